"""Sweeps in a simulator of tabulated curves: what do policies cost, and how far from the best do they end?

    python benchmarks/sweeps.py --data ../shared/data --out taskset.json        # TaskSet: 12 tasks of 1000 curves
    python benchmarks/sweeps.py --tables tables.jsonl --out own.json            # own sweeps, of sweeps_own.py

Each sweep draws configurations from a task. Every policy sees the same ones in the same order, one after the other.
"foretrain" is the policy and the scores of `foretrain sweep` themselves. Optuna's pruners are its own classes in its
own study: they see a trial's losses one by one and may prune it after each; what is pruned is gone. Random search
spends what "foretrain" spent, without its audits, on whole runs. Cost: steps of all runs, of annealed copies and of
audits, over the steps of all configurations in full. Regret: how far the last loss of the best finished run is above
that of the best configuration. A run whose loss is no number costs its steps up to there.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from scipy.stats import spearmanr

import foretrain
from foretrain import environment
from foretrain.forecast.forecasting import forecast
from foretrain.forecast.records import RatePlan
from foretrain.sweep.pieces import COPIES_FROM
from foretrain.sweep.policy import HalvingPolicy
from foretrain.sweep.records import Standing, TrialRecord
from foretrain.sweep.regret import report_regret
from foretrain.sweep.scoring import curve_of, standing

RUNGS = (0.0625, 0.125, 0.25, 0.5)


@dataclass(frozen=True)
class Tabulated:
    """A run whose losses are all known."""

    total: int
    losses: tuple[tuple[int, float], ...]
    """Up to where it diverged."""
    final: float
    """Infinite where it diverged."""
    plan: RatePlan
    annealed: tuple[tuple[int, int, float, float], ...] = ()

    @property
    def diverged_at(self) -> int | None:
        return self.losses[-1][0] + 1 if not math.isfinite(self.final) and self.losses else None


@dataclass
class Outcome:
    """What one policy did in one sweep."""

    cost: float
    regret: float
    search_cost: float | None = None
    """Without audits."""
    search_regret: float | None = None
    reported: dict[str, Any] | None = None
    true_share: float | None = None
    """Share of all stopped trials that really end below the best of those never stopped."""
    true_gain: float | None = None
    """How far they end below it, as a mean over all stopped trials."""


Ranker = Callable[[TrialRecord, int, RatePlan, Sequence[TrialRecord]], Standing]


def regret_of(found: float, pool: Sequence[Tabulated]) -> float:
    best = min(run.final for run in pool)
    return (found - best) / abs(best)


# --- ours ------------------------------------------------------------------------------------------------------------


def ours(pool: Sequence[Tabulated], policy: HalvingPolicy, rank: Ranker | None = None, copies: bool = True) -> Outcome:
    """Play `foretrain sweep` with one worker."""
    records: list[TrialRecord] = []
    while (piece := policy.next_piece(records)) is not None:
        number = len(records) if piece.number is None else piece.number
        run = pool[number]
        if piece.number is None:
            records.append(TrialRecord(number, total_steps=run.total))
        record = records[number]
        if piece.why == "audit" and not record.audited:
            record = record.with_changes(audited_from=record.rung)
        after = advanced(record, run, piece.rung, policy.rungs, copies)
        if after.state == "paused":
            after = after.with_changes(
                standings={**after.standings, piece.rung: (rank or by_score)(after, piece.rung, run.plan, records)}
            )
        records[number] = after
    total = sum(record.cost for record in records) / len(pool)
    stopped = {record.number for record in policy.stopped(records)}
    finals = [(record.final, record.number in stopped) for record in records if record.final is not None]
    audit_cost = policy.audit_runs(records, RUNGS)
    found = min((final for final, _ in finals), default=math.inf)
    searched = min((final for final, audited in finals if not audited), default=math.inf)
    report = report_regret(policy, records)
    gains = [max(0.0, (searched - pool[number].final) / abs(searched)) for number in stopped]
    return Outcome(
        total,
        regret_of(found, pool),
        total - audit_cost / len(pool),
        regret_of(searched, pool),
        None if report is None else asdict(report),
        statistics.fmean(gain > 0 for gain in gains) if gains else None,
        statistics.fmean(gains) if gains else None,
    )


def advanced(
    record: TrialRecord, run: Tabulated, rung: int, rungs: int, copies: bool, since: float = COPIES_FROM
) -> TrialRecord:
    """Return the record of a trial that was trained up to a rung."""
    goal = run.total if rung >= rungs else round(RUNGS[rung] * run.total)
    dead = run.diverged_at
    step = goal if dead is None else min(goal, dead)
    seen = tuple(point for point in run.losses if point[0] <= step)
    kept = [copy for copy in run.annealed if copy[0] + copy[1] <= step and copy[0] + copy[1] + 2 >= since * run.total]
    made = tuple(kept) if copies else ()
    record = record.with_changes(
        step=step, rung=rung, losses=seen, annealed=made, extra_steps=sum(copy[1] for copy in made)
    )
    if dead is not None and step >= dead:
        return record.with_changes(state="failed")
    return (
        record.with_changes(state="finished", final=run.final)
        if goal >= run.total
        else record.with_changes(state="paused")
    )


def by_score(record: TrialRecord, rung: int, plan: RatePlan, others: Sequence[TrialRecord]) -> Standing:
    """Rank as `foretrain sweep` does; forecasts, by which it decides nothing, are left out."""
    return standing(record, rung, plan, others, forecasts=False)


def by_loss(record: TrialRecord, rung: int, plan: RatePlan, others: Sequence[TrialRecord]) -> Standing:
    """Rank by the raw held-out loss, as other tools do; everything else as in `foretrain sweep`."""
    return by_score(replace(record, annealed=()), rung, plan, others)


def by_forecast(record: TrialRecord, rung: int, plan: RatePlan, others: Sequence[TrialRecord]) -> Standing:
    """Rank by the forecast of the last loss."""
    stands = by_score(record, rung, plan, others)
    told = forecast(curve_of(record, plan))
    return stands if told is None else replace(stands, score=told.loss)


# --- Optuna's --------------------------------------------------------------------------------------------------------


def theirs(pool: Sequence[Tabulated], pruner: optuna.pruners.BasePruner) -> Outcome:
    """Play Optuna with one of its pruners, trial after trial."""
    study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0))
    cost, found = 0.0, math.inf
    for run in pool:
        trial = study.ask()
        pruned = False
        for place, (step, loss) in enumerate(run.losses, 1):
            trial.report(loss, place)
            last = step
            if trial.should_prune():
                pruned = True
                break
        if pruned:
            cost += last / run.total
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif math.isfinite(run.final):
            cost += 1.0
            found = min(found, run.final)
            study.tell(trial, run.final)
        else:
            cost += (run.diverged_at or run.total) / run.total
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return Outcome(cost / len(pool), regret_of(found, pool))


def random_search(pool: Sequence[Tabulated], cost: float) -> Outcome:
    """Spend this share of all steps on whole runs."""
    spent, found = 0.0, math.inf
    for run in pool:
        price = 1.0 if math.isfinite(run.final) else (run.diverged_at or run.total) / run.total
        if spent and spent + price > cost * len(pool):
            break
        spent += price
        found = min(found, run.final)
    return Outcome(spent / len(pool), regret_of(found, pool))


def pruners(points: int) -> dict[str, Callable[[], optuna.pruners.BasePruner]]:
    first = max(1, round(RUNGS[0] * points))
    return {
        "optuna median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=first),
        "optuna hyperband": lambda: optuna.pruners.HyperbandPruner(first, points, 3),
        "optuna successive halving, 1 of 2": lambda: optuna.pruners.SuccessiveHalvingPruner(first, 2),
        "optuna successive halving, 1 of 4": lambda: optuna.pruners.SuccessiveHalvingPruner(first, 4),
    }


# --- tables ----------------------------------------------------------------------------------------------------------


def taskset(data: Path) -> dict[str, list[Tabulated]]:
    """Read TaskSet's curves: 50 losses per run. Its rates are part of the configurations, and unknown to us."""
    tasks: dict[str, list[Tabulated]] = {}
    with gzip.open(data / "curves" / "taskset" / "curves.csv.gz", "rt") as file:
        rows = csv.DictReader(file)
        names = [name for name in rows.fieldnames or () if name.startswith("valid_")]
        plan = RatePlan(len(names) - 1, np.empty(0), np.empty(0))
        for row in rows:
            values = [float(row[name] or "nan") for name in names]
            known = next((place for place, value in enumerate(values) if not math.isfinite(value)), len(values))
            losses = tuple(enumerate(values))[1:known]
            final = values[-1] if known == len(values) else math.inf
            tasks.setdefault(row["task"], []).append(Tabulated(len(names) - 1, losses, final, plan))
    return tasks


