"""Keeps the losses of full steps. Two readers share `LossHistory`, a third sums windows up; each is fed at one place.

    reader          fed by                        after a rollback           answers
    LossBaseline    health.detect, step by step   is as it was before        what loss is usual now?
    Monitor         health.vitals, many at once   judges what was undone     how did the run do since the last time?
    WindowLosses    motion.observer, per window   knows the undone windows   how fast does the loss fall, how noisily?

They are three because a rollback treats them in three ways, and because runs without prediction have only the second.
One rule for what is no number: a loss counts only if it is finite and its step was not skipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.persist.stateful import Stateful

Array = NDArray[np.float64]

KEPT = 64
"""Losses that are kept. Chosen: their median has about a sixth of the noise of one loss."""
ENOUGH = 32
"""Losses (or gradient norms) before anything is called unusual. Chosen: a spread of 32 values is known to some 20 %."""
START = 3
"""Losses that stand for the untrained model. Chosen: one may be luck, and later ones may be ruin already."""
LATELY = 5
"""Losses whose median says where the run is now. Chosen: it takes three bad ones to move it."""
FIRST = 8
"""Losses whose mean is where learning began. Chosen: few enough that hardly anything is learned within them."""
RUIN = 1.0
"""A run is ruined when it is worse than the untrained model by this share of the first loss, which is twice the first
loss, beyond noise. Chosen: health reported ruin from 0.5 on and the guard acted from 2.0 on until both were joined; 1.0
was already the highest loss of a state that is worth going back to."""
BEYOND_NOISE = 10.0
"""Sigmas of the best average by which a change is certain. Chosen: so far that no noise of tests/health reaches it."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution / its median absolute deviation. This is mathematics."""

RATES = (1 / 4, 1 / 16, 1 / 64)
"""Weights of the newest loss in the moving averages. Chosen: less than, about and several of a window of 10 steps."""
SMOOTHING = 1 / 16
"""Weight of the newest loss in the smoothed loss. Chosen: about one window of 10 steps."""
WINDOWS = 12
"""Windows that the slope is measured over. Chosen: tests/motion/test_losses.py shows the slope within 30 % there."""
NOISE_KEPT = 0.8
"""Share that the noise ratio keeps per window. Chosen: about the last five windows count."""


