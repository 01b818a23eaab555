"""The whole way with bases of other families: fine-tuned, resumed, handed to peft and transformers, scored, planned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.causal import write_causal
from tests.finetuning import config_for, write_colors

from foretrain import AdapterRegistry, Sampling, TextGenerator, evaluate
from foretrain import config as configuration
from foretrain.cli.app import main
from foretrain.data.chat_templates import ChatTemplate
from foretrain.models.adapter_files import load_adapter, read_adapter
from foretrain.planning.estimate import all_parameters, estimate, pass_of, target_of
from foretrain.recipes.finetune import base_of, finetune, prepare, with_templates
from foretrain.recipes.newest import open_newest
from foretrain.recipes.open_model import open_base

pytestmark = pytest.mark.xdist_group("bases")  # what is below is made once

PROMPTS = ["7: the sky?\nLabel:", "12: the snow?\nLabel:"]
GREEDY = Sampling(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {family: write_causal(folder / family, family) for family in ("llama", "qwen2")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_colors(tmp_path_factory.mktemp("data") / "colors.jsonl")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def run(
    request: pytest.FixtureRequest, bases: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, Any]]:
    """Return a base, a run that was fine-tuned from it at the rate that `auto` found, and its summary."""
    base, folder = bases[request.param], tmp_path_factory.mktemp("runs") / request.param
    config = config_for(base, data, optimizer__learning_rate="auto", max_steps=120, checkpoint__interval=60)
    return base, folder, finetune(config, folder, progress=False)


def command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


def theirs(folder: Path) -> tuple[Any, Any]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


def written(model: Any, tokenizer: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(input_ids=given, max_new_tokens=8, do_sample=False)
        found.append(made[0, given.shape[1] :].tolist())
    return found


def test_a_run_learns_and_others_read_what_it_leaves(run: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    base, folder, summary = run
    assert summary["accuracy"] > 0.5  # by chance: 0.25
    assert len(summary["learning_rate"]["tried"]) > 1
    opened = open_base(folder)
    assert opened.adapter == folder / "adapter"
    load_adapter(opened.model, opened.adapter)
    ours = [list(made.tokens) for made in TextGenerator(opened.model, opened.tokenizer).generate(PROMPTS, GREEDY)]
    inner, tokenizer = theirs(base)
    adapted: Any = peft.PeftModel.from_pretrained(inner, str(folder / "adapter"))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, opened.model(tokens), rtol=1e-5, atol=1e-5)
    assert written(adapted, tokenizer) == ours
    command("adapters", "merge", str(folder), str(tmp_path / "merged"))
    assert written(*theirs(tmp_path / "merged")) == ours
    again = open_base(tmp_path / "merged")
    assert [list(made.tokens) for made in TextGenerator(again.model, again.tokenizer).generate(PROMPTS, GREEDY)] == ours
    assert again.chat is not None


def test_adapters_of_peft_are_read(bases: dict[str, Path], tmp_path: Path) -> None:
    inner, _ = theirs(bases["llama"])
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian")
    adapted = peft.get_peft_model(inner, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    model = open_base(bases["llama"]).model
    registry = AdapterRegistry(model)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        plain = model(tokens)
        registry.load("theirs", tmp_path / "adapter")
        with registry.serving("theirs"):
            torch.testing.assert_close(model(tokens), adapted(tokens).logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(model(tokens), plain)


def test_a_resumed_run_ends_with_the_same_bits(
    run: tuple[Path, Path, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    base, folder, _ = run
    target = tmp_path / "resumed"
    (target / "checkpoints").mkdir(parents=True)
    place = target / "checkpoints" / "step-00000060"
    shutil.copytree(folder / "checkpoints" / place.name, place)
    (target / "metrics.jsonl").touch()
    config = config_for(base, data, optimizer__learning_rate="auto", max_steps=120, checkpoint__interval=60)
    newest = open_newest(target)
    assert newest.adapter is not None
    finetune(config, target, resume=True, progress=False)
    one, other = (read_adapter(path / "adapter").tensors for path in (folder, target))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_run_made_is_scored(run: tuple[Path, Path, dict[str, Any]], data: Path, tmp_path: Path) -> None:
    base, folder, _ = run
    found = evaluate(folder, data, answers=40)
    assert found["accuracy"] > 0.5
    assert found["loss"] < evaluate(base, data, answers=0)["loss"]
    text = tmp_path / "text.txt"
    text.write_text("The sky is blue. " * 60, encoding="utf-8")
    assert evaluate(base, text)["tokens"] > 500


def test_chats_are_learned_and_asked_by_the_models_own_template(bases: dict[str, Path], tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    answer = {"role": "assistant", "content": "Yo"}
    with chats.open("w", encoding="utf-8") as file:
        for number in range(60):
            asked = {"role": "user", "content": str(number)}
            file.write(json.dumps({"messages": [asked, answer] * (1 + number % 2)}) + "\n")
    config = config_for(bases["llama"], chats, max_steps=4, evaluation__answers=0)
    base, said = base_of(config), []
    assert isinstance(base.chat, ChatTemplate)
    config = with_templates(config, said.append, base.chat)
    assert "by the model's own chat template" in said[0]
    train = prepare(config, base).train
    tokens, targets = train.fetch(torch.arange(len(train)).numpy(), 0)
    end = base.tokenizer.end_of_text
    learned = [base.tokenizer.decode(row[row >= 0].tolist()) for row in targets]
    assert set(learned) == {"Yo", "YoYo"}
    ends = (targets == end).sum(dim=1).tolist()
    assert set(ends) == {1, 2}  # an end behind each answer
    follows = tokens[:, 1:][targets[:, :-1] == end]
    assert follows.eq(end).all()  # which is also what comes next
    finetune(config, tmp_path / "run", progress=False)
    opened = open_base(tmp_path / "run")
    assert opened.format is not None
    assert opened.format.ask("Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_plans_of_other_families_hold(bases: dict[str, Path], data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("plan", "--base", str(bases["llama"]), "--device", "cpu", "--json")
    told = json.loads(capsys.readouterr().out)
    config = config_for(bases["llama"], data)
    base = base_of(config)
    inner: Any = base.model
    assert told["planned"]["parameters"] == sum(p.numel() for p in inner.parameters())
    configured = configuration.changed(config, {"lora.targets": ["q_proj", "down_proj"], "lora.rank": 4})
    target = target_of(configured, inner.shape, length=64, adapters=True)
    parameters = all_parameters(configured, target)
    from foretrain.models import lora

    lora.attach(inner, lora.LoraSettings(4, targets=("q_proj", "down_proj")), 0)
    assert parameters.elements == sum(p.numel() for p in inner.parameters() if p.requires_grad)
    assert parameters.weights == 4 * sum(p.numel() for p in inner.parameters())
    assert estimate(configured, target).peak > parameters.weights


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_block_keeps_is_what_is_planned(precision: str, bases: dict[str, Path], data: Path) -> None:
    from foretrain.models import lora

    config = config_for(bases["llama"], data, batch_size=4, lora__rank=4, precision__type=precision)
    kept = []
    for layers in (1, 2):
        base = base_of(config)
        inner: Any = base.model
        del inner.inner.model.layers[layers:]
        lora.attach(inner, lora.LoraSettings(4), 0)
        kept.append(_saved_bytes(inner.train(), precision))
    planned = pass_of(config, target_of(config, inner.shape, length=64, adapters=True))
    assert planned.kept_per_block + planned.casts_per_block == pytest.approx(kept[1] - kept[0], rel=0.02)


def _saved_bytes(model: Any, precision: str) -> int:
    """Return what autograd keeps for the backward pass, weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(4, 64, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        loss = model.loss((tokens, tokens))
    del loss
    return sum(seen.values())
