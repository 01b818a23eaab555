"""How the weights move: windows of full steps, their displacement, and the basis that moves are made of.

All directions live in one buffer, row by row, each group of weights padded to whole chunks. So two batched products per
window give every dot product that is needed, exactly and with one host wait, and a move is a few passes over the rows.
A run on shards replaces `reduce_dots`, the only place where numbers of different shards meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrain.dynamics.predictor import Array
from foretrain.dynamics.records import DIRECTIONS, HORIZONS_IN_WINDOWS, WINDOWS_OF_MEANS

_MOST_CHUNKS = 8192
_SMALLEST_CHUNK = 256
_MOST_GROUPS = 256
_R = len(DIRECTIONS)


@dataclass(frozen=True, slots=True)
class Since:
    """What followed on a basis: dot products per group."""

    windows: int
    dots: Array
    """[G, R] of the displacement with the basis directions."""
    square: Array
    """[G] squared length of the displacement."""


@dataclass(frozen=True, slots=True)
class Motion:
    """What the end of a window showed, on the host."""

    window: Since
    """This window's displacement, on the basis as it stood before it."""
    frozen: Since | None
    """The displacement since the basis was frozen, on the frozen basis."""
    gram: Array
    """[G, R, R] of the basis with this window: the one the next move is made of."""
    extra: list[float]
    """What the caller wanted to have read along."""


