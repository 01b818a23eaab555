"""HybridTrainer: `step()` for your own loop, `fit()` for a whole run. hybrid/cycle.py decides on the next phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.engine.compile_cache import Compilation
from foretrain.engine.composed import ComposedState, Part
from foretrain.engine.engine import Engine
from foretrain.engine.explain import KnownLength, first_failure, first_words
from foretrain.engine.growing import trained_sizes, with_growth
from foretrain.engine.memory.usage import MemoryMeter
from foretrain.engine.objective import ResidualFunction, objective_given
from foretrain.engine.own import Measure, OptimizerLike, check_processes
from foretrain.engine.ranks import world_of_ranks
from foretrain.engine.result import StepResult
from foretrain.engine.state import as_checkpoint_error
from foretrain.engine.syncing import inside_replicas
from foretrain.engine.world import World
from foretrain.errors import CheckpointError
from foretrain.events import Bus, Listener, Phase
from foretrain.health.checkup import Checkup
from foretrain.health.rescue import Rescue
from foretrain.hybrid import summary as summaries
from foretrain.hybrid.assembly import look_ahead_of
from foretrain.hybrid.freezing import follow_freezing
from foretrain.hybrid.growth import Growth
from foretrain.hybrid.hybrid import Hybrid
from foretrain.hybrid.policy import Policy
from foretrain.hybrid.rate_plan import check_rates, trains_adapters
from foretrain.hybrid.resumed_depth import check_depths
from foretrain.loop.companions import companions_of
from foretrain.loop.fit import FitOptions, fit
from foretrain.motion.observer import Observer
from foretrain.motion.predictors.base import Predictor
from foretrain.motion.predictors.guarded import check_predictor
from foretrain.persist.folder import RunFolder

_MAY_BE_MISSING = ("copies", "forecaster", "targets")
"""Parts of a state that start anew where it does not hold them: those of earlier versions do not, and a target may be
set when a run is resumed."""


class HybridTrainer:
    """Trains any module with any optimizer and a loss function `(model, batch) -> mean loss`.

    optimizer: an object, a class, a name such as "adamw", or none for the configuration's. One of your own keeps its
    rates and its gradients: it gets a schedule and clipping only if the configuration names them. scheduler: any of
    torch.optim.lr_scheduler; it is stepped once per step, and saved. loss_fn: also a criterion of (output, target),
    such as `nn.MSELoss()`; without one `model.loss(batch)` is called. residuals: instead of a loss a function of
    (model, batch) that gives residuals, a tensor or tensors by name; the loss is the sum of their mean squares, times
    `weights` by name (`foretrain.logistic` and `cross_entropy` make blocks that count by those losses). Without
    `max_steps` in the configuration the run has no end and no rate decays. predictor: instead of the configuration's;
    with `hybrid.mode = "off"` it is the plain loop. probe: batches that are never trained on; moves are then searched
    and judged on them, at the run's charge; on several ranks each hands in its own part of them.

    On several ranks the model is wrapped in DistributedDataParallel or sharded by `fully_shard` before, and every rank
    makes the same calls; each hands in its own rows of every batch. world: None: the default process group of
    torch.distributed, where there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerLike = None,
        loss_fn: Measure | None = None,
        config: Config | None = None,
        *,
        residuals: ResidualFunction | None = None,
        weights: Mapping[str, float] | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        predictor: Predictor | None = None,
        probe: Sequence[Any] = (),
        bus: Bus | None = None,
        world: World | None = None,
    ) -> None:
        config = config or Config()
        check_processes(config, model, loss_fn)
        world = world or world_of_ranks()
        loss_fn = objective_given(loss_fn, residuals, weights)
        if predictor is not None:
            check_predictor(predictor)
        config, decided = with_growth(config, trained_sizes(inside_replicas(model), config.growth.blocks), None)
        self._to_tell = first_words(model, config, decided)
        self._compilation: Compilation | None = Compilation()
        check_rates(config)
        self.engine = engine = Engine(model, optimizer, loss_fn, config, scheduler, world)
        config, adapters = engine.config, trains_adapters(engine.model)  # before growth hides a part of it
        self.bus = bus or Bus()
        self.bus.around = engine.fence.hearing
        emit = self.bus.emit
        self.memory = MemoryMeter(engine.device, emit, lambda: engine.progress.global_step, config.memory.timeline)
        self.rescue = Rescue(engine, self.memory, emit)
        self.growth = Growth(engine, emit) if config.growth.stages else None  # before others see what is trained
        self.look_ahead = look_ahead_of(engine)  # the first of the hooks
        self.checkup = Checkup(engine, emit)
        engine.rate_sources = (self.checkup.health,)
        self.companions = companions_of(engine, self.growth, adapters, probe, self.look_ahead, emit)
        self.race, self.copies = self.companions.race, self.companions.copies
        self.forecaster, self.targets = self.companions.forecaster, self.companions.targets
        self.stopping, self.stopped_because = False, ""  # until somebody calls `stop`
        self._length = KnownLength(engine, emit)
        self.hybrid: Hybrid | None = None
        """All that predicts; None in a run of full steps only."""
        self.policy: Policy | None = None
        self.observer: Observer | None = None
        if engine.config.hybrid.mode != "off" and engine.full_step.parameters:
            self.hybrid = hybrid = Hybrid(engine, self.checkup, self.rescue, self.look_ahead, predictor, probe, emit)
            self.policy, self.observer = hybrid.policy, hybrid.observer
        self.companions.connect(self.hybrid)
        parts: dict[str, Part | None] = {"look_ahead": self.look_ahead, "checkup": self.checkup}
        parts |= {"hybrid": self.hybrid, "rescue": self.rescue}
        self._state = ComposedState(engine, parts | self.companions.parts, emit)

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

    @property
    def backward_passes(self) -> int:
        """Backward passes so far, those of copies and of other learning rates included."""
        return self.engine.progress.backward_passes + self.companions.backward_passes

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
        forward = self.engine.forward
        return forward.evaluate(batches) if metrics is None else forward.evaluate(batches, metrics)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model at averaged weights inside the block, if `evaluation.ema_decay` is set."""
        return self.engine.averaged_weights()

    def anneal(self, steps: int) -> None:
        """Ask for an annealed copy: what the run would come to, had its rate been brought to 0 over so many steps.

        The next `steps` calls of `step` go on as ever, and the call after them makes the copy from here on the same
        batches: the rate falls in a straight line to 0, held-out batches (those of `fit`, or `probe`) are measured, and
        the run is put back bit for bit. The event `Annealed` tells the loss, and `copies.points` keeps it. The copy is
        charged: its steps count as backward passes and tokens.
        """
        self.copies.ask(steps)

    def evaluated(self, held_out: float) -> None:
        """A held-out loss is known: it shows over- and underfitting, and some schedulers follow it."""
        self.engine.rate.evaluated(held_out)
        if self.policy is not None:
            self.policy.evaluated(held_out)
        self.checkup.evaluated(held_out)
        if self.forecaster is not None:
            self.forecaster.evaluated(held_out)
        self.looked(held_out)

    def looked(self, held_out: float) -> None:
        """A held-out loss is known that only a target asked for, or that all others know already."""
        if self.targets is not None:
            self.targets.evaluated(held_out)

    def load_weights(self, state: dict[str, Any], origin: str = "the given state") -> None:
        """Weights, buffers and averages of a state, in place; all else stays."""
        self.engine.load_weights(state, origin)

    def finish(self, batch: Any) -> None:
        """Your loop ends here, before `max_steps`: where losses are exact the model goes back to the lowest one that is
        known, as it does after its last step, since the optimizer's steps between two chains of leaps may lead far up.

        batch: the last one. Not while `judging`.
        """
        if self.policy is not None:
            self.policy.finish(self.engine.to_device(batch))

    @property
    def phase(self) -> Phase:
        return Phase.FULL if self.hybrid is None else self.hybrid.phase

    @property
    def judging(self) -> bool:
        """A move is open: it has begun, and it is neither kept nor undone yet."""
        return self.hybrid is not None and self.hybrid.policy.move is not None

    @property
    def racing(self) -> bool:
        """Learning rates are tried: it is not settled yet at which one the run goes on."""
        return self.companions.racing

    # --- one step, in one of four phases -----------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """One step of the phase the run is in. Full steps never wait for the device, except at the end of a window.

        Where memory runs out, `memory.on_out_of_memory` decides what follows.
        """
        engine, position, before = self.engine, self.engine.progress.position, self.engine.progress.global_step
        while self._to_tell:  # here, when those who listen are there
            self.bus.emit(self._to_tell.pop(0))
        self._length.check(self.judging)
        if self.targets is not None:
            self.targets.check()
        self.catch_up()
        engine.fence.obey()
        if engine.trained.changed:
            batch = follow_freezing(engine, self.policy, batch, self.bus.emit)
        self.companions.before_step(batch, self.phase)
        try:
            result = self.rescue.step(batch, self._advance)
        except (TypeError, AttributeError, RuntimeError) as error:
            if (explained := first_failure(error, engine)) is None:
                raise
            raise explained from error
        if engine.ended:
            self.companions.end()
        self._forget_undone(before)
        if engine.ended and not self.judging:
            self.copies.end()
        engine.fence.obey()
        engine.world.step_done()
        if self._compilation is not None:  # all that steps need is compiled with the first one
            self._compilation.tell(self.bus.emit)
            self._compilation = None
        back = position + 1 - engine.progress.position
        return result if back <= 0 else replace(result, rewound=back)

    def _advance(self, batch: Any) -> StepResult:
        """PREDICT, CORRECT: a step of the move. WARMUP, FULL, and where the move was refused: a full step."""
        engine, hybrid, result, before = self.engine, self.hybrid, None, self.engine.progress.global_step
        given = batch = engine.to_device(batch)
        if hybrid is not None and hybrid.phase in (Phase.PREDICT, Phase.CORRECT):
            result, batch = self._move(hybrid, batch)
        if result is None:
            self.memory.enter(self.phase.value)
            result = engine.result(Phase.FULL, engine.full(batch)) if hybrid is None else hybrid.full(batch)
            engine.progress.position += 1
        engine.rate.advance(engine.progress.global_step)
        if hybrid is not None and engine.ended and before < engine.config.max_steps:
            hybrid.policy.finish(given)
        self._look_at_health()
        return result

    def _move(self, hybrid: Hybrid, batch: Any) -> tuple[StepResult | None, Any]:
        """Go on with the move by one step: predicted in PREDICT, a full step that validates it in CORRECT. The first
        one in PREDICT begins the move that was decided for (`Policy.open`). When the move is over it is judged, and
        kept or undone. Returns None, and a batch to learn from, where it was refused."""
        policy, phase, progress = hybrid.policy, hybrid.phase, self.engine.progress
        position = progress.position
        self.memory.enter(phase.value)
        move = policy.open(batch)
        output = None if move.refused else policy.advance(batch)
        if hybrid.phase is not phase:
            policy.tell_phase()
        if move.refused:
            batch = batch if progress.position == position else move.batch
            if self.engine.trained.changed:  # by a callback that heard of it
                follow_freezing(self.engine, policy, batch, self.bus.emit)
            return None, batch
        if self.look_ahead is not None and phase is Phase.PREDICT:
            self.look_ahead.restart()
        if output is None:  # it came to its end without a step: this batch validates it
            return self._move(hybrid, batch)
        predicted = move.plan.predicted_loss if phase is Phase.PREDICT else None
        result = self.engine.result(phase, output, predicted, move.plan.confidence)
        if phase is Phase.CORRECT and move.over:
            with self.engine.steady_rate():
                actions = policy.settle()
            hybrid.carry_out(actions)
            policy.tell_phase()
        if progress.position >= position:  # else the move was undone together with its data
            progress.position += 1
        return result, batch

    def catch_up(self) -> None:
        """Learn from a window that is still due. If an order to end comes again meanwhile, the window stays due."""
        if self.hybrid is not None and self.hybrid.window_due:
            before = self.engine.progress.global_step
            self.rescue.aside(self.hybrid.judge_window)
            self._forget_undone(before)
            self._look_at_health()

    def _forget_undone(self, before: int) -> None:
        """What was measured at steps that a rollback has undone is forgotten. before: steps that were done."""
        if self.engine.progress.global_step < before:
            self.companions.taken_back()

    def _look_at_health(self) -> None:
        if self.checkup.due and (self.hybrid is None or self.hybrid.may_be_examined):
            self.checkup.judge()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on, also in the middle of a move. Tensors are not copied."""
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any], origin: str = "the given state") -> None:
        """Put a state back, in place: afterwards every step is, bit for bit, what it would have been."""
        with as_checkpoint_error(origin):
            check_depths(self.growth, state.get("growth"), origin)
            if self.growth is not None:
                self.growth.expect(state["growth"])
        if self.race is not None and "race" not in state:
            raise CheckpointError(
                f"{origin}: this run was begun with a learning rate that was set, and 'auto' looks for one at the "
                "beginning of a run only; set optimizer.learning_rate to that rate, or start a new run"
            )
        self._state.load_state_dict({**dict.fromkeys(_MAY_BE_MISSING), **state}, origin)

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
        pause_at: int | None = None,
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
        pause_at: leave the run after this step, saved, with the reason "paused"; `resume` goes on with it later. Its
        length and its learning rates are those of the whole run.
        """
        self.engine.unit = unit or self.engine.unit
        asked = FitOptions(epochs, metrics or {}, tuple(callbacks), out, resume, overwrite, load_best, progress, table)
        told = replace(asked, title=title, details=details or {}, data_fingerprint=data_fingerprint)
        return fit(self, loader, held_out, replace(told, on_interrupt=on_interrupt, pause_at=pause_at))

    def stop(self, reason: str = "") -> None:
        """End `fit` after this step, or after the move that is open, as early stopping does. For callbacks.

        reason: why, in words of your own: the summary has them as `stopped_because`. Of several processes one may call
        it: all end after the same step.
        """
        self.stopping, self.stopped_because = True, reason or self.stopped_because
        if self.hybrid is not None and self.engine.world.size == 1:  # else all processes hear of it first
            self.hybrid.end_soon()

    def summary(self) -> dict[str, Any]:
        """What the run did so far."""
        predicted = {} if self.hybrid is None else summaries.of_prediction(self.engine, self.hybrid)
        summary = self.companions.summary(summaries.of_steps(self.engine, self.memory) | predicted)
        return summary | self.checkup.summary() | self.rescue.summary()
