"""Every signal of the guard and every recovery action in a real run, by fault injection; and the run ends well."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.worlds import QUICK, Net, Regression, Told, World, same_weights, world
from torch import Tensor

from foretrain import CheckpointStore, HybridTrainer
from foretrain.config import from_mapping, to_mapping
from foretrain.errors import DivergenceError
from foretrain.events import Event, Phase, Progress, Recovered, Tuned
from foretrain.health.act import Kind
from foretrain.health.detect import Detector
from foretrain.health.signs import Signal, StepReading
from foretrain.motion.predictors.base import Forecast, Situation

Batch = tuple[Tensor, Tensor, Tensor]
Fault = Callable[[int, Tensor, Tensor], Batch]
"""From a position and its (inputs, targets) to (inputs, targets, [scale of the gradient, offset of the loss])."""

STEPS = 400
IDLE: dict[str, Any] = {"audit.time_budget": 0.0, "max_steps": STEPS, "optimizer.learning_rate": 3e-3}
SGD: dict[str, Any] = {"optimizer.type": "sgd", "optimizer.learning_rate": 0.05, "optimizer.gradient_clip_norm": 0.0}


class Tampered(Net):
    """The last tensor of a batch says what to do to its loss and gradient."""

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch[:2])
        scale, offset = batch[2]
        return loss.detach() + scale * (loss - loss.detach()) + offset


def healthy(position: int, inputs: Tensor, targets: Tensor) -> Batch:
    return inputs, targets, torch.tensor([1.0, 0.0])


def between(first: int, last: int, change: Fault) -> Fault:
    return lambda position, x, y: (change if first <= position < last else healthy)(position, x, y)


def nan(position: int, inputs: Tensor, targets: Tensor) -> Batch:
    return inputs, targets * math.nan, torch.tensor([1.0, 0.0])


def larger(factor: float) -> Fault:
    return lambda position, x, y: (x, factor * y, torch.tensor([1.0, 0.0]))


def tampered(scale: float = 1.0, offset: Callable[[int], float] = lambda position: 0.0) -> Fault:
    return lambda position, x, y: (x, y, torch.tensor([scale, offset(position)]))


DATA = Regression(rows=32)


def faulty(fault: Fault, settings: dict[str, Any] | None = None, predictor: Any = None) -> World:
    return world(Tampered(), lambda position: fault(position, *DATA(position)), {**IDLE, **(settings or {})}, predictor)


def told(run: World) -> list[str]:
    return [event.action for event in run.events if isinstance(event, Recovered)]


def ends_well(run: World, within: float = 0.05) -> bool:
    """No worse than the same run without the fault."""
    config = run.trainer.config
    optimizer = config.optimizer
    plain = plain_held_out(config.max_steps, optimizer.type, optimizer.learning_rate, optimizer.gradient_clip_norm)
    mine = DATA.held_out(run.trainer.model)
    assert math.isfinite(mine)
    return mine <= (1 + within) * plain


@functools.cache
def plain_held_out(steps: int, kind: str, rate: float, clip: float) -> float:
    settings = {"optimizer.type": kind, "optimizer.learning_rate": rate, "optimizer.gradient_clip_norm": clip}
    config = from_mapping({**QUICK, **IDLE, **settings, "max_steps": steps, "hybrid.mode": "off"})
    trainer = HybridTrainer(Tampered(), config=config)
    for position in range(steps):
        trainer.step(healthy(position, *DATA(position)))
    return DATA.held_out(trainer.model)


def test_without_a_fault_nothing_is_done() -> None:
    run = faulty(healthy).run()
    assert told(run) == []
    assert run.trainer.engine.rate_factor == 1.0
    assert run.trainer.summary()["recoveries"] == {}
    assert ends_well(run, within=0.0)


# --- not finite ------------------------------------------------------------------------------------------------------


def test_one_bad_batch_is_skipped() -> None:
    run = faulty(between(200, 201, nan)).run()
    assert told(run) == ["skip_batch"]
    assert run.trainer.engine.rate_factor == 1.0
    run.trainer.engine.meter.read()
    assert run.trainer.summary()["skipped_steps"] == 1
    assert ends_well(run)


def test_a_skipped_batch_changes_no_weight() -> None:
    run = faulty(between(200, 201, nan))
    run.run(lambda: run.position == 200)
    before = [p.detach().clone() for p in run.trainer.model.parameters()]
    assert run.step().skipped
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))


def test_bad_batches_in_a_row_roll_back_with_a_tenth_of_the_rate() -> None:
    run = faulty(between(200, 203, nan))
    run.run(lambda: "roll_back" in told(run))
    trainer = run.trainer
    assert run.position <= 210
    assert trainer.engine.rate_factor == pytest.approx(0.1)
    assert trainer.global_step < run.position
    rate = trainer.optimizer.param_groups[0]["lr"]
    run.step()
    assert float(trainer.optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 * float(rate), rel=0.01)
    run.run()
    assert trainer.engine.rate_factor > 0.1  # given back bit by bit
    assert trainer.global_step == STEPS == sum(trainer.summary()["steps"].values())
    assert ends_well(run, within=0.1)


def test_the_rate_comes_back_in_a_rest_too() -> None:
    """50 good steps double it; in a rest they are looked at together, up to 100 steps later."""
    run = faulty(between(200, 203, nan), {"max_steps": 800})
    run.run(lambda: "roll_back" in told(run))
    assert run.trainer.engine.rate_factor == pytest.approx(0.1)
    for _ in range(340):
        run.step()
    assert run.trainer.engine.rate_factor == 1.0


def test_harmed_weights_are_rolled_back() -> None:
    """Without the check before each update NaN reaches the weights."""
    run = faulty(between(200, 201, nan), {"guard.nan_check": False}).run()
    assert "roll_back" in told(run)
    assert all(torch.isfinite(p).all() for p in run.trainer.model.parameters())
    assert ends_well(run, within=0.1)


# --- explosions ------------------------------------------------------------------------------------------------------


def test_an_exploding_gradient_halves_the_rate_and_clips() -> None:
    run = faulty(between(200, 206, larger(12.0)), SGD)
    run.run(lambda: run.trainer.engine.rate_factor < 1 or run.position > 240)
    trainer = run.trainer
    assert trainer.engine.rate_factor == 0.5
    assert trainer.engine.clip_limit == 1.0
    event = next(event for event in run.events if isinstance(event, Recovered) and "0.5" in event.text)
    assert event.action == "force_full"
    assert "gradient norm" in event.text
    run.run()
    assert (trainer.engine.rate_factor, trainer.engine.clip_limit) == (1.0, 0.0)
    assert ends_well(run)


def test_a_spiked_learning_rate_is_recovered_from() -> None:
    run = faulty(healthy, {"optimizer.gradient_clip_norm": 0.0})
    schedule = run.trainer.engine.rate.at
    run.trainer.engine.rate.at = lambda step: schedule(step) * (300.0 if 200 <= step < 204 else 1.0)
    run.run(lambda: run.trainer.global_step >= STEPS or run.position > 900)
    assert {"roll_back", "force_full"} & set(told(run))
    assert run.trainer.global_step == STEPS
    assert ends_well(run, within=0.1)


def test_one_spike_is_no_explosion() -> None:
    run = faulty(between(200, 201, larger(12.0))).run()
    assert run.trainer.engine.rate_factor == 1.0
    assert "roll_back" not in told(run)
    assert ends_well(run)


def test_a_jump_without_noise_is_a_runaway() -> None:
    """A run whose loss was 1.2 and is 50 ever after."""
    config = from_mapping({})
    guard = Detector(config.hybrid, config.guard)
    for step in range(300):
        guard.check(StepReading(step, Phase.FULL, 1 + 4 * 0.99**step, 1.0))
    verdicts = [guard.check(StepReading(300 + step, Phase.FULL, 50.0, 5.0)) for step in range(300)]
    assert any(Signal.RUNAWAY in verdict.signals for verdict in verdicts)


def test_ruin_in_the_first_steps_is_rolled_back_to_the_beginning() -> None:
    """Without clipping the loss is thousands by the first window's end: that is nothing to go back to."""
    run = faulty(healthy, {**SGD, "optimizer.learning_rate": 0.7, "schedule.type": "constant"})
    before = [p.detach().clone() for p in run.trainer.model.parameters()]
    run.run(lambda: "roll_back" in told(run))
    assert run.trainer.global_step == 0
    assert run.trainer.engine.rate_factor == pytest.approx(0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))


