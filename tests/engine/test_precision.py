"""Devices, number formats, and the loss scale of fp16."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.planning.observed import Live
from torch import nn

from foretrain.config import PrecisionConfig, from_mapping
from foretrain.engine import precision
from foretrain.engine.precision import Precision, choose_device, choose_precision, cpu_has_bf16_products
from foretrain.errors import ConfigError
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer

Make = Callable[..., Any]
CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)


# --- devices -------------------------------------------------------------------------------------------------------


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto").type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"


@pytest.mark.parametrize(
    ("name", "words"),
    [("cuda", "sees no CUDA GPU"), ("cuda:1", "sees no CUDA GPU"), ("mps", "no Apple GPU"), ("gpu", "is not a device")],
)
def test_an_absent_device_is_an_error_and_never_a_fallback(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        choose_device(name)


def test_a_gpu_number_beyond_the_last_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="only 2 CUDA GPUs"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("machine", "one_dnn", "instructions", "wanted"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),  # AVX-512 without bf16: oneDNN takes it and emulates
        ("x86_64", False, True, False),  # oneDNN was told not to use it
        ("x86_64", False, False, False),
        ("aarch64", True, False, True),
        ("arm64", False, False, False),
    ],
)
def test_bf16_products_in_hardware(
    machine: str, one_dnn: bool, instructions: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: one_dnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    assert cpu_has_bf16_products.__wrapped__() is wanted


def test_without_one_dnn_there_are_no_bf16_products_in_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu_has_bf16_products.__wrapped__() is False


def test_auto_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_precision("auto", CPU) == "fp32"
    assert choose_precision("bf16", CPU) == "bf16"
    for supported, name in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported: supported)
        assert choose_precision("auto", torch.device("cuda")) == name


def test_residuals_are_not_rounded_where_it_is_left_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "choose_precision", lambda name, device: "bf16" if name == "auto" else name)
    model = nn.Linear(1, 1)
    residuals = lambda model, x: model(x) - x  # noqa: E731
    for given, wanted in (({"residuals": residuals}, "fp32"), ({"loss_fn": nn.MSELoss()}, "bf16")):
        trainer = HybridTrainer(model, config=from_mapping({"device": "cpu"}), **given)
        assert trainer.engine.precision.name == wanted
    config = from_mapping({"device": "cpu", "precision.type": "bf16"})
    assert HybridTrainer(model, config=config, residuals=residuals).engine.precision.name == "bf16"


def test_full_precision_beside_the_newer_name_of_the_setting() -> None:
    code = (
        "import torch; from foretrain.engine.precision import full_precision; m = torch.backends.cuda.matmul\n"
        "m.fp32_precision = 'tf32'\nwith full_precision(): assert m.fp32_precision == 'ieee'\n"
        "assert m.fp32_precision == 'tf32'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # the setting is one of the whole process


# --- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_have_the_format_asked_for(name: str, dtype: torch.dtype) -> None:
    precision = Precision(PrecisionConfig(type=name), CPU)
    with precision.autocast():
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype is dtype
    assert precision.scaled is (name == "fp16")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_narrow_copies_of_what_is_recomputed_are_not_kept(share: float, make_batch: Make, make_config: Make) -> None:
    """The peak of a forward pass without gradients, with torch's cache of such copies and as it is."""
    changes = {
        "precision.type": "bf16",
        "model.width": 128,
        "model.vocab_size": 65,
        "engine.activation_checkpointing": share,
    }
    config = make_config(changes)
    trainer = HybridTrainer(run.build_model(config), config=config)
    batch, autocast = make_batch(), trainer.engine.precision.autocast

    def peak() -> int:
        live = Live()
        live.ignore((*trainer.model.parameters(), *batch))
        with live, torch.no_grad():
            trainer.engine.full_step.loss(batch)
        return live.peak

    found = peak()
    trainer.engine.precision.autocast = lambda cache=True: autocast()  # type: ignore[method-assign]
    assert (found < 0.7 * peak()) is bool(share)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_trains_like_full(name: str, make_model: Make, make_batch: Make, make_config: Make) -> None:
    losses = {}
    for kind in ("fp32", name):
        config = make_config({"precision.type": kind, "max_steps": 30, "optimizer.learning_rate": 1e-2})
        trainer = HybridTrainer(make_model(), config=config)
        results = [trainer.step(make_batch(rows=8)) for _ in range(30)]
        assert not any(result.skipped for result in results)
        losses[kind] = [result.loss for result in results]
        assert all(p.dtype is torch.float32 for p in trainer.model.parameters())
    assert losses[name][0] == pytest.approx(losses["fp32"][0], rel=1e-2)
    assert losses["fp32"][-1] < 0.6 * losses["fp32"][0]
    assert losses[name][-1] == pytest.approx(losses["fp32"][-1], rel=0.1)


