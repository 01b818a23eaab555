"""Weights of one's own module: one file at the end of a run, and the way back from it and from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretrain import CheckpointError, HybridTrainer, InputError, load_weights
from foretrain.config import from_mapping
from foretrain.events import Progress

OFF = {"hybrid.mode": "off", "device": "cpu", "health.interval": 0, "max_steps": 4, "log.report": False}


LONGER = {"max_steps": 8, "log.interval": 1, "checkpoint.interval": 100}


class Compiled(nn.Module):
    """Wraps a module as torch.compile does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


class Tied(nn.Module):
    """Tied weights, a buffer and something frozen."""

    def __init__(self, seed: int, frozen_seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        torch.manual_seed(frozen_seed)
        self.frozen = nn.Linear(4, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.second(self.norm(self.first(x))))
        return out


DATA = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(n)), torch.ones(6, 1)) for n in range(4)]


def trained(folder: Path, **settings: Any) -> tuple[Tied, HybridTrainer]:
    model = Tied(1)
    config = from_mapping(OFF | {name.replace("__", "."): value for name, value in settings.items()})
    trainer = HybridTrainer(model, torch.optim.SGD, nn.MSELoss(), config)
    trainer.fit(DATA, out=folder, progress=False)
    return model, trainer


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_end_of_a_run_is_one_file_that_any_tool_reads(tmp_path: Path) -> None:
    model, _ = trained(tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    other = Tied(2, frozen_seed=3)
    other.load_state_dict(load_file(path))
    assert same(model, other)
    assert path.stat().st_mode == (tmp_path / "run" / "summary.json").stat().st_mode


@pytest.mark.parametrize("source", ["run", "run/model.safetensors"])
def test_it_is_loaded_into_a_fresh_module(source: str, tmp_path: Path) -> None:
    model, _ = trained(tmp_path / "run")
    fresh = Tied(2, frozen_seed=3)
    assert load_weights(fresh, tmp_path / source) is fresh
    assert same(model, fresh)
    assert fresh.second.weight is fresh.first.weight


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_checkpoint_gives_the_same_weights(decay: float, tmp_path: Path) -> None:
    """Averaged ones, if there is an average: those that were evaluated."""
    model, trainer = trained(tmp_path / "run", evaluation__ema_decay=decay)
    finished = load_weights(Tied(2), tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    for source in (tmp_path / "run", newest):
        assert same(load_weights(Tied(2).requires_grad_(True), source), finished)
    with trainer.averaged_weights():
        assert same(model, finished)
    assert same(model, finished) == (decay == 0)


def test_weights_that_were_frozen_must_be_the_same(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"it belongs to another model \(frozen.weight is not in it\)"):
        load_weights(Tied(2, frozen_seed=3), tmp_path / "run")


def test_an_interrupted_run_has_no_finished_weights_but_those_of_its_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    again = HybridTrainer(Tied(1), torch.optim.SGD, nn.MSELoss(), from_mapping(OFF | LONGER))
    again.bus.subscribe(lambda event: (_ for _ in ()).throw(KeyboardInterrupt) if isinstance(event, Progress) else None)
    with pytest.raises(KeyboardInterrupt):
        again.fit(DATA, out=tmp_path / "run", resume=True, progress=False)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert same(load_weights(Tied(2), tmp_path / "run"), again.model)  # an order of own code is obeyed when it is saved


def test_wrapped_modules_are_saved_by_their_own_names(tmp_path: Path) -> None:
    model, _ = trained(tmp_path / "run")
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    save_file({f"module._orig_mod.{name}": value for name, value in tensors.items()}, tmp_path / "wrapped.safetensors")
    wrapped = Compiled(Tied(2, frozen_seed=3))
    load_weights(wrapped, tmp_path / "wrapped.safetensors")
    assert same(wrapped._orig_mod, model)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Linear(4, 4), "it belongs to another model"),
        (lambda: nn.Sequential(Tied(1)), "it belongs to another model"),
    ],
)
def test_another_module_is_refused_and_left_alone(make: Any, text: str, tmp_path: Path) -> None:
    trained(tmp_path / "run")
    other = make()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=text):
        load_weights(other, tmp_path / "run")
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_another_shape_and_what_is_no_file_of_weights_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"weight is \[3, 3\] there, \[2, 2\] here"):
        load_weights(nn.Linear(2, 2, bias=False), tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_text("no weights")
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        load_weights(nn.Linear(2, 2), tmp_path / "b.safetensors")
    with pytest.raises(InputError, match=r"neither model\.safetensors nor a checkpoint is there"):
        load_weights(nn.Linear(2, 2), tmp_path / "nowhere")
