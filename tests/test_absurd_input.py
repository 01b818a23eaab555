"""Numbers, names, nesting and characters that nobody means: one line, exit code 2, at once."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from tests.finetuning import config_for, write_base, write_colors

from foretrain.cli.app import main
from foretrain.config import Config, from_mapping
from foretrain.errors import InputError
from foretrain.events import CheckpointRejected, Notice
from foretrain.persist.files import from_json, user_path
from foretrain.recipes import train as run
from foretrain.recipes.finetune import finetune
from foretrain.recipes.open_model import open_base
from foretrain.show import narration
from foretrain.show import screen as screens
from foretrain.show.outlet import Outlet, visible

DIGITS = "9" * 5000
LONG = "x" * 300
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat " * 100)
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def command(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return command


@pytest.fixture
def refused(call: Call) -> Callable[..., str]:
    """The one line of a command that ends with exit code 2."""

    def command(*arguments: object) -> str:
        code, out, err = call(*arguments, *["--quiet"] * (arguments[0] == "train"))
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert len(err) < 2100
        assert not Path("out").exists()
        return err

    return command


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "preset=[1]",
        "preset={}",
        f"max_steps={DIGITS}",
        f"max_steps=9{'0' * 400}",
        "max_steps=9e400",
        f"max_steps={'[' * 5000}",
        f"data.path={'[' * 5000}{']' * 5000}",
        f"{'a.' * 3000}b=1",
        f"memory.budget={'9' * 400}GB",
        *(f"batch_size={number}" for number in (2**63 - 1, 2**63, 10**30)),
        *(f"model.{name}={number}" for name in ("vocab_size", "context", "width") for number in (10**12, 2**63)),
        *(f"model.layers={number}" for number in (10**6, 10**12, 10**30)),
        f"model.heads={2**63}",
        f"hybrid.max_predict_steps=9{'0' * 400}",
        "hybrid.max_predict_steps=9e400",
        f"correction.residuals={2**63 - 1}",
        "hybrid.secant_memory_mb=1e308",
        f"data.max_documents={2**63}",
        "optimizer.learning_rate=1e308",
        f"predictor.hidden_dims={[4] * 1000}",
        f"lora.rank={10**9}",
    ],
    ids=lambda setting: setting[:40],
)
def test_settings_are_bounded_before_anything_is_computed_from_them(setting: str, refused: Any) -> None:
    refused("train", "--out", "out", "--set", "data.path=text.txt", "--set", setting)
    refused("plan", "--set", setting)


@pytest.mark.parametrize("device", ["meta", "xla", "hip", "vulkan", "ipu", "privateuseone", "cuda:99999999999999", ""])
def test_devices_that_nothing_is_trained_on(device: str, refused: Any) -> None:
    settings = ["data.path=text.txt", f'device="{device}"', "model.layers=1", "model.width=16", "model.heads=1"]
    line = refused("train", "--out", "out", *(part for text in settings for part in ("--set", text)))
    assert "use auto, cpu, cuda, cuda:1 or mps" in line


def test_a_budget_that_no_machine_has(refused: Any) -> None:
    assert "--budget" in refused("plan", "--budget", f"{'9' * 400}GB")


def test_a_limit_that_no_listing_shows_is_told_where_it_matters(refused: Any) -> None:
    assert "model.layers=10000: too large, it is at most 4,096" in refused(
        "config", "show", "--set", "model.layers=10000"
    )


@pytest.mark.parametrize("text", [f"max_steps = {DIGITS}", f"a = {'[' * 100_000}", f"[{'a.' * 3000}b]\nc = 1"])
def test_files_of_settings_are_bounded_too(text: str, refused: Any) -> None:
    Path("absurd.toml").write_text(text)
    assert "absurd.toml: " in refused("config", "check", "absurd.toml") or text.startswith("[")


# --- paths -----------------------------------------------------------------------------------------------------------

PATHS = ["~nosuchuser/x", LONG, "/a" * 3000, "a\\u0000b"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:12])
@pytest.mark.parametrize("name", ["path", "validation_path", "cache", "tokenizer", "vocabulary"])
def test_paths_in_settings_that_cannot_be_looked_up(name: str, path: str, refused: Any) -> None:
    settings = ["data.path=text.txt", f'data.{name}="{path}"']
    if name == "vocabulary":
        settings.append("data.tokenizer=gpt2")
    line = refused("train", "--out", "out", *(part for text in settings for part in ("--set", text)))
    assert f"data.{name} = " in line


@pytest.mark.parametrize("path", ["~nosuchuser/x", LONG])
def test_paths_on_the_command_line_that_cannot_be_looked_up(path: str, refused: Any) -> None:
    refused("finetune", "--base", path, "--data", "text.txt", "--out", "out")
    refused("generate", path, "--prompt", "x")
    refused("evaluate", path, "--data", "text.txt")
    refused("train", path)
    refused("train", "--set", f"model.weights={path}", "--set", "data.path=text.txt", "--out", "out")
    refused("report", path)
    refused("export", path, "somewhere")
    refused("adapters", "list", path)
    refused("adapters", "merge", path, "somewhere")
    refused("bench", "compare", path, path)
    refused("bench", "history", path)
    refused("bench", "run", "--against", path)


@pytest.mark.parametrize("path", ["~nosuchuser/x", LONG])
def test_paths_beside_a_model_that_cannot_be_looked_up(path: str, base: Path, refused: Any) -> None:
    for option in ("--tokenizer", "--vocabulary", "--adapter"):
        refused("generate", base, "--prompt", "x", option, path)
    refused("finetune", "--base", base, "--data", path, "--out", "out")
    refused("evaluate", base, "--data", path)


def test_a_folder_that_cannot_be_looked_through(base: Path, refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `/`, for most users."""

    def denied(path: Path, pattern: str) -> Any:
        raise PermissionError(13, "Permission denied", str(path / "root"))

    Path("texts").mkdir()
    monkeypatch.setattr(Path, "rglob", denied)
    assert "texts/root: Permission denied" in refused("train", "--out", "out", "--set", "data.path=texts")
    assert "texts" in refused("finetune", "--base", base, "--data", "texts", "--out", "out")


