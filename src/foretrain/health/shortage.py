"""Explains that memory ran out: what was asked for and where, what can be made smaller, and what to advise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import nn

from foretrain.config import Config, changed
from foretrain.config.paths import value_of
from foretrain.config.units import format_size
from foretrain.engine.recomputing import can_recompute
from foretrain.errors import ConfigError, root_of_shortage

_PARTS = {
    "Engine.to_device": "the copy of a batch to the device",
    "FullStep.loss": "the forward pass",
    "FullStep._backward": "the backward pass",
    "FullStep.update": "the update of the weights",
    "GraphedStep._record": "the recording of a CUDA graph",
    "GraphedGradient._record": "the recording of a CUDA graph",
    "GraphedLoss._record": "the recording of a CUDA graph",
    "Forward.probe": "a probe",
    "Forward.probe_all": "a probe",
    "Forward.evaluate": "an evaluation",
    "Snapshots.take": "a snapshot",
    "Trajectory.displacement": "a predicted displacement",
    "Observer.measure": "the end of a window",
    "Observer.learn": "the end of a window",
    "QuasiNewton.leap": "a quasi-Newton leap",
    "Secant.gradient_known": "the memory of quasi-Newton leaps",
    "CheckpointStore.save": "a checkpoint",
    "ComposedState.load_state_dict": "the loading of a state",
}
"""What a function does, in words. The outermost and the innermost of those on the stack say what was going on."""
RECORDING = _PARTS["GraphedStep._record"]
_ASKED = re.compile(r"ried to allocate ([0-9.]+ ?[A-Za-z]+)")


@dataclass(frozen=True, slots=True)
class Shortage:
    """What is known of one lack of memory. It holds words only, so it keeps no tensor alive."""

    asked: str
    """The memory that was asked for; empty where the allocator did not say."""
    doing: str
    place: str
    """The innermost line of Python."""

    @property
    def recording(self) -> bool:
        return RECORDING in self.doing

    def __str__(self) -> str:
        asked = f"{self.asked} more could not be had" if self.asked else "no more could be had"
        return f"during {self.doing} ({self.place}) {asked}"


def look_at(error: BaseException) -> Shortage | None:
    """Read what an error says about a lack of memory. Return None if it is another error."""
    root = root_of_shortage(error)
    if root is None:
        return None
    found = _ASKED.search(str(root))
    asked = found[1] if found is not None else ""
    if asked.endswith("bytes"):
        asked = format_size(int(asked.split()[0]), 1)
    return Shortage(asked, *_where([*_frames(error), *(_frames(root) if root is not error else ())]))


def _frames(error: BaseException) -> Iterator[TracebackType]:
    """The frames of an error, from the outermost to the innermost."""
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _where(traces: list[TracebackType]) -> tuple[str, str]:
    parts: list[str] = []
    place = "an unknown place"
    for trace in traces:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__"))
        part = _PARTS.get(code.co_qualname) if module.startswith("foretrain.") else None
        if part is not None and part not in parts:
            parts.append(part)
        place = f"{code.co_filename.rpartition('/')[2]}, line {trace.tb_lineno}"
    if not parts:
        return "a step", place
    return (parts[0] if len(parts) == 1 else f"{parts[-1]} of {parts[0]}"), place


# --- what can be made smaller ----------------------------------------------------------------------------------------


def next_smaller(config: Config) -> Config | None:
    """The next configuration that computes the same in less memory; None when there is none.

    First more and smaller parts of each batch, down to one row; then every block is computed twice.
    """
    parts = _more_parts(config)
    if parts is not None:
        return changed(config, {"accumulation_steps": parts})
    if float(config.engine.activation_checkpointing) < 1:
        return changed(config, {"engine.activation_checkpointing": True})
    return None


def _more_parts(config: Config) -> int | None:
    """At least twice as many parts, all of one size; None where updates in the backward pass cannot wait for parts."""
    if config.engine.update_in_backward:
        return None
    wanted = range(2 * config.accumulation_steps, config.batch_size + 1)
    return next((parts for parts in wanted if config.batch_size % parts == 0), None)


# --- what to advise --------------------------------------------------------------------------------------------------


def _unlike(*enough: Any) -> Callable[[Any], bool]:
    return lambda value: value not in enough


_REMEDIES: tuple[tuple[str, Callable[[Any], bool], Any], ...] = (
    ("engine.fused_loss", _unlike(True), True),
    ("accumulation_steps", lambda value: True, None),
    ("engine.activation_checkpointing", lambda share: float(share) < 1, True),
    ("memory.snapshots", _unlike("pinned"), "pinned"),
    ("memory.basis", _unlike("pinned"), "pinned"),
    ("engine.update_in_backward", _unlike(True), True),
    ("optimizer.state_type", _unlike("bf16", "8bit"), "bf16"),
    ("optimizer.state_type", _unlike("8bit"), "8bit"),
)
"""Settings that save memory, the cheapest first: name, whether a value leaves something to save, and what to set."""
_TOGETHER_WITH = {"engine.update_in_backward": {"optimizer.gradient_clip_norm": 0}}
_ANEW = "optimizer.state_type"
"""A run cannot continue with this change, because moments are stored in another form."""


def advice(config: Config, model: nn.Module) -> str:
    """Name the settings that would save memory and are not set yet."""
    found: list[str] = []
    for name, worth_it, value in _REMEDIES:
        section, _, key = name.rpartition(".")
        if any(name in text for text in found):
            continue
        if name == "engine.fused_loss" and not hasattr(model, key):
            continue  # a model of one's own: this switch is of language models of ours
        if name == "engine.activation_checkpointing" and not can_recompute(model, config):
            continue
        if section == "memory" and config.hybrid.mode == "off":
            continue  # there are neither snapshots nor directions
        if name == "accumulation_steps":
            value = _more_parts(config)
        if value is None or not worth_it(value_of(config, name)):
            continue
        changes = {name: value} | _TOGETHER_WITH.get(name, {})
        if _possible(config, changes):
            found.append(_in_words(changes) + (" (in a new run)" if name == _ANEW else ""))
    if not found:
        return "every setting that saves memory is on: use a smaller model, a shorter model.context or less batch_size"
    return f"to make it fit, what costs least first: {'; '.join(found)}"


def _possible(config: Config, changes: dict[str, Any]) -> bool:
    """Whether these settings are allowed together with all others."""
    try:
        changed(config, changes)
    except ConfigError:
        return False
    return True


def _in_words(changes: dict[str, Any]) -> str:
    return " with ".join(f"{name} = {'true' if value is True else repr(value)}" for name, value in changes.items())
