"""The learning rate of every step: as a schedule has it, or as the user's own optimizer and scheduler have it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from foretrain.config import ScheduleConfig
from foretrain.engine import schedule
from foretrain.engine.optim.build import RateControl
from foretrain.engine.schedule import DecayPlan
from foretrain.errors import ConfigError
from foretrain.persist.stateful import Stateful

Number = float | Tensor
"""A rate; on a GPU it may be a tensor, which is not read unless somebody asks."""
_REMEMBERED = 3
"""Rates of the last steps, by which it is told whether they rise or fall."""
_STEADY = 1e-3
"""Relative change over two steps below which a rate counts as constant."""


class RateSource(Protocol):
    """Changes the learning rate and the clipping of a run, such as recovery, tuning or a race of rates."""

    @property
    def rate_factor(self) -> float:
        """What the scheduled rate is to be multiplied with."""

    @property
    def clip(self) -> float:
        """The highest gradient norm; infinite where there is no such order."""


class Rates(Stateful, ABC):
    """What the rest of a trainer asks about learning rates. A rate is that of the first group of parameters."""

    used: Number
    """In the last update."""

    @property
    @abstractmethod
    def peak(self) -> float:
        """The highest rate, as far as it is known."""

    @abstractmethod
    def at(self, step: int) -> float:
        """Rate of the update at `step` before recovery changes it."""

    @abstractmethod
    def trend(self, step: int) -> int:
        """-1 where it falls, 1 where it rises, else 0."""

    @abstractmethod
    def during(self, step: int, factor: float) -> AbstractContextManager[None]:
        """An update inside the block is made at the rate of `step` times a factor."""

    def end_at(self, max_steps: int, plan: DecayPlan | None = None) -> None:
        """The length of the run is known now. plan: of the decay, where it does not follow from the length alone."""

    def advance(self, step: int) -> None:
        """So many steps are done."""

    def evaluated(self, held_out: float) -> None:
        """A held-out loss was measured."""

    def forget(self) -> None:
        """The optimizer's state was replaced from outside."""

    def own_numbers(self) -> list[Number] | None:
        """What the user has written into the optimizer by himself and no rollback may change; None: nothing."""
        return None

    def put_back(self, numbers: list[Number] | None) -> None:
        """The inverse of `own_numbers`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was saved by the other kind of rates says nothing about these."""
        if bool(state) == bool(self.saved):
            super().load_state_dict(state)