@pytest.mark.parametrize("device", ["meta", "xla", "hip", "vulkan", "ipu", "privateuseone"])
def test_devices_that_no_model_writes_on(device: str, base: Path, refused: Any) -> None:
    assert "use auto, cpu, cuda, cuda:1 or mps" in refused(
        "generate", base, "--prompt", "x", "--max-tokens", 1, "--device", device
    )


def test_a_name_that_is_not_utf8_is_refused_where_it_must_be_written_down(call: Call, refused: Any) -> None:
    odd = os.fsdecode(b"\xff.txt")
    shutil.copy("text.txt", odd)
    assert "is not UTF-8, and config.toml could not hold it" in refused("train", "--set", f"data.path={odd}")
    Path("texts").mkdir()
    shutil.move(odd, f"texts/{odd}")
    tiny = ["max_steps=2", "batch_size=2", "model.layers=1", "model.heads=1", "model.width=16", "model.context=16"]
    out = os.fsdecode(b"run\xff")
    settings = [part for text in [*tiny, "data.path=texts", "device=cpu"] for part in ("--set", text)]
    code, _, err = call("train", "--out", out, *settings)
    assert code == 0, err
    assert (Path(out) / "report.html").is_file()
    assert call("report", out)[0] == 0


def test_a_path_of_the_user() -> None:
    assert user_path("none/at/all") == Path("none/at/all")
    assert user_path("text.txt/below a file") == Path("text.txt/below a file")
    assert user_path("~") == Path.home()
    for path in (LONG, "a\0b", "~nosuchuser"):
        with pytest.raises(InputError, match=r"^data\.path = "):
            user_path(path, "data.path")


