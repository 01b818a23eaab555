"""Plans the search for a learning rate that is `auto`: where it begins, which rates are tried, for how long, and which
one follows from what they came to."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from foretrain.config import Config, changed
from foretrain.engine.schedule import warmup_of
from foretrain.engine.syncing import inside_replicas
from foretrain.errors import ConfigError

ADAPTERS = 0.2
"""Share of the model's parameters below which those that are trained are called adapters. Chosen: adapters are a few
percent; a model of which a fifth is trained behaves like one that is trained whole."""
_STEPS, _ANNEAL = 0.055, 0.01
"""Length of a trial, and of the fall of its rate to 0, as shares of the run. Chosen: as long as three rates may take;
after 3 % of small language models all rates were alike (docs/learning-rate.md)."""
_FEWEST, _FEWEST_ANNEALED = 20, 6
"""Steps of them in short runs. Chosen: after ten steps of a run of two hundred the best rate looked too small."""
_BUDGET = 0.15
"""Share of the run that trials may cost, where it is long enough for the fewest steps."""
_HORIZON = 0.3
_HORIZON_OF_TEXT = {"adamw": -0.15, "adam": -0.15, "muon": 0.08}
"""The best rate of a trial over that of the run, as a power of how much longer the run is. Fitted on few runs on a CPU
(docs/learning-rate.md): language models of bytes by optimizer, all others on a classifier of digits and a table. In
text AdamW wants less in its first steps than later, until it knows more than how frequent each token is; Muon more."""
_BETWEEN_RUNS = 0.3
"""Such a power between whole runs of different lengths: 0.32 is published for language models of both optimizers."""
_CLOSE = 0.005
"""Rates count as good as the best while their loss is above it by no more than this share."""
_ADAPTER_FACTOR = math.sqrt(10.0)
_ADAPTER_STEPS = (10, 100)
_ADAPTER_REACH = 3
"""Adapters: a factor of 3.2, a tenth of the run within these steps, up to three factors away, as it was measured
(docs/results.md#fine-tuning)."""


@dataclass(frozen=True)
class RacePlan:
    """Which rates are tried, and for how long."""

    steps: int
    """Steps of a trial at its rate."""
    anneal: int
    """Steps after them, on a copy, in which the rate falls to 0; 0: none."""
    factor: float
    """Between two neighbours."""
    budget: int
    """Steps that all trials together may take beside the run; two other rates are always tried."""
    reach: int
    """Factors between the first rate and any other, at the most."""
    exponent: float
    """The best rate of a trial is lowered by this power of how much longer the run is."""
    refined: bool
    """The rate is that of the vertex of a parabola; else the best of those that were tried."""
    rise: int | None = None
    """Steps of warm-up of a trial, where the run's own may be another; None: a trial has that of the run."""

    @property
    def length(self) -> int:
        """Steps of the run that all rates are tried on."""
        return self.steps + self.anneal

    @property
    def warmup(self) -> int:
        """Steps of warm-up, unless they are set: a trial must see more than that."""
        return self.steps // 2

    @property
    def cost(self) -> tuple[int, int]:
        """Steps beside the run that all trials take together, at the least and at the most: of two other rates, or of
        as many as budget and reach allow, all on one side of the first but one. The first rate falls on a copy, and the
        run may have to follow the best."""
        allowed = (self.budget - 2 * self.anneal) // self.length
        most = min(max(2, allowed), self.reach + 1)
        return 2 * self.length + self.anneal, most * self.length + 2 * self.anneal

    def allows(self, tried: int, spent: int) -> bool:
        """Tell whether another rate may be tried. The run may have to make the last steps of a trial again."""
        return tried < 3 or spent + self.length + self.anneal <= self.budget


def trains_adapters(model: nn.Module) -> bool:
    """Tell whether only a small part of the model is trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trained in sizes if trained) < ADAPTERS * sum(size for size, _ in sizes)


def horizon_of(config: Config, text: bool) -> float:
    """Return the exponent of the correction for the length of the run. text: tokens are predicted."""
    return _HORIZON_OF_TEXT.get(config.optimizer.type, _HORIZON) if text else _HORIZON


def plan_of(max_steps: int, adapters: bool, exponent: float = _HORIZON) -> RacePlan:
    """Return how rates are tried in a run of so many steps. exponent: of the correction for its length."""
    if adapters:
        fewest, longest = _ADAPTER_STEPS
        steps = max(2, min(max(fewest, max_steps // 10), longest, max_steps // 2))
        return RacePlan(steps, 0, _ADAPTER_FACTOR, max_steps, _ADAPTER_REACH, 0.0, refined=False)
    steps = max(2, min(max(_FEWEST, round(_STEPS * max_steps)), max_steps // 4))
    anneal = max(1, min(max(_FEWEST_ANNEALED, round(_ANNEAL * max_steps)), max_steps // 8))
    return RacePlan(steps, anneal, 2.0, int(_BUDGET * max_steps), 12, exponent, refined=True)


def with_short_warmup(config: Config, adapters: bool) -> Config:
    """A trial must see more than the warm-up: so that is half a trial long, unless it was set."""
    if config.optimizer.learning_rate != "auto" or not _has_warmup(config) or config.schedule.warmup_share != "auto":
        return config
    return changed(config, {"schedule.warmup_steps": plan_of(config.max_steps, adapters).warmup})


def with_rise(plan: RacePlan, config: Config) -> RacePlan:
    """Give trials a warm-up of their own, where that of the run is set as a share and may be longer than a trial."""
    if not _has_warmup(config) or config.schedule.warmup_share == "auto":
        return plan
    return replace(plan, rise=min(plan.warmup, warmup_of(config.schedule, config.max_steps)))


def _has_warmup(config: Config) -> bool:
    """Tell whether there is one that follows from the length of the run."""
    return config.schedule.warmup_steps is None and config.schedule.type not in ("constant", "cyclic")


def check_rates(config: Config) -> None:
    """Refuse what a race cannot change."""
    if config.optimizer.learning_rate != "auto":
        return
    if config.max_time is not None:
        raise ConfigError(
            "optimizer.learning_rate = 'auto' tries each rate for a share of the run's steps, and with max_time nobody "
            "knows how many there are: give max_steps instead of max_time, or set a rate"
        )
    if config.optimizer.rest_learning_rate is not None:
        raise ConfigError(
            "optimizer.learning_rate = 'auto' finds both rates of muon, and optimizer.rest_learning_rate sets one of "
            "them; set optimizer.rest_rate_factor instead, their ratio"
        )


# --- where the search begins ------------------------------------------------------------------------------------------

_BASE = {"adamw": (2e-3, 384), "adam": (2e-3, 384), "muon": (3e-3, 512), "sgd": (0.05, 128)}
"""Rates that were tuned at a width (docs/results.md), in runs of a thousand steps or so."""
_USUAL_TOKENS, _USUAL_STEPS = 16384, 1000


def centre_of(config: Config, model: nn.Module, length: int | None = None) -> float:
    """Return the rate that a race begins with where no earlier run says more: by optimizer, width, tokens per step and
    length of the run. It need only be of the right size: the race looks further where it is not.

    length: tokens of a sequence, None where there are none.
    """
    rate, usual = _BASE[config.optimizer.type]
    if config.optimizer.type == "muon" and config.optimizer.muon_scale == "original":
        rate *= 10
    rate *= math.sqrt(usual / width_of(model))
    if length is not None:
        rate *= min(max(config.batch_size * length / _USUAL_TOKENS, 1 / 64), 64.0) ** 0.125
    return float(f"{at_length(rate, _USUAL_STEPS, config.max_steps):.2g}")


def width_of(model: nn.Module) -> int:
    """Return the width of a language model, or the middle one of the numbers of inputs that trained matrices have."""
    width = getattr(getattr(inside_replicas(model), "shape", None), "width", None)
    if isinstance(width, int):
        return width
    inputs = sorted(math.prod(p.shape[1:]) for p in model.parameters() if p.requires_grad and p.ndim >= 2)
    return max(1, inputs[len(inputs) // 2]) if inputs else 128


def at_length(rate: float, steps: int, max_steps: int) -> float:
    """Return the rate of a run of `max_steps` that is as good as `rate` in one of `steps`."""
    return float(rate * (max_steps / max(1, steps)) ** -_BETWEEN_RUNS)


# --- which rates are tried --------------------------------------------------------------------------------------------


def next_exponent(plan: RacePlan, tried: Collection[int], best: int) -> int | None:
    """Return by how many factors the next rate to try is above the first; None where no neighbour is left.

    Both neighbours of the best are tried, the higher one first. While the best is an edge the search goes on beyond it,
    two factors at a time from the second time on; between two rates that far apart it comes back.
    """
    beyond = [
        best + (2 if plan.refined and best * direction > 0 else 1) * direction
        for direction in (1, -1)
        if all((exponent - best) * direction <= 0 for exponent in tried)
    ]
    between = [exponent for exponent in (best + 1, best - 1) if min(tried) < exponent < max(tried)]
    wanted = (exponent for exponent in (*beyond, *between) if exponent not in tried and abs(exponent) <= plan.reach)
    return next(wanted, None)


# --- what follows from what was tried ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundRate:
    """The rate that the run goes on with, and those that are about as good by the same parabola."""

    rate: float
    low: float | None
    high: float | None


def found_rate(plan: RacePlan, centre: float, tried: Mapping[int, float], max_steps: int) -> FoundRate:
    """Return what follows from held-out losses by exponents of the factor. A loss that is no number has lost."""
    losses = {exponent: loss for exponent, loss in tried.items() if math.isfinite(loss)}
    if not losses:
        return FoundRate(centre, None, None)
    best = min(losses, key=lambda exponent: losses[exponent])
    if not plan.refined:
        return FoundRate(centre * plan.factor**best, None, None)
    shrunk = (max_steps / plan.length) ** -plan.exponent

    def rate(exponent: float) -> float:
        return float(centre * plan.factor**exponent * shrunk)

    lower = [exponent for exponent in losses if exponent < best]
    higher = [exponent for exponent in losses if exponent > best]
    if not higher:  # a short trial flatters high rates, and one that is too high costs more than one that is too low
        return FoundRate(rate(best if not lower else max(best - 1, max(lower) + 1)), None, None)
    if not lower:  # the lowest place may lie beyond the edge, and is not looked for far from it
        points = sorted(losses.items())[:3]
        vertex, bend = _parabola(points)[:2] if len(points) == 3 else (0.0, 0.0)
        return FoundRate(rate(max(vertex, best - 1) if bend else best), None, None)
    points = [(max(lower), losses[max(lower)]), (best, losses[best]), (min(higher), losses[min(higher)])]
    vertex, bend, lowest = _parabola(points)
    if not bend > 0:
        return FoundRate(rate(best), None, None)
    reach = math.sqrt(_CLOSE * abs(lowest) / bend)
    return FoundRate(rate(vertex), rate(vertex - reach), rate(vertex + reach))


def _parabola(points: list[tuple[int, float]]) -> tuple[float, float, float]:
    """Return where the parabola through three points is lowest, how much it bends, and its lowest value."""
    (a, at_a), (b, at_b), (c, at_c) = points
    left, right = (at_b - at_a) / (b - a), (at_c - at_b) / (c - b)
    bend = (right - left) / (c - a)
    if not bend > 0:
        return float(b), 0.0, at_b
    vertex = (a + b) / 2 - left / (2 * bend)
    return vertex, bend, at_b - bend * (b - vertex) ** 2
