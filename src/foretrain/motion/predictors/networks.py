"""What the learned predictors are built from: weights with their own optimizer, and a head per group of weights.

Forward and backward passes are written out in numpy: the arrays are so small that the bookkeeping of a tensor library
would cost several times what the arithmetic does. All members of an ensemble lie in one array, member first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foretrain.motion.predictors.base import Array
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, LAST_WINDOW

Single = NDArray[np.float32]
Matrices = Mapping[str, Single]

SIZE = len(DIRECTIONS)
PAIRS = np.triu_indices(SIZE, 1)
GROUP_FEATURES = SIZE + len(PAIRS[0]) + SIZE
HORIZON_FEATURES: Single = np.array([[math.log2(h) / 3, h / 8] for h in HORIZONS_IN_WINDOWS], dtype=np.float32)


class Weights:
    """Named matrices [members, inputs, outputs] over one buffer, with Adam. Members are trained one at a time."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], members: int, generator: torch.Generator) -> None:
        """Normal with variance 1 / inputs; names ending in `bias` or `last` start at zero."""
        sizes = [inputs * outputs for inputs, outputs in shapes.values()]
        self.values = torch.zeros(members, sum(sizes))
        self.first = torch.zeros_like(self.values)
        self.second = torch.zeros_like(self.values)
        self.steps = torch.zeros(members)
        self.gradient = torch.zeros(sum(sizes))
        self.all: dict[str, Single] = {}
        self.gradients: dict[str, Single] = {}
        start = 0
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            part = self.values[:, start : start + size]
            if not name.endswith(("bias", "last")):
                part.copy_(torch.randn(members, size, generator=generator) / shape[0] ** 0.5)
            self.all[name] = part.numpy().reshape(members, *shape)
            self.gradients[name] = self.gradient[start : start + size].numpy().reshape(shape)
            start += size
        self.single = [{name: array[member] for name, array in self.all.items()} for member in range(members)]

    def step(self, member: int, rate: float) -> None:
        """One step of Adam for one member, from `gradients`. One that is not finite changes nothing."""
        if not math.isfinite(float(self.gradient.sum())):
            return
        torch._fused_adam_(
            [self.values[member]],
            [self.gradient],
            [self.first[member]],
            [self.second[member]],
            [],
            [self.steps[member].add_(1.0)],
            lr=rate,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        tensors = {"values": self.values, "first": self.first, "second": self.second, "steps": self.steps}
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("values", "first", "second", "steps"):
            getattr(self, name).copy_(state[name])


def sigmoid(values: Single) -> Single:
    """By the hyperbolic tangent, which cannot overflow."""
    return np.asarray(np.float32(0.5) * np.tanh(np.float32(0.5) * values) + np.float32(0.5))


def silu(values: Single) -> Single:
    return np.asarray(values * sigmoid(values))


def silu_slope(values: Single) -> Single:
    gate = sigmoid(values)
    return np.asarray(gate * (1 + values * (1 - gate)))


def group_features(gram: Array, coefficients: Array) -> Single:
    """[G, features] relative lengths and cosines of the directions, and the coefficients of the linear fit."""
    known = np.sqrt(np.maximum(np.einsum("gii->gi", gram), 1e-60))
    unit = 1.0 / known
    features = np.empty((len(gram), GROUP_FEATURES), dtype=np.float32)
    features[:, :SIZE] = np.log(known * unit[:, LAST_WINDOW, None]).clip(-3.0, 3.0)
    cosines = gram[:, PAIRS[0], PAIRS[1]] * unit[:, PAIRS[0]] * unit[:, PAIRS[1]]
    features[:, SIZE:-SIZE] = cosines.clip(-1.0, 1.0)
    features[:, -SIZE:] = coefficients.clip(-2.0, 2.0)
    return features


def units(gram: Array) -> Array:
    """[G, R] what a coefficient of 1 means in lengths of the last window: long directions count less."""
    squares = np.einsum("gii->gi", gram)
    ratio = squares[:, LAST_WINDOW, None] / np.maximum(squares, 1e-300)
    return np.asarray(np.sqrt(ratio.clip(0.0, 4.0)))


def head_shapes(context: int, hidden: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Of a network from a context, group and horizon to coefficients. It starts at exactly zero."""
    shapes: dict[str, tuple[int, int]] = {
        "head_context": (context, hidden[0]),
        "head_context_bias": (1, hidden[0]),
        "head_group": (GROUP_FEATURES, hidden[0]),
        "head_horizon": (HORIZON_FEATURES.shape[1], hidden[0]),
    }
    for number, (inputs, outputs) in enumerate(pairwise(hidden), 1):
        shapes[f"head_hidden{number}"] = (inputs, outputs)
        shapes[f"head_hidden{number}_bias"] = (1, outputs)
    return {**shapes, "head_last": (hidden[-1], SIZE)}


def head(weights: Matrices, context: Single, groups: Single) -> Single:
    """[members, horizons, G, R] at every horizon, from context [members or 1, 1, inputs] and groups [G, features].

    The first layer is a sum of three small products; the product of all three axes is only formed after it.
    """
    common = (
        context @ weights["head_context"] + weights["head_context_bias"] + HORIZON_FEATURES @ weights["head_horizon"]
    )
    each = groups @ weights["head_group"]
    rows = silu((common[:, :, None] + each[:, None]).reshape(len(each), -1, each.shape[-1]))
    number = 1
    while f"head_hidden{number}" in weights:
        rows = silu(rows @ weights[f"head_hidden{number}"] + weights[f"head_hidden{number}_bias"])
        number += 1
    return (rows @ weights["head_last"]).reshape(len(each), len(HORIZON_FEATURES), len(groups), SIZE)


class HeadPass:
    """One member's head on samples that each have their own context, groups and horizon; and its gradients."""

    def __init__(self, weights: Matrices, context: Single, groups: Single, indices: Sequence[int]) -> None:
        self.weights, self.context, self.groups = weights, context, groups
        self.horizons = HORIZON_FEATURES[list(indices)]
        common = context @ weights["head_context"] + weights["head_context_bias"]
        common = common + self.horizons @ weights["head_horizon"]
        rows = (groups @ weights["head_group"] + common[:, None]).reshape(-1, common.shape[-1])
        self.inputs = [rows]  # of every layer's nonlinearity
        self.outputs = [silu(rows)]
        while (name := f"head_hidden{len(self.inputs)}") in weights:
            self.inputs.append(self.outputs[-1] @ weights[name] + weights[name + "_bias"])
            self.outputs.append(silu(self.inputs[-1]))
        self.result: Single = (self.outputs[-1] @ weights["head_last"]).reshape(*groups.shape[:2], SIZE)

    def backward(self, error: Single, gradients: Matrices) -> Single:
        """From the gradient of the result to those of the matrices (written) and of the context (returned)."""
        weights = self.weights
        flat = error.reshape(-1, SIZE)
        np.matmul(self.outputs[-1].T, flat, out=gradients["head_last"])
        rows = (flat @ weights["head_last"].T) * silu_slope(self.inputs[-1])
        for number in range(len(self.inputs) - 1, 0, -1):
            name = f"head_hidden{number}"
            np.matmul(self.outputs[number - 1].T, rows, out=gradients[name])
            gradients[name + "_bias"][0] = rows.sum(0)
            rows = (rows @ weights[name].T) * silu_slope(self.inputs[number - 1])
        np.matmul(self.groups.reshape(len(rows), -1).T, rows, out=gradients["head_group"])
        common = rows.reshape(len(self.context), -1, rows.shape[-1]).sum(1)
        np.matmul(self.horizons.T, common, out=gradients["head_horizon"])
        np.matmul(self.context.T, common, out=gradients["head_context"])
        gradients["head_context_bias"][0] = common.sum(0)
        return np.asarray(common @ weights["head_context"].T)
