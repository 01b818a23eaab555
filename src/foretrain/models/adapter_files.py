"""Adapters in PEFT's files, both ways: `adapter_config.json` and `adapter_model.safetensors`, never a pickle."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretrain.errors import CheckpointError, ConfigError, SaveError
from foretrain.models import base_weights, huggingface, lora
from foretrain.models.causal_lm import PREFIX as INNER
from foretrain.models.causal_lm import CausalLM
from foretrain.models.gpt2 import GPT2
from foretrain.models.language_model import LanguageModel
from foretrain.models.lora import LoraSettings
from foretrain.persist.files import (
    explain_failed_write,
    from_json,
    give_usual_mode,
    make_folder,
    sync_file,
    user_path,
    write_atomic,
    write_synced,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "base_model_name_or_path"}
WITHOUT_EFFECT = {
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors say which layers
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
    *("auto_mapping", "inference_mode", "peft_version", "revision", "task_type"),
}
"""Fields that do not change what saved weights compute; any other that is set is a feature we do not have."""
NEUTRAL_STARTS = (True, False, "gaussian", "orthogonal", "eva", None)
"""Ways to draw first weights that leave the base model as it is (PiSSA, OLoRA, LoftQ and CorDA change it)."""


@dataclass(frozen=True)
class Adapter:
    """An adapter apart from any model: its tensors are `<path>.lora_a`, `<path>.lora_b` and biases by name."""

    settings: LoraSettings
    tensors: dict[str, Tensor] = field(repr=False)
    base_model_name: str = ""
    base_checksum: str = ""
    """Checksum of the weights it was trained on, as `base_weights.checksum` makes it; empty: unknown."""

    @property
    def layers(self) -> list[str]:
        """Return the paths of the layers that it changes."""
        return [name.removesuffix(".lora_a") for name in self.tensors if name.endswith(".lora_a")]


def adapter_of(model: nn.Module, base_model_name: str = "") -> Adapter:
    """Return a copy of the adapter that is attached to the model."""
    return Adapter(lora.attachment(model).settings, lora.adapter_state(model), base_model_name)


def save_adapter(
    model: nn.Module, folder: str | Path, base_model_name: str = "", beside: Mapping[str, str] | None = None
) -> Path:
    """Write the attached adapter for `peft.PeftModel.from_pretrained`; a language model gets Hugging Face's names.

    beside: further text files of the folder, by name, such as the tokenizer's.
    """
    folder = Path(folder)
    foreign = isinstance(model, GPT2) and huggingface.is_exportable(model)
    layers = lora.adapted_layers(model)
    rename = _renaming(model)
    tensors = {
        PREFIX + _peft_name(name, layers, rename): value.cpu().contiguous()
        for name, value in lora.adapter_state(model).items()
    }
    settings = lora.attachment(model).settings
    outside = [path for path, _ in model.named_modules() if path and path.rpartition(".")[0] not in layers]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(model, LanguageModel) else None,
        "base_model_name_or_path": base_model_name or None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "bias": settings.bias,
        "fan_in_fan_out": foreign or any(lora.is_conv1d(layer.base) for layer in layers.values()),
        "target_modules": _peft_targets(
            [rename(path) for path in layers], [rename(path) for path in outside if rename(path)]
        ),
    }
    metadata = {"format": "pt", base_weights.KEY: base_weights.checksum(model, lora.adapter_state(model))}
    _write(folder, json.dumps(config, indent=2) + "\n", tensors, metadata, beside or {})
    return folder


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """Return what makes Hugging Face's path of a module from ours."""
    if isinstance(model, GPT2) and huggingface.is_exportable(model):
        return _gpt2_name
    return _inner_name if isinstance(model, CausalLM) else str


def _gpt2_name(path: str) -> str:
    with contextlib.suppress(KeyError, ValueError):  # what has no weight has no name there
        return huggingface.foreign_name(f"{path}.weight").removesuffix(".weight")
    return path


