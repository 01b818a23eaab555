"""The numbers of a model of transformers, as planning and generation ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from foretrain.models import lora

LONGEST_WINDOW = 2048
"""Tokens. A text is scored in windows of this length where the model could read more at once: what needs a context of
a hundred thousand tokens is rarely asked, and its memory would be."""
USUAL_CONTEXT = 2048
"""Tokens, where a model says of no length that it is the longest."""
_CONTEXT = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")


class Weight(NamedTuple):
    """One weight of a model that is not made."""

    name: str
    shape: tuple[int, ...]
    is_linear: bool
    """Whether it is the matrix [outputs, inputs] of a linear layer that an adapter may stand beside."""


@dataclass(frozen=True)
class CausalShape:
    """What is known of a model without its weights."""

    layers: int
    heads: int
    width: int
    context: int
    vocab_size: int
    queries: int
    """Width of all queries of a token."""
    key_values: int
    """Width of all its keys, which is also that of its values."""
    feed_forward: int
    gated: bool
    """Whether the feed-forward part has a gate beside its wide matrix."""
    dropout: float
    weights: tuple[Weight, ...]
    frozen_bytes: int = 4
    """Bytes of a number in frozen weights."""

    @property
    def padded_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def window(self) -> int:
        """Return the tokens of a window that a text is cut into to be scored."""
        return min(self.context, LONGEST_WINDOW)


def shape_of(inner: Any, frozen_bytes: int = 4) -> CausalShape:
    """Return the shape of a model of transformers, which may lie on the meta device."""
    config = inner.config.get_text_config()
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_width = _first(config, ("head_dim",)) or width // heads
    wide = _first(config, ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")) or 4 * width
    rates = [value for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)]
    return CausalShape(
        layers=int(config.num_hidden_layers),
        heads=heads,
        width=width,
        context=_first(config, _CONTEXT) or USUAL_CONTEXT,
        vocab_size=int(config.vocab_size),
        queries=heads * head_width,
        key_values=(_first(config, ("num_key_value_heads",)) or heads) * head_width,
        feed_forward=wide,
        gated=any("gate" in name.rpartition(".")[2] for name, _ in inner.named_modules()),
        dropout=max(rates, default=0.0),
        weights=tuple(_weights(inner)),
        frozen_bytes=frozen_bytes,
    )


def _first(config: Any, names: Iterable[str]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)


def _weights(inner: Any) -> Iterator[Weight]:
    linear = {f"{path}.weight": layer for path, layer in lora.linear_layers(inner).items()}
    for name, parameter in inner.named_parameters():
        shape = tuple(parameter.shape)
        layer: nn.Module | None = linear.get(name)
        if layer is not None and lora.is_conv1d(layer):
            shape = shape[::-1]
        yield Weight(f"inner.{name}", shape, layer is not None)
