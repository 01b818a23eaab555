"""Data, tokenizers, models, adapters and text: makers of inputs for the fuzzer."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
from pathlib import Path
from typing import Any

import fuzz_mutations as spoil
from fuzz_examples import TINY
from fuzz_maker import Input, Maker, tiny_settings
from fuzz_mutations import Random

# --- data -------------------------------------------------------------------------------------------------------------

DATA = ("text.txt", "text.txt.gz", "text.txt.xz", "text.jsonl", "text.parquet", "tokens.bin", "tokens.npy")


def data_file(make: Maker) -> str:
    """One spoilt file of data, at times under a name that is odd or says another kind."""
    name = make.rng.choice([name for name in DATA if (make.good / name).exists()])
    make.take(name)
    if make.chance(0.75):
        spoil.spoil_file(make.rng, Path(name))
    if name.endswith(("gz", "xz")) and make.chance(0.4):  # what is wrong is inside
        pack = gzip.compress if name.endswith("gz") else lzma.compress
        shutil.rmtree(name, ignore_errors=True)
        Path(name).unlink(missing_ok=True)
        Path(name).write_bytes(pack(spoil.spoil_bytes(make.rng, (make.good / "text.txt").read_bytes())))
    if make.chance(0.15) and not Path(name).is_symlink():
        other = make.rng.choice([*DATA, "x", spoil.odd_name(make.rng, Path(name).suffix)])
        os.rename(name, other)  # noqa: PTH104 - names that pathlib would change
        name = other
    return make.name(name) or name


def train_data(make: Maker) -> Input:
    path = data_file(make)
    tokenizer = make.rng.choice(["byte", "byte", "char", "bpe"])
    more = {"data__path": path, "data__tokenizer": tokenizer, "data__bpe_size": 260}
    if Path(path).suffix in (".bin", ".npy") or make.chance(0.1):
        more["model__vocab_size"] = make.rng.choice([300, 300, 10, 65536])
    if make.chance(0.15):
        make.take(*{"text.txt"} - {path} if not os.path.lexists("text.txt") else ())
        more |= {"data__validation_path": path, "data__path": make.name("text.txt")}
    return Input(["train", *tiny_settings(**more), "--out", "out", "--quiet"], writes=("out", "cache"))


def evaluate_data(make: Maker) -> Input:
    make.take("base")
    path = data_file(make)
    options = make.options(
        batch_size=(1, 2, 0),
        batches=(1, 0),
        answers=(0, 2),
        prompt=("{text}", "{"),
        answer=("{n}", "{label}"),
        final_answer=("x",),
        device=("cpu", "cuda", "x"),
    )
    return Input(["evaluate", "base", "--data", path, *options, *make.json()])


def train_names(make: Maker) -> Input:
    """Names of folders and files that are odd, and still there."""
    make.take("text.txt")
    name, folder = spoil.odd_name(make.rng, ".txt"), spoil.odd_name(make.rng)
    os.rename("text.txt", name)  # noqa: PTH104
    for text in (folder, "out"):
        os.makedirs(text, exist_ok=True)  # noqa: PTH103
    out = make.rng.choice([os.path.join("out", spoil.odd_name(make.rng)), folder, *spoil.LOST_NAMES[:4]])  # noqa: PTH118
    more = {
        "data__path": make.rng.choice([name, f"./{name}", folder, *spoil.LOST_NAMES]) or name,
        "data__cache": make.rng.choice(["cache", folder]),
    }
    return Input(
        ["train", *tiny_settings(**more), "--quiet", "--out", out],
        writes=("out", "cache", folder, "none", "x" * 256, "~nosuchuser", *["home"] * (folder == "~")),
    )


def train_cache(make: Maker) -> Input:
    """A token cache that was damaged since."""
    from foretrain import config
    from foretrain.data import tokens

    make.take("text.txt")
    data = {
        "data.path": "text.txt",
        "data.cache": "cache",
        "data.tokenizer": make.rng.choice(["byte", "char", "bpe"]),
        "data.bpe_size": 260,
    }
    tokens.prepare(config.from_mapping(data).data)
    spoil.spoil_folder(make.rng, Path("cache"))
    settings = [
        part for name, value in {**TINY, "max_steps": 1, **data}.items() for part in ("--set", f"{name}={value}")
    ]
    return Input(["train", *settings, "--out", "out", "--quiet"], writes=("out", "cache"))


# --- tokenizers -------------------------------------------------------------------------------------------------------

TOKENIZERS = ("tokenizer.json", "byte.json", "char.json", "word.json", "piece.json", "unigram.json")


def tokenizer_file(make: Maker) -> str:
    name = make.rng.choice(TOKENIZERS)
    make.take(name)
    if make.chance(0.5):
        tree = json.loads(Path(name).read_text())
        part = make.rng.choice(
            [
                "model",
                "added_tokens",
                "pre_tokenizer",
                "decoder",
                "normalizer",
                "post_processor",
                "truncation",
                "padding",
            ]
        )
        tree[part] = spoil.spoil_tree(make.rng, tree[part]) if tree[part] else _component(make.rng)
        Path(name).write_bytes(spoil.json_text(make.rng, tree))
    else:
        spoil.spoil_file(make.rng, Path(name))
    return make.name(name)


def _component(rng: Random) -> Any:
    """A part of a tokenizer that needs more than its type, or has it wrong."""
    kinds = [
        "ByteLevel",
        "Whitespace",
        "Metaspace",
        "Split",
        "Punctuation",
        "Digits",
        "Sequence",
        "BertPreTokenizer",
        "Precompiled",
        "Replace",
        "Prepend",
        "Strip",
        "NFKC",
        "TemplateProcessing",
        "BPEDecoder",
        "CTC",
        "Fuse",
        "WordPiece",
        "Unigram",
        "BPE",
    ]
    part = {
        "type": rng.choice(kinds),
        "pattern": rng.choice([{"Regex": "("}, {"Regex": "(a*)*b"}, {"String": ""}, None]),
        "behavior": "Isolated",
        "invert": False,
    }
    part |= {
        "content": "",
        "precompiled_charsmap": rng.choice(["", "AAAA", None]),
        "pretokenizers": [],
        "normalizers": [],
        "decoders": [],
        "prepend_scheme": "always",
        "replacement": rng.choice(["", "▁", "ab"]),
        "split": True,
        "add_prefix_space": rng.random() < 0.5,
        "trim_offsets": True,
        "use_regex": True,
    }
    return rng.choice([part, {"type": part["type"]}, spoil.value(rng)])


def train_tokenizer(make: Maker) -> Input:
    make.take("text.txt")
    return Input(
        [
            "train",
            *tiny_settings(data__path="text.txt", data__tokenizer=tokenizer_file(make)),
            "--out",
            "out",
            "--quiet",
        ],
        writes=("out", "cache"),
    )


def generate_tokenizer(make: Maker) -> Input:
    make.take("base")
    arguments = [
        "generate",
        "base",
        "--tokenizer",
        tokenizer_file(make),
        "--prompt",
        "the cat",
        "--max-tokens",
        "3",
        "--device",
        "cpu",
    ]
    return Input([*arguments, *make.options(stream=(True,)), *make.json()])


def train_vocabulary(make: Maker) -> Input:
    make.take("text.txt", "vocabulary")
    spoil.spoil_folder(make.rng, Path("vocabulary"))
    more = {"data__tokenizer": "gpt2", "data__vocabulary": make.name("vocabulary"), "data__path": "text.txt"}
    return Input(["train", *tiny_settings(**more), "--out", "out", "--quiet"], writes=("out", "cache"))


# --- models and adapters ----------------------------------------------------------------------------------------------


def base_folder(make: Maker) -> str:
    """A model in Hugging Face's format; its numbers stay small, or are refused."""
    make.take("base")
    if make.chance(0.35):
        path = Path("base/config.json")
        tree = json.loads(path.read_text())
        path.write_bytes(spoil.json_text(make.rng, spoil.spoil_tree(make.rng, tree)))
    else:
        spoil.spoil_folder(make.rng, Path("base"))
    return make.name("base")


