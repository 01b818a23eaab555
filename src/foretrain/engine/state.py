"""The state of an engine: what is saved, how it is put back, and the way back inside of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from foretrain.engine.meters import Stopwatch
from foretrain.engine.optim.build import plain_state
from foretrain.engine.optim.muon import Muon
from foretrain.engine.progress import TAKEN_BACK
from foretrain.engine.rates import ScheduledRates
from foretrain.engine.trained import arranged
from foretrain.errors import CheckpointError, is_out_of_memory
from foretrain.persist.codec import random_state, restore_random_state
from foretrain.persist.model_state import (
    changing_state,
    check_groups,
    check_model,
    checksum,
    left_out,
    restore_model,
    restore_optimizer,
)
from foretrain.persist.stateful import StateError, entry

if TYPE_CHECKING:
    from foretrain.engine.engine import Engine

State = dict[str, Any]


def of_run(engine: Engine) -> State:
    """All that changes while a run goes on."""
    return {
        **of_weights(engine),
        "trained": engine.trained.state_dict(),
        "optimizer": plain_state(engine.optimizer),
        "precision": engine.precision.state_dict(),
        "rates": engine.rate.state_dict(),
        "random": random_state(),
        "progress": engine.progress.state_dict(),
    }


def of_weights(engine: Engine) -> State:
    """What was learned: weights that were trained, buffers and averages."""
    average = engine.average.state_dict() if engine.average is not None else None
    return {"model": changing_state(engine.named, engine.trained.never()), "average": average}


def put_back(engine: Engine, state: State, origin: str) -> None:
    """A saved state, in place."""
    constant = _checked(engine.named, state, origin)
    saved = entry(state, "trained", "Engine")
    engine.trained.hold(saved["groups"], state["optimizer"]["param_groups"])
    check_groups(engine.optimizer, state["optimizer"]["param_groups"], origin)
    if engine.trained.put_back(saved, _names_in(engine.named, state["model"])):
        engine.cover_trained()
    _put_back_training(engine, state, origin, constant)
    engine.clock = Stopwatch(float(entry(state, "seconds", "Engine")))
    engine.meter.load_state_dict(entry(state, "meter", "Engine"))
    engine.progress.load_state_dict(entry(state, "progress", "Engine"))


def load_weights(engine: Engine, state: State, origin: str) -> None:
    """What `of_weights` gave; all else stays."""
    constant = _checked(engine.named, state, origin)
    engine.trained.learned(_names_in(engine.named, state["model"]))
    if engine.average is not None:
        engine.average.cover(engine.trained.ever, engine.trained.names)
    _put_back_weights(engine, state, origin, constant)


def rewind(engine: Engine, state: State) -> None:
    """Back to an earlier state of the same run. Rates that a user wrote into the optimizer stay as they are."""
    engine.full_step.changing = True
    rates = engine.rate.own_numbers()
    constant = left_out(engine.named, state["model"])  # what was unfrozen since may have been added to the snapshot
    saved, now = state["trained"], engine.trained.groups()
    state = {**state, "optimizer": arranged(state["optimizer"], saved["groups"], engine.optimizer, now)}
    _put_back_training(engine, state, "the snapshot", constant)
    engine.rate.put_back(rates)
    engine.full_step.changing = False
    if not state["optimizer"]["state"]:  # of before the first step: its tensors are made anew
        engine.execution.forget()
    for name in TAKEN_BACK:
        setattr(engine.progress, name, state["progress"][name])


def _put_back_training(engine: Engine, state: State, origin: str, constant: Collection[str]) -> None:
    """Weights, optimizer, average, loss scale and random states. constant: weights that it does not hold."""
    if engine.away is not None:
        engine.away.back()
    _put_back_weights(engine, state, origin, constant)
    keep = not engine.own_optimizer and isinstance(engine.rate, ScheduledRates)
    saved = state["optimizer"]
    if isinstance(engine.optimizer, Muon):
        saved = {**saved, "state": engine.optimizer.with_rows(saved["state"])}
    restore_optimizer(engine.optimizer, saved, origin, keep_settings=keep)
    engine.precision.load_state_dict(state["precision"])
    restore_random_state(state["random"])
    engine.rate.load_state_dict(state["rates"])
    engine.rate.forget()


def _put_back_weights(engine: Engine, state: State, origin: str, constant: Collection[str]) -> None:
    restore_model(engine.named, state["model"], origin, constant)
    if (engine.average is None) != (state["average"] is None):
        raise CheckpointError(f"{origin}: evaluation.ema_decay was switched on or off since; use the same setting")
    if engine.average is not None:
        engine.average.load_state_dict(state["average"])


def _names_in(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Names of the parameters that a state holds, in the model's order."""
    return [name for name, _ in model.named_parameters() if name in saved]


def _checked(model: nn.Module, state: State, origin: str) -> Collection[str]:
    """Refuse a state of another model, or of other weights that are not trained; the names of these."""
    constant = left_out(model, state["model"]) if state["frozen"] else {}
    if state["frozen"] and state["frozen"] != (checksum(constant) if constant else ""):
        raise CheckpointError(
            f"{origin}: its frozen weights are not those of this model; start from the same weights, and freeze "
            "the same ones"
        )
    check_model(model, state["model"], origin, constant)
    return constant


class Fingerprint:
    """The checksum of weights that are not trained: it takes long, so it is remembered while they are the same."""

    def __init__(self) -> None:
        self._known: tuple[list[str], str] | None = None

    def of(self, weights: Mapping[str, Tensor]) -> str:
        """Empty if there are none."""
        if self._known is None or self._known[0] != list(weights):
            self._known = (list(weights), checksum(weights) if weights else "")
        return self._known[1]


@contextmanager
def as_checkpoint_error(origin: str) -> Iterator[None]:
    """Whatever a state that does not fit leads to is told as one kind of error."""
    try:
        yield
    except (StateError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{origin}: it does not hold the state of such a trainer ({type(error).__name__}: {error}); "
            "use the settings it was saved with, or start a new run"
        ) from error
