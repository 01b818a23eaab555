"""What an adapter was trained on, as a checksum: weights of equal shapes may still be another model."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from foretrain.errors import CheckpointError
from foretrain.models.causal_lm import CausalLM
from foretrain.models.gpt2 import GPT2
from foretrain.models.lora import AdaptedLinear, LoraLinear

KEY = "foretrain_base"
"""Key in the metadata of the adapter's safetensors file, which other programs leave alone."""


def checksum(model: nn.Module, without: Collection[str] = ()) -> str:
    """Digest names, number formats and bits of all weights below adapters. without: those that the adapter holds.

    It takes 0.1 s for 124M weights.
    """
    digest, kinds = hashlib.sha256(), set()
    for name, weight in sorted(_weights(model), key=lambda item: item[0]):
        if name not in without:
            content = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(f"{name} {list(weight.shape)} {zlib.crc32(content)}\n".encode())
            kinds.add(str(weight.dtype))
    return f"{'+'.join(sorted(kinds))}:{digest.hexdigest()}"


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    layers = [module for module in model.modules() if isinstance(module, LoraLinear) and module.merged]
    before = {id(layer.base.weight): layer.original for layer in layers}
    adapted = any(isinstance(module, AdaptedLinear) for module in model.modules())
    for name, weight in model.named_parameters():
        if adapted and name.endswith((".lora_a", ".lora_b")):
            continue
        original = before.get(id(weight))
        value = weight if original is None else original
        if isinstance(model, GPT2) and name == "token_embedding.weight":
            value = value[: model.shape.vocab_size]  # the rest of it is never used
        if isinstance(model, CausalLM):
            value = value.float()  # exact: the same weights are held in the file's format or in fp32
        yield name.replace(".base.", "."), value


def check(wanted: str, found: str) -> None:
    """Refuse another base. Where one of them is unknown, or in another number format, nothing can be said."""
    if wanted and wanted != found and wanted.partition(":")[0] == found.partition(":")[0]:
        raise CheckpointError(
            "the adapter was trained on other weights than those of this model: the model was trained on or replaced "
            "since; use the weights it was trained on, or fine-tune again (any_base=True, or --any-base, takes these "
            "all the same)"
        )
