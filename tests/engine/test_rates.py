"""Learning rates of the user's own optimizer and scheduler: followed, told as they were, and never compounded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.worlds import QUICK, Net, Regression
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler

from foretrain import Config, ConfigError, HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.rates import FollowedRates
from foretrain.events import Event, Moved, Notice
from foretrain.persist.codec import put_together, snapshot

STEPS = 12
OFF = {"hybrid.mode": "off", "device": "cpu", "health.interval": 0}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
    "multi step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 7], gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 8)],
        [4],
    ),
}


def slope(model: nn.Module, batch: Tensor) -> Tensor:
    """Its gradient is 1 everywhere, so that a step shows the rate it was made with."""
    return sum((p.sum() for p in model.parameters()), batch.sum() * 0)


class Made:
    """A trainer of one's own optimizer on a model whose steps show their rates."""

    def __init__(self, scheduler: Any = None, lr: Any = 0.1, config: Any = OFF, **options: Any) -> None:
        self.model = nn.Linear(1, 1).double()
        self.optimizer = SGD(self.model.parameters(), lr=lr, **options)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        settings = from_mapping(config) if config is not None else None
        self.trainer = HybridTrainer(self.model, self.optimizer, slope, settings, scheduler=self.scheduler)

    def step(self) -> tuple[float, float]:
        """What it says the rate was, and what it was."""
        before = self.model.weight.item()
        result = self.trainer.step(torch.zeros(1, dtype=torch.double))
        return result.learning_rate, before - self.model.weight.item()

    def rates(self, steps: int) -> list[float]:
        """Told, and checked to be true."""
        both = [self.step() for _ in range(steps)]
        assert [told for told, _ in both] == pytest.approx([used for _, used in both], rel=1e-9)
        return [used for _, used in both]


