"""Meters and clocks."""

from __future__ import annotations

import math

import pytest
import torch

from foretrain.engine import meters
from foretrain.engine.meters import StepMeter, Stopwatch
from foretrain.engine.step import StepOutput


def output(loss: float, norm: float = 1.0, skipped: bool = False) -> StepOutput:
    return StepOutput(torch.tensor(loss), torch.tensor(norm), torch.tensor(float(skipped)))


# --- the meter -----------------------------------------------------------------------------------------------------


def test_a_reading_is_the_mean_since_the_last_one() -> None:
    meter = StepMeter()
    for loss in (1.0, 2.0, 6.0):
        meter.add(output(loss, 2 * loss))
    reading = meter.read()
    assert (reading.loss, reading.gradient_norm, reading.skipped, reading.steps) == (3.0, 6.0, 0, 3)
    assert meter.read() is None
    meter.add(output(5.0))
    assert meter.read().loss == 5.0


def test_skipped_steps_are_counted_and_kept_out_of_the_mean() -> None:
    meter = StepMeter()
    for loss, skipped in ((1.0, False), (math.nan, True), (math.inf, True), (3.0, False)):
        meter.add(output(loss, loss, skipped))
    reading = meter.read()
    assert (reading.loss, reading.gradient_norm, reading.skipped, reading.steps) == (2.0, 2.0, 2, 4)
    assert (meter.skipped, meter.skipped_in_a_row) == (2, 0)


def test_when_every_step_was_skipped_all_of_them_are_counted() -> None:
    meter = StepMeter()
    for _ in range(3):
        meter.add(output(math.nan, 1.0, skipped=True))
    reading = meter.read()
    assert math.isnan(reading.loss)
    assert (reading.skipped, reading.steps) == (3, 3)
    assert (meter.skipped, meter.skipped_in_a_row) == (3, 3)


def test_what_is_noted_is_told_once_more_whatever_is_read() -> None:
    meter = StepMeter()
    meter.add(output(1.0))
    assert not meter.noting
    meter.start_noting()
    for loss in (2.0, 3.0):
        meter.add(output(loss, 2 * loss))
        meter.read()
    meter.add(output(4.0, 8.0, skipped=True))
    assert meter.untaken == 3
    assert meter.take_noted() == [(2.0, 4.0, 0.0), (3.0, 6.0, 0.0), (4.0, 8.0, 1.0)]
    assert meter.take_noted() == []
    assert meter.untaken == 0
    assert meter.read().steps == 1
    meter.stop_noting()
    assert not meter.noting


@pytest.mark.parametrize("saved_after", [None, 2, 4, 5, 7])
@pytest.mark.parametrize("read_after", [None, 3, 6])
def test_a_lagging_meter_tells_each_row_one_look_late_whenever_it_is_read_or_saved(
    saved_after: int | None, read_after: int | None
) -> None:
    meter = StepMeter(lagging=True)
    meter.add(output(0.0))
    meter.start_noting()
    looks = []
    for number in range(1, 10):
        meter.add(output(float(number)))
        if number == read_after:
            meter.read()
        if number == saved_after:
            state = meter.state_dict()
            meter = StepMeter(lagging=True)
            meter.load_state_dict(state)
        if number % 2 == 0:
            looks.append([row[0] for row in meter.take_noted()])
    assert looks == [[], [1, 2], [3, 4], [5, 6]]
    assert meter.untaken == 3
    assert [row[0] for row in meter.take_noted(everything=True)] == [7, 8, 9]


def test_a_state_replaces_whatever_the_meter_had_collected() -> None:
    saved = StepMeter(lagging=True)
    saved.add(output(5.0))
    state = saved.state_dict()
    meter = StepMeter(lagging=True)
    meter.start_noting()
    meter.add(output(1.0))
    meter.take_noted()  # on its way to the host
    meter.add(output(2.0))
    meter.load_state_dict(state)
    assert not meter.noting
    assert (meter.read().loss, meter.read()) == (5.0, None)


def test_noting_anew_forgets_what_was_noted() -> None:
    meter = StepMeter(lagging=True)
    meter.start_noting()
    for number in range(4):
        meter.add(output(float(number)))
    meter.start_noting()
    meter.add(output(9.0))
    assert meter.take_noted() == []
    assert [row[0] for row in meter.take_noted()] == [9.0]


def test_steps_in_a_row_are_counted_over_readings() -> None:
    meter = StepMeter()
    counts = []
    for skipped in (True, True, False, True, True, True):
        meter.add(output(1.0, 1.0, skipped))
        meter.read()
        counts.append(meter.skipped_in_a_row)
    assert counts == [1, 2, 0, 1, 2, 3]
    assert meter.skipped == 5


def test_fetching_early_loses_nothing() -> None:
    meter = StepMeter()
    meter.add(output(1.0))
    meter.fetch()
    meter.fetch()
    meter.add(output(3.0))
    assert meter.read().loss == 2.0


def test_outputs_do_not_pile_up_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "_READ_AT_LEAST_EVERY", 4)
    meter = StepMeter()
    for number in range(10):
        meter.add(output(float(number)))
        assert len(meter._outputs) < 12
    assert meter.read().loss == 4.5


# --- the stopwatch, with a clock of its own ------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time is what the test says."""
    now = [100.0]
    monkeypatch.setattr(meters.time, "perf_counter", lambda: now[0])
    return now


def test_it_runs_only_between_start_and_stop(clock: list[float]) -> None:
    watch = Stopwatch()
    clock[0] += 5
    assert watch.seconds == 0
    watch.start()
    clock[0] += 2
    watch.start()
    clock[0] += 1
    assert watch.seconds == 3
    watch.stop()
    clock[0] += 9
    assert watch.seconds == 3
    watch.stop()
    watch.start()
    clock[0] += 1
    assert watch.seconds == 4


def test_it_stands_still_while_paused(clock: list[float]) -> None:
    watch = Stopwatch(seconds=10.0)
    watch.start()
    clock[0] += 1
    with watch.paused():
        clock[0] += 50
        with watch.paused():
            clock[0] += 50
    clock[0] += 1
    assert watch.seconds == 12


def test_a_pause_of_a_stopped_watch_does_not_start_it(clock: list[float]) -> None:
    watch = Stopwatch()
    with watch.paused():
        clock[0] += 5
    clock[0] += 5
    assert watch.seconds == 0


def test_it_goes_on_after_an_error_in_the_pause(clock: list[float]) -> None:
    watch = Stopwatch()
    watch.start()
    with pytest.raises(KeyError), watch.paused():
        raise KeyError
    clock[0] += 2
    assert watch.seconds == 2
