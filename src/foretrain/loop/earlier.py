"""Finished runs that lie beside a new one: what the last of the same kind says about its learning rate."""

from __future__ import annotations

import json
from pathlib import Path

from foretrain.config.kinds import MOST
from foretrain.forecast.stored import SUMMARY_KEY, summaries
from foretrain.hybrid.rate_plan import at_length
from foretrain.hybrid.rate_race import RateRace
from foretrain.launch.group import ALONE, Group
from foretrain.show.numbers import finite, mapping

_FARTHEST = 8.0
"""A rate so many times above or below the one that a race would begin with is not begun with. Chosen: as far
as the three rates of a short race reach."""


def begin_with_last(race: RateRace, kind: str, max_steps: int, folder: Path, group: Group = ALONE) -> None:
    """Let the race begin with the rate that another one has found in the last finished run of this kind in the same
    folder of runs. kind: as forecasts know it; empty where nothing tells it from others. Of several processes rank 0
    looks, and tells the others."""
    said = group.from_first(lambda: json.dumps(_last(race.centre, kind, max_steps, folder.resolve())))
    if (found := json.loads(said)) is not None:
        race.begin_with(*found)


def _last(centre: float, kind: str, max_steps: int, folder: Path) -> tuple[float, str] | None:
    """Return the rate, and where it comes from; None where there is none near the centre."""
    for other, summary in summaries(folder.parent, folder) if kind else ():
        found = _found(summary, kind)
        if found is None:
            continue
        rate = float(f"{at_length(*found, max_steps):.3g}")
        if centre / _FARTHEST <= rate <= centre * _FARTHEST:
            return rate, f"that of {Path(other).name}"
    return None


def _found(values: object, kind: str) -> tuple[float, int] | None:
    """Return the rate that a finished run of this kind has found, and its length; None where it is none."""
    summary = mapping(values)
    same = mapping(mapping(summary.get(SUMMARY_KEY)).get("curve")).get("kind") == kind
    rate, steps = finite(mapping(summary.get("learning_rate")).get("chosen")), finite(summary.get("global_step"))
    if not same or summary.get("reason") != "finished" or rate is None or steps is None:
        return None
    return (rate, round(steps)) if rate > 0 and 1 <= steps <= MOST else None
