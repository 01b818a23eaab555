"""AdamW whose moments are stored in fewer bits; the arithmetic stays fp32. A Triton kernel on CUDA, torch elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from foretrain.engine.optim.moments import (
    BLOCK,
    decode,
    encode,
    is_narrow,
    load_as_stored,
    make_moment,
    round_by_chance,
)
from foretrain.engine.optim.skipping import SkippingOptimizer
from foretrain.persist.model_state import SCALE

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
    pairs = list(zip(params, states, strict=True))
    wide = [(p, state) for p, state in pairs if not is_narrow(p, state_type)]
    narrow = [(p, state) for p, state in pairs if is_narrow(p, state_type)]
    if wide:
        adamw(
            [p for p, _ in wide],
            [p.grad for p, _ in wide if p.grad is not None],
            [state["exp_avg"] for _, state in wide],
            [state["exp_avg_sq"] for _, state in wide],
            [],
            [state["step"] for _, state in wide],
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
        steps = [state["step"] for _, state in narrow]
        torch._foreach_add_(steps, 1)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        for p, state in narrow:
            kernel = _triton_kernel() if p.is_cuda else None
            if kernel is None:
                _by_torch(group, p, state, grad_scale, found_inf)
            else:
                _by_triton(kernel, group, p, state, grad_scale, found_inf)


def _by_torch(
    group: dict[str, Any], p: Tensor, state: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """Piece by piece, so that the moments never all exist in fp32."""
    if p.grad is None:
        return
    names = [name for name in state if name != "step"]
    weights, gradient, stored = p.detach().view(-1), p.grad.reshape(-1), {name: state[name].view(-1) for name in names}
    beta1, beta2 = group["betas"]
    step, rate = state["step"], group["lr"]
    first_correction, second_correction = 1 - beta1**step, 1 - beta2**step
    for start in range(0, len(weights), AT_ONCE):
        piece = slice(start, start + AT_ONCE)
        blocks = slice(start // BLOCK, (start + AT_ONCE) // BLOCK)
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
    p: Tensor,
    state: dict[str, Any],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One kernel for the whole tensor."""
    if p.grad is None:
        return
    rate = group["lr"] if isinstance(group["lr"], Tensor) else torch.full((), group["lr"], device=p.device)
    one, count = state["step"], p.numel()
    kernel[(-(-count // (_ROWS * BLOCK)),)](
        p.detach(),
        p.grad.contiguous(),
        state["exp_avg"],
        state["exp_avg_sq"],
        state.get("exp_avg" + SCALE, one),
        state.get("exp_avg_sq" + SCALE, one),
        state["step"],
        rate,
        one if grad_scale is None else grad_scale,
        one if found_inf is None else found_inf,
        count,
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
