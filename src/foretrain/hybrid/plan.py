"""What was decided at the end of a window, and the move that it leads to."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.motion.predictors.base import Array, Forecast

FORECAST = "forecast"
"""A decision that follows from a forecast: the first kind of move that applies when the move begins will make it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A move is to be made with the next batch."""

    kind: str
    """Name of the kind of move, or `FORECAST`."""
    horizon: int
    """Steps ahead."""
    audited: bool
    """It is made as an audit: with the move and without it, from one snapshot."""
    longest: int
    """Steps that the longest move takes which still fits into the run."""
    reason: str


@dataclass(frozen=True)
class Plan:
    """A move that is about to be made: the decision, and what is known of the run when the move begins."""

    kind: str
    horizon: int
    audited: bool
    longest: int
    reason: str
    correct_steps: int
    """Full steps that validate it."""
    low_noise: bool = False
    """The loss right after the move can be trusted."""
    searched: bool = False
    """Several lengths are probed, and the best is taken."""
    confidence: float = 1.0
    """Probability that it will be kept, as estimated."""
    tolerance: float = 0.0
    """Rise of the loss that noise explains."""
    exactness: float = 0.0
    """How nearly exactly forecasts of this length came true: 1 if to the last bit, negative if far from it, nan if none
    was scored yet. Where it is not above 0, no predicted step counts."""
    least_worth: float = 0.0
    """Full steps that a predicted step is worth at least, with confidence."""
    predicted_loss: float = float("nan")
    coefficients: Array | None = None
    """[G, R] at the horizon."""
    forecast: Forecast | None = None

    def disaster_limit(self, anchor: float) -> float:
        """A probe loss above this shows a disaster, whatever the noise. anchor: probe loss before the move."""
        return anchor + max(self.tolerance, 1e-3 * abs(anchor))
