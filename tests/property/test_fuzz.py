"""Spoilt input for every command and every kind of file: no traceback, no hang, few words, and nothing else changed.

`benchmarks/fuzz.py` does the same with as many inputs as wanted, each in a process with limits on time and memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import BENCHMARKS, load_script

pytestmark = pytest.mark.xdist_group("fuzz")  # the examples are made once
INPUTS = 4
TARGETS = """\
config show / --set
config show / configuration
config check / --set
config check / configuration
config init / --set
plan / --set
plan / configuration
plan / model folder
train / --set
train / configuration
train / data
train / names
train / token cache
train / tokenizer
train / vocabulary
train / model folder
train / run folder
finetune / --set
finetune / configuration
finetune / examples
finetune / model folder
finetune / run folder
compare / --set
compare / configuration
compare / comparison folder
evaluate / data
evaluate / examples
evaluate / model folder
evaluate / adapter
evaluate / run folder
generate / model folder
generate / tokenizer
generate / adapter
generate / run folder
generate / text
adapters list / adapter
adapters merge / adapter
adapters merge / run folder
adapters export / run folder
export / run folder
report / run folder
forecast / run folder
forecast / log
sweep / space
watch / run folder
bench compare / results
bench history / results
bench run / arguments
any / arguments""".splitlines()


@pytest.fixture(scope="session")
def fuzz() -> Any:
    for name in ("examples", "mutations", "maker", "settings", "files", "runs", "inputs", "judge"):
        load_script(BENCHMARKS / f"fuzz_{name}.py")
    return load_script(BENCHMARKS / "fuzz.py")


@pytest.fixture(scope="session")
def good(fuzz: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An example of every kind of file."""
    folder = tmp_path_factory.mktemp("fuzz") / "good"
    before = Path.cwd()
    fuzz.fuzz_examples.build(folder)
    os.chdir(before)
    return folder


def test_every_command_and_kind_is_here(fuzz: Any) -> None:
    assert sorted(target.name for target in fuzz.TARGETS) == sorted(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_is_handed_in(
    name: str, fuzz: Any, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = next(target for target in fuzz.TARGETS if target.name == name)
    for number in range(INPUTS):
        rng = random.Random(f"{name}/{number}")  # noqa: S311 - no secret
        folder = tmp_path / str(number)
        outcome = fuzz.perform(target, rng, good, folder)
        assert not outcome.problems, f"{outcome.arguments}\n{outcome.err}"
        shutil.rmtree(folder)
    assert capfd.readouterr().err == ""  # no library printed past Python


# --- the judge --------------------------------------------------------------------------------------------------------


@pytest.fixture
def judged(fuzz: Any, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is found wrong with a program that does this."""

    def call(program: Any) -> list[str]:
        def make(maker: Any) -> Any:
            maker.take("text.txt")
            return sys.modules["fuzz_maker"].Input(["report"], writes=("page.html",))

        monkeypatch.setattr("foretrain.cli.app.main", program)
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        target = fuzz.Target("report", "run folder", make)
        return list(fuzz.perform(target, random.Random(0), good, tmp_path / "here").problems)  # noqa: S311

    return call


def ends(code: int, err: str = "", out: str = "") -> Any:
    def program(arguments: list[str]) -> None:
        sys.stderr.write(err)
        sys.stdout.write(out)
        sys.exit(code)

    return program


def test_what_the_judge_lets_pass(judged: Any) -> None:
    assert judged(ends(0, out="page.html\n")) == []
    assert judged(ends(2, "note: this\nerror: that\n")) == []
    assert judged(lambda _: Path("page.html").write_text("x")) == []


@pytest.mark.parametrize(
    ("code", "err", "problem"),
    [
        (1, "Traceback (most recent call last):\n", "raw error"),
        (2, "thread panicked at x\nerror: x\n", "raw error"),
        (0, "a.py:1: UserWarning: x\n", "raw error"),
        (70, "error: x\n", "exit code"),
        (2, "", "not one error line"),
        (2, "error: x\nerror: y\n", "not one error line"),
        (2, "error: x\nafterwards\n", "not one error line"),
        (2, "line\n" * 20 + "error: x\n", "many lines"),
        (3, "error: x\n", "out of memory"),
        (2, "error: \x1b[2J\n", "steering character"),
        (2, f"error: {'x' * 3000}\n", "long line"),
    ],
)
def test_what_the_judge_finds(code: int, err: str, problem: str, judged: Any) -> None:
    assert [text.partition(":")[0] for text in judged(ends(code, err))] == [problem]


def test_the_judge_finds_what_is_raised_and_what_is_changed(judged: Any) -> None:
    assert judged(lambda _: {}["x"]) == ["raw error: Traceback (most recent call last)"]
    assert judged(lambda _: Path("new").touch()) == ["made a file: new"]
    assert judged(lambda _: Path("text.txt").unlink()) == ["deleted a file: text.txt"]
    assert judged(lambda _: Path("text.txt").write_text("x")) == ["changed a file: text.txt"]


def test_the_script(good: Path, tmp_path: Path) -> None:
    """Two processes under limits; one input again by its name is the same one."""
    (tmp_path / "good").symlink_to(good)
    script = [sys.executable, str(BENCHMARKS / "fuzz.py"), "--out", str(tmp_path)]
    many = subprocess.run(
        [*script, "--inputs", "4", "--jobs", "2", "--results", str(tmp_path)], capture_output=True, text=True
    )
    assert (many.returncode, many.stdout.splitlines()[-2]) == (0, "4 inputs, 0 findings"), many.stdout + many.stderr
    (result,) = tmp_path.glob("*-fuzz.json")
    content = json.loads(result.read_text())
    assert (content["inputs"], content["findings"]) == (4, 0)
    assert sum(row["inputs"] for row in content["rows"]) == 4
