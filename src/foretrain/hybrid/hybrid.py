"""The hybrid part of a run: its policy, and what follows on full steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from foretrain.engine.engine import Engine
from foretrain.engine.fence import Ordered
from foretrain.engine.rates import FollowedRates
from foretrain.engine.result import StepResult
from foretrain.errors import DivergenceError
from foretrain.events import Event, Notice, Phase, Recovered
from foretrain.health.act import Action, Kind
from foretrain.health.checkup import Checkup
from foretrain.health.rescue import Rescue
from foretrain.hybrid.assembly import equip
from foretrain.hybrid.emergencies import Emergencies
from foretrain.hybrid.moves.lookahead import LookAhead
from foretrain.hybrid.moves.obstacles import told
from foretrain.hybrid.policy import Policy
from foretrain.hybrid.rate_plan import ADAPTERS
from foretrain.motion.hosted import HostedTrajectory
from foretrain.motion.observer import Moment, Observer
from foretrain.motion.predictors import registry
from foretrain.motion.predictors.base import Predictor
from foretrain.motion.predictors.guarded import MOST_FAILURES
from foretrain.motion.shared import SharedTrajectory
from foretrain.motion.trajectory import Trajectory, basis_type

_SAY_EVERY = 100
"""Steps. Chosen: a run that recovers over and over says so a few times per thousand steps, not at every window."""
_LOOK_EVERY = 10
"""Steps of a rest after which its losses are looked at. Chosen: as often as a window of the default length ends."""
_OBSTACLES = "obstacles"
_SAME = "every batch is the same"


def kind_of_trajectory(engine: Engine) -> type[Trajectory]:
    """Return the class that keeps directions where they are to be."""
    if engine.shares_directions:
        return SharedTrajectory
    return HostedTrajectory if engine.config.memory.basis == "pinned" else Trajectory


class Hybrid:
    """Stands between the steps of a run and the policy: tells the policy what happened, and does what it wants done."""

    def __init__(
        self,
        engine: Engine,
        checkup: Checkup,
        rescue: Rescue,
        look_ahead: LookAhead | None,
        predictor: Predictor | None,
        probe: Iterable[Any],
        emit: Callable[[Event], None],
    ) -> None:
        """predictor: None: that of the configuration. probe: batches that are never trained on."""
        self.engine = engine
        self.checkup = checkup
        self.rescue = rescue
        self.emit = emit
        config, parameters = engine.config, engine.full_step.parameters
        trained, size = (sum(p.numel() for p in some) for some in (parameters, engine.model.parameters()))
        trajectory = kind_of_trajectory(engine)(
            parameters,
            engine.trained.names,
            window=config.hybrid.window_steps,
            dtype=basis_type(config.hybrid.basis_type, trained),
            world=engine.world,
            hold=False,
        )
        predictor = predictor or registry.build(config.predictor, config.seed)
        self.observer = Observer(trajectory, predictor, parameters, engine.optimizer, engine.fence)
        if engine.full_step.in_backward is not None:
            engine.full_step.in_backward.watchers.append(self.observer.sample.watch())
        kind = "adapters" if trained < ADAPTERS * size else "full weights"
        self.policy = policy = Policy(config, self.observer, kind, engine.world)
        policy.recovery.rate_name = checkup.levers.rate
        policy.appraiser.falls_once &= not isinstance(engine.rate, FollowedRates)
        equip(policy, engine, checkup, look_ahead, [engine.to_device(batch) for batch in probe], emit)
        policy.hold_directions()
        engine.rate_sources = (policy.recovery, *engine.rate_sources)
        self.racing: Callable[[], bool] = lambda: False
        """Whether learning rates are tried: then nothing is watched. Set by the trainer."""
        self.said: dict[str, int] = {}
        """Kind of action, or text -> step at which it was last told."""
        engine.world.compare(self._decided)
        engine.on_cover.append(self.cover)
        engine.on_length.append(policy.appraiser.plan_for)
        rescue.excursions = emergencies = Emergencies(policy)
        checkup.known_of_moves = emergencies.add_to
        checkup.tuned = lambda: policy.cycle.use_full_steps(checkup.health.full_steps)

    @property
    def phase(self) -> Phase:
        return self.policy.cycle.phase

    @property
    def chaining(self) -> bool:
        """A chain of leaps is being made: it can be long, and its weights are as good as any."""
        move = self.policy.move
        return move is not None and move.chained and self.phase is Phase.PREDICT

    @property
    def window_due(self) -> bool:
        """An order to end came in the middle of the predictor: its window is still to be learned from."""
        return self.observer.due

    @property
    def may_be_examined(self) -> bool:
        """Nothing stands in the way of judging the run's health: no window is due, no short move is open."""
        return not self.observer.due and (self.policy.move is None or self.chaining)

    def _decided(self) -> dict[str, Any]:
        """What ranks must have in common at any time."""
        cycle, progress = self.policy.cycle, self.engine.progress
        return {
            "global_step": progress.global_step,
            "position": progress.position,
            "phase": cycle.phase,
            "rest_steps": self.policy.rest.steps,
            "full_steps_needed": cycle.full_steps_needed,
            "rate_factor": self.engine.rate_factor,
        }

    def cover(self) -> None:
        """Others are trained from now on."""
        self.policy.cover()

    # --- full steps --------------------------------------------------------------------------------------------------

    def full(self, batch: Any) -> StepResult:
        """A full step in WARMUP or FULL, and what follows on it. Only the end of a window can lead to another phase."""
        engine, policy, phase = self.engine, self.policy, self.phase
        if self.racing():
            policy.count(1, phase)
            return engine.result(phase, engine.full(batch))
        if self._rests:
            return self._rest_step(batch)
        if engine.progress.backward_passes == 0:
            self.rescue.aside(policy.keep_safe)
        output = engine.full(batch, self.observer, *policy.watching())
        if engine.progress.backward_passes == 1:
            engine.check_optimizer_state()
        policy.count(1, phase)
        policy.tools.recent.remember(batch)
        result = engine.result(phase, output)
        if self.observer.complete:
            self.rescue.aside(self.end_window)
        return result

    @property
    def watches(self) -> bool:
        """Whether the motion of the weights is seen in the next full step."""
        return not (self.racing() or self._rests)

    @property
    def _rests(self) -> bool:
        """Nothing would come of watching the weights now."""
        if self.policy.off and not self.policy.rest.steps:
            self.policy.rest.for_good()
        return self.policy.rest.steps > 0

    def _rest_step(self, batch: Any) -> StepResult:
        """A full step of which nobody watches the weights: only now and then losses are looked at."""
        policy, meter, phase = self.policy, self.engine.meter, self.phase
        if not meter.noting:
            meter.start_noting()
        result = self.engine.result(phase, self.engine.full(batch))
        policy.count(1, phase)
        policy.rest.steps -= 1
        if policy.rest.steps % _LOOK_EVERY == 0:
            self.rescue.aside(self.look)
        if policy.rest.steps == 0:
            meter.stop_noting()
            policy.wake()
        return result

    # --- what follows on full steps ----------------------------------------------------------------------------------

    def end_window(self) -> None:
        """A window is full: measure it, learn from it, and decide how to go on."""
        engine, policy = self.engine, self.policy
        moment = Moment(
            step=engine.progress.global_step,
            max_steps=engine.planned_steps,
            full_steps=engine.progress.backward_passes,
            learning_rate=float(engine.rate.used),
            peak_rate=engine.rate.peak,
            phase=policy.phase_record(),
            acceptance_rate=policy.score.counts.acceptance_rate,
            confidence=policy.appraiser.current_confidence,
        )
        if engine.world.size > 1:
            engine.world.vote(_SAME, policy.tools.recent.same())
        policy.observer.measure(moment)
        self.judge_window()

    def judge_window(self) -> None:
        """The second half of `end_window`. Where own code orders the program to end it is left, and still due."""
        engine, policy = self.engine, self.policy
        try:
            record = policy.observer.learn()
        except Ordered:  # the next step begins with it, here or in the run that is resumed
            return
        policy.heed()
        same = engine.world.every(_SAME, policy.tools.recent.same())
        actions = policy.watch(record, same, fp16=engine.precision.scaled)
        policy.score.exact.watched(record, engine.clock.seconds, engine.progress.backward_passes)
        if self.carry_out(actions):
            return
        policy.keep_safe()
        if engine.progress.global_step >= engine.awaited():
            return  # what waits for moves to be over comes first
        before, step, planned = policy.cycle.phase, engine.progress.global_step, engine.planned_steps
        if before is Phase.WARMUP:
            policy.prepare()
        policy.appraiser.plan_for(planned)
        policy.decide(step, planned - step, engine.rate.trend(step))
        if not policy.observer.trajectory.held:
            policy.tools.snapshots.forget_other()
        if policy.cycle.phase is not before:
            policy.tell_phase()
        self._tell_obstacles()

    def look(self) -> None:
        """At the losses of a rest. What is seen on a GPU is one look old, except at the end: the device never waits."""
        meter, policy = self.engine.meter, self.policy
        rows = meter.take_noted(everything=policy.rest.steps == 0)
        numbers = [(torch.nan if skipped else loss, norm) for loss, norm, skipped in rows]
        step = self.engine.progress.global_step - meter.untaken
        if self.carry_out(policy.rested(step, numbers, fp16=self.engine.precision.scaled)):
            meter.start_noting()  # what came after the fault was undone
        policy.keep_safe()

    def carry_out(self, actions: list[Action]) -> bool:
        """Do what recovery wants. Returns whether that was a rollback."""
        for action in actions:
            self._carry_out(action)
        return any(action.kind is Kind.ROLL_BACK for action in actions)

    def _carry_out(self, action: Action) -> None:
        policy, at = self.policy, self.engine.progress.global_step
        policy.apply(action, at)
        if action.kind is Kind.ROLL_BACK:
            policy.recover()
            policy.score.counts.rollbacks += 1
            policy.score.counts.undone_steps += at - self.engine.progress.global_step
        matters = action.kind is not Kind.CONTINUE or action.rate_factor != 1.0
        if matters and self._is_news(action):
            self.emit(Recovered(self.engine.progress.global_step, action.kind.value, action.text, at))
        if action.kind is Kind.ROLL_BACK and action.rate_factor < 1:
            policy.recovery.hand_over(self.checkup.rolled_back(action.rate_factor, at))
        if action.kind is Kind.ABORT:
            raise DivergenceError(f"{action.text} (step {self.engine.progress.global_step})")

    def _is_news(self, action: Action) -> bool:
        """Whether an action is to be told: one kind, over and over, is told once per hundred steps."""
        step = self.engine.progress.global_step
        weighty = action.kind in (Kind.ROLL_BACK, Kind.ABORT) or action.rate_factor != 1.0
        said = self.said.get(action.kind.value, -_SAY_EVERY)
        if not weighty and 0 <= step - said < _SAY_EVERY:
            return False
        self.said[action.kind.value] = step
        return True

    def _tell_obstacles(self) -> None:
        """Once: that leaps could be tried here, and which setting keeps them off. Batches are compared once only."""
        if _OBSTACLES in self.said or not self.policy.predictability.low_noise:
            return
        found = self.policy.obstacles()
        if None not in found:
            self.said[_OBSTACLES] = self.engine.progress.global_step
        for text in told(found):
            if text not in self.said:
                self.said[text] = self.engine.progress.global_step
                self.emit(Notice(text, level="info"))

    # --- what a run of `fit` tells and asks --------------------------------------------------------------------------

    def judge_by(self, held_out: list[Any]) -> None:
        """Held-out batches: where the loss is exact, a move must not raise their loss."""
        self.policy.tools.held_out.batches, self.policy.appraiser.judged_on_held_out = held_out, bool(held_out)

    def is_usual(self, loss: float) -> bool:
        """Whether a mean loss is about what the guard knows; else the run may have to go back first."""
        return self.policy.guard.is_usual(loss)

    def rest(self, steps: int) -> None:
        """Nothing is tried for so many full steps: something else is on trial."""
        self.policy.rest.steps = max(self.policy.rest.steps, steps)
        self._other_depth()

    def taken_back(self, steps: int) -> None:
        """Somebody else has gone back by so many full steps."""
        self.policy.score.counts.undone_steps += steps
        self.observer.restart()
        self._other_depth()

    def _other_depth(self) -> None:
        """The model has another depth: what was usual is not any more, and an emergency must not go back to weights of
        the one before."""
        self.policy.guard.after_growth()
        snapshots = self.policy.tools.snapshots
        snapshots.forget()
        if snapshots.on:
            self.rescue.aside(lambda: snapshots.take(for_move=False))

    def start_counting_anew(self) -> None:
        """A run that was given up, and is gone on with, gets as many tries as any other."""
        if self.policy.recovery.rollbacks > self.engine.config.guard.max_rollbacks:
            self.policy.recovery.rollbacks = 0

    def end_soon(self) -> None:
        """A chain of leaps ends with its next leap, if there is one."""
        if self.policy.move is not None:
            self.policy.move.end_soon()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        predictor, moving = self.observer.guarded.state_dict(), self.phase in (Phase.PREDICT, Phase.CORRECT)
        self.policy.heed()
        return {
            "predictor": predictor,
            "policy": self.policy.state_dict(self.engine.config.checkpoint.directions or moving),
            "said": dict(self.said),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        policy = self.policy
        policy.load_state_dict(state["policy"])
        self.observer.guarded.load_state_dict(state["predictor"])
        if state["predictor"]["strikes"] >= MOST_FAILURES and not policy.off:
            policy.rest.steps = min(1, policy.rest.steps)  # another one is watched with at once
        self.said = dict(state["said"])
        policy.heed()