def test_a_result_that_cannot_be_written_is_said_before_the_measuring(refused: Any) -> None:
    assert "--out /proc/x: nothing can be written there" in refused("bench", "run", "--out", "/proc/x")


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a":' * 100_000, '{"text": ' + DIGITS + "}"])
def test_records_without_end(line: str, refused: Any) -> None:
    Path("deep.jsonl").write_text(line)
    assert "deep.jsonl: not JSON lines" in refused("train", "--out", "out", "--set", "data.path=deep.jsonl")


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_halves_of_surrogate_pairs_in_records(kind: str) -> None:
    Path("half.jsonl").write_text('{"text": "abc\\ud800 and more of it, and more"}\n' * 60)
    tiny = {"max_steps": 2, "batch_size": 2, "model.layers": 1, "model.heads": 1, "model.width": 16}
    data = {"model.context": 16, "data.path": "half.jsonl", "data.tokenizer": kind, "data.bpe_size": 260}
    run.train(from_mapping({**tiny, **data, "device": "cpu"}), "out", progress=False)
    assert "?" in open_base("out").tokenizer.decode(open_base("out").tokenizer.encode("abc\ud800"))


@pytest.fixture
def base(folder: Path) -> Path:
    return write_base(folder / "base")


SHAPE = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")


@pytest.mark.parametrize("value", [0, -1, 2**63, 10**30, 1.5, "x", None, True, [1]])
@pytest.mark.parametrize("name", SHAPE)
def test_numbers_of_a_model_that_no_model_has(name: str, value: Any, base: Path, refused: Any) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {name: value}))
    assert "base/config.json: does not describe a GPT-2" in refused("generate", "base", "--prompt", "x")


@pytest.mark.parametrize("content", ["[" * 100_000, f'{{"n_layer": {DIGITS}}}', "[]", "null", '{"n_layer": NaN}'])
def test_descriptions_of_a_model_that_are_none(content: str, base: Path, refused: Any) -> None:
    (base / "config.json").write_text(content)
    assert "config.json" in refused("generate", "base", "--prompt", "x")
    if not content.startswith("{"):
        model = ["layers=2", "heads=2", "width=32", "context=64", f"weights={base}"]
        settings = [part for text in model for part in ("--set", f"model.{text}")]
        assert "config.json" in refused("train", "--out", "out", "--set", "data.path=text.txt", *settings)


def test_weights_that_are_no_weights_of_a_model(base: Path, refused: Any) -> None:
    weights = load_file(base / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    for changed, words in (
        ({name: weights[name][None]}, "has shape [1, 32, 96]"),
        ({"transformer.h.x.weight": weights[name]}, "no such thing"),
        ({"transformer.h.99.weight": weights[name]}, "it has 100 layers, its config.json says 2"),
        ({"transformer.wte.weight": weights["transformer.wte.weight"][:9]}, "has shape [9, 32], its config.json says"),
    ):
        save_file(weights | {key: value.clone() for key, value in changed.items()}, base / "model.safetensors")
        if words == "no such thing":  # what no GPT-2 has is left where it is
            assert open_base(base).model.shape.layers == 2
        else:
            assert words in refused("generate", "base", "--prompt", "x")


@pytest.mark.parametrize(("name", "value"), [("n_layer", 4000), ("n_embd", 2**20), ("n_positions", 2**24)])
def test_no_memory_is_taken_for_what_the_weights_do_not_have(name: str, value: int, base: Path, refused: Any) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {name: value}))
    assert "its config.json says" in refused("generate", "base", "--prompt", "x")


