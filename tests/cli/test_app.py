"""The command line: what it prints, what it leaves behind, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from foretrain.cli import app as cli
from foretrain.cli.doctor import DoctorFinding
from foretrain.config import Config, load
from foretrain.data import tokenizers
from foretrain.data.tokenizers import ByteTokenizer
from foretrain.errors import InputError

Command = Callable[..., int]


def answers_without_torch(*arguments: str) -> str:
    """Standard output of a command in a fresh process that imports neither torch nor the benchmarks."""
    code = (
        "import sys\nfrom foretrain.cli.app import main\n"
        f"try:\n    main({list(arguments)!r})\nexcept SystemExit as ended:\n"
        "    heavy = sorted({'torch', 'numpy', 'tokenizers', 'foretrain_bench'} & set(sys.modules))\n"
        "    sys.exit(str(heavy) if heavy else ended.code)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


# --- help and version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["train", "export", "doctor", "config", "bench", "--version"]),
        (["train", "--help"], ["--set", "--out", "--resume", "--overwrite", "--quiet", "--json"]),
        (["config", "--help"], ["init", "show", "check"]),
        (["doctor", "--help"], ["--json"]),
        (["config", "show"], ["[optimizer]", "learning_rate"]),
    ],
)
def test_help_and_configuration_answer_without_torch(arguments: list[str], words: list[str]) -> None:
    output = answers_without_torch(*arguments)
    for word in words:
        assert word in output


def test_version(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out.strip() == metadata.version("foretrain")


def test_version_of_what_is_not_installed(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert command("--version") == 0
    assert capsys.readouterr().out.strip() == "not installed: runs from its source"


def test_python_dash_m_is_the_same_program() -> None:
    answer = subprocess.run([sys.executable, "-m", "foretrain", "config", "nosuch"], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout, answer.stderr.count("Traceback")) == (2, "", 0)


def test_an_error_is_one_line_of_bearable_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise InputError("two\n  lines\tand " + "more " * 2000)

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main(["anything"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: two lines and more more ")
    assert line.endswith(" ...")
    assert len(line) < 2100


def test_the_installed_program_runs() -> None:
    program = Path(sys.executable).with_name("foretrain")
    answer = subprocess.run([program, "--version"], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout.strip()) == (0, metadata.version("foretrain"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["train", "a.toml", "b.toml"],
            "foretrain train: there is no use for b.toml; `foretrain train --help` shows how",
        ),
        (["config", "init"], "foretrain config init: FILE is missing; `foretrain config init --help` shows how"),
        (
            ["train", "--out"],
            (
                "foretrain train: --out needs a value; one that begins with a minus is written --out=-VALUE; "
                "`foretrain train --help` shows how"
            ),
        ),
        (
            ["compare", "--seeds", "many"],
            "foretrain compare: --seeds many: not a whole number; `foretrain compare --help` shows how",
        ),
        (["trian"], 'Unknown command "trian". Did you mean "train"? `foretrain --help` shows how'),
        (["train", "--ou", "x"], "Unknown option: --ou. Did you mean --out? `foretrain train --help` shows how"),
    ],
)
def test_a_wrong_command_line_is_explained_in_our_words(
    arguments: list[str], error: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("arguments", [["trian"], ["train", "--stes", "3"], ["config", "check"], ["export", "one"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str], command: Command) -> None:
    assert command(*arguments) == 2


# --- config --------------------------------------------------------------------------------------------------------


def test_init_writes_a_file_that_checks_and_loads(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    assert command("config", "init", file, "--preset", "small", "--set", "max_steps=7") == 0
    assert f"foretrain train {file}" in capsys.readouterr().out
    config = load(file).config
    assert (config.preset, config.optimizer.learning_rate, config.max_steps) == ("small", 1e-4, 7)
    assert command("config", "check", file) == 0
    note = "note: preset = 'small' sets phases and rates, no model size: that is model.type"
    assert capsys.readouterr().out == f"{note}\n{file}: ok\n"


def test_init_never_overwrites(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.toml"
    file.write_text("seed = 3\n", encoding="utf-8")
    assert command("config", "init", file) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "seed = 3\n"


def test_show_prints_the_whole_configuration(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[learning_rate]\ninitial = 1e-4\n", encoding="utf-8")
    assert command("config", "show", file, "-s", "seed=9") == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["optimizer"]["learning_rate"] == 1e-4
    assert shown["seed"] == 9
    assert shown["batch_size"] == Config().batch_size


def test_show_as_json(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("config", "show", "--set", "seed=9", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["seed"], shown["model"]["type"]) == (9, "gpt2-tiny")


def test_check_prints_notices_and_exits_with_0(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[dataset]\ndomain = "code"\n', encoding="utf-8")
    assert command("config", "check", file) == 0
    assert "note: dataset.domain has no effect" in capsys.readouterr().out
    assert command("config", "check", file, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    assert len(answer["notices"]) == 1


def test_a_text_instead_of_a_configuration_is_led_to_where_texts_are_named(
    command: Command, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("train", text_file, "--out", tmp_path / "run") == 2
    assert f"data is named with --set data.path={text_file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_step = 3", "did you mean max_steps?"),
        ("max_steps = 0", "max_steps = 0"),
        ("max_steps", "not valid TOML"),
        ("[learning_rate]\ninitial = 1.0\n[optimizer]\nlearning_rate = 2.0", "keep one of them"),
    ],
)
def test_check_exits_with_2_and_the_reason_in_one_line(
    text: str, reason: str, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text(text, encoding="utf-8")
    assert command("config", "check", file) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert reason in output.err
    assert output.err.count("\n") == 1
    assert command("config", "check", file, "--json") == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert reason in answer["error"]


def test_check_of_a_missing_file_exits_with_2(command: Command, tmp_path: Path) -> None:
    assert command("config", "check", tmp_path / "none.toml") == 2


# --- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_says_what_a_run_would_use(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrain.cli.doctor.installed_gpu", lambda: "")
    assert command("doctor") == 0
    output = capsys.readouterr().out
    for name in ("foretrain", "device", "precision", "compile", "memory", "threads", "disk"):
        assert f" {name} " in output
    assert command("doctor", "--json") == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["name"] for finding in findings} >= {"device", "precision", "disk"}


def test_doctor_exits_with_1_when_something_is_wrong(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrain.cli.doctor.examine", lambda: [DoctorFinding("device", "it is broken", "problem")])
    assert command("doctor") == 1
    assert capsys.readouterr().out == "!!!  device     it is broken\n"
    assert command("doctor", "--json") == 1


# --- train, resume, export -----------------------------------------------------------------------------------------


def test_a_run_leaves_its_files(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert command("train", *tiny_settings, "--set", f"data.path={text_file}", "--out", out, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    files = {"folder": str(out), "report": str(out / "report.html"), "model": str(out / "model")}
    assert printed == summary | {"files": files}
    wanted = {"final_val_loss", "final_train_loss", "seconds", "tokens", "steps", "config", "environment"}
    assert wanted <= summary.keys()
    assert (summary["global_step"], summary["tokens"], summary["reason"]) == (6, 6 * 4 * 16, "finished")
    assert 0 < summary["final_val_loss"] < 7
    assert 0 < summary["final_train_loss"] < 7
    assert summary["config"]["model"] | {"layers": 2, "width": 32, "vocab_size": 257} == summary["config"]["model"]
    assert summary["environment"]["foretrain"] == metadata.version("foretrain")

    config = load(out / "config.toml").config
    assert (config.max_steps, config.model.vocab_size, config.data.path) == (6, 257, str(text_file))
    assert type(tokenizers.load(out / "tokenizer.json")) is ByteTokenizer
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["event"] for event in (events[0], events[-1])] == ["RunStarted", "RunEnded"]
    assert [event["step"] for event in events if event["event"] == "Progress"] == [1, 2, 3, 4, 5, 6]
    steps = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert steps[-1] == "step-00000006"
    settings = {"config.json", "generation_config.json", "model.safetensors"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in (out / "model").iterdir()} == settings | tokenizer


def test_numbers_that_json_does_not_have_are_null_on_the_screen_too(
    command: Command,
    tmp_path: Path,
    text_file: Path,
    tiny_settings: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from foretrain.engine.forward import Forward

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    monkeypatch.setattr(Forward, "evaluate", lambda forward, batches: float("nan"))
    out = tmp_path / "run"
    assert command("train", *tiny_settings, "--set", f"data.path={text_file}", "--out", out, "--json") == 0
    for text in (capsys.readouterr().out, (out / "summary.json").read_text(encoding="utf-8")):
        assert json.loads(text, parse_constant=refuse)["final_val_loss"] is None


def test_quiet_prints_the_result_in_one_line(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny_settings, "--set", f"data.path={text_file}", "--set", "data.domain=code"]
    assert command("train", *arguments, "--out", tmp_path / "run", "--quiet") == 0
    shown = capfd.readouterr()
    assert re.fullmatch(r"finished: held-out loss \d\.\d{4}, 6 steps in \d+:\d\d; (.*)\n", shown.out)[1] == str(
        tmp_path / "run"
    )
    assert shown.err == ""


def test_verbose_tells_everything_and_its_opposite_is_refused(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny_settings, "--set", f"data.path={text_file}", "--set", "log.console=quiet"]
    assert command("train", *arguments, "--out", tmp_path / "run", "--verbose") == 0
    said = capfd.readouterr().err
    for words_of_it in ("looked at 15 layers", "memory in", "saved ", "step 6/6"):
        assert words_of_it in said
    assert load(tmp_path / "run" / "config.toml").config.log.console == "quiet", "a flag is for this call alone"
    assert command("train", "--quiet", "--verbose") == 2
    assert "contradict each other" in capfd.readouterr().err


def test_progress_goes_to_standard_error_and_the_result_to_standard_output(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny_settings, "--set", f"data.path={text_file}", "--set", "data.domain=code"]
    assert command("train", *arguments, "--out", tmp_path / "run") == 0
    output = capfd.readouterr()
    for words in ("note: data.domain has no effect", "step 6/6", "held-out loss"):
        assert words in output.err
    assert output.out.startswith("run finished")
    assert re.search("held-out loss +│", output.out)
    assert "run finished" not in output.err
    assert f"report   {tmp_path / 'run' / 'report.html'}  (open it in a browser)\n" in output.err
    assert re.search(rf"live +foretrain watch {re.escape(str(tmp_path / 'run'))} --open\n", output.err)
    assert "\x1b" not in output.err


def test_a_run_from_a_file_with_overrides(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text(f"seed = 5\nmax_steps = 99\n[data]\npath = '{text_file}'\n", encoding="utf-8")
    out = tmp_path / "run"
    assert command("train", file, *tiny_settings, "--set", "max_steps=2", "--out", out, "--quiet") == 0
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert (summary["config"]["seed"], summary["global_step"]) == (5, 2)


def test_without_out_a_new_folder_in_runs_is_made(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("train", *tiny_settings, "--set", f"data.path={text_file}", "--quiet") == 0
    assert [path.name.startswith("gpt2-tiny-") for path in (tmp_path / "runs").iterdir()] == [True]


def test_a_second_run_in_the_same_folder_needs_overwrite(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["train", *tiny_settings, "--set", f"data.path={text_file}", "--out", out, "--quiet"]
    assert command(*arguments) == 0
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    assert command(*arguments) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert command(*arguments, "--set", "max_steps=2", "--overwrite") == 0
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["global_step"] == 2
    best, *others = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert best in ("best-step-00000001", "best-step-00000002")
    assert others == ["step-00000001", "step-00000002"]
    assert (out / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_resume_goes_on_with_the_run_folders_own_configuration(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str]
) -> None:
    out, straight = tmp_path / "run", tmp_path / "straight"
    arguments = ["train", *tiny_settings, "--set", f"data.path={text_file}", "--set", "schedule.type=constant"]
    assert command(*arguments, "--set", "max_steps=3", "--out", out, "--quiet") == 0
    assert command("train", "--out", out, "--resume", "--set", "max_steps=6", "--quiet") == 0
    assert command(*arguments, "--out", straight, "--quiet") == 0
    resumed, plain = (json.loads((path / "summary.json").read_text()) for path in (out, straight))
    assert resumed["global_step"] == plain["global_step"] == 6
    assert resumed["final_val_loss"] == plain["final_val_loss"]
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (out, straight)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--resume"], "--resume needs --out"), (["--resume", "--overwrite", "--out", "x"], "contradict each other")],
)
def test_resume_that_cannot_be_meant_exits_with_2(
    arguments: list[str], reason: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("train", *arguments) == 2
    assert reason in capsys.readouterr().err


def test_a_run_that_diverges_exits_with_1(
    command: Command,
    tmp_path: Path,
    text_file: Path,
    tiny_settings: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from foretrain.models.gpt2 import GPT2

    original, calls = GPT2.loss, iter(range(1000))
    monkeypatch.setattr(
        GPT2, "loss", lambda model, batch: original(model, batch) * (float("nan") if next(calls) > 1 else 1.0)
    )
    arguments = [*tiny_settings, "--set", f"data.path={text_file}", "--set", "guard.max_skipped_steps=2"]
    assert command("train", *arguments, "--out", tmp_path / "run", "--quiet") == 1
    error = capsys.readouterr().err
    assert "2 steps in a row were not finite" in error
    assert "Traceback" not in error


def test_export_writes_the_newest_checkpoint_and_a_named_one(
    command: Command, tmp_path: Path, text_file: Path, tiny_settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["--set", f"data.path={text_file}", "--set", "checkpoint.interval=5", "--out", out, "--quiet"]
    assert command("train", *tiny_settings, *arguments) == 0
    capsys.readouterr()
    assert command("export", out, tmp_path / "newest") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'newest'}\n"
    assert command("export", out / "checkpoints" / "step-00000005", tmp_path / "older") == 0
    of_run, newest, older = (
        (folder / "model.safetensors").read_bytes()
        for folder in (out / "model", tmp_path / "newest", tmp_path / "older")
    )
    assert of_run == newest != older
    (best,) = (out / "checkpoints").glob("best-step-*")
    assert command("export", best, tmp_path / "best") == 0
    assert (tmp_path / "best" / "model.safetensors").is_file()
    capsys.readouterr()
    assert command("export", out, tmp_path / "older") == 2
    assert "add --overwrite to replace files" in capsys.readouterr().err
    assert (tmp_path / "older" / "model.safetensors").read_bytes() == older
    assert command("export", out, tmp_path / "older", "--overwrite") == 0
    assert (tmp_path / "older" / "model.safetensors").read_bytes() == newest


def test_export_of_something_else_exits_with_2(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("export", tmp_path, tmp_path / "model") == 2
    assert "neither a checkpoint nor a run folder" in capsys.readouterr().err


def test_a_whole_run_in_its_own_process(tmp_path: Path, text_file: Path, tiny_settings: list[str]) -> None:
    program = Path(sys.executable).with_name("foretrain")
    arguments = ["train", *tiny_settings, "--set", f"data.path={text_file}", "--out", tmp_path / "run", "--json"]
    answer = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["global_step"] == 6
    assert "run finished" in answer.stderr
