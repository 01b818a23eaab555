"""Computes at once what the losses and gradient norms of all steps since the last measurement say about a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrain.health.signs import RUNAWAY_SHARE
from foretrain.motion.losses import FIRST, MAD_TO_SIGMA, LossHistory

Row = tuple[float, float, float]
"""(loss, gradient norm, skipped) of one step."""
FEWEST_ROWS = 20
"""Steps whose mean says anything. Chosen: its noise is about a quarter of that of one loss."""
FALLEN_BACK = 0.01
"""Share of the best mean by which later ones are clearly worse, and not only no better. Chosen: ten times the gain that
counts as progress."""
CERTAIN = 3.0
"""Standard errors of a mean by which it differs for certain. Chosen: the usual three sigma."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the steps since the last measurement say."""

    steps: int
    not_finite: int
    """Steps that were skipped, or whose loss or gradient was no number."""
    best: float
    """Lowest mean loss so far."""
    usual_norm: float
    """Usual gradient norm before these steps."""
    loss: float = math.nan
    """Mean of the finite losses; nan where there are too few."""
    deviation: float = 0.0
    """How far the mean is above the best such mean, in sigmas."""
    lost: float = 0.0
    """Share of all gained since the start that is lost again, beyond noise."""
    diverged: bool = False
    """The mean is far above the best one, as `detect` defines a runaway."""
    ruined: bool = False
    """The mean is far above the loss of the first step, by the limit that the detector goes by, too."""
    gained: bool = False
    """The loss fell since the start, beyond noise."""
    largest_norm: float = math.nan
    spikes: int = 0
    """Gradient norms far above the usual one."""
    gradient_variance: float = 0.0
    """Variance of the gradient norm over its squared mean."""
    sign_changes: float = 0.0
    """Sign changes of the loss around its trend, per 10 steps, above the 5 of independent noise."""
    stalled_steps: int = 0
    """Steps since the mean was last clearly better than ever before."""
    fallen_back: bool = False
    """The means since the best one are clearly worse than it."""


