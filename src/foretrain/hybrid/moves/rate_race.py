"""A learning rate that is `auto`: the first steps are run at several rates, and the run goes on with the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from foretrain.config import Config, changed
from foretrain.config.schema import FIRST_RATE
from foretrain.engine.batch import map_tensors
from foretrain.engine.fence import OwnCodeError
from foretrain.engine.step import StepOutput
from foretrain.events import Notice, RateTrial, RateTried
from foretrain.hybrid.mover import Mover

FACTOR = math.sqrt(10.0)
"""Between two rates that are tried."""
MOST = 3
"""Rates that are tried above the first, or below it."""
_SHORTEST, _LONGEST = 10, 100
"""Steps of a race. Shorter ones favour rates that fail later: after ten steps of a run of two hundred the best rate
looked too small, after twenty it was the best of the five that were swept (docs/results.md)."""

_TOLD = 10
"""How often a rate that is tried says how far it is."""


def with_short_warmup(config: Config) -> Config:
    """A race must see more than the warm-up: so that is half a race long, unless it was set."""
    if config.optimizer.learning_rate != "auto" or config.schedule.warmup_steps is not None:
        return config
    if config.schedule.type in ("constant", "cyclic"):
        return config
    return changed(config, {"schedule.warmup_steps": _steps(config) // 2})


def _steps(config: Config) -> int:
    return max(2, min(max(_SHORTEST, config.max_steps // 10), _LONGEST, config.max_steps // 2))


class RateRace:
    """Tries rates on the same first batches from the same first weights; held-out examples say which is best.

    The rate rises by `FACTOR` as long as that ends lower, else it falls as long as that does. The run goes on from
    where the best one ended: only what the others computed is spent, and charged.
    """

    def __init__(self, mover: Mover, config: Config) -> None:
        self.mover = mover
        self.steps = _steps(config)
        self.open = config.optimizer.learning_rate == "auto"
        self.tried: dict[int, float] = {}
        """Held-out loss at the end, by how many factors the rate is above the first."""
        self.best = 0
        self.spent = 0
        """Full steps of rates that lost."""
        self.begun = False
        """There is a snapshot of the beginning, from which all rates start."""
        self.batches: list[Any] = []
        self._told = False
        self._trying: int | None = None
        """The rate that runs now, by how many factors it is above the first."""

    def begin_anew(self) -> None:
        """Others are trained: rates are compared from here on, all on the same steps."""
        self.begun, self.batches = False, []

    @property
    def factor(self) -> float:
        """What the first rate is to be multiplied with."""
        return float(FACTOR**self.best)

    @property
    def rate_factor(self) -> float:
        """The factor of the rate that runs now."""
        return self.factor if self._trying is None else float(FACTOR**self._trying)

    clip = math.inf

    def step(self, batch: Any, full_step: Callable[[Any], StepOutput]) -> StepOutput:
        """A step at the first rate; after the last one all other rates run."""
        if not self._told:  # at least two others follow: one that is higher, and one beyond the better of the two
            self._told = True
            self._tell(0, len(self.batches), 2 * self.steps)
        if not self.begun:
            self.mover.safety.take()
            self.mover.safety.wait()  # full steps follow, not probes
            self.begun = True
        output = full_step(batch)
        self.batches.append(map_tensors(batch, lambda tensor: tensor.clone()))
        if len(self.batches) >= self.steps:
            try:
                self._run_others(full_step)
            finally:
                self._trying = None
        return output

    def _run_others(self, full_step: Callable[[Any], StepOutput]) -> None:
        engine, safety = self.mover.engine, self.mover.safety
        rows, position, counts = engine.meter.state_dict(), engine.position, self.mover.pilot.counts
        counted = dict(counts.steps)
        self._judge(0)
        end = safety.take_other()
        for direction in (1, -1):
            exponent = direction
            while self.best == exponent - direction and abs(exponent) <= MOST:
                safety.rewind()
                self._trying = exponent
                for done, batch in enumerate(self.batches, start=1):
                    if done % max(1, self.steps // _TOLD) == 1 or self.steps < 2 * _TOLD:
                        self._tell(exponent, done)
                    full_step(batch)
                self.spent += len(self.batches)
                if self._judge(exponent):
                    end = safety.take_other()
                exponent += direction
            if self.best:
                break
        safety.rewind(end)
        engine.position, counts.steps = position, counted
        engine.meter.load_state_dict(rows)  # what others did is no progress of this run
        self._trying = None
        self.batches, self.open = [], False
        text = f"the run goes on with a learning rate of {FIRST_RATE * self.factor:.3g}, the best of {len(self.tried)}"
        self.mover.emit(Notice(text, level="info"))

    def _tell(self, exponent: int, done: int, others: int = 0) -> None:
        rate = FIRST_RATE * FACTOR**exponent
        self.mover.emit(RateTrial(self.mover.engine.global_step, rate, done, self.steps, others))

    def _judge(self, exponent: int) -> bool:
        """Whether this rate ended lowest so far."""
        engine, mover = self.mover.engine, self.mover
        try:
            loss = engine.probe_all(mover.probes.held_out)
        except OwnCodeError as error:  # then the first rate stays
            loss = math.nan
            mover.fail(error.failure)
        first = not self.tried
        self.tried[exponent] = loss
        best = first or loss < self.tried[self.best] or (math.isnan(self.tried[self.best]) and not math.isnan(loss))
        self.best = exponent if best else self.best
        mover.emit(RateTried(engine.global_step, FIRST_RATE * FACTOR**exponent, self.steps, loss, best))
        return best

    def summary(self) -> dict[str, Any]:
        """What was tried and what was chosen."""
        return {
            "chosen": FIRST_RATE * self.factor,
            "tried": {f"{FIRST_RATE * FACTOR**exponent:.3g}": loss for exponent, loss in sorted(self.tried.items())},
            "steps": self.steps,
            "extra_steps": self.spent,
        }

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "open": self.open,
            "begun": self.begun,
            "tried": [[exponent, loss] for exponent, loss in self.tried.items()],
            "best": self.best,
            "spent": self.spent,
            "batches": self.batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.open, self.begun = bool(state["open"]), bool(state["begun"])
        self.best, self.spent = int(state["best"]), int(state["spent"])
        self.tried = {int(exponent): float(loss) for exponent, loss in state["tried"]}
        self.batches = [self.mover.own(batch) for batch in state["batches"]]