def torchs(scheduler: Callable[[Optimizer], Any], steps: int = STEPS) -> list[float]:
    """The rates of a plain loop."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.0)
    stepped, rates = scheduler(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        stepped.step()
    return rates


# --- nobody asked for a schedule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, {**OFF, "max_steps": 20}, {"device": "cpu", "max_steps": 20}])
def test_an_optimizer_of_ones_own_keeps_its_rate(config: Any) -> None:
    assert Made(config=config).rates(20) == pytest.approx([0.1] * 20)


def test_a_schedule_that_was_asked_for_is_used() -> None:
    rates = Made(config={**OFF, "max_steps": 20, "schedule.type": "cosine", "schedule.warmup_steps": 0}).rates(20)
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 20)) for step in range(20)])


def test_clipping_is_there_only_if_asked_for() -> None:
    gradient = math.sqrt(2)  # of two parameters
    assert Made(config={**OFF, "optimizer.gradient_clip_norm": 0.5}).step()[1] == pytest.approx(0.1 * 0.5 / gradient)
    assert Made().step()[1] == pytest.approx(0.1)
    assert Made().trainer.engine.clip_limit == 0.0


@pytest.mark.parametrize("own", [True, False])
def test_without_a_configuration_there_is_no_end_and_no_decay(own: bool) -> None:
    model = nn.Linear(1, 1)
    trainer = HybridTrainer(model, SGD(model.parameters(), lr=0.1) if own else None, slope)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(820):
            result = trainer.step(torch.zeros(1))
    assert result.learning_rate == trainer.engine.rate.peak > 0
    assert trainer.engine.planned_steps > trainer.global_step > 800


def test_steps_past_the_end_are_warned_of_once() -> None:
    made, events = Made(config={**OFF, "max_steps": 3}), list[Event]()
    made.trainer.bus.subscribe(events.append)
    made.rates(3)
    assert not [event for event in events if isinstance(event, Notice)]
    with pytest.warns(UserWarning, match=r"after the last of max_steps = 3, with a learning rate of 0\.1; raise max_"):
        made.step()
    made.rates(3)
    assert [event.level for event in events if isinstance(event, Notice)] == ["warning"]


# --- a scheduler of one's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_of_torch_steps_after_each_step(name: str) -> None:
    made = Made(SCHEDULERS[name], momentum=0.0)
    if name in ("one cycle", "cyclic"):  # they cycle momentum too; the rate is to be seen alone
        made.optimizer.param_groups[0]["momentum"] = 0.0
        made.scheduler.cycle_momentum = False
    assert made.rates(STEPS) == pytest.approx(torchs(SCHEDULERS[name]), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_ones_own_loop_steps_is_followed(name: str) -> None:
    model = nn.Linear(1, 1).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    trainer = HybridTrainer(model, optimizer, slope, from_mapping({**OFF, "max_steps": 60}))
    told = []
    for _ in range(STEPS):
        told.append(trainer.step(torch.zeros(1, dtype=torch.double)).learning_rate)
        scheduler.step()
    assert told == pytest.approx(torchs(SCHEDULERS[name]), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_it_goes_on_exactly_where_it_was_saved(name: str) -> None:
    made = Made(SCHEDULERS[name])
    for _ in range(5):
        made.step()
    saved = put_together(snapshot(made.trainer.state_dict()))
    straight = [made.step() for _ in range(STEPS - 5)]
    again = Made(SCHEDULERS[name])
    again.trainer.load_state_dict(saved)
    assert [again.step() for _ in range(STEPS - 5)] == straight
    assert again.scheduler.state_dict().keys() == made.scheduler.state_dict().keys()


def test_what_recovery_does_to_a_rate_is_gone_after_the_step() -> None:
    """A scheduler that goes on from the present number would multiply it in again and again."""
    made = Made(SCHEDULERS["exponential"])
    made.trainer.checkup.health.rate_factor = 0.5
    assert made.rates(4) == pytest.approx([0.05 * 0.9**step for step in range(4)])
    assert made.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**4)
    made.trainer.checkup.health.rate_factor = 1.0
    assert made.rates(2) == pytest.approx([0.1 * 0.9**4, 0.1 * 0.9**5])


def test_groups_keep_their_own_rates() -> None:
    model = nn.Linear(1, 1).double()
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.4}]
    trainer = HybridTrainer(model, SGD(groups), slope, from_mapping(OFF))
    trainer.checkup.health.rate_factor = 0.5
    before = model.weight.item(), model.bias.item()
    trainer.step(torch.zeros(1, dtype=torch.double))
    moved = before[0] - model.weight.item(), before[1] - model.bias.item()
    assert moved == pytest.approx((0.05, 0.2))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.1, 0.4]


def test_a_rate_may_be_a_tensor_and_stays_the_same_one() -> None:
    rate = torch.tensor(0.1, dtype=torch.double)
    made = Made(SCHEDULERS["exponential"], lr=rate)
    inside = made.optimizer.param_groups[0]["lr"]
    made.trainer.checkup.health.rate_factor = 0.5
    assert made.rates(3) == pytest.approx([0.05, 0.045, 0.0405])
    assert made.optimizer.param_groups[0]["lr"] is inside
    assert float(inside) == pytest.approx(0.1 * 0.9**3)


def test_an_optimizer_may_have_no_rate_at_all() -> None:
    class Fixed(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(0.3 * p.grad)

    model = nn.Linear(1, 1)
    trainer = HybridTrainer(model, Fixed(model.parameters()), slope, from_mapping({"device": "cpu"}))
    trainer.checkup.health.rate_factor = 0.5  # there is nothing that it could act on
    before = model.weight.item()
    assert math.isnan(trainer.step(torch.zeros(1)).learning_rate)
    assert before - model.weight.item() == pytest.approx(0.3)
    trainer.load_state_dict(put_together(snapshot(trainer.state_dict())))
    with pytest.raises(ConfigError, match="Fixed has no lr that a schedule could set"):
        HybridTrainer(model, Fixed(model.parameters()), slope, from_mapping({"schedule.type": "cosine"}))


def test_a_function_may_make_the_scheduler() -> None:
    trainer = HybridTrainer(
        nn.Linear(1, 1), None, slope, from_mapping(OFF), scheduler=lambda made: lr_scheduler.ExponentialLR(made, 0.5)
    )
    rates = [trainer.step(torch.zeros(1)).learning_rate for _ in range(3)]
    assert rates == pytest.approx([rates[0], rates[0] / 2, rates[0] / 4])
    saved = put_together(snapshot(trainer.state_dict()))
    trainer.step(torch.zeros(1))
    trainer.load_state_dict(saved)
    assert trainer.step(torch.zeros(1)).learning_rate == pytest.approx(rates[0] / 8)


def test_one_that_watches_a_loss_is_told_the_held_out_loss() -> None:
    made = Made(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
    for loss in (1.0, 0.5, 0.6, 0.4, 0.7):
        made.step()
        made.trainer.evaluated(loss)
    assert made.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    assert made.scheduler.best == 0.4


# --- beside prediction -----------------------------------------------------------------------------------------------


def hybrid(gamma: float = 0.999) -> tuple[HybridTrainer, lr_scheduler.LRScheduler, list[Moved]]:
    """A full batch, whose moves are kept, and a scheduler."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma)
    settings = {name: value for name, value in QUICK.items() if not name.startswith(("schedule.", "optimizer."))}
    config = from_mapping({**settings, "hybrid.secant_pairs": 20, "max_steps": 200})
    trainer, moves = HybridTrainer(model, optimizer, None, config, scheduler=scheduler), list[Moved]()
    trainer.bus.subscribe(lambda event: moves.append(event) if isinstance(event, Moved) else None)
    return trainer, scheduler, moves


