"""Muon equals `torch.optim.Muon` step by step; its AdamW part equals `torch.optim.AdamW`; bad steps change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain.engine import precision
from foretrain.engine.optim import muon as muon_module
from foretrain.engine.optim.muon import Muon, iteration_type, orthogonalize


@pytest.fixture(autouse=True, params=["bf16", "fp32"])
def number_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU with bf16 instructions, and as on one without."""
    monkeypatch.setattr(precision, "cpu_has_bf16_products", lambda: request.param == "bf16")
    monkeypatch.setattr(muon_module, "SMALL", 0)  # the matrices here are
    return str(request.param)


SHAPES = [(16, 16), (8, 24), (24, 8), (1, 12), (12, 1), (32, 96)]


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in shapes]


def set_gradients(groups: list[list[nn.Parameter]], step: int) -> None:
    """The same reproducible gradients for every list of parameters."""
    for params in groups:
        generator = torch.Generator().manual_seed(1000 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)


def pair(shapes: list[tuple[int, int]], **settings: Any) -> tuple[list[nn.Parameter], Muon, list[nn.Parameter], Any]:
    ours, theirs = parameters(shapes), parameters(shapes)
    scale = settings.pop("scale", "original")
    muon = Muon([{"params": ours}], scale=scale, **settings)
    reference = torch.optim.Muon(theirs, adjust_lr_fn=scale, **settings)
    return ours, muon, theirs, reference


# --- against torch -------------------------------------------------------------------------------------------------

# The orthogonalisation of one input is bit for bit torch's where batched and single bf16 products round alike, as on
# the CPUs this was written on. The momentum is averaged in another order of operations and so differs in its last fp32
# bit, which can move an input of the bf16 iteration by one bf16 step: entries of about one, steps of about 1/128.
STEP_TOLERANCE = 2e-2
# Torch's is always in bf16, so ours in fp32 differs by the rounding of all five iterations.
TOLERANCE = {"bf16": STEP_TOLERANCE, "fp32": 3 * STEP_TOLERANCE}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_equals_torchs_step_by_step(
    shape: tuple[int, int], nesterov: bool, scale: str, number_format: str
) -> None:
    rate = 0.02
    ours, muon, theirs, reference = pair([shape] * 3, lr=rate, nesterov=nesterov, scale=scale, weight_decay=0.1)
    ratio = 0.2 * math.sqrt(max(shape)) if scale == "match_rms_adamw" else math.sqrt(max(1, shape[0] / shape[1]))
    for step in range(12):
        set_gradients([ours, theirs], step)
        muon.step()
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            momentum = muon.state[one]["momentum_buffer"]
            torch.testing.assert_close(momentum, reference.state[other]["momentum_buffer"], rtol=1e-5, atol=1e-6)
            assert (one - other).abs().max() <= TOLERANCE[number_format] * rate * ratio
            with torch.no_grad():
                one.copy_(other)  # the next step is compared on its own


def test_muon_stays_with_torchs_over_many_steps() -> None:
    ours, muon, theirs, reference = pair([(16, 16), (8, 24), (24, 8)], lr=0.02, weight_decay=0.1)
    start = [p.detach().clone() for p in ours]
    for step in range(20):
        set_gradients([ours, theirs], step)
        muon.step()
        reference.step()
    for one, other, before in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() < 1e-2 * (other - before).norm()


@pytest.mark.parametrize("settings", [{"momentum": 0.0}, {"momentum": 0.5}, {"weight_decay": 0.0}, {"lr": 0.5}])
def test_muon_equals_torchs_for_other_settings(settings: dict[str, float]) -> None:
    ours, muon, theirs, reference = pair([(16, 16)], **{"lr": 0.02, **settings})
    for step in range(3):
        set_gradients([ours, theirs], step)
        muon.step()
        reference.step()
        tolerance = STEP_TOLERANCE * muon.param_groups[0]["lr"]
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=(step + 1) * tolerance)


def test_a_matrix_moves_alike_alone_and_among_others() -> None:
    alone, among = parameters([(16, 24)]), parameters([(16, 24)] * 4)
    with torch.no_grad():
        among[2].copy_(alone[0])
    one, many = Muon([{"params": alone}], lr=0.02), Muon([{"params": among}], lr=0.02)
    for step in range(5):
        set_gradients([among], step)
        alone[0].grad = among[2].grad.clone()
        one.step()
        many.step()
    torch.testing.assert_close(alone[0], among[2], rtol=0, atol=5 * STEP_TOLERANCE * 0.02)


