"""Rows of a Jacobian by one backward pass: taps record, row by row, what a gradient of a linear layer is made of.

The gradient of a weight is a sum of outer products, one per row of the batch: what went into the layer times the
gradient of what came out. Autograd adds them up; here both factors are kept, so that every row's gradient is known.
Where a loss takes derivatives itself, a layer is used again in the backward pass, y = x W^T and then g W, and each such
use contributes a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Use:
    """One use of a layer's weight: the product of `partner` and of the gradient that reaches `tap`, row by row."""

    tap: Tensor
    partner: Tensor
    tap_is_output: bool
    """The gradient belongs to the outputs of the weight, the partner to its inputs; else the other way round."""
    biased: bool
    """The layer's bias was added, too."""


@dataclass
class Call:
    """All uses that go back to one call of a layer; their rows are the rows of its input."""

    layer: nn.Linear
    uses: list[Use] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.uses[0].tap.shape[0]

    def tap(self, like: Tensor, width: int, partner: Tensor, output: bool, biased: bool = False) -> Tensor:
        """A leaf of zeros that takes the gradient of a use."""
        zeros = torch.zeros((), dtype=like.dtype, device=like.device).expand(*like.shape[:-1], width).requires_grad_()
        self.uses.append(Use(zeros, partner.detach(), output, biased))
        return zeros


class _Apply(torch.autograd.Function):
    """x W^T, with the bias or without it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, tap: Tensor, call: Call, biased: bool) -> Tensor:
        ctx.call = call
        layer = call.layer
        bias = layer.bias.detach() if biased and layer.bias is not None else None
        return F.linear(inputs, layer.weight.detach(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call, back = ctx.call, None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled():  # the loss takes derivatives: this is a use of the weight as well
                tap = call.tap(gradient, call.layer.in_features, gradient, output=False)
                back = _ApplyBack.apply(gradient, tap, call)  # type: ignore[no-untyped-call]
            else:
                back = gradient @ call.layer.weight.detach()
        return back, gradient, None, None


class _ApplyBack(torch.autograd.Function):
    """g W."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, tap: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return gradient @ call.layer.weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call, back = ctx.call, None
        if ctx.needs_input_grad[0]:
            if torch.is_grad_enabled():
                tap = call.tap(gradient, call.layer.out_features, gradient, output=True)
                back = _Apply.apply(gradient, tap, call, False)  # type: ignore[no-untyped-call]
            else:
                back = F.linear(gradient, call.layer.weight.detach())
        return back, gradient, None


class Taps:
    """Inside the block the linear layers of a model record their uses. Gradients no longer reach their weights."""

    def __init__(self, model: nn.Module, trained: Iterable[Tensor]) -> None:
        wanted = {id(p) for p in trained}
        self.layers = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and "forward" not in vars(module)
            and "weight" in module._parameters  # else it is made of others in every pass, as by weight_norm
            and any(id(p) in wanted for p in (module.weight, module.bias))
        ]
        self.calls: list[Call] = []

    def __enter__(self) -> Taps:
        for layer in self.layers:
            layer.forward = self._recording(layer)  # type: ignore[method-assign]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for layer in self.layers:
            del layer.forward

    def _recording(self, layer: nn.Linear) -> Any:
        def forward(input: Tensor) -> Tensor:  # as nn.Linear names it: a call may
            if input.ndim < 2:
                return F.linear(input, layer.weight, layer.bias)  # without rows: found as a use beside the layers
            call = Call(layer)
            tap = call.tap(input, layer.out_features, input, output=True, biased=True)
            self.calls.append(call)
            result: Tensor = _Apply.apply(input, tap, call, True)  # type: ignore[no-untyped-call]
            return result

        return forward
