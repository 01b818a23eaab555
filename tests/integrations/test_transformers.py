"""The callback inside of the real Trainer of transformers, and of TRL's with an adapter of PEFT."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from foretrain.errors import ConfigError
from foretrain.events import Evaluated, Moved, Notice, Progress, Resumed
from foretrain.integrations import transformers as integration
from foretrain.integrations.transformers import HybridCallback

from .hosts import LONGEST, WORDS, Heard, RisingLoss, examples, settings, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the hosts' own
    pytest.mark.xdist_group("hosts"),  # they take seconds to import
]
STEPS = 40
TRAIN, HELD_OUT = examples(200), examples(24, seed=2)


def model() -> GPT2LMHeadModel:
    set_seed(7)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LONGEST, n_embd=16, n_layer=1, n_head=2))


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "save_steps": 20,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "seed": 7,
        "logging_steps": 1000,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **more,
    }


def train(folder: Path, callback: HybridCallback | None, resume: bool | str = False, **more: Any) -> Trainer:
    trainer = Trainer(
        model(), TrainingArguments(**arguments(folder, **more)), train_dataset=TRAIN, eval_dataset=HELD_OUT
    )
    if callback is not None:
        assert callback.bind(trainer) is callback
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def moves(callback: HybridCallback) -> dict[str, int]:
    assert callback.run is not None
    found: dict[str, int] = callback.run.summary()["moves"]
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return weights(train(tmp_path_factory.mktemp("plain"), None).model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run with leaps in one go, with its log and its checkpoints."""
    folder, heard = tmp_path_factory.mktemp("whole"), Heard()
    callback = HybridCallback(probe=16, config=settings(), bus=heard.bus, out=folder / "watched")
    trainer = train(folder, callback)
    return SimpleNamespace(folder=folder, heard=heard, callback=callback, weights=weights(trainer.model))


def test_idle_is_no_callback_bit_for_bit(tmp_path: Path, plain: torch.Tensor) -> None:
    callback = HybridCallback(probe=16, config=settings(hybrid__mode="off"))
    assert torch.equal(weights(train(tmp_path, callback, save_strategy="no").model), plain)
    assert callback.run is not None
    assert callback.run.engine.progress.global_step == STEPS


def test_a_probe_that_always_objects_leaves_the_bits_of_no_callback(
    tmp_path: Path, plain: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "_loss", RisingLoss())
    callback = HybridCallback(probe=16, config=settings())
    assert torch.equal(weights(train(tmp_path, callback, save_strategy="no").model), plain)
    assert moves(callback)["refused"] >= 1
    assert moves(callback)["kept"] + moves(callback)["shrunk"] == 0


def test_leaps_are_kept_and_told(whole: SimpleNamespace, plain: torch.Tensor) -> None:
    assert moves(whole.callback)["kept"] >= 1
    assert not torch.equal(whole.weights, plain)
    assert all(moved.loss < moved.anchor for moved in whole.heard.of(Moved) if moved.verdict == "kept")
    told = whole.heard.of(Progress)
    assert [event.step for event in told] == [10, 20, 30, 40]
    assert 0 < told[0].loss < 1.2 * torch.tensor(float(WORDS)).log(), "the mean over the parts of a step, not their sum"
    assert {path.name for path in (whole.folder / "watched").iterdir()} >= {"metrics.jsonl", "summary.json"}
    assert "GPT2LMHeadModel" in (whole.folder / "watched" / "report.html").read_text()


def test_half_resumed_and_half_is_the_whole(whole: SimpleNamespace, tmp_path: Path) -> None:
    assert {path.suffix for path in (whole.folder / "checkpoint-20" / "foretrain").iterdir()} == {
        ".json",
        ".safetensors",
    }
    shutil.copytree(whole.folder / "checkpoint-20", tmp_path / "checkpoint-20")
    heard = Heard()
    callback = HybridCallback(probe=16, config=settings(), bus=heard.bus)
    resumed = train(tmp_path, callback, resume=True)
    assert torch.equal(weights(resumed.model), whole.weights)
    assert moves(callback) == moves(whole.callback)
    assert [event.step for event in heard.of(Resumed)] == [20]


