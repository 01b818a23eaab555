"""The hybrid loop as a whole: idle it is the plain loop; what it takes back leaves no trace; it counts right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Phase, Recovered
from foretrain.hybrid import resting as rests
from foretrain.hybrid.moves.leap import Leap
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
from foretrain.motion.trajectory import Trajectory
from foretrain.persist.codec import Snapshot, put_together, snapshot, take_apart

from .worlds import (
    QUICK,
    Bowl,
    Net,
    Regression,
    Told,
    World,
    differences,
    everything,
    same_weights,
    still,
    trust,
    world,
)

SGD = {"optimizer.type": "sgd", "optimizer.momentum": 0.0, "optimizer.gradient_clip_norm": 0.0}
BOWL = {**SGD, "optimizer.learning_rate": 0.05}
AUDITED = {"audit.time_budget": 1.0, "audit.steps": 8, "optimizer.learning_rate": 1e-3}
IDLE = {"audit.time_budget": 0.0}
WATCHED = {"audit.time_budget": 1.0, "hybrid.warmup_steps": 10_000}
"""Nothing is predicted, but every window is looked at."""
UNGUARDED = {"hybrid.search": False, "hybrid.divergence_threshold": 1e9, "guard.prediction_error": 1e9}
"""Harmful moves get through to their validation."""


def plain(
    model: nn.Module, data: Callable[[int], Any], positions: Sequence[int], settings: dict[str, Any]
) -> HybridTrainer:
    """The plain loop over the given batches."""
    trainer = HybridTrainer(model, config=from_mapping({**QUICK, **settings, "hybrid.mode": "off"}))
    for position in positions:
        trainer.step(data(position))
    return trainer


# --- idle ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("still", [IDLE, WATCHED], ids=["idle", "watched"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({}, {}),
        ({"dropout": 0.2, "norm": True}, {}),
        ({"dropout": 0.2}, {"accumulation_steps": 4, "evaluation.ema_decay": 0.99, "predictor.beta": 0.5}),
    ],
    ids=["plain", "dropout", "everything"],
)
def test_without_moves_it_is_the_plain_loop_to_the_bit(
    optimizer: str, model: dict[str, Any], settings: dict[str, Any], still: dict[str, Any]
) -> None:
    settings = {**settings, "max_steps": 150, "optimizer.type": optimizer, "optimizer.learning_rate": 3e-3, **still}
    hybrid = world(Net(**model), Regression(), settings).run()
    state = torch.get_rng_state()
    other = plain(Net(**model), Regression(), range(150), settings)
    assert hybrid.trainer.policy is not None
    assert hybrid.trainer.backward_passes == other.backward_passes == 150
    assert hybrid.moves == []
    assert same_weights(hybrid.trainer.model, other.model)
    assert torch.equal(torch.get_rng_state(), state)
    if other.engine.average is not None:
        assert hybrid.trainer.engine.average is not None
        assert all(
            torch.equal(a, b)
            for a, b in zip(hybrid.trainer.engine.average.average, other.engine.average.average, strict=True)
        )


@pytest.mark.parametrize("predictor", ["momentum", "linear", "mlp", "rssm"])
def test_no_predictor_disturbs_an_idle_run(predictor: str) -> None:
    """They draw random numbers of their own only."""
    small = {"predictor.deterministic_dim": 8, "predictor.stochastic_dim": 2, "predictor.num_categoricals": 2}
    settings = {"max_steps": 100, "optimizer.learning_rate": 3e-3}
    hybrid = world(Net(dropout=0.2), Regression(), {**settings, **WATCHED, **small, "predictor.type": predictor}).run()
    assert hybrid.trainer.observer.forecast is not None
    state = torch.get_rng_state()
    other = plain(Net(dropout=0.2), Regression(), range(100), settings)
    assert torch.equal(state, torch.get_rng_state())
    assert same_weights(hybrid.trainer.model, other.model)


@pytest.mark.parametrize(("steps", "windows"), [(200, 4), (1000, 10)])
def test_where_nothing_will_be_tried_a_tenth_of_the_run_is_watched(steps: int, windows: int) -> None:
    settings = {**IDLE, "max_steps": steps, "hybrid.window_steps": 10, "hybrid.warmup_steps": 150}
    run = world(Net(), Regression(), {**settings, "optimizer.learning_rate": 3e-3})
    run.run(lambda: run.position >= 190)
    trainer = run.trainer
    assert 3 <= trainer.policy.predictability.windows <= windows
    assert trainer.phase is Phase.FULL
    assert "not tried" in trainer.policy.last_reason
    assert trainer.policy.rest.steps > 0


def test_where_moves_can_be_tried_every_window_of_the_warm_up_is_watched() -> None:
    settings = {"audit.time_budget": 1.0, "hybrid.window_steps": 10, "hybrid.warmup_steps": 150}
    run = world(Net(), Regression(), {**settings, "optimizer.learning_rate": 3e-3})
    run.run(lambda: run.position >= 150)
    assert run.trainer.policy.predictability.windows == 15


# --- what is taken back leaves no trace ------------------------------------------------------------------------------


def before_a_move(run: World, most: int = 400) -> World:
    """Steps until the next one is the first of a move."""
    while run.trainer.phase is not Phase.PREDICT:
        run.step()
        assert run.position < most, run.trainer.policy.last_reason
    assert not run.trainer.judging
    return run


FULL_HOUSE = {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5, "optimizer.learning_rate": 1e-3}


@pytest.mark.parametrize("mode", ["leap", "rollout"])
@pytest.mark.parametrize("how", ["exploding", "nan"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_refused_move_leaves_no_trace(mode: str, how: str, optimizer: str) -> None:
    settings = {**AUDITED, **FULL_HOUSE, "hybrid.mode": mode, "optimizer.type": optimizer}
    run = before_a_move(world(Net(dropout=0.2, norm=True), Regression(), settings, how))
    trainer = run.trainer
    before, passes = everything(trainer), trainer.backward_passes
    moved = []
    inner = trainer.policy._learn_refused
    trainer.policy._learn_refused = lambda move: (inner(move), moved.append(everything(trainer)))  # type: ignore[method-assign]
    while not run.moves:
        run.step()
    assert run.moves[0].verdict == "refused"
    assert differences(before, moved[0]) == ([] if how == "exploding" else predictor_only(before, moved[0]))
    assert trainer.backward_passes == passes + 1  # the batch was trained on in the same step


def predictor_only(one: Any, other: Any) -> list[str]:
    """A predictor that said NaN is reset, and nothing else may differ."""
    found = differences(one, other)
    assert set(found) <= {"predictor.tensor", "tree"}
    return found


@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_a_refused_move_and_the_run_goes_on_as_if_it_had_not_been(mode: str) -> None:
    settings = {**AUDITED, "hybrid.mode": mode}
    run = before_a_move(world(Net(dropout=0.2), Regression(), settings, "exploding"))
    first = run.position
    while not run.moves:
        run.step()
    for _ in range(4):
        run.step()
    # The first batch of the move is trained on; in a loop of one's own, those that only watched are gone.
    positions = [*range(first + 1), *range(run.position - 4, run.position)]
    other = plain(Net(dropout=0.2), Regression(), positions, settings)
    assert same_weights(run.trainer.model, other.model)


def test_a_step_says_how_many_batches_are_to_be_handed_in_again() -> None:
    """A rollout is refused later than it began: a loop of one's own that goes back, as `fit` does, loses no data."""
    settings = {**AUDITED, "hybrid.mode": "rollout", "hybrid.monitor_interval": 3}
    run = before_a_move(world(Net(dropout=0.2), Regression(), settings, "exploding"))
    rewound = []
    while not rewound:
        at = run.position
        result = run.step()
        rewound += [result.rewound] if result.rewound else []
        run.position -= result.rewound
        assert run.trainer.position == run.position == at + 1 - result.rewound
    for _ in range(4):
        assert run.step().rewound == 0
    other = plain(Net(dropout=0.2), Regression(), range(run.position), settings)
    assert same_weights(run.trainer.model, other.model)


