"""Keeps the directions of replicated weights once in all ranks together: each watches its part of every weight.

Watching sends nothing more: dot products of parts meet in the sum by which a window ends. A move gathers the parts of
its displacement, 4 bytes per weight, and then every rank moves all weights by the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foretrain.motion.predictors.base import Array
from foretrain.motion.trajectory import Trajectory, Watched
from foretrain.persist.parts import flat_forms

_AT_ONCE = 2**26
"""Numbers of weights that are gathered at once: 256 MiB on each rank while a move is made, beside its displacement."""


class SharedTrajectory(Trajectory):
    """Watches this rank's part of each replicated weight."""

    def _watched(self, parameters: Sequence[Tensor]) -> Watched:
        form_of = flat_forms(self.world.size, self.device.type)
        forms = [form_of(p.numel()) for p in self.parameters]
        regions = [form.region() for form in forms]
        parts = [
            p.view(-1)[begin : begin + size] for p, ((size,), (begin,)) in zip(self.parameters, regions, strict=True)
        ]
        return Watched(parts, forms, parted=True, flat=True)

    @torch.no_grad()
    def displacement(self, coefficients: Array) -> list[Tensor]:
        """Return basis x coefficients [G, R] as tensors like the parameters. All ranks must ask, with the same
        coefficients."""
        parts = super().displacement(coefficients)
        wholes = [torch.empty(p.shape, dtype=torch.float32, device=p.device) for p in self.parameters]
        for places in self._together():
            self._gather([parts[place] for place in places], [wholes[place] for place in places])
        return wholes

    def _together(self) -> Iterator[list[int]]:
        """Yield places of weights whose parts are gathered at once."""
        places: list[int] = []
        numbers = 0
        for place, parameter in enumerate(self.parameters):
            places.append(place)
            numbers += parameter.numel()
            if numbers >= _AT_ONCE:
                yield places
                places, numbers = [], 0
        if places:
            yield places

    def _gather(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Fill whole tensors with the parts that all ranks have of them."""
        lengths = [-(-whole.numel() // self.world.size) for whole in wholes]
        sent = torch.zeros(sum(lengths), dtype=torch.float32, device=self.device)
        places = [place[: part.numel()] for place, part in zip(torch.split(sent, lengths), parts, strict=True)]
        torch._foreach_copy_(places, list(parts))
        heard = torch.split(self.world.gather(sent), lengths, dim=1)
        found = [some.reshape(-1)[: whole.numel()].view_as(whole) for some, whole in zip(heard, wholes, strict=True)]
        torch._foreach_copy_(list(wholes), found)
