"""What forward and backward passes keep and need for a while, in bytes, as `models/gpt2.py` computes op by op.

The figures per token and unit of width come from reading the model and are compared by the tests with the tensors that
autograd really saves. E is the size of a number in the precision of the pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from foretrain.models.gpt2 import FUSED_LOSS_ELSEWHERE, FUSED_LOSS_FROM_BYTES, GPT2Shape
from foretrain.models.loss import SLICE_ROWS, SLICE_ROWS_ALONE
from foretrain.planning.parameters import FP32

HALF = 2


@dataclass(frozen=True)
class Pass:
    """One forward (and backward) pass of a micro-batch, and how it is executed."""

    shape: GPT2Shape
    rows: int
    length: int
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    cuda: bool = True
    compiled: bool = False
    by_block: bool = False
    """Compiled, but block by block, so that gradients come in turn; the loss is then not compiled."""
    narrow: bool = True
    fused: bool | str = "auto"
    loss_rows: int | str = "auto"
    recomputed: float = 0.0
    """Share of the blocks whose activations are not kept."""
    rank: int = 0
    """The rank of adapters; 0: all weights are trained."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def half(self) -> bool:
        return self.precision != "fp32"

    @property
    def number(self) -> int:
        """Return E, the bytes of a number in matrix products."""
        return HALF if self.half else FP32

    @property
    def residual(self) -> int:
        """Return the bytes of a number in the sum that runs through the blocks."""
        return HALF if self.half and self.narrow else FP32

    @property
    def stream(self) -> int:
        """Return the residual stream once, in fp32 bytes / 4: tokens x width."""
        return self.tokens * self.shape.width

    @property
    def norm_input(self) -> int:
        """Return the bytes of a number that a norm keeps: CUDA's autocast widens its input to fp32, a compiled one
        reads it as it is, and the CPU's RMS norm, which is not fused, keeps an fp32 input and its normalized form."""
        return self._norm_input(self.compiled)

    def _norm_input(self, compiled: bool) -> int:
        if compiled:
            return self.residual
        if not self.cuda and self.shape.normalization == "rmsnorm":
            return 2 * FP32
        return FP32 if self.half and self.cuda else self.residual

    # --- blocks ------------------------------------------------------------------------------------------------------

    @cached_property
    def kept_per_block(self) -> int:
        """Sum up inputs and outputs of both norms, queries, keys and values, attention, and the feed-forward twice 4
        wide."""
        e = self.number
        wide = self.stream * (2 * self.norm_input + 2 * e + 3 * e + e + 4 * e + 4 * e)
        numbers = 2 if self.shape.normalization == "layernorm" else 1
        statistics = self.tokens * FP32 * (2 * numbers + self.shape.heads)
        return wide + statistics + self._dropout_per_block + self._adapters_per_block

    @property
    def _dropout_per_block(self) -> int:
        if not self.shape.dropout:
            return 0
        if self.cuda or self.compiled:
            return 2 * self.stream  # a byte per number, twice
        # The CPU's attention is not fused then: queries, keys and values in fp32, and three times all pairs of tokens.
        pairs = self.rows * self.shape.heads * self.length**2
        return 2 * self.stream * self.number + 3 * FP32 * pairs + 3 * self.stream * (FP32 - self.number)

    @property
    def kept_of_embedding(self) -> int:
        """Return which numbers were dropped before the first block."""
        return self.stream * (1 if self.cuda or self.compiled else FP32) if self.shape.dropout else 0

    @property
    def _adapters_per_block(self) -> int:
        """Adapters keep a copy of attention's output in the narrow format, and four inner results."""
        if not self.rank:
            return 0
        copy = self.stream * self.number if self.half else 0
        return copy + 4 * self.tokens * self.rank * self.number

    @property
    def input_of_block(self) -> int:
        """Return all that is kept of a recomputed block."""
        return self.stream * self.residual

    @property
    def casts_per_block(self) -> int:
        """Return the narrow copies of its matrices and biases, made by autocast and kept for the backward pass."""
        width = self.shape.width
        return HALF * (12 * width**2 + (9 * width if self.shape.bias else 0)) if self.half else 0

    @property
    def in_forward(self) -> int:
        """Return what a block's forward pass needs for a while beside what is kept: residual streams and a norm's fp32
        output."""
        return self.stream * (2 * self.residual + (FP32 if self.half else 0))

    @property
    def in_forward_alone(self) -> int:
        """Return what the forward pass of a block needs that keeps nothing: the feed-forward twice 4 wide, its in- and
        output."""
        return self.stream * (self.residual + 10 * self.number)

    @property
    def in_backward(self) -> int:
        """Return what a block's backward pass needs for a while: the gradient of the stream and that of the wide
        part."""
        cast = self.number if self.residual != self.number else 0
        return self.stream * (self.residual + cast + 4 * self.number)

    @property
    def largest_matrix(self) -> int:
        """Return the elements of the feed-forward's matrices."""
        return 4 * self.shape.width**2

    # --- the loss ----------------------------------------------------------------------------------------------------

    @property
    def compiles_loss(self) -> bool:
        return self.compiled and not self.by_block

    @property
    def last_norm_input(self) -> int:
        """Return `norm_input` for the norm before the output layer."""
        return self._norm_input(self.compiles_loss)

    @cached_property
    def fuses(self) -> bool:
        """Return whether the logits are computed in slices."""
        if self.fused == "auto":
            limit = FUSED_LOSS_FROM_BYTES["cuda"] if self.cuda else FUSED_LOSS_ELSEWHERE
            return FP32 * self.tokens * self.shape.padded_vocab_size > limit
        return bool(self.fused)

    @property
    def head(self) -> int:
        """Return the elements of the output layer, which is the token embedding."""
        return self.shape.padded_vocab_size * self.shape.width

    @property
    def learns_head(self) -> bool:
        """Return whether the output layer has a gradient: beside adapters it is frozen."""
        return not self.rank

    @property
    def head_cast(self) -> int:
        return HALF * self.head if self.half else 0

    @property
    def kept_of_hidden(self) -> int:
        """Return the input of the last norm, and its output where the output layer needs it later."""
        return self.stream * (self.last_norm_input + (0 if self.fuses else self.number))

    @property
    def hidden_in_forward(self) -> int:
        """Return the last norm's output, and its narrow copy, while the loss is computed."""
        if not self.half:
            return self.stream * FP32 if self.fuses else 0
        return self.stream * (self.residual + FP32 + (self.number if self.fuses else 0))

    def loss_forward(self, learning: bool = True) -> int:
        """Return the most that the loss needs in the forward pass."""
        e, vocabulary, padded = self.number, self.shape.vocab_size, self.shape.padded_vocab_size
        if not self.fuses:
            if self.compiles_loss:
                return self.tokens * e * padded
            contiguous = vocabulary < padded or self.half
            return self.tokens * (e * padded + FP32 * vocabulary * (2 if contiguous else 1))
        rows = min(self.tokens, self._slice(learning))
        logits = rows * e * padded + self.head_cast
        # On the CPU torch's own operations: the softmax in fp32, and its gradient.
        softmax = 0 if self.cuda else rows * vocabulary * FP32 * ((1 if self.half else 0) + (2 if learning else 0))
        if not learning:
            return logits + softmax
        if not self.learns_head:
            return logits + self.stream * e + softmax
        before = FP32 * self.head if self.tokens > rows else 0  # the gradient of the head from earlier slices
        product = FP32 * self.head + (self.head_cast if not self.cuda else 0)
        return logits + self.stream * e + before + max(softmax, product)

    def _slice(self, learning: bool) -> int:
        usual = SLICE_ROWS if learning else SLICE_ROWS_ALONE
        return usual["cuda" if self.cuda else "cpu"] if isinstance(self.loss_rows, str) else self.loss_rows

    @property
    def loss_kept(self) -> int:
        """Return what the loss keeps between the two passes."""
        if self.fuses:
            return (FP32 * self.head if self.learns_head else 0) + self.stream * self.number
        logits = self.number * self.shape.padded_vocab_size if self.compiles_loss else FP32 * self.shape.vocab_size
        return self.tokens * logits + self.head_cast

    @property
    def loss_backward(self) -> int:
        """Return the most that the loss needs in the backward pass, with what was kept, without the gradient of the
        head."""
        if self.fuses:
            return self.loss_kept + (self.head_cast if self.learns_head else 0) + self.stream * self.number
        padded = self.tokens * self.number * self.shape.padded_vocab_size
        if self.compiles_loss:
            return self.loss_kept + padded + self.head_cast
        return self.head_cast + max(
            self.tokens * 3 * FP32 * self.shape.vocab_size - FP32 * self.head, padded + self.head_cast
        )

    @property
    def cast_at_once(self) -> int:
        """Return the largest narrow copy, where each is made when it is needed and freed after it."""
        return HALF * self.largest_matrix if self.half else 0

    @property
    def forward_alone(self) -> int:
        """Return a pass without gradients, as probes and evaluation make them, with its copies of weights."""
        cached = not self.compiled and not self.recomputed  # autocast keeps every copy to the end of the pass
        copies = self.shape.layers * self.casts_per_block if cached else self.cast_at_once
        head = self.head_cast if not (self.compiles_loss or self.fuses) else 0
        loss = self.hidden_in_forward + head
        return copies + max(self.in_forward_alone, loss + self.loss_forward(learning=False))
