"""HybridTrainer: `step()` for your own loop, `fit()` for a whole run. The four phases stand here in reading order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from foretrain import environment
from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.engine import described
from foretrain.engine.batches import steps_in
from foretrain.engine.engine import Engine, as_checkpoint_error, own_loss
from foretrain.engine.fence import Ordered
from foretrain.engine.hooks import StepHook
from foretrain.engine.memory.usage import MemoryMeter
from foretrain.engine.own import (
    Measure,
    OptimizerLike,
    as_tensors,
    check_metrics,
    check_processes,
    explain_first_failure,
)
from foretrain.engine.rates import FollowedRates
from foretrain.engine.step import StepOutput
from foretrain.engine.trained import Change
from foretrain.engine.weights import write_weights
from foretrain.errors import ConfigError, DivergenceError, InputError
from foretrain.events import Bus, Listener, Notice, Phase, PhaseChanged, Recovered
from foretrain.health.act import Action, Kind
from foretrain.health.checkup import Checkup
from foretrain.health.rescue import Rescue
from foretrain.hybrid.emergencies import Emergencies
from foretrain.hybrid.failures import heed
from foretrain.hybrid.mover import Mover
from foretrain.hybrid.moves.lookahead import LookAhead
from foretrain.hybrid.moves.move import Move
from foretrain.hybrid.moves.rate_race import RateRace, with_short_warmup
from foretrain.hybrid.policy import Pilot
from foretrain.loop import Run, check_load_best, tell_interruption, warning_of_failure
from foretrain.motion.hosted import HostedTrajectory
from foretrain.motion.observer import Moment, Observer
from foretrain.motion.predictors import registry
from foretrain.motion.predictors.base import Predictor
from foretrain.motion.predictors.guarded import MOST_FAILURES, check_predictor
from foretrain.motion.trajectory import Trajectory, basis_type
from foretrain.persist.codec import random_state, restore_random_state
from foretrain.persist.folder import WEIGHTS, RunFolder
from foretrain.persist.form import check_form, check_format
from foretrain.persist.signals import StopRequest
from foretrain.show.console import Console
from foretrain.show.jsonl import JsonlLog
from foretrain.show.pages.report import ReportWriter
from foretrain.show.trackers.listener import close_all
from foretrain.show.trackers.opening import open_trackers

_SAY_EVERY = 100
_OBSTACLES = "obstacles"
_NOT_IN_EVERY_RUN = (
    *("moves", "predicted_steps", "recoveries", "rollbacks", "forecast", "confidence", "predictability"),
    *("exact", "audit", "learning_rate", "predictor", "basis_mb", "health", "memory", "peak_memory_mb"),
    *("out_of_memory", "signal", "best_checkpoint"),
)
"""Keys of the summary that are None where there is nothing to say, so that every summary has the same keys."""
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
        self._fitting = False
        self.stopping = False
        """Somebody called `stop`."""
        self._went_back = False
        """This step trained on the batch that a refused move began with."""
        self.pilot: Pilot | None = None
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
        self.pilot = Pilot(config, self.observer, "adapters" if self._trains_adapters() else "full weights")
        self.pilot.recovery.rate_name = self.checkup.levers.rate
        self.pilot.falls_once = self.pilot.falls_once and not isinstance(engine.rate, FollowedRates)
        self.mover = Mover(engine, self.pilot, self.bus.emit, self.look_ahead)
        self.mover.probes.held_out = [engine.to_device(batch) for batch in probe]
        if self.mover.probes.held_out:
            self.pilot.judge_on_held_out()
        self.pilot.hold_directions()
        self.race = RateRace(self.mover, config)
        engine.rate_sources = (self.pilot.recovery, self.race, self.checkup.health)
        self.rescue.excursions = emergencies = Emergencies(engine, self.pilot, self.mover)
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
        return self.engine.evaluate(batches) if metrics is None else self.engine.evaluate(batches, metrics)

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
            self._say_past_the_end()
        self.catch_up()
        self._obey()
        if self.engine.trained.changed:
            batch = self._follow_freezing(batch)
        try:
            result = self.rescue.step(batch, self._step)
        except (TypeError, AttributeError) as error:
            if self.engine.backward_passes or self.engine.loss_fn is own_loss:
                raise
            raise explain_first_failure(error) from error
        except RuntimeError as error:
            if self.engine.backward_passes or "sparse" not in str(error):
                raise
            raise ConfigError(
                f"the gradients are sparse, and {type(self.optimizer).__name__} cannot use them ({error}); hand in "
                "torch.optim.SparseAdam, Adagrad or SGD without momentum, or make them dense"
            ) from error
        self._obey()
        return result

    def _obey(self) -> None:
        """Own code wants the program to end, and the state can be gone on from. `fit` saves it before."""
        if not self._fitting and (order := self.engine.fence.taken()) is not None:
            raise order

    def _see_freezing(self, batch: Any) -> None:
        """A callback that heard of a refused move may have frozen or unfrozen something."""
        if self.engine.trained.changed:
            self._follow_freezing(batch)

    def _follow_freezing(self, batch: Any) -> Any:
        """Parameters were frozen or unfrozen since the last step. Returns the batch to go on with: an open move is
        taken back with its data, but what is frozen now stays where its user froze it."""
        frozen = [(p, p.detach().clone()) for p in self.engine.trained.parameters if not p.requires_grad]
        if self.judging:
            position, first = self.engine.position, self.mover.interrupt("parameters were frozen or unfrozen")
            self._tell_phase()
            with torch.no_grad():
                for parameter, value in frozen:
                    parameter.copy_(value)
            batch = batch if first is None or self.engine.position == position else self.engine.to_device(first)
        elif self.phase is Phase.PREDICT and self.pilot is not None:
            self.pilot.machine.force_full("parameters were frozen or unfrozen")
        change = self.engine.follow_trained()
        lost = self.engine.trained.without_optimizer()
        watched = "; what was seen of how weights move is dropped, and the run watches anew" if self.pilot else ""
        if change.frozen or change.unfrozen:
            self.bus.emit(Notice(f"from step {self.engine.global_step} on {change.in_words()}{watched}", level="info"))
        if lost and change.unfrozen:
            text = f"{next(iter(lost))} is trained now, but {type(self.engine.optimizer).__name__} does not hold it"
            self.bus.emit(Notice(f"{text}, so it will not change; add it with optimizer.add_param_group"))
        return batch

    def _cover(self) -> None:
        """Others are trained from now on."""
        if self.look_ahead is not None:
            self.look_ahead.cover(self.engine.trained.parameters)
        self.checkup.cover()
        if self.pilot is not None:
            self.mover.cover()
            self.race.begin_anew()

    def _say_past_the_end(self) -> None:
        """Once. A schedule may have brought the learning rate down to nothing by now."""
        self._past_the_end = True
        text = (
            f"step() goes on after the last of max_steps = {self.engine.config.max_steps}, with a learning rate of "
            f"{self.engine.schedule(self.engine.global_step):.3g}; "
            + (
                "raise max_steps, or leave it out for a loop without an end"
                if self.engine._max_steps_given
                else "a schedule of the Config goes by max_steps: set it"
            )
        )
        warnings.warn(text, stacklevel=3)
        self.bus.emit(Notice(text))

    def end_at(self, max_steps: int) -> None:
        """From now on it is known how long the run is."""
        self.engine.end_at(max_steps)
        if self.pilot is not None:
            self.pilot.config = self.engine.config
            self.pilot.plan_for(max_steps)

    def _step(self, batch: Any) -> StepResult:
        batch = self.engine.to_device(batch)
        position = self.engine.position
        match self.phase:
            case Phase.WARMUP | Phase.FULL:
                result = self._train(batch)
            case Phase.PREDICT:
                result = self._predict(batch)
            case Phase.CORRECT:
                result = self._correct(batch)
        if self.engine.position >= position and not self._went_back:  # else a rollback went back in the data
            self.engine.position += 1
        self._went_back = False
        self.engine.rate.advance(self.engine.global_step)
        if self.pilot is not None and self.engine.has_end and self.engine.global_step == self.engine.config.max_steps:
            self.mover.finish(batch)
        self._look_at_health()
        return result

    def _look_at_health(self) -> None:
        if not self.window_due and self.checkup.due and (self.chaining or not self.judging) and self.checkup.judge():
            self._follow_tuning()

    @property
    def window_due(self) -> bool:
        """An order to end came in the middle of the predictor: its window is still to be learned from."""
        return self.pilot is not None and self.observer.due

    def catch_up(self) -> None:
        """Finish a window that is due. It may be left by an order once more."""
        if self.pilot is not None and self.observer.due:
            self.rescue.aside(self._judge_window, self.pilot)
            self._look_at_health()

    @property
    def phase(self) -> Phase:
        return self.pilot.machine.phase if self.pilot is not None else Phase.FULL

    @property
    def judging(self) -> bool:
        """A move was made and is not judged yet."""
        return self.pilot is not None and self.mover.move is not None

    @property
    def chaining(self) -> bool:
        """A chain of leaps is being made: it can be long, and its weights are as good as any."""
        return self.judging and self.mover.open_move.chained and self.phase is Phase.PREDICT

    def _train(self, batch: Any) -> StepResult:
        """WARMUP and FULL: full steps, watched. Only the end of a window can lead to another phase."""
        phase = self.phase
        self.memory.enter(phase.value)
        if self.pilot is None:
            return self._result(phase, self.engine.full(batch))
        if self.race.open:
            return self._find_rate(self.pilot, batch)
        if self.pilot.off and not self.pilot.rest_steps:
            self.pilot.rest_for_good()
        if self.pilot.rest_steps:
            return self._rest(self.pilot, batch)
        if self.engine.backward_passes == 0:
            self.rescue.aside(self.mover.keep_safe)
        output = self.engine.full(batch, self.observer, *self.mover.watching())
        if self.engine.backward_passes == 1:
            self.engine.check_optimizer_state()
        self.pilot.count(1, phase)
        self.mover.remember(batch)
        result = self._result(phase, output)
        if self.observer.complete:
            self.rescue.aside(self._end_window, self.pilot)
        return result

    def _find_rate(self, pilot: Pilot, batch: Any) -> StepResult:
        """The first steps where the learning rate is `auto`."""

        output = self.race.step(batch, self.engine.full)
        if not self.race.open:  # the last step of the rate that goes on, not of the last one that was tried
            self.engine.rate.used = self.engine.schedule(max(0, self.engine.global_step - 1)) * self.engine.rate_factor
        pilot.count(1, self.phase)
        return self._result(self.phase, output)

    def _rest(self, pilot: Pilot, batch: Any) -> StepResult:
        """Full steps while nothing would come of watching the weights: only now and then losses are looked at."""
        phase = self.phase
        if not self.engine.meter.noting:
            self.engine.meter.start_noting()
        result = self._result(phase, self.engine.full(batch))
        pilot.count(1, phase)
        pilot.rest_steps -= 1
        if pilot.rest_steps % _LOOK_EVERY == 0:
            self.rescue.aside(self._look, pilot)
        if pilot.rest_steps == 0:
            self.engine.meter.stop_noting()
            pilot.wake()
        return result

    def _look(self, pilot: Pilot) -> None:
        """At the losses of a rest. What is seen on a GPU is one look old, except at the end: the device never waits."""
        rows = self.engine.meter.take_noted(everything=pilot.rest_steps == 0)
        numbers = [(torch.nan if skipped else loss, norm) for loss, norm, skipped in rows]
        actions = pilot.rested(
            self.engine.global_step - self.engine.meter.untaken, numbers, fp16=self.engine.precision.scaled
        )
        for action in actions:
            self._carry_out(action)
        if any(action.kind is Kind.ROLL_BACK for action in actions):
            self.engine.meter.start_noting()  # what came after the fault was taken back
        self.mover.keep_safe()

    def _predict(self, batch: Any) -> StepResult:
        """PREDICT: the weights move as forecast, forward only. A refused move leaves everything as it was."""
        position = self.engine.position
        self.memory.enter(Phase.PREDICT.value)
        move = self.mover.begin(batch)
        loss = None
        if move.chained:
            return self._chain(batch, move)
        if not move.refused:
            loss = self.mover.leap() if self.engine.config.hybrid.mode == "leap" else self.mover.roll(batch)
        if self.phase is not Phase.PREDICT:
            self._tell_phase()
        if self.look_ahead is not None and not move.refused:
            self.look_ahead.restart()
        if loss is None:
            return self._train_instead(move, position)
        output = StepOutput(torch.tensor(loss), torch.tensor(torch.nan), torch.zeros(()))
        return self._result(Phase.PREDICT, output, move.predicted_loss, move.confidence)

    def _chain(self, batch: Any, move: Move) -> StepResult:
        """PREDICT where the loss is exact: leaps to where the gradient should vanish, each judged by its own loss."""
        leaps = move.moved
        self.checkup.before_step()
        output = self.mover.leap_on(batch)
        if output is not None and move.moved > leaps:
            self.checkup.after_step(output)
        else:
            self.checkup.undone(self.mover.undone_leaps)
        if self.phase is not Phase.PREDICT:
            self._tell_phase()
        if self.look_ahead is not None and not move.refused:
            self.look_ahead.restart()
        if output is not None:
            return self._result(Phase.PREDICT, output, move.predicted_loss, move.confidence)
        if not move.refused:
            return self._correct(batch)
        self._see_freezing(batch)
        return self._train(batch)

    def _train_instead(self, move: Move, position: int) -> StepResult:
        """A move was refused: the batch it began with is still there to learn from. position: that of this step."""
        self._see_freezing(move.batch)
        result = self._train(move.batch)
        if self.engine.position < position:
            self.engine.position += 1
            self._went_back = True
        return result

    def _correct(self, batch: Any) -> StepResult:
        """CORRECT: full steps that validate the move; then it is kept or taken back."""
        self.memory.enter(Phase.CORRECT.value)
        confidence = self.mover.open_move.confidence
        output = self.mover.validate(batch, self.engine.full)
        result = self._result(Phase.CORRECT, output, confidence=confidence)
        if self.mover.due:
            with self.engine.steady_rate():
                actions = self.mover.judge(self.engine.full)
            for action in actions:
                self._carry_out(action)
            self._tell_phase()
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

    def _end_window(self, pilot: Pilot) -> None:
        moment = Moment(
            step=self.engine.global_step,
            max_steps=self.engine.planned_steps,
            full_steps=self.engine.backward_passes,
            learning_rate=float(self.engine.rate.used),
            peak_rate=self.engine.rate.peak,
            phase=pilot.phase_record(),
            acceptance_rate=pilot.counts.acceptance_rate,
            confidence=pilot.current_confidence,
        )
        self.observer.measure(moment)
        self._judge_window(pilot)

    def _judge_window(self, pilot: Pilot) -> None:
        try:
            record = self.observer.learn()
        except Ordered:  # the next step begins with it, here or in the run that is resumed
            return
        heed(pilot, self.engine.global_step, self.bus.emit)
        actions = pilot.watch(record, self.mover.same_batch(), fp16=self.engine.precision.scaled)
        pilot.exact.watched(record, self.engine.clock.seconds, self.engine.backward_passes)
        for action in actions:
            self._carry_out(action)
        if any(action.kind is Kind.ROLL_BACK for action in actions):
            return
        self.mover.keep_safe()
        before = self.phase
        if before is Phase.WARMUP:
            self.mover.compare_batches()
        left = self.engine.planned_steps - self.engine.global_step
        pilot.plan_for(self.engine.planned_steps)
        chain = self.mover.chain
        pilot.decide(
            self.engine.global_step, left, self.engine.rate.trend(self.engine.global_step), chain.ready, chain.exact
        )
        if not self.observer.trajectory.held:
            self.mover.safety.forget_other()
        if self.phase is not before:
            self._tell_phase()
        self._tell_obstacles()

    def _tell_obstacles(self) -> None:
        """Once: that leaps could be tried here, and which setting keeps them off. Batches are compared once only."""
        if _OBSTACLES in self._said or not self.mover.pilot.predictability.low_noise:
            return
        text = self.mover.why_no_chain()
        if text or (self.mover.chain.obstacles and not self.mover.probes.held_out):
            self._said[_OBSTACLES] = self.engine.global_step
        if text:
            self.bus.emit(Notice(text, level="info"))

    def _tell_phase(self) -> None:
        if self.pilot is not None:
            self.bus.emit(PhaseChanged(self.engine.global_step, self.phase.value, self.pilot.last_reason))

    def _carry_out(self, action: Action) -> None:
        """One of the recovery actions."""
        pilot, at = self.mover.pilot, self.engine.global_step
        pilot.apply(action, at)
        if action.kind is Kind.ROLL_BACK and not self.judging:
            self.mover.safety.flee()
            pilot.counts.rollbacks += 1
            pilot.counts.undone_steps += at - self.engine.global_step
        matters = action.kind is not Kind.CONTINUE or action.rate_factor != 1.0
        if matters and self._is_news(action):
            self.bus.emit(Recovered(self.engine.global_step, action.kind.value, action.text, at))
        if action.kind is Kind.ROLL_BACK and action.rate_factor < 1:
            pilot.recovery.hand_over(self.checkup.rolled_back(action.rate_factor, at))
            self._follow_tuning()
        if action.kind is Kind.ABORT:
            raise DivergenceError(f"{action.text} (step {self.engine.global_step})")

    def start_counting_anew(self) -> None:
        """A run that was given up, and is gone on with, gets as many tries as any other."""
        self.engine.meter.skipped_in_a_row = 0
        if self.pilot is not None and self.pilot.recovery.rollbacks > self.engine.config.guard.max_rollbacks:
            self.pilot.recovery.rollbacks = 0

    def judge_by(self, held_out: list[Any]) -> None:
        """Held-out batches: where the loss is exact, a move must not raise their loss."""
        if self.pilot is not None:
            self.mover.unseen.batches, self.pilot.unseen = held_out, bool(held_out)

    def evaluated(self, held_out: float) -> None:
        """A held-out loss is known: it shows over- and underfitting, and some schedulers follow it."""
        self.engine.rate.evaluated(held_out)
        if self.pilot is not None:
            self.mover.evaluated(held_out)
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
        if self.pilot is not None:
            self.pilot.machine.full_steps = self.checkup.health.full_steps

    # --- the whole state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on, also in the middle of a move. Tensors are not copied."""
        state = self.engine.state_dict()
        state["look_ahead"] = self.look_ahead.state_dict() if self.look_ahead is not None else None
        state["rescue"] = self.rescue.state_dict()
        state["checkup"] = self.checkup.state_dict()
        state["hybrid"] = None
        if self.pilot is not None:
            predictor = self.observer.guarded.state_dict()
            heed(self.pilot, self.engine.global_step, self.bus.emit)
            state["hybrid"] = {
                "predictor": predictor,
                "pilot": self.pilot.state_dict(self.engine.config.checkpoint.directions or self.mover.move is not None),
                "mover": self.mover.state_dict(),
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
        trained, settings = set(self.engine.trained.names), described.optimizer_settings(self.engine.optimizer)
        self.engine.put_back(state, origin)
        self._tell_put_back(trained, settings)
        if self.look_ahead is not None and state.get("look_ahead") is not None:
            self.look_ahead.load_state_dict(state["look_ahead"])
        self.checkup.load_state_dict(state.get("checkup", {}))
        hybrid = state.get("hybrid")
        if self.pilot is None or hybrid is None:  # switched on or off since: the hybrid part starts anew
            self.rescue.load_state_dict(state.get("rescue", {}))
            return
        self.pilot.load_state_dict(hybrid["pilot"])
        self.observer.guarded.load_state_dict(hybrid["predictor"])
        self.pilot.off = self.observer.guarded.off
        if hybrid["predictor"].get("strikes", 0) >= MOST_FAILURES and not self.pilot.off:
            self.pilot.rest_steps = min(1, self.pilot.rest_steps)  # another one is watched with at once
        self.mover.load_state_dict(hybrid["mover"])
        self.race.load_state_dict(hybrid["race"])
        self._said = dict(hybrid["said"])
        self.rescue.load_state_dict(state.get("rescue", {}))
        heed(self.pilot, self.engine.global_step, self.bus.emit)

    def _tell_put_back(self, trained: set[str], settings: dict[str, Any]) -> None:
        """What was handed in otherwise, and is as it was saved now: the saved state wins, else it would be another run.

        trained: names of what was; settings: of the optimizer.
        """
        now = set(self.engine.trained.names)
        if change := Change(sorted(trained - now), sorted(now - trained)).in_words():
            text = f"{change}, as when this was saved; freeze or unfreeze after that, in a callback"
            self.bus.emit(Notice(text, level="info"))
        if not self.engine.own_optimizer or (
            isinstance(self.engine.rate, FollowedRates) and self.engine.rate.scheduler is not None
        ):
            return
        saved = described.optimizer_settings(self.engine.optimizer)
        differing = [name for name, value in settings.items() if name in saved and saved[name] != value]
        if isinstance(self.engine.rate, FollowedRates) and differing:
            words = ", ".join(f"{name} = {saved[name]} and not {settings[name]}" for name in differing)
            self.bus.emit(
                Notice(
                    f"{described.full_name(self.optimizer)} goes on as it was saved, with {words}; to change that, "
                    "write it into optimizer.param_groups when the state is loaded (in fit: in a callback, at the "
                    "event Resumed)",
                    level="info",
                )
            )

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
        if on_interrupt not in ("raise", "return"):
            raise InputError(f"on_interrupt = {on_interrupt!r}: it is 'raise' or 'return'")
        check_metrics(metrics or {})
        if metrics and held_out is None:
            raise InputError("metrics are measured on held-out batches: give some to fit()")
        if resume and overwrite:
            raise InputError("resume goes on with the run in out=..., overwrite replaces it: choose one")
        callbacks = list(callbacks)
        if not all(callable(callback) for callback in callbacks):
            raise InputError("callbacks is a list of functions of one event, such as [listen]")
        if load_best:
            check_load_best(self.engine.config, out, held_out)
        self.engine.check_recording()
        self.engine.unit = unit or self.engine.unit
        self.stopping = False
        self._set_length(loader, epochs)
        random = random_state()  # a DataLoader draws from it when it is read
        held = [as_tensors(batch, self.engine._float_type) for batch in held_out] if held_out is not None else []
        self._check_scheduler(held)
        self.engine.measure(held[:1], metrics or {})  # a metric that fails does so before anything is trained
        restore_random_state(random)
        with ExitStack() as stack:
            folder = out if isinstance(out, RunFolder) else None
            if out is not None and not isinstance(out, RunFolder):
                folder = stack.enter_context(RunFolder(Path(out), resume, overwrite, in_python=True))
                details = {**(details or {}), "folder": str(folder.path)}
                if overwrite and not resume:
                    folder.clear()
            self._show(stack, folder, resume, progress, table)
            for callback in callbacks:
                stack.callback(self.bus.subscribe(warning_of_failure(callback)))
            stop = stack.enter_context(StopRequest())
            stop.leave = lambda: self.engine.fence.interruptible
            run = Run(self, folder, held, stop, data_fingerprint, metrics, load_best)
            self.engine.fence.order, self._fitting = None, True
            stack.callback(setattr, self, "_fitting", False)
            summary = run.train(loader, resume, title, details or {})
            if folder is not None and folder is not out and summary["reason"] != "interrupted":
                with self.engine.averaged_weights():
                    write_weights(self.engine.model, folder.path / WEIGHTS)
        order = self.engine.fence.taken()
        if order is not None and not (isinstance(order, KeyboardInterrupt) and on_interrupt == "return"):
            raise order
        if summary["reason"] == "interrupted" and not isinstance(out, RunFolder):
            shown = bool(progress) and (self.engine.config.log.console if progress is True else progress) != "quiet"
            tell_interruption(summary["signal"], run.last_words, on_interrupt, shown)
        return summary

    def _show(
        self, stack: ExitStack, folder: RunFolder | None, resume: bool, progress: bool | Level, table: bool
    ) -> None:
        """Console, log, report and trackers listen until `stack` is left."""
        if progress:
            console = Console(level=self.engine.config.log.console if progress is True else progress, table=table)
            stack.callback(self.bus.subscribe(console, trusted=True))
            stack.callback(console.close)
        if folder is None:
            return
        log = JsonlLog(folder.metrics, emit=self.bus.emit)
        stack.callback(self.bus.subscribe(log, trusted=True))
        stack.callback(log.close)
        if self.engine.config.log.report:
            stack.callback(self.bus.subscribe(ReportWriter(folder.path), trusted=True))
        trackers = open_trackers(self.engine.config, folder.path, resume, self.bus.emit, self.settings())
        for tracker in trackers:
            stack.callback(self.bus.subscribe(tracker, trusted=True))
        stack.callback(close_all, trackers)

    def _set_length(self, loader: Iterable[Any], epochs: float | None) -> None:
        """`fit` needs an end: so many epochs, or `max_steps`."""
        if epochs is not None and self.engine._max_steps_given:
            raise ConfigError(
                f"epochs = {epochs:g} and max_steps = {self.config.max_steps} of the Config both say how long the run "
                "is; keep one"
            )
        epochs = epochs if epochs is not None else self.engine.config.epochs
        if epochs is not None:
            self.end_at(steps_in(epochs, loader))
        elif not self.engine.has_end:
            self.end_at(self.engine.config.max_steps)

    def _check_scheduler(self, held_out: list[Any]) -> None:
        if not isinstance(self.engine.rate, FollowedRates) or self.engine.rate.scheduler is None:
            return
        name, last = type(self.engine.rate.scheduler).__name__, getattr(self.engine.rate.scheduler, "total_steps", None)
        if self.engine.rate.watches_loss and not held_out:
            raise ConfigError(f"{name} follows the held-out loss: give held-out batches to fit()")
        if last is not None and last < self.engine.config.max_steps:
            raise ConfigError(
                f"{name} was made for {last} steps, and the run has {self.engine.config.max_steps}: make it with "
                f"total_steps={self.engine.config.max_steps}"
            )

    def stop(self) -> None:
        """End `fit` after this step, as early stopping does. For callbacks."""
        self.stopping = True

    @property
    def optimizer_in_words(self) -> str:
        """torch.optim.Adam, lr 0.003."""
        return described.in_words(
            self.engine.optimizer, self.engine.config, self.engine.rate, self.engine.own_optimizer
        )

    def settings(self) -> dict[str, Any]:
        """The configuration as far as it has an effect here, with the model and the optimizer as they really are."""
        return described.settings_of_run(
            self.engine.config,
            self.engine.model,
            self.engine.optimizer,
            self.engine.rate,
            own=self.engine.own_optimizer,
            clip=self.engine.clip,
            rows=self.engine.progress.rows,
        )

    def prediction_progress(self) -> dict[str, Any]:
        """What the progress line says of prediction."""
        if self.pilot is None:
            return {}
        moves, observer = self.pilot.counts.moves, self.observer
        gain = self.pilot.ledger.gain(self.engine.backward_passes)
        watched = observer.windows > 0 and not (self.pilot.rest_steps or self.judging)  # else they are of long ago
        chained = self.judging and self.mover.open_move.chained  # nothing was forecast for it
        return {
            "predicted_loss": observer.predicted_loss if watched else None,
            "smoothed_loss": observer.smoothed_loss if watched else None,
            "confidence": None if chained else round(self.pilot.current_confidence, 4),
            "kept": moves["kept"] + moves["shrunk"],
            "refused": moves["refused"] + moves["rolled_back"],
            "gain_percent": gain["gain_percent"],
        }

    def summary(self) -> dict[str, Any]:
        """What the run did so far."""
        seconds = self.engine.clock.seconds
        summary = {
            "final_val_loss": self.engine.progress.last_val_loss,
            "final_train_loss": self.engine.progress.last_train_loss,
            "best_val_loss": self.engine.progress.best_val_loss,
            "metrics": dict(self.engine.progress.last_metrics),
            "best_step": self.engine.progress.best_step,
            "global_step": self.engine.global_step,
            "steps": {"warmup": 0, "full": self.engine.global_step, "predict": 0, "correct": 0},
            "backward_passes": self.engine.backward_passes,
            "tokens": self.engine.progress.tokens,
            "probe_tokens": self.engine.probe_tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(self.engine.progress.tokens / seconds, 1) if seconds else None,
            "unit": self.engine.unit,
            "optimizer": self.optimizer_in_words,
            "skipped_steps": self.engine.meter.skipped,
            "parameters": sum(p.numel() for p in self.engine.model.parameters()),
            "precision": self.engine.precision.name,
            "config": self.settings(),
            "environment": environment.describe(str(self.engine.device)),
        }
        summary |= dict.fromkeys(_NOT_IN_EVERY_RUN)
        if self.pilot is not None:
            summary |= self.pilot.summary(self.engine.backward_passes)
            if self.race.tried:
                summary["learning_rate"] = self.race.summary()
            summary["predictor"] = self.observer.predictor.name
            summary["basis_mb"] = round(self.observer.trajectory.bytes / 2**20, 1)
        summary |= self.checkup.summary()
        if self.memory.on:
            summary["memory"] = self.memory.summary()
        if self.engine.device.type == "cuda":
            peak = self.memory.peak if self.memory.on else torch.cuda.max_memory_allocated(self.engine.device)
            summary["peak_memory_mb"] = round((peak or 0) / 2**20, 1)
        return summary | self.rescue.summary()
