"""The forecast of the end where a user meets it: progress line, words, table, trackers, and the record of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from foretrain.config.units import interval_text
from foretrain.events import Evaluated, LossForecasted
from foretrain.show.console import Console
from foretrain.show.follow import read_runs
from foretrain.show.narration import line
from foretrain.show.pages.report_end import end_forecasts, said_of_the_end, way_to_the_end
from foretrain.show.pages.report_page import page, parts
from foretrain.show.summary import summary_table
from foretrain.show.trackers.entries import entry_of

from .runs import STARTED, SUMMARY, append, end, progress, write_run


def forecast(step: int, loss: float = 1.2, half: float = 0.05, calibrated: bool = False) -> LossForecasted:
    way = ((step + 10, loss + 0.1, loss, loss + 0.3), (100, loss, loss - half, loss + half))
    told = (loss, loss - half, loss + half, 0.8, "its law", calibrated)
    return LossForecasted(step, 100, *told, {"last value": 2.0}, way)


CHECK = {"share": 0.5, "step": 50, "loss": 1.2, "low": 1.15, "high": 1.25, "error_percent": -4.0, "held": True}
FOUND: dict[str, Any] = {
    "level": 0.8,
    "ended": True,
    "last": {"step": 90, "loss": 1.2, "low": 1.15, "high": 1.25, "end": 100},
    "calibrated": False,
    "own_finished_runs": 3,
    "checks": [CHECK],
}


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((3.2123, 3.1701, 3.2598), "3.21 [3.17, 3.26]"),
        ((2.5, 1.5, 3.5), "2.50 [1.50, 3.50]"),
        ((3.21234, 3.2119, 3.2129), "3.2123 [3.2119, 3.2129]"),
        ((3e-7, 2e-7, 4e-7), "3e-07 [2e-07, 4e-07]"),
        ((-2.0, -2.5, -1.5), "-2.00 [-2.50, -1.50]"),
        ((2.0, 2.0, 2.0), "2.00 [2.00, 2.00]"),
    ],
)
def test_an_interval_has_as_many_digits_as_it_needs(numbers: tuple[float, float, float], text: str) -> None:
    assert interval_text(*numbers) == text


def test_a_forecast_is_not_shown_any_more_when_newer_losses_allow_none() -> None:
    stream = io.StringIO()
    console = Console(RichConsole(file=stream, width=200), clock=lambda: 0.0)
    events = [STARTED, forecast(10, 3.2123, 0.045), progress(10), Evaluated(20, 2.0, 0.1, True, False), progress(20)]
    for event in (*events, Evaluated(30, 1.9, 0.1, True, False), forecast(30), progress(30)):
        console(event)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step ") and "lr" in line]
    assert ["| end" in line for line in lines] == [True, False, True]


def test_the_progress_line_says_where_the_run_ends() -> None:
    stream = io.StringIO()
    console = Console(RichConsole(file=stream, width=200), clock=lambda: 0.0)
    for event in (STARTED, progress(10), forecast(10, 3.2123, 0.045), progress(20)):
        console(event)
    before, after = (text for text in stream.getvalue().splitlines() if text.startswith("step"))
    assert "end" not in before
    assert "| end 3.21 [3.17, 3.26] |" in after


def test_a_narrow_terminal_keeps_the_end_rather_than_the_speed() -> None:
    console = Console(RichConsole(file=io.StringIO(), width=200))
    console(STARTED)
    console(forecast(10, 3.2123, 0.045))
    console(Evaluated(10, 2.5, 0.1, False, True))
    numbers = console._numbers(progress(20), 70)
    assert "end 3.21 [3.17, 3.26]" in numbers
    assert "tok/s" not in numbers


def test_a_verbose_run_says_how_it_was_made() -> None:
    assert line(forecast(40), verbose=True) == (
        "step 40: held-out loss at the end 1.20 [1.15, 1.25] "
        "(80 % interval, not calibrated, by its law; last value 2.0000)"
    )


def shown(summary: dict[str, Any]) -> str:
    stream = io.StringIO()
    RichConsole(file=stream, width=160).print(summary_table(summary))
    return stream.getvalue()


def test_the_table_says_how_good_the_forecasts_were() -> None:
    plain = SUMMARY | {"skipped_steps": 0, "unit": "tokens"}
    text = shown(plain | {"loss_forecast": FOUND})
    assert "step 50: 1.20 [1.15, 1.25], -4.00 %, held" in text
    assert "80 % intervals, not calibrated yet (3 finished runs of its kind beside it)" in text
    stopped = shown(plain | {"loss_forecast": FOUND | {"checks": [], "ended": False}})
    assert "forecast for step 100" in stopped
    assert (
        "1.20 [1.15, 1.25], made at step 90; 80 % interval, not calibrated yet (3 finished runs of its kind" in stopped
    )
    assert "of the end" not in shown(plain | {"loss_forecast": None})
    ended = shown(plain | {"loss_forecast": FOUND | {"checks": []}})  # at another step than that of its forecasts
    assert "forecast for" not in ended
    assert "of the end" not in ended


def test_trackers_get_the_end_and_its_interval() -> None:
    entry = entry_of(forecast(40), 0)
    assert entry is not None
    assert entry.numbers == {"end/loss": 1.2, "end/low": pytest.approx(1.15), "end/high": 1.25}


# --- the page ---------------------------------------------------------------------------------------------------------


def going(folder: Path) -> Path:
    told = [STARTED, progress(10), Evaluated(10, 2.2, 0.1, False, True), forecast(10, 1.5, 0.3)]
    return write_run(folder, [*told, progress(20), Evaluated(20, 2.0, 0.1, False, True), forecast(20)])


def test_the_loss_chart_goes_on_to_the_end_of_a_run(tmp_path: Path) -> None:
    (record,) = read_runs([going(tmp_path / "run")])
    dashed, lower, upper = way_to_the_end(record, 100)
    assert dashed["steps"] == [20, 30, 100]
    assert dashed["values"] == [2.0, 1.3, 1.2]
    assert (lower["label"], lower["style"], lower["values"]) == ("lower 80 %", "edge", [2.0, 1.2, 1.15])
    assert (upper["label"], upper["values"]) == ("upper 80 %", [2.0, 1.5, 1.25])
    assert dashed["seconds"] == [2, 3, 10]
    assert "Forecast of the end" in page([record])


def test_the_way_to_the_end_begins_at_the_loss_that_it_was_made_of(tmp_path: Path) -> None:
    """A loss that was measured afterwards, as when a run is stopped, is not where the forecast began."""
    told = [STARTED, progress(20), Evaluated(20, 2.0, 0.1, False, True), forecast(20)]
    (record,) = read_runs([write_run(tmp_path / "run", [*told, progress(25), Evaluated(25, 0.9, 0.1, False, True)])])
    dashed = way_to_the_end(record, 100)[0]
    assert (dashed["steps"][0], dashed["values"][0]) == (20, 2.0)


def test_a_finished_run_shows_its_forecasts_and_what_came(tmp_path: Path) -> None:
    folder = going(tmp_path / "run")
    end(folder, SUMMARY | {"loss_forecast": FOUND})
    (record,) = read_runs([folder])
    assert way_to_the_end(record, 100) == []
    made, lower, _, came = end_forecasts(record, 100)
    assert (made["steps"], made["values"]) == ([10, 20], [1.5, 1.2])
    assert lower["values"] == [1.2, 1.15]
    assert (came["label"], came["values"]) == ("as it ended", [1.25, 1.25])
    told = parts([record]).sections["end"]
    assert "not calibrated yet" in told
    assert "−4.00 %" in told
    assert "held" in told
    assert "<figure data-optional><h3>Forecasts of the end</h3>" in page([record])


def test_a_wild_first_interval_does_not_flatten_the_others(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", [STARTED, forecast(10, 1.5, 1e6), *(forecast(step) for step in range(20, 60, 10))]
    )
    (record,) = read_runs([folder])
    _, lower, upper, *_ = end_forecasts(record, 100)
    assert max(upper["values"]) < 2
    assert min(lower["values"]) > 1


def test_what_is_done_again_after_a_kill_is_told_once(tmp_path: Path) -> None:
    folder = going(tmp_path / "run")
    append(folder, {"event": "Resumed", "step": 10, "path": "x"})
    append(folder, {"event": "LossForecasted", "step": 20, "loss": 1.3, "low": 1.1, "high": 1.4, "level": 0.8})
    (record,) = read_runs([folder])
    assert [(entry.step, entry.fields["loss"]) for entry in record.end_forecasts] == [(10, 1.5), (20, 1.3)]


def test_a_damaged_log_makes_no_chart_and_no_traceback(tmp_path: Path) -> None:
    folder = going(tmp_path / "run")
    for path in ("x", [[1]], [["a", "b", "c", "d"]], None):
        append(folder, {"event": "LossForecasted", "step": 30, "loss": "x", "low": None, "path": path})
    append(folder, {"event": "RatesPlanned", "step": 30, "steps": "x"})
    (record,) = read_runs([folder])
    assert end_forecasts(record, 100)[0]["steps"] == [10, 20]
    assert way_to_the_end(record, 100) == []
    assert said_of_the_end(record)["table"] is None
    assert page([record])
