"""Reads and writes the model as Hugging Face's `GPT2LMHeadModel`, safetensors only."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretrain.data.handover import tokenizer_files
from foretrain.data.tokenizers import Tokenizer
from foretrain.errors import CheckpointError
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.persist.files import from_json, give_usual_mode, user_path

_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}


_LAYER = re.compile(r"(?:transformer\.)?h\.([0-9]{1,9})\.")
_OUTER_NAMES = {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}


def foreign_name(name: str) -> str:
    """Return Hugging Face's name for a tensor of our GPT-2."""
    if name.startswith("blocks."):
        _, layer, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        return f"transformer.h.{layer}.{_NAMES[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"transformer.{_OUTER_NAMES[part]}.{kind}"


def own_name(foreign: str) -> str:
    """Return our name for Hugging Face's, with or without the leading `transformer.`; any other name comes back as it
    is."""
    name = foreign.removeprefix("transformer.")
    if name.startswith("h.") and name.count(".") >= 3:
        _, layer, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        ours = {theirs: ours for ours, theirs in _NAMES.items()}.get(part)
        return foreign if ours is None else f"blocks.{layer}.{ours}.{kind}"
    part, _, kind = name.rpartition(".")
    ours = {theirs: ours for ours, theirs in _OUTER_NAMES.items()}.get(part)
    return foreign if ours is None else f"{ours}.{kind}"


def is_exportable(model: GPT2) -> bool:
    """Return whether Hugging Face's GPT-2 can be the same function."""
    return model.shape.bias and model.shape.normalization == "layernorm"


def _is_transposed(name: str) -> bool:
    """Hugging Face stores these matrices as [in, out]."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def to_huggingface(model: GPT2) -> dict[str, Tensor]:
    """Return the state dict for `GPT2LMHeadModel` (its head is tied, so it has no entry of its own)."""
    if not is_exportable(model):
        raise CheckpointError(
            "only a model with model.bias = true and model.normalization = 'layernorm' is a GPT-2 for Hugging Face"
        )
    if any(".base." in name for name in model.state_dict()):
        raise CheckpointError("the model has adapters on it; merge and detach them (or close their registry) first")
    exported = {}
    for name, parameter in model.state_dict().items():
        value = parameter[: model.shape.vocab_size] if name == "token_embedding.weight" else parameter
        exported[foreign_name(name)] = (value.t() if _is_transposed(name) else value).contiguous()
    return exported


@torch.no_grad()
def from_huggingface(model: GPT2, weights: Mapping[str, Tensor], origin: str = "the given weights") -> None:
    """Copy a `GPT2LMHeadModel`'s (or `GPT2Model`'s) weights into `model`; both must have the same shape."""
    if (layers := _layers(weights)) > model.shape.layers:
        raise CheckpointError(
            f"{origin}: it has {layers} layers, the model {model.shape.layers}; set model.layers to the same"
        )
    copies: list[tuple[Tensor, Tensor]] = []
    for name, parameter in model.state_dict().items():
        foreign = foreign_name(name)
        value = weights.get(foreign, weights.get(foreign.removeprefix("transformer.")))
        if value is None:
            raise CheckpointError(f"{origin}: no tensor {foreign}; is it a GPT-2 with {model.shape.layers} layers?")
        if _is_transposed(name) and value.ndim == 2:
            value = value.t()
        target = parameter[: model.shape.vocab_size] if name == "token_embedding.weight" else parameter
        if value.shape != target.shape:
            raise CheckpointError(
                f"{origin}: {foreign} has shape {list(value.shape)}, the model needs {list(target.shape)}; "
                "choose the model.type, width, context and vocab_size of those weights"
            )
        copies.append((target, value))
    for target, value in copies:
        target.copy_(value)


def _layers(names: Iterable[str]) -> int:
    """Return how many layers these tensors are of."""
    found = (_LAYER.match(name) for name in names)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _check_family(path: Path) -> None:
    """Refuse other models than GPT-2 before their weights are read. What cannot be read is refused later."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if (kind := from_json(path.read_text(encoding="utf-8")).get("model_type", "gpt2")) != "gpt2":
            raise CheckpointError(
                f"model.weights: {path} says model_type = {kind!r}, but only a GPT-2 is trained at full weights; "
                f"`foretrain finetune --base {path.parent}` trains an adapter for it"
            )


def _check_config(model: GPT2, path: Path) -> None:
    """Weights of equal shapes may still mean another function; `config.json` tells."""
    try:
        config = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model.weights: {path} cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"model.weights: {path} does not describe a model; it must hold one object")
    wanted = {
        "n_head": model.shape.heads,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"model.weights: {path} says {name} = {config[name]}, the model needs {value}; "
                "choose the settings of those weights, or other weights"
            )


def save(model: GPT2, folder: str | Path, tokenizer: Tokenizer | None = None, chat_template: str = "") -> Path:
    """Write what `GPT2LMHeadModel`, `AutoTokenizer` and `pipeline("text-generation")` load: weights and settings, and
    the tokenizer if there is one. Generation ends where `TextGenerator` ends: at the end of text, or of the context."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    end = None if tokenizer is None else tokenizer.end_of_text
    weights = {name: value.cpu() for name, value in to_huggingface(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    give_usual_mode(folder / "model.safetensors")
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": shape.vocab_size,
        "n_positions": shape.context,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "activation_function": "gelu_new",
        "attn_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "bos_token_id": end,
        "eos_token_id": end,
        "tie_word_embeddings": True,
    }
    generation = {"max_length": shape.context + 1}  # the last token is not read again
    if end is not None:
        generation |= {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    files = {} if tokenizer is None else tokenizer_files(tokenizer, shape.context, chat_template)
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        files[name] = json.dumps(values, indent=2) + "\n"
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def check_sizes(folder: Path, shape: GPT2Shape) -> None:
    """Refuse weights of another shape before memory is taken for a model of this one."""
    path = folder / "model.safetensors"
    sizes = {"wte.weight": [shape.vocab_size, shape.width], "wpe.weight": [shape.context, shape.width]}
    with _reading(path), safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name, wanted in sizes.items():
            for full_name in {name, f"transformer.{name}"} & names:
                if (found := list(file.get_slice(full_name).get_shape())) != wanted:
                    raise CheckpointError(f"{path}: {full_name} has shape {found}, its config.json says {wanted}")
        if (layers := _layers(names)) != shape.layers:
            raise CheckpointError(f"{path}: it has {layers} layers, its config.json says {shape.layers}")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"model.weights: {path} is not a readable safetensors file ({error})") from None


def load(model: GPT2, folder: str | Path) -> None:
    """Fill `model` from a folder with a GPT-2 `model.safetensors`."""
    path = user_path(folder, "model.weights") / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"model.weights: {path} does not exist; name a folder that holds model.safetensors")
    _check_family(path.with_name("config.json"))
    with _reading(path):
        weights = load_file(path)
    _check_config(model, path.with_name("config.json"))
    from_huggingface(model, weights, str(path))
