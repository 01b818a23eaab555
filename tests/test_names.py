"""Names and words are used in one way: class names are unique, nobody is handed the trainer, docstrings are sentences.

What others still have to change is listed here by name; the lists only become shorter.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = {
    path.relative_to(ROOT / "src").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "src").rglob("*.py"))
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST = 160

ABOVE_THE_LOOP = ("cli", "integrations", "measure", "recipes", "planning", "trainer.py", "loop", "__main__.py")
FRAGMENTS = ("Of ", "Nor ", "And ", "The same")

DEFINED_TWICE = {"HybridCallback"}  # one for transformers, one for Lightning: nobody imports both
HANDED_THE_TRAINER: set[str] = set()
BEGIN_WITH_FRAGMENTS = {
    "foretrain/hybrid/cycle.py",
    "foretrain/hybrid/exact_gain.py",
    "foretrain/hybrid/gate.py",
    "foretrain/hybrid/judges/audit.py",
    "foretrain/hybrid/judges/held_out.py",
    "foretrain/hybrid/judges/worth.py",
    "foretrain/hybrid/ledger.py",
    "foretrain/hybrid/moves/judged.py",
    "foretrain/hybrid/moves/quasi_newton.py",
    "foretrain/hybrid/moves/search.py",
    "foretrain/hybrid/moves/secant.py",
    "foretrain/hybrid/policy.py",
    "foretrain/hybrid/snapshot.py",
}


def test_no_class_name_is_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in DEFINED_TWICE} == {}


def test_nothing_below_the_loop_is_handed_the_trainer() -> None:
    found = {
        name
        for name, tree in SOURCES.items()
        if name.startswith("foretrain/") and not name.removeprefix("foretrain/").startswith(ABOVE_THE_LOOP)
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.arg == "trainer"
    }
    assert found - HANDED_THE_TRAINER == set()


def test_no_docstring_is_a_fragment() -> None:
    found = {name for name, tree in SOURCES.items() for text in docstrings(tree) if text.startswith(FRAGMENTS)}
    assert found - BEGIN_WITH_FRAGMENTS == set()


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions, attributes and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.strip()


def test_lines_of_the_pages_are_short() -> None:
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LONGEST
    ]
    assert long == []
