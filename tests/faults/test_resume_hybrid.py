"""Exact resumption of a hybrid run after every step of every phase, rollbacks before and after it included."""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foretrain import CheckpointStore, HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.step import StepOutput
from foretrain.events import Event, Moved, PhaseChanged, Recovered, Resumed
from foretrain.hybrid.moves.rollout import Rollout
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
from foretrain.persist.codec import Snapshot, put_together, take_apart

SHORT = {
    "hybrid.warmup_steps": 20,
    "hybrid.full_steps": 5,
    "hybrid.window_steps": 5,
    "hybrid.correct_steps": 3,
    "hybrid.max_predict_steps": 8,
    "hybrid.confidence_threshold": 0.0,
    "hybrid.secant_pairs": 0,
    "optimizer.type": "sgd",
    "optimizer.weight_decay": 0.0,
    "schedule.type": "constant",
    "device": "cpu",
    "memory.timeline": False,  # no two runs take the same memory
}
"""All phases several times within some hundred steps."""
UNGUARDED = {"hybrid.search": False, "hybrid.divergence_threshold": 1e6, "guard.prediction_error": 1e6}
"""Harmful moves get through to their validation."""


# --- what is trained -------------------------------------------------------------------------------------------------


class Bowl(nn.Module):
    """A quadratic loss of a vector; the same batch in every step, so that the loss is exact."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(20, generator=generator))
        self.b = nn.Parameter(torch.ones(3))
        self.register_buffer("curvature", torch.logspace(-2, 0, 20))

    def loss(self, batch: Tensor) -> Tensor:
        return 0.5 * (self.curvature * self.w.square()).sum() + 0.025 * self.b.square().sum() + 0 * batch.sum()


class Regression(nn.Module):
    """Linear regression on random batches, with dropout, so that random states count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.dropout = nn.Dropout(0.1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.linear(self.dropout(batch[0]))[:, 0] - batch[1]).square().mean()


def same_batch(position: int) -> Tensor:
    return torch.zeros(1)


class Slope(Bowl):
    """A batch of ones turns the gradient around, ten times as steep: validation finds harm that no probe showed."""

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return loss.detach() + (1 - 11 * batch.sum()) * (loss - loss.detach())


def uphill(position: int) -> Tensor:
    """When the first move is validated."""
    return torch.ones(1) if 47 <= position < 50 else torch.zeros(1)


def random_batch(position: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + position)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, inputs @ torch.linspace(-1, 1, 6) + 0.5 * torch.randn(8, generator=generator)


