"""GPT-2, written for speed: fused attention, tied head, a loss that need not hold all logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foretrain.config import ModelConfig
from foretrain.errors import ConfigError
from foretrain.models.cache import KeyValueCache
from foretrain.models.language_model import LanguageModel
from foretrain.models.loss import IGNORED, linear_cross_entropy, logits_bytes
from foretrain.models.recomputing import recomputed_blocks

FUSED_LOSS_FROM_BYTES = {"cuda": 256 * 2**20}
FUSED_LOSS_ELSEWHERE = 2**30
"""On CUDA the fused loss is also the faster one from here on; elsewhere it only saves memory, and only a lot pays."""
VOCABULARY_ALIGNMENT = 128
"""Matrix products are faster with aligned sizes; the extra rows stay zero and never reach the loss."""


@dataclass(frozen=True)
class GPT2Shape:
    """The numbers that define a GPT-2."""

    layers: int
    heads: int
    width: int
    context: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.0
    bias: bool = True
    normalization: str = "layernorm"
    initialization: str = "gpt2"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(
                f"model.heads = {self.heads} does not divide model.width = {self.width}; change one of them"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Return the rows of the token embedding as stored: aligned, once the vocabulary is large enough to profit."""
        alignment = VOCABULARY_ALIGNMENT if self.vocab_size >= 8 * VOCABULARY_ALIGNMENT else 1
        return -(-self.vocab_size // alignment) * alignment

    @property
    def window(self) -> int:
        """Return the tokens of a window that a text is cut into to be scored: all that the model reads at once."""
        return self.context


SIZES: dict[str, GPT2Shape] = {
    "gpt2-tiny": GPT2Shape(layers=4, heads=4, width=128, context=128),
    "gpt2-small": GPT2Shape(layers=12, heads=12, width=768),
    "gpt2-medium": GPT2Shape(layers=24, heads=16, width=1024),
    "gpt2-large": GPT2Shape(layers=36, heads=20, width=1280),
    "gpt2-xl": GPT2Shape(layers=48, heads=25, width=1600),
}


def shape_from_config(config: ModelConfig) -> GPT2Shape:
    """Return the named size with the settings that were changed."""
    shape = SIZES[config.type]
    width = config.width or shape.width
    heads = config.heads or (shape.heads if width == shape.width else max(1, width // 64))
    return replace(
        shape,
        layers=config.layers or shape.layers,
        heads=heads,
        width=width,
        context=config.context or shape.context,
        vocab_size=config.vocab_size or shape.vocab_size,
        dropout=config.dropout,
        bias=config.bias,
        normalization=config.normalization,
        initialization=config.initialization,
    )


def _norm(shape: GPT2Shape) -> nn.Module:
    if shape.normalization == "rmsnorm":
        return nn.RMSNorm(shape.width, eps=1e-5)
    return nn.LayerNorm(shape.width, bias=shape.bias)


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.qkv.fused_parts = 3  # type: ignore[assignment]  # Muon takes them apart
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed

    def decode(self, x: Tensor, new: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the attention of the last tokens to all so far; `new` is where their keys and values are kept."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        new.copy_(qkv[1:])
        y = F.scaled_dot_product_attention(qkv[0], keys, values, attn_mask=bias, is_causal=bias is None and length > 1)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class FeedForward(nn.Module):
    """Widens four times, applies GELU, and narrows again."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """Adds attention of the norm, then the feed-forward part of the norm, to the residual stream."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape)
        self.feed_forward_norm = _norm(shape)
        self.feed_forward = FeedForward(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        y: Tensor = x + self.drop(self.feed_forward(self.feed_forward_norm(x)))
        return y

    @torch.no_grad()
    def silence(self) -> None:
        """Let the block add nothing to the residual stream."""
        for layer in (self.attention.out, self.feed_forward.down):
            for parameter in layer.parameters():
                parameter.zero_()

    def decode(self, x: Tensor, new: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        x = x + self.attention.decode(self.attention_norm(x), new, keys, values, bias)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


def _draws(block: nn.Module) -> bool:
    """Return whether a block draws random numbers while training: its own dropout, or that of an adapter in it."""
    return any(getattr(module, "dropout", getattr(module, "p", 0.0)) > 0 for module in block.modules())


class GPT2(LanguageModel):
    """The model itself, with a head that is the token embedding."""

    shape: GPT2Shape

    def __init__(
        self,
        shape: GPT2Shape,
        seed: int = 0,
        *,
        activation_checkpointing: bool | float = False,
        fused_loss: bool | str = "auto",
        loss_rows: int | str = "auto",
        narrow_residual: bool = True,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.activation_checkpointing = activation_checkpointing
        self.fused_loss = fused_loss
        self.loss_rows = None if isinstance(loss_rows, str) else loss_rows
        self.narrow_residual = narrow_residual
        self.token_embedding = nn.Embedding(shape.padded_vocab_size, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final_norm = _norm(shape)
        self.initialize(torch.Generator().manual_seed(seed))

    @property
    def activation_checkpointing(self) -> bool | float:
        """Return the share of the blocks that is recomputed in the backward pass; may be changed between two steps."""
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, share: bool | float) -> None:
        self._activation_checkpointing = share
        self.recomputed = recomputed_blocks(self.shape.layers, float(share))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw new first weights from `generator` alone, the same on every device."""
        residual_std = 0.02 / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            fresh = torch.zeros(parameter.shape)
            if parameter.ndim == 1:
                fresh.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            elif self.shape.initialization == "xavier_uniform" and "embedding" not in name:
                nn.init.xavier_uniform_(fresh, generator=generator)
            else:
                std = residual_std if name.endswith(("out.weight", "down.weight")) else 0.02
                fresh.normal_(std=std, generator=generator)
            if name == "token_embedding.weight":
                fresh[self.shape.vocab_size :] = 0.0
            parameter.copy_(fresh)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the residual stream after the last norm."""
        length = tokens.shape[1]
        if length > self.shape.context:
            raise ConfigError(
                f"a sequence of {length} tokens does not fit model.context = {self.shape.context}; shorten the one "
                "or raise the other"
            )
        x = self.drop(self.token_embedding(tokens) + self.position_embedding.weight[:length])
        if self.narrow_residual and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer, block in enumerate(self.blocks):
            if layer in self.recomputed and self.training:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=_draws(block))
            else:
                x = block(x)
        normed: Tensor = self.final_norm(x)
        return normed

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.hidden(tokens)
        weight = self.token_embedding.weight
        vocab_size = self.shape.vocab_size
        if targets is not None and self._use_fused_loss(hidden):
            rows, goals = hidden.flatten(0, 1), targets.flatten()
            return linear_cross_entropy(rows, weight, goals, vocab_size, self.loss_rows)
        logits = F.linear(hidden, weight)
        if vocab_size < weight.shape[0]:
            logits = logits[..., :vocab_size]
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)

    @property
    def draws_again(self) -> bool:
        """A recomputed block repeats its dropout: its random state is read and set, which no recorded graph can do."""
        return any(_draws(block) for layer, block in enumerate(self.blocks) if layer in self.recomputed)

    def make_cache(self, batch: int, length: int, padding: Sequence[int] | None = None) -> KeyValueCache:
        """Make room for `length` tokens in each of `batch` rows, for `decode` under the same autocast setting as
        here."""
        shape, weight = self.shape, self.token_embedding.weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        sizes = shape.layers, batch, shape.heads, length, shape.width // shape.heads
        return KeyValueCache(*sizes, context=shape.context, padding=padding, device=weight.device, dtype=dtype)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Read `tokens` [batch, new] after those in `cache`; the logits [batch, vocabulary] of what comes next.

        No dropout and no gradients. A row that has outgrown the context gets logits that mean nothing.
        """
        start, positions, bias, new, seen = cache.advance(*tokens.shape)
        weight = self.token_embedding.weight
        if positions is None:
            x = self.token_embedding(tokens) + self.position_embedding.weight[start : start + tokens.shape[1]]
        else:
            x = self.token_embedding(tokens) + self.position_embedding(positions)
        if self.narrow_residual and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer, block in enumerate(self.blocks):
            x = cast("Block", block).decode(x, new[layer], seen[2 * layer], seen[2 * layer + 1], bias)
        return F.linear(self.final_norm(x[:, -1]), weight)[:, : self.shape.vocab_size]

    def _use_fused_loss(self, hidden: Tensor) -> bool:
        if self.fused_loss == "auto":
            limit = FUSED_LOSS_FROM_BYTES.get(hidden.device.type, FUSED_LOSS_ELSEWHERE)
            return logits_bytes(hidden, self.shape.padded_vocab_size) > limit
        return bool(self.fused_loss)

    def flops_per_token(self) -> float:
        """Return the forward and backward floating-point operations for one token at full context (PaLM's
        convention)."""
        matrices = sum(p.numel() for p in self.parameters() if p.ndim == 2) - self.position_embedding.weight.numel()
        return 6.0 * matrices + 12.0 * self.shape.layers * self.shape.width * self.shape.context


def build(config: ModelConfig, seed: int, **options: Any) -> GPT2:
    """Return the model a configuration describes."""
    return GPT2(shape_from_config(config), seed, **options)
