"""The page of a comparison: whole, safe, readable without script, whatever the numbers are."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.show.pages.comparison_page import interval, page, place, ratio_range, round_factors

ARMS = {
    "plain": ("plain", "the reference, learning rate swept"),
    "hybrid": ("hybrid", "the claim; learning rate swept as hard as plain's"),
    "plain_passes": ("plain, equal passes", "what just training less gives"),
    "plain_seconds": ("plain, equal seconds", "what else could be done with the time"),
    "hybrid_zero": ("hybrid, not moving", "phases and probes without prediction: the overhead"),
    "hybrid_repeat": ("hybrid, repeating", "the naive predictor that a learned one must beat"),
}


def final_loss(steps: float) -> float:
    return 1.45 + 6.2 * math.pow(steps, -0.46)


def run(arm: str, seed: int, learning_rate: float, steps: int = 400, budget: float = 1.0) -> dict[str, Any]:
    noise = random.Random(f"{arm} {seed} {learning_rate} {steps}")  # noqa: S311
    hybrid = arm.startswith("hybrid")
    off = 0.018 * math.log(learning_rate / 2e-3) ** 2
    loss = final_loss(steps) + off + seed * 0.004 + noise.gauss(0, 0.0015) - (0.006 if arm == "hybrid" else 0)
    seconds = steps * 0.079 * (1.05 if hybrid else 1) * (1 + noise.gauss(0, 0.008))
    curve = [
        [
            step,
            seconds * step / steps,
            loss + (10.8 - loss) * (math.exp(-8 * (step / steps) ** 0.5) - math.exp(-8) + 0.01 * (1 - step / steps)),
        ]
        for step in range(0, steps + 1, 20)
    ]
    training = [
        [s, seconds * s / steps, loss + 6 * math.exp(-s / 40) + noise.gauss(0, 0.05)] for s in range(1, steps + 1)
    ]
    phases: list[list[Any]] = [[0, 0.14 * seconds, "warmup"]]
    moves: list[list[Any]] = []
    time = 0.14 * seconds
    while hybrid and time < 0.8 * seconds:
        full = noise.uniform(0.08, 0.15) * seconds
        phases += [[time, time + full, "full"], [time + full, time + full + 0.15, "predict"]]
        time += full + 0.15
        phases.append([time, time + 0.04 * seconds, "correct"])
        time += 0.04 * seconds
        moves.append([int(steps * time / seconds), time, noise.choice(["kept", "refused", "rolled back", "kept"])])
    phases.append([time, seconds, "full"])
    verdicts = [move[2] for move in moves]
    return {
        "arm": arm,
        "label": ARMS.get(arm, (arm, ""))[0],
        "seed": seed,
        "learning_rate": learning_rate,
        "budget": budget,
        "max_steps": steps,
        "loss": loss,
        "seconds": seconds,
        "backward_passes": steps + (len(moves) * 8 if hybrid else 0),
        "tokens": steps * 2048,
        "probe_tokens": 10000 if hybrid else 0,
        "steps": steps,
        "kept": verdicts.count("kept"),
        "refused": verdicts.count("refused"),
        "rolled_back": verdicts.count("rolled back"),
        "curve": curve,
        "training": training,
        "phases": phases if hybrid else [[0, 0.14 * seconds, "warmup"], [0.14 * seconds, seconds, "full"]],
        "moves": moves,
        "started": f"2025-11-03T10:{noise.randrange(60):02d}:00+00:00",
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def comparison(seeds: tuple[int, ...] = (1, 2, 3), ladder: bool = True) -> dict[str, Any]:
    """A result as `foretrain compare` makes it, with invented numbers."""
    rates = [1e-3, 2e-3, 4e-3]
    runs = [run(arm, seed, rate) for seed in seeds for arm in ("plain", "hybrid") for rate in rates]
    runs += [run("plain", seed, 2e-3, steps, budget) for seed in seeds for steps, budget in ((280, 0.7), (560, 1.4))]
    runs += [run("plain_passes", seed, 2e-3, 424, 1.06) for seed in seeds]
    runs += [run("plain_seconds", seed, 2e-3, 420, 1.05) for seed in seeds]
    runs += [run(arm, seed, 2e-3) for seed in seeds for arm in ("hybrid_zero", "hybrid_repeat")]
    speedups = {
        "plain_passes": 1.0,
        "plain_seconds": 1.003,
        "hybrid": 1.012,
        "hybrid_zero": 0.952,
        "hybrid_repeat": 0.938,
    }
    arms = []
    for arm, (label, meaning) in ARMS.items():
        own = [one for one in runs if one["arm"] == arm and one["learning_rate"] == 2e-3]
        own = [one for one in own if one["budget"] == 1.0] or own
        losses = [one["loss"] for one in own]
        middle, several = mean(losses), len(seeds) > 1
        factor = speedups.get(arm)
        interval = {"mean": factor, "low": None, "high": None, "deviation": None}
        if several and factor is not None:
            wide = 0.031 if "repeat" not in arm else 0.06
            interval |= {"low": factor - wide, "high": factor + wide, "deviation": 0.013}
        arms.append(
            {
                "arm": arm,
                "label": label,
                "meaning": meaning,
                "learning_rate": 2e-3,
                "n": len(seeds),
                "loss_mean": middle,
                "loss_deviation": mean([(loss - middle) ** 2 for loss in losses]) ** 0.5 if several else None,
                "seconds_mean": mean([one["seconds"] for one in own]),
                "backward_passes_mean": mean([one["backward_passes"] for one in own]),
                "tokens_mean": mean([one["tokens"] for one in own]),
                "loss_difference": {
                    "mean": -0.0052,
                    "low": -0.0113 if several else None,
                    "high": 0.0009 if several else None,
                },
                "speedup": interval if factor is not None else None,
                "smallest_detectable": 1.036 if several and factor is not None else None,
                "note": "",
            }
        )
    rungs = [("fp32 eager", "precision.type = fp32", 1.0), ("bf16", "precision.type = bf16", 1.62)]
    rungs += [("compile and fused kernels", "compile = true", 2.9), ("better optimizer", "optimizer.name = muon", 3.7)]
    rungs += [("look-ahead", "lookahead.every = 5", 3.6), ("leaps", "prediction.enabled = true", 3.55)]
    below = [1.0] + [rung[2] for rung in rungs]
    return {
        "format": 1,
        "title": "gpt2-tiny on Python's own source code",
        "command": "foretrain compare --preset demo --seeds 3 --set max_steps=400 --out runs/compare",
        "date": "2025-11-03T10:12:44+00:00",
        "commit": "d248900f3a1c",
        "environment": {"device": "2 CPU cores", "python": "3.11.9", "torch": "2.11.0", "system": "Linux 6.1"},
        "config": {"max_steps": 400, "optimizer": {"name": "adamw", "learning_rate": 2e-3}, "data": {"path": None}},
        "settings": {"seeds": list(seeds), "rate_factors": [0.5, 1, 2], "budgets": [0.7, 1, 1.4], "steps": 400},
        "complete": True,
        "missing": [],
        "runs": runs,
        "analysis": {
            "sentence": "No gain shown: hybrid reached plain's loss 1.01 times as fast (95 % interval 0.98 to 1.04). "
            "With these seeds a speed-up of 1.04 or more would have shown.",
            "verdict": "no gain shown",
            "arms": arms,
            "budget_curve": [
                {key: one[key] for key in ("max_steps", "budget", "seed", "loss", "seconds")}
                for one in runs
                if one["arm"] == "plain" and one["learning_rate"] == 2e-3
            ],
            "sweep": [
                {key: one[key] for key in ("arm", "label", "learning_rate", "seed", "loss")}
                for one in runs
                if one["arm"] in ("plain", "hybrid") and one["budget"] == 1.0
            ],
            "ladder": [
                {
                    "rung": name,
                    "setting": setting,
                    "loss_mean": 1.83,
                    "seconds_mean": 90 / whole,
                    "speedup": {"mean": whole / under, "low": whole / under - 0.04, "high": whole / under + 0.04},
                    "cumulative": whole,
                    "n": len(seeds),
                    "note": "prediction by itself" if name == "leaps" else "",
                }
                for (name, setting, whole), under in zip(rungs, below, strict=False)
            ]
            if ladder
            else [],
        },
    }


def unfinished() -> dict[str, Any]:
    """One seed, runs still to do, no ladder, and numbers that are unknown."""
    result = comparison(seeds=(1,), ladder=False)
    result |= {"complete": False, "missing": ["hybrid, 4e-3, seed 1", "plain, 2e-3, seed 2"], "commit": None}
    result["analysis"] |= {"verdict": "incomplete", "sentence": "Not complete: two of 14 runs are still to do."}
    result["runs"][0]["loss"] = math.nan
    result["runs"][1] |= {"loss": None, "seconds": None, "curve": [], "phases": [], "moves": []}
    result["runs"][4]["curve"][5][2] = math.inf
    result["analysis"]["arms"][2] |= {"speedup": None, "loss_mean": None, "seconds_mean": None, "loss_difference": None}
    result["analysis"]["budget_curve"][0]["loss"] = None
    return result


class Reader(HTMLParser):
    """Checks that elements close in order, and gathers what the page refers to."""

    VOID = ("meta", "link", "br", "img", "hr", "input")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.charts: dict[str, dict[str, str | None]] = {}
        self.policy = ""
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        assert not [name for name in named if name.startswith("on")]
        self.references += [str(named[name]) for name in ("src", "href", "srcset", "action", "data") if name in named]
        if "data-chart" in named:
            self.charts[str(named["data-chart"])] = named
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(named["content"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


RESULTS = {"whole": comparison(), "unfinished": unfinished()}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_the_page_is_well_formed_and_loads_nothing(result: dict[str, Any]) -> None:
    text = page(result)
    reader = read(text)
    assert reader.references == ["data:,"]
    assert set(re.findall(r"https?://[^ ]*", text)) == {"https://github.com/leeoniya/uPlot"}  # in a comment
    assert not re.search(r"url\(|@import", text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = dict(part.strip().partition(" ")[::2] for part in reader.policy.split(";"))
    assert allowed == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": " ".join(f"'sha256-{one}'" for one in hashes),
        "img-src": "data:",
        "base-uri": "'none'",
    }
    assert len(scripts) == reader.tags.count("script") - 1 == 2
    assert len(text) < 1_000_000


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


def series_of(text: str, chart: str) -> dict[str, dict[str, Any]]:
    """Every series of a chart by its name."""
    return {one["label"]: one for group in data_of(text)[chart]["runs"] for one in group["series"]}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_every_chart_is_named_and_has_its_numbers(result: dict[str, Any]) -> None:
    text = page(result)
    data, charts = data_of(text), read(text).charts
    assert set(charts) == {"curve", "enlarged", "training", "budget", "ends", "sweep", "strips"}
    for name, holder in charts.items():
        assert len(str(holder["aria-label"])) > 20
        assert re.search(r"\((seconds|per step)", data[name]["x"]["label"])
        assert name == "strips" or "per token" in data[name]["unit"]
    figures = [figure for figure in re.findall(r"<figure>.*?</figure>", text, re.S) if "data-chart" in figure]
    assert len(figures) == len(charts)
    for figure in figures:
        assert "The numbers behind this chart" in figure
        assert figure.count("<td") > 5
        assert "<noscript>" in figure


def test_the_curves_are_those_of_the_runs_at_the_best_rates() -> None:
    result = comparison()
    text = page(result)
    groups = data_of(text)["curve"]["runs"]
    assert [group["name"] for group in groups] == [label for label, _ in ARMS.values()]
    assert len({group["look"] for group in groups}) == len(ARMS)
    assert [[one["listed"] for one in group["series"]] for group in groups] == [[True, False, False]] * len(ARMS)
    (shown,) = (one for one in result["runs"] if (one["arm"], one["seed"], one["learning_rate"]) == ("hybrid", 2, 2e-3))
    drawn = series_of(text, "curve")["hybrid, seed 2"]
    assert drawn["x"] == pytest.approx([point[1] for point in shown["curve"]], rel=1e-5)
    assert drawn["values"] == pytest.approx([point[2] for point in shown["curve"]], rel=1e-5)
    assert data_of(text)["curve"]["log"] is True
    enlarged = data_of(text)["enlarged"]
    assert enlarged["x"]["low"] == pytest.approx(0.6 * max(one["seconds"] for one in result["runs"][:24:2]), rel=0.1)
    assert all(sum(x < enlarged["x"]["low"] for x in one["x"]) == 1 for one in series_of(text, "enlarged").values())


def test_the_ends_have_their_deviations_and_arrows_to_plain() -> None:
    result = comparison()
    text = page(result)
    hybrid = next(arm for arm in result["analysis"]["arms"] if arm["arm"] == "hybrid")
    seconds, loss, deviation = (hybrid[name] for name in ("seconds_mean", "loss_mean", "loss_deviation"))
    end = series_of(text, "ends")["hybrid, mean"]
    assert [*end["x"], *end["values"]] == pytest.approx([seconds, loss], rel=1e-5)
    assert end["errors"] == [pytest.approx([loss - deviation, loss + deviation], rel=1e-5)]
    arrow = next(arrow for arrow in data_of(text)["ends"]["arrows"] if arrow["look"] == 1)
    assert arrow["text"] == "1.012×"
    assert arrow["end"] == pytest.approx([1.012 * seconds, loss], rel=1e-5)
    assert series_of(text, "budget")["plain, mean"]["labels"] == ["280 steps", "400 steps", "560 steps"]
    chart = data_of(text)["ends"]
    assert chart["low"] < min(loss, *chart["runs"][1]["series"][0]["values"]) < chart["high"]


def test_more_arms_than_looks_keep_all_their_seeds() -> None:
    result = comparison()
    for number in range(9):
        own = [
            one | {"arm": f"more-{number}", "label": f"more {number}"}
            for one in result["runs"]
            if one["arm"] == "hybrid"
        ]
        result["runs"] += [one for one in own if one["learning_rate"] == 2e-3]
        result["analysis"]["arms"].append(
            result["analysis"]["arms"][1] | {"arm": f"more-{number}", "label": f"more {number}"}
        )
    ends = {group["name"]: len(group["series"]) for group in data_of(page(result))["ends"]["runs"]}
    assert {name: count for name, count in ends.items() if count != 4} == {}  # three seeds and their mean


def test_the_sweep_has_a_point_for_each_seed_and_a_line_through_their_means() -> None:
    result = comparison()
    text = page(result)
    found = [
        point["loss"]
        for point in result["analysis"]["sweep"]
        if (point["arm"], point["learning_rate"]) == ("plain", 1e-3)
    ]
    series = series_of(text, "sweep")
    assert [series[f"plain, seed {seed}"]["values"][0] for seed in (1, 2, 3)] == pytest.approx(found, rel=1e-5)
    assert series["plain, mean"]["values"][0] == pytest.approx(mean(found), rel=1e-5)
    assert data_of(text)["sweep"]["x"]["ticks"] == [1e-3, 2e-3, 4e-3]


def test_the_phases_and_moves_of_a_run_are_told_by_their_own_names() -> None:
    result = comparison()
    for one in result["runs"]:
        one["moves"] = [[10, 3.0, "kept"], [20, 5.0, "shrunk"], [30, 7.0, "refused"], [40, 9.0, "rolled_back"]]
    text = page(result)
    strip = next(one for one in data_of(text)["strips"]["strips"] if one["name"] == "hybrid, seed 1")
    (shown,) = (one for one in result["runs"] if (one["arm"], one["seed"], one["learning_rate"]) == ("hybrid", 1, 2e-3))
    assert [phase for _, _, phase, _ in strip["phases"]] == [phase for _, _, phase in shown["phases"]]
    assert [mark[1:4:1] for mark in strip["marks"]] == [
        [3, "kept", "step 10, 3.0 s: move kept"],
        [5, "shrunk", "step 20, 5.0 s: move shrunk"],
        [7, "refused", "step 30, 7.0 s: move refused"],
        [9, "rolled back", "step 40, 9.0 s: move rolled back"],
    ]
    spent = sum(end - start for start, end, phase in shown["phases"] if phase == "predict")
    assert strip["spent"]["predict"].startswith(f"{spent:.3g} s in all, ")
    table = text[text.index('data-chart="strips"') :]
    assert re.search(r"hybrid, seed 1</td>(<td[^>]*>.*?</td>){4}<td[^>]*>2</td><td[^>]*>1</td><td[^>]*>1</td>", table)


def test_very_many_phases_and_moves_stay_small() -> None:
    result = comparison(seeds=(1,))
    result["runs"] = [one for one in result["runs"] if one["arm"] == "hybrid" and one["learning_rate"] == 2e-3]
    for one in result["runs"]:
        one["phases"] = [[n / 10, (n + 1) / 10, ("full", "predict")[n % 2]] for n in range(50000)]
        one["moves"] = [[n, n / 10, "kept"] for n in range(50000)]
    strip = data_of(page(result))["strips"]["strips"][0]
    assert len(strip["phases"]) <= 400
    assert {(phase, share) for _, _, phase, share in strip["phases"]} <= {
        ("predict", share / 100) for share in range(49, 52)
    }
    assert len(strip["marks"]) < 200
    assert sum(count for *_, count in strip["marks"]) == 50000
    assert len(json.dumps(strip)) < 30_000


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_intervals_lie_around_the_line_at_one(result: dict[str, Any]) -> None:
    arms = result["analysis"]["arms"]
    bounds = ratio_range([arm["speedup"] or {} for arm in arms])
    assert bounds[0] < 1 < bounds[1]
    for arm in arms:
        made = interval(arm["speedup"] or {}, bounds)
        assert (made is None) == (arm["speedup"] is None)
        if made is not None:
            factor = arm["speedup"]["mean"]
            assert (made["mean"] > place(1.0, bounds)) == (factor > 1)
            assert f"{factor:.3g}×" in made["told"]
            assert f'aria-label="{arm["label"]}: {made["told"]}"' in page(result)


def test_an_interval_that_leaves_the_range_is_drawn_as_going_on() -> None:
    inside, outside = {"mean": 1.0, "low": 0.9, "high": 1.1}, {"mean": 1.0, "low": 0.0, "high": None}
    bounds = ratio_range([inside, outside])
    assert 0.5 < bounds[0] < 0.9 < 1.1 < bounds[1] < 2
    assert interval(inside, bounds)["span"]["style"] == ""
    assert interval(outside, bounds)["span"] == {"left": 0.0, "width": 100.0, "style": "open-low open-high"}
    assert interval({"mean": None}, bounds) is None


@given(st.floats(0.01, 100), st.floats(1, 50), st.integers(2, 8))
def test_factors_on_an_axis_are_round_few_and_inside(low: float, factor: float, most: int) -> None:
    bounds = ratio_range([{"mean": low}, {"mean": low * factor}])
    found = round_factors(bounds, most)
    assert len(found) <= most
    assert all(bounds[0] < one < bounds[1] for one in found)
    assert found == sorted({float(f"{one:.3g}") for one in found})


def test_the_bars_of_the_ladder_are_as_long_as_their_factors() -> None:
    bars = re.findall(r'class="bar" style="left: ([0-9.]+)%; width: ([0-9.]+)%"', page(comparison()))
    widths = [float(width) for _, width in bars]
    factors = [1.0, 1.62, 2.9, 3.7, 3.6, 3.55]
    assert [width / widths[3] for width in widths] == pytest.approx(
        [math.log(f) / math.log(3.7) for f in factors], abs=1e-2
    )


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_unknown_numbers_never_show_as_such(result: dict[str, Any]) -> None:
    assert not re.search(r"\b(nan|inf|None)\b", page(result))


def test_the_verdict_comes_first_then_what_it_rests_on() -> None:
    result = comparison()
    text = read(page(result)).text
    order = [
        result["title"],
        "no gain shown",
        result["analysis"]["sentence"],
        *("The arms", "Held-out loss against time", "Final loss against budget", "Final loss against learning rate"),
        *("What the runs did", "The ladder", "How it was measured", "Every run (36)", "Configuration", "Environment"),
        result["command"],
    ]
    start = 0
    for part in order:
        start = text.index(part, start)


def test_the_arms_are_told_with_all_their_numbers() -> None:
    text = read(page(comparison())).text
    assert all(label in text and meaning in text for label, meaning in ARMS.values())
    shown = ("1.012×", "(0.981 to 1.043)", "1.036×", "2e-3", "optimizer.learning_rate", "not set")
    assert [part for part in shown if part not in text] == []


def test_what_is_missing_is_said() -> None:
    text = read(page(unfinished())).text
    assert "2 runs still to do" in text
    assert "plain, 2e-3, seed 2" in text
    assert "The ladder" not in text
    assert "runs still to do" not in read(page(comparison())).text


@pytest.mark.parametrize("verdict", ["gain", "no gain shown", "slower", "one run", "incomplete", "something new"])
def test_every_verdict_has_a_badge(verdict: str) -> None:
    result = comparison()
    result["analysis"]["verdict"] = verdict
    assert re.search(rf'<span class="badge [a-z]*">{verdict}</span>', page(result))


def test_a_run_that_failed_has_its_reason_and_no_numbers() -> None:
    result = comparison()
    head = ("arm", "label", "seed", "learning_rate", "budget", "max_steps", "started")
    result["runs"][2] = {key: result["runs"][2][key] for key in head} | {
        "loss": None,
        "failed": "the loss is not finite",
    }
    assert "the loss is not finite" in read(page(result)).text


def test_a_budget_of_one_seed_does_not_bend_plains_line() -> None:
    result = comparison()
    result["analysis"]["budget_curve"].append(
        {"max_steps": 437, "budget": 1.09, "seed": 2, "loss": 9.0, "seconds": 34.0}
    )
    series = series_of(page(result), "budget")
    assert series["plain, mean"]["labels"] == ["280 steps", "400 steps", "560 steps"]
    assert not any("437 steps" in tip for tip in series["plain, mean"]["tips"])
    assert any(tip.startswith("plain, seed 2, 437 steps: 34.0 s") for tip in series["plain, seed 2"]["tips"])


def test_moves_may_tell_more_than_their_verdict() -> None:
    result = comparison()
    for one in result["runs"]:
        one["moves"] = [[10, 3.25, "rolled_back", 40, -1.5]] if one["arm"] == "hybrid" else []
    assert "step 10, 3.2 s: move rolled back" in page(result)


def test_an_empty_comparison_is_a_page_too() -> None:
    result = comparison()
    result |= {"runs": [], "environment": {}, "config": {}, "settings": {}, "commit": None, "date": None}
    result["analysis"] |= {"arms": [], "budget_curve": [], "sweep": [], "ladder": []}
    text = page(result)
    read(text)
    assert not any(group["series"] for group in data_of(text)["curve"]["runs"])
    assert not {"ends", "sweep", "strips"} & set(data_of(text))


def test_any_number_may_be_null() -> None:
    def without_numbers(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_numbers(part) for key, part in value.items()}
        if isinstance(value, list):
            return [without_numbers(part) for part in value]
        return None if isinstance(value, float | int) and not isinstance(value, bool) else value

    text = page(without_numbers(comparison()))
    read(text)
    assert not re.search(r"\b(nan|inf)\b", text)


def test_text_cannot_become_markup() -> None:
    hostile = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"

    def poisoned(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {
                name + ("<b>" if key in ("environment", "config") else ""): poisoned(v, name)
                for name, v in value.items()
            }
        if isinstance(value, list):
            return [poisoned(part, key) for part in value]
        return hostile if isinstance(value, str) and key != "arm" else value

    text = page(poisoned(copy.deepcopy(comparison())))
    reader = read(text)
    assert reader.tags.count("script") == 3
    assert "img" not in reader.tags
    assert "b" not in reader.tags


def test_a_comparison_of_long_runs_stays_below_a_megabyte() -> None:
    result = comparison(seeds=(1, 2, 3, 4, 5))
    for one in result["runs"]:
        one["curve"] = [[step, step / 10, 2 + math.sin(step) / 9] for step in range(20000)]
        one["training"] = one["curve"]
    assert len(page(result)) < 1_100_000


def test_the_result_may_have_gone_through_json() -> None:
    result = json.loads(json.dumps(unfinished()))
    assert page(result) == page(unfinished())