def generate_options(make: Maker) -> list[str]:
    return [
        *("--max-tokens", "3", "--device", "cpu"),
        *make.options(
            temperature=(0, 0.5),
            top_k=(0, 1, 10**6),
            top_p=(0.5, 1),
            repetition_penalty=(1.2, 1e-30),
            seed=(1, 2**63 - 1),
            stop=("a", "["),
            stream=(True,),
        ),
        *make.json(),
    ]


def generate_base(make: Maker) -> Input:
    return Input(["generate", base_folder(make), "--prompt", "the cat", *generate_options(make)])


def evaluate_base(make: Maker) -> Input:
    make.take("text.txt")
    return Input(["evaluate", base_folder(make), "--data", "text.txt", "--batches", "2", *make.json()])


def finetune_base(make: Maker) -> Input:
    make.take("examples.jsonl")
    arguments = [
        "finetune",
        "--base",
        base_folder(make),
        "--data",
        "examples.jsonl",
        *tiny_settings(),
        "--out",
        "out",
        "--quiet",
    ]
    return Input(arguments, writes=("out", "cache"))


def train_base(make: Maker) -> Input:
    make.take("text.txt")
    more = {"data__path": "text.txt", "model__weights": base_folder(make), "model__context": 32}
    return Input(["train", *tiny_settings(**more), "--out", "out", "--quiet"], writes=("out", "cache"))


