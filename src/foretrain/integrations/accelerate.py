"""foretrain inside of a loop with Accelerate: its state rides in `save_state` and `load_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from foretrain.config import Config
from foretrain.engine.own import Measure
from foretrain.errors import ConfigError
from foretrain.events import Bus
from foretrain.guest.run import GuestRun
from foretrain.guest.wrap import Probe, wrap

_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Ways of running in which each process holds whole weights."""
_FOLDER = "foretrain"


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    probe: Probe,
    loss_fn: Measure | None = None,
    config: Config | None = None,
    max_steps: int | None = None,
    scheduler: LRScheduler | None = None,
    bus: Bus | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
) -> GuestRun:
    """Watch a loop with Accelerate, and leap in it: `foretrain.wrap`, whose arguments these are, for prepared objects.

    To be called after `accelerator.prepare(...)`, once per optimizer. Call `between_steps(loss)` on what is returned
    after each `optimizer.step()`; with gradient accumulation it knows by itself which steps are real. `save_state` and
    `load_state` hold its state in a folder of their own, as safetensors and JSON.
    """
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind not in _PLAIN:
        raise ConfigError(
            f"foretrain does not work with Accelerate's distributed type {kind}, which keeps weights where nobody else "
            "sees them; use one process, or leave foretrain out"
        )
    run = wrap(
        model,
        getattr(optimizer, "optimizer", optimizer),
        probe=probe,
        loss_fn=loss_fn,
        config=config,
        max_steps=max_steps,
        scheduler=getattr(scheduler, "scheduler", scheduler),
        bus=bus,
        out=out,
        overwrite=overwrite,
    )

    def save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        run.save(Path(folder) / _FOLDER)

    def load(models: list[nn.Module], folder: str) -> None:
        run.load(Path(folder) / _FOLDER)

    handles = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)
    run.at_end += [handle.remove for handle in handles]
    return run