def test_the_adamw_part_equals_torchs() -> None:
    shapes: list[tuple[int, ...]] = [(16, 16), (12,), (3, 4, 5)]
    ours, theirs = parameters(shapes), parameters(shapes)
    settings = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    muon = Muon([{"params": ours, "algorithm": "adamw"}], **settings)
    reference = torch.optim.AdamW(theirs, **settings)
    for step in range(12):
        set_gradients([ours, theirs], step)
        muon.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(muon.state[one][name], reference.state[other][name], rtol=1e-5, atol=1e-8)


# --- orthogonalisation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_singular_values_come_close_to_one(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(matrices).float())
    assert values.shape == (3, min(shape))
    # the iteration aims at [0.7, 1.2]; the smallest singular values of a square matrix may stay below
    assert values.max() < 1.3
    assert values.median() > 0.6


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_orthogonalised_as_torch_does_each_matrix(shape: tuple[int, int]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz as reference

    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    for got, matrix in zip(orthogonalize(matrices), matrices, strict=True):
        wanted = reference(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=0, atol=STEP_TOLERANCE)


def test_the_iteration_is_in_the_format_that_the_cpu_can_multiply(number_format: str) -> None:
    assert orthogonalize(torch.ones(1, 4, 6)).dtype is precision.DTYPES[number_format]
    assert iteration_type(torch.device("cpu")) == number_format


def test_small_matrices_are_iterated_in_fp32_on_every_cpu(number_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_module, "SMALL", 6)
    types = [orthogonalize(torch.ones(1, *shape)).dtype for shape in ((6, 20), (20, 6), (7, 20), (20, 7))]
    assert types == [torch.float32] * 2 + [precision.DTYPES[number_format]] * 2


def test_other_devices_iterate_in_bf16() -> None:
    assert [iteration_type(torch.device(name), (4, 4)) for name in ("cuda", "mps")] == ["bf16", "bf16"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_in_fp32_is_exact_to_five_digits(shape: tuple[int, int], number_format: str) -> None:
    matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    x = matrices.double() if shape[0] <= shape[1] else matrices.double().mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    wanted = x if shape[0] <= shape[1] else x.mT
    tolerance = {"bf16": 6e-2, "fp32": 1e-5}[number_format]
    torch.testing.assert_close(orthogonalize(matrices).double(), wanted, rtol=0, atol=tolerance)


def test_each_matrix_of_a_batch_is_on_its_own() -> None:
    matrices = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(1))
    together = orthogonalize(matrices)
    for index in range(4):
        torch.testing.assert_close(together[index], orthogonalize(matrices[index : index + 1])[0], rtol=0, atol=2e-2)


def test_the_scale_of_a_matrix_does_not_matter() -> None:
    matrices = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonalize(matrices), orthogonalize(matrices * 1024), rtol=0, atol=2e-2)


def test_a_zero_matrix_stays_zero() -> None:
    assert torch.count_nonzero(orthogonalize(torch.zeros(1, 4, 6))) == 0


def test_zero_rows_and_columns_stay_zero_and_the_rest_is_as_without_them() -> None:
    matrices = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(1))
    matrices[:, 2], matrices[:, :, 5] = 0.0, 0.0
    rows, columns = [row for row in range(8) if row != 2], [column for column in range(12) if column != 5]
    for got in (orthogonalize(matrices), orthogonalize(matrices.mT).mT):
        assert torch.count_nonzero(got[:, 2]) == torch.count_nonzero(got[:, :, 5]) == 0
        alone = orthogonalize(matrices[:, rows][:, :, columns])
        torch.testing.assert_close(got[:, rows][:, :, columns], alone, rtol=0, atol=2e-2)


def test_a_zero_matrix_beside_others_stays_zero() -> None:
    matrices = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(1))
    matrices[1] = 0.0
    got = orthogonalize(matrices)
    assert torch.count_nonzero(got[1]) == 0
    assert got.isfinite().all()
    assert got[0].norm() > 1


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (32, 96)])
def test_a_transposed_matrix_gives_the_transposed_result(shape: tuple[int, int]) -> None:
    matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    turned = orthogonalize(matrices.mT).mT
    torch.testing.assert_close(turned, orthogonalize(matrices), rtol=0, atol=2e-2)


