"""Moments in bf16 and in 8 bits: how exact they are, how they are skipped, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain.config import OptimizerConfig
from foretrain.engine.optim import build as optim
from foretrain.engine.optim import narrow
from foretrain.engine.optim.moments import BLOCK, SMALLEST, read_moment
from foretrain.engine.optim.narrow import NarrowAdamW
from foretrain.errors import CheckpointError, ConfigError
from foretrain.persist.checkpoint import CheckpointStore, read
from foretrain.persist.codec import snapshot
from foretrain.persist.model_state import restore_optimizer

Make = Callable[..., Any]
NARROW = ["bf16", "8bit"]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Over six orders of magnitude, as moments are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (-6 * torch.rand(shape, generator=generator))


@pytest.mark.parametrize("state_type", NARROW)
def test_a_second_moment_decays_though_each_step_is_below_its_precision(state_type: str) -> None:
    weight = nn.Parameter(torch.zeros(SMALLEST))
    optimizer = NarrowAdamW([{"params": [weight]}], lr=0.0, betas=(0.9, 0.999), state_type=state_type)
    weight.grad = torch.ones_like(weight)
    weight.grad[::7] = 0.3
    optimizer.step()
    before = read_moment(optimizer.state[weight], "exp_avg_sq")
    weight.grad[::BLOCK] = 1.0  # the largest of each block stays the largest; the others get nothing more
    weight.grad[torch.arange(len(weight)) % BLOCK > 0] = 0.0
    for _ in range(700):
        optimizer.step()
    rest = torch.arange(len(weight)) % BLOCK > 0
    after = read_moment(optimizer.state[weight], "exp_avg_sq")
    assert float(after[rest].sum() / before[rest].sum()) == pytest.approx(0.999**700, rel=0.1)


def build(model: nn.Module, state_type: str, kind: str = "adamw") -> Any:
    return optim.build(model, OptimizerConfig(type=kind, learning_rate=3e-3, state_type=state_type))


def train(model: nn.Module, optimizer: Any, make_batch: Make, steps: range = range(6)) -> list[float]:
    losses = []
    for number in steps:
        optimizer.zero_grad()
        loss = model(*make_batch(seed=number))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(("state_type", "tolerance"), [("bf16", 2e-3), ("8bit", 1e-2)])
def test_the_loss_curve_is_that_of_fp32(
    state_type: str, tolerance: float, kind: str, make_model: Make, make_batch: Make
) -> None:
    curves = []
    for chosen in ("fp32", state_type):
        model = make_model(width=64)
        curves.append(train(model, build(model, chosen, kind), lambda seed: make_batch(seed=seed % 4), range(40)))
    assert curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=tolerance)
    assert curves[1] != curves[0]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(("state_type", "share"), [("bf16", 0.5), ("8bit", 0.25 + 1 / BLOCK)])
def test_moments_take_less_memory(state_type: str, share: float, kind: str, make_model: Make, make_batch: Make) -> None:
    sizes = []
    for chosen in ("fp32", state_type):
        model = make_model(width=256)
        optimizer = build(model, chosen, kind)
        train(model, optimizer, make_batch, range(1))
        large = [optimizer.state[p] for p in model.parameters() if p.numel() >= SMALLEST]
        tensors = [value for state in large for name, value in state.items() if name not in ("step", "row_squares")]
        sizes.append(sum(value.nbytes for value in tensors))
    assert sizes[1] == pytest.approx(share * sizes[0], rel=1e-3)


def test_small_tensors_stay_fp32(make_model: Make, make_batch: Make) -> None:
    model = make_model()
    optimizer = build(model, "8bit")
    train(model, optimizer, make_batch, range(1))
    for p in model.parameters():
        expected = torch.int8 if p.numel() >= SMALLEST else torch.float32
        assert optimizer.state[p]["exp_avg"].dtype is expected
    assert any(p.numel() >= SMALLEST for p in model.parameters())


@pytest.mark.parametrize("state_type", NARROW)
def test_pieces_and_sizes_that_do_not_divide_make_no_difference(
    state_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for chunk in (narrow.AT_ONCE, 4 * BLOCK):
        monkeypatch.setattr(narrow, "AT_ONCE", chunk)
        weight = nn.Parameter(numbers(71, 83))
        optimizer = NarrowAdamW([{"params": [weight]}], lr=1e-2, state_type=state_type)
        for step in range(5):
            weight.grad = numbers(71, 83, seed=step)
            optimizer.step()
        ends.append((weight.detach(), snapshot(optimizer.state_dict()).tensors))
    assert torch.equal(ends[0][0], ends[1][0])
    assert all(torch.equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("state_type", NARROW)
def test_a_bad_step_changes_nothing_and_a_scale_is_taken_out(
    state_type: str, kind: str, make_model: Make, make_batch: Make
) -> None:
    models = [make_model(width=64) for _ in range(2)]
    plain, scaled = (build(model, state_type, kind) for model in models)
    for number in range(5):
        for model, optimizer in zip(models, (plain, scaled), strict=True):
            optimizer.zero_grad()
            model(*make_batch(seed=number)).backward()
        for p in models[1].parameters():
            p.grad.mul_(8.0)
        scaled.grad_scale, scaled.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        plain.step()
        scaled.step()
        before = snapshot({"model": models[1].state_dict(), "optimizer": scaled.state_dict()}).tensors
        models[1].blocks[0].attention.qkv.weight.grad[0, 0] = torch.nan
        scaled.found_inf = torch.tensor(1.0)
        scaled.step()
        after = snapshot({"model": models[1].state_dict(), "optimizer": scaled.state_dict()}).tensors
        assert all(torch.equal(before[name], after[name]) for name in before)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_tensor_rate_is_the_same_as_a_number(make_model: Make, make_batch: Make) -> None:
    ends = []
    for rate in (3e-3, torch.tensor(3e-3)):
        model = make_model()
        train(model, NarrowAdamW([{"params": list(model.parameters())}], lr=rate), make_batch, range(1))
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("state_type", NARROW)
def test_a_saved_state_comes_back_to_the_bit(
    state_type: str, kind: str, make_model: Make, make_batch: Make, tmp_path: Path
) -> None:
    model = make_model(width=64)
    optimizer = build(model, state_type, kind)
    train(model, optimizer, make_batch, range(4))
    store = CheckpointStore(tmp_path)
    folder = store.save(4, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, make_batch, range(4, 8))
    state, twin = read(folder), make_model(seed=5, width=64)
    other = build(twin, state_type, kind)
    twin.load_state_dict(state["model"])
    for _ in range(2):  # into an optimizer without a state, then into the tensors that are there
        restore_optimizer(other, state["optimizer"], "here", keep_settings=True)
    types = {value.dtype for entry in other.state.values() for value in entry.values()}
    assert types >= ({torch.bfloat16} if state_type == "bf16" else {torch.int8, torch.uint8})
    train(twin, other, make_batch, range(4, 8))
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("before", "now"), [("fp32", "bf16"), ("bf16", "8bit"), ("8bit", "bf16"), ("8bit", "fp32")])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_state_of_another_type_is_refused(
    kind: str, before: str, now: str, make_config: Make, make_model: Make, make_batch: Make
) -> None:
    from foretrain import HybridTrainer

    trainers = [
        HybridTrainer(make_model(), config=make_config({"optimizer.type": kind, "optimizer.state_type": chosen}))
        for chosen in (before, now)
    ]
    trainers[0].step(make_batch())
    with pytest.raises(CheckpointError, match=r"another form|use the settings it was saved with"):
        trainers[1].load_state_dict(trainers[0].state_dict())


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_only_adamw_and_muon_can_be_narrow(kind: str, make_config: Make) -> None:
    with pytest.raises(ConfigError, match=rf"'adamw' and 'muon', not for '{kind}'; use one of these"):
        make_config({"optimizer.type": kind, "optimizer.state_type": "bf16"})


def test_a_closure_is_called() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = NarrowAdamW([{"params": [weight]}])

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert (weight < 1).all()
