"""The engine of a run: model, optimizer, one full step, evaluation, and the state of all that. It knows no phases."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor, nn

from foretrain.config import Config, given
from foretrain.engine import own
from foretrain.engine.average import WeightAverage
from foretrain.engine.batch import count, map_tensors, part_weights, rows_of, split
from foretrain.engine.described import is_configured
from foretrain.engine.fence import Failure, Fence, OwnCodeError, failure_of, same_model
from foretrain.engine.graphs import GraphedGradient, GraphedLoss, GraphedStep, launch_bound
from foretrain.engine.hooks import StepHook
from foretrain.engine.memory.offload import OptimizerParking
from foretrain.engine.meters import StepMeter, Stopwatch
from foretrain.engine.metrics import measured
from foretrain.engine.optim import build as optim
from foretrain.engine.precision import Precision, choose_device
from foretrain.engine.progress import RunProgress
from foretrain.engine.rates import FollowedRates, Rates, RateSource, ScheduledRates, check_scheduler
from foretrain.engine.sparse import check_sparse
from foretrain.engine.step import FullStep, LossFunction, StepOutput
from foretrain.engine.trained import Change, TrainedWeights, arranged
from foretrain.engine.world import World
from foretrain.errors import CheckpointError, ConfigError, InputError, is_out_of_memory
from foretrain.persist.codec import (
    changing_state,
    check_groups,
    check_model,
    checksum,
    left_out,
    random_state,
    restore_model,
    restore_optimizer,
    restore_random_state,
    seed_random,
)
from foretrain.persist.form import FORMAT
from foretrain.persist.stateful import StateError, entry


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
        self.world = world or World()
        optimizer, config = own.with_named_optimizer(optimizer, config)
        self.config = config
        self._max_steps_given = "max_steps" in config.model_fields_set
        self.has_end = bool({"max_steps", "schedule"} & config.model_fields_set) and config.epochs is None
        """Somebody said how long the run is: else it goes on for as long as steps are made, and no rate decays."""
        self.device = choose_device(config.device)
        if config.engine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to repeat itself
            torch.use_deterministic_algorithms(True)
        seed_random(config.seed)
        self.model = own.ready_to_train(model).to(self.device)
        self.own_optimizer = optimizer is not None
        self.optimizer = (
            optim.build(self.model, config.optimizer)
            if optimizer is None
            else own.built_optimizer(optimizer, self.model, config)
        )
        check_sparse(self.model, self.optimizer)
        self.loss_fn: LossFunction = own_loss if loss_fn is None else own.as_loss(loss_fn, self.device)
        self._float_type = own.float_type(self.model)
        self.precision = Precision(config.precision, self.device)
        self.rate = self._rates(scheduler)
        self.clip = config.optimizer.gradient_clip_norm
        """Without what the rate sources make of it; 0: none."""
        if self.own_optimizer and "optimizer.gradient_clip_norm" not in given(config):
            self.clip = 0.0
        self.trained = TrainedWeights(self.model, self.optimizer)
        self.average = WeightAverage(self.model, config.evaluation.ema_decay) if config.evaluation.ema_decay else None
        self.full_step = FullStep(
            self.model,
            self.optimizer,
            self.loss_fn,
            self.precision,
            clip=self.clip,
            accumulation=config.accumulation_steps,
            nan_check=config.guard.nan_check,
            compile_loss=_switch(config.engine.compile, auto=self.device.type == "cuda"),
            update_in_backward=config.engine.update_in_backward,
            parameters=self.trained.parameters,
        )
        self.away: OptimizerParking | None = None
        """The optimizer's state leaves the device while nothing needs it."""
        if config.memory.offload and config.hybrid.mode != "off":
            self.away = OptimizerParking(self.optimizer, self.full_step.parameters, self.device)
        self.hooks: tuple[StepHook, ...] = ()
        """They watch every full step."""
        self.rate_sources: tuple[RateSource, ...] = ()
        """All that changes the scheduled learning rate and the configured clipping."""
        self._steady: tuple[float, float] | None = None
        self.cuda_graph = config.engine.cuda_graph
        self._run_step: Callable[[Any], StepOutput] | None = None
        self._run_gradient: GraphedGradient | None = None
        self._run_loss: GraphedLoss | None = None
        self._loss_takes_derivatives = False
        self.meter = StepMeter(lagging=self.device.type == "cuda")
        self.clock = Stopwatch()
        self.progress = RunProgress()
        self.unit = "tokens" if is_configured(self.model) else "samples"
        """What `progress.tokens` counts."""
        self.fence = Fence()
        self.first_trained: Callable[[dict[str, nn.Parameter]], None] = lambda weights: None
        """Called with weights that are about to be trained for the first time in this run, which nobody saved so far.
        Set by `fit`."""
        self.on_cover: list[Callable[[], None]] = []
        """Called when other weights are trained than before."""
        self._frozen: tuple[list[str], str] | None = None

    # --- how far the run is, as others ask for it -------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        return self.progress.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.progress.global_step = step

    @property
    def position(self) -> int:
        return self.progress.position

    @position.setter
    def position(self, position: int) -> None:
        self.progress.position = position

    @property
    def backward_passes(self) -> int:
        return self.progress.backward_passes

    @backward_passes.setter
    def backward_passes(self, passes: int) -> None:
        self.progress.backward_passes = passes

    @property
    def probe_tokens(self) -> int:
        return self.progress.probe_tokens

    @probe_tokens.setter
    def probe_tokens(self, tokens: int) -> None:
        self.progress.probe_tokens = tokens

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
        if self.average is not None:
            self.average.cover(self.trained.ever, self.trained.names)
        if self.full_step.in_backward is not None:
            self.full_step.in_backward.cover(self.trained.parameters)
        self._run_step = self._run_gradient = self._run_loss = None  # recorded with others
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

    def end_at(self, max_steps: int) -> None:
        """From now on it is known how long the run is."""
        self.config = self.config.model_copy(update={"max_steps": max_steps, "epochs": None})
        self.has_end = True
        self.rate.end_at(max_steps)

    # --- one full step -----------------------------------------------------------------------------------------------

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
                output = self.full_step(batch, curious, self.gradient)
            else:
                if self._run_step is None:
                    self._run_step = self._choose_step(batch)
                output = self._run_step(batch)
        self.count_step(batch, output)
        for hook in reversed(hooks):
            hook.after_step(output)
        self.progress.global_step += 1
        self.full_step.changing = False
        return output

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
            self._run_step = None  # a recorded graph has the old value in it
        return self.rate.during(self.progress.global_step, self.rate_factor)

    def gradient(self, batch: Any) -> Tensor:
        """Forward and backward alone: the loss, and gradients on the parameters. Recorded where whole steps are."""
        if self._run_gradient is None:
            if not (isinstance(self._run_step, GraphedStep) and self._run_step.recorded):
                return self.full_step.gradient(batch)
            self._run_gradient = GraphedGradient(self.full_step)
        return self._run_gradient(batch)

    def count(self, batch: Any) -> int:
        """Tokens of a batch of token numbers where tokens are counted; else its rows."""
        return count(batch) if self.unit == "tokens" else rows_of(batch)

    def count_step(self, batch: Any, output: StepOutput) -> StepOutput:
        """What follows on every update."""
        if self.average is not None:
            self.average.update()
        self.meter.add(output)
        progress = self.progress
        progress.tokens += self.count(batch)
        progress.rows = max(progress.rows, rows_of(batch))  # the last batch of an epoch may be smaller
        progress.backward_passes += 1
        return output

    def to_device(self, batch: Any) -> Any:
        """The batch as tensors where the model is."""
        batch = own.as_tensors(batch, self._float_type)
        if self.device.type == "cpu":
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    def untimed(self) -> AbstractContextManager[None]:
        """Not charged to the run; what the device still has to do for it is."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock.paused()

    def _choose_step(self, batch: Any) -> Callable[[Any], StepOutput]:
        """The step as it is, or recorded as a CUDA graph where launches dominate."""
        possible = self.check_recording()
        parameters = sum(p.numel() for p in self.full_step.parameters)
        if possible and _switch(self.cuda_graph, auto=launch_bound(parameters, batch)):
            return GraphedStep(self.full_step)
        return self.full_step

    def check_recording(self) -> bool:
        """Whether a step can be recorded as a CUDA graph; refuses where it cannot, and must."""
        draws_again = getattr(self.model, "draws_again", False)
        possible = self.device.type == "cuda" and self.full_step.device_skip and not draws_again
        possible = possible and self.away is None  # a graph is bound to addresses: its tensors cannot leave
        possible = possible and (not self.own_optimizer or optim.can_be_recorded(self.optimizer))
        if self.cuda_graph is True and not possible:
            raise ConfigError(
                "engine.cuda_graph = true needs a CUDA GPU, a fused optimizer (adamw, adam, sgd or muon; one of your "
                "own with lr=torch.tensor(...) on the GPU and capturable=True), no dropout in blocks that "
                "engine.activation_checkpointing recomputes, and memory.offload = false; use 'auto'"
            )
        return possible

    # --- memory ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give back what the next step makes anew: gradients, recorded graphs, and memory that is only cached."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step that failed may have left work on another stream
        self.optimizer.zero_grad(set_to_none=True)
        self._run_step = self._run_gradient = self._run_loss = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def use(self, settings: Config) -> None:
        """Go on with other settings of how a step is executed."""
        self.full_step.accumulation = settings.accumulation_steps
        self.cuda_graph = settings.engine.cuda_graph
        if hasattr(self.model, "activation_checkpointing"):
            setattr(self.model, "activation_checkpointing", settings.engine.activation_checkpointing)  # noqa: B010
        self._run_step = self._run_gradient = self._run_loss = None  # recorded as they were before

    # --- forward only ------------------------------------------------------------------------------------------------

    @overload
    def evaluate(self, batches: Iterable[Any]) -> float: ...

    @overload
    def evaluate(self, batches: Iterable[Any], metrics: Mapping[str, own.Measure]) -> dict[str, float]: ...

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Any], metrics: Mapping[str, own.Measure] | None = None
    ) -> float | dict[str, float]:
        """Mean loss over `batches`, each weighed by what it counts; at averaged weights if there is an average.

        metrics: functions of (model, batch) or (output, target) by name; then the result is a dict of the loss and
        their means over all rows.
        """
        if metrics is not None:
            own.check_metrics(metrics)
            batches = list(batches)
            return {"loss": self.evaluate(batches), **self.measure(batches, metrics)}
        batches = [own.as_tensors(batch, self._float_type) for batch in batches]
        if not batches:
            raise InputError("evaluation needs at least one held-out batch")
        if not isinstance(self._run_step, GraphedStep):
            self.optimizer.zero_grad(set_to_none=True)  # the next step makes gradients anew
        with self.averaged_weights():
            return float(self.forward_loss(batches))

    @torch.no_grad()
    def measure(
        self,
        batches: Iterable[Any],
        metrics: Mapping[str, own.Measure],
        failed: Callable[[str, Failure], None] | None = None,
    ) -> dict[str, float]:
        """Mean of each metric over all rows of `batches`, at the weights that evaluations are made at, which no metric
        changes.

        failed: is told the name of a metric that fails, which is then no number; without it InputError is raised.
        """
        if not metrics:
            return {}
        total, rows, running = dict.fromkeys(metrics, 0.0), 0, dict(metrics)
        derivatives = torch.set_grad_enabled(self._loss_takes_derivatives)
        with self.averaged_weights(), same_model(self.model) as changed, self.evaluating(), derivatives:
            for batch in map(self.to_device, batches):
                with self.precision.autocast():
                    for name, value in measured(running, self.model, batch, self.fence if failed else None):
                        if not isinstance(value, Failure):
                            total[name] += rows_of(batch) * value
                        elif failed is not None:
                            failed(name, value)
                            del running[name]
                rows += rows_of(batch)
        if changed and failed is not None:
            names = " or ".join(f"the metric {name!r}" for name in metrics)
            text = f"it changed weights, {changed[0]} among them; they are put back"
            failed("", Failure(names, text, ""))
        return {name: total[name] / max(1, rows) if name in running else math.nan for name in metrics}

    def probe(self, batch: Any) -> float:
        """Loss of a training batch at the weights as they are, forward only, in the parts that a full step has."""
        self.progress.probe_tokens += self.count(batch)
        pieces = self.full_step.accumulation
        parts = [batch] if pieces == 1 else [split(batch, pieces, index) for index in range(pieces)]
        with self._probing():
            return float(self.forward_loss([part for part in parts if rows_of(part)]))

    def probe_all(self, batches: list[Any]) -> float:
        """Mean loss over several batches, each as it is."""
        self.progress.probe_tokens += sum(self.count(batch) for batch in batches)
        with self._probing():
            return float(self.forward_loss(batches))

    @contextmanager
    def _probing(self) -> Iterator[None]:
        """A loss that fails here, though steps are made with it, costs the move and not the run."""
        try:
            with self.precision.predicting():
                yield
        except Exception as error:
            if is_out_of_memory(error) or self.progress.backward_passes == 0:
                raise
            raise OwnCodeError(failure_of("the loss function, forward only on a probe,", error)) from error

    @torch.no_grad()
    def forward_loss(self, batches: list[Any]) -> Tensor:
        """Mean loss over `batches` on the device; neither weights nor buffers nor random states change."""
        weights = part_weights(batches, self.device)
        total = torch.zeros((), device=self.device)
        with self.evaluating():
            for batch, weight in zip(batches, weights, strict=True):
                total = total + self._loss_alone(self.to_device(batch)).float() * weight.to(self.device)
        return total

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model evaluates inside the block. What a user has set to evaluate by himself stays so after it."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def _loss_alone(self, batch: Any) -> Tensor:
        """A loss that itself takes derivatives, as in physics-informed networks, needs its graph also here."""
        if not self._loss_takes_derivatives:
            if self._run_loss is None and isinstance(self._run_step, GraphedStep) and self._run_step.recorded:
                self._run_loss = GraphedLoss(self.full_step, self._run_step.pool)
            try:
                return (self._run_loss or self.full_step.loss)(batch)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                self._loss_takes_derivatives = True
        with torch.enable_grad():
            return self.full_step.loss(batch).detach()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model at averaged weights inside the block, if `evaluation.ema_decay` is set."""
        return self.average.applied() if self.average is not None else nullcontext()

    # --- the whole state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on. Tensors are referred to, not copied."""
        return self.changing_state_dict() | {"frozen": self.frozen, "format": FORMAT}

    def check_optimizer_state(self) -> None:
        """That it can be saved and taken back. Asked after the first step, when there is one, and not hours later."""
        optim.plain_state(self.optimizer)

    def changing_state_dict(self) -> dict[str, Any]:
        """The same without the fingerprint of frozen weights, which takes long: enough to go back in the same run."""
        return {
            "model": changing_state(self.model, self.trained.never()),
            "trained": self.trained.state_dict(),
            "optimizer": optim.plain_state(self.optimizer),
            "average": self.average.state_dict() if self.average is not None else None,
            "precision": self.precision.state_dict(),
            "rates": self.rate.state_dict(),
            "random": random_state(),
            "progress": self.progress.state_dict(),
            "meter": self.meter.state_dict(),
            "seconds": self.clock.seconds,
        }

    def weights_state_dict(self) -> dict[str, Any]:
        """What was learned, and nothing of how: enough for `load_weights`."""
        average = self.average.state_dict() if self.average is not None else None
        model = changing_state(self.model, self.trained.never())
        return {"model": model, "average": average, "frozen": self.frozen}

    def load_weights(self, state: dict[str, Any], origin: str = "the given state") -> None:
        """Weights, buffers and averages of a state, in place; all else stays."""
        with as_checkpoint_error(origin):
            constant = self._checked(state, origin)
            self.trained.learned(self._names_in(state["model"]))
            if self.average is not None:
                self.average.cover(self.trained.ever, self.trained.names)
            self._put_back_weights(state, origin, constant)

    def rewind(self, state: dict[str, Any]) -> None:
        """Back to an earlier state of this run, bit for bit; what was spent in between stays spent."""
        self.full_step.changing = True
        rates = self.rate.own_numbers()
        constant = left_out(self.model, state["model"])  # what was unfrozen since may have been added to the snapshot
        saved, now = state["trained"], self.trained.groups()
        state = {**state, "optimizer": arranged(state["optimizer"], saved["groups"], self.optimizer, now)}
        self._put_back_training(state, "the snapshot", constant)
        self.rate.put_back(rates)
        self.full_step.changing = False
        if not state["optimizer"]["state"]:  # of before the first step: its tensors are made anew
            self._run_step = self._run_gradient = self._run_loss = None
        self.progress.global_step, self.progress.position = (
            int(state["progress"][name]) for name in ("global_step", "position")
        )

    def _put_back_training(self, state: dict[str, Any], origin: str, constant: Collection[str]) -> None:
        """Weights, optimizer, average, loss scale and random states. constant: weights that it does not hold."""
        if self.away is not None:
            self.away.back()
        self._put_back_weights(state, origin, constant)
        keep = not self.own_optimizer and isinstance(self.rate, ScheduledRates)
        restore_optimizer(self.optimizer, state["optimizer"], origin, keep_settings=keep)
        self.precision.load_state_dict(state["precision"])
        restore_random_state(state["random"])
        self.rate.load_state_dict(state["rates"])
        self.rate.forget()

    def _put_back_weights(self, state: dict[str, Any], origin: str, constant: Collection[str]) -> None:
        restore_model(self.model, state["model"], origin, constant)
        if (self.average is None) != (state["average"] is None):
            raise CheckpointError(f"{origin}: evaluation.ema_decay was switched on or off since; use the same setting")
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    def _names_in(self, saved: Mapping[str, Any]) -> list[str]:
        """Of the parameters that a state holds, in the model's order."""
        return [name for name, _ in self.model.named_parameters() if name in saved]

    @property
    def frozen(self) -> str:
        """What the weights are that this run does not train, so that it goes on with the same ones only; empty if there
        are none."""
        weights = self.trained.never()
        if self._frozen is None or self._frozen[0] != list(weights):
            self._frozen = (list(weights), checksum(weights) if weights else "")
        return self._frozen[1]

    def _checked(self, state: dict[str, Any], origin: str) -> Collection[str]:
        """Refuse a state of another model, or of other weights that are not trained; the names of these."""
        constant = left_out(self.model, state["model"]) if state["frozen"] else {}
        if state["frozen"] and state["frozen"] != (checksum(constant) if constant else ""):
            raise CheckpointError(
                f"{origin}: its frozen weights are not those of this model; start from the same weights, and freeze "
                "the same ones"
            )
        check_model(self.model, state["model"], origin, constant)
        return constant

    def put_back(self, state: dict[str, Any], origin: str) -> None:
        """What `state_dict` gave, in place. `freeze_as_saved` follows when all else is there."""
        constant = self._checked(state, origin)
        saved = entry(state, "trained", "Engine")
        self.trained.hold(saved["groups"], state["optimizer"]["param_groups"])
        check_groups(self.optimizer, state["optimizer"]["param_groups"], origin)
        if self.trained.put_back(saved, self._names_in(state["model"])):
            self.cover_trained()
        self._put_back_training(state, origin, constant)
        self.clock = Stopwatch(float(entry(state, "seconds", "Engine")))
        self.meter.load_state_dict(entry(state, "meter", "Engine"))
        self.progress.load_state_dict(entry(state, "progress", "Engine"))

    def freeze_as_saved(self, state: dict[str, Any]) -> None:
        """What was frozen or unfrozen just before the state was saved: the next step notices, as it would have then."""
        self.trained.want(state["trained"]["wanted"])


@contextmanager
def as_checkpoint_error(origin: str) -> Iterator[None]:
    """Whatever a state that does not fit leads to is told as one kind of error."""
    try:
        yield
    except (StateError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{origin}: it does not hold the state of such a trainer ({type(error).__name__}: {error}); "
            "use the settings it was saved with, or start a new run"
        ) from error


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = getattr(model, "loss", None)
    if loss is None:
        raise ConfigError(f"{type(model).__name__} has no method loss(batch); pass a loss_fn to HybridTrainer")
    value: Tensor = loss(batch)
    return value


def _switch(setting: bool | str, auto: bool) -> bool:
    return auto if setting == "auto" else bool(setting)
