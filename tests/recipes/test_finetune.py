"""From a base model and a JSONL file to an adapter that answers: the whole way, and what can go wrong on it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import COLORS, config_for, make_base, write_base, write_colors

from foretrain import config as configuration
from foretrain.cli.app import main
from foretrain.data.examples import Example
from foretrain.data.tokenizers import CharacterTokenizer
from foretrain.errors import CheckpointError, ConfigError, InputError
from foretrain.events import Event, Notice, Progress, RunStarted
from foretrain.models import huggingface
from foretrain.models.adapter_files import load_adapter, read_adapter
from foretrain.persist.folder import RunFolder
from foretrain.recipes.export import read_checkpoint
from foretrain.recipes.finetune import export_adapter, finetune, prepare, with_templates
from foretrain.recipes.open_model import open_base
from foretrain.serve.answers import fitting, spread


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_colors(tmp_path / "colors.jsonl")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return read_adapter(folder).tensors


# --- the whole way ---------------------------------------------------------------------------------------------------


def test_a_run_leaves_an_adapter_that_answers(base: Path, data: Path, tmp_path: Path) -> None:
    summary = finetune(config_for(base, data, max_steps=200), tmp_path / "run", progress=False)
    assert summary["accuracy"] > 0.7  # by chance: 0.25
    assert summary["classes"] == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy"] == summary["accuracy"]
    opened = open_base(tmp_path / "run")
    assert opened.adapter == tmp_path / "run" / "adapter"
    assert opened.folder == base
    before = opened.model(torch.zeros(1, 8, dtype=torch.long))
    load_adapter(opened.model, opened.adapter)
    assert not torch.allclose(before, opened.model(torch.zeros(1, 8, dtype=torch.long)))


def test_leaps_are_judged_on_examples_of_their_own(base: Path, data: Path, tmp_path: Path) -> None:
    config = config_for(base, data, optimizer__learning_rate=1e-4, max_steps=80, schedule__type="constant")
    made = finetune(config, tmp_path / "hybrid", progress=False)
    plain = finetune(configuration.changed(config, {"hybrid.mode": "off"}), tmp_path / "plain", progress=False)
    assert made["moves"]["kept"] + made["moves"]["shrunk"] >= 2
    assert made["final_val_loss"] < plain["final_val_loss"]
    split = prepare(config, open_base(base))
    assert split.probe is not None
    assert len(split.probe) == 16
    rows = [{tuple(row) for row in part._tokens.tolist()} for part in (split.train, split.probe, split.held_out)]
    assert not rows[0] & rows[1]
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[2]


def test_growth_that_is_auto_is_off_for_an_adapter_and_says_why(base: Path, data: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    config = config_for(base, data, max_steps=2, growth__layers="auto", evaluation__answers=0)
    finetune(config, tmp_path / "run", progress=False, listeners=[events.append])
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert started.details["growth"].startswith("off, because the run starts from weights that have learned")
    assert configuration.load(tmp_path / "run" / "config.toml").config.growth.layers == 0


def test_held_out_examples_are_the_same_for_both_arms(base: Path, data: Path) -> None:
    opened = open_base(base)
    one, other = (prepare(config_for(base, data, hybrid__mode=mode), opened) for mode in ("leap", "off"))
    assert one.questions == other.questions
    assert other.probe is None


def test_a_resumed_run_ends_with_the_same_bits(base: Path, data: Path, tmp_path: Path) -> None:
    config = config_for(base, data, checkpoint__interval=20)
    finetune(config, tmp_path / "straight", progress=False)
    target = tmp_path / "resumed"
    (target / "checkpoints").mkdir(parents=True)
    (tmp_path / "straight" / "checkpoints" / "step-00000020").rename(target / "checkpoints" / "step-00000020")
    (target / "metrics.jsonl").touch()
    finetune(config, target, resume=True, progress=False)
    one, other = weights_of(tmp_path / "straight" / "adapter"), weights_of(target / "adapter")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_hold_the_adapter_only(base: Path, data: Path, tmp_path: Path) -> None:
    finetune(config_for(base, data, hybrid__mode="off"), tmp_path / "run", progress=False)
    names = set(read_checkpoint(tmp_path / "run")[1]["model"])
    assert {name.rpartition(".")[2] for name in names} == {"lora_a", "lora_b"}
    assert len(names) == len(read_adapter(tmp_path / "run" / "adapter").tensors)
    exported = export_adapter(tmp_path / "run", tmp_path / "exported")
    one, other = weights_of(tmp_path / "run" / "adapter"), weights_of(exported)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_averaged_weights_are_what_a_run_leaves(base: Path, data: Path, tmp_path: Path) -> None:
    decay = 0.5
    config = config_for(base, data, hybrid__mode="off", max_steps=6, evaluation__ema_decay=decay, evaluation__answers=0)
    finetune(config, tmp_path / "run", progress=False)
    state = read_checkpoint(tmp_path / "run")[1]
    correction = 1 - decay ** state["average"]["updates"]
    trained = [name for name in state["model"] if name.endswith(("lora_a", "lora_b"))]
    averaged = [average / correction for average in state["average"]["average"]]
    for folder in (tmp_path / "run" / "adapter", export_adapter(tmp_path / "run", tmp_path / "exported")):
        left = list(weights_of(folder).values())
        assert len(left) == len(averaged) == len(trained)
        for value in left:
            assert any(torch.equal(value, average) for average in averaged)
            assert not any(torch.equal(value, state["model"][name]) for name in trained)


def test_another_base_is_refused_on_resume(base: Path, data: Path, tmp_path: Path) -> None:
    config = config_for(base, data, max_steps=6)
    finetune(config, tmp_path / "run", progress=False)
    huggingface.save(make_base(4), base)
    with pytest.raises(CheckpointError, match="frozen weights"):
        finetune(configuration.changed(config, {"max_steps": 8}), tmp_path / "run", resume=True, progress=False)


def test_generated_answers_are_compared(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    records = [{"question": f"{n} + 0", "answer": f"it is {n} #### {n % 3}"} for n in range(100, 180)]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    changes: dict[str, Any] = {"max_steps": 4, "evaluation__final_answer": "####", "evaluation__answers": 6}
    summary = finetune(config_for(base, path, **changes), tmp_path / "run", progress=False)
    assert summary["answered"] == 6
    assert 0 <= summary["exact_match"] <= 1


@pytest.mark.parametrize("stop", [1, 4, 9, 10, 11, 15])
def test_an_automatic_rate_goes_on_exactly_after_a_stop_while_rates_are_tried(
    base: Path, data: Path, tmp_path: Path, stop: int
) -> None:
    settings: dict[str, Any] = {"optimizer__learning_rate": "auto", "schedule__type": "constant", "max_steps": 40}
    config = config_for(base, data, checkpoint__interval=stop, checkpoint__keep=40, evaluation__answers=0, **settings)
    straight = finetune(config, tmp_path / "straight", progress=False)
    assert straight["learning_rate"]["steps"] == 10
    assert len(straight["learning_rate"]["tried"]) > 2
    saved = tmp_path / "straight" / "checkpoints" / f"step-{stop:08d}"
    (tmp_path / "resumed" / "checkpoints").mkdir(parents=True)
    saved.rename(tmp_path / "resumed" / "checkpoints" / saved.name)
    resumed = finetune(config, tmp_path / "resumed", resume=True, progress=False)
    assert resumed["learning_rate"] == straight["learning_rate"]
    one, other = weights_of(tmp_path / "straight" / "adapter"), weights_of(tmp_path / "resumed" / "adapter")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_interrupted_run_with_an_automatic_rate_can_be_exported(base: Path, data: Path, tmp_path: Path) -> None:
    finetune(config_for(base, data, optimizer__learning_rate="auto", max_steps=20), tmp_path / "run", progress=False)
    assert weights_of(export_adapter(tmp_path / "run", tmp_path / "exported"))


def test_a_tokenizer_from_elsewhere_stays_with_the_run(base: Path, data: Path, tmp_path: Path) -> None:
    (base / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    config = config_for(base, data, data__tokenizer=str(tmp_path / "tokenizer.json"), max_steps=2)
    finetune(config, tmp_path / "run", progress=False)
    assert open_base(tmp_path / "run").tokenizer.vocab_size == 257
    assert run("adapters", "merge", tmp_path / "run", tmp_path / "merged") == 0
    assert open_base(tmp_path / "merged").adapter is None


def test_answers_are_asked_from_all_over_the_held_out_examples(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "sorted.jsonl"
    records = [{"text": f"{n} {color}?", "label": color} for color in ("a", "b", "c", "d") for n in range(50)]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    opened = open_base(base)
    questions = prepare(config_for(base, path), opened).questions
    assert len({question.answer for question in spread(questions, 8)}) == 4
    long = [Example("x" * 100, " y"), Example("x", " y")]
    assert fitting(opened.model, opened.tokenizer, long) == long[1:]


# --- what can go wrong -----------------------------------------------------------------------------------------------


def test_what_is_missing_is_said(base: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.weights is empty"):
        finetune(config_for(base, data, model__weights=""), tmp_path / "a", progress=False)
    with pytest.raises(ConfigError, match=r"data\.path is empty"):
        finetune(config_for(base, data, data__path=""), tmp_path / "b", progress=False)
    with pytest.raises(InputError, match="no such folder"):
        open_base(tmp_path / "nothing")
    with pytest.raises(InputError, match="holds no model yet"):
        open_base(tmp_path)
    (base / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        open_base(base)
    (base / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="does not describe a GPT-2"):
        open_base(base)


def test_what_would_lose_something_is_refused(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="holds the model that is to be fine-tuned"):
        finetune(config_for(base, data), base, overwrite=True, progress=False)
    with pytest.raises(InputError, match="holds the model that is to be fine-tuned"):
        finetune(config_for(base, data), tmp_path, overwrite=True, progress=False)
    assert (base / "model.safetensors").is_file()
    config = config_for(base, data, max_steps=2)
    finetune(config, tmp_path / "run", progress=False)
    with pytest.raises(InputError, match="merge it first"):
        finetune(config_for(tmp_path / "run", data), tmp_path / "second", progress=False)
    changed = configuration.changed(config, {"lora.alpha": 4.0, "max_steps": 4})
    with pytest.raises(ConfigError, match=r"lora\.alpha was 16\.0"):
        finetune(changed, tmp_path / "run", resume=True, progress=False)
    capsys.readouterr()
    assert run("export", tmp_path / "run", tmp_path / "whole") == 2
    assert f"foretrain adapters export {tmp_path / 'run'} FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "whole").exists()
    assert run("adapters", "merge", tmp_path / "run", base) == 2
    assert run("train", "--out", tmp_path / "run", "--resume") == 2
    assert "foretrain finetune --out" in capsys.readouterr().err
    folder = RunFolder(tmp_path / "run", resume=False, overwrite=True)
    folder.clear()
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_stopped_run_says_how_to_go_on(base: Path, data: Path, tmp_path: Path) -> None:
    messages: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Progress):
            signal.raise_signal(signal.SIGINT)
        if isinstance(event, Notice):
            messages.append(event.message)

    summary = finetune(config_for(base, data), tmp_path / "run", progress=False, listeners=[listen])
    assert summary["reason"] == "interrupted"
    assert any("foretrain finetune --out" in message for message in messages)
    assert not (tmp_path / "run" / "adapter").exists()


def test_line_breaks_from_a_shell_and_wrong_folders(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_templates(config_for(base, data, data__prompt="Q: {text}\\nA:"))
    assert config.data.prompt == ["Q: {text}\nA:"]
    assert config.data.answer == " {label}"
    assert run("finetune", "--out", tmp_path / "nothing", "--resume") == 2
    assert "no run to go on with" in capsys.readouterr().err
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.toml").write_text("max_steps = 3\n")
    assert run("finetune", "--out", tmp_path / "plain", "--resume") == 2
    assert "foretrain train --out" in capsys.readouterr().err
    finetune(config_for(base, data, max_steps=1), tmp_path / "run", progress=False)
    assert run("generate", tmp_path / "run" / "adapter", "--prompt", "x") == 2
    assert "--adapter" in capsys.readouterr().err


def test_a_tokenizer_too_large_for_the_model_is_refused(base: Path) -> None:
    characters = "".join(chr(0x4E00 + number) for number in range(400))
    (base / "tokenizer.json").write_text(CharacterTokenizer(characters).to_json(), encoding="utf-8")
    with pytest.raises(InputError, match="the tokenizer has 401 tokens, the model 257"):
        open_base(base)


def test_very_few_examples_are_enough_without_judges(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"text": "a", "label": "b"}\n{"text": "c", "label": "d"}\n', encoding="utf-8")
    split = prepare(config_for(base, path, data__validation_path=str(path)), open_base(base))
    assert split.probe is None
    assert len(split.train) == 2


# --- the commands ----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def tuned(base: Path, data: Path, tmp_path: Path) -> Path:
    finetune(config_for(base, data), tmp_path / "tuned", progress=False)
    return tmp_path / "tuned"


def test_finetune_by_command(base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "by command"
    settings = ["max_steps=3", "engine.compile=false", "device=cpu", "evaluation.answers=4", "batch_size=4"]
    chosen = [part for setting in settings for part in ("--set", setting)]
    assert run("finetune", "--base", base, "--data", data, "--out", out, "--quiet", *chosen) == 0
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert 'preset = "finetune"' in (out / "config.toml").read_text()
    capsys.readouterr()
    assert run("finetune", "--base", base, "--data", data, "--out", out, "--quiet") == 2
    assert "already holds a run" in capsys.readouterr().err


def test_generate_by_command(tuned: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--prompt", "5: the sky?", "--temperature", 0, "--max-tokens", 5, "--device", "cpu")
    said = []
    for extra in ([], ["--no-adapter"], ["--stream"]):
        assert run("generate", tuned, *common, *extra) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[2]
    assert said[0] != said[1]
    common = ("--prompt", "5: the sky?\nLabel:", *common[2:])
    assert run("generate", base, *common) == 0
    assert capsys.readouterr().out == said[1]
    assert run("generate", base, *common, "--adapter", tuned / "adapter", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["text"] == said[0].rstrip("\n")
    assert found[0]["finish_reason"] in ("eos", "length")
    assert run("generate", base, *common, "--stream", "--json") == 2


def test_a_tuned_model_is_asked_as_it_was_trained(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--temperature", 0, "--max-tokens", 5, "--device", "cpu", "--json")
    assert run("generate", tuned, "--prompt", "5: the sky?", *common) == 0
    asked = json.loads(capsys.readouterr().out)
    assert asked[0]["prompt"] == "5: the sky?\nLabel:"
    assert run("generate", tuned, "--prompt", "5: the sky?\nLabel:", "--raw", *common) == 0
    assert json.loads(capsys.readouterr().out) == asked
    assert run("generate", tuned, "--field", "text=5: the sky?", "--prompt", "", *common) == 0
    assert json.loads(capsys.readouterr().out) == asked
    assert run("generate", tuned, "--field", "colour=5", "--prompt", "x", *common) == 2
    assert "it has text" in capsys.readouterr().err
    assert run("generate", open_base(tuned).folder, "--field", "text=5", "--prompt", "x", *common) == 2


def test_adapters_by_command(tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("adapters", "list", tuned, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in found] == [8]
    assert run("adapters", "merge", tuned, tmp_path / "merged") == 0
    capsys.readouterr()
    common = ("--prompt", "5: the sky?", "--temperature", 0, "--max-tokens", 5, "--device", "cpu")
    assert run("generate", tuned, *common) == 0
    with_adapter = capsys.readouterr().out
    assert run("generate", tmp_path / "merged", "--prompt", "5: the sky?\nLabel:", *common[2:]) == 0
    assert capsys.readouterr().out == with_adapter
    assert run("adapters", "export", tuned, tmp_path / "exported") == 0
    assert (tmp_path / "exported" / "adapter_config.json").is_file()
    (tmp_path / "file").touch()
    for command in ("merge", "export"):
        for target in (tmp_path / "merged", tmp_path / "file"):
            assert run("adapters", command, tuned, target) == 2
            assert str(target) in capsys.readouterr().err
        assert run("adapters", command, tuned, tmp_path / "merged", "--overwrite") == 0


def test_a_changed_base_is_refused_by_every_command(
    tuned: Path, base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huggingface.save(make_base(4), base)
    commands = [
        ("generate", tuned, "--prompt", "5: the sky?", "--max-tokens", 2, "--device", "cpu"),
        ("generate", base, "--adapter", tuned, "--prompt", "5: the sky?", "--max-tokens", 2, "--device", "cpu"),
        ("adapters", "merge", tuned, tmp_path / "merged"),
        ("evaluate", tuned, "--data", data, "--answers", 0, "--batches", 1, "--device", "cpu"),
    ]
    for command in commands:
        capsys.readouterr()
        assert run(*command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "the adapter was trained on other weights" in error
        assert run(*command, "--any-base") == 0


def test_a_prompt_that_is_not_utf8(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"K\xf6ln"), encoding="utf-8", errors="strict"))
    assert run("generate", tuned, "--device", "cpu") == 2
    assert "error: standard input: not utf-8 (invalid start byte at byte 1)" in capsys.readouterr().err


# --- chats, and other tools ------------------------------------------------------------------------------------------


def test_a_chat_model_is_asked_in_chats_here_and_by_other_tools(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged model and the bare adapter in a real pipeline: the same text, token for token."""
    import transformers

    data = tmp_path / "chats.jsonl"
    records = [
        [{"role": "user", "content": f"{number}: {thing}?"}, {"role": "assistant", "content": color}]
        for number in range(60)
        for thing, color in COLORS.items()
    ]
    data.write_text("".join(json.dumps({"messages": record}) + "\n" for record in records), encoding="utf-8")
    finetune(config_for(base, data, max_steps=60), tmp_path / "run", progress=False)
    assert run("adapters", "merge", tmp_path / "run", tmp_path / "merged") == 0
    capsys.readouterr()
    question = "5: sky?"
    assert run("generate", tmp_path / "run", "--prompt", question, "--temperature", 0, "--device", "cpu", "--json") == 0
    said = json.loads(capsys.readouterr().out)[0]
    assert said["prompt"] == f"User: {question}\nAssistant:"
    ask = ("generate", tmp_path / "merged", "--prompt", question, "--temperature", 0, "--device", "cpu", "--json")
    assert run(*ask) == 0
    merged = json.loads(capsys.readouterr().out)[0]
    assert (merged["prompt"], merged["tokens"]) == (said["prompt"], said["tokens"])
    assert run(*ask, "--raw") == 0
    assert json.loads(capsys.readouterr().out)[0]["prompt"] == question
    for folder in (tmp_path / "merged", tmp_path / "run" / "adapter"):
        writer = transformers.pipeline("text-generation", model=str(folder), tokenizer=str(folder))
        answer = writer([{"role": "user", "content": question}], do_sample=False)[0]["generated_text"][-1]
        assert answer == {"role": "assistant", "content": said["text"]}
        tokens = writer(said["prompt"], do_sample=False, return_tensors=True)[0]["generated_token_ids"]
        assert tokens[-len(said["tokens"]) :] == said["tokens"]


