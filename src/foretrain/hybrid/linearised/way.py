"""How the rows of a batch are taken: found out once for all batches of one form."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foretrain.hybrid.linearised.grid import Grid

COUPLED = "rows depend on each other"
"""Why outputs are taken one by one: an integral over all points is in each."""


@dataclass
class Table:
    """Which rows of a call of a layer the outputs of a part depend on."""

    call: int
    rows: Tensor
    """[outputs of the part, rows of the call at the most]; -1: fewer."""
    full: bool
    """No -1 is in it."""
    run: slice | None
    """The rows of the call that belong to the outputs in their order, one to each; None where it is not so simple."""


@dataclass
class PartWay:
    """How the rows of one part of the outputs are taken."""

    tables: list[Table] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    """For each column of the part the backward pass that it belongs to."""
    beside: tuple[int, ...] = ()
    """Numbers of the parameters that its outputs depend on beside linear layers."""

    @property
    def alone(self) -> bool:
        """Its outputs depend on no layer, as those of a penalty on weights do."""
        return not self.tables


@dataclass
class Way:
    form: tuple[object, ...]
    reason: str = ""
    """Why outputs are taken one by one; empty where they are not."""
    passes: list[list[int]] = field(default_factory=list)
    """Columns whose rows meet in no call: one backward pass takes the sum of their outputs."""
    parts: list[PartWay] = field(default_factory=list)
    grid: Grid | None = None
    """Outputs are a table: its diagonals are taken."""
    factored: frozenset[int] = frozenset()
    """Numbers of the weights whose columns are held as factors."""
    pair_work: float = 0.0
    """Multiplications that the product of two rows takes."""
    held: float = 0.0
    """Numbers that are held for each row."""

    @property
    def one_by_one(self) -> bool:
        return bool(self.reason)

    @property
    def plain(self) -> bool:
        """Rows are taken without anything that the device would have to be asked for: they can be recorded."""
        return not self.one_by_one and self.grid is None
