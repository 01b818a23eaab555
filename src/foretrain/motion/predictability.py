"""Measures how predictable the motion of a run is, from the warm-up on, and says it in plain words."""

from __future__ import annotations

import math
from typing import Any

from foretrain.motion.losses import WindowLosses
from foretrain.motion.quality import Quality
from foretrain.motion.records import HORIZONS_IN_WINDOWS, LAST_WINDOW, WindowRecord
from foretrain.persist.stateful import Stateful

_KEPT = 0.8
"""Share that the cosines keep per window. Chosen: about the last five windows count."""
LOW_NOISE_RATIO = 0.3
"""Scatter of the losses within a window / their fall over it, below which batches hardly differ. Chosen: the fall
is then several times the scatter."""
LOW_NOISE_COSINE = 0.9
"""Cosine of successive gradients above which batches hardly differ. Chosen: noise is then a tenth of the signal."""
NOISY_COSINE = 0.5
"""Cosine of successive gradients below which batches clearly differ. Chosen: noise is then as large as the signal."""
FEWEST = 3
"""Forecasts of a horizon whose mean says something. Chosen: the first ones are of a young predictor."""
MARGIN = 0.05
"""Shares of the motion that differ by less are called alike. Chosen: it is what whole percents in a sentence bear."""


class Predictability(Stateful):
    """Compares signal and noise in displacements, gradients and losses."""

    saved = ("window_cosine", "gradient_cosine", "same_batch", "windows")

    def __init__(self, losses: WindowLosses) -> None:
        """losses: the observer adds every window to them before it is added here."""
        self.losses = losses
        self.window_cosine = math.nan
        """Cosine of the displacements of successive windows."""
        self.gradient_cosine = math.nan
        self.same_batch = False
        """Every step sees the same batch: the loss is exact."""
        self.windows = 0

    def add(self, record: WindowRecord, same_batch: bool) -> None:
        self.windows += 1
        self.same_batch = same_batch
        if self.windows > 1:
            self.window_cosine = _fade(self.window_cosine, record.cosines[LAST_WINDOW])
        self.gradient_cosine = _fade(self.gradient_cosine, record.gradient_cosine)

    @property
    def low_noise(self) -> bool:
        """Whether the loss right after a move can be trusted."""
        smooth = self.losses.noise_ratio < LOW_NOISE_RATIO and self.gradient_cosine > LOW_NOISE_COSINE
        return self.windows >= 2 and (self.same_batch or smooth)

    @property
    def noisy(self) -> bool:
        """Whether batches clearly differ. Both this and `low_noise` can be False."""
        return self.windows >= 3 and not self.same_batch and self.gradient_cosine < NOISY_COSINE

    @property
    def gradient_snr(self) -> float:
        return _snr(self.gradient_cosine)

    @property
    def motion_snr(self) -> float:
        return _snr(self.window_cosine)

    def sentence(self, quality: Quality, on_probes: bool = False) -> str:
        """Say in plain words what prediction can do for this run."""
        known = [windows for windows in HORIZONS_IN_WINDOWS if quality.tallies[windows].made >= FEWEST]
        if not known:
            made = max(quality.tallies[windows].made for windows in HORIZONS_IN_WINDOWS)
            return f"too few forecasts ({made}) to say what is predictable"
        horizon = known[-1]
        share, repeat = (max(0.0, r2(horizon)) for r2 in (quality.r2, quality.repeat_r2))
        start = f"{max(share, repeat):.0%} of the motion over the next {horizon * quality.window} steps is predictable"
        behind = repeat > share + MARGIN
        if behind:
            start += f" by repeating the last displacement, {share:.0%} by the predictor"
        if self.low_noise:
            return f"{start} and batches hardly differ: leaps are searched on the exact loss"
        if on_probes:
            return f"{start}; leaps are searched on held-out examples"
        if behind:
            return f"{start}: leaps wait until it does as well"
        if share < 0.15:
            return f"{start}: leaps will not pay here; averaging and look-ahead may"
        if share < 0.5:
            return f"{start}: leaps may pay a little, audits will tell"
        return f"{start}: leaps should pay, audits will tell"

    def summary(self, quality: Quality, on_probes: bool = False) -> dict[str, Any]:
        return {
            "motion_snr": _rounded(self.motion_snr),
            "gradient_snr": _rounded(self.gradient_snr),
            "loss_noise_ratio": _rounded(self.losses.noise_ratio),
            "low_noise": self.low_noise,
            "verdict": self.sentence(quality, on_probes),
        }


def _fade(old: float, new: float) -> float:
    if not math.isfinite(new):
        return old
    return new if not math.isfinite(old) else _KEPT * old + (1 - _KEPT) * new


def _snr(cosine: float) -> float:
    """Two measurements of the same signal with independent noise have cosine snr / (1 + snr)."""
    if not math.isfinite(cosine):
        return math.nan
    share = min(max(cosine, 0.0), 0.999999)
    return share / (1 - share)


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
