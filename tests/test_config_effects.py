"""Every setting has an effect: one check per setting, and a failure for a setting without one."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.finetuning import config_for, write_base, write_colors
from tests.hybrid.moves.test_products import adapted
from torch import nn

from foretrain.config import from_mapping, load, settings, to_mapping
from foretrain.data import tokens
from foretrain.engine import precision, schedule
from foretrain.engine.forward import Forward
from foretrain.engine.memory.host import host_bytes
from foretrain.engine.optim.muon import Muon
from foretrain.engine.ranks_limits import shares_directions
from foretrain.errors import ConfigError, DataError, DivergenceError, OutOfMemory
from foretrain.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    HealthFound,
    HealthMeasured,
    LossForecasted,
    MemoryUsed,
    Moved,
    PhaseChanged,
    Planned,
    Progress,
    Recovered,
    Tuned,
)
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.launch.group import ALONE, Group, RankPlace
from foretrain.models import gpt2, huggingface
from foretrain.models import loss as loss_module
from foretrain.motion import trajectory
from foretrain.motion.hosted import HostedTrajectory
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
from foretrain.motion.trajectory import Trajectory
from foretrain.persist.codec import take_apart
from foretrain.planning.estimate import estimate, target_of
from foretrain.recipes import finetune as tuning
from foretrain.recipes import frame, spreading
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer


@dataclass
class Bench:
    """What a check may use."""

    folder: Path
    patch: pytest.MonkeyPatch
    text_file: Path
    make_config: Callable[..., Any]
    make_model: Callable[..., Any]
    make_batch: Callable[..., Any]
    make_text: Callable[..., str]
    runs: int = 0

    def train(self, **changes: Any) -> tuple[dict[str, Any], list[Event], Path]:
        """A whole tiny run: its summary, its events, its folder."""
        self.runs += 1
        events: list[Event] = []
        out = self.folder / f"run-{self.runs}"
        config = self.config(data__path=str(self.text_file), **changes)
        return run.train(config, out, progress=False, listeners=[events.append]), events, out

    def config(self, **changes: Any) -> Any:
        return self.make_config({name.replace("__", "."): value for name, value in changes.items()})

    def trainer(self, **changes: Any) -> HybridTrainer:
        return HybridTrainer(self.make_model(), config=self.config(**changes))

    def weights_after_steps(self, count: int = 3, **changes: Any) -> torch.Tensor:
        trainer = self.trainer(**{"schedule__type": "constant", **changes})
        for number in range(count):
            trainer.step(self.make_batch(seed=number))
        return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()

    def changes_training(self, name: str, one: Any, other: Any, **base: Any) -> None:
        """Two values of a setting train to different weights, and one value twice to the same."""
        first = self.weights_after_steps(**{name: one}, **base)
        assert torch.equal(first, self.weights_after_steps(**{name: one}, **base))
        second = self.weights_after_steps(**{name: other}, **base)
        assert not torch.allclose(first, second, rtol=0, atol=1e-7)

    def rates(self, **changes: Any) -> list[float]:
        config = self.config(**{"max_steps": 20, "optimizer__learning_rate": 1.0, **changes})
        rate = schedule.build(config.schedule, config.optimizer.learning_rate, config.max_steps)
        return [rate(step) for step in range(25)]

    def corpus(self, **changes: Any) -> tokens.Corpus:
        return tokens.prepare(self.config(**{"data__path": str(self.text_file), **changes}).data)


Check = Callable[[Bench], None]
EFFECTS: dict[str, Check] = {}


def effect(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        assert name not in EFFECTS, f"two checks for {name}"
        EFFECTS[name] = check
        return check

    return register


def grouped(name: str) -> Any:
    """Checks that share runs go to one process."""
    return pytest.param(name, marks=pytest.mark.xdist_group("watched") if name.startswith("predictor.") else ())


@pytest.mark.parametrize("name", [grouped(setting.name) for setting in settings()])
def test_every_setting_has_an_effect(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text_file: Path,
    make_config: Callable[..., Any],
    make_model: Callable[..., Any],
    make_batch: Callable[..., Any],
    make_text: Callable[..., str],
) -> None:
    assert name in EFFECTS, f"{name} has no check: show here what it does, or remove the setting"
    EFFECTS[name](Bench(tmp_path, monkeypatch, text_file, make_config, make_model, make_batch, make_text))


def test_no_check_is_left_of_a_removed_setting() -> None:
    assert set(EFFECTS) == {setting.name for setting in settings()}


# --- top level -----------------------------------------------------------------------------------------------------


@effect("preset")
def _(bench: Bench) -> None:
    assert bench.trainer(preset="small").engine.rate.peak == 1e-4
    assert bench.trainer(preset="large").engine.rate.peak == 1e-5


@effect("max_steps")
def _(bench: Bench) -> None:
    assert bench.train(max_steps=2)[0]["global_step"] == 2
    assert bench.train(max_steps=4)[0]["global_step"] == 4


@effect("epochs")
def _(bench: Bench) -> None:
    values = to_mapping(bench.config(data__path=str(bench.text_file), batch_size=8))
    del values["max_steps"]
    steps = {}
    for epochs in (1, 0.5):
        folder = bench.folder / f"{epochs}"
        steps[epochs] = run.train(from_mapping({**values, "epochs": epochs}), folder, progress=False)["global_step"]
        assert load(folder / "config.toml").config.max_steps == steps[epochs]
    trained = 0.9 * len(bench.text_file.read_bytes())  # the rest is held out
    assert steps[1] == pytest.approx(trained / (8 * 16), abs=1)
    assert steps[0.5] == pytest.approx(steps[1] / 2, abs=1)


@effect("max_time")
def _(bench: Bench) -> None:
    done = []
    for seconds in (2, 5):
        trainer = bench.trainer(max_time=seconds, max_steps=1000, log__interval=1000)
        assert trainer.targets is not None
        looks = itertools.count()
        trainer.targets.clock = lambda looks=looks: next(looks) / 100  # it goes on when it is looked at
        done.append(trainer.fit([bench.make_batch()], progress=False)["global_step"])
    assert done[0] < done[1] < 1000


@effect("until_loss")
def _(bench: Bench) -> None:
    summary, events, _ = bench.train(max_steps=40, until_loss=3.9, schedule__warmup_steps=2)
    assert summary["global_step"] < 40
    assert any(isinstance(event, Planned) and event.what == "met" for event in events)
    assert bench.train(max_steps=8, until_loss=0.1)[0]["global_step"] == 8


@effect("batch_size")
def _(bench: Bench) -> None:
    assert bench.train(max_steps=2, batch_size=3)[0]["tokens"] == 2 * 3 * 16
    assert bench.train(max_steps=2, batch_size=5)[0]["tokens"] == 2 * 5 * 16


@effect("accumulation_steps")
def _(bench: Bench) -> None:
    for parts in (1, 2, 4):
        rows: list[int] = []

        def loss(model: nn.Module, batch: Any, rows: list[int] = rows) -> torch.Tensor:
            rows.append(len(batch[0]))
            return model(*batch)

        trainer = HybridTrainer(bench.make_model(), None, loss, bench.config(accumulation_steps=parts))
        trainer.step(bench.make_batch(rows=4))
        assert rows == [4 // parts] * parts


@effect("seed")
def _(bench: Bench) -> None:
    losses = [bench.train(max_steps=2, seed=seed)[0]["final_train_loss"] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    first, second = (run.build_model(bench.config(seed=seed, model__vocab_size=64)) for seed in (1, 2))
    assert not torch.equal(first.token_embedding.weight, second.token_embedding.weight)


@effect("device")
def _(bench: Bench) -> None:
    bench.patch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.trainer(device="cpu").device == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no CUDA GPU"):
        bench.trainer(device="cuda")


# --- model ---------------------------------------------------------------------------------------------------------


@effect("model.type")
def _(bench: Bench) -> None:
    shapes = [
        gpt2.shape_from_config(bench.config(model__type=name).model.model_copy(update={"layers": None, "width": None}))
        for name in ("gpt2-tiny", "gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl")
    ]
    assert [(shape.layers, shape.width) for shape in shapes] == [
        (4, 128),
        (12, 768),
        (24, 1024),
        (36, 1280),
        (48, 1600),
    ]


@effect("model.layers")
def _(bench: Bench) -> None:
    for layers in (1, 3):
        assert len(run.build_model(bench.config(model__layers=layers, model__vocab_size=64)).blocks) == layers


@effect("model.heads")
def _(bench: Bench) -> None:
    inputs = bench.make_batch()[0]
    one, two = (run.build_model(bench.config(model__heads=heads, model__vocab_size=64)).eval() for heads in (1, 4))
    assert torch.equal(one.blocks[0].attention.qkv.weight, two.blocks[0].attention.qkv.weight)
    assert not torch.allclose(one(inputs), two(inputs), atol=1e-6)


@effect("model.width")
def _(bench: Bench) -> None:
    for width in (16, 64):
        model = run.build_model(bench.config(model__width=width, model__vocab_size=64))
        assert model.hidden(bench.make_batch()[0]).shape[-1] == width


@effect("model.context")
def _(bench: Bench) -> None:
    assert bench.train(max_steps=1, model__context=8)[0]["tokens"] == 4 * 8
    short = run.build_model(bench.config(model__context=8, model__vocab_size=64))
    with pytest.raises(ConfigError, match=r"model\.context = 8"):
        short(bench.make_batch()[0])


@effect("model.vocab_size")
def _(bench: Bench) -> None:
    assert bench.train(max_steps=1)[0]["config"]["model"]["vocab_size"] == 257  # that of the byte tokenizer
    assert bench.train(max_steps=1, model__vocab_size=300)[0]["config"]["model"]["vocab_size"] == 300
    assert run.build_model(bench.config(model__vocab_size=300))(bench.make_batch()[0]).shape[-1] == 300


@effect("model.dropout")
def _(bench: Bench) -> None:
    batch = bench.make_batch()
    for dropout, same in ((0.0, True), (0.5, False)):
        model = run.build_model(bench.config(model__dropout=dropout, model__vocab_size=64)).train()
        assert torch.equal(model(*batch), model(*batch)) is same
        model.eval()
        assert torch.equal(model(*batch), model(*batch))


@effect("model.bias")
def _(bench: Bench) -> None:
    for bias in (True, False):
        model = run.build_model(bench.config(model__bias=bias, model__vocab_size=64))
        assert any(name.endswith("bias") for name, _ in model.named_parameters()) is bias


@effect("model.normalization")
def _(bench: Bench) -> None:
    for name, kind in (("layernorm", nn.LayerNorm), ("rmsnorm", nn.RMSNorm)):
        model = run.build_model(bench.config(model__normalization=name, model__vocab_size=64))
        assert [type(module) for module in model.modules() if "Norm" in type(module).__name__] == [kind] * 5


@effect("model.initialization")
def _(bench: Bench) -> None:
    weights = [
        run.build_model(bench.config(model__initialization=name, model__vocab_size=64)).blocks[0].attention.qkv.weight
        for name in ("gpt2", "xavier_uniform")
    ]
    assert weights[0].std().item() == pytest.approx(0.02, rel=0.1)
    bound = math.sqrt(6 / (32 + 96))
    assert weights[1].abs().max().item() == pytest.approx(bound, rel=0.02)


@effect("model.weights")
def _(bench: Bench) -> None:
    saved = bench.make_model(seed=77)
    huggingface.save(saved, bench.folder / "weights")
    built = run.build_model(bench.config(model__vocab_size=64, model__weights=str(bench.folder / "weights")))
    assert torch.equal(built.token_embedding.weight, saved.token_embedding.weight)
    fresh = run.build_model(bench.config(model__vocab_size=64))
    assert not torch.equal(fresh.token_embedding.weight, saved.token_embedding.weight)


@effect("model.residual")
def _(bench: Bench) -> None:
    assert bench.config(model__residual=True)
    with pytest.raises(ConfigError, match=r"model\.residual = False"):
        bench.config(model__residual=False)


# --- data ----------------------------------------------------------------------------------------------------------


@effect("data.path")
def _(bench: Bench) -> None:
    other = bench.folder / "other.txt"
    other.write_text("another text, and a longer one than that. " * 20, encoding="utf-8")
    corpora = bench.corpus(), bench.corpus(data__path=str(other))
    decoded = [corpus.tokenizer.decode(corpus.train[:12]) for corpus in corpora]
    assert decoded == [bench.text_file.read_text()[:12], "another text"]


@effect("data.tokenizer")
def _(bench: Bench) -> None:
    assert bench.corpus(data__tokenizer="byte").vocab_size == 257
    characters = set(bench.text_file.read_text())
    assert bench.corpus(data__tokenizer="char").vocab_size == len(characters) + 1


@effect("data.vocabulary")
def _(bench: Bench) -> None:
    from foretrain.data.tokenizers import train_bpe

    for name, size in (("one", 270), ("two", 285)):
        (bench.folder / name).mkdir()
        train_bpe(iter([bench.make_text(300)]), size).inner.model.save(str(bench.folder / name))
        corpus = bench.corpus(data__tokenizer="gpt2", data__vocabulary=str(bench.folder / name))
        assert corpus.vocab_size == size
    with pytest.raises(DataError, match=r"data\.vocabulary"):
        bench.corpus(data__tokenizer="gpt2", data__vocabulary=str(bench.folder))


@effect("data.bpe_size")
def _(bench: Bench) -> None:
    for size in (260, 280):
        assert bench.corpus(data__tokenizer="bpe", data__bpe_size=size).vocab_size == size


@effect("data.text_field")
def _(bench: Bench) -> None:
    path = bench.folder / "records.jsonl"
    path.write_text(json.dumps({"text": "a" * 50, "body": "b" * 50}) + "\n", encoding="utf-8")
    for field, letter in (("text", "a"), ("body", "b")):
        corpus = bench.corpus(data__path=str(path), data__text_field=field)
        assert set(corpus.tokenizer.decode(corpus.train)) == {letter}


@effect("data.held_out")
def _(bench: Bench) -> None:
    characters = len(bench.text_file.read_text())
    for share in (0.1, 0.5):
        assert len(bench.corpus(data__held_out=share).held_out) == pytest.approx(characters * share, abs=3)


@effect("data.validation_path")
def _(bench: Bench) -> None:
    other = bench.folder / "validation.txt"
    other.write_text("held out " * 30, encoding="utf-8")
    corpus = bench.corpus(data__validation_path=str(other))
    assert corpus.tokenizer.decode(corpus.held_out) == "held out " * 30
    assert corpus.tokenizer.decode(corpus.train) == bench.text_file.read_text()


@effect("data.max_documents")
def _(bench: Bench) -> None:
    path = bench.folder / "records.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " * 20}) + "\n" for n in range(9)), encoding="utf-8")
    for limit, highest in ((None, "8"), (4, "3")):
        changes = {} if limit is None else {"data__max_documents": limit}
        corpus = bench.corpus(data__path=str(path), **changes)
        assert max(corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.held_out)) == highest


@effect("data.cache")
def _(bench: Bench) -> None:
    folder = bench.folder / "my cache"
    bench.corpus(data__cache=str(folder))
    assert [path.name for path in folder.rglob("train.bin")] == ["train.bin"]


@effect("data.prefetch")
def _(bench: Bench) -> None:
    for prefetch, wanted in ((0, False), (2, True)):
        seen: list[bool] = []

        def look(event: Event, seen: list[bool] = seen) -> None:
            if isinstance(event, Progress):
                seen.append(any(thread.name == "foretrain-loader" for thread in threading.enumerate()))

        config = bench.config(data__path=str(bench.text_file), data__prefetch=prefetch, max_steps=2)
        run.train(config, bench.folder / f"prefetch-{prefetch}", progress=False, listeners=[look])
        assert seen == [wanted, wanted]


# --- optimizer -----------------------------------------------------------------------------------------------------


@effect("optimizer.type")
def _(bench: Bench) -> None:
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "muon": Muon}
    for name, kind in kinds.items():
        assert type(bench.trainer(optimizer__type=name).optimizer) is kind


@effect("optimizer.learning_rate")
def _(bench: Bench) -> None:
    bench.changes_training("optimizer__learning_rate", 1e-3, 2e-3)
    trainer = bench.trainer(optimizer__learning_rate=7e-3, schedule__type="constant")
    assert trainer.step(bench.make_batch()).learning_rate == 7e-3


@effect("optimizer.weight_decay")
def _(bench: Bench) -> None:
    models = []
    for decay in (0.0, 50.0):
        trainer = bench.trainer(optimizer__weight_decay=decay, schedule__type="constant")
        for number in range(3):
            trainer.step(bench.make_batch(seed=number))
        models.append(trainer.model)
    none, strong = (model.token_embedding.weight.norm().item() for model in models)
    assert strong < 0.9 * none
    none, strong = (model.final_norm.weight.norm().item() for model in models)
    assert strong == pytest.approx(none, rel=1e-2)  # matrices only


@effect("optimizer.beta1")
def _(bench: Bench) -> None:
    bench.changes_training("optimizer__beta1", 0.9, 0.5)


@effect("optimizer.beta2")
def _(bench: Bench) -> None:
    bench.changes_training("optimizer__beta2", 0.95, 0.5)
    _, _, out = bench.train(optimizer__beta2="auto", max_steps=1)
    assert load(out / "config.toml").config.optimizer.beta2 == 0.999  # few tokens per step


@effect("optimizer.epsilon")
def _(bench: Bench) -> None:
    bench.changes_training("optimizer__epsilon", 1e-8, 1e-2)


@effect("optimizer.momentum")
def _(bench: Bench) -> None:
    for kind in ("sgd", "muon"):
        bench.changes_training("optimizer__momentum", 0.9, 0.0, optimizer__type=kind)
        unset = bench.weights_after_steps(optimizer__type=kind)
        assert torch.equal(unset, bench.weights_after_steps(optimizer__type=kind, optimizer__momentum=0.9))


@effect("optimizer.nesterov")
def _(bench: Bench) -> None:
    for kind in ("sgd", "muon"):
        bench.changes_training("optimizer__nesterov", True, False, optimizer__type=kind)


@effect("optimizer.rest_learning_rate")
def _(bench: Bench) -> None:
    muon = {"optimizer__type": "muon", "optimizer__learning_rate": 2e-3}
    bench.changes_training("optimizer__rest_learning_rate", 2e-3, 1e-2, **muon)
    unset = bench.weights_after_steps(**muon)
    assert torch.equal(unset, bench.weights_after_steps(optimizer__rest_learning_rate=2e-3, **muon))


@effect("optimizer.rest_rate_factor")
def _(bench: Bench) -> None:
    muon = {"optimizer__type": "muon", "optimizer__learning_rate": 2e-3}
    bench.changes_training("optimizer__rest_rate_factor", 1.0, 5.0, **muon)
    multiple = bench.weights_after_steps(optimizer__rest_rate_factor=5.0, **muon)
    assert torch.equal(multiple, bench.weights_after_steps(optimizer__rest_learning_rate=5 * 2e-3, **muon))


@effect("optimizer.muon_scale")
def _(bench: Bench) -> None:
    bench.changes_training("optimizer__muon_scale", "original", "match_rms_adamw", optimizer__type="muon")


@effect("optimizer.split_fused")
def _(bench: Bench) -> None:
    bench.changes_training("optimizer__split_fused", True, False, optimizer__type="muon")
    adamw = {"optimizer__type": "adamw"}
    together = bench.weights_after_steps(optimizer__split_fused=False, **adamw)
    assert torch.equal(together, bench.weights_after_steps(**adamw))


@effect("optimizer.row_beta2")
def _(bench: Bench) -> None:
    bench.changes_training("optimizer__row_beta2", 0.0, 0.95, optimizer__type="muon")
    bench.changes_training("optimizer__row_beta2", 0.5, 0.95, optimizer__type="muon")


@effect("optimizer.state_type")
def _(bench: Bench) -> None:
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.int8}
    for kind, name in (("adamw", "exp_avg"), ("muon", "momentum_buffer")):
        for state_type, dtype in types.items():
            trainer = bench.trainer(optimizer__type=kind, optimizer__state_type=state_type)
            trainer.step(bench.make_batch())
            assert trainer.optimizer.state[trainer.model.blocks[0].feed_forward.up.weight][name].dtype is dtype


@effect("optimizer.gradient_clip_norm")
def _(bench: Bench) -> None:
    bench.changes_training("optimizer__gradient_clip_norm", 0.0, 1e-2, optimizer__type="sgd")


# --- schedule ------------------------------------------------------------------------------------------------------


@effect("schedule.type")
def _(bench: Bench) -> None:
    curves = [bench.rates(schedule__type=kind) for kind in ("wsd", "cosine", "constant", "warmup", "cyclic")]
    assert len({tuple(curve) for curve in curves}) == 5


@effect("schedule.warmup_steps")
def _(bench: Bench) -> None:
    for steps in (2, 8):
        curve = bench.rates(schedule__warmup_steps=steps)
        assert curve.index(1.0) == steps


@effect("schedule.warmup_share")
def _(bench: Bench) -> None:
    for share, steps in ((0.1, 2), (0.4, 8)):
        curve = bench.rates(schedule__warmup_share=share, schedule__warmup_steps=None)
        assert curve.index(1.0) == steps


@effect("schedule.warmup_rate")
def _(bench: Bench) -> None:
    for start in (0.05, 0.25):
        assert bench.rates(schedule__warmup_steps=4, schedule__warmup_rate=start)[0] == start


@effect("schedule.stable_steps")
def _(bench: Bench) -> None:
    for stable in (3, 9):
        curve = bench.rates(schedule__warmup_steps=2, schedule__stable_steps=stable)
        assert curve.count(1.0) == stable + 1  # the first step of the decay is still at the peak


@effect("schedule.decay_steps")
def _(bench: Bench) -> None:
    for decay in (4, 10):
        curve = bench.rates(schedule__warmup_steps=0, schedule__decay_steps=decay)
        assert curve[20 - decay] == 1.0 > curve[20 - decay + 1]
        cosine = bench.rates(schedule__type="cosine", schedule__warmup_steps=0, schedule__decay_steps=decay)
        assert cosine[decay - 1] > 0.0
        assert cosine[decay] == pytest.approx(0.0, abs=1e-12)


@effect("schedule.decay")
def _(bench: Bench) -> None:
    linear, cosine = (
        bench.rates(schedule__decay=shape, schedule__warmup_steps=0, schedule__decay_steps=20)[5]
        for shape in ("linear", "cosine")
    )
    assert linear == pytest.approx(0.75)
    assert cosine == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@effect("schedule.final_rate")
def _(bench: Bench) -> None:
    for final in (0.0, 0.1):
        assert bench.rates(schedule__final_rate=final)[-1] == final


@effect("schedule.base_rate")
def _(bench: Bench) -> None:
    for base in (0.1, 0.3):
        assert bench.rates(schedule__type="cyclic", schedule__base_rate=base)[0] == base


@effect("schedule.cycle_length")
def _(bench: Bench) -> None:
    for length in (4, 10):
        curve = bench.rates(schedule__type="cyclic", schedule__cycle_length=length)
        assert curve.index(max(curve)) == length // 2


@effect("schedule.mode")
def _(bench: Bench) -> None:
    second_peaks = [
        bench.rates(schedule__type="cyclic", schedule__cycle_length=8, schedule__mode=mode, schedule__gamma=0.9)[12]
        for mode in ("triangular", "triangular2", "exp_range")
    ]
    assert second_peaks == pytest.approx([1.0, 0.5, 0.9**12], rel=1e-4)


@effect("schedule.gamma")
def _(bench: Bench) -> None:
    for gamma in (0.9, 0.5):
        curve = bench.rates(
            schedule__type="cyclic", schedule__cycle_length=4, schedule__mode="exp_range", schedule__gamma=gamma
        )
        assert curve[2] == pytest.approx(gamma**2, rel=1e-4)


# --- precision and engine ------------------------------------------------------------------------------------------


@effect("precision.type")
def _(bench: Bench) -> None:
    dtypes = {"auto": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        seen: list[torch.dtype] = []

        def loss(model: nn.Module, batch: Any, seen: list[torch.dtype] = seen) -> torch.Tensor:
            logits = model(batch[0])
            seen.append(logits.dtype)
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())

        trainer = HybridTrainer(bench.make_model(), None, loss, bench.config(precision__type=name))
        trainer.step(bench.make_batch())
        assert seen == [dtype]
        assert all(p.dtype is torch.float32 for p in trainer.model.parameters())


@effect("precision.predict")
def _(bench: Bench) -> None:
    dtypes = {"same": torch.bfloat16, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        seen: list[torch.dtype] = []

        def loss(model: nn.Module, batch: Any, seen: list[torch.dtype] = seen) -> torch.Tensor:
            logits = model(batch[0])
            seen.append(logits.dtype)
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())

        config = bench.config(precision__type="bf16", precision__predict=name)
        trainer = HybridTrainer(bench.make_model(), None, loss, config)
        trainer.engine.probe(bench.make_batch())
        trainer.engine.probe_all([bench.make_batch()])
        trainer.step(bench.make_batch())
        trainer.evaluate([bench.make_batch()])
        assert seen == [dtype, dtype, torch.bfloat16, torch.bfloat16]


@effect("precision.narrow_residual")
def _(bench: Bench) -> None:
    for narrow, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        config = bench.config(precision__narrow_residual=narrow, precision__type="bf16", model__vocab_size=64)
        trainer = HybridTrainer(run.build_model(config), config=config)
        seen: list[torch.dtype] = []
        for block in trainer.model.blocks:
            block.register_forward_hook(lambda block, inputs, output, seen=seen: seen.append(output.dtype))
        trainer.step(bench.make_batch())
        assert seen == [dtype, dtype]


class TorchWithoutGpu:
    """torch, but what is put on a GPU lands on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, value: Any, device: Any = None) -> torch.Tensor:
        return torch.tensor(value)

    def zeros(self, *shape: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)


