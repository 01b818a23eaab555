"""What the commands of foretrain are given, spoilt: for every command and every kind of file a maker of inputs.

`build` writes good examples of every kind into a folder, once. A maker copies what it needs of them into the current
folder of one input, spoils some of it (`fuzz_mutations.py`) and returns the arguments. Everything that is legal is
tiny: what is fuzzed is how input is refused, not how long a long order takes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fuzz_mutations as spoil
from fuzz_mutations import Random

TINY = {
    "max_steps": 4,
    "batch_size": 2,
    "device": "cpu",
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 16,
    "model.context": 16,
    "evaluation.batches": 2,
    "evaluation.answers": 4,
    "checkpoint.interval": 2,
    "log.interval": 1,
    "data.cache": "cache",
}
LONG = {
    *("max_steps", "epochs", "device", "engine.compile", "log.trackers", "data.path", "data.cache", "data.validation_path"),
    *("model.type", "memory.budget"),
}
"""Settings whose legal values can make a long run of a tiny one, or leave its folder."""
SIZES = {"model.layers", "model.heads", "model.width", "model.context", "model.vocab_size", "batch_size", "data.bpe_size"}


@dataclass
class Input:
    """One call of the program, in a folder that `make` has filled."""

    arguments: list[str]
    writes: tuple[str, ...] = ()
    """What it may write, below the current folder; everything else must stay as it is."""
    stdin: bytes = b""
    serves: bool = False
    """It goes on until it is stopped."""
    note: str = ""


@dataclass(frozen=True)
class Target:
    """A command and a kind of what it is given."""

    command: str
    kind: str
    make: Callable[[Maker], Input] = field(repr=False)
    weight: int = 1

    @property
    def name(self) -> str:
        return f"{self.command} / {self.kind}"


class Maker:
    """Makes one input: `rng` decides, `good` holds the examples, the current folder takes what is made."""

    def __init__(self, rng: Random, good: Path) -> None:
        self.rng = rng
        self.good = good
        self.legal = rng.choice([0.5, 0.93])
        """Share of settings with a value that is allowed."""

    def take(self, *names: str) -> None:
        """Copy examples into the current folder."""
        for name in names:
            if (self.good / name).is_dir():
                shutil.copytree(self.good / name, name, symlinks=True)
            else:
                shutil.copy(self.good / name, name)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def name(self, *good: str) -> str:
        """One of these names, or rarely one that leads nowhere."""
        return self.rng.choice(good) if self.chance(0.95) else self.rng.choice(spoil.LOST_NAMES)

    def options(self, **choices: tuple[Any, ...]) -> list[str]:
        """Some options with one of their values, or rarely any value at all."""
        given = []
        for name, values in choices.items():
            if self.chance(0.12):
                value = self.rng.choice(values)
                if self.chance(0.02 if value is True else 0.1):
                    value = self.rng.choice([*spoil.STRANGE, *spoil.NUMBERS])
                text = "" if value is True else f"={plain(value)}"
                given.append(f"--{name.replace('_', '-')}{text}")
        return given

    def json(self) -> list[str]:
        return ["--json"] if self.chance(0.2) else []


def plain(value: Any) -> str:
    """A value as somebody would type it on a command line."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, (list, dict, bool)) or value is None else str(value)


# --- good examples ----------------------------------------------------------------------------------------------------


def build(folder: Path) -> None:
    """Write an example of every kind of file. The current folder becomes `folder`."""
    from foretrain import config, run, tuning

    folder.mkdir(parents=True)
    os.chdir(folder)
    _write_data()
    _write_tokenizers()
    _write_base()
    settings = {**TINY, "data.path": "text.txt", "evaluation.ema_decay": 0.9, "hybrid.window_steps": 2}
    made = config.from_mapping({**settings, "hybrid.warmup_steps": 2, "health.interval": 2})
    Path("config.toml").write_text(config.to_toml(made, comments=False))
    run.train(made, "run", progress=False)
    _interrupt("run", "killed")
    examples = {**TINY, "preset": "finetune", "model.weights": "base", "data.path": "examples.jsonl"}
    run_config = config.from_mapping({**examples, "evaluation.batches": 1, "optimizer.learning_rate": 1e-3})
    Path("finetune.toml").write_text(config.to_toml(run_config, comments=False))
    tuning.finetune(run_config, "tuned", progress=False)
    _interrupt("tuned", "half-tuned")
    shutil.copytree("tuned/adapter", "adapter")
    _write_results()
    _write_comparison(settings)


