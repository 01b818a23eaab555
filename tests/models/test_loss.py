"""The fused output layer and cross-entropy equals the plain one: loss and both gradients."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foretrain.models import loss as loss_module
from foretrain.models.loss import IGNORED, linear_cross_entropy, logits_bytes

ROWS, WIDTH, VOCABULARY = 23, 16, 61


def problem(
    rows: int = ROWS, vocab_size: int = VOCABULARY, padding: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size + padding, WIDTH, generator=generator, dtype=torch.float64) * 0.5
    weight[vocab_size:] = 0
    targets = torch.randint(vocab_size, (rows,), generator=generator)
    return hidden, weight.to(dtype).requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight)[:, :vocab_size], targets, ignore_index=IGNORED)


def compare(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, slice_rows: int) -> None:
    tolerance = 1e-12 if hidden.dtype is torch.float64 else 1e-6
    fused = linear_cross_entropy(hidden, weight, targets, vocab_size, slice_rows)
    fused_gradients = torch.autograd.grad(fused, (hidden, weight))
    expected = plain(hidden, weight, targets, vocab_size)
    gradients = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(fused, expected, rtol=tolerance, atol=tolerance)
    for got, wanted in zip(fused_gradients, gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=10 * tolerance, atol=tolerance)


DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slice_rows", [1, 4, 7, 22, 23, 24, 1000])
def test_equal_whatever_the_slices(slice_rows: int, dtype: torch.dtype) -> None:
    compare(*problem(dtype=dtype), VOCABULARY, slice_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [0, 1, 67])
def test_equal_with_a_padded_vocabulary(padding: int, dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(padding=padding, dtype=dtype)
    compare(hidden, weight, targets, VOCABULARY, 8)
    gradient = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, VOCABULARY, 8), weight)[0]
    assert torch.count_nonzero(gradient[VOCABULARY:]) == 0
    assert gradient.shape == weight.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ignored", [slice(0, 1), slice(3, 11), slice(8, 16), slice(0, ROWS - 1)])
def test_equal_with_ignored_targets(ignored: slice, dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(dtype=dtype)
    targets[ignored] = IGNORED
    compare(hidden, weight, targets, VOCABULARY, 8)
    gradient = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, slice_rows=8), hidden)[0]
    assert torch.count_nonzero(gradient[ignored]) == 0


def test_nothing_counted_is_no_loss_and_no_gradient() -> None:
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED))
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert torch.count_nonzero(gradient) == 0


def test_gradients_agree_with_finite_differences() -> None:
    hidden, weight, targets = problem(rows=5, vocab_size=7, padding=2, dtype=torch.float64)
    targets[2] = IGNORED

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, 7, slice_rows=2)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


@pytest.mark.parametrize("scale", [128.0, 65536.0])
def test_a_scaled_loss_scales_the_gradients(scale: float) -> None:
    hidden, weight, targets = problem()
    once = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, slice_rows=8), (hidden, weight))
    scaled = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, slice_rows=8) * scale, (hidden, weight))
    for one, other in zip(once, scaled, strict=True):
        assert torch.equal(one * scale, other)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_close_under_autocast(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = problem(rows=64)
    targets[5:9] = IGNORED
    with torch.autocast("cpu", dtype=dtype):
        fused = linear_cross_entropy(hidden, weight, targets, slice_rows=24)
    gradients = torch.autograd.grad(fused, (hidden, weight))
    expected = plain(hidden, weight, targets, VOCABULARY)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    assert fused.dtype is torch.float32
    assert fused.item() == pytest.approx(expected.item(), rel=tolerance)
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype is torch.float32
        assert (got - want).norm() < tolerance * want.norm()


def test_fp16_gradients_of_many_rows_neither_vanish_nor_overflow() -> None:
    """A mean over many rows has gradients below fp16's smallest number, a sum over a slice above its largest."""
    generator = torch.Generator().manual_seed(0)
    rows = 4096
    hidden = torch.randn(rows, 8, generator=generator).requires_grad_()
    weight = (torch.randn(11, 8, generator=generator) * 0.3).requires_grad_()
    targets = torch.zeros(rows, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.float16):
        fused = linear_cross_entropy(hidden, weight, targets) * 65536.0
    gradients = torch.autograd.grad(fused, (hidden, weight))
    wanted = torch.autograd.grad(plain(hidden, weight, targets, 11) * 65536.0, (hidden, weight))
    for got, want in zip(gradients, wanted, strict=True):
        assert bool(got.isfinite().all())
        assert (got - want).norm() < 1e-2 * want.norm()


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = problem(dtype=torch.float64)
    with torch.no_grad():
        hidden.mul_(1000)  # the exponential of such logits is infinite
    compare(hidden, weight, targets, VOCABULARY, 8)


