"""Learning rates equal their formulas, at every boundary and everywhere between."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foretrain.config import ScheduleConfig
from foretrain.engine import schedule

PEAK = 1e-2


def rates(max_steps: int, peak: float = PEAK, extra: int = 5, **settings: Any) -> list[float]:
    rate = schedule.build(ScheduleConfig(**settings), peak, max_steps)
    return [rate(step) for step in range(max_steps + extra)]


# --- WSD -----------------------------------------------------------------------------------------------------------


def methodology(step: int, warmup: int, start: float, peak: float, stable: int, decay: int, final: float) -> float:
    """The methodology's own function, line by line (it does not say what happens after the end)."""
    if step < warmup:
        progress = step / warmup
        return start + (peak - start) * progress
    if step < warmup + stable:
        return peak
    decay_step = step - warmup - stable
    progress = decay_step / decay
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return final + (peak - final) * cosine


@pytest.mark.parametrize(
    ("warmup", "stable", "decay"), [(5, 10, 7), (0, 10, 7), (5, 0, 7), (1, 1, 1), (500, 10000, 5000)]
)
def test_wsd_with_cosine_decay_is_the_methodologys_formula(warmup: int, stable: int, decay: int) -> None:
    settings = {"warmup_steps": warmup, "stable_steps": stable, "decay_steps": decay, "decay": "cosine"}
    total = warmup + stable + decay
    got = rates(total, 1e-4, warmup_rate=1e-6, final_rate=1e-6, **settings)
    wanted = [methodology(step, warmup, 1e-6, 1e-4, stable, decay, 1e-6) for step in range(total + 1)]
    assert got[: total + 1] == pytest.approx(wanted, rel=1e-12)
    assert got[total:] == pytest.approx([1e-6] * 5, rel=1e-12)  # clamped after the end


def test_wsd_at_every_boundary() -> None:
    settings = {"warmup_steps": 4, "stable_steps": 6, "decay_steps": 5, "final_rate": 1e-3, "warmup_rate": 2e-3}
    got = rates(15, **settings)
    assert got[0] == 2e-3  # first
    assert got[3] == pytest.approx(2e-3 + 8e-3 * 3 / 4)  # last of the warm-up
    assert got[4] == pytest.approx(PEAK)  # first stable
    assert got[9] == pytest.approx(PEAK)  # last stable
    assert got[10] == pytest.approx(PEAK)  # first of the decay
    assert got[11] == pytest.approx(1e-3 + 9e-3 * 4 / 5)
    assert got[14] == pytest.approx(1e-3 + 9e-3 * 1 / 5)  # last of the decay
    assert got[15:] == pytest.approx([1e-3] * 5)  # after the end


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_wsd_decay_shapes(decay: str) -> None:
    got = rates(20, warmup_steps=0, stable_steps=0, decay_steps=20, decay=decay)
    shape: Callable[[float], float] = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    }[decay]
    assert got[:21] == pytest.approx([PEAK * shape(step / 20) for step in range(21)], abs=1e-15)


def test_wsd_lengths_that_are_not_set_follow_from_the_run() -> None:
    got = rates(1000)
    assert got[50] == PEAK > got[49]  # 5 % warm-up
    assert got[700] == PEAK > got[701]  # 30 % decay
    assert got[999] == pytest.approx(PEAK / 300)
    long = schedule.build(ScheduleConfig(), PEAK, 100_000)
    assert long(1000) == PEAK > long(999)  # 1000 steps of warm-up at most


def test_wsd_decay_ends_with_the_run_when_only_one_length_is_set() -> None:
    got = rates(100, warmup_steps=10, decay_steps=20)
    assert got[80] == PEAK > got[81]
    got = rates(100, warmup_steps=10, stable_steps=50)
    assert got[60] == PEAK > got[61]
    assert got[100] == 0


@pytest.mark.parametrize("max_steps", [1, 2, 3])
@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant", "warmup"])
def test_the_shortest_runs_begin_at_the_peak(kind: str, max_steps: int) -> None:
    assert rates(max_steps, type=kind)[0] == PEAK


# --- the others ----------------------------------------------------------------------------------------------------


def test_cosine_at_every_boundary() -> None:
    got = rates(104, type="cosine", warmup_steps=4, final_rate=1e-3)
    assert got[0] == pytest.approx(PEAK / 5)
    assert got[3] == pytest.approx(PEAK * 4 / 5)
    assert got[4] == pytest.approx(PEAK)
    assert got[54] == pytest.approx((PEAK + 1e-3) / 2)
    assert got[103] == pytest.approx(1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * 99 / 100)))
    assert got[104:] == pytest.approx([1e-3] * 5)


def test_cosine_is_torchs_cosine() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=1e-4)
    got = rates(50, type="cosine", warmup_steps=0, final_rate=1e-4)
    for step in range(51):
        assert got[step] == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        reference.step()


def test_cosine_with_a_decay_of_its_own_is_clamped_after_it() -> None:
    got = rates(50, type="cosine", warmup_steps=5, decay_steps=10, final_rate=1e-3)
    assert got[14] > 1e-3
    assert got[15:] == pytest.approx([1e-3] * 40)


def test_constant_is_constant_and_ignores_the_warm_up() -> None:
    assert set(rates(50, type="constant", warmup_steps=10)) == {PEAK}


def test_warm_up_only_stays_at_the_peak() -> None:
    got = rates(50, type="warmup", warmup_steps=10, warmup_rate=1e-3)
    assert got[:10] == pytest.approx([1e-3 + 9e-3 * step / 10 for step in range(10)])
    assert set(got[10:]) == {PEAK}


@pytest.mark.parametrize("mode", ["triangular", "triangular2", "exp_range"])
@pytest.mark.parametrize("length", [2, 10, 7])
def test_cyclic_is_torchs_cyclic(mode: str, length: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    reference = torch.optim.lr_scheduler.CyclicLR(
        optimizer,
        base_lr=1e-3,
        max_lr=PEAK,
        step_size_up=length / 2,
        mode=mode,
        gamma=0.95,
        cycle_momentum=False,
    )
    got = rates(60, type="cyclic", base_rate=1e-3, cycle_length=length, mode=mode, gamma=0.95)
    for step in range(60):
        assert got[step] == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        reference.step()


def test_cyclic_at_every_boundary() -> None:
    got = rates(30, type="cyclic", base_rate=1e-3, cycle_length=10)
    assert [got[step] for step in (0, 5, 10, 15, 20)] == pytest.approx([1e-3, PEAK, 1e-3, PEAK, 1e-3])
    halves = rates(30, type="cyclic", base_rate=1e-3, cycle_length=10, mode="triangular2")
    assert [halves[step] for step in (5, 15, 25)] == pytest.approx([1e-3 + 9e-3 / 2**n for n in range(3)])


@pytest.mark.parametrize("kind", ["wsd", "cosine", "warmup"])
def test_no_update_of_a_warm_up_is_wasted_at_a_rate_of_0(kind: str) -> None:
    got = rates(100, type=kind, warmup_steps=9)
    assert got[:10] == pytest.approx([PEAK * (step + 1) / 10 for step in range(10)])
