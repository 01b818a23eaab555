"""Drawn changes of core modules for `mutants.py --random`: comparisons, operators, numbers, conditions and statements.

Each is judged by the test file that mirrors its module. They say where to look, not what is promised: many of them
change nothing that anybody can see.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from typing import Any

MODULES = (
    "hybrid/ledger.py",
    "hybrid/correction.py",
    "hybrid/exact_gain.py",
    "hybrid/gate.py",
    "health/detect.py",
    "hybrid/horizon.py",
    "hybrid/moves/search.py",
    "hybrid/cycle.py",
    "hybrid/moves/obstacles.py",
    "health/act.py",
    "data/chats.py",
    "data/examples.py",
    "data/loader.py",
    "data/order.py",
    "data/tokenizers.py",
    "motion/confidence.py",
    "hybrid/moves/lookahead.py",
    "motion/predictability.py",
    "motion/quality.py",
    "motion/losses.py",
    "engine/average.py",
    "persist/checkpoint.py",
    "engine/optim/in_backward.py",
    "engine/optim/moments.py",
    "engine/optim/muon.py",
    "engine/optim/build.py",
    "engine/precision.py",
    "engine/rates.py",
    "persist/folder.py",
    "engine/schedule.py",
    "health/shortage.py",
    "persist/signals.py",
    "persist/codec.py",
    "engine/step.py",
    "measure/analysis.py",
    "foretrain_bench/history.py",
    "measure/plan.py",
    "measure/stats.py",
    "foretrain_bench/stats.py",
    "foretrain_bench/verdict.py",
    "models/cache.py",
    "models/lora.py",
    "models/loss.py",
    "serve/sampling.py",
    "serve/scoring.py",
    "serve/streaming.py",
    "show/pages/watch.py",
    "config/loading.py",
    "events.py",
    "show/outlet.py",
    "config/units.py",
)
"""Below src/foretrain, or below src. Their test files take seconds."""
_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
_OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Div(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
}


def sites(tree: ast.AST) -> Iterator[ast.AST]:
    """What can be changed, in a fixed order. Annotations, docstrings and words of messages are left alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.arg, ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)) or _is_text(node):
            continue
        if changed(node) is not None:
            yield node
        if isinstance(node, ast.AnnAssign):
            yield from sites(ast.Expression(node.value)) if node.value is not None else ()
        elif isinstance(node, ast.FunctionDef):
            yield from sites(ast.Module([*node.args.defaults, *node.body], []))  # type: ignore[list-item]
        else:
            yield from sites(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def changed(node: ast.AST) -> ast.AST | None:
    """The same with one change; None where none is known."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            return ast.Compare(node.left, [_COMPARISONS[type(operator)]], node.comparators)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return ast.BinOp(left, _OPERATORS[type(operator)], right)
        case ast.BoolOp(op=operator, values=values):
            return ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool() as value):
            return ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value + 1 if isinstance(value, int) else 2 * value + 0.1)
        case ast.If(test=test, body=body, orelse=orelse):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return ast.Pass()
    return None


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old = old
        self.new = new

    def generic_visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.new, node) if node is self.old else super().generic_visit(node)


def drawn(project: Any, count: int, seed: int) -> list[tuple[str, str, str, str, str, str]]:
    """(area, file, text of the file, text with a change, what was changed, its test file) `count` times."""
    draw = random.Random(seed)  # noqa: S311
    found: dict[tuple[str, int], tuple[str, str, str, str, str, str]] = {}
    sources = {name: project.path(name).read_text(encoding="utf-8") for name in MODULES}
    places = [(name, number) for name, text in sources.items() for number in range(len(list(sites(ast.parse(text)))))]
    for name, number in draw.sample(places, min(count, len(places))):
        tree = ast.parse(sources[name])
        old = list(sites(tree))[number]
        new = changed(copy.deepcopy(old))
        assert new is not None
        words = f"line {getattr(old, 'lineno', 0)}: {_shown(old)} -> {_shown(new)}"
        text = ast.unparse(ast.fix_missing_locations(_Replace(old, new).visit(tree)))
        found[name, number] = (
            name.rpartition("/")[0] or "top",
            name,
            sources[name],
            text + "\n",
            words,
            tests_of(name),
        )
    return list(found.values())


def tests_of(name: str) -> str:
    """Return the test file of a module, below `tests`."""
    folder, _, file = name.removeprefix("foretrain_").rpartition("/")
    return f"{folder}/test_{file}".lstrip("/")


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        return f"if {ast.unparse(ast.fix_missing_locations(node.test))}"
    return " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())[:80]