@effect("precision.tf32")
def _(bench: Bench) -> None:
    bench.patch.setattr(precision, "torch", TorchWithoutGpu())
    for tf32 in (True, False):
        config = bench.config(precision__tf32=tf32, precision__type="fp32").precision
        precision.Precision(config, torch.device("cuda"))
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32 is tf32
        with precision.full_precision():
            assert torch.backends.cuda.matmul.allow_tf32 is False
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
    for exact in (True, False):
        precision.Precision(bench.config(precision__type="fp32").precision, torch.device("cuda"), exact)
        assert torch.backends.cuda.matmul.allow_tf32 is not exact


@effect("precision.loss_scale")
def _(bench: Bench) -> None:
    norms: dict[float, float] = {}
    gradients: dict[float, float] = {}
    for scale in (1.0, 128.0, 1024.0):
        trainer = bench.trainer(precision__type="fp16", precision__loss_scale=scale)
        bias = trainer.model.final_norm.bias
        bias.register_hook(lambda gradient, scale=scale: gradients.update({scale: float(gradient.norm())}))
        norms[scale] = trainer.step(bench.make_batch()).gradient_norm
    for scale in (128.0, 1024.0):
        assert gradients[scale] == pytest.approx(scale * gradients[1.0], rel=1e-2)
        assert norms[scale] == pytest.approx(norms[1.0], rel=1e-2)


