"""The fast trajectory beside a slow one that keeps every weight of every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.engine.world import World
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, WINDOWS_OF_MEANS
from foretrain.motion.trajectory import Trajectory

SHAPES = [(300, 7), (5,), (64, 3, 2), (1,)]
R = len(DIRECTIONS)


class Slow:
    """The same formulas, tensor by tensor, from the whole history."""

    def __init__(self, parameters: list[torch.Tensor], window: int) -> None:
        self.parameters, self.window = parameters, window
        self.history = [[p.clone() for p in parameters]]
        self.means: list[list[torch.Tensor]] = []
        self.windows = 0

    def step(self) -> None:
        self.history.append([p.clone() for p in self.parameters])

    def displacement(self, steps: int) -> list[torch.Tensor]:
        return [new - old for new, old in zip(self.history[-1], self.history[-1 - steps], strict=True)]

    def close(self) -> list[list[torch.Tensor]]:
        """[R][parameter] the basis after this window."""
        moved = self.displacement(self.window)
        self.windows += 1
        if not self.means:
            self.means = [[torch.zeros_like(p) for p in self.parameters] for _ in WINDOWS_OF_MEANS[1:]]
        for mean, windows in zip(self.means, WINDOWS_OF_MEANS[1:], strict=True):
            weight = max(1 / windows, 1 / self.windows)
            for tensor, new in zip(mean, moved, strict=True):
                tensor += weight * (new - tensor)
        last = [self.window * step for step in self.displacement(1)]
        return [last, moved, *[[t.clone() for t in mean] for mean in self.means]]


def make(seed: int = 0, dtype: torch.dtype = torch.float32, window: int = 3) -> tuple[list[Any], Trajectory, Slow]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return parameters, Trajectory(parameters, window=window, dtype=dtype), Slow(parameters, window)


def advance(parameters: list[Any], trajectory: Trajectory, slow: Slow, generator: torch.Generator) -> bool:
    trajectory.before_step()
    for p in parameters:
        p.add_(0.01 * torch.randn(p.shape, generator=generator) + 0.003)
    slow.step()
    return trajectory.after_step()


def dot(one: list[torch.Tensor], other: list[torch.Tensor]) -> np.ndarray:
    """[G] per tensor."""
    return np.array([float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dot_product_is_that_of_the_slow_reference(dtype: torch.dtype) -> None:
    parameters, trajectory, slow = make(dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    exact = {"rtol": 1e-4, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 0.03, "atol": 2e-3}
    basis: list[list[torch.Tensor]] | None = None
    frozen: list[list[torch.Tensor]] | None = None
    frozen_at = 0
    for _ in range(3 * 20):
        if not advance(parameters, trajectory, slow, generator):
            continue
        moved = slow.displacement(3)
        motion = trajectory.close()
        if basis is not None:
            expected = np.stack([dot(direction, moved) for direction in basis], axis=1)
            np.testing.assert_allclose(motion.window.dots, expected, **exact)
        np.testing.assert_allclose(motion.window.square, dot(moved, moved), **exact)
        if frozen is not None:
            assert motion.frozen is not None
            windows = slow.windows - frozen_at + 1
            assert motion.frozen.windows == windows
            since = slow.displacement(3 * windows)
            expected = np.stack([dot(direction, since) for direction in frozen], axis=1)
            np.testing.assert_allclose(motion.frozen.dots, expected, **exact)
            np.testing.assert_allclose(motion.frozen.square, dot(since, since), **exact)
        basis = slow.close()
        expected = np.stack([[dot(a, b) for a in basis] for b in basis]).transpose(2, 0, 1)
        np.testing.assert_allclose(motion.gram, expected, **exact)
        if trajectory.frozen_windows == 0:
            frozen, frozen_at = basis, slow.windows


def test_the_basis_is_frozen_for_the_longest_horizon_and_then_anew() -> None:
    parameters, trajectory, slow = make()
    generator = torch.Generator().manual_seed(1)
    ages = []
    for _ in range(3 * 20):
        if advance(parameters, trajectory, slow, generator):
            motion = trajectory.close()
            ages.append(motion.frozen.windows if motion.frozen else 0)
    longest = HORIZONS_IN_WINDOWS[-1]
    assert ages == [0, *range(1, longest + 1), *range(1, longest + 1), *range(1, 4)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_a_move_changes_every_tensor_by_exactly_basis_times_coefficients(seed: int, narrow: bool) -> None:
    parameters, trajectory, slow = make(seed, torch.bfloat16 if narrow else torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(9):
        if advance(parameters, trajectory, slow, generator):
            trajectory.close()
    coefficients = np.random.default_rng(seed).normal(size=(len(SHAPES), R))
    before = [p.clone() for p in parameters]
    rows = [trajectory.layout.views(row) for row in trajectory.basis]
    trajectory.place(None, trajectory.displacement(coefficients))
    for index, (p, old) in enumerate(zip(parameters, before, strict=True)):
        expected = torch.zeros_like(old)
        for direction in range(R):  # the order of the fast path: sums of floats depend on it
            factor = torch.tensor(coefficients[index, direction], dtype=torch.float32)
            expected = torch.addcmul(expected, rows[direction][index].float(), factor)
        assert torch.equal(p, old + expected)
        assert not torch.equal(p, old)


def test_place_with_nothing_of_a_displacement_is_the_start_even_if_it_is_not_a_number() -> None:
    parameters, trajectory, _ = make()
    start = [p.clone() for p in parameters]
    trajectory.place(start, [torch.full_like(p, torch.nan) for p in parameters], 0.0)
    assert all(torch.equal(p, old) for p, old in zip(parameters, start, strict=True))
    trajectory.place(start, [torch.ones_like(p) for p in parameters], 0.5)
    assert all(torch.equal(p, old + 0.5) for p, old in zip(parameters, start, strict=True))


def test_a_restart_forgets_the_open_window_but_not_the_basis() -> None:
    parameters, trajectory, slow = make()
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        advance(parameters, trajectory, slow, generator)
    trajectory.close()
    basis = trajectory.basis.clone()
    advance(parameters, trajectory, slow, generator)
    for p in parameters:
        p.add_(100.0)  # a move
    trajectory.restart()
    assert trajectory.steps == 0
    assert torch.equal(trajectory.basis, basis)
    for _ in range(3):
        advance(parameters, trajectory, slow, generator)
    motion = trajectory.close()
    assert motion.frozen is None
    assert motion.window.square.sum() < 1.0  # the jump of 100 is not in it


def test_state_goes_on_bit_for_bit() -> None:
    one = make()
    other = make(seed=5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3 * 11 + 1):
        if advance(*one, generator):
            one[1].close()
    for p, source in zip(other[0], one[0], strict=True):
        p.copy_(source)
    saved = one[1].state_dict()
    other[1].load_state_dict({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saved.items()})
    generators = [torch.Generator().manual_seed(9) for _ in range(2)]
    for _ in range(30):
        full = [advance(*run, g) for run, g in zip((one, other), generators, strict=True)]
        if full[0]:
            motions = [run[1].close() for run in (one, other)]
            assert np.array_equal(motions[0].gram, motions[1].gram)
            assert np.array_equal(motions[0].window.dots, motions[1].window.dots)
            assert (motions[0].frozen is None) == (motions[1].frozen is None)
    assert torch.equal(one[1].basis, other[1].basis)


def test_dots_are_reduced_in_one_place() -> None:
    """Two shards whose dots are added see what one whole sees."""
    parameters = [torch.randn(10, 4), torch.randn(6)]
    halves = [[p[: len(p) // 2].clone() for p in parameters], [p[len(p) // 2 :].clone() for p in parameters]]
    seen: list[torch.Tensor] = []

    class Collecting(World):
        def reduce(self, vector: torch.Tensor, kind: str) -> torch.Tensor:
            assert kind == "sharded"
            seen.append(vector.clone())
            return vector

    whole = Trajectory(parameters, window=2, world=Collecting())
    shards = [Trajectory(half, window=2, world=Collecting()) for half in halves]
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        change = [torch.randn(p.shape, generator=generator) for p in parameters]
        for each, part in zip((whole, *shards), (slice(None), 0, 1), strict=True):
            each.before_step()
            for p, d in zip(each.parameters, change, strict=True):
                half = len(d) // 2
                p.add_(d if part == slice(None) else d[:half] if part == 0 else d[half:])
            if each.after_step():
                each.close()
    for start in (0, 3):
        torch.testing.assert_close(seen[start], seen[start + 1] + seen[start + 2], rtol=1e-5, atol=1e-5)


def test_many_parameters_share_groups_and_memory_is_what_it_says() -> None:
    parameters = [torch.randn(3) for _ in range(700)]
    trajectory = Trajectory(parameters, [f"p{i}" for i in range(700)], window=2)
    assert len(trajectory.groups) <= 256
    assert trajectory.groups[0] == "p0 ..."
    size = trajectory.layout.size
    assert trajectory.bytes == 4 * size * (2 * R + 2) + 4 * size * 2
    narrow = Trajectory(parameters, window=2, dtype=torch.bfloat16)
    assert narrow.bytes == 2 * size * (2 * R + 2) + 4 * size * 2


def test_memory_that_was_given_back_is_taken_again_with_nothing_in_it() -> None:
    parameters = [torch.randn(300), torch.randn(7)]
    trajectory = Trajectory(parameters, window=2)
    size = trajectory.bytes
    for _ in range(2):
        trajectory.before_step()
        torch._foreach_add_(parameters, 1.0)
        trajectory.after_step()
    trajectory.close()
    trajectory.release()
    assert (trajectory.bytes, trajectory.held, trajectory.windows) == (0, False, 0)
    trajectory.restart()  # as after a rollback
    trajectory.before_step()
    assert [trajectory.after_step() for _ in range(2)] == [False, True]
    assert [numbers.tolist() for numbers in trajectory.skip([torch.ones(2), torch.zeros(1)])] == [[1.0, 1.0], [0.0]]
    trajectory.after_step()
    other = Trajectory(parameters, window=2)
    other.load_state_dict(trajectory.state_dict())
    assert (other.bytes, other.steps) == (0, 1)
    trajectory.hold()
    assert (trajectory.bytes, trajectory.held, trajectory.steps) == (size, True, 0)
    assert not trajectory.basis.any()
    assert torch.equal(trajectory._previous_views[0], parameters[0])
    other.load_state_dict(trajectory.state_dict())
    assert other.bytes == size
