"""Is the forecast worth a move? How far to go, how likely it is to help, and whether the gate lets it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from foretrain.config import Config
from foretrain.hybrid.gate import Answer, Ask, Gate, cost_of_audit, no_audit_is_affordable, steps_of_audit
from foretrain.hybrid.horizon import HorizonBandit, HorizonContext
from foretrain.hybrid.plan import FORECAST, Decision, Plan
from foretrain.motion.confidence import Confidence, ConfidenceFeatures
from foretrain.motion.observer import Observer
from foretrain.motion.predictability import Predictability
from foretrain.motion.predictors.base import Forecast
from foretrain.motion.records import HORIZONS_IN_WINDOWS

WINDOWS_TO_SCORE = 2
"""Windows after a move until a forecast has met what followed: one to make it, one to score it."""
_NEARLY_EXACT = 0.98
"""R2 from which forecasts count as steps. Chosen: below it a fall of the loss can be the easy part of what steps do."""


@dataclass(frozen=True, slots=True)
class Appraisal:
    """What a forecast is thought to be worth at the end of a window."""

    decision: Decision
    confidence: float
    answer: Answer
    """The gate's."""


class Appraiser:
    """Knows how good forecasts were so far. It decides nothing: the policy does."""

    def __init__(self, config: Config, observer: Observer, kind: str) -> None:
        """kind: of run, "full weights" or "adapters"."""
        hybrid = config.hybrid
        self.config = config
        self.observer = observer
        self.max_steps = config.max_steps
        self.gate = Gate(config.max_steps, config.audit.time_budget, kind)
        self.bandit = HorizonBandit(hybrid.max_predict_steps, hybrid.window_steps)
        self.confidence = Confidence()
        self.predictability = Predictability(observer.losses)
        self.falls_once = config.schedule.type in ("wsd", "cosine")
        """The learning rate falls once, to the end of the run."""
        self.judged_on_probes = False
        """Moves are judged on the probe batches alone, which are never trained on."""
        self.judged_on_held_out = False
        """Where the loss is exact, the held-out batches of `fit` judge moves, too."""

    def plan_for(self, max_steps: int) -> None:
        """The run is so long, as far as is known now."""
        self.max_steps = max_steps
        self.gate.plan_for(max_steps)

    def judge_on_probes(self) -> None:
        """Such a leap is found or refused with some probes. A rate that is too low shows at once, and a good one makes
        every further try a waste."""
        self.judged_on_probes = True
        self.gate.first_wait = self.gate.backoff = 4

    # --- how moves are judged here -----------------------------------------------------------------------------------

    @property
    def judged_at_once(self) -> bool:
        """Whether the loss of a probe right after a move can be trusted."""
        return self.predictability.low_noise or self.judged_on_probes

    @property
    def searches(self) -> bool:
        """Whether the length of a move is chosen by probing several."""
        wanted = self.config.hybrid.search
        return self.judged_at_once if wanted == "auto" else bool(wanted)

    def correct_steps(self, audited: bool) -> int:
        """An audit validates for longer; a short run can afford a short one only."""
        return steps_of_audit(self.config, self.max_steps) if audited else self.config.hybrid.correct_steps

    @property
    def audit_cost(self) -> float:
        return cost_of_audit(self.config, self.max_steps)

    def too_dear(self, tried: int) -> bool:
        """An audit costs more than this run may spend, and nothing but an audit can tell what a move is worth.
        tried: moves so far."""
        unknown = not tried and not self.judged_at_once and self.gate.interval()[0] <= 0
        return unknown and no_audit_is_affordable(self.config, self.max_steps)

    # --- confidence --------------------------------------------------------------------------------------------------

    def estimate(self, forecast: Forecast, horizon: int) -> float:
        """Calibrated probability that a move over `horizon` will be kept."""
        return self.confidence.estimate(self._features(forecast, horizon))

    @property
    def current_confidence(self) -> float:
        """That a move over the shortest horizon would be kept; 0 while nothing is forecast."""
        forecast = self.observer.forecast
        return self.estimate(forecast, self.config.hybrid.window_steps) if forecast is not None else 0.0

    def learn(self, forecast: Forecast, horizon: int, kept: bool, weight: float = 1.0) -> None:
        """A move by this forecast was kept, or would have been right."""
        self.confidence.learn(self._features(forecast, horizon), kept, weight=weight)

    def reward(self, step: int, horizon: int, gain_steps: float, cost_steps: float) -> None:
        """A move over this horizon gained and cost so many full steps."""
        self.bandit.reward(horizon, self._context(step), gain_steps, cost_steps)

    def _context(self, step: int) -> HorizonContext:
        r2 = self.observer.quality.r2(HORIZONS_IN_WINDOWS[1])
        snr = self.predictability.motion_snr
        noise = -math.log(max(snr, 1e-6)) if math.isfinite(snr) else math.nan
        return HorizonContext(self.current_confidence, r2, step / self.max_steps, noise)

    def _features(self, forecast: Forecast, horizon: int) -> ConfidenceFeatures:
        windows = 1 if self.searches else max(1, round(horizon / self.config.hybrid.window_steps))
        quality = self.observer.quality
        cosine = quality.cosine(windows)
        return ConfidenceFeatures(
            error=1 - (cosine * abs(cosine) if self.searches else quality.r2(windows)),
            cosine=cosine,
            disagreement=forecast.disagreement,
            spread=quality.spread(windows),
        )

    # --- a move ------------------------------------------------------------------------------------------------------

    def weigh(
        self, step: int, forecast: Forecast, steps_left: int, longest: int, trend: int, ready: bool, exact: bool
    ) -> Appraisal:
        """What to do with a forecast. longest: move that may be made; trend: of the learning rate; ready: a
        move could begin now that may be made at any learning rate; exact: one that needs no confidence."""
        needed = self.correct_steps(True)
        limit = min(longest, steps_left - needed)
        confidence = self.estimate(forecast, min(limit, self.config.hybrid.max_predict_steps))
        horizon = self.bandit.choose(self._context(step), confidence, limit) if limit >= 1 else 0
        confidence = self.estimate(forecast, horizon) if horizon else confidence
        answer = self.gate.ask(self._question(horizon, steps_left, needed, trend, ready, exact))
        if not self.searches and self.observer.windows < WINDOWS_TO_SCORE:
            answer = Answer(False, False, "forecasts since the last move are not scored yet")
        if self.judged_on_probes or (
            self.judged_on_held_out and self.judged_at_once
        ):  # an audit would judge by what is trained on
            answer = replace(answer, audited=False)
        decision = Decision(FORECAST, horizon, answer.audited, limit, answer.reason)
        return Appraisal(decision, confidence, answer)

    def _question(self, horizon: int, steps_left: int, needed: int, trend: int, ready: bool, exact: bool) -> Ask:
        windows = max(1, round(horizon / self.config.hybrid.window_steps))
        quality = self.observer.quality
        # A searched move need only point the right way: its length is found on the exact loss.
        trusted = exact or (quality.cosine(1) > 0 if self.searches else quality.trusted(windows))
        return Ask(
            horizon,
            steps_left,
            needed,
            trusted,
            self.judged_at_once,
            decaying=trend < 0,
            cost=self.audit_cost,
            judge="held-out examples are probed" if self.judged_on_probes else "batches hardly differ",
            chained=ready,
            rising=trend > 0,
            for_good=self.judged_on_probes and self.falls_once,
        )

    def plan(self, decision: Decision, tolerance: float) -> Plan:
        """The move that was decided for, with what is known of the run now. tolerance: rise of the loss by noise."""
        plan = Plan(
            decision.kind,
            decision.horizon,
            decision.audited,
            decision.longest,
            decision.reason,
            self.correct_steps(decision.audited),
            low_noise=self.judged_at_once,
            searched=self.searches,
            tolerance=tolerance,
            exactness=self._exactness(decision.horizon),
            least_worth=self.gate.interval()[0],
        )
        if decision.kind != FORECAST:
            return plan
        forecast, horizon = self.observer.forecast, decision.horizon
        if forecast is None:
            raise RuntimeError("nothing is forecast")  # PREDICT is entered with a forecast only
        return replace(
            plan,
            confidence=self.estimate(forecast, horizon),
            predicted_loss=float(np.interp(horizon, forecast.horizons, forecast.loss)),
            coefficients=forecast.at(horizon),
            forecast=forecast,
        )

    def _exactness(self, horizon: int) -> float:
        """How nearly exactly forecasts of that length came true: 1 at an R2 of 1, 0 at `_NEARLY_EXACT`, negative below
        it; nan where none was scored so far."""
        windows = max(1, round(horizon / self.config.hybrid.window_steps))
        return (self.observer.quality.r2(windows) - _NEARLY_EXACT) / (1 - _NEARLY_EXACT)
