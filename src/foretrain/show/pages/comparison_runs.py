"""Answer what the charts and tables of a comparison ask of its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foretrain.show.numbers import finite
from foretrain.show.pages.charts import LOOKS

ComparedRun = Mapping[str, Any]

# A run that failed has no more than its settings.
_NUMBERS = ("loss", "seconds", "backward_passes", "tokens", "probe_tokens", "steps", "kept", "refused", "rolled_back")
_FAILED: dict[str, Any] = dict.fromkeys(_NUMBERS) | {
    "failed": "",
    "curve": (),
    "training": (),
    "phases": (),
    "moves": (),
}


class ComparedRuns:
    """It knows which runs of a comparison stand for an arm, and how an arm looks."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        analysis = result["analysis"]
        self.runs: list[ComparedRun] = [_FAILED | dict(run) for run in result["runs"]]
        self.arms: list[Mapping[str, Any]] = list(analysis["arms"])
        self.budget_curve: list[Mapping[str, Any]] = list(analysis["budget_curve"])
        self.sweep: list[Mapping[str, Any]] = list(analysis["sweep"])
        self.ladder: list[Mapping[str, Any]] = list(analysis["ladder"])
        names = dict.fromkeys(str(item["arm"]) for item in [*self.arms, *self.runs, *self.sweep])
        others = [name for name in names if name not in ("plain", "hybrid")]
        looks = {name: 2 + place % (len(LOOKS) - 2) for place, name in enumerate(others)}
        self._looks = {"plain": 0, "hybrid": 1} | looks
        self._rates = {str(arm["arm"]): finite(arm["learning_rate"]) for arm in self.arms}
        tokens = any(finite(run["tokens"]) for run in self.runs)
        self.unit = "nats per token" if tokens else "in its own unit"

    def look(self, arm: object) -> int:
        return self._looks.get(str(arm), 0)

    def shown_runs(self) -> list[ComparedRun]:
        """List the runs that stand for their arms: at the best rate, and at the whole budget where there are such."""
        shown: list[ComparedRun] = []
        for arm in dict.fromkeys(str(run["arm"]) for run in self.runs):
            best = self._rates.get(arm)
            runs = [
                run for run in self.runs if run["arm"] == arm and (best is None or _close(run["learning_rate"], best))
            ]
            whole = [run for run in runs if _close(run["budget"], 1.0)]
            shown += whole or runs
        return sorted(shown, key=lambda run: self.look(run["arm"]))

    def shown_arms(self) -> list[tuple[int, str, list[ComparedRun]]]:
        """List (look, label, runs) of every arm that has runs to show."""
        made: dict[str, list[ComparedRun]] = {}
        for run in self.shown_runs():
            made.setdefault(str(run["arm"]), []).append(run)
        return [(self.look(arm), str(runs[0]["label"]), runs) for arm, runs in made.items()]


def _close(value: object, other: float) -> bool:
    number = finite(value)
    return number is not None and math.isclose(number, other, rel_tol=1e-6)


def run_name(run: ComparedRun) -> str:
    return f"{run['label']}, seed {run['seed']}"