# --- the loss scale ------------------------------------------------------------------------------------------------


def fp16(**settings: Any) -> Precision:
    return Precision(PrecisionConfig(type="fp16", **settings), CPU)


def test_the_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    precision = fp16(loss_scale=1024.0, growth_interval=3)
    scales = []
    for found in (GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD, BAD, BAD):
        precision.update(found)
        scales.append(float(precision.scale))
    #                 good  good  bad  good  good  good: doubled  good  bad  bad
    assert scales == [1024, 1024, 512, 512, 512, 1024, 1024, 512, 256]


def test_an_overflow_starts_the_count_again() -> None:
    precision = fp16(loss_scale=8.0, growth_interval=2)
    for found in (GOOD, BAD, GOOD):
        precision.update(found)
    assert float(precision.scale) == 4
    precision.update(GOOD)
    assert float(precision.scale) == 8


def test_the_scale_stays_within_its_limits() -> None:
    low, high = fp16(loss_scale=2.0), fp16(loss_scale=2.0**23, growth_interval=1)
    for _ in range(4):
        low.update(BAD)
        high.update(GOOD)
    assert float(low.scale) == 1
    assert float(high.scale) == 2**24


def test_the_scale_changes_in_place_and_without_a_look_from_the_host() -> None:
    precision = fp16()
    scale, steps = precision.scale, precision.good_steps
    precision.update(BAD)
    assert precision.scale is scale
    assert precision.good_steps is steps


def test_it_agrees_with_torchs_own_scaler() -> None:
    precision = fp16(loss_scale=256.0, growth_interval=2)
    scale, growth = torch.tensor(256.0), torch.tensor(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        found = (torch.rand((), generator=generator) < 0.3).float()
        precision.update(found)
        torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 2)
        assert float(precision.scale) == min(max(float(scale), 1.0), 2.0**24)
        scale.clamp_(1.0, 2.0**24)
        assert int(precision.good_steps) == int(growth)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_other_formats_have_no_scale(name: str) -> None:
    precision = Precision(PrecisionConfig(type=name, loss_scale=1024.0), CPU)
    precision.update(BAD)
    assert float(precision.scale) == 1


def test_the_state_comes_back() -> None:
    precision = fp16(loss_scale=1024.0, growth_interval=3)
    for found in (BAD, GOOD, GOOD):
        precision.update(found)
    again = fp16(loss_scale=1024.0, growth_interval=3)
    place = again.scale.data_ptr()
    again.load_state_dict({name: value.clone() for name, value in precision.state_dict().items()})
    assert again.scale.data_ptr() == place
    precision.update(GOOD)
    again.update(GOOD)
    assert float(again.scale) == float(precision.scale) == 1024


def test_an_overflowing_step_is_skipped_and_the_scale_finds_its_place(
    make_model: Make, make_batch: Make, make_config: Make
) -> None:
    config = make_config({"precision.type": "fp16", "precision.loss_scale": 2.0**24, "max_steps": 40})
    trainer = HybridTrainer(make_model(), config=config)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    first = trainer.step(make_batch())
    assert first.skipped
    assert math.isfinite(first.loss)
    assert all(torch.equal(p, q) for p, q in zip(before, trainer.model.parameters(), strict=True))
    assert float(trainer.engine.precision.scale) == 2.0**23
    results = [trainer.step(make_batch(seed=number)) for number in range(20)]
    assert not any(result.skipped for result in results[-5:])
    assert float(trainer.engine.precision.scale) < 2.0**23


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_gradient_norm_and_the_update_are_free_of_the_scale(
    clip: float, make_model: Make, make_batch: Make, make_config: Make
) -> None:
    norms, weights = [], []
    for scale in (1.0, 4096.0):
        settings = {"precision.type": "fp16", "precision.loss_scale": scale, "optimizer.type": "sgd"}
        config = make_config({**settings, "optimizer.gradient_clip_norm": clip, "schedule.type": "constant"})
        trainer = HybridTrainer(make_model(), config=config)
        norms.append(trainer.step(make_batch()).gradient_norm)
        weights.append(nn.utils.parameters_to_vector(trainer.model.parameters()).detach())
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    start = nn.utils.parameters_to_vector(make_model().parameters()).detach()
    assert (weights[0] - weights[1]).norm() < 2e-2 * (weights[0] - start).norm()
