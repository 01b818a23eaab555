"""Knows which losses and gradient norms are usual in this run, so that the detector can tell what is not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from copy import copy

import numpy as np

from foretrain.motion.losses import ENOUGH, FIRST, KEPT, MAD_TO_SIGMA, LossHistory, detrended, middle
from foretrain.persist.stateful import Stateful

SHORT = 10
"""Losses in which a strong oscillation shows. Chosen: the fewest in which alternation is clearly rarer by chance."""
FAST, MIDDLE, SLOW = 16, 64, 256
"""Steps that the averages reach back. Chosen: a factor of 4 between neighbours, from about one window to 25 windows."""
RELATIVE_FLOOR = 0.002
"""Share of itself by which even a loss without noise varies. Chosen: a rise by less harms nobody."""
CREEP = 1.1
"""Factor by which the sigma of the best average may grow at a time. Chosen: a jump must not widen its own limits."""


class LossBaseline(LossHistory):
    """Averages of the loss over three lengths of time and its noise. Only full steps enter."""

    saved = (*LossHistory.saved, "count", "fast", "middle", "slow", "lowest_slow", "residuals", "sigma")
    residuals: deque[float]

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.fast = self.middle = self.slow = math.nan
        self.lowest_slow = math.inf
        self.residuals = deque(maxlen=KEPT)
        """Losses minus `fast` as it was before them."""
        self.sigma = 0.0
        """Noise of one loss around its average."""

    def copy(self) -> LossBaseline:
        """A baseline of its own that knows the same."""
        made = copy(self)
        vars(made).update(
            {name: value.copy() for name, value in vars(self).items() if isinstance(value, (list, deque))}
        )
        return made

    def update(self, loss: float, limit: float) -> None:
        """Take in a finite loss. Above `limit` sigmas it counts as that, so that one spike does not move averages."""
        self.add(loss)
        if self.count:
            self.residuals.append(loss - self.fast)
        self._average(min(loss, self.fast + limit * self.sigma) if self.count >= ENOUGH else loss)
        if self.count <= FIRST:
            self.first = self.slow
        self._conclude()

    def update_calmly(self, losses: Sequence[float], limit: float) -> bool:
        """Take in many losses at once if none of them is remarkable. Otherwise return False and change nothing."""
        if self.count < ENOUGH or max(losses) > self.fast + limit * 2 / 3 * self.sigma:
            return False
        for loss in losses:
            self.add(loss)
            self.residuals.append(loss - self.fast)
            self._average(loss)
        self._conclude()
        return True

    def _average(self, loss: float) -> None:
        self.count += 1
        self.fast = _average(self.fast, loss, self.count, FAST)
        self.middle = _average(self.middle, loss, self.count, MIDDLE)
        self.slow = _average(self.slow, loss, self.count, SLOW)

    def _conclude(self) -> None:
        self.sigma = self._spread(list(self.residuals))
        if self.count >= ENOUGH // 2 and self.middle < self.best:
            # Right after a jump the average still falls, but with the sigma of the jump.
            self.best_sigma = min(self.sigma, CREEP * self.best_sigma) if self.best_sigma > 0 else self.sigma
            self.best = self.middle
        if self.count > SLOW:
            self.lowest_slow = min(self.lowest_slow, self.slow)

    def _spread(self, residuals: list[float]) -> float:
        """The noise by the median absolute deviation, which a transient hardly changes.

        Losses of small batches have a long upper tail: where the upper half spreads more, it counts.
        """
        if len(residuals) < 2:
            return 0.0
        ordered = sorted(residuals)
        centre = middle(ordered)
        both = middle(sorted([abs(value - centre) for value in ordered]))
        upper = middle(ordered[len(ordered) // 2 :]) - centre
        return max(MAD_TO_SIGMA * max(both, upper), RELATIVE_FLOOR * abs(self.fast), 1e-300)

    @property
    def setback(self) -> float:
        """The share of all that was gained so far which the last five losses have lost again."""
        return self.lost(self.lately) if self.last else 0.0

    @property
    def stable(self) -> bool:
        """Whether the recent average is no higher than the longer one, apart from noise."""
        return self.count >= ENOUGH and self.fast <= self.middle + 0.75 * self.sigma

    @property
    def improving(self) -> bool:
        """Whether the average loss still falls, beyond noise."""
        return self.fast < self.middle - 0.25 * self.sigma < self.slow

    def amplitude(self) -> float:
        """Mean distance of the last ten losses from their trend, in sigmas of the losses before them."""
        if len(self.residuals) < ENOUGH + SHORT:
            return 0.0
        distance = float(np.abs(detrended(list(self.last)[-SHORT:])).mean())
        return distance / self._spread(list(self.residuals)[:-SHORT])


class GradientBaseline(Stateful):
    """The usual gradient norm: a geometric mean over about 64 full steps."""

    saved = ("count", "log_norm")

    def __init__(self) -> None:
        self.count = 0
        self.log_norm = 0.0

    @property
    def recorded(self) -> bool:
        """Whether enough norms are known to call another one unusual."""
        return self.count >= ENOUGH

    @property
    def norm(self) -> float:
        return math.exp(self.log_norm)

    def update(self, norm: float, most: float) -> None:
        """Take in a norm. It changes the mean no more than one that is `most` times larger or smaller would."""
        if not norm > 0:
            return
        value = math.log(norm)
        if self.recorded:
            value = min(max(value, self.log_norm - math.log(most)), self.log_norm + math.log(most))
        self.count += 1
        self.log_norm = _average(self.log_norm, value, self.count, MIDDLE)


def _average(average: float, value: float, count: int, steps: int) -> float:
    """The plain mean while young, an exponential average later."""
    if count == 1:
        return value
    return average + (value - average) / min(count, steps)
