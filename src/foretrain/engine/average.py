"""Averaged weights for evaluation: an exponential moving average beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foretrain.engine.memory.host import add_each, copy_each, on_device
from foretrain.persist.codec import real_view
from foretrain.persist.parts import like, local
from foretrain.persist.stateful import entry


class WeightAverage:
    """`average = decay * average + (1 - decay) * weights` after every step, corrected as in Adam while it is young."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.names: list[str] = []
        self.weights: list[Tensor] = []
        """This process's parts of them."""
        self.average: list[Tensor] = []
        self._whole: list[Tensor] = []
        self._moving: list[int] = []
        """Places of those that are trained now; others were frozen in mid-run, and the average still goes towards
        them."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.cover(trained, list(trained))

    @torch.no_grad()
    def cover(self, weights: Mapping[str, Tensor], trained: Sequence[str]) -> None:
        """Average these from now on. What is new did not change so far: its average is itself."""
        known, share = dict(zip(self.names, self.average, strict=True)), 1 - self.decay**self.updates
        self.names, self.weights = list(weights), [local(weight) for weight in weights.values()]
        self._whole = list(weights.values())
        self.average = [
            known[name] if name in known else weight * share if self.updates else torch.zeros_like(weight)
            for name, weight in zip(self.names, self.weights, strict=True)
        ]
        places = {name: place for place, name in enumerate(self.names)}
        self._moving = [places[name] for name in trained]

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        torch._foreach_lerp_(self.average, self.weights, 1 - self.decay)

    @torch.no_grad()
    def copy(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Give weights the average of those that they were made from. pairs: names, (new, old)."""
        places = {name: place for place, name in enumerate(self.names)}
        for new, old in pairs:
            self.average[places[new]].copy_(self.average[places[old]])

    @torch.no_grad()
    def shift(self, displacement: Sequence[Tensor], share: float) -> None:
        """A move carries the average along, else it would lag behind by the whole move."""
        averages = [real_view(self.average[place]) for place in self._moving]
        add_each(averages, displacement, share * (1 - self.decay**self.updates))

    @torch.no_grad()
    def follow(self, before: Sequence[Tensor]) -> None:
        """Carry the average along from the weights `before`, in host memory or not, to those of now, one at a time."""
        share = 1 - self.decay**self.updates
        for place, start in zip(self._moving, before, strict=True):
            weight = real_view(self.weights[place])
            add_each([real_view(self.average[place])], [weight - on_device(start, weight.device)], share)

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
        average = [like(mean, whole) for mean, whole in zip(self.average, self._whole, strict=True)]
        return {"updates": self.updates, "average": average, "names": list(self.names)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What it does not hold had not changed by then."""
        updates, names, averages = (entry(state, name, "WeightAverage") for name in ("updates", "names", "average"))
        self.updates = int(updates)
        if not 0 <= self.updates < 2**63:
            raise ValueError(f"the average was updated {self.updates} times")
        saved = dict(zip(names, averages, strict=True))
        share = 1 - self.decay**self.updates
        sources = [
            local(saved[name]) if name in saved else weight * share
            for name, weight in zip(self.names, self.weights, strict=True)
        ]
        copy_each(self.average, sources)
