"""Whatever is wrong with what is handed in: one line that says what to do, exit code 2, no traceback."""

from __future__ import annotations

import gzip
import json
import lzma
import pickle  # noqa: TID251 - to attack with
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretrain import HybridTrainer
from foretrain.cli.app import main
from foretrain.config import from_mapping
from foretrain.errors import InputError
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.models.huggingface import save

TEXT = "the cat sat on the mat and saw two dogs run home again. " * 60
TINY = ["max_steps=2", "batch_size=2", "model.layers=1", "model.heads=2", "model.width=16", "model.context=16"]

Refuse = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def refuse(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs a command that must be refused; gives the line it prints."""

    def call(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        printed = capsys.readouterr()
        assert end.value.code == 2, printed.err
        assert printed.out == ""
        assert printed.err.count("\n") == 1, printed.err
        assert printed.err.startswith("error: ")
        assert "Traceback" not in printed.err
        assert not list(folder.glob("out*")), "a run that never began left something behind"
        return printed.err.removeprefix("error: ").rstrip("\n")

    return call


@pytest.fixture
def refuse_training(refuse: Refuse) -> Refuse:
    """The same for `foretrain train` on tiny settings and some more."""

    def call(*changes: str, path: str = "text.txt") -> str:
        settings = [*TINY, f"data.path={json.dumps(path)}", "data.cache=cache", *changes]
        named = {setting.partition("=")[0]: setting for setting in settings}
        return refuse(
            "train", "--out", "out", "--quiet", *(part for text in named.values() for part in ("--set", text))
        )

    return call


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["none.txt", "none/*.txt", "none/", "hf.txt.gz", "~/none.txt"])
def test_missing_data(path: str, refuse_training: Refuse) -> None:
    line = refuse_training(path=path)
    assert path in line
    assert "does not exist; name a file, a folder or a glob" in line


def test_a_folder_without_text(refuse_training: Refuse, folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "picture.png").write_bytes(b"")
    assert "holds no .txt" in refuse_training(path="empty")


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.txt.gz", "empty.bin", "blank.jsonl"])
def test_empty_data(name: str, refuse_training: Refuse) -> None:
    content = {"empty.txt.gz": gzip.compress(b""), "blank.jsonl": b"\n\n\n"}
    Path(name).write_bytes(content.get(name, b""))
    assert "empty" in refuse_training(path=name)


def test_too_little_to_train_on(refuse_training: Refuse) -> None:
    Path("short.txt").write_text("abc")
    line = refuse_training(path="short.txt")
    assert re.search(r"^data\.path: \d+ tokens are too few for model\.context = 16", line)
    assert "use more text, a shorter context" in line


def test_too_little_held_out(refuse_training: Refuse) -> None:
    line = refuse_training("data.held_out=0.001")
    assert re.search(r"^held-out data: \d+ tokens are too few for model\.context = 16", line)
    assert "a larger data.held_out" in line


def test_too_little_validation_data(refuse_training: Refuse) -> None:
    Path("short.txt").write_text("abc")
    assert "held-out data: " in refuse_training("data.validation_path=short.txt")
    assert "data.validation_path: none.txt does not exist" in refuse_training("data.validation_path=none.txt")


def test_too_few_tokens_in_a_token_file(refuse_training: Refuse) -> None:
    np.arange(5, dtype=np.uint16).tofile("few.bin")
    assert "too few" in refuse_training("model.vocab_size=300", path="few.bin")


def test_mixed_kinds_of_data(refuse_training: Refuse) -> None:
    np.arange(500, dtype=np.uint16).tofile("tokens.bin")
    line = refuse_training('data.path=["text.txt", "tokens.bin"]')
    assert "cannot be mixed" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"body": "hello"}\n', "line 1: no text in field 'text' (found: body); set data.text_field"),
        ('{"text": 5}\n', "no text in field 'text'"),
        ('{"text": "fine"}\n["not", "an", "object"]\n', "line 2: no text"),
        ("not json\n", "not JSON lines"),
        ('{"text": "torn', "not JSON lines"),
        ("\x00\x01", "not JSON lines"),
    ],
)
def test_broken_json_lines(text: str, words: str, refuse_training: Refuse) -> None:
    Path("data.jsonl").write_text(text)
    line = refuse_training(path="data.jsonl")
    assert line.startswith("data.jsonl")
    assert words in line


@pytest.mark.parametrize("name", ["data.txt.gz", "data.jsonl.gz", "data.txt.xz", "data.jsonl.xz"])
@pytest.mark.parametrize("damage", ["not compressed", "cut", "flipped"])
def test_broken_compression(name: str, damage: str, refuse_training: Refuse) -> None:
    plain = (json.dumps({"text": TEXT * 50}) + "\n").encode()
    content = bytearray((gzip if name.endswith("gz") else lzma).compress(plain))
    if damage == "flipped":
        content[len(content) // 2] ^= 255
    Path(name).write_bytes({"not compressed": plain, "cut": bytes(content[: len(content) // 2])}.get(damage, content))
    line = refuse_training(path=name)
    assert line.startswith(name)
    assert "cannot be read" in line or "not JSON lines" in line


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 but not really PAR1", b"text"])
def test_broken_parquet(content: bytes, refuse_training: Refuse) -> None:
    Path("data.parquet").write_bytes(content)
    assert refuse_training(path="data.parquet").startswith("data.parquet: not a readable Parquet file")


def test_parquet_without_the_column(refuse_training: Refuse) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["some text"]}), "data.parquet")
    assert "no column 'text'; it has body. Set data.text_field" in refuse_training(path="data.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), "data.parquet")
    assert "no text in field 'text'" in refuse_training(path="data.parquet")


def test_a_cache_that_cannot_be_written(refuse_training: Refuse) -> None:
    line = refuse_training("data.cache=text.txt/cache")
    assert "cannot write token files" in line
    assert "set data.cache" in line


# --- vocabulary ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_tokens_beyond_the_vocabulary(name: str, refuse_training: Refuse) -> None:
    array = np.arange(500, dtype=np.uint16)
    if name.endswith("npy"):
        np.save(name, array)
    else:
        array.tofile(name)
    line = refuse_training("model.vocab_size=300", path=name)
    assert line == ("vocabulary mismatch: the data holds token 499, but model.vocab_size = 300; set it to at least 500")


def test_negative_tokens(refuse_training: Refuse) -> None:
    np.save("tokens.npy", np.arange(-5, 500, dtype=np.int64))
    line = refuse_training("model.vocab_size=600", path="tokens.npy")
    assert "vocabulary mismatch: the data holds token -5" in line


def test_token_files_do_not_say_their_vocabulary(refuse_training: Refuse) -> None:
    np.arange(500, dtype=np.uint16).tofile("tokens.bin")
    assert "set model.vocab_size" in refuse_training(path="tokens.bin")


def test_a_vocabulary_smaller_than_the_tokenizers(refuse_training: Refuse) -> None:
    line = refuse_training("model.vocab_size=100")
    assert line.startswith("model.vocab_size = 100 is smaller than the tokenizer's vocabulary of 257")


@pytest.mark.parametrize(
    "array",
    [np.ones(500), np.ones((5, 100), dtype=np.int64), np.array("text"), np.ones(500, dtype=bool)],
    ids=["floats", "table", "text", "bools"],
)
def test_arrays_that_are_no_tokens(array: Any, refuse_training: Refuse) -> None:
    np.save("tokens.npy", array)
    assert "one-dimensional array of integers" in refuse_training("model.vocab_size=600", path="tokens.npy")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"text", b"\x93NUMPY\x01\x00\xff\xff{", b"\x00" * 64])
def test_files_that_are_no_arrays(content: bytes, refuse_training: Refuse) -> None:
    Path("tokens.npy").write_bytes(content)
    assert refuse_training("model.vocab_size=600", path="tokens.npy").startswith("tokens.npy: not a token file")


def test_a_token_file_with_half_a_token(refuse_training: Refuse) -> None:
    Path("tokens.bin").write_bytes(b"\x01\x00" * 500 + b"\x01")
    assert "tokens.bin: not a token file" in refuse_training("model.vocab_size=600", path="tokens.bin")


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"not json", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"{}", "is not a tokenizer file"),
        (b"[]", "is not a tokenizer file"),
        (b'"text"', "is not a tokenizer file"),
        (b'{"foretrain": "char"}', "is not a tokenizer file"),
        (b'{"foretrain": "char", "characters": 5}', "is not a tokenizer file"),
        (b'{"foretrain": "other"}', "is not a tokenizer file"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=["missing", "text", "bytes", "empty", "list", "string", "no characters", "number", "unknown", "deep"],
)
def test_a_tokenizer_that_is_none(content: bytes | None, words: str, refuse_training: Refuse) -> None:
    if content is not None:
        Path("tokenizer.json").write_bytes(content)
    line = refuse_training("data.tokenizer=tokenizer.json")
    assert line.startswith("data.tokenizer: tokenizer.json ")
    assert words in line


def test_a_tokenizer_without_an_end_of_text(refuse_training: Refuse) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save("tokenizer.json")
    assert "has no <|endoftext|> token" in refuse_training("data.tokenizer=tokenizer.json")


@pytest.mark.parametrize("files", [{}, {"encoder.json": "{}"}, {"encoder.json": "no", "vocab.bpe": "no"}])
def test_gpt2_without_its_vocabulary(files: dict[str, str], refuse_training: Refuse, folder: Path) -> None:
    (folder / "vocabulary").mkdir()
    for name, text in files.items():
        (folder / "vocabulary" / name).write_text(text)
    line = refuse_training("data.tokenizer=gpt2", "data.vocabulary=vocabulary")
    assert "vocabulary" in line
    assert "vocab.bpe" in line


# --- folders ---------------------------------------------------------------------------------------------------------


def test_an_output_folder_that_cannot_be_written(refuse: Refuse) -> None:
    for out in ("text.txt", "text.txt/run", "/proc/none/run"):
        line = refuse("train", "--out", out, "--set", "data.path=text.txt", "--quiet")
        assert line.startswith(f"--out {out}: cannot write there (")
        assert line.endswith("choose another folder")
        line = refuse("train", "--out", out, "--set", "data.path=text.txt", "--quiet", "--overwrite")
        assert "cannot write there" in line


def test_a_folder_that_holds_a_run(refuse: Refuse, folder: Path) -> None:
    (folder / "run" / "checkpoints").mkdir(parents=True)
    line = refuse("train", "--out", "run", "--set", "data.path=text.txt")
    assert "it already holds a run; go on with --resume" in line


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_step = 5", "unknown key max_step; did you mean max_steps?"),
        ("[optimiser]\nlearning_rate = 1", "unknown key optimiser.learning_rate; did you mean optimizer.learning_rate"),
        ("max_steps = 0", "max_steps = 0: "),
        ("max_steps = -5", "max_steps = -5: "),
        ("max_steps = 'many'", "max_steps = 'many': "),
        ("[optimizer]\nlearning_rate = 0", "optimizer.learning_rate = 0: "),
        ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate = nan: "),
        ("[optimizer]\ntype = 'adamax'", "optimizer.type = 'adamax': "),
        ("[model]\ntype = 'gpt3'", "model.type = 'gpt3': "),
        ("[model]\ndropout = 1.0", "model.dropout = 1.0: "),
        ("[data]\nheld_out = 1", "data.held_out = 1: "),
        ("[checkpoint]\nkeep = 1", "checkpoint.keep = 1: "),
        ("accumulation_steps = 3", "accumulation_steps = 3 does not divide batch_size = 16"),
        ("device = 'tpu'", "device = 'tpu' is not a device"),
        ("model = 5", "unknown key model; did you mean model.type?"),
        ("max_steps = [1, 2]", "max_steps"),
        ("max_steps = ", "not valid TOML"),
        ("max_steps = 1\nmax_steps = 2", "not valid TOML"),
        ("[data", "not valid TOML"),
        ("\x00", "not valid TOML"),
    ],
)
def test_a_configuration_file_that_cannot_be_used(text: str, words: str, refuse: Refuse) -> None:
    Path("config.toml").write_text(text)
    line = refuse("train", "config.toml", "--out", "out", "--quiet")
    assert words in line
    if "is not a device" not in line:
        assert line.startswith("config.toml: ")
        assert words in refuse("config", "check", "config.toml")


def test_a_configuration_file_that_is_not_there(refuse: Refuse, folder: Path) -> None:
    (folder / "folder").mkdir()
    for name in ("none.toml", "folder", "text.txt/none"):
        line = refuse("train", name, "--out", "out")
        assert line.startswith(f"{name}: cannot read the configuration file (")
        assert "`foretrain config init FILE` writes one" in line
    Path("bytes.toml").write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refuse("train", "bytes.toml", "--out", "out")


def test_settings_that_contradict_the_model(refuse_training: Refuse) -> None:
    line = refuse_training("model.heads=3")
    assert line == "model.heads = 3 does not divide model.width = 16; change one of them"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_steps", "write it as key=value"),
        ("=5", "write it as key=value"),
        ("maxsteps=5", "unknown key maxsteps; did you mean max_steps?"),
        ("max_steps=five", "--set max_steps=five: not an integer; allowed"),
        ("optimizer.learning_rate=-1", "--set optimizer.learning_rate=-1: this cannot"),
    ],
)
def test_settings_of_the_command_line(setting: str, words: str, refuse: Refuse) -> None:
    assert words in refuse("train", "--out", "out", "--set", setting)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "gpu", ""])
def test_a_device_that_is_not_there(device: str, refuse_training: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    line = refuse_training(f"device={device!r}")
    assert line.startswith(f"device = {device!r}")
    assert "auto" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("trian",),
        ("train", "--ou", "x"),
        ("train", "--out"),
        ("train", "--resume=maybe", "--out", "out"),
        ("train", "a.toml", "b.toml"),
        ("train", "--resume"),
        ("train", "--resume", "--overwrite", "--out", "out"),
        ("train", "--resume", "--out", "out"),
        ("config", "chek", "x"),
        ("config", "check"),
        ("config", "check", "none.toml"),
        ("config", "init", "text.txt"),
        ("config", "init", "text.txt/x"),
        ("config", "init", "new.toml", "--preset", "huge"),
        ("export", "none", "out"),
        ("export", "text.txt", "out"),
        ("export", "only-one"),
        ("--unknown",),
    ],
    ids=" ".join,
)
def test_the_command_line_itself(arguments: tuple[str, ...], refuse: Refuse) -> None:
    assert len(refuse(*arguments)) > 20


# --- weights to start from -------------------------------------------------------------------------------------------


def shape(**changes: Any) -> GPT2Shape:
    numbers = {"layers": 1, "heads": 2, "width": 16, "context": 16, "vocab_size": 257} | changes
    return GPT2Shape(**numbers)


@pytest.mark.parametrize(
    "changes", [{"width": 32}, {"context": 8}, {"vocab_size": 300}], ids=["width", "context", "vocabulary"]
)
def test_weights_of_another_model(changes: dict[str, int], refuse_training: Refuse) -> None:
    save(GPT2(shape(**changes)), "weights")
    line = refuse_training("model.weights=weights")
    assert line.startswith("weights/model.safetensors: ")
    assert "the model needs" in line


def test_weights_with_too_few_layers(refuse_training: Refuse) -> None:
    save(GPT2(shape()), "weights")
    assert "2 layers" in refuse_training("model.weights=weights", "model.layers=2")


def test_weights_that_are_not_there(refuse_training: Refuse, folder: Path) -> None:
    assert "none/model.safetensors does not exist" in refuse_training("model.weights=none")
    (folder / "weights").mkdir()
    for content in (b"", b"text", struct.pack("<Q", 2**60) + b"{}", pickle.dumps({"a": 1})):
        (folder / "weights" / "model.safetensors").write_bytes(content)
        assert "is not a readable safetensors file" in refuse_training("model.weights=weights")


# --- a loss that is no number ----------------------------------------------------------------------------------------


def test_weights_that_are_no_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2(shape())
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    save(model, "weights")
    settings = [*TINY, "data.path=text.txt", "data.cache=cache", "model.weights=weights"]
    with pytest.raises(SystemExit) as end:
        main(["train", "--out", "run", "--quiet", *(part for text in settings for part in ("--set", text))])
    printed = capsys.readouterr().err
    assert (end.value.code, printed.count("\n")) == (2, 1)
    assert printed.startswith("error: the first loss is nan")
    assert "Look for NaN in the data or the starting weights" in printed
    assert not (folder / "run" / "checkpoints").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_first_loss_that_is_no_number(value: float, accumulation: int) -> None:
    config = from_mapping({"device": "cpu", "batch_size": 4, "accumulation_steps": accumulation})
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    trainer = HybridTrainer(model, loss_fn=lambda model, batch: model(batch).sum() * value, config=config)
    with pytest.raises(InputError, match=r"the first loss is .*Look for NaN"):
        trainer.fit([torch.ones(4, 2)], progress=False)
    assert torch.equal(model.weight, before)


def test_a_first_gradient_that_is_no_number() -> None:
    trainer = HybridTrainer(
        torch.nn.Linear(2, 1),
        loss_fn=lambda model, batch: (model(batch).sum() * 0).sqrt(),
        config=from_mapping({"device": "cpu"}),
    )
    with pytest.raises(InputError, match=r"the first loss is -?0\.0 \(gradient norm nan\)"):
        trainer.fit([torch.ones(4, 2)], progress=False)


def test_a_held_out_loss_that_is_no_number_is_never_the_best() -> None:
    losses = iter([2.0, float("nan"), 1.0])
    config = from_mapping({"device": "cpu", "max_steps": 3, "evaluation.interval": 1})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = model(batch).square().mean()
        return value if model.training else value * 0 + next(losses)

    summary = HybridTrainer(torch.nn.Linear(2, 1), loss_fn=loss, config=config).fit(
        [torch.ones(4, 2)], [torch.ones(4, 2)], progress=False
    )
    assert (summary["best_val_loss"], summary["final_val_loss"]) == (1.0, 1.0)


@pytest.mark.parametrize("loader", [[], iter([])], ids=["empty list", "empty iterator"])
def test_a_loader_without_batches(loader: Any) -> None:
    trainer = HybridTrainer(torch.nn.Linear(2, 1), loss_fn=lambda model, batch: model(batch).sum())
    with pytest.raises(InputError, match="the loader gave no batch at all"):
        trainer.fit(loader, progress=False)