@effect("precision.growth_interval")
def _(bench: Bench) -> None:
    for interval, doublings in ((1, 4), (2, 2), (5, 0)):
        trainer = bench.trainer(precision__type="fp16", precision__loss_scale=8.0, precision__growth_interval=interval)
        for number in range(4):
            trainer.step(bench.make_batch(seed=number))
        assert float(trainer.engine.precision.scale) == 8.0 * 2**doublings


@effect("engine.compile")
def _(bench: Bench) -> None:
    compiled: list[dict[str, Any]] = []

    def fake_compile(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return function

    bench.patch.setattr(torch, "compile", fake_compile)
    for wanted, count in ((False, 0), ("auto", 0), (True, 1)):
        compiled.clear()
        bench.trainer(engine__compile=wanted).step(bench.make_batch())
        assert len(compiled) == count


@effect("engine.cuda_graph")
def _(bench: Bench) -> None:
    for harmless in ("auto", False):
        bench.trainer(engine__cuda_graph=harmless).step(bench.make_batch())
    with pytest.raises(ConfigError, match=r"engine\.cuda_graph = true needs a CUDA GPU"):
        bench.trainer(engine__cuda_graph=True).step(bench.make_batch())


@effect("engine.fused_loss")
def _(bench: Bench) -> None:
    calls: list[int] = []
    original = gpt2.linear_cross_entropy

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return original(*arguments)

    bench.patch.setattr(gpt2, "linear_cross_entropy", counted)
    losses = []
    for wanted, count in ((False, 0), (True, 1), ("auto", 0)):
        calls.clear()
        model = run.build_model(bench.config(engine__fused_loss=wanted, model__vocab_size=64))
        losses.append(model(*bench.make_batch()).item())
        assert len(calls) == count
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    bench.patch.setattr(gpt2, "logits_bytes", lambda hidden, vocab_size: 2**60)
    model(*bench.make_batch())  # "auto", and the logits are too large now
    assert len(calls) == 1


@effect("engine.loss_rows")
def _(bench: Bench) -> None:
    slices: list[int] = []
    original = loss_module.softmax_gradient_

    def counted(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        slices.append(len(logits))
        return original(logits, *arguments)

    bench.patch.setattr(loss_module, "softmax_gradient_", counted)
    losses = []
    for wanted, expected in (("auto", [64]), (24, [24, 24, 16])):
        slices.clear()
        config = bench.config(engine__fused_loss=True, engine__loss_rows=wanted, model__vocab_size=64)
        losses.append(run.build_model(config)(*bench.make_batch()).item())
        assert slices == expected
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def _blocks_used(bench: Bench, **changes: Any) -> list[int]:
    """Blocks that are used before each of twenty steps."""
    config = bench.config(model__layers=4, max_steps=20, hybrid__mode="off", growth__layers=2, **changes)
    trainer = HybridTrainer(bench.make_model(layers=4), config=config)
    assert trainer.growth is not None
    used = []
    for _ in range(20):
        trainer.step(bench.make_batch())
        used.append(trainer.growth.depth.layers)
    return used


@effect("growth.layers")
def _(bench: Bench) -> None:
    assert _blocks_used(bench) == [2] * 10 + [4] * 10
    plain = HybridTrainer(bench.make_model(layers=4), config=bench.config(max_steps=10))
    assert plain.growth is None


@effect("growth.at")
def _(bench: Bench) -> None:
    assert _blocks_used(bench, growth__at=0.2) == [2] * 4 + [4] * 16


@effect("growth.blocks")
def _(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"growth.blocks = 'layers' names no nn.ModuleList of blocks in GPT2"):
        _blocks_used(bench, growth__blocks="layers")


def _copies_of(bench: Bench, **changes: Any) -> list[tuple[int, int]]:
    """Steps at which copies of a run of forty steps are taken, and their lengths."""
    config = bench.config(max_steps=40, hybrid__mode="off", **changes)
    trainer = HybridTrainer(bench.make_model(), config=config, probe=[bench.make_batch()])
    for _ in range(40):
        trainer.step(bench.make_batch())
    return [(point.step, point.steps) for point in trainer.copies.points]


@effect("forecast.copies")
def _(bench: Bench) -> None:
    assert _copies_of(bench) == []
    assert _copies_of(bench, forecast__copies=[0.5, 0.25]) == [(10, 1), (20, 1)]


@effect("forecast.copy_steps")
def _(bench: Bench) -> None:
    assert _copies_of(bench, forecast__copies=[0.25], forecast__copy_steps=0.1) == [(10, 4)]


def _forecasts(bench: Bench, **changes: Any) -> list[LossForecasted]:
    """What is forecast of a run of a hundred steps whose held-out losses are known."""
    trainer, events = bench.trainer(max_steps=100, **changes), list[Event]()
    trainer.bus.subscribe(events.append)
    for step in range(2, 60, 2):
        trainer.engine.progress.global_step = step
        trainer.evaluated(2 + 2 * step**-0.5 + 0.01 * (-1) ** (step // 2))
    return [event for event in events if isinstance(event, LossForecasted)]


@effect("forecast.enabled")
def _(bench: Bench) -> None:
    assert _forecasts(bench, forecast__enabled=False) == []
    assert _forecasts(bench)[0].step >= 10


@effect("forecast.level")
def _(bench: Bench) -> None:
    narrow, wide = (_forecasts(bench, forecast__level=level)[-1] for level in (0.5, 0.9))
    assert (narrow.level, wide.level) == (0.5, 0.9)
    assert wide.high - wide.low > narrow.high - narrow.low


@effect("engine.activation_checkpointing")
def _(bench: Bench) -> None:
    calls: list[nn.Module] = []
    original = gpt2.checkpoint

    def counted(block: nn.Module, *arguments: Any, **options: Any) -> Any:
        calls.append(block)
        return original(block, *arguments, **options)

    bench.patch.setattr(gpt2, "checkpoint", counted)
    for wanted, count in ((False, 0), (0, 0), (0.25, 1), (0.5, 2), (1, 4), (True, 4)):
        calls.clear()
        config = bench.config(engine__activation_checkpointing=wanted, model__vocab_size=64, model__layers=4)
        run.build_model(config).train()(*bench.make_batch()).backward()
        assert len(calls) == count


@effect("engine.update_in_backward")
def _(bench: Bench) -> None:
    for wanted in (False, True):
        trainer = bench.trainer(engine__update_in_backward=wanted, optimizer__gradient_clip_norm=0)
        trainer.step(bench.make_batch())
        assert all((p.grad is None) is wanted for p in trainer.model.parameters())


@effect("engine.deterministic")
def _(bench: Bench) -> None:
    bench.trainer(engine__deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()
    bench.trainer(engine__deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


# --- memory --------------------------------------------------------------------------------------------------------


@effect("memory.snapshots")
def _(bench: Bench) -> None:
    used = {}
    for place in ("device", "pinned"):
        gc.collect()
        before = host_bytes()
        run = hybrid(memory__snapshots=place)
        assert run.moves
        used[place] = host_bytes() - before
        del run
    assert used["device"] == 0 < used["pinned"]


@effect("memory.basis")
def _(bench: Bench) -> None:
    for place, kind in (("device", Trajectory), ("pinned", HostedTrajectory)):
        assert type(hybrid(20, memory__basis=place).trainer.observer.trajectory) is kind


@effect("memory.offload")
def _(bench: Bench) -> None:
    for wanted in (True, False):
        parked = away_while_probing(bench.patch, memory__offload=wanted, memory__return_ahead=0)
        assert set(parked) == {wanted}
    with pytest.raises(ConfigError, match=r"engine\.cuda_graph = true and memory\.offload = true exclude each other"):
        bench.config(memory__offload=True, engine__cuda_graph=True)


@effect("memory.return_ahead")
def _(bench: Bench) -> None:
    for steps in (0, 1, 3):
        parked = away_while_probing(bench.patch, memory__offload=True, memory__return_ahead=steps)
        assert parked[: len(parked) - steps] == [True] * (len(parked) - steps)
        assert parked[len(parked) - steps :] == [False] * steps


def away_while_probing(patch: pytest.MonkeyPatch, **changes: Any) -> list[bool]:
    """For each predicted step of the first rollout, whether the optimizer's state was away from the device."""
    seen: dict[int, list[bool]] = {}
    probe = JudgedMove.probe

    def watched(move: JudgedMove, batch: Any = None) -> float:
        if batch is not None:
            engine = move.tools.engine
            away = engine.away is not None and engine.away.away
            seen.setdefault(engine.progress.backward_passes, []).append(away)
        return probe(move, batch)

    with patch.context() as inner:
        inner.setattr(JudgedMove, "probe", watched)
        hybrid(hybrid__mode="rollout", optimizer__momentum=0.5, **changes)
    first = next(iter(seen.values()))
    assert len(first) > 3
    return first


# --- evaluation, checkpoints, guard, log ---------------------------------------------------------------------------


def evaluated_steps(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, Evaluated)]


@effect("evaluation.interval")
def _(bench: Bench) -> None:
    assert evaluated_steps(bench.train(evaluation__interval=2)[1]) == [2, 4, 6]
    assert evaluated_steps(bench.train(evaluation__interval=0)[1]) == [6]
    assert evaluated_steps(bench.train(max_steps=20)[1]) == list(range(2, 21, 2))


@effect("evaluation.batches")
def _(bench: Bench) -> None:
    seen: list[int] = []
    original = Forward.evaluate

    def counted(forward: Forward, batches: Any) -> float:
        seen.append(len(batches))
        return original(forward, batches)

    bench.patch.setattr(Forward, "evaluate", counted)
    for wanted in (1, 3):
        bench.train(max_steps=1, evaluation__batches=wanted)
    assert seen == [1, 3]


@effect("evaluation.ema_decay")
def _(bench: Bench) -> None:
    changes = {"max_steps": 4, "evaluation__interval": 0}
    results = [bench.train(evaluation__ema_decay=decay, **changes) for decay in (0.0, 0.9)]
    flags = [event.averaged_weights for _, events, _ in results for event in events if isinstance(event, Evaluated)]
    assert flags == [False, True]
    assert results[0][0]["final_train_loss"] == results[1][0]["final_train_loss"]
    assert results[0][0]["final_val_loss"] != results[1][0]["final_val_loss"]


@effect("evaluation.early_stopping_patience")
def _(bench: Bench) -> None:
    for patience, steps in ((0, 6), (1, 2), (3, 4)):
        rising = iter(range(1, 100))
        bench.patch.setattr(Forward, "evaluate", lambda forward, batches, rising=rising: float(next(rising)))
        changes = {"evaluation__interval": 1, "evaluation__early_stopping_patience": patience}
        assert bench.train(**changes)[0]["global_step"] == steps


@effect("checkpoint.interval")
def _(bench: Bench) -> None:
    def saved(**changes: Any) -> list[int]:
        return [event.step for event in bench.train(**changes)[1] if isinstance(event, CheckpointSaved)]

    assert saved(checkpoint__interval=4) == [4, 6]
    assert saved(checkpoint__interval=0) == [6]
    assert saved(max_steps=10) == [2, 4, 6, 8, 10]


@effect("checkpoint.keep")
def _(bench: Bench) -> None:
    for keep in (2, 4):
        folder = bench.train(checkpoint__interval=1, checkpoint__keep=keep)[2]
        names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        assert names == [f"step-{step:08d}" for step in range(7 - keep, 7)]


@effect("checkpoint.keep_best")
def _(bench: Bench) -> None:
    for keep in (True, False):
        folder = bench.train(checkpoint__keep_best=keep)[2]
        assert len(list((folder / "checkpoints").glob("best-step-*"))) == keep


@effect("checkpoint.directions")
def _(bench: Bench) -> None:
    def saved(directions: bool) -> float:
        events = bench.train(checkpoint__directions=directions, hybrid__mode="leap")[1]
        return [event.megabytes for event in events if isinstance(event, CheckpointSaved)][-1]

    assert saved(False) < 0.6 * saved(True)


def poisoned(bench: Bench, bad_from: int, **changes: Any) -> HybridTrainer:
    """A trainer whose loss is NaN from step `bad_from` on."""
    calls = iter(range(10**6))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(*batch) * (math.nan if next(calls) >= bad_from else 1.0)

    return HybridTrainer(bench.make_model(), None, loss, bench.config(**changes))


@effect("guard.nan_check")
def _(bench: Bench) -> None:
    for check in (True, False):
        trainer = poisoned(bench, 1, guard__nan_check=check)
        for number in range(2):
            trainer.step(bench.make_batch(seed=number))
        finite = all(bool(p.isfinite().all()) for p in trainer.model.parameters())
        assert finite is check


@effect("guard.max_skipped_steps")
def _(bench: Bench) -> None:
    for limit in (2, 4):
        trainer = poisoned(bench, 3, guard__max_skipped_steps=limit, max_steps=20)
        with pytest.raises(DivergenceError, match=f"{limit} steps in a row"):
            trainer.fit([bench.make_batch()], progress=False)
        assert trainer.global_step == 3 + limit


@effect("memory.on_out_of_memory")
def _(bench: Bench) -> None:
    class Large(nn.Linear):
        """Two rows at a time are all that fits."""

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            if len(batch) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return self(batch).square().mean()

    batch = torch.ones(4, 3)
    with pytest.raises(OutOfMemory, match=r"1\.00 GiB more could not be had.*accumulation_steps = 2"):
        HybridTrainer(Large(3, 1), config=bench.config(memory__on_out_of_memory="stop")).step(batch)
    trainer = HybridTrainer(Large(3, 1), config=bench.config(memory__on_out_of_memory="retry"))
    assert trainer.step(batch).global_step == 1
    assert trainer.engine.full_step.accumulation == 2


@effect("memory.timeline")
def _(bench: Bench) -> None:
    for wanted in (True, False):
        summary, events, folder = bench.train(memory__timeline=wanted)
        told = {event.phase for event in events if isinstance(event, MemoryUsed)}
        assert ("warmup" in told) is wanted
        assert ("MemoryUsed" in (folder / "metrics.jsonl").read_text()) is wanted
        assert (summary["memory"] is not None) is wanted
        if wanted:
            assert {"warmup", "evaluation", "checkpoint"} <= set(summary["memory"])


@effect("log.interval")
def _(bench: Bench) -> None:
    for interval, steps in ((1, [1, 2, 3, 4, 5, 6]), (4, [4, 6])):
        _, events, folder = bench.train(log__interval=interval)
        assert [event.step for event in events if isinstance(event, Progress)] == steps
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["event"] == "Progress"] == steps
        losses = [event.loss for event in events if isinstance(event, Progress)]
        assert np.isfinite(losses).all()


@effect("log.console")
def _(bench: Bench) -> None:
    lines = {}
    for level in ("quiet", "normal", "verbose"):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            run.train(bench.config(data__path=str(bench.text_file), log__console=level), bench.folder / level)
        lines[level] = said.getvalue().count("\n")
        assert ("looked at" in said.getvalue()) is (level == "verbose")
    assert lines["quiet"] == 0
    assert 10 < lines["normal"] < lines["verbose"], lines


@effect("log.report")
def _(bench: Bench) -> None:
    for wanted in (True, False):
        summary, _, folder = bench.train(log__report=wanted)
        assert (folder / "report.html").is_file() is wanted
        if wanted:
            assert f'<data value="{summary["final_val_loss"]}">' in (folder / "report.html").read_text(encoding="utf-8")


@effect("log.trackers")
def _(bench: Bench) -> None:
    for wanted in ([], ["tensorboard"]):  # what all of them write is read in tests/show/trackers
        _, events, folder = bench.train(log__trackers=wanted)
        steps = sum(isinstance(event, Progress) for event in events)
        told = [path.read_bytes().count(b"train/gradient_norm") for path in (folder / "tensorboard").glob("events.*")]
        assert told == [steps] * len(wanted)


# --- prediction ----------------------------------------------------------------------------------------------------


class Bowl(nn.Module):
    """A quadratic loss of a vector. The batch is one number that multiplies it; 1 in every step makes it exact."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(20, generator=torch.Generator().manual_seed(0)))
        self.b = nn.Parameter(torch.ones(3))
        self.register_buffer("curvature", torch.logspace(-2, 0, 20))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.mean() * (0.5 * (self.curvature * self.w.square()).sum() + 0.025 * self.b.square().sum())


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (self.linear(batch[0])[:, 0] - batch[1]).square().mean()


def one(position: int) -> torch.Tensor:
    return torch.ones(1)


def random_rows(position: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + position)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, inputs @ torch.linspace(-1, 1, 6) + 0.5 * torch.randn(8, generator=generator)


class Repeating(Predictor):
    """Repeats `factor` times the last window, `far` times at the horizon of 15 steps, which is never scored."""

    name = "repeating"

    def __init__(self, factor: float = 1.0, far: float | None = None, hope: float = 1.0) -> None:
        self.factor = factor
        self.hope = hope  # predicted loss / present loss
        self.far = factor if far is None else far

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        asked = tuple(sorted({15, *horizons}))
        coefficients = np.zeros((len(asked), *situation.gram.shape[:2]))
        for index, horizon in enumerate(asked):
            coefficients[index, :, 1] = (self.far if horizon == 15 else self.factor) * horizon / situation.window
        return Forecast(asked, coefficients, np.full(len(asked), self.hope * situation.loss), np.zeros(len(asked)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        pass

    def reset(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


BASE = {
    "device": "cpu",
    "max_steps": 200,
    "schedule.type": "constant",
    "hybrid.warmup_steps": 40,
    "hybrid.full_steps": 10,
    "hybrid.max_predict_steps": 15,
    "hybrid.confidence_threshold": 0.0,
    "hybrid.secant_pairs": 0,
    "optimizer.type": "sgd",
    "optimizer.momentum": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.gradient_clip_norm": 0.0,
    "optimizer.learning_rate": 0.02,
}


@dataclass
class Hybrid:
    """A run in an own loop, and what came of it."""

    trainer: HybridTrainer
    events: list[Event]
    phases: list[str]
    losses: list[float]

    @property
    def moves(self) -> list[Moved]:
        return [event for event in self.events if isinstance(event, Moved)]

    @property
    def recovered(self) -> list[Recovered]:
        return [event for event in self.events if isinstance(event, Recovered)]

    @property
    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.trainer.model.parameters()).detach()

    @property
    def forecast(self) -> np.ndarray[Any, Any]:
        assert self.trainer.observer.forecast is not None
        return self.trainer.observer.forecast.coefficients

    def runs_of(self, phase: str) -> list[int]:
        """Lengths of all unbroken stretches of a phase."""
        return [len(list(group)) for name, group in itertools.groupby(self.phases) if name == phase]


def hybrid(
    steps: int = 200,
    model: Callable[[], nn.Module] = Bowl,
    batch: Callable[[int], Any] = one,
    predictor: Predictor | None = None,
    **changes: Any,
) -> Hybrid:
    settings = BASE | {"max_steps": steps} | {name.replace("__", "."): value for name, value in changes.items()}
    trainer = HybridTrainer(model(), config=from_mapping(settings), predictor=predictor)
    result = Hybrid(trainer, [], [], [])
    trainer.bus.subscribe(result.events.append)
    while trainer.global_step < steps or trainer.judging:
        made = trainer.step(batch(trainer.position))
        result.phases.append(made.phase)
        result.losses.append(made.loss)
    return result


def noisy(steps: int = 200, **changes: Any) -> Hybrid:
    return hybrid(steps, Regression, random_rows, **changes)


def harmful(**changes: Any) -> Hybrid:
    """The first move leads uphill."""
    return hybrid(predictor=Repeating(1.0, far=-30.0), **changes)


def biased(**changes: Any) -> Hybrid:
    """Forecasts go half as far as the weights really go: past residuals tell by how much to correct a move."""
    settings = {"hybrid__warmup_steps": 100, "hybrid__full_steps": 30, **changes}
    return hybrid(300, predictor=Repeating(0.5), **settings)


@effect("hybrid.mode")
def _(bench: Bench) -> None:
    plain, leap, rollout = (hybrid(hybrid__mode=mode) for mode in ("off", "leap", "rollout"))
    assert plain.phases == ["full"] * 200
    assert set(leap.phases) == set(rollout.phases) == {"warmup", "full", "predict", "correct"}
    assert set(leap.runs_of("predict")) == {1}
    assert max(rollout.runs_of("predict")) > 1
    for moved in (leap, rollout):  # no steps are spared for moves that are not nearly exact, but the loss is lower
        assert moved.trainer.backward_passes <= plain.trainer.backward_passes + 10
        assert moved.losses[-1] < plain.losses[-1]


@effect("hybrid.warmup_steps")
def _(bench: Bench) -> None:
    for steps in (40, 80):
        assert hybrid(hybrid__warmup_steps=steps).phases.index("full") == steps


@effect("hybrid.full_steps")
def _(bench: Bench) -> None:
    for steps in (10, 30):
        between = hybrid(hybrid__full_steps=steps).runs_of("full")[1:-1]
        assert set(between) == {steps}


@effect("hybrid.max_predict_steps")
def _(bench: Bench) -> None:
    for steps in (12, 25):
        run = hybrid(300, hybrid__max_predict_steps=steps, hybrid__mode="rollout")
        assert max(run.runs_of("predict")) == max(move.horizon for move in run.moves) == steps


@effect("hybrid.correct_steps")
def _(bench: Bench) -> None:
    for steps in (3, 7):
        assert set(hybrid(hybrid__correct_steps=steps).runs_of("correct")) == {steps}


@effect("hybrid.confidence_threshold")
def _(bench: Bench) -> None:
    first = noisy(audit__time_budget=1.0).moves[0]
    assert first.step == 70
    threshold = first.confidence
    later = noisy(audit__time_budget=1.0, hybrid__confidence_threshold=threshold).moves
    assert all(move.step > first.step and move.confidence > threshold for move in later)
    assert not noisy(audit__time_budget=1.0, hybrid__confidence_threshold=0.99).moves


@effect("hybrid.divergence_threshold")
def _(bench: Bench) -> None:
    """Of a loss right after a leap: what is tolerated is judged later."""
    for threshold, verdict in ((3.0, "refused"), (1e6, "rolled back")):
        assert harmful(hybrid__search=False, hybrid__divergence_threshold=threshold).moves[0].verdict == verdict


@effect("hybrid.correction_interval")
def _(bench: Bench) -> None:
    never, often = (biased(hybrid__mode="rollout", hybrid__correction_interval=steps) for steps in (0, 3))
    pairs = enumerate(zip(never.losses, often.losses, strict=False))
    differing = next(place for place, (one, other) in pairs if one != other)
    assert never.phases[differing - 2 : differing + 1] == ["predict"] * 3
    assert often.losses[differing] < never.losses[differing]  # half of the way was missing


@effect("hybrid.monitor_interval")
def _(bench: Bench) -> None:
    for interval in (1, 4):
        run = hybrid(hybrid__mode="rollout", hybrid__monitor_interval=interval, hybrid__max_predict_steps=12)
        place = run.phases.index("predict")
        watched = [math.isfinite(loss) for loss in run.losses[place : place + run.runs_of("predict")[0]]]
        expected = [(step + 1) % interval == 0 for step in range(len(watched))]
        assert watched == [*expected[:-1], True]  # the last always is


@effect("hybrid.window_steps")
def _(bench: Bench) -> None:
    for steps in (5, 20):
        run = hybrid(100, hybrid__window_steps=steps, hybrid__warmup_steps=200)
        assert run.trainer.observer.trajectory.windows == 100 // steps


@effect("hybrid.basis_type")
def _(bench: Bench) -> None:
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "auto": torch.float32}
    for name, dtype in types.items():
        assert hybrid(20, hybrid__basis_type=name).trainer.observer.trajectory.basis.dtype is dtype
    bench.patch.setattr(trajectory, "LARGEST_FP32_BASIS", 10)
    assert hybrid(20).trainer.observer.trajectory.basis.dtype is torch.bfloat16


@effect("hybrid.search")
def _(bench: Bench) -> None:
    for wanted, searched in (("auto", True), (True, True), (False, False)):
        assert any(move.share > 1 for move in hybrid(hybrid__search=wanted).moves) is searched
    for wanted, searched in (("auto", False), (True, True), (False, False)):
        run = noisy(audit__time_budget=1.0, hybrid__search=wanted)
        assert run.moves
        assert any(move.share > 1 for move in run.moves) is searched


@effect("hybrid.secant_pairs")
def _(bench: Bench) -> None:
    """Quasi-Newton leaps on an exact loss, with as many pairs as there are curvatures: nearly its minimum."""
    none, some = (hybrid(100, hybrid__secant_pairs=pairs) for pairs in (0, 30))
    assert torch.equal(none.weights, hybrid(100, hybrid__secant_pairs=0).weights)
    assert some.losses[-1] < 0.1 * none.losses[-1]


@effect("hybrid.secant_memory_mb")
def _(bench: Bench) -> None:
    """Without memory there are no pairs."""
    none, starved, fed = (
        hybrid(100, hybrid__secant_pairs=pairs, hybrid__secant_memory_mb=memory)
        for pairs, memory in ((0, 256.0), (30, 0.0), (30, 1.0))
    )
    assert torch.equal(none.weights, starved.weights)
    assert not torch.allclose(none.weights, fed.weights, rtol=0, atol=1e-3)


def fitted(points: int = 40, width: int = 4, **changes: Any) -> Hybrid:
    """A line is fitted to residuals of known form."""
    inputs = torch.linspace(-1, 1, points).view(-1, 1)
    settings = BASE | {"max_steps": 60} | {name.replace("__", "."): value for name, value in changes.items()}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    trainer = HybridTrainer(model, config=from_mapping(settings), residuals=lambda model, x: model(x) - x.square())
    result = Hybrid(trainer, [], [], [])
    while trainer.global_step < 60 or trainer.judging:
        result.losses.append(trainer.step(inputs).loss)
    return result


@effect("hybrid.linear_rows")
def _(bench: Bench) -> None:
    """Leaps of the linearised run, by few rows of the Jacobian or by many."""
    none, few, many = (fitted(300, 32, hybrid__linear_rows=rows) for rows in (0, 10, 300))
    assert max(few.losses[-1], many.losses[-1]) < 0.1 * none.losses[-1]
    assert not torch.equal(few.weights, many.weights)


@effect("hybrid.linear_memory_mb")
def _(bench: Bench) -> None:
    """Without memory for rows there are no such leaps."""
    none, starved = fitted(hybrid__linear_rows=0), fitted(hybrid__linear_memory_mb=0.001)
    assert torch.equal(none.weights, starved.weights)
    assert not torch.equal(none.weights, fitted().weights)


def swinging(position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is to be learned turns round every 24 steps: more than a linear forecast can know."""
    inputs, targets = random_rows(position)
    return inputs, targets * (1.0 if position // 24 % 2 else -1.0)


def watched(**changes: Any) -> Hybrid:
    """A run that only forecasts, of enough windows for a network to be listened to."""
    settings = {"hybrid__warmup_steps": 2000, "hybrid__window_steps": 3, "audit__time_budget": 1.0, **changes}
    return hybrid(480, Regression, swinging, **settings)


WATCHED: dict[str, Hybrid] = {}


def watched_once(**changes: Any) -> Hybrid:
    """The same, but of each configuration only one: many checks begin with the same one."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    key = json.dumps(to_mapping(from_mapping(named)), sort_keys=True)
    if key not in WATCHED:
        WATCHED[key] = watched(**changes)
    return WATCHED[key]


def changes_forecasts(name: str, first: Any, second: Any, **base: Any) -> tuple[Hybrid, Hybrid]:
    """Two values of a setting lead to different forecasts of one and the same motion."""
    one, other = (watched_once(**{**base, name: value}) for value in (first, second))
    assert torch.equal(one.weights, other.weights)  # a forecast alone changes nothing
    assert not np.allclose(one.forecast, other.forecast, rtol=1e-6, atol=0)
    return one, other


def size(run: Hybrid) -> int:
    """Numbers that the predictor consists of."""
    state = take_apart(run.trainer.observer.predictor.state_dict())
    return sum(tensor.numel() for tensor in state.tensors.values())


SMALL = {
    "predictor__deterministic_dim": 11,
    "predictor__stochastic_dim": 3,
    "predictor__num_categoricals": 5,
    "predictor__ensemble_size": 2,
    "predictor__hidden_dims": [13],
}


@effect("hybrid.space")
def _(bench: Bench) -> None:
    ends = [adapted(1, **{"hybrid.space": space}).model.lora_b for space in ("adapter", "product", "adapter")]
    assert torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], ends[1])


@effect("predictor.type")
def _(bench: Bench) -> None:
    names = ("momentum", "linear", "mlp", "rssm")
    runs = [watched_once(predictor__type=name, **SMALL) for name in names]
    assert [run.trainer.summary()["predictor"] for run in runs] == list(names)
    assert len({run.forecast.tobytes() for run in runs}) == 4
    again = watched(predictor__type="rssm", **SMALL)
    assert np.array_equal(runs[-1].forecast, again.forecast)


@effect("predictor.beta")
def _(bench: Bench) -> None:
    runs = [hybrid(100, hybrid__mode="off", predictor__beta=beta) for beta in (0.0, 0.0, 0.9)]
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert runs[0].losses[:40] == runs[2].losses[:40]  # off during the warm-up
    assert not torch.allclose(runs[0].weights, runs[2].weights, rtol=0, atol=1e-5)


@effect("predictor.gamma")
def _(bench: Bench) -> None:
    runs = [hybrid(100, hybrid__mode="off", predictor__beta=0.9, predictor__gamma=gamma) for gamma in (0.99, 0.9)]
    assert not torch.allclose(runs[0].weights, runs[1].weights, rtol=0, atol=1e-5)


@effect("predictor.stride")
def _(bench: Bench) -> None:
    runs = [hybrid(100, hybrid__mode="off", predictor__beta=0.9, predictor__stride=stride) for stride in (1, 10)]
    assert not torch.allclose(runs[0].weights, runs[1].weights, rtol=0, atol=1e-5)


@effect("predictor.l2")
def _(bench: Bench) -> None:
    changes_forecasts("predictor__l2", 1.0, 10.0)


@effect("predictor.forgetting")
def _(bench: Bench) -> None:
    changes_forecasts("predictor__forgetting", 0.97, 0.5)


@effect("predictor.hidden_dims")
def _(bench: Bench) -> None:
    first, second = changes_forecasts("predictor__hidden_dims", [13], [17, 9], predictor__type="mlp")
    assert size(first) < size(second)


RSSM = SMALL | {"predictor__type": "rssm"}


@effect("predictor.deterministic_dim")
def _(bench: Bench) -> None:
    name = "predictor__deterministic_dim"
    first, second = changes_forecasts(name, 11, 37, **RSSM)
    assert size(first) < size(second)


@effect("predictor.stochastic_dim")
def _(bench: Bench) -> None:
    name = "predictor__stochastic_dim"
    first, second = changes_forecasts(name, 3, 7, **RSSM)
    assert size(first) < size(second)


@effect("predictor.num_categoricals")
def _(bench: Bench) -> None:
    name = "predictor__num_categoricals"
    first, second = changes_forecasts(name, 5, 19, **RSSM)
    assert size(first) < size(second)


@effect("predictor.ensemble_size")
def _(bench: Bench) -> None:
    name = "predictor__ensemble_size"
    for kind in ("mlp", "rssm"):
        single, several = changes_forecasts(name, 1, 4, **SMALL, predictor__type=kind)
        assert size(single) < size(several)
        assert single.trainer.observer.forecast.disagreement == 0


@effect("predictor.bptt_steps")
def _(bench: Bench) -> None:
    changes_forecasts("predictor__bptt_steps", 1, 4, **RSSM)


@effect("predictor.learning_rate")
def _(bench: Bench) -> None:
    for kind in ("mlp", "rssm"):
        changes_forecasts("predictor__learning_rate", 1e-3, 1e-2, **{**SMALL, "predictor__type": kind})


@effect("correction.residuals")
def _(bench: Bench) -> None:
    for count in (3, 6):
        state = hybrid(correction__residuals=count, hybrid__warmup_steps=200).trainer.state_dict()
        assert len(state["hybrid"]["policy"]["correction"]["ring"][1]) == count


@effect("correction.similarity")
def _(bench: Bench) -> None:
    assert biased(correction__similarity=-1.0).trainer.summary()["corrections"]["applied"] > 0
    assert biased(correction__similarity=0.999999).trainer.summary()["corrections"]["applied"] == 0


@effect("correction.neighbors")
def _(bench: Bench) -> None:
    runs = [biased(correction__neighbors=count, correction__similarity=-1.0) for count in (1, 1, 5)]
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert not torch.equal(runs[0].weights, runs[2].weights)


@effect("correction.limit")
def _(bench: Bench) -> None:
    settings = {"hybrid__mode": "rollout", "hybrid__correction_interval": 1, "correction__similarity": -1.0}
    falls = []
    for limit in (0.0, 0.2, 1.0):
        run = biased(correction__limit=limit, **settings)
        place = run.phases.index("predict")
        falls.append(run.losses[place - 1] - run.losses[place + 5])
    assert 0 < falls[0] < falls[1] < falls[2]
    assert biased(correction__limit=0.0).trainer.summary()["corrections"]["applied"] == 0


@effect("audit.time_budget")
def _(bench: Bench) -> None:
    assert not noisy(audit__time_budget=0.0).moves
    assert noisy(audit__time_budget=0.5).moves[0].audited


@effect("audit.steps")
def _(bench: Bench) -> None:
    for steps in (8, 14):
        run = noisy(audit__time_budget=1.0, audit__steps=steps)
        assert run.moves[0].audited
        assert run.runs_of("correct")[0] == steps


# --- guard ---------------------------------------------------------------------------------------------------------


def disturbed(factors: Sequence[float], start: int = 80, steps: int = 120, **changes: Any) -> Hybrid:
    """A plain quadratic run whose losses are multiplied by `factors` from a step on."""

    def batch(position: int) -> torch.Tensor:
        place = position - start
        return torch.full((1,), factors[place] if 0 <= place < len(factors) else 1.0)

    return hybrid(steps, batch=batch, hybrid__warmup_steps=1000, optimizer__learning_rate=1e-4, **changes)


@effect("guard.explosion_factor")
def _(bench: Bench) -> None:
    for factor, expected in ((10.0, ["force_full"]), (50.0, [])):
        recovered = disturbed([20.0] * 3, guard__explosion_factor=factor).recovered
        assert [event.action for event in recovered if "learning rate" in event.text] == expected


class Steep(Bowl):
    """The batch multiplies the gradient, not the loss."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().loss(torch.ones(1))
        return loss.detach() + batch.mean() * (loss - loss.detach())


@effect("guard.vanishing_factor")
def _(bench: Bench) -> None:
    vanished = [0.001] * 5
    noticed = disturbed(vanished, model=Steep).recovered
    assert noticed
    assert all("the gradient norm" in event.text for event in noticed)
    assert not disturbed(vanished, model=Steep, guard__vanishing_factor=0.0001).recovered


@effect("guard.prediction_error")
def _(bench: Bench) -> None:
    """A tenth of the loss is promised: a move is cut short, or goes on to its horizon."""
    strict, mild = (
        hybrid(predictor=Repeating(hope=0.1), hybrid__mode="rollout", guard__prediction_error=limit)
        for limit in (0.2, 1e6)
    )
    assert strict.runs_of("predict")[0] < mild.runs_of("predict")[0] == mild.moves[0].horizon
    reasons = [event.reason for event in strict.events if isinstance(event, PhaseChanged)]
    assert any("above its prediction, more than 20%" in reason for reason in reasons)


@effect("guard.oscillation_changes")
def _(bench: Bench) -> None:
    """Nine changes of direction out of ten, for a long time: 3.9 more in 10 steps than noise has."""
    up_and_down = [1.0 + 0.2 * (-1) ** (step + step // 9) for step in range(100)]
    for limit, noticed in ((3.0, True), (4.9, False)):
        run = disturbed(up_and_down, steps=180, guard__oscillation_changes=limit)
        assert any("goes up and down" in event.text for event in run.recovered) is noticed


@effect("guard.patience")
def _(bench: Bench) -> None:
    for patience in (2, 4):
        noticed = disturbed([20.0] * patience, model=Steep, guard__patience=patience).recovered
        assert [f"{patience} warnings in a row" in event.text for event in noticed] == [True]
        assert not disturbed([20.0] * (patience - 1), model=Steep, guard__patience=patience).recovered


@effect("guard.max_rollbacks")
def _(bench: Bench) -> None:
    for most in (0, 2):
        calls = iter(range(10**6))

        def loss(model: nn.Module, batch: Any, calls: Any = calls) -> torch.Tensor:
            return model.loss(batch) * (math.nan if next(calls) >= 60 else 1.0)

        settings = from_mapping(BASE | {"guard.max_rollbacks": most, "hybrid.warmup_steps": 1000})
        trainer = HybridTrainer(Bowl(), None, loss, settings)
        events: list[Event] = []
        trainer.bus.subscribe(events.append)
        with pytest.raises(DivergenceError, match=f"in spite of {most} rollbacks"):
            [trainer.step(one(0)) for _ in range(1000)]
        assert [e.action for e in events if isinstance(e, Recovered)].count("roll_back") == most


@effect("guard.auto_tune")
def _(bench: Bench) -> None:
    for tuned, factor in ((False, 1.0), (True, 2.0)):
        run = hybrid(560, hybrid__warmup_steps=1000, optimizer__learning_rate=1e-7, guard__auto_tune=tuned)
        assert run.trainer.engine.rate_factor == factor
        assert run.trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-7 * factor)
        assert [event.ailment for event in run.events if isinstance(event, HealthFound)] == [
            "plateau"
        ]  # in either case
        assert [dict(event.change) for event in run.events if isinstance(event, Tuned)] == [
            {"optimizer.learning_rate": pytest.approx(2e-7)}
        ][:tuned]


@effect("health.interval")
def _(bench: Bench) -> None:
    for interval, steps in ((0, []), (10, [0, 10, 20]), (25, [0, 25])):
        looks = [event for event in noisy(30, health__interval=interval).events if isinstance(event, HealthMeasured)]
        assert [event.step for event in looks] == steps


# --- fine-tuning -----------------------------------------------------------------------------------------------------


@dataclass
class Tuning:
    """A short fine-tuning run, as far as a check needs it."""

    bench: Bench

    def parts(self, **changes: Any) -> tuple[tuning.Base, tuning.ExampleSplit, HybridTrainer]:
        config = config_for(write_base(self.bench.folder / "base"), self.colors(), **changes)
        opened = tuning.open_base(config.model.weights)
        split = tuning.prepare(config, opened)
        return opened, split, tuning.build_trainer(config, opened.model, split)

    def colors(self) -> Path:
        return write_colors(self.bench.folder / "colors.jsonl")

    def weights(self, **changes: Any) -> torch.Tensor:
        _, split, trainer = self.parts(**changes)
        batch = split.train.fetch(np.arange(8), 0)
        for _ in range(3):
            trainer.step(batch)
        return nn.utils.parameters_to_vector(p for p in trainer.model.parameters() if p.requires_grad).detach()

    def changes_training(self, name: str, one: Any, other: Any, **base: Any) -> None:
        first, again, second = (self.weights(**{name: value}, **base) for value in (one, one, other))
        assert torch.equal(first, again)
        assert not torch.allclose(first, second, rtol=0, atol=1e-7)


@effect("lora.rank")
def _(bench: Bench) -> None:
    sizes = [len(Tuning(bench).weights(lora__rank=rank)) for rank in (2, 4)]
    assert sizes[1] == 2 * sizes[0]


@effect("lora.alpha")
def _(bench: Bench) -> None:
    Tuning(bench).changes_training("lora__alpha", 4.0, 32.0)


@effect("lora.dropout")
def _(bench: Bench) -> None:
    Tuning(bench).changes_training("lora__dropout", 0.0, 0.5)


@effect("lora.rank_stabilized")
def _(bench: Bench) -> None:
    Tuning(bench).changes_training("lora__rank_stabilized", False, True)


@effect("lora.targets")
def _(bench: Bench) -> None:
    names = {
        name.split(".")[-2]
        for name, p in Tuning(bench).parts(lora__targets=["qkv", "*.down"])[2].model.named_parameters()
        if p.requires_grad
    }
    assert names == {"qkv", "down"}


@effect("lora.bias")
def _(bench: Bench) -> None:
    counts = [
        len(Tuning(bench).weights(lora__bias=bias, lora__targets=["up"])) for bias in ("none", "lora_only", "all")
    ]
    assert counts[0] < counts[1] < counts[2]


@effect("data.prompt")
def _(bench: Bench) -> None:
    prompts = {
        Tuning(bench).parts(data__prompt=prompt)[1].questions[0].prompt[:3] for prompt in ("", "Q: {text}", "A? {text}")
    }
    assert len(prompts) == 3


@effect("data.answer")
def _(bench: Bench) -> None:
    split = Tuning(bench).parts(data__answer="={label}!")[1]
    assert all(question.answer[0] + question.answer[-1] == "=!" for question in split.questions)


@effect("data.max_length")
def _(bench: Bench) -> None:
    assert [Tuning(bench).parts(data__max_length=length)[1].train.length for length in (16, None)] == [16, 32]


@effect("evaluation.answers")
def _(bench: Bench) -> None:
    opened, split, _ = Tuning(bench).parts()
    for wanted in (0, 3):
        config = config_for(Path("base"), Path("data"), evaluation__answers=wanted)
        assert tuning.answer(opened, split, config).get("answered", 0) == wanted


@effect("evaluation.final_answer")
def _(bench: Bench) -> None:
    opened, split, _ = Tuning(bench).parts(data__answer=" #### {label}")
    for mark, figure in (("", "accuracy"), ("####", "exact_match")):
        config = config_for(Path("base"), Path("data"), evaluation__answers=2, evaluation__final_answer=mark)
        assert figure in tuning.answer(opened, split, config)
    with pytest.raises(ConfigError, match="do not hold it"):
        Tuning(bench).parts(evaluation__final_answer="####")


@effect("hybrid.probe_examples")
def _(bench: Bench) -> None:
    for wanted in (0, 5):
        _, split, trainer = Tuning(bench).parts(hybrid__probe_examples=wanted)
        assert (0 if split.probe is None else len(split.probe)) == wanted
        assert trainer.policy is not None
        assert trainer.policy.appraiser.judged_on_probes == bool(wanted)


# --- memory --------------------------------------------------------------------------------------------------------


@effect("memory.budget")
def _(bench: Bench) -> None:
    plain = {"hybrid__mode": "off", "optimizer__type": "adamw", "model__vocab_size": 257}
    config = bench.config(**plain)
    needed = estimate(config, target_of(config, gpt2.shape_from_config(config.model))).needed
    _, _, folder = bench.train(max_steps=1, memory__budget=f"{0.9 * needed / 1000:.3f}KB", **plain)
    written = load(folder / "config.toml").config
    assert (written.accumulation_steps, written.engine, written.optimizer) != (1, config.engine, config.optimizer)


# --- several processes -----------------------------------------------------------------------------------------------


def _spreading(bench: Bench, ranks: int, **changes: Any) -> Any:
    config = bench.config(model__vocab_size=256, batch_size=24, **changes)
    target = target_of(config, gpt2.shape_from_config(config.model))
    return spreading.choose(config, target, Group(RankPlace(0, ranks)))


@effect("distributed.type")
def _(bench: Bench) -> None:
    chosen = {kind: _spreading(bench, 4, distributed__type=kind).kind for kind in ("auto", "ddp", "fsdp2")}
    assert chosen == {"auto": "ddp", "ddp": "ddp", "fsdp2": "fsdp2"}
    with pytest.raises(ConfigError, match=r"distributed\.type = 'off', and 4 processes were started"):
        _spreading(bench, 4, distributed__type="off")
    bench.patch.setattr(spreading, "_memory", lambda config: 10**6)
    assert str(_spreading(bench, 4)).startswith("4 ranks, each with a shard of the weights (FSDP2): all of it would")
    bench.patch.setattr(spreading, "_memory", lambda config: 10**12)
    assert str(_spreading(bench, 4)).startswith("4 ranks, each with all weights (DDP): ")


@effect("distributed.shard")
def _(bench: Bench) -> None:
    found = _spreading(bench, 6, distributed__shard=2)
    assert (found.kind, found.replicate, found.shard) == ("fsdp2", 3, 2)
    with pytest.raises(ConfigError, match="do not make 6 ranks"):
        _spreading(bench, 6, distributed__shard=4)
    with pytest.raises(ConfigError, match="'ddp' has none"):
        _spreading(bench, 6, distributed__shard=2, distributed__type="ddp")


@effect("distributed.replicate")
def _(bench: Bench) -> None:
    found = _spreading(bench, 6, distributed__replicate=2)
    assert (found.kind, found.replicate, found.shard) == ("fsdp2", 2, 3)
    assert "FSDP2, 2 times 3" in str(found)


@effect("distributed.basis")
def _(bench: Bench) -> None:
    """What ranks keep then: tests/motion/test_shared.py."""

    def shares(basis: str, numbers: int, ranks: int = 2) -> bool:
        config = from_mapping({"distributed.basis": basis})
        full_step = SimpleNamespace(spread=False, parameters=[torch.empty(numbers, device="meta")])
        engine: Any = SimpleNamespace(config=config, world=SimpleNamespace(size=ranks), full_step=full_step)
        return shares_directions(engine)

    few, many = 1000, 40_000_000
    assert [shares("auto", few), shares("auto", many), shares("auto", many, ranks=1)] == [False, True, False]
    assert [shares("sharded", few), shares("replicated", many)] == [True, False]


@effect("distributed.timeout_seconds")
def _(bench: Bench) -> None:
    told: list[float] = []

    @contextlib.contextmanager
    def joined(device: str, timeout_seconds: float) -> Any:
        told.append(timeout_seconds)
        yield ALONE

    bench.patch.setattr(frame, "joined", joined)
    bench.train(distributed__timeout_seconds=7)
    assert told == [7.0]
