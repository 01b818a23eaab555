"""Finds out how the rows of a batch can be taken, and checks a few of them against true products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretrain.hybrid.linearised.grid import Grid, grid_of
from foretrain.hybrid.linearised.matrix import pair_work, spans
from foretrain.hybrid.linearised.rows import Linearisation, width_of
from foretrain.hybrid.linearised.way import COUPLED, PartWay, Table, Way

_MOST_COLUMNS = 16
"""Outputs per row up to which each takes a backward pass of all rows; beyond, chosen outputs are taken one by one.
Chosen: a pass of all rows costs about as much as ten chosen outputs taken together."""
_MOST_BESIDE = 64
"""Elements of parameters that are used beside linear layers, such as an unknown coefficient, up to which each takes a
pass forward. Chosen: about as dear as one backward pass of all rows."""
_LARGEST_TABLE = 16
"""Times the rows of a call that a table may have entries. Chosen: one output of all rows beside a few of one each."""
_AGREES = 1e-3
"""Relative error up to which rows agree with a true product. Chosen: rounding in fp32 leaves 1e-6, a wrong row 1."""
_WHOLE = 0.02
"""How far from a whole number the index of a row may be found. Chosen: rounding in fp32 leaves 0.005 at 10,000 rows."""

Maps = list[Tensor | None]
"""For each call the output of a column that each of its rows belongs to, by its row; -1: none. None: untouched."""


def find_way(look: Linearisation) -> Way:
    form = look.form
    beside = [_beside(look, number) for number in range(len(look.parts))]
    if not look.calls and any(sum(look.parameters[i].numel() for i in some) > _MOST_BESIDE for some in beside):
        return _singly(look, "there are no linear layers")
    if any(width_of(part) > _MOST_COLUMNS for part in look.parts):
        grid, elements = _grid(look), sum(look.parameters[index].numel() for index in set().union(*beside))
        if grid is not None and elements <= _MOST_BESIDE:
            way = _priced(look, Way(form, parts=[PartWay(beside=beside[0])], grid=grid))
            if agrees(look, way):
                return way
        return _singly(look, "there are many outputs per row")
    passes: list[tuple[list[int], Maps]] = []
    parts = [PartWay(beside=one) for one in beside]
    for index, (part, _) in enumerate(look.columns):
        maps = _maps(look, index)
        if maps is None:
            return _singly(look, COUPLED)
        for number, (columns, known) in enumerate(passes):
            if not any(_meet(one, other) for one, other in zip(known, maps, strict=True)):
                columns.append(index)
                known[:] = [_joined(one, other) for one, other in zip(known, maps, strict=True)]
                parts[part].passes.append(number)
                break
        else:
            passes.append(([index], list(maps)))
            parts[part].passes.append(len(passes) - 1)
        _note(parts[part], look, index, maps)
    for part_way in parts:
        elements = sum(look.parameters[index].numel() for index in part_way.beside)
        if part_way.tables and elements > _MOST_BESIDE:
            return _singly(look, "there are parameters beside those of linear layers")
        if any(table.rows.numel() > _LARGEST_TABLE * look.calls[table.call].rows for table in part_way.tables):
            return _singly(look, COUPLED)
        for table in part_way.tables:
            table.full, table.run = bool((table.rows >= 0).all()), _run(table.rows)
    way = _priced(look, Way(form, passes=[columns for columns, _ in passes], parts=parts))
    return way if agrees(look, way) else _singly(look, COUPLED)


def _singly(look: Linearisation, reason: str) -> Way:
    elements = sum(p.numel() for p in look.parameters)
    return Way(look.form, reason, pair_work=elements, held=elements)


def _priced(look: Linearisation, way: Way) -> Way:
    """Decide which weights are held as factors, by what the products of rows cost."""
    uses: dict[int, float] = {}
    """Number of a weight -> its uses in a row, on the average of all rows."""
    for number, part in enumerate(way.parts):
        share, rows = look.outputs[number] / look.count, {table.call: table.rows.shape[1] for table in part.tables}
        calls = rows if way.grid is None else dict.fromkeys(range(len(look.calls)), 1)
        for call, most in calls.items():
            weight = look.numbers.get(id(look.calls[call].layer.weight))
            if weight is not None:
                each = sum(use.tap.shape[1:-1].numel() for use in look.calls[call].uses)
                uses[weight] = uses.get(weight, 0.0) + share * most * each
    factored, beside = set(), {number for part in way.parts for number in part.beside}
    for number, parameter in enumerate(look.parameters):
        if number in uses and number not in beside:
            out, into = parameter.shape
            work, as_factors = pair_work(uses[number], out, into)
            if as_factors:
                factored.add(number)
            way.held += uses[number] * (out + into) if as_factors else parameter.numel()
            way.pair_work += work
        else:
            way.held += parameter.numel()
            way.pair_work += parameter.numel()
    way.factored = frozenset(factored)
    return way


def _beside(look: Linearisation, number: int) -> tuple[int, ...]:
    """Parameters that the outputs of a part depend on otherwise than through taps."""
    total = look.parts[number].outputs.sum()
    live = [(index, p) for index, p in enumerate(look.parameters) if p.requires_grad and total.requires_grad]
    if not live:
        return ()
    found = torch.autograd.grad(total, [p for _, p in live], retain_graph=True, allow_unused=True)
    return tuple(index for (index, _), gradient in zip(live, found, strict=True) if gradient is not None)


def _grid(look: Linearisation) -> Grid | None:
    """The table that the outputs of the only part are, if they are one."""
    if len(look.parts) != 1 or look.parts[0].outputs.ndim != 2 or look.parts[0].by_class:
        return None
    outputs = look.parts[0].outputs
    touched = [[_touched(some) for some in look.tap_gradients(few.sum())] for few in (outputs[0], outputs[:, 0])]
    return grid_of(outputs.shape, *touched)


# --- which rows belong to which output -------------------------------------------------------------------------------


def _maps(look: Linearisation, index: int) -> Maps | None:
    """For each call, which output of the column each of its rows belongs to; None if a row belongs to several."""
    rows = look.column(index)
    numbers = torch.arange(1, len(rows) + 1, dtype=torch.float64, device=rows.device)
    ones, numbered = look.tap_gradients(rows.sum()), look.tap_gradients((rows * numbers).sum())
    maps: Maps = []
    for one_of_call, number_of_call in zip(ones, numbered, strict=True):
        norm = product = miss = None
        for one, number in zip(one_of_call, number_of_call, strict=True):
            if one is None or number is None:
                continue
            one, number = one.double().flatten(1), number.double().flatten(1)
            norm = _plus(norm, one.square().sum(1))
            product = _plus(product, (one * number).sum(1))
            miss = _plus(miss, number.square().sum(1))
        if norm is None or product is None or miss is None:
            maps.append(None)
            continue
        touched = norm > 0
        ratio = torch.where(touched, product / norm.clamp(min=1e-300), torch.zeros_like(norm))
        if not bool(torch.isfinite(ratio).all()):
            return None
        whole = ratio.round()
        off = (miss - ratio * product).clamp(min=0).sqrt() > _AGREES * miss.sqrt()  # the two are not parallel
        if bool((touched & (((ratio - whole).abs() > _WHOLE) | off | (whole < 1))).any()):
            return None
        maps.append(_completed(torch.where(touched, whole.long() - 1, -1), len(rows)))
    return _filled(maps)


def _note(part: PartWay, look: Linearisation, index: int, maps: Maps) -> None:
    """Write down the rows of a column in the tables of its part."""
    number, column = look.columns[index]
    width, outputs = width_of(look.parts[number]), look.outputs[number]
    for call, known in enumerate(maps):
        if known is None or not bool((known >= 0).any()):
            continue
        found = _turned(known, outputs // width)
        table = next((one for one in part.tables if one.call == call), None)
        if table is None:
            table = Table(call, found.new_full((outputs, found.shape[1]), -1), full=False, run=None)
            part.tables.append(table)
        wider = found.shape[1] - table.rows.shape[1]
        if wider > 0:
            table.rows = torch.cat([table.rows, table.rows.new_full((outputs, wider), -1)], 1)
        table.rows[column::width, : found.shape[1]] = found


def _turned(known: Tensor, outputs: int) -> Tensor:
    """[outputs, most]: the rows that belong to each output, from the output that each row belongs to."""
    rows = (known >= 0).nonzero().squeeze(1)
    order = torch.argsort(known[rows], stable=True)
    rows, of = rows[order], known[rows][order]
    counts = torch.bincount(of, minlength=outputs)
    before = torch.cumsum(counts, 0) - counts
    place = torch.arange(len(rows), device=rows.device) - before[of]
    table = rows.new_full((outputs, int(counts.max())), -1)
    table[of, place] = rows
    return table


def _run(rows: Tensor) -> slice | None:
    """Rows that follow one another, one for each output; None where they do not."""
    if rows.shape[1] != 1 or not len(rows):
        return None
    only = rows.squeeze(1)
    first = int(only[0])
    if first < 0 or not torch.equal(only, torch.arange(first, first + len(only), device=only.device)):
        return None
    return slice(first, first + len(only))


def agrees(look: Linearisation, way: Way) -> bool:
    """Whether some rows are what a true product says."""
    draw = torch.Generator().manual_seed(look.count)
    some = torch.randperm(look.count, generator=draw)[: min(look.count, 32)].sort().values.to(look.loss.device)
    chosen = [some[(some >= one.start) & (some < one.stop)] - one.start for one in spans(look.outputs)]
    rows = look.rows(way, chosen).numbers()
    weights = torch.randn(len(some), generator=draw).to(rows)
    mine = rows.T @ weights
    with torch.enable_grad():
        parts = look.objective.parts(look.model, look.batch)
        flat = torch.cat([part.outputs.reshape(-1) for part in parts])
        true = torch.autograd.grad((flat[some] * weights).sum(), look.parameters, allow_unused=True)
    whole = _flat(true, look.parameters)
    return bool((mine - whole).norm() <= _AGREES * whole.norm())


def _touched(gradients: list[Tensor | None]) -> Tensor | None:
    """Which rows of a call have a gradient."""
    found = None
    for gradient in gradients:
        if gradient is not None:
            found = _plus(found, gradient.flatten(1).abs().sum(1))
    return None if found is None else found > 0


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _meet(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and bool(((one >= 0) & (other >= 0)).any())


def _joined(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return torch.where(one >= 0, one, other)


def _filled(maps: Maps) -> Maps:
    """Rows whose gradient happened to be 0 in one call belong where the same rows of the other calls do."""
    result = list(maps)
    for index, one in enumerate(result):
        for other in maps:
            if one is None or other is None or len(one) != len(other):
                continue
            if bool(((one < 0) | (other < 0) | (one == other)).all()):
                one = torch.where(one >= 0, one, other)
        result[index] = one
    return result


def _completed(known: Tensor, outputs: int) -> Tensor:
    """Rows whose gradient happened to be 0, as behind a ReLU, belong where they would in the order of all others."""
    touched = known >= 0
    shift = known - torch.arange(len(known), device=known.device)
    if not bool(touched.any()) or not bool((shift[touched] == shift[touched][0]).all()):
        return known
    expected = torch.arange(len(known), device=known.device) + shift[touched][0]
    return torch.where(touched | (expected < 0) | (expected >= outputs), known, expected)


def _flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """All gradients as one vector."""
    each = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
    return torch.cat([g.reshape(-1) for g in each])
