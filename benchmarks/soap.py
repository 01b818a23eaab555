"""SOAP as a baseline: Adam in the eigenbasis of Shampoo's two factors (Vyas et al., 2024), in its plain form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Soap(Optimizer):
    """Matrices with both sides; vectors by Adam. The bases are refreshed by one power step and a QR every `refresh`."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        refresh: int = 10,
        largest: int = 1024,
    ) -> None:
        """largest: a side longer than this keeps its own basis, as in the authors' code."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "refresh": refresh, "largest": largest}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        first, second = group["betas"]
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            sides = [n if p.ndim == 2 and 1 < n <= group["largest"] else 0 for n in p.shape] if p.ndim == 2 else []
            state["factors"] = [torch.zeros(n, n, device=p.device) if n else None for n in sides]
            state["bases"] = []
            self._add_factors(state, gradient, 0.0)
            state["bases"] = [None if f is None else torch.linalg.eigh(f)[1].flip(1) for f in state["factors"]]
            return  # the first step only makes the bases, as in the authors' code
        state["step"] += 1
        turned = self._turn(gradient, state["bases"])
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(turned, turned, value=1 - second)
        step = state["step"]
        size = (state["square"] / (1 - second**step)).sqrt_().add_(group["eps"])
        update = self._turn(state["mean"], state["bases"]).div_(size)
        p.sub_(self._turn(update, state["bases"], back=True), alpha=float(group["lr"]) / (1 - first**step))
        self._add_factors(state, gradient, second)
        if step % group["refresh"] == 0:
            self._refresh(state)

    @staticmethod
    def _turn(matrix: Tensor, bases: list[Tensor | None], back: bool = False) -> Tensor:
        if bases and bases[0] is not None:
            matrix = (bases[0] if back else bases[0].T) @ matrix
        if bases and bases[1] is not None:
            matrix = matrix @ (bases[1].T if back else bases[1])
        return matrix.clone() if not bases else matrix

    @staticmethod
    def _add_factors(state: dict[str, Any], gradient: Tensor, kept: float) -> None:
        for factor, product in zip(state["factors"], (lambda g: g @ g.T, lambda g: g.T @ g), strict=False):
            if factor is not None:
                factor.lerp_(product(gradient), 1 - kept)

    @staticmethod
    def _refresh(state: dict[str, Any]) -> None:
        """Columns in the order of their eigenvalues, then one step of orthogonal iteration."""
        for side, (factor, basis) in enumerate(zip(state["factors"], state["bases"], strict=True)):
            if factor is None:
                continue
            order = torch.einsum("ij,ik,kj->j", basis, factor, basis).argsort(descending=True)
            state["square"] = state["square"].index_select(side, order)
            state["bases"][side] = torch.linalg.qr(factor @ basis[:, order])[0]