def test_predicted_steps_count_for_the_scheduler_too() -> None:
    trainer, scheduler, moves = hybrid()
    data = Regression()
    while trainer.global_step < 200:
        trainer.step((data.inputs[:100], data.targets[:100]))
        assert scheduler.last_epoch == trainer.global_step
    assert any(move.verdict == "kept" for move in moves)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(3e-3 * 0.999**trainer.global_step)


def test_a_rollback_takes_the_scheduler_back_but_not_a_number_of_the_users() -> None:
    for own_loop in (False, True):
        trainer, scheduler, _ = hybrid(0.5)
        if own_loop:
            trainer = HybridTrainer(trainer.model, trainer.optimizer, None, trainer.config)
        data = Regression()
        batch = data.inputs[:100], data.targets[:100]
        trainer.step(batch)
        trainer.policy.tools.snapshots.take()
        there = trainer.optimizer.param_groups[0]["lr"]
        for _ in range(3):
            trainer.step(batch)
            if own_loop:
                scheduler.step()
        now = trainer.optimizer.param_groups[0]["lr"]
        trainer.policy.tools.snapshots.rewind()
        assert now == pytest.approx(there / 8)
        assert trainer.global_step == 1
        assert trainer.optimizer.param_groups[0]["lr"] == (now if own_loop else there)
        if not own_loop:
            assert scheduler.last_epoch == 1


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_schedule_and_a_scheduler_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"scheduler= and \[schedule\] of the Config both set the learning rate"):
        Made(SCHEDULERS["step"], config={"schedule.type": "constant"})


def test_a_scheduler_belongs_to_the_optimizer_that_trains() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    stranger = lr_scheduler.ExponentialLR(SGD(other.parameters(), lr=0.1), 0.9)
    with pytest.raises(ConfigError, match="the ExponentialLR belongs to another optimizer"):
        HybridTrainer(model, SGD(model.parameters(), lr=0.1), slope, Config(), scheduler=stranger)
    with pytest.raises(ConfigError, match="scheduler = 'cosine' is no learning-rate scheduler"):
        HybridTrainer(model, SGD(model.parameters(), lr=0.1), slope, Config(), scheduler="cosine")  # type: ignore[arg-type]


def test_a_scheduler_that_is_too_short_says_so() -> None:
    made = Made(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=4, cycle_momentum=False))
    made.rates(4)
    with pytest.raises(ConfigError, match=r"OneCycleLR cannot go on at step 5: .* for as many steps as the run has"):
        made.step()


def test_a_scheduler_keeps_up_with_steps_that_were_predicted() -> None:
    """A leap counts many steps at once."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = FollowedRates(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5))
    for step, rate in ((0, 1.0), (1, 0.5), (5, 0.5**5), (5, 0.5**5)):
        rates.advance(step)
        assert optimizer.param_groups[0]["lr"] == rates.at(step) == rate
