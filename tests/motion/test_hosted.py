"""The trajectory in host memory does what the one on the device does, bit for bit, whatever the size of its buffer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.slow_lane import SlowLane, spoil
from torch import Tensor

from foretrain.motion import hosted as hosted_module
from foretrain.motion.hosted import HostedTrajectory
from foretrain.motion.records import DIRECTIONS
from foretrain.motion.trajectory import Motion, Trajectory

SHAPES = [(300, 7), (5,), (64, 3, 2), (1,), (40, 40)]
WINDOW = 3


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [*made[:-1], made[-1].T]  # the last one is not laid out row by row


def pair(buffer_bytes: int, basis: torch.dtype, dtype: torch.dtype) -> list[tuple[list[Tensor], Trajectory]]:
    one, other = weights(dtype), weights(dtype)
    hosted = HostedTrajectory(other, window=WINDOW, dtype=basis, buffer_bytes=buffer_bytes)
    return [(one, Trajectory(one, window=WINDOW, dtype=basis)), (other, hosted)]


def steps(parameters: list[Tensor], trajectory: Trajectory, count: int, seed: int) -> list[Motion]:
    generator = torch.Generator().manual_seed(seed)
    motions = []
    for _ in range(count):
        trajectory.before_step()
        for p in parameters:
            p.add_(0.01 * torch.randn(p.shape, generator=generator).to(p.dtype) + 0.003)
        if trajectory.after_step():
            motions.append(trajectory.close([torch.ones(2)]))
    return motions


def flat(motion: Motion) -> list[Any]:
    parts = [motion.window, *([motion.frozen] if motion.frozen else [])]
    numbers = [array for part in parts for array in (np.asarray(part.windows), part.dots, part.square)]
    return [*numbers, motion.gram, *motion.extra]


def same(one: Motion, other: Motion) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


@pytest.mark.parametrize("buffer_bytes", [1, 40_000, 10**9])
@pytest.mark.parametrize("basis", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_and_every_move_is_the_same(buffer_bytes: int, basis: torch.dtype, dtype: torch.dtype) -> None:
    runs = pair(buffer_bytes, basis, dtype)
    coefficients = np.random.default_rng(3).normal(size=(len(SHAPES), len(DIRECTIONS)))
    for seed in range(3):
        motions = [steps(*run, 30 + seed, seed) for run in runs]
        assert len(motions[0]) >= 10
        assert all(same(a, b) for a, b in zip(*motions, strict=True))
        saved = [run[1].state_dict() for run in runs]
        assert all(np.array_equal(saved[0][key], saved[1][key]) for key in ("windows", "steps", "frozen_windows"))
        for name in ("basis", "previous", "frozen", "since_freeze"):
            assert torch.equal(saved[0][name], saved[1][name]), name
        for parameters, trajectory in runs:
            start = [p.clone() for p in parameters]
            trajectory.place(None, trajectory.displacement(coefficients))
            trajectory.place(start, trajectory.displacement(coefficients), 0.3)
            trajectory.place(None, trajectory.displacement(coefficients), 0.3)
            trajectory.restart()
        assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))


def test_a_buffer_is_as_small_as_was_asked_for_and_at_least_one_chunk() -> None:
    (_, one), (_, small) = pair(80_000, torch.float32, torch.float32)
    assert isinstance(small, HostedTrajectory)
    assert 1 < small.chunks_at_once < one.layout.chunks
    assert pair(1, torch.float32, torch.float32)[1][1].chunks_at_once == 1  # type: ignore[attr-defined]
    covered = [(first, last) for first, last, _ in small._ranges()]
    assert covered[0][0] == 0
    assert covered[-1][1] == small.layout.chunks
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))


def test_no_more_than_the_buffer_is_ever_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is not in host memory is made by one function."""
    parameters, trajectory = pair(40_000, torch.float32, torch.float32)[1]
    assert isinstance(trajectory, HostedTrajectory)
    made: list[int] = []
    inner = trajectory._buffer

    def counted(rows: int, dtype: torch.dtype) -> Tensor:
        buffer = inner(rows, dtype)
        made.append(buffer.numel() * buffer.element_size())
        return buffer

    monkeypatch.setattr(trajectory, "_buffer", counted)
    steps(parameters, trajectory, WINDOW, 0)
    assert 0 < sum(made) <= 40_000
    made.clear()
    trajectory.displacement(np.ones((len(SHAPES), len(DIRECTIONS))))
    assert 0 < sum(made) <= 40_000


