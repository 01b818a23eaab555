"""foretrain inside of Lightning's Trainer, and a loader with which its runs resume exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from foretrain.config import Config
from foretrain.errors import ConfigError
from foretrain.events import Bus
from foretrain.guest.resumable import ResumableLoader
from foretrain.guest.run import GuestRun
from foretrain.guest.wrap import wrap
from foretrain.hybrid.gate import FORWARD
from foretrain.persist.codec import own_copy, random_state, restore_random_state, same_random_numbers

__all__ = ["HybridCallback", "ResumableLoader"]


class HybridCallback(lightning.Callback):
    """Watches a run of Lightning's Trainer, and leaps between its steps: `Trainer(callbacks=[HybridCallback()])`.

    probe: so many batches of the validation loader, or a list of batches, never to be trained on; `training_step` tells
    their loss. config: of prediction and the log; `hybrid.mode = "off"` only watches. exact_resume: random states ride
    in the checkpoint; Lightning leaves them out. With `ResumableLoader` a resumed run is then the whole one to the bit.
    out: a folder for log, summary and report; overwrite: replace the run that is there.
    """

    def __init__(
        self,
        probe: int | Sequence[Any] = 4,
        config: Config | None = None,
        exact_resume: bool = True,
        *,
        out: str | Path | None = None,
        overwrite: bool = False,
        bus: Bus | None = None,
    ) -> None:
        self.probe, self.config, self.exact_resume, self.bus = probe, config, exact_resume, bus
        self.out, self.overwrite = out, overwrite
        self.run: GuestRun | None = None  # made when training begins
        self._losses: list[Tensor] = []  # of the parts of the step that is being made
        self._saved: Mapping[str, Any] | None = None
        self._random: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wrap the optimizer, and go on where a checkpoint was saved."""
        _check(trainer, pl_module)
        with same_random_numbers():
            batches = _batches(self.probe, trainer)
        steps, schedulers = trainer.estimated_stepping_batches, trainer.lr_scheduler_configs
        told = [one.scheduler for one in schedulers if one.interval == "step" and one.frequency == 1]
        self.run = run = wrap(
            trainer.strategy.model,
            trainer.optimizers[0],
            probe=batches,
            loss_fn=lambda model, batch: _loss(trainer, pl_module, batch),
            config=self.config,
            max_steps=int(steps) if 0 < steps < float("inf") else None,
            scheduler=told[0] if len(told) == 1 else None,
            bus=self.bus,
            out=self.out,
            overwrite=self.overwrite,
            price=FORWARD * len(batches) / trainer.accumulate_grad_batches,
        )
        if self._saved is not None:
            run.load_state_dict(self._saved, f"the checkpoint of step {trainer.global_step}")
            self._saved = None
        elif trainer.global_step:
            run.begin_at(trainer.global_step)
        run.open()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The first step of a resumed run draws the random numbers that it would have drawn."""
        random, self._random = self._random, None
        if random is not None:
            restore_random_state(random)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Here a leap may be made, where the batch was the last of a step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._losses += [loss.detach()] if isinstance(loss, Tensor) else []
        if self.run is not None and self.run.stepped:
            self.run.between_steps(torch.stack(self._losses).mean() if self._losses else None)
            self._losses = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the summary and the page."""
        if self.run is not None:
            self.run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watch."""
        if self.run is not None:
            self.run.close(failed=True)

    def state_dict(self) -> dict[str, Any]:
        """Rides in Lightning's checkpoint: tensors and plain values, which it loads with `weights_only=True`."""
        if self.run is None:
            return {}
        one = self.run.engine.world.size == 1  # of several processes the first saves, and draws random numbers alone
        random = random_state() if self.exact_resume and one else None
        return {"random": random, "run": own_copy(self.run.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What is read here is put back when training starts: there is no optimizer yet."""
        self._saved, self._random = state_dict.get("run"), state_dict.get("random")


def _check(trainer: Any, module: Any) -> None:
    strategy = type(trainer.strategy).__name__
    if strategy.startswith(("FSDP", "DeepSpeed", "ModelParallel")):
        what = f"{strategy}, which keeps weights where nobody else sees them; use strategy='ddp' or one process"
    elif not module.automatic_optimization:
        what = "manual optimization, where nobody else knows what a step is; use foretrain.wrap in your training_step"
    elif len(trainer.optimizers) != 1:
        what = (
            f"{len(trainer.optimizers)} optimizers: whose steps would be forecast? Use foretrain.wrap with one of them"
        )
    else:
        return
    raise ConfigError(f"HybridCallback does not work with {what}, or leave the callback out")


def _batches(probe: int | Sequence[Any], trainer: Any) -> list[Any]:
    if not isinstance(probe, int):
        return list(probe)
    if probe < 1 or not trainer.enable_validation:
        raise ConfigError(f"probe = {probe} takes so many batches of a validation loader; give one to fit(), or a list")
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    loaders = trainer.val_dataloaders
    return list(islice(loaders[0] if isinstance(loaders, (list, tuple)) else loaders, probe))


def _loss(trainer: Any, module: Any, batch: Any) -> Tensor:
    """Return what `training_step` computes; what it logs is not the run's."""
    module.log = module.log_dict = lambda *_, **__: None
    try:
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(trainer.strategy.batch_to_device(batch), 0)
    finally:
        del module.log, module.log_dict
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss
