"""How the weights move: windows of full steps, their displacement, and the basis that moves are made of.

All directions live in one buffer, row by row, each group of weights padded to whole chunks. So two batched products per
window give every dot product that is needed, exactly and with one host wait, and a move is a few passes over the rows.
In a run on shards their dot products meet in `World.reduce`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrain.engine.memory.host import add_each, copy_each
from foretrain.engine.world import ALONE, World
from foretrain.motion.predictors.base import Array
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, WINDOWS_OF_MEANS
from foretrain.persist.codec import real_view
from foretrain.persist.stateful import Stateful, entry

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
    extra: tuple[Array, ...]
    """What the caller wanted to have read along: the numbers of each of its tensors."""


LARGEST_FP32_BASIS = 32_000_000
"""Trained parameters up to which `hybrid.basis_type = "auto"` stores directions in fp32."""


def basis_type(wanted: str, trained: int) -> torch.dtype:
    """Number format of stored directions, for as many trained parameters."""
    narrow = wanted == "bf16" or (wanted == "auto" and trained > LARGEST_FP32_BASIS)
    return torch.bfloat16 if narrow else torch.float32


class Trajectory(Stateful):
    """Observes weights in windows, in place and without copies of its own state; only `place` changes weights."""

    saved = ("windows", "steps", "frozen_windows")

    _ROWS = 2 * _R + 2
    """The basis, the frozen one, the displacement since then, and that of the window, last."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
        *,
        window: int = 10,
        dtype: torch.dtype = torch.float32,
        world: World = ALONE,
        hold: bool = True,
    ) -> None:
        """hold: from the beginning; otherwise not before `hold` is called."""
        self.parameters: list[Tensor] = []
        self.window = window
        self.world = world
        self._lay_out(parameters, names, dtype)
        self.held = hold
        """There is memory for directions; without it windows are counted, and nothing is seen of the motion."""
        self._make_room(self.layout.size if hold else 0)
        self.windows = 0
        """Windows that entered the basis so far."""
        self.steps = 0
        """Full steps in the open window."""
        self.frozen_windows = -1
        """Windows since the basis was frozen; -1 while none is."""
        self.restart()

    def _lay_out(self, parameters: Sequence[Tensor], names: Sequence[str] | None, dtype: torch.dtype) -> None:
        self.parameters[:] = [real_view(p.detach()) for p in parameters]
        self.layout = Layout(self.parameters, names or [str(index) for index in range(len(self.parameters))])
        self.device = self.parameters[0].device
        self._dtype = dtype

    def cover(self, parameters: Sequence[Tensor], names: Sequence[str], dtype: torch.dtype) -> None:
        """Watch others from now on, as if nothing had been seen yet. `parameters` stays the same list."""
        held = self.held
        self.release()
        self._lay_out(parameters, names, dtype)
        if held:
            self.hold()

    def _make_room(self, size: int) -> None:
        """Rows of so many elements, all zero."""
        self._rows = self._zeros(self._ROWS, size, dtype=self._dtype)
        self.basis = self._rows[:_R]
        self.frozen = self._rows[_R : 2 * _R]
        self._since_freeze = self._rows[2 * _R]
        self._previous = self._zeros(size)
        self._scratch = self._zeros(size)
        self._previous_views = self.layout.views(self._previous) if size else []
        self._scratch_views = self.layout.views(self._scratch) if size else []

    def hold(self) -> None:
        """From now on directions are kept, beginning with none."""
        if not self.held:
            self._make_room(self.layout.size)
            self.held = True
            self.restart()

    def release(self) -> None:
        """Give the memory of all directions back: nothing will be made of them soon."""
        self._make_room(0)
        self.held = False
        self.windows = self.steps = 0
        self.frozen_windows = -1

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def groups(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def bytes(self) -> int:
        """Memory of all buffers."""
        return sum(t.numel() * t.element_size() for t in (self._rows, self._previous, self._scratch))

    # --- observing ---------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Open a window at the weights as they are. A move lies between: what was frozen is not comparable any more."""
        if self.held:
            copy_each(self._previous_views, self.parameters)
        self.steps = 0
        self.frozen_windows = -1

    @torch.no_grad()
    def forget(self) -> None:
        """Begin anew: nothing was seen yet."""
        self.basis.zero_()
        self.windows = 0
        self.restart()

    def before_step(self) -> None:
        """Before each full step: the last one of a window is a direction of its own."""
        if self.held and self.steps == self.window - 1:
            copy_each(self._scratch_views, self.parameters)

    def after_step(self) -> bool:
        """After each full step; True when the window is full and `close`, or `skip`, is due."""
        self.steps += 1
        return self.steps >= self.window

    def skip(self, extra: Sequence[Tensor]) -> tuple[Array, ...]:
        """End of a window of which no direction is kept: only what the caller wants to have read."""
        self.steps = 0
        return tuple(self._to_host(extra))

    def _to_host(self, tensors: Sequence[Tensor]) -> list[Array]:
        """All numbers in one transfer."""
        flat = torch.cat([tensor.reshape(-1).to(tensors[0].dtype) for tensor in tensors])
        numbers = np.asarray(self.world.to_host(flat), dtype=np.float64)
        return np.split(numbers, np.cumsum([tensor.numel() for tensor in tensors])[:-1])

    @torch.no_grad()
    def close(self, extra: Sequence[Tensor] = ()) -> Motion:
        """End of a window: all dot products, then its displacement enters the basis. The device is waited for once."""
        frozen = self.frozen_windows >= 0
        freeze = not frozen or self.frozen_windows + 1 >= HORIZONS_IN_WINDOWS[-1]
        self.windows += 1
        self.steps = 0
        followed, gram = (self.layout.sum_groups(partial) for partial in self._enter(frozen, freeze))
        numbers = self._to_host([self.world.reduce(torch.cat([followed, gram], dim=1), "sum"), *extra])
        dots = numbers[0].reshape(len(self.groups), -1)
        followed_size, gram_size = followed.shape[1], gram.shape[1]
        followed_dots = dots[:, :followed_size].reshape(-1, followed_size // 2, 2)
        motion = Motion(
            window=Since(1, followed_dots[:, :_R, 1], followed_dots[:, -1, 1]),
            frozen=Since(self.frozen_windows + 1, followed_dots[:, _R : 2 * _R, 0], followed_dots[:, -2, 0])
            if frozen
            else None,
            gram=dots[:, -gram_size:].reshape(-1, _R, _R),
            extra=tuple(numbers[1:]),
        )
        self.frozen_windows = 0 if freeze else self.frozen_windows + 1
        return motion

    def _enter(self, frozen: bool, freeze: bool) -> tuple[Tensor, Tensor]:
        """Dot products per chunk: of all rows with the displacements, then of the basis that this window has entered.

        frozen: a basis is frozen; freeze: this one is to be, from now on.
        """
        self._previous.neg_()
        torch._foreach_add_(self._previous_views, self.parameters)  # weights now - weights at the window's start
        displacement = self._rows[-1].copy_(self._previous)
        if frozen:
            self._since_freeze.add_(displacement)
        followed = self._dots(self._rows, self._rows[-2:])
        torch._foreach_sub_(self._scratch_views, self.parameters)
        self._enter_basis(self.basis, self._scratch, displacement)
        torch._foreach_copy_(self._previous_views, self.parameters)
        if freeze:
            self.frozen.copy_(self.basis)
            self._since_freeze.zero_()
        return followed, self._dots(self.basis, self.basis)

    def _enter_basis(self, basis: Tensor, last_step: Tensor, displacement: Tensor) -> None:
        """last_step: backwards."""
        basis[0].copy_(last_step).mul_(-float(self.window))  # as if repeated for a window
        basis[1].copy_(displacement)
        for row, windows in zip(basis[2:], WINDOWS_OF_MEANS[1:], strict=True):
            row.lerp_(displacement, max(1 / windows, 1 / self.windows))  # a plain mean while it is young

    def _dots(self, left: Tensor, right: Tensor) -> Tensor:
        """[chunks, left rows x right rows] all dot products, per chunk."""
        left = left.view(len(left), -1, self.layout.chunk).transpose(0, 1)
        right = right.view(len(right), -1, self.layout.chunk).permute(1, 2, 0)
        with _full_precision():
            if left.dtype == torch.float32:
                partial = torch.bmm(left, right)
            elif left.is_cuda:
                partial = torch.bmm(left, right, out_dtype=torch.float32)
            else:
                partial = torch.bmm(left.float(), right.float())
            return partial.flatten(1)

    # --- moving ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def displacement(self, coefficients: Array, residual: Tensor | None = None) -> list[Tensor]:
        """basis x coefficients [G, R] (+ residual), as views shaped like the parameters; valid until the next call."""
        per_chunk = self._per_chunk(coefficients)
        out = self._scratch.view(self.layout.chunks, self.layout.chunk)
        out.zero_()
        for index, row in enumerate(self.basis):
            out.addcmul_(row.view_as(out).float(), per_chunk[:, index : index + 1])
        if residual is not None:
            self._scratch.add_(residual)
        return self._scratch_views

    def _per_chunk(self, coefficients: Array) -> Tensor:
        """[chunks, R] on the device."""
        factors = torch.from_numpy(np.ascontiguousarray(coefficients)).to(self.device, torch.float32)
        return factors[self.layout.group_of_chunk]

    def move(self, coefficients: Array) -> None:
        """Change every weight by exactly basis x coefficients."""
        add_each(self.parameters, self.displacement(coefficients))

    def place(self, start: Sequence[Tensor] | None, displacement: Sequence[Tensor], share: float = 1.0) -> None:
        """Put the weights at start + share x displacement. Both may be in host memory; None: they are at the start."""
        if start is not None:
            copy_each(self.parameters, start)
        if share:  # else NaN in a displacement would pass
            add_each(self.parameters, displacement, share)

    # --- state -------------------------------------------------------------------------------------------------------

    def _directions(self) -> dict[str, Tensor]:
        """What there is of the size of the weights."""
        tensors = {"basis": self.basis, "previous": self._previous} if self.held else {}
        if self.held and self.frozen_windows >= 0:
            tensors |= {"frozen": self.frozen, "since_freeze": self._since_freeze}
        return tensors

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self._directions()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Directions are copied straight to where they belong: there may be no room for them twice."""
        if "basis" in state:
            self.hold()
        else:
            self.release()
        super().load_state_dict({name: value for name, value in state.items() if name in self.saved})
        for name, tensor in self._directions().items():
            tensor.copy_(entry(state, name, "Trajectory"))


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


@contextmanager
def _full_precision() -> Iterator[None]:
    """TF32 would round the dot products of fp32 directions to 10 bits."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