class LossHistory(Stateful):
    """The first and the last finite losses, the best average, and what can be said by comparing them."""

    saved: ClassVar[tuple[str, ...]] = ("start", "last", "first", "best", "best_sigma")
    start: list[float]
    last: deque[float]

    def __init__(self) -> None:
        self.start = []
        """The losses of the first steps, before anything was learned or ruined."""
        self.last = deque(maxlen=KEPT)
        self.first = math.nan
        """Mean of the first losses."""
        self.best = math.inf
        """Lowest average loss so far."""
        self.best_sigma = 0.0
        """Noise of one loss at that time."""

    def begin(self, losses: Iterable[float]) -> None:
        """Take the first losses of the run from these."""
        for loss in losses:
            if len(self.start) >= START:
                return
            if math.isfinite(loss):
                self.start.append(loss)

    def add(self, loss: float) -> None:
        """Take in a finite loss."""
        if len(self.start) < START:
            self.start.append(loss)
        self.last.append(loss)

    @property
    def start_loss(self) -> float:
        """The loss of the very first step."""
        return self.start[0] if self.start else math.nan

    @property
    def median(self) -> float:
        """The median of the last losses. Unlike an average it takes high ones as they are."""
        return middle(sorted(self.last))

    @property
    def lately(self) -> float:
        """The median of the last five losses."""
        return middle(sorted(list(self.last)[-LATELY:]))

    # --- worse than untrained ----------------------------------------------------------------------------------------

    def untrained(self, sigma: float) -> float:
        """A typical loss above this is worse than that of the untrained model, beyond the noise of one loss.

        The very first loss may have been luck, so the middle one of three counts, unless that is ruin already.
        """
        if not self.start:
            return math.inf
        highest = _ruin(self.start[0], sigma)
        typical = sorted(self.start)[len(self.start) // 2]
        return _ruin(typical, sigma) if typical <= highest else highest

    @property
    def ruined(self) -> bool:
        """Whether the last losses are far above the first, whatever happened between."""
        if len(self.last) < ENOUGH:
            return False
        centre = self.median
        sigma = MAD_TO_SIGMA * middle(sorted(abs(loss - centre) for loss in self.last))
        return centre > self.untrained(sigma)

    @property
    def sound(self) -> bool:
        """Whether this state is worth going back to: the last losses, and the very last ones, are not ruined.

        Noise is no excuse here, because ruin is noisy. A wrong no only leaves an older snapshot in place.
        """
        if not self.last:
            return True
        highest = self.untrained(0.0)
        return self.lately <= highest and (len(self.last) < ENOUGH or self.median <= highest)

    # --- gained and lost again ---------------------------------------------------------------------------------------

    @property
    def gain(self) -> float:
        """How far the average loss fell since the start; 0 while that is hardly more than noise."""
        fall = self.first - self.best
        return fall if fall > BEYOND_NOISE * self.best_sigma else 0.0

    def far_above(self, share: float) -> float:
        """The loss at which this share of the gain is lost, beyond noise; without any gain it is twice the first."""
        if self.gain > 0:
            return self.best + max(share * self.gain, BEYOND_NOISE * self.best_sigma)
        return self.first + max(abs(self.first), BEYOND_NOISE * self.best_sigma)

    def lost(self, now: float) -> float:
        """The share of all that was gained so far which is lost again at this loss."""
        if self.gain <= 0:
            return float(now > self.far_above(0.0))
        return max(0.0, (now - self.best) / self.gain)

    # --- up and down -------------------------------------------------------------------------------------------------

    def sign_changes(self, count: int = KEPT) -> float:
        """Sign changes of the last `count` losses around a straight line, per 10 steps, above the 5 of noise."""
        if len(self.last) < count:
            return 0.0
        above = detrended(list(self.last)[-count:]) > 0
        changes = int(np.count_nonzero(above[1:] != above[:-1]))
        return 10 * (changes / (count - 1) - 0.5)


class WindowFit(NamedTuple):
    """A straight line through the finite losses of one window."""

    losses: Array
    mean: float
    slope: float
    """Change of the loss per step."""
    curvature: float
    rest: Array
    """Losses minus the line."""

    @property
    def scatter(self) -> float:
        """Standard deviation around the line."""
        return math.sqrt(float(self.rest @ self.rest) / len(self.losses))


class WindowLosses(Stateful):
    """What the losses of the watched windows say. A move lies between windows and is not counted as steps."""

    saved = ("smoothed", "averages", "noise_ratio", "steps", "points", "last_fall", "last_log_fall")
    averages: list[float]
    points: list[list[float]]

    def __init__(self) -> None:
        self.smoothed = math.nan
        """The moving average of the loss that forecasts are about; nan before the first loss."""
        self.averages = [math.nan] * len(RATES)
        """Moving averages that begin at the mean of the first window, for the training state."""
        self.noise_ratio = math.nan
        """Scatter of the losses within a window / their fall over it; a moving average in the logarithm."""
        self.steps = 0
        self.points = []
        """[full steps so far, mean loss of the window] of the last windows."""
        self.last_fall = math.nan
        """Fall of the loss per step within the last window."""
        self.last_log_fall = math.nan
        """Fall of the logarithm of the loss per step; nan where the loss is not positive."""
        self.fit: WindowFit | None = None
        """The last window; None where fewer than three of its losses were finite."""
        self._shapes: dict[int, tuple[Array, Array]] = {}

    def after_load(self) -> None:
        if len(self.averages) != len(RATES):
            raise ValueError(f"{len(self.averages)} averages, not {len(RATES)}")

    def new_level(self) -> None:
        """The weights moved so far that no loss from before says anything about those that follow."""
        self.smoothed = math.nan

    def add(self, losses: Sequence[float]) -> None:
        """Take in the losses of a window of consecutive full steps."""
        good = [loss for loss in losses if math.isfinite(loss)]
        for loss in good:
            step, old = (SMOOTHING, self.smoothed) if math.isfinite(self.smoothed) else (1.0, 0.0)
            self.smoothed = old + step * (loss - old)
        self.fit = self._add_fit(good) if len(good) > 2 else None
        if self.fit is not None and len(good) == len(losses):  # a gap would look like noise
            self._add_noise(self.fit)
        self._add_slope(good, len(losses))

    def _add_fit(self, losses: list[float]) -> WindowFit:
        data = np.array(losses)
        rows, time = self._shape(len(losses))
        mean, slope, curvature, *fresh = (rows @ data).tolist()
        for number, rate in enumerate(RATES):
            before = self.averages[number] if math.isfinite(self.averages[number]) else mean
            self.averages[number] = (1 - rate) ** len(losses) * before + fresh[number]
        return WindowFit(data, mean, slope, curvature, data - (mean + slope * time))

    def _shape(self, count: int) -> tuple[Array, Array]:
        """[6, count] weights that give mean, slope and curvature in least squares and the fresh part of the moving
        averages; [count] the centred time."""
        if count not in self._shapes:
            time = np.arange(count) - (count - 1) / 2
            square = time**2 - np.mean(time**2)
            fits = (np.full(count, 1 / count), time / (time @ time), 2 * square / (square @ square))
            averages = (rate * (1 - rate) ** np.arange(count - 1, -1, -1) for rate in RATES)
            self._shapes[count] = np.asarray(np.stack([*fits, *averages]), float), np.asarray(time, float)
        return self._shapes[count]

    def _add_noise(self, fit: WindowFit) -> None:
        fall = abs(fit.slope) * len(fit.losses)
        ratio = math.log(max(fit.scatter / max(fall, 1e-6 * abs(fit.mean), 1e-30), 1e-30))
        known = math.isfinite(self.noise_ratio)
        kept = NOISE_KEPT * math.log(max(self.noise_ratio, 1e-30)) + (1 - NOISE_KEPT) * ratio if known else ratio
        self.noise_ratio = math.exp(kept)

    # --- how fast the loss falls -------------------------------------------------------------------------------------

    def _add_slope(self, good: list[float], steps: int) -> None:
        self.steps += steps
        if not good:
            return
        self.points = [*self.points, [float(self.steps), math.fsum(good) / len(good)]][-WINDOWS:]
        if len(good) > 1:
            self.last_fall = (good[0] - good[-1]) / (len(good) - 1)
            positive = good[0] > 0 and good[-1] > 0
            self.last_log_fall = math.log(good[0] / good[-1]) / (len(good) - 1) if positive else math.nan

    def per_step(self, low_noise: bool) -> float:
        """Fall of the loss per full step, at present; not positive, or nan, where it does not fall."""
        if low_noise:
            return self.last_fall
        if len(self.points) < 3:
            return math.nan
        steps, losses = np.asarray(self.points).T
        steps = steps - steps.mean()
        return float(-(steps @ losses) / (steps @ steps))


def middle(ordered: Sequence[float]) -> float:
    """The median of numbers that are in order."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def detrended(values: Sequence[float]) -> Array:
    """Values minus a straight line through them."""
    data = np.asarray(values)
    time = np.arange(len(data)) - (len(data) - 1) / 2
    data = data - data.sum() / len(data)
    return np.asarray(data - time * (time @ data / (time @ time)))


def _ruin(loss: float, sigma: float) -> float:
    """The loss at which a model that began with this one is ruined."""
    return loss + max(RUIN * abs(loss), 3 * sigma)
