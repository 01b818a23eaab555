"""A learning rate that is `auto`: the first steps are run at several rates, and the run goes on with the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretrain.config import Config, changed
from foretrain.config.schema import FIRST_RATE
from foretrain.engine.batch import map_tensors
from foretrain.engine.fence import Failure, OwnCodeError
from foretrain.engine.step import StepOutput
from foretrain.errors import ConfigError
from foretrain.events import Notice, Phase, RateTrial, RateTried
from foretrain.hybrid.judges.judgement import Judgement
from foretrain.hybrid.moves.base import Move, MoveTools
from foretrain.persist.codec import Snapshot

FACTOR = math.sqrt(10.0)
"""Factor between two rates that are tried. Chosen: two steps make a power of ten."""
MOST = 3
"""Rates that are tried above the first, or below it. Chosen: with the factor that is a range of 1000."""
_SHORTEST, _LONGEST = 10, 100
"""Steps of a race. Shorter ones favour rates that fail later: after ten steps of a run of two hundred the best rate
looked too small, after twenty it was the best of the five that were swept (docs/results.md)."""

_TOLD = 10
"""How often a rate that is tried says how far it is. Chosen: for the progress line only."""


def with_short_warmup(config: Config) -> Config:
    """A race must see more than the warm-up: so that is half a race long, unless it was set."""
    if config.optimizer.learning_rate != "auto" or config.schedule.warmup_steps is not None:
        return config
    if config.schedule.type in ("constant", "cyclic"):
        return config
    return changed(config, {"schedule.warmup_steps": _steps(config) // 2})


def check_race(config: Config, probe: Sequence[Any]) -> None:
    """Refuse a rate that is to be found where nothing can judge rates."""
    if config.optimizer.learning_rate == "auto" and (config.hybrid.mode == "off" or not probe):
        raise ConfigError(
            "optimizer.learning_rate = 'auto' needs held-out examples that judge rates: use `foretrain finetune` with "
            "hybrid.mode = 'leap' and hybrid.probe_examples above 0, or set a rate"
        )


def _steps(config: Config) -> int:
    return max(2, min(max(_SHORTEST, config.max_steps // 10), _LONGEST, config.max_steps // 2))


class RateRace(Move):
    """Tries rates on the same first batches from the same first weights; held-out examples say which is best.

    The rate rises by `FACTOR` as long as that ends lower, else it falls as long as that does. The run goes on from
    where the best one ended: only what the others computed is spent, and charged.
    """

    kind = "rate race"
    phase = Phase.WARMUP
    saved = ("open", "begun", "tried", "best", "cost", "batches")
    tried: dict[int, float]
    batches: list[Any]

    clip = math.inf
    """As a source of the learning rate, it wants no clipping."""

    def __init__(self, tools: MoveTools, fail: Callable[[Failure], None]) -> None:
        """fail: is told where a probe failed."""
        config = tools.engine.config
        self.tools = tools
        self.fail = fail
        self.steps = _steps(config)
        self.open = config.optimizer.learning_rate == "auto"
        self.tried = {}
        """Held-out loss at the end, by how many factors the rate is above the first."""
        self.best = 0
        self.cost = 0.0
        """Full steps of rates that lost."""
        self.begun = False
        """There is a snapshot of the beginning, from which all rates start."""
        self.batches = []
        self._at_work: int | None = None
        """Exponent of the rate that runs now; None: the best."""
        self._told = False

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
        return self.factor if self._at_work is None else float(FACTOR**self._at_work)

    def begin(self, batch: Any) -> None:
        self.tools.snapshots.take()
        self.tools.snapshots.wait()  # full steps follow, not probes
        self.begun = True

    def advance(self, batch: Any) -> StepOutput:
        """A step at the first rate."""
        if not self._told:  # at least two others follow: one that is higher, and one beyond the better of the two
            self._told = True
            self._tell(0, len(self.batches), 2 * self.steps)
        if not self.begun:
            self.begin(batch)
        output = self.tools.engine.full(batch)
        self.batches.append(map_tensors(batch, lambda tensor: tensor.clone()))
        return output

    @property
    def over(self) -> bool:
        return self.open and len(self.batches) >= self.steps

    def undo(self) -> None:
        self.tools.snapshots.rewind()
        self.begin_anew()

    def judge(self) -> Judgement:
        """Run all other rates on the same batches. Afterwards the run stands where the best one ended."""
        engine, snapshots, counts = self.tools.engine, self.tools.snapshots, self.tools.counts
        rows, position, counted = engine.meter.state_dict(), engine.progress.position, dict(counts.steps)
        self._measure(0)
        try:
            end = self._run_others()
        finally:
            self._at_work = None
        snapshots.rewind(end)
        engine.progress.position, counts.steps = position, counted
        engine.meter.load_state_dict(rows)  # what others did is no progress of this run
        self.batches, self.open = [], False
        text = f"the run goes on with a learning rate of {FIRST_RATE * self.factor:.3g}, the best of {len(self.tried)}"
        self.tools.emit(Notice(text, level="info"))
        return Judgement(self.best == 0, 0.0, self.cost, text, self.tried[self.best])

    def _run_others(self) -> Snapshot:
        """Returns where the best rate ended."""
        snapshots = self.tools.snapshots
        end = snapshots.take_other()
        for direction in (1, -1):
            exponent = direction
            while self.best == exponent - direction and abs(exponent) <= MOST:
                snapshots.rewind()
                self._run(exponent)
                if self._measure(exponent):
                    end = snapshots.take_other()
                exponent += direction
            if self.best:
                break
        return end

    def _run(self, exponent: int) -> None:
        self._at_work = exponent
        for done, batch in enumerate(self.batches, start=1):
            if done % max(1, self.steps // _TOLD) == 1 or self.steps < 2 * _TOLD:
                self._tell(exponent, done)
            self.tools.engine.full(batch)
        self.cost += len(self.batches)

    def _tell(self, exponent: int, done: int, others: int = 0) -> None:
        rate = FIRST_RATE * FACTOR**exponent
        self.tools.emit(RateTrial(self.tools.engine.progress.global_step, rate, done, self.steps, others))

    def _measure(self, exponent: int) -> bool:
        """Whether this rate ended lowest so far."""
        engine = self.tools.engine
        try:
            loss = engine.probe_all(self.tools.probes.batches)
        except OwnCodeError as error:  # then the first rate stays
            loss = math.nan
            self.fail(error.failure)
        first = not self.tried
        self.tried[exponent] = loss
        best = first or loss < self.tried[self.best] or (math.isnan(self.tried[self.best]) and not math.isnan(loss))
        self.best = exponent if best else self.best
        self.tools.emit(RateTried(engine.progress.global_step, FIRST_RATE * FACTOR**exponent, self.steps, loss, best))
        return best

    def summary(self) -> dict[str, Any]:
        """What was tried and what was chosen."""
        return {
            "chosen": FIRST_RATE * self.factor,
            "tried": {f"{FIRST_RATE * FACTOR**exponent:.3g}": loss for exponent, loss in sorted(self.tried.items())},
            "steps": self.steps,
            "extra_steps": round(self.cost),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.batches = [self.tools.engine.to_device(batch) for batch in self.batches]