def own_tables(path: Path) -> dict[str, list[Tabulated]]:
    """Read what sweeps_own.py wrote: one pool per schedule and length of copies."""
    from foretrain.sweep.pieces import trial_config
    from foretrain.sweep.scoring import rate_plan
    from sweeps_own import space_of

    pools: dict[str, list[Tabulated]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        space = space_of(row["schedule"], row["copy"], row["steps"], 1, row["seed"])
        plan = rate_plan(trial_config(space, row["values"]))
        final = math.inf if row["final"] is None else row["final"]
        run = Tabulated(
            row["steps"],
            tuple((step, loss) for step, loss in row["losses"] if loss is not None),
            final,
            plan,
            tuple(tuple(copy) for copy in row["annealed"]),
        )
        pools.setdefault(f"{row['schedule']}, copies of {row['copy']:.1%}", []).append(run)
    return pools


# --- measuring -------------------------------------------------------------------------------------------------------


def play(pools: dict[str, list[Tabulated]], count: int, draws: int, arms: dict[str, Any]) -> dict[str, Any]:
    """Play every policy on the same draws of configurations from each pool."""
    outcomes: dict[str, list[tuple[str, Outcome]]] = {}
    for place, (name, pool) in enumerate(pools.items()):
        for draw in range(draws):
            lot = np.random.default_rng([place, draw])
            chosen = [pool[index] for index in lot.permutation(len(pool))[:count]]
            if not any(math.isfinite(run.final) for run in chosen):
                continue
            cost = 0.0
            for arm, make in arms.items():
                outcome = random_search(chosen, cost) if make is None else make(chosen, draw)
                cost = cost or (outcome.search_cost or outcome.cost)
                outcomes.setdefault(arm, []).append((name, outcome))
        print(f"{name}: {draws} sweeps done", file=sys.stderr, flush=True)
    return {arm: summed(found) for arm, found in outcomes.items()}


def summed(found: list[tuple[str, Outcome]]) -> dict[str, Any]:
    def shares(cost: list[float], regret: list[float]) -> dict[str, float]:
        mean = statistics.fmean(cost)
        return {
            "cost": round(mean, 4),
            "times_cheaper": round(1 / mean, 2),
            "mean_regret": round(statistics.fmean(min(one, 1.0) for one in regret), 5),
            "within_1_percent": round(statistics.fmean(one <= 0.01 for one in regret), 4),
        }

    all_ = [outcome for _, outcome in found]
    result: dict[str, Any] = {"sweeps": len(found), **shares([o.cost for o in all_], [o.regret for o in all_])}
    searches = [o for o in all_ if o.search_cost is not None and o.search_regret is not None]
    if searches:
        result["without_audits"] = shares(
            [o.search_cost for o in searches if o.search_cost is not None],
            [o.search_regret for o in searches if o.search_regret is not None],
        )
        result["reported_regret"] = honesty(searches)
    result["by_pool"] = {
        name: shares([o.cost for other, o in found if other == name], [o.regret for other, o in found if other == name])
        for name in dict.fromkeys(name for name, _ in found)
    }
    return result


def honesty(outcomes: list[Outcome]) -> dict[str, Any]:
    """Compare what sweeps reported of their regret with the truth."""
    told = [(o.reported, o.true_share or 0.0, o) for o in outcomes if o.reported and o.reported["audited"]]
    if not told:
        return {"told": 0}
    return {
        "told": len(told),
        "of": len(outcomes),
        "reported_share_mean": round(statistics.fmean(report["share"] for report, _, _ in told), 5),
        "true_share_mean": round(statistics.fmean(share for _, share, _ in told), 5),
        "bound_mean": round(statistics.fmean(report["share_at_most"] for report, _, _ in told), 5),
        "within_bound": round(statistics.fmean(share <= report["share_at_most"] for report, share, _ in told), 4),
        "reported_gain_mean": round(statistics.fmean(report["mean_gain"] for report, _, _ in told), 6),
        "true_gain_mean": round(statistics.fmean(o.true_gain or 0.0 for _, _, o in told), 6),
        "audit_found_better": round(statistics.fmean(report["better"] > 0 for report, _, _ in told), 4),
    }


def rankings(pools: dict[str, list[Tabulated]]) -> dict[str, Any]:
    """Return Spearman's correlation with the last loss, and the place that the best run has, at each rung."""
    table: dict[str, Any] = {}
    for name, pool in pools.items():
        runs = [run for run in pool if math.isfinite(run.final)]
        finals = [run.final for run in runs]
        for rung, share in enumerate(RUNGS):
            records = [advanced(TrialRecord(n, total_steps=r.total), r, rung, 9, True, 0) for n, r in enumerate(runs)]
            for way, rank in (("loss", by_loss), ("annealed", by_score), ("forecast", by_forecast)):
                scores = [rank(record, rung, run.plan, []).score for record, run in zip(records, runs, strict=True)]
                order = np.argsort(scores, kind="stable")
                table.setdefault(name, {}).setdefault(f"{share:.2%}", {})[way] = {
                    "spearman": round(float(spearmanr(scores, finals).statistic), 3),
                    "place_of_best": 1 + int(np.flatnonzero(order == int(np.argmin(finals)))[0]),
                    "best_of_top_half_regret": round(
                        min(finals[i] for i in order[: len(order) // 2]) / min(finals) - 1, 5
                    ),
                }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--tables", type=Path, help="own sweeps instead of TaskSet")
    parser.add_argument("--count", type=int, nargs="+", default=[100, 32], help="configurations per sweep")
    parser.add_argument("--draws", type=int, default=20, help="sweeps per pool")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of policies")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pools = taskset(arguments.data) if arguments.tables is None else own_tables(arguments.tables)
    result: dict[str, Any] = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(Path(foretrain.__file__).parents[1]),
        "versions": {name: environment.version(name) for name in ("foretrain", "optuna", "numpy")},
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
    }
    if arguments.tables is not None:
        result["rankings"] = rankings(pools)
    for count in arguments.count:
        points = len(next(run for run in next(iter(pools.values())) if math.isfinite(run.final)).losses)
        result[f"{count} configurations"] = play(pools, count, arguments.draws, chosen_arms(count, points, arguments))
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


def chosen_arms(count: int, points: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the policies by name; None stands for random search at the cost of the first."""

    def halving(reduction: float, **more: Any) -> Callable[[Sequence[Tabulated], int], Outcome]:
        def played(pool: Sequence[Tabulated], seed: int) -> Outcome:
            return ours(pool, HalvingPolicy(min(count, len(pool)), len(RUNGS), reduction, seed=seed), **more)

        return played

    arms: dict[str, Any] = {"foretrain": halving(2)}
    if arguments.tables is not None:
        arms["foretrain, 1 of 3"] = halving(3)
        arms["foretrain by raw loss"] = halving(2, rank=by_loss, copies=False)
        arms["foretrain by forecast"] = halving(2, rank=by_forecast)
    arms["random search"] = None
    for name, make in pruners(points).items():
        arms[name] = lambda pool, seed, make=make: theirs(pool, make())
    if arguments.only:
        arms = {name: arm for name, arm in arms.items() if name.startswith(tuple(arguments.only))}
    return arms


if __name__ == "__main__":
    main()
