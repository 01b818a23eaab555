"""Quasi-Newton directions against the textbook, and what is kept of the past."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from foretrain.hybrid.moves.secant import Secant
from foretrain.persist.codec import put_together, snapshot

SHAPES = ((3, 4), (5,), (), (2, 1, 3))
SIZE = 12 + 5 + 1 + 6


def textbook(pairs: list[tuple[Tensor, Tensor]], gradient: Tensor, scales: Tensor | None) -> Tensor:
    """Two loops, pair by pair (Nocedal and Wright, algorithm 7.4), in double precision."""
    pairs = [(s.double(), y.double()) for s, y in pairs]
    q, alphas = gradient.double().clone(), []
    for s, y in reversed(pairs):
        alphas.append(s @ q / (s @ y))
        q -= alphas[-1] * y
    s, y = pairs[-1]
    shape = torch.ones_like(q) if scales is None else scales.double()
    r = shape * q * (s @ y) / (y @ (shape * y))
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        r += (alpha - y @ r / (s @ y)) * s
    return -r


class Path:
    """Weights on a walk over a quadratic, and their gradients."""

    def __init__(self, pairs: int, seed: int = 0) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(shape, generator=self.draw) for shape in SHAPES]
        root = torch.randn(SIZE, SIZE, generator=self.draw)
        self.hessian = root @ root.T / SIZE + 0.1 * torch.eye(SIZE)
        self.secant = Secant(self.weights, pairs)
        self.points: list[tuple[Tensor, Tensor]] = []

    def flat(self) -> Tensor:
        return torch.cat([w.reshape(-1) for w in self.weights])

    def show(self, gradient: Tensor | None = None) -> None:
        gradient = self.hessian @ self.flat() if gradient is None else gradient
        parts = gradient.split([w.numel() for w in self.weights])
        self.secant.at()
        self.secant.gradient_known([part.view(w.shape) for part, w in zip(parts, self.weights, strict=True)])
        self.points.append((self.flat(), gradient.clone()))

    def go(self, steps: int) -> Path:
        for _ in range(steps):
            self.show()
            for weight in self.weights:
                weight.add_(torch.randn(weight.shape, generator=self.draw), alpha=0.3)
        return self

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (after[0] - before[0], after[1] - before[1])
            for before, after in zip(self.points, self.points[1:], strict=False)
        ]

    def in_order(self, vector: Tensor) -> Tensor:
        """A vector of the secant's layout as one of ours."""
        return torch.cat([view.reshape(-1) for view in self.secant.layout.views(vector)])

    def scales(self) -> Tensor:
        moments = [torch.rand(shape, generator=self.draw) + 0.01 for shape in SHAPES]
        made = self.secant.scales(moments, 0.5, 1e-8)
        assert made is not None
        expected = torch.cat([1 / ((m / 0.5).sqrt() + 1e-8).reshape(-1) for m in moments])
        assert torch.allclose(self.in_order(made), expected)
        return made


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kept", "steps"), [(6, 2), (6, 5), (6, 7), (6, 8), (6, 23), (1, 4), (40, 20)])
def test_the_direction_is_that_of_the_textbook(kept: int, steps: int, scaled: bool) -> None:
    path = Path(kept).go(steps)
    scales = path.scales() if scaled else None
    direction, slope = path.secant.leap(scales)
    shape = path.in_order(scales) if scales is not None else None
    expected = textbook(path.pairs[-kept:], path.points[-1][1], shape)
    mine = path.in_order(direction).double()
    assert torch.linalg.norm(mine - expected) < 1e-3 * torch.linalg.norm(expected)
    assert slope == pytest.approx(float(expected @ path.points[-1][1].double()), rel=1e-3)
    assert slope < 0


def test_with_enough_pairs_the_direction_leads_to_the_minimum() -> None:
    path = Path(pairs=80).go(80)
    path.show()
    direction, _ = path.secant.leap(None)
    before = path.flat()
    path.secant.place(direction, 1.0)
    assert torch.linalg.norm(path.hessian @ path.flat()) < 0.1 * torch.linalg.norm(path.hessian @ before)


def test_the_ring_overwrites_the_oldest() -> None:
    path = Path(pairs=4).go(11)
    secant = path.secant
    assert sorted(secant.order) == [0, 1, 2, 3]
    for row, (s, y) in zip(secant.order, path.pairs[-4:], strict=True):
        assert torch.equal(path.in_order(secant.s[row]), s)
        assert torch.equal(path.in_order(secant.y[row]), y)


def test_dots_of_the_pairs_are_kept_up_to_date() -> None:
    path = Path(pairs=4).go(11)
    rows = path.secant.order
    expected = np.array([[float(s @ y) for _, y in path.pairs[-4:]] for s, _ in path.pairs[-4:]])
    assert path.secant._sy[np.ix_(rows, rows)] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("bend", [-1.0, 0.0, 1e-10, float("nan")])
def test_a_pair_without_curvature_is_not_kept(bend: float) -> None:
    """Nor where rounding, which is another one in every case, makes it seem to have some."""
    for seed in range(20):
        path = Path(pairs=4, seed=seed).go(3)
        count = len(path.secant.order)
        step = path.flat() - path.points[-1][0]
        aside = torch.randn(SIZE, generator=path.draw)
        aside -= step * (aside @ step) / (step @ step)
        path.show(path.points[-1][1] + bend * step + aside)
        assert len(path.secant.order) == count
        # the next pair begins at the point that was shown last
        assert torch.equal(path.in_order(path.secant.weights), path.points[-1][0])