@pytest.mark.parametrize("to_host", [True, False])
def test_a_state_can_go_from_one_place_to_the_other(to_host: bool) -> None:
    runs = pair(40_000, torch.float32, torch.float32)
    (one, giver), (other, taker) = runs if to_host else runs[::-1]
    steps(one, giver, 35, 0)
    for mine, theirs in zip(other, one, strict=True):
        mine.copy_(theirs)
    taker.load_state_dict({k: v.clone() if isinstance(v, Tensor) else v for k, v in giver.state_dict().items()})
    motions = [steps(parameters, trajectory, 30, 1) for parameters, trajectory in ((one, giver), (other, taker))]
    assert all(same(a, b) for a, b in zip(*motions, strict=True))


def test_nothing_is_used_before_its_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a buffer that has not left yet, nor host memory that has not arrived yet."""
    monkeypatch.setattr(hosted_module, "Lane", SlowLane)
    runs = pair(40_000, torch.float32, torch.float32)
    hosted = runs[1][1]
    assert isinstance(hosted, HostedTrajectory)
    assert len(list(hosted._ranges())) > 2 * len(hosted._lanes)  # each buffer is used repeatedly
    motions = [steps(*run, 30, 0) for run in runs]
    assert all(same(a, b) for a, b in zip(*motions, strict=True))
    saved = [run[1].state_dict() for run in runs]
    for name in ("basis", "previous", "frozen", "since_freeze"):
        assert torch.equal(saved[0][name], saved[1][name]), name


@pytest.mark.parametrize("event", ["saved", "replaced", "forgotten"])
def test_the_host_waits_for_what_the_device_has_still_to_write(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, trajectory = pair(40_000, torch.float32, torch.float32)[1]
    steps(parameters, trajectory, 30, 0)
    expected = {k: v.clone() if isinstance(v, Tensor) else v for k, v in trajectory.state_dict().items()}
    late = [lambda: trajectory.basis.copy_(expected["basis"])]
    spoil(trajectory.basis)
    monkeypatch.setattr(hosted_module, "settle", lambda device: [late.pop()() for _ in list(late)])
    if event == "saved":
        assert torch.equal(trajectory.state_dict()["basis"], expected["basis"])
    elif event == "replaced":
        trajectory.load_state_dict(expected | {"basis": torch.ones_like(expected["basis"])})
        hosted_module.settle(trajectory.device)
        assert bool((trajectory.basis == 1).all())
    else:
        trajectory.forget()
        hosted_module.settle(trajectory.device)
        assert not bool(trajectory.basis.any())


def test_host_memory_is_given_back_and_taken_again() -> None:
    parameters = [torch.randn(300), torch.randn(7)]
    trajectory = HostedTrajectory(parameters, window=2, hold=False)
    assert trajectory.bytes == 0
    trajectory.hold()
    size, other = trajectory.bytes, HostedTrajectory(parameters, window=2)
    assert size == other.bytes > 0
    trajectory.release()
    assert trajectory.bytes == 0
    trajectory.hold()
    for step in range(4):
        for each in (trajectory, other):
            each.before_step()
        torch._foreach_add_(parameters, float(step))
        if trajectory.after_step() & other.after_step():
            assert same(trajectory.close(), other.close())
    assert trajectory.bytes == size
