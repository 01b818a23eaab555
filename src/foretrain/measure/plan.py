"""Decides which runs a comparison needs and which come next. Everything follows from the results so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from foretrain.config import Config
from foretrain.errors import InputError
from foretrain.measure.runs import Spec

Result = dict[str, Any]
PLAIN_SETTINGS: dict[str, Any] = {"hybrid.mode": "off", "predictor.beta": 0.0}
_MOST_EXTENSIONS = 2


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    meaning: str
    settings: dict[str, Any] = field(default_factory=dict)
    control: str = ""
    rates_of: str = ""
    """The arm whose learning rate it takes; empty: its own, swept."""
    rung: str = ""
    """What it changes, if it is a rung of the ladder."""
    budget: float = 1.0
    """Its length, as a factor on `max_steps`: a much faster arm must end where the plain loop's budgets reach."""
    once: bool = False
    """One seed is enough: it changes only how fast the same is computed."""

    @property
    def finds_rate(self) -> bool:
        """Return whether the arm finds its learning rate itself, so that none can be swept."""
        return self.settings.get("optimizer.learning_rate") == "auto"

    @property
    def swept(self) -> bool:
        return not (self.rates_of or self.finds_rate)


PLAIN = Arm("plain", "the reference, learning rate swept", PLAIN_SETTINGS)
HYBRID = Arm("hybrid", "the claim, learning rate swept as hard")
STILL = Arm(
    "hybrid, not moving",
    "phases and probes without prediction: the overhead",
    {"predictor.beta": 0.0, "hybrid.secant_pairs": 0},
    "still",
    rates_of="hybrid",
)
REPEAT = Arm("hybrid, repeating", "the naive predictor that a learned one must beat", {}, "repeat", "hybrid")
SAME_PASSES = Arm("plain, equal passes", "what 'just train less' gives", PLAIN_SETTINGS, rates_of="plain")
SAME_SECONDS = Arm("plain, equal seconds", "what the user would do with the time", PLAIN_SETTINGS, rates_of="plain")


