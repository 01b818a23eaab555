"""HybridTrainer: `step()` for your own loop, `fit()` for a whole run.

The trainer runs the FULL phase: forward, backward, update. The predicted phases will be added around it here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain import environment
from foretrain.config import Config, to_mapping
from foretrain.engine import optim, schedule
from foretrain.engine.averaging import WeightAverage
from foretrain.engine.graph import GraphedStep, launch_bound
from foretrain.engine.meters import StepMeter, Stopwatch
from foretrain.engine.precision import Precision, choose_device
from foretrain.engine.runfolder import RunFolder
from foretrain.engine.signals import StopRequest
from foretrain.engine.state import random_state, restore_model, restore_optimizer, restore_random_state, seed_random
from foretrain.engine.step import FullStep, LossFunction, StepOutput, map_tensors, part_weights, tensors_of
from foretrain.errors import CheckpointError, ConfigError, InputError
from foretrain.events import Bus
from foretrain.fit import Run
from foretrain.show.console import Console
from foretrain.show.jsonl import JsonlLog

_COUNTS = ("global_step", "position", "tokens", "evaluations_without_best")
_LOSSES = ("best_val_loss", "last_val_loss", "last_train_loss")


def supervised(criterion: Callable[[Tensor, Tensor], Tensor]) -> LossFunction:
    """Loss function for batches of (inputs, targets): `supervised(torch.nn.functional.cross_entropy)`."""
    return lambda model, batch: criterion(model(batch[0]), batch[1])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. Reading `loss` or `gradient_norm` waits for the device; not reading costs nothing."""

    phase: str
    global_step: int
    """Steps done so far, this one included."""
    learning_rate: float
    output: StepOutput

    @property
    def loss(self) -> float:
        return float(self.output.loss)

    @property
    def gradient_norm(self) -> float:
        return float(self.output.gradient_norm)

    @property
    def skipped(self) -> bool:
        """True when the step was not finite and changed nothing."""
        return bool(self.output.skipped)


