"""The engine of a run: model, optimizer, one full step, evaluation, and the state of all that. It knows no phases."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.config import Config, given, with_beta2
from foretrain.engine import own, state
from foretrain.engine.average import WeightAverage
from foretrain.engine.batch import count, map_tensors, rows_of
from foretrain.engine.compiling import is_worthwhile, known_workload
from foretrain.engine.described import is_configured
from foretrain.engine.execution import Execution, switch
from foretrain.engine.fence import Fence
from foretrain.engine.forward import Forward
from foretrain.engine.handing_over import hand_over
from foretrain.engine.hooks import StepHook
from foretrain.engine.memory.offload import OptimizerParking
from foretrain.engine.meters import StepMeter, Stopwatch
from foretrain.engine.objective import Residuals, block_weights, objective_of
from foretrain.engine.optim import build as optim
from foretrain.engine.precision import Precision, choose_device
from foretrain.engine.progress import RunProgress
from foretrain.engine.ranks_limits import check_ranks, device_of_rank, seed_of_rank, shares_directions
from foretrain.engine.rates import FollowedRates, Rates, RateSource, ScheduledRates, check_scheduler
from foretrain.engine.recomputing import Recomputing
from foretrain.engine.result import StepResult
from foretrain.engine.schedule import DecayPlan
from foretrain.engine.sparse import check_sparse
from foretrain.engine.step import FullStep, LossFunction, StepOutput
from foretrain.engine.syncing import inside_replicas, loss_through, prepared_for_loss
from foretrain.engine.trained import Change, TrainedWeights
from foretrain.engine.world import ALONE, World
from foretrain.errors import ConfigError
from foretrain.events import Phase
from foretrain.persist.codec import (
    seed_random,
)
from foretrain.persist.form import FORMAT
from foretrain.persist.parts import is_spread


class Engine:
    """Any module, any optimizer, a loss function `(model, batch) -> mean loss`, and a configuration."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: own.OptimizerLike,
        loss_fn: own.Measure | None,
        config: Config,
        scheduler: Any = None,
        world: World | None = None,
    ) -> None:
        self.world = world or ALONE
        optimizer, config = own.with_named_optimizer(optimizer, config)
        config = with_beta2(config) if optimizer is None else config
        self.config = config
        self.max_steps_given = "max_steps" in config.model_fields_set
        known = {"max_steps", "schedule"} & config.model_fields_set and config.epochs is None
        self.has_end = bool(known) and config.steps_are_limited
        """Somebody said how long the run is: else it goes on for as long as steps are made, and no rate decays."""
        model = self._ready(model)
        self.device = device_of_rank(model, choose_device(config.device), self.world)
        if config.engine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to repeat itself
            torch.use_deterministic_algorithms(True)
        self.model = self._placed(model)
        self.own_optimizer = optimizer is not None
        self.optimizer = (
            optim.build(self.model, config.optimizer)
            if optimizer is None
            else own.built_optimizer(optimizer, self.model, config)
        )
        check_sparse(self.model, self.optimizer)
        self.loss_fn: LossFunction = own_loss if loss_fn is None else own.as_loss(loss_fn, self.device)
        if loss_fn is None:
            prepared_for_loss(self.model)
        self.objective = objective_of(self.loss_fn)
        """What the loss is made of, where its form is known."""
        self.float_type = own.float_type(self.model)
        physical = isinstance(self.objective, Residuals)  # they take derivatives, and are to become small
        self.precision = self._formats(exact=physical)
        self.rate = self._rates(scheduler)
        self.clip = config.optimizer.gradient_clip_norm
        """Without what the rate sources make of it; 0: none."""
        if self.own_optimizer and "optimizer.gradient_clip_norm" not in given(config):
            self.clip = 0.0
        self.named = inside_replicas(self.model)
        """The module whose names weights have: a state says nothing of DistributedDataParallel around it."""
        hand_over(self.named, config)
        self.recomputing = Recomputing(self.named, config)
        self.trained = TrainedWeights(self.named, self.optimizer)
        self.average = WeightAverage(self.named, config.evaluation.ema_decay) if config.evaluation.ema_decay else None
        self.full_step = FullStep(
            self.model,
            self.optimizer,
            self.loss_fn,
            self.precision,
            clip=self.clip,
            accumulation=config.accumulation_steps,
            nan_check=config.guard.nan_check,
            compile_loss=switch(config.engine.compile, auto=not physical and self._compiling_pays()),
            update_in_backward=config.engine.update_in_backward,
            parameters=self.trained.parameters,
            recomputing=self.recomputing,
            world=self.world,
        )
        self.away: OptimizerParking | None = None
        """The optimizer's state leaves the device while nothing needs it."""
        if config.memory.offload and config.hybrid.mode != "off":
            self.away = OptimizerParking(self.optimizer, self.full_step.parameters, self.device)
        self.hooks: tuple[StepHook, ...] = ()
        """They watch every full step. Changed by `add_hook` and `remove_hook`."""
        self.rate_sources: tuple[RateSource, ...] = ()
        """All that changes the scheduled learning rate and the configured clipping. Set by the trainer and `Hybrid`."""
        self._steady: tuple[float, float] | None = None
        fixed = self.away is None  # a graph is bound to addresses: its tensors cannot leave
        recordable = fixed and (not self.own_optimizer or optim.can_be_recorded(self.optimizer))
        recordable = recordable and self.world.size == 1 and not self.full_step.spread
        self.execution = Execution(self.full_step, config.engine.cuda_graph, recordable)
        self.meter = StepMeter(lagging=self.device.type == "cuda", world=self.world)
        self.clock = Stopwatch()
        self.progress = RunProgress()
        self.unit = "tokens" if is_configured(self.model) else "samples"
        """What `progress.tokens` counts."""
        self.fence = Fence()
        self.forward = Forward(
            self.full_step,
            self.execution,
            self.average,
            self.progress,
            self.fence,
            self.to_device,
            self.count,
            self.world,
        )
        self.first_trained: Callable[[dict[str, nn.Parameter]], None] = lambda weights: None
        """Called with weights that are about to be trained for the first time in this run, which nobody saved so far.
        Set by `fit`."""
        self.awaited: Callable[[], float] = lambda: math.inf
        """The step from which on something has to be done between two full steps: moves are over by then."""
        self.on_cover: list[Callable[[], None]] = []
        """Called when other weights are trained than before."""
        self.on_length: list[Callable[[int], None]] = []
        """Called when it becomes known how many steps the run has, before its rates are planned for them."""
        self._fingerprint = state.Fingerprint()
        self.world.follow(lambda: self.progress.global_step, config.hybrid.window_steps)
        check_ranks(self)
        self.shares_directions = shares_directions(self)
        """Replicas share the directions of their weights, each keeping its part."""

    def _ready(self, model: nn.Module) -> nn.Module:
        return own.ready_to_train(model)

    def _placed(self, model: nn.Module) -> nn.Module:
        """Bring the model to where it is trained. From now on random numbers follow from the seed."""
        seed_random(seed_of_rank(self.config.seed, self.world.rank))
        return model.to(self.device)

    def _formats(self, exact: bool) -> Precision:
        return Precision(self.config.precision, self.device, exact=exact)

    def _compiling_pays(self) -> bool:
        if self.world.size > 1 or any(is_spread(p) for p in self.model.parameters()):
            return False  # blocks are compiled before they are wrapped, the loss as a whole is not
        work = known_workload(self.config, self.model, self.has_end)
        return self.device.type == "cuda" and is_worthwhile(work, self.config)

    # --- what is trained ---------------------------------------------------------------------------------------------

    def follow_trained(self) -> Change:
        """Somebody has frozen or unfrozen parameters, or given the optimizer more: from now on it counts."""
        before, change = self.trained.never(), self.trained.look()
        new = self.trained.without_optimizer()
        if new and not self.own_optimizer:
            optim.add(self.optimizer, self.model, new, self.config.optimizer)
            self.trained.look()
        self.rate.forget()
        self.cover_trained()
        never = self.trained.never()
        if first := {name: p for name, p in before.items() if name not in never}:
            self.first_trained(first)
        return change

    def cover_trained(self) -> None:
        """All that knows what is trained learns it anew."""
        self.full_step.syncing.follow_trained()
        self.recomputing.follow()
        if self.average is not None:
            self.average.cover(self.trained.ever, self.trained.names)
        if self.full_step.in_backward is not None:
            self.full_step.in_backward.cover(self.trained.parameters)
        self.execution.forget()
        for cover in self.on_cover:
            cover()

    # --- learning rates and the length of the run --------------------------------------------------------------------

    def _rates(self, scheduler: Any) -> Rates:
        """An optimizer of the user's own keeps his rates, unless he asks for a schedule in the configuration."""
        asked = "schedule" in self.config.model_fields_set
        if scheduler is not None:
            if asked:
                raise ConfigError(
                    "scheduler= and [schedule] of the Config both set the learning rate; keep one of them"
                )
            scheduler = check_scheduler(scheduler, self.optimizer)
        if scheduler is not None or not (asked or not self.own_optimizer):
            return FollowedRates(self.optimizer, scheduler)
        end = self.config.max_steps if self.has_end else None
        return ScheduledRates(self.optimizer, self.config.schedule, end, self.config.max_steps)

    def schedule(self, step: int) -> float:
        """Learning rate at `step`, as far as it is known, before recovery changes it."""
        return self.rate.at(step)

    @property
    def rate_factor(self) -> float:
        """What the sources make of the scheduled learning rate: the product of their factors."""
        if self._steady is not None:
            return self._steady[0]
        factor = 1.0
        for source in self.rate_sources:
            factor *= source.rate_factor
        return factor

    @property
    def clip_limit(self) -> float:
        """The lowest limit for gradients that the configuration or a source wants; 0: none."""
        if self._steady is not None:
            return self._steady[1]
        limit = self.clip or math.inf
        for source in self.rate_sources:
            limit = min(limit, source.clip)
        return 0.0 if limit == math.inf else limit

    @contextmanager
    def steady_rate(self) -> Iterator[None]:
        """Sources change nothing inside the block: what is compared there was made alike."""
        self._steady = (self.rate_factor, self.clip_limit)
        try:
            yield
        finally:
            self._steady = None

    @property
    def planned_steps(self) -> int:
        """Length of the run; without an end it is taken to go on for as long again as it has been."""
        return self.config.max_steps if self.has_end else max(self.config.max_steps, 2 * self.progress.global_step)

    @property
    def ended(self) -> bool:
        """All steps are done that were planned."""
        return self.has_end and self.progress.global_step >= self.config.max_steps

    def end_at(self, max_steps: int, plan: DecayPlan | None = None) -> None:
        """From now on it is known how long the run is; where it goes by the clock, as far as can be told by now.
        plan: of the decay, where it does not follow from the length alone."""
        self.config = self.config.model_copy(update={"max_steps": max_steps, "epochs": None})
        self.has_end = True
        for told in self.on_length:  # they may change the schedule, and the plan is made of it
            told(max_steps)
        self.rate.end_at(max_steps, plan)

    # --- one full step -----------------------------------------------------------------------------------------------

    def add_hook(self, hook: StepHook) -> None:
        """From now on `hook` watches every full step, inside of the hooks that are there. `StepHook` says what it is
        told, and what not."""
        self.hooks = (*self.hooks, hook)

    def remove_hook(self, hook: StepHook) -> None:
        """End what `add_hook` began."""
        self.hooks = tuple(other for other in self.hooks if other is not hook)

    def full(self, batch: Any, *watching: StepHook) -> StepOutput:
        """Forward, backward, update on a batch that is on the device. Never waits for the device.

        watching: hooks for this step only.
        """
        hooks = watching + self.hooks
        for hook in hooks:
            hook.before_step()
        curious = [hook for hook in hooks if hook.wants_gradients]
        with self._rate_of_update():
            if curious:
                output = self.full_step(batch, curious, self.execution.gradient)
            else:
                output = self.execution.step_for(batch)(batch)
        self.count_step(batch, output)
        for hook in reversed(hooks):
            hook.after_step(output)
        self.progress.global_step += 1
        self.full_step.changing = False
        return output

    def result(
        self, phase: Phase, output: StepOutput, predicted_loss: float | None = None, confidence: float | None = None
    ) -> StepResult:
        """What a step did, as its caller sees it."""
        step, rate = self.progress.global_step, self.rate.used
        return StepResult(phase.value, step, rate, output, predicted_loss, confidence, world=self.world)

    def take_back_step(self) -> None:
        """The step that was begun will not be done, and its update has not begun: hooks undo what they changed."""
        for hook in self.hooks:
            hook.take_back()

    def update(self, loss: Tensor) -> StepOutput:
        """The optimizer's step with the gradients that are there."""
        with self._rate_of_update():
            return self.full_step.update(loss)

    def _rate_of_update(self) -> AbstractContextManager[None]:
        """An update inside the block is made at the rate, and with the clipping, that the sources want now."""
        limit = self.clip_limit
        if limit != self.full_step.clip:
            self.full_step.clip = limit
            self.execution.forget_step()  # a recorded graph has the old value in it
        return self.rate.during(self.progress.global_step, self.rate_factor)

    def count(self, batch: Any) -> int:
        """Tokens of a batch of token numbers where tokens are counted; else its rows."""
        return count(batch) if self.unit == "tokens" else rows_of(batch)

    def count_step(self, batch: Any, output: StepOutput, passes: int = 1) -> StepOutput:
        """What follows on every update. passes: backward passes that it took."""
        if self.average is not None:
            self.average.update()
        self.meter.add(output)
        progress = self.progress
        progress.tokens += self.count(batch) * self.world.size
        progress.rows = max(progress.rows, rows_of(batch))  # the last batch of an epoch may be smaller
        progress.backward_passes += passes
        return output

    def to_device(self, batch: Any) -> Any:
        """The batch as tensors where the model is."""
        batch = own.as_tensors(batch, self.float_type)
        if self.device.type == "cpu":
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    def wait(self) -> None:
        """The device has done all steps that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def untimed(self) -> AbstractContextManager[None]:
        """Not charged to the run; what the device still has to do for it is."""
        self.wait()
        return self.clock.paused()

    # --- memory ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give back what the next step makes anew: gradients, recorded graphs, and memory that is only cached."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step that failed may have left work on another stream
        self.optimizer.zero_grad(set_to_none=True)
        self.execution.forget()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def use(self, settings: Config) -> None:
        """Go on with other settings of how a step is executed."""
        self.full_step.accumulation = settings.accumulation_steps
        self.execution.cuda_graph = settings.engine.cuda_graph
        self.recomputing.use(settings.engine.activation_checkpointing)
        self.execution.forget()

    # --- forward passes that moves ask for ---------------------------------------------------------------------------

    def gradient(self, batch: Any) -> Tensor:
        """Forward and backward alone: the loss, and gradients on the parameters."""
        loss = self.execution.gradient(batch)
        return loss if self.world.size == 1 else self.world.reduce(loss.double(), "replicated").float()

    def probe(self, batch: Any) -> float:
        """Loss of a training batch at the weights as they are, forward only, in the parts that a full step has."""
        return self.forward.probe(batch)

    def probe_all(self, batches: list[Any]) -> float:
        """Mean loss over several batches, each as it is."""
        return self.forward.probe_all(batches)

    # --- the whole state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on. Tensors are referred to, not copied."""
        spent = {"meter": self.meter.state_dict(), "seconds": self.clock.seconds}
        weights = block_weights(self.objective)
        blocks = {} if weights is None else {"block_weights": weights}
        return self.changing_state_dict() | spent | blocks | {"frozen": self.frozen, "format": FORMAT}

    def changing_state_dict(self) -> dict[str, Any]:
        """Leave out what was spent and the fingerprint of frozen weights, which takes long. It is enough to go back in
        the same run."""
        return state.of_run(self)

    def weights_state_dict(self) -> dict[str, Any]:
        """What was learned, and nothing of how: enough for `load_weights`."""
        return state.of_weights(self) | {"frozen": self.frozen}

    def load_weights(self, weights: dict[str, Any], origin: str = "the given state") -> None:
        """Weights, buffers and averages of a state, in place; all else stays."""
        with state.as_checkpoint_error(origin):
            state.load_weights(self, weights, origin)

    def put_back(self, saved: dict[str, Any], origin: str) -> None:
        """What `state_dict` gave, in place. `freeze_as_saved` follows when all else is there."""
        state.put_back(self, saved, origin)

    def freeze_as_saved(self, saved: dict[str, Any]) -> None:
        """What was frozen or unfrozen just before the state was saved: the next step notices, as it would have then."""
        self.trained.want(saved["trained"]["wanted"])

    def rewind(self, snapshot: dict[str, Any]) -> None:
        """Back to an earlier state of this run, bit for bit; what was spent in between stays spent."""
        state.rewind(self, snapshot)

    def check_optimizer_state(self) -> None:
        """That it can be saved and taken back. Asked after the first step, when there is one, and not hours later."""
        optim.plain_state(self.optimizer)

    @property
    def frozen(self) -> str:
        """What the weights are that this run does not train, so that it goes on with the same ones only; empty if there
        are none."""
        return self._fingerprint.of(self.trained.never())

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model at averaged weights inside the block, if `evaluation.ema_decay` is set."""
        return self.forward.averaged_weights()


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss by the model's own method, also where DistributedDataParallel is around the model."""
    found = loss_through(model, batch)
    if found is not None:
        return found
    loss = getattr(model, "loss", None)
    if loss is None:
        raise ConfigError(f"{type(model).__name__} has no method loss(batch); pass a loss_fn to HybridTrainer")
    value: Tensor = loss(batch)
    return value
