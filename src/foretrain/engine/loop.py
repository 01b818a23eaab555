"""The engine of a run: model, optimizer, one full step, evaluation, and the state of all that. It knows no phases."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor, nn

from foretrain.config import Config, given
from foretrain.engine import optim, own
from foretrain.engine.averaging import WeightAverage
from foretrain.engine.described import is_configured
from foretrain.engine.form import check_form
from foretrain.engine.graph import GraphedGradient, GraphedLoss, GraphedStep, launch_bound
from foretrain.engine.meters import StepMeter, Stopwatch
from foretrain.engine.offload import OptimizerParking
from foretrain.engine.precision import Precision, choose_device
from foretrain.engine.rates import FollowedRates, Rates, ScheduledRates, check_scheduler
from foretrain.engine.state import (
    changing_state,
    checksum,
    frozen_weights,
    random_state,
    restore_model,
    restore_optimizer,
    restore_random_state,
    seed_random,
)
from foretrain.engine.step import (
    FullStep,
    LossFunction,
    StepOutput,
    map_tensors,
    part_weights,
    rows_of,
    split,
    tensors_of,
)
from foretrain.errors import CheckpointError, ConfigError, InputError, is_out_of_memory

_COUNTS = ("global_step", "position", "tokens", "backward_passes", "evaluations_without_best")
_LOSSES = ("best_val_loss", "last_val_loss", "last_train_loss")
HELD_OUT_RECORD = ("best_val_loss", "best_step", "last_val_loss", "evaluations_without_best")
"""What evaluations leave behind; those of weights that were taken back do not count."""


class Engine:
    """Any module, any optimizer, a loss function `(model, batch) -> mean loss`, and a configuration."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: own.OptimizerLike,
        loss_fn: own.Measure | None,
        config: Config,
        scheduler: Any = None,
    ) -> None:
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
        self.loss_fn: LossFunction = own_loss if loss_fn is None else own.as_loss(loss_fn, self.device)
        self._float_type = own.float_type(self.model)
        self.precision = Precision(config.precision, self.device)
        self.rate = self._rates(scheduler)
        self.clip = config.optimizer.gradient_clip_norm
        """Without what recovery makes of it."""
        if self.own_optimizer and "optimizer.gradient_clip_norm" not in given(config):
            self.clip = 0.0
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
        )
        self.away: OptimizerParking | None = None
        """The optimizer's state leaves the device while nothing needs it."""
        if config.memory.offload and config.hybrid.mode != "off":
            self.away = OptimizerParking(self.optimizer, self.full_step.parameters, self.device)
        self.rate_factor = 1.0
        """What recovery makes of the scheduled learning rate."""
        self.backward_passes = 0
        self.probe_tokens = 0
        """Tokens (or samples) of forward passes that probed a move."""
        self.cuda_graph = config.engine.cuda_graph
        self._run_step: Callable[[Any], StepOutput] | None = None
        self._run_gradient: GraphedGradient | None = None
        self._run_loss: GraphedLoss | None = None
        self._loss_takes_derivatives = False
        self.meter = StepMeter(lagging=self.device.type == "cuda")
        self.clock = Stopwatch()
        self.global_step = 0
        self.tokens = 0
        """Or samples: what `unit` says."""
        self.unit = "tokens" if is_configured(self.model) else "samples"
        self.rows = 0
        """Of the largest batch so far."""
        self.position = 0
        self.best_val_loss: float | None = None
        self.best_step: int | None = None
        """Where it was measured."""
        self.evaluations_without_best = 0
        self.evaluation_due = False
        """An evaluation was begun and is not finished: a run that is resumed makes it first."""
        self.last_val_loss: float | None = None
        self.last_train_loss: float | None = None
        self.last_metrics: dict[str, float] = {}

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
    def planned_steps(self) -> int:
        """Length of the run; without an end it is taken to go on for as long again as it has been."""
        return self.config.max_steps if self.has_end else max(self.config.max_steps, 2 * self.global_step)

    def end_at(self, max_steps: int) -> None:
        """From now on it is known how long the run is."""
        self.config = self.config.model_copy(update={"max_steps": max_steps, "epochs": None})
        self.has_end = True
        self.rate.end_at(max_steps)

    # --- one full step -----------------------------------------------------------------------------------------------

    def full(self, batch: Any, between: Callable[[], None] | None = None) -> StepOutput:
        """Forward, backward, update on a batch that is on the device. Never waits for the device.

        between: called when the gradients are there and nothing is updated yet.
        """
        with self.rate.during(self.global_step, self.rate_factor):
            if between is not None:
                output = self.full_step(batch, between, self.gradient)
            else:
                if self._run_step is None:
                    self._run_step = self._choose_step(batch)
                output = self._run_step(batch)
        return self.count_step(batch, output)

    def update(self, loss: Tensor) -> StepOutput:
        """The optimizer's step with the gradients that are there."""
        with self.rate.during(self.global_step, self.rate_factor):
            return self.full_step.update(loss)

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
        self.tokens += self.count(batch)
        self.rows = max(self.rows, rows_of(batch))  # the last batch of an epoch may be smaller
        self.backward_passes += 1
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

    def set_clip(self, clip: float) -> None:
        """Change the clipping of gradients in mid-run."""
        if clip != self.full_step.clip:
            self.full_step.clip = clip
            self._run_step = None  # a recorded graph has the old value in it

    def _choose_step(self, batch: Any) -> Callable[[Any], StepOutput]:
        """The step as it is, or recorded as a CUDA graph where launches dominate."""
        wanted = self.cuda_graph
        draws_again = getattr(self.model, "draws_again", False)
        possible = self.device.type == "cuda" and self.full_step.device_skip and not draws_again
        possible = possible and self.away is None  # a graph is bound to addresses: its tensors cannot leave
        possible = possible and (not self.own_optimizer or optim.can_be_recorded(self.optimizer))
        if wanted is True and not possible:
            raise ConfigError(
                "engine.cuda_graph = true needs a CUDA GPU, a fused optimizer (adamw, adam, sgd or muon; one of your "
                "own with lr=torch.tensor(...) on the GPU and capturable=True), no dropout in blocks that "
                "engine.activation_checkpointing recomputes, and memory.offload = false; use 'auto'"
            )
        parameters = sum(p.numel() for p in self.full_step.parameters)
        if possible and _switch(wanted, auto=launch_bound(parameters, batch)):
            return GraphedStep(self.full_step)
        return self.full_step

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
    def measure(self, batches: Iterable[Any], metrics: Mapping[str, own.Measure]) -> dict[str, float]:
        """Mean of each metric over all rows of `batches`, at the weights that evaluations are made at."""
        if not metrics:
            return {}
        total, rows = torch.zeros(len(metrics), dtype=torch.double), 0
        with self.averaged_weights(), self.evaluating(), torch.set_grad_enabled(self._loss_takes_derivatives):
            for batch in map(self.to_device, batches):
                with self.precision.autocast():
                    values = own.measured(metrics, self.model, batch)
                total += rows_of(batch) * torch.stack(values).cpu()
                rows += rows_of(batch)
        return dict(zip(metrics, (total / max(1, rows)).tolist(), strict=True))

    def probe(self, batch: Any) -> float:
        """Loss of a training batch at the weights as they are, forward only, in the parts that a full step has."""
        self.probe_tokens += self.count(batch)
        pieces = self.full_step.accumulation
        parts = [batch] if pieces == 1 else [split(batch, pieces, index) for index in range(pieces)]
        with self.precision.predicting():
            return float(self.forward_loss([part for part in parts if rows_of(part)]))

    def probe_all(self, batches: list[Any]) -> float:
        """Mean loss over several batches, each as it is."""
        self.probe_tokens += sum(self.count(batch) for batch in batches)
        with self.precision.predicting():
            return float(self.forward_loss(batches))

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
        return self.changing_state_dict() | {"frozen": self.frozen}

    def changing_state_dict(self) -> dict[str, Any]:
        """The same without the fingerprint of frozen weights, which takes long: enough to go back in the same run."""
        return {
            "model": changing_state(self.model),
            "optimizer": optim.plain_state(self.optimizer),
            "average": self.average.state_dict() if self.average is not None else None,
            "precision": self.precision.state_dict(),
            "rates": self.rate.state_dict(),
            "random": random_state(),
            "progress": {
                **{name: getattr(self, name) for name in _COUNTS + _LOSSES},
                "probe_tokens": self.probe_tokens,
                "best_step": self.best_step,
                "evaluation_due": self.evaluation_due,
                "metrics": dict(self.last_metrics),
                "rows": self.rows,
                "seconds": self.clock.seconds,
                **self.meter.state_dict(),
            },
        }

    def weights_state_dict(self) -> dict[str, Any]:
        """What was learned, and nothing of how: enough for `load_weights`."""
        average = self.average.state_dict() if self.average is not None else None
        return {"model": changing_state(self.model), "average": average, "frozen": self.frozen}

    def load_weights(self, state: dict[str, Any], origin: str = "the given state") -> None:
        """Weights, buffers and averages of a state, in place; all else stays."""
        with self._as_checkpoint_error(origin):
            self._check_frozen(state, origin)
            self._put_back_weights(state, origin)

    def load_state_dict(self, state: dict[str, Any], origin: str = "the given state") -> None:
        """Put a state back, in place: afterwards every step is, bit for bit, what it would have been."""
        with self._as_checkpoint_error(origin):
            check_form(self.state_dict(), state)
            self._put_back(state, origin)

    @staticmethod
    @contextmanager
    def _as_checkpoint_error(origin: str) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"{origin}: it does not hold the state of such a trainer ({type(error).__name__}: {error}); "
                "use the settings it was saved with, or start a new run"
            ) from error

    def rewind(self, state: dict[str, Any]) -> None:
        """Back to an earlier state of this run, bit for bit; what was spent in between stays spent."""
        self.full_step.changing = True
        rates = self.rate.own_numbers()
        self._put_back_training(state, "the snapshot")
        self.rate.put_back(rates)
        self.full_step.changing = False
        if not state["optimizer"]["state"]:  # of before the first step: its tensors are made anew
            self._run_step = self._run_gradient = self._run_loss = None
        self.global_step, self.position = (int(state["progress"][name]) for name in ("global_step", "position"))

    def _put_back_training(self, state: dict[str, Any], origin: str) -> None:
        """Weights, optimizer, average, loss scale and random states."""
        if self.away is not None:
            self.away.back()
        self._put_back_weights(state, origin)
        keep = not self.own_optimizer and isinstance(self.rate, ScheduledRates)
        restore_optimizer(self.optimizer, state["optimizer"], origin, keep_settings=keep)
        self.precision.load_state_dict(state["precision"])
        restore_random_state(state["random"])
        self.rate.load_state_dict(state.get("rates") or {})
        self.rate.forget()

    def _put_back_weights(self, state: dict[str, Any], origin: str) -> None:
        restore_model(self.model, state["model"], origin)
        if (self.average is None) != (state["average"] is None):
            raise CheckpointError(f"{origin}: evaluation.ema_decay was switched on or off since; use the same setting")
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    @cached_property
    def frozen(self) -> str:
        """What the frozen weights are, so that a run goes on with the same ones only; empty if there are none."""
        weights = frozen_weights(self.model)
        return checksum(weights) if weights else ""

    def _check_frozen(self, state: dict[str, Any], origin: str) -> None:
        if state["frozen"] != self.frozen:
            raise CheckpointError(
                f"{origin}: its frozen weights are not those of this model; start from the same weights, and freeze "
                "the same ones"
            )

    def _put_back(self, state: dict[str, Any], origin: str) -> None:
        self._check_frozen(state, origin)
        self._put_back_training(state, origin)
        progress = state["progress"]
        self.clock = Stopwatch(float(progress["seconds"]))
        self.meter.load_state_dict(progress)
        self.probe_tokens = int(progress.get("probe_tokens", 0))
        self.best_step = progress.get("best_step")  # not there in older checkpoints
        self.evaluation_due = bool(progress.get("evaluation_due", False))
        self.last_metrics = dict(progress.get("metrics", {}))
        self.rows = int(progress.get("rows", 0))
        for name in _COUNTS:
            if (count := int(progress[name])) < 0:
                raise ValueError(f"{name} = {count}")
            setattr(self, name, count)
        for name in _LOSSES:
            setattr(self, name, None if progress[name] is None else float(progress[name]))


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = getattr(model, "loss", None)
    if loss is None:
        raise ConfigError(f"{type(model).__name__} has no method loss(batch); pass a loss_fn to HybridTrainer")
    value: Tensor = loss(batch)
    return value


def _switch(setting: bool | str, auto: bool) -> bool:
    return auto if setting == "auto" else bool(setting)


def count(batch: Any) -> int:
    """Tokens of a batch of token numbers, samples of any other batch."""
    tensors = tensors_of(batch)
    if not tensors:
        return 1
    first = tensors[0]
    return first.numel() if first.ndim == 2 and not first.is_floating_point() else first.shape[0] if first.ndim else 1
