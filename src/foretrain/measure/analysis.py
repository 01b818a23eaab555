"""Says what the runs of a comparison show. It is pure: numbers go in, numbers and words come out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foretrain.measure.plan import PLAIN, SAME_PASSES, SAME_SECONDS, Arm, ComparisonPlan, Result
from foretrain.measure.stats import Interval, paired_interval, smallest_detectable

_FARTHEST = 1.25
"""The plain curve is prolonged up to this multiple of the longest budget. A loss above the curve has no such limit: an
arm is charged with its result, however bad that is."""
_UNSTEADY = 0.1
"""Difference of the plain loop's own times per step within a round from which they are said to be unsteady."""
_FEWEST_RATES = 3


class Curve:
    """Steps that the plain loop needs to end at a loss: its budgets, interpolated in log(steps)."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """Take points (steps, final loss), each from runs with a complete schedule."""
        ordered = sorted(dict(points).items())
        self._log_steps = np.log([steps for steps, _ in ordered])
        self._losses = np.asarray([loss for _, loss in ordered], dtype=float)

    @property
    def falls(self) -> bool:
        """Longer budgets end lower; otherwise nothing can be read off."""
        return bool((np.diff(self._losses) < 0).all())

    def loss(self, steps: int) -> float:
        return float(np.interp(np.log(steps), self._log_steps, self._losses))

    def steps(self, loss: float) -> tuple[float, bool]:
        """Return (steps, whether that lies within the measured budgets)."""
        x, y = self._log_steps[::-1], self._losses[::-1]  # losses ascending
        if y[0] <= loss <= y[-1]:
            return float(np.exp(np.interp(loss, y, x))), True
        one, two = (0, 1) if loss < y[0] else (-1, -2)
        guess = x[one] + (x[one] - x[two]) / (y[one] - y[two]) * (loss - y[one])
        return float(np.exp(np.clip(guess, 0.0, x.max() + math.log(_FARTHEST)))), False


def analyse(plan: ComparisonPlan) -> dict[str, Any]:
    """Return everything that the page and the table show."""
    curve = plain_curve(plan)
    compared = [PLAIN, *plan.claims, *plan.controls]
    arms = [_arm(plan, arm, curve) for arm in compared]
    arms += [_arm(plan, arm, curve, plan.derived) for arm in (SAME_PASSES, SAME_SECONDS)]
    lost = [f"{arm['label']} failed in all {arm['failed']} seeds" for arm in arms if arm["failed"] and not arm["n"]]
    arms = [arm for arm in arms if arm["n"]]
    claim = next((arm for arm in arms if arm["arm"] == plan.claims[0].name), None)
    verdict, sentence = _verdict(plan, claim)
    return {
        "verdict": verdict,
        "sentence": " ".join([sentence, *(f"{text}." for text in lost)]),
        "arms": arms,
        "budget_curve": _budget_points(plan),
        "sweep": _sweep_points(plan),
        "ladder": _ladder(plan, arms),
    }


def plain_curve(plan: ComparisonPlan) -> Curve | None:
    """Return the mean over seeds; None while fewer than three budgets are there for any seed."""
    losses: dict[int, list[float]] = {}
    for seed in plan.seeds:
        results = {spec.max_steps: plan.find(spec) for spec in plan.curve(seed)}
        found = {steps: r["loss"] for steps, r in results.items() if r is not None and r["loss"] is not None}
        if len(found) == len(results):
            for steps, loss in found.items():
                losses.setdefault(steps, []).append(loss)
    return Curve([(steps, float(np.mean(values))) for steps, values in losses.items()]) if len(losses) > 2 else None


def seconds_per_step(plan: ComparisonPlan, seed: int) -> float:
    """Return the plain loop's seconds per step in the round of this seed, over all its runs together."""
    return float(np.median(_plain_times(plan, seed)))


def _plain_times(plan: ComparisonPlan, seed: int) -> list[float]:
    results = [plan.find(spec) for spec in plan.curve(seed) + plan.derived(seed)]
    return [r["seconds"] / r["backward_passes"] for r in results if r is not None and r["loss"] is not None]


def _results(plan: ComparisonPlan, arm: Arm, derived: Any = None) -> dict[int, Result]:
    """Return the result of each seed, those that failed included."""
    found = {}
    for seed in plan.seeds:
        if plan.best_rate(arm) is None or (arm.once and seed != plan.seeds[0]):
            continue
        specs = [spec for spec in derived(seed) if spec.arm == arm.name] if derived else [plan.spec(arm, seed)]
        for spec in specs:
            result = plan.find(spec)
            if result is not None:
                found[seed] = result
    return found


