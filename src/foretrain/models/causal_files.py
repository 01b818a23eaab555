"""Opens and writes models of transformers: safetensors only, no code of a folder is ever run, and what a stranger's
config.json says is bounded before anything is computed from it."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from foretrain.errors import CheckpointError, ForetrainError, InputError, how_to_install
from foretrain.models.causal_lm import CausalLM
from foretrain.models.causal_shape import CausalShape, shape_of
from foretrain.persist.files import from_json, give_usual_mode

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin", "consolidated.00.pth")
LARGEST_NUMBER = 2**24
"""No size of a model is larger; a vocabulary or a context could be, if it were no damage."""
MOST_PARTS = 1024
"""Layers or experts of a model, at the most."""
MOST_BUFFERS = 2**28
"""Numbers in all buffers of a model, which no file holds, at the most."""
_NO_SIZES = ("theta", "seed", "base", "_token_id", "token_index")
"""Parts of names whose numbers are no sizes."""
_OF_CODE = ("auto_map", "dtype", "torch_dtype", "transformers_weights", "use_cache", "torchscript", "return_dict")
_OF_LABELS = ("num_labels", "id2label", "label2id", "problem_type", "task_specific_params", "pruned_heads")
_DROPPED = frozenset(_OF_CODE + _OF_LABELS)
"""What a causal language model here has no use for; a number of labels would become a table of as many."""
_SILENT = 50
"""The level above all that Python's logging knows: what matters comes as an error, or as what was not loaded."""
_FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class _Header(NamedTuple):
    """What the safetensors files of a folder hold."""

    tensors: int
    elements: int
    format: torch.dtype
    """That of most numbers."""


def holds_weights(folder: Path) -> bool:
    """Return whether there are safetensors, in one file or in several with an index."""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def pickle_in(folder: Path) -> str:
    """Return the name of the pickle that holds a model's weights; empty: there is none."""
    return next((name for name in PICKLES if (folder / name).is_file()), "")


def config_of(folder: Path) -> dict[str, Any]:
    """Return a model's config.json, once it is one that a stranger may be trusted with."""
    path = folder / "config.json"
    try:
        values = from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); it must say what the model is") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: does not describe a model; it must hold one object")
    return values


def is_gpt2(folder: Path) -> bool:
    """Return whether the folder holds what our own GPT-2 opens; a config.json that says nothing is left to it."""
    try:
        return str(config_of(folder).get("model_type", "gpt2")) == "gpt2"
    except CheckpointError:
        return True


def checked_config(folder: Path) -> dict[str, Any]:
    """Return the config of a model that can be a base. Refuses whatever would run code, or is no causal model."""
    values, path = config_of(folder), folder / "config.json"
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: model_type = {kind!r}; it must name a type of model")
    if "auto_map" in values:
        raise CheckpointError(
            f"{path}: auto_map asks for code that comes with the model, which is never run; take a model that "
            "transformers itself has the code of"
        )
    if values.get("is_encoder_decoder") is True:
        raise CheckpointError(
            f"{path}: model_type = {kind!r} is an encoder with a decoder; only causal language models, which continue "
            "a text, can be a base"
        )
    if values.get("quantization_config"):
        raise CheckpointError(
            f"{path}: the weights are quantized (quantization_config); save them once in bf16 or fp32, and name that "
            "folder"
        )
    if (folder / "adapter_config.json").is_file():
        raise InputError(f"{folder}: holds an adapter beside a model; move one of them into a folder of its own")
    _check_numbers(values, path)
    return values