def test_a_token_far_from_all_others(base: Path, refused: Any) -> None:
    content = json.loads((base / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 10_000_000
    (base / "tokenizer.json").write_text(json.dumps(content))
    assert "one has the number 10,000,000" in refused("generate", "base", "--prompt", "x")


@pytest.mark.parametrize(
    "array", [np.zeros(0, np.int64), np.full(99, -5), np.full(99, 2**63, np.uint64), np.arange(99).astype("m8[s]")]
)
def test_tokens_that_are_none(array: Any, base: Path, refused: Any) -> None:
    np.save("tokens.npy", array)
    assert "token" in refused("evaluate", "base", "--data", "tokens.npy")
    assert "token" in refused("train", "--set", "data.path=tokens.npy", "--set", "model.vocab_size=99", "--out", "out")


@pytest.mark.parametrize("header", ["{'descr': '<i8', 'shape': (9L,", "{'shape': (" + "9" * 5000 + ",)}", "(" * 9000])
def test_headers_of_arrays_that_are_no_python(header: str, refused: Any) -> None:
    Path("t.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    line = refused("train", "--set", "data.path=t.npy", "--set", "model.vocab_size=99", "--out", "out")
    assert "t.npy: not a token file" in line


@pytest.fixture
def tuned(base: Path, folder: Path) -> Path:
    config = config_for(base, write_colors(folder / "colors.jsonl"), max_steps=2, evaluation__answers=0)
    finetune(config, folder / "tuned", progress=False)
    return folder / "tuned"


def test_adapters_that_no_one_made(tuned: Path, call: Call, refused: Any) -> None:
    path = tuned / "adapter" / "adapter_config.json"
    whole = path.read_text()
    for name, value in (("lora_alpha", 10**400), ("lora_dropout", 10**400), ("r", 10**400), ("peft_type", [1])):
        path.write_text(json.dumps(json.loads(whole) | {name: value}))
        assert "adapter" in refused("generate", tuned, "--prompt", "x")
        code, out, err = call("adapters", "list", tuned)
        assert (code, out, err.count("\n")) == (0, f"no adapters in {tuned}\n", 1)
    path.write_text(json.dumps(json.loads(whole) | {"base_model_name_or_path": "[/x][link=http://a]\x1b]0;b\x07"}))
    code, out, err = call("adapters", "list", tuned)
    assert (code, err) == (0, "")
    assert "[/x][link=http://a]\\x1b]0;b\\x07" in out
    path.write_text(whole)
    weights = tuned / "adapter" / "adapter_model.safetensors"
    narrow = {name: value.to(torch.float8_e4m3fn) for name, value in load_file(weights).items()}
    save_file(narrow, weights)
    assert call("adapters", "list", tuned)[0] == 0


def test_fine_tuning_runs_that_name_each_other(tuned: Path, refused: Any) -> None:
    other = shutil.copytree(tuned, tuned.with_name("other"))
    for one, two in ((tuned, other), (other, tuned)):
        text = (one / "config.toml").read_text()
        (one / "config.toml").write_text(re.sub('weights = ".*"', f'weights = "{two}"', text))
    assert "is a fine-tuning run and no model" in refused("generate", tuned, "--prompt", "x")


def test_a_summary_without_end(tuned: Path, call: Call) -> None:
    (tuned / "summary.json").write_text("[" * 100_000)
    assert call("generate", tuned, "--prompt", "x", "--max-tokens", "2")[0] == 0


@pytest.mark.parametrize(
    "content",
    [
        *(f'{{"a": [{"9" * 400}]}}', f'{{"a": [{DIGITS}]}}', "[" * 100_000, '{"a": [true]}'),
        '{"benchmarks": [{"name": "a", "stats": {"data": 5}}]}',
    ],
    ids=lambda content: content[:20],
)
def test_results_of_benchmarks_that_are_none(content: str, refused: Any) -> None:
    Path("a.json").write_text(content)
    assert "a.json: " in refused("bench", "compare", "a.json", "a.json")


def test_names_of_benchmarks_are_no_markup(call: Call) -> None:
    for name in ("a.json", "b.json"):
        Path(name).write_text(json.dumps({"[/x]\x1b[2J": [1.0, 1.01, 0.99]}))
    for arguments in (("compare", "a.json", "b.json"), ("history", "a.json", "b.json")):
        code, out, _ = call("bench", *arguments)
        assert code == 0
        assert "[/x]\\x1b[2J" in out
        assert "\x1b" not in out


@pytest.mark.parametrize("content", ["[" * 100_000, '{"event": "Notice", "message": "\\ud800", "level": "info"}\n'])
def test_a_page_of_whatever_a_log_holds(content: str, call: Call) -> None:
    Path("run").mkdir()
    Path("run/config.toml").write_text("")
    Path("run/metrics.jsonl").write_text('{"event": "Notice", "message": "x", "level": "info"}\n' + content)
    assert call("report", "run")[0] == 0


# --- what is printed -------------------------------------------------------------------------------------------------


def test_what_steers_a_terminal_is_shown() -> None:
    assert visible("a\tb\nc äß漢") == "a\tb\nc äß漢"
    assert visible("\x1b[2J\x07\r\x9b31m\u202eevil") == "\\x1b[2J\\x07\\r\\x9b31m\\u202eevil"


def test_errors_that_quote_files_steer_no_terminal(call: Call) -> None:
    Path("a.jsonl").write_text('{"\x1b]0;title\x07": 1}\n'.replace("\x1b", "\\u001b").replace("\x07", "\\u0007"))
    code, _, err = call("train", "--set", "data.path=a.jsonl", "--out", "out")
    assert code == 2
    assert "\\x1b]0;title\\x07" in err
    assert "\x1b" not in err


def test_tables_show_what_would_steer_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    table = Table("a\x1b[2J")
    table.add_row("b\x1b[2J")
    screens.screen().print(table)
    screens.screen().print("c\x1b[2J")
    assert stream.getvalue().count("\\x1b[2J") == 3
    assert "\x1b" not in stream.getvalue()


def test_what_a_stream_cannot_encode_is_written_as_an_escape() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    outlet = Outlet(stream)
    outlet.write("Köln \udcff\n")
    outlet.flush()
    assert raw.getvalue() == b"K\\xf6ln \\udcff\n"


def test_a_warning_is_never_longer_than_one_reads(tuned: Path, call: Call) -> None:
    path = tuned / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bias": "none" * 9999}))
    code, _, err = call("adapters", "list", tuned)
    assert (code, err.count("\n")) == (0, 1)
    assert len(err) < 2100


def test_json_of_others() -> None:
    assert from_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert from_json("[" * 100 + "]" * 100)
    for text in ("[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101, "[" * 100_000, DIGITS, "", "[", b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
            from_json(text)


def test_bounds_hold_in_python_too() -> None:
    with pytest.raises(InputError, match="too large"):
        Config(batch_size=2**63)


def test_an_empty_name_of_data_is_not_all_of_pythons_sources(refused: Callable[..., str], tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    assert "an empty name" in refused("evaluate", "base", "--data", "")
    assert "an empty name among others" in refused("train", "--set", 'data.path=["text.txt", ""]', "--out", "out")


def test_prefetch_has_a_bound(refused: Callable[..., str]) -> None:
    assert "data.prefetch" in refused("train", "--set", "data.prefetch=2147483647", "--out", "out")


def test_what_needs_a_gpu_is_said_before_the_run_is_shown(call: Call) -> None:
    settings = ("data.path=text.txt", "device=cpu", "engine.cuda_graph=true", "model.layers=1", "model.width=16")
    code, _, err = call("train", *(word for setting in settings for word in ("--set", setting)), "--out", "out")
    assert (code, err.splitlines()[-1][:32]) == (2, "error: engine.cuda_graph = true ")
    assert len(err.splitlines()) <= 3, err


def test_a_notice_that_quotes_a_file_is_never_longer_than_one_reads() -> None:
    told = narration.line(Notice("saved with torch " + "2.13.0" * 1000))
    assert told is not None
    assert len(told) < 2100
    told = narration.line(CheckpointRejected("step-1", "model.blocks" * 1000))
    assert told is not None
    assert len(told) < 2100