class Scripted(Predictor):
    """Repeats the last window and is trusted for it; only a move of 8 steps goes `factor` times as far, or back."""

    name = "scripted"

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.windows = 0

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        asked = tuple(sorted({8, *horizons}))
        coefficients = np.zeros((len(asked), *situation.gram.shape[:2]))
        for index, horizon in enumerate(asked):
            coefficients[index, :, 1] = (self.factor if horizon == 8 else 1.0) * horizon / situation.window
        return Forecast(asked, coefficients, np.full(len(asked), situation.loss), np.zeros(len(asked)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        self.windows += 1

    def reset(self) -> None:
        self.windows = 0

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows = int(state["windows"])


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run, and what must have happened in it for the test to be worth anything."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    settings: dict[str, Any]
    steps: int
    verdicts: set[str]
    phases: set[str]
    predictor: Callable[[], Predictor | None] = lambda: None
    audited: bool = False

    def trainer(self) -> tuple[HybridTrainer, list[Event]]:
        torch.rand(3)  # whatever the generators gave before must not matter
        settings = {**SHORT, "max_steps": self.steps, **self.settings}
        trainer = HybridTrainer(self.model(), config=from_mapping(settings), predictor=self.predictor())
        events: list[Event] = []
        trainer.bus.subscribe(events.append)
        return trainer, events


BOWL = {"optimizer.learning_rate": 0.05, "optimizer.momentum": 0.0, "optimizer.gradient_clip_norm": 0.0}
NOISY = {"optimizer.learning_rate": 0.01, "optimizer.momentum": 0.5}
AUDITED = {"audit.time_budget": 1.0, "audit.steps": 6}
AVERAGED = {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5, "optimizer.type": "adamw"}
ROLLOUT = {"hybrid.mode": "rollout"}
ALL = {"warmup", "full", "predict", "correct"}
CASES: dict[str, Case] = {
    "leap, exact loss": Case(Bowl, same_batch, {**BOWL, **AUDITED}, 130, {"kept"}, ALL, audited=True),
    "leap, quasi-Newton": Case(Bowl, same_batch, {**BOWL, "hybrid.secant_pairs": 30}, 110, {"kept"}, ALL),
    "leap, averaged weights": Case(Bowl, same_batch, {**BOWL, **AVERAGED}, 110, {"kept"}, ALL),
    "leap, refused": Case(Bowl, same_batch, BOWL, 110, {"refused"}, {"warmup", "full"}, lambda: Scripted(-1.0)),
    "leap, rolled back": Case(
        Bowl, same_batch, {**BOWL, **UNGUARDED}, 130, {"rolled back"}, ALL, lambda: Scripted(-2.0)
    ),
    "leap, noisy": Case(Regression, random_batch, {**NOISY, **AUDITED}, 130, {"kept"}, ALL, audited=True),
    "leap, noisy, rolled back": Case(
        Regression,
        random_batch,
        {**NOISY, **AUDITED, **UNGUARDED},
        130,
        {"rolled back"},
        ALL,
        lambda: Scripted(-2.0),
        audited=True,
    ),
    "rollout, exact loss": Case(
        Bowl, same_batch, {**BOWL, **ROLLOUT, "hybrid.monitor_interval": 2}, 130, {"kept"}, ALL
    ),
    "rollout, undone": Case(Bowl, same_batch, {**BOWL, **ROLLOUT}, 110, {"refused"}, ALL, lambda: Scripted(-30.0)),
    "rollout, rolled back": Case(
        Slope, uphill, {**BOWL, **UNGUARDED, **ROLLOUT}, 130, {"rolled back"}, ALL, lambda: Scripted(1.0)
    ),
    "rollout, noisy": Case(Regression, random_batch, {**NOISY, **AUDITED, **ROLLOUT}, 130, {"kept"}, ALL, audited=True),
    "rollout, noisy, undone": Case(
        Regression,
        random_batch,
        {**NOISY, **AUDITED, **ROLLOUT},
        130,
        {"refused"},
        ALL,
        lambda: Scripted(-30.0),
        audited=True,
    ),
}


def loop(trainer: HybridTrainer, case: Case) -> Iterator[str]:
    """An own loop that goes where the trainer wants it in the data; gives the phase of every step."""
    while trainer.global_step < case.steps or trainer.judging:
        yield trainer.step(case.batch(trainer.position)).phase


def saved(trainer: HybridTrainer) -> Any:
    """The state as a checkpoint would hold it: cloned tensors, and all else through JSON."""
    parts = take_apart(trainer.state_dict())
    tensors = {name: tensor.clone() for name, tensor in parts.tensors.items()}
    return put_together(Snapshot(tensors, json.loads(json.dumps(parts.tree, allow_nan=False))))


def without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: without_times(value) for key, value in tree.items() if key != "seconds"}
    return [without_times(value) for value in tree] if isinstance(tree, list) else tree


def assert_same_state(one: Any, other: Any) -> None:
    """Every tensor bit for bit, every number and word: weights, optimizer, average, random states, the open move."""
    parts = [take_apart(state) for state in (one, other)]
    assert without_times(parts[0].tree) == without_times(parts[1].tree)
    for name, tensor in parts[0].tensors.items():
        again = parts[1].tensors[name]
        assert (tensor.shape, tensor.dtype) == (again.shape, again.dtype), name
        assert torch.allclose(tensor, again, rtol=0, atol=0, equal_nan=True), name


@dataclass
class Undisturbed:
    """A whole run and its state after every step."""

    phases: list[str] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """Events after each step."""
    events: list[str] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    end: Any = None


@functools.cache
def undisturbed(name: str) -> Undisturbed:
    case, run = CASES[name], Undisturbed()
    trainer, events = case.trainer()
    for phase in loop(trainer, case):
        run.phases.append(phase)
        run.states.append(saved(trainer))
        run.told.append(len(events))
    run.events = [repr(event) for event in events]
    run.moves = [event for event in events if isinstance(event, Moved)]
    run.end = saved(trainer)
    return run


FURTHER = 40
"""Steps that a resumed run is followed for: more than a cycle. It then has the state of the run that was never stopped,
and with it that run's future: `test_resumed_again_and_again` goes on from such states to the end."""


def goes_on_as(run: Undisturbed, step: int, case: Case, trainer: HybridTrainer, events: list[Event]) -> None:
    """A trainer that was resumed after `step` does what the undisturbed run did, and comes to the same state."""
    last = min(step + FURTHER, len(run.states) - 1)
    for now in range(step + 1, last + 1):
        assert trainer.step(case.batch(trainer.position)).phase == run.phases[now], (step, now)
    assert [repr(event) for event in events] == run.events[run.told[step] : run.told[last]], step
    assert_same_state(saved(trainer), run.states[last])


each_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"resumed: {name}")) for name in CASES]
)
"""Tests of one case go to one process, which then makes its undisturbed run once."""