def _interrupt(whole: str, half: str) -> None:
    """The same run without its end."""
    shutil.copytree(whole, half)
    for name in ("model", "adapter", "report.html"):
        shutil.rmtree(Path(half) / name, ignore_errors=True)
        (Path(half) / name).unlink(missing_ok=True)
    (Path(half) / "summary.json").unlink()
    newest = sorted(Path(half, "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(newest)


def _write_data() -> None:
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    text = "the cat sat on the mat and saw two dogs run home again.\n" * 60
    Path("text.txt").write_text(text)
    Path("text.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    Path("text.txt.xz").write_bytes(lzma.compress(text.encode()))
    rows = [{"text": f"{number} {text[:100]}", "n": number} for number in range(30)]
    Path("text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.table({"text": [row["text"] for row in rows], "n": [1.5] * len(rows)}), "text.parquet")
    tokens = np.frombuffer(text.encode(), np.uint8)
    tokens.astype("<u2").tofile("tokens.bin")
    np.save("tokens.npy", tokens.astype(np.int64))
    colors = {"sky": "blue", "grass": "green", "snow": "white"}
    asked = [{"text": f"{number}: the {thing}?", "label": color} for number in range(12) for thing, color in colors.items()]
    Path("examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    chats = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"{number}?"},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": f"Because {number}."},
            ]
        }
        for number in range(20)
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))


