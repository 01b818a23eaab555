"""The outputs of an objective at the weights as they are, and rows of their Jacobian, as few as are asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foretrain.engine.objective import Objective, OutputPart, UnknownForm
from foretrain.hybrid.linearised.grid import Grid, grid_of
from foretrain.hybrid.linearised.taps import Call, Taps

_MOST_COLUMNS = 16
"""Outputs per row up to which each takes a backward pass of all rows; beyond, chosen outputs are taken one by one.
Chosen: a pass of all rows costs about as much as ten chosen outputs taken together."""
_MOST_BESIDE = 64
"""Elements of parameters that are used beside linear layers, such as an unknown coefficient, up to which each takes a
pass forward. Chosen: about as dear as one backward pass of all rows."""
TOGETHER = 16
"""Outputs that are taken one by one, but by one batched backward pass. Chosen: each takes the memory of a backward pass
of the whole batch, and more of them at once are hardly faster."""
_AGREES = 1e-3
"""Relative error up to which rows agree with a true product. Chosen: rounding in fp32 leaves 1e-6, a wrong row 1."""
_WHOLE = 0.02
"""How far from a whole number the index of a row may be found. Chosen: rounding in fp32 leaves 0.005 at 10,000 rows."""


@dataclass
class BackwardPass:
    """One backward pass: of the sum of these columns, whose rows meet in no call."""

    columns: list[int]
    maps: list[Tensor | None] = field(default_factory=list)
    """For each call the output that each of its rows belongs to, by its number among all; -1: none. None: untouched."""
    runs: list[slice | None] = field(default_factory=list)
    """For each call the outputs that its rows belong to, if these follow one another; else None."""


@dataclass
class Way:
    """How rows are taken, found out once for all batches of one form."""

    form: tuple[object, ...]
    passes: list[BackwardPass] | None
    """None: rows depend on each other, or on too much beside linear layers: outputs are taken one by one."""
    reason: str = ""
    beside: tuple[int, ...] = ()
    """Numbers of the parameters that outputs depend on beside linear layers."""
    grid: Grid | None = None
    """Outputs are a table: its diagonals are taken."""


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
        with torch.enable_grad(), Taps(model, parameters if with_taps else ()) as taps:
            self.parts: list[OutputPart] = objective.parts(model, batch)
        if not self.parts:
            raise UnknownForm("no block has a row that counts")
        self.calls: list[Call] = taps.calls
        with torch.no_grad():
            means = [part.weight * part.losses(part.outputs.detach()).mean() for part in self.parts]
            self.loss = torch.stack(means).sum()
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.outputs.numel())
        self.starts = starts
        """Number of the first output of each part, and of all outputs."""
        self._versions = self._versions_now()

    @property
    def work(self) -> int:
        """Multiplications that these outputs took, derivatives in them included, as far as taps saw them; by the number
        of weights and rows where there are no taps."""
        seen = sum(use.tap.shape[:-1].numel() * call.layer.weight.numel() for call in self.calls for use in call.uses)
        return seen or sum(p.numel() for p in self.parameters) * sum(part.outputs.shape[0] for part in self.parts)

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

    @property
    def form(self) -> tuple[object, ...]:
        """Batches of equal form take their rows the same way."""
        calls = [(id(call.layer), *use.tap.shape) for call in self.calls for use in call.uses]
        return (*calls, *((part.name, *part.outputs.shape) for part in self.parts), *map(id, self.parameters))

    # --- columns: outputs that one backward pass can take ---

    @property
    def columns(self) -> list[tuple[OutputPart, int, int]]:
        """(part, number of the column in it, number of its first output)."""
        return [
            (part, column, start)
            for part, start in zip(self.parts, self.starts, strict=False)
            for column in range(_width(part))
        ]

    def _sum(self, columns: list[int], by_number: bool = False) -> Tensor:
        """The sum of all outputs of these columns; by_number: each times its number."""
        total = self.loss.new_zeros(())
        for index in columns:
            part, column, start = self.columns[index]
            rows = part.outputs.reshape(part.outputs.shape[0], -1)[:, column]
            if by_number:
                first, width = start + column + 1, _width(part)
                end = first + width * (len(rows) - 1)
                rows = rows * torch.linspace(first, end, len(rows), dtype=torch.float64, device=rows.device)
            total = total + rows.sum()
        return total

    def _tap_gradients(self, total: Tensor) -> list[Tensor | None]:
        taps = [use.tap for call in self.calls for use in call.uses]
        if not taps or not total.requires_grad:  # outputs may be constants
            return [None] * len(taps)
        return list(torch.autograd.grad(total, taps, retain_graph=True, allow_unused=True))

    # --- finding the way ---

    def find_way(self) -> Way:
        """Find out how rows can be taken, and check a few against true products."""
        form = self.form
        beside = self._beside()
        elements = sum(self.parameters[index].numel() for index in beside)
        if elements > _MOST_BESIDE:
            return Way(form, None, "there are parameters beside those of linear layers", beside)
        if any(_width(part) > _MOST_COLUMNS for part in self.parts):
            grid = self._grid()
            if grid is not None and self._agrees(way := Way(form, [], "", beside, grid), []):
                return way
            return Way(form, None, "there are many outputs per row", beside)
        passes: list[BackwardPass] = []
        for index in range(len(self.columns)):
            maps = self._maps(index)
            if maps is None:
                return Way(form, None, "rows depend on each other", beside)
            for known in passes:
                if not any(_meet(one, other) for one, other in zip(known.maps, maps, strict=True)):
                    known.columns.append(index)
                    known.maps = [_joined(one, other) for one, other in zip(known.maps, maps, strict=True)]
                    break
            else:
                passes.append(BackwardPass([index], maps))
        for one in passes:
            one.runs = [None if known is None else _run(known) for known in one.maps]
        way = Way(form, passes, "", beside)
        return way if self._agrees(way, passes) else Way(form, None, "rows depend on each other", beside)

    def _grid(self) -> Grid | None:
        """The table that the outputs of the only part are, if they are one."""
        if len(self.parts) != 1 or self.parts[0].outputs.ndim != 2 or self.parts[0].by_class:
            return None
        outputs, touched = self.parts[0].outputs, []
        for some in (outputs[0], outputs[:, 0]):
            gradients = iter(self._tap_gradients(some.sum()))
            touched.append([_touched([next(gradients) for _ in call.uses]) for call in self.calls])
        return grid_of(outputs.shape, *touched)

    def _beside(self) -> tuple[int, ...]:
        """Parameters that outputs depend on otherwise than through taps."""
        total = self._sum(list(range(len(self.columns))))
        live = [(index, p) for index, p in enumerate(self.parameters) if p.requires_grad and total.requires_grad]
        if not live:
            return ()
        found = torch.autograd.grad(total, [p for _, p in live], retain_graph=True, allow_unused=True)
        return tuple(index for (index, _), gradient in zip(live, found, strict=True) if gradient is not None)

    def _maps(self, index: int) -> list[Tensor | None] | None:
        """For each call, which output of the column each of its rows belongs to; None if a row belongs to several."""
        ones, numbers = (self._tap_gradients(self._sum([index], by_number)) for by_number in (False, True))
        maps: list[Tensor | None] = []
        at = 0
        for call in self.calls:
            norm = product = miss = None
            for one, number in zip(ones[at : at + len(call.uses)], numbers[at : at + len(call.uses)], strict=True):
                if one is None or number is None:
                    continue
                one, number = one.double().flatten(1), number.double().flatten(1)
                norm = _plus(norm, one.square().sum(1))
                product = _plus(product, (one * number).sum(1))
                miss = _plus(miss, number.square().sum(1))
            at += len(call.uses)
            if norm is None or product is None or miss is None:
                maps.append(None)
                continue
            touched = norm > 0
            ratio = torch.where(touched, product / norm.clamp(min=1e-300), torch.zeros_like(norm))
            whole = ratio.round()
            off = (miss - ratio * product).clamp(min=0).sqrt() > _AGREES * miss.sqrt()  # the two are not parallel
            if bool((touched & (((ratio - whole).abs() > _WHOLE) | off | (whole < 1))).any()):
                return None
            maps.append(torch.where(touched, whole.long() - 1, -1))
        return _filled(maps)

    def _agrees(self, way: Way, passes: list[BackwardPass]) -> bool:
        """Whether some rows are what a true product says."""
        total = self.starts[-1]
        draw = torch.Generator().manual_seed(total)
        chosen = torch.randperm(total, generator=draw)[: min(total, 32)].sort().values.to(self.loss.device)
        rows = self._by_taps(way, passes, chosen) if way.grid is None else self._by_grid(way, way.grid, chosen)
        weights = torch.randn(len(chosen), generator=draw).to(rows)
        mine = rows.T @ weights
        with torch.enable_grad():
            parts = self.objective.parts(self.model, self.batch)
            flat = torch.cat([part.outputs.reshape(-1) for part in parts])
            true = torch.autograd.grad((flat[chosen] * weights).sum(), self.parameters, allow_unused=True)
        whole = _flat(true, self.parameters)
        return bool((mine - whole).norm() <= _AGREES * whole.norm())

    # --- rows ---

    def rows(self, way: Way, chosen: Tensor) -> Tensor:
        """[chosen, weights]: the Jacobian of the chosen outputs, by their numbers among all."""
        if way.grid is not None:
            return self._by_grid(way, way.grid, chosen)
        return self._one_by_one(chosen) if way.passes is None else self._by_taps(way, way.passes, chosen)

    def _one_by_one(self, chosen: Tensor) -> Tensor:
        with torch.enable_grad():
            parts = self.objective.parts(self.model, self.batch)
            flat = torch.cat([part.outputs.reshape(-1) for part in parts])[chosen]
        rows, starts = self._empty(len(chosen))
        for first in range(0, len(chosen) if flat.requires_grad else 0, TOGETHER):
            some = flat[first : first + TOGETHER]
            each = torch.eye(len(some), dtype=flat.dtype, device=flat.device)
            found = torch.autograd.grad(
                some, self.parameters, each, is_grads_batched=True, allow_unused=True, retain_graph=True
            )
            for gradient, parameter in zip(found, self.parameters, strict=True):
                if gradient is not None:
                    columns = slice(start := starts[id(parameter)], start + parameter.numel())
                    rows[first : first + len(some), columns] = gradient.reshape(len(some), -1).to(rows.dtype)
        return rows

    def _empty(self, count: int) -> tuple[Tensor, dict[int, int]]:
        """Rows of zeros, in fp32 at least, and the first column of each parameter."""
        starts, first = {}, 0
        for parameter in self.parameters:
            starts[id(parameter)] = first
            first += parameter.numel()
        dtype = functools.reduce(torch.promote_types, {p.dtype for p in self.parameters}, torch.float32)
        return torch.zeros(count, first, dtype=dtype, device=self.loss.device), starts

    def _by_grid(self, way: Way, grid: Grid, chosen: Tensor) -> Tensor:
        """One backward pass for each diagonal of the table that an output lies on."""
        rows, starts = self._empty(len(chosen))
        flat, diagonal = self.parts[0].outputs.reshape(-1), grid.of(chosen)
        for one in torch.unique(diagonal):
            target = (diagonal == one).nonzero().squeeze(1)
            some = chosen[target]
            gradients = iter(self._tap_gradients(flat[some].sum()))
            for number, call in enumerate(self.calls):
                mine = [next(gradients) for _ in call.uses]
                taken = grid.rows_of(number, some)
                if taken is not None:
                    _add(rows, call, mine, taken, target, starts)
        if way.beside:
            self._add_beside(rows, way, chosen, starts)
        return rows

    def _by_taps(self, way: Way, passes: list[BackwardPass], chosen: Tensor) -> Tensor:
        rows, starts = self._empty(len(chosen))
        place = torch.full((self.starts[-1] + 1,), -1, device=rows.device)  # the last one: rows of no output
        place[chosen] = torch.arange(len(chosen), device=rows.device)
        all_of_them = len(chosen) == self.starts[-1]
        for one in passes:
            gradients = self._tap_gradients(self._sum(one.columns))
            at = 0
            for call, known, run in zip(self.calls, one.maps, one.runs, strict=True):
                mine = gradients[at : at + len(call.uses)]
                at += len(call.uses)
                if known is None:
                    continue
                if all_of_them and run is not None:
                    _add(rows[run], call, mine, None, None, starts)
                    continue
                target = place[known]
                taken = (target >= 0).nonzero().squeeze(1)
                if len(taken):
                    _add(rows, call, mine, taken, target[taken], starts)
        if way.beside:
            self._add_beside(rows, way, chosen, starts)
        return rows

    def _add_beside(self, rows: Tensor, way: Way, chosen: Tensor, starts: dict[int, int]) -> None:
        """Columns of parameters that are used beside linear layers: a product backward, then one forward for each."""
        flat = torch.cat([part.outputs.reshape(-1) for part in self.parts])[chosen]
        one = torch.ones_like(flat, requires_grad=True)
        parameters = [self.parameters[index] for index in way.beside]
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                flat, parameters, one, retain_graph=True, create_graph=True, materialize_grads=True
            )
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if not gradient.requires_grad:  # no chosen output depends on it
                    continue
                for number, element in enumerate(gradient.reshape(-1)):
                    (column,) = torch.autograd.grad(element, one, retain_graph=True, materialize_grads=True)
                    rows[:, starts[id(parameter)] + number] += column


def _add(
    rows: Tensor,
    call: Call,
    gradients: list[Tensor | None],
    taken: Tensor | None,
    target: Tensor | None,
    starts: dict[int, int],
) -> None:
    """Add the products of a call to the rows that its own rows belong to. taken: some of its own; None: all of them,
    and they belong to these rows in their order."""
    out, into, bias = [], [], None
    for use, gradient in zip(call.uses, gradients, strict=True):
        if gradient is None:
            continue
        partner = use.partner
        if taken is not None:
            gradient, partner = gradient[taken], partner[taken]
        if use.biased:
            bias = gradient if gradient.ndim == 2 else gradient.flatten(1, -2).sum(1)
        if not use.tap_is_output:
            gradient, partner = partner, gradient
        width, depth = gradient.shape[-1], partner.shape[-1]
        out.append(gradient.reshape(len(gradient), -1, width))
        into.append(partner.reshape(len(partner), -1, depth))
    layer = call.layer
    weight = starts.get(id(layer.weight))
    if out and weight is not None:
        product = torch.bmm(torch.cat(out, 1).transpose(1, 2), torch.cat(into, 1))
        _add_to(rows[:, weight : weight + layer.weight.numel()], target, product.flatten(1))
    if bias is not None and layer.bias is not None and (start := starts.get(id(layer.bias))) is not None:
        _add_to(rows[:, start : start + layer.bias.numel()], target, bias)


def _add_to(rows: Tensor, target: Tensor | None, more: Tensor) -> None:
    if target is None:
        rows.add_(more)
    else:
        rows.index_add_(0, target, more.to(rows.dtype))


def _run(known: Tensor) -> slice | None:
    """Outputs that follow one another, one for each row of a call; None where they do not."""
    if not len(known):
        return None
    first, last = int(known[0]), int(known[-1])
    if first < 0 or last - first + 1 != len(known) or not bool((known.diff() == 1).all()):
        return None
    return slice(first, last + 1)


def _width(part: OutputPart) -> int:
    return part.outputs[0].numel()


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


def _filled(maps: list[Tensor | None]) -> list[Tensor | None]:
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


def _flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """All gradients as one vector."""
    each = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
    return torch.cat([g.reshape(-1) for g in each])