@pytest.mark.parametrize("shape", [(96, 96), (64, 192), (192, 64)])
def test_singular_values_that_fall_off_are_raised_towards_one_along_the_same_vectors(shape: tuple[int, int]) -> None:
    """Gradients have such spectra. The cosine to U V^T is what a cheaper iteration must not lose."""
    short = min(shape)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(1)), full_matrices=False)
    matrix = u * torch.arange(1, short + 1).reciprocal() @ v
    got, exact = orthogonalize(matrix[None])[0].float(), u @ v
    assert torch.cosine_similarity(got.flatten(), exact.flatten(), dim=0) > 0.97
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.6
    assert values.max() < 1.3


# --- skipping and scaling ------------------------------------------------------------------------------------------


def mixed() -> tuple[list[nn.Parameter], Muon]:
    params = parameters([(16, 16), (16, 16), (8, 24), (7,)])
    groups = [{"params": params[:3]}, {"params": params[3:], "algorithm": "adamw"}]
    return params, Muon(groups, lr=0.02, weight_decay=0.1)


def everything(params: list[nn.Parameter], muon: Muon) -> list[Tensor]:
    state = [value.clone() for p in params for _, value in sorted(muon.state[p].items())]
    return [p.detach().clone() for p in params] + state


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_step_changes_nothing(bad: float) -> None:
    params, muon = mixed()
    for step in range(3):
        set_gradients([params], step)
        muon.step()
    before = everything(params, muon)
    set_gradients([params], 3)
    for p in params:
        p.grad.view(-1)[0] = bad
    muon.found_inf = torch.tensor(1.0)
    muon.step()
    assert all(torch.equal(one, other) for one, other in zip(before, everything(params, muon), strict=True))


def test_a_bad_first_step_changes_nothing() -> None:
    params, muon = mixed()
    before = [p.detach().clone() for p in params]
    set_gradients([params], 0)
    params[0].grad.fill_(math.nan)
    muon.found_inf = torch.tensor(1.0)
    muon.step()
    assert all(torch.equal(one, other) for one, other in zip(before, params, strict=True))
    muon.found_inf = None
    fresh_params, fresh = mixed()
    for step in range(1, 4):
        set_gradients([params, fresh_params], step)
        muon.step()
        fresh.step()
    for one, other in zip(params, fresh_params, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=3 * STEP_TOLERANCE * 0.02)


def test_a_good_step_that_was_checked_is_a_plain_step() -> None:
    (params, muon), (plain_params, plain) = mixed(), mixed()
    for step in range(4):
        set_gradients([params, plain_params], step)
        muon.found_inf = torch.tensor(0.0)
        muon.step()
        plain.step()
    for one, other in zip(params, plain_params, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4 * STEP_TOLERANCE * 0.02)


@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_grad_scale_divides_the_gradients(scale: float) -> None:
    (params, muon), (plain_params, plain) = mixed(), mixed()
    for step in range(4):
        set_gradients([params, plain_params], step)
        for p in params:
            p.grad.mul_(scale)
        muon.grad_scale = torch.tensor(scale)
        muon.step()
        plain.step()
        for p, q in zip(params[:3], plain_params[:3], strict=True):
            torch.testing.assert_close(
                muon.state[p]["momentum_buffer"], plain.state[q]["momentum_buffer"], rtol=1e-5, atol=1e-6
            )
    for one, other in zip(params, plain_params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=4 * STEP_TOLERANCE * 0.02)


# --- the rest ------------------------------------------------------------------------------------------------------


def test_only_matrices_are_taken() -> None:
    with pytest.raises(ValueError, match="matrices only"):
        Muon([{"params": parameters([(3,)])}])


def test_parameters_without_gradient_stay() -> None:
    params = parameters([(8, 8), (8, 8)])
    muon = Muon([{"params": params}], lr=0.1, weight_decay=0.5)
    params[0].grad = torch.ones(8, 8)
    before = params[1].detach().clone()
    muon.step()
    assert torch.equal(params[1], before)
    assert params[1] not in muon.state


def test_the_learning_rate_may_be_a_tensor() -> None:
    params, plain_params = parameters([(8, 8)]), parameters([(8, 8)])
    muon, plain = Muon([{"params": params}], lr=torch.tensor(0.05)), Muon([{"params": plain_params}], lr=0.05)
    set_gradients([params, plain_params], 0)
    muon.step()
    plain.step()
    torch.testing.assert_close(params[0], plain_params[0], rtol=1e-6, atol=1e-7)


def test_a_closure_is_called_and_its_loss_returned() -> None:
    params = parameters([(8, 8)])
    muon = Muon([{"params": params}], lr=0.05)

    def closure() -> float:
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss.item()

    assert muon.step(closure) == pytest.approx((parameters([(8, 8)])[0] ** 2).sum().item())
