"""Probes: the loss with the anchor's random numbers, their price, what a held-out loss is worth, what leaves beside."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hybrid.moves.test_chain import Random
from tests.worlds import Net, Regression, world

from foretrain.engine.batch import rows_of
from foretrain.engine.world import ALONE
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.judges.probes import Probes
from foretrain.hybrid.judges.worth import Worth
from foretrain.persist.codec import random_state


def made(away: Any = None, **memory: Any) -> Any:
    hybrid = SimpleNamespace(mode=memory.pop("mode", "rollout"))
    config = SimpleNamespace(memory=SimpleNamespace(**{"return_ahead": 5, **memory}), hybrid=hybrid)
    engine: Any = SimpleNamespace(away=away, count=rows_of, config=config, world=ALONE)
    snapshots: Any = SimpleNamespace(optimizer_state=lambda: {"state": {}})
    return Probes(engine, snapshots)


def test_probes_see_the_same_random_numbers_and_disturb_none() -> None:
    """Dropout is off in them, but a loss may draw by itself."""
    run = world(Random(dropout=0.5), Regression(), {}, "repeat")
    probes = run.trainer.policy.tools.probes
    move = SimpleNamespace(random=random_state(), batch=Regression()(0))
    before = torch.get_rng_state()
    first = probes.loss(move)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert run.trainer.engine.probe(move.batch) != first
    assert probes.loss(move) == first == probes.loss(move, move.batch)  # type: ignore[arg-type]
    assert probes.loss(move, Regression()(1)) != first  # type: ignore[arg-type]
    assert probes.seconds > 0


def test_a_probe_of_the_batch_is_a_third_of_a_step_and_held_out_ones_cost_what_they_hold() -> None:
    probes, batch = made(), (torch.zeros(16, 8), torch.zeros(16))
    assert probes.price(batch) == FORWARD
    probes.batches = [(torch.zeros(24, 8), torch.zeros(24)), (torch.zeros(8, 8), torch.zeros(8))]
    assert probes.price(batch) == pytest.approx(2 * FORWARD)


def test_a_held_out_loss_is_worth_what_full_steps_took_to_lower_it() -> None:
    engine: Any = SimpleNamespace(progress=SimpleNamespace(backward_passes=10))
    slope: Any = SimpleNamespace(per_step=lambda low_noise: 0.5)
    worth = Worth(engine, slope)
    assert worth.on_probes(1.0, moved=7) == 2.0  # as the training loss falls, as long as nothing else is known
    worth.remember_probes(5.0)
    engine.progress.backward_passes = 30
    worth.watch_probes(3.0)  # 2 in 20 steps
    assert worth.on_probes(1.0, moved=7) == pytest.approx(10.0)
    assert worth.on_probes(4.5, moved=4) == 40.0  # ten per predicted step at the most
    assert worth.on_probes(-1.0, moved=7) == 0.0
    engine.progress.backward_passes = 40
    worth.watch_probes(3.5)  # full steps alone get nowhere
    assert worth.on_probes(1.0, moved=7) == 7.0
    other = Worth(engine, slope)
    other.load_state_dict(worth.state_dict())
    assert other.state_dict() == worth.state_dict()
    assert list(worth.state_dict().values()) == [40, 3.5, pytest.approx(-0.05)]


@pytest.mark.parametrize(
    ("mode", "ahead", "expected"),
    [("rollout", 5, (80, 400)), ("rollout", 2, (80, 160)), ("leap", 5, (80, 80)), ("leap", 0, (math.inf, math.inf))],
)
def test_what_leaves_is_what_a_probe_hides_and_can_be_back_in_time(
    mode: str, ahead: int, expected: tuple[float, float]
) -> None:
    told: list[Any] = []
    away = SimpleNamespace(begun=False, hidden_bytes=lambda seconds: 40 * seconds, leave=lambda *a: told.append(a))
    away.fetch = told.append
    probes = made(away=away, mode=mode, return_ahead=ahead)
    probes.seconds = 2.0
    probes.offload()
    away.begun = True
    probes.offload()
    assert told == [({"state": {}}, *expected), (None, *expected)]
    told.clear()
    for steps_left in (7, 5, 4, 0, -1):
        probes.bring_back(steps_left)
    assert told == [80] * sum(steps_left < ahead for steps_left in (7, 5, 4, 0)) + [math.inf]


def test_without_offload_nothing_leaves() -> None:
    run = world(Net(), Regression(), {}, "repeat")
    for number in range(3):
        run.trainer.step(Regression()(number))
    probes, optimizer = run.trainer.policy.tools.probes, run.trainer.optimizer
    assert probes.engine.away is None
    before = {id(p): {name: id(value) for name, value in state.items()} for p, state in optimizer.state.items()}
    gradients = [id(p.grad) for p in run.trainer.engine.full_step.parameters]
    probes.offload()
    probes.bring_back(-1)
    after = {id(p): {name: id(value) for name, value in state.items()} for p, state in optimizer.state.items()}
    assert after == before
    assert len(before) == len(gradients)
    assert [id(p.grad) for p in run.trainer.engine.full_step.parameters] == gradients
