"""Tiny models with random weights of many families of transformers: the same loss, the same text, gradients everywhere.

python benchmarks/causal_families.py            # from the root of the repository; a minute on one core

Each is written by transformers, opened here and there, and asked in one batch of three prompts of unequal length. A row
of the table: whether the loss and all texts are the same; whether logits are the output layer's product alone, so that
the fused loss is used; how many linear layers have an adapter, and whether all of them learn with blocks recomputed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.causal import FAMILIES, write_causal

from foretrain import Sampling, TextGenerator, environment
from foretrain.errors import ForetrainError
from foretrain.models import lora
from foretrain.models.loss import IGNORED
from foretrain.recipes.open_model import open_base

GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {},
    "cohere2": GROUPED | {"head_dim": 8},
    "deepseek_v3": {
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "n_routed_experts"), 4),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
        **MIXTURE,
    },
    "exaone4": GROUPED,
    "falcon": {},
    "gemma": GROUPED | {"head_dim": 8},
    "gemma3_text": GROUPED | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "glm": GROUPED | {"head_dim": 8, "pad_token_id": 0},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_oss": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gptj": {"rotary_dim": 4},
    "granite": GROUPED | {"logits_scaling": 3.0},
    "helium": GROUPED | {"head_dim": 8, "pad_token_id": 0},
    "lfm2": GROUPED,
    "mistral": GROUPED | {"sliding_window": 8},
    "mixtral": GROUPED | {"num_local_experts": 4},
    "mpt": {},
    "nemotron": GROUPED,
    "olmo": {},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": GROUPED | {"pad_token_id": 0},
    "qwen3_moe": GROUPED | MIXTURE | {"num_experts": 4, "head_dim": 8},
    "smollm3": GROUPED | {"pad_token_id": 0},
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
}
PROMPTS = ["Once upon a time there was", "x", "Where is my card? It is"]
WORDS = 12


def row(family: str, folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what was found of one family."""
    write_causal(folder, family, **sizes)
    base, theirs = open_base(folder, fused_loss=True), transformers.AutoModelForCausalLM.from_pretrained(folder)
    model: Any = base.model
    tokens = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[:, :9] = IGNORED
    with torch.no_grad():
        wanted = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        same_loss = torch.allclose(model.loss((tokens, targets)), wanted, rtol=1e-5, atol=1e-5)
    made = TextGenerator(model, base.tokenizer).generate(PROMPTS, Sampling(max_tokens=WORDS, temperature=0))
    told = transformers.AutoTokenizer.from_pretrained(folder)
    texts = 0
    for prompt, ours in zip(PROMPTS, made, strict=True):
        given = told(prompt, return_tensors="pt").input_ids
        text = theirs.generate(given, max_new_tokens=WORDS, do_sample=False)[0, given.shape[1] :]
        texts += text.tolist() == list(ours.tokens)
    fused = model._head_to_fuse(tokens) is not None
    adapted = lora.attach(model.train(), lora.LoraSettings(2), 0)
    model.activation_checkpointing = True
    model.loss((tokens, targets)).backward()
    learns = all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    return {"same_loss": same_loss, "same_texts": texts, "fused": fused, "adapters": len(adapted), "all_learn": learns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for family, sizes in sorted((FAMILIES | OTHERS).items()):
            try:
                found[family] = row(family, Path(place) / family, sizes)
            except ForetrainError as error:
                found[family] = {"refused": str(error)}
            print(f"{family:14} " + ", ".join(f"{name} {value}" for name, value in found[family].items()), flush=True)
    if options.out:
        facts = {"date": f"{datetime.now().astimezone():%Y-%m-%d}", "environment": environment.describe("cpu")}
        facts |= {"transformers": transformers.__version__, "prompts": len(PROMPTS), "families": found}
        options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