class Trajectory:
    """Observes weights in windows, in place and without copies of its own state; only `place` changes weights."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
        *,
        window: int = 10,
        dtype: torch.dtype = torch.float32,
        reduce_dots: Callable[[Tensor], Tensor] = lambda dots: dots,
    ) -> None:
        self.parameters = [p.detach() for p in parameters]
        self.window = window
        self.reduce_dots = reduce_dots
        self.layout = Layout(self.parameters, names or [str(index) for index in range(len(self.parameters))])
        device, size = self.parameters[0].device, self.layout.size
        self._rows = torch.zeros(2 * _R + 2, size, dtype=dtype, device=device)
        self.basis = self._rows[:_R]
        self.frozen = self._rows[_R : 2 * _R]
        self._displacement = self._rows[-2]
        self._since_freeze = self._rows[-1]
        self._previous = torch.zeros(size, device=device)
        self._scratch = torch.zeros(size, device=device)
        self._previous_views = self.layout.views(self._previous)
        self._scratch_views = self.layout.views(self._scratch)
        self.windows = 0
        """Windows that entered the basis so far."""
        self.steps = 0
        """Full steps in the open window."""
        self.frozen_windows = -1
        """Windows since the basis was frozen; -1 while none is."""
        self.restart()

    @property
    def groups(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def bytes(self) -> int:
        """Memory of all buffers."""
        return sum(t.numel() * t.element_size() for t in (self._rows, self._previous, self._scratch))

    # --- observing ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restart(self) -> None:
        """Open a window at the weights as they are. A move lies between: what was frozen is not comparable any more."""
        torch._foreach_copy_(self._previous_views, self.parameters)
        self.steps = 0
        self.frozen_windows = -1

    @torch.no_grad()
    def before_step(self) -> None:
        """Before each full step: the last one of a window is a direction of its own."""
        if self.steps == self.window - 1:
            torch._foreach_copy_(self._scratch_views, self.parameters)

    def after_step(self) -> bool:
        """After each full step; True when the window is full and `close` is due."""
        self.steps += 1
        return self.steps >= self.window

    @torch.no_grad()
    def close(self, extra: Sequence[Tensor] = ()) -> Motion:
        """End of a window: all dot products, then its displacement enters the basis. The device is waited for once."""
        self._previous.neg_()
        torch._foreach_add_(self._previous_views, self.parameters)  # weights now - weights at the window's start
        self._displacement.copy_(self._previous)
        frozen = self.frozen_windows >= 0
        if frozen:
            self._since_freeze.add_(self._displacement)
        followed = self._dots(self._rows, self._rows[-2:])
        self._enter_basis()
        gram = self._dots(self.basis, self.basis)
        numbers = _to_host([self.reduce_dots(torch.cat([followed, gram], dim=1)), *extra])
        dots = numbers[0].reshape(len(self.groups), -1)
        followed_dots = dots[:, : 2 * len(self._rows)].reshape(-1, len(self._rows), 2)
        motion = Motion(
            window=Since(1, followed_dots[:, :_R, 0], followed_dots[:, -2, 0]),
            frozen=Since(self.frozen_windows + 1, followed_dots[:, _R : 2 * _R, 1], followed_dots[:, -1, 1])
            if frozen
            else None,
            gram=dots[:, 2 * len(self._rows) :].reshape(-1, _R, _R),
            extra=[float(value) for values in numbers[1:] for value in values.ravel()],
        )
        self.frozen_windows = self.frozen_windows + 1 if frozen else -1
        if self.frozen_windows < 0 or self.frozen_windows >= HORIZONS_IN_WINDOWS[-1]:
            self._freeze()
        return motion

    def _enter_basis(self) -> None:
        torch._foreach_sub_(self._scratch_views, self.parameters)
        self.basis[0].copy_(self._scratch).mul_(-float(self.window))  # the last step, as if repeated for a window
        self.basis[1].copy_(self._displacement)
        self.windows += 1
        for row, windows in zip(self.basis[2:], WINDOWS_OF_MEANS[1:], strict=True):
            row.lerp_(self._displacement, max(1 / windows, 1 / self.windows))  # a plain mean while it is young
        torch._foreach_copy_(self._previous_views, self.parameters)
        self.steps = 0

    def _freeze(self) -> None:
        self.frozen.copy_(self.basis)
        self._since_freeze.zero_()
        self.frozen_windows = 0

    def _dots(self, left: Tensor, right: Tensor) -> Tensor:
        """[G, left rows x right rows] all dot products, per group."""
        layout = self.layout
        chunks = (layout.chunks, layout.chunk)
        left = left.view(len(left), *chunks).transpose(0, 1)
        right = right.view(len(right), *chunks).permute(1, 2, 0)
        with _full_precision():
            if left.dtype == torch.float32:
                partial = torch.bmm(left, right)
            elif left.is_cuda:
                partial = torch.bmm(left, right, out_dtype=torch.float32)
            else:
                partial = torch.bmm(left.float(), right.float())
            return layout.sum_groups(partial.flatten(1))

    # --- moving ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def displacement(self, coefficients: Array, residual: Tensor | None = None) -> list[Tensor]:
        """basis x coefficients [G, R] (+ residual), as views shaped like the parameters; valid until the next call."""
        factors = torch.from_numpy(np.ascontiguousarray(coefficients)).to(self._scratch.device, torch.float32)
        per_chunk = factors[self.layout.group_of_chunk]
        out = self._scratch.view(self.layout.chunks, self.layout.chunk)
        out.zero_()
        for index, row in enumerate(self.basis):
            out.addcmul_(row.view_as(out).float(), per_chunk[:, index : index + 1])
        if residual is not None:
            self._scratch.add_(residual)
        return self._scratch_views

    @torch.no_grad()
    def move(self, coefficients: Array) -> None:
        """Change every weight by exactly basis x coefficients."""
        torch._foreach_add_(self.parameters, self.displacement(coefficients))

    @torch.no_grad()
    def place(self, start: Sequence[Tensor], displacement: Sequence[Tensor], share: float = 1.0) -> None:
        """Put the weights at start + share x displacement."""
        torch._foreach_copy_(self.parameters, list(start))
        if share:  # else NaN in a displacement would pass
            torch._foreach_add_(self.parameters, list(displacement), alpha=share)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        counts = {"windows": self.windows, "steps": self.steps, "frozen_windows": self.frozen_windows}
        tensors = {"basis": self.basis, "previous": self._previous}
        if self.frozen_windows >= 0:
            tensors |= {"frozen": self.frozen, "since_freeze": self._since_freeze}
        return counts | tensors

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows, self.steps = int(state["windows"]), int(state["steps"])
        self.frozen_windows = int(state["frozen_windows"])
        self.basis.copy_(state["basis"])
        self._previous.copy_(state["previous"])
        if self.frozen_windows >= 0:
            self.frozen.copy_(state["frozen"])
            self._since_freeze.copy_(state["since_freeze"])


class Layout:
    """Where each parameter lies in a row: a group per parameter (neighbours share one where there are too many)."""

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        self.parameters = list(parameters)
        per_group = -(-len(parameters) // _MOST_GROUPS)
        members = [list(range(i, min(i + per_group, len(parameters)))) for i in range(0, len(parameters), per_group)]
        self.names = tuple(names[group[0]] if len(group) == 1 else f"{names[group[0]]} ..." for group in members)
        total = sum(p.numel() for p in parameters)
        self.chunk = max(_SMALLEST_CHUNK, -(-total // (64 * _MOST_CHUNKS)) * 64)  # aligned rows load faster
        self.starts: list[int] = []
        lengths: list[int] = []
        used = 0
        for group in members:
            place = used * self.chunk
            for index in group:
                self.starts.append(place)
                place += parameters[index].numel()
            lengths.append(-(-(place - used * self.chunk) // self.chunk))
            used += lengths[-1]
        self.chunks = used
        self.size = used * self.chunk
        device = parameters[0].device
        self.group_of_chunk = torch.repeat_interleave(torch.arange(len(members)), torch.tensor(lengths)).to(device)
        exact = torch.float32 if device.type == "mps" else torch.float64
        # Summing by a product gives the same bits in every run, unlike adding by index.
        self._membership = torch.nn.functional.one_hot(self.group_of_chunk, len(members)).T.to(exact).contiguous()

    def views(self, row: Tensor) -> list[Tensor]:
        """The places of the parameters in a row."""
        return [
            row[start : start + p.numel()].view(p.shape) for start, p in zip(self.starts, self.parameters, strict=True)
        ]

    def sum_groups(self, partial: Tensor) -> Tensor:
        """[chunks, n] -> [G, n]"""
        return self._membership @ partial.to(self._membership.dtype)


def _to_host(tensors: Sequence[Tensor]) -> list[Array]:
    """All numbers in one transfer."""
    flat = torch.cat([tensor.reshape(-1).to(tensors[0].dtype) for tensor in tensors]).cpu().double().numpy()
    return np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])


@contextmanager
def _full_precision() -> Iterator[None]:
    """TF32 would round the dot products of fp32 directions to 10 bits."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