def _arm(plan: ComparisonPlan, arm: Arm, curve: Curve | None, derived: Any = None) -> dict[str, Any]:
    tried = _results(plan, arm, derived)
    results = {seed: result for seed, result in tried.items() if result["loss"] is not None}
    plain = {seed: result for seed, result in _results(plan, PLAIN).items() if result["loss"] is not None}
    paired = [seed for seed in results if seed in plain]
    failed = len(tried) - len(results)
    notes = [f"failed in {failed} of {len(tried)} seeds, which are in no mean here"] if failed else []
    ratios, outside = [], False
    if curve is not None and not curve.falls:
        notes.append(
            "the plain loop does not end lower with a longer budget: no speed-up can be read off; train longer"
        )
    elif curve is not None and arm.name != PLAIN.name:
        for seed in paired:
            # A seed's luck is the same for all its arms: it is taken out by where its own plain run ended.
            luck = plain[seed]["loss"] - curve.loss(plan.base.max_steps)
            steps, inside = curve.steps(results[seed]["loss"] - luck)
            outside = outside or not inside
            same = results[seed] is plain[seed]  # one run serves both arms
            seconds = steps * seconds_per_step(plan, seed)
            ratios.append(0.0 if same else math.log(seconds / results[seed]["seconds"]))
    tries = sum(result.get(name, 0) for result in results.values() for name in ("kept", "refused", "rolled_back"))
    idle = bool(results) and not tries and _moves(plan, arm)
    identical = idle and len(paired) == len(results) and all(_equal(results[seed], plain[seed]) for seed in paired)
    if idle:
        shown = "the same run as plain's, to the bit" if identical else "what it shows is overhead"
        notes.append(f"made no move: {shown}")
    if len(paired) < len(results):
        notes.append(f"compared in {len(paired)} of {len(results)} seeds: in the others the plain loop failed")
    same_length = arm.budget == 1.0 and not derived
    more = [results[seed]["tokens"] / plain[seed]["tokens"] - 1 for seed in paired if same_length]
    if more and np.mean(more) > 0.001:
        notes.append(f"trained on {np.mean(more):.1%} more tokens than plain; their time is in its seconds")
    doubts = _doubts(plan, arm, paired if ratios else [])
    if outside:
        doubts.insert(0, "the plain loop's budgets do not reach this loss: its curve was prolonged; add to --budgets")
    return {
        "arm": arm.name,
        "label": arm.name,
        "meaning": arm.meaning,
        "learning_rate": next(iter(results.values()))["learning_rate"] if results else None,
        "n": len(results),
        "failed": failed,
        "identical": identical,
        "seeds": paired,
        "loss_mean": _mean([r["loss"] for r in results.values()]),
        "loss_deviation": _deviation([r["loss"] for r in results.values()]),
        "seconds_mean": _mean([r["seconds"] for r in results.values()]),
        "backward_passes_mean": _mean([r["backward_passes"] for r in results.values()]),
        "tokens_mean": _mean([r["tokens"] for r in results.values()]),
        "loss_difference": _interval([results[s]["loss"] - plain[s]["loss"] for s in paired if same_length]),
        "speedup": _ratio(ratios),
        "speedups": [math.exp(value) for value in ratios],
        "smallest_detectable": _detectable(ratios),
        "doubts": doubts,
        "note": "; ".join(notes + doubts),
    }


def _equal(one: Result, other: Result) -> bool:
    """Return whether both took the same steps to the same losses, to the bit."""
    return all(one.get(name) == other.get(name) for name in ("loss", "held_out_loss", "backward_passes", "tokens"))


def _moves(plan: ComparisonPlan, arm: Arm) -> bool:
    """Return whether the arm is one that may make predicted moves."""
    return plan.spec(arm, plan.seeds[0]).config(plan.base).hybrid.mode != "off"


def _doubts(plan: ComparisonPlan, arm: Arm, compared: list[int]) -> list[str]:
    """Return what speaks against the figures of an arm: how it was tuned, and how steady the machine was."""
    doubts, rates = [], plan.rates()
    if arm.swept:
        if len(rates) < _FEWEST_RATES:
            doubts.append(f"fewer than {_FEWEST_RATES} learning rates were tried; add to --rates")
        elif plan.best_rate(arm) in (rates[0], rates[-1]):
            doubts.append("its best learning rate is the last that was tried; add to --rates")
    times = [_plain_times(plan, seed) for seed in compared]
    apart = max((max(seen) / min(seen) - 1 for seen in times), default=0.0)
    if apart > _UNSTEADY:
        doubts.append(f"the machine was not steady: plain's own time per step varied by {apart:.0%} within a seed")
    return doubts


