"""How the weights move: windows of full steps, their displacement, and the basis that moves are made of.

All directions live in one buffer, row by row, each group of weights padded to whole chunks. So two batched products per
window give every dot product that is needed, exactly and with one host wait, and a move is a few passes over the rows.
In a run on shards their dot products meet in `World.reduce`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretrain.engine.memory.host import add_each, copy_each
from foretrain.engine.precision import full_precision
from foretrain.engine.world import ALONE, ReduceKind, World
from foretrain.motion.predictors.base import Array
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, WINDOWS_OF_MEANS
from foretrain.motion.rows import SavedRows, grouped, lie_in_row, places_in_rows
from foretrain.persist.codec import real_view
from foretrain.persist.parts import SpreadForm, form_of_spread, local
from foretrain.persist.stateful import Stateful

_R = len(DIRECTIONS)


@dataclass(frozen=True, slots=True)
class Since:
    """The displacement that followed on a basis, as dot products per group."""

    windows: int
    dots: Array
    """[G, R] dot products of the displacement with the basis directions."""
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
    """[G, R, R] dot products of the basis that this window has entered, of which the next move is made."""
    extra: tuple[Array, ...]
    """The numbers of the tensors that the caller wanted to be read in the same transfer."""


LARGEST_FP32_BASIS = 32_000_000
"""Trained parameters up to which `hybrid.basis_type = "auto"` stores directions in fp32. Chosen: these take 1.5 GB."""


def basis_type(wanted: str, trained: int) -> torch.dtype:
    """The number format of stored directions, for so many trained parameters."""
    narrow = wanted == "bf16" or (wanted == "auto" and trained > LARGEST_FP32_BASIS)
    return torch.bfloat16 if narrow else torch.float32


class Watched(NamedTuple):
    """What a process watches of the weights."""

    parts: Sequence[Tensor]
    forms: Sequence[SpreadForm | None]
    """How each weight is spread over ranks; None: it is not."""
    shares: Sequence[float] = ()
    """What each part counts in a sum over ranks; none: 1."""
    parted: bool = False
    """Ranks watch different numbers."""
    flat: bool = False
    """Parts are of the weights' numbers in one line, whatever shape the weights have."""


