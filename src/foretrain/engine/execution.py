"""How steps, gradients and losses are executed: as they are, or as recorded CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.graphs import WARMUP_STEPS, GraphedGradient, GraphedLoss, GraphedStep, launch_bound
from foretrain.engine.step import FullStep, StepOutput
from foretrain.errors import ConfigError


class Execution:
    """Chooses at the first batch whether steps are recorded; gradients and losses alone are recorded after them.

    recordable: nothing else than the device and the model stands against it.
    """

    def __init__(self, full_step: FullStep, cuda_graph: bool | str, recordable: bool) -> None:
        self.full_step = full_step
        self.device = full_step.device
        self.cuda_graph = cuda_graph
        self.recordable = recordable
        self._step: Callable[[Any], StepOutput] | None = None
        self._gradient: GraphedGradient | None = None
        self._loss: GraphedLoss | None = None
        self.takes_derivatives = False
        """The loss itself takes derivatives, as in physics-informed networks."""
        self.eager_steps = WARMUP_STEPS
        """Steps that run as they are before one is recorded."""
        self.tell: Callable[[str], None] = lambda text: None
        """Is told once where steps are not recorded after all."""

    @property
    def records(self) -> bool:
        """Whether steps are, or will be, replayed from a graph: inside of it nobody can count."""
        return isinstance(self._step, GraphedStep)

    def forget(self) -> None:
        """What was recorded does not hold any more."""
        self._step = self._gradient = self._loss = None

    def forget_step(self) -> None:
        self._step = None

    def step_for(self, batch: Any) -> Callable[[Any], StepOutput]:
        """What executes a whole step: chosen once, by the first batch."""
        if self._step is None:
            parameters = sum(p.numel() for p in self.full_step.parameters)
            recorded = self.check() and switch(self.cuda_graph, auto=launch_bound(parameters, batch))
            self._step = self.full_step
            if recorded:
                self._step = GraphedStep(self.full_step, self._give_up, self.eager_steps)
        return self._step

    def _give_up(self, error: Exception) -> None:
        """Steps run as they are from now on: something in them cannot be recorded."""
        what = f"the step cannot be recorded as a CUDA graph ({str(error).splitlines()[0]})"
        if self.cuda_graph is True:
            raise ConfigError(f"engine.cuda_graph = true, but {what}; use 'auto'") from error
        self.cuda_graph = False
        self.forget()
        self.tell(
            f"{what}; it runs without one, which is slower for small models. Numbers that are copied to the GPU in "
            "every step, as by u[[0, -1]], are a usual cause: make them once, on the device"
        )

    def gradient(self, batch: Any) -> Tensor:
        """Forward and backward alone: the loss, and gradients on the parameters. Recorded where whole steps are."""
        if self._gradient is None:
            if not (isinstance(self._step, GraphedStep) and self._step.recorded):
                return self.full_step.gradient(batch)
            self._gradient = GraphedGradient(self.full_step)
        return self._gradient(batch)

    def loss(self, batch: Any) -> Tensor:
        """The loss alone. One that itself takes derivatives needs its graph also here."""
        if not self.takes_derivatives:
            if self._loss is None and isinstance(self._step, GraphedStep) and self._step.recorded:
                self._loss = GraphedLoss(self.full_step, self._step.pool)
            try:
                return (self._loss or self.full_step.loss)(batch)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                self.takes_derivatives = True
        with torch.enable_grad():
            return self.full_step.loss(batch).detach()

    def check(self) -> bool:
        """Whether a step can be recorded as a CUDA graph; refuses where it cannot, and must."""
        recomputing = self.full_step.recomputing
        draws_again = recomputing is not None and recomputing.draws_again
        possible = self.device.type == "cuda" and self.full_step.device_skip and not draws_again
        possible = possible and self.recordable
        if self.cuda_graph is True and not possible:
            raise ConfigError(
                "engine.cuda_graph = true needs a CUDA GPU, a fused optimizer (adamw, adam, sgd or muon; one of your "
                "own with lr=torch.tensor(...) on the GPU and capturable=True), no dropout in blocks that "
                "engine.activation_checkpointing recomputes, none recomputed in a module of your own, and "
                "memory.offload = false; use 'auto'"
            )
        return possible


def switch(setting: bool | str, auto: bool) -> bool:
    """A setting that may be left to us."""
    return auto if setting == "auto" else bool(setting)
