"""The shape of the code, counted: how large, how deep, what is said twice. Behind the table of docs/architecture.md.

    python benchmarks/code_shape.py                     # of this source
    python benchmarks/code_shape.py --against COMMIT    # beside that of a commit

Counts lines, the largest classes and modules, constants, class names that are used twice and settings from the syntax
tree; call paths by running them: one full step, one leap with its audit, one save. Takes about 20 seconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DECIDING = ("control", "dynamics", "hybrid", "health", "motion")
"""Rooms whose constants decide how a run goes, before and after they were renamed."""


# --- counted in the syntax tree --------------------------------------------------------------------------------------


def counted(source: Path) -> dict[str, Any]:
    """What can be counted without running anything. source: the folder that holds the package."""
    files = sorted(path for path in source.rglob("*.py") if "egg-info" not in str(path))
    texts = {str(path.relative_to(source)): path.read_text(encoding="utf-8") for path in files}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    classes = [
        (node.end_lineno - node.lineno + 1, node.name, name)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
    ]
    modules = sorted(((text.count("\n"), name) for name, text in texts.items()), reverse=True)
    names = Counter(name for _, name, _ in classes)
    constants = [(name, *found) for name, tree in trees.items() for found in numeric_constants(tree)]
    deciding = [entry for entry in constants if Path(entry[0]).parts[1:2] and Path(entry[0]).parts[1] in DECIDING]
    state = [node for tree in trees.values() for node in ast.walk(tree) if is_state_method(node)]
    return {
        "lines": sum(lines for lines, _ in modules),
        "modules": len(modules),
        "modules over 400 lines": [f"{Path(name).stem} {lines}" for lines, name in modules if lines > 400],
        "classes": len(classes),
        "classes over 250 lines": [
            f"{name} {lines}" for lines, name, _ in sorted(classes, reverse=True) if lines > 250
        ],
        "class names used twice": sorted(name for name, times in names.items() if times > 1),
        "numeric constants": len(constants),
        "of them in rooms that decide": len(deciding),
        "of these without a word beside them": sum(not told for _, _, told in deciding),
        "state methods": len(state),
        "lines of state methods": sum((node.end_lineno or 0) - node.lineno + 1 for node in state),
        "parameters called trainer": sum(
            argument.arg == "trainer"
            for name, tree in trees.items()
            if Path(name).stem not in ("trainer", "fit", "loop") and Path(name).parts[0] == "foretrain"
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for argument in (*node.args.args, *node.args.kwonlyargs)
        ),
    }


def numeric_constants(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Names of module constants that are numbers, and whether a text or a comment follows on them."""
    for here, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(here, ast.Assign) and isinstance(here.targets[0], ast.Name):
            name = here.targets[0].id
        elif isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            name = here.target.id
        else:
            continue
        if name.strip("_").isupper() and here.value is not None and is_number(here.value):
            yield name, isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)


def is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.Tuple(elts=elements):
            return bool(elements) and all(is_number(element) for element in elements)
    return False


def is_state_method(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in ("state_dict", "load_state_dict")


# --- counted by running it -------------------------------------------------------------------------------------------


def measured() -> dict[str, Any]:
    """Call paths: frames from `step` to the loss, and files of the package that are entered."""
    import torch
    from torch import nn

    from foretrain import HybridTrainer, load

    depths: list[int] = []

    class Bowl(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(1, 2, 20))

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            depths.append(depth())
            noise = torch.randn(20, generator=torch.Generator().manual_seed(int(batch)))
            return (torch.logspace(-2, 0, 20) * (self.w + 0.1 * noise).square()).sum()

    settings = {
        "device": "cpu",
        "max_steps": 400,
        "optimizer.type": "sgd",
        "optimizer.learning_rate": 0.05,
        "schedule.type": "constant",
        "hybrid.warmup_steps": 20,
        "hybrid.full_steps": 5,
        "hybrid.window_steps": 5,
        "hybrid.correct_steps": 3,
        "hybrid.max_predict_steps": 8,
        "hybrid.confidence_threshold": 0.0,
        "audit.time_budget": 1.0,
        "audit.steps": 6,
        "health.interval": 0,
        "memory.timeline": False,
    }
    config = load(None, [f"{name}={json.dumps(value)}" for name, value in settings.items()]).config
    trainer = HybridTrainer(Bowl(), config=config)
    found: dict[str, Any] = {}
    moves: list[Any] = []
    trainer.bus.subscribe(lambda event: moves.append(event) if type(event).__name__ == "Moved" else None)
    with torch.random.fork_rng():
        for number in range(12):
            trainer.step(torch.tensor(number))
        depths.clear()
        with entered() as files:
            trainer.step(torch.tensor(12))
        found["full step: frames from step to the loss"] = depths[0]
        found["full step: files entered"] = files()
        deepest, before = 0, set[str]()
        for number in range(13, 400):
            began = len(moves)
            depths.clear()
            with entered() as files:
                trainer.step(torch.tensor(number))
            if trainer.phase.value in ("predict", "correct") or len(moves) > began:
                deepest, before = max(deepest, *depths, 0), before | set(files())
            if len(moves) > began:
                if moves[-1].audited and moves[-1].verdict != "refused":
                    break
                deepest, before = 0, set()
        found["audited leap: deepest frames from step to the loss"] = deepest
        found["audited leap: files entered"] = sorted(before)
        with entered() as files:
            trainer.state_dict()
        found["the whole state: files entered"] = files()
    return found


def depth() -> int:
    """Frames of the package above this one, up to and with `step` of the trainer."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        if "foretrain" in Path(frame.f_code.co_filename).parts:
            count += 1
            if frame.f_code.co_name == "step" and frame.f_code.co_filename.endswith("trainer.py"):
                return count
        frame = frame.f_back
    return 0


@contextmanager
def entered() -> Iterator[Callable[[], list[str]]]:
    """Files of the package that functions were called in, inside the block."""
    files: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and f"foretrain{os.sep}" in name and "benchmarks" not in name and name not in files:
            files.append(name)

    sys.setprofile(note)
    try:
        yield lambda: [name.rpartition(f"foretrain{os.sep}")[2] for name in files]
    finally:
        sys.setprofile(None)


# --- the table -------------------------------------------------------------------------------------------------------


def of_source(source: Path) -> dict[str, Any]:
    """Both parts, of the package under `source`, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(source), "CODE_SHAPE_SOURCE": str(source)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def of_commit(commit: str) -> dict[str, Any]:
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), commit], check=True)
        try:
            return of_source(tree / "src")
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def in_words(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)}: {', '.join(map(str, value))}" if value else "0"
    return f"{value:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="a second column of this commit")
    parser.add_argument("--json", action="store_true", help="print the counts of this source as JSON")
    options = parser.parse_args()
    if options.json:
        source = Path(os.environ.get("CODE_SHAPE_SOURCE", ROOT / "src"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(counted(source) | measured()))
        return
    now = of_source(ROOT / "src")
    before = of_commit(options.against) if options.against else {}
    for name, value in now.items():
        print(f"{name}\n  now     {in_words(value)}")
        if before:
            print(f"  before  {in_words(before[name])}")


if __name__ == "__main__":
    main()