def hide_harm(trainer: HybridTrainer) -> None:
    """The probe at the end of PREDICT sees none: a rollout that does harm gets through to its validation."""
    probes = trainer.policy.tools.probes
    probe = probes.loss

    def blind(move: Any, batch: Any = None) -> float:
        at_its_end = trainer.phase is Phase.PREDICT and move.moved > 0 and batch is None
        return move.anchor - 1e-3 if at_its_end else probe(move, batch)

    probes.loss = blind  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["leap", "rollout"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_move_rolled_back_leaves_no_trace(mode: str, optimizer: str) -> None:
    """Validated by real full steps, found harmful, taken back."""
    settings = {**FULL_HOUSE, **UNGUARDED, "hybrid.mode": mode, "audit.time_budget": 0.0, "optimizer.type": optimizer}
    data = Regression(rows=64)
    run = world(Net(dropout=0.2, norm=True), lambda position: data(0), settings, "flipped")  # one batch: judged at once
    before_a_move(run)
    trainer = run.trainer
    hide_harm(trainer)
    before, passes = everything(trainer), trainer.backward_passes
    while not run.moves:
        run.step()
    move = run.moves[0]
    assert move.verdict == "rolled back", move
    assert trainer.backward_passes == passes + trainer.config.hybrid.correct_steps
    assert differences(before, everything(trainer)) == []


def test_a_rollback_of_an_emergency_keeps_the_data_going() -> None:
    run = world(Net(), Regression(), IDLE)
    run.run(lambda: run.trainer.global_step >= 100)
    trainer = run.trainer
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.policy.tools.snapshots.take()
    for _ in range(20):
        run.step()
    position = trainer.position
    assert trainer.observer.trajectory.steps > 0 or trainer.observer.windows > 0
    trainer.policy.recover()
    assert trainer.observer.trajectory.steps == trainer.observer.windows == 0  # what was watched was undone
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), weights, strict=True))
    assert trainer.position == position
    assert trainer.global_step == 100 == sum(trainer.summary()["steps"].values())


