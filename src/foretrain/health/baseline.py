"""What losses and gradients are usual in this run, so that the guard can tell what is not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from foretrain.persist.stateful import Stateful

KEPT_LOSSES = 64
ENOUGH = 32
"""Values before anything is called unusual: spreads of fewer are too uncertain."""
SHORT = 10
RUIN = 2.0
"""Share of the first loss by which the median of the last ones is above it in a run that is ruined."""
SOUND = 1.0
"""The same, up to which a state is worth going back to."""
FIRST_LOSSES = 3
RELATIVE_FLOOR = 0.002
"""A loss without noise still varies by this share of itself before anybody should worry."""
MAD_TO_SIGMA = 1.4826


class Start(Stateful):
    """The losses before anything was learned or ruined, and what is far above them."""

    saved = ("losses",)
    losses: list[float]

    def __init__(self) -> None:
        self.losses = []

    def note(self, loss: float) -> None:
        if len(self.losses) < FIRST_LOSSES:
            self.losses.append(loss)

    @property
    def loss(self) -> float:
        """Of the very first step."""
        return self.losses[0] if self.losses else math.nan

    def limit(self, share: float, sigma: float) -> float:
        """An average loss above it is worse than untrained, by this share at least and beyond the noise of one loss.
        The first loss may have been luck; the highest of three hardly is, unless the second step was ruin already."""
        if not self.losses:
            return math.inf
        first, highest = self.losses[0], max(self.losses)
        return min(first + max(share * abs(first), 3 * sigma), highest + max(share * abs(highest), 2 * sigma))


class LossBaseline(Stateful):
    """Averages of the loss at three time constants and its noise, from full steps only."""

    saved = (
        *("count", "start", "fast", "middle", "slow", "first", "best", "best_sigma", "lowest_slow"),
        *("losses", "residuals", "sigma"),
    )
    losses: deque[float]
    residuals: deque[float]

    def __init__(self) -> None:
        self.count = 0
        self.start = Start()
        self.fast = self.middle = self.slow = math.nan
        """Averages over about 16, 64 and 256 steps."""
        self.first = math.nan
        """Mean of the first 8 losses."""
        self.best = math.inf
        """Lowest `middle`."""
        self.best_sigma = 0.0
        self.lowest_slow = math.inf
        self.losses = deque(maxlen=KEPT_LOSSES)
        self.residuals = deque(maxlen=KEPT_LOSSES)
        """Losses minus `fast` as it was before them."""
        self.sigma = 0.0
        """Noise of one loss around its average."""

    def update(self, loss: float, limit: float) -> None:
        """Take in a finite loss. Upwards it counts for no more than `limit` sigma, lest one spike move the averages."""
        self.start.note(loss)
        self.losses.append(loss)
        if self.count:
            self.residuals.append(loss - self.fast)
        if self.count >= ENOUGH:
            loss = min(loss, self.fast + limit * self.sigma)
        self.count += 1
        self.fast = _average(self.fast, loss, self.count, 16)
        self.middle = _average(self.middle, loss, self.count, 64)
        self.slow = _average(self.slow, loss, self.count, 256)
        self.sigma = self._spread(list(self.residuals))
        if self.count <= 8:
            self.first = self.slow
        if self.count >= ENOUGH // 2:
            self._take_best()
        if self.count > 256:
            self.lowest_slow = min(self.lowest_slow, self.slow)

    def update_calmly(self, losses: Sequence[float], limit: float) -> bool:
        """Take in many losses at once, if none of them is remarkable; else False, and nothing is changed."""
        if self.count < ENOUGH or max(losses) > self.fast + limit * 2 / 3 * self.sigma:
            return False
        for loss in losses:
            self.losses.append(loss)
            self.residuals.append(loss - self.fast)
            self.count += 1
            self.fast = _average(self.fast, loss, self.count, 16)
            self.middle = _average(self.middle, loss, self.count, 64)
            self.slow = _average(self.slow, loss, self.count, 256)
        self.sigma = self._spread(list(self.residuals))
        self._take_best()
        if self.count > 256:
            self.lowest_slow = min(self.lowest_slow, self.slow)
        return True

    def _take_best(self) -> None:
        """Right after a jump the long average still falls, but with the sigma of the jump: it may only creep up."""
        if self.middle < self.best:
            self.best_sigma = min(self.sigma, 1.1 * self.best_sigma) if self.best_sigma > 0 else self.sigma
            self.best = self.middle

    def _spread(self, residuals: list[float]) -> float:
        """From the median absolute deviation, so that a transient hardly counts; that of the upper half where it is
        larger, because losses of small batches have a long upper tail."""
        if len(residuals) < 2:
            return 0.0
        ordered = sorted(residuals)
        centre = _middle(ordered)
        both = _middle(sorted([abs(value - centre) for value in ordered]))
        upper = _middle(ordered[len(ordered) // 2 :]) - centre
        return max(MAD_TO_SIGMA * max(both, upper), RELATIVE_FLOOR * abs(self.fast), 1e-300)

    @property
    def setback(self) -> float:
        """Share of all that was gained so far which the last five losses (their median) have lost again."""
        if not self.losses:
            return 0.0
        now = _middle(sorted(list(self.losses)[-5:]))
        if self.gain <= 0:
            return float(now > self.far_above(0.0))
        return max(0.0, (now - self.best) / self.gain)

    @property
    def gain(self) -> float:
        """How far the average loss fell since the start; 0 while that is hardly more than noise."""
        fall = self.first - self.best
        return fall if fall > 10 * self.best_sigma else 0.0

    def far_above(self, share: float) -> float:
        """The loss at which this share of the gain is lost, far beyond noise; without any gain, twice the first."""
        if self.gain > 0:
            return self.best + max(share * self.gain, 10 * self.best_sigma)
        return self.first + max(abs(self.first), 10 * self.best_sigma)

    @property
    def ruined(self) -> bool:
        """The last losses are far above the first, whatever happened between."""
        return self.count >= ENOUGH and self._above_start(RUIN)

    def _above_start(self, share: float) -> bool:
        centre = self.recent
        sigma = MAD_TO_SIGMA * _middle(sorted(abs(loss - centre) for loss in self.losses))
        return centre > self.start.limit(share, sigma)

    @property
    def recent(self) -> float:
        """Median of the last losses; unlike the averages it takes high ones as they are."""
        return _middle(sorted(self.losses))

    @property
    def sound(self) -> bool:
        """A state that is worth going back to: no worse than twice the first loss, lately and on the whole. Noise is no
        excuse, because ruin is noisy, and to say no by mistake only leaves an older state in place."""
        if not self.losses:
            return True
        highest = self.start.limit(SOUND, 0.0)
        lately = _middle(sorted(list(self.losses)[-5:]))
        return lately <= highest and (self.count < ENOUGH or self.recent <= highest)

    @property
    def stable(self) -> bool:
        """Not rising: the recent average is no higher than the longer one, noise allowed for."""
        return self.count >= ENOUGH and self.fast <= self.middle + 0.75 * self.sigma

    @property
    def improving(self) -> bool:
        return self.fast < self.middle - 0.25 * self.sigma < self.slow

    def sign_changes(self, count: int) -> float:
        """Sign changes around a straight line, in 10 steps, above the 5 of independent noise; over the last `count`."""
        return sign_changes(list(self.losses)[-count:]) if len(self.losses) >= count else 0.0

    def amplitude(self) -> float:
        """Mean distance of the last 10 losses from their trend, in sigmas of those before."""
        if len(self.residuals) < ENOUGH + SHORT:
            return 0.0
        return float(np.abs(_detrended(list(self.losses)[-SHORT:])).mean()) / self._spread(
            list(self.residuals)[:-SHORT]
        )


class GradientBaseline(Stateful):
    """The usual gradient norm: a geometric mean over about 64 full steps."""

    saved = ("count", "log_norm")

    def __init__(self) -> None:
        self.count = 0
        self.log_norm = 0.0

    @property
    def recorded(self) -> bool:
        return self.count >= ENOUGH

    @property
    def norm(self) -> float:
        return math.exp(self.log_norm)

    def update(self, norm: float, most: float) -> None:
        """One norm changes the mean no more than a `most` times larger or smaller one would."""
        if not norm > 0:
            return
        value = math.log(norm)
        if self.recorded:
            value = min(max(value, self.log_norm - math.log(most)), self.log_norm + math.log(most))
        self.count += 1
        self.log_norm = _average(self.log_norm, value, self.count, 64)


def sign_changes(losses: Sequence[float]) -> float:
    """Sign changes around a straight line, in 10 steps, above the 5 of independent noise."""
    above = _detrended(losses) > 0
    changes = int(np.count_nonzero(above[1:] != above[:-1]))
    return 10 * (changes / (len(losses) - 1) - 0.5)


def _average(average: float, value: float, count: int, steps: int) -> float:
    """The plain mean while young, an exponential average later."""
    if count == 1:
        return value
    return average + (value - average) / min(count, steps)


def _middle(ordered: Sequence[float]) -> float:
    """The median of numbers in order."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _detrended(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    data = np.asarray(values)
    time = np.arange(len(data)) - (len(data) - 1) / 2
    data = data - data.sum() / len(data)
    return np.asarray(data - time * (time @ data / (time @ time)))
