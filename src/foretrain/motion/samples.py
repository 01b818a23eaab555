"""Samples a few thousand gradients and optimizer moments: enough for statistics, cheap enough for every window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.engine.optim.build import is_wrapped
from foretrain.engine.optim.moments import sample_moment
from foretrain.persist.codec import real_view
from foretrain.persist.parts import is_spread, local, own_of_every
from foretrain.persist.stateful import Stateful

_TENSORS = 16
_PER_TENSOR = 1024
"""Largest parameters that are sampled, and numbers of each. Chosen: a mean of 16,384 is within one percent."""


class Statistics(NamedTuple):
    """What `Sample.statistics` measures, in this order."""

    gradient_mean: float
    gradient_std: float
    gradient_cosine: float
    """Cosine with the gradient of the step before."""
    moment_mean: float
    """Mean of the absolute first moment, or of the gradient where there is none."""
    moment_std: float
    second_moment_mean: float
    """Mean root of the second moment, or the gradient's root mean square where there is none."""


class Sample(Stateful):
    """Fixed coordinates of the largest parameters."""

    saved = ("_before",)
    own_of_rank = ("_before",)
    _before: Tensor | None

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._seen: dict[nn.Parameter, Tensor] = {}
        self.cover(parameters)

    @property
    def device(self) -> torch.device:
        return local(self.parameters[0]).device

    def cover(self, parameters: Sequence[nn.Parameter]) -> None:
        """Choose among these parameters from now on."""
        self.parameters = sorted(parameters, key=lambda p: -p.numel())[:_TENSORS]
        self._before = None
        if self._seen:
            self.watch()

    def watch(self) -> Callable[[nn.Parameter], None]:
        """Return what is to be called with each parameter while its gradient is there, if none outlives the pass."""
        self._seen = {p: torch.zeros_like(_strided(p)) for p in self.parameters}
        return self._see

    @torch.no_grad()
    def _see(self, parameter: nn.Parameter) -> None:
        if parameter in self._seen and parameter.grad is not None:
            self._seen[parameter].copy_(_strided(parameter.grad))  # in place, also in a recorded graph

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """The sampled gradient of the step that was just made."""
        if self._seen:
            return torch.cat(list(self._seen.values()))
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return _pick(gradients) if gradients else torch.zeros(1, device=self.device)

    def remember(self) -> None:
        """Keep the gradient of the step before the last one of a window."""
        self._before = self.gradient()

    @torch.no_grad()
    def sums(self, share: Callable[[Tensor], float]) -> Tensor:
        """What this rank's part adds to the sums that `statistics_of` makes the statistics of.

        share: what a part counts. The coordinates are those that one process samples.
        """
        gradient, before = self.gradient().double(), self._before
        before = gradient if before is None or before.shape != gradient.shape else before.double()
        counts = self._counts([p for p in self.parameters if p.grad is not None], share)
        of_first, first = self._owned(("exp_avg", "momentum_buffer"))
        of_second, second = self._owned(("exp_avg_sq",))
        moment, weights = (gradient, counts) if first is None else (first.double(), self._counts(of_first, share))
        roots = None if second is None else second.double().clamp(min=0).sqrt()
        self._before = None
        return torch.stack(
            [
                counts.sum(),
                counts @ gradient,
                counts @ gradient.square(),
                counts @ before.square(),
                counts @ (gradient * before),
                weights.sum(),
                weights @ moment.abs(),
                weights @ moment,
                weights @ moment.square(),
                counts.new_full((), torch.nan) if roots is None else self._counts(of_second, share) @ roots,
            ]
        )

    def _owned(self, names: Sequence[str]) -> tuple[list[nn.Parameter], Tensor | None]:
        """The parameters that have a moment of one of these names, the first that is found, and samples of it."""
        for name in names:
            moments = [(p, _sampled(self.optimizer.state.get(p, {}), name)) for p in self.parameters]
            found = [(p, moment) for p, moment in moments if moment is not None]
            if found:
                return [p for p, _ in found], torch.cat([moment for _, moment in found])
        return [], None

    def _counts(self, parameters: Sequence[Tensor], share: Callable[[Tensor], float]) -> Tensor:
        """What each sampled number of these counts."""
        found = [torch.full_like(_strided(p), share(p), dtype=torch.float64) for p in parameters]
        return torch.cat(found) if found else torch.zeros(1, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def statistics(self) -> Tensor:
        """The numbers of `Statistics`, still on the device: they are read along with others."""
        gradient = self.gradient()
        before = self._before if self._before is not None and self._before.shape == gradient.shape else gradient
        cosine = torch.nn.functional.cosine_similarity(gradient, before, dim=0, eps=1e-30)
        states: list[dict[str, Any]] = [self.optimizer.state.get(p, {}) for p in self.parameters]
        first = _moments(states, ("exp_avg", "momentum_buffer")) if any(states) else None
        second = _moments(states, ("exp_avg_sq",)) if any(states) else None
        moment = first if first is not None else gradient  # without momentum the gradient itself is what moves
        square = second.clamp(min=0).sqrt().mean() if second is not None else gradient.square().mean().sqrt()
        self._before = None
        return torch.stack(
            [
                gradient.mean(),
                gradient.std(unbiased=False),
                cosine,
                moment.abs().mean(),
                moment.std(unbiased=False),
                square,
            ]
        )


def statistics_of(sums: Sequence[float]) -> Statistics:
    """The statistics, from sums over all ranks."""
    count, total, square, before, both, moments, size, moment, moment_square, roots = sums
    count, moments = max(count, 1.0), max(moments, 1.0)
    return Statistics(
        gradient_mean=total / count,
        gradient_std=_deviation(total / count, square / count),
        gradient_cosine=both / max(math.sqrt(square * before), 1e-30),
        moment_mean=size / moments,
        moment_std=_deviation(moment / moments, moment_square / moments),
        second_moment_mean=math.sqrt(square / count) if math.isnan(roots) else roots / moments,
    )


def _deviation(mean: float, square: float) -> float:
    return square if math.isnan(square) else math.sqrt(max(0.0, square - mean * mean))


def bias_corrections(optimizer: Optimizer, steps: int) -> tuple[float, float]:
    """Compute 1 - beta^steps of the first and second moment."""
    group = optimizer.param_groups[0]
    first, second = group.get("betas") or (group.get("momentum") or 0.9, 0.999)
    return 1 - float(first) ** steps, 1 - float(second) ** steps


def _moments(states: Sequence[dict[str, Any]], names: Sequence[str]) -> Tensor | None:
    for name in names:
        found = [moment for state in states if (moment := _sampled(state, name)) is not None]
        if found:
            return torch.cat(found)
    return None


def _pick(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_strided(tensor) for tensor in tensors])


def _strided(tensor: Tensor) -> Tensor:
    if is_spread(tensor):
        return real_view(local(tensor)).reshape(-1)[own_of_every(tensor, _stride(tensor), _PER_TENSOR)].float()
    numbers = real_view(tensor.detach()._values() if tensor.is_sparse else tensor.detach())
    return numbers.reshape(-1)[:: _stride(numbers)][:_PER_TENSOR].float()


def _sampled(state: dict[str, Any], name: str) -> Tensor | None:
    moment = state.get(name)
    if not isinstance(moment, Tensor) or is_wrapped(moment):
        return None
    return sample_moment(state, name, _stride(moment if is_spread(moment) else real_view(moment)), _PER_TENSOR)


def _stride(tensor: Tensor) -> int:
    return max(1, tensor.numel() // _PER_TENSOR)
