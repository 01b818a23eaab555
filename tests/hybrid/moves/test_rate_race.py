"""A learning rate that is found by trying several on the first steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.slow_lane import SlowLane
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import changed, from_mapping
from foretrain.config.schema import FIRST_RATE
from foretrain.engine.memory import offload
from foretrain.events import Event, Notice, RateTrial, RateTried
from foretrain.hybrid.moves.rate_race import FACTOR, MOST, with_short_warmup
from foretrain.hybrid.summary import optimizer_in_words

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(40, 16, 8, generator=GENERATOR)
TARGET = torch.randn(8, 1, generator=GENERATOR)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def batches(scale: float) -> list[tuple[Tensor, Tensor]]:
    return [(rows, scale * rows @ TARGET) for rows in INPUTS]


def make(scale: float, bias: bool = False, **settings: Any) -> HybridTrainer:
    """The answer is `scale` long, so that many steps of Adam, or long ones, are needed where it is large."""
    torch.manual_seed(1)
    values = {
        "device": "cpu",
        "max_steps": 40,
        "optimizer.type": "adamw",
        "optimizer.learning_rate": "auto",
        "optimizer.weight_decay": 0.0,
        "schedule.type": "warmup",
        "schedule.warmup_steps": 5,
        "hybrid.warmup_steps": 1000,
    }
    probe = [(torch.ones(4, 8), scale * torch.ones(4, 8) @ TARGET)]
    model = nn.Linear(8, 1, bias=bias)
    nn.init.zeros_(model.weight)
    return HybridTrainer(model, loss_fn=loss, config=from_mapping(values | settings), probe=probe)


def train(trainer: HybridTrainer, scale: float, first: int = 0, last: int = 40) -> list[Tensor]:
    for batch in batches(scale)[first:last]:
        trainer.step(batch)
    return [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize(("scale", "best"), [(1.0, 3), (0.003, 0), (0.001, -1)])
def test_the_rate_that_ends_lowest_goes_on(scale: float, best: int) -> None:
    """The answer is some `scale` away, and ten steps of Adam go ten times the rate."""
    trainer = make(scale)
    tried: list[Event] = []
    trainer.bus.subscribe(tried.append)
    weights = train(trainer, scale)
    race = trainer.hybrid.race
    assert race.best == best
    assert race.tried[best] == min(race.tried.values())
    assert len(race.tried) == min(abs(best) + 2, MOST + 1) + (best <= 0)
    assert trainer.summary()["learning_rate"]["chosen"] == pytest.approx(FIRST_RATE * FACTOR**best)
    told = [event for event in tried if isinstance(event, RateTried)]
    assert [event.loss for event in told] == list(race.tried.values())
    trials = [event for event in tried if isinstance(event, RateTrial)]
    assert (trials[0].learning_rate, trials[0].step, trials[0].others) == (FIRST_RATE, 0, 20)
    assert trials[0].others <= race.cost
    assert list(dict.fromkeys(event.learning_rate for event in trials)) == [event.learning_rate for event in told]
    assert [event.done for event in trials[1:10]] == list(range(1, 10))
    # from there on it is the run that has this rate from the start, bit for bit
    rate = FIRST_RATE * FACTOR**best
    plain = make(scale, **{"optimizer.learning_rate": rate, "hybrid.mode": "off"})
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(weights, train(plain, scale), strict=True))
    assert trainer.global_step == trainer.position == sum(trainer.summary()["steps"].values()) == 40
    assert trainer.backward_passes == 40 + race.cost
    assert race.cost == 10 * (len(race.tried) - 1)
    assert trainer.engine.progress.probe_tokens == 4 * len(race.tried)


def test_the_first_weights_are_saved_before_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot in host memory may be on its way while probes run, but not while weights are updated."""
    usual = make(0.003)
    train(usual, 0.003)
    monkeypatch.setattr(offload, "Lane", SlowLane)
    late = make(0.003, **{"memory.snapshots": "pinned"})
    train(late, 0.003)
    assert late.hybrid.race.tried == usual.hybrid.race.tried


def test_what_is_told_after_a_race_is_of_the_rate_that_goes_on() -> None:
    trainer = make(0.003)
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    rates = [trainer.step(batch).learning_rate for batch in batches(0.003)[:11]]
    assert max(rates[9:]) <= FIRST_RATE  # not the last rate that was tried
    (said,) = [event.message for event in events if isinstance(event, Notice)]
    assert said == f"the run goes on with a learning rate of {FIRST_RATE:.3g}, the best of 3"
    assert "lr auto" in optimizer_in_words(trainer.engine)


@pytest.mark.parametrize("stop", [3, 9, 10, 11, 25])
def test_a_race_goes_on_exactly_after_a_stop(stop: int) -> None:
    whole = make(1.0)
    straight = train(whole, 1.0)
    first = make(1.0)
    train(first, 1.0, 0, stop)
    second = make(1.0)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(train(second, 1.0, stop), straight, strict=True))
    assert second.hybrid.race.best == 3
    assert second.summary()["learning_rate"] == whole.summary()["learning_rate"]


def test_losses_of_rates_that_lost_are_no_progress() -> None:
    trainer = make(0.001)
    train(trainer, 0.001, 0, 10)
    reading = trainer.engine.meter.read()
    assert reading is not None
    assert reading.steps == 10


def test_a_rate_that_is_no_number_loses() -> None:
    trainer = make(1.0)
    trainer.hybrid.race.tried[0], trainer.hybrid.race.best = float("nan"), 0
    assert trainer.hybrid.race._measure(1)
    assert trainer.hybrid.race.best == 1


@pytest.mark.parametrize(("steps", "warmup"), [(10, 2), (60, 5), (300, 15), (5000, 50)])
def test_a_race_sees_twice_the_warmup(steps: int, warmup: int) -> None:
    config = from_mapping({"optimizer.learning_rate": "auto", "max_steps": steps})
    assert with_short_warmup(config).schedule.warmup_steps == warmup
    assert with_short_warmup(changed(config, {"schedule.warmup_steps": 7})).schedule.warmup_steps == 7
    assert with_short_warmup(changed(config, {"optimizer.learning_rate": 1e-3})).schedule.warmup_steps is None


def test_a_race_scales_both_rates_of_muon() -> None:
    trainer = make(1.0, bias=True, **{"optimizer.type": "muon", "optimizer.rest_rate_factor": 0.5})
    train(trainer, 1.0)
    assert trainer.hybrid is not None
    factor = trainer.hybrid.race.factor
    assert factor != 1.0
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == pytest.approx([FIRST_RATE * factor, 0.5 * FIRST_RATE * factor])
