"""HybridTrainer: `step()` for your own loop, `fit()` for a whole run. The four phases stand here in reading order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.engine.engine import Engine
from foretrain.engine.explain import HandedIn, first_failure, past_the_end
from foretrain.engine.fence import Ordered
from foretrain.engine.hooks import StepHook
from foretrain.engine.memory.usage import MemoryMeter
from foretrain.engine.own import Measure, OptimizerLike, check_processes
from foretrain.engine.rates import FollowedRates
from foretrain.engine.state import as_checkpoint_error
from foretrain.engine.step import StepOutput
from foretrain.errors import ConfigError, DivergenceError
from foretrain.events import Bus, Listener, Notice, Phase, PhaseChanged, Recovered
from foretrain.health.act import Action, Kind
from foretrain.health.checkup import Checkup
from foretrain.health.rescue import Rescue
from foretrain.hybrid import summary as summaries
from foretrain.hybrid.assembly import equip
from foretrain.hybrid.emergencies import Emergencies
from foretrain.hybrid.freezing import follow_freezing
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.moves.lookahead import LookAhead
from foretrain.hybrid.moves.rate_race import RateRace, with_short_warmup
from foretrain.hybrid.policy import Policy
from foretrain.loop.fit import FitOptions, fit
from foretrain.motion.hosted import HostedTrajectory
from foretrain.motion.observer import Moment, Observer
from foretrain.motion.predictors import registry
from foretrain.motion.predictors.base import Predictor
from foretrain.motion.predictors.guarded import MOST_FAILURES, check_predictor
from foretrain.motion.trajectory import Trajectory, basis_type
from foretrain.persist.folder import RunFolder
from foretrain.persist.form import check_form, check_format

_SAY_EVERY = 100
_OBSTACLES = "obstacles"
_LOOK_EVERY = 10
"""Steps after which the losses of unwatched steps are looked at."""
_LOOK_AHEAD_ENDS = 2 / 3
"""Share of a run after which nothing looks ahead: forward moves harm while the learning rate decays."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. Reading `loss` or `gradient_norm` waits for the device; not reading costs nothing."""

    phase: str
    """"warmup", "full", "predict" or "correct"."""
    global_step: int
    """Virtual steps done so far, this one included: full steps, and predicted ones as far as they were worth one."""
    rate: float | Tensor
    """As `learning_rate`, not read yet."""
    output: StepOutput
    predicted_loss: float | None = None
    """What the predictor said this loss would be, in PREDICT."""
    confidence: float | None = None
    """Probability that the open move will be kept, in PREDICT and CORRECT."""
    rewound: int = 0
    """How many of the last batches, that of this step included, are to be handed in again, because a move was undone
    together with its data: the next batch is the one at `HybridTrainer.position`. `fit` does this by itself."""

    @property
    def learning_rate(self) -> float:
        """That the last update was made with, in the first group of parameters; what recovery did to it included."""
        return float(self.rate)

    @property
    def loss(self) -> float:
        return float(self.output.loss)

    @property
    def gradient_norm(self) -> float:
        """Not a number in PREDICT, where there is no gradient."""
        return float(self.output.gradient_norm)

    @property
    def skipped(self) -> bool:
        """True when the step was not finite and changed nothing."""
        return bool(self.output.skipped)


