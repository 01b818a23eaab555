"""The formulas of activations against what autograd, the allocator and torch.compile really keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning import observed

from foretrain.config import OptimizerConfig
from foretrain.engine import precision
from foretrain.engine.optim.build import build
from foretrain.engine.optim.in_backward import waiting_bytes
from foretrain.engine.optim.muon import Muon
from foretrain.models import lora
from foretrain.models import loss as loss_module
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.planning.activations import Pass
from foretrain.planning.parameters import parameters_of
from foretrain.planning.timeline import moments, muon_bytes, update_buffers

SHAPES = {
    "square": (GPT2Shape(2, 2, 64, 64, 300), 8),
    "deep": (GPT2Shape(6, 4, 64, 32, 64), 4),
    "wide": (GPT2Shape(2, 4, 256, 128, 64), 4),
    "many words": (GPT2Shape(2, 2, 64, 64, 5000), 8),
    "without bias": (GPT2Shape(3, 2, 64, 64, 64, bias=False), 8),
    "long": (GPT2Shape(2, 2, 64, 512, 64), 2),
    "one row": (GPT2Shape(4, 2, 128, 128, 64), 1),
}


def work_of(shape: GPT2Shape, rows: int, precision: str, **options: Any) -> Pass:
    return Pass(shape, rows, shape.context, precision, **{"cuda": False, **options})


def kept(work: Pass) -> int:
    """Of all blocks and the loss, between the two passes."""
    blocks = work.shape.layers * (work.kept_per_block + work.casts_per_block)
    return work.kept_of_embedding + blocks + work.kept_of_hidden + work.loss_kept


def near(planned: float, real: float) -> None:
    assert 0.95 * real <= planned <= 1.10 * real, f"planned {planned:,}, really {real:,}: {planned / real:.3f}"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
def test_kept_activations_are_as_planned(name: str, precision: str, fused: bool) -> None:
    shape, rows = SHAPES[name]
    model, tokens, targets = observed.model_and_batch(shape, rows, fused_loss=fused)
    real = observed.saved_bytes(model, tokens, targets, precision)
    near(kept(work_of(shape, rows, precision, fused=fused)), real)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kept_activations_with_dropout_and_a_wide_residual(dropout: float, narrow: bool, precision: str) -> None:
    shape = GPT2Shape(3, 2, 64, 64, 64, dropout=dropout)
    model, tokens, targets = observed.model_and_batch(shape, 8, fused_loss=False, narrow_residual=narrow)
    real = observed.saved_bytes(model, tokens, targets, precision)
    near(kept(work_of(shape, 8, precision, fused=False, narrow=narrow)), real)


def test_kept_activations_with_another_norm() -> None:
    shape = GPT2Shape(3, 2, 64, 64, 64, normalization="rmsnorm")
    model, tokens, targets = observed.model_and_batch(shape, 8, fused_loss=False)
    near(kept(work_of(shape, 8, "fp32", fused=False)), observed.saved_bytes(model, tokens, targets, "fp32"))


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("name", ["square", "deep", "wide"])
def test_cuda_keeps_a_wide_input_of_every_norm(name: str, narrow: bool) -> None:
    shape, rows = SHAPES[name]
    model, tokens, targets = observed.model_and_batch(shape, rows, fused_loss=False, narrow_residual=narrow)
    with observed.norms_as_on_cuda():
        real = observed.saved_bytes(model, tokens, targets, "bf16")
    near(kept(work_of(shape, rows, "bf16", cuda=True, fused=False, narrow=narrow)), real)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rank", [2, 8])
def test_adapters_keep_what_is_planned(rank: int, fused: bool, precision: str) -> None:
    shape = GPT2Shape(4, 4, 128, 64, 64)
    model, tokens, targets = observed.model_and_batch(shape, 8, fused_loss=fused)
    lora.attach(model, lora.LoraSettings(rank), 0)
    with observed.norms_as_on_cuda() if precision == "bf16" else observed.nullcontext():
        real = observed.saved_bytes(model, tokens, targets, precision)
    near(kept(work_of(shape, 8, precision, cuda=precision == "bf16", fused=fused, rank=rank)), real)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["square", "deep", "wide", "many words", "long"])
def test_the_peak_of_a_step_is_as_planned(name: str, precision: str, summed: bool, again: bool) -> None:
    shape, rows = SHAPES[name]
    model, tokens, targets = observed.model_and_batch(shape, rows, fused_loss=False, activation_checkpointing=again)
    with observed.norms_as_on_cuda() if precision == "bf16" else observed.nullcontext():
        real = observed.step_peak(model, tokens, targets, precision, with_gradients=summed)
    work = work_of(shape, rows, precision, cuda=precision == "bf16", fused=False, recomputed=float(again))
    steps = moments(work, parameters_of(shape), OptimizerConfig(type="adamw"), 2 if summed else 1, False)
    near(max(moment.total for moment in steps), real)


@pytest.mark.parametrize(
    ("precision", "narrow", "again", "fused"),
    [
        ("fp32", True, False, False),
        ("bf16", True, False, False),
        ("bf16", False, False, False),
        ("bf16", True, False, True),
    ],
)
def test_a_compiled_pass_keeps_what_is_planned(precision: str, narrow: bool, again: bool, fused: bool) -> None:
    shape = GPT2Shape(3, 2, 64, 64, 64)
    options = {"fused_loss": fused, "narrow_residual": narrow, "activation_checkpointing": again}
    model, tokens, targets = observed.model_and_batch(shape, 8, **options)
    with observed.norms_as_on_cuda() if precision == "bf16" else observed.nullcontext():
        real = observed.compiled_bytes(model, tokens, targets, precision)
    work = work_of(shape, 8, precision, cuda=True, compiled=True, narrow=narrow, fused=fused, recomputed=float(again))
    near(kept(work), real)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "slices"), [(256, "auto"), (3000, "auto"), (3000, 200)])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_fused_loss_needs_what_is_planned(precision: str, rows: int, slices: int | str, frozen: bool) -> None:
    shape = GPT2Shape(1, 1, 64, rows, 3000)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    hidden, weight = torch.zeros(rows, 64, dtype=dtype), torch.zeros(shape.padded_vocab_size, 64, dtype=dtype)
    targets = torch.zeros(rows, dtype=torch.long)
    live = observed.Live()
    live.ignore((hidden, weight, targets))
    with live, torch.no_grad():
        at_once = loss_module.SLICE_ROWS["cpu"] if isinstance(slices, str) else slices
        sizes = shape.vocab_size, at_once
        loss_module._linear_cross_entropy._init_fn(hidden, weight, targets, *sizes, True, not frozen)
    work = work_of(shape, 1, precision, fused=True, loss_rows=slices, rank=8 if frozen else 0)
    near(work.loss_forward() - work.head_cast, live.peak)


@pytest.mark.parametrize("shape", [(256, 80), (80, 80), (32, 32)])
@pytest.mark.parametrize("bf16_products", [True, False])
def test_muon_needs_what_is_planned_for_its_largest_batch_of_matrices(
    shape: tuple[int, int], bf16_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bf16_products", lambda: bf16_products)
    matrices = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(6)]
    optimizer = Muon([{"params": matrices, "algorithm": "muon"}])
    for p in matrices:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    live = observed.Live()
    live.ignore([t for p in matrices for t in (p, p.grad, optimizer.state[p]["momentum_buffer"])])
    with live:
        optimizer.step()
    near(muon_bytes(shape, cuda=False) * sum(p.numel() for p in matrices), live.peak)


@pytest.mark.parametrize("bf16_products", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_muon_needs_what_is_planned_for_the_attention_of_all_blocks(
    split: bool, bf16_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bf16_products", lambda: bf16_products)
    shape = GPT2Shape(3, 2, 80, 8, 64)
    model, settings = GPT2(shape), OptimizerConfig(type="muon", split_fused=split)
    optimizer = build(model, settings)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    live = observed.Live()
    live.ignore([t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())])
    with live:
        optimizer.step()
    near(update_buffers(settings, parameters_of(shape), cuda=False), live.peak)


def test_updates_in_the_backward_pass_hold_few_gradients_at_once() -> None:
    shape = GPT2Shape(12, 4, 256, 32, 64)
    work, parameters = work_of(shape, 1, "fp32"), parameters_of(shape)
    for kind in ("adamw", "muon"):
        optimizer = OptimizerConfig(type=kind)
        plain, early = (
            max(moment.total for moment in moments(work, parameters, optimizer, 1, early)) for early in (False, True)
        )
        buffers = update_buffers(optimizer, parameters, cuda=False, waiting=waiting_bytes(parameters.learned))
        assert early < plain
        assert early < parameters.learned / 2 + buffers
