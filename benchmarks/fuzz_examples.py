"""Good examples of everything that the commands of foretrain read, all of it tiny; `fuzz_inputs.py` spoils them."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import shutil
from pathlib import Path
from typing import Any

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
EAGER = {
    "hybrid.warmup_steps": 2,
    "hybrid.window_steps": 2,
    "hybrid.full_steps": 2,
    "hybrid.correct_steps": 2,
    "audit.time_budget": 1.0,
    "audit.steps": 2,
}
"""Everything that prediction does is tried within a few steps."""


def build(folder: Path) -> None:
    """Write an example of every kind of file. The current folder becomes `folder`."""
    from foretrain import config
    from foretrain.recipes import finetune as tuning
    from foretrain.recipes import train as run

    folder.mkdir(parents=True)
    os.chdir(folder)
    _write_data()
    _write_tokenizers()
    _write_base()
    settings = {**TINY, **EAGER, "data.path": "text.txt"}
    longer = {"max_steps": 16, "checkpoint.interval": 8, "health.interval": 2, "evaluation.ema_decay": 0.9}
    made = config.from_mapping({**settings, **longer})
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

    text = "the cat sat on the mat and saw two dogs run home again.\n" * 60
    Path("text.txt").write_text(text)
    Path("text.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    Path("text.txt.xz").write_bytes(lzma.compress(text.encode()))
    rows = [{"text": f"{number} {text[:100]}", "n": number} for number in range(30)]
    Path("text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with contextlib.suppress(ImportError):  # where it is not installed, there is one kind less
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": [row["text"] for row in rows], "n": [1.5] * len(rows)}), "text.parquet")
    tokens = np.frombuffer(text.encode(), np.uint8)
    tokens.astype("<u2").tofile("tokens.bin")
    np.save("tokens.npy", tokens.astype(np.int64))
    colors = {"sky": "blue", "grass": "green", "snow": "white"}
    asked = [
        {"text": f"{number}: the {thing}?", "label": color} for number in range(12) for thing, color in colors.items()
    ]
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

    made = config.from_mapping({**settings, "max_steps": 3})
    Path("compare.toml").write_text(config.to_toml(made, comments=False))
    run_comparison(Path("compare.toml"), (), Path("comparison"), 1, [1.0], None, (), False, None, ["compare"], "quiet")
