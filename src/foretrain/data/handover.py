"""A tokenizer as the files that `transformers.AutoTokenizer` reads, with the same numbers for the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretrain.data.tokenizers import END_OF_TEXT, BPETokenizer, CharacterTokenizer, Tokenizer
from foretrain.persist.files import from_json


def tokenizer_files(tokenizer: Tokenizer, context: int, chat_template: str = "") -> dict[str, str]:
    """Return file names and contents. context: the longest text of the model. chat_template: in Jinja, for chats."""
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    if isinstance(tokenizer, CharacterTokenizer):
        special["unk_token"] = END_OF_TEXT
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # any other would put a text splitting of its own in
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        # only a tokenizer of the library itself sees a special token where one is spelled out in the text
        "split_special_tokens": not isinstance(tokenizer, BPETokenizer),
        **special,
    }
    if chat_template:
        config["chat_template"] = chat_template
    return {
        "tokenizer.json": _without_additions(tokenizer),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
    }


def _without_additions(tokenizer: Tokenizer) -> str:
    """Drop the special tokens that a file may put around every text: models are trained without them here."""
    text = tokenizer.to_json()
    if isinstance(tokenizer, BPETokenizer) and tokenizer.inner.num_special_tokens_to_add(False):
        return json.dumps(json.loads(text) | {"post_processor": None}, ensure_ascii=False)
    return text


def chat_template_of(folder: Path) -> str:
    """Return the chat template that the files in `folder` name; nothing where there is none."""
    try:
        found = from_json((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""
