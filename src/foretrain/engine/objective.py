"""Objectives whose form is known: squares of residuals, a convex loss of a model's outputs, or a sum of such blocks.

Training needs only the loss. Leaps of the linearised run also ask how each output counts: `OutputPart` knows the
gradient and the curvature of the loss in its outputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretrain.engine.own import Measure, Supervised, described, pair
from foretrain.engine.world import World
from foretrain.errors import ConfigError, InputError
from foretrain.models.loss import IGNORED

ResidualFunction = Callable[[Any, Any], Any]
"""A function of (model, batch) that gives a tensor of residuals, or tensors by name. In place of a tensor there may be
`logistic(...)` or `cross_entropy(...)`: a block that counts by that loss, not by its squares."""
_FLATTEST = 1e-6
"""Least curvature of a convex loss that counts. Chosen: a sample that is classified beyond doubt has nearly none, and
what it still asks for would be divided by it."""


class UnknownForm(Exception):
    """This batch's loss does not have the form that its criterion usually has."""


@dataclass(frozen=True)
class OutputPart:
    """Outputs of one kind and how they count: `weight` times the mean of their losses."""

    name: str
    outputs: Tensor
    """[rows, ...], real numbers, with their graph."""
    weight: float = 1.0
    target: Tensor | None = None
    """None: the loss of an output is its square. Numbers from 0 to 1 of the outputs' shape: the logistic loss. Whole
    numbers, one per row: the cross-entropy."""

    @property
    def by_class(self) -> bool:
        """A row of outputs is one sample of several classes."""
        return self.target is not None and not self.target.is_floating_point()

    @property
    def units(self) -> int:
        """What the mean is taken over: rows of classes, else single outputs."""
        return self.outputs.shape[0] if self.by_class else self.outputs.numel()

    def losses(self, outputs: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Loss of each unit, or of the chosen ones, at outputs of the same shape."""
        target = self.target
        if self.by_class and target is not None:
            rows = outputs if chosen is None else outputs[chosen]
            return F.cross_entropy(rows, target if chosen is None else target[chosen], reduction="none")
        flat = outputs.reshape(-1)
        flat = flat if chosen is None else flat[chosen]
        if target is None:
            return flat.square()
        wanted = target.reshape(-1)
        wanted = wanted if chosen is None else wanted[chosen]
        return F.binary_cross_entropy_with_logits(flat, wanted, reduction="none")

    def curvature(self, chosen: Tensor, of: int | None = None) -> tuple[Tensor, Tensor]:
        """Gradient q of the mean loss of the chosen units in their outputs, and a factor S of its curvature S S^T.

        of: how many units the mean is taken of, where other processes hold some of them.
        q [n] and S [n] of single outputs; q [n, classes] and S [n, classes, classes] of rows of classes, in fp64. Where
        outputs are no numbers, both are none.
        """
        outputs, share = self.outputs.detach(), self.weight / (len(chosen) if of is None else of)
        if self.by_class and self.target is not None:
            chance = outputs[chosen].double().softmax(-1)
            wanted = F.one_hot(self.target[chosen].long(), chance.shape[-1])
            bend = torch.diag_embed(chance + _FLATTEST) - chance.unsqueeze(-1) * chance.unsqueeze(-2)
            factor = torch.linalg.cholesky_ex(bend).L.where(torch.isfinite(bend), torch.nan)
            return share * (chance - wanted), math.sqrt(share) * factor
        flat = outputs.reshape(-1)[chosen]
        if self.target is None:
            return 2 * share * flat, torch.full_like(flat, math.sqrt(2 * share))
        chance = flat.sigmoid()
        bend = (chance * (1 - chance)).clamp(min=_FLATTEST)
        return share * (chance - self.target.reshape(-1)[chosen]), (share * bend).sqrt()


class Objective(ABC):
    """A loss as outputs and how they count."""

    @abstractmethod
    def parts(self, model: Any, batch: Any) -> list[OutputPart]:
        """Outputs of this batch, with their graph."""

    def note(self, means: Mapping[str, Tensor]) -> None:  # noqa: B027 - most have nothing to tell
        """These are the mean losses of the parts in a step."""


def logistic(outputs: Tensor, targets: Tensor) -> OutputPart:
    """A block of residuals that counts by the logistic loss instead of squares: outputs before the sigmoid, and targets
    from 0 to 1 of the same shape."""
    _check_outputs("logistic", outputs, targets)
    if outputs.shape != targets.shape:
        shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
        raise InputError(f"logistic() got {shapes}: it takes one target for each output")
    return OutputPart("logistic", outputs, target=targets.to(outputs.dtype))


def cross_entropy(outputs: Tensor, targets: Tensor) -> OutputPart:
    """A block of residuals that counts by the cross-entropy instead of squares: outputs [rows, classes] before the
    softmax, and the class of each row, from 0 on."""
    _check_outputs("cross_entropy", outputs, targets)
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1] or targets.is_floating_point():
        shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)} of {targets.dtype}"
        raise InputError(f"cross_entropy() got {shapes}: it takes [rows, classes] and one whole number per row")
    return OutputPart("cross_entropy", outputs, target=targets)


def _check_outputs(name: str, outputs: Any, targets: Any) -> None:
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.is_floating_point()):
        given = f"{described(outputs)} and {described(targets)}"
        raise InputError(f"{name}() got {given}: it takes tensors of outputs and of targets, and outputs are real")


class Residuals(Objective):
    """The sum over blocks of weight times the mean of squares of residuals, or of a convex loss of outputs. A loss
    function of (model, batch)."""

    def __init__(self, function: ResidualFunction, weights: Mapping[str, float] | None = None) -> None:
        if not callable(function):
            raise ConfigError(f"residuals = {function!r} cannot be called; give a function of (model, batch)")
        self.function = function
        given: Mapping[str, Any] = weights or {}
        for name, weight in given.items():
            if not (isinstance(weight, Real) and math.isfinite(weight) and float(weight) >= 0):
                raise ConfigError(f"weights[{name!r}] = {weight!r}: a weight is a number that is not negative")
        self.weights = {str(name): float(weight) for name, weight in given.items()}
        self.latest: dict[str, Tensor] = {}
        """Mean loss of each block when it was last computed, on the device."""

    def parts(self, model: Any, batch: Any) -> list[OutputPart]:
        found = [part for part in self.blocks(model, batch) if part.units and part.weight > 0]
        for part in found:
            if part.by_class and part.target is not None and bool((part.target < 0).any()):
                raise UnknownForm("targets are not one class per row")
        return found

    def note(self, means: Mapping[str, Tensor]) -> None:
        self.latest |= means

    def blocks(self, model: Any, batch: Any) -> list[OutputPart]:
        """All blocks with their names and weights, also those that count nothing."""
        found = self.function(model, batch)
        if isinstance(found, (list, tuple)):
            raise InputError(
                f"the residual function gave {described(found)}, whose parts have no names; give tensors by name, such "
                'as {"equation": ..., "edge": ...}, or one tensor'
            )
        named = found if isinstance(found, Mapping) else {"residuals": found}
        if not named:
            raise InputError("the residual function gave no block; it must give a tensor, or tensors by name")
        if all(isinstance(block, Tensor) and not block.ndim for block in named.values()):
            raise InputError(
                "the residual function gave one number and not one for each point: that looks like a loss, and its "
                "square would be minimised. Hand a loss in as loss_fn, or give what it is the mean of before squares "
                "are taken; if there really is one residual only, give it as one row: residual.reshape(1)"
            )
        blocks = {str(name): block for name, block in named.items()}
        if unknown := [name for name in self.weights if name not in blocks]:
            names = ", ".join(map(repr, blocks))
            raise ConfigError(
                f"weights names {unknown[0]!r}, which is no block of residuals; there are {names}. A block that has no "
                "row in some batches is given there all the same, as an empty tensor"
            )
        return [self._block(name, block) for name, block in blocks.items()]

    def _block(self, name: str, block: Any) -> OutputPart:
        weight = self.weights.get(name, 1.0)
        if isinstance(block, OutputPart):
            return replace(block, name=name, weight=weight)
        if not isinstance(block, Tensor):
            raise InputError(f"the residuals {name!r} are {described(block)}; they must be a tensor")
        if not (block.is_floating_point() or block.is_complex()):
            raise InputError(f"the residuals {name!r} are whole numbers ({block.dtype}), which have no derivative")
        return OutputPart(name, _real(block), weight)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss. A block without rows, or of weight 0, counts nothing."""
        total: Tensor | None = None
        for part in self.blocks(model, batch):
            if not part.units:
                continue
            mean = part.losses(part.outputs).mean()
            self.latest[part.name] = mean.detach()
            if part.weight:
                total = part.weight * mean if total is None else total + part.weight * mean
        if total is None:
            raise InputError("no block of residuals that counts has a row in this batch: there is nothing to train on")
        return total


def block_weights(objective: Objective | None) -> dict[str, float] | None:
    """The weights of blocks that were given; None where the loss is not made of residuals."""
    return dict(objective.weights) if isinstance(objective, Residuals) else None


def other_weights(saved: Mapping[str, float], given: Mapping[str, float]) -> str:
    """What to say where blocks count otherwise now than in a saved state; empty where they do not."""
    names = [name for name in sorted({*saved, *given}) if saved.get(name, 1.0) != given.get(name, 1.0)]
    changes = ", ".join(f"{name!r} {given.get(name, 1.0):g} and not {saved.get(name, 1.0):g}" for name in names)
    if not changes:
        return ""
    return (
        f"blocks of residuals have other weights now than when this was saved: {changes}. The run goes on with the new "
        "ones; its losses from here on are not comparable with those before"
    )


def block_losses(objective: Objective | None, world: World) -> dict[str, float] | None:
    """Mean loss of each block of residuals; None where the loss is not made of them. Waits for the device."""
    if not isinstance(objective, Residuals) or not objective.latest:
        return None
    numbers = world.to_host(torch.stack([mean.float() for mean in objective.latest.values()]))
    return dict(zip(objective.latest, numbers, strict=True))


class OfOutputs(Objective):
    """The loss of a criterion of (output, target) whose curvature is known."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def parts(self, model: Any, batch: Any) -> list[OutputPart]:
        inputs, targets = pair(batch)
        output = model(inputs)
        if self.kind == "classes":
            classes = isinstance(output, Tensor) and output.ndim == 2 and targets.shape == output.shape[:1]
            if not classes or targets.is_floating_point() or bool((targets < 0).any()):
                raise UnknownForm("targets are not one class per row")
            return [OutputPart("loss", output, target=targets)]
        if not isinstance(output, Tensor) or output.shape != targets.shape:
            raise UnknownForm("outputs and targets differ in shape")
        if self.kind == "mse":
            wanted = targets.to(output.dtype) if targets.dtype is torch.bool else targets
            return [OutputPart("loss", _real(output - wanted))]
        return [OutputPart("loss", output, target=targets.to(output.dtype))]


def objective_given(
    loss: Measure | None, residuals: ResidualFunction | None, weights: Mapping[str, float] | None
) -> Measure | None:
    """The loss that was handed in, or that of the residuals."""
    if residuals is None:
        if weights is not None:
            raise ConfigError("weights= are those of blocks of residuals; hand in residuals= as well")
        return loss
    if loss is not None:
        raise ConfigError("loss_fn and residuals= both say what is minimised; keep one of them")
    return Residuals(residuals, weights)


def objective_of(loss: object) -> Objective | None:
    """The objective behind a loss function, where its form is known: residuals, mean squares, logistic, cross-entropy.

    Weighted, smoothed and summed criteria have none here.
    """
    if isinstance(loss, Objective):
        return loss
    criterion: Any = loss.criterion if isinstance(loss, Supervised) else None
    if criterion is F.mse_loss or _plain(criterion, nn.MSELoss):
        return OfOutputs("mse")
    if criterion is F.binary_cross_entropy_with_logits or _plain(criterion, nn.BCEWithLogitsLoss):
        return OfOutputs("bce")
    if criterion is F.cross_entropy or _plain(criterion, nn.CrossEntropyLoss):
        return OfOutputs("classes")
    return None


def _plain(criterion: Any, kind: type[nn.Module]) -> bool:
    """A criterion of this very class as torch makes it by default."""
    if type(criterion) is not kind or criterion.reduction != "mean":
        return False
    weighted = any(getattr(criterion, name, None) is not None for name in ("weight", "pos_weight"))
    ignoring = getattr(criterion, "ignore_index", IGNORED) != IGNORED  # targets below 0 are looked for in any case
    return not (weighted or ignoring or getattr(criterion, "label_smoothing", 0.0))


def _real(block: Tensor) -> Tensor:
    """Complex residuals as pairs of real ones, a single number as one row."""
    if block.is_complex():
        # the mean of squares of pairs is half of the mean of squared moduli
        block = math.sqrt(2.0) * torch.view_as_real(block)
    return block if block.ndim else block.reshape(1)
