"""The mutation check: its list is in order, and it tells what a test notices from what none does."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import load_script

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def mutants() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield load_script(BENCHMARKS / "mutants.py")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_every_mutant_of_the_list_can_be_made(mutants: Any) -> None:
    """Its text is in the file once, what comes in its place is Python, and its tests are there."""
    project, listed = mutants.Project(BENCHMARKS.parent), mutants.listed()
    stale = {f"{mutant.file}: {mutant.promise}": reason for mutant in listed if (reason := project.stale(mutant))}
    assert stale == {}
    assert len(listed) == len({project.key(mutant) for mutant in listed}) > 150
    known = [mutant for mutant in listed if mutant.harmless]
    assert len(known) < (1 - mutants.ENOUGH) * len(listed)


@pytest.fixture
def tiny(mutants: Any, tmp_path: Path) -> Any:
    """A package of two functions, of which the tests know one."""
    (tmp_path / "src" / "tiny").mkdir(parents=True)
    (tmp_path / "src" / "tiny" / "__init__.py").write_text(
        "def add(a, b):\n    return a + b\n\n\ndef half(a):\n    while a < 0:\n        a += 1\n    return a / 2\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_tiny.py").write_text(
        "import tiny\n\n\ndef test_add():\n    assert tiny.add(1, 2) == 3\n\n\ndef test_half():\n    tiny.half(-2)\n"
    )
    (tmp_path / "tests" / "test_broken.py").write_text("\ndef test_never():\n    assert False\n")
    return mutants.Project(tmp_path, "src/tiny", ("pytest",))


def mutant(mutants: Any, before: str, after: str, tests: str = "test_tiny.py") -> Any:
    return mutants.Mutant("arithmetic", "__init__.py", before, after, f"{before} stays", (tests,))


def test_killed_survived_void_and_stale_are_told_apart(mutants: Any, tiny: Any, tmp_path: Path) -> None:
    listed = [
        mutant(mutants, "a + b", "a - b"),
        mutant(mutants, "a / 2", "a / 3"),
        mutant(mutants, "def add", "import nothing_of_that_name\n\n\ndef add"),
        mutant(mutants, "a < 0", "a < 1", "test_broken.py"),
        mutant(mutants, "a * b", "a"),
        mutant(mutants, "a += 1", "a +="),
        mutant(mutants, "a += 1", "a += 2", "test_tiny.py::test_of_that_name"),
        mutant(mutants, "a + b", "b - a", "test_tiny.py::test_half"),
    ]
    before = (tmp_path / "src" / "tiny" / "__init__.py").read_bytes()
    out, told = tmp_path / "results.json", list[str]()
    rows = mutants.check(tiny, listed, mutants.Results(out, {}), timeout=300.0, tell=told.append)
    verdicts = ["killed", "survived", "killed", "void", "stale", "stale", "stale", "survived"]
    assert [row["verdict"] for row in rows] == verdicts
    assert rows[0]["by"] == "tests/test_tiny.py::test_add"
    assert [row["by"] for row in rows if row["verdict"] == "stale"] == [
        "its text is found 0 times",
        "it makes no Python: invalid syntax",
        "there is no test test_tiny.py::test_of_that_name",
    ]
    assert mutants.share_killed(rows) == 0.5
    assert (tmp_path / "src" / "tiny" / "__init__.py").read_bytes() == before
    assert {row["key"]: row for row in json.loads(out.read_text())["rows"]} == {row["key"]: row for row in rows}
    assert "| arithmetic | 8 | 2 | 0 | 2 | 1 | 3 |" in mutants.table(rows)
    assert "survived: __init__.py: a / 2 stays [a / 2 -> a / 3]" in mutants.table(rows)
    # what is known is not tried again, unless its tests have changed since
    told.clear()
    assert mutants.check(tiny, listed[:2], mutants.Results(out, {}), tell=told.append) == rows[:2]
    assert told == []
    test = tmp_path / "tests" / "test_tiny.py"
    test.write_text(
        test.read_text().replace("    tiny.half(-2)", "    assert tiny.half(-2) == 0 and tiny.half(6) == 3")
    )
    again = mutants.check(tiny, listed[:2], mutants.Results(out, {}), timeout=300.0)
    assert [row["verdict"] for row in again] == ["killed", "killed"]


def test_a_hang_is_killed(mutants: Any, tiny: Any) -> None:
    listed = [mutant(mutants, "a += 1", "__import__('time').sleep(3600)")]
    rows = mutants.check(tiny, listed, mutants.Results(None, {}), timeout=0.5, baseline=False)
    assert [row["verdict"] for row in rows] == ["timeout"]
    assert mutants.share_killed(rows) == 1.0


def test_drawn_changes_are_python_and_the_same_for_a_seed(mutants: Any) -> None:
    drawing = load_script(BENCHMARKS / "mutants_random.py")
    project = mutants.Project(BENCHMARKS.parent)
    found = drawing.drawn(project, 12, 5)
    assert found == drawing.drawn(project, 12, 5)
    assert len({(file, words) for _, file, _, _, words, _ in found}) == 12
    for _, file, before, after, _, tests in found:
        assert project.path(file).read_text() == before
        assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))
        assert project.has(tests)
    assert all(project.has(drawing.tests_of(name)) for name in drawing.MODULES)


def test_what_can_be_drawn() -> None:
    drawing = load_script(BENCHMARKS / "mutants_random.py")

    def changes(text: str) -> list[str]:
        return [
            ast.unparse(ast.fix_missing_locations(drawing.changed(node))) for node in drawing.sites(ast.parse(text))
        ]

    assert changes("x = a < b and not c") == ["a < b or not c", "a <= b", "c"]
    assert changes("x: int = y + 1") == ["y - 1", "2"]
    assert changes("def f(a: int = 3) -> int:\n    'words'\n    raise E(f'{a + 1}')") == ["4"]
    assert changes("if a is None:\n    f(a)") == ["if not a is None:\n    f(a)", "a is not None", "pass"]
    assert changes("x += 0.5") == ["pass", "1.1"]
