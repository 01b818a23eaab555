"""The fastest settings that fit a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretrain.config import Config
from foretrain.errors import ConfigError
from foretrain.planning.estimate import Estimate, Target, estimate
from foretrain.planning.levers import EXPLANATIONS, LEVERS, Choice, choices, value_of
from foretrain.sizes import format_size


class NothingFitsError(ConfigError):
    """No combination of settings fits the budget."""

    def __init__(self, text: str, smallest: Plan) -> None:
        super().__init__(text)
        self.smallest = smallest


@dataclass(frozen=True)
class Plan:
    """Settings, and the memory a run with them will need."""

    config: Config
    choice: Choice
    estimate: Estimate
    before: Estimate
    """Of the configuration as it was."""
    budget: int | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every lever that was pulled."""
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


def plan(config: Config, target: Target, budget: int, given: frozenset[str]) -> Plan:
    """The fastest allowed settings whose estimate is within the budget. Raises NothingFitsError otherwise."""
    before = estimate(config, target)
    smallest: Plan | None = None
    for choice in choices(config, given, target):
        changed = with_settings(config, choice.settings)
        found = Plan(changed, choice, estimate(changed, target), before, budget)
        if found.estimate.needed <= budget:
            return found
        if smallest is None or found.estimate.needed < smallest.estimate.needed:
            smallest = found
    if smallest is None:
        raise RuntimeError("the configuration itself is always a choice")
    fixed = sorted(name for name in LEVERS if name in given)
    hint = f"; leave {', '.join(fixed)} unset to let the plan choose" if fixed else ""
    raise NothingFitsError(
        f"nothing fits into {format_size(budget)}: the smallest possible is {format_size(smallest.estimate.needed)}"
        f"{hint}; or take a smaller model, context or batch",
        smallest,
    )


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """The same configuration with these settings, quickly: the values are known to be allowed."""
    update: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        if section:
            part = update.get(section, getattr(config, section))
            update[section] = part.model_copy(update={key: value})
        else:
            update[key] = value
    return config.model_copy(update=update) if update else config


def toml_lines(settings: dict[str, Any]) -> str:
    """The lines to put into a configuration file."""
    import tomlkit

    document: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        (document.setdefault(section, {}) if section else document)[key] = value
    plain = {key: value for key, value in document.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    return tomlkit.dumps(plain | tables).strip()


def changed_values(config: Config, settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """From which value to which."""
    return {name: (value_of(config, name), value) for name, value in settings.items()}
