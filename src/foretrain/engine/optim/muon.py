"""Muon: momentum whose update is orthogonalised. All matrices of one shape go through one batched call.

A fused matrix, such as that of queries, keys and values, counts as the matrices it is made of. Only its orthogonalised
update does: weights, gradients and momentum keep the fused shape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from foretrain.engine import precision
from foretrain.engine.optim import moments, muon_kernels, narrow
from foretrain.engine.optim.loading import load_as_stored
from foretrain.engine.optim.skipping import SkippingOptimizer
from foretrain.persist.model_state import ROW_SQUARES
from foretrain.persist.parts import form_of_spread, local, spread_as

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
"""Four would do after scaling the rows by their sums in the Gram matrix, but only for random matrices: where singular
values fall off as 1/i, the result is then at a cosine of 0.87 to U V^T (768 x 768; with these five 0.96)."""
EPSILON = 1e-7
SMALL = 64
"""Shorter side of matrices up to which every CPU is faster in fp32: there a product in bf16 has a high fixed cost."""


def iteration_type(device: torch.device, shape: tuple[int, ...] | None = None) -> str:
    """Number format of the Newton-Schulz iteration for matrices of this shape; None: for large ones.

    bf16 is enough. fp32 is faster on CPUs that would emulate bf16, and for small matrices on every CPU.
    """
    if device.type != "cpu":
        return "bf16"
    small = shape is not None and min(shape) <= SMALL
    return "bf16" if precision.cpu_has_bf16_products() and not small else "fp32"


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest (roughly) orthogonal matrix to each of [batch, rows, columns], by quintic Newton-Schulz; the result is in
    the format that suits the device."""
    a, b, c = COEFFICIENTS
    x = matrices.to(precision.DTYPES[iteration_type(matrices.device, tuple(matrices.shape[1:]))])
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if tall else x


def row_factors(squares: Tensor, steps: Tensor, weight: float | Tensor) -> Tensor:
    """Take the mean squares of the rows of `steps`, [matrices, rows, columns], into the running ones, `squares`,
    [matrices, rows]. Return what each row is multiplied by: over time all rows are of about one size then, and each
    matrix keeps its own."""
    own = torch.linalg.vector_norm(steps, dim=2, dtype=torch.float32).square_().div_(steps.shape[2])
    squares.lerp_(own, weight)
    factors = squares.clamp(min=EPSILON**2).rsqrt()
    before, after = own.sum(1, keepdim=True), (own * factors.square()).sum(1, keepdim=True)
    return factors.mul_((before / after.clamp(min=EPSILON**2)).sqrt())


def step_ratio(scale: str, rows: int, columns: int) -> float:
    """What the step of a matrix of this shape is multiplied by, beside the rate."""
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