def test_only_the_wanted_gradients_are_made() -> None:
    hidden, weight, targets = problem()
    wanted = torch.autograd.grad(plain(hidden, weight, targets, VOCABULARY), (hidden, weight))
    of_hidden = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets), hidden)[0]
    of_weight = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, targets), weight)[0]
    torch.testing.assert_close(of_hidden, wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_weight, wanted[1], rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(plain(hidden, weight, targets, VOCABULARY).item(), rel=1e-6)


def test_a_frozen_output_layer_gets_no_gradient_and_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = problem()
    made: list[Tensor] = []
    product = loss_module._wide_product
    monkeypatch.setattr(loss_module, "_wide_product", lambda *parts: made.append(product(*parts)) or made[-1])
    loss = linear_cross_entropy(hidden, weight.detach(), targets)
    assert not made
    (frozen,) = torch.autograd.grad(loss, hidden)
    (trained,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden)
    assert made
    assert torch.equal(frozen, trained)


def test_gradients_go_on_into_the_layers_below() -> None:
    hidden, weight, targets = problem()
    below = torch.eye(WIDTH).requires_grad_()
    got = torch.autograd.grad(linear_cross_entropy(hidden @ below, weight, targets, slice_rows=5), below)[0]
    want = torch.autograd.grad(plain(hidden @ below, weight, targets, VOCABULARY), below)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_memory_of_the_plain_logits_is_counted_in_fp32() -> None:
    assert logits_bytes(torch.zeros(3, 5, 8), 100) == 3 * 5 * 100 * 4


@pytest.mark.parametrize("learning", [True, False])
def test_the_logits_of_one_slice_exist_at_a_time(learning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []
    linear = F.linear

    def watched(hidden: Tensor, weight: Tensor) -> Tensor:
        alive.append(sum(reference() is not None for reference in made))
        logits = linear(hidden, weight)
        made.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(loss_module.F, "linear", watched)
    hidden, weight = torch.randn(12, 4, requires_grad=learning), torch.randn(7, 4, requires_grad=learning)
    linear_cross_entropy(hidden, weight, torch.zeros(12, dtype=torch.long), slice_rows=4)
    assert alive == [0, 0, 0]


def test_slices_are_smaller_where_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = loss_module.softmax_gradient_

    def counted(logits: Tensor, *arguments: Any) -> Tensor:
        seen.append(len(logits))
        return original(logits, *arguments)

    monkeypatch.setattr(loss_module, "softmax_gradient_", counted)
    monkeypatch.setitem(loss_module.SLICE_ROWS, "cpu", 8)
    monkeypatch.setitem(loss_module.SLICE_ROWS_ALONE, "cpu", 4)
    hidden, weight = torch.randn(12, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    targets = torch.arange(12) % 7
    learned = loss_module.linear_cross_entropy(hidden, weight, targets)
    with torch.no_grad():
        alone = loss_module.linear_cross_entropy(hidden, weight, targets)
    assert seen == [8, 4, 4, 4, 4]
    assert alone.item() == pytest.approx(learned.item(), rel=1e-6)
