"""A trained model and its tokenizer, from wherever they lie: to fine-tune it, or to let it write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretrain import config as configuration
from foretrain.config import ModelConfig
from foretrain.data import chat_templates, chats, hub_tokenizers, tokenizers
from foretrain.data.chat_templates import ChatTemplate
from foretrain.data.handover import chat_template_of, tokenizer_files
from foretrain.data.templates import Format, make_format, with_chat
from foretrain.data.tokenizers import Tokenizer
from foretrain.errors import CheckpointError, ConfigError, InputError
from foretrain.models import causal_files, huggingface
from foretrain.models.adapter_files import Adapter
from foretrain.models.causal_files import holds_weights
from foretrain.models.causal_lm import CausalLM
from foretrain.models.causal_shape import CausalShape
from foretrain.models.gpt2 import GPT2, GPT2Shape, shape_from_config
from foretrain.models.language_model import LanguageModel
from foretrain.persist.files import from_json, user_path
from foretrain.recipes import hub

_CHAT = f"{{{chats.FIELDS[0]}}}"
_SHAPE = {
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
    "context": "n_positions",
    "vocab_size": "vocab_size",
}
"""The numbers of a model in our words and in Hugging Face's."""


@dataclass(frozen=True)
class Base:
    """Weights, the tokenizer that belongs to them, and where they came from."""

    model: LanguageModel
    tokenizer: Tokenizer
    folder: Path
    adapter: Path | Adapter | None = None
    """What a fine-tuning run trained on top of these weights."""
    format: Format | None = None
    """How a fine-tuning run was asked."""
    chat: ChatTemplate | None = None
    """The model's own way to write chats; None: plain lines."""

    def files_beside(self, chat_template: str = "") -> dict[str, str]:
        """Return the tokenizer's files for a folder that is made from this model: its own, as its folder has them.

        chat_template: in Jinja; only for a model that has none of its own."""
        if isinstance(self.model, CausalLM):
            return hub_tokenizers.files_of(self.tokenizer, self.folder)
        return tokenizer_files(self.tokenizer, self.model.shape.context, chat_template)


def open_base(
    path: str | Path, tokenizer: str = "", vocabulary: str = "", precision: str = "fp32", **options: Any
) -> Base:
    """Open a run folder of `foretrain train` or `finetune`, a folder with a causal language model in Hugging Face's
    format, or a name of the Hugging Face Hub.

    tokenizer: the path of a tokenizer.json, or `gpt2` with the folder of its `vocabulary`; unset: the one that lies
    there. precision: what it will be computed in; models other than GPT-2 are held in it where their files are in it.
    options: of `GPT2`, or of `CausalLM`.
    """
    path = find_folder(path)
    if (path / "adapter").is_dir():
        config = configuration.load(path / "config.toml").config
        if not config.model.weights:
            raise CheckpointError(f"{path}: its config.toml does not say what was fine-tuned (model.weights)")
        if (find_folder(config.model.weights) / "adapter").is_dir():
            raise CheckpointError(
                f"{path}: what its config.toml names as fine-tuned (model.weights = {config.model.weights}) is a "
                "fine-tuning run and no model"
            )
        beside = path / "tokenizer.json"
        tokenizer = tokenizer or (str(beside) if beside.is_file() else "")
        inner = open_base(config.model.weights, tokenizer, vocabulary, precision, **options)
        return replace(inner, adapter=path / "adapter", format=asked_as(config, inner))
    folder = path if holds_weights(path) else path / "model"
    if (path / "adapter_config.json").is_file():
        raise InputError(f"{path}: an adapter, not a model; `foretrain generate MODEL --adapter {path}` uses it")
    if not holds_weights(folder):
        _refuse_pickle(path)
        raise InputError(
            f"{path}: holds no model yet (no model.safetensors); name a folder that holds one, or wait until the run "
            "has saved its first checkpoint"
        )
    if not causal_files.is_gpt2(folder):
        return _open_causal(folder, tokenizer, precision, **options)
    if not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: a GPT-2 in several files; save it in one (max_shard_size), or convert it to fp16")
    shape = shape_of(folder)
    huggingface.check_sizes(folder, shape)
    model = GPT2(shape, **options)
    huggingface.load(model, folder)
    found = find_tokenizer(folder, tokenizer, vocabulary)
    _check_vocabulary(folder, found, model)
    return Base(model, found, folder)