@each_case
def test_the_run_goes_through_what_it_is_there_for(name: str) -> None:
    case, run = CASES[name], undisturbed(name)
    assert set(run.phases) == case.phases
    verdicts = {move.verdict.replace("shrunk", "kept") for move in run.moves}
    assert case.verdicts <= verdicts
    assert any(move.audited for move in run.moves) == case.audited
    counts = run.end["hybrid"]["policy"]["score"]["counts"]["steps"]
    assert sum(counts.values()) == run.end["progress"]["global_step"] == case.steps


@each_case
def test_resumed_again_and_again(name: str) -> None:
    """After every step of a move and every third of the others a fresh trainer goes on that got nothing but the state:
    all states and all events are the same."""
    case, run = CASES[name], undisturbed(name)
    trainer, events = case.trainer()
    heard: list[str] = []
    for step, (phase, state) in enumerate(zip(run.phases, run.states, strict=True)):
        result = trainer.step(case.batch(trainer.position))
        assert result.phase == phase, step
        if phase not in ("predict", "correct") and step % 3:
            continue
        heard += [repr(event) for event in events]
        assert heard == run.events[: run.told[step]]
        now = saved(trainer)
        assert_same_state(now, state)
        trainer, events = case.trainer()
        trainer.load_state_dict(now)
    assert_same_state(saved(trainer), run.end)


@each_case
def test_resumed_once_and_followed(name: str) -> None:
    """From the state after every step of the first move, the steps around it, some of later moves, and some others."""
    case, run = CASES[name], undisturbed(name)
    moved = [step for step, phase in enumerate(run.phases) if phase in ("predict", "correct")]
    first = [step for step in moved if step < moved[0] + 12]
    near = {step + away for step in first for away in (-1, 0, 1)} | set(moved[::7])
    for step in sorted((near | set(range(0, len(run.states), 20))) & set(range(len(run.states)))):
        trainer, events = case.trainer()
        trainer.load_state_dict(copy.deepcopy(run.states[step]))
        goes_on_as(run, step, case, trainer, events)


@each_case
def test_a_state_that_was_loaded_is_not_touched(name: str) -> None:
    case, run = CASES[name], undisturbed(name)
    for phase in sorted(case.phases):
        step = run.phases.index(phase)
        state = copy.deepcopy(run.states[step])
        trainer, events = case.trainer()
        trainer.load_state_dict(state)
        goes_on_as(run, step, case, trainer, events)
        assert_same_state(state, run.states[step])


@each_case
def test_resumed_from_files(name: str, tmp_path: Path) -> None:
    case, run = CASES[name], undisturbed(name)
    store = CheckpointStore(tmp_path)
    first = {phase: run.phases.index(phase) for phase in case.phases}
    last = {phase: len(run.phases) - 1 - run.phases[::-1].index(phase) for phase in case.phases}
    for step in sorted({*first.values(), *last.values()}):
        store.save(step, run.states[step])
        loaded = store.load_newest()
        assert loaded is not None
        trainer, events = case.trainer()
        trainer.load_state_dict(loaded.state)
        goes_on_as(run, step, case, trainer, events)