# --- audits ----------------------------------------------------------------------------------------------------------


def audited(how: str, **settings: Any) -> tuple[World, int]:
    """A noisy run up to the end of its first audit, and the position of the batch that the move was probed on."""
    run = before_a_move(world(Net(dropout=0.2, norm=True), Regression(), {**AUDITED, **settings}, how))
    first = run.position
    while not run.moves:
        run.step()
    assert run.moves[0].audited
    return run, first


@pytest.mark.parametrize("extra", [{}, {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5}])
def test_an_audit_that_says_worse_leaves_the_plain_run(extra: dict[str, Any]) -> None:
    """The probed batch is not trained on; but for that the run is the plain one, to the bit."""
    run, first = audited("flipped", **extra)
    trainer = run.trainer
    assert run.moves[0].verdict == "rolled back"
    state = torch.get_rng_state()
    positions = [position for position in run.used if position != first]
    other = plain(Net(dropout=0.2, norm=True), Regression(), positions, {**AUDITED, **extra})
    assert same_weights(trainer.model, other.model)
    assert torch.equal(state, torch.get_rng_state())
    assert trainer.global_step == other.global_step
    assert trainer.position == run.position
    assert trainer.backward_passes == other.backward_passes + 8
    mine, theirs = trainer.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    for index, values in theirs.items():
        assert all(torch.equal(value, mine[index][name]) for name, value in values.items())
    torch.set_rng_state(state)
    for position in range(run.position, run.position + 20):  # and it goes on like it
        trainer.step(Regression()(position))
    after = [p.detach().clone() for p in trainer.model.parameters()]
    torch.set_rng_state(state)
    for position in range(run.position, run.position + 20):
        other.step(Regression()(position))
    assert all(torch.equal(a, b) for a, b in zip(after, other.model.parameters(), strict=True))


