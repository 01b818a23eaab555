"""Which outputs a leap takes rows of, and the least-squares problem that they make."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrain.engine.objective import OutputPart
from foretrain.engine.world import World
from foretrain.hybrid.linearised.grid import Grid
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.hybrid.linearised.solve import Root, System
from foretrain.hybrid.linearised.way import Way

_LEAST_OF_BLOCK = 16
"""Rows that a block gives at least, if it has them. Chosen: boundaries have few rows, and matter."""

Choice = list[Tensor]
"""Numbers of the chosen units of each part."""


def choose(parts: list[OutputPart], rows: int, seed: int, grid: Grid | None, ranks: int = 1) -> Choice | None:
    """Units of all parts with so many outputs together, each part by its share; of a table whole diagonals, or a part
    of one. None: all of them are wanted.

    ranks: so many processes hold parts like these, whose units are numbered one process after the other. All of them
    draw the same.
    """
    share = rows / (ranks * sum(part.outputs.numel() for part in parts))
    if share >= 1:
        return None
    draw, chosen = torch.Generator().manual_seed(seed), []
    if grid is not None:
        outputs, each = parts[0].outputs, max(1, rows // ranks)
        drawn = [rank * outputs.numel() + _of_table(grid, each, draw) for rank in range(ranks)]
        return [torch.cat(drawn).to(outputs.device)]
    for part in parts:
        units, least = ranks * part.units, min(_LEAST_OF_BLOCK, rows // len(parts)) // outputs_of_unit(part)
        wanted = max(1, least, round(share * units))
        some = torch.randperm(units, generator=draw)[: min(wanted, units)]
        chosen.append(some.sort().values.to(part.outputs.device))
    return chosen


def _of_table(grid: Grid, rows: int, draw: torch.Generator) -> Tensor:
    some = torch.randperm(grid.diagonals, generator=draw)[: max(1, round(rows / grid.size))]
    on_them = grid.outputs(some.sort().values)
    if rows < grid.size:
        on_them = on_them[torch.randperm(grid.size, generator=draw)[:rows].sort().values]
    return on_them


def of_rank(chosen: Choice, parts: list[OutputPart], rank: int) -> Choice:
    """Those that a process holds, by its own numbers."""
    firsts = [rank * part.units for part in parts]
    return [
        some[(some >= first) & (some < first + part.units)] - first
        for some, part, first in zip(chosen, parts, firsts, strict=True)
    ]


def outputs_of_unit(part: OutputPart) -> int:
    return part.outputs.numel() // part.units


def everything(parts: list[OutputPart]) -> Choice:
    return [torch.arange(part.units, device=part.outputs.device) for part in parts]


def system_of(
    look: Linearisation, way: Way, chosen: Choice | None, world: World, totals: Sequence[int] | None = None
) -> System:
    """The linearised problem of the chosen units, or of all. totals: how many units of each part there are with those
    of other processes."""
    units = everything(look.parts) if chosen is None else chosen
    counts = [len(some) for some in units] if totals is None else totals
    found = [part.curvature(some, count) for part, some, count in zip(look.parts, units, counts, strict=True)]
    gradients, factors = zip(*found, strict=True)
    numbers = [_outputs(part, some) for part, some in zip(look.parts, units, strict=True)]
    rows, root = look.rows(way, None if chosen is None else numbers), Root(factors)
    return System(rows, root, root.undone(gradients).to(rows.dtype), world)


def outputs_of(parts: Sequence[OutputPart], chosen: Choice) -> Tensor:
    """The outputs of the chosen units, one part after the other."""
    pairs = zip(parts, chosen, strict=True)
    return torch.cat([part.outputs.detach().reshape(-1)[_outputs(part, some)] for part, some in pairs])


def _outputs(part: OutputPart, units: Tensor) -> Tensor:
    """Numbers of the outputs of these units within their part."""
    if not part.by_class:
        return units
    classes = part.outputs.shape[-1]
    return (units.unsqueeze(1) * classes + torch.arange(classes, device=units.device)).reshape(-1)
