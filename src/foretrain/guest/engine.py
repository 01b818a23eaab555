"""The engine of a guest: the host makes the steps, and nothing that is the host's is changed here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from foretrain.config import Config
from foretrain.engine import own
from foretrain.engine.ahead import plan_ahead, unknown_plan
from foretrain.engine.engine import Engine
from foretrain.engine.fence import untouched
from foretrain.engine.hooks import StepHook
from foretrain.engine.precision import Precision
from foretrain.engine.rates import FollowedRates, Number, Rates
from foretrain.engine.step import StepOutput, stacked
from foretrain.engine.world import World
from foretrain.errors import ConfigError, InputError

_QUIET_STEPS = 20
"""Steps that a learning rate must stand still for to count as steady. Chosen: two windows of the default length. A
schedule that acts in every step never stands still, however slowly it goes."""


@dataclass
class MadeStep:
    """A step that the host has made. Its numbers are on the device."""

    gradient_norm: Tensor
    """It is what the optimizer saw: after the host's own clipping."""
    gradient_norms: Tensor
    skipped: Tensor
    loss: Tensor | None = None
    """None where the host did not tell it."""
    stand_in: float = math.nan
    """What is watched in place of a loss that was not told."""


class GuestRates(FollowedRates):
    """The learning rate as the host has it. Its scheduler is never stepped; a copy of it tells what is to come."""

    saved: ClassVar[tuple[str, ...]] = (
        "stepped",
        "_recent",
        "_highest",
        "changes_by_itself",
        "_direction",
        "_quiet",
        "steady",
    )

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        super().__init__(optimizer, scheduler)
        self._direction = 0
        """It is that of the last change: 1 up, -1 down."""
        self._quiet = 0
        """Steps since then."""
        self.steady = 0
        """Steps in which the rate had stood still for long enough."""

    def advance(self, step: int) -> None:
        """The host steps its scheduler by itself."""

    def trend(self, step: int) -> int:
        """Any change counts, however small: a linear decay over a million steps is a decay."""
        if self._recent and isinstance(self._recent[-1], Tensor):  # on a GPU it is not read in every step
            return super().trend(step)
        return self._direction if self._quiet < _QUIET_STEPS else 0

    def _note(self, rate: Number) -> None:
        before = self._recent[-1] if self._recent else rate
        super()._note(rate)
        if isinstance(rate, Tensor) or isinstance(before, Tensor):
            return
        self._quiet += 1
        if rate != before:
            self._direction, self._quiet = (1 if rate > before else -1), 0
            self.changes_by_itself = True
        self.steady += self._quiet >= _QUIET_STEPS


class GuestEngine(Engine):
    """Knows model and optimizer of the host as an engine knows its own, and makes no step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: own.Measure,
        config: Config,
        scheduler: LRScheduler | None,
        world: World | None = None,
    ) -> None:
        with untouched():
            super().__init__(model, optimizer, loss_fn, config, scheduler, world)
        self.unit = "steps"
        self.precision.scaled = True  # the host may scale its loss: a step that overflows is its business

    def _ready(self, model: nn.Module) -> nn.Module:
        modes = [(module, module.training) for module in model.modules()]
        super()._ready(model)
        for module, training in modes:
            module.training = training
        return model

    def _placed(self, model: nn.Module) -> nn.Module:
        return model

    def _formats(self, exact: bool) -> Precision:
        """Without its switches for the whole of torch, which are the host's."""
        on_host = Precision(self.config.precision, torch.device("cpu"), exact=exact)
        on_host.device = self.device
        return on_host

    def _rates(self, scheduler: Any) -> Rates:
        return GuestRates(self.optimizer, scheduler)

    @property
    def rate_never_steady(self) -> bool:
        """Whether the learning rate was never steady so far, and as far as can be seen will not be."""
        rate = self.rate
        if not isinstance(rate, GuestRates) or rate.steady:
            return False
        left = max(0, self.config.max_steps - self.progress.global_step)  # the scheduler stands at this step, not at 0
        known = plan_ahead(rate, left) if self.has_end else unknown_plan(left)
        if len(known.steps) == 0:
            return rate.changes_by_itself
        flat = np.diff(known.steps)[np.diff(known.multipliers) == 0]
        return not (flat >= _QUIET_STEPS).any()

    def check_optimizer_state(self) -> None:
        """The host saves it."""

    def begin_at(self, step: int) -> None:
        """So many steps were made before anybody watched. What the rate did in them is not known."""
        self.progress.global_step = step
        if isinstance(self.rate, FollowedRates):
            self.rate.stepped = step

    # --- a step of the host ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look_at_gradients(self) -> MadeStep:
        """What the optimizer is about to see. Nothing here waits for the device."""
        given = [p.grad for p in self.full_step.parameters]
        present = [g.coalesce().values() if g.is_sparse else g for g in given if g is not None]
        absent = torch.full((), torch.nan, device=self.device)
        each = iter(torch._foreach_norm(present) if present else [])
        norms = stacked([absent if g is None else next(each) for g in given])
        total = torch.linalg.vector_norm(torch.nan_to_num(norms, nan=0.0) if len(present) < len(given) else norms)
        scale, found = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if isinstance(scale, Tensor):  # a GradScaler left its work to a fused optimizer
            total, norms = total / scale, norms / scale
        skipped = (found > 0).float().reshape(()) if isinstance(found, Tensor) else torch.zeros((), device=self.device)
        return MadeStep(total, norms, skipped)

    def before_step(self, *watching: StepHook) -> None:
        """The host is about to make a step."""
        for hook in (*watching, *self.hooks):
            hook.before_step()
        with self.rate.during(self.progress.global_step, 1.0):
            pass  # only to note the rate

    def full(self, batch: MadeStep, *watching: StepHook) -> StepOutput:
        """The host has made this step: tell all that watch."""
        stand_in = torch.full((), batch.stand_in, device=self.device)
        loss = stand_in if batch.loss is None else batch.loss.detach().to(self.device, copy=True).float().mean()
        if self.world.size > 1 and batch.loss is not None:
            self.world.later(loss)  # each rank knows that of its own rows
        output = StepOutput(loss, batch.gradient_norm, batch.skipped, batch.gradient_norms)
        if batch.loss is not None:
            self.meter.add(output)
        self.progress.tokens += 1
        self.progress.backward_passes += 1
        for hook in reversed(watching + self.hooks):
            hook.after_step(output)
        self.progress.global_step += 1
        self.progress.position += 1
        return output


def device_of(model: nn.Module) -> str:
    """Where the trained weights are; they must be together."""
    trained = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
    places = sorted({str(p.device) for p in trained})
    if len(places) > 1:
        raise ConfigError(
            f"the trained weights of {type(model).__name__} are on {', '.join(places)}; foretrain watches weights on "
            "one device: put the model on one, or train without it"
        )
    return places[0] if places else "cpu"


def loss_of_callable(probe: Callable[[], Any]) -> Callable[[nn.Module, Any], Tensor]:
    """Make a loss function of (model, batch) of a function that knows both."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = probe()
        if isinstance(value, Tensor):
            return value.detach()
        if not isinstance(value, Real):
            raise InputError(f"the probe gave {own.described(value)}; it must give the mean loss on held-out examples")
        return torch.tensor(float(value))

    return loss
