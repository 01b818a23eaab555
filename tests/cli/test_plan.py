"""`foretrain plan`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.finetuning import write_base

Command = Callable[..., int]
SMALL = ["--set", "model.type=gpt2-small", "--set", "data.tokenizer=gpt2", "--device", "cuda"]
LONG = [*SMALL, "--set", "max_steps=10000"]
"""Moves will be tried."""
LEAP = [*LONG, "--set", "hybrid.mode=leap"]
"""And prediction stays on."""


def test_the_table_names_every_component_and_phase(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", *LONG) == 0
    shown = capsys.readouterr().out
    for word in ("weights", "gradients", "optimizer state", "activations", "basis", "snapshot", "PREDICT", "CORRECT"):
        assert word in shown
    assert "WARMUP, FULL" in shown
    assert "peak" in shown


def test_a_budget_gives_settings_their_reasons_and_lines_for_the_file(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command("plan", *LEAP, "--budget", "3GB") == 0
    shown = capsys.readouterr().out
    assert "to fit into 3.00 GB" in shown
    assert "in main memory" in shown
    lines = shown[shown.index("accumulation_steps =") :]
    assert tomllib.loads(lines)
    file = tmp_path / "planned.toml"
    file.write_text(lines, encoding="utf-8")
    assert command("plan", file, *LEAP, "--budget", "3GB") == 0
    assert "it fits into 3.00 GB as it is" in capsys.readouterr().out


def test_main_memory_that_would_be_locked_is_said(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", *LONG) == 0
    assert "main memory" not in capsys.readouterr().out
    assert command("plan", *LONG, "--set", "memory.basis=pinned") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"main memory: \d\.\d\d GB, locked, beside what the process itself takes", last)


def test_a_file_without_a_preset_can_be_planned_as_fine_tuning(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_base(tmp_path / "base")
    file = tmp_path / "tune.toml"
    file.write_text(f'[model]\nweights = "{tmp_path / "base"}"\n', encoding="utf-8")
    states = []
    for flags in ([], ["--finetune"]):
        assert command("plan", file, *flags, "--json") == 0
        states.append(json.loads(capsys.readouterr().out)["estimate"]["components"]["full"]["optimizer state"])
    assert states[1] < states[0]


def test_json_says_the_same(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", *LEAP, "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["fits"] is None
    assert command("plan", *LEAP, "--budget", "3GB", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made) == {
        "fits", "budget_bytes", "settings", "levers", "relative_step_time", "estimate", "estimate_before",
            "planned", "without_prediction", "with_prediction",
    }  # fmt: skip
    assert made["fits"] is True
    assert made["budget_bytes"] == 3 * 10**9
    assert set(made["estimate"]) == {
        "peak_bytes",
        "needed_bytes",
        "peak_by_phase",
        "components",
        "moment",
        "host_bytes",
    }
    assert made["estimate"]["needed_bytes"] <= made["budget_bytes"]
    assert made["estimate_before"] == plain["estimate"]
    assert set(made["estimate"]["peak_by_phase"]) == {"full", "predict", "correct", "audit", "evaluate"}
    assert {row["setting"] for row in made["levers"]} == set(made["settings"])
    for phase, parts in made["estimate"]["components"].items():
        assert sum(parts.values()) == made["estimate"]["peak_by_phase"][phase]


def test_nothing_fits_is_exit_code_2_with_the_smallest_figure(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("plan", *SMALL, "--budget", "500MB", "--json") == 2
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["fits"] is False
    assert answer["smallest_bytes"] > answer["budget_bytes"] == 500 * 10**6
    assert "the smallest possible is" in said.err
    assert command("plan", *SMALL, "--budget", f"{answer['smallest_bytes'] / 1000 + 1:.3f}KB") == 0


@pytest.mark.parametrize("budget", ["14", "lots", "14 gb"])
def test_a_wrong_budget_is_explained(budget: str, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", "--budget", budget) == 2
    assert "14GB, 6GiB or 800MB" in capsys.readouterr().err


def test_the_budget_of_the_file_counts_too(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", *SMALL, "--set", "memory.budget=4GiB", "--json") == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == 4 * 2**30


def test_a_gpu_s_free_memory_is_the_budget_where_none_is_given(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * 10**9, 8 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert command("plan", *SMALL, "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["budget_bytes"] == 4 * 10**9
    assert "what is free on a card" in said.err


@pytest.mark.parametrize(
    ("tokenizer", "size"), [("byte", 257), ("bpe", 4096), ("gpt2", 50304), ("char", 50304), ("some.json", 50304)]
)
def test_the_vocabulary_is_that_of_the_tokenizer(
    tokenizer: str, size: int, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--set", "model.layers=1", "--set", "model.width=64", "--set", "model.context=8"]
    assert command("plan", *tiny, "--set", f"data.tokenizer={tokenizer}", "--json") == 0
    said = capsys.readouterr()
    weights = json.loads(said.out)["estimate"]["components"]["full"]["weights"]
    rest = 12 * 64 * 64 + 13 * 64 + 2 * 64 + 8 * 64
    assert weights == 4 * (64 * size + rest)
    assert ("set model.vocab_size" in said.err) == (tokenizer in ("char", "some.json"))


def test_a_fine_tuning_run_is_planned_from_its_model(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    arguments = ["plan", "--set", "preset=finetune", "--device", "cpu", "--json"]
    assert command(*arguments, "--set", f"model.weights={base}") == 0
    parts = json.loads(capsys.readouterr().out)["estimate"]["components"]["full"]
    assert parts["optimizer state"] < parts["weights"]
    assert command(*arguments, "--set", f"model.weights={tmp_path / 'none'}") == 2
    assert "name the model to fine-tune" in capsys.readouterr().err


def test_another_device_is_refused(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", "--device", "tpu") == 2
    assert "plan for cuda or cpu" in capsys.readouterr().err


def test_what_was_planned_is_said(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", *SMALL, "--set", "batch_size=8") == 0
    device, what = capsys.readouterr().out.splitlines()[:2]
    assert device == "planned for a CUDA GPU, bf16"
    assert what.startswith("gpt2-small, 124,")
    assert what.endswith(" parameters, vocabulary of 50,257; batches of 8 x 1024 tokens; cuda, bf16")


def test_growth_that_is_auto_is_decided_and_said(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    auto = [*SMALL, "--set", "growth.layers=auto", "--set", "batch_size=8"]
    assert command("plan", *auto, "--set", "max_steps=10000") == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[2].startswith("growth: 6 of 12 blocks until 50% of the run, because 68% of a step lies")
    assert "state before growth" in shown
    assert command("plan", *auto, "--set", "max_steps=1000000", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["planned"]["growth"].startswith("off, because the run has 65.8 tokens per parameter")
    assert "state before growth" not in found["estimate"]["components"]["full"]
    assert command("plan", *auto, "--set", "epochs=1") == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("growth: decided when the run begins, because only")


def test_a_budget_on_a_machine_without_a_gpu_means_a_gpu(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrain.engine.precision.choose_device", lambda name: torch.device("cpu"))
    model = ["--set", "model.type=gpt2-small", "--set", "data.tokenizer=gpt2"]

    def first(*arguments: str) -> str:
        assert command("plan", *model, *arguments) == 0
        return capsys.readouterr().out.splitlines()[0]

    meant = "planned for a CUDA GPU, bf16: there is none here, but a budget means one; for the CPU: --device cpu"
    assert first("--budget", "30GB") == first("--set", "memory.budget=30GB") == meant
    assert first() == "planned for this machine's CPU, fp32; for a GPU: --device cuda"
    assert first("--budget", "30GB", "--device", "cpu") == "planned for a CPU, fp32"
    assert first("--budget", "30GB", "--set", "device=cpu").startswith("planned for this machine's CPU, fp32")
    assert command("plan", *model, "--budget", "500MB") == 2
    assert meant in capsys.readouterr().err


def test_prediction_that_does_not_pay_is_proposed_off_first(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command("plan", *LONG, "--budget", "3GB") == 0
    shown = capsys.readouterr().out
    file = tmp_path / "planned.toml"
    file.write_text(shown[shown.index("accumulation_steps =") :], encoding="utf-8")  # the alternative is in comments
    assert tomllib.loads(file.read_text(encoding="utf-8"))["hybrid"] == {"mode": "off"}
    assert command("plan", file, *LONG, "--budget", "3GB") == 0
    assert "it fits into 3.00 GB as it is" in capsys.readouterr().out
    other = shown[shown.index("# with prediction instead: ") :]
    assert "# main memory: " in other
    assert '# basis = "pinned"' in other
    assert command("plan", *LONG, "--budget", "3GB", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["settings"]["hybrid.mode"] == "off"
    assert made["with_prediction"]["relative_step_time"] > made["relative_step_time"]
    assert command("plan", *SMALL, "--budget", "3GB") == 0
    assert "no audit is affordable in so few steps" in capsys.readouterr().out


def test_what_the_plain_loop_would_need_instead_is_said(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", *LEAP, "--budget", "3GB") == 0
    said = capsys.readouterr().err
    assert said.startswith('note: without prediction (hybrid.mode = "off"): that fits at about 1')
    assert command("plan", *LONG, "--budget", "3GB", "--set", "hybrid.mode=off") == 0
    assert command("plan", *LEAP, "--budget", "40GB") == 0
    assert capsys.readouterr().err == ""
    named = ["accumulation_steps=1", "memory.basis=device", "memory.snapshots=device", "optimizer.state_type=fp32"]
    settings = [part for name in named for part in ("--set", name)]
    assert command("plan", *LEAP, *settings, "--budget", "6GB") == 2
    said = capsys.readouterr().err
    assert "; take a smaller model, context or batch, or leave settings that are named to the plan (" in said
    assert "memory.basis and 2 more), or train without prediction" in said


def test_a_named_size_without_data_has_gpt2_s_vocabulary(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def vocabulary(*settings: str) -> tuple[int, str]:
        named = [part for setting in settings for part in ("--set", setting)]
        assert command("plan", *named, "--device", "cuda", "--json") == 0
        said = capsys.readouterr()
        return json.loads(said.out)["planned"]["vocabulary"], said.err

    note = "note: the vocabulary is taken to be GPT-2's 50,257, as no data is named; with data.tokenizer = 'byte'"
    size, said = vocabulary("model.type=gpt2-xl")
    assert (size, said.startswith(note)) == (50257, True)
    assert vocabulary("model.type=gpt2-xl", "data.tokenizer=byte") == (257, "")
    assert vocabulary("model.type=gpt2-xl", "data.path=book.txt") == (257, "")
    assert vocabulary("model.type=gpt2-tiny") == vocabulary() == (257, "")
