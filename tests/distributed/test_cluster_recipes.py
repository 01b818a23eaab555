"""The recipes for clusters, checked as far as that goes without one: their syntax, and the command lines in them."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # noqa: TID251 - read with safe_load, in a test
from torch.distributed.run import get_args_parser

from foretrain.cli.app import app
from foretrain.cli.training import finetune, train

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
PAGE = ROOT / "docs" / "cluster.md"
NUMBERS = {"SLURM_NNODES", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE"}


def scripts() -> dict[str, str]:
    """The shell of each recipe, and that of the page."""
    sky = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    page = {f"cluster.md {number}": block for number, block in enumerate(blocks) if "torchrun" in block}
    return {"slurm.sh": (FOLDER / "slurm.sh").read_text(), "skypilot.yaml": sky["run"], **page}


def torchruns(script: str) -> list[list[str]]:
    """The arguments of each torchrun, with variables put in."""
    joined = script.replace("\\\n", " ")
    filled = re.sub(r"\$\{?(\w+)(:-\w+)?\}?", lambda found: "1" if found[1] in NUMBERS else found[1], joined)
    lines = [shlex.split(line, comments=True) for line in filled.splitlines() if "torchrun " in line and line[0] != "#"]
    return [line[line.index("torchrun") + 1 :] for line in lines]


@pytest.mark.parametrize("name", scripts())
def test_a_recipe_is_valid_shell(name: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-n"], input=scripts()[name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", scripts())
def test_torchrun_and_foretrain_understand_the_command_line(name: str) -> None:
    lines = torchruns(scripts()[name])
    assert lines
    for line in lines:
        parsed = get_args_parser().parse_args(line)
        assert (parsed.module, parsed.training_script) == (True, "foretrain")
        command, bound, _ = app.parse_args(parsed.training_script_args, print_error=False, exit_on_error=False)
        assert command in (train, finetune)
        assert bound.arguments["out"]
        assert bound.arguments["resume"] is True  # so that a new attempt goes on


def test_slurm_sends_a_signal_that_torchrun_hands_on() -> None:
    script = (FOLDER / "slurm.sh").read_text()
    assert "#SBATCH --signal=TERM@" in script
    assert script.startswith("#!/bin/bash\n")


def test_skypilot_has_what_a_task_needs() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert {"name", "num_nodes", "resources", "setup", "run", "file_mounts"} <= task.keys()
    mounted = next(iter(task["file_mounts"]))
    assert f"--out {mounted}/" in task["run"]


def test_ray_calls_a_function_that_trains_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: dict[str, Any] = {}

    def train_instead(config: Any, out: Any = None, **options: Any) -> dict[str, Any]:
        told.update(options, steps=config.max_steps, out=out)
        return {}

    found = runpy.run_path(str(FOLDER / "ray_train.py"))
    monkeypatch.setattr(found["foretrain"], "train", train_instead, raising=False)
    (tmp_path / "my.toml").write_text("max_steps = 7\n")
    found["train_loop_per_worker"]({"config": str(tmp_path / "my.toml"), "out": "runs/big"})
    assert (told["steps"], told["out"], told["resume"]) == (7, "runs/big", True)
