"""The one place that turns a fall of the loss into full steps, at the pace at which full steps lower it."""

from __future__ import annotations

import math

from foretrain.engine.engine import Engine
from foretrain.motion.losses import WindowLosses
from foretrain.persist.stateful import Stateful

MOST_PER_STEP = 10.0
"""Full steps that a step of a quasi-Newton leap counts at the most, whatever the slope says.
Chosen: where the optimizer hardly lowers the loss by itself, a leap would else be worth any number of steps."""


def in_steps(fall: float, pace: float) -> float:
    """Full steps that take the loss down by `fall`; 0 where full steps do not lower it."""
    steps = fall / pace if pace > 0 else math.nan
    return steps if math.isfinite(steps) else 0.0


class Worth(Stateful):
    """Knows three paces: of a noisy loss over many windows, of an exact loss lately, and of probe batches."""

    saved = ("_passes", "_probe_loss", "_probe_pace")

    def __init__(self, engine: Engine, slope: WindowLosses) -> None:
        self.engine = engine
        self.slope = slope
        self._passes = 0
        """Backward passes at the last probe of weights that stayed."""
        self._probe_loss = math.nan
        """What that probe said."""
        self._probe_pace = math.nan
        """Fall of the loss on probe batches per full step, lately."""

    def noisy(self, fall: float) -> float:
        """Full steps for a fall that was measured under noise."""
        return in_steps(fall, self.slope.per_step(low_noise=False))

    def exact(self, before: float, after: float) -> float:
        """Full steps between two exact losses, by their ratio: without noise a loss falls by a share per step."""
        pace = self.slope.last_log_fall
        if before > 0 and after > 0 and pace > 0:
            return in_steps(math.log(before / after), pace)
        return in_steps(before - after, self.slope.per_step(low_noise=True))

    def on_probes(self, fall: float, moved: int) -> float:
        """Full steps for a fall of the loss on probe batches, by a move of so many steps."""
        pace = self._probe_pace
        if not math.isfinite(pace):
            pace = self.slope.per_step(low_noise=False)
        if not fall > 0:
            return 0.0
        if not pace > 0:  # full steps alone do not get there, or nobody knows yet
            return float(max(1, moved))
        return min(fall / pace, MOST_PER_STEP * max(1, moved))

    def watch_probes(self, loss: float) -> None:
        """Note the loss on probe batches at a move's beginning: it shows how fast full steps alone lower it."""
        steps = self.engine.progress.backward_passes - self._passes
        if steps > 0 and math.isfinite(self._probe_loss):
            self._probe_pace = (self._probe_loss - loss) / steps
        self.remember_probes(loss)

    def remember_probes(self, loss: float) -> None:
        """Note the loss on probe batches of weights that stay."""
        self._passes, self._probe_loss = self.engine.progress.backward_passes, loss
