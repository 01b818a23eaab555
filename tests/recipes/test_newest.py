"""A run that goes on or was interrupted is asked at its newest checkpoint."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import config_for, write_base, write_colors

from foretrain.cli.app import main
from foretrain.config import changed
from foretrain.errors import InputError
from foretrain.events import Event, Progress
from foretrain.models.adapter_files import Adapter, read_adapter
from foretrain.recipes import finetune as tuning
from foretrain.recipes import train as run
from foretrain.recipes.newest import open_newest

ASK = ("--prompt", "the cat", "--temperature", "0", "--max-tokens", "5", "--device", "cpu", "--json")


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def stop_at(step: int) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, Progress) and event.step >= step:
            signal.raise_signal(signal.SIGINT)

    return listen


@pytest.fixture
def config(make_config: Callable[..., Any], text_file: Path) -> Any:
    changes = {"data.path": str(text_file), "data.prefetch": 0, "max_steps": 8, "checkpoint.interval": 3}
    return make_config(changes | {"evaluation.ema_decay": 0.5})


def test_an_interrupted_run_is_asked_at_its_newest_checkpoint(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run.train(config, folder, progress=False, listeners=[stop_at(4)])["reason"] == "interrupted"
    capsys.readouterr()
    assert command("generate", folder, *ASK) == 0
    printed = capsys.readouterr()
    assert "its newest checkpoint is taken: step 4 of 8" in printed.err
    assert printed.err.count("\n") == 1
    assert command("export", folder, tmp_path / "exported") == 0
    capsys.readouterr()
    assert command("generate", tmp_path / "exported", *ASK) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(printed.out)
    assert command("generate", folder / "checkpoints" / "step-00000003", *ASK) == 0
    assert "the checkpoint of step 3" in capsys.readouterr().err
    assert command("generate", tmp_path / "exported", *ASK[:4], "--max-tokens", "999", "--device", "cpu") == 0
    assert "it ends where the model's context of 16 tokens does" in capsys.readouterr().err


def test_what_is_newer_than_the_finished_model_is_taken(config: Any, tmp_path: Path) -> None:
    folder, said = tmp_path / "run", list[str]()
    run.train(config, folder, progress=False)
    finished = open_newest(folder, say=said.append)
    assert not said
    assert finished.folder == folder / "model"
    longer = changed(config, {"max_steps": 16})
    run.train(longer, folder, resume=True, progress=False, listeners=[stop_at(11)])
    assert not torch.equal(
        open_newest(folder, say=said.append).model.final_norm.weight, finished.model.final_norm.weight
    )
    assert "step 11 of 16" in said[0]
    (folder / "summary.json").write_text(json.dumps({"reason": "finished", "global_step": 8}))  # still at work
    assert open_newest(folder, say=said.append).folder == folder
    run.train(longer, folder, resume=True, progress=False)
    assert open_newest(folder).folder == folder / "model"


def test_an_interrupted_fine_tuning_run_is_asked_with_its_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, data = write_base(tmp_path / "base"), write_colors(tmp_path / "colors.jsonl")
    config, folder = config_for(base, data, max_steps=20, log__interval=5), tmp_path / "run"
    tuning.finetune(config, folder, progress=False, listeners=[stop_at(10)])
    opened = open_newest(folder)
    assert isinstance(opened.adapter, Adapter)
    assert opened.format is not None
    assert opened.format.ask("x") == "x\nLabel:"
    exported = read_adapter(tuning.export_adapter(folder, tmp_path / "exported")).tensors
    assert len(exported) == len(opened.adapter.tensors)
    capsys.readouterr()
    assert command("generate", folder, *ASK) == 0
    printed = capsys.readouterr()
    assert "step 10 of 20" in printed.err
    whole = ("--prompt", "the cat\nLabel:", *ASK[2:])
    assert command("generate", base, "--adapter", tmp_path / "exported", *whole) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(printed.out)


def test_a_run_without_a_checkpoint_says_so(config: Any, tmp_path: Path) -> None:
    run.train(config, tmp_path / "run", progress=False)
    for name in ("model", "checkpoints"):
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(InputError, match="wait until the run has saved its first checkpoint"):
        open_newest(tmp_path / "run")
