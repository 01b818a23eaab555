"""How far a move goes is found by probes; the weights stand exactly where the answer says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretrain.hybrid.moves import search
from foretrain.hybrid.moves.search import Found
from foretrain.motion.trajectory import Trajectory

Place = tuple[Trajectory, list[Tensor], list[Tensor]]


def at(direction: float = 0.1) -> Place:
    """Weights, where they start, and a displacement. None of the numbers is a round one."""
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)]
    start = [p.clone() for p in parameters]
    displacement = [direction * torch.randn(p.shape, generator=generator) for p in parameters]
    return Trajectory(parameters), start, displacement


def placing(place: Place) -> search.Place:
    trajectory, start, displacement = place
    return lambda share: trajectory.place(start, displacement, share)


def assert_stands(place: Place, share: float) -> None:
    trajectory, start, displacement = place
    for weights, begin, way in zip(trajectory.parameters, start, displacement, strict=True):
        expected = begin if share == 0 else torch.add(begin, way, alpha=share)
        assert torch.equal(weights, expected)


def losses(place: Place, table: Callable[[float], float]) -> tuple[Callable[[], float], list[float]]:
    """A probe that tells the loss of the share at which the weights stand, and the shares it was asked at."""
    trajectory, start, displacement = place
    asked: list[float] = []

    def probe() -> float:
        share = float((trajectory.parameters[1] - start[1]).norm() / displacement[1].norm())
        asked.append(round(share, 4))
        return table(share)

    return probe, asked


# --- careful ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "share", "tried"),
    [
        (lambda s: 2.0, 1.0, [1.0]),
        (lambda s: 1.0 + 1.5 * s, 0.5, [1.0, 0.5]),
        (lambda s: 1.0 + 3 * s, 0.25, [1.0, 0.5, 0.25]),
        (lambda s: math.nan if s > 0.3 else 1.0, 0.25, [1.0, 0.5, 0.25]),
        (lambda s: math.inf if s > 0.6 else 1.0, 0.5, [1.0, 0.5]),
        (lambda s: 2.0 + 1e-6, 0.0, [1.0, 0.5, 0.25]),
        (lambda s: math.nan, 0.0, [1.0, 0.5, 0.25]),
        (lambda s: math.inf, 0.0, [1.0, 0.5, 0.25]),
    ],
)
def test_careful_takes_the_first_length_that_is_no_disaster(
    table: Callable[[float], float], share: float, tried: list[float]
) -> None:
    place = at()
    probe, asked = losses(place, table)
    found = search.careful(placing(place), probe, limit=2.0)
    assert (found.share, found.probes) == (share, len(tried))
    assert asked == tried
    assert_stands(place, share)
    if share:
        assert found.loss == pytest.approx(table(share))
        assert found.loss <= 2.0


def test_careful_does_not_ask_for_a_lower_loss() -> None:
    """The loss right after a move says nothing about its worth where batches differ."""
    place = at()
    found = search.careful(placing(place), losses(place, lambda s: 1.9)[0], limit=2.0)
    assert found == Found(1.0, 1.9, 1)


# --- search ----------------------------------------------------------------------------------------------------------


def test_search_doubles_while_the_loss_falls() -> None:
    place = at()
    probe, asked = losses(place, lambda s: (s - 9.0) ** 2)
    found = search.search(placing(place), probe, anchor=81.0)
    assert (found.share, found.probes) == (8.0, 5)
    assert asked == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert found.loss == pytest.approx(1.0, abs=1e-3)
    assert_stands(place, 8.0)


def test_search_halves_until_the_loss_falls() -> None:
    place = at()
    probe, asked = losses(place, lambda s: (s - 0.2) ** 2)
    found = search.search(placing(place), probe, anchor=0.04)
    assert asked == [1.0, 0.5, 0.25]
    assert (found.share, found.probes) == (0.25, 3)
    assert_stands(place, 0.25)


@pytest.mark.parametrize("table", [lambda s: 1.0 + s, lambda s: 1.0, lambda s: math.nan, lambda s: math.inf])
def test_search_refuses_what_lowers_no_loss(table: Callable[[float], float]) -> None:
    place = at()
    probe, asked = losses(place, table)
    found = search.search(placing(place), probe, anchor=1.0)
    assert found.share == 0.0
    assert asked == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert math.isnan(found.loss)
    assert_stands(place, 0.0)


def test_search_survives_nan_beyond_the_good_part() -> None:
    place = at()
    found = search.search(placing(place), losses(place, lambda s: math.nan if s > 3 else -s)[0], anchor=0.0)
    assert (found.share, found.probes) == (2.0, 3)
    assert_stands(place, 2.0)


def test_search_ends_although_the_loss_falls_for_ever() -> None:
    place = at()
    probe, asked = losses(place, lambda s: -s)
    found = search.search(placing(place), probe, anchor=0.0)
    assert found.probes == len(asked) == 10
    assert found.share == 512.0
    assert_stands(place, 512.0)


@pytest.mark.parametrize("best", [0.07, 0.1, 0.3, 0.7, 1.0, 1.4, 3.0, 20.0, 300.0])
def test_search_always_lowers_the_loss_or_refuses(best: float) -> None:
    place = at()
    probe, _ = losses(place, lambda s: (s - best) ** 2)
    found = search.search(placing(place), probe, anchor=best**2)
    assert found.share > 0
    assert found.loss < best**2
    assert found.loss == pytest.approx((found.share - best) ** 2, rel=1e-3, abs=1e-6)
    assert_stands(place, found.share)


def test_a_search_may_begin_short_and_give_up_at_once() -> None:
    place = at()
    probe, asked = losses(place, lambda s: (s - 1.0) ** 2)
    found = search.search(placing(place), probe, anchor=1.0, first=0.25, shorter=())
    assert asked == [0.25, 0.5, 1.0, 2.0]
    assert found.share == 1.0
    assert_stands(place, 1.0)
    probe, asked = losses(place, lambda s: 1.0 + s)
    assert search.search(placing(place), probe, anchor=1.0, first=0.25, shorter=()).share == 0.0
    assert asked == [0.25]
    assert_stands(place, 0.0)


# --- refusals leave no trace -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e30, math.nan, math.inf])
def test_a_refusal_is_exact_to_the_bit(size: float) -> None:
    """Also where the displacement is no number, or so large that subtracting it again would not bring them back."""
    for choose, limit in ((search.careful, -1.0), (search.search, -1.0)):
        place = at(direction=size)
        found = choose(placing(place), lambda: 0.0, limit)
        assert found.share == 0.0
        assert_stands(place, 0.0)


@pytest.mark.parametrize("size", [math.nan, math.inf, 1e30])
def test_a_probe_of_absurd_weights_is_refused(size: float) -> None:
    for choose in (search.careful, search.search):
        place = at(direction=size)
        weights = place[0].parameters
        found = choose(placing(place), lambda weights=weights: float(sum(p.square().sum() for p in weights)), 1e3)
        assert found.share == 0.0
        assert_stands(place, 0.0)


def test_nothing_but_the_weights_changes() -> None:
    trajectory, start, displacement = at()
    before = [t.clone() for t in (*start, *displacement)]
    search.search(placing((trajectory, start, displacement)), lambda: 0.0, 1.0)
    search.careful(placing((trajectory, start, displacement)), lambda: 0.0, 1.0)
    for now, then in zip((*start, *displacement), before, strict=True):
        assert torch.equal(now, then)
