"""Whether a saved state is one that this version can use: its format, and a number where a number belongs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foretrain.errors import CheckpointError
from foretrain.persist.codec import unmarked
from foretrain.persist.typed import LARGEST_NUMBER, kind_of

FORMAT = 2
"""The format of states and checkpoints. 1: development versions before 0.1.0."""
IN_PIECES = 3
"""Several processes saved the state, each the pieces that it holds (`foretrain.persist.shards`)."""
USABLE = (FORMAT, IN_PIECES)
WITH_READABLE_WEIGHTS = (1, *USABLE)
"""Formats in which weights, averages and the configuration are saved alike."""
_OTHERS = frozenset({"model", "optimizer", "average", "rates", "predictor"})
"""Parts of a state that are checked where they are put back: of another model, or a user's own."""


class FormatError(CheckpointError):
    """A state of another format. It is not damaged: the version that saved it can use it."""


def check_format(found: Any, origin: str) -> None:
    """Raises FormatError unless a whole state of the format `found` (None: it has none) can be read."""
    if found == FORMAT:
        return
    if isinstance(found, int) and found > FORMAT:
        raise FormatError(
            f"{origin}: saved by a newer version (format {found}, this one reads format {FORMAT}); update foretrain"
        )
    earlier = 1 if found is None else found
    raise FormatError(
        f"{origin}: saved by an earlier development version (format {earlier}, this one reads format {FORMAT}); "
        "finish that run with the version that began it, or begin anew in another folder. Its weights alone can still "
        "be read: `foretrain export`, or load_weights"
    )


def check_form(own: Any, saved: Any, place: str = "") -> None:
    """Raises ValueError that names the first place where `saved` holds another kind of value than `own`, a state that
    was just made. What is None, or empty, in one of them says nothing about the other, and what only one of them has
    is not looked at: settings may have changed since."""
    own, saved = unmarked(own), unmarked(saved)
    kind, other = _kind(own), _kind(saved)
    if isinstance(saved, int) and abs(saved) > LARGEST_NUMBER:
        raise ValueError(f"{place} is a number of {len(hex(saved)) * 4} bits")
    if own is None or saved is None:
        return
    if kind != other:
        raise ValueError(f"{place} is {other}, not {kind}")
    if kind == "a mapping":
        for key in (own.keys() & saved.keys()) - _OTHERS:
            check_form(own[key], saved[key], f"{place}.{key}" if place else str(key))
    elif kind == "a list":
        for number, (mine, theirs) in enumerate(zip(own, saved, strict=False)):
            check_form(mine, theirs, f"{place}.{number}")
        if not own and len({_kind(item) for item in saved if item is not None}) > 1:
            raise ValueError(f"{place} holds values of several kinds")
    elif kind == "a tensor" and own.ndim != saved.ndim:
        raise ValueError(f"{place} has {saved.ndim} dimensions, not {own.ndim}")


def _kind(value: Any) -> str:
    """In words. A tensor of one number is as good as a number."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and not value.ndim):
        return "a number"
    return kind_of(value)
