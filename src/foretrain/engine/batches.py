"""Endless batches of any loader, and the way back to one of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from foretrain.config import Config
from foretrain.engine.fence import put_back, randomness, same_randomness
from foretrain.errors import CheckpointError, InputError
from foretrain.events import Event, Notice
from foretrain.persist.codec import random_state, restore_random_state

_LOOK_AT_ALL = 100
"""Batches after which it is looked at again whether a loader draws from generators that are slow to read."""


def batches_in(loader: Iterable[Any]) -> float | None:
    """Return the batches of one pass over a loader; None for one that does not say."""
    try:
        return getattr(loader, "batches_per_epoch", None) or len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def steps_in(epochs: float, loader: Iterable[Any]) -> int:
    """Batches of so many passes over a loader."""
    per_epoch = batches_in(loader)
    if per_epoch is None:
        raise InputError(
            "epochs needs a loader that says how many batches it has, by len(loader); give max_steps instead"
        )
    if not epochs > 0:
        raise InputError(f"epochs = {epochs}: it must be above 0")
    return max(1, math.ceil(epochs * per_epoch - 1e-6))


def with_steps(config: Config, loader: Iterable[Any]) -> Config:
    """Return the configuration with `epochs` turned into `max_steps`."""
    if config.epochs is None:
        return config
    return config.model_copy(update={"max_steps": steps_in(config.epochs, loader), "epochs": None})


def set_epoch(loader: Iterable[Any], number: int) -> None:
    """Tell the sampler of a DataLoader which pass begins: a DistributedSampler shuffles by that number, and without it
    every pass would have the order of the first."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(number)


def checked_state(state: Any, origin: str) -> dict[str, Any] | None:
    """A state of `Batches` as a checkpoint had it. Raises CheckpointError where it is none."""
    if state is None:
        return None
    try:
        known = isinstance(state["start"], int) and state["random"].keys() == random_state().keys()
    except (KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise CheckpointError(
            f"{origin}: it does not hold where the run was in its data; start from another checkpoint, or a new run"
        )
    return dict(state)


class Batches:
    """A loader with `seek(position)` goes anywhere at once; any other is read again from its start.

    A finite one starts over at its end. Where its order is drawn anew for each pass, as in a shuffled torch DataLoader,
    it follows from the random state that the pass began with, which is why `state` holds that.
    """

    def __init__(self, loader: Iterable[Any], emit: Callable[[Event], None]) -> None:
        self._loader = loader
        self._emit = emit
        self._pass: dict[str, Any] | None = None
        self._before: tuple[Any, ...] | None = None
        """Random states before the loader was asked for the last batch."""
        self._draws_elsewhere = False
        """It draws from more than torch's generator."""

    def state(self) -> dict[str, Any] | None:
        """Which pass over the loader this is. Nothing to know for one that can seek."""
        return self._pass

    def give_back(self) -> None:
        """The last batch was not trained on, and will be asked for again: what drawing it took is put back."""
        if self._before is not None:
            put_back(self._before)

    def after(self, position: int, state: dict[str, Any] | None = None) -> Generator[Any, None, None]:
        """The batches after the first `position` ones. `state`: as it was when the run was there."""
        if hasattr(self._loader, "seek"):
            self._loader.seek(position)
            yield from self._loader
            return
        if position:
            text = (
                f"reading {position} batches again to get to where the run was: the loader has no seek(), as "
                "foretrain.Loader has"
            )
            self._emit(Notice(text, level="info"))
        seen, random_there = 0, random_state()
        for number in itertools.count():
            set_epoch(self._loader, number)
            if state is not None and seen == state["start"] <= position:
                restore_random_state(state["random"])
            self._pass = {"start": seen, "random": random_state()}
            for batch in self._one_pass():
                seen += 1
                if seen == position:
                    restore_random_state(random_there)  # reading has drawn from it
                if seen > position:
                    yield batch
            if seen == 0:
                raise InputError("the loader gave no batch at all; it must give the same batches every time it is read")
            if seen == self._pass["start"]:
                once = " (a generator or iterator is read only once)" * (iter(self._loader) is self._loader)
                raise InputError(
                    f"the loader gave {seen} batches and none when it was read again{once}; give a list, a DataLoader, "
                    f"or an object whose __iter__ begins anew, or set max_steps to at most {seen}"
                )

    def _one_pass(self) -> Generator[Any, None, None]:
        """Where the loader fails, what it drew for that batch is put back: what is saved then goes on as if the loader
        had never been asked."""
        self._before = randomness()
        try:
            iterator = iter(self._loader)
            for number in itertools.count():
                wide = self._draws_elsewhere or number % _LOOK_AT_ALL == 0
                self._before = randomness() if wide else (torch.get_rng_state(),)
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                if wide and not self._draws_elsewhere:
                    self._draws_elsewhere = not same_randomness(self._before, randomness())
                yield batch
        except GeneratorExit:
            raise
        except BaseException:
            self.give_back()
            raise