def test_an_audit_that_says_better_leaves_the_run_with_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the move had been made by hand and the same batches had followed."""
    settings = AUDITED
    run = before_a_move(world(Net(dropout=0.2, norm=True), Regression(), settings, "repeat"))
    first = run.position
    trainer = run.trainer
    trainer.policy.tools.worth.noisy = lambda gain: 3.0  # type: ignore[method-assign]
    trainer.policy.correction.tried = -1000  # no correction of the move
    begun: dict[str, Any] = {}
    inner = Leap.arrive

    def arrive(move: Leap, loss: float) -> None:
        inner(move, loss)
        begun["weights"] = [p.detach().clone() for p in trainer.model.parameters()]

    monkeypatch.setattr(Leap, "arrive", arrive)
    while not run.moves:
        run.step()
    assert run.moves[0].audited
    assert run.moves[0].verdict == "kept"
    state = torch.get_rng_state()
    other = plain(Net(dropout=0.2, norm=True), Regression(), range(first), settings)
    with torch.no_grad():
        for weight, value in zip(other.model.parameters(), begun["weights"], strict=True):
            weight.copy_(value)
    for position in range(first + 1, run.position):
        other.step(Regression()(position))
    assert same_weights(trainer.model, other.model)
    assert torch.equal(state, torch.get_rng_state())
    assert trainer.position == run.position
    assert trainer.backward_passes == other.backward_passes + 8


def test_audits_are_charged() -> None:
    run, _ = audited("flipped")
    audit = run.trainer.summary()["audit"]
    assert audit["n"] == 1
    assert audit["gain_percent"] < 0
    assert run.trainer.policy.score.ledger.cost >= 8
    assert "not shown to pay" in audit["sentence"]


# --- counting --------------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "exact": (Bowl, still, BOWL),
    "exact rollout": (Bowl, still, {**BOWL, "hybrid.mode": "rollout"}),
    "noisy": (lambda: Net(dropout=0.1), Regression(), AUDITED),
    "noisy rollout": (lambda: Net(dropout=0.1), Regression(), {**AUDITED, "hybrid.mode": "rollout"}),
    "short": (Bowl, still, {**BOWL, "max_steps": 83}),
}


@pytest.mark.parametrize("how", ["repeat", "flipped", "exploding", "nan"])
@pytest.mark.parametrize("way", WAYS)
def test_every_step_is_counted_once(way: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, data, settings = WAYS[way]
    run = world(make(), data, settings, how)
    trainer = run.trainer
    passes: list[Tensor] = []
    inner = trainer.engine.full_step._backward
    monkeypatch.setattr(trainer.engine.full_step, "_backward", lambda loss: (inner(loss), passes.append(loss.detach())))
    last = 0
    while trainer.global_step < trainer.config.max_steps or trainer.judging:
        result = run.step()
        assert trainer.global_step == sum(trainer.policy.score.counts.steps.values())
        assert trainer.global_step <= trainer.config.max_steps
        assert trainer.backward_passes == len(passes)
        assert result.global_step <= trainer.global_step or trainer.global_step < last  # a rollback went back
        last = trainer.global_step
    assert trainer.global_step == trainer.config.max_steps == sum(trainer.summary()["steps"].values())
    if way != "short":
        assert run.moves
    verdicts = [move.verdict for move in run.moves]
    counts = trainer.policy.score.counts.moves
    assert counts == {name: verdicts.count(name.replace("_", " ")) for name in counts}


@pytest.mark.parametrize("way", ["leap", "rollout", "chain"])
def test_all_that_was_seen_is_counted_and_nothing_else(way: str) -> None:
    """`tokens` is what was learned from, `probe_tokens` what moves were probed with: together all that the loss saw."""
    seen = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal seen
        seen += len(batch[0])
        return model.loss(batch)

    settings = {"hybrid.mode": "rollout" if way == "rollout" else "leap", "max_steps": 160}
    settings |= AUDITED if way == "leap" else {"audit.time_budget": 1.0, "optimizer.learning_rate": 1e-2}
    settings |= {"hybrid.secant_pairs": 20} if way == "chain" else {}
    trainer = HybridTrainer(Net(), None, loss, from_mapping({**QUICK, **settings}), predictor=Told("repeat"))
    trust(trainer)
    data = Regression()
    position = 0
    while trainer.global_step < 115:
        trainer.step(data(0 if way == "chain" else position))
        position += 1
    assert trainer.policy.score.counts.tried
    assert trainer.engine.progress.tokens + trainer.engine.progress.probe_tokens == seen
    assert trainer.engine.progress.tokens <= 16 * trainer.backward_passes


def test_predicted_steps_save_full_ones_where_they_are_worth_it() -> None:
    run = world(Bowl(spread=0.0), still, {**BOWL, "optimizer.learning_rate": 0.002}, "repeat").run()
    steps = run.trainer.summary()["steps"]
    assert steps["predict"] > 30
    assert run.trainer.backward_passes < 300


# --- moves reach the weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_a_move_moves_every_trained_tensor_and_nothing_else(mode: str) -> None:
    model = Net(norm=True, frozen=True)
    settings = {**AUDITED, "hybrid.mode": mode, "hybrid.search": False}
    run = before_a_move(world(model, Regression(), settings, "repeat"))
    trainer = run.trainer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    basis = trainer.observer.trajectory
    plan = trainer.policy.plan()
    expected = [value.clone() for value in basis.displacement(plan.coefficients)]
    while trainer.phase is Phase.PREDICT:
        run.step()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 6
    for name, way in zip(trained, expected, strict=True):
        moved = model.state_dict()[name] - before[name]
        assert moved.abs().max() > 0
        assert torch.allclose(moved, way, rtol=1e-3, atol=1e-6), name
    for name, value in model.state_dict().items():
        if name not in trained:
            assert torch.equal(value, before[name]), name


def test_a_kept_move_carries_the_average_along() -> None:
    settings = {**AUDITED, "evaluation.ema_decay": 0.9}
    run = before_a_move(world(Net(), Regression(), settings, "repeat"))
    trainer = run.trainer
    assert trainer.engine.average is not None

    def averaged() -> list[Tensor]:
        with trainer.averaged_weights():
            return [p.detach().clone() for p in trainer.model.parameters()]

    average, weights = averaged(), [p.detach().clone() for p in trainer.model.parameters()]
    run.step()
    for old, new, before, after in zip(average, averaged(), weights, trainer.model.parameters(), strict=True):
        assert torch.allclose(new - old, after - before, atol=1e-6)


# --- rollout ---------------------------------------------------------------------------------------------------------


def rolled(**settings: Any) -> World:
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    run = world(Net(), Regression(), {**AUDITED, **UNGUARDED, "hybrid.mode": "rollout", **changed}, "repeat")
    return before_a_move(run)


def test_a_rollout_takes_one_predicted_step_at_a_time() -> None:
    run = rolled()
    plan = run.trainer.policy.plan()
    assert plan.horizon > 5
    start = [p.detach().clone() for p in run.trainer.model.parameters()]
    for number in range(1, plan.horizon + 1):
        result = run.step()
        assert result.phase == "predict"
        assert math.isnan(result.gradient_norm)
        assert result.predicted_loss is not None
        assert run.trainer.phase is (Phase.PREDICT if number < plan.horizon else Phase.CORRECT)
        expected = run.trainer.observer.trajectory.displacement(plan.forecast.at(number))
        for weight, begin, way in zip(run.trainer.model.parameters(), start, expected, strict=True):
            assert torch.allclose(weight - begin, way, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_monitor_interval_is_how_often_a_forward_pass_looks(interval: int) -> None:
    run = rolled(hybrid__monitor_interval=interval)
    plan, trainer = run.trainer.policy.plan(), run.trainer
    probed: list[int] = []
    inner = trainer.engine.probe
    trainer.engine.probe = lambda batch: (probed.append(trainer.policy.move.moved), inner(batch))[1]  # type: ignore[method-assign]
    losses = [run.step().loss for _ in range(plan.horizon)]
    looked = [number for number in range(1, plan.horizon + 1) if number % interval == 0 or number == plan.horizon]
    assert probed == [0, *looked, plan.horizon]  # the anchor first, the same tokens again last
    for number, loss in enumerate(losses, start=1):
        assert math.isnan(loss) == (number not in looked)


def test_correction_interval_is_how_often_a_rollout_is_corrected() -> None:
    run = rolled(hybrid__correction_interval=4)
    trainer, plan = run.trainer, run.trainer.pilot.plan()
    asked: list[int] = []
    trainer.mover._suggestion = lambda coefficients, steps: (  # type: ignore[method-assign]
        asked.append(trainer.mover.open_move.moved + 1),
        np.zeros_like(coefficients),
    )[1]
    for _ in range(plan.horizon):
        run.step()
    assert asked == list(range(4, plan.horizon + 1, 4))


def test_an_active_correction_moves_the_weights() -> None:
    plain_run, corrected = rolled(hybrid__correction_interval=0), rolled(hybrid__correction_interval=2)
    correction = corrected.trainer.pilot.correction
    correction.tried, correction.plain_error, correction.corrected_error = 10, 1.0, 0.5
    assert correction.active
    assert correction.stored > 0
    horizon = corrected.trainer.pilot.plan().horizon
    for run in (plain_run, corrected):
        for _ in range(horizon):
            run.step()
    assert not same_weights(plain_run.trainer.model, corrected.trainer.model)


def test_the_correction_before_validation_is_counted() -> None:
    run = world(Net(), Regression(), AUDITED, "repeat")
    before_a_move(run)
    correction = run.trainer.pilot.correction
    correction.tried, correction.plain_error, correction.corrected_error = 10, 1.0, 0.5
    while not run.moves:
        run.step()
    assert run.trainer.summary()["corrections"]["applied"] == 1


# --- rest ------------------------------------------------------------------------------------------------------------


def resting(data: Callable[[int], Any], settings: dict[str, Any] | None = None) -> World:
    """A noisy run up to where watching pauses."""
    run = world(Net(), data, {**IDLE, "max_steps": 1500, **(settings or {})}, "repeat")
    while not run.trainer.policy.rest.steps > 50:
        run.step()
        assert run.position < 1000
    return run


def test_when_nothing_can_come_of_it_watching_pauses() -> None:
    run = resting(Regression())
    trainer = run.trainer
    windows, told = trainer.observer.trajectory.windows, trainer.observer.predictor.windows
    rest = trainer.policy.rest.steps
    assert rest % 5 == 0
    for _ in range(rest):
        run.step()
    assert trainer.policy.rest.steps == 0
    assert trainer.observer.trajectory.windows == windows
    assert trainer.observer.predictor.windows == told
    for _ in range(5):
        run.step()
    assert trainer.observer.trajectory.windows == windows + 1  # and then goes on


def test_steps_of_a_rest_are_plain_steps() -> None:
    run = resting(Regression())
    for _ in range(37):
        run.step()
    other = plain(Net(), Regression(), range(run.position), {**IDLE, "max_steps": 1500})
    assert same_weights(run.trainer.model, other.model)
    assert run.trainer.global_step == sum(run.trainer.summary()["steps"].values()) == run.position


def directions(trainer: HybridTrainer) -> int:
    """Bytes of them in a checkpoint."""
    tensors = take_apart(trainer.state_dict()).tensors.items()
    return sum(t.numel() * t.element_size() for name, t in tensors if "observer.trajectory" in name)


def test_directions_are_given_back_for_as_long_as_nothing_will_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests, "_LONGEST_REST", 12)
    run = world(Net(), Regression(), {**IDLE, "max_steps": 400}, "repeat")
    trainer, trajectory = run.trainer, run.trainer.observer.trajectory
    assert trajectory.bytes > 0 < directions(trainer)
    run.run(lambda: trainer.policy.rest.steps > 0)
    assert trajectory.bytes == directions(trainer) == 0
    assert trainer.policy.tools.snapshots.taken is not None  # for emergencies
    run.run(lambda: trainer.policy.rest.steps == 0)
    assert trajectory.bytes > 0 < directions(trainer)
    assert not trajectory.basis.any()
    run.run(lambda: trajectory.windows == 1)
    assert trajectory.basis.any()
    run.run()
    other = plain(Net(), Regression(), range(run.position), {**IDLE, "max_steps": 400})
    assert same_weights(trainer.model, other.model)


def test_a_large_model_keeps_no_directions_only_to_say_how_predictable_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests, "NEED_A_REASON", 0)
    monkeypatch.setattr(rests, "_LONGEST_REST", 12)
    run = world(Net(), Regression(), {**IDLE, "max_steps": 300})
    made: list[int] = []
    run.run(lambda: made.append(run.trainer.observer.trajectory.bytes) or run.trainer.global_step == 300)
    summary = run.trainer.summary()
    assert max(made) == 0
    assert summary["predictability"]["verdict"].startswith("too few forecasts (0)")
    assert "not tried" in summary["audit"]["sentence"]
    assert summary["predictability"]["gradient_snr"] is not None
    assert same_weights(run.trainer.model, plain(Net(), Regression(), range(300), {**IDLE, "max_steps": 300}).model)
    tried = world(Net(), Regression(), {**AUDITED, "max_steps": 300})
    assert tried.trainer.observer.trajectory.bytes > 0


def test_a_large_model_makes_room_for_directions_once_moves_can_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests, "NEED_A_REASON", 0)
    run = world(Bowl(), still, {**BOWL, **IDLE, "max_steps": 200})
    assert run.trainer.observer.trajectory.bytes == 0
    run.run()
    assert run.trainer.observer.trajectory.bytes > 0
    assert any(move.verdict == "kept" for move in run.moves)


def test_where_there_is_no_memory_for_directions_the_run_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(trajectory: Trajectory) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB.")

    monkeypatch.setattr(rests, "NEED_A_REASON", 0)
    run = world(Bowl(), still, {**BOWL, **IDLE, "max_steps": 120})
    monkeypatch.setattr(Trajectory, "hold", full)
    run.run()
    assert run.trainer.observer.trajectory.bytes == 0
    assert run.moves == []
    assert "there is no memory for directions" in run.trainer.policy.last_reason
    assert run.trainer.policy.rest.steps > 0


@pytest.mark.parametrize("reason", [0, 10**9])
def test_a_run_without_directions_is_resumed_exactly(reason: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From windows that are watched with and without them, rests, and after waking."""
    monkeypatch.setattr(rests, "NEED_A_REASON", reason)
    monkeypatch.setattr(rests, "_LONGEST_REST", 4)
    settings = {**IDLE, "max_steps": 110, "predictor.beta": 0.5, "evaluation.ema_decay": 0.9}
    whole, kept = world(Net(), Regression(), settings), set()
    again = world(Net(), Regression(), settings)
    for step in range(110):
        whole.step()
        again.step()
        if step % 3:
            continue
        kept.add(whole.trainer.observer.trajectory.held)
        state = snapshot(again.trainer.state_dict())
        assert differences(without_clock(state), without_clock(snapshot(whole.trainer.state_dict()))) == []
        again = World(world(Net(), Regression(), settings).trainer, Regression(), [], again.position)
        again.trainer.load_state_dict(put_together(state))
    assert kept == ({False} if reason == 0 else {True, False})


