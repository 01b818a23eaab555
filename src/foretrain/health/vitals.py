"""What the losses and gradient norms of all steps since the last look say of a run, computed at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrain.health.baseline import KEPT_LOSSES, MAD_TO_SIGMA, Start, sign_changes
from foretrain.persist.stateful import Stateful

Row = tuple[float, float, float]
"""(loss, gradient norm, skipped) of one step."""
FEWEST_ROWS = 20
"""Steps whose average says anything."""
FIRST_ROWS = 8
RUIN = 0.5
"""Share of the first loss by which a mean above it, beyond noise, is ruin: an untrained model was better."""
FALLEN_BACK = 0.01
"""Share of the best mean by which those after it are worse, beyond noise, and not only no better."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Of the steps since the last look."""

    steps: int
    not_finite: int
    loss: float
    """Mean of the finite ones."""
    sigma: float
    """Noise of one loss around its trend."""
    deviation: float
    """How far the mean is above the best such mean, in sigmas."""
    lost: float
    """Share of all gained since the start that is lost again, beyond noise."""
    ruined: bool
    """The mean is far above the loss of the first step."""
    gained: bool
    """The loss fell since the start, beyond noise."""
    gradient_norm: float
    """Median."""
    usual_norm: float
    """Median of the looks before."""
    largest_norm: float
    spikes: int
    """Gradient norms far above the usual one."""
    gradient_variance: float
    """Variance of the gradient norm over its squared mean."""
    sign_changes: float
    """Of the loss around its trend, in 10 steps, above the 5 of independent noise."""
    stalled_steps: int
    """Steps since the mean was last clearly better than ever before."""
    fallen_back: bool
    """All in all they were clearly worse than that."""
    best: float


