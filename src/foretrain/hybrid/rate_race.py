"""A learning rate that is `auto`: the first steps are run at several rates, and the run goes on with the best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrain.config import Config, changed
from foretrain.config.schema import FIRST_RATE
from foretrain.engine import schedule
from foretrain.engine.engine import Engine
from foretrain.engine.fence import OwnCodeError
from foretrain.engine.rates import ScheduledRates
from foretrain.errors import ConfigError
from foretrain.events import Event, Notice, RatesToTry, RateTrial, RateTried
from foretrain.hybrid.moves.lookahead import LookAhead
from foretrain.hybrid.rate_plan import (
    FoundRate,
    RacePlan,
    centre_of,
    found_rate,
    horizon_of,
    next_exponent,
    plan_of,
    with_rise,
    with_short_warmup,
)
from foretrain.hybrid.replay import Interrupted, Replay
from foretrain.persist.stateful import Stateful

_LOOKS = 8
"""How often a trial says how far it is, and is looked at whether it has failed. Chosen: each look waits for the device,
and a rate that fails costs an eighth of a trial at the least."""
_MANY_PASSES = 10.0
"""A run that passes over its data so often may overfit where no trial sees it. Chosen: small tables were best after 4
to 27 passes (docs/learning-rate.md#many-passes-over-the-data)."""
_FAR_ABOVE = 3.0
"""A trial has failed when its mean loss between two looks is so many times that before the first one. Chosen: no rate
that learns comes near."""


class RateRace(Stateful):
    """Tries rates on the same first batches from the same first weights; held-out batches say which is best.

    The run itself begins with the first rate and notes its batches. When there are enough, copies of the run are
    trained on them at other rates: the neighbours of the best so far, while any of them was not tried. At the end of
    each trial the rate falls to 0, on a copy, before the held-out loss is measured: raw losses would prefer rates that
    are too low. The run then goes on from where the best of them ended before its rate fell. All of it is charged.

    Where the run has a longer warm-up than a trial, trials have a short one, as a factor on the scheduled rate, and the
    run goes on with its own from where the lowest rate ended: high rates so early do harm that lasts.

    Of several processes each trains on its own rows and keeps its own parts; losses are those of all, and rates are
    what rank 0 computes.
    """

    saved = (
        "open",
        "centre",
        "origin",
        "_plan",
        "tried",
        "best",
        "replay",
        "middle",
        "end",
        "found",
        "failed",
        "spent",
    )
    _plan: RacePlan | None
    tried: dict[int, float]
    middle: Any
    end: Any
    found: FoundRate | None

    clip = math.inf
    """As a source of the learning rate, it wants no clipping."""

    def __init__(
        self,
        engine: Engine,
        adapters: bool,
        held_out: list[Any],
        look_ahead: LookAhead | None,
        emit: Callable[[Event], None],
    ) -> None:
        """held_out: batches that judge rates; `fit` gives its own where there are none."""
        config = engine.config
        self.engine, self.emit = engine, emit
        self.hooks = () if look_ahead is None else (look_ahead,)
        self.replay = Replay(engine, look_ahead)
        self.adapters = adapters
        self.held_out = held_out
        self.open = config.optimizer.learning_rate == "auto"
        self.centre = FIRST_RATE if adapters else centre_of(config, engine.model)
        """The rate that is tried first."""
        self.origin = "as adapters often want it" if adapters else "by optimizer, width and length"
        """Where it comes from, in words."""
        self._plan = None
        """How rates are tried, since the race began: a run that is resumed may have another length."""
        self.tried = {}
        """Held-out loss of each trial, by how many factors its rate is above the first."""
        self.best = 0
        self.middle = None
        """The run at the end of its own trial."""
        self.end = None
        """The end of the trial that the run goes on from, where it was not that of the run itself."""
        self.found = None
        self.failed = 0
        """Trials that were ended early."""
        self.spent = 0
        """Steps of all trials, without those that were left: the same rates are tried however often a run stops."""
        self.interrupted: Interrupted = lambda: False
        """Set by `fit`."""
        self.per_pass: float | None = None
        """Batches of one pass over the training data, set by `fit`; None where nobody knows."""
        self.may_overfit = True
        """Set by `fit`: the run ends neither early nor with its best weights."""
        self._at_work: float | None = None
        """Factor of the rate of the trial that runs now."""
        self._told = False
        self._shortened = False
        """The warm-up follows from the plan."""
        engine.on_cover.append(self._begin_anew)
        engine.on_length.append(self._shorten_warmup)
        if engine.has_end:
            self._shorten_warmup(config.max_steps)

    def _shorten_warmup(self, max_steps: int) -> None:
        """The length of the run is known: a trial must see more than the warm-up."""
        short = with_short_warmup(self.engine.config, self.adapters)
        if short is not self.engine.config:
            self._shortened = True
            self._use(short)

    def _use(self, config: Config) -> None:
        """Go on with another schedule."""
        engine, rate = self.engine, self.engine.rate
        engine.config = config
        if isinstance(rate, ScheduledRates):
            rate.config = config.schedule
            rate.end_at(config.max_steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Trials of earlier versions had the warm-up of the run."""
        plan = state.get("plan") if isinstance(state, Mapping) else None
        super().load_state_dict(state if plan is None else {**state, "plan": {"rise": None, **plan}})

    def after_load(self) -> None:
        """Trials that are left have the warm-up of those that were made, also in a run of another length."""
        if self.open and self._plan is not None and self._shortened:
            self._use(changed(self.engine.config, {"schedule.warmup_steps": self._plan.warmup}))

    @property
    def plan(self) -> RacePlan:
        """How rates are tried."""
        if self._plan is not None:
            return self._plan
        config = self.engine.config
        plan = plan_of(config.max_steps, self.adapters, horizon_of(config, self.engine.unit == "tokens"))
        return with_rise(plan, config)

    @property
    def extra(self) -> int:
        """Steps that were made beside the run, those of trials that were left included."""
        return self.replay.passes

    @property
    def rate(self) -> float:
        """The rate that the run itself has now, at its highest."""
        return self.centre if self.found is None else self.found.rate

    @property
    def rate_factor(self) -> float:
        """What the scheduled rate is to be multiplied with."""
        if self._at_work is None and not (self.open and self.found is None):
            return self.rate / FIRST_RATE
        return (self.rate / FIRST_RATE if self._at_work is None else self._at_work) * self._lift()

    def _lift(self) -> float:
        """Return what makes the rate of this step, as the run has it, that of a trial."""
        engine, rise, step = self.engine, self.plan.rise, self.engine.progress.global_step
        own = engine.schedule(step)
        if rise is None or not own:
            return 1.0
        short = engine.config.schedule.model_copy(update={"type": "warmup", "warmup_steps": rise})
        return schedule.build(short, engine.rate.peak, engine.config.max_steps)(step) / own

    @property
    def _rises_on(self) -> bool:
        """The run's own warm-up goes on after the trials."""
        return self.plan.rise is not None and self.engine.rate.trend(self.replay.step + self.plan.steps) > 0

    @property
    def passes(self) -> float | None:
        """How often the whole run passes over its training data; None where nobody knows."""
        return self.engine.config.max_steps / self.per_pass if self.per_pass and self.engine.has_end else None

    def use(self, held_out: list[Any], length: int) -> None:
        """Judge by these batches, of sequences of so many tokens."""
        self.held_out = held_out
        if not self.adapters:
            self.centre = centre_of(self.engine.config, self.engine.model, length)
            self.origin = "by optimizer, width, tokens per step and length"

    def begin_with(self, rate: float, origin: str) -> None:
        """Try this rate first, while nothing was tried. origin: where it comes from."""
        if not self.replay.open and not self.tried:
            self.centre, self.origin = rate, origin

    def check(self) -> None:
        """Refuse a race that has no length, or that nothing could judge."""
        if not self.open:
            return
        if not self.engine.has_end:
            raise ConfigError(
                "optimizer.learning_rate = 'auto' tries each rate for a share of the run's steps, and nothing says how "
                "many there are: set max_steps"
            )
        if not self.held_out:
            raise ConfigError(
                "optimizer.learning_rate = 'auto' needs held-out batches that judge rates, and there are none: give "
                "held_out to fit(), or probe= to HybridTrainer, or set a rate"
            )

    def _begin_anew(self) -> None:
        """Others are trained: rates are compared from here on, all on the same steps."""
        if self.open:
            self.replay.forget()
            self._plan = self.middle = self.end = None
            self.tried, self.best = {}, 0

    # --- between steps -----------------------------------------------------------------------------------------------

    def follow(self, batch: Any) -> None:
        """Before a step of the run while the race is open: note where trials begin and end, and make them."""
        if not self._keep_states():
            self._give_up("memory does not suffice to try other learning rates; the run goes on")
            return
        if not self._told:
            self._told = True
            if not self.tried:
                self._announce()
            self._tell(0, self.replay.noted, 2 * self.plan.length)
        if self.replay.noted >= self.plan.length:
            self._race(batch)

    def _keep_states(self) -> bool:
        """Copy the run where trials begin, and where its own ends. Returns whether memory sufficed."""
        replay = self.replay
        if not replay.open:
            self.check()
            self.engine.forward.same_number(self.held_out, "batches that judge learning rates")
            self.centre = self._of_first(self.centre)
            if not replay.fits(replay.begin):
                return False
            self._plan = self.plan
        if self.middle is None and replay.noted >= self.plan.steps:
            return replay.fits(self._keep_middle)
        return True

    def _keep_middle(self) -> None:
        self.middle = self.replay.state()

    def _of_first(self, number: float) -> float:
        """Return what rank 0 has computed: others may round in another way."""
        return float(self.engine.world.of_first(np.array(number)))

    def finish(self) -> None:
        """The run is over. One that was too short for a race says so."""
        if self.open:
            self._give_up("the run ended before other learning rates were tried")

    def _give_up(self, why: str) -> None:
        """Keep the first rate."""
        self._close()
        self.emit(Notice(f"{why}: its rate is the first one, {self.centre:.3g}, {self.origin}"))

    def _close(self) -> None:
        self.open = False
        self.replay.forget()
        self.middle = self.end = None

    def note(self, batch: Any, position: int) -> None:
        """A batch is handed in for a step of the run; those that come while a race is left for a while count, too."""
        self.replay.note(batch, position)

    def _race(self, given: Any) -> None:
        """Make all trials that are left. Where the run is to stop, the one at work is made anew when it goes on."""
        try:
            complete = self._try_all(given)
        except RuntimeError as error:
            if not self.replay.is_bearable(error):
                raise
            complete = True
            self.emit(Notice("memory does not suffice to try more learning rates; the run goes on with what is known"))
        if complete:
            self._settle(given)

    def _try_all(self, given: Any) -> bool:
        """Returns False where the run is to stop."""
        try:
            exponent = 0 if not self.tried else self._next()
            while exponent is not None:
                if not self._try(exponent, given):
                    return False
                exponent = self._next()
        finally:
            self._at_work = None
        return True

    def _next(self) -> int | None:
        """Return the exponent of the next rate to try, None where enough were tried."""
        plan = self.plan
        if not plan.allows(len(self.tried), self.spent):
            return None
        return next_exponent(plan, self.tried, self.best)

    def _try(self, exponent: int, given: Any) -> bool:
        """Make one trial. Returns False where the run is to stop."""
        plan, loss, end, before = self.plan, math.nan, None, self.extra
        rate = self._of_first(self._rate_of(exponent))
        with self.replay.aside(*self.hooks):
            if exponent == 0:
                self.replay.put(self.middle)
                whole: bool | None = True
            else:
                self.replay.go_back()
                whole = self._run(exponent, rate, given)
                end = self.replay.state() if whole else None
            if whole and plan.anneal:
                whole = self._fall(rate, given)
            if whole:
                loss = self._held_out_loss()
        if whole is None:
            return False
        self.failed += not whole
        self.spent += self.extra - before
        best = not self.tried or loss < self.tried[self.best] or not math.isfinite(self.tried[self.best])
        best = self.engine.world.agree(best)
        goes_on = self.engine.world.agree(self._is_lowest(exponent, loss)) if self._rises_on else best
        self.tried[exponent] = loss
        if best:
            self.best = exponent
        if goes_on:
            self.end = end
        step = self.replay.step + plan.length
        self.emit(RateTried(step, self._rate_of(exponent), plan.length, loss, best))
        return True

    def _is_lowest(self, exponent: int, loss: float) -> bool:
        """Tell whether no lower rate came to a loss."""
        known = [other for other, held_out in self.tried.items() if math.isfinite(held_out)]
        return not known or (exponent < min(known) and math.isfinite(loss))

    def _run(self, exponent: int, rate: float, given: Any) -> bool | None:
        """Train at a rate. Returns False where it has failed, None where the run is to stop."""
        plan, world = self.plan, self.engine.world
        self._at_work = rate / FIRST_RATE
        every = max(1, plan.steps // _LOOKS)
        losses: list[Tensor] = []
        first = math.nan
        for done in range(plan.steps):
            if self.interrupted():
                return None
            if done % every == 0:
                self._tell(exponent, done + 1)
            losses.append(self.replay.full(done, given).loss)
            if len(losses) == every:
                world.catch_up()
                loss = statistics.fmean(world.to_host(torch.stack(losses).float()))
                losses, first = [], loss if math.isnan(first) else first
                if world.agree(not loss <= first + (_FAR_ABOVE - 1) * abs(first)):
                    return False
        return True

    def _fall(self, rate: float, given: Any) -> bool | None:
        """Bring the rate to 0 in a straight line. Returns None where the run is to stop."""
        plan, engine = self.plan, self.engine
        top = engine.schedule(engine.progress.global_step) * self._lift()
        for done in range(plan.anneal):
            if self.interrupted():
                return None
            now = engine.schedule(engine.progress.global_step) * self._lift()
            line = (1.0 - done / plan.anneal) * (top / now if now else 1.0)
            self._at_work = line * rate / FIRST_RATE
            self.replay.full(plan.steps + done, given)
        return True

    def _held_out_loss(self) -> float:
        try:
            return self.replay.loss(self.held_out)
        except OwnCodeError as error:  # then the first rate stays
            self.emit(Notice(f"a learning rate could not be judged: the loss failed ({error.failure.error})"))
            return math.nan

    def _settle(self, given: Any) -> None:
        """The run goes on from where the best rate ended, or the lowest, at the rate that follows from all of them."""
        plan, replay, own = self.plan, self.replay, self.end is None
        self.found = self._found(plan)
        if not own or replay.noted > plan.length:  # else the run is there
            with replay.aside(*self.hooks, stay=True):
                replay.put(self.middle if own else self.end)
                for done in range(plan.steps, replay.noted):
                    self._at_work = self.centre / FIRST_RATE if own and done < plan.length else None
                    replay.full(done, given)
        self._at_work = None
        self._close()
        self.engine.rate.used = self.engine.schedule(max(0, self.engine.progress.global_step - 1)) * self.rate_factor
        self.emit(Notice(self._in_words(self.found), level="info"))
        if self.may_overfit and self.passes is not None and self.passes >= _MANY_PASSES:
            self.emit(Notice(self._of_many_passes(self.passes)))

    def _found(self, plan: RacePlan) -> FoundRate:
        """Return the rate that follows, as rank 0 computes it."""
        found = found_rate(plan, self.centre, self.tried, self.engine.config.max_steps)
        numbers = [math.nan if number is None else number for number in (found.rate, found.low, found.high)]
        rate, low, high = (float(number) for number in self.engine.world.of_first(np.array(numbers)))
        return FoundRate(rate, None if math.isnan(low) else low, None if math.isnan(high) else high)

    # --- what is said ------------------------------------------------------------------------------------------------

    def _rate_of(self, exponent: int) -> float:
        return float(self.centre * self.plan.factor**exponent)

    def _announce(self) -> None:
        """Say what trials will cost, before the first one is over."""
        step, total = self.engine.progress.global_step, self.engine.config.max_steps
        self.emit(RatesToTry(step, self.plan.length, *self.plan.cost, total))

    def _tell(self, exponent: int, done: int, others: int = 0) -> None:
        step = self.engine.progress.global_step if exponent == 0 else self.replay.step + self.plan.length
        self.emit(RateTrial(step, self._rate_of(exponent), done, self.plan.length, others))

    def _in_words(self, found: FoundRate) -> str:
        edge = ""
        if found.low is not None and found.high is not None:
            edge = f"; {found.low:.2g} to {found.high:.2g} should be about as good"
        elif self.plan.refined:
            edge = "; the best was the last that could be tried, so a better one may lie beyond it"
        return f"the run goes on with a learning rate of {found.rate:.3g}, by {len(self.tried)} that were tried{edge}"

    def _of_many_passes(self, passes: float) -> str:
        seen = passes * self.plan.length / self.engine.config.max_steps
        return (
            f"the run passes over its training data {passes:.0f} times, and learning rates were tried on the first "
            f"{seen:.2g}: one that is best there may overfit later, which no trial sees. Let the run end with its best "
            "weights (load_best=True in fit; a run folder keeps them as best-step-...), or early "
            "(evaluation.early_stopping_patience)"
        )

    def summary(self) -> dict[str, Any]:
        """What was tried, what was chosen, and what it took."""
        chosen, found = self.rate, self.found
        return {
            "chosen": chosen,
            "low": None if found is None else found.low,
            "high": None if found is None else found.high,
            "first": self.centre,
            "origin": self.origin,
            "tried": {f"{self._rate_of(exponent):.3g}": loss for exponent, loss in sorted(self.tried.items())},
            "failed": self.failed,
            "steps": self.plan.length,
            "extra_steps": self.extra,
            "cost": round(self.extra / self.engine.config.max_steps, 4),
            "passes": None if self.passes is None else round(self.passes, 2),
        }