# --- what recovery changed stays changed -----------------------------------------------------------------------------


class Exploding(Bowl):
    """Three gradients a hundred times too large, one after the other."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * (1.0 + 99.0 * batch.sum())


def explosion(position: int) -> Tensor:
    return torch.ones(1) if 60 <= position < 63 else torch.zeros(1)


def recovering() -> tuple[HybridTrainer, list[Event]]:
    settings = {**SHORT, **BOWL, "optimizer.learning_rate": 0.001, "max_steps": 300, "hybrid.warmup_steps": 250}
    return Case(Exploding, explosion, settings, 300, set(), set()).trainer()


@functools.cache
def recovered() -> tuple[HybridTrainer, list[Event], dict[int, Any]]:
    """The whole run, what it told, and its states."""
    straight, events = recovering()
    states: dict[int, Any] = {}
    for position in range(200):
        straight.step(explosion(position))
        if position >= 69:
            states[position + 1] = saved(straight)
        if position == 65:
            assert (straight.engine.rate_factor, straight.engine.clip_limit) == (0.5, 1.0)
    return straight, events, states


@pytest.mark.parametrize("stop", [70, 118, 150, 178])
def test_a_lowered_rate_and_a_clip_are_resumed(stop: int) -> None:
    """Also while they are given back bit by bit."""
    straight, events, states = recovered()
    assert any(isinstance(event, Recovered) for event in events)
    resumed, _ = recovering()
    resumed.load_state_dict(copy.deepcopy(states[stop]))
    for position in range(stop, 200):
        resumed.step(explosion(position))
        if position % 3 == 1:  # 199 among them
            assert_same_state(saved(resumed), states[position + 1])
    assert resumed.engine.clip_limit == straight.engine.clip_limit
    assert resumed.engine.rate_factor == straight.engine.rate_factor == straight.policy.recovery.rate_factor == 1.0


def broken(position: int) -> Tensor:
    return torch.full((1,), torch.nan if 83 <= position < 88 else 0.0)


@pytest.mark.parametrize("stop", [21, 63, 70, 74, 80, 84])
def test_taking_the_state_changes_nothing(stop: int) -> None:
    """Neither in this run nor in the resumed one: an emergency that follows returns to where it would have."""
    case = Case(Bowl, broken, {**BOWL, "hybrid.warmup_steps": 1000}, 120, set(), set())
    straight, events = case.trainer()
    assert all(loop(straight, case))
    assert any(isinstance(event, Recovered) and event.action == "roll_back" for event in events)
    end = saved(straight)
    watched, seen = case.trainer()
    for _ in range(stop):
        watched.step(case.batch(watched.position))
    state, before = saved(watched), list(seen)
    assert all(loop(watched, case))
    assert [repr(event) for event in seen] == [repr(event) for event in events]
    assert_same_state(saved(watched), end)
    resumed, after = case.trainer()
    resumed.load_state_dict(state)
    assert all(loop(resumed, case))
    assert [repr(event) for event in before + after] == [repr(event) for event in events]
    assert_same_state(saved(resumed), end)


# --- whole runs in a folder ------------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Regression that notes the batches of its full steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Regression()
        self.positions: list[int] = []

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self.positions.append(int(batch[2][0]))
        return self.inner.loss(batch[:2])


class Rewindable:
    """A loader that can seek."""

    def __init__(self) -> None:
        self.position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            yield (*random_batch(self.position - 1), torch.full((8,), self.position - 1))


def shuffled() -> Any:
    """A torch DataLoader: it cannot seek, and draws a new order for each pass of 7 batches."""
    rows = [random_batch(number) for number in range(7)]
    samples = [(*row, torch.full((8,), number)) for number, row in enumerate(rows)]
    return torch.utils.data.DataLoader(samples, batch_size=None, shuffle=True)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[], Any]] = {"seek": Rewindable, "shuffled": shuffled}
FIT_STEPS = 110


def fit(
    out: Path,
    mode: str,
    loader: str,
    stop_in: tuple[str, int] | None = None,
    resume: bool = False,
    factor: float = -2.0,
    **changes: Any,
) -> tuple[HybridTrainer, dict[str, Any], list[Event]]:
    """A run whose moves of 8 steps do harm and are rolled back. stop_in: stop after so many steps of that phase."""
    case = Case(
        Seen,
        random_batch,
        {**NOISY, **UNGUARDED, "hybrid.mode": mode, "audit.time_budget": 0.0, "checkpoint.interval": 0, **changes},
        FIT_STEPS,
        set(),
        set(),
        lambda: Scripted(factor),
    )
    trainer, events = case.trainer()
    assert trainer.policy is not None
    trainer.policy.gate.prior = (1.0, 0.01, 100.0)  # moves are taken to pay, so that they are made without an audit
    steps = 0
    step = trainer.step

    def counted(batch: Any) -> Any:
        nonlocal steps
        result = step(batch)
        if stop_in is not None and result.phase == stop_in[0]:
            steps += 1
            if steps == stop_in[1]:
                os.kill(os.getpid(), signal.SIGTERM)
        return result

    trainer.step = counted  # type: ignore[method-assign]
    with warnings.catch_warnings(action="ignore"):
        summary = trainer.fit(LOADERS[loader](), out=out, resume=resume, progress=False, on_interrupt="return")
    return trainer, summary, events


def told(events: Sequence[Event]) -> list[str]:
    return [repr(event) for event in events if isinstance(event, (Moved, PhaseChanged, Recovered))]


STOPS = {
    "leap": [("full", 1), ("predict", 1), ("correct", 1), ("correct", 2), ("correct", 3), ("correct", 4)],
    "rollout": [("predict", 1), ("predict", 4), ("predict", 7), ("correct", 1), ("correct", 2), ("correct", 3)],
}


@pytest.fixture(scope="session")
def never_stopped(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[HybridTrainer, dict[str, Any], list[Event]]]:
    return functools.cache(lambda mode, loader: fit(tmp_path_factory.mktemp("straight") / "run", mode, loader))


@pytest.mark.parametrize(
    ("mode", "stop", "loader"),
    [
        pytest.param(mode, stop, loader, marks=pytest.mark.xdist_group(f"stopped: {mode}, {loader}"))
        for loader in LOADERS
        for mode, stops in STOPS.items()
        for stop in stops
    ],
)
def test_a_run_interrupted_in_any_phase_ends_as_if_nothing_had_been(
    mode: str, stop: tuple[str, int], loader: str, tmp_path: Path, never_stopped: Callable[..., Any]
) -> None:
    """In PREDICT and CORRECT the rollback that follows the resumption goes back to data before it."""
    straight, summary, events = never_stopped(mode, loader)
    assert summary["moves"]["rolled_back"] >= 2
    first, stopped, before = fit(tmp_path / "stopped", mode, loader, stop_in=stop)
    assert stopped["reason"] == "interrupted"
    assert first.phase.value in (stop[0], "correct", "full")
    resumed, again, after = fit(tmp_path / "stopped", mode, loader, resume=True)
    assert again["reason"] == "finished"
    assert any(isinstance(event, Resumed) for event in after)
    assert told(before) + told(after) == told(events)
    assert first.model.positions + resumed.model.positions == straight.model.positions
    if stop[0] == "correct" and stop[1] < 3:
        assert resumed.model.positions[3 - stop[1]] < resumed.model.positions[0] or loader == "shuffled"
    assert_same_state(saved(resumed), saved(straight))
    timeless = {"seconds", "total_seconds", "tokens_per_second", "environment"}
    assert {k: v for k, v in again.items() if k not in timeless} == {
        k: v for k, v in summary.items() if k not in timeless
    }


@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_a_rollback_goes_back_in_the_data_and_meets_the_same_batches(mode: str, tmp_path: Path) -> None:
    """A run whose every move is rolled back has, in the end, trained on the batches of a plain run, in their order."""
    trainer, summary, _ = fit(tmp_path / "run", mode, "seek")
    assert summary["moves"]["rolled_back"] >= 2
    assert summary["moves"]["kept"] + summary["moves"]["shrunk"] + summary["moves"]["refused"] == 0
    wasted = 3 * summary["moves"]["rolled_back"]
    assert summary["backward_passes"] == len(trainer.model.positions) == FIT_STEPS + wasted
    assert trainer.position == FIT_STEPS
    plain, _, _ = fit(tmp_path / "plain", "leap", "seek", **{"hybrid.full_steps": FIT_STEPS})
    assert plain.backward_passes == FIT_STEPS
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name


def test_a_move_undone_while_predicting_leaves_no_trace(tmp_path: Path) -> None:
    """The batches that watched it are trained on in their turn, and none of them twice."""
    guarded = {"hybrid.divergence_threshold": 3.0, "guard.prediction_error": 0.2}
    trainer, _, events = fit(tmp_path / "run", "rollout", "seek", factor=-300.0, **guarded)
    first = next(event for event in events if isinstance(event, Moved))
    assert first.verdict == "refused"
    known = first.step + 10  # the next move comes later
    assert trainer.model.positions[:known] == list(range(known))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_however_soon_it_is_undone(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = Rollout.predict

    def undone(move: Rollout, batch: Any) -> StepOutput | None:
        output = predict(move, batch)
        if move.refused or move.moved < steps:
            return output
        move.refuse("the test wants it")
        return None

    monkeypatch.setattr(Rollout, "predict", undone)
    trainer, summary, _ = fit(tmp_path / "run", "rollout", "seek")
    assert summary["moves"]["refused"] >= 2
    assert trainer.model.positions == list(range(FIT_STEPS))


@pytest.mark.parametrize("pass_length", [5, 50])
def test_a_rollback_meets_the_batches_of_a_shuffled_pass_again(
    pass_length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves begin at multiples of 5: with passes of 5 batches a rollback returns to the first batch of a pass."""

    def loader() -> Any:
        samples = [(*random_batch(number), torch.full((8,), number)) for number in range(pass_length)]
        return torch.utils.data.DataLoader(samples, batch_size=None, shuffle=True)  # type: ignore[arg-type]

    monkeypatch.setitem(LOADERS, "passes", loader)
    trainer, _, events = fit(tmp_path / "run", "leap", "passes")
    first = next(event for event in events if isinstance(event, Moved))
    assert first.verdict == "rolled back"
    seen = trainer.model.positions
    # The batch at `first.step` was probed, the next three validated the move; then it starts again from the former.
    assert seen[first.step : first.step + 3] == seen[first.step + 4 : first.step + 7]


