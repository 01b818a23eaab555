"""Averaged weights for evaluation: an exponential moving average beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.engine.host import add_each, copy_each, on_device


class WeightAverage:
    """`average = decay * average + (1 - decay) * weights` after every step, corrected as in Adam while it is young."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights: list[Tensor] = [p.detach() for p in model.parameters() if p.requires_grad]
        self.average = [torch.zeros_like(weight) for weight in self.weights]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        torch._foreach_lerp_(self.average, self.weights, 1 - self.decay)

    @torch.no_grad()
    def shift(self, displacement: Sequence[Tensor], share: float) -> None:
        """A move carries the average along, else it would lag behind by the whole move."""
        add_each(self.average, displacement, share * (1 - self.decay**self.updates))

    @torch.no_grad()
    def follow(self, before: Sequence[Tensor]) -> None:
        """The same for a move from the weights `before`, in host memory or not, to those of now, one at a time."""
        share = 1 - self.decay**self.updates
        for average, weight, start in zip(self.average, self.weights, before, strict=True):
            add_each([average], [weight - on_device(start, weight.device)], share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the average inside the block, and its own weights, bit for bit, after it."""
        if self.updates == 0:
            yield
            return
        kept = [weight.clone() for weight in self.weights]
        correction = 1 - self.decay**self.updates
        with torch.no_grad():
            torch._foreach_copy_(self.weights, torch._foreach_div(self.average, correction))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, kept)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": list(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state["updates"])
        if not 0 <= self.updates < 2**63:
            raise ValueError(f"the average was updated {self.updates} times")
        copy_each(self.average, state["average"])
