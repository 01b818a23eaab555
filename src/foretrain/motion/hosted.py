"""Keeps the directions of the trajectory in host memory; they pass through a small buffer on the device.

The arithmetic and its order are those of `Trajectory`, a range of chunks at a time. At the end of a window one range is
on its way back while the next one comes, in a buffer of its own: a bus carries both ways at once. All other copies are
on the current stream, so each finds what the one before it left. The host waits for none but at the end of a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.memory.host import Lane, copy_each, host_zeros, settle
from foretrain.engine.world import ALONE, World
from foretrain.motion.predictors.base import Array
from foretrain.motion.records import DIRECTIONS
from foretrain.motion.trajectory import Trajectory

BUFFER_BYTES = 128 * 2**20
"""Size of all buffers on the device together, while a window is closed or a move is made. Chosen: small beside any
model that needs this, large enough to keep a bus busy."""
_BUFFERS = 2
"""Buffers that take turns: one for each direction of the bus."""
_R = len(DIRECTIONS)
_BUFFER_ROWS = 2 * _R + 2
HOSTED_ROWS = 2 * _R + 1
"""Rows in host memory, beside two in fp32."""


def elements_at_once(number: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Elements of each row that fit into a buffer, with `number` bytes each and three more rows in fp32."""
    return buffer_bytes // (_BUFFERS * (_BUFFER_ROWS * number + 3 * torch.float32.itemsize))


class HostedTrajectory(Trajectory):
    """A trajectory that keeps nothing of the size of the weights on the device."""

    _ROWS = HOSTED_ROWS
    """The displacement of a window exists in the buffer only."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
        *,
        window: int = 10,
        dtype: torch.dtype = torch.float32,
        world: World = ALONE,
        hold: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._buffer_bytes = buffer_bytes
        super().__init__(parameters, names, window=window, dtype=dtype, world=world, hold=hold)
        self._lanes = [Lane(self.device) for _ in range(_BUFFERS)]

    def _lay_out(self, parameters: Sequence[Tensor], names: Sequence[str] | None, dtype: torch.dtype) -> None:
        super()._lay_out(parameters, names, dtype)
        at_once = elements_at_once(dtype.itemsize, self._buffer_bytes) // self.layout.chunk
        self.chunks_at_once = min(self.layout.chunks, max(1, at_once))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return host_zeros(shape, dtype, self.device)

    def _ranges(self) -> Iterator[tuple[int, int, slice]]:
        """Yield the first chunk of a range, the one after its last, and their elements."""
        layout = self.layout
        for first in range(0, layout.chunks, self.chunks_at_once):
            last = min(first + self.chunks_at_once, layout.chunks)
            yield first, last, slice(first * layout.chunk, last * layout.chunk)

    def _buffer(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, self.chunks_at_once * self.layout.chunk, dtype=dtype, device=self.device)

    def _enter(self, frozen: bool, freeze: bool) -> tuple[Tensor, Tensor]:
        followed, grams = [], []
        buffers = [
            (lane, self._buffer(_BUFFER_ROWS, self._rows.dtype), self._buffer(3, torch.float32)) for lane in self._lanes
        ]
        for turn, (_, _, part) in enumerate(self._ranges()):
            length = part.stop - part.start
            lane, all_rows, all_work = buffers[turn % _BUFFERS]
            lane.join()  # what this buffer held before has left it
            rows, (now, moved, last_step) = all_rows[:, :length], all_work[:, :length]
            basis, since_freeze, displacement = rows[:_R], rows[-2], rows[-1]
            stored = self._rows[:, part]
            self._weights_in(part, now)
            copy_each([moved], [self._previous[part]])
            displacement.copy_(moved.neg_().add_(now))
            copy_each(rows[:-1].unbind(), stored.unbind())
            if frozen:
                since_freeze.add_(displacement)
            followed.append(self._dots(rows, rows[-2:]))
            copy_each([last_step], [self._scratch[part]])
            self._enter_basis(basis, last_step.sub_(now), displacement)
            grams.append(self._dots(basis, basis))
            if freeze:
                rows[_R : 2 * _R].copy_(basis)
                since_freeze.zero_()
            with lane.behind():
                copy_each(stored[:_R].unbind(), basis.unbind())
                if freeze:
                    copy_each(stored[_R : 2 * _R].unbind(), rows[_R : 2 * _R].unbind())
                copy_each([stored[-1], self._previous[part]], [since_freeze, now])
        for lane in self._lanes:
            lane.join()
        return torch.cat(followed), torch.cat(grams)

    def _weights_in(self, part: slice, out: Tensor) -> None:
        """Write the weights as they lie in a row, with zeros where nothing lies."""
        out.zero_()
        places, pieces = [], []
        for start, weights in zip(self.layout.starts, self.parameters, strict=True):
            first, last = max(start, part.start), min(start + weights.numel(), part.stop)
            if first < last:
                places.append(out[first - part.start : last - part.start])
                pieces.append(weights.reshape(-1)[first - start : last - start])
        if places:
            torch._foreach_copy_(places, pieces)

    @torch.no_grad()
    def displacement(self, coefficients: Array) -> list[Tensor]:
        """The displacement as views of host memory."""
        per_chunk = self._per_chunk(coefficients)
        row, sums = self._buffer(1, self._rows.dtype)[0], self._buffer(1, torch.float32)[0]
        for first, last, part in self._ranges():
            length = part.stop - part.start
            out, direction = (x[:length].view(-1, self.layout.chunk) for x in (sums, row))
            out.zero_()
            for index in range(_R):
                copy_each([direction], [self.basis[index, part].view_as(direction)])
                out.addcmul_(direction.float(), per_chunk[first:last, index : index + 1])
            copy_each([self._scratch[part]], [out.view(-1)])
        return self._scratch_views

    def forget(self) -> None:
        settle(self.device)
        super().forget()

    def release(self) -> None:
        settle(self.device)
        super().release()

    def state_dict(self) -> dict[str, Any]:
        settle(self.device)
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        settle(self.device)
        super().load_state_dict(state)
