"""The parameters of a GPT-2 and of its optimizer as sizes, without making any."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

from foretrain.config import OptimizerConfig
from foretrain.config.schema import LoraConfig
from foretrain.engine.optim.moments import BLOCK, SMALLEST
from foretrain.models.gpt2 import GPT2Shape

FP32 = 4
_BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers|h)\.([0-9]+)\.")
"""Where a name says which block a parameter belongs to."""
STEP_BYTES = 4
"""AdamW counts its steps in one fp32 number per parameter."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    parts: int = 1
    """Matrices that a fused one is made of."""
    size: int = FP32
    """Bytes of a number."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def embedding(self) -> bool:
        return "embedding" in self.name

    @property
    def block(self) -> int | None:
        """Return the block it belongs to."""
        found = _BLOCK.search(self.name)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class MatrixBatch:
    """Hidden matrices that Muon updates together."""

    shape: tuple[int, ...]
    """Shape of each one; of a fused one, of its parts."""
    elements: int
    """Elements of all of them."""
    largest: int
    """Elements of the largest parameter among them."""


@dataclass(frozen=True, eq=False)
class Parameters:
    """All parameters of a model, in its order, and sums over them."""

    all: tuple[Parameter, ...]

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.all if p.trained)

    @cached_property
    def elements(self) -> int:
        """Return how many elements are trained."""
        return sum(p.numel for p in self.trained)

    @cached_property
    def weights(self) -> int:
        """Return the bytes of all parameters."""
        return sum(p.size * p.numel for p in self.all)

    @cached_property
    def count(self) -> int:
        """Return how many elements there are, frozen ones too."""
        return sum(p.numel for p in self.all)

    @property
    def learned(self) -> int:
        """Return the bytes that are trained, which are also those of all gradients."""
        return FP32 * self.elements

    @cached_property
    def head_gradient(self) -> int:
        """Return the bytes of the gradient of the token embedding, which is also the output layer."""
        return FP32 * sum(p.numel for p in self.trained if p.name == "token_embedding.weight")

    @cached_property
    def block_gradients(self) -> int:
        """Return the bytes of the gradients of one block."""
        return FP32 * sum(p.numel for p in self.trained if p.block == 0)

    @cached_property
    def largest_gradient(self) -> int:
        """Return the bytes of the largest gradient in a block."""
        return FP32 * max((p.numel for p in self.trained if p.block == 0), default=0)

    @cached_property
    def largest(self) -> int:
        """Return the elements of the largest trained parameter."""
        return max((p.numel for p in self.trained), default=0)

    def batches(self, split_fused: bool) -> tuple[MatrixBatch, ...]:
        """Return the hidden matrices by their shape, which Muon updates together. split_fused: parts of fused ones
        count as matrices."""
        return _batches(self, split_fused)

    def optimizer_state(self, config: OptimizerConfig) -> int:
        """Bytes of the averages of all trained parameters, and of the step counts."""
        return _state_of_all(self, config.type, config.state_type, config.momentum == 0, config.row_beta2 > 0)


@lru_cache(maxsize=64)
def parameters_of(shape: GPT2Shape) -> Parameters:
    """Return the parameters of the whole model."""
    return Parameters(_all(shape))


def adapted_parameters(shape: GPT2Shape, lora: LoraConfig) -> Parameters:
    """Return the frozen model with trained adapters beside the chosen linear layers."""
    return _adapted(shape, lora.rank, tuple(lora.targets), lora.bias)


def _all(shape: GPT2Shape) -> tuple[Parameter, ...]:
    width = shape.width
    found = [
        Parameter("token_embedding.weight", (shape.padded_vocab_size, width)),
        Parameter("position_embedding.weight", (shape.context, width)),
    ]
    for index in range(shape.layers):
        block = f"blocks.{index}"
        found += _norm(shape, f"{block}.attention_norm")
        found += _linear(shape, f"{block}.attention.qkv", 3 * width, width, parts=3)
        found += _linear(shape, f"{block}.attention.out", width, width)
        found += _norm(shape, f"{block}.feed_forward_norm")
        found += _linear(shape, f"{block}.feed_forward.up", 4 * width, width)
        found += _linear(shape, f"{block}.feed_forward.down", width, 4 * width)
    return tuple(found + _norm(shape, "final_norm"))


def _norm(shape: GPT2Shape, name: str) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", (shape.width,))
    has_bias = shape.bias and shape.normalization == "layernorm"
    return [weight, Parameter(f"{name}.bias", (shape.width,))] if has_bias else [weight]


def _linear(shape: GPT2Shape, name: str, rows: int, columns: int, parts: int = 1) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", (rows, columns), parts=parts)
    return [weight, Parameter(f"{name}.bias", (rows,))] if shape.bias else [weight]


@lru_cache(maxsize=64)
def _adapted(shape: GPT2Shape, rank: int, targets: tuple[str, ...], bias: str) -> Parameters:
    found: list[Parameter] = []
    for p in _all(shape):
        path, _, kind = p.name.rpartition(".")
        linear = kind == "weight" and len(p.shape) == 2 and not p.embedding
        chosen = any(fnmatchcase(path, text) or fnmatchcase(path, f"*.{text}") for text in targets)
        biased = bias == "all" or (bias == "lora_only" and chosen and ("attention." in path or "forward." in path))
        found.append(Parameter(p.name, p.shape, trained=kind == "bias" and biased))
        if linear and chosen:
            rows, columns = p.shape
            found.append(Parameter(f"{path}.lora_a", (rank, columns)))
            found.append(Parameter(f"{path}.lora_b", (rows, rank)))
    return Parameters(tuple(found))


def by_muon(p: Parameter) -> bool:
    """Return whether Muon updates it: hidden matrices; it leaves all else to AdamW."""
    return len(p.shape) == 2 and not p.embedding


@lru_cache(maxsize=256)
def _batches(parameters: Parameters, split_fused: bool) -> tuple[MatrixBatch, ...]:
    sizes: dict[tuple[int, ...], list[int]] = {}
    for p in parameters.trained:
        if by_muon(p):
            rows, columns = p.shape
            sizes.setdefault((rows // p.parts if split_fused else rows, columns), []).append(p.numel)
    return tuple(MatrixBatch(shape, sum(found), max(found)) for shape, found in sizes.items())


@lru_cache(maxsize=256)
def _state_of_all(parameters: Parameters, kind: str, state_type: str, still: bool, rows: bool) -> int:
    """Return the bytes of all averages. still: without momentum; rows: Muon averages a number for each row."""
    total = 0
    for p in parameters.trained:
        one = _average(p.numel, state_type)
        if kind == "sgd":
            total += 0 if still else one
        elif kind == "muon" and by_muon(p):
            total += one + (FP32 * p.shape[0] if rows else 0)
        else:
            total += 2 * one + STEP_BYTES
    return total


def _average(numel: int, state_type: str) -> int:
    if state_type == "fp32" or numel < SMALLEST:
        return FP32 * numel
    return 2 * numel if state_type == "bf16" else numel + FP32 * -(-numel // BLOCK)