class ScheduledRates(Rates):
    """Every group's peak times what the configuration's schedule says. max_steps: None where nobody knows the end."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, max_steps: int | None, usual_steps: int) -> None:
        if any("lr" not in group for group in optimizer.param_groups):
            raise ConfigError(
                f"{type(optimizer).__name__} has no lr that a schedule could set; leave [schedule] out of the Config"
            )
        self.config = config
        self.control = RateControl(optimizer)
        if max_steps is None and config.type in ("wsd", "cosine"):  # nothing can fall towards an end that is not known
            config = config.model_copy(update={"type": "warmup"})
        self._schedule = schedule.build(config, self.peak, max_steps or usual_steps)
        self._end = max_steps
        self.used = self.at(0)

    @property
    def peak(self) -> float:
        return self.control.peak

    def at(self, step: int) -> float:
        return self._schedule(step)

    def trend(self, step: int) -> int:
        after = step + 1 if self._end is None else min(step + 1, self._end)
        return _direction(self.at(max(0, step - 1)), self.at(after))

    @contextmanager
    def during(self, step: int, factor: float) -> Iterator[None]:
        rate = self.at(step) * factor
        self.control.set(rate)
        self.used = rate
        yield

    def end_at(self, max_steps: int, plan: DecayPlan | None = None) -> None:
        self._schedule = schedule.build(self.config, self.peak, max_steps, plan)
        self._end = max_steps

    def forget(self) -> None:
        self.control.forget()


class FollowedRates(Rates):
    """What the user left in `group["lr"]` is the rate of the next step, whoever wrote it: he, or his scheduler.

    What recovery makes of it is there during the step only: a scheduler that goes on from the present number must not
    meet another one. scheduler: stepped once for each step that the run counts, predicted ones included, so that it
    ends where the run ends; one that watches a loss is told the held-out loss after every evaluation.
    """

    saved: ClassVar[tuple[str, ...]] = ("stepped", "_recent", "_highest", "_scheduled")
    _recent: list[Number]

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.watches_loss = isinstance(scheduler, ReduceLROnPlateau)
        self.changes_by_itself = False
        """Somebody changes it who has not told how."""
        self.stepped = 0
        self._recent = []
        """Rates of the last steps, the newest last."""
        self._highest = 0.0
        self.used = self._first()

    @property
    def peak(self) -> float:
        self._highest = max([self._highest, self.at(0), *(float(rate) for rate in self._recent)])
        return self._highest

    def at(self, step: int) -> float:
        return float(self._first())

    def trend(self, step: int) -> int:
        return _direction(float(self._recent[0]), float(self._recent[-1])) if self._recent else 0

    @contextmanager
    def during(self, step: int, factor: float) -> Iterator[None]:
        self.advance(step)
        rate = _copied(self._first())
        self._note(rate)
        if factor == 1.0:
            self.used = rate
            yield
            return
        self.used = rate * factor
        kept = self._numbers()
        self._write([number * factor for number in kept])
        try:
            yield
        finally:
            self._write(kept)

    def advance(self, step: int) -> None:
        if self.scheduler is None or self.watches_loss:
            return
        setattr(self.optimizer, "_opt_called", True)  # noqa: B010 - a replayed or predicted step does not call it
        while self.stepped < step:
            self.stepped += 1
            try:
                self.scheduler.step()
            except (ValueError, KeyError) as error:  # OneCycleLR past its end, or groups were added
                name, groups = type(self.scheduler).__name__, len(self.optimizer.param_groups)
                if (known := len(self.scheduler.base_lrs)) != groups:
                    raise ConfigError(
                        f"{name} was made for {known} of the optimizer's groups, and there are {groups} now; give the "
                        "optimizer all parameters from the start: frozen ones stay as they are"
                    ) from error
                raise ConfigError(
                    f"{name} cannot go on at step {step}: {error}; make it for as many steps as the run has"
                ) from error

    def evaluated(self, held_out: float) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(held_out)

    def own_numbers(self) -> list[Number] | None:
        return self._numbers() if self.scheduler is None else None

    def put_back(self, numbers: list[Number] | None) -> None:
        if numbers is not None:
            self._write(numbers)

    @property
    def _scheduled(self) -> Any:
        """The scheduler's state."""
        return None if self.scheduler is None else _plain(self.scheduler.state_dict())

    @_scheduled.setter
    def _scheduled(self, saved: Any) -> None:
        if self.scheduler is not None and saved is not None:
            self.scheduler.load_state_dict(_like(self.scheduler.state_dict(), saved))

    def after_load(self) -> None:
        self._recent = [_copied(rate) for rate in self._recent]

    def _first(self) -> Number:
        """nan for an optimizer that has no learning rate."""
        rate: Number = self.optimizer.param_groups[0].get("lr", torch.nan)
        return rate

    def _note(self, rate: Number) -> None:
        if not isinstance(rate, Tensor):
            self._highest = max(self._highest, rate)
        self._recent = [*self._recent, rate][-_REMEMBERED:]

    def _numbers(self) -> list[Number]:
        return [_copied(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]

    def _write(self, numbers: list[Number]) -> None:
        groups = [group for group in self.optimizer.param_groups if "lr" in group]
        for group, number in zip(groups, numbers, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(number) if isinstance(number, Tensor) else group["lr"].fill_(number)
            else:
                group["lr"] = number


def _direction(before: float, after: float) -> int:
    return (after > (1 + _STEADY) * before) - (after < (1 - _STEADY) * before)


def _copied(rate: Number) -> Number:
    """On the CPU a plain number; on a GPU a tensor, so that nobody waits for it."""
    if isinstance(rate, Tensor):
        return rate.detach().clone() if rate.is_cuda else float(rate)
    return float(rate)


def _plain(value: Any) -> Any:
    """What of a scheduler's state can be saved. Functions are left out: the scheduler is made with them again."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if _can_be_saved(item)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) if _can_be_saved(item) else None for item in value]
    return value


def _can_be_saved(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, Tensor, Mapping, list, tuple))


def _like(present: Any, saved: Any) -> Any:
    """A saved state in the types of the present one, which keeps what could not be saved."""
    if isinstance(present, Counter):
        return Counter(saved)
    if isinstance(present, Mapping):
        return {**present, **{key: _like(present.get(key), item) for key, item in saved.items()}}
    if isinstance(present, (list, tuple)) and len(present) == len(saved):
        pairs = zip(present, saved, strict=True)
        return type(present)(_like(one, other) if _can_be_saved(one) else one for one, other in pairs)
    return saved.detach().clone() if isinstance(saved, Tensor) else saved


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> LRScheduler:
    """A torch scheduler of this optimizer, or what makes one of it."""
    if not isinstance(scheduler, LRScheduler) and callable(scheduler):
        scheduler = scheduler(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"scheduler = {scheduler!r} is no learning-rate scheduler; give one of torch.optim.lr_scheduler, or a "
            "function that makes one of an optimizer"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError(
            f"the {type(scheduler).__name__} belongs to another optimizer than the one that trains; make it from the "
            "optimizer that is handed to HybridTrainer"
        )
    return scheduler