class HybridTrainer:
    """Trains any module with any optimizer and a loss function `(model, batch) -> mean loss`.

    optimizer: an object, a class, a name such as "adamw", or none for the configuration's. One of your own keeps its
    rates and its gradients: it gets a schedule and clipping only if the configuration names them. scheduler: any of
    torch.optim.lr_scheduler; it is stepped once per step, and saved. loss_fn: also a criterion of (output, target),
    such as `nn.MSELoss()`; without one `model.loss(batch)` is called. Without `max_steps` in the configuration the run
    has no end and no rate decays. predictor: instead of the configuration's; with `hybrid.mode = "off"` it is the plain
    loop. probe: batches that are never trained on; moves are then searched and judged on them, at the run's charge.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerLike = None,
        loss_fn: Measure | None = None,
        config: Config | None = None,
        *,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        predictor: Predictor | None = None,
        probe: Sequence[Any] = (),
        bus: Bus | None = None,
    ) -> None:
        config = config or Config()
        check_processes(config)
        if predictor is not None:
            check_predictor(predictor)
        self.engine = engine = Engine(model, optimizer, loss_fn, with_short_warmup(config), scheduler)
        config = engine.config
        self.bus = bus or Bus()
        self.bus.around = engine.fence.hearing
        self.memory = MemoryMeter(engine.device, self.bus.emit, lambda: engine.global_step, config.memory.timeline)
        parameters = engine.full_step.parameters
        self.look_ahead = self._new_look_ahead()
        self._said: dict[str, int] = {}
        self._past_the_end = False
        self.stopping = False
        """Somebody called `stop`."""
        self._went_back = False
        """This step trained on the batch that a refused move began with."""
        self.policy: Policy | None = None
        self.rescue = Rescue(engine, self.memory, self.bus.emit)
        self.checkup = Checkup(engine, self.bus.emit)
        watching: list[StepHook] = [self.look_ahead] if self.look_ahead is not None else []
        engine.hooks = (*watching, self.checkup) if self.checkup.on else tuple(watching)
        engine.rate_sources = (self.checkup.health,)
        engine.on_cover.append(self._cover)
        if config.optimizer.learning_rate == "auto" and (config.hybrid.mode == "off" or not probe):
            raise ConfigError(
                "optimizer.learning_rate = 'auto' needs held-out examples that judge rates: use `foretrain finetune` "
                "with hybrid.mode = 'leap' and hybrid.probe_examples above 0, or set a rate"
            )
        if config.hybrid.mode == "off" or not parameters:
            return
        kind = HostedTrajectory if config.memory.basis == "pinned" else Trajectory
        dtype = basis_type(config.hybrid.basis_type, sum(p.numel() for p in parameters))
        trajectory = kind(parameters, engine.trained.names, window=config.hybrid.window_steps, dtype=dtype, hold=False)
        predictor = predictor or registry.build(config.predictor, config.seed)
        self.observer = Observer(trajectory, predictor, parameters, engine.optimizer, engine.fence)
        if engine.full_step.in_backward is not None:
            engine.full_step.in_backward.watchers.append(self.observer.sample.watch())
        run = "adapters" if self._trains_adapters() else "full weights"
        self.policy = policy = Policy(config, self.observer, run, engine.world)
        policy.recovery.rate_name = self.checkup.levers.rate
        policy.appraiser.falls_once &= not isinstance(engine.rate, FollowedRates)
        equip(
            policy, engine, self.checkup, self.look_ahead, [engine.to_device(batch) for batch in probe], self.bus.emit
        )
        policy.hold_directions()
        self.race = RateRace(policy.tools, policy.fail)
        engine.rate_sources = (policy.recovery, self.race, self.checkup.health)
        self.rescue.excursions = emergencies = Emergencies(policy)
        self.checkup.known_of_moves = emergencies.add_to

    def _new_look_ahead(self) -> LookAhead | None:
        ahead = self.engine.config.predictor
        if not ahead.beta > 0:
            return None
        return LookAhead(self.engine.trained.parameters, ahead.beta, ahead.gamma, ahead.stride, self._look_ahead_share)

    def _trains_adapters(self) -> bool:
        trained = sum(p.numel() for p in self.engine.full_step.parameters)
        return trained < 0.2 * sum(p.numel() for p in self.engine.model.parameters())

    # --- what a loop of one's own asks for ----------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    @property
    def optimizer(self) -> Optimizer:
        return self.engine.optimizer

    @property
    def config(self) -> Config:
        return self.engine.config

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def global_step(self) -> int:
        """Virtual steps done so far."""
        return self.engine.progress.global_step

    @property
    def position(self) -> int:
        """Batches of the data used so far. A rollback can go back in it, and `StepResult.rewound` says how far."""
        return self.engine.progress.position

    @position.setter
    def position(self, position: int) -> None:
        self.engine.progress.position = position

    @property
    def backward_passes(self) -> int:
        return self.engine.progress.backward_passes

    @overload
    def evaluate(self, batches: Iterable[Any]) -> float: ...

    @overload
    def evaluate(self, batches: Iterable[Any], metrics: Mapping[str, Measure]) -> dict[str, float]: ...

    def evaluate(
        self, batches: Iterable[Any], metrics: Mapping[str, Measure] | None = None
    ) -> float | dict[str, float]:
        """Mean loss over `batches`, each weighed by what it counts; at averaged weights if there is an average.

        metrics: functions of (model, batch) or (output, target) by name; then the result is a dict of the loss and
        their means over all rows.
        """
        return (
            self.engine.forward.evaluate(batches) if metrics is None else self.engine.forward.evaluate(batches, metrics)
        )

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model at averaged weights inside the block, if `evaluation.ema_decay` is set."""
        return self.engine.averaged_weights()

    def load_weights(self, state: dict[str, Any], origin: str = "the given state") -> None:
        """Weights, buffers and averages of a state, in place; all else stays."""
        self.engine.load_weights(state, origin)

    # --- one step, in one of four phases -----------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """One step of the phase the run is in. Full steps never wait for the device, except at the end of a window.

        Where memory runs out, `memory.on_out_of_memory` decides what follows.
        """
        if self.engine.config.epochs is not None:
            raise ConfigError(
                "epochs is for fit(), which knows the data; in a loop of your own give max_steps, or none"
            )
        if (
            self.engine.has_end
            and self.engine.global_step >= self.engine.config.max_steps
            and not (self._past_the_end or self.judging)
        ):
            self._past_the_end = True
            text = past_the_end(self.engine)
            warnings.warn(text, stacklevel=2)
            self.bus.emit(Notice(text))
        position = self.position
        self.catch_up()
        self.engine.fence.obey()
        if self.engine.trained.changed:
            batch = self._follow_freezing(batch)
        try:
            result = self.rescue.step(batch, self._step)
        except (TypeError, AttributeError, RuntimeError) as error:
            if (explained := first_failure(error, self.engine)) is None:
                raise
            raise explained from error
        self.engine.fence.obey()
        return result if self.position > position else replace(result, rewound=position + 1 - self.position)

    def _follow_freezing(self, batch: Any) -> Any:
        return follow_freezing(self.engine, self.policy, batch, self.bus.emit)

    def _cover(self) -> None:
        """Others are trained from now on."""
        if self.look_ahead is not None:
            self.look_ahead.cover(self.engine.trained.parameters)
        self.checkup.cover()
        if self.policy is not None:
            self.policy.cover()
            self.race.begin_anew()

    def end_at(self, max_steps: int) -> None:
        """From now on it is known how long the run is."""
        self.engine.end_at(max_steps)
        if self.policy is not None:
            self.policy.appraiser.plan_for(max_steps)

    def _step(self, batch: Any) -> StepResult:
        batch = self.engine.to_device(batch)
        position = self.engine.position
        if self.policy is not None and self.phase in (Phase.PREDICT, Phase.CORRECT):
            result = self._move(self.policy, batch)
        else:
            result = self._train(batch)
        if self.engine.position >= position and not self._went_back:  # else a rollback went back in the data
            self.engine.position += 1
        self._went_back = False
        self.engine.rate.advance(self.engine.global_step)
        if self.policy is not None and self.engine.has_end and self.engine.global_step == self.engine.config.max_steps:
            self.policy.finish(batch)
        self._look_at_health()
        return result

    def _look_at_health(self) -> None:
        if not self.window_due and self.checkup.due and (self.chaining or not self.judging) and self.checkup.judge():
            self._follow_tuning()

    @property
    def window_due(self) -> bool:
        """An order to end came in the middle of the predictor: its window is still to be learned from."""
        return self.policy is not None and self.observer.due

    def catch_up(self) -> None:
        """Finish a window that is due. It may be left by an order once more."""
        if self.policy is not None and self.observer.due:
            self.rescue.aside(self._judge_window, self.policy)
            self._look_at_health()

    @property
    def phase(self) -> Phase:
        return self.policy.cycle.phase if self.policy is not None else Phase.FULL

    @property
    def judging(self) -> bool:
        """A move was made and is not judged yet."""
        return self.policy is not None and self.policy.move is not None

    @property
    def chaining(self) -> bool:
        """A chain of leaps is being made: it can be long, and its weights are as good as any."""
        move = self.policy.move if self.policy is not None else None
        return move is not None and move.chained and self.phase is Phase.PREDICT

    def _train(self, batch: Any) -> StepResult:
        """WARMUP and FULL: full steps, watched. Only the end of a window can lead to another phase."""
        phase = self.phase
        self.memory.enter(phase.value)
        if self.policy is None:
            return self._result(phase, self.engine.full(batch))
        if self.race.open:
            return self._find_rate(self.policy, batch)
        if self.policy.off and not self.policy.rest.steps:
            self.policy.rest.for_good()
        if self.policy.rest.steps:
            return self._rest(self.policy, batch)
        if self.engine.backward_passes == 0:
            self.rescue.aside(self.policy.keep_safe)
        output = self.engine.full(batch, self.observer, *self.policy.watching())
        if self.engine.backward_passes == 1:
            self.engine.check_optimizer_state()
        self.policy.count(1, phase)
        self.policy.tools.recent.remember(batch)
        result = self._result(phase, output)
        if self.observer.complete:
            self.rescue.aside(self._end_window, self.policy)
        return result

    def _find_rate(self, policy: Policy, batch: Any) -> StepResult:
        """The first steps where the learning rate is `auto`."""
        output = self.race.advance(batch)
        if self.race.over:
            self.race.judge()  # the last step is that of the rate that goes on, not of the last one that was tried
            self.engine.rate.used = self.engine.schedule(max(0, self.engine.global_step - 1)) * self.engine.rate_factor
        policy.count(1, self.phase)
        return self._result(self.phase, output)

    def _rest(self, policy: Policy, batch: Any) -> StepResult:
        """Full steps while nothing would come of watching the weights: only now and then losses are looked at."""
        phase = self.phase
        if not self.engine.meter.noting:
            self.engine.meter.start_noting()
        result = self._result(phase, self.engine.full(batch))
        policy.count(1, phase)
        policy.rest.steps -= 1
        if policy.rest.steps % _LOOK_EVERY == 0:
            self.rescue.aside(self._look, policy)
        if policy.rest.steps == 0:
            self.engine.meter.stop_noting()
            policy.wake()
        return result

    def _look(self, policy: Policy) -> None:
        """At the losses of a rest. What is seen on a GPU is one look old, except at the end: the device never waits."""
        rows = self.engine.meter.take_noted(everything=policy.rest.steps == 0)
        numbers = [(torch.nan if skipped else loss, norm) for loss, norm, skipped in rows]
        actions = policy.rested(
            self.engine.global_step - self.engine.meter.untaken, numbers, fp16=self.engine.precision.scaled
        )
        for action in actions:
            self._carry_out(policy, action)
        if any(action.kind is Kind.ROLL_BACK for action in actions):
            self.engine.meter.start_noting()  # what came after the fault was taken back
        policy.keep_safe()

    def _move(self, policy: Policy, batch: Any) -> StepResult:
        """PREDICT and CORRECT: the open move goes on by one step. When it is over it is judged, and kept or undone."""
        phase, position = self.phase, self.engine.position
        self.memory.enter(phase.value)
        move = policy.open(batch)
        output = None if move.refused else policy.advance(batch)
        if self.phase is not phase:
            self._tell_phase()
        if self.look_ahead is not None and phase is Phase.PREDICT and not move.refused:
            self.look_ahead.restart()
        if move.refused:
            return self._train_instead(move, batch, position)
        if output is None:  # it came to its end without a step: this batch validates it
            return self._move(policy, batch)
        predicted = move.plan.predicted_loss if phase is Phase.PREDICT else None
        result = self._result(phase, output, predicted, move.plan.confidence)
        if phase is Phase.CORRECT and move.over:
            with self.engine.steady_rate():
                actions = policy.settle()
            for action in actions:
                self._carry_out(policy, action)
            self._tell_phase()
        return result

    def _train_instead(self, move: JudgedMove, batch: Any, position: int) -> StepResult:
        """A move was refused: the batch it began with is still there to learn from. position: that of this step."""
        batch = batch if self.engine.position == position else move.batch
        if self.engine.trained.changed:  # by a callback that heard of the refused move
            self._follow_freezing(batch)
        result = self._train(batch)
        if self.engine.position < position:
            self.engine.position += 1
            self._went_back = True
        return result

    def _look_ahead_share(self) -> float:
        """On after the warm-up, off for the last third, and only as far as the learning rate is up."""
        step = self.engine.global_step
        if step < self.engine.config.hybrid.warmup_steps or step >= _LOOK_AHEAD_ENDS * self.engine.planned_steps:
            return 0.0
        peak = self.engine.rate.peak
        return self.engine.schedule(step) / peak if peak else 0.0

    def _result(
        self, phase: Phase, output: StepOutput, predicted_loss: float | None = None, confidence: float | None = None
    ) -> StepResult:
        return StepResult(
            phase.value, self.engine.global_step, self.engine.rate.used, output, predicted_loss, confidence
        )

    # --- the end of a window -----------------------------------------------------------------------------------------

    def _end_window(self, policy: Policy) -> None:
        moment = Moment(
            step=self.engine.global_step,
            max_steps=self.engine.planned_steps,
            full_steps=self.engine.backward_passes,
            learning_rate=float(self.engine.rate.used),
            peak_rate=self.engine.rate.peak,
            phase=policy.phase_record(),
            acceptance_rate=policy.score.counts.acceptance_rate,
            confidence=policy.appraiser.current_confidence,
        )
        self.observer.measure(moment)
        self._judge_window(policy)

    def _judge_window(self, policy: Policy) -> None:
        try:
            record = self.observer.learn()
        except Ordered:  # the next step begins with it, here or in the run that is resumed
            return
        policy.heed()
        actions = policy.watch(record, policy.tools.recent.same(), fp16=self.engine.precision.scaled)
        policy.score.exact.watched(record, self.engine.clock.seconds, self.engine.backward_passes)
        for action in actions:
            self._carry_out(policy, action)
        if any(action.kind is Kind.ROLL_BACK for action in actions):
            return
        policy.keep_safe()
        before = self.phase
        if before is Phase.WARMUP:
            policy.prepare()
        left = self.engine.planned_steps - self.engine.global_step
        policy.appraiser.plan_for(self.engine.planned_steps)
        policy.decide(self.engine.global_step, left, self.engine.rate.trend(self.engine.global_step))
        if not self.observer.trajectory.held:
            policy.tools.snapshots.forget_other()
        if self.phase is not before:
            self._tell_phase()
        self._tell_obstacles()

    def _tell_obstacles(self) -> None:
        """Once: that leaps could be tried here, and which setting keeps them off. Batches are compared once only."""
        if _OBSTACLES in self._said or self.policy is None or not self.policy.predictability.low_noise:
            return
        found = self.policy.obstacles()
        if None not in found:
            self._said[_OBSTACLES] = self.engine.global_step
        for text in filter(None, found):
            self.bus.emit(Notice(text, level="info"))

    def _tell_phase(self) -> None:
        if self.policy is not None:
            self.bus.emit(PhaseChanged(self.engine.global_step, self.phase.value, self.policy.last_reason))

    def _carry_out(self, policy: Policy, action: Action) -> None:
        """One of the recovery actions."""
        at = self.engine.global_step
        policy.apply(action, at)
        if action.kind is Kind.ROLL_BACK and not self.judging:
            policy.recover()
            policy.score.counts.rollbacks += 1
            policy.score.counts.undone_steps += at - self.engine.global_step
        matters = action.kind is not Kind.CONTINUE or action.rate_factor != 1.0
        if matters and self._is_news(action):
            self.bus.emit(Recovered(self.engine.global_step, action.kind.value, action.text, at))
        if action.kind is Kind.ROLL_BACK and action.rate_factor < 1:
            policy.recovery.hand_over(self.checkup.rolled_back(action.rate_factor, at))
            self._follow_tuning()
        if action.kind is Kind.ABORT:
            raise DivergenceError(f"{action.text} (step {self.engine.global_step})")

    def start_counting_anew(self) -> None:
        """A run that was given up, and is gone on with, gets as many tries as any other."""
        self.engine.meter.skipped_in_a_row = 0
        if self.policy is not None and self.policy.recovery.rollbacks > self.engine.config.guard.max_rollbacks:
            self.policy.recovery.rollbacks = 0

    def judge_by(self, held_out: list[Any]) -> None:
        """Held-out batches: where the loss is exact, a move must not raise their loss."""
        if self.policy is not None:
            self.policy.tools.unseen.batches, self.policy.appraiser.unseen = held_out, bool(held_out)

    def evaluated(self, held_out: float) -> None:
        """A held-out loss is known: it shows over- and underfitting, and some schedulers follow it."""
        self.engine.rate.evaluated(held_out)
        if self.policy is not None:
            self.policy.evaluated(held_out)
        if self.checkup.evaluated(held_out):
            self._follow_tuning()

    def _is_news(self, action: Action) -> bool:
        """The same kind of action over and over is said once per hundred steps."""
        weighty = action.kind in (Kind.ROLL_BACK, Kind.ABORT) or action.rate_factor != 1.0
        said = self._said.get(action.kind.value, -_SAY_EVERY)
        if not weighty and 0 <= self.engine.global_step - said < _SAY_EVERY:
            return False
        self._said[action.kind.value] = self.engine.global_step
        return True

    def _follow_tuning(self) -> None:
        """Tuning may want longer FULL phases. Its learning rate and clipping need no following: the engine asks."""
        if self.policy is not None:
            self.policy.cycle.use_full_steps(self.checkup.health.full_steps)

    # --- the whole state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on, also in the middle of a move. Tensors are not copied."""
        state = self.engine.state_dict()
        state["look_ahead"] = self.look_ahead.state_dict() if self.look_ahead is not None else None
        state["rescue"] = self.rescue.state_dict()
        state["checkup"] = self.checkup.state_dict()
        state["hybrid"] = None
        if self.policy is not None:
            predictor, moving = self.observer.guarded.state_dict(), self.phase in (Phase.PREDICT, Phase.CORRECT)
            self.policy.heed()
            state["hybrid"] = {
                "predictor": predictor,
                "policy": self.policy.state_dict(self.engine.config.checkpoint.directions or moving),
                "race": self.race.state_dict(),
                "said": dict(self._said),
            }
        return state

    def load_state_dict(self, state: dict[str, Any], origin: str = "the given state") -> None:
        """Put a state back, in place: afterwards every step is, bit for bit, what it would have been."""
        with as_checkpoint_error(origin):
            check_format(state.get("format"), origin)
            check_form(self.state_dict(), state)
            self._put_back(state, origin)
            self.engine.freeze_as_saved(state)

    def _put_back(self, state: dict[str, Any], origin: str) -> None:
        handed_in = HandedIn.to(self.engine)
        self.engine.put_back(state, origin)
        for text in handed_in.differences(self.engine):
            self.bus.emit(Notice(text, level="info"))
        if self.look_ahead is not None and state["look_ahead"] is not None:
            self.look_ahead.load_state_dict(state["look_ahead"])
        self.checkup.load_state_dict(state["checkup"])
        hybrid = state["hybrid"]
        if self.policy is None or hybrid is None:  # switched on or off since: the hybrid part starts anew
            self.rescue.load_state_dict(state["rescue"])
            return
        self.policy.load_state_dict(hybrid["policy"])
        self.observer.guarded.load_state_dict(hybrid["predictor"])
        if hybrid["predictor"]["strikes"] >= MOST_FAILURES and not self.policy.off:
            self.policy.rest.steps = min(1, self.policy.rest.steps)  # another one is watched with at once
        self.race.load_state_dict(hybrid["race"])
        self._said = dict(hybrid["said"])
        self.rescue.load_state_dict(state["rescue"])
        self.policy.heed()

    # --- a whole run -------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        held_out: Iterable[Any] | None = None,
        *,
        epochs: float | None = None,
        metrics: Mapping[str, Measure] | None = None,
        callbacks: Iterable[Listener] = (),
        out: str | Path | RunFolder | None = None,
        resume: bool = False,
        overwrite: bool = False,
        load_best: bool = False,
        progress: bool | Level = True,
        table: bool = True,
        unit: str | None = None,
        on_interrupt: Literal["raise", "return"] = "raise",
        title: str = "",
        details: dict[str, str] | None = None,
        data_fingerprint: str = "",
    ) -> dict[str, Any]:
        """Train to `max_steps` with progress, evaluation, checkpoints and a log; returns the summary.

        loader: batches. One with `seek(position)` (such as `foretrain.Loader`) resumes at once; any other iterable is
        read again from its start up to the saved position. epochs: passes over it, instead of `max_steps`. metrics:
        functions of (model, batch) or (output, target) by name, measured with the held-out loss. callbacks: called with
        every event. out: the run folder; without one nothing is written. overwrite: replace a run that is there.
        load_best: the model ends with the weights of the lowest held-out loss, not with the last ones.
        progress: how much is shown; True: as `log.console` says, False: nothing. table: it ends with the results. unit:
        what the rows of a batch are called. on_interrupt: after Ctrl-C the run is saved, and KeyboardInterrupt raised
        (SystemExit after other signals); "return": the summary comes back with the reason "interrupted".
        """
        self.engine.unit = unit or self.engine.unit
        options = FitOptions(
            epochs,
            metrics or {},
            tuple(callbacks),
            out,
            resume,
            overwrite,
            load_best,
            progress,
            table,
            on_interrupt,
            title,
            details or {},
            data_fingerprint,
        )
        return fit(self, loader, held_out, options)

    def stop(self) -> None:
        """End `fit` after this step, as early stopping does. For callbacks."""
        self.stopping = True

    def prediction_progress(self) -> dict[str, Any]:
        """What the progress line says of prediction."""
        return {} if self.policy is None else summaries.prediction_progress(self.engine, self.policy)

    def summary(self) -> dict[str, Any]:
        """What the run did so far."""
        predicted = {} if self.policy is None else summaries.of_prediction(self.engine, self.policy, self.race)
        return summaries.of_steps(self.engine, self.memory) | predicted | self.checkup.summary() | self.rescue.summary()

    # --- what a run of `fit` asks for --------------------------------------------------------------------------------

    @property
    def end_loss(self) -> float | None:
        """Loss of the last batch, where the run went back to a lower point at its end."""
        return None if self.policy is None else self.policy.end_loss

    def end_chain(self) -> None:
        """A chain of leaps ends with its next leap, if there is one."""
        if self.policy is not None and self.policy.move is not None:
            self.policy.move.end_soon()

    def data_is_at(self, state: Callable[[], Any]) -> None:
        """state: says where the data is, for snapshots."""
        if self.policy is not None:
            self.policy.tools.snapshots.loader_state = state

    def data_was_at(self) -> Any:
        """Where the data was when the snapshot was taken that the last rollback went back to."""
        return None if self.policy is None else self.policy.tools.snapshots.loader_state_then()
