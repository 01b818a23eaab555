"""The console: plain lines without a terminal, a live line on one, and text shown as it is."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console as RichConsole

from foretrain.config.schema import Level
from foretrain.config.units import duration, short
from foretrain.events import (
    Bus,
    CheckpointRejected,
    CheckpointSaved,
    Evaluated,
    Event,
    HealthFound,
    HealthMeasured,
    MemoryUsed,
    Moved,
    Notice,
    PhaseChanged,
    Progress,
    RateTrial,
    RateTried,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Tuned,
)
from foretrain.show.console import Console
from foretrain.show.summary import closing_lines, result_line, summary_table

SUMMARY: dict[str, Any] = {
    "final_val_loss": 1.23456,
    "best_val_loss": 1.2,
    "final_train_loss": 1.1,
    "global_step": 1000,
    "steps": {"warmup": 0, "full": 1000, "predict": 0, "correct": 0},
    "backward_passes": 1000,
    "tokens": 1234567,
    "seconds": 75.5,
    "tokens_per_second": 16352.0,
    "skipped_steps": 0,
}


def progress(step: int, seconds: float = 0.0, loss: float = 2.5) -> Progress:
    return Progress(step, loss, 1.0, 3e-4, step * 100, 12345.6, seconds, 0)


def started(max_steps: int = 1000, **details: str) -> RunStarted:
    return RunStarted(0, max_steps, 124439808, 124439808, "cpu", "fp32", "gpt2-small", details)


def shown(events: list[Event], terminal: bool = False, width: int = 200, level: Level = "normal") -> str:
    text = io.StringIO()
    console = RichConsole(file=text, force_terminal=terminal, width=width, highlight=False, color_system=None)
    spent = {"training": 0.0, "evaluation": 0.0}
    listener = Console(console, level, clock=lambda: sum(spent.values()))
    for event in events:
        match event:
            case Progress():
                spent["training"] = event.seconds
            case Evaluated():
                spent["evaluation"] += event.seconds
        listener(event)
    listener.close()
    return text.getvalue()


# --- without a terminal --------------------------------------------------------------------------------------------


def test_a_run_in_plain_lines() -> None:
    text = shown(
        [
            started(data="tiny.txt", folder="runs/mine"),
            progress(500, 30.0),
            Evaluated(500, 2.25, 0.1, False, True),
            CheckpointSaved(500, "runs/mine/checkpoints/step-00000500", 12.5, 0.1),
            progress(1000, 60.0),
            RunEnded(1000, "finished", SUMMARY),
        ]
    )
    assert "\x1b" not in text
    for words in (
        "model   gpt2-small, 124M parameters",
        "data    tiny.txt",
        "device  cpu, fp32",
        "step  500/1000  50% | loss 2.5000 | 12.3k tok/s | lr 3.00e-04 | eta 0:30",
        "step 500: held-out loss 2.2500 (best so far)",
        "step 500: saved runs/mine/checkpoints/step-00000500 (12.5 MB)",
        "step 1000/1000 100% | loss 2.5000 | val 2.2500",
        "run finished",
        "1.2346",
        "1,234,567",
        "1:16 (75.5 s)",
        "runs/mine",
    ):
        assert words in text


def test_learning_rates_that_are_tried_do_not_spoil_the_time_left() -> None:
    now = [0.0]
    text = io.StringIO()
    listener = Console(RichConsole(file=text, width=200, color_system=None), clock=lambda: now[0])
    told: list[tuple[float, Event]] = [
        (0.0, started(300)),
        (0.0, RateTrial(0, 1e-3, 0, 30, 58)),
        (10.0, progress(10)),
        (20.0, progress(20)),  # a second for each step: 280 to go, and two rates at least
        (30.0, RateTried(30, 1e-3, 30, 2.0, True)),
        (30.0, RateTrial(30, 3e-3, 1, 30)),
        (50.0, RateTrial(30, 3e-3, 20, 30)),
        (60.0, RateTried(30, 3e-3, 30, 1.5, True)),
        (60.0, RateTrial(30, 1e-2, 1, 30)),
        (90.0, RateTried(30, 1e-2, 30, 1.7, False)),
        (90.0, progress(30)),  # a second for each step as before: 270 to go
        (100.0, progress(40)),
    ]
    for now[0], event in told:
        listener(event)
    assert re.findall(r"eta (\S+)", text.getvalue())[1:] == ["5:38", "4:30", "4:20"]
    tried = re.findall(r"^learning rate: (trying .*)$", text.getvalue(), flags=re.MULTILINE)
    assert tried == [
        "trying 0.001 first, for 30 steps, then others",
        "trying 0.003 on the same 30 steps",
        "trying 0.01 on the same 30 steps",
    ]


def test_rates_that_are_tried_before_the_first_line_do_not_count() -> None:
    now = [0.0]
    text = io.StringIO()
    listener = Console(RichConsole(file=text, width=200, color_system=None), clock=lambda: now[0])
    for now[0], event in (
        (0.0, started(100)),
        (0.0, RateTrial(0, 1e-3, 0, 10, 18)),
        (10.0, RateTrial(10, 3e-3, 1, 10)),
        (40.0, progress(10, seconds=40.0)),
    ):
        listener(event)
    assert "eta 1:30" in text.getvalue()  # ten seconds for the run's own ten steps, ninety to go


def test_a_long_run_is_some_forty_lines() -> None:
    text = shown([started(100_000), *(progress(step) for step in range(10, 100_001, 10))])
    lines = re.findall(r"^step .*%", text, flags=re.MULTILINE)
    assert 38 <= len(lines) <= 42
    assert "step 100000/100000" in text


def test_a_short_run_shows_every_line() -> None:
    text = shown([started(5), *(progress(step) for step in range(1, 6))])
    assert len(re.findall(r"^step \d/5", text, flags=re.MULTILINE)) == 5


def test_the_time_left_follows_from_the_steps_since_the_first_line() -> None:
    text = shown([started(100), progress(10, 100.0), progress(20, 110.0)])
    assert "eta 1:20" in text  # ten seconds for ten steps, eighty to go; the slow start does not count


def test_the_time_left_goes_by_the_newest_steps() -> None:
    """The machine became three times slower after a half."""
    fast = [progress(step, step / 1.0) for step in range(10, 51, 10)]
    slow = [progress(step, 50 + 3.0 * (step - 50)) for step in range(60, 91, 10)]
    assert re.findall(r"eta (\S+)", shown([started(100), *fast, *slow]))[-1] == "0:30"


def test_the_time_left_counts_evaluations() -> None:
    text = shown([started(100), progress(10, 1.0), Evaluated(10, 2.0, 19.0, False, True), progress(20, 2.0)])
    assert re.findall(r"eta (\S+)", text)[-1] == "2:40"  # twenty seconds for ten steps, eighty to go


def test_after_a_rollback_lines_go_on_from_the_step_gone_back_to() -> None:
    back = Recovered(0, "roll_back", "rolled back, with the learning rate x 0.1: the loss is nan", at=50)
    steps = [progress(step, step / 10) for step in range(10, 51, 10)]
    again = [progress(step, 5 + step / 10) for step in range(10, 101, 10)]
    text = shown([started(400), *steps, back, *again])
    assert "step 50: rolled back to step 0, with the learning rate x 0.1: the loss is nan\n" in text
    assert re.findall(r"^step +(\d+)/400", text, flags=re.MULTILINE)[-10:] == [str(step) for step in range(10, 101, 10)]
    assert re.findall(r"eta (\S+)", text)[-1] == "0:30"  # what was undone took as long per step


def test_the_time_left_is_never_negative_after_a_rollback_to_before_a_resumption() -> None:
    steps = [progress(60, 600.0), progress(40, 620.0), progress(50, 700.0)]
    text = shown([RunStarted(50, 100, 10, 10, "cpu", "fp32", "x"), *steps], level="verbose")
    assert "eta -" not in text
    assert re.findall(r"eta (\S+)", text)[1:] == ["15:30", "8:20"]  # 620 s for 40 steps; then 100 s for 10 of them


def test_a_resumed_run_starts_its_lines_where_it_goes_on() -> None:
    start = RunStarted(900, 1000, 10, 10, "cpu", "fp32", "x")
    text = shown([Resumed(900, "runs/mine/step-00000900"), start, progress(910, 5.0)])
    assert "resumed from step 900 (runs/mine/step-00000900)" in text
    assert "step  910/1000" in text


def test_warnings_and_hints() -> None:
    text = shown([Notice("look out"), Notice("by the way", level="info")])
    assert text == "warning: look out\nby the way\n"


def test_a_failed_run_has_no_table() -> None:
    assert shown([RunEnded(3, "failed", SUMMARY)]) == ""


def test_a_loss_that_is_no_number_is_shown() -> None:
    assert "loss nan" in shown([started(5), progress(1, loss=math.nan)])


def test_a_finding_says_what_it_means_and_what_to_set() -> None:
    change = {"optimizer.type": "adamw", "optimizer.learning_rate": 0.002}
    found = HealthFound(
        "vanishing layer",
        200,
        "update/weight ratio",
        "layers.0",
        4e-7,
        "above 1e-5",
        "critical",
        "it hardly moves",
        change,
    )
    text = shown([found, Tuned(300, "explosion", {"optimizer.gradient_clip_norm": 1.0})])
    lines = text.splitlines()
    said = "it hardly moves (update/weight ratio 4e-07, healthy above 1e-5)"
    assert lines[0] == f"step 200, vanishing layer in layers.0: {said}"
    assert lines[1] == '    set optimizer.type = "adamw", optimizer.learning_rate = 0.002'
    assert lines[2] == "step 300, tuned: optimizer.gradient_clip_norm = 1.0 (explosion)"


# --- on a terminal -------------------------------------------------------------------------------------------------


def test_a_live_line_on_a_terminal() -> None:
    text = shown(
        [
            started(10),
            progress(4),
            Evaluated(4, 2.25, 0.1, False, True),
            progress(8),
            RunEnded(8, "interrupted", SUMMARY),
        ],
        terminal=True,
    )
    assert "\x1b[" in text  # it moves the cursor
    assert "step 8/10" in text
    assert "loss 2.5000 | val 2.2500 | 12.3k tok/s | lr 3.00e-04 | eta " in text
    assert "━" in text
    assert "run interrupted" in text
    assert "step 4: held-out loss" not in text  # it is in the live line


@pytest.mark.parametrize(
    ("width", "there"),
    [(60, ""), (80, "val"), (150, "val tok/s confidence lr"), (200, "val tok/s confidence predicted lr")],
)
def test_the_live_line_fits_and_always_has_loss_and_time_left(width: int, there: str) -> None:
    event = replace(
        progress(800, 30.0), phase="correct", predicted_loss=2.4, smoothed_loss=2.45, confidence=0.8, kept=3, refused=1
    )
    text = shown([started(1000), Evaluated(790, 2.25, 0.1, False, True), event], terminal=True, width=width)
    line = re.split(r"\r|\x1b\[[0-9;?]*[A-Za-z]|\n", text)
    [*_, last] = [part.rstrip() for part in line if part.startswith("step 800/1000")]
    assert len(last) <= width
    assert "…" not in last
    assert "correct | loss 2.5000" in last
    assert last.endswith(" | eta 0:08")
    for word in ("val", "tok/s", "confidence", "predicted", "lr"):
        assert (f"{word} " in f"{last} ") is (word in there.split()), word


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = shown([started(10), progress(4), RunEnded(10, "finished", SUMMARY)], terminal=True)
    assert "\x1b" not in text
    assert "\r" not in text
    assert "step  4/10  40% | loss 2.5000" in text


def test_warnings_appear_above_the_live_line() -> None:
    text = shown([started(10), progress(4), Notice("look out"), progress(5)], terminal=True)
    assert "warning: look out" in text


def test_closing_ends_the_live_line_and_may_be_repeated() -> None:
    console = Console(RichConsole(file=io.StringIO(), force_terminal=True))
    console(started(10))
    console.close()
    console.close()


# --- levels --------------------------------------------------------------------------------------------------------

FOUND = HealthFound("plateau", 4, "loss", "run", 1.0, "falling", "warning", "it stands still", {"seed": 2})


def moved(step: int) -> Moved:
    return Moved(step, 10, "rolled back", 1.0, True, False, 2.5, 2.4, 2.6, 0.75, -0.3, 4.0, "the loss rose")


WHOLE_RUN = [
    started(1000, folder="runs/mine"),
    Notice("look out"),
    Notice("by the way", level="info"),
    MemoryUsed(1, "full", resident_peak=700_000_000),
    HealthMeasured(1, 2.5, 0.1, 0.01, {"a": {}, "b": {}}, 0.5),
    FOUND,
    *(event for step in range(20) for event in (PhaseChanged(step, "predict", "it pays"), moved(step))),
    *(progress(step) for step in range(10, 1001, 10)),
    CheckpointSaved(500, "step-500", 12.5, 0.25),
    Recovered(500, "roll_back", "back to step 400"),
    Recovered(500, "reset", "momentum is reset"),
    RunEnded(1000, "finished", SUMMARY),
]


def test_a_quiet_run_says_only_what_needs_attention() -> None:
    for terminal in (False, True):
        assert shown(WHOLE_RUN, terminal, level="quiet").splitlines() == [
            "warning: look out",
            "step 4, plateau: it stands still (loss 1, healthy falling)",
            "    set seed = 2",
            "step 500, roll back: back to step 400",
        ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_verbose_run_says_everything(terminal: bool) -> None:
    normal, verbose = (shown(WHOLE_RUN, terminal, level=level) for level in ("normal", "verbose"))
    assert (normal.count("audited move"), verbose.count("audited move")) == (12, 20)
    assert (normal.count("PREDICT"), verbose.count("PREDICT")) == (12, 20)
    assert ("--verbose shows them all" in normal, "--verbose" in verbose) == (True, False)
    for words in (
        "step 1: memory in full: the process held 700 MB at the most so far",
        "step 1: looked at 2 layers: gradient norm 2.5, gradient/weight 0.1, update/weight 0.01, mean loss 0.5 sigmas",
        "rolled back (loss 2.5000 -> 2.6000, worth 0 steps, confidence 0.75): the loss rose",
        "step 500: saved step-500 (12.5 MB in 0.25 s)",
    ):
        assert words in verbose
        assert words not in normal
    if not terminal:
        assert len(re.findall(r"^step .*%", verbose, flags=re.MULTILINE)) == 100


def test_the_result_in_one_line() -> None:
    summary = SUMMARY | {"reason": "finished"}
    assert result_line(summary) == "finished: held-out loss 1.2346, 1,000 steps in 1:16"
    assert result_line(summary | {"final_val_loss": None}) == "finished: training loss 1.1000, 1,000 steps in 1:16"
    assert "accuracy 93.0%, 1,000" in result_line(summary | {"accuracy": 0.93})
    assert "exact match 50.0%, 1,000" in result_line(summary | {"exact_match": 0.5})
    guessing = summary | {"unit": "tokens", "config": {"model": {"vocab_size": 257}}}
    assert result_line(guessing | {"final_val_loss": 5.54}) == result_line(summary | {"final_val_loss": 5.54})
    told = "nothing was learned: guessing among 257 tokens has a loss of 5.5491; try a lower rate"
    assert result_line(guessing | {"final_val_loss": 70.5}).endswith(told)
    assert closing_lines(guessing | {"final_val_loss": 70.5})[0] == told


def finding(ailment: str, step: int, level: str = "critical", rate: float | None = None) -> dict[str, Any]:
    change = {} if rate is None else {"optimizer.learning_rate": rate}
    return {"ailment": ailment, "step": step, "place": "run", "level": level, "change": change}


def test_a_sick_run_says_so_beside_its_result() -> None:
    told = [
        finding("plateau", 10, "warning", 0.1),
        finding("divergence", 50, rate=0.5),
        finding("NaN", 70),
        finding("divergence", 100, rate=0.05),
    ]
    sick = SUMMARY | {
        "reason": "finished",
        "rollbacks": {"times": 3, "undone_steps": 260},
        "health": {"findings": told},
    }
    table = "\n".join(line.strip("│ ") for line in shown([RunEnded(1000, "finished", sick)]).splitlines())
    for words in (
        "3 rollbacks, 260 steps done again",
        "critical: divergence; set optimizer.learning_rate = 0.05",
        "critical: NaN",
        "and 2 more: see the report",
    ):
        assert words in table
    assert "0.5" not in table.replace("75.5", "")
    assert result_line(sick).endswith("1,000 steps in 1:16; 3 rollbacks, 3 critical findings")
    once = sick | {"rollbacks": {"times": 1, "undone_steps": 1}, "health": {"findings": told[:1]}}
    assert result_line(once).endswith("; 1 rollback")
    well = SUMMARY | {"rollbacks": {"times": 0, "undone_steps": 0}, "health": {"findings": []}}
    assert not {"recoveries", "findings"} & set(shown([RunEnded(1000, "finished", well)]).split())


# --- text as it is -------------------------------------------------------------------------------------------------

AWKWARD = ["a [b] c.txt", "[red]x[/red]", "[/]", "[/bold]", "[link=x", "\\[x]", "ü 漢字 🙂", "%s {0} {task}"]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("name", AWKWARD)
def test_names_are_shown_as_they_are(name: str, terminal: bool) -> None:
    bus, dropped = Bus(), []
    text = io.StringIO()
    rich = RichConsole(file=text, force_terminal=terminal, width=200, highlight=False, color_system=None)
    console = Console(rich)
    bus.subscribe(console)
    bus.subscribe(lambda event: dropped.append(event) if "stopped listening" in str(event) else None)
    for event in (
        RunStarted(0, 10, 1, 1, "cpu", "fp32", name, {"data": name, "folder": name}),
        Notice(name),
        Notice(name, level="info"),
        Resumed(3, name),
        CheckpointRejected(name, name),
        CheckpointSaved(3, name, 1.0, 0.1),
        RunEnded(10, "finished", SUMMARY),
    ):
        bus.emit(event)
    console.close()
    assert dropped == []
    expected = 3 + 2 + 1 + 2 + (0 if terminal else 1) + 1
    assert text.getvalue().count(name) == expected


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7.5, "7.5"), (999, "999"), (1234, "1.23k"), (1234567, "1.23M"), (1.5e9, "1.5B"), (-2000, "-2k")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599, "59:59"), (3600, "1h00m"), (7325, "2h02m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_table_leaves_out_what_is_not_known() -> None:
    summary = SUMMARY | {"final_val_loss": None, "best_val_loss": None, "tokens_per_second": None, "skipped_steps": 3}
    text = io.StringIO()
    RichConsole(file=text, width=120).print(summary_table(summary))
    assert "held-out" not in text.getvalue()
    assert "speed" not in text.getvalue()
    assert re.search(r"skipped steps\s+│\s+3", text.getvalue())


def table(**more: object) -> str:
    text = io.StringIO()
    RichConsole(file=text, width=160).print(summary_table(SUMMARY | more))
    return text.getvalue()


def test_the_total_time_stands_beside_the_training_time() -> None:
    assert re.search(r"total time\s+│ 1:49 with start-up, evaluation and saving", table(total_seconds=109.2))
    assert "total time" not in table()


def test_no_line_of_the_end_is_filled_up_with_blanks() -> None:
    lines = shown([RunEnded(10, "finished", SUMMARY)], width=80).splitlines()
    assert lines[0] == "run finished"
    assert lines == [line.rstrip() for line in lines]


def test_the_memory_of_every_phase() -> None:
    usage = {"allocated": 10**9, "reserved": 4 * 10**9, "pinned": 0}
    phases = {"setup": usage | {"peak": 10**9}, "full": usage | {"peak": 3_140_000_000}}
    assert "peak 3.1 GB in full, 2.0 GB in predict │" in _flat(
        table(memory=phases | {"predict": usage | {"peak": 2 * 10**9}})
    )
    pinned = phases | {"predict": usage | {"peak": 2 * 10**9, "pinned": 512_000_000}}
    assert "2.0 GB in predict; 512 MB pinned on the host" in table(memory=pinned)
    assert "the process held 700 MB at the most" in table(memory={"full": {"resident_peak": 700_000_000}})
    for nothing in ({}, {"memory": {}}, {"memory": {"setup": usage | {"peak": 5}}}):
        assert "memory" not in table(**nothing)


def test_how_often_memory_ran_out() -> None:
    found = {"times": 3, "failed_moves": 1, "prediction": "on", "settings": {"engine.activation_checkpointing": True}}
    text = table(out_of_memory=found)
    assert "3 times, once in a move; went on with engine.activation_checkpointing = true; prediction on" in text
    found = {"times": 1, "failed_moves": 0, "prediction": "on", "settings": {}}
    assert "once; prediction on" in table(out_of_memory=found)


def _flat(text: str) -> str:
    return " ".join(text.split())


SCORES = {"count": 1, "r2": 0.0, "repeat_r2": 0.83, "cosine": 0.0}
NOT_TRIED = "prediction was not tried: the run is too short for it to pay (an audit costs 10 full steps)"
IDLE: dict[str, Any] = {
    "steps": {"warmup": 100, "full": 900, "predict": 0, "correct": 0},
    "moves": {"kept": 0, "shrunk": 0, "refused": 0, "rolled_back": 0},
    "forecast": {"20": SCORES | {"made": 0}, "40": SCORES | {"made": 2, "r2": 0.5}},
    "confidence": {"calibration_error": 0.1, "outcomes": 12},
    "predictability": {"verdict": "hardly any"},
    "exact": None,
    "audit": {"sentence": NOT_TRIED, "gain_percent": None},
}
MACHINERY = ("forecasts", "calibration error", "predictability", "moves")


def test_a_predictor_that_said_nothing_yet_has_no_scores() -> None:
    text = shown([RunEnded(1000, "finished", SUMMARY | IDLE)], level="verbose")
    assert "20 steps: no forecast yet (repeat 0.83)" in text
    assert "40 steps: R2 0.50 (repeat 0.83), cosine 0.00" in text


def test_where_nothing_was_tried_the_table_has_one_sentence_on_prediction() -> None:
    text = shown([RunEnded(1000, "finished", SUMMARY | IDLE)])
    assert not [word for word in (*MACHINERY, "confidence", "glossary", "warm-up") if word in text]
    assert re.search(r"│ prediction +│ not tried: the run is too short for it to pay", text)
    assert re.search(r"│ steps +│ 1,000 +│", text)
    verbose = shown([RunEnded(1000, "finished", SUMMARY | IDLE)], level="verbose")
    assert [word for word in MACHINERY if word in verbose] == list(MACHINERY)
    assert "1,000 = 100 warm-up + 900 full" in verbose


def test_where_moves_were_tried_the_table_says_how_they_did() -> None:
    moves = {"kept": 2, "shrunk": 0, "refused": 0, "rolled_back": 1}
    audit = {"sentence": "prediction saved 3.0 % of the time to this loss", "gain_percent": 3.0}
    text = shown([RunEnded(1000, "finished", SUMMARY | IDLE | {"moves": moves, "audit": audit})])
    assert [word for word in MACHINERY if word in text] == list(MACHINERY)
    assert "2 kept, 1 rolled back" in text
    assert "prediction saved 3.0 %" in text
    assert "docs/glossary.md" in text.splitlines()[-1]


def test_what_leaps_reached_on_an_exact_loss_comes_first() -> None:
    exact = {"sentence": "Quasi-Newton leaps took the training loss from 1.0000 (step 40) to 2.784e-7 (step 99, 1.0 s)"}
    moves = {"kept": 2, "shrunk": 0, "refused": 0, "rolled_back": 0}
    text = shown([RunEnded(1000, "finished", SUMMARY | IDLE | {"moves": moves, "exact": exact})])
    first = text.splitlines()[2]
    assert first.startswith("│ result")
    assert "Quasi-Newton leaps took the training loss from 1.0000 (step 40) to 2.784e-7" in first
    assert "forecasts" not in text
    assert "not tried" not in text


def test_a_plain_run_says_nothing_of_prediction() -> None:
    plain = dict.fromkeys(("moves", "forecast", "confidence", "predictability", "exact", "audit"))
    text = shown([RunEnded(1000, "finished", SUMMARY | plain)], level="verbose")
    assert "prediction" not in text


def idle(step: int, phase: str = "warmup") -> Progress:
    told = {"predicted_loss": 2.4, "smoothed_loss": 2.45, "confidence": 0.35}
    return replace(progress(step), phase=phase, **told)


@pytest.mark.parametrize("terminal", [False, True])
def test_idle_machinery_is_quiet_in_progress_lines(terminal: bool) -> None:
    run = [started(1000), idle(100), PhaseChanged(120, "full", "the loss has settled"), idle(200, "full")]
    normal, verbose = (shown(run, terminal, level=level) for level in ("normal", "verbose"))
    for word in ("warmup", "full", "confidence", "predicted", "kept", "FULL", "settled"):
        assert word not in normal, word
        assert word in verbose or (terminal and word == "warmup"), word  # a live line is drawn now and then
    tried = shown([*run, PhaseChanged(210, "predict", "it pays"), moved(220), replace(idle(300, "full"), kept=1)])
    for words in ("step 210: PREDICT (it pays)", "| full    | loss 2.5000", "confidence 0.35, 1 kept, 0 refused"):
        assert words in tried


def test_a_chain_has_no_confidence() -> None:
    event = replace(progress(300), phase="predict", kept=2)
    assert " | 2 kept, 0 refused | " in shown([started(1000), event])


def test_a_resumed_run_that_has_tried_moves_goes_on_saying_so() -> None:
    assert "3 kept, 1 refused" in shown([started(1000), replace(idle(300, "full"), kept=3, refused=1)])


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        (["made", "kept"], "to 12 blocks at step 150: kept; 12 of 12 are used"),
        (["refused"], "not made: refused; 12 of 12 are used"),
        ([], "not made; 12 of 12 are used"),
    ],
)
def test_the_table_says_what_the_model_grew_to(moves: list[str], words: str) -> None:
    told = [{"step": 150, "verdict": verdict, "layers": 12, "before": 3.0, "loss": None} for verdict in moves]
    assert words in table(growth={"layers": 12, "of": 12, "moves": told})
