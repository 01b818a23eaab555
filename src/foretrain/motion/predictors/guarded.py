"""A predictor behind the fence: what a class of the user's own does wrong costs its forecasts, never the run.

The first failure starts it anew, the second switches it off. What it is handed are copies, what it gives back is
checked and copied, and its state is taken only if a checkpoint can hold it.
"""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from foretrain.engine.fence import ContractError, Failure, Fence, Ordered, OwnCodeError
from foretrain.errors import ConfigError, is_out_of_memory
from foretrain.motion.predictors.base import Array, Followed, Forecast, Predictor, Situation
from foretrain.persist.codec import Snapshot, put_together, snapshot, take_apart
from foretrain.persist.stateful import entry

MOST_FAILURES = 2
"""With the first it starts anew, with this one it is off. Chosen: a second failure is no accident."""
_LARGEST_TREE = 8 * 2**20
"""Characters of a state that are not in tensors. Chosen: they are written as JSON within every checkpoint."""
_DEEPEST = 50
"""Levels of a state. Chosen: far below what Python's recursion allows."""
_STORED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
)
"""Number formats that a checkpoint holds."""
_OURS = "foretrain."


def check_predictor(predictor: object) -> None:
    """Whether it can be a predictor at all: said before anything is trained."""
    if isinstance(predictor, type):
        raise ConfigError(f"predictor is the class {predictor.__name__}; give an object of it: {predictor.__name__}()")
    kind = type(predictor).__name__
    if not isinstance(predictor, Predictor):
        raise ConfigError(f"predictor is of type {kind}; give an object of a class that implements foretrain.Predictor")
    if not isinstance(getattr(predictor, "name", None), str):
        raise ConfigError(f"the predictor {kind} has no name; give its class one: name = {kind.lower()!r}")


