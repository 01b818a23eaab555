"""The report of a run: what it says, that it is one safe file, and that it can be read by everybody."""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.show.runs import FINDING, STARTED, SUMMARY, append, measured, progress, some_run, write_run

from foretrain.cli.app import main
from foretrain.events import Event, HealthFound, Notice, PhaseChanged, Recovered, RunStarted
from foretrain.show.follow import read_runs
from foretrain.show.pages.render import as_data
from foretrain.show.pages.report import write_report
from foretrain.show.pages.report_ledger import ROWS, first_rows, ledger_rows
from foretrain.show.pages.report_page import page, parts
from foretrain.show.record import Entry, RunRecord

VOID = {"meta", "link", "br", "input", "img"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects what a reader would go by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def values(markup: str) -> set[float]:
    return {float(found) for found in re.findall(r'<data value="([^"]*)"', markup)}


def data_of(markup: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', markup, re.S)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "mine", some_run(), SUMMARY)


def test_the_numbers_are_those_of_the_summary(folder: Path) -> None:
    markup = page(read_runs([folder]))
    audit, forecast = SUMMARY["audit"], SUMMARY["forecast"]
    wanted = {SUMMARY["final_val_loss"], SUMMARY["final_train_loss"], SUMMARY["seconds"], 100.0}
    wanted |= {audit["gain_percent"], audit["low"], audit["high"], *(quality["r2"] for quality in forecast.values())}
    assert wanted <= values(markup)


def test_every_decision_stands_in_the_ledger_with_its_reason(folder: Path) -> None:
    text = Reader(page(read_runs([folder]))).text
    for reason in (
        "warm-up is done",
        "confidence 0.70 is above 0.50",
        "sure enough",
        "the run is worse",
        "half the learning rate",
    ):
        assert reason in text
    assert "set optimizer.learning_rate = 0.002" in text[text.index("Findings and advice") :]
    assert "2 of the last 10 steps were not finite" in text[text.index("Findings and advice") :]


def test_the_charts_have_all_curves_phases_and_marks(folder: Path) -> None:
    data = data_of(page(read_runs([folder])))
    (loss,) = data["loss"]["runs"]
    curves = {series["label"]: series for series in loss["series"]}
    assert set(curves) == {"training", "held out"}
    assert curves["held out"]["steps"] == [30, 100]
    assert curves["held out"]["values"] == [2.5, 1.25]
    assert curves["training"]["seconds"] == [step / 10 for step in range(10, 101, 10)]
    (shared,) = data["shared"]["runs"]
    assert [phase for _, _, phase, _ in shared["phases"]] == ["full", "predict", "end"]
    assert [kind for _, _, kind, _, _ in shared["marks"]] == ["kept", "rolled back", "recovery"]


def test_a_horizon_without_a_forecast_is_a_dash_and_no_point(tmp_path: Path) -> None:
    none = SUMMARY["forecast"]["20"] | {"made": 0, "r2": 0.0, "cosine": 0.0, "norm_ratio": 0.0}
    summary = SUMMARY | {"forecast": {"10": SUMMARY["forecast"]["10"] | {"made": 5}, "20": none}}
    (record,) = read_runs([write_run(tmp_path / "run", some_run(), summary)])
    made = parts([record])
    assert made.sections["horizons"].count('class="unknown"') == 3
    drawn = made.charts["horizons"]["runs"][0]["series"][0]
    assert (drawn["label"], drawn["x"], drawn["values"]) == ("forecast", [10, 20], [0.41, None])


def test_a_score_below_the_frame_stands_on_its_edge_and_is_said(tmp_path: Path) -> None:
    bad = SUMMARY["forecast"]["10"] | {"r2": -24.57}
    summary = SUMMARY | {"forecast": {"10": bad, "20": SUMMARY["forecast"]["20"]}}
    (record,) = read_runs([write_run(tmp_path / "run", some_run(), summary)])
    chart = parts([record]).charts["horizons"]
    drawn = chart["runs"][0]["series"][0]
    assert (drawn["x"], drawn["values"]) == ([10, 20], [-1, 0.22])
    assert drawn["tips"][0] == "Forecast: −24.57"
    assert chart["low"] == -1
    assert "below −1 on the edge" in chart["unit"]
    well = parts(read_runs([write_run(tmp_path / "well", some_run(), SUMMARY)])).charts["horizons"]
    assert "on the edge" not in well["unit"]


def test_confidence_is_drawn_against_what_came_with_the_numbers_beside_it(folder: Path) -> None:
    made = parts(read_runs([folder]))
    said, came = made.charts["calibration"]["runs"][0]["series"]
    assert (said["x"], said["values"]) == ([0, 1], [0, 1])
    assert (came["x"], came["values"]) == ([0.3, 0.8], [0.25, 0.9])
    assert {0.3, 0.25, 0.8, 0.9, 6} <= values(made.sections["calibration"])
    assert "0.123 over 12 outcomes" in made.sections["calibration"]


# --- what the charts show of the loss ---------------------------------------------------------------------------------


def drawn_of(folder: Path, *told: Event) -> dict[str, Any]:
    return data_of(page(read_runs([write_run(folder, [STARTED, *told])])))


def test_the_axis_goes_by_the_loss_whatever_a_forecast_says(tmp_path: Path) -> None:
    steps = range(1, 101)
    falls = drawn_of(tmp_path / "falls", *(progress(n, 10.0 ** (-n / 12), predicted_loss=-9.5) for n in steps))
    assert falls["loss"]["log"] is True
    flat = drawn_of(tmp_path / "flat", *(progress(n, 2.0 + n / 100, predicted_loss=10.0**n) for n in steps))
    assert flat["loss"]["log"] is False
    low, high = flat["forecast"]["frame"]["linear"]
    assert 1.0 < low < 2.01
    assert 3.0 < high < 4.0
    low, high = falls["forecast"]["frame"]["log"]
    assert 1e-12 < low < 1e-8
    assert 0.8 < high < 200


def test_a_mean_that_a_chain_leaves_as_it_was_is_not_drawn_as_what_came(tmp_path: Path) -> None:
    before = [progress(n, 3.0 - n / 100) for n in (10, 20)]
    chain = [
        progress(n, 1e-3, phase="predict", smoothed_loss=2.8, predicted_loss=2.7) for n in range(30, 100, 10)
    ]  # as it was after step 20
    silent = progress(100, 1e-4, phase="predict", smoothed_loss=None, predicted_loss=None)
    data = drawn_of(tmp_path / "run", *before, *chain, silent)
    curves = {one["label"]: one for one in data["forecast"]["runs"][0]["series"]}
    assert curves["mean loss"]["steps"] == [10, 20]
    assert {one["label"] for one in data["loss"]["runs"][0]["series"]} == {"training"}


def test_the_interval_of_the_forecast_holds_most_of_what_came(tmp_path: Path) -> None:
    told = [STARTED, *(progress(step, 2.0 + (step * 7 % 5) / 50, predicted_loss=2.05) for step in range(1, 101))]
    (run,) = data_of(page(read_runs([write_run(tmp_path / "run", told)])))["forecast"]["runs"]
    curves = {series["label"]: dict(zip(series["steps"], series["values"], strict=True)) for series in run["series"]}
    inside = [
        curves["lower 90 %"][step] <= curves["mean loss"][step] <= curves["upper 90 %"][step]
        for step in curves["lower 90 %"]
    ]
    assert len(inside) == 90
    assert sum(inside) >= 0.85 * len(inside)


def test_the_page_is_one_file_that_loads_and_runs_nothing_else(folder: Path) -> None:
    markup = page(read_runs([folder]))
    reader = Reader(markup)
    assert not [a for a in reader.all("script") if "src" in a]
    assert [a["href"] for a in reader.all("link")] == ["data:,"]
    policy = next(a["content"] for a in reader.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    allowed = dict(part.strip().partition(" ")[::2] for part in str(policy).split(";"))
    scripts = re.findall(r"<script>(.*?)</script>", markup, re.S)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(hashes) == 2
    assert allowed == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": " ".join(f"'sha256-{one}'" for one in hashes),
        "img-src": "data:",
        "base-uri": "'none'",
    }
    assert not [a for _, a in reader.elements if any(name.startswith("on") or name == "style" for name in a)]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028'\"&"


def test_whatever_a_run_says_is_text(tmp_path: Path) -> None:
    told = [
        RunStarted(0, 10, 1, 1, HOSTILE, HOSTILE, HOSTILE, {"data": HOSTILE}),
        progress(1, phase=HOSTILE),
        PhaseChanged(2, HOSTILE, HOSTILE),
        Notice(HOSTILE),
        Recovered(3, HOSTILE, HOSTILE),
        measured(3, {HOSTILE: 1.0}),
        HealthFound(HOSTILE, 4, HOSTILE, HOSTILE, 1.0, HOSTILE, HOSTILE, HOSTILE, {HOSTILE: HOSTILE}),
    ]
    folder = write_run(tmp_path / "run", told)
    append(folder, {"event": "Moved", "step": 3, "verdict": HOSTILE, "reason": HOSTILE, "horizon": HOSTILE})
    append(folder, {"event": "Tuned", "step": 3, "ailment": HOSTILE, "change": {HOSTILE: HOSTILE}})
    append(folder, {"event": "CheckpointRejected", "path": HOSTILE, "reason": HOSTILE})
    append(folder, {"event": "Evaluated", "step": 3, "loss": 1.0, "metrics": {HOSTILE: 1.0}})
    append(folder, {"event": "RunStarted", "step": 3, "unit": HOSTILE, "optimizer": HOSTILE, "title": HOSTILE})
    append(folder, {"event": "RunEnded", "step": 3, "reason": HOSTILE})
    for summary in (hostile(SUMMARY), hostile(SUMMARY, keys=False), hostile(SUMMARY, leaves=False)):
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        for records in (read_runs([folder]), read_runs([folder, folder])):
            reader = Reader(page(records))
            assert not reader.all("img")
            assert len(reader.all("script")) == 3
    assert "<" not in as_data({HOSTILE: HOSTILE})


def hostile(value: Any, leaves: bool = True, keys: bool = True) -> Any:
    """The same with every number and text, and beside every key another one, that would like to be markup."""
    if isinstance(value, dict):
        made = {name: hostile(one, leaves, keys) for name, one in value.items()}
        return made | {name + HOSTILE: one for name, one in made.items()} if keys else made
    if isinstance(value, list):
        return [hostile(one, leaves, keys) for one in value]
    return HOSTILE if leaves else value


def paths(value: Any) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield (name,)
            yield from ((name, *rest) for rest in paths(one))


def damaged(path: tuple[str, ...], by: Any) -> dict[str, Any]:
    """The summary with something else at this place."""
    made = copy.deepcopy(SUMMARY)
    inside = made
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = by
    return made


def test_the_name_of_a_run_is_text(tmp_path: Path) -> None:
    markup = page(read_runs([write_run(tmp_path / "<b>&amp;", some_run(), SUMMARY)]))
    reader = Reader(markup)
    assert not reader.all("b")
    assert "<title>&lt;b&gt;&amp;amp; · foretrain</title>" in markup


def test_no_damage_of_the_summary_breaks_the_page(folder: Path) -> None:
    (record,) = read_runs([folder])
    for path in paths(SUMMARY):
        for by in (None, True, -5, 1e300, 10**400, "ten", [], [3, None], {}, {"ten": 10}, [{"said": "ten"}]):
            record.summary = damaged(path, by)
            made = parts([record])
            assert "<h1" in made.sections["lead"], (path, by)
            assert "100 steps, " in made.sections["lead"], (path, by)
            as_data(made.charts)


def test_it_can_be_read_without_seeing_or_pointing(folder: Path) -> None:
    reader = Reader(page(read_runs([folder])))
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(reader.all(landmark)) == 1
    assert len(reader.all("caption")) >= len(reader.all("table")) - 2  # settings have their summaries
    names = {a["id"] for _, a in reader.elements if "id" in a}
    assert len(names) == len([a for _, a in reader.elements if "id" in a])
    for link in reader.all("a"):
        assert str(link["href"])[1:] in names
    assert {"Words", "What the words on this page mean", "perplexity", "audit"} <= {
        text.strip() for text in reader.texts
    }
    for section in reader.all("section"):
        assert section["aria-labelledby"] in names
    for holder in reader.all("div"):
        if "data-chart" in holder or holder.get("role") in ("region", "group"):
            assert holder["aria-label"]


def test_several_runs_lie_over_each_other(tmp_path: Path) -> None:
    other = SUMMARY | {"final_val_loss": 0.75}
    folders = [write_run(tmp_path / "one", some_run(), SUMMARY), write_run(tmp_path / "two", some_run(), other)]
    markup = page(read_runs(folders))
    assert [run["name"] for run in data_of(markup)["loss"]["runs"]] == ["one", "two"]
    text = Reader(markup).text
    assert "2 runs: lowest held-out loss 0.7500, two" in text
    assert {1.25, 0.75} <= values(markup)


@pytest.mark.parametrize("state", ["running", "failed", "empty"])
def test_a_run_without_a_summary_is_shown_as_far_as_it_went(tmp_path: Path, state: str) -> None:
    folder = write_run(tmp_path / "run", [] if state == "empty" else some_run())
    if state == "failed":
        append(folder, {"event": "RunEnded", "step": 100, "reason": "failed"})
        (folder / "summary.json").write_text(json.dumps(SUMMARY | {"final_val_loss": 9.9}), encoding="utf-8")
    (record,) = read_runs([folder])
    text = Reader(page([record])).text
    assert record.state == ("failed" if state == "failed" else "running")
    assert "9.9" not in text
    if state != "empty":
        assert "held-out loss 1.2500" in text


def test_health_is_drawn_and_told_where_there_is_some(folder: Path) -> None:
    assert data_of(page(read_runs([folder])))["heat"] == []
    looks = [measured(step, {"blocks.0": 1.5, "blocks.1": None if step else 1e-9}) for step in (0, 100)]
    again = [dataclasses.replace(FINDING, step=step, change={"model.residual": True}) for step in (0, 100)]
    write_run(folder, [*looks, *again])
    markup = page(read_runs([folder]))
    (heat,) = data_of(markup)["heat"]
    assert heat == {
        "name": "mine",
        "steps": [0, 100],
        "layers": ["blocks.0", "blocks.1"],
        "measures": {"gradient norm": [[1.5, 1.5], [1e-9, None]]},
    }
    text = Reader(markup).text
    assert "vanishing layer in blocks.1: it learns nothing" in text
    assert "gradient norm 1e-09 (healthy: 0.01 to 100)" in text
    assert "model.residual = true" in text
    assert "0 to 100 (2 times)" in text


def test_a_change_that_the_run_made_by_itself_is_a_decision(folder: Path) -> None:
    change = {"optimizer.gradient_clip_norm": 0.5}
    append(folder, {"event": "Tuned", "step": 70, "ailment": "explosion", "change": change})
    markup = page(read_runs([folder]))
    text = Reader(markup).text
    assert "tuned: optimizer.gradient_clip_norm = 0.5" in text
    (shared,) = data_of(markup)["shared"]["runs"]
    assert [70, "recovery"] in [[mark[0], mark[2]] for mark in shared["marks"]]


def test_the_heat_map_offers_every_measure_and_keeps_both_extremes(tmp_path: Path) -> None:
    from foretrain.show.pages.report_health import heat_map

    folder = write_run(tmp_path / "run", [STARTED])
    for look in range(1000):
        ratio = {333: 50.0, 700: 0.0}.get(look, 0.01)
        layer = {"gradient_norm": 1.0, "gradient_to_weight": ratio, "update_to_weight": 0.001}
        append(folder, {"event": "HealthMeasured", "step": 100 * look, "layers": {"a": layer}})
    made = heat_map(read_runs([folder])[0], 160)
    assert made is not None
    assert list(made["measures"]) == ["gradient/weight ratio", "update/weight ratio", "gradient norm"]
    (ratios,) = made["measures"]["gradient/weight ratio"]
    assert len(ratios) == len(made["steps"]) == 160
    assert sorted(set(ratios)) == [0.0, 0.01, 50.0]
    near = [made["steps"][ratios.index(value)] for value in (50.0, 0.0)]
    assert abs(near[0] - 33_300) <= 700
    assert abs(near[1] - 70_000) <= 700


def test_every_curve_has_its_numbers_in_a_table(folder: Path) -> None:
    markup = page(read_runs([folder]))
    loss = markup[markup.index('data-section="loss-numbers"') :].partition("</table>")[0]
    rows = [re.findall(r'<data value="([^"]*)"', row) for row in loss.split("<tr>")[2:]]
    assert [float(number) for number in rows[0]] == [2.8, 1.0, 1.0, 100, 2.8, 10]  # first, last, lowest, highest
    assert [float(number) for number in rows[1]] == [2.5, 1.25, 1.25, 100, 2.5, 30]


def test_a_rollback_is_shown_where_it_happened_and_tells_where_to(tmp_path: Path) -> None:
    told = [STARTED, progress(40), Recovered(10, "roll_back", "3 steps in a row were not finite"), progress(20)]
    folder = write_run(tmp_path / "run", told)
    data = data_of(page(read_runs([folder])))
    assert [mark[:4] for mark in data["shared"]["runs"][0]["marks"]] == [[40, 4, "recovery", "roll back to step 10"]]
    ((kind, _, step, _, decision, *_),) = data["rows/0"]
    assert (kind, step, decision) == ("recovery", "40", "roll back to step 10")
    curves = {series["label"]: series["steps"] for series in data["loss"]["runs"][0]["series"]}
    assert curves["training"] == [20]
    assert curves["taken back"] == [40]


# --- a ledger of thousands --------------------------------------------------------------------------------------------


def long_ledger(count: int) -> RunRecord:
    record = RunRecord("long")
    for step in range(count):
        verdict = {0: "kept", 7: "rolled back"}.get(step % 40)
        fields = {"verdict": verdict, "horizon": 5} if verdict else {"phase": "full", "reason": f"reason {step}"}
        record.decisions.append(Entry("Moved" if verdict else "PhaseChanged", step, step / 10, fields))
    return record


def test_a_long_ledger_shows_its_first_rows_and_holds_the_others() -> None:
    data = ledger_rows([long_ledger(2500)])
    assert data["ledger"] | {"rows": 2500, "left": 0, "order": "last"} == data["ledger"]
    rows = [row for name, block in data.items() if name.startswith("rows/") for row in block]
    assert len(rows) == 2500
    assert [row[2] for row in rows] == [f"{step:,}" for step in range(2500)]
    shown = first_rows(data)
    assert [row[2] for row in shown] == [
        f"{step:,}" for step in range(2499, 2399, -1)
    ]  # the newest first, as it goes on
    markup = page([long_ledger(2500)])
    assert markup.index(">2,499</td>") < markup.index(">2,400</td>")
    assert ">2,399</td>" not in markup


def test_what_went_wrong_stays_in_a_ledger_that_is_too_long() -> None:
    record = long_ledger(40_000)
    rows = [row for name, block in ledger_rows([record]).items() if name.startswith("rows/") for row in block]
    assert 3000 < len(rows) <= ROWS
    assert sum("rolled back" in row[4] for row in rows) == 1000
    assert sum(": kept" in row[4] for row in rows) == 1000
    assert {row[0] for row in rows} == {"move", "phase"}


@pytest.mark.parametrize("count", [2450, 40_000])
def test_a_live_ledger_that_grows_sends_its_last_rows_only(count: int) -> None:
    before, after = (ledger_rows([long_ledger(count + more)]) for more in (0, 3))
    changed = [name for name in after if before.get(name) != after[name]]
    assert len(changed) <= 2, changed


# --- the command ------------------------------------------------------------------------------------------------------


def run_command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_the_command_writes_into_the_run_folder_or_where_it_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("report", folder) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    other = write_run(tmp_path / "other", some_run(), SUMMARY)
    assert run_command("report", folder, other, "--out", tmp_path / "both.html", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == str(tmp_path / "both.html")
    assert told["bytes"] == (tmp_path / "both.html").stat().st_size
    assert [run["name"] for run in told["runs"]] == ["mine", "other"]


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("report", tmp_path / "nothing") == 2
    assert "no run folder" in capsys.readouterr().err
    assert run_command("report", folder, folder) == 2
    assert "--out" in capsys.readouterr().err
    assert run_command("report", folder, "--out", tmp_path) == 2
    assert "a folder" in capsys.readouterr().err
    assert run_command("report", folder, "--out", tmp_path / "not" / "there" / "x.html") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    from foretrain.events import Bus, RunEnded
    from foretrain.show.pages.report import ReportWriter

    folder = write_run(tmp_path / "run", some_run(), SUMMARY)
    (folder / "report.html").mkdir()
    told: list[Event] = []
    bus = Bus()
    bus.subscribe(ReportWriter(folder))
    bus.subscribe(told.append)
    bus.emit(RunEnded(100, "finished", {}))
    assert any(isinstance(event, Notice) and "report.html" in event.message for event in told)


def test_a_report_replaces_the_one_before(folder: Path) -> None:
    target = folder / "report.html"
    assert write_report([folder], target) == target.stat().st_size
    before = target.read_text(encoding="utf-8")
    append(folder, {"event": "Evaluated", "step": 100, "loss": 0.5})
    write_report([folder], target)
    assert target.read_text(encoding="utf-8") != before
    assert not list(folder.glob(".tmp*"))
