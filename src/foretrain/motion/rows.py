"""Rows in which all weights lie one after the other: where each is, and how rows are saved for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretrain.persist.parts import FLAT, SpreadForm, is_spread, local, region, spread_as
from foretrain.persist.stateful import StateError, entry

if TYPE_CHECKING:
    from foretrain.motion.trajectory import Layout

_MOST_CHUNKS, _SMALLEST_CHUNK = 8192, 256
"""Pieces that rows are cut into for batched dot products, and their least length. Chosen: enough to fill a GPU, and the
sums over them stay small."""
_MOST_GROUPS = 256
"""Groups of weights with coefficients of their own. Chosen: a deep model has about as many parameters."""
_PARTS = "_parts"
"""Names of rows that are saved by parameter end so; of parts of weights in one line they end in `FLAT`."""


def grouped(shares: Sequence[float]) -> list[list[int]]:
    """Places of the parameters of each group: neighbours of one share, as many as keeps groups few."""
    most = -(-len(shares) // _MOST_GROUPS)
    groups: list[list[int]] = []
    for place, share in enumerate(shares):
        if groups and len(groups[-1]) < most and shares[groups[-1][0]] == share:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def lie_in_row(sizes: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, list[int], list[int]]:
    """Return the length of a chunk, where each of so many numbers begins, and the chunks of each group."""
    chunk = max(_SMALLEST_CHUNK, -(-sum(sizes) // (64 * _MOST_CHUNKS)) * 64)  # aligned rows load faster
    starts: list[int] = []
    lengths: list[int] = []
    used = 0
    for group in groups:
        place = used * chunk
        for index in group:
            starts.append(place)
            place += sizes[index]
        lengths.append(-(-(place - used * chunk) // chunk))
        used += lengths[-1]
    return chunk, starts, lengths


def places_in_rows(rows: Tensor, starts: Sequence[int], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of rows [..., size] where tensors of these shapes begin there."""
    lead = rows.shape[:-1]
    return [
        rows[..., start : start + shape.numel()].view((*lead, *shape))
        for start, shape in zip(starts, shapes, strict=True)
    ]


class SavedRows:
    """Rows of a layout. They are saved as they are or, of weights that are spread over ranks, each parameter by itself:
    there a row holds this rank's parts only, and those of another number of ranks lie elsewhere."""

    def __init__(self, layout: Layout, forms: Sequence[SpreadForm | None], flat: bool = False) -> None:
        """forms: how the parameters of the layout are spread. flat: as numbers in one line."""
        self.layout = layout
        self._forms = list(forms)
        self._flat = flat
        self.by_parameter = any(form is not None for form in self._forms)

    def of(self, rows: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what is saved of rows [..., size]. Tensors are referred to, not copied."""
        if not self.by_parameter:
            return dict(rows)
        ending = FLAT if self._flat else _PARTS
        return {f"{name}{ending}": self._spread(tensor) for name, tensor in rows.items()}

    def _spread(self, rows: Tensor) -> list[Tensor]:
        forms = [form if form is None or rows.ndim == 1 else form.rows(len(rows)) for form in self._forms]
        return [spread_as(part, form) for part, form in zip(self.layout.views(rows), forms, strict=True)]

    @staticmethod
    def held(state: Mapping[str, Any], name: str) -> bool:
        """Whether a state holds these rows, in any of the ways."""
        return any(f"{name}{ending}" in state for ending in ("", _PARTS, FLAT))

    @torch.no_grad()
    def fill(self, rows: Tensor, state: Mapping[str, Any], name: str, place: str) -> None:
        """Put rows back in place, whoever saved them. place: what they belong to, for messages."""
        if name in state and not self.by_parameter:
            rows.copy_(entry(state, name, place))
            return
        ending = FLAT if f"{name}{FLAT}" in state else _PARTS
        saved = self._cut(entry(state, name, place)) if name in state else entry(state, f"{name}{ending}", place)
        parts = self.layout.views(rows)
        if len(saved) != len(parts):
            raise StateError(f"{place}.{name} is of {len(saved)} weights, not {len(parts)}")
        lead = rows.shape[:-1]
        for part, form, one in zip(parts, self._forms, saved, strict=True):
            if is_spread(one):
                part.copy_(local(one))
            elif form is None:
                part.copy_(one.reshape(part.shape))
            else:
                sizes, begin = form.region()
                whole = one.reshape((*lead, *form.shape))
                part.copy_(region(whole, ((0,) * len(lead)) + begin, (*lead, *sizes)))

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """Return the parameters in rows of whole weights, as one process saves them."""
        shapes = [
            parameter.shape if form is None else torch.Size(form.shape)
            for parameter, form in zip(self.layout.parameters, self._forms, strict=True)
        ]
        _, starts, _ = lie_in_row([shape.numel() for shape in shapes], grouped([1.0] * len(shapes)))
        return places_in_rows(rows, starts, shapes)
