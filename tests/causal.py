"""Tiny models of other families than GPT-2, with random weights and a tokenizer, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from foretrain.data.tokenizers import ByteTokenizer

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "bos_token_id": 257,
    "eos_token_id": 259,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gpt_neox": {"rotary_pct": 0.5},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
}


def make_inner(family: str, **changes: Any) -> Any:
    """Return a model of transformers with random weights, the same every time."""
    config = transformers.AutoConfig.for_model(family, **SIZES | FAMILIES.get(family, {}) | changes)
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def write_tokenizer(folder: Path, *, begins: bool = False, chat: str = CHAT) -> Any:
    """Write bytes as tokens with the marks of chats. begins: every text begins with a token of its own, as Llama's."""
    inner = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json())
    inner.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    if begins:
        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **MARKS)
    made.chat_template = chat or None
    made.save_pretrained(folder)
    return made


def write_causal(folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a complete folder."""
    given = {name: changes.pop(name) for name in ("begins", "chat") if name in changes}
    size = {"max_shard_size": changes.pop("shard")} if "shard" in changes else {}
    make_inner(family, **changes).to(dtype).save_pretrained(folder, **size)
    write_tokenizer(folder, **given)
    return folder
