"""Small frozen records of what was measured. It is read from the device once per window, never per step."""

from __future__ import annotations

from dataclasses import dataclass

HORIZONS_IN_WINDOWS = (1, 2, 4, 6, 8)
"""Horizons for which forecasts are scored and predictors are trained. Chosen: the longest, 80 steps, is above
the longest move by default."""
DIRECTIONS = ("last step", "last window", "mean of 3 windows", "mean of 10 windows")
"""The basis. The last step is what the optimizer alone would repeat; it counts once per step of a window. Chosen:
four directions cost four copies of the weights, and a fit on several averages forecasts better than one average."""
LAST_WINDOW = 1
"""Index of the direction that 'repeat the last displacement' uses."""
WINDOWS_OF_MEANS = (1, 3, 10)
"""Time constants of directions 1, 2, 3 in windows. Chosen: a factor of about 3 between neighbours."""


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """One window of consecutive full steps."""

    step: int
    """`global_step` at its end."""
    losses: tuple[float, ...]
    """Training loss of each step, before its update. Not finite where the step was skipped."""
    gradient_norms: tuple[float, ...]
    learning_rate: float
    rate_share: float
    """Learning rate / its peak."""
    progress: float
    """`global_step` / `max_steps`."""
    weight_norm: float
    displacement_norm: float
    cosines: tuple[float, ...]
    """Cosine of the displacement with each basis direction as it was before."""
    effective_rank: float
    """Effective rank of the basis with the displacement: exp of the entropy of the normalised spectrum."""
    gradient_mean: float
    gradient_std: float
    """Standard deviation of the elements of the last gradient."""
    gradient_cosine: float
    """Cosine of the last two gradients, on a sample of coordinates."""
    moment_mean: float
    """Mean absolute first moment of the optimizer (momentum), or gradient where it has none."""
    moment_std: float
    second_moment_mean: float
    """Mean square root of the second moment; the gradient's root mean square where the optimizer has none."""
    bias_corrections: tuple[float, float]
    """1 - beta^t of the first and second moment."""


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """How good the predictor was so far."""

    errors: tuple[float, ...]
    """Last relative error 1 - R2 per horizon of HORIZONS_IN_WINDOWS; 1 where nothing is known."""
    cosines: tuple[float, ...]
    """Last cosine per horizon; 0 where nothing is known."""
    loss_errors: tuple[float, ...]
    """Last relative error of the loss forecast per horizon."""
    acceptance_rate: float
    """Share of moves that were kept."""
    confidence: float


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """Where in its cycle the run is."""

    phase: str
    """"warmup", "full", "predict" or "correct"."""
    steps_in_phase: int
    cycle: int
    steps_since_move: int