class HybridTrainer:
    """Trains any module with any optimizer and a loss function `(model, batch) -> mean loss`.

    Without an optimizer the configuration's is built; without a loss function `model.loss(batch)` is called.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loss_fn: LossFunction | None = None,
        config: Config | None = None,
        *,
        bus: Bus | None = None,
    ) -> None:
        self.config = config = config or Config()
        self.bus = bus or Bus()
        self.device = choose_device(config.device)
        if config.engine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to repeat itself
            torch.use_deterministic_algorithms(True)
        seed_random(config.seed)
        self.model = model.to(self.device)
        self.model.train()
        self._optimizer_is_configured = optimizer is None
        self.optimizer = optimizer or optim.build(self.model, config.optimizer)
        self.loss_fn = loss_fn or _own_loss
        self.precision = Precision(config.precision, self.device)
        self.rate = optim.RateControl(self.optimizer)
        self.schedule = schedule.build(config.schedule, self.rate.peak, config.max_steps)
        self.average = WeightAverage(self.model, config.evaluation.ema_decay) if config.evaluation.ema_decay else None
        self.full_step = FullStep(
            self.model,
            self.optimizer,
            self.loss_fn,
            self.precision,
            clip=config.optimizer.gradient_clip_norm,
            accumulation=config.accumulation_steps,
            nan_check=config.guard.nan_check,
            compile_loss=_switch(config.engine.compile, auto=self.device.type == "cuda"),
        )
        self._run_step: Callable[[Any], StepOutput] | None = None
        self.meter = StepMeter()
        self.clock = Stopwatch()
        self.global_step = 0
        self.tokens = 0
        self.position = 0
        self.best_val_loss: float | None = None
        self.evaluations_without_best = 0
        self.last_val_loss: float | None = None
        self.last_train_loss: float | None = None

    # --- one step ----------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """One full step on `batch`. Never waits for the device."""
        batch = self._to_device(batch)
        rate = self.schedule(self.global_step)
        self.rate.set(rate)
        if self._run_step is None:
            self._run_step = self._choose_step(batch)
        output = self._run_step(batch)
        if self.average is not None:
            self.average.update()
        self.meter.add(output)
        self.tokens += _count(batch)
        self.global_step += 1
        return StepResult("full", self.global_step, rate, output)

    def _to_device(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    def _choose_step(self, batch: Any) -> Callable[[Any], StepOutput]:
        """The step as it is, or recorded as a CUDA graph where launches dominate."""
        wanted = self.config.engine.cuda_graph
        possible = self.device.type == "cuda" and self.full_step.device_skip
        if wanted is True and not possible:
            raise ConfigError(
                "engine.cuda_graph = true needs a CUDA GPU and a fused optimizer (adamw, adam, sgd or muon); use 'auto'"
            )
        parameters = sum(p.numel() for p in self.full_step.parameters)
        if possible and _switch(wanted, auto=launch_bound(parameters, batch)):
            return GraphedStep(self.full_step)
        return self.full_step

    # --- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        """Mean loss over `batches`, each weighed by what it counts; at averaged weights if there is an average."""
        batches = list(batches)
        if not batches:
            raise InputError("evaluation needs at least one held-out batch")
        weights = part_weights(batches, self.device)
        total = torch.zeros((), device=self.device)
        self.model.eval()
        try:
            with self.averaged_weights():
                for batch, weight in zip(batches, weights, strict=True):
                    total = total + self.full_step.loss(self._to_device(batch)).float() * weight.to(self.device)
        finally:
            self.model.train()
        return float(total)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model at averaged weights inside the block, if `evaluation.ema_decay` is set."""
        return self.average.applied() if self.average is not None else nullcontext()

    # --- the whole state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on. Tensors are referred to, not copied."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict() if self.average is not None else None,
            "precision": self.precision.state_dict(),
            "random": random_state(),
            "progress": {
                **{name: getattr(self, name) for name in _COUNTS + _LOSSES},
                "seconds": self.clock.seconds,
                "skipped": self.meter.skipped,
                "skipped_in_a_row": self.meter.skipped_in_a_row,
                "unread": self.meter.unread,
            },
        }

    def load_state_dict(self, state: dict[str, Any], origin: str = "the given state") -> None:
        """Put a state back, in place: afterwards every step is, bit for bit, what it would have been."""
        try:
            self._put_back(state, origin)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{origin}: it does not hold the state of such a trainer ({type(error).__name__}: {error}); "
                "use the settings it was saved with, or start a new run"
            ) from error

    def _put_back(self, state: dict[str, Any], origin: str) -> None:
        restore_model(self.model, state["model"], origin)
        restore_optimizer(self.optimizer, state["optimizer"], origin, keep_settings=self._optimizer_is_configured)
        if (self.average is None) != (state["average"] is None):
            raise CheckpointError(f"{origin}: evaluation.ema_decay was switched on or off since; use the same setting")
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.precision.load_state_dict(state["precision"])
        restore_random_state(state["random"])
        self.rate.forget()
        progress = state["progress"]
        self.clock = Stopwatch(float(progress["seconds"]))
        self.meter = StepMeter(progress["skipped"], progress["skipped_in_a_row"], progress["unread"])
        for name in _COUNTS:
            setattr(self, name, int(progress[name]))
        for name in _LOSSES:
            setattr(self, name, None if progress[name] is None else float(progress[name]))

    # --- a whole run -------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        held_out: Iterable[Any] | None = None,
        *,
        out: str | Path | RunFolder | None = None,
        resume: bool = False,
        progress: bool = True,
        title: str = "",
        details: dict[str, str] | None = None,
        data_fingerprint: str = "",
    ) -> dict[str, Any]:
        """Train to `max_steps` with progress, evaluation, checkpoints and a log; returns the summary.

        loader: batches. One with `seek(position)` (such as `foretrain.Loader`) resumes at once; any other iterable is
        read again from its start up to the saved position. out: the run folder; without one nothing is written.
        """
        with ExitStack() as stack:
            folder = (
                out if isinstance(out, RunFolder) or out is None else stack.enter_context(RunFolder(Path(out), resume))
            )
            if progress:
                console = Console()
                stack.callback(self.bus.subscribe(console))
                stack.callback(console.close)
            if folder is not None:
                log = JsonlLog(folder.metrics)
                stack.callback(self.bus.subscribe(log))
                stack.callback(log.close)
            stop = stack.enter_context(StopRequest())
            run = Run(self, folder, list(held_out) if held_out is not None else [], stop, data_fingerprint)
            return run.train(loader, resume, title, details or {})

    def summary(self) -> dict[str, Any]:
        """What the run did so far."""
        seconds = self.clock.seconds
        summary = {
            "final_val_loss": self.last_val_loss,
            "final_train_loss": self.last_train_loss,
            "best_val_loss": self.best_val_loss,
            "steps": self.global_step,
            "tokens": self.tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(self.tokens / seconds, 1) if seconds else None,
            "skipped_steps": self.meter.skipped,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "precision": self.precision.name,
            "config": to_mapping(self.config),
            "environment": environment.describe(str(self.device)),
        }
        if self.device.type == "cuda":
            summary["peak_memory_mb"] = round(torch.cuda.max_memory_allocated(self.device) / 2**20, 1)
        return summary


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = getattr(model, "loss", None)
    if loss is None:
        raise ConfigError(f"{type(model).__name__} has no method loss(batch); pass a loss_fn to HybridTrainer")
    value: Tensor = loss(batch)
    return value


def _switch(setting: bool | str, auto: bool) -> bool:
    return auto if setting == "auto" else bool(setting)


def _count(batch: Any) -> int:
    """Tokens of a batch of token numbers, samples of any other batch."""
    tensors = tensors_of(batch)
    if not tensors:
        return 1
    first = tensors[0]
    return first.numel() if first.ndim == 2 and not first.is_floating_point() else first.shape[0] if first.ndim else 1
