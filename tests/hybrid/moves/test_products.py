"""A low-rank product goes on as it went; both factors follow."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds import Regression
from torch import Tensor, nn

from foretrain.config import from_mapping
from foretrain.engine.engine import Engine
from foretrain.events import Moved
from foretrain.hybrid.moves.products import Products
from foretrain.motion.observer import Moment, Observer
from foretrain.trainer import HybridTrainer

Factors = tuple[Tensor, Tensor, Tensor, Tensor]


class LowRank(nn.Module):
    """A frozen layer and a trained product beside it."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.base = nn.Linear(8, 1)
        self.base.requires_grad_(False).weight.copy_(torch.randn(1, 8, generator=generator))
        self.lora_a = nn.Parameter(torch.randn(rank, 8, generator=generator))
        self.lora_b = nn.Parameter(torch.zeros(1, rank))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = self.base(batch[0]) + batch[0] @ self.lora_a.T @ self.lora_b.T
        return (made[:, 0] - batch[1]).square().mean()


class Pair(nn.Module):
    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.lora_a, self.lora_b = nn.Parameter(a.clone()), nn.Parameter(b.clone())


def factors(seed: int, rank: int, scale: float) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rank, 7), (5, rank), (rank, 7), (5, rank))
    a, b, a_moved, b_moved = (torch.randn(shape, generator=generator) for shape in shapes)
    return a, b, scale * a_moved, scale * b_moved


def placed(drawn: Factors, share: float) -> tuple[Tensor, Tensor]:
    a, b, a_moved, b_moved = drawn
    parameters = [p.detach() for p in Pair(a, b).parameters()]
    products = Products.of(Pair(a, b), parameters)
    assert products is not None
    parameters[0].copy_(a + share * a_moved)
    products.place([a, b], [a_moved, b_moved], share)
    return parameters[0], parameters[1]


def target(drawn: Factors, share: float) -> Tensor:
    a, b, a_moved, b_moved = drawn
    return b @ a + share * ((b + b_moved) @ (a + a_moved) - b @ a)


@given(st.integers(0, 1000), st.integers(1, 4), st.floats(0.01, 1.0))
@settings(deadline=None, max_examples=50)
def test_one_whole_move_is_where_both_factors_lead(seed: int, rank: int, scale: float) -> None:
    drawn = factors(seed, rank, scale)
    new_a, new_b = placed(drawn, 1.0)
    torch.testing.assert_close(new_b @ new_a, target(drawn, 1.0), rtol=1e-3, atol=1e-3)


@given(st.integers(0, 1000), st.floats(0.5, 64.0))
@settings(deadline=None, max_examples=50)
def test_the_product_is_nearest_to_its_straight_way(seed: int, share: float) -> None:
    """No other B is nearer; above all not the one that moved by itself."""
    drawn = factors(seed, 3, 0.05)
    new_a, new_b = placed(drawn, share)
    wanted = target(drawn, share)
    distance = (new_b @ new_a - wanted).norm()
    by_itself = ((drawn[1] + share * drawn[3]) @ new_a - wanted).norm()
    assert distance <= by_itself * (1 + 1e-4) + 1e-4
    nudged = ((new_b + 1e-2 * torch.randn(new_b.shape)) @ new_a - wanted).norm()
    assert distance <= nudged + 1e-5