def test_peft_has_the_same_logits(tuned: Path) -> None:
    import peft
    import transformers

    opened = open_base(tuned)
    assert opened.adapter is not None
    load_adapter(opened.model, opened.adapter)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tuned / "adapter").eval()
    tokens = torch.tensor([opened.tokenizer.encode("5: the sky?\nLabel:")])
    names = transformers.AutoTokenizer.from_pretrained(tuned / "adapter")
    assert names("5: the sky?\nLabel:")["input_ids"] == tokens[0].tolist()
    with torch.no_grad():
        assert torch.allclose(opened.model.eval()(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


# --- names of the Hugging Face Hub ------------------------------------------------------------------------------------


def in_cache(base: Path, name: str, revision: str = "abc") -> Path:
    """The base as `huggingface_hub` keeps a downloaded model."""
    cached = Path(os.environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True, exist_ok=True)
    (cached / "refs" / "main").write_text("abc")
    return shutil.copytree(base, cached / "snapshots" / revision)


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2"])
def test_a_model_in_the_hubs_cache_is_found_by_its_name(base: Path, data: Path, tmp_path: Path, name: str) -> None:
    in_cache(base, "openai-community/gpt2")
    newer = in_cache(base, "openai-community/gpt2", "zzz")
    (newer / "config.json").unlink()
    finetune(config_for(Path(name), data, max_steps=2), tmp_path / "run", progress=False)
    opened = open_base(tmp_path / "run")
    assert opened.folder.name == "abc"
    assert opened.folder.is_absolute()


def test_a_name_that_is_not_there_says_how_to_get_it(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_cache(base, "gpt2") / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert run("finetune", "--base", "gpt2", "--data", data, "--out", tmp_path / "run") == 2
    printed = capsys.readouterr().err
    assert "fetching it from the Hugging Face Hub failed (OfflineModeIsEnabled" in printed
    assert "AutoModelForCausalLM.from_pretrained('gpt2').save_pretrained('FOLDER')" in printed
    assert not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert run("finetune", "--base", "runs/nothing", "--data", data) == 2
    assert "runs/nothing: there is no such folder; name a run folder" in capsys.readouterr().err
