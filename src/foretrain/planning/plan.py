"""The fastest settings that fit a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from foretrain.config import Config
from foretrain.config.paths import nested, value_of, with_settings
from foretrain.config.units import format_size
from foretrain.errors import ConfigError
from foretrain.planning.estimate import Estimate, PlanTarget, estimate
from foretrain.planning.levers import EXPLANATIONS, LEVERS, LeverChoice, choices

_NAMED = 3
"""Settings that a message lists."""
_WORTH_SAYING = 0.02
"""A share of a step's time."""


class NothingFitsError(ConfigError):
    """No combination of settings fits the budget."""

    def __init__(self, text: str, smallest: MemoryPlan) -> None:
        super().__init__(text)
        self.smallest = smallest


@dataclass(frozen=True)
class MemoryPlan:
    """Settings, and the memory that a run with them will need."""

    config: Config
    choice: LeverChoice
    estimate: Estimate
    before: Estimate
    """The estimate for the configuration as it was."""
    budget: int | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return every lever that was pulled."""
        return [
            {"setting": name, "value": value, "cost": round(self.choice.costs[name], 4), "effect": EXPLANATIONS[name]}
            for name, value in self.choice.settings.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "budget_bytes": self.budget,
            "settings": self.choice.settings,
            "levers": self.rows,
            "relative_step_time": round(1 + self.choice.cost, 4),
            "estimate": self.estimate.as_dict(),
            "estimate_before": self.before.as_dict(),
        }


def plan(config: Config, target: PlanTarget, budget: int, given: frozenset[str]) -> MemoryPlan:
    """Find the fastest allowed settings whose estimate is within the budget. Raises NothingFitsError otherwise.

    Where it does not fit as it is and prediction does not pay, that is the first to go.
    """
    if not gives_up_prediction(config, target, given) or estimate(config, target).needed <= budget:
        return with_prediction(config, target, budget, given)
    off = {"hybrid.mode": "off"}
    try:
        found = with_prediction(with_settings(config, off), target, budget, given)
    except NothingFitsError as error:
        error.smallest = _with(off, error.smallest, config, target)
        raise
    return _with(off, found, config, target)


def gives_up_prediction(config: Config, target: PlanTarget, given: frozenset[str]) -> bool:
    """Return whether a plan may switch prediction off. It has paid for no language model at full weights
    (docs/results.md); adapters' leaps are judged on held-out examples and need little memory."""
    return config.hybrid.mode != "off" and "hybrid.mode" not in given and not target.adapters


def _with(off: dict[str, Any], found: MemoryPlan, config: Config, target: PlanTarget) -> MemoryPlan:
    """Return the plan, as one of the configuration before `off`, which costs nothing."""
    choice = found.choice
    whole = LeverChoice(off | choice.settings, choice.cost, dict.fromkeys(off, 0.0) | choice.costs)
    return replace(found, choice=whole, before=estimate(config, target))


def with_prediction(config: Config, target: PlanTarget, budget: int, given: frozenset[str]) -> MemoryPlan:
    """Plan without touching `hybrid.mode`."""
    before = estimate(config, target)
    smallest: MemoryPlan | None = None
    for choice in choices(config, given, target):
        changed = with_settings(config, choice.settings)
        found = MemoryPlan(changed, choice, estimate(changed, target), before, budget)
        if found.estimate.needed <= budget:
            return found
        if smallest is None or found.estimate.needed < smallest.estimate.needed:
            smallest = found
    if smallest is None:
        raise RuntimeError("the configuration itself is always a choice")
    advice = ["take a smaller model, context or batch"]
    if fixed := sorted(name for name in LEVERS if name in given):
        more = f" and {len(fixed) - _NAMED} more" if len(fixed) > _NAMED else ""
        advice.append(f"leave settings that are named to the plan ({', '.join(fixed[:_NAMED])}{more})")
    if cheaper := without_prediction(config, target, budget, given):
        advice.append(f"train {cheaper}")
    raise NothingFitsError(
        f"nothing fits into {format_size(budget)}: the smallest possible is {format_size(smallest.estimate.needed)}; "
        + ", or ".join(advice),
        smallest,
    )


def without_prediction(
    config: Config, target: PlanTarget, budget: int, given: frozenset[str], cost: float = math.inf
) -> str | None:
    """Return what the plain loop, which has neither directions nor snapshots, would need; None unless it fits at a
    lower cost.

    cost: of the plan with prediction, as a share of a step's time.
    """
    if config.hybrid.mode == "off":
        return None
    plain = with_settings(config, {"hybrid.mode": "off"})
    for choice in choices(plain, given, target):
        if choice.cost > cost - _WORTH_SAYING:
            return None
        needed = estimate(with_settings(plain, choice.settings), target).needed
        if needed <= budget:
            how = f"at about {1 + choice.cost:.0%} of the time per step" if choice.settings else "as it is"
            return f'without prediction (hybrid.mode = "off"): that fits {how}, in {format_size(needed)}'
    return None


def toml_lines(settings: dict[str, Any]) -> str:
    """Return the lines to put into a configuration file."""
    import tomlkit

    document = nested(settings)
    plain = {key: value for key, value in document.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    return tomlkit.dumps(plain | tables).strip()


def changed_values(config: Config, settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return from which value to which each setting changes."""
    return {name: (value_of(config, name), value) for name, value in settings.items()}
