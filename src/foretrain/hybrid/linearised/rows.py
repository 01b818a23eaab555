"""The outputs of an objective at the weights as they are, and rows of their Jacobian, as few as are asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foretrain.engine.objective import Objective, OutputPart, UnknownForm
from foretrain.hybrid.linearised.grid import Grid
from foretrain.hybrid.linearised.matrix import Factor, RowMatrix, as_rows, spans
from foretrain.hybrid.linearised.taps import Call, Taps
from foretrain.hybrid.linearised.way import PartWay, Table, Way
from foretrain.models.recomputing import computed_once

TOGETHER = 16
"""Outputs that are taken one by one, but by one batched backward pass. Chosen: each takes the memory of a backward pass
of the whole batch, and more of them at once are hardly faster."""
_ALONE_TOGETHER = 256
"""Outputs that depend on no layer and are taken together. Chosen: each takes the memory of the weights only."""

Chosen = Sequence[Tensor]
"""Numbers of the chosen outputs of each part, within the part."""
Products = dict[int, list[tuple[Tensor, Tensor]]]
"""Number of a weight -> (out, into) [rows, uses, width] of the calls that use it."""


class Linearisation:
    """Outputs, loss and, on demand, rows. One object per point and batch."""

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        parameters: Sequence[Tensor],
        batch: object,
        *,
        with_taps: bool = True,
    ) -> None:
        """with_taps: else outputs are cheaper, and rows can only be taken one by one."""
        self.model, self.objective, self.parameters, self.batch = model, objective, parameters, batch
        with torch.enable_grad(), computed_once(model), Taps(model, parameters if with_taps else ()) as taps:
            self.parts: list[OutputPart] = objective.parts(model, batch)
        if not self.parts:
            raise UnknownForm("no block has a row that counts")
        self.calls: list[Call] = taps.calls
        with torch.no_grad():
            means = [part.losses(part.outputs.detach()).mean() for part in self.parts]
            self.loss = torch.stack([p.weight * mean for p, mean in zip(self.parts, means, strict=True)]).sum()
        self.own_loss = self.loss
        """That of the rows of this process; `loss` becomes that of all where there are others."""
        self.means = {part.name: mean for part, mean in zip(self.parts, means, strict=True)}
        """Mean loss of each part."""
        self.outputs = [part.outputs.numel() for part in self.parts]
        self._versions = self._versions_now()
        calls = [(id(call.layer), *use.tap.shape) for call in self.calls for use in call.uses]
        shapes = [(part.name, *part.outputs.shape) for part in self.parts]
        self.form: tuple[object, ...] = (*calls, *shapes, *map(id, parameters))
        """Batches of equal form take their rows the same way."""

    @property
    def count(self) -> int:
        """Outputs of all parts."""
        return sum(self.outputs)

    @property
    def work(self) -> int:
        """Multiplications that these outputs took, derivatives in them included, as far as taps saw them; by the number
        of weights and rows where there are no taps."""
        seen = sum(use.tap.shape[:-1].numel() * call.layer.weight.numel() for call in self.calls for use in call.uses)
        return seen or sum(p.numel() for p in self.parameters) * sum(part.outputs.shape[0] for part in self.parts)

    @property
    def numbers_made(self) -> int:
        """Numbers that linear layers gave on the way to these outputs."""
        return sum(use.tap.numel() for call in self.calls for use in call.uses)

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    @property
    def stale(self) -> bool:
        """Somebody wrote to the weights since, be it the same numbers: no row can be taken any more."""
        return self._versions != self._versions_now()

    def loss_of(self, chosen: list[Tensor]) -> Tensor:
        """The loss of some units of each part, as an estimate of that of all."""
        with torch.no_grad():
            pairs = zip(self.parts, chosen, strict=True)
            return torch.stack([p.weight * p.losses(p.outputs.detach(), some).mean() for p, some in pairs]).sum()

    def part_of_loss(self, chosen: Sequence[Tensor], totals: Sequence[int]) -> Tensor:
        """What these units are of the loss of so many of each part."""
        with torch.no_grad():
            units = zip(self.parts, chosen, totals, strict=True)
            return torch.stack([p.weight * p.losses(p.outputs.detach(), some).sum() / n for p, some, n in units]).sum()

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """Identity of a parameter -> its number."""
        return {id(parameter): number for number, parameter in enumerate(self.parameters)}

    # --- backward passes ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def columns(self) -> list[tuple[int, int]]:
        """(number of the part, column in it): outputs of a column belong to different rows."""
        return [(number, column) for number, part in enumerate(self.parts) for column in range(width_of(part))]

    def column(self, index: int) -> Tensor:
        part, column = self.columns[index]
        outputs = self.parts[part].outputs
        return outputs.reshape(outputs.shape[0], -1)[:, column]

    def tap_gradients(self, total: Tensor) -> list[list[Tensor | None]]:
        """The gradients of the uses of each call."""
        taps = [use.tap for call in self.calls for use in call.uses]
        if not taps or not total.requires_grad:  # outputs may be constants
            return [[None] * len(call.uses) for call in self.calls]
        found = iter(torch.autograd.grad(total, taps, retain_graph=True, allow_unused=True))
        return [[next(found) for _ in call.uses] for call in self.calls]

    # --- rows --------------------------------------------------------------------------------------------------------

    def rows(self, way: Way, chosen: Chosen | None) -> RowMatrix:
        """The Jacobian of the chosen outputs, or of all."""
        if way.one_by_one:
            return as_rows(self._one_by_one(chosen))
        counts = self.outputs if chosen is None else [len(some) for some in chosen]
        matrix = _Building(self, way, counts)
        if way.grid is not None:
            self._add_grid(matrix, way.grid, None if chosen is None else chosen[0])
        else:
            gradients = [self.tap_gradients(sum_of([self.column(index) for index in some])) for some in way.passes]
            for number, part in enumerate(way.parts):
                matrix.add(number, self._products(part, gradients, None if chosen is None else chosen[number]))
        for number, part in enumerate(way.parts):
            if part.beside:
                some = None if chosen is None else chosen[number]
                take = self._part_one_by_one if part.alone and way.grid is None else self._beside
                matrix.add_columns(number, take(number, part.beside, some))
        return matrix.done()

    def _products(self, part: PartWay, gradients: list[list[list[Tensor | None]]], chosen: Tensor | None) -> _PartRows:
        """What the rows of a part are made of, in all calls that its outputs depend on."""
        result = _PartRows()
        passes, columns = sorted(set(part.passes)), len(part.passes)
        place = None
        if len(passes) > 1:
            outputs = torch.arange(len(part.tables[0].rows), device=self.loss.device) if chosen is None else chosen
            of_column = torch.tensor([passes.index(one) for one in part.passes], device=outputs.device)
            place = of_column[outputs % columns]
        for table in part.tables:
            mine = [gradients[one][table.call] for one in passes]
            self._add_products(result, table, mine, place, chosen)
        return result

    def _add_products(
        self,
        result: _PartRows,
        table: Table,
        gradients: list[list[Tensor | None]],
        place: Tensor | None,
        chosen: Tensor | None,
    ) -> None:
        call = self.calls[table.call]
        run = table.run if chosen is None and place is None else None
        rows = table.rows if chosen is None else table.rows[chosen]
        known = None if table.full else (rows >= 0)
        taken = rows if table.full else rows.clamp(min=0)
        out, into = [], []
        for number, use in enumerate(call.uses):
            found = [of_pass[number] for of_pass in gradients]
            some = next((gradient for gradient in found if gradient is not None), None)
            if some is None:
                continue
            if place is None:
                gradient = some[run] if run is not None else some[taken]
            else:
                whole = torch.stack([torch.zeros_like(some) if one is None else one for one in found])
                gradient = whole[place.unsqueeze(1), taken]
            if known is not None and run is None:
                gradient = gradient * known.view(*known.shape, *[1] * (gradient.ndim - 2))
            partner = use.partner[run] if run is not None else use.partner[taken]
            gradient, partner = _by_use(gradient), _by_use(partner)
            if use.biased:
                result.add_bias(self.numbers.get(id(call.layer.bias)), gradient)
            out.append(gradient if use.tap_is_output else partner)
            into.append(partner if use.tap_is_output else gradient)
        result.add(self.numbers.get(id(call.layer.weight)), out, into)

    def _add_grid(self, matrix: _Building, grid: Grid, chosen: Tensor | None) -> None:
        """One backward pass for each diagonal of the table that an output lies on."""
        flat = self.parts[0].outputs.reshape(-1)
        chosen = torch.arange(len(flat), device=flat.device) if chosen is None else chosen
        diagonal = grid.of(chosen)
        order = torch.argsort(diagonal, stable=True)
        pieces = []
        for some in torch.split(
            chosen[order], torch.unique_consecutive(diagonal[order], return_counts=True)[1].tolist()
        ):
            gradients, piece = self.tap_gradients(flat[some].sum()), _PartRows()
            for number in range(len(self.calls)):
                taken = grid.rows_of(number, some)
                if taken is not None:
                    table = Table(number, taken.unsqueeze(1), full=True, run=None)
                    self._add_products(piece, table, [gradients[number]], None, None)
            pieces.append(piece)
        matrix.add(0, joined(pieces, torch.argsort(order)))

    def _one_by_one(self, chosen: Chosen | None) -> Tensor:
        with torch.enable_grad():
            parts = self.objective.parts(self.model, self.batch)
        flat = [part.outputs.reshape(-1) for part in parts]
        some = flat if chosen is None else [outputs[few] for outputs, few in zip(flat, chosen, strict=True)]
        every = range(len(self.parameters))
        found = self._each(torch.cat(some), every, TOGETHER)
        return torch.cat([found[number] for number in every], 1)

    def _part_one_by_one(self, number: int, beside: tuple[int, ...], chosen: Tensor | None) -> dict[int, Tensor]:
        """Number of a parameter -> its columns of the rows of a part that depends on no layer."""
        flat = self.parts[number].outputs.reshape(-1)
        return self._each(flat if chosen is None else flat[chosen], beside, _ALONE_TOGETHER)

    def _each(self, outputs: Tensor, numbers: Sequence[int], together: int) -> dict[int, Tensor]:
        """Number of a parameter -> its columns, by batched backward passes of so many outputs."""
        kind, parameters = self.kind, [self.parameters[number] for number in numbers]
        pieces: list[list[Tensor]] = [[p.new_zeros(0, p.numel(), dtype=kind)] for p in parameters]
        for some in torch.split(outputs, together) if len(outputs) else ():
            found: Sequence[Tensor | None] = [None] * len(parameters)
            if some.requires_grad:
                each = torch.eye(len(some), dtype=some.dtype, device=some.device)
                found = torch.autograd.grad(
                    some, parameters, each, is_grads_batched=True, allow_unused=True, retain_graph=True
                )
            for piece, gradient, p in zip(pieces, found, parameters, strict=True):
                none = p.new_zeros(len(some), p.numel(), dtype=kind)
                piece.append(none if gradient is None else gradient.reshape(len(some), -1).to(kind))
        return {number: torch.cat(piece) for number, piece in zip(numbers, pieces, strict=True)}

    def _beside(self, number: int, beside: tuple[int, ...], chosen: Tensor | None) -> dict[int, Tensor]:
        """Columns of parameters that are used beside linear layers: a product backward, then one forward for each."""
        flat = self.parts[number].outputs.reshape(-1)
        flat = flat if chosen is None else flat[chosen]
        one = torch.ones_like(flat, requires_grad=True)
        parameters, found = [self.parameters[index] for index in beside], {}
        uses = [len(call.uses) for call in self.calls]
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                flat, parameters, one, retain_graph=True, create_graph=True, materialize_grads=True
            )
            for index, gradient in zip(beside, gradients, strict=True):
                if gradient.requires_grad:  # else no chosen output depends on it
                    columns = [
                        torch.autograd.grad(element, one, retain_graph=True, materialize_grads=True)[0]
                        for element in gradient.reshape(-1)
                    ]
                    found[index] = torch.stack(columns, 1).to(self.kind)
        for call, count in zip(self.calls, uses, strict=True):
            del call.uses[count:]  # those of the products here
        return found

    @functools.cached_property
    def kind(self) -> torch.dtype:
        """Rows are in fp32 at least."""
        return functools.reduce(torch.promote_types, {p.dtype for p in self.parameters}, torch.float32)


class _PartRows:
    """Products and biases of the rows of one part, as they are found."""

    def __init__(self) -> None:
        self.products: Products = {}
        self.biases: dict[int, Tensor] = {}

    def add(self, weight: int | None, out: list[Tensor], into: list[Tensor]) -> None:
        if weight is not None and out:
            pair = torch.cat(out, 1) if len(out) > 1 else out[0], torch.cat(into, 1) if len(into) > 1 else into[0]
            self.products.setdefault(weight, []).append(pair)

    def add_bias(self, bias: int | None, gradient: Tensor) -> None:
        if bias is not None:
            more = gradient.squeeze(1) if gradient.shape[1] == 1 else gradient.sum(1)
            self.biases[bias] = more if bias not in self.biases else self.biases[bias] + more


def joined(pieces: list[_PartRows], order: Tensor) -> _PartRows:
    """All rows, in this order, of pieces that were found in the same calls."""
    result = _PartRows()
    for weight, pairs in pieces[0].products.items():
        for number in range(len(pairs)):
            sides = zip(*(piece.products[weight][number] for piece in pieces), strict=True)
            out, into = (torch.cat(side)[order] for side in sides)
            result.add(weight, [out], [into])
    for bias in pieces[0].biases:
        result.biases[bias] = torch.cat([piece.biases[bias] for piece in pieces])[order]
    return result


class _Building:
    """A matrix of rows that is being made, part by part."""

    def __init__(self, look: Linearisation, way: Way, counts: Sequence[int]) -> None:
        self.look, self.way, self.counts = look, way, counts
        self.rows = spans(counts)
        self.starts = spans([p.numel() for p in look.parameters])
        self.kept = [number for number in range(len(look.parameters)) if number not in way.factored]
        """Parameters whose columns are held as numbers."""
        sizes = [look.parameters[number].numel() for number in self.kept]
        self.columns = dict(zip(self.kept, spans(sizes), strict=True))
        self.numbers = torch.zeros(sum(counts), sum(sizes), dtype=look.kind, device=look.loss.device)
        self.factors: dict[int, dict[int, tuple[Tensor, Tensor]]] = {number: {} for number in way.factored}
        """Number of a weight -> number of a part -> (out, into) [rows, uses, width]."""

    def add(self, part: int, found: _PartRows) -> None:
        for weight, pairs in found.products.items():
            out, into = (torch.cat(side, 1) if len(side) > 1 else side[0] for side in zip(*pairs, strict=True))
            if weight in self.factors:
                self.factors[weight][part] = out.to(self.look.kind), into.to(self.look.kind)
            else:
                self._columns(part, weight).add_(torch.bmm(out.mT, into).flatten(1))
        for bias, columns in found.biases.items():
            self._columns(part, bias).add_(columns)

    def add_columns(self, part: int, found: dict[int, Tensor]) -> None:
        for number, columns in found.items():
            self._columns(part, number).add_(columns)

    def _columns(self, part: int, number: int) -> Tensor:
        return self.numbers[self.rows[part], self.columns[number]]

    def done(self) -> RowMatrix:
        weights = self.starts[-1].stop if self.starts else 0
        factors = [self._factor(number, found) for number, found in self.factors.items() if found]
        return RowMatrix(self.numbers, [self.starts[number] for number in self.kept], factors, weights)

    def _factor(self, number: int, found: dict[int, tuple[Tensor, Tensor]]) -> Factor:
        weight, pairs = self.look.parameters[number], []
        for part, count in enumerate(self.counts):
            nothing = [self.numbers.new_zeros(count, 1, width) for width in weight.shape]
            pairs.append(found.get(part, (nothing[0], nothing[1])))
        out, into = (torch.cat([one.reshape(-1, one.shape[-1]) for one in side]) for side in zip(*pairs, strict=True))
        shape = tuple((count, pair[0].shape[1]) for count, pair in zip(self.counts, pairs, strict=True))
        return Factor(self.starts[number].start, out, into, shape)


def width_of(part: OutputPart) -> int:
    """Outputs of one row."""
    return part.outputs[0].numel()


def sum_of(columns: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, [column.sum() for column in columns])


def _by_use(tensor: Tensor) -> Tensor:
    """[rows, uses, width]."""
    return tensor.unsqueeze(1) if tensor.ndim == 2 else tensor.flatten(1, -2)
