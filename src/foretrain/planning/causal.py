"""What a model of transformers needs: its parameters beside adapters, and what a block keeps, in bytes.

The block is the one that Llama, Qwen and Mistral have: norm, attention with keys and values of their own width, norm,
gated feed-forward. Its figures are compared by the tests with what autograd really saves; a block of another form is
estimated by its widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from foretrain.models import lora
from foretrain.models.causal_shape import CausalShape
from foretrain.planning.activations import HALF, Pass
from foretrain.planning.parameters import FP32, Parameter, Parameters

_STATISTICS = 2
"""Numbers per token that the norms of a block keep: one each."""


@lru_cache(maxsize=64)
def whole_parameters(shape: CausalShape) -> Parameters:
    """Return the parameters of the model, all of them trained."""
    return Parameters(tuple(Parameter(weight.name, weight.shape) for weight in shape.weights))


@lru_cache(maxsize=64)
def adapted_causal(shape: CausalShape, rank: int, targets: tuple[str, ...], bias: str) -> Parameters:
    """Return the frozen model with trained adapters beside the chosen linear layers."""
    found: list[Parameter] = []
    chosen = {
        path: weight.shape
        for weight in shape.weights
        if weight.is_linear and any(lora.matches(path := weight.name.removesuffix(".weight"), text) for text in targets)
    }
    for weight in shape.weights:
        path, _, kind = weight.name.rpartition(".")
        trained = "bias" in kind and (bias == "all" or (bias == "lora_only" and path in chosen))
        size = FP32 if trained else shape.frozen_bytes
        found.append(Parameter(weight.name, weight.shape, trained=trained, size=size))
        if path in chosen and kind == "weight":
            rows, columns = chosen[path]
            found.append(Parameter(f"{path}.lora_a", (rank, columns)))
            found.append(Parameter(f"{path}.lora_b", (rows, rank)))
    return Parameters(tuple(found))


@dataclass(frozen=True)
class CausalPass(Pass):
    """A pass through a model of transformers with adapters beside all linear layers of its blocks."""

    shape: CausalShape  # type: ignore[assignment]

    @property
    def _wide(self) -> int:
        """Return the matrices that read the stream or write the wide part: gate and up, or up alone."""
        return 2 if self.shape.gated else 1

    def _norm_input(self, compiled: bool) -> int:
        if compiled:
            return self.residual
        return FP32  # these norms widen what they read by themselves

    @cached_property
    def kept_per_block(self) -> int:
        """Sum up what both norms read, what each adapter reads (in a narrow format a copy of its own), queries, keys
        and values, attention, and the feed-forward as it is before and after its activation."""
        shape, e = self.shape, self.number
        read = 3 + self._wide if self.half else 2
        attention = shape.queries * (3 if self.half else 2) + 2 * shape.key_values
        numbers = read * shape.width + attention + (2 + self._wide) * shape.feed_forward
        norms = 2 * self.norm_input * shape.width
        statistics = FP32 * (_STATISTICS + shape.heads)
        return self.tokens * (e * (numbers + self._inner) + norms + statistics + self._dropout_of_block)

    @property
    def _inner(self) -> int:
        """Return the inner results of a block's adapters."""
        return (5 + self._wide) * self.rank

    @property
    def _dropout_of_block(self) -> int:
        return 2 * self.shape.width if self.shape.dropout else 0  # a byte per number, twice

    @property
    def casts_per_block(self) -> int:
        """Return the narrow copies of a block's matrices; those that are held in that format need none."""
        if not self.half:
            return 0
        adapters = self.rank * (4 * self.shape.width + 3 * self.shape.queries + 2 * self.shape.key_values)
        adapters += self.rank * (self._wide + 1) * (self.shape.width + self.shape.feed_forward)
        frozen = self.matrices_per_block if self.shape.frozen_bytes > HALF else 0
        return HALF * (frozen + adapters)

    @cached_property
    def matrices_per_block(self) -> int:
        """Return the elements of a block's linear layers."""
        linear = sum(weight.shape[0] * weight.shape[1] for weight in self.shape.weights if weight.is_linear)
        return linear // self.shape.layers

    @property
    def in_forward(self) -> int:
        """Return what a block's forward pass needs for a while beside what is kept: streams, the wide part in fp32 as
        an adapter reads it, and its update."""
        wide = self.shape.feed_forward * (FP32 + self.number)
        return self.tokens * (self.shape.width * (2 * self.residual + FP32) + wide)

    @property
    def in_forward_alone(self) -> int:
        """Return what the forward pass of a block needs that keeps nothing."""
        wide = self.shape.feed_forward * (2 * self.number + FP32)
        return self.tokens * (self.shape.width * (2 * self.residual + self.number) + wide)

    @property
    def in_backward(self) -> int:
        """Return what a block's backward pass needs for a while: gradients of the stream and of the wide part."""
        wide = self.shape.feed_forward * (2 * self.number + FP32)
        return self.tokens * (self.shape.width * 2 * self.residual + wide)

    @property
    def largest_matrix(self) -> int:
        return self.shape.width * self.shape.feed_forward if self.shape.frozen_bytes > HALF else 0

    @property
    def head_cast(self) -> int:
        return HALF * self.head if self.half and self.shape.frozen_bytes > HALF else 0
