"""Muon on parts of matrices: momentum is kept in parts, and an update is gathered, orthogonalised and cut again.

Where processes share the rows of all matrices, as with FSDP2, each matrix goes to its owner and comes back
(`muon_owners`). Where matrices are cut in another way, as by tensor parallelism, each process gathers and
orthogonalises every one of them, as each replica does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from foretrain.engine import precision
from foretrain.engine.optim import moments
from foretrain.engine.optim.muon import Muon, iteration_type, orthogonalize, step_ratio
from foretrain.engine.optim.muon_owners import Owners, owners_of
from foretrain.persist.model_state import ROW_SQUARES
from foretrain.persist.parts import form_of_spread, is_spread, like, local, region


class MuonOnParts(Muon):
    """Does what Muon does to whole matrices, where a process holds a part of each."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._known: tuple[list[Tensor], Owners | None] = [], None
        """The matrices of the last step, and their owners."""

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            self._begin(p)
        rate, weight = group["lr"], 1 - group["momentum"]
        if self.found_inf is not None:
            # A bad step moves nothing: no gradient, the momentum stays, the step length is zero.
            bad = self.found_inf > 0
            rate, weight = torch.where(bad, 0.0, rate), torch.where(bad, 0.0, weight)
        if (owners := self._owners(params)) is not None:
            self._by_owners(group, params, owners, rate, weight)
            return
        by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for p in params:
            by_shape[self._part_shape(p)].append(p)
        for shape, some in by_shape.items():
            self._same_shaped(group, some, shape, rate, weight)

    def _owners(self, params: list[Tensor]) -> Owners | None:
        before, owners = self._known
        if len(before) != len(params) or any(one is not other for one, other in zip(before, params, strict=True)):
            owners = owners_of(params, _beside(self._sent(params)) if self.row_beta2 else 0)
            self._known = list(params), owners
        return owners

    def _by_owners(
        self, group: dict[str, Any], params: list[Tensor], owners: Owners, rate: float | Tensor, weight: float | Tensor
    ) -> None:
        """Update matrices each of which goes to its owner, and comes back as the step. What is sent has the number
        format of the iteration, so that nothing is lost by it. With `row_beta2` the mean square of each row goes with
        it, and comes back with what the row is multiplied by."""
        shapes, sent = [self._part_shape(p) for p in params], self._sent(params)
        updates = [update.to(sent) for update in self._own_updates(group, params, weight)]
        if self.row_beta2:
            kept = [local(self.state[p][ROW_SQUARES]) for p in params]
            updates = [_packed(update, one, one) for update, one in zip(updates, kept, strict=True)]
        whole = dict(zip(owners.own, owners.gather(updates), strict=True))
        places: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number in owners.own:
            places[shapes[number]].append(number)
        for shape, numbers in places.items():
            squares = [_beside_rows(whole[number], shape[1])[:, :1] for number in numbers if self.row_beta2]
            parts = [whole.pop(number)[:, : shape[1]].reshape(-1, *shape) for number in numbers]
            counts = [len(part) for part in parts]
            steps = orthogonalize(torch.cat(parts)).to(sent)
            stepped = [step.flatten(0, 1) for step in steps.split_with_sizes(counts)]
            if self.row_beta2:
                factors = self._even(squares, steps).view(-1, 1).split_with_sizes([len(one) for one in squares])
                stepped = [_packed(*pieces) for pieces in zip(stepped, squares, factors, strict=True)]
            whole |= dict(zip(numbers, stepped, strict=True))
        here = owners.scatter([whole[number] for number in owners.own], updates[0])
        if self.row_beta2:
            here = self._evened(here, kept, shapes)
        lengths = {shape: rate * step_ratio(group["scale"], *shape) for shape in set(shapes)}
        weights = [local(p) for p in params]
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        steps_here = [step.float().mul_(lengths[shape]) for step, shape in zip(here, shapes, strict=True)]
        torch._foreach_sub_(weights, steps_here)

    def _evened(self, packed: list[Tensor], kept: list[Tensor], shapes: list[tuple[int, int]]) -> list[Tensor]:
        """The rows of the steps that came back, multiplied as their owners say. kept: mean squares, which are new."""
        beside = [_beside_rows(one, columns) for one, (_, columns) in zip(packed, shapes, strict=True)]
        torch._foreach_copy_(kept, [numbers[:, :1] for numbers in beside])
        steps = [one[:, :columns].float() for one, (_, columns) in zip(packed, shapes, strict=True)]
        return list(torch._foreach_mul(steps, [numbers[:, 1:] for numbers in beside]))

    def _sent(self, params: list[Tensor]) -> torch.dtype:
        """The number format in which updates go to their owners."""
        formats = {iteration_type(local(params[0]).device, self._part_shape(p)) for p in params}
        return precision.DTYPES[formats.pop() if len(formats) == 1 else "fp32"]

    def _factors(self, params: list[Tensor], steps: Tensor) -> Tensor | None:
        """As those of whole matrices; mean squares are gathered where each process has those of its rows."""
        if not self.row_beta2:
            return None
        kept = [self.state[p][ROW_SQUARES] for p in params]
        whole = [_gathered(local(one), one) for one in kept]
        factors = self._even(whole, steps)
        torch._foreach_copy_([local(one) for one in kept], [_cut(*pair) for pair in zip(whole, kept, strict=True)])
        return factors

    def _same_shaped(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        shape: tuple[int, int],
        rate: float | Tensor,
        weight: float | Tensor,
    ) -> None:
        """Update matrices whose fused parts all have this shape, each of them here."""
        updates = self._own_updates(group, params, weight)
        whole = [_gathered(update, p).view(-1, *shape) for update, p in zip(updates, params, strict=True)]
        counts = [len(one) for one in whole]
        steps = orthogonalize(torch.cat(whole)).float()
        del whole
        factors = self._factors(params, steps)
        steps.mul_(rate * step_ratio(group["scale"], *shape))
        if factors is not None:
            steps.mul_(factors.unsqueeze(2))
        weights = [local(p) for p in params]
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        of_each = zip(steps.split_with_sizes(counts), params, strict=True)
        torch._foreach_sub_(weights, [_cut(step.flatten(0, 1), p) for step, p in of_each])

    def _own_updates(self, group: dict[str, Any], params: list[Tensor], weight: float | Tensor) -> list[Tensor]:
        """The parts of the updates that are here, before orthogonalisation. The momentum takes in the gradient."""
        gradients = [local(p.grad) for p in params if p.grad is not None]
        if self.grad_scale is not None:
            gradients = list(torch._foreach_div(gradients, self.grad_scale))
        if self.found_inf is not None:
            bad = self.found_inf > 0
            gradients = [torch.where(bad, 0.0, gradient) for gradient in gradients]
        narrow = [moments.is_narrow(p, self.state_type) for p in params]
        momenta = [self._momentum_here(p, few) for p, few in zip(params, narrow, strict=True)]
        torch._foreach_mul_(momenta, 1 - weight)
        torch._foreach_add_(momenta, torch._foreach_mul(gradients, weight))
        for p, momentum, few in zip(params, momenta, narrow, strict=True):
            if few:
                moments.write_moment(self.state[p], "momentum_buffer", momentum)
        if not group["nesterov"]:
            return momenta
        return list(torch._foreach_lerp(gradients, momenta, group["momentum"]))

    def _momentum_here(self, parameter: Tensor, narrow: bool) -> Tensor:
        """The part of a momentum that is here, in fp32: itself, or a copy where it is stored in fewer bits."""
        state = self.state[parameter]
        found = moments.read_moment(state, "momentum_buffer") if narrow else None
        return local(state["momentum_buffer"]) if found is None else found


def _beside(sent: torch.dtype) -> int:
    """How many numbers of this format hold two in fp32."""
    return 2 * torch.float32.itemsize // sent.itemsize


def _packed(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Rows with the bits of two numbers in fp32, [rows, 1] each, behind each of them."""
    return torch.cat([rows, torch.cat([one, other], 1).view(rows.dtype)], 1)


def _beside_rows(packed: Tensor, columns: int) -> Tensor:
    """[rows, 2]: the numbers that are packed behind rows of so many columns."""
    return packed[:, columns:].clone(memory_format=torch.contiguous_format).view(torch.float32)


def _gathered(part: Tensor, parameter: Tensor) -> Tensor:
    """All of a matrix, from the parts that processes have."""
    if not is_spread(parameter):
        return part
    spread: Any = like(part, parameter)
    whole: Tensor = spread.full_tensor()
    return whole


def _cut(whole: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of a matrix."""
    form = form_of_spread(parameter)
    if form is None:
        return whole
    sizes, begin = form.region()
    return region(whole, begin, sizes)
