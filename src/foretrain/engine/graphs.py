"""A whole step as one CUDA graph: where launching kernels takes longer than running them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretrain.engine.batch import map_tensors, tensors_of
from foretrain.engine.step import FullStep, StepOutput
from foretrain.errors import is_out_of_memory
from foretrain.persist.codec import form_of

Result = TypeVar("Result")
WARMUP_STEPS = 3
LAUNCH_BOUND_FLOPS = 8e12
"""Below this much arithmetic a step runs for less than some 20 ms on a large GPU, about what its launches take."""
_OWN_THREAD = "thread_local"
"""While recording, only this thread is bound by its rules: the loader's may pin the next batch meanwhile."""

_FORMS = 2
"""Forms of batches whose loss is recorded: those of probes and of evaluations."""


def launch_bound(parameters: int, batch: Any) -> bool:
    """Whether a step on `batch` is so small that launching its kernels dominates."""
    tensors = tensors_of(batch)
    elements = tensors[0].numel() if tensors else 0
    return 6.0 * parameters * elements < LAUNCH_BOUND_FLOPS


class GraphedStep:
    """Runs `step` as it is a few times, then records it once and replays it.

    Everything a step reads that may change (batch, learning rate, loss scale) lives in fixed tensors; weights and
    moments are updated in place. A batch of another shape runs without the graph.
    """

    def __init__(
        self, step: FullStep, give_up: Callable[[Exception], None] | None = None, eager_steps: int = WARMUP_STEPS
    ) -> None:
        """give_up: is told what stood against recording; the step then runs as it is. None: it is raised. eager_steps:
        before it is recorded."""
        self.step, self.give_up, self.eager_steps = step, give_up, eager_steps
        self._recorded: tuple[torch.cuda.CUDAGraph, Any, StepOutput] | None = None
        self._blocks: dict[str, Tensor] = {}
        """Mean losses of the blocks of residuals, which a replay writes anew."""
        self._eager_steps = 0
        self._stream = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call]

    @property
    def recorded(self) -> bool:
        return self._recorded is not None

    @property
    def pool(self) -> Any:
        """The memory of the recorded graph."""
        return self._recorded[0].pool() if self._recorded is not None else None

    def __call__(self, batch: Any) -> StepOutput:
        if self._eager_steps < self.eager_steps:
            self._eager_steps += 1
            return self._on_side_stream(batch)
        if self._recorded is None:
            try:
                self._recorded = self._record(batch)
            except Exception as error:
                if self.give_up is None or is_out_of_memory(error):
                    raise
                output = self.step(batch)  # a fault of the step itself comes out here
                self.give_up(error)
                return output
        graph, inputs, output = self._recorded
        if not same_form(batch, inputs):
            return self.step(batch)
        torch._foreach_copy_(tensors_of(inputs), tensors_of(batch), non_blocking=True)
        self.step.changing = True
        graph.replay()
        if self._blocks:
            self.step.loss_function.latest |= self._blocks  # an evaluation may have put its own there
        return StepOutput(
            output.loss.clone(), output.gradient_norm.clone(), output.skipped.clone(), output.gradient_norms
        )

    def _on_side_stream(self, batch: Any) -> StepOutput:
        """Warm-up happens off the main stream, as recording requires."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            output = self.step(batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return output

    def _record(self, batch: Any) -> tuple[torch.cuda.CUDAGraph, Any, StepOutput]:
        inputs = map_tensors(batch, lambda tensor: tensor.clone())
        self.step.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph):
                output = self.step(inputs)
        finally:
            self.step.changing = False  # nothing runs while it is recorded
        self._blocks = dict(getattr(self.step.loss_function, "latest", {}))
        return graph, inputs, output


class GraphedGradient:
    """Forward and backward of `step` as one graph, for whoever has to look at the gradient before the update.

    To be made when a whole step has been recorded: then everything it runs is warm, and known to be recordable.
    """

    def __init__(self, step: FullStep) -> None:
        self.step = step
        self._recorded: tuple[torch.cuda.CUDAGraph, Any, Tensor, list[Tensor | None]] | None = None

    def __call__(self, batch: Any) -> Tensor:
        """The loss; the gradients are on the parameters."""
        if self._recorded is None:
            self._recorded = self._record(batch)
        graph, inputs, loss, gradients = self._recorded
        if not same_form(batch, inputs):
            return self.step.gradient(batch)
        torch._foreach_copy_(tensors_of(inputs), tensors_of(batch), non_blocking=True)
        graph.replay()
        for parameter, gradient in zip(self.step.parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss.clone()

    def _record(self, batch: Any) -> tuple[torch.cuda.CUDAGraph, Any, Tensor, list[Tensor | None]]:
        inputs = map_tensors(batch, lambda tensor: tensor.clone())
        self.step.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with recording(graph):
            loss = self.step.gradient(inputs)
        return graph, inputs, loss, [parameter.grad for parameter in self.step.parameters]


class GraphedLoss:
    """The loss alone as a graph, of a model that is set to evaluate: for probes and evaluations.

    To be made when a whole step has been recorded: then its loss is known to be recordable. It shares that graph's
    memory, as neither leaves anything there that the other could overwrite while it is needed.
    """

    def __init__(self, step: FullStep, pool: Any) -> None:
        self.step = step
        self._pool = pool
        self._recorded: list[tuple[torch.cuda.CUDAGraph, Any, Tensor, str]] = []

    def __call__(self, batch: Any) -> Tensor:
        for graph, inputs, loss, precision in self._recorded:
            if precision == self.step.precision.forward and same_form(batch, inputs):
                torch._foreach_copy_(tensors_of(inputs), tensors_of(batch), non_blocking=True)
                graph.replay()
                return loss.clone()
        loss = self.step.loss(batch)  # what is loaded or compiled only once must not happen while recording
        if len(self._recorded) < _FORMS:
            self._recorded.append(self._record(batch))
        return loss

    def _record(self, batch: Any) -> tuple[torch.cuda.CUDAGraph, Any, Tensor, str]:
        inputs = map_tensors(batch, lambda tensor: tensor.clone())
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool):
            loss = self.step.loss(inputs)
        return graph, inputs, loss, self.step.precision.forward


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record into `graph` what is launched inside the block. No garbage is collected meanwhile: the end of an older
    graph, which a reference cycle kept, would break the recording."""
    collecting = gc.isenabled()
    gc.disable()  # collecting it before takes 0.2 s, as long as a hundred steps
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=_OWN_THREAD):
            yield
    finally:
        if collecting:
            gc.enable()


def record(run: Callable[[], Result], warm: bool = False) -> tuple[Callable[[], None], Result]:
    """Record what `run` launches. Returns what replays it, and what it gave: each replay writes that anew.

    warm: the same was run before; else it is run once: what is loaded only once must not happen while recording.
    """
    if not warm:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with recording(graph):
        result = run()
    return graph.replay, result


def same_form(batch: Any, other: Any) -> bool:
    """Whether two batches differ in nothing but the numbers in their tensors: a graph knows all else by heart."""
    return bool(_outline(batch) == _outline(other))


def _outline(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return form_of(batch)
    if isinstance(batch, Mapping):
        return [(name, _outline(value)) for name, value in batch.items()]
    if isinstance(batch, (list, tuple)):
        return [_outline(value) for value in batch]
    return batch if isinstance(batch, (bool, int, float, complex, str, bytes)) else type(batch)