@dataclass(frozen=True)
class Options:
    """How thoroughly a comparison is made."""

    seeds: int = 3
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Factors on the configured learning rate; if the best is the lowest or highest, the sweep goes on beyond it."""
    budgets: tuple[float, ...] = (0.7, 1.0, 1.4)
    """Lengths of the plain loop, as factors on `max_steps`."""
    arms: tuple[Arm, ...] = ()
    """Further arms, each with its own sweep."""
    controls: bool = True

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InputError("--seeds must be at least 1")
        if not self.rates or min(self.rates) <= 0:
            raise InputError("--rates must be positive factors, for example --rates 0.5 1 2")
        if len(set(self.budgets)) < 3 or min(self.budgets) <= 0:
            raise InputError("--budgets needs at least three different factors, for example --budgets 0.7 1 1.4")
        if 1.0 not in self.budgets:
            raise InputError("--budgets must contain 1, the length of the run itself")


class ComparisonPlan:
    """The runs of a comparison. `find` returns the result of a run, or None."""

    def __init__(self, base: Config, options: Options, find: Callable[[Spec], Result | None]) -> None:
        self.base = base
        self.options = options
        self.find = find
        hybrid_moves = base.hybrid.mode != "off"
        self.claims = [HYBRID, *options.arms] if hybrid_moves or base.predictor.beta else list(options.arms)
        if not self.claims:
            raise InputError(
                "there is nothing to compare: hybrid.mode = 'off' and predictor.beta = 0 is the plain loop itself"
            )
        names = [arm.name for arm in (PLAIN, *self.claims, STILL, REPEAT, SAME_PASSES, SAME_SECONDS)]
        if len(set(names)) < len(names):
            raise InputError(f"two arms have the same name; taken are {', '.join(map(repr, names))}")
        self.controls = [STILL, REPEAT] if options.controls and hybrid_moves else []

    @property
    def seeds(self) -> list[int]:
        return [self.base.seed + offset for offset in range(self.options.seeds)]

    # --- the sweep ---------------------------------------------------------------------------------------------------

    def rates(self) -> list[float]:
        """Return all factors of the sweep, with those added because the best so far was at its edge; all arms share
        them."""
        factors = sorted(self.options.rates)
        if len(factors) < 2:
            return factors
        for _ in range(_MOST_EXTENSIONS):
            best = [self._best_of(arm, factors) for arm in self._swept()]
            if any(factor is None for factor in best):
                break
            if factors[-1] in best:
                factors.append(factors[-1] * factors[-1] / factors[-2])
            elif factors[0] in best:
                factors.insert(0, factors[0] * factors[0] / factors[1])
            else:
                break
        return factors

    def _swept(self) -> list[Arm]:
        return [PLAIN, *(arm for arm in self.claims if arm.swept)]

    def sweep(self) -> list[Spec]:
        """Return one seed at every learning rate; arms take turns."""
        return [self._spec(arm, self.seeds[0], rate) for rate in self.rates() for arm in self._swept()]

    def best_rate(self, arm: Arm) -> float | None:
        """Return the rate with the lowest held-out loss of the sweep; None while it is not finished."""
        if arm.finds_rate:
            return 1.0
        owner = next((other for other in self._swept() if other.name == arm.rates_of), arm)
        return self._best_of(owner, self.rates())

    def _best_of(self, arm: Arm, factors: list[float]) -> float | None:
        found = {factor: self.find(self._spec(arm, self.seeds[0], factor)) for factor in factors}
        if any(result is None for result in found.values()):
            return None
        losses = {
            factor: result["held_out_loss"]
            for factor, result in found.items()
            if result is not None and result["held_out_loss"] is not None
        }
        if not losses and arm.name == PLAIN.name:
            raise InputError("the plain loop diverged at every learning rate of the sweep; lower --rates")
        if not losses:
            return factors[0]  # it will be said of it that it failed
        return min(losses, key=lambda factor: losses[factor])

    # --- one round per seed ------------------------------------------------------------------------------------------

    def round(self, seed: int) -> list[Spec]:
        """Return all arms of one seed, as far as they are known; every second round goes the other way round."""
        rates = {arm.name: self.best_rate(arm) for arm in self._swept()}
        if any(rate is None for rate in rates.values()):
            return []
        arms = [arm for arm in (PLAIN, *self.claims, *self.controls) if seed == self.seeds[0] or not arm.once]
        specs = [self._spec(arm, seed) for arm in arms]
        specs += self.curve(seed)[1:]
        if (seed - self.seeds[0]) % 2:
            specs.reverse()
        return specs + self.derived(seed)

    def curve(self, seed: int) -> list[Spec]:
        """Return the plain loop at every budget, its own length first."""
        others = sorted(set(self.options.budgets) - {1.0})
        return [self._spec(PLAIN, seed, steps=self._steps(budget)) for budget in (1.0, *others)]

    def derived(self, seed: int) -> list[Spec]:
        """Return plain loops as long as the first claim turned out to be."""
        claim, plain = (self.find(self._spec(arm, seed)) for arm in (self.claims[0], PLAIN))
        if not self.options.controls or not _usable(claim) or not _usable(plain):
            return []
        per_second = plain["backward_passes"] / plain["seconds"]  # type: ignore[index]
        passes, seconds = claim["backward_passes"], claim["seconds"]  # type: ignore[index]
        return [
            self._spec(SAME_PASSES, seed, steps=passes),
            self._spec(SAME_SECONDS, seed, steps=max(1, round(seconds * per_second))),
        ]

    def specs(self) -> list[Spec]:
        """Return all runs known by now."""
        return self.sweep() + [spec for seed in self.seeds for spec in self.round(seed)]

    def next(self) -> list[Spec]:
        """Return the runs to do now, in this order: what is missing of the sweep, else of the first unfinished
        round."""
        stages = [self.sweep, *(lambda seed=seed: self.round(seed) for seed in self.seeds)]
        for stage in stages:
            missing = [spec for spec in stage() if self.find(spec) is None]
            if missing:
                return missing
        return []

    def steps_left(self) -> int:
        """Return the optimizer steps still to do, roughly: what depends on results yet to come is guessed."""
        per_round = self.base.max_steps * (
            len(self.claims) + len(self.controls) + sum(self.options.budgets) + 2 * self.options.controls
        )
        known = sum(spec.max_steps for spec in self.specs() if self.find(spec) is None)
        unknown = sum(1 for seed in self.seeds if not self.round(seed))
        return round(known + unknown * per_round + self._underivable() * self.base.max_steps)

    def unknown_runs(self) -> int:
        """Guess how many runs `specs` does not name yet, because they depend on results to come; rather too many."""
        unknown = [seed for seed in self.seeds if not self.round(seed)]
        per_round = len(self.claims) + len(self.controls) + len(set(self.options.budgets)) + 2 * self.options.controls
        swept = len(self._swept()) if self.seeds[0] in unknown else 0  # the sweep has one of each already
        return len(unknown) * per_round - swept + self._underivable()

    def _underivable(self) -> int:
        """Return the plain loops whose length is not known yet, in rounds that are known."""
        rounds = [seed for seed in self.seeds if self.options.controls and self.round(seed)]
        first = self.claims[0], PLAIN
        return 2 * sum(any(self.find(self._spec(arm, seed)) is None for arm in first) for seed in rounds)

    def spec(self, arm: Arm, seed: int) -> Spec:
        """Return the run of an arm at its best learning rate."""
        return self._spec(arm, seed)

    def _steps(self, budget: float) -> int:
        return max(1, round(self.base.max_steps * budget))

    def _spec(self, arm: Arm, seed: int, rate: float | None = None, steps: int | None = None) -> Spec:
        factor = rate if rate is not None else self.best_rate(arm)
        length = steps or self._steps(arm.budget)
        return Spec(arm.name, seed, factor or 1.0, length, dict(arm.settings), arm.control)


def _usable(result: Result | None) -> bool:
    return result is not None and result["loss"] is not None