def test_a_pair_of_little_but_true_curvature_is_kept() -> None:
    path = Path(pairs=4).go(3)
    count = len(path.secant.order)
    step = path.flat() - path.points[-1][0]
    aside = torch.randn(SIZE, generator=path.draw)
    aside -= step * (aside @ step) / (step @ step)
    path.show(path.points[-1][1] + 1e-4 * step + aside)
    assert len(path.secant.order) == min(4, count + 1)


def test_a_parameter_without_a_gradient_counts_as_flat() -> None:
    path = Path(pairs=4)
    path.secant.at()
    path.secant.gradient_known([None, *(torch.ones(shape) for shape in SHAPES[1:])])
    assert torch.equal(path.in_order(path.secant.gradient), torch.cat([torch.zeros(12), torch.ones(SIZE - 12)]))


def test_placing_is_relative_to_the_point_of_the_last_gradient() -> None:
    path = Path(pairs=4).go(5)  # and the weights have moved on since
    path.secant.place(torch.zeros_like(path.secant.weights), 0.0)
    assert torch.equal(path.flat(), path.points[-1][0])
    direction, _ = path.secant.leap(None)
    path.secant.place(direction, 0.5)
    assert torch.allclose(path.flat(), path.points[-1][0] + 0.5 * path.in_order(direction))


def test_what_is_forgotten_makes_no_pair() -> None:
    path = Path(pairs=4).go(5)
    path.secant.forget()
    path.go(1)
    assert path.secant.order == []
    path.go(1)
    assert len(path.secant.order) == 1


@pytest.mark.parametrize("reach", [1e-3, 0.1, 1e6])
def test_a_leap_goes_no_further_than_its_pairs_can_tell(reach: float) -> None:
    path, near = Path(pairs=6).go(9), Path(pairs=6).go(9)
    near.secant.reach = reach
    (far, slope), (short, shorter) = path.secant.leap(None), near.secant.leap(None)
    longest = max(float(torch.linalg.norm(s)) for s, _ in path.pairs[-6:])
    assert near.secant.longest == pytest.approx(longest, rel=1e-5)
    share = min(1.0, reach * longest / float(torch.linalg.norm(far)))
    assert torch.allclose(short, share * far, rtol=1e-4)
    assert shorter == pytest.approx(share * slope, rel=1e-4)


def test_going_to_a_mark_is_as_if_the_last_gradient_had_been_taken_there() -> None:
    path = Path(pairs=8).go(3)
    secant = path.secant
    secant.mark = secant.point()
    marked = path.points[-1]
    path.go(3)
    count = len(secant.order)
    secant.go_to(secant.mark)
    assert torch.equal(path.in_order(secant.weights), marked[0])
    assert torch.equal(path.in_order(secant.gradient), marked[1])
    assert len(secant.order) == count + 1  # the way back is a pair
    resumed = Path(pairs=8)
    resumed.secant.load_state_dict(put_together(snapshot(secant.state_dict())))
    assert resumed.secant.mark is not None
    assert all(torch.equal(a, b) for a, b in zip(resumed.secant.mark, secant.mark or (), strict=True))
    secant.forget()  # pairs, not points
    resumed.secant.load_state_dict(put_together(snapshot(secant.state_dict())))
    assert resumed.secant.mark is not None
    assert torch.equal(resumed.secant.mark[0], secant.mark[0])


def test_no_scales_for_an_optimizer_without_second_moments() -> None:
    path = Path(pairs=4)
    assert path.secant.scales([torch.ones(shape) for shape in SHAPES[:-1]] + [None], 1.0, 1e-8) is None


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 11])
def test_state_goes_on_bit_for_bit(steps: int) -> None:
    whole, half = Path(pairs=4).go(steps), Path(pairs=4).go(steps)
    state = put_together(snapshot(half.secant.state_dict()))
    resumed = Path(pairs=4)
    resumed.secant.load_state_dict(state)
    resumed.draw.set_state(half.draw.get_state())
    for mine, theirs in zip(resumed.weights, half.weights, strict=True):
        mine.copy_(theirs)
    for path in (whole, resumed):
        path.go(6)
    assert whole.secant.order == resumed.secant.order
    assert np.array_equal(whole.secant._sy, resumed.secant._sy)
    (mine, slope), (theirs, other) = whole.secant.leap(None), resumed.secant.leap(None)
    assert torch.equal(mine, theirs)
    assert slope == other


def test_a_state_of_more_pairs_than_there_is_room_for_starts_anew() -> None:
    path = Path(pairs=8).go(9)
    small = Path(pairs=4)
    small.secant.load_state_dict(path.secant.state_dict())
    assert small.secant.order == []
    assert not small.secant.known


def test_memory_is_two_rows_per_pair() -> None:
    few, many = Secant([torch.zeros(1000)], 5), Secant([torch.zeros(1000)], 15)
    assert many.bytes - few.bytes == 10 * 2 * 4 * few.layout.size
