"""The top of a report: result and state in one line, what prediction was worth, the figures, how far a run is."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.show.runs import FINDING, STARTED, SUMMARY, append, end, progress, some_run, write_run

from foretrain.events import Evaluated, Event, Moved, Notice, Recovered, Resumed
from foretrain.show.follow import read_runs
from foretrain.show.pages.render import style as style_sheet
from foretrain.show.pages.report import write_report
from foretrain.show.pages.report_lead import headline, seconds_left, share_done
from foretrain.show.pages.report_page import page, parts
from foretrain.show.record import RunRecord

IDLE = SUMMARY | {
    "moves": {"kept": 0, "shrunk": 0, "refused": 0, "rolled_back": 0},
    "audit": {"gain_percent": None, "n": 0, "sentence": "prediction was not tried: an audit costs too much here"},
}
EXACT = {
    "loss": 2.78e-7,
    "step": 160,
    "seconds": 2.5,
    "trend_steps": 4750.0,
    "sentence": "the loss of 2.78e-7 at step 160 would have taken the optimizer's own trend 4,750 steps",
}


def idle_run() -> list[Event]:
    return [event for event in some_run() if not isinstance(event, (Moved, Recovered)) and event is not FINDING]


def record_of(folder: Path, told: list[Event], summary: dict[str, Any] | None = None, **more: Any) -> RunRecord:
    (record,) = read_runs([write_run(folder, told, summary, **more)])
    return record


def text_of(markup: str) -> str:
    words = " ".join(re.sub(r"<[^>]*>", " ", markup).split()).replace("\u00a0", " ").replace("−", "-")
    return words.replace(" ,", ",")


def lead(records: list[RunRecord]) -> str:
    return parts(records).sections["lead"]


def cards(record: RunRecord) -> dict[str, str]:
    found = re.findall(r"<dt>(.*?)</dt><dd class=\"figure[^>]*>(.*?)</dd>", lead([record]))
    return {name: text_of(figure) for name, figure in found}


# --- the line ---------------------------------------------------------------------------------------------------------


def test_the_headline_is_result_and_state(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", idle_run(), IDLE)
    assert headline(record) == "tiny: held-out loss 1.2500 after 100 steps, finished"
    markup = lead([record])
    assert markup.count("<h1") == 1
    assert text_of(markup[: markup.index("</h1>")]) == headline(record)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("interrupted", "tiny: held-out loss 1.2500 after 100 of 800 steps, interrupted"),
        ("stopped early", "tiny: held-out loss 1.2500 after 100 of 800 steps, stopped early"),
    ],
)
def test_a_run_that_did_not_reach_its_end_says_how_far_it_came(tmp_path: Path, reason: str, said: str) -> None:
    told = [dataclasses.replace(STARTED, max_steps=800), *idle_run()[1:]]
    assert headline(record_of(tmp_path / "run", told, IDLE, reason=reason)) == said


def test_without_held_out_data_the_training_loss_is_told_with_its_digits(tmp_path: Path) -> None:
    summary = IDLE | {"final_val_loss": None, "best_val_loss": None, "final_train_loss": 2.784e-7}
    record = record_of(tmp_path / "run", [STARTED, progress(100, 2.784e-7)], summary)
    assert headline(record) == "tiny: training loss 2.784e-7 after 100 steps, finished"
    assert cards(record)["Training loss"] == "2.784e-7"
    assert "Held-out loss" not in cards(record)


def test_of_a_path_in_the_title_the_end_is_told(tmp_path: Path) -> None:
    started = dataclasses.replace(STARTED, title="adapter for /home/me/runs/stories/model")
    record = record_of(tmp_path / "run", [started, progress(100)])
    assert headline(record).startswith("adapter for stories/model: ")


def test_critical_findings_are_in_the_state_and_named_below(tmp_path: Path) -> None:
    critical = dataclasses.replace(FINDING, ailment="divergence")
    summary = SUMMARY | {"rollbacks": {"times": 1, "undone_steps": 40}}
    sick = record_of(tmp_path / "sick", [STARTED, progress(40), critical, critical, progress(100)], summary)
    assert headline(sick).endswith(", finished, with critical findings")
    assert "2 critical findings: divergence; it was rolled back once. 1 finding asks for a look" in text_of(
        lead([sick])
    )
    well = record_of(tmp_path / "well", idle_run(), IDLE)
    assert "critical" not in lead([well])


def test_an_information_asks_for_no_look(tmp_path: Path) -> None:
    told = [STARTED, progress(10), Resumed(10, "x"), Notice("learning_rate is 0.003 now", level="info"), progress(20)]
    record = record_of(tmp_path / "run", told)
    assert "for a look" not in lead([record])
    rows = parts([record]).charts["rows/0"]
    assert any("note" in row and "learning_rate is 0.003 now" in row for row in rows)


# --- what prediction was worth ----------------------------------------------------------------------------------------


def test_the_exact_gain_leads(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", some_run(), SUMMARY | {"exact": EXACT})
    text = text_of(lead([record]))
    assert (
        text.index("finished") < text.index("The loss of 2.78e-7 at step 160 would have") < text.index("Held-out loss")
    )
    assert lead([record]).count('class="card first gain"') == 1
    assert cards(record)["Worth of the leaps"] == "4,700 steps"  # no more digits than are known
    assert '<data value="4750.0">' in lead([record])
    assert "Net time saved" not in text


def test_leaps_that_are_not_shown_to_have_saved_steps_are_no_gain(tmp_path: Path) -> None:
    summary = SUMMARY | {"exact": EXACT | {"trend_steps": None, "sentence": "the loss came down to 2.78e-7"}}
    record = record_of(tmp_path / "run", some_run(), summary)
    assert cards(record)["Loss reached"] == "2.780e-7"
    assert 'class="card first "' in lead([record])
    assert "The loss came down to 2.78e-7." in text_of(lead([record]))


def test_the_audited_gain_leads_with_its_interval(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", some_run(), SUMMARY)
    text = text_of(lead([record]))
    assert cards(record)["Net time saved"] == "+3.2 %"
    assert text.index("Prediction saved 3.2 % of the time.") < text.index("95 % interval +1.1 to +5.4, 4 audits")
    assert text.index("95 % interval") < text.index("Training loss")


def test_moves_of_which_nothing_was_measured_have_no_card(tmp_path: Path) -> None:
    audit = {"gain_percent": None, "n": 0, "sentence": "2 moves were kept"}
    record = record_of(tmp_path / "run", some_run(), SUMMARY | {"audit": audit})
    assert "Net time saved" not in cards(record)
    assert "not measured" not in lead([record])
    assert "Predicted moves: 1 kept, 1 rolled back. 2 moves were kept." in text_of(
        parts([record]).sections["prediction"]
    )


def test_prediction_that_was_not_tried_is_quiet(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", idle_run(), IDLE)
    top = text_of(lead([record]))
    for word in ("rediction", "onfidence", "saved", "audit", "oves", "warm-up"):
        assert word not in top
    made = parts([record])
    assert made.charts["shared"]["prediction"] == "idle"
    assert made.sections["key"] == ""
    assert made.sections["prediction-title"] == "Prediction (not tried)"
    assert "Prediction was not tried: an audit costs too much here." in text_of(made.sections["prediction"])
    assert '<details class="fold"><summary>' in page([record])
    assert "confidence" not in made.charts["ledger"]["columns"]


def test_prediction_that_was_tried_is_unfolded(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", some_run(), SUMMARY)
    made = parts([record])
    assert made.charts["shared"]["prediction"] == "tried"
    assert '<details class="fold" open><summary>' in page([record])
    assert "confidence" in made.charts["ledger"]["columns"]
    assert {"move kept", "rolled back", "recovery"} <= set(re.findall(r"</i>([^<]*)</li>", made.sections["key"]))
    assert "shrunk" not in made.sections["key"]


def test_a_plain_run_says_nothing_of_prediction(tmp_path: Path) -> None:
    plain = {name: value for name, value in IDLE.items() if name not in ("moves", "audit", "forecast", "confidence")}
    record = record_of(tmp_path / "run", [STARTED, progress(100, confidence=None, predicted_loss=None)], plain)
    assert parts([record]).charts["shared"]["prediction"] == "off"
    markup = page([record])
    assert '<section id="prediction" aria-labelledby="prediction-heading" hidden>' in markup
    assert '<li hidden><a href="#prediction">' in markup


# --- figures and files ------------------------------------------------------------------------------------------------


def test_a_run_has_loss_steps_time_speed_and_memory(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", idle_run(), IDLE | {"total_seconds": 12.5})
    assert cards(record) == {
        "Held-out loss": "1.2500",
        "Training loss": "1.0000",
        "Steps": "100",
        "Time": "10.5 s",
        "Speed": "610",
        "Memory": "400 MB",
    }
    assert "12.5 s with start-up, evaluation and saving" in text_of(lead([record]))
    assert "best" not in text_of(lead([record]))
    worse = record_of(tmp_path / "worse", idle_run(), IDLE | {"best_val_loss": 1.125})
    assert "best 1.1250" in text_of(lead([worse]))


def with_unit(folder: Path, unit: str) -> RunRecord:
    """As a run writes it that says what it counts."""
    write_run(folder, [], None)
    started = {"event": "RunStarted", **dataclasses.asdict(STARTED), "unit": unit, "optimizer": "torch.optim.Adam"}
    append(folder, started)
    write_run(folder, idle_run()[1:], IDLE)
    return read_runs([folder])[0]


def test_perplexity_is_told_of_tokens_only(tmp_path: Path) -> None:
    tokens, points = (with_unit(tmp_path / unit, unit) for unit in ("tokens", "points"))
    assert "perplexity 3.49" in text_of(lead([tokens]))
    assert "perplexity" not in lead([points])
    assert "points per second" in text_of(lead([points]))
    assert "torch.optim.Adam" in lead([points])
    (speed,) = parts([points]).charts["speed"]["runs"][0]["series"]
    assert speed["label"] == "points per second"
    assert "points per second" in parts([points]).sections["resources"]


def test_measures_of_the_users_own_have_cards_and_curves(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [STARTED, progress(50)])
    for step, error in ((50, 0.5), (100, 0.001)):
        told = {"accuracy": 1 - error, "error <b>": error, "broken": None}
        append(folder, {"event": "Evaluated", "step": step, "loss": 1.0, "metrics": told})
    (record,) = read_runs([folder])
    assert cards(record)["Accuracy"] == "0.9990"
    assert "<b>" not in lead([record])
    drawn = parts([record]).charts
    (accuracy,), (error,) = (drawn[f"metric-{place}"]["runs"][0]["series"] for place in range(2))
    assert (accuracy["label"], accuracy["steps"], accuracy["values"]) == ("accuracy", [50, 100], [0.5, 0.999])
    assert drawn["metric-0"]["log"] is False
    assert drawn["metric-1"]["log"] is True
    assert error["label"] == "error <b>"
    assert "<figure data-optional><h3>accuracy</h3>" in page([record])
    assert page([record]).count("<figure data-optional hidden><h3>") == 5  # two measures, blocks, rates, the end


def test_the_files_of_the_run_are_linked_from_beside_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my run", some_run(), SUMMARY)
    (folder / "model").mkdir()
    write_report([folder], folder / "report.html")
    links = re.findall(r'href="([^"#]+)"', (folder / "report.html").read_text(encoding="utf-8"))
    assert {"model/", "config.toml", "metrics.jsonl", "summary.json"} <= set(links)
    assert "adapter/" not in links
    other = write_run(tmp_path / "other", some_run(), SUMMARY)
    write_report([folder, other], tmp_path / "both.html")
    links = re.findall(r'href="([^"#]+)"', (tmp_path / "both.html").read_text(encoding="utf-8"))
    assert "my%20run/report.html" in links
    assert "other/report.html" not in links
    assert not re.findall(r'href="(?!#|data:)', page(read_runs([folder])))  # served live there are no files


@pytest.mark.parametrize(
    ("loss", "style"),
    [(1.25, "figure"), (123.4567, "figure long"), (7754.4507, "figure long"), (-1.2345e-99, "figure longer")],
)
def test_a_long_number_is_smaller_in_its_card(tmp_path: Path, loss: float, style: str) -> None:
    record = record_of(tmp_path / "run", some_run(), SUMMARY | {"final_val_loss": loss})
    assert f'<dd class="{style}"><data value="{loss}">' in lead([record])
    assert f".{style.replace(' ', '.')} {{" in style_sheet()


# --- how far it is ----------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_shows_how_far_it_is_and_the_time_left(tmp_path: Path) -> None:
    told = [dataclasses.replace(STARTED, max_steps=400), *(progress(step) for step in range(10, 101, 10))]
    folder = write_run(tmp_path / "run", told)
    (record,) = read_runs([folder])
    assert share_done(record) == 0.25
    assert seconds_left(record) == pytest.approx(30.0)  # 300 steps of a tenth of a second
    markup = lead([record])
    assert '<progress max="100" value="25.0"' in markup
    assert "25 %, about 0:30 left" in text_of(markup)
    assert parts([record]).title.startswith("25 % · run")
    append(folder, {"event": "Evaluated", "step": 100, "loss": 1.0, "seconds": 10.0})
    (slower,) = read_runs([folder])
    assert seconds_left(slower) == pytest.approx(60.0)  # an evaluation takes as long as the steps
    end(folder, SUMMARY)
    (ended,) = read_runs([folder])
    assert "<progress" not in lead([ended])
    assert share_done(ended) is None


def test_the_time_left_knows_that_steps_are_slower_once_the_model_has_grown(tmp_path: Path) -> None:
    begun = dataclasses.replace(STARTED, max_steps=400, costs=[(0, 0.5), (200, 1.0)])
    folder = write_run(tmp_path / "run", [begun, *(progress(step) for step in range(10, 101, 10))])
    (record,) = read_runs([folder])
    assert seconds_left(record) == pytest.approx(50.0)  # 100 steps of a tenth of a second, 200 of two tenths
    refused = {"event": "Grown", "step": 100, "verdict": "refused", "layers": 2, "of": 4, "cost": 0.5}
    append(folder, refused)
    (record,) = read_runs([folder])
    assert seconds_left(record) == pytest.approx(30.0)


def test_a_run_that_has_not_begun_has_no_time_left(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"event": "Notice", "message": "x"}) + "\n")
    (record,) = read_runs([tmp_path / "run"])
    assert seconds_left(record) is None
    assert headline(record) == "run: at step 0, running"
    started = record_of(tmp_path / "other", [STARTED])
    assert "0 %" in text_of(lead([started]))


def test_evaluations_before_the_first_entry_break_nothing(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", [STARTED, Evaluated(0, 3.0, 0.1, False, True)])
    assert headline(record) == "tiny: held-out loss 3.0000 at step 0 of 100, running"


def test_a_fine_tuning_run_that_ended_too_early_says_how_to_go_on(tmp_path: Path) -> None:
    falling = {"from": 2.1, "to": 1.9, "steps": 60, "max_steps": 900}
    record = record_of(tmp_path / "run", idle_run(), IDLE | {"epochs": 0.36, "still_falling": falling})
    shown = text_of(lead([record])).replace("&#39;", "'")
    assert (
        "The held-out loss was still falling (2.1 -&gt; 1.9 in the last 60 steps; 0.36 epochs): train longer" in shown
    )
    assert f"foretrain finetune --out {tmp_path / 'run'} --resume --set max_steps=900" in shown
    for broken in (None, 3, {}, falling | {"to": None}, falling | {"steps": "many"}):
        record = record_of(tmp_path / "other", idle_run(), IDLE | {"epochs": 0.36, "still_falling": broken})
        assert "still falling" not in lead([record])
