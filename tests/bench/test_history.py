"""Steps in a series of results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain_bench.history import find_steps, read_all, series, sparkline, without_spikes


def noisy(levels: list[float], noise: float = 0.005, seed: int = 0) -> list[float]:
    return (np.asarray(levels) + noise * np.random.default_rng(seed).normal(size=len(levels))).tolist()


class TestFindSteps:
    def test_one(self) -> None:
        [(place, size, probability)] = find_steps(noisy([0.0] * 6 + [0.2] * 6))
        assert place == 6
        assert size == pytest.approx(0.2, abs=0.02)
        assert probability < 0.001

    def test_several(self) -> None:
        steps = find_steps(noisy([0.0] * 6 + [0.3] * 5 + [0.1] * 7))
        assert [place for place, _, _ in steps] == [6, 11]
        assert [size for _, size, _ in steps] == pytest.approx([0.3, -0.2], abs=0.02)

    def test_two_files_on_either_side_are_enough(self) -> None:
        assert [place for place, _, _ in find_steps([0.0, 0.001, 0.3, 0.301])] == [2]

    @pytest.mark.parametrize("place", [0, 4, 9])
    def test_one_slow_day_is_no_step(self, place: int) -> None:
        values = noisy([0.0] * 10)
        values[place] += 1.0
        assert find_steps(values) == []

    def test_a_slow_day_does_not_hide_a_step(self) -> None:
        values = noisy([0.0] * 6 + [0.2] * 6)
        values[2] += 1.0
        values[9] += 2.0
        assert [place for place, _, _ in find_steps(values)] == [6]

    def test_less_than_delta_is_of_no_interest(self) -> None:
        assert find_steps([0.0] * 10 + [0.01] * 10) == []

    def test_constant(self) -> None:
        assert find_steps([0.5] * 8) == []

    def test_seldom_where_there_is_none(self) -> None:
        found = sum(bool(find_steps(noisy([0.0] * 12, 0.05, seed))) for seed in range(200))
        assert found <= 20

    @given(st.lists(st.floats(-3, 3), max_size=15))
    def test_places_are_inside_and_in_order(self, values: list[float]) -> None:
        places = [place for place, _, _ in find_steps(values)]
        assert places == sorted(set(places))
        assert all(2 <= place <= len(values) - 2 for place in places)


def test_spikes_go_and_steps_stay() -> None:
    step = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert without_spikes(step) == step
    assert without_spikes([0.0, 0.0, 5.0, 0.0, 0.0]) == [0.0] * 5


class TestSparkline:
    def test_low_to_high(self) -> None:
        assert sparkline([1.0, 2.0, 4.0, 8.0])[0] == "▁"
        assert sparkline([1.0, 2.0, 4.0, 8.0])[-1] == "█"

    def test_noise_is_not_blown_up(self) -> None:
        assert set(sparkline([1.0, 1.001, 1.0, 1.001])) <= {"▄", "▅"}

    @given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
    def test_a_bar_per_value(self, values: list[float]) -> None:
        assert len(sparkline(values)) == len(values)


class TestFiles:
    def test_sorted_by_date_and_named(self, tmp_path: Path) -> None:
        for day, median in ((3, 2.0), (1, 1.0), (4, 2.02), (2, 1.01)):
            (tmp_path / f"2026-01-0{day}.json").write_text(json.dumps({"a": [median] * 5}), encoding="utf-8")
        found = series(read_all([tmp_path]))["a"]
        assert found.files == tuple(f"2026-01-0{day}.json" for day in (1, 2, 3, 4))
        assert found.medians == (1.0, 1.01, 2.0, 2.02)
        [step] = found.steps
        assert (step.before, step.after) == ("2026-01-02.json", "2026-01-03.json")
        assert step.ratio == pytest.approx(2.0, rel=0.02)

    def test_a_benchmark_may_begin_later(self, tmp_path: Path) -> None:
        for day in range(1, 5):
            content = {"a": [1.0]} | ({"b": [2.0]} if day > 2 else {})
            (tmp_path / f"2026-01-0{day}.json").write_text(json.dumps(content), encoding="utf-8")
        found = series(read_all([tmp_path]))
        assert len(found["a"].files) == 4
        assert found["b"].files == ("2026-01-03.json", "2026-01-04.json")

    def test_one_file_is_no_history(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('{"a": [1.0]}', encoding="utf-8")
        with pytest.raises(InputError, match="at least two"):
            read_all([tmp_path])
        with pytest.raises(InputError, match="at least two"):
            read_all([])

    def test_units_are_not_mixed(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('{"x": [1.0]}', encoding="utf-8")
        (tmp_path / "b.txt").write_text("x   time:   [1.0 ms 1.5 ms 2.0 ms]\n", encoding="utf-8")
        with pytest.raises(InputError, match="without a unit"):
            series(read_all([tmp_path]))
