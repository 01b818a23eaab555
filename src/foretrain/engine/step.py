"""One full step: forward, backward, check, clip, update. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from foretrain.engine.batch import part_counts, part_weights, rows_of, split
from foretrain.engine.compile_cache import keep_compiled
from foretrain.engine.hooks import StepHook
from foretrain.engine.optim.build import supports_device_skip
from foretrain.engine.optim.in_backward import UpdatesInBackward
from foretrain.engine.own import one_number
from foretrain.engine.precision import Precision
from foretrain.engine.recomputing import Recomputing
from foretrain.engine.syncing import Syncing
from foretrain.engine.world import ALONE, World
from foretrain.models.blocks import blocks_of
from foretrain.persist.parts import is_spread, local

LossFunction = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step left behind, on the device."""

    loss: Tensor
    gradient_norm: Tensor
    skipped: Tensor
    """1.0 when loss or gradient was not finite and nothing was updated."""
    gradient_norms: Tensor | None = None
    """One norm per trained parameter, before clipping; not a number where it has no gradient. It comes for nothing with
    the norm of all. Where steps are recorded the next one overwrites it."""


class FullStep:
    """A callable full step. `batch` may be any nesting of tuples, lists and dicts of tensors."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_function: LossFunction,
        precision: Precision,
        *,
        clip: float = 0.0,
        accumulation: int = 1,
        nan_check: bool = True,
        compile_loss: bool = False,
        update_in_backward: bool = False,
        parameters: list[nn.Parameter] | None = None,
        recomputing: Recomputing | None = None,
        world: World = ALONE,
    ) -> None:
        """parameters: what is trained; None: all that require gradients. recomputing: what of the model is computed
        again in the backward pass."""
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self.world = world
        self.recomputing = recomputing
        self.clip = clip
        self.accumulation = accumulation
        self.nan_check = nan_check
        self.device = precision.device
        self.parameters = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
        self.spread = any(is_spread(p) for p in self.parameters)
        """Each rank holds parts of the weights."""
        self.uneven = False
        """Targets that count differ in number from rank to rank, and each of them is to count alike: one sum over ranks
        per step. Otherwise each rank's mean counts alike, as in DistributedDataParallel."""
        self.syncing = Syncing(model, loss_function)
        self.buffers = list(model.buffers())
        self.changing = False
        """Something is being changed that cannot be taken back; False again when the step is counted."""
        self.device_skip = supports_device_skip(optimizer)
        self.in_backward = UpdatesInBackward(optimizer, self.parameters, nan_check) if update_in_backward else None
        self._loss_function = loss_function
        self._compiled = _compiled(model, loss_function, by_block=update_in_backward) if compile_loss else None
        self._attention = _attention_order(self.device)
        self._always_good = torch.zeros((), device=self.device)
        self._absent = torch.full((), torch.nan, device=self.device)
        self._shares_known: list[float] = []
        self._shares = self._absent
        """What this rank's parts of the gradients, and its loss, count in a sum."""

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    @property
    def _recomputes(self) -> bool:
        return self.recomputing is not None and bool(self.recomputing.share)

    @property
    def loss_function(self) -> Any:
        """The loss as it was handed in, or as it was compiled."""
        return self._loss_function

    def loss(self, batch: Any) -> Tensor:
        """The forward pass alone, in the precision of training."""
        with self._attention(), self.precision.autocast(cache=not self._recomputes):
            if self._compiled is not None:
                return self._compiled(batch)
            return one_number(self._loss_function(self.model, batch))

    def gradient(self, batch: Any) -> Tensor:
        """Forward and backward: the loss, and gradients on the parameters.

        They are those of the mean loss over the whole batch, part by part, each weighed by what it counts.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self.accumulation == 1 and not self.uneven:
            loss = self.loss(batch)
            self._backward(loss)
            return loss.detach().float()
        parts = [split(batch, self.accumulation, index) for index in range(self.accumulation)]
        parts = [part for part in parts if rows_of(part)] or parts[:1]
        weights = self._weights_over_ranks(parts) if self.uneven else part_weights(parts, self.device)
        total = torch.zeros((), device=self.device)
        for place, (part, weight) in enumerate(zip(parts, weights, strict=True), start=1):
            with self.syncing.with_last(last=place == len(parts)):
                # the mean over a part in which no target counts is no number, and must not count either
                loss = torch.where(weight > 0, self.loss(part), 0.0) * weight
                self._backward(loss)
            total = total + loss.detach().float()
        return total

    def _weights_over_ranks(self, parts: list[Any]) -> Tensor:
        """What each part counts in the batch of all ranks, times the ranks, whose gradients are averaged."""
        counts = part_counts(parts, self.device)
        return counts * self.world.size / self.world.reduce(counts.sum(), "sharded").clamp(min=1.0)

    def __call__(
        self,
        batch: Any,
        hooks: Sequence[StepHook] = (),
        gradient: Callable[[Any], Tensor] | None = None,
    ) -> StepOutput:
        """hooks: told when the gradients are there and nothing is updated yet; gradient: another way to them."""
        kept = [buffer.clone() for buffer in self.buffers]
        try:
            if self.in_backward is not None:
                output = self._update_on_the_way(batch, self.in_backward)
            else:
                loss = (gradient or self.gradient)(batch)
                for hook in hooks:
                    self.changing = True  # by whoever wants to see the gradients
                    hook.gradients_ready()
                output = self.update(loss)
        except BaseException:
            with torch.no_grad():
                for buffer, before in zip(self.buffers, kept, strict=True):
                    buffer.copy_(before)
            raise
        if self.nan_check:
            with torch.no_grad():  # running statistics saw the bad batch too
                for buffer, before in zip(self.buffers, kept, strict=True):
                    buffer.copy_(torch.where(output.skipped > 0, before, buffer))
        return output

    def _update_on_the_way(self, batch: Any, updates: UpdatesInBackward) -> StepOutput:
        """A whole step whose updates happen in the backward pass; there is never a time for hooks."""
        self.optimizer.zero_grad(set_to_none=True)
        updates.limit = self.clip
        loss = self.loss(batch)
        self.changing = True
        with updates.during(loss):
            self._backward(loss)
        loss, norm = loss.detach().float(), updates.norm().float()
        bad = torch.logical_not(torch.isfinite(norm) & torch.isfinite(loss)).float()
        norms = stacked(updates.norms(self._absent))
        return StepOutput(loss, norm, bad if self.nan_check else self._always_good, norms)

    def _backward(self, loss: Tensor) -> None:
        if self.recomputing is not None:
            self.recomputing.check_calls()
        scaled = loss * self.precision.scale if self.precision.scaled else loss
        with self._attention():  # blocks that are recomputed must choose the same kernels again
            scaled.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, loss: Tensor) -> StepOutput:
        """Check, clip and apply the gradients that are there."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm, norms, loss = self._norms(gradients, loss)
        if self.precision.scaled:
            norm, norms = norm / self.precision.scale, norms / self.precision.scale
        if self.nan_check or self.precision.scaled:
            own = self.world.size > 1 and not self.spread  # the loss is this rank's own until ranks meet
            good = torch.isfinite(norm) if own else torch.isfinite(norm) & torch.isfinite(loss)
            bad = torch.logical_not(good).float()
        else:
            bad = self._always_good
        # The gradients still carry the loss scale; dividing by `divisor` removes it and clips in the same pass.
        divisor = self.precision.scale if self.precision.scaled else None
        if self.clip > 0:
            clipping = (norm / self.clip).clamp(min=1.0)
            divisor = clipping if divisor is None else clipping * divisor
        self.changing = True
        self._apply(gradients, divisor, bad)
        self.precision.update(bad)
        return StepOutput(loss, norm, bad, norms)

    def _norms(self, gradients: list[Tensor], loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The norm of all gradients together, that of each parameter, and the loss.

        Replicas have the same gradients: the mean of their losses is made when they meet. Of parts the squares of all
        ranks are summed, and the mean loss comes along.
        """
        if self.world.size > 1 and not self.spread:
            loss = loss.clone()
            self.world.later(loss)
        if not gradients:
            return torch.zeros((), device=self.device), self._absent.expand(len(self.parameters)), loss
        if self.spread:
            each, loss = self._norms_of_parts(gradients, loss)
        else:
            each = list(torch._foreach_norm([g.coalesce().values() if g.is_sparse else g for g in gradients]))
        together = stacked(each)
        norm = torch.linalg.vector_norm(together)
        if len(each) < len(self.parameters):
            found = iter(each)
            together = stacked([self._absent if p.grad is None else next(found) for p in self.parameters])
        return norm, together, loss

    def _norms_of_parts(self, gradients: list[Tensor], loss: Tensor) -> tuple[list[Tensor], Tensor]:
        """The norm of each gradient, and the mean loss of all ranks, in one sum."""
        each = torch._foreach_norm([local(gradient) for gradient in gradients])
        if self.world.size == 1:
            return list(each), loss
        shares = [self.world.share(p) for p in self.parameters if p.grad is not None]
        if shares != self._shares_known:
            self._shares_known, self._shares = shares, torch.tensor([*shares, 1.0], device=self.device).double()
        own = torch.cat([stacked(list(each)).double().square(), loss.double().reshape(1) / self.world.size])
        total = self.world.sum_of_step(own * self._shares).float()
        return list(total[:-1].sqrt().unbind()), total[-1]

    def _apply(self, gradients: list[Tensor], divisor: Tensor | None, bad: Tensor) -> None:
        optimizer: Any = self.optimizer
        if self.device_skip:
            optimizer.grad_scale = divisor
            optimizer.found_inf = bad if bad is not self._always_good else None
            try:
                optimizer.step()
            finally:
                optimizer.grad_scale = optimizer.found_inf = None
            return
        # An optimizer that cannot skip on the device: the host has to look, which waits for the device once a step.
        if divisor is not None:
            torch._foreach_div_([g._values() if g.is_sparse else local(g) for g in gradients], divisor)
        if not self.world.to_host(bad)[0]:
            optimizer.step()


def _compiled(model: nn.Module, loss_function: LossFunction, by_block: bool) -> Callable[[Any], Tensor]:
    """by_block: the backward pass of a compiled whole brings all gradients at once, that of blocks in turn."""

    def loss(batch: Any) -> Tensor:
        return one_number(loss_function(model, batch))

    keep_compiled()
    blocks = blocks_of(model) if by_block else []
    for block in blocks:
        block.compile(dynamic=False)
    return loss if blocks else _Compiled(loss)


class _Compiled:
    """A compiled loss; or, if it takes derivatives itself, as in physics-informed networks, the loss as it is."""

    def __init__(self, loss: Callable[[Any], Tensor]) -> None:
        self._plain = loss
        self._loss: Callable[[Any], Tensor] = torch.compile(loss, dynamic=False)

    def __call__(self, batch: Any) -> Tensor:
        try:
            return self._loss(batch)
        except RuntimeError as error:
            if self._loss is self._plain or "double backward" not in str(error):
                raise
            self._loss = self._plain  # torch cannot compile derivatives of derivatives
            return self._plain(batch)


def _attention_order(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """On Hopper and later cuDNN's attention is the fastest; elsewhere torch's own choice stands."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        order = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        return lambda: sdpa_kernel(order, set_priority=True)
    return nullcontext


def stacked(norms: list[Tensor]) -> Tensor:
    """One fp32 vector of single numbers, whatever their formats."""
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.float() for norm in norms]
    return torch.stack(norms).float()
