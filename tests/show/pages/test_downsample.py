"""Long curves keep their spikes, their ends and their gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretrain.show.pages.downsample import places_to_keep, rounded
from foretrain.show.pages.report_charts import POINTS, charts, marks, ribbon
from foretrain.show.record import Entry, RunRecord

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=400)


@given(VALUES, st.integers(5, 60))
def test_first_last_lowest_and_highest_survive(values: list[float | None], limit: int) -> None:
    kept = places_to_keep(values, limit)
    assert len(kept) <= limit
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    known = [value for value in values if value is not None]
    shown = [values[place] for place in kept if values[place] is not None]
    if known:
        assert min(shown) == min(known)
        assert max(shown) == max(known)
    assert (None in values) == any(values[place] is None for place in kept)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e90, max_value=1e90))
def test_numbers_are_short_and_near(value: float) -> None:
    near = rounded(value)
    assert near is not None
    assert abs(near - value) <= 1e-5 * abs(value) + 1e-90


def test_a_run_of_a_hundred_thousand_entries_is_small_and_keeps_its_spike() -> None:
    record = RunRecord("long")
    for step in range(1, 100_001):
        fields = {"loss": 1e9 if step == 61_803 else 2.0 + step % 7, "confidence": 0.5, "tokens_per_second": 100.0}
        record.progress.append(Entry("Progress", step, step / 10, fields))
        if step % 10 == 0:
            record.decisions.append(Entry("Moved", step, step / 10, {"verdict": "kept", "horizon": 5}))
            phase = "predict" if step % 20 else "full"
            record.decisions.append(Entry("PhaseChanged", step, step / 10, {"phase": phase, "reason": "so"}))
    (run,) = charts([record])["loss"]["runs"]
    (training,) = run["series"]
    assert len(training["values"]) <= POINTS
    assert max(training["values"]) == 1e9
    assert training["steps"][training["values"].index(1e9)] == 61_803
    assert len(ribbon(record)) < 1000
    *stretches, end = ribbon(record)
    assert {phase for _, _, phase, _ in stretches} == {"predict"}
    assert all(0.45 < share < 0.55 for _, _, _, share in stretches)
    assert end[:3] == [100_000, 10_000, "end"]
    assert len(marks(record)) < 1000
    assert sum(mark[4] for mark in marks(record)) == 10_000


def test_the_page_of_a_long_run_stays_under_three_megabytes() -> None:
    from foretrain.show.pages.report_page import page

    record = RunRecord("long", started={"max_steps": 100_000})
    for step in range(10, 100_001, 10):
        fields = {
            "loss": 2.0 + (step * 0.618) % 1,
            "predicted_loss": 2.1 + (step * 0.314) % 1,
            "smoothed_loss": 2.03,
            "gradient_norm": (step * 0.271) % 1,
            "learning_rate": 1e-3,
            "confidence": (step * 0.577) % 1,
            "tokens_per_second": 1e5 + step % 977,
            "phase": "full",
        }
        record.progress.append(Entry("Progress", step, step / 7, fields))
        reason = "20 full steps are done and confidence 0.80 is above 0.50; an audit is due and affordable"
        record.decisions.append(Entry("PhaseChanged", step, step / 7, {"phase": "full", "reason": reason}))
        norms = {f"blocks.{block}.attention.qkv": {"gradient_norm": (step * block * 0.1) % 1} for block in range(40)}
        record.health.append(Entry("HealthMeasured", step, step / 7, {"layers": norms}))
    assert len(page([record])) < 3_000_000