class Muon(SkippingOptimizer):
    """Muon for groups with `algorithm = "muon"`, AdamW for groups with `algorithm = "adamw"`.

    parts: of how many equal matrices, one above the other, a fused one is made. They are orthogonalised apart.
    row_beta2: rows of an orthogonalised update are divided by the root of their mean square, averaged so over steps, as
    NorMuon does; 0: they are not.
    """

    _kernels_allowed = True
    """Checks and benchmarks set this to False, to compare the kernels with the same in torch."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | Tensor = 0.02,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        state_type: str = "fp32",
        parts: Mapping[Tensor, int] | None = None,
        row_beta2: float = 0.0,
    ) -> None:
        self.state_type = state_type
        self.row_beta2 = row_beta2
        self.parts = dict(parts or {})  # it follows from the model and is no part of the state
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "scale": scale,
            "betas": betas,
            "eps": eps,
            "algorithm": "muon",
            "capturable": True,  # step counts live on the device, also after load_state_dict
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            if group["algorithm"] == "muon" and any(p.ndim != 2 for p in group["params"]):
                raise ValueError("Muon takes matrices only; put other parameters into a group with algorithm='adamw'")

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if group["algorithm"] == "muon":
            self._muon(group, params)
        else:
            self._adamw(group, params)

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        batches: dict[Any, dict[torch.Size, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        for p in params:
            self._begin(p)
            narrow_momentum, by_kernel = moments.is_narrow(p, self.state_type), self._by_kernel(p)
            batches[self._part_shape(p), narrow_momentum, by_kernel][p.shape].append(p)
        for (_, _, by_kernel), by_shape in batches.items():
            if by_kernel:
                self._muon_batch_by_kernel(group, [p for some in by_shape.values() for p in some])
            else:
                self._muon_batch(group, list(by_shape.values()))

    def _begin(self, p: Tensor) -> None:
        """Add what is missing in the state of a matrix."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            moments.make_moment(state, "momentum_buffer", p, self.state_type)
        if self.row_beta2 and ROW_SQUARES not in state:
            state[ROW_SQUARES] = _no_squares(p)

    def with_rows(self, state: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return a saved state with the mean squares of rows that this run wants and the one that saved it had not,
        and without those that it does not want: tensors that exist are then filled in place."""
        matrices = [(p, group["algorithm"] == "muon") for group in self.param_groups for p in group["params"]]
        found = {number: dict(kept) for number, kept in state.items()}
        for number, (p, by_muon) in enumerate(matrices):
            kept = found.get(number, {})
            if not self.row_beta2:
                kept.pop(ROW_SQUARES, None)
            elif by_muon and "momentum_buffer" in kept and ROW_SQUARES not in kept:
                kept[ROW_SQUARES] = _no_squares(p)
        return found

    def _by_kernel(self, p: Tensor) -> bool:
        if not self._kernels_allowed or moments.is_narrow(p, self.state_type):
            return False
        return muon_kernels.fit(p, self.state[p]["momentum_buffer"])

    def _part_shape(self, p: Tensor) -> tuple[int, int]:
        rows, columns = p.shape
        return rows // self.parts.get(p, 1), columns

    def _muon_batch_by_kernel(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update matrices whose parts all have one shape, as `_muon_batch` does, in fewer passes."""
        shape, device = self._part_shape(params[0]), params[0].device
        counts = [self.parts.get(p, 1) for p in params]
        updates = torch.empty(
            (sum(counts), *shape), dtype=precision.DTYPES[iteration_type(device, shape)], device=device
        )
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        muon_kernels.write_updates(updates, params, momenta, counts, group, self.grad_scale, self.found_inf)
        ratio = step_ratio(group["scale"], *shape)
        steps = orthogonalize(updates)
        del updates
        muon_kernels.move_weights(params, steps, self._factors(params, steps), counts, group, ratio, self.found_inf)

    def _factors(self, params: list[Tensor], steps: Tensor) -> Tensor | None:
        """[parts of all, rows]: what each row of orthogonalised updates is multiplied by; None where rows stay."""
        if not self.row_beta2:
            return None
        return self._even([self.state[p][ROW_SQUARES] for p in params], steps)

    def _even(self, squares: list[Tensor], steps: Tensor) -> Tensor:
        """Take the rows of all `steps` into their mean squares, of one matrix each, in place. Return their factors."""
        together = torch.cat(squares).view(steps.shape[:2])
        factors = row_factors(together, steps, self._row_weight())
        torch._foreach_copy_(squares, list(together.view(-1, 1).split_with_sizes([len(one) for one in squares])))
        return factors

    def _row_weight(self) -> float | Tensor:
        """The weight of a step among the mean squares of rows; a bad one has none."""
        weight = 1 - self.row_beta2
        return weight if self.found_inf is None else torch.where(self.found_inf > 0, 0.0, weight)

    def _muon_batch(self, group: dict[str, Any], same_shaped: list[list[Tensor]]) -> None:
        """Update matrices of several shapes whose parts all have one shape."""
        rate, weight = group["lr"], 1 - group["momentum"]
        if self.found_inf is not None:
            # A bad step moves nothing: no gradient, the momentum stays, the step length is zero.
            bad = self.found_inf > 0
            rate, weight = torch.where(bad, 0.0, rate), torch.where(bad, 0.0, weight)
        updates = [self._part_updates(group, params, weight) for params in same_shaped]
        update = torch.cat(updates) if len(updates) > 1 else updates[0]
        del updates  # the iteration needs the room
        params = [p for some in same_shaped for p in some]
        step = orthogonalize(update).float()
        factors = self._factors(params, step)
        step.mul_(rate * step_ratio(group["scale"], *update.shape[1:]))
        if factors is not None:
            step.mul_(factors.unsqueeze(2))
        torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        steps = step.split_with_sizes([self.parts.get(p, 1) for p in params])
        torch._foreach_sub_(params, [parts.flatten(0, 1) for parts in steps])

    def _part_updates(self, group: dict[str, Any], params: list[Tensor], weight: float | Tensor) -> Tensor:
        """[parts of all, rows, columns]: the updates of `params`, which are of one shape, before orthogonalisation."""
        gradient = torch.stack([p.grad for p in params if p.grad is not None])
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if self.found_inf is not None:
            gradient = torch.where(self.found_inf > 0, 0.0, gradient)
        momentum = self._momentum(params, gradient, weight)
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return update.view(-1, *self._part_shape(params[0]))

    def _momentum(self, params: list[Tensor], gradient: Tensor, weight: float | Tensor) -> Tensor:
        """The momentum of all `params`, which are of one shape, after it has taken in the gradient."""
        states = [self.state[p] for p in params]
        buffers = [state["momentum_buffer"] for state in states]
        if not moments.is_narrow(params[0], self.state_type):
            torch._foreach_mul_(buffers, 1 - weight)
            torch._foreach_add_(buffers, list((gradient * weight).unbind(0)))
            return torch.stack(buffers)
        momentum = moments.read_all(states, "momentum_buffer").mul_(1 - weight).add_(gradient * weight)
        moments.write_all(states, "momentum_buffer", momentum)
        return momentum

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self.state[p] for p in params]
        narrow.adamw_step(group, params, states, self.state_type, self.grad_scale, self.found_inf)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_as_stored(self, state_dict, self.state_type)


def _no_squares(p: Tensor) -> Tensor:
    """The mean squares of a matrix's rows before its first step; where rows are shared out, those that are here."""
    form = form_of_spread(p)
    form = None if form is None or not form.by_rows else form.with_columns(1)
    rows = p.shape[0] if form is None else local(p).shape[0]
    return spread_as(torch.zeros(rows, 1, dtype=torch.float32, device=local(p).device), form)