# --- resumed with other settings -------------------------------------------------------------------------------------


OTHER = {
    "another predictor": {"predictor.type": "momentum"},
    "longer moves": {"hybrid.max_predict_steps": 40},
    "shorter windows": {"hybrid.window_steps": 4},
    "longer windows": {"hybrid.window_steps": 8},
    "another way": {"hybrid.mode": "rollout"},
    "no prediction": {"hybrid.mode": "off"},
    "a narrow basis": {"hybrid.basis_type": "bf16"},
    "fewer residuals": {"correction.residuals": 3},
}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param(name, what, marks=pytest.mark.xdist_group(f"resumed: {name}"))
        for name in ("leap, exact loss", "leap, rolled back", "leap, noisy")
        for what in OTHER
    ],
)
def test_changed_settings_take_over_wherever_the_run_stopped(name: str, what: str) -> None:
    """Nobody promises the same numbers, but the run goes on and ends well."""
    case, run = CASES[name], undisturbed(name)
    for phase in sorted(set(run.phases)):
        step = run.phases.index(phase)
        state = copy.deepcopy(run.states[step])
        settings = {**case.settings, **OTHER[what]}
        predictor = (lambda: None) if "predictor" in what else case.predictor
        end = min(case.steps, state["progress"]["global_step"] + FURTHER)
        changed = Case(case.model, case.batch, settings, end, set(), set(), predictor)
        trainer, _ = changed.trainer()
        trainer.load_state_dict(state)
        assert all(loop(trainer, changed))
        assert trainer.global_step >= end
        assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