def _write_tokenizers() -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    from foretrain.data import tokenizers

    text = Path("text.txt").read_text()
    end = tokenizers.END_OF_TEXT
    Path("tokenizer.json").write_text(tokenizers.train_bpe(iter([text] * 3), 300).to_json())
    Path("byte.json").write_text(tokenizers.ByteTokenizer().to_json())
    Path("char.json").write_text(tokenizers.CharacterTokenizer(text).to_json())
    words = {word: number for number, word in enumerate([end, "[UNK]", *sorted(set(text.split()))])}
    kinds = {
        "word": models.WordLevel(words, unk_token="[UNK]"),  # noqa: S106 - no password
        "piece": models.WordPiece(words, unk_token="[UNK]"),  # noqa: S106
        "unigram": models.Unigram([(word, -1.0) for word in words], unk_id=1),
    }
    for name, model in kinds.items():
        made = Tokenizer(model)
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        made.add_special_tokens([end])
        made.enable_truncation(8)
        made.save(f"{name}.json")
    vocabulary = json.loads(Path("tokenizer.json").read_text())["model"]
    Path("vocabulary").mkdir()
    Path("vocabulary/encoder.json").write_text(json.dumps(vocabulary["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary["merges"]]
    Path("vocabulary/vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


def _write_base() -> None:
    from foretrain.data.tokenizers import ByteTokenizer
    from foretrain.models import huggingface
    from foretrain.models.gpt2 import GPT2, GPT2Shape

    shape = GPT2Shape(layers=1, heads=2, width=16, context=32, vocab_size=257)
    huggingface.save(GPT2(shape, 3), "base", ByteTokenizer())


def _write_results() -> None:
    Path("results").mkdir()
    for number in range(5):
        processes = [{"samples": [1.0 + 0.01 * number + 0.001 * place, 1.1]} for place in range(5)]
        own = {"format": "foretrain bench 1", "date": f"2026-01-0{number + 1}T00:00:00+00:00", "commit": "abc"}
        benchmarks = {"step": {"processes": processes}, "save": {"processes": processes}}
        Path(f"results/own-{number}.json").write_text(json.dumps({**own, "benchmarks": benchmarks}))
        names = {"step": [1.0 + 0.01 * number] * 5, "save": [2.0, 2.1, 2.2]}
        Path(f"results/plain-{number}.json").write_text(json.dumps(names))
        entries = [{"name": "step", "fullname": "t::step", "stats": {"median": 1.0, "data": [1.0, 1.1]}}]
        pytest = {"benchmarks": entries, "datetime": "2026-01-01T00:00:00", "commit_info": {"id": "abc"}}
        Path(f"results/pytest-{number}.json").write_text(json.dumps(pytest))
        lines = "fib 20   time:   [1.0 ms 1.1 ms 1.2 ms]\nlong name\n   time:   [1.0 µs 1.1 µs 1.2 µs]\n"
        Path(f"results/criterion-{number}.txt").write_text(lines)


def _write_comparison(settings: dict[str, Any]) -> None:
    from foretrain import config
    from foretrain.measure.commands import run_comparison

    made = config.from_mapping({**settings, "evaluation.ema_decay": 0.0, "max_steps": 3})
    Path("compare.toml").write_text(config.to_toml(made, comments=False))
    run_comparison(Path("compare.toml"), (), Path("comparison"), 1, [1.0], None, (), False, None, ["compare"], "quiet")


# --- settings ---------------------------------------------------------------------------------------------------------


def setting(make: Maker, tiny: bool) -> tuple[str, Any]:
    """A setting and a value for it: legal, of another type, or absurd. tiny: no value makes a run long."""
    from foretrain.config import settings

    rng = make.rng
    known = list(settings())
    chosen = rng.choice(known)
    kind = rng.random()
    if kind < make.legal and not (tiny and chosen.name in LONG):
        return chosen.name, legal(rng, chosen.kind, tiny and chosen.name in SIZES)
    if kind < make.legal + 0.05:
        name = rng.choice([chosen.name.rpartition(".")[2], chosen.name + "x", f"{chosen.name}.x", chosen.name.upper(), *spoil.STRANGE[:30]])
        return name, spoil.value(rng)
    value = spoil.value(rng)
    if tiny and (chosen.name in LONG | SIZES) and isinstance(value, (int, float, str)) and not _harmless(chosen.name, value):
        return chosen.name, rng.choice([None, [], {}, -1, 10**30, "\x00"])
    if tiny and isinstance(value, int) and not isinstance(value, bool) and 8 < value < 2**31:
        value = -value
    return chosen.name, value


def _harmless(name: str, value: Any) -> bool:
    """Whether a value of a setting that decides sizes and lengths is refused, or small."""
    if isinstance(value, str):
        return name not in ("data.path", "data.cache", "data.validation_path", "memory.budget")
    return not 8 < value < 2**31


def legal(rng: Random, kind: str, small: bool) -> Any:
    """A value that fits how a setting is described, or nearly."""
    options: list[Any] = []
    for part in kind.split(" or "):
        least = float(found[1]) if (found := re.search(r"[≥>] (-?[0-9]+)", part)) else 0.0
        if part.startswith("list"):
            options += [[], [2], [1, 2]] if "integers" in part else [[], ["*"], ["text", "x"]]
        elif part.startswith("integer"):
            options += [int(least) + more for more in ([1, 2] if small else [0, 1, 2, 3, 7])]
        elif part.startswith("number"):
            options += [least, least + 1e-12, least + 1e-3, least + 0.5, least + 0.99, least + 1, least + 1e6]
        elif part == "string":
            options += ["", "text", "x"]
        else:
            options += [json.loads(word) for word in part.split(" | ")]
    return rng.choice(options)


def overrides(make: Maker, tiny: bool, good: dict[str, Any]) -> list[str]:
    """`--set` for a good configuration with some settings of other values; at times no setting at all."""
    words = {name: plain(value) for name, value in good.items()}
    texts = [f"{name}={text}" for name, text in words.items()]
    for _ in range(make.rng.choice([1, 2, 4, 8])):
        name, value = setting(make, tiny)
        quoted = json.dumps(value) if isinstance(value, str) and make.chance(0.5) else plain(value)
        texts.append(f"{name}={quoted}")
    if make.chance(0.08):
        texts.append(make.rng.choice([*spoil.STRANGE[:40], "a.b.c.d.e=1", "a" * 3000 + "=1", "=", "==", f"seed={'[' * 3000}", f"seed={spoil.DIGITS}", "seed=1 # x", "seed=1\nmax_steps=1"]))
    return [part for text in texts for part in ("--set", text)]


def toml(make: Maker, tiny: bool, good: dict[str, Any]) -> bytes:
    """A configuration file of such settings, or bytes that are nearly one."""
    import tomlkit

    values = dict(good)
    for _ in range(make.rng.choice([1, 2, 4, 8])):
        name, value = setting(make, tiny)
        values[name] = value
    lines, sections = [], {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    for section in sorted(sections):
        lines += [f"[{section}]"] if section else []
        for key, value in sections[section].items():
            try:
                lines.append(f"{tomlkit.key(key).as_string()} = {tomlkit.item(value).as_string()}")
            except (ValueError, TypeError):  # None, which TOML does not have, or halves of characters
                lines.append(f"{key} = {plain(value)}")
    content = "\n".join(lines).encode("utf-8", "surrogatepass" if make.chance(0.3) else "replace")
    if make.chance(0.15):
        content = spoil.spoil_bytes(make.rng, content) if not tiny else content[: make.rng.randrange(len(content))]
    return content


def configure(make: Maker, tiny: bool, good: dict[str, Any], by_file: bool) -> list[str]:
    if not by_file:
        return overrides(make, tiny, good)
    Path("my.toml").write_bytes(toml(make, tiny, good))
    return [make.name("my.toml")] + (["--set", "max_steps=2"] if tiny else [])


def config_show(make: Maker, by_file: bool) -> Input:
    return Input(["config", "show", *configure(make, False, {}, by_file), *make.json()])


def config_check(make: Maker, by_file: bool) -> Input:
    Path("ok.toml").write_text("max_steps = 5\n")
    arguments = configure(make, False, {}, by_file)
    return Input(["config", "check", *([] if by_file else ["ok.toml"]), *arguments, *make.json()])


def config_init(make: Maker) -> Input:
    Path("there.toml").write_text("")
    name = make.rng.choice(["new.toml", "new.toml", "there.toml", "none/x.toml", *spoil.LOST_NAMES])
    preset = make.options(preset=("measured", "small", "finetune", "x"))
    return Input(["config", "init", name, *preset, *overrides(make, False, {}), *make.json()], writes=(name,))


def plan(make: Maker, by_file: bool) -> Input:
    make.take("base")
    good = {"model.weights": "base"} if make.chance(0.3) else {}
    options = make.options(budget=("14GB", "1MB", "0", "1e400GB", "x"), device=("cuda", "cpu", "x"), finetune=(True,))
    return Input(["plan", *configure(make, False, good, by_file), *options, *make.json()])


def train(make: Maker, by_file: bool) -> Input:
    make.take("text.txt", "base", "tokenizer.json", "vocabulary")
    good = {**TINY, "data.path": "text.txt", "max_steps": make.rng.choice([1, 2, 6]), "hybrid.window_steps": 2, "hybrid.warmup_steps": 2}
    arguments = ["train", *configure(make, True, good, by_file), "--out", "out", *make.options(quiet=(True,), verbose=(True,), resume=(True,), overwrite=(True,)), *make.json()]
    return Input(arguments, writes=("out", "cache", "text"))


def finetune(make: Maker, by_file: bool) -> Input:
    make.take("base", "examples.jsonl", "chats.jsonl")
    data = make.name("examples.jsonl", "chats.jsonl")
    good = {**TINY, "max_steps": 2, "model.weights": make.name("base"), "data.path": data}
    arguments = ["finetune", *configure(make, True, good, by_file), "--out", "out", *make.options(quiet=(True,), verbose=(True,)), *make.json()]
    return Input(arguments, writes=("out", "cache", "text"))


def compare(make: Maker, by_file: bool) -> Input:
    """Nothing is run: the time is up before the first one."""
    make.take("text.txt")
    good = {**TINY, "data.path": "text.txt", "max_steps": 2}
    options = make.options(seeds=(1, 0), rates=(1, 0.5), budgets=(1,), arm=("a: optimizer.type=adamw", "a", ":", "a: seed=3"), ladder=(True,), quiet=(True,))
    arguments = ["compare", *configure(make, True, good, by_file), "--out", "out", *options, *make.json(), "--minutes", "0"]
    return Input(arguments, writes=("out", "cache", "text"))


# --- data -------------------------------------------------------------------------------------------------------------

DATA = ("text.txt", "text.txt.gz", "text.txt.xz", "text.jsonl", "text.parquet", "tokens.bin", "tokens.npy")


def tiny_settings(**more: Any) -> list[str]:
    values = {**TINY, "max_steps": 2, **{name.replace("__", "."): value for name, value in more.items()}}
    return [part for name, value in values.items() for part in ("--set", f"{name}={plain(value)}")]


def data_file(make: Maker) -> str:
    """One spoilt file of data, at times under a name that is odd or says another kind."""
    name = make.rng.choice(DATA)
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
        make.take(*{"text.txt"} - {path} if not Path("text.txt").exists() else ())
        more |= {"data__validation_path": path, "data__path": make.name("text.txt")}
    return Input(["train", *tiny_settings(**more), "--out", "out", "--quiet"], writes=("out", "cache"))


def evaluate_data(make: Maker) -> Input:
    make.take("base")
    path = data_file(make)
    options = make.options(batch_size=(1, 2, 0), batches=(1, 0), answers=(0, 2), prompt=("{text}", "{"), answer=("{n}", "{label}"), final_answer=("x",), device=("cpu", "cuda", "x"))
    return Input(["evaluate", "base", "--data", path, *options, *make.json()])


def train_names(make: Maker) -> Input:
    """Names of folders and files that are odd, and still there."""
    make.take("text.txt")
    name, folder = spoil.odd_name(make.rng, ".txt"), spoil.odd_name(make.rng)
    os.rename("text.txt", name)  # noqa: PTH104
    for text in (folder, "out"):
        os.makedirs(text, exist_ok=True)  # noqa: PTH103
    out = make.rng.choice([os.path.join("out", spoil.odd_name(make.rng)), folder, *spoil.LOST_NAMES[:4]])  # noqa: PTH118
    more = {"data__path": make.rng.choice([name, f"./{name}", folder, *spoil.LOST_NAMES]) or name, "data__cache": make.rng.choice(["cache", folder])}
    return Input(["train", *tiny_settings(**more), "--quiet", "--out", out], writes=("out", "cache", folder, "none", "x" * 256, "~nosuchuser"))


def train_cache(make: Maker) -> Input:
    """A token cache that was damaged since."""
    from foretrain import config
    from foretrain.data import tokens

    make.take("text.txt")
    data = {"data.path": "text.txt", "data.cache": "cache", "data.tokenizer": make.rng.choice(["byte", "char", "bpe"]), "data.bpe_size": 260}
    tokens.prepare(config.from_mapping(data).data)
    spoil.spoil_folder(make.rng, Path("cache"))
    settings = [part for name, value in {**TINY, "max_steps": 1, **data}.items() for part in ("--set", f"{name}={value}")]
    return Input(["train", *settings, "--out", "out", "--quiet"], writes=("out", "cache"))


# --- tokenizers -------------------------------------------------------------------------------------------------------

TOKENIZERS = ("tokenizer.json", "byte.json", "char.json", "word.json", "piece.json", "unigram.json")


def tokenizer_file(make: Maker) -> str:
    name = make.rng.choice(TOKENIZERS)
    make.take(name)
    if make.chance(0.5):
        tree = json.loads(Path(name).read_text())
        part = make.rng.choice(["model", "added_tokens", "pre_tokenizer", "decoder", "normalizer", "post_processor", "truncation", "padding"])
        tree[part] = spoil.spoil_tree(make.rng, tree[part]) if tree[part] else _component(make.rng)
        Path(name).write_bytes(spoil.json_text(make.rng, tree))
    else:
        spoil.spoil_file(make.rng, Path(name))
    return make.name(name)


def _component(rng: Random) -> Any:
    """A part of a tokenizer that needs more than its type, or has it wrong."""
    kinds = ["ByteLevel", "Whitespace", "Metaspace", "Split", "Punctuation", "Digits", "Sequence", "BertPreTokenizer", "Precompiled", "Replace", "Prepend", "Strip", "NFKC", "TemplateProcessing", "BPEDecoder", "CTC", "Fuse", "WordPiece", "Unigram", "BPE"]
    part = {"type": rng.choice(kinds), "pattern": rng.choice([{"Regex": "("}, {"Regex": "(a*)*b"}, {"String": ""}, None]), "behavior": "Isolated", "invert": False}
    part |= {"content": "", "precompiled_charsmap": rng.choice(["", "AAAA", None]), "pretokenizers": [], "normalizers": [], "decoders": [], "prepend_scheme": "always", "replacement": rng.choice(["", "▁", "ab"]), "split": True, "add_prefix_space": rng.random() < 0.5, "trim_offsets": True, "use_regex": True}
    return rng.choice([part, {"type": part["type"]}, spoil.value(rng)])


def train_tokenizer(make: Maker) -> Input:
    make.take("text.txt")
    return Input(["train", *tiny_settings(data__path="text.txt", data__tokenizer=tokenizer_file(make)), "--out", "out", "--quiet"], writes=("out", "cache"))


def generate_tokenizer(make: Maker) -> Input:
    make.take("base")
    arguments = ["generate", "base", "--tokenizer", tokenizer_file(make), "--prompt", "the cat", "--max-tokens", "3", "--device", "cpu"]
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
        *make.options(temperature=(0, 0.5), top_k=(0, 1, 10**6), top_p=(0.5, 1), repetition_penalty=(1.2, 1e-30), seed=(1, 2**63 - 1), stop=("a", "["), stream=(True,)),
        *make.json(),
    ]


def generate_base(make: Maker) -> Input:
    return Input(["generate", base_folder(make), "--prompt", "the cat", *generate_options(make)])


def evaluate_base(make: Maker) -> Input:
    make.take("text.txt")
    return Input(["evaluate", base_folder(make), "--data", "text.txt", "--batches", "2", *make.json()])


def finetune_base(make: Maker) -> Input:
    make.take("examples.jsonl")
    arguments = ["finetune", "--base", base_folder(make), "--data", "examples.jsonl", *tiny_settings(), "--out", "out", "--quiet"]
    return Input(arguments, writes=("out", "cache"))


def train_base(make: Maker) -> Input:
    make.take("text.txt")
    more = {"data__path": "text.txt", "model__weights": base_folder(make), "model__context": 32}
    return Input(["train", *tiny_settings(**more), "--out", "out", "--quiet"], writes=("out", "cache"))


def plan_base(make: Maker) -> Input:
    return Input(["plan", "--finetune", "--set", f"model.weights={base_folder(make)}", *make.options(budget=("1GB",)), *make.json()])


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
    return Input(["generate", "base", "--adapter", adapter_folder(make), "--prompt", "x", *make.options(any_base=(True,)), *generate_options(make)])


def evaluate_adapter(make: Maker) -> Input:
    make.take("examples.jsonl")
    arguments = ["evaluate", "base", "--adapter", adapter_folder(make), "--data", "examples.jsonl", "--answers", "2"]
    return Input([*arguments, *make.options(any_base=(True,)), *make.json()])


def adapters_list(make: Maker) -> Input:
    adapter_folder(make)
    return Input(["adapters", "list", make.name("."), *make.json()])


def adapters_merge(make: Maker) -> Input:
    arguments = ["adapters", "merge", adapter_folder(make), "out"]
    return Input([*arguments, *make.options(base=("base", "adapter"), any_base=(True,), overwrite=(True,)), *make.json()], writes=("out", ".tmp-out"))


# --- run folders ------------------------------------------------------------------------------------------------------


def run_folder(make: Maker, *kinds: str) -> str:
    """A run with something wrong in it: any file, or the state of a checkpoint, forged so that its checksums fit."""
    name = make.rng.choice(kinds)
    make.take(name)
    if "tuned" in name:
        make.take("base", "examples.jsonl")
        for path in (Path(name) / "config.toml",):  # it names the good base by its whole path
            path.write_text(path.read_text().replace(str(make.good / "base"), str(Path("base").resolve())))
    else:
        make.take("text.txt")
    if make.chance(0.4):
        forge_checkpoint(make.rng, Path(name))
    else:
        spoil.spoil_folder(make.rng, Path(name))
    return name


def forge_checkpoint(rng: Random, run: Path) -> None:
    """Another state under checksums that fit it."""
    folder = rng.choice(sorted(run.glob("checkpoints/*step-*")))
    path = rng.choice(sorted(folder.glob("*.safetensors"))) if rng.random() < 0.35 else folder / "state.json"
    content = path.read_bytes()
    if path.suffix == ".json":
        tree = json.loads(content)
        part = rng.choice([tree, tree["state"], tree["state"], *(item for item in tree["state"].values() if isinstance(item, dict))])
        spoil.spoil_tree(rng, part)
        path.write_bytes(spoil.json_text(rng, tree))
    else:
        path.write_bytes(spoil.spoil_tensors(rng, content))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][path.name] = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def report(make: Maker) -> Input:
    runs = [run_folder(make, "run", "killed", "tuned")]
    if make.chance(0.15):
        make.take("half-tuned")
        runs.append("half-tuned")
    out = ["--out", "page.html"] if make.chance(0.4) or len(runs) > 1 else []
    return Input(["report", *runs, *out, *make.json()], writes=("page.html", f"{runs[0]}/report.html"))


def watch(make: Maker) -> Input:
    run = make.name(run_folder(make, "run", "killed", "tuned"), "none", "text.txt")
    port = make.rng.choice(["0", "0", "0", "-1", "70000", "x", "1e3", str(2**70)])
    return Input(["watch", run, "--port", port, *make.json()], serves=True)


def resume(make: Maker) -> Input:
    run = run_folder(make, "killed", "killed", "run")
    settings = tiny_settings(max_steps=make.rng.choice([4, 5, 2])) if make.chance(0.3) else []
    return Input(["train", "--resume", "--out", run, *settings, *make.options(quiet=(True,)), *make.json()], writes=(run, "cache"))


def resume_tuned(make: Maker) -> Input:
    run = run_folder(make, "half-tuned", "half-tuned", "tuned")
    return Input(["finetune", "--resume", "--out", run, *make.options(quiet=(True,)), *make.json()], writes=(run, "cache"))


def export(make: Maker) -> Input:
    run = run_folder(make, "run", "killed", "tuned")
    source = make.rng.choice([run, run, *(str(path) for path in sorted(Path(run).glob("checkpoints/*step-*")))])
    return Input(["export", source, "out", *make.json()], writes=("out", ".tmp-out"))


def adapters_export(make: Maker) -> Input:
    return Input(["adapters", "export", run_folder(make, "tuned", "half-tuned", "run"), "out", *make.json()], writes=("out",))


def merge_run(make: Maker) -> Input:
    return Input(["adapters", "merge", run_folder(make, "tuned"), "out", *make.json()], writes=("out", ".tmp-out"))


def generate_run(make: Maker) -> Input:
    run = run_folder(make, "run", "killed", "tuned", "half-tuned")
    options = make.options(field=("label=x", "x", "="), raw=(True,), no_adapter=(True,))
    return Input(["generate", run, "--prompt", "1: the sky?", *options, *generate_options(make)])


def evaluate_run(make: Maker) -> Input:
    run = run_folder(make, "run", "killed", "tuned", "half-tuned")
    data = "examples.jsonl" if "tuned" in run else "text.txt"
    return Input(["evaluate", run, "--data", data, "--answers", "2", "--batches", "2", *make.json()])


def comparison(make: Maker) -> Input:
    """A comparison that goes on where it stopped; no further run is begun."""
    make.take("comparison", "compare.toml", "text.txt")
    spoil.spoil_folder(make.rng, Path("comparison"), "*.json", "runs/*.json")
    arguments = ["compare", "compare.toml", "--out", "comparison", "--seeds", "1", "--rates", "1", "--minutes", "0"]
    return Input([*arguments, *make.options(quiet=(True,)), *make.json()], writes=("comparison", "cache"))


# --- examples, results, standard input, the command line ---------------------------------------------------------------


def examples_file(make: Maker) -> str:
    name = make.rng.choice(["examples.jsonl", "chats.jsonl", "chats.jsonl"])
    make.take(name)
    if make.chance(0.9):
        spoil.spoil_file(make.rng, Path(name))
    return make.name(name)


def finetune_examples(make: Maker) -> Input:
    make.take("base")
    more = make.options(set=("data.prompt={text}", "data.prompt={", "data.answer={label}", "data.max_length=4", "data.prompt=[]", "evaluation.final_answer=x", "data.held_out=0.9", "data.prompt={a.b}", "data.prompt={text!r:>99}"))
    arguments = ["finetune", "--base", "base", "--data", examples_file(make), *tiny_settings(), *more, "--out", "out"]
    return Input([*arguments, *make.options(quiet=(True,)), *make.json()], writes=("out", "cache"))


def evaluate_examples(make: Maker) -> Input:
    make.take("base")
    options = make.options(prompt=("{text}", "{", "{messages}"), answer=("{label}", ""), final_answer=("b", ""), batch_size=(1,))
    return Input(["evaluate", "base", "--data", examples_file(make), "--answers", "2", *options, *make.json()])


def bench_compare(make: Maker) -> Input:
    folder = _results(make)
    files = sorted(str(path) for path in folder.iterdir())
    sides = [make.name(*files), make.name(*files)] if make.chance(0.85) else [make.name("results"), make.name(*files)]
    return Input(["bench", "compare", *sides, *make.options(delta=(0.02, 0, 1, 0.5)), *make.json()])


def bench_history(make: Maker) -> Input:
    folder = _results(make)
    sides = [make.name("results")] if make.chance(0.8) else [str(path) for path in sorted(folder.iterdir())]
    return Input(["bench", "history", *sides, *make.json()])


def _results(make: Maker) -> Path:
    """Files of one format, some of them spoilt."""
    folder = Path("results")
    folder.mkdir()
    kinds = ["own", "plain", "pytest", "criterion"]
    for kind in [make.rng.choice(kinds)] if make.chance(0.9) else kinds:
        for path in sorted((make.good / "results").glob(f"{kind}-*")):
            shutil.copy(path, folder)
    for _ in range(make.rng.choice([1, 2, 4])):
        files = spoil.files_in(folder)
        if files:
            spoil.spoil_file(make.rng, make.rng.choice(files))
    return folder


def bench_run(make: Maker) -> Input:
    """Always with something that refuses it: measuring takes minutes."""
    refused = make.rng.choice([["--processes", "0"], ["--threads", "-1"], ["--device", "x"], ["--only", "none-of-them"], ["--against", "none"], ["--out", "/proc/x"], ["--quiet", "--verbose"], ["--processes", "x"]])
    options = make.options(only=("forecast*", "", ",", "["), processes=(1, 0), device=("cpu", "cuda"), threads=(1,), against=("text", "/"), out=("out/x.json",))
    return Input(["bench", "run", *options, *refused, *make.json()], writes=("out",))


def generate_stdin(make: Maker) -> Input:
    make.take("base", "half-tuned")
    text = make.rng.choice([b"the cat", b"", b"\xff\xfe\x00", "漢字\u202e\x1b[2J".encode(), b"\x00" * 50, b"a" * 5000, "\U0010ffff".encode()])
    model = make.rng.choice(["base", "half-tuned"])
    if make.chance(0.5):
        text = spoil.spoil_bytes(make.rng, text)
    if make.chance(0.4):
        prompts = [part for _ in range(2) for part in ("--prompt", make.rng.choice([*spoil.STRANGE, "the cat"]))]
        return Input(["generate", model, *prompts, *make.options(raw=(True,)), *generate_options(make)])
    return Input(["generate", model, *generate_options(make)], stdin=text)


COMMANDS = (
    *(("train",), ("finetune",), ("config", "init"), ("config", "show"), ("config", "check"), ("plan",), ("predictors",), ("doctor",)),
    *(("export",), ("compare",), ("bench", "run"), ("bench", "list"), ("bench", "compare"), ("bench", "history"), ("generate",)),
    *(("evaluate",), ("adapters", "list"), ("adapters", "merge"), ("adapters", "export"), ("report",), ("watch",), ()),
)
WORDS = (
    *("--json", "--json=false", "--json=maybe", "--quiet", "--verbose", "--out", "--set", "--resume", "--overwrite", "--help", "--version", "-h"),
    *("--prompt", "--data", "--base", "--adapter", "--seed", "--port", "--only", "--", "-", "-x", "--x=1", "--set=seed=1", "-s", "--state", "--budget"),
    *("text.txt", "base", "none", "out", "0", "-1", "nan", "1e400", "seed=1", "max_steps=1", "list", "run"),
)


def command_line(make: Maker) -> Input:
    """Words in any order: most are refused, none may run long."""
    make.take("text.txt", "base")
    chosen = make.rng.choice(COMMANDS)
    words = [make.rng.choice([*WORDS, *WORDS, *spoil.STRANGE]) for _ in range(make.rng.randrange(6))]
    long = {("train",): ["--set", "max_steps=0"], ("compare",): ["--minutes", "-1"], ("bench", "run"): ["--processes", "0"], ("watch",): ["--port", "-1"], ("finetune",): ["--set", "max_steps=0"]}
    end = long.get(chosen, [])
    if "--" in words and end:
        words = [word for word in words if word != "--"]
    if words and words[-1].startswith("-") and end:
        words.append("text.txt")
    return Input([*chosen, *words, *end], writes=("out", "seed=1", "max_steps=1", "none", *(word for word in words if chosen == ("config", "init") and not word.startswith("-"))))


def _both(command: str, make: Callable[[Maker, bool], Input], weight: int = 1) -> list[Target]:
    return [
        Target(command, "--set", lambda maker: make(maker, False), weight),
        Target(command, "configuration", lambda maker: make(maker, True), weight),
    ]


TARGETS: tuple[Target, ...] = (
    *_both("config show", config_show, 2),
    *_both("config check", config_check, 2),
    Target("config init", "--set", config_init),
    *_both("plan", plan, 3),
    *_both("train", train, 4),
    *_both("finetune", finetune, 2),
    *_both("compare", compare, 1),
    Target("compare", "comparison folder", comparison, 2),
    Target("train", "data", train_data, 5),
    Target("train", "names", train_names, 2),
    Target("train", "token cache", train_cache, 2),
    Target("train", "tokenizer", train_tokenizer, 4),
    Target("train", "vocabulary", train_vocabulary),
    Target("train", "model folder", train_base, 2),
    Target("train", "run folder", resume, 5),
    Target("finetune", "examples", finetune_examples, 4),
    Target("finetune", "model folder", finetune_base, 2),
    Target("finetune", "run folder", resume_tuned, 3),
    Target("evaluate", "data", evaluate_data, 3),
    Target("evaluate", "examples", evaluate_examples, 3),
    Target("evaluate", "model folder", evaluate_base, 2),
    Target("evaluate", "adapter", evaluate_adapter, 2),
    Target("evaluate", "run folder", evaluate_run, 2),
    Target("generate", "model folder", generate_base, 3),
    Target("generate", "tokenizer", generate_tokenizer, 4),
    Target("generate", "adapter", generate_adapter, 3),
    Target("generate", "run folder", generate_run, 3),
    Target("generate", "text", generate_stdin, 2),
    Target("adapters list", "adapter", adapters_list, 2),
    Target("adapters merge", "adapter", adapters_merge, 2),
    Target("adapters merge", "run folder", merge_run),
    Target("adapters export", "run folder", adapters_export, 2),
    Target("export", "run folder", export, 3),
    Target("report", "run folder", report, 4),
    Target("watch", "run folder", watch, 1),
    Target("bench compare", "results", bench_compare, 3),
    Target("bench history", "results", bench_history, 3),
    Target("bench run", "arguments", bench_run),
    Target("plan", "model folder", plan_base),
    Target("any", "arguments", command_line, 4),
)
