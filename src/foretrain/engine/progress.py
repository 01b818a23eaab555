"""How far a run is: what was done, what was measured, and which evaluation was best."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretrain.persist.stateful import Stateful

_COUNTS = ("global_step", "position", "tokens", "rows", "backward_passes", "probe_tokens", "evaluations_without_best")
HELD_OUT_RECORD = ("best_val_loss", "best_step", "last_val_loss", "evaluations_without_best")
"""What evaluations leave behind; those of weights that were taken back do not count."""
TAKEN_BACK = ("global_step", "position", *HELD_OUT_RECORD)
"""What a rollback brings back. All else was spent, and stays spent."""


@dataclass
class RunProgress(Stateful):
    """Counts and losses of one run, over all its parts."""

    saved = (
        *_COUNTS,
        *("last_train_loss", "last_val_loss", "last_metrics", "best_val_loss", "best_step", "evaluation_due"),
    )

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

    def after_load(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}")
