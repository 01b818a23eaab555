"""How much of a run is left where steps cost more once its model has grown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretrain.show.numbers import finite

Costs = Sequence[tuple[int, float]]
"""From which step on a step costs how much, in order. Empty: all steps cost the same."""


def weighed(costs: Costs, first: int, last: int) -> float:
    """Sum up what the steps from `first` to before `last` cost."""
    total, begun, cost = 0.0, first, 1.0
    for start, now in costs:
        if start > begun:
            end = min(start, last)
            total, begun = total + cost * max(0, end - begun), max(begun, end)
        cost = now
    return total + cost * max(0, last - begun)


def after_growth(costs: Costs, step: int, verdict: str, cost: float) -> Costs:
    """Return the costs once it is known what became of a growth: the run may have grown later than planned, or it
    stays as it is."""
    if verdict == "kept":
        return costs
    later = [one for one in costs if one[0] > step] if verdict == "made" else []
    return [*(one for one in costs if one[0] < step), (step, cost), *later]


def costs_in(fields: Any) -> Costs:
    """Read what a log says of costs. What is no cost is left out."""
    found: list[tuple[int, float]] = []
    for one in fields if isinstance(fields, list) else ():
        numbers = [finite(number) for number in one] if isinstance(one, list) else []
        match numbers:
            case [float() as step, float() as cost] if cost > 0:
                found.append((int(step), cost))
    return found