def _check_numbers(values: Any, path: Path, name: str = "") -> None:
    """Refuse sizes that no model has, before a model of them is laid out."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            _check_numbers(value, path, str(key))
    elif isinstance(values, list):
        for value in values:
            _check_numbers(value, path, name)
    elif isinstance(values, (int, float)) and not isinstance(values, bool):
        if isinstance(values, float) and not math.isfinite(values):
            raise CheckpointError(f"{path}: {name} = {values}; it must be a finite number")
        if any(part in name for part in _NO_SIZES):
            return
        parts = "layer" in name or "expert" in name
        if abs(values) > (MOST_PARTS if parts and isinstance(values, int) else LARGEST_NUMBER):
            raise CheckpointError(f"{path}: {name} = {values}; no model has so many")


def read_header(folder: Path) -> _Header:
    """Return how much the files hold, without reading the weights."""
    counts: Counter[str] = Counter()
    tensors = 0
    for path in _weight_files(folder):
        with _reading(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dictionary
                part = file.get_slice(name)
                counts[part.get_dtype()] += math.prod(part.get_shape())
                tensors += 1
    kind = max(counts, key=lambda name: counts[name], default="F32")
    return _Header(tensors, sum(counts.values()), _FORMATS.get(kind, torch.float32))


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    path = folder / INDEX
    try:
        names = set(from_json(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is no index of weights ({type(error).__name__}: {error})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: names {name!r}; only safetensors files beside it can be opened")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: does not exist, but {path.name} names it; get the whole model")
    return [folder / name for name in sorted(names)]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"model.weights: {path} is not a readable safetensors file ({error})") from None


@contextlib.contextmanager
def _library(what: str) -> Iterator[Any]:
    """Hand transformers out, silent, and make a sentence of whatever it raises."""
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise InputError(
            f"{what}: models other than GPT-2 need transformers; {how_to_install('foretrain[transformers]')}"
        ) from None
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(_SILENT)
    logging.disable_progress_bar()
    try:
        yield transformers
    except (ForetrainError, MemoryError, SafetensorError):
        raise
    except Exception as error:  # classes of transformers raise whatever they like
        if isinstance(error, OSError) and error.errno is not None:  # of the system itself
            raise
        raise CheckpointError(f"{what}: transformers cannot use it ({_short(error)})") from None
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def lay_out(folder: Path) -> Any:
    """Return the model without weights, on the meta device, once the files are large enough to hold it."""
    values, header = checked_config(folder), read_header(folder)
    with _library(str(folder / "config.json")) as transformers:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

        kind = values["model_type"]
        if kind not in KNOWN:
            raise CheckpointError(
                f"{folder / 'config.json'}: model_type = {kind!r} is no causal language model that transformers "
                f"{transformers.__version__} knows"
            )
        config = CONFIG_MAPPING[kind].from_dict(_plain(values))
        layers = config.get_text_config().num_hidden_layers
        if not 0 < layers <= header.tensors:
            raise CheckpointError(f"{folder}: config.json says {layers} layers, the weights are {header.tensors}")
        with torch.device("meta"):
            inner = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        needed = sum(parameter.numel() for parameter in inner.parameters())
        if needed > header.elements:
            raise CheckpointError(
                f"{folder}: config.json describes a model of {needed:,} weights, its files hold {header.elements:,}; "
                "they do not belong together"
            )
        if sum(buffer.numel() for buffer in inner.buffers()) > MOST_BUFFERS:
            raise CheckpointError(f"{folder / 'config.json'}: describes tables that no memory holds")
    return inner


def _plain(values: Any) -> Any:
    """Leave out what chooses code or number formats: attention by a kernel of the hub, for example."""
    if isinstance(values, dict):
        return {
            name: _plain(value)
            for name, value in values.items()
            if name not in _DROPPED and "implementation" not in name
        }
    return values


def shape_in(folder: Path, precision: str = "fp32", narrow: bool = True) -> CausalShape:
    """Return the shape of the model in a folder, without reading its weights."""
    inner, size = lay_out(folder), _format_for(read_header(folder).format, precision, narrow).itemsize
    with _library(str(folder / "config.json")):
        return shape_of(inner, size)


def _format_for(stored: torch.dtype, precision: str, narrow: bool) -> torch.dtype:
    """Return the format that frozen weights are held in: that of the file where they are multiplied in it, else fp32,
    which holds every number of the file exactly."""
    computed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return stored if narrow and computed is stored else torch.float32


def open_causal(folder: Path, precision: str = "fp32", **options: Any) -> CausalLM:
    """Read a causal language model of any family from its folder.

    precision: the format that it will be computed in; weights are held in it where the files have it, too. options: of
    `CausalLM`.
    """
    inner, stored = lay_out(folder), read_header(folder).format
    dtype = _format_for(stored, precision, options.get("narrow_residual", True))
    with _reading(folder / WEIGHTS), _library(str(folder)) as transformers:
        loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=inner.config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are told, and refused below
            output_loading_info=True,
        )
        lost = [*told["missing_keys"], *told["mismatched_keys"]]
        if lost:
            name = min(one if isinstance(one, str) else str(one[0]) for one in lost)
            raise CheckpointError(f"{folder}: no tensor fits {name} as config.json says it; get the whole model again")
        loaded.config.use_cache = True
        loaded.eval()
        shape = shape_of(loaded, dtype.itemsize)
        if "past_key_values" not in inspect.signature(loaded.forward).parameters:
            raise CheckpointError(
                f"{folder}: a model of type {loaded.config.model_type} keeps no keys and values of what it has read, "
                "which generation here needs"
            )
        return CausalLM(loaded, shape, file_format=stored, **options)


def save(model: CausalLM, folder: Path, beside: Mapping[str, str]) -> Path:
    """Write a complete Hugging Face folder, in the number format that the model's own files had.

    beside: further text files by name, such as the tokenizer's and generation_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _library(str(folder)) as transformers:
        inner = model.inner.to(model.file_format)
        inner.config.dtype = model.file_format
        inner.generation_config = transformers.GenerationConfig()  # ours is written beside, as the base had it
        inner.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        give_usual_mode(path)
    for name, text in beside.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def generation_config(folder: Path, ends: tuple[int, ...]) -> str:
    """Return the base's generation_config.json, with all tokens at which a text ends."""
    try:
        values = from_json((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = {}
    values = values if isinstance(values, dict) else {}
    return json.dumps(values | {"eos_token_id": list(ends) if len(ends) > 1 else ends[0]}, indent=2) + "\n"
