"""Outputs that are a table, as those of operator networks: each depends on one row of one network and on one row of
another. Outputs along a diagonal share no row, so that one backward pass takes them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Grid:
    """A table of outputs, and what its rows and columns are to the calls of layers."""

    rows: int
    columns: int
    by_row: list[bool | None]
    """For each call: its rows are the rows of the table, or the columns of it; None: no output depends on it."""

    @property
    def diagonals(self) -> int:
        return max(self.rows, self.columns)

    @property
    def size(self) -> int:
        """Outputs of a diagonal."""
        return min(self.rows, self.columns)

    def of(self, outputs: Tensor) -> Tensor:
        """The diagonal that each output lies on."""
        row, column = outputs // self.columns, outputs % self.columns
        return (row - column if self.rows >= self.columns else column - row) % self.diagonals

    def outputs(self, diagonals: Tensor) -> Tensor:
        """Numbers of the outputs on these diagonals, one after the other."""
        along = torch.arange(self.size, device=diagonals.device)
        across = (along + diagonals.unsqueeze(1)) % self.diagonals
        rows, columns = (across, along) if self.rows >= self.columns else (along, across)
        return (rows * self.columns + columns).reshape(-1)

    def rows_of(self, call: int, outputs: Tensor) -> Tensor | None:
        """Rows of a call that these outputs depend on."""
        known = self.by_row[call]
        if known is None:
            return None
        return outputs // self.columns if known else outputs % self.columns


def grid_of(shape: torch.Size, in_first_row: list[Tensor | None], in_first_column: list[Tensor | None]) -> Grid | None:
    """The table that outputs of this shape are; None where calls do not fit it. in_first_row, in_first_column: which
    rows of each call the outputs of the first row and of the first column of the table depend on."""
    if len(shape) != 2 or min(shape) < 2:
        return None
    by_row: list[bool | None] = []
    for row, column in zip(in_first_row, in_first_column, strict=True):
        if row is None and column is None:
            by_row.append(None)
        elif row is not None and len(row) == shape[0] and _only_first(row):
            by_row.append(True)
        elif column is not None and len(column) == shape[1] and _only_first(column):
            by_row.append(False)
        else:
            return None
    return Grid(shape[0], shape[1], by_row)


def _only_first(touched: Tensor) -> bool:
    return not bool(touched[1:].any())
