"""`foretrain.wrap`: watch any training loop, and leap in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from foretrain.config import Config
from foretrain.config.paths import with_settings
from foretrain.engine.described import unwrapped
from foretrain.engine.own import Measure, described
from foretrain.engine.ranks import world_of_ranks
from foretrain.engine.world import World
from foretrain.errors import ConfigError
from foretrain.events import Bus
from foretrain.guest.engine import GuestEngine, device_of, loss_of_callable
from foretrain.guest.run import GuestRun, checked_probe
from foretrain.guest.settings import settings_for_guest
from foretrain.persist.codec import same_random_numbers
from foretrain.persist.parts import is_spread

Probe = Callable[[], Tensor | float] | Sequence[Any] | None
_BY_ITSELF = [(0,)]
"""The only batch of a probe that is a function: it is not looked at."""


def wrap(
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
    price: float | None = None,
) -> GuestRun:
    """Watch a training loop of your own, and make leaps between its steps that held-out examples judge at once.

    probe: batches that are never trained on, with `loss_fn` of (model, batch) or a criterion of (output, target); or a
    function that gives their mean loss; or None, to watch only. max_steps: length of the run, for forecasts. scheduler:
    tells what the learning rate will do; it stays yours to step. out: a folder for log, summary and report, which
    `foretrain report` and `foretrain watch` read; overwrite: replace the run that is there. price: full steps that one
    look at the probe costs; unset, each of its batches costs as much as a training batch of the same size.

    Call `between_steps(loss)` on what is returned after each step of the optimizer: only there weights are changed. On
    several ranks hand in the model in DistributedDataParallel; all of them make the same calls, each with its own part
    of the probe, and rank 0 writes.
    """
    world = world_of_ranks()
    _check(model, optimizer, world)
    model, config = unwrapped(model), config or Config()
    if max_steps is not None:
        if max_steps < 1:
            raise ConfigError(f"max_steps = {max_steps}: the number of steps of the loop, 1 or more")
        config = with_settings(config, {"max_steps": max_steps})
    batches, loss = _of_probe(model, probe, loss_fn)
    settings = settings_for_guest(config, device_of(model), leaps=bool(batches))
    engine = GuestEngine(model, optimizer, loss, settings, scheduler, world)
    return GuestRun(engine, batches, price, bus or Bus(), out, overwrite)


def _check(model: nn.Module, optimizer: Optimizer, world: World) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {described(model)}; give a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is {described(optimizer)}; give the object of torch.optim that the loop steps")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ConfigError(
            f"{type(optimizer).__name__} is a wrapper without step hooks; give the optimizer inside of it, or with "
            "Accelerate use foretrain.integrations.accelerate.prepare"
        )
    if any(
        isinstance(getattr(hook, "__self__", None), GuestRun) for hook in optimizer._optimizer_step_pre_hooks.values()
    ):
        raise ConfigError(f"this {type(optimizer).__name__} is watched already: close() the run that wraps it first")
    if any(is_spread(p) for p in model.parameters()):
        raise ConfigError(
            f"the weights of {type(model).__name__} are in parts (FSDP2, tensor parallelism), which foretrain.wrap "
            "does not move; use DistributedDataParallel, or HybridTrainer, which does"
        )
    if world.size > 1 and not isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"this is one of {world.size} processes, and {type(model).__name__} is not in DistributedDataParallel, so "
            "that each trains a model of its own: hand in the wrapped model"
        )


def _of_probe(model: nn.Module, probe: Probe, loss_fn: Measure | None) -> tuple[list[Any], Measure]:
    """Return probe batches, and the loss function that they are looked at with."""
    if probe is None:
        return [], _unused
    if callable(probe):
        if loss_fn is not None:
            raise ConfigError("probe is a function that gives a loss by itself, so loss_fn has no effect; leave it out")
        return list(_BY_ITSELF), loss_of_callable(probe)
    with same_random_numbers():  # a DataLoader draws from the host's
        batches = checked_probe(probe)
    if loss_fn is None and not hasattr(model, "loss"):
        raise ConfigError(
            f"probe batches need loss_fn=..., a function of (model, batch) or a criterion such as torch.nn.MSELoss(): "
            f"{type(model).__name__} has no method loss(batch)"
        )
    return batches, loss_fn if loss_fn is not None else _own_loss


def _own_loss(model: nn.Module, batch: Any) -> Any:
    return model.loss(batch)  # type: ignore[operator]


def _unused(model: nn.Module, batch: Any) -> Tensor:
    raise ConfigError("this run is watched without a probe")