def test_a_checkpoint_without_our_part_goes_on_and_is_watched_anew(whole: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copytree(whole.folder / "checkpoint-20", tmp_path / "elsewhere" / "checkpoint-20")
    checkpoint = tmp_path / "elsewhere" / "checkpoint-20"
    shutil.rmtree(checkpoint / "foretrain")
    heard = Heard()
    callback = HybridCallback(probe=16, config=settings(), bus=heard.bus, resume_from=checkpoint)
    train(tmp_path, callback, resume=str(checkpoint), eval_strategy="steps", eval_steps=10)
    assert [event.message for event in heard.of(Notice)] == [
        f"{checkpoint / 'foretrain'} is not there: the run goes on, and is watched anew"
    ]
    assert callback.run is not None
    assert callback.run.engine.progress.global_step == STEPS
    assert [event.step for event in heard.of(Evaluated)] == [40], "the trainer's own evaluations, and no others"


def test_what_cannot_work_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def trainer(**options: Any) -> Trainer:
        return Trainer(model(), TrainingArguments(**arguments(tmp_path)), train_dataset=TRAIN, **options)

    for name, what in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        host = trainer(eval_dataset=HELD_OUT)
        assert not getattr(host, name), "the trainer's own name for it"
        setattr(host, name, True)
        with pytest.raises(ConfigError, match=f"does not work with {what}, which keeps weights where"):
            HybridCallback().bind(host)
    with pytest.raises(ConfigError, match="probe = 64 takes so many examples of the trainer's eval_dataset"):
        HybridCallback().bind(trainer())
    unbound = trainer(callbacks=[HybridCallback(probe=4)])
    with pytest.raises(ConfigError, match=r"add it with HybridCallback\(...\).bind\(trainer\)"):
        unbound.train()


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    end = "<end>"
    vocabulary = {end: 0, **{str(number): number for number in range(1, WORDS)}}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=end))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=end, pad_token=end)


def test_trl_with_an_adapter_is_exact_idle_and_resumed_and_keeps_leaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    texts = [{"text": " ".join(map(str, row["input_ids"].tolist()))} for row in (*TRAIN, *HELD_OUT)]
    train_data, held_out = Dataset.from_list(texts[: len(TRAIN)]), Dataset.from_list(texts[len(TRAIN) :])
    found = {}
    for kind in ("plain", "idle", "leaps", "resumed", "objecting"):
        args = SFTConfig(**arguments(tmp_path / kind, learning_rate=1e-3, max_length=LONGEST))
        lora = LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        host = SFTTrainer(
            model(),
            args=args,
            train_dataset=train_data,
            eval_dataset=held_out,
            processing_class=tokenizer(),
            peft_config=lora,
        )
        callback = HybridCallback(probe=16, config=settings(**({"hybrid__mode": "off"} if kind == "idle" else {})))
        if kind != "plain":
            callback.bind(host)
        if kind == "resumed":
            shutil.copytree(tmp_path / "leaps" / "checkpoint-20", tmp_path / kind / "checkpoint-20")
        if kind == "objecting":
            monkeypatch.setattr(integration, "_loss", RisingLoss())
        host.train(resume_from_checkpoint=kind == "resumed" or None)
        found[kind] = (weights(host.model), callback, dict(host._metrics.get("eval", {})))
    assert torch.equal(found["idle"][0], found["plain"][0])
    assert torch.equal(found["objecting"][0], found["plain"][0])
    assert moves(found["objecting"][1])["refused"] >= 1
    assert not torch.equal(found["leaps"][0], found["plain"][0])
    assert moves(found["leaps"][1])["kept"] >= 1
    assert torch.equal(found["resumed"][0], found["leaps"][0])
    assert all(metrics == {} for _, _, metrics in found.values()), "a probe is no evaluation of the trainer's"