class GuardedPredictor:
    """All that a run asks of a predictor. It raises nothing but Ordered, and out of memory of foretrain's own ones."""

    def __init__(self, predictor: Predictor, fence: Fence | None = None) -> None:
        self.predictor = predictor
        self.fence = fence or Fence()
        self.name = predictor.name
        self.own = not type(predictor).__module__.startswith(_OURS)
        self.strikes = 0
        self.untold: list[tuple[Failure, bool]] = []
        """Failures that nobody was told of yet, and whether the predictor was off after them."""

    @property
    def off(self) -> bool:
        return self.strikes >= MOST_FAILURES

    def learn(self, situation: Situation, followed: Sequence[Followed], horizons: list[int]) -> Forecast | None:
        """`observe`, then `forecast`; None where that failed. If it is left by an order, it is as it was before."""
        if self.off:
            return None
        before: Snapshot | None = None
        handed, told = situation, followed
        try:
            if self.own:
                before = self._call("state_dict", check=snapshot, again=True)
                handed, told = _own_copy(situation), [_own_followed(item) for item in followed]
            self._call("observe", handed, told, again=True)
            forecast: Forecast = self._call(
                "forecast", handed, horizons, check=lambda given: _checked(given, situation), again=True
            )
            return forecast
        except OwnCodeError as error:
            self.strike(error.failure)
            return None
        except Ordered:
            if before is not None:
                self.load(put_together(before))
            raise

    def strike(self, failure: Failure) -> None:
        """Something that prediction needs failed."""
        if self.off:
            return
        self.strikes += 1
        self.untold.append((failure, self.off))
        if not self.off:
            self.reset()

    def reset(self) -> None:
        if self.off:
            return
        try:
            self._call("reset")
        except (OwnCodeError, Ordered) as error:
            self._give_up(error)

    def _give_up(self, error: OwnCodeError | Ordered) -> None:
        """What cannot even start anew is off; left in the middle of it, too."""
        self.strikes = MOST_FAILURES
        if isinstance(error, OwnCodeError):
            self.untold.append((error.failure, True))
        else:
            failure = Failure(f"{type(self.predictor).__name__}.reset()", "it was interrupted", "")
            self.untold.append((failure, True))

    def _call(
        self, method: str, *arguments: Any, check: Callable[[Any], Any] = lambda given: given, again: bool = False
    ) -> Any:
        where = f"{type(self.predictor).__name__}.{method}()"

        def called() -> Any:
            return check(getattr(self.predictor, method)(*arguments))

        if self.own:
            return self.fence.call(where, called, again=again)
        try:
            return called()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return self.fence.call(where, _raise, error)

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """As a checkpoint can hold it; None where it cannot be had, and then the predictor has started anew."""
        if self.off:
            return None
        try:
            found: dict[str, Any] = self._call("state_dict", check=_storable if self.own else lambda given: given)
        except OwnCodeError as error:
            self.strike(error.failure)
        except Ordered:
            self.reset()
        else:
            return found
        return None

    def load(self, state: dict[str, Any] | None) -> None:
        """A state that `state` gave; without one it starts anew."""
        if self.off:
            return
        if state is None:
            self.reset()
            return
        try:
            self._call("load_state_dict", copy.deepcopy(state))  # it may keep what it is given
        except OwnCodeError as error:
            self.strike(error.failure)
        except Ordered:
            self.reset()

    def state_dict(self) -> dict[str, Any]:
        state = self.state()
        return {"name": self.name, "state": state, "strikes": self.strikes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Another predictor than the saved one starts as it is."""
        name, strikes, saved = (entry(state, name, "GuardedPredictor") for name in ("name", "strikes", "state"))
        if self.name == name:
            self.strikes = int(strikes)
            self.load(saved)


def _raise(error: Exception) -> None:
    raise error


# --- what it is handed -----------------------------------------------------------------------------------------------


def _own_copy(situation: Situation) -> Situation:
    return replace(situation, state=situation.state.copy(), gram=situation.gram.copy())


def _own_followed(item: Followed) -> Followed:
    return replace(item, situation=_own_copy(item.situation), dots=item.dots.copy(), square=item.square.copy())


# --- what it gives back ----------------------------------------------------------------------------------------------


def _checked(given: Any, situation: Situation) -> Forecast:
    """The forecast as a copy, if it is one. Numbers that are none are borne: such a move is refused."""
    if not isinstance(given, Forecast):
        raise ContractError(f"forecast() must return a foretrain.Forecast, and returned {_kind(given)}")
    try:
        horizons = tuple(operator.index(horizon) for horizon in given.horizons)
    except TypeError:
        horizons = ()
    if not horizons or horizons[0] < 1 or any(a >= b for a, b in pairwise(horizons)):
        raise ContractError("Forecast.horizons must be whole steps above 0, ascending: give back those that were asked")
    groups, directions = situation.gram.shape[:2]
    count = len(horizons)
    try:
        disagreement = float(given.disagreement)
    except (TypeError, ValueError):
        raise ContractError(f"Forecast.disagreement must be a number, and is {_kind(given.disagreement)}") from None
    return Forecast(
        horizons,
        _array("coefficients", "[horizons, G, R]", given.coefficients, (count, groups, directions)),
        _array("loss", "[horizons]", given.loss, (count,)),
        _array("loss_deviation", "[horizons]", given.loss_deviation, (count,)),
        disagreement,
    )


def _array(name: str, form: str, given: Any, shape: tuple[int, ...]) -> Array:
    wanted = f"Forecast.{name} must be an array of numbers of shape {form} = {list(shape)}"
    try:
        found = np.asarray(given)
    except Exception:  # noqa: BLE001 - a tensor on a GPU, a ragged list, an object with ideas of its own
        raise ContractError(f"{wanted}, and is {_kind(given)}") from None
    if found.dtype.kind not in "fiu":
        raise ContractError(f"{wanted}, and is {_kind(given)} of {found.dtype}")
    if found.shape != shape:
        raise ContractError(f"{wanted}, and has the shape {list(found.shape)}")
    return np.array(found, dtype=np.float64)


def _storable(state: Any) -> dict[str, Any]:
    """A copy of a state that a checkpoint can hold and give back."""
    if not isinstance(state, dict):
        raise ContractError(f"state_dict() must return a dict, and returned {_kind(state)}")
    parts = take_apart(state)
    for name, tensor in parts.tensors.items():
        if tensor.dtype not in _STORED or tensor.layout != torch.strided or tensor.device.type == "meta":
            form = f"{tensor.dtype}, {tensor.layout}, on {tensor.device.type}"
            raise ContractError(f"state_dict() may hold dense tensors of usual formats, and {name} is {form}")
    size = len(json.dumps(parts.tree, allow_nan=False))
    if size > _LARGEST_TREE:
        text = f"{size >> 20} MB that are not tensors, {_LARGEST_TREE >> 20} MB at the most: keep numbers in tensors"
        raise ContractError(f"state_dict() holds {text}")
    if _depth(parts.tree) > _DEEPEST:
        raise ContractError(f"state_dict() is nested more than {_DEEPEST} deep")
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parts.tensors.items()}
    found: dict[str, Any] = put_together(Snapshot(tensors, parts.tree))
    return found


def _depth(tree: Any) -> int:
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return 1 + max((_depth(item) for item in items if isinstance(item, (dict, list))), default=0)


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