class Trajectory(Stateful):
    """Observes weights in windows, in place. Of its own methods only `place` changes them."""

    saved = ("windows", "steps", "frozen_windows")

    _ROWS = 2 * _R + 2
    """Rows: the basis, the frozen basis, the displacement since it was frozen, and that of the window."""

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
        """hold: keep directions from the beginning, and not only after `hold` is called."""
        self.parameters: list[Tensor] = []
        """The weights that moves move."""
        self.watched: list[Tensor] = []
        """What is watched of them here: all, or this rank's part of each."""
        self.window = window
        self.world = world
        self._lay_out(parameters, names, dtype)
        self.held = hold
        """There is memory for directions. Without it windows are counted, and the motion is not seen."""
        self._make_room(self.layout.size if hold else 0)
        self.windows = 0
        """Windows that entered the basis so far."""
        self.steps = 0
        """Full steps in the open window."""
        self.frozen_windows = -1
        """Windows since the basis was frozen; -1 while none is."""
        self.restart()

    def _lay_out(self, parameters: Sequence[Tensor], names: Sequence[str] | None, dtype: torch.dtype) -> None:
        self.parameters[:] = [real_view(local(p)) for p in parameters]
        self.device = self.parameters[0].device
        self._dtype = dtype
        watched = self._watched(parameters)
        self.watched[:] = watched.parts
        self.parted = watched.parted
        """Ranks watch different parts of the weights, so that their sums meet; else they watch the same numbers."""
        names = names or [str(index) for index in range(len(self.parameters))]
        self.layout = Layout(self.watched, names, watched.shares)
        self._rows_saved = SavedRows(self.layout, watched.forms, watched.flat)

    def _watched(self, parameters: Sequence[Tensor]) -> Watched:
        """What of these weights is watched here."""
        parted = self.world.is_parted(parameters)
        shares = [self.world.share(p) for p in parameters] if parted else []
        return Watched(self.parameters, [form_of_spread(p) for p in parameters], shares, parted)

    def cover(self, parameters: Sequence[Tensor], names: Sequence[str], dtype: torch.dtype) -> None:
        """Watch other weights from now on, as if nothing had been seen yet. `parameters` stays the same list."""
        held = self.held
        self.release()
        self._lay_out(parameters, names, dtype)
        if held:
            self.hold()

    def _make_room(self, size: int) -> None:
        """Allocate rows of so many elements, all zero."""
        self._rows = self._zeros(self._ROWS, size, dtype=self._dtype)
        self.basis = self._rows[:_R]
        self.frozen = self._rows[_R : 2 * _R]
        self._since_freeze = self._rows[2 * _R]
        self._previous = self._zeros(size)
        self._scratch = self._zeros(size)
        self._previous_views = self.layout.views(self._previous) if size == self.layout.size else []
        self._scratch_views = self.layout.views(self._scratch) if size == self.layout.size else []

    def hold(self) -> None:
        """Keep directions from now on, beginning with none."""
        if not self.held:
            self._make_room(self.layout.size)
            self.held = True
            self.restart()

    def release(self) -> None:
        """Free the memory of all directions: nothing will be made of them soon."""
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
        """The memory of all buffers."""
        return sum(t.numel() * t.element_size() for t in (self._rows, self._previous, self._scratch))

    # --- observing ---------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Open a window at the weights as they are. After a move the frozen basis is not comparable any more."""
        if self.held:
            copy_each(self._previous_views, self.watched)
        self.steps = 0
        self.frozen_windows = -1

    @torch.no_grad()
    def forget(self) -> None:
        """Forget all directions, as if nothing had been seen yet."""
        self.basis.zero_()
        self.windows = 0
        self.restart()

    def before_step(self) -> None:
        """Be told before each full step. The last step of a window is a direction of its own."""
        if self.held and self.steps == self.window - 1:
            copy_each(self._scratch_views, self.watched)

    def after_step(self) -> bool:
        """Be told after each full step. Return True when the window is full and `close`, or `skip`, is due."""
        self.steps += 1
        return self.steps >= self.window

    def skip(self, extra: Sequence[Tensor], kinds: Sequence[ReduceKind] = ()) -> tuple[Array, ...]:
        """End a window of which no direction is kept, and read only what the caller wants."""
        self.steps = 0
        return tuple(self._to_host(extra, kinds or ["same"] * len(extra)))

    def _to_host(self, tensors: Sequence[Tensor], kinds: Sequence[ReduceKind]) -> list[Array]:
        """Read all numbers in one transfer."""
        numbers = np.asarray(self.world.read(tensors, kinds), dtype=np.float64)
        return np.split(numbers, np.cumsum([tensor.numel() for tensor in tensors])[:-1])

    @torch.no_grad()
    def close(self, extra: Sequence[Tensor] = (), kinds: Sequence[ReduceKind] = ()) -> Motion:
        """End a window: compute dot products, then let its displacement enter the basis. The host waits once.

        kinds: how numbers that the caller wants are combined where there are several processes.
        """
        frozen = self.frozen_windows >= 0
        freeze = not frozen or self.frozen_windows + 1 >= HORIZONS_IN_WINDOWS[-1]
        self.windows += 1
        self.steps = 0
        followed, gram = (self.layout.sum_groups(partial) for partial in self._enter(frozen, freeze))
        dots_here = torch.cat([followed, gram], dim=1)
        if self.layout.shares is not None:
            dots_here = dots_here * self.layout.shares
        sums: ReduceKind = "sharded" if self.parted or self.world.size == 1 else "same"
        numbers = self._to_host([dots_here, *extra], [sums, *(kinds or ["same"] * len(extra))])
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
        """Compute dot products per chunk: all rows with the displacements, then the basis that this window has entered.

        frozen: a basis is frozen; freeze: this one is to be, from now on.
        """
        self._previous.neg_()
        torch._foreach_add_(self._previous_views, self.watched)  # weights now - weights at the window's start
        displacement = self._rows[-1].copy_(self._previous)
        if frozen:
            self._since_freeze.add_(displacement)
        followed = self._dots(self._rows, self._rows[-2:])
        torch._foreach_sub_(self._scratch_views, self.watched)
        self._enter_basis(self.basis, self._scratch, displacement)
        torch._foreach_copy_(self._previous_views, self.watched)
        if freeze:
            self.frozen.copy_(self.basis)
            self._since_freeze.zero_()
        return followed, self._dots(self.basis, self.basis)

    def _enter_basis(self, basis: Tensor, last_step: Tensor, displacement: Tensor) -> None:
        """Let a window enter the basis. last_step: weights before the last step minus those after it."""
        basis[0].copy_(last_step).mul_(-float(self.window))  # as if repeated for a window
        basis[1].copy_(displacement)
        for row, windows in zip(basis[2:], WINDOWS_OF_MEANS[1:], strict=True):
            row.lerp_(displacement, max(1 / windows, 1 / self.windows))  # a plain mean while it is young

    def _dots(self, left: Tensor, right: Tensor) -> Tensor:
        """Return [chunks, left rows x right rows], all dot products per chunk."""
        left = left.view(len(left), -1, self.layout.chunk).transpose(0, 1)
        right = right.view(len(right), -1, self.layout.chunk).permute(1, 2, 0)
        with full_precision():
            if left.dtype == torch.float32:
                partial = torch.bmm(left, right)
            elif left.is_cuda:
                partial = torch.bmm(left, right, out_dtype=torch.float32)
            else:
                partial = torch.bmm(left.float(), right.float())
            return partial.flatten(1)

    # --- moving ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def displacement(self, coefficients: Array) -> list[Tensor]:
        """Return basis x coefficients [G, R] as views like the parameters, valid until the next call."""
        per_chunk = self._per_chunk(coefficients)
        out = self._scratch.view(self.layout.chunks, self.layout.chunk)
        out.zero_()
        for index, row in enumerate(self.basis):
            out.addcmul_(row.view_as(out).float(), per_chunk[:, index : index + 1])
        return self._scratch_views

    def _per_chunk(self, coefficients: Array) -> Tensor:
        """Return [chunks, R] coefficients on the device."""
        factors = torch.from_numpy(np.ascontiguousarray(coefficients)).to(self.device, torch.float32)
        return factors[self.layout.group_of_chunk]

    def place(self, start: Sequence[Tensor] | None, displacement: Sequence[Tensor], share: float = 1.0) -> None:
        """Put the weights at start + share x displacement. Both may be in host memory. None: they are at start."""
        if start is not None:
            copy_each(self.parameters, start)
        if share:  # else NaN in a displacement would pass
            add_each(self.parameters, displacement, share)

    # --- state -------------------------------------------------------------------------------------------------------

    def _directions(self) -> dict[str, Tensor]:
        """Everything that is as large as the weights."""
        tensors = {"basis": self.basis, "previous": self._previous} if self.held else {}
        if self.held and self.frozen_windows >= 0:
            tensors |= {"frozen": self.frozen, "since_freeze": self._since_freeze}
        return tensors

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self._rows_saved.of(self._directions())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back. Directions are copied in place, because there may be no room for them twice."""
        if self._rows_saved.held(state, "basis"):
            self.hold()
        else:
            self.release()
        super().load_state_dict({name: value for name, value in state.items() if name in self.saved})
        for name, tensor in self._directions().items():
            self._rows_saved.fill(tensor, state, name, "Trajectory")


class Layout:
    """Knows where each parameter lies in a row. Each is a group; neighbours share one where there are too many."""

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], shares: Sequence[float] = ()) -> None:
        """shares: what the part of each parameter that is here counts in a sum over processes; none: 1. Parameters of
        one group have one share."""
        self.parameters = list(parameters)
        members = grouped(list(shares) or [1.0] * len(parameters))
        self.names = tuple(names[group[0]] if len(group) == 1 else f"{names[group[0]]} ..." for group in members)
        self.chunk, self.starts, lengths = lie_in_row([p.numel() for p in parameters], members)
        self.chunks = sum(lengths)
        self.size = self.chunks * self.chunk
        device = parameters[0].device
        self.group_of_chunk = torch.repeat_interleave(torch.arange(len(members)), torch.tensor(lengths)).to(device)
        exact = torch.float32 if device.type == "mps" else torch.float64
        self.shares: Tensor | None = None
        """[G, 1] of each group; None where all count whole."""
        if any(share != 1 for share in shares):
            self.shares = torch.tensor([[shares[group[0]]] for group in members], dtype=exact, device=device)
        self.roots_of_shares: Tensor | None = None
        """[parameters] roots of their shares, for norms."""
        if self.shares is not None:
            self.roots_of_shares = torch.tensor(list(shares), dtype=exact, device=device).sqrt()
        # Summing by a product gives the same bits in every run, unlike adding by index.
        self._membership = torch.nn.functional.one_hot(self.group_of_chunk, len(members)).T.to(exact).contiguous()

    def views(self, row: Tensor) -> list[Tensor]:
        """The places of the parameters in a row."""
        return places_in_rows(row, self.starts, [p.shape for p in self.parameters])

    def sum_groups(self, partial: Tensor) -> Tensor:
        """Sum [chunks, n] to [G, n]."""
        return self._membership @ partial.to(self._membership.dtype)
