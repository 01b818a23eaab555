"""Names the 64 numbers of the training state and says what they mean."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS


@dataclass(frozen=True, slots=True)
class Feature:
    index: int
    group: str
    name: str
    meaning: str


_TABLE: dict[str, tuple[tuple[str, str], ...]] = {
    "loss": (
        ("value", "last loss of the window"),
        ("mean", "mean over the window"),
        ("average 1/4", "moving average in which the newest loss weighs 1/4"),
        ("average 1/16", "moving average in which the newest loss weighs 1/16"),
        ("average 1/64", "moving average in which the newest loss weighs 1/64"),
        ("deviation", "logarithm of the standard deviation within the window"),
        ("minimum", "lowest loss of the window"),
        ("maximum", "highest loss of the window"),
        ("slope", "change per step within the window"),
        ("curvature", "change of the slope within the window"),
        ("oscillation", "share of steps at which the loss turns"),
        ("autocorrelation", "of neighbouring losses around the window's trend"),
        ("trend", "short minus long moving average"),
    ),
    "gradient": (
        ("norm", "last gradient norm"),
        ("log norm", "mean logarithm of the gradient norm"),
        ("mean norm", "mean over the window"),
        ("deviation", "standard deviation of the norm within the window"),
        ("ratio to baseline", "logarithm of norm / its long average"),
        ("ratio to weights", "logarithm of norm / weight norm"),
        ("element mean", "mean element / deviation of the elements"),
        ("element deviation", "logarithm of the standard deviation of the elements"),
        ("cosine", "between the last two gradients"),
    ),
    "optimizer": (
        ("rate x gradient", "logarithm of learning rate x gradient norm"),
        ("path", "square root of the share of the run's learning rates, added up, that is behind"),
        ("rate to come", "square root of: learning rate / peak, times the share of the run that is left"),
        ("first moment", "logarithm of the mean absolute first moment, bias-corrected"),
        ("first moment deviation", "logarithm of the first moment's standard deviation"),
        ("second moment", "logarithm of the mean root second moment, bias-corrected"),
        ("update size", "logarithm of learning rate x first moment / root second moment"),
        ("bias correction 1", "how much of the first moment's memory, and of the run's, is filled"),
        ("bias correction 2", "how much of the second moment's memory, and of the run's, is filled"),
    ),
    "weights": (
        ("norm", "weight norm"),
        ("growth", "logarithm of weight norm / that of the window before"),
        ("displacement", "logarithm of the displacement norm"),
        ("relative displacement", "logarithm of displacement norm / weight norm"),
        ("acceleration", "logarithm of displacement norm / that of the window before"),
        *((f"cosine {name}", f"of the displacement with: {name}") for name in DIRECTIONS),
        ("effective rank", "of the basis and the displacement together"),
        ("pace", "logarithm of displacement norm / its moving average"),
    ),
    "predictor": (
        *((f"error {number}", f"share of the motion missed, {number} windows ahead") for number in HORIZONS_IN_WINDOWS),
        *((f"cosine {number}", f"of forecast and motion, {number} windows ahead") for number in HORIZONS_IN_WINDOWS),
        ("loss error near", f"relative, {HORIZONS_IN_WINDOWS[0]} windows ahead"),
        ("loss error far", f"relative, {HORIZONS_IN_WINDOWS[-1]} windows ahead"),
        ("acceptance", "share of moves that were kept"),
        ("confidence", "probability that the next move will be kept"),
    ),
    "phase": (
        ("warmup", "1 in WARMUP"),
        ("full", "1 in FULL"),
        ("predict", "1 in PREDICT; else the share of steps since the window before that were predicted"),
        ("correct", "1 in CORRECT; else what is left of the last move's correction, fading per window"),
        ("steps in phase", "logarithm"),
        ("cycle", "logarithm of the number of the cycle"),
        ("progress", "share of the run that is done"),
        ("steps since move", "logarithm"),
    ),
}

FEATURES: tuple[Feature, ...] = tuple(
    Feature(index, group, name, meaning)
    for index, (group, name, meaning) in enumerate(
        (group, name, meaning) for group, entries in _TABLE.items() for name, meaning in entries
    )
)


KNOWN_SPREADS: dict[tuple[str, str], tuple[float, float]] = {
    ("optimizer", "path"): (0.667, 0.236),
    ("optimizer", "rate to come"): (0.667, 0.236),
    ("phase", "progress"): (0.5, 0.289),
}
"""Mean and deviation over a whole run of what goes from 0 to 1, because the running z-score of a straight line is
constant. Computed: of a uniform variable, and of its square root."""


def describe() -> list[tuple[str, str, str, str]]:
    """The table of features as rows of text."""
    return [(str(item.index), item.group, item.name, item.meaning) for item in FEATURES]