def plan_base(make: Maker) -> Input:
    return Input(
        [
            "plan",
            "--finetune",
            "--set",
            f"model.weights={base_folder(make)}",
            *make.options(budget=("1GB",)),
            *make.json(),
        ]
    )


def adapter_folder(make: Maker) -> str:
    make.take("adapter", "base")
    path = Path("adapter/adapter_config.json")
    tree = json.loads(path.read_text()) | {"base_model_name_or_path": "base"}
    if make.chance(0.4):
        tree = spoil.spoil_tree(make.rng, tree)
    path.write_bytes(spoil.json_text(make.rng, tree))
    if make.chance(0.6):
        spoil.spoil_folder(make.rng, Path("adapter"), "adapter_*")
    return make.name("adapter")


def generate_adapter(make: Maker) -> Input:
    return Input(
        [
            "generate",
            "base",
            "--adapter",
            adapter_folder(make),
            "--prompt",
            "x",
            *make.options(any_base=(True,)),
            *generate_options(make),
        ]
    )


def evaluate_adapter(make: Maker) -> Input:
    make.take("examples.jsonl")
    arguments = ["evaluate", "base", "--adapter", adapter_folder(make), "--data", "examples.jsonl", "--answers", "2"]
    return Input([*arguments, *make.options(any_base=(True,)), *make.json()])


def adapters_list(make: Maker) -> Input:
    adapter_folder(make)
    return Input(["adapters", "list", make.name("."), *make.json()])


def adapters_merge(make: Maker) -> Input:
    arguments = ["adapters", "merge", adapter_folder(make), "out"]
    return Input(
        [*arguments, *make.options(base=("base", "adapter"), any_base=(True,), overwrite=(True,)), *make.json()],
        writes=("out", ".tmp-out"),
    )


# --- examples and text -----------------------------------------------------------------------------------------------


def examples_file(make: Maker) -> str:
    name = make.rng.choice(["examples.jsonl", "chats.jsonl", "chats.jsonl"])
    make.take(name)
    if make.chance(0.9):
        spoil.spoil_file(make.rng, Path(name))
    return make.name(name)


def finetune_examples(make: Maker) -> Input:
    make.take("base")
    more = make.options(
        set=(
            "data.prompt={text}",
            "data.prompt={",
            "data.answer={label}",
            "data.max_length=4",
            "data.prompt=[]",
            "evaluation.final_answer=x",
            "data.held_out=0.9",
            "data.prompt={a.b}",
            "data.prompt={text!r:>99}",
        )
    )
    arguments = ["finetune", "--base", "base", "--data", examples_file(make), *tiny_settings(), *more, "--out", "out"]
    return Input([*arguments, *make.options(quiet=(True,)), *make.json()], writes=("out", "cache"))


def evaluate_examples(make: Maker) -> Input:
    make.take("base")
    options = make.options(
        prompt=("{text}", "{", "{messages}"), answer=("{label}", ""), final_answer=("b", ""), batch_size=(1,)
    )
    return Input(["evaluate", "base", "--data", examples_file(make), "--answers", "2", *options, *make.json()])


def generate_stdin(make: Maker) -> Input:
    make.take("base", "half-tuned")
    text = make.rng.choice(
        [
            b"the cat",
            b"",
            b"\xff\xfe\x00",
            "漢字\u202e\x1b[2J".encode(),
            b"\x00" * 50,
            b"a" * 5000,
            "\U0010ffff".encode(),
        ]
    )
    model = make.rng.choice(["base", "half-tuned"])
    if make.chance(0.5):
        text = spoil.spoil_bytes(make.rng, text)
    if make.chance(0.4):
        prompts = [part for _ in range(2) for part in ("--prompt", make.rng.choice([*spoil.STRANGE, "the cat"]))]
        return Input(["generate", model, *prompts, *make.options(raw=(True,)), *generate_options(make)])
    return Input(["generate", model, *generate_options(make)], stdin=text)