def _inner_name(path: str) -> str:
    """Return the path inside of transformers' own model, which is empty for the model itself."""
    return path.removeprefix(INNER) if path.startswith(INNER) else ""


def _peft_name(name: str, layers: Iterable[str], rename: Callable[[str], str]) -> str:
    path, _, kind = name.rpartition(".")
    kinds = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    if kind not in kinds and path in layers:
        kind = f"base_layer.{kind}"
    return f"{rename(path)}.{kinds.get(kind, kind)}" if path else kind


def _peft_targets(chosen: list[str], everything: list[str]) -> list[str] | str:
    """Return the shortest way to name exactly these layers: last parts, whole paths, or an expression."""
    for names in (sorted({path.rpartition(".")[2] for path in chosen}), chosen):
        if {path for path in everything if any(f".{path}".endswith(f".{name}") for name in names)} == set(chosen):
            return names
    return f"(?:{'|'.join(map(re.escape, chosen))})"


def _write(
    folder: Path, config: str, tensors: dict[str, Tensor], metadata: dict[str, str], beside: Mapping[str, str]
) -> None:
    """Write both files whole beside the old ones first; the configuration leaves first and comes last: no mix is
    read."""
    new_config, new_weights = folder / f".tmp-{CONFIG}", folder / f".tmp-{WEIGHTS}"
    try:
        make_folder(folder)
        write_synced(new_config, config)
        new_weights.unlink(missing_ok=True)  # it may be a link
        save_file(tensors, new_weights, metadata=metadata)
        give_usual_mode(new_weights)
        for path in (new_config, new_weights):
            sync_file(path)
        (folder / CONFIG).unlink(missing_ok=True)
        for name, text in beside.items():
            write_atomic(folder / name, text)
        new_weights.replace(folder / WEIGHTS)
        new_config.replace(folder / CONFIG)
        sync_file(folder)
    except (OSError, SafetensorError) as error:
        for path in (new_config, new_weights):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        cause, advice = explain_failed_write(error)
        raise SaveError(f"the adapter could not be written to {folder}: {cause}. {advice}") from None