def test_auto_tune_keeps_the_lower_rate_of_a_rollback() -> None:
    """Else it comes back, does the same harm again, and the run is given up before the next look could help."""
    wild = {**SGD, "optimizer.learning_rate": 0.7, "schedule.type": "constant", "guard.max_rollbacks": 1}
    with pytest.raises(DivergenceError, match="in spite of 1 rollbacks"):
        faulty(healthy, wild).run()
    run = faulty(healthy, {**wild, "guard.auto_tune": True, "max_steps": 150}).run()
    tuned = [event for event in run.events if isinstance(event, Tuned)]
    assert tuned[0].step < 100
    assert tuned[0].change == {"optimizer.learning_rate": pytest.approx(0.07), "optimizer.gradient_clip_norm": 1.0}
    assert run.trainer.global_step == 150
    assert run.trainer.policy.recovery.rate_factor == 1.0
    assert run.trainer.engine.rate_factor <= 0.1
    assert run.trainer.engine.clip_limit == 1.0
    assert DATA.held_out(run.trainer.model) < 1.0
    before_first_look = [event for event in tuned if event.step <= 100]
    assert len(before_first_look) == told(run).count("roll_back")  # the look does not do once more what was just done


def test_a_loss_high_from_the_second_step_on_is_found_out() -> None:
    """It is stable, and lower than ever, but it began at 5.5."""
    config = from_mapping({})
    guard, random = Detector(config.hybrid, config.guard), np.random.default_rng(0)
    losses = [5.5, *(130 - 0.1 * np.arange(99) + 20 * random.normal(size=99))]
    verdicts = [guard.check(StepReading(step, Phase.FULL, loss, 1.0)) for step, loss in enumerate(losses)]
    assert Signal.RUIN in verdicts[40].signals
    assert not guard.losses.sound