def test_where_a_stands_still_the_way_is_exact() -> None:
    a, b, a_moved, b_moved = factors(3, 2, 0.1)
    drawn = (a, b, torch.zeros_like(a_moved), b_moved)
    new_a, new_b = placed(drawn, 16.0)
    torch.testing.assert_close(new_b @ new_a, target(drawn, 16.0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(new_b, b + 16 * b_moved, rtol=1e-3, atol=1e-3)


def test_full_weights_have_no_products() -> None:
    model = nn.Linear(3, 2)
    assert Products.of(model, [p.detach() for p in model.parameters()]) is None


# --- judged on held-out batches --------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {
    "device": "cpu",
    "max_steps": 120,
    "optimizer.type": "adamw",
    "optimizer.learning_rate": 1e-3,
    "schedule.type": "constant",
    "hybrid.warmup_steps": 20,
    "hybrid.full_steps": 6,
    "hybrid.window_steps": 3,
    "hybrid.correct_steps": 2,
}


def adapted(probe: int, **changes: Any) -> HybridTrainer:
    data = Regression()
    held_out = [(data.inputs[1200:1232], data.targets[1200:1232])] * probe
    trainer = HybridTrainer(LowRank(), config=from_mapping(QUICK | changes), probe=held_out)
    while trainer.global_step < 120 or trainer.judging:
        trainer.step(data(trainer.position))
    return trainer


def test_adapters_leap_where_held_out_batches_say_so() -> None:
    """The rate is much too low: leaps found on held-out rows repair that. Without such rows nothing is tried."""
    data = Regression()
    leaping, without, plain = adapted(1), adapted(0), adapted(0, **{"hybrid.mode": "off"})
    moves = leaping.summary()["moves"]
    assert moves["kept"] + moves["shrunk"] >= 3
    assert sum(without.summary()["moves"].values()) == 0

    def loss(trainer: HybridTrainer) -> float:
        with torch.no_grad():
            return float(trainer.model.loss((data.inputs[1300:], data.targets[1300:])))

    assert loss(without) == loss(plain)
    assert loss(leaping) < 0.9 * loss(plain)


@pytest.mark.parametrize("batches", [1, 2])
def test_tokens_of_held_out_probes_are_charged(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    probes = []
    inner = Engine.probe_all

    def probe_all(self: Engine, held_out: list[Any]) -> float:
        probes.append(len(held_out))
        return inner(self, held_out)

    monkeypatch.setattr(Engine, "probe_all", probe_all)
    trainer = adapted(batches)
    assert len(probes) > 5
    assert set(probes) == {batches}
    assert trainer.engine.progress.probe_tokens == 32 * sum(probes)


def watched_windows(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[HybridTrainer, list[int]]:
    steps = []
    inner = Observer.measure

    def measure(self: Observer, moment: Moment) -> None:
        steps.append(moment.step)
        inner(self, moment)

    monkeypatch.setattr(Observer, "measure", measure)
    return adapted(1, **changes), steps


def test_nothing_is_watched_while_refused_leaps_make_the_gate_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate that is too high every leap is refused. Between two of them the weights are left in peace."""
    trainer, steps = watched_windows(monkeypatch, **{"optimizer.learning_rate": 0.5})
    moves = trainer.summary()["moves"]
    assert moves["refused"] >= 1
    assert moves["kept"] + moves["shrunk"] == 0
    assert len(steps) < 0.5 * 120 / 3
    assert max(after - before for before, after in pairwise(steps)) > 18  # the first wait is four cycles of six steps


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 33), ("constant", 100)])
def test_nothing_is_watched_any_more_once_the_rate_falls(
    monkeypatch: pytest.MonkeyPatch, schedule: str, last: int
) -> None:
    _, steps = watched_windows(monkeypatch, **{"schedule.type": schedule, "optimizer.learning_rate": 1e-3})
    assert (max(steps) <= last) is (schedule == "cosine")


@pytest.mark.parametrize("warmup", [0, 60])
def test_adapters_do_not_leap_while_the_learning_rate_warms_up(warmup: int) -> None:
    data = Regression()
    settings = QUICK | {"schedule.type": "warmup", "schedule.warmup_steps": warmup}
    held_out = [(data.inputs[1200:1232], data.targets[1200:1232])]
    trainer = HybridTrainer(LowRank(), config=from_mapping(settings), probe=held_out)
    moved: list[int] = []
    trainer.bus.subscribe(lambda event: moved.append(event.step) if isinstance(event, Moved) else None)
    while trainer.global_step < 120 or trainer.judging:
        trainer.step(data(trainer.position))
    assert moved
    assert (min(moved) >= 60) is (warmup == 60)