class Record(Stateful):
    """Keeps what vitals are judged by: the first, the best, the usual."""

    saved = (
        *("rows", "closed", "recent", "start", "first", "best", "best_sigma", "best_step", "means", "usual"),
        "last_step",
    )
    rows: list[Row]
    closed: list[Row]
    recent: deque[float]
    means: list[tuple[int, float]]

    def __init__(self, spike: float, gain: float) -> None:
        """spike: times the usual norm that make a spike; gain: relative fall of the loss that is progress."""
        self.spike = spike
        self.gain = gain
        self.rows = []
        """Since the last look."""
        self.closed = []
        """What is judged next: whatever else arrives meanwhile, at whatever time, counts for the look after."""
        self.recent = deque(maxlen=KEPT_LOSSES)
        self.start = Start()
        self.first = math.nan
        """Mean of the first losses."""
        self.best = math.inf
        self.best_sigma = 0.0
        self.best_step = 0
        self.means = []
        """(step, mean loss) since then."""
        self.usual = 0.0
        self.last_step = 0

    def note(self, rows: Sequence[Row]) -> None:
        for loss, _, skipped in rows[: 2 * FIRST_ROWS]:
            if math.isfinite(loss) and not skipped:
                self.start.note(loss)
        self.rows.extend(rows)

    def close(self) -> None:
        """A look begins."""
        self.closed, self.rows = self.closed + self.rows, []

    def forget(self, steps: int) -> None:
        """The last steps were taken back, as far as no look has judged them yet."""
        left = max(0, len(self.closed) + len(self.rows) - steps)
        self.rows = self.rows[: max(0, left - len(self.closed))]
        self.closed = self.closed[:left]

    def undone(self, step: int) -> Vitals | None:
        """A rollback undid the steps since the last look: they are judged now, and no look counts them again. Of too
        few to have an average only those that are no number say something."""
        self.close()
        if len(self.closed) < FEWEST_ROWS:
            self.closed = [row for row in self.closed if row[2] or not np.isfinite(row).all()]
        vitals = self.vitals(step, fewest=1)
        self.closed = []
        self.recent.clear()
        return vitals

    def vitals(self, step: int, fewest: int = FEWEST_ROWS) -> Vitals | None:
        """None while there were too few steps to say anything; they then wait for the next time."""
        if len(self.closed) < fewest:
            return None
        table = np.asarray(self.closed, dtype=np.float64)
        self.closed = []
        good = np.isfinite(table).all(axis=1) & (table[:, 2] == 0)
        bad = int(len(table) - good.sum())
        losses, norms = table[good, 0], table[good, 1]
        began, self.last_step = self.last_step, step
        if len(losses) < FIRST_ROWS:
            nothing = math.nan
            return Vitals(
                steps=len(table),
                not_finite=bad,
                loss=nothing,
                sigma=0.0,
                deviation=0.0,
                lost=0.0,
                ruined=False,
                gained=False,
                gradient_norm=nothing,
                usual_norm=self.usual,
                largest_norm=nothing,
                spikes=0,
                gradient_variance=0.0,
                sign_changes=0.0,
                stalled_steps=0,
                fallen_back=False,
                best=self.best,
            )
        self.recent.extend(losses.tolist())
        mean, sigma = float(losses.mean()), _noise(losses)
        if math.isnan(self.first):
            self.first = float(losses[:FIRST_ROWS].mean())
        typical = float(np.median(norms))
        usual = self.usual or typical
        ruined = mean > self.start.limit(RUIN, sigma)
        deviation, lost, gained = self._setback(mean, sigma, len(losses))
        if ruined:
            deviation = max(deviation, (mean - self.start.loss) / max(sigma, 1e-300))
        spread = norms.var() / max(norms.mean() ** 2, 1e-300)
        spikes = int(np.count_nonzero(norms > self.spike * usual)) if usual > 0 else 0
        if mean < self.best - self.gain * abs(self.best) or (not math.isfinite(self.best) and not ruined):
            self.best_step, self.means = began, []
        self.means.append((step, mean))
        if mean < self.best and not ruined:  # what is worse than untrained is no measure of what comes after it
            self.best, self.best_sigma = mean, sigma
        self.usual = math.sqrt(usual * typical)
        changes = sign_changes(list(self.recent)) if len(self.recent) == KEPT_LOSSES else 0.0
        if self._creeps():
            self.best_step = self.means[0][0]
        return Vitals(
            steps=len(table),
            not_finite=bad,
            loss=mean,
            sigma=sigma,
            deviation=deviation,
            lost=lost,
            ruined=ruined,
            gained=gained and not ruined,
            gradient_norm=typical,
            usual_norm=usual,
            largest_norm=float(norms.max()),
            spikes=spikes,
            gradient_variance=float(spread),
            sign_changes=changes,
            stalled_steps=step - self.best_step,
            fallen_back=self._fell_back(len(losses)),
            best=self.best,
        )

    def start_over(self, step: int) -> None:
        """A plateau was noticed: the next one is as long."""
        self.best_step, self.means = step, []

    def _creeps(self) -> bool:
        """The best mean may have been luck: progress of the later half of the means after it over the earlier half is
        progress too, and only the later half is kept then."""
        half = len(self.means) // 2
        if half < 2:
            return False
        earlier, later = ([mean for _, mean in part] for part in (self.means[:half], self.means[half:]))
        before, after = sum(earlier) / len(earlier), sum(later) / len(later)
        if not after < before - self.gain * abs(before):
            return False
        self.means = self.means[half:]
        return True

    def _fell_back(self, count: int) -> bool:
        """The means after the best one are, on average, clearly worse. count: losses in a mean."""
        after = [mean for _, mean in self.means[1:]]
        if len(after) < 2 or not math.isfinite(self.best):
            return False
        margin = max(FALLEN_BACK * abs(self.best), 3 * self.best_sigma / math.sqrt(count))
        return sum(after) / len(after) > self.best + margin

    def _setback(self, mean: float, sigma: float, count: int) -> tuple[float, float, bool]:
        """Deviation from the best mean, share of the gain lost, and whether there is a gain."""
        if not math.isfinite(self.best):
            return 0.0, 0.0, mean < self.first - 3 * sigma / math.sqrt(FIRST_ROWS)
        rise = mean - self.best
        deviation = max(0.0, rise) / max(self.best_sigma, 1e-300)
        gain = self.first - min(self.best, mean)
        gained = gain > 3 * max(sigma, self.best_sigma) / math.sqrt(FIRST_ROWS)
        beyond_noise = rise > 3 * max(sigma, self.best_sigma) / math.sqrt(count)
        if not beyond_noise:
            return deviation, 0.0, gained
        if self.first - self.best > 10 * self.best_sigma:
            return deviation, rise / (self.first - self.best), gained
        return deviation, float(rise > abs(self.first) + 10 * self.best_sigma), gained


def _noise(losses: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """From differences of neighbours, so that a trend hardly counts."""
    differences = np.abs(np.diff(losses))
    return float(MAD_TO_SIGMA * np.median(differences) / math.sqrt(2))
