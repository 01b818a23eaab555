"""How far a run is: what was done, what was measured, and which evaluation was best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_COUNTS = ("global_step", "position", "tokens", "backward_passes", "evaluations_without_best")
_LOSSES = ("best_val_loss", "last_val_loss", "last_train_loss")
HELD_OUT_RECORD = ("best_val_loss", "best_step", "last_val_loss", "evaluations_without_best")
"""What evaluations leave behind; those of weights that were taken back do not count."""


@dataclass
class RunProgress:
    """Counts and losses of one run, over all its parts."""

    global_step: int = 0
    """Virtual steps: full steps, and predicted ones as far as they were worth one."""
    position: int = 0
    """Batches of the data that were used; a rollback can go back in it."""
    tokens: int = 0
    """Tokens or samples, as `Engine.unit` says, that were learned from."""
    rows: int = 0
    """Rows of the largest batch so far."""
    backward_passes: int = 0
    probe_tokens: int = 0
    """Tokens or samples that moves were probed with: nothing was learned from them."""
    last_train_loss: float | None = None
    last_val_loss: float | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)
    best_val_loss: float | None = None
    best_step: int | None = None
    """Step at which it was measured."""
    evaluations_without_best: int = 0
    evaluation_due: bool = False
    """An evaluation was begun and is not finished: a run that is resumed makes it first."""

    def state_dict(self) -> dict[str, Any]:
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return state | {"metrics": dict(state.pop("last_metrics"))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.probe_tokens = int(state.get("probe_tokens", 0))
        self.best_step = state.get("best_step")  # not there in older checkpoints
        self.evaluation_due = bool(state.get("evaluation_due", False))
        self.last_metrics = dict(state.get("metrics", {}))
        self.rows = int(state.get("rows", 0))
        for name in _COUNTS:
            if (count := int(state[name])) < 0:
                raise ValueError(f"{name} = {count}")
            setattr(self, name, count)
        for name in _LOSSES:
            setattr(self, name, None if state[name] is None else float(state[name]))