def _open_causal(folder: Path, tokenizer: str, precision: str, **options: Any) -> Base:
    """Open a model of any other family, by transformers."""
    causal_files.checked_config(folder)  # before its tokenizer is looked for
    beside = folder / "tokenizer.json"
    if not tokenizer and not beside.is_file():
        raise InputError(
            f"{folder}: no tokenizer.json beside the weights; write one with: python -c "
            f"\"import transformers as t; t.AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\", "
            "or name one (data.tokenizer, or --tokenizer)"
        )
    found = hub_tokenizers.load(Path(tokenizer) if tokenizer else beside, folder)
    chat = chat_templates.template_in(folder, found.special)
    model = causal_files.open_causal(folder, precision, **options)
    _check_vocabulary(folder, found, model)
    return Base(model, found, folder, chat=chat)


def _check_vocabulary(folder: Path, tokenizer: Tokenizer, model: LanguageModel) -> None:
    if tokenizer.vocab_size > model.shape.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {model.shape.vocab_size}; name the "
            "tokenizer that it was trained with"
        )


def _refuse_pickle(path: Path) -> None:
    if name := causal_files.pickle_in(path):
        raise InputError(
            f"{path}: its weights are in {name}, a pickle, which can run any code and is never opened; save them as "
            f'safetensors where you trust them: python -c "import transformers as t; '
            f"t.AutoModelForCausalLM.from_pretrained('{path}').save_pretrained('FOLDER')\""
        )


def asked_as(config: configuration.Config, base: Base) -> Format | None:
    """Return how a fine-tuning run asks its model; None: it was not told."""
    if not config.data.prompt:
        return None
    return with_chat(make_format(config.data.prompt, config.data.answer), base.chat)


def asked_in_chats(base: Base) -> Format | None:
    """Return how a model is asked that was tuned on chats: by its own template, or in the lines of ours, as the folder
    of a merged adapter says."""
    if base.chat is not None or chat_template_of(base.folder) == chats.JINJA:
        return with_chat(make_format(_CHAT, _CHAT), base.chat)
    return None


def find_folder(name: str | Path, say: Callable[[str], None] = lambda _: None, fetch: bool = True) -> Path:
    """Return the folder of this path, or a model of this name of the Hugging Face Hub: from its cache, or fetched.

    say: hears how much is fetched. fetch: False leaves it at the cache."""
    path = user_path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise InputError(f"{path}: it is a file; name a run folder, or one that holds model.safetensors")
    is_inside = path.parent != Path() and path.parent.is_dir()
    if is_inside or not hub.is_name(str(name)):
        raise InputError(f"{path}: there is no such folder; name a run folder, or one that holds model.safetensors")
    if cached := hub.in_cache(str(name)):
        return cached
    if fetch and hub.can_be_fetched(str(name)):
        return hub.fetch(str(name), say)
    raise InputError(f"{name}: there is no such folder, and nothing is fetched here; {hub.how_to_get(str(name))}")


def any_shape_of(folder: Path, precision: str = "fp32", narrow: bool = True) -> GPT2Shape | CausalShape:
    """Return the shape of the model in a folder of any family, without reading its weights."""
    if causal_files.is_gpt2(folder):
        return shape_of(folder)
    return causal_files.shape_in(folder, precision, narrow)


def shape_of(folder: Path) -> GPT2Shape:
    """Return the shape that a model's `config.json` says."""
    path = folder / "config.json"
    try:
        values = from_json(path.read_text(encoding="utf-8"))
        if any(isinstance(values[name], (bool, type(None))) for name in _SHAPE.values()):
            raise TypeError("its numbers are not given")
        numbers = ModelConfig(**{ours: values[theirs] for ours, theirs in _SHAPE.items()})
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); it must say the model's shape") from None
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{path}: does not describe a GPT-2 ({type(error).__name__}: {error})") from None
    return shape_from_config(numbers)


def tokenizer_beside(folder: Path) -> Tokenizer | None:
    """Return the one that lies in a folder of weights, or in the run folder above."""
    for place in (folder, folder.parent):
        if (place / "tokenizer.json").is_file():
            return tokenizers.load(place / "tokenizer.json")
    return tokenizers.gpt2(folder) if (folder / "vocab.json").is_file() else None


def find_tokenizer(folder: Path, wanted: str, vocabulary: str) -> Tokenizer:
    """Return the one that is wanted, or else the one beside the weights."""
    if wanted == "gpt2" or (vocabulary and not wanted):
        return tokenizers.gpt2(vocabulary or folder)
    if wanted == "byte":
        return tokenizers.ByteTokenizer()
    if wanted:
        return tokenizers.load(wanted)
    if (found := tokenizer_beside(folder)) is not None:
        return found
    raise InputError(
        f"{folder}: no tokenizer.json beside the weights; name one (data.tokenizer, or --tokenizer), or GPT-2's "
        "vocabulary files (data.vocabulary, or --vocabulary)"
    )
