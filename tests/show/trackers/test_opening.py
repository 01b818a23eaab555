"""Trackers are opened before a run begins, or it does not begin."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.show.trackers.conftest import fit, tiny_config

from foretrain.errors import InputError, SaveError
from foretrain.recipes import finetune as tuning
from foretrain.recipes import train as run
from foretrain.show.trackers import opening
from foretrain.show.trackers.listener import close_all

NEEDS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "alembic", "trackio": "trackio"}


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_is_told_with_the_command_before_anything_else(
    name: str, make_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    config = make_config({"log.trackers": [name], "data.path": "nowhere.txt"})
    how = f"install it with: {shlex.quote(sys.executable)} -m pip install {NEEDS[name]}"
    message = re.escape(f"log.trackers = {name}: needs {NEEDS[name]}; {how}")
    with pytest.raises(InputError, match=message):
        run.train(config, tmp_path / "run", progress=False)
    with pytest.raises(InputError, match=message):
        fit(tiny_config(log__trackers=[name]), tmp_path / "fit")
    tunable = make_config({"log.trackers": [name], "data.path": "nowhere.jsonl", "model.weights": "nowhere"})
    with pytest.raises(InputError, match=message):
        tuning.finetune(tunable, tmp_path / "tuned", progress=False)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "tuned").exists()


def test_nothing_is_imported_unless_asked_for() -> None:
    code = (
        "import sys, foretrain.cli.app\n"
        "from foretrain.show.trackers import listener, mlflow, opening, tensorboard, trackio, wandb\n"
        "opening.check_installed(['tensorboard', 'wandb', 'mlflow', 'trackio'])\n"
        "packages = {'tensorboardX', 'tensorboard', 'wandb', 'mlflow', 'sqlalchemy', 'trackio', 'google.protobuf'}\n"
        "print(sorted(packages & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout.strip(), found.stderr) == ("[]", "")


def test_a_tracker_that_cannot_begin_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("in the way", encoding="utf-8")
    with pytest.raises(InputError, match=r"log\.trackers = tensorboard: it cannot begin \(FileExistsError"):
        fit(tiny_config(log__trackers=["tensorboard"]), tmp_path / "run")
    assert "Progress" not in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")


def test_mlflow_does_not_try_for_minutes_to_write_where_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in a path mean something else"):
        fit(tiny_config(log__trackers=["mlflow"]), tmp_path / "100%")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mlflow").write_text("in the way", encoding="utf-8")
    with pytest.raises(InputError, match="mlflow: it cannot begin"):
        fit(tiny_config(log__trackers=["mlflow"]), tmp_path / "run")


def test_ids_are_kept_for_the_resumed_run_only(tmp_path: Path) -> None:
    config = tiny_config(log__trackers=["trackio", "trackio"], max_steps=2)

    def opened(resume: bool) -> str:
        close_all(opening.open_trackers(config, tmp_path, resume, lambda _: None))
        return str(json.loads((tmp_path / opening.IDS).read_text(encoding="utf-8"))["trackio"])

    first = opened(resume=True)
    assert opened(resume=True) == first
    assert opened(resume=False) != first


@pytest.mark.parametrize("text", ["{", "[]", '{"wandb": 3}', '{"wandb/row": "3"}'])
def test_ids_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / opening.IDS).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"trackers\.json: .*delete it, and trackers begin new runs"):
        opening.open_trackers(tiny_config(log__trackers="trackio"), tmp_path, True, lambda _: None)


def test_ids_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / opening.IDS).mkdir()
    with pytest.raises(SaveError, match=r"trackers\.json: cannot be written"):
        opening.open_trackers(tiny_config(log__trackers="trackio"), tmp_path, False, lambda _: None)


def test_trackers_follow_their_own_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "shared"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    fit(tiny_config(log__trackers=["trackio", "wandb"], max_steps=2), tmp_path / "run")
    assert (tmp_path / "shared" / "foretrain.db").is_file()
    assert not {"trackio", "wandb"} & {path.name for path in (tmp_path / "run").iterdir()}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at.all")
    with pytest.raises(InputError, match=r"mlflow: it cannot begin .*nowhere"):
        fit(tiny_config(log__trackers=["mlflow"]), tmp_path / "other")
