"""Reading results: four formats, and clear words about what cannot be read."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain_bench.formats import FORMAT, date_of, read

CRITERION = """\
Benchmarking fib 20: Collecting 100 samples in estimated 5.0002 s (192k iterations)
fib 20                  time:   [26.029 µs 26.251 µs 26.505 µs]
                        change: [-1.2% +0.1% +1.3%] (p = 0.85 > 0.05)
                        No change in performance detected.
Found 11 outliers among 99 measurements (11.11%)
group/a very long name that does not fit
                        time:   [1.0000 ms 1.5000 ms 2.0000 ms]
                        thrpt:  [500.00 Kelem/s 666.67 Kelem/s 1.0000 Melem/s]
                 change:
                        time:   [-1.0% +0.5% +2.0%] (p = 0.40 > 0.05)
\x1b[32mfib 20\x1b[0m                  time:   [\x1b[2m27.0 us\x1b[0m \x1b[1m28.0 us\x1b[0m 29.0 us]
slow                    time:   [1.1 s 1.2 s 1.3 s]
"""


def write(folder: Path, content: Any, name: str = "results.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def own(**changes: Any) -> dict[str, Any]:
    process = {"samples": [1e-3, 2e-3, 3e-3], "loops": 1}
    content = {"format": FORMAT, "date": "2026-11-15T10:00:00+00:00", "commit": "abc", "together": "t1"}
    return content | {"benchmarks": {"step": {"processes": [process, process]}}} | changes


def pytest_benchmark(**statistics: Any) -> dict[str, Any]:
    benchmark = {"name": "test_a", "fullname": "tests/test_x.py::test_a", "stats": {"median": 0.5, **statistics}}
    return {"datetime": "2026-11-14T08:00:00.123+00:00", "commit_info": {"id": "f00"}, "benchmarks": [benchmark]}


class TestFormats:
    def test_own(self, tmp_path: Path) -> None:
        results = read(write(tmp_path, own()))
        assert results.benchmarks == {"step": [[1e-3, 2e-3, 3e-3]] * 2}
        assert (results.seconds, results.commit, results.together) == (True, "abc", "t1")
        assert results.date == datetime(2026, 11, 15, 10, tzinfo=UTC)

    def test_plain(self, tmp_path: Path) -> None:
        results = read(write(tmp_path, {"a": [1, 2.5], "b": [[1.0, 2.0], [3.0]]}))
        assert results.benchmarks == {"a": [[1.0], [2.5]], "b": [[1.0, 2.0], [3.0]]}
        assert not results.seconds

    def test_plain_may_have_a_benchmark_called_benchmarks(self, tmp_path: Path) -> None:
        assert read(write(tmp_path, {"format": [1.0, 2.0]})).benchmarks == {"format": [[1.0], [2.0]]}

    def test_pytest_benchmark(self, tmp_path: Path) -> None:
        results = read(write(tmp_path, pytest_benchmark()))
        assert results.benchmarks == {"tests/test_x.py::test_a": [[0.5]]}
        assert results.commit == "f00"
        assert results.date is not None
        assert results.date.day == 14

    def test_pytest_benchmark_with_data(self, tmp_path: Path) -> None:
        results = read(write(tmp_path, pytest_benchmark(data=[0.4, 0.5, 0.6])))
        assert results.benchmarks == {"tests/test_x.py::test_a": [[0.4, 0.5, 0.6]]}

    def test_thousands_of_samples_become_their_median(self, tmp_path: Path) -> None:
        samples = [1.0 + number for number in range(2000)]
        assert read(write(tmp_path, {"a": [samples]})).benchmarks == {"a": [[1000.5]]}

    def test_criterion(self, tmp_path: Path) -> None:
        results = read(write(tmp_path, CRITERION, "bench.txt"))
        assert set(results.benchmarks) == {"fib 20", "group/a very long name that does not fit", "slow"}
        assert [value for [value] in results.benchmarks["fib 20"]] == pytest.approx([26.251e-6, 28e-6])
        assert results.benchmarks["group/a very long name that does not fit"] == [[pytest.approx(1.5e-3)]]
        assert results.benchmarks["slow"] == [[1.2]]

    def test_folder_is_taken_together(self, tmp_path: Path) -> None:
        for number in range(5):
            write(tmp_path, pytest_benchmark(median=0.5 + number), f"run-{number}.json")
        write(tmp_path, "not looked at", ".hidden")
        assert read(tmp_path).benchmarks["tests/test_x.py::test_a"] == [[0.5], [1.5], [2.5], [3.5], [4.5]]

    @given(
        st.dictionaries(
            st.text(min_size=1, max_size=8).filter(lambda name: name not in ("format", "benchmarks")),
            st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=6),
            min_size=1,
            max_size=4,
        )
    )
    def test_plain_comes_back_as_written(self, tmp_path: Path, content: dict[str, list[float]]) -> None:
        results = read(write(tmp_path, content))
        assert results.benchmarks == {name: [[value] for value in values] for name, values in content.items()}


class TestBadFiles:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("", "no benchmark in it"),
            ("some text\nwithout times\n", "no benchmark in it"),
            ("{", "not valid JSON"),
            ("[" * 100_000, "not valid JSON"),
            ("[1, 2]", "a JSON object is needed"),
            ("{}", "no benchmark in it"),
            ({"a": []}, "no numbers"),
            ({"a": [[]]}, "without samples"),
            ({"a": 3}, "no list of numbers"),
            ({"a": [1.0, "fast"]}, "'fast'"),
            ({"a": [1.0, None]}, "None"),
            ({"a": [1.0, True]}, "True"),
            ({"a": [1.0, 0.0]}, "above zero"),
            ({"a": [1.0, -2]}, "above zero"),
            ('{"a": [1.0, NaN]}', "finite"),
            ('{"a": [1.0, Infinity]}', "finite"),
            ({"a": [1.0, {"b": 1}]}, "above zero"),
            (own(format="foretrain bench 99"), "another version"),
            (own(benchmarks={"a": {}}), "damaged"),
            (own(benchmarks={"a": {"processes": 3}}), "damaged"),
            ({"benchmarks": [{"name": "x"}]}, "stats"),
            ({"benchmarks": [3]}, "no pytest-benchmark file"),
            ({"benchmarks": []}, "no benchmark in it"),
        ],
    )
    def test_said_clearly(self, tmp_path: Path, content: Any, words: str) -> None:
        path = write(tmp_path, content)
        with pytest.raises(InputError) as caught:
            read(path)
        assert words in str(caught.value)
        assert path.name in str(caught.value)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such file"):
            read(tmp_path / "nothing.json")

    def test_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "image.png"
        path.write_bytes(b"\x89PNG\xff\xfe")
        with pytest.raises(InputError, match="not text"):
            read(path)

    def test_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no result file"):
            read(tmp_path)

    def test_folder_of_two_units(self, tmp_path: Path) -> None:
        write(tmp_path, own(), "a.json")
        write(tmp_path, {"a": [1.0]}, "b.json")
        with pytest.raises(InputError, match="keep one kind"):
            read(tmp_path)


class TestDate:
    def test_of_the_file_name(self, tmp_path: Path) -> None:
        results = read(write(tmp_path, {"a": [1.0]}, "bench-2025-03-04.json"))
        assert date_of(results) == datetime(2025, 3, 4, tzinfo=UTC)

    def test_else_when_it_was_written(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a": [1.0]})
        os.utime(path, (1000.0, 1000.0))
        assert date_of(read(path)) == datetime.fromtimestamp(1000, UTC)

    def test_a_date_without_zone_can_be_sorted(self, tmp_path: Path) -> None:
        assert date_of(read(write(tmp_path, own(date="2026-01-01T00:00:00")))).tzinfo is not None
        assert date_of(read(write(tmp_path, own(date="soon")))).tzinfo is not None