def read_adapter(folder: str | Path) -> Adapter:
    """Return an adapter from PEFT's files, checked; its layers have the names that they have in the files."""
    folder = user_path(folder)
    config = _read_config(folder)
    try:
        settings = LoraSettings(
            rank=config.get("r", 8),
            alpha=float(config.get("lora_alpha", 8)),
            dropout=float(config.get("lora_dropout", 0.0)),
            rank_stabilized=bool(config.get("use_rslora", False)),
            bias=config.get("bias", "none"),
        )
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be used: {error}") from None
    weights, base_checksum = _read_weights(folder)
    tensors = {_own_tensor_name(name, folder): value for name, value in weights.items()}
    layers = _check_tensors(tensors, settings, folder / WEIGHTS)
    name = str(config.get("base_model_name_or_path") or "")
    return Adapter(replace(settings, targets=layers), tensors, name, base_checksum)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; name a folder that PEFT or save_adapter wrote to its end"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else "no object"
        raise CheckpointError(f"{path} says peft_type = {kind!r}; only LORA adapters can be used")
    if config.get("init_lora_weights", True) not in NEUTRAL_STARTS:
        raise CheckpointError(
            f"{path}: init_lora_weights = {config['init_lora_weights']!r} belongs to a changed base model; "
            "save it with PEFT's conversion to a plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        if value and name not in READ | WITHOUT_EFFECT | {"init_lora_weights"}:
            raise CheckpointError(f"{path}: {name} = {value!r} is a feature of PEFT that is not supported here")
    return config


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors, and the checksum of what they belong to."""
    path = folder / WEIGHTS
    if not path.is_file():
        old = folder / "adapter_model.bin"
        advice = "name a folder that holds it"
        if old.exists():
            advice = f"{old.name} is a pickle and is never opened; save the adapter again with safe_serialization=True"
        raise CheckpointError(f"{path} does not exist; {advice}")
    try:
        with safe_open(path, framework="pt") as file:
            return load_file(path), (file.metadata() or {}).get(base_weights.KEY, "")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error})") from None


def _own_tensor_name(name: str, folder: Path) -> str:
    if not name.startswith(PREFIX):
        raise CheckpointError(f"{folder / WEIGHTS}: the name {name} does not begin with {PREFIX} as PEFT's names do")
    name = name.removeprefix(PREFIX)
    for theirs, ours in ((".lora_A.weight", ".lora_a"), (".lora_B.weight", ".lora_b"), (".base_layer.bias", ".bias")):
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


def _check_tensors(tensors: dict[str, Tensor], settings: LoraSettings, path: Path) -> tuple[str, ...]:
    """Return the layers of the file, once all its tensors make sense by themselves."""
    halves = (name.rpartition(".") for name in tensors)
    layers = tuple(dict.fromkeys(path for path, _, kind in halves if kind in ("lora_a", "lora_b")))
    if not layers:
        raise CheckpointError(f"{path} holds no LoRA weights")
    wanted = {f"{layer}.{kind}" for layer in layers for kind in ("lora_a", "lora_b")}
    for name in sorted(tensors.keys() | wanted):
        value = tensors.get(name)
        if value is None:
            raise CheckpointError(f"{path} has only half of layer {name.rpartition('.')[0]}; it is damaged")
        if name not in wanted and (settings.bias == "none" or "bias" not in name.rpartition(".")[2]):
            raise CheckpointError(f"{path}: {name} is no LoRA weight of a linear layer; it is not supported here")
        kind = name.rpartition(".")[2]
        shape = list(value.shape)
        if kind == "lora_a":
            shape = [settings.rank, *shape[-1:]]
        elif kind == "lora_b":
            shape = [*shape[:1], settings.rank]
        try:
            lora.check_tensor(name, value, shape)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error} (r = {settings.rank})") from None
    return layers


def fitted(adapter: Adapter, model: nn.Module, layers: dict[str, nn.Module]) -> Adapter:
    """Return the adapter under the model's own names, once every tensor fits one of these layers (or a bias)."""
    tensors = adapter.tensors
    if isinstance(model, GPT2):
        tensors = {huggingface.own_name(name): value for name, value in tensors.items()}
    if isinstance(model, CausalLM):
        tensors = {name if name.startswith(INNER) else INNER + name: value for name, value in tensors.items()}
    for name, value in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind in ("lora_a", "lora_b"):
            if path not in layers:
                raise CheckpointError(
                    f"the adapter changes layer {path}, which is no linear layer to adapt in this model"
                )
            inputs, outputs = lora.layer_size(layers[path])
            rank = adapter.settings.rank
            lora.check_tensor(name, value, (rank, inputs) if kind == "lora_a" else (outputs, rank))
    own = replace(adapter, tensors=tensors)
    return replace(own, settings=replace(adapter.settings, targets=tuple(own.layers)))


def load_adapter(model: nn.Module, adapter: Adapter | str | Path, any_base: bool = False) -> list[str]:
    """Attach a saved adapter to exactly its layers; where it does not fit, the model stays as it was.

    any_base: also to other weights than those it was trained on."""
    lora.refuse_adapted(model)
    if not isinstance(adapter, Adapter):
        adapter = read_adapter(adapter)
    everything = {path: module for path, module in model.named_modules() if path and lora.is_linear(module)}
    adapter = fitted(adapter, model, everything)
    names = lora.attach_to(model, {path: everything[path] for path in adapter.layers}, adapter.settings, seed=0)
    try:
        lora.load_adapter_state(model, adapter.tensors)
        if adapter.base_checksum and not any_base:
            base_weights.check(adapter.base_checksum, base_weights.checksum(model, adapter.tensors))
    except CheckpointError:
        lora.detach(model)
        raise
    return names
