"""A sweep in plain values, for the console, the page, `summary.json` and `--json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretrain.config.units import loss_text
from foretrain.show.sweep import rung_text
from foretrain.sweep.policy import HalvingPolicy, cannot_win
from foretrain.sweep.records import TrialRecord
from foretrain.sweep.regret import report_regret
from foretrain.sweep.space import Space, shown


def summarize(
    space: Space,
    policy: HalvingPolicy,
    records: Sequence[TrialRecord],
    importances: Mapping[str, float],
    steps: Mapping[int, int],
) -> dict[str, Any]:
    """Return everything worth knowing of a sweep. steps: how far running trials are, by number."""
    complete = policy.is_complete(records)
    ended = [one for one in records if one.final is not None]
    best = min(ended, key=lambda one: (one.final or 0.0, one.number), default=None)
    promoted = policy.promotions(records)
    passed = policy.stopped_at(records) if complete else {}
    told = [_trial(policy, space, one, records, promoted, complete, passed, steps) for one in records]
    audited = policy.audit_runs(records, space.settings.rungs) if complete else 0.0
    cost = sum(one.cost for one in records)
    report = report_regret(policy, records) if complete else None
    return {
        "complete": complete,
        "trials": told,
        "best": None if best is None else told[best.number],
        "planned_trials": policy.trials,
        "rungs": list(space.settings.rungs),
        "runs_paid": round(cost, 4),
        "runs_of_audit": round(audited, 4),
        "runs_of_all": len(records),
        "runs_planned": round(planned_runs(policy, space.settings.rungs), 4),
        "regret": None if report is None else asdict(report),
        "importances": dict(importances),
        "space": {one.name: _range(one.choices, one.low, one.high) for one in space.ranges},
        "settings": space.settings.model_dump(mode="json", exclude={"storage"}),
    }


def planned_runs(policy: HalvingPolicy, rungs: Sequence[float]) -> float:
    """Return what a sweep costs in whole runs if halving goes as planned: trials, references and audits."""
    ends = [*rungs, 1.0]
    going = [policy.trials, *(policy.planned(rung) for rung in range(policy.rungs))]
    halving = going[0] * ends[0] + sum(
        count * (later - earlier) for count, earlier, later in zip(going[1:], ends, ends[1:], strict=False)
    )
    references = min(policy.references, policy.trials) * (1 - halving / policy.trials)
    stopped = max(0, policy.trials - going[-1])
    drawn = math.ceil(policy.audit_share * stopped) - policy.references if policy.audit_share else 0
    audit = max(0, drawn) * (1 - ends[0])
    return halving + references + audit


def _short(name: str) -> str:
    """Return the last part of a setting's name that says something: "schedule" of "schedule.type"."""
    return name.removesuffix(".type").rpartition(".")[2]


def _range(choices: Sequence[Any], low: float, high: float) -> str:
    return ", ".join(shown(value) for value in choices) if choices else f"{shown(low)} to {shown(high)}"


def _trial(
    policy: HalvingPolicy,
    space: Space,
    record: TrialRecord,
    records: Sequence[TrialRecord],
    promoted: Sequence[Sequence[TrialRecord]],
    complete: bool,
    passed: Mapping[int, int],
    steps: Mapping[int, int],
) -> dict[str, Any]:
    stands = record.standing
    state = "stopped" if complete and record.state == "paused" else record.state
    return {
        "number": record.number,
        "values": dict(record.values),
        "label": ", ".join(f"{_short(name)} {shown(value)}" for name, value in record.values.items()),
        "state": state,
        "reason": _reason(policy, space, record, records, promoted, passed, state),
        "step": max(record.step, steps.get(record.number, 0)),
        "total_steps": record.total_steps,
        "rung": record.rung,
        "score": None if stands is None or not math.isfinite(stands.score) else stands.score,
        "low": None if stands is None else stands.low,
        "high": None if stands is None else stands.high,
        "method": "" if stands is None else stands.method,
        "final": record.final,
        "audited": record.audited,
        "reference": record.number < policy.references,
        "cost": round(record.cost, 4),
        "losses": [list(point) for point in record.losses],
        "annealed": [list(point) for point in record.annealed],
        "standings": {str(rung): asdict(one) for rung, one in record.standings.items()},
        "place": record.place,
    }


def _reason(
    policy: HalvingPolicy,
    space: Space,
    record: TrialRecord,
    records: Sequence[TrialRecord],
    promoted: Sequence[Sequence[TrialRecord]],
    passed: Mapping[int, int],
    state: str,
) -> str:
    """Say in words why a trial is where it is. passed: the rungs at which trials were passed over for good."""
    if state == "failed":
        return record.reason
    if record.audited:
        return f"stopped at {rung_text(space.settings.rungs[record.audited_from or 0])}, audited by lot"
    if record.number < policy.references:
        at = passed.get(record.number)
        if at is not None:
            return f"reference, passed over at {rung_text(space.settings.rungs[at])}: audited"
        return "reference, runs to the end"
    if state not in ("paused", "stopped") or record.rung not in record.standings:
        return ""
    rung = record.rung
    ranked = policy.ranked(records, rung)
    place = next((index for index, one in enumerate(ranked, 1) if one.number == record.number), 0)
    best, stands = policy.best_end(records), record.standings[rung]
    where = f"number {place} of {len(ranked)} at {rung_text(space.settings.rungs[rung])}"
    if any(one.number == record.number for one in promoted[rung]):
        return f"{where}: goes on"
    if place <= policy.planned(rung) and cannot_win(stands, best) and best is not None and stands.low is not None:
        return f"{where}, but cannot win: at least {loss_text(stands.low)}, and another ended at {loss_text(best)}"
    count = policy.planned(rung)
    if state == "paused":
        return f"{where} so far; waits: the best {'one goes' if count == 1 else f'{count} go'} on when all are ranked"
    return f"{where}, {'1 goes' if count == 1 else f'{count} go'} on"
