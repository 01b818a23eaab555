"""`foretrain evaluate` says of other data what the run itself would say of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.finetuning import COLORS, config_for, write_base, write_colors
from tests.recipes.test_newest import command, stop_at

from foretrain.cli.evaluate import EvaluationProgress
from foretrain.errors import DataError, InputError
from foretrain.recipes import finetune as tuning
from foretrain.recipes import train as run
from foretrain.recipes.evaluate import evaluate


@pytest.fixture
def other_text(tmp_path: Path, make_text: Callable[..., str]) -> Path:
    path = tmp_path / "other.txt"
    path.write_text(make_text(400, seed=5), encoding="utf-8")
    return path


@pytest.fixture
def trained(make_config: Callable[..., Any], text_file: Path, other_text: Path, tmp_path: Path) -> dict[str, Any]:
    changes = {"data.path": str(text_file), "data.validation_path": str(other_text), "evaluation.batches": 1000}
    return run.train(make_config(changes), tmp_path / "run", progress=False)


def write_records(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def tuned(tmp_path: Path) -> dict[str, Any]:
    """Its held-out examples are in a file of their own, which does not hold all classes."""
    base, data = write_base(tmp_path / "base"), write_colors(tmp_path / "colors.jsonl")
    things = list(COLORS.items())[:3]
    write_records(
        tmp_path / "test.jsonl",
        [{"text": f"{number}. the {thing}?", "label": color} for number in range(9) for thing, color in things],
    )
    changes: dict[str, Any] = {"data__validation_path": str(tmp_path / "test.jsonl"), "evaluation__batches": 100}
    return tuning.finetune(config_for(base, data, max_steps=80, **changes), tmp_path / "tuned", progress=False)


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_loss_of_a_text_is_the_runs_own(trained: dict[str, Any], other_text: Path, tmp_path: Path) -> None:
    found = evaluate(tmp_path / "run", other_text, device="cpu")
    assert found["loss"] == pytest.approx(trained["final_val_loss"], abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["tokens"] == (found["tokens_in_data"] - 1) // 16 * 16
    smaller = evaluate(tmp_path / "run" / "model", [str(other_text)], device="cpu", batch_size=3)
    assert smaller["loss"] == pytest.approx(found["loss"], abs=1e-5)
    assert evaluate(tmp_path / "run", other_text, device="cpu", batches=1)["tokens"] == 4 * 16


def test_tokens_short_texts_and_checkpoints(trained: dict[str, Any], other_text: Path, tmp_path: Path) -> None:
    stream = np.frombuffer(other_text.read_bytes(), np.uint8).astype(np.int32)
    np.save(tmp_path / "tokens.npy", np.append(stream, 256))
    found = evaluate(tmp_path / "run", tmp_path / "tokens.npy", device="cpu")
    assert found["loss"] == pytest.approx(trained["final_val_loss"], abs=1e-6)
    (tmp_path / "short.txt").write_text("the cat")
    assert evaluate(tmp_path / "run", tmp_path / "short.txt", device="cpu")["tokens"] == 7
    older = tmp_path / "run" / "checkpoints" / "step-00000005"
    assert evaluate(older, other_text, device="cpu")["loss"] != found["loss"]
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        evaluate(tmp_path / "run", tmp_path / "empty.txt", device="cpu")
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 999]))
    with pytest.raises(DataError, match="holds token 999, the model knows 257"):
        evaluate(tmp_path / "run", tmp_path / "tokens.npy", device="cpu")
    with pytest.raises(InputError, match="batch_size = 0"):
        evaluate(tmp_path / "run", other_text, batch_size=0)


def test_records_without_known_fields_are_text(trained: dict[str, Any], other_text: Path, tmp_path: Path) -> None:
    path = write_records(tmp_path / "documents.jsonl", [{"text": other_text.read_text()}])
    found = evaluate(tmp_path / "run", path, device="cpu")
    assert found["kind"] == "text"
    assert found["loss"] == pytest.approx(trained["final_val_loss"], abs=1e-6)


# --- examples --------------------------------------------------------------------------------------------------------


def test_examples_are_scored_as_by_the_run_itself(tuned: dict[str, Any], tmp_path: Path) -> None:
    found = evaluate(tmp_path / "tuned", tmp_path / "test.jsonl", device="cpu", answers=20)
    assert found["loss"] == pytest.approx(tuned["final_val_loss"], abs=1e-6)
    own = {name: tuned[name] for name in ("accuracy", "answered", "classes")}
    assert {name: found[name] for name in own} == own
    assert own["classes"] == 4
    everything = evaluate(tmp_path / "tuned", tmp_path / "test.jsonl", device="cpu")
    assert everything["answered"] == everything["examples"] == 27


def test_a_merged_model_and_an_adapter_score_alike(tuned: dict[str, Any], tmp_path: Path) -> None:
    assert command("adapters", "merge", tmp_path / "tuned", tmp_path / "merged") == 0
    data = tmp_path / "test.jsonl"
    merged = evaluate(tmp_path / "merged", data, device="cpu")  # the fields are known
    adapted = evaluate(tmp_path / "base", data, adapter=tmp_path / "tuned" / "adapter", device="cpu")
    assert merged["loss"] == pytest.approx(tuned["final_val_loss"], abs=1e-5)
    assert adapted["loss"] == pytest.approx(tuned["final_val_loss"], abs=1e-5)
    assert evaluate(tmp_path / "base", data, device="cpu")["loss"] > tuned["final_val_loss"] + 0.1


def test_generated_answers_are_compared(tuned: dict[str, Any], tmp_path: Path) -> None:
    records = [{"q": f"{n} + 0", "a": f"it is {n} #### {n}"} for n in range(100, 106)]
    path = write_records(tmp_path / "sums.jsonl", records)
    options: dict[str, Any] = {"prompt": "{q}\nA:", "answer": " {a}", "device": "cpu"}
    found = evaluate(tmp_path / "tuned", path, final_answer="####", **options)
    assert (found["answered"], found["exact_match"]) == (6, 0.0)
    with pytest.raises(InputError, match="6 of 6 answers do not hold it"):
        evaluate(tmp_path / "tuned", path, final_answer="$$", **options)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tuned: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    arguments = ("evaluate", tmp_path / "tuned", "--data", tmp_path / "test.jsonl", "--device", "cpu")
    assert command(*arguments) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"loss {tuned['final_val_loss']:.4f}, perplexity ")
    accuracy = evaluate(tmp_path / "tuned", tmp_path / "test.jsonl", device="cpu")["accuracy"]
    assert second == f"accuracy {accuracy:.2%} on 27 examples of 4 classes"
    assert command(*arguments, "--answers", 0, "--prompt", "{text}\\nLabel:", "--answer", " {label}", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(tuned["final_val_loss"], abs=1e-6)
    assert "accuracy" not in found
    assert command("evaluate", tmp_path / "tuned", "--data", tmp_path / "none.jsonl") == 2
    assert "none.jsonl does not exist" in capsys.readouterr().err


def test_an_interrupted_run_is_scored_at_its_newest_checkpoint(
    make_config: Callable[..., Any], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(make_config({"data.path": str(text_file)}), tmp_path / "run", progress=False, listeners=[stop_at(4)])
    assert command("evaluate", tmp_path / "run", "--data", text_file, "--device", "cpu") == 0
    assert "step 4 of 6" in capsys.readouterr().err


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr("foretrain.cli.evaluate.time", SimpleNamespace(monotonic=lambda: now[0]))
    report = EvaluationProgress()
    for done in (1, 2, 3, 4):
        now[0] += 6
        report("evaluated", done, 4)
    now[0] += 30
    report("answered", 1, 2)
    assert capsys.readouterr().err == "evaluated 2 of 4 (50%), 0:12 left\nanswered 1 of 2 (50%), 0:30 left\n"