@pytest.mark.parametrize("seed", range(5))
def test_ruin_that_is_as_noisy_as_it_is_high_is_nothing_to_go_back_to(seed: int) -> None:
    config = from_mapping({})
    guard, random = Detector(config.hybrid, config.guard), np.random.default_rng(seed)
    ruined = np.abs(500 + 250 * random.normal(size=77))
    for step, loss in enumerate([5.3, 5.2, 5.6, *ruined]):
        guard.check(StepReading(step, Phase.FULL, loss, 1.0))
        assert guard.losses.sound or step >= 5, "three good losses are the middle of five"
        assert not (guard.losses.sound and step >= 6)


def test_noise_is_no_ruin() -> None:
    """Squared errors of single examples, the first by luck next to nothing; and losses that only fall."""
    config = from_mapping({})
    for seed in range(20):
        guard, random = Detector(config.hybrid, config.guard), np.random.default_rng(seed)
        for step, loss in enumerate([1e-6, *random.normal(size=500) ** 2]):
            assert Signal.RUIN not in guard.check(StepReading(step, Phase.FULL, float(loss), 1.0)).signals


def test_a_runaway_loss_is_rolled_back() -> None:
    """Targets that turn around for a while undo what was learned."""
    run = faulty(between(250, 300, larger(-6.0)), {"max_steps": 600}).run()
    assert "roll_back" in told(run)
    assert any("far above" in event.text for event in run.events if isinstance(event, Recovered))
    assert ends_well(run, within=0.1)


# --- vanishing, oscillation, drift -----------------------------------------------------------------------------------


def test_a_vanishing_gradient_stops_prediction() -> None:
    run = faulty(between(200, 215, tampered(scale=1e-5)))
    run.run(lambda: bool(told(run)) or run.position > 240)
    event = next(event for event in run.events if isinstance(event, Recovered))
    assert event.action == "force_full"
    assert "gradient norm" in event.text
    assert run.trainer.policy.guard.recent_divergence
    run.run()
    assert run.trainer.engine.rate_factor == 1.0
    assert ends_well(run)


def test_an_oscillating_loss_lowers_the_rate() -> None:
    alternating = tampered(offset=lambda position: 3.0 * (-1) ** position)
    run = faulty(between(200, 330, alternating), {"max_steps": 600}).run()
    event = next(event for event in run.events if isinstance(event, Recovered) and "0.3" in event.text)
    assert event.action == "force_full"
    assert "up and down" in event.text
    assert run.trainer.engine.rate_factor == 1.0  # it ended, and so did the caution
    assert ends_well(run)


def test_a_slow_drift_lengthens_the_full_steps() -> None:
    """By less than half of what was gained; more would be a runaway."""
    rising = tampered(offset=lambda position: 0.0012 * (position - 560))
    watched = {"audit.time_budget": 1.0, "hybrid.confidence_threshold": 0.9999}  # it waits for a move, so it watches
    run = faulty(between(560, 10**9, rising), {"max_steps": 900, **watched}).run()
    event = next(event for event in run.events if isinstance(event, Recovered))
    assert event.action == "force_full"
    assert "rose by" in event.text
    assert run.trainer.policy.cycle.full_steps_needed > 10
    assert ends_well(run)


# --- predictors ------------------------------------------------------------------------------------------------------