def _verdict(plan: ComparisonPlan, claim: dict[str, Any] | None) -> tuple[str, str]:
    missing = [spec for spec in plan.specs() if plan.find(spec) is None]
    if missing or plan.next():
        return "incomplete", "Not finished: run the same command again to go on."
    if claim is None:
        return "no gain shown", "No gain shown: nothing can be compared."
    if claim["speedup"] is None:
        return "no gain shown", f"No gain shown: {claim['note'] or 'nothing can be compared'}."
    ratio, n = claim["speedup"], len(claim["speedups"])
    times = f"{ratio['mean']:.3f}x as fast as the equally tuned plain loop to the same loss"
    if claim["identical"] and not claim["failed"] and (n < 3 or ratio["high"] >= 1):
        return "identical", (
            f"Identical runs: {claim['label']} made no move and ended at the plain loop's loss, to the bit, with "
            f"{_count(n, 'seed')}; the time differs by noise. How much may be spent on trying moves is "
            "audit.time_budget."
        )
    if n < 3:
        few = f"Too few for a proof: {claim['label']} was {times} with {_count(n, 'seed')}. Use --seeds 3."
        return "one run", few
    within = f"{times} (95 % interval {ratio['low']:.3f} to {ratio['high']:.3f}, {n} seeds)"
    if ratio["low"] > 1 and claim["failed"]:
        failed = f"{claim['label']} failed in {_count(claim['failed'], 'seed')}"
        return "no gain shown", f"No gain shown: {failed}; in the others it was {within}."
    if ratio["low"] > 1:
        return "gain", " But: ".join([f"A gain: {claim['label']} was {within}.", *(f"{d}." for d in claim["doubts"])])
    if ratio["high"] < 1:
        return "slower", f"No gain: {claim['label']} was slower, {within}."
    seen = claim["smallest_detectable"]
    text = f"No gain shown: {claim['label']} was {within}. An effect of {seen - 1:.1%} or more would most likely have"
    return "no gain shown", f"{text} been seen."


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _budget_points(plan: ComparisonPlan) -> list[dict[str, Any]]:
    points = []
    if plan.best_rate(PLAIN) is None:
        return []
    for seed in plan.seeds:
        for spec in sorted(plan.curve(seed) + plan.derived(seed), key=lambda spec: spec.max_steps):
            result = plan.find(spec)
            if result is not None:
                points.append(
                    {
                        "max_steps": spec.max_steps,
                        "budget": spec.max_steps / plan.base.max_steps,
                        "seed": seed,
                        "loss": result["loss"],
                        "seconds": result.get("seconds"),
                    }
                )
    return points


def _sweep_points(plan: ComparisonPlan) -> list[dict[str, Any]]:
    points = []
    for spec in plan.sweep():
        result = plan.find(spec)
        if result is not None:
            held_out = result["held_out_loss"]
            rate, seed = result["learning_rate"], spec.seed
            points.append({"arm": spec.arm, "label": spec.arm, "learning_rate": rate, "seed": seed, "loss": held_out})
    return points


def _ladder(plan: ComparisonPlan, arms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every rung's time to its loss, against the plain loop's; a rung over the one below is the ratio of the
    two."""
    rungs = [arm for arm in plan.claims if arm.rung]
    by_name = {arm["arm"]: arm for arm in arms}
    ladder: list[dict[str, Any]] = []
    below: dict[str, Any] | None = None
    first: float | None = None
    for rung in rungs:
        arm = by_name.get(rung.name)
        if arm is None or not arm["speedups"]:
            continue
        step = None
        if below is not None:
            lower = dict(zip(below["seeds"], below["speedups"], strict=True))
            upper = dict(zip(arm["seeds"], arm["speedups"], strict=True))
            step = _ratio([math.log(upper[seed] / lower[seed]) for seed in upper if seed in lower])
        first = first or arm["speedup"]["mean"]
        ladder.append(
            {
                "rung": rung.name,
                "setting": rung.rung,
                "loss_mean": arm["loss_mean"],
                "seconds_mean": arm["seconds_mean"],
                "speedup": step,
                "cumulative": arm["speedup"]["mean"] / first,
                "over_plain": arm["speedup"]["mean"],
                "n": arm["n"],
                "note": arm["note"],
            }
        )
        below = arm
    return ladder


def _ratio(logs: list[float]) -> dict[str, Any] | None:
    found = _interval(logs)
    if found is None:
        return None
    deviation = found["deviation"]
    return {key: None if value is None else math.exp(value) for key, value in found.items()} | {"deviation": deviation}


def _interval(values: list[float]) -> dict[str, Any] | None:
    if not values:
        return None
    interval: Interval = paired_interval(values)
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "deviation": interval.deviation}


def _detectable(logs: list[float]) -> float | None:
    found = smallest_detectable(logs) if len(logs) > 1 else None
    return None if found is None else math.exp(found)


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _deviation(values: list[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
