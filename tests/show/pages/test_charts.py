"""Charts: round ticks, places inside the frame, spikes kept, names and units on every axis, any text safe."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretrain.show.pages.charts import Arrow, Axis, Series, plot, standalone
from foretrain.show.pages.row_charts import Ratio, Strip, interval_cell, ratio_range, ratios, strips, verdict_of
from foretrain.show.pages.scales import (
    Scale,
    finite,
    fitted,
    frame,
    linear_ticks,
    log_ticks,
    rate,
    spans_widely,
    thinned,
    tick_labels,
)
from foretrain.show.pages.theme import CHART_STYLE, DARK, LIGHT, LOOKS

TIME, LOSS = Axis("time (seconds)"), Axis("loss (nats per token)")
HOSTILE = "\"><script>alert('1')</script>&<b>"

# What the three kinds of colour blindness leave of linear red, green and blue (Machado, Oliveira, Fernandes 2009).
VISIONS = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def parsed(chart: str) -> ET.Element:
    return ET.fromstring(chart)  # noqa: S314


def texts(chart: str) -> list[str]:
    return [element.text or "" for element in parsed(chart).iter() if element.tag.endswith("text")]


def is_round(value: float) -> bool:
    digits = f"{abs(value):.12e}".split("e")[0].replace(".", "").rstrip("0")
    return value == 0 or len(digits) <= 5


# --- scales -----------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_linear_ticks_are_round_even_and_inside(low: float, span: float, count: int) -> None:
    high = low + span
    ticks = linear_ticks(low, high, count)
    slack = 1e-6 * span + 1e-9
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= count + 1
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    steps = {f"{second - first:.3g}" for first, second in itertools.pairwise(ticks)}
    assert len(steps) <= 1
    assert all(step.replace(".", "").replace("e", " ").split()[0].strip("0+-") in ("1", "2", "5") for step in steps)


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e12), st.integers(2, 12))
@example(0.006, 2693099.384141698, 2)
@example(5.035510568949213, 1.0882505966664615, 2)
def test_logarithmic_ticks_are_round_and_inside(low: float, factor: float, count: int) -> None:
    high = low * factor
    ticks = log_ticks(low, high, count)
    assert ticks == sorted(set(ticks))
    assert ticks
    assert all(low * (1 - 1e-6) <= tick <= high * (1 + 1e-6) and is_round(tick) for tick in ticks)
    assert len(ticks) <= 3 * count + 4


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(5e-4, 2e-3, [5e-4, 1e-3, 2e-3]), (22, 46, [25, 30, 35, 40, 45]), (1, 1e6, [1, 10, 100, 1e3, 1e4, 1e5, 1e6])],
)
def test_logarithmic_ticks_suit_the_range(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high, 7) == expected


@given(st.lists(st.floats(-1e9, 1e9), max_size=5), st.booleans())
def test_a_range_holds_its_values_and_is_never_empty(values: list[float], log: bool) -> None:
    low, high = fitted(values, log)
    assert low < high
    assert all(low <= value <= high for value in values if value > 1e-100 or not log)
    assert not log or low > 0


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ([1.84, 1.86, 1.9], ["1.84", "1.86", "1.9"]),
        ([1.8, 1.85, 1.9], ["1.80", "1.85", "1.90"]),
        ([5e-4, 1e-3, 2e-3], ["5e-4", "1e-3", "2e-3"]),
        ([0, 1000, 2000], ["0", "1,000", "2,000"]),
        ([0, 1e6, 2e6], ["0", "1e6", "2e6"]),
        ([], []),
    ],
)
def test_labels_of_an_axis_have_one_notation(ticks: list[float], expected: list[str]) -> None:
    assert tick_labels(ticks) == expected


def test_rates_are_written_as_people_write_them() -> None:
    assert [rate(value) for value in (3e-4, 2.5e-3, 0.02, 0.0, 1.0)] == ["3e-4", "2.5e-3", "0.02", "0", "1"]


def test_a_scale_maps_its_ends_to_the_pixels() -> None:
    assert Scale(1, 100, 0, 200, log=True)(10) == pytest.approx(100)
    assert Scale(0, 10, 100, 0)(10) == pytest.approx(0)
    assert Scale(0, 10, 100, 0).clipped(99) == pytest.approx(0)


def test_what_cannot_be_drawn_is_no_number() -> None:
    assert [finite(value) for value in (None, math.nan, math.inf, "3", True, 10**400)] == [None] * 6
    assert finite(3) == 3.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(4, 500))
@settings(max_examples=50)
def test_thinning_keeps_ends_and_extremes_in_order(values: list[float], limit: int) -> None:
    points = [(float(place), value) for place, value in enumerate(values)]
    kept = thinned(points, limit)
    assert len(kept) <= max(limit, 4)
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {min(values), max(values)} <= {value for _, value in kept}


# --- plots ------------------------------------------------------------------------------------------------------------


def test_a_plot_names_its_axes_and_series_and_itself() -> None:
    chart = plot([Series("plain", [(0, 3), (10, 2)]), Series("hybrid", [(0, 3), (9, 2)], 1)], TIME, LOSS, label="a < b")
    assert {"time (seconds)", "loss (nats per token)", "plain", "hybrid", "10"} <= set(texts(chart))
    root = parsed(chart)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "a < b"
    assert root.get("viewBox") == "0 0 760 380"


def test_series_of_one_name_share_an_entry_of_the_legend() -> None:
    chart = plot([Series("plain", [(0, 3), (1, seed)], tip=f"seed {seed}") for seed in (1, 2)], TIME, LOSS, label="")
    assert texts(chart).count("plain") == 1
    assert "<title>seed 1</title>" in chart


def test_looks_differ_without_colour() -> None:
    charts = [plot([Series("x", [(1, 1)], look, line=False)], TIME, LOSS, label="") for look in range(LOOKS)]
    assert len({re.sub(r'class="s\d"', "", chart) for chart in charts}) == LOOKS


def test_a_long_line_is_thinned_and_keeps_its_spike() -> None:
    points = [(float(x), 100.0 if x == 54321 else 1.0) for x in range(100000)]
    chart = plot([Series("x", points)], TIME, LOSS, label="", height=300)
    path = max(re.findall(r' d="(M[^"]*)"', chart), key=len)
    heights = [float(pair.split()[1]) for pair in path[1:].split("L")]
    assert len(heights) <= 400
    assert min(heights) < 100 < 200 < max(heights)


def test_points_that_are_no_numbers_are_left_out() -> None:
    points = [(0, 1.0), (None, 2.0), (2, math.nan), (3, math.inf), (4, 2.0)]
    chart = plot([Series("x", points, tips=list("abcde"))], TIME, LOSS, label="")
    assert "nan" not in chart
    assert re.findall("<title>([a-e])</title>", chart) == ["a", "e"]


def test_values_not_above_zero_are_left_out_of_a_logarithmic_axis() -> None:
    chart = plot([Series("x", [(0, 1), (1, -1), (10, 2)])], Axis("x (s)", log=True), Axis("y (1)", log=True), label="")
    assert chart.count("<title>") == 1


@pytest.mark.parametrize("log", [False, True])
def test_a_plot_without_points_says_so(log: bool) -> None:
    assert "nothing to show yet" in texts(plot([Series("x", [])], Axis("x (s)", log), Axis("y (1)", log), label=""))


def test_one_point_with_a_whisker_an_arrow_and_a_label() -> None:
    series = Series("x", [(1, 2)], errors=[(1.5, 2.5)], labels=["here"])
    chart = plot(
        [series], TIME, LOSS, label="", arrows=[Arrow((0.96, 2), (1.04, 2), "2×", "twice"), Arrow((1, 2), (1, 2), "")]
    )
    assert {"here", "2×"} <= set(texts(chart))
    assert chart.count('class="whisker"') == 2


def test_lines_go_on_beyond_a_bound_but_marks_do_not() -> None:
    chart = plot(
        [Series("x", [(0, 1), (5, 2), (10, 3)], tips=list("abc"))], Axis("x (s)", low=4.0, high=6.0), LOSS, label=""
    )
    assert re.findall("<title>([abc])</title>", chart) == ["b"]
    assert len(re.findall(r'class="curve" d="M[^L"]*L[^L"]*L', chart)) == 1


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=6), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_any_numbers_make_a_picture(points: list[tuple[float, float]], across: bool, up: bool) -> None:
    chart = plot([Series("x", points)], Axis("x (s)", across), Axis("y (1)", up), label="")
    parsed(chart)
    assert not re.search(r"\b(nan|inf)\b", chart)


def test_text_is_escaped_everywhere() -> None:
    series = Series(HOSTILE, [(1, 2), (2, 3)], tip=HOSTILE, tips=[HOSTILE] * 2, labels=[HOSTILE] * 2)
    arrow = Arrow((1, 2), (2, 2), HOSTILE, HOSTILE)
    charts = [
        plot([series], Axis(HOSTILE), Axis(HOSTILE), label=HOSTILE, arrows=[arrow]),
        ratios([Ratio(HOSTILE, 2, text=HOSTILE)], HOSTILE, label=HOSTILE, bars=True),
        strips([Strip(HOSTILE, [(0, 1, "full")], [(0.5, "kept", HOSTILE)])], Axis(HOSTILE), label=HOSTILE),
        interval_cell(Ratio(HOSTILE, 1, 0.5, 2), (0.5, 2)),
    ]
    for chart in charts:
        assert "<script" not in chart
        assert "<b>" not in chart
        parsed(chart)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_an_interval_that_leaves_the_range_is_drawn_as_going_on() -> None:
    inside, outside = Ratio("x", 1.0, 0.9, 1.1), Ratio("x", 1.0, 0.0, math.inf)
    bounds = ratio_range([inside, outside])
    assert 0.5 < bounds[0] < 0.9 < 1.1 < bounds[1] < 2
    assert "l-5 4l5 4" in interval_cell(outside, bounds)
    assert "l-5 4l5 4" not in interval_cell(inside, bounds)


@pytest.mark.parametrize("width", [760, 380])
def test_rows_of_ratios_have_names_values_and_a_unit(width: int) -> None:
    rows = [Ratio("bf16", 1.6, text="1.60×"), Ratio("leaps", 0.9, text="0.90×"), Ratio("unknown", None, text="–")]
    chart = ratios(rows, "speed-up (factor)", label="ladder", width=width, bars=True)
    assert {"bf16", "1.60×", "leaps", "speed-up (factor)", "–"} <= set(texts(chart))
    assert chart.count('class="bar"') == 2


@pytest.mark.parametrize("width", [760, 380])
def test_strips_show_phases_and_moves(width: int) -> None:
    bands = [(0, 1, "warmup"), (1, 5, "full"), (5, 5.001, "predict"), (5.001, 6, "correct"), (6, 9, "full")]
    marks = [(5.0, "kept", "step 5: kept"), (6.0, "undone", "step 6: rolled back"), (7.0, "refused", "step 7: refused")]
    chart = strips(
        [Strip("hybrid, seed 1", bands, marks)], Axis("time (seconds)", low=0.0), label="phases", width=width
    )
    assert {"hybrid, seed 1", "time (seconds)", "predict", "move rolled back"} <= set(texts(chart))
    assert "hybrid, seed 1, full: 7 s, 2 times" in chart
    assert all(f"<title>{tip}</title>" in chart for _, _, tip in marks)


def test_strips_of_very_many_phases_and_moves_stay_small() -> None:
    bands = [(place / 10, (place + 1) / 10, ("full", "predict")[place % 2]) for place in range(50000)]
    marks = [(place / 10, "kept", "kept") for place in range(50000)]
    assert len(strips([Strip("x", bands, marks)], Axis("time (s)"), label="")) < 250_000


def test_verdicts_in_the_words_of_the_log() -> None:
    words = ["kept", "shrunk", "refused", "rejected", "rolled back", "audited: rolled back"]
    assert [verdict_of(word) for word in words] == ["kept", "kept", "refused", "refused", "undone", "undone"]


# --- files of their own, colours --------------------------------------------------------------------------------------


def test_a_chart_of_its_own_is_valid_and_holds_its_colours() -> None:
    file = standalone(plot([Series("plain", [(0, 3), (10, 2)])], TIME, LOSS, label="loss"))
    assert parsed(file).tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in file
    assert "prefers-color-scheme: dark" in file
    assert LIGHT["series-0"] in file
    assert DARK["series-0"] in file
    assert file.count("http") == 1


def test_every_colour_of_the_style_exists_in_both_themes() -> None:
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", CHART_STYLE))
    assert used <= LIGHT.keys() == DARK.keys()


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
    seen = [perceived(theme[f"series-{look}"], vision) for look in range(LOOKS)]
    assert min(math.dist(a, b) for place, a in enumerate(seen) for b in seen[:place]) > 12


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_ground(theme: dict[str, str]) -> None:
    def contrast(name: str) -> float:
        lights = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(theme[name]), linear(theme["surface"]))]
        return (max(lights) + 0.05) / (min(lights) + 0.05)

    assert all(contrast(name) >= 4.5 for name in ("ink", "muted", "good", "bad", "caution"))
    assert all(contrast(f"series-{look}") >= 2.9 for look in range(LOOKS))


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
