"""AdamW whose moments are stored in fewer bits; the arithmetic stays fp32. A Triton kernel on CUDA, torch elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from foretrain.engine.optim.loading import load_as_stored
from foretrain.engine.optim.moments import BLOCK, decode, encode, is_narrow, make_moment, round_by_chance
from foretrain.engine.optim.skipping import SkippingOptimizer
from foretrain.persist.model_state import SCALE
from foretrain.persist.parts import is_spread, local

AT_ONCE = 2**14 * BLOCK
"""Numbers that are worked on at once where there is no kernel for it, so that intermediate results stay small."""
_ROWS, _WARPS = 8, 4


def adamw_step(
    group: dict[str, Any],
    params: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    state_type: str,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One step of AdamW for `params`, which have gradients. Nothing waits for the device."""
    for p, state in zip(params, states, strict=True):
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            make_moment(state, "exp_avg", p, state_type)
            make_moment(state, "exp_avg_sq", p, state_type, signed=False)
    pairs = [(p, state) for p, state in zip(params, states, strict=True) if p.grad is not None]
    wide = [_part(p, state) for p, state in pairs if not is_narrow(p, state_type)]
    narrow = [_part(p, state) for p, state in pairs if is_narrow(p, state_type)]
    if wide:
        adamw(
            [part.weights for part in wide],
            [part.gradient for part in wide],
            [part.state["exp_avg"] for part in wide],
            [part.state["exp_avg_sq"] for part in wide],
            [],
            [part.state["step"] for part in wide],
            fused=True,
            grad_scale=grad_scale,
            found_inf=found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
    if narrow:
        steps = [part.state["step"] for part in narrow]
        torch._foreach_add_(steps, 1)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        for part in narrow:
            kernel = _triton_kernel() if part.weights.is_cuda else None
            if not part.weights.numel():
                continue  # of a weight with fewer rows than there are processes
            if kernel is None:
                _by_torch(group, part, grad_scale, found_inf)
            else:
                _by_triton(kernel, group, part, grad_scale, found_inf)


class _Part(NamedTuple):
    """What is here of a weight, its gradient and its state: all of it, unless several processes hold parts."""

    weights: Tensor
    gradient: Tensor
    state: dict[str, Any]

    @property
    def columns(self) -> int:
        """Numbers of a row, each of which begins a new block; without rows they are all one."""
        scales = self.state.get("exp_avg" + SCALE)
        rows = len(self.weights) if scales is not None and scales.ndim == 2 else 1
        return self.weights.numel() // rows


def _part(p: Tensor, state: dict[str, Any]) -> _Part:
    gradient: Any = p.grad
    if not is_spread(p):
        return _Part(p.detach(), gradient, state)
    return _Part(local(p), local(gradient), {name: local(value) for name, value in state.items()})


def _by_torch(group: dict[str, Any], part: _Part, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Piece by piece, so that the moments never all exist in fp32."""
    columns, state = part.columns, part.state
    by_rows = columns < part.weights.numel()
    shape, at_once = ((-1, columns), max(1, AT_ONCE // columns)) if by_rows else ((-1,), AT_ONCE)
    weights, gradient = part.weights.view(shape), part.gradient.reshape(shape)
    stored = {name: value.view(shape) for name, value in state.items() if name != "step" and not name.endswith(SCALE)}
    stored |= {name: value if by_rows else value.view(-1) for name, value in state.items() if name.endswith(SCALE)}
    beta1, beta2 = group["betas"]
    step, rate = state["step"], group["lr"]
    first_correction, second_correction = 1 - beta1**step, 1 - beta2**step
    for start in range(0, len(weights), at_once):
        piece = slice(start, start + at_once)
        blocks = piece if by_rows else slice(start // BLOCK, (start + at_once) // BLOCK)
        old = {name: value[blocks if name.endswith(SCALE) else piece] for name, value in stored.items()}
        w, g = weights[piece].float(), gradient[piece].float()
        if grad_scale is not None:
            g = g / grad_scale
        first = _read(old, "exp_avg").lerp(g, 1 - beta1)
        second = _read(old, "exp_avg_sq") * beta2 + (1 - beta2) * g * g
        w = w * (1 - rate * group["weight_decay"])
        w = w - (rate / first_correction) * first / (second.sqrt() / second_correction.sqrt() + group["eps"])
        new = _store(first, second, step, eight_bits="exp_avg" + SCALE in old)
        for name, value in [*new.items(), ("", w)]:
            target = old[name] if name else weights[piece]
            target.copy_(value if found_inf is None else torch.where(found_inf > 0, target, value.to(target.dtype)))


def _read(state: dict[str, Tensor], name: str) -> Tensor:
    scale = state.get(name + SCALE)
    return state[name].float() if scale is None else decode(state[name], scale)


def _store(first: Tensor, second: Tensor, step: Tensor, eight_bits: bool) -> dict[str, Tensor]:
    if not eight_bits:
        return {"exp_avg": first.bfloat16(), "exp_avg_sq": round_by_chance(second, step)}
    codes, scales = encode(first)
    square_codes, square_scales = encode(second, step)
    return {
        "exp_avg": codes,
        "exp_avg" + SCALE: scales,
        "exp_avg_sq": square_codes,
        "exp_avg_sq" + SCALE: square_scales,
    }


def _by_triton(
    kernel: Any,
    group: dict[str, Any],
    part: _Part,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One kernel for the whole tensor."""
    weights, gradient, state = part
    rate = group["lr"] if isinstance(group["lr"], Tensor) else torch.full((), group["lr"], device=weights.device)
    one, count, columns = state["step"], weights.numel(), part.columns
    blocks = count // columns * -(-columns // BLOCK)
    kernel[(-(-blocks // _ROWS),)](
        weights,
        gradient.contiguous(),
        state["exp_avg"],
        state["exp_avg_sq"],
        state.get("exp_avg" + SCALE, one),
        state.get("exp_avg_sq" + SCALE, one),
        state["step"],
        rate,
        one if grad_scale is None else grad_scale,
        one if found_inf is None else found_inf,
        count,
        columns,
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        SCALED=grad_scale is not None,
        CHECKED=found_inf is not None,
        EIGHT_BITS="exp_avg" + SCALE in state,
        ROWS=_ROWS,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )


@cache
def _triton_kernel() -> Any:
    """The kernel, or None where Triton is not installed."""
    try:
        from foretrain.engine.optim.kernels import narrow_adamw
    except ImportError:
        return None
    return narrow_adamw


class NarrowAdamW(SkippingOptimizer):
    """AdamW with moments in bf16 or 8 bits."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        state_type: str = "bf16",
    ) -> None:
        self.state_type = state_type
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self.state[p] for p in params]
        adamw_step(group, params, states, self.state_type, self.grad_scale, self.found_inf)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_as_stored(self, state_dict, self.state_type)
