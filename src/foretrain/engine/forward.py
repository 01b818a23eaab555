"""Forward passes that change nothing: evaluations, metrics and probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor

from foretrain.engine import own
from foretrain.engine.average import WeightAverage
from foretrain.engine.batch import part_counts, part_weights, rows_of, split
from foretrain.engine.execution import Execution
from foretrain.engine.fence import Failure, Fence, OwnCodeError, failure_of, same_model
from foretrain.engine.metrics import measured
from foretrain.engine.progress import RunProgress
from foretrain.engine.step import FullStep
from foretrain.engine.world import ALONE, World
from foretrain.errors import InputError, is_out_of_memory


class Forward:
    """Losses and metrics of batches, at the weights as they are or at averaged ones.

    to_device: brings a batch to the model. count: tokens or samples of a batch.
    """

    def __init__(
        self,
        full_step: FullStep,
        execution: Execution,
        average: WeightAverage | None,
        progress: RunProgress,
        fence: Fence,
        to_device: Callable[[Any], Any],
        count: Callable[[Any], int],
        world: World = ALONE,
    ) -> None:
        self.full_step = full_step
        self.model, self.device, self.precision = full_step.model, full_step.device, full_step.precision
        self.execution = execution
        self.average = average
        self.progress = progress
        self.fence = fence
        self.to_device = to_device
        self.count = count
        self.world = world
        self.float_type = own.float_type(self.model)

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
        batches = [own.as_tensors(batch, self.float_type) for batch in batches]
        if not batches:
            raise InputError("evaluation needs at least one held-out batch")
        if not self.execution.records:
            self.full_step.optimizer.zero_grad(set_to_none=True)  # the next step makes gradients anew
        self.same_number(batches, "held-out batches")
        with self.averaged_weights():
            return self.world.to_host(self.forward_loss(batches))[0]

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
        derivatives = torch.set_grad_enabled(self.execution.takes_derivatives)
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
        if self.world.size > 1:
            own = [value if name in running else math.nan for name, value in total.items()]
            *sums, whole = self.world.total([*own, rows])
            total, rows = dict(zip(total, sums, strict=True)), int(whole)
        if changed and failed is not None:
            names = " or ".join(f"the metric {name!r}" for name in metrics)
            text = f"it changed weights, {changed[0]} among them; they are put back"
            failed("", Failure(names, text, ""))
        return {name: total[name] / max(1, rows) if name in running else math.nan for name in metrics}

    def same_number(self, batches: Sequence[Any], what: str) -> None:
        """Refuse another number of batches on another rank, which would wait for passes that never come."""
        if self.world.size > 1:
            self.world.agree(len(batches), f"the number of {what}")
            self.world.meet()

    def probe(self, batch: Any) -> float:
        """Loss of a training batch at the weights as they are, forward only, in the parts that a full step has."""
        self.progress.probe_tokens += self.count(batch) * self.world.size
        pieces = self.full_step.accumulation
        parts = [batch] if pieces == 1 else [split(batch, pieces, index) for index in range(pieces)]
        with self._probing():
            return self.world.to_host(self.forward_loss([part for part in parts if rows_of(part)]))[0]

    def probe_all(self, batches: list[Any]) -> float:
        """Mean loss over several batches, each as it is."""
        self.progress.probe_tokens += sum(self.count(batch) for batch in batches) * self.world.size
        with self._probing():
            return self.world.to_host(self.forward_loss(batches))[0]

    @contextmanager
    def _probing(self) -> Iterator[None]:
        """A loss that fails here, though steps are made with it, costs the move and not the run. One of several ranks
        cannot go back by itself: there it ends the run."""
        try:
            with self.precision.predicting():
                yield
        except Exception as error:
            if is_out_of_memory(error) or self.progress.backward_passes == 0 or self.world.size > 1:
                raise
            raise OwnCodeError(failure_of("the loss function, forward only on a probe,", error)) from error

    @torch.no_grad()
    def forward_loss(self, batches: list[Any]) -> Tensor:
        """Mean loss over `batches` on the device; neither weights nor buffers nor random states change."""
        if self.world.size > 1:
            return self._loss_over_ranks(batches)
        weights = part_weights(batches, self.device)
        total = torch.zeros((), device=self.device)
        with self.evaluating():
            for batch, weight in zip(batches, weights, strict=True):
                total = total + self.execution.loss(self.to_device(batch)).float() * weight.to(self.device)
        return total

    def _loss_over_ranks(self, batches: list[Any]) -> Tensor:
        """Mean loss over the batches of all ranks, each weighed by what it counts among all of them."""
        counts = part_counts(batches, self.device).double()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        with self.evaluating():
            for batch, count in zip(batches, counts, strict=True):
                loss = self.execution.loss(self.to_device(batch)).double() * count
                total = total + torch.where(count > 0, loss, 0.0)  # the mean over nothing is no number
        sums = self.world.reduce(torch.stack([total, counts.sum()]), "sharded")
        mean: Tensor = sums[0] / sums[1].clamp(min=1.0)
        return mean.float()

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
            self.full_step.syncing.settle()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The model at averaged weights inside the block, if `evaluation.ema_decay` is set."""
        return self.average.applied() if self.average is not None else nullcontext()
