"""The callback inside of the real Trainer of Lightning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from foretrain.errors import ConfigError
from foretrain.events import Moved, Progress, Resumed
from foretrain.integrations import lightning as integration
from foretrain.integrations.lightning import HybridCallback, ResumableLoader

from .hosts import WORDS, Heard, RisingLoss, sentences, settings, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the host's own
    pytest.mark.xdist_group("hosts"),  # they take seconds to import
]
STEPS = 60
TRAIN, HELD_OUT = sentences(200, 1), sentences(32, 2)


class Counting(lightning.LightningModule):
    """Says the next number; dropout draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, WORDS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(
    folder: Path, callback: HybridCallback | None, *, until: int = STEPS, resume: Path | None = None, **more: Any
) -> lightning.Trainer:
    lightning.seed_everything(7, verbose=False)
    saving = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=25, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        **{"enable_model_summary": False, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2, **more},
        callbacks=[saving, Until(until), *([] if callback is None else [callback])],
    )
    loaders = ResumableLoader(TRAIN, batch_size=8, seed=3), DataLoader(HELD_OUT, batch_size=8)
    trainer.fit(Counting(), *loaders, ckpt_path=resume)
    return trainer


class Until(lightning.Callback):
    """Ends a run before its planned end, as a kill would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


def moves(callback: HybridCallback) -> dict[str, int]:
    assert callback.run is not None
    found: dict[str, int] = callback.run.summary()["moves"]
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    trainer = train(tmp_path_factory.mktemp("plain"), None)
    return SimpleNamespace(weights=weights(trainer.lightning_module), metrics=dict(trainer.callback_metrics))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder, heard = tmp_path_factory.mktemp("whole"), Heard()
    callback = HybridCallback(probe=2, config=settings(), bus=heard.bus, out=folder / "watched")
    trainer = train(folder, callback)
    return SimpleNamespace(
        folder=folder, heard=heard, callback=callback, weights=weights(trainer.lightning_module), trainer=trainer
    )


def test_idle_is_no_callback_bit_for_bit(tmp_path: Path, plain: SimpleNamespace) -> None:
    callback = HybridCallback(probe=2, config=settings(hybrid__mode="off"))
    trainer = train(tmp_path, callback)
    assert torch.equal(weights(trainer.lightning_module), plain.weights)
    assert callback.run is not None
    assert callback.run.engine.progress.global_step == STEPS
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        name: float(value) for name, value in plain.metrics.items()
    }, "what a probe logs is not the run's"


def test_a_probe_that_always_objects_leaves_the_bits_of_no_callback(
    tmp_path: Path, plain: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "_loss", RisingLoss())
    callback = HybridCallback(probe=2, config=settings())
    assert torch.equal(weights(train(tmp_path, callback).lightning_module), plain.weights)
    assert moves(callback)["refused"] >= 1
    assert moves(callback)["kept"] + moves(callback)["shrunk"] == 0


def test_leaps_are_kept_and_told(whole: SimpleNamespace, plain: SimpleNamespace) -> None:
    assert moves(whole.callback)["kept"] >= 1
    assert not torch.equal(whole.weights, plain.weights)
    assert all(moved.loss < moved.anchor for moved in whole.heard.of(Moved) if moved.verdict == "kept")
    told = whole.heard.of(Progress)
    assert [event.step for event in told] == [10, 20, 30, 40, 50, 60]
    assert 0.5 < told[0].loss / torch.tensor(float(WORDS)).log() < 1.2, "the mean over the parts of a step"
    assert all(event.gradient_norm > 0 for event in told), "gradients are made inside of the optimizer's step"
    assert whole.trainer.global_step == STEPS
    assert "Counting" in (whole.folder / "watched" / "report.html").read_text()


@pytest.mark.parametrize("step", [25, 50])  # 50 is the end of a pass over the data
def test_half_resumed_and_half_is_the_whole(whole: SimpleNamespace, tmp_path: Path, step: int) -> None:
    first = HybridCallback(probe=2, config=settings())
    train(tmp_path, first, until=step)
    heard = Heard()
    second = HybridCallback(probe=2, config=settings(), bus=heard.bus)
    trainer = train(tmp_path, second, resume=tmp_path / f"step={step}.ckpt")
    assert torch.equal(weights(trainer.lightning_module), whole.weights)
    assert moves(second) == moves(whole.callback)
    assert [event.step for event in heard.of(Resumed)] == [step]


class ByHand(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_what_cannot_work_is_refused_before_the_first_step() -> None:
    def fit(module: lightning.LightningModule, *loaders: Any) -> None:
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[HybridCallback(probe=2)],
        )
        trainer.fit(module, DataLoader(TRAIN, batch_size=8), *loaders)

    with pytest.raises(ConfigError, match="does not work with manual optimization"):
        fit(ByHand(), DataLoader(HELD_OUT))
    with pytest.raises(ConfigError, match="probe = 2 takes so many batches of a validation loader"):
        fit(Counting())
    for strategy in (FSDPStrategy(), ModelParallelStrategy()):  # which a trainer takes on GPUs only
        with pytest.raises(ConfigError, match=f"does not work with {type(strategy).__name__}, which keeps weights"):
            integration._check(SimpleNamespace(strategy=strategy, optimizers=[1]), Counting())
    host = SimpleNamespace(strategy=object(), optimizers=[1, 2])
    with pytest.raises(ConfigError, match="does not work with 2 optimizers"):
        integration._check(host, Counting())
