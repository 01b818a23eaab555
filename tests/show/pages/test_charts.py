"""What charts are drawn from: short curves that keep what one looks for, and colours that everybody can tell apart."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.show.pages.charts import LOOKS, MARKS, PHASES, frame, key, places_to_keep, points, spans_widely
from foretrain.show.pages.render import asset, style
from foretrain.show.pages.report_charts import POINTS, charts, marks, ribbon
from foretrain.show.record import Entry, RunRecord

# What the three kinds of colour blindness leave of linear red, green and blue (Machado, Oliveira, Fernandes 2009).
VISIONS = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def theme(name: str) -> dict[str, str]:
    """The colours of the style sheet."""
    found = re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", style())
    return {colour: pair[name == "dark"] for colour, *pair in found}


LIGHT, DARK = theme("light"), theme("dark")


# --- long curves made short -------------------------------------------------------------------------------------------

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


def test_points_are_in_the_order_of_their_axis() -> None:
    made = points("a curve", "plain", [(3.0, 1.0), (1.0, None), (2.0, 0.1234567)], tips=["x"])
    assert made == {"label": "a curve", "style": "plain", "x": [1, 2, 3], "values": [None, 0.123457, 1], "tips": ["x"]}


# --- looks and colours ------------------------------------------------------------------------------------------------


def test_looks_differ_without_colour() -> None:
    assert len({look["shape"] for look in LOOKS}) == len({look["dash"] for look in LOOKS}) == len(LOOKS) == 8


def test_every_colour_that_is_used_exists() -> None:
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", style()))
    scripts = "".join(asset(f"{name}.js") for name in ("charts", "heat", "report"))
    used |= set(re.findall(r"style\('([a-z0-9-]+)'\)", scripts))
    used |= {f"phase-{phase}" for phase in PHASES} | {f"series-{look}" for look in range(len(LOOKS))}
    assert len(used) > 15
    assert used <= LIGHT.keys() == DARK.keys()


def test_every_sign_has_its_words_and_its_look() -> None:
    made = {text for part in key(PHASES, MARKS) for _, text in part["items"]}
    assert made == {*PHASES.values(), *MARKS.values()}
    for sign in MARKS:
        assert f"'{sign}': '" in asset("charts.js")
    for sign, _ in (item for part in key(PHASES, ["kept", "rolled back"]) for item in part["items"]):
        assert f"i.{sign.replace(' ', '.')}" in style() or sign == "phase full"


def linear(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def perceived(colour: str, vision: str) -> list[float]:
    """The colour in CIELAB as an eye of that kind sees it."""
    seen = [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in VISIONS[vision]]
    red, green, blue = (min(max(part, 0.0), 1.0) for part in seen)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_series_can_be_told_apart_by_any_eye(theme: dict[str, str], vision: str) -> None:
    seen = [perceived(theme[f"series-{look}"], vision) for look in range(len(LOOKS))]
    assert min(math.dist(a, b) for place, a in enumerate(seen) for b in seen[:place]) > 12


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_ground(theme: dict[str, str]) -> None:
    def contrast(name: str) -> float:
        lights = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(theme[name]), linear(theme["surface"]))]
        return (max(lights) + 0.05) / (min(lights) + 0.05)

    assert all(contrast(name) >= 4.5 for name in ("ink", "muted", "good", "bad", "caution"))
    assert all(contrast(f"series-{look}") >= 2.9 for look in range(len(LOOKS)))


# --- which part of the values is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curves", "wide"),
    [
        ([[40.0, 1.0, 1e-3, 2.5e-8]], True),
        ([[40.0, 1.0, 0.0]], False),
        ([[60.0, 1.0, 0.0]], True),
        ([[60.0, 1.0, -0.5]], False),
        ([[2.5] * 50 + [1e6] + [2.4] * 50], False),
        ([[2.5, 2.4], [60.0, 0.9]], True),
        ([[0.0, 0.0]], False),
        ([[], [3.0]], False),
        ([], False),
    ],
)
def test_a_logarithmic_axis_is_for_values_that_span_a_factor_of_50(curves: list[list[float]], wide: bool) -> None:
    assert spans_widely(curves) is wide


def test_a_frame_goes_by_what_came() -> None:
    assert frame([]) == {}
    assert frame([[]]) == {}
    assert frame([[1.0, 2.0]])["linear"] == pytest.approx((0.6, 2.4))
    assert frame([[1.0, 16.0]])["log"] == pytest.approx((0.5, 32.0))
    assert set(frame([[-1.0, 0.0]])) == {"linear"}
    low, high = frame([[2.0, 2.0]])["linear"]
    assert low < 2.0 < high


@pytest.mark.parametrize(
    ("verdict", "mark"), [("made", "kept"), ("kept", "kept"), ("undone", "rolled back"), ("refused", "refused")]
)
def test_growth_has_the_mark_of_a_move(verdict: str, mark: str) -> None:
    record = RunRecord("run")
    record.decisions.append(Entry("Grown", 150, 3.0, {"verdict": verdict, "layers": 6, "of": 12}))
    assert [(kind, words) for _, _, kind, words, _ in marks(record)] == [(mark, f"growth to 6 of 12 blocks: {verdict}")]
    assert mark in MARKS