EXACT: dict[str, Any] = {"max_steps": 300, "optimizer.learning_rate": 1e-3, "audit.time_budget": 0.0}
UNGUARDED = {"hybrid.search": False, "hybrid.divergence_threshold": 1e9, "guard.prediction_error": 1e9}
SAME = Regression(rows=128)(0)


class Saying(Told):
    """Repeats the last window `factor` times as far and says that the loss will be `expected` times as high."""

    def __init__(self, factor: float, expected: float = 1.0) -> None:
        super().__init__("repeat")
        self.factor, self.expected = factor, expected

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        made = super().forecast(situation, horizons)
        with np.errstate(all="ignore"):
            coefficients = self.factor * made.coefficients
        return Forecast(made.horizons, coefficients, self.expected * made.loss, made.loss_deviation)


def same_batch(settings: dict[str, Any], predictor: Any) -> World:
    return world(Net(), lambda position: SAME, {**EXACT, **settings}, predictor)


@functools.cache
def plain_loss() -> float:
    run = world(Net(), lambda position: SAME, {**EXACT, "hybrid.mode": "off"}).run()
    return loss_of(run)


def loss_of(run: World) -> float:
    with torch.no_grad():
        return float(run.trainer.model.loss(SAME))


def test_a_divergence_loop_doubles_the_full_steps() -> None:
    run = same_batch(UNGUARDED, "flipped")
    run.run(lambda: run.trainer.policy.score.counts.moves["rolled_back"] == 2)
    event = next(event for event in run.events if isinstance(event, Recovered) and event.action == "force_full")
    assert "2 moves undone within 3 cycles" in event.text
    assert run.trainer.policy.cycle.full_steps_needed > 20
    run.run()
    assert loss_of(run) <= 1.01 * plain_loss()


@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_a_predictor_that_says_nan_is_reset(mode: str) -> None:
    run = same_batch({"hybrid.mode": mode}, "nan").run()
    predictor = run.trainer.observer.predictor
    assert run.trainer.summary()["recoveries"]["reset_predictor"] >= 1
    assert predictor.resets >= 1
    assert {move.verdict for move in run.moves} == {"refused"}
    assert loss_of(run) == plain_loss()


def test_a_predictor_that_leads_to_nan_is_reset_and_stays_so() -> None:
    """The rollback brings back its state of before the move; what poisoned it must not come back with it."""
    run = same_batch({"hybrid.mode": "rollout"}, Saying(1e38))
    run.run(lambda: bool(run.moves))
    predictor = run.trainer.observer.predictor
    assert run.moves[0].verdict == "refused"
    assert run.trainer.summary()["recoveries"]["reset_predictor"] == 1
    assert predictor.resets == 1
    assert predictor.windows <= 1
    run.run()
    assert loss_of(run) <= 1.01 * plain_loss()


def test_a_prediction_error_ends_a_rollout_and_shortens_the_next() -> None:
    run = same_batch({"hybrid.mode": "rollout"}, Saying(1.0, expected=0.4))
    run.run(lambda: bool(run.moves))
    policy = run.trainer.policy
    assert policy.score.counts.recoveries["shorten_horizon"] >= 1
    assert policy.bandit.allowed <= 20
    assert "above its prediction" in run.moves[0].reason or run.moves[0].horizon < 20
    run.run()
    assert loss_of(run) <= 1.05 * plain_loss()


def test_a_diverging_rollout_is_undone_and_must_be_surer_next_time() -> None:
    run = same_batch({"hybrid.mode": "rollout"}, Saying(-30.0))
    run.run(lambda: bool(run.moves))
    recovery, policy = run.trainer.policy.recovery, run.trainer.policy
    assert run.moves[0].verdict == "refused"
    assert recovery.threshold > run.trainer.config.hybrid.confidence_threshold
    assert policy.score.counts.recoveries["raise_threshold"] >= 1
    assert policy.score.counts.recoveries["shorten_horizon"] >= 1
    assert policy.score.counts.recoveries["roll_back"] >= 1
    assert run.trainer.engine.rate_factor == 1.0  # no fault of the learning rate
    run.run()
    assert loss_of(run) <= 1.01 * plain_loss()


def test_lost_confidence_undoes_a_rollout() -> None:
    run = same_batch({"hybrid.mode": "rollout"}, "repeat")
    run.run(lambda: run.trainer.phase is Phase.PREDICT)
    run.step()
    run.step()
    assert run.trainer.judging
    run.trainer.policy.confidence.estimate = lambda features: 0.1  # type: ignore[method-assign]
    run.step()
    assert run.moves[0].verdict == "refused"
    assert "confidence" in run.moves[0].reason


