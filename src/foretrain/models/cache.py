"""Keys and values of the tokens a model has read, so that a new token costs one position and not all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretrain.errors import InputError


class Window(NamedTuple):
    """What a model needs to read the next tokens: where they stand, what they may see, where they are kept."""

    start: int
    positions: Tensor | None
    """[batch, new] position numbers; None: `start`, `start + 1`, ... in every row."""
    bias: Tensor | None
    """Added to the attention scores, 0 or -inf; None where causality alone says it."""
    new: tuple[Tensor, ...]
    """For each layer [2, batch, heads, new, head_width]: to be filled with keys and values."""
    seen: tuple[Tensor, ...]
    """Keys of the first layer, values of the first layer, keys of the second ..., the new ones included."""


class KeyValueCache:
    """One buffer [layers, 2, batch, heads, length, head_width], allocated once.

    `padding` is the number of columns each row leaves empty on its left: rows of unequal length end in the same column.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        length: int,
        head_width: int,
        *,
        context: int,
        padding: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        padding = list(padding) if padding is not None and any(padding) else None
        if padding is not None and (len(padding) != batch or not all(0 <= empty < length for empty in padding)):
            raise InputError(f"padding {padding} does not fit {batch} rows of {length} tokens; give one number per row")
        if not 0 < length <= context + max(padding or [0]):
            raise InputError(
                f"a cache of {length} tokens does not fit model.context = {context}; shorten the one or raise the other"
            )
        self.length = length
        self.used = 0
        self.buffer = torch.zeros(layers, 2, batch, heads, length, head_width, device=device, dtype=dtype)
        self._padding: Tensor | None = None
        if padding is not None:
            self._padding = torch.tensor(padding, device=device)[:, None]
            columns = torch.arange(length, device=device)
            self._positions = (columns - self._padding).clamp_(0, context - 1)
            hidden = (columns < self._padding)[:, None, None, :]
            self._bias = torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)

    @property
    def batch(self) -> int:
        return self.buffer.shape[2]

    def advance(self, rows: int, count: int) -> Window:
        """Make the next `count` columns of all rows the current ones."""
        start, end = self.used, self.used + count
        if rows != self.batch:
            raise InputError(f"the cache is for {self.batch} rows, {rows} were given; make one for each batch")
        if end > self.length:
            raise InputError(
                f"{end} tokens do not fit a cache of {self.length}: {end - self.length} too many; make a longer one"
            )
        self.used = end
        return Window(
            start=start,
            positions=None if self._padding is None else self._positions[:, start:end],
            bias=self._bias_between(start, end),
            new=self.buffer[..., start:end, :].unbind(0),
            seen=self.buffer[..., :end, :].flatten(0, 1).unbind(0),
        )

    def _bias_between(self, start: int, end: int) -> Tensor | None:
        if end - start == 1 and start > 0:
            return None if self._padding is None else self._bias[..., :end]
        if start == 0 and self._padding is None:
            return None
        keys = torch.arange(end, device=self.buffer.device)
        queries = keys[start:, None]
        visible = keys <= queries
        if self._padding is not None:
            # an empty column sees itself: a row of the softmax without anything in it would be NaN
            visible = visible & ((keys >= self._padding[:, :, None]) | (keys == queries))
            visible = visible[:, None]
        bias = torch.zeros(visible.shape, device=self.buffer.device, dtype=self.buffer.dtype)
        return bias.masked_fill_(~visible, -torch.inf)
