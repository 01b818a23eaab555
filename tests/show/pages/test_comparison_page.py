"""The page of a comparison: whole, safe, readable without script, whatever the numbers are."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from foretrain.show.pages.comparison_page import page

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
        self.charts: list[dict[str, str | None]] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        assert not [name for name in named if name.startswith("on")]
        self.references += [str(named[name]) for name in ("src", "href", "srcset", "action", "data") if name in named]
        if tag == "svg" and named.get("class") == "chart":
            self.charts.append(named)
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
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in text
    assert reader.tags.count("script") == 1
    assert len(text) < 1_000_000


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_every_chart_is_named_and_has_its_numbers(result: dict[str, Any]) -> None:
    text = page(result)
    assert all(chart["role"] == "img" and chart["viewbox"] for chart in read(text).charts)
    figures = [figure for figure in re.findall(r"<figure>.*?</figure>", text, re.S) if 'class="wide"' in figure]
    assert len(figures) >= 6
    for figure in figures:
        assert "The numbers behind this chart" in figure
        assert "<table" in figure
        for picture in re.findall(r'<svg class="chart".*?</svg>', figure, re.S):
            assert re.search(r'aria-label="[^"]{20,}"', picture)
        assert re.search(r"<text[^>]*>[^<]*\((seconds|per step|factor)[^<]*\)</text>", figure)
        assert "per token" in figure or "predict" in figure or "speed-up" in figure


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
    text = page(result)
    assert "<title>plain, 400 steps, mean</title>" in text
    assert "plain, 437 steps, mean" not in text
    assert "plain, seed 2, 437 steps" in text


def test_moves_may_tell_more_than_their_verdict() -> None:
    result = comparison()
    for one in result["runs"]:
        one["moves"] = [[10, 3.25, "rolled_back", 40, -1.5]] if one["arm"] == "hybrid" else []
    assert "step 10, 3.2 s: move rolled back" in page(result)


def test_an_empty_comparison_is_a_page_too() -> None:
    result = comparison()
    result |= {"runs": [], "environment": {}, "config": {}, "settings": {}, "commit": None, "date": None}
    result["analysis"] |= {"arms": [], "budget_curve": [], "sweep": [], "ladder": []}
    assert "nothing to show yet" in read(page(result)).text


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
    assert reader.tags.count("script") == 1
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