def without_clock(state: Snapshot) -> Snapshot:
    state.tree["seconds"] = 0.0
    return state


def test_nan_during_a_rest_is_noticed() -> None:
    data, bad = Regression(), set()

    def with_holes(position: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data(position)
        return (inputs, targets * math.nan) if position in bad else (inputs, targets)

    run = resting(with_holes)
    bad |= set(range(run.position + 3, run.position + 6))
    for _ in range(40):
        run.step()
    kinds = [event.action for event in run.events if isinstance(event, Recovered)]
    assert "skip_batch" in kinds
    rolled_back = next(event for event in run.events if isinstance(event, Recovered) and event.action == "roll_back")
    assert "learning rate x 0.1" in rolled_back.text
    assert 0.1 <= run.trainer.engine.rate_factor < 1.0  # noticed at once, so a part may have been given back by now
    assert all(torch.isfinite(p).all() for p in run.trainer.model.parameters())


def test_a_runaway_loss_during_a_rest_is_noticed() -> None:
    data, start = Regression(), [10**9]

    def poisoned(position: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data(position)
        return (inputs, 30 + 5 * targets) if position > start[0] else (inputs, targets)

    run = resting(poisoned, {"optimizer.learning_rate": 3e-3, "max_steps": 3000})
    start[0] = run.position
    while not any(isinstance(event, Recovered) and event.action == "roll_back" for event in run.events):
        run.step()
        assert run.position < start[0] + 1200, "not noticed"


# --- a predictor of one's own ----------------------------------------------------------------------------------------


class Own(Predictor):
    """Learns one number: how far the last displacement goes on."""

    name = "own"

    def __init__(self) -> None:
        self.share = 0.5
        self.seen = 0

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        coefficients = np.zeros((len(horizons), *situation.gram.shape[:2]))
        coefficients[:, :, 1] = self.share * np.asarray(horizons)[:, None] / situation.window
        return Forecast(tuple(horizons), coefficients, np.full(len(horizons), situation.loss), np.ones(len(horizons)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        for item in followed:
            windows = item.horizon / situation.window
            along, own = item.dots[:, 1].sum(), item.situation.gram[:, 1, 1].sum()
            if own > 0:
                self.share += 0.2 * (along / own / windows - self.share)
                self.seen += 1

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        return {"share": float(self.share), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.share, self.seen = float(state["share"]), int(state["seen"])


def test_a_predictor_of_ones_own_works_and_learns() -> None:
    run = world(Bowl(spread=0.0), still, {**BOWL, "optimizer.learning_rate": 0.005}, Own(), trusted=False).run()
    summary = run.trainer.summary()
    assert summary["predictor"] == "own"
    assert summary["moves"]["kept"] + summary["moves"]["shrunk"] >= 1
    assert run.trainer.observer.predictor.seen > 10
    assert summary["forecast"]["5"]["r2"] > 0.9


class Breaking:
    """The same batch for ever, or until so many backward passes are done."""

    def __init__(self, trainer: HybridTrainer, most: int) -> None:
        self.trainer, self.most = trainer, most

    def __iter__(self) -> Iterator[Tensor]:
        while self.trainer.backward_passes < self.most:
            yield still(0)
        raise OSError("the disk is gone")


@pytest.mark.parametrize("stop", [60, 90])
def test_a_predictor_of_ones_own_is_saved_and_resumed(stop: int, tmp_path: Path) -> None:
    changes = {"optimizer.learning_rate": 0.005, "max_steps": 200, "checkpoint.interval": 7}
    settings = from_mapping({**QUICK, **BOWL, **changes})

    def run(out: str, most: int, resume: bool) -> HybridTrainer:
        trainer = HybridTrainer(Bowl(spread=0.0), config=settings, predictor=Own())
        trainer.fit(Breaking(trainer, most), out=tmp_path / out, resume=resume, progress=False)
        return trainer

    whole = run("whole", 10**9, resume=False)
    assert stop < whole.backward_passes
    with pytest.raises(OSError, match="the disk is gone"):
        run("broken", stop, resume=False)
    resumed = run("broken", 10**9, resume=True)
    assert resumed.engine.clock.seconds > 0
    assert whole.summary()["moves"]["kept"] + whole.summary()["moves"]["shrunk"] >= 1
    assert same_weights(whole.model, resumed.model)
    assert whole.summary()["moves"] == resumed.summary()["moves"]
    assert whole.backward_passes == resumed.backward_passes
    assert whole.observer.predictor.state_dict() == resumed.observer.predictor.state_dict()


# --- what users do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rmsprop", "adagrad", "nadam"])
def test_a_move_with_an_optimizer_of_ones_own_is_taken_back_exactly(kind: str) -> None:
    data = Regression(rows=64)
    model = Net()
    make = {"rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad, "nadam": torch.optim.NAdam}[kind]
    settings = {**QUICK, **UNGUARDED, **IDLE}
    config = from_mapping({name: value for name, value in settings.items() if not name.startswith("optimizer.")})
    trainer = HybridTrainer(model, make(model.parameters(), lr=1e-3), config=config, predictor=Told("flipped"))
    events: list[Any] = []
    trainer.bus.subscribe(events.append)
    trust(trainer)
    run = before_a_move(World(trainer, lambda position: data(0), events))
    before = everything(trainer)
    while not run.moves:
        run.step()
    assert run.moves[0].verdict == "rolled back"
    assert differences(before, everything(trainer)) == []


def test_modules_that_were_put_into_evaluation_stay_so() -> None:
    """Batch statistics that the user froze must not begin to move with the first probe."""
    run = world(Net(norm=True), Regression(), AUDITED, "repeat")
    run.trainer.model.norm.eval()
    before_a_move(run)
    mean = run.trainer.model.norm.running_mean.clone()
    while not run.moves:
        run.step()
    assert not run.trainer.model.norm.training
    assert torch.equal(run.trainer.model.norm.running_mean, mean)


def test_a_buffer_that_is_filled_again_and_again_is_not_the_same_batch() -> None:
    """Loops that reuse their memory, as for CUDA graphs, show one tensor with new numbers each time."""
    data = Regression()
    inputs, targets = (tensor.clone() for tensor in data(0))

    def refilled(position: int) -> tuple[Tensor, Tensor]:
        for buffer, value in zip((inputs, targets), data(position), strict=True):
            buffer.copy_(value)
        return inputs, targets

    run = world(Net(), refilled, IDLE)
    run.run(lambda: run.position >= 60)
    assert not run.trainer.policy.predictability.low_noise


def test_an_audit_replays_the_batches_as_they_were() -> None:
    """Also where the loop reuses its memory."""
    data = Regression()
    inputs, targets = (tensor.clone() for tensor in data(0))

    def refilled(position: int) -> tuple[Tensor, Tensor]:
        for buffer, value in zip((inputs, targets), data(position), strict=True):
            buffer.copy_(value)
        return inputs, targets

    run = world(Net(), refilled, AUDITED, "flipped")
    run.trainer.policy.tools.recent.same = lambda: False  # type: ignore[method-assign]
    before_a_move(run)
    first = run.position
    while not run.moves:
        run.step()
    assert run.moves[0].audited
    assert run.moves[0].verdict == "rolled back"
    positions = [position for position in run.used if position != first]
    assert same_weights(run.trainer.model, plain(Net(), data, positions, AUDITED).model)


def test_a_predictor_that_keeps_the_tensors_it_is_given_does_not_spoil_the_snapshot() -> None:
    class Keeping(Told):
        def __init__(self) -> None:
            super().__init__("repeat")
            self.count = torch.zeros(1)

        def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    run = world(Net(), Regression(), WATCHED, Keeping())
    run.run(lambda: run.position >= 50)
    run.trainer.policy.tools.snapshots.take()
    counts = []
    for _ in range(2):
        run.trainer.policy.recover()
        counts.append(float(run.trainer.observer.predictor.count))
        for _ in range(20):
            run.step()
    assert counts == [10.0, 10.0]


def test_the_correction_carries_the_average_along() -> None:
    settings = {**AUDITED, "evaluation.ema_decay": 0.9}
    run = before_a_move(world(Net(), Regression(), settings, "repeat"))
    trainer = run.trainer
    correction = trainer.pilot.correction
    correction.tried, correction.plain_error, correction.corrected_error = 10, 1.0, 0.5
    run.step()
    assert trainer.phase is Phase.CORRECT
    seen: dict[str, list[Tensor]] = {}

    def both() -> dict[str, list[Tensor]]:
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        with trainer.averaged_weights():
            return {"weights": weights, "average": [p.detach().clone() for p in trainer.model.parameters()]}

    before = both()
    inner = trainer.mover._apply_correction
    trainer.mover._apply_correction = lambda move: (inner(move), seen.update(both()))  # type: ignore[method-assign]
    run.step()
    assert not torch.equal(seen["weights"][0], before["weights"][0])
    for index in range(len(before["weights"])):
        moved = seen["weights"][index] - before["weights"][index]
        assert torch.allclose(seen["average"][index] - before["average"][index], moved, atol=1e-6)


def test_look_ahead_switched_on_at_a_resume_survives_an_emergency() -> None:
    """The snapshot from before knows nothing of it."""
    first = resting(Regression())
    state = first.trainer.state_dict()
    second = world(Net(), Regression(), {**IDLE, "max_steps": 1500, "predictor.beta": 0.5})
    second.trainer.load_state_dict(state)
    second.trainer.policy.recover()
    assert second.trainer.look_ahead is not None
    second.step()