class Monitor(LossHistory):
    """Collects the rows of steps and judges them together. A rollback does not change what it knows."""

    saved = (*LossHistory.saved, "rows", "closed", "best_step", "means", "usual", "last_step")
    rows: list[Row]
    closed: list[Row]
    means: list[tuple[int, float]]

    def __init__(self, spike: float, gain: float) -> None:
        """spike: times the usual norm that make a spike; gain: relative fall of the loss that is progress."""
        super().__init__()
        self.spike = spike
        self.progress = gain
        self.rows = []
        """Steps since the last measurement began."""
        self.closed = []
        """Steps that are judged next. Those that arrive meanwhile count for the measurement after it."""
        self.best_step = 0
        self.means = []
        """(step, mean loss) since then."""
        self.usual = 0.0
        """Usual gradient norm; 0 while unknown."""
        self.last_step = 0

    def note(self, rows: Sequence[Row]) -> None:
        """Take in the numbers of steps."""
        self.begin(loss for loss, _, skipped in rows[: 2 * FIRST] if not skipped)
        self.rows.extend(rows)

    def close(self) -> None:
        """A measurement begins: the steps so far belong to it."""
        self.closed, self.rows = self.closed + self.rows, []

    def forget(self, steps: int) -> None:
        """The last steps were undone. Those that are not judged yet are dropped."""
        left = max(0, len(self.closed) + len(self.rows) - steps)
        self.rows = self.rows[: max(0, left - len(self.closed))]
        self.closed = self.closed[:left]

    def undone(self, step: int) -> Vitals | None:
        """A rollback undid the steps since the last measurement: they are judged now and never again.

        Where they are too few to have a mean, only those that are no number are judged.
        """
        self.close()
        if len(self.closed) < FEWEST_ROWS:
            self.closed = [row for row in self.closed if row[2] or not np.isfinite(row).all()]
        vitals = self.vitals(step, fewest=1)
        self.closed = []
        self.last.clear()
        return vitals

    def vitals(self, step: int, fewest: int = FEWEST_ROWS) -> Vitals | None:
        """Judge the closed steps. With too few of them return None: they then wait for the next time."""
        if len(self.closed) < fewest:
            return None
        table = np.asarray(self.closed, dtype=np.float64)
        self.closed = []
        good = np.isfinite(table).all(axis=1) & (table[:, 2] == 0)
        losses, norms = table[good, 0], table[good, 1]
        began, self.last_step = self.last_step, step
        counts: dict[str, Any] = {"steps": len(table), "not_finite": int(len(table) - good.sum())}
        if len(losses) < FIRST:
            return Vitals(**counts, best=self.best, usual_norm=self.usual)
        for loss in losses.tolist():
            self.add(loss)
        if math.isnan(self.first):
            self.first = float(losses[:FIRST].mean())
        mean, sigma = float(losses.mean()), _noise(losses)
        ruined = mean > self.untrained(sigma)
        compared = self._compare(mean, sigma, len(losses), ruined)
        gradients = self._gradients(norms)
        self._note_mean(began, step, mean, sigma, ruined)
        return Vitals(
            **counts,
            **compared,
            **gradients,
            loss=mean,
            ruined=ruined,
            sign_changes=self.sign_changes(),
            stalled_steps=step - self.best_step,
            fallen_back=self._fell_back(len(losses)),
            best=self.best,
        )

    def start_over(self, step: int) -> None:
        """A plateau was reported: the next one has to be as long."""
        self.best_step, self.means = step, []

    def _compare(self, mean: float, sigma: float, count: int, ruined: bool) -> dict[str, Any]:
        """The mean against the first losses and the best mean."""
        noise = CERTAIN * max(sigma, self.best_sigma)
        known = math.isfinite(self.best)
        rise = mean - self.best if known else 0.0
        deviation = max(0.0, rise) / max(self.best_sigma, 1e-300)
        if ruined:
            deviation = max(deviation, (mean - self.start_loss) / max(sigma, 1e-300))
        return {
            "deviation": deviation,
            "lost": self.lost(mean) if known and rise > noise / math.sqrt(count) else 0.0,
            "diverged": known and mean > self.far_above(RUNAWAY_SHARE),
            "gained": self.first - min(self.best, mean) > noise / math.sqrt(FIRST) and not ruined,
        }

    def _gradients(self, norms: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
        typical = float(np.median(norms))
        usual = self.usual or typical
        self.usual = math.sqrt(usual * typical)
        return {
            "usual_norm": usual,
            "largest_norm": float(norms.max()),
            "spikes": int(np.count_nonzero(norms > self.spike * usual)) if usual > 0 else 0,
            "gradient_variance": float(norms.var() / max(norms.mean() ** 2, 1e-300)),
        }

    def _note_mean(self, began: int, step: int, mean: float, sigma: float, ruined: bool) -> None:
        """Remember the mean. One that is worse than untrained is no measure of those that follow."""
        if mean < self.best - self.progress * abs(self.best) or (not math.isfinite(self.best) and not ruined):
            self.best_step, self.means = began, []
        self.means.append((step, mean))
        if mean < self.best and not ruined:
            self.best, self.best_sigma = mean, sigma
        if self._creeps():
            self.best_step = self.means[0][0]

    def _creeps(self) -> bool:
        """Whether the later half of the means after the best one is better than the earlier half.

        The best mean may have been luck, so this is progress, too. Only the later half is kept then.
        """
        half = len(self.means) // 2
        if half < 2:
            return False
        earlier, later = ([mean for _, mean in part] for part in (self.means[:half], self.means[half:]))
        before, after = sum(earlier) / len(earlier), sum(later) / len(later)
        if not after < before - self.progress * abs(before):
            return False
        self.means = self.means[half:]
        return True

    def _fell_back(self, count: int) -> bool:
        """Whether the means after the best one are, on average, clearly worse. count: losses in a mean."""
        after = [mean for _, mean in self.means[1:]]
        if len(after) < 2 or not math.isfinite(self.best):
            return False
        margin = max(FALLEN_BACK * abs(self.best), CERTAIN * self.best_sigma / math.sqrt(count))
        return sum(after) / len(after) > self.best + margin


def _noise(losses: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The noise of one loss, from differences of neighbours, which a trend hardly changes."""
    differences = np.abs(np.diff(losses))
    return float(MAD_TO_SIGMA * np.median(differences) / math.sqrt(2))