def test_want_of_confidence_postpones_prediction() -> None:
    run = same_batch({}, "repeat")
    run.trainer.policy.confidence.estimate = lambda features: 0.1  # type: ignore[method-assign]
    run.run()
    assert run.moves == []
    assert run.trainer.policy.cycle.earliest_predict_step > 40
    assert loss_of(run) == plain_loss()


def test_a_rising_anchor_is_drift() -> None:
    """Each move does a little harm that its own judgement does not see."""
    run = same_batch({}, "repeat")
    policy = run.trainer.policy
    run.run(lambda: run.trainer.phase is Phase.PREDICT)
    now = policy.guard.losses.fast
    policy.guard.anchors = [now * (0.90 + 0.02 * index) for index in range(7)]
    inner = run.trainer.engine.probe
    run.trainer.engine.probe = lambda batch: inner(batch) + (0.04 * now if len(policy.guard.anchors) == 7 else 0.0)
    needed = policy.cycle.full_steps_needed
    run.step()
    assert policy.score.counts.recoveries["force_full"] >= 1
    assert policy.cycle.full_steps_needed >= 2 * needed


# --- giving up -------------------------------------------------------------------------------------------------------


def given_up(fault: Fault, folder: Path, settings: dict[str, Any]) -> tuple[HybridTrainer, str]:
    config = from_mapping({**QUICK, **IDLE, "checkpoint.interval": 0, **settings})
    trainer = HybridTrainer(Tampered(), config=config)

    class Data:
        def __iter__(self) -> Any:
            for position in range(10_000):
                yield fault(position, *DATA(position))

    with pytest.raises(DivergenceError) as caught:
        trainer.fit(Data(), out=folder, progress=False)
    return trainer, str(caught.value)


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        (between(200, 10**9, nan), {"guard.max_rollbacks": 2}),
        (between(250, 10**9, larger(-8.0)), {"guard.max_rollbacks": 0, "max_steps": 1000}),
    ],
    ids=["nan", "runaway"],
)
def test_what_goes_wrong_again_and_again_is_given_up_with_a_checkpoint(
    fault: Fault, settings: dict[str, Any], tmp_path: Path
) -> None:
    trainer, message = given_up(fault, tmp_path / "run", settings)
    assert "given up" in message
    assert "learning_rate" in message
    assert trainer.summary()["recoveries"][Kind.ABORT.value] == 1
    loaded = CheckpointStore(tmp_path / "run" / "checkpoints", 2).load_newest()
    assert loaded is not None
    assert all(torch.isfinite(value).all() for value in loaded.state["model"].values())
    patient = from_mapping(
        {**to_mapping(trainer.config), "guard.max_rollbacks": 9}
    )  # it is still where it was given up
    resumed = HybridTrainer(Tampered(), config=patient)
    resumed.load_state_dict(loaded.state)
    assert same_weights(resumed.model, trainer.model)
    for position in range(5):
        assert math.isfinite(resumed.step(healthy(position, *DATA(position))).loss)
    again = HybridTrainer(Tampered(), config=trainer.config)
    again.load_state_dict(loaded.state)
    assert again.policy is not None
    assert again.policy.recovery.rollbacks > trainer.config.guard.max_rollbacks
    again.hybrid.start_counting_anew()  # as `fit` does when it resumes
    assert again.policy.recovery.rollbacks == 0


def test_a_caution_changes_nothing() -> None:
    """One high loss is noticed, and the run goes on: to the bit."""
    fault = between(200, 201, tampered(offset=lambda position: 1.5))
    run, other = faulty(fault).run(), faulty(healthy).run()
    assert run.trainer.summary()["recoveries"] == {}
    assert same_weights(run.trainer.model, other.trainer.model)


def test_steps_that_are_done_again_are_logged_again(tmp_path: Path) -> None:
    events: list[Event] = []
    trainer = HybridTrainer(Tampered(), config=from_mapping({**QUICK, **IDLE, "log.interval": 10, "max_steps": 260}))
    trainer.bus.subscribe(events.append)

    class Data:
        def __iter__(self) -> Any:
            for position in range(10_000):
                yield between(200, 206, nan)(position, *DATA(position))

    trainer.fit(Data(), out=tmp_path / "run", progress=False)
    back = next(event for event in events if isinstance(event, Recovered) and event.action == "roll_back")
    after = [event.step for event in events[events.index(back) :] if isinstance(event, Progress)]
    assert back.step < 190
    assert back.at is not None
    assert back.at >= 203
    assert trainer.summary()["rollbacks"] == {"times": 1, "undone_steps": back.at - back.step}
    assert after[0] == (back.step // 10 + 1) * 10
    assert after[-1] == 260
