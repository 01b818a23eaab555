"""Leaps that are replayed from recorded graphs are those that are computed anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.hybrid.linearised.problems import POINTS, network, poisson
from tests.hybrid.linearised.test_leaps import LINE, chaining, leaps_of, world
from torch import Tensor

from foretrain.hybrid.linearised import recorded


def _tensors(found: Any) -> list[Tensor]:
    """All tensors in what was recorded, in one order."""
    if isinstance(found, Tensor):
        return [found.detach()]
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        return [tensor for one in found for tensor in _tensors(one)]
    return _tensors(list(vars(found).values())) if type(found).__module__.startswith("foretrain.hybrid") else []


class Replays:
    """Stands for CUDA graphs where there is no GPU: a replay computes anew, and writes into the same memory."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.fails = False

    def record(self, run: Callable[[], Any], warm: bool = False) -> tuple[Callable[[], None], Any]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for kept, new in zip(_tensors(result), _tensors(run()), strict=True):
                kept.copy_(new)

        return replay, result


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    found = Replays()
    monkeypatch.setattr(recorded, "record", found.record)
    return found


def fresh(position: int) -> Tensor:
    return LINE + 0.001 * torch.rand(LINE.shape, generator=torch.Generator().manual_seed(position))


@pytest.mark.parametrize("rows", [8, 160])
@pytest.mark.parametrize("points", [LINE, POINTS, fresh])
def test_replayed_leaps_lead_to_the_same_weights(rows: int, points: Any, replays: Replays) -> None:
    ends = []
    for wanted in (False, True):
        run = world(network(width=6), points, residuals=poisson, hybrid__linear_rows=rows, max_steps=200)
        leaps_of(run).lookout.recordable = wanted
        chaining(run, 12)
        assert bool(leaps_of(run).lookout.recorded) == wanted
        ends.append([p.detach().clone() for p in run.trainer.model.parameters()])
    assert replays.recorded >= 2
    assert replays.replayed >= 16
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_recorded_is_computed(replays: Replays) -> None:
    replays.fails = True
    run = world(network(width=6), LINE, residuals=poisson, max_steps=200)
    leaps = leaps_of(run)
    leaps.lookout.recordable = True
    chaining(run, 12)
    assert not leaps.lookout.recordable
    assert leaps.leaps >= 12
    assert leaps.loss < leaps.start_loss


def test_a_chain_that_ended_holds_no_graph(replays: Replays) -> None:
    run = world(network(width=6), LINE, residuals=poisson, max_steps=200)
    leaps = leaps_of(run)
    leaps.lookout.recordable = True
    chaining(run, 12)
    assert leaps.lookout.recorded
    leaps.release()
    assert not leaps.lookout.recorded


def test_a_later_recording_that_fails_leaves_no_trace(replays: Replays) -> None:
    """Less damping is solved in another type, which is recorded when it is first needed."""
    ends = []
    for fails in (False, True):
        replays.fails = False
        run = world(network(width=6), LINE, max_steps=200)
        leaps = leaps_of(run)
        leaps.lookout.recordable = True
        chaining(run, 3)
        assert leaps.lookout.recorded
        replays.fails = fails
        chaining(run, 14)
        assert leaps.lookout.recordable is not fails
        ends.append([p.detach().clone() for p in run.trainer.model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_few_recordings_are_kept(replays: Replays) -> None:
    run = world(network(width=6), LINE, max_steps=400)
    leaps = leaps_of(run)
    leaps.lookout.recordable = True
    chaining(run, 3)
    look, start = leaps.lookout.look(LINE), leaps._point()
    for rows in (4, 6, 8, 10, 12):
        leaps.row_count.now = rows
        for _ in range(2):
            some = [torch.arange(rows)]
            leaps.lookout.problem(look, leaps.lookout.find_way(look, leaps.made), some, damping=1.0)
    leaps._go_to(start)
    assert len(leaps.lookout.recorded) == 3
