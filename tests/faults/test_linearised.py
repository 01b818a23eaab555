"""Faults inside a chain of linearised leaps: killed, stopped, short of memory, frozen. Nothing is lost, and every bit
of the end is that of the undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.test_out_of_memory import shortage
from tests.faults.test_resume_hybrid import assert_same_state, saved
from tests.hybrid.judges.test_held_out import HELD_OUT, TRAINED
from tests.hybrid.linearised.problems import derivative
from tests.worlds import QUICK, same_weights
from torch import Tensor, nn

from foretrain import CheckpointStore, HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import OutOfMemory
from foretrain.events import CheckpointSaved, Evaluated, Event, Moved, Notice, Phase, Recovered, Resumed
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.hybrid.moves.linearised import LinearisedKind
from foretrain.persist import checkpoint

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "max_steps": 80,
    "optimizer.type": "adam",
    "optimizer.learning_rate": 0.01,
    "hybrid.linear_rows": 12,
    "evaluation.interval": 10,
    "checkpoint.interval": 10,
    "memory.timeline": False,
    "log.report": False,
}
LINE = torch.linspace(-1, 1, 20).view(-1, 1)


class Points:
    """Batches by position; a run can go to any of them at once."""

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self.batch, self.position = batch, 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch(self.position)
            self.position += 1


def same(position: int) -> Tensor:
    return LINE


def fresh(position: int) -> Tensor:
    return LINE + torch.rand(20, 1, generator=torch.Generator().manual_seed(position)) / 10


def curve(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found - torch.sin(3 * x)


def equation(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    u = model(x)
    return {"equation": derivative(u, x) - model[-1].bias * u, "start": model(LINE[:1]) - 1}


def by_functions(model: nn.Module, x: Tensor) -> Tensor:
    """Taps cannot see what is called through torch.func."""
    slope = torch.func.vmap(torch.func.grad(lambda t: model(t.view(1, 1)).squeeze()))
    return slope(x[:, 0]) - torch.cos(3 * x[:, 0])


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 6), *between, nn.Tanh(), nn.Linear(6, 1))


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int], Any]]] = {
    "the same points": (network, curve, same),
    "fresh points": (network, curve, fresh),
    "an unknown coefficient": (network, equation, same),
    "parameters beside the layers": (lambda: network(nn.LayerNorm(6)), curve, same),
    "rows one by one": (network, by_functions, fresh),
}
each_case = pytest.mark.parametrize("name", CASES)


def trainer_of(name: str, **changes: Any) -> tuple[HybridTrainer, list[Event], Points]:
    make, residuals, batch = CASES[name]
    model = make()
    torch.rand(3)  # whatever the generators gave before must not matter
    settings = {**QUICK, **SETTINGS, **{name.replace("__", "."): value for name, value in changes.items()}}
    trainer = HybridTrainer(model, residuals=residuals, config=from_mapping(settings))
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    return trainer, events, Points(batch)


def fit(
    name: str, out: Path | None, how: dict[str, Any] | None = None, **changes: Any
) -> tuple[HybridTrainer, list[Event], dict[str, Any]]:
    trainer, events, points = trainer_of(name, **changes)
    summary = trainer.fit(points, [points.batch(-1)], out=out, progress=False, **(how or {}))
    return trainer, events, summary


def kind_of(trainer: HybridTrainer) -> LinearisedKind:
    return next(kind for kind in trainer.policy.kinds if isinstance(kind, LinearisedKind))


def moves(events: list[Event]) -> list[Moved]:
    return [event for event in events if isinstance(event, Moved)]


def steps(events: list[Event], kind: type[Any]) -> list[int]:
    return [event.step for event in events if isinstance(event, kind)]


# --- killed and resumed ----------------------------------------------------------------------------------------------


LENGTHS = {"the same points": 170, "fresh points": 60}
"""So long that the first one waits at last, because nothing is left to win."""


def die_in_a_chain(name: str, out: str, step: int) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    trainer, _, points = trainer_of(name, max_steps=LENGTHS[name])
    taken = trainer.step

    def killed(batch: object) -> object:
        result = taken(batch)
        if trainer.hybrid.chaining and trainer.global_step >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    trainer.step = killed  # type: ignore[method-assign,assignment]
    trainer.fit(points, [points.batch(-1)], out=out, progress=False)


@pytest.mark.parametrize(("name", "step"), [("the same points", 150), ("fresh points", 47)])
def test_killed_inside_a_chain(name: str, step: int, tmp_path: Path) -> None:
    """Where the points are the same, at a time at which it waits because nothing is left to win."""
    script = f"from {__name__} import die_in_a_chain; die_in_a_chain({name!r}, {str(tmp_path / 'killed')!r}, {step})"
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGKILL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole, _, _ = fit(name, tmp_path / "whole", max_steps=LENGTHS[name])
        resumed, events, _ = fit(name, tmp_path / "killed", {"resume": True}, max_steps=LENGTHS[name])
    finally:
        torch.set_num_threads(threads)
    assert step - 20 < steps(events, Resumed)[0] <= step
    assert kind_of(whole).leaps.idle > 0 or name != "the same points"
    assert_same_state(saved(resumed), saved(whole))


@each_case
def test_resumed_after_every_step(name: str) -> None:
    """A fresh trainer that got nothing but the state goes on, again and again: through leaps, through steps that wait
    for better times, and through the steps that validate them."""
    settings = {"max_steps": LENGTHS.get(name, 50)}
    straight, _, _ = trainer_of(name, **settings)
    other, _, _ = trainer_of(name, **settings)
    batch, phases = CASES[name][2], []
    while straight.global_step < straight.config.max_steps or straight.judging:
        straight.step(batch(straight.position))
        phases.append(other.step(batch(other.position)).phase)
        now = saved(other)
        other, _, _ = trainer_of(name, **settings)
        other.load_state_dict(now)
    assert_same_state(saved(other), saved(straight))
    assert {"predict", "correct"} <= set(phases)
    assert kind_of(straight).leaps.made > 5
    assert kind_of(straight).leaps.lookout.tapped is (name != "rows one by one")


def test_a_batch_that_is_a_named_tuple_is_one_after_a_resume() -> None:
    pair = namedtuple("pair", "x y")
    CASES["named"] = (network, lambda model, batch: curve(model, batch.x), lambda position: pair(LINE, LINE))
    try:
        trainer, _, points = trainer_of("named")
        while not trainer.hybrid.chaining:
            trainer.step(points.batch(0))
        state = saved(trainer)
        other, events, _ = trainer_of("named")
        other.load_state_dict(state)
        for each in (trainer, other):
            while each.global_step < 80 or each.judging:
                each.step(points.batch(0))
        assert {move.verdict for move in moves(events)} == {"kept"}
        assert same_weights(trainer.model, other.model)
    finally:
        del CASES["named"]


# --- what fit does inside a chain ------------------------------------------------------------------------------------


@each_case
def test_saved_and_evaluated_inside_a_chain_at_averaged_weights(name: str, tmp_path: Path) -> None:
    """It goes on from each of its checkpoints."""
    settings = {"checkpoint__keep": 100, "evaluation__ema_decay": 0.9, "health__interval": 15, "max_steps": 80}
    whole, events, _ = fit(name, tmp_path / "whole", **settings)
    began = events.index(next(event for event in events if getattr(event, "phase", "") == "predict"))
    inside = events[began : events.index(moves(events)[0])]
    assert len(steps(inside, Evaluated)) >= 3
    assert len(steps(inside, CheckpointSaved)) >= 3
    silent, _, _ = fit(name, None, **settings | {"evaluation__interval": 1000, "health__interval": 0})
    assert same_weights(silent.model, whole.model)
    place = [event.path for event in inside if isinstance(event, CheckpointSaved)][1]
    for _, path in CheckpointStore(tmp_path / "whole/checkpoints").steps():
        if path.name > Path(place).name:
            checkpoint.verify(path)
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    (tmp_path / "whole/summary.json").unlink()
    resumed, again, _ = fit(name, tmp_path / "whole", {"resume": True}, **settings)
    assert steps(again, Resumed) == [int(Path(place).name[5:13])]
    assert_same_state(saved(resumed), saved(whole))


@pytest.mark.parametrize(
    ("name", "where"), [("the same points", "in the residuals"), ("fresh points", "between leaps")]
)
def test_ctrl_c_inside_a_chain(name: str, where: str, tmp_path: Path) -> None:
    trainer, _, points = trainer_of(name)
    residuals, calls = trainer.engine.objective.function, []  # type: ignore[union-attr]

    def interrupt() -> None:
        if trainer.hybrid.chaining and kind_of(trainer).leaps.leaps >= 5 and not calls:
            calls.append(1)
            signal.raise_signal(signal.SIGINT)

    if where == "in the residuals":
        trainer.engine.objective.function = lambda model, x: interrupt() or residuals(model, x)  # type: ignore[union-attr]
    else:
        trainer.bus.subscribe(lambda event: interrupt())
    with pytest.warns(UserWarning, match="SIGINT: stopped after step"):
        trainer.fit(points, [points.batch(-1)], out=tmp_path / "run", progress=False, on_interrupt="return")
    assert trainer.hybrid.chaining
    resumed, _, _ = fit(name, tmp_path / "run", {"resume": True})
    whole, _, _ = fit(name, tmp_path / "apart" / "whole")  # a finished run beside it would be forecast from
    assert_same_state(saved(resumed), saved(whole))


def test_early_stopping_ends_a_chain(tmp_path: Path) -> None:
    settings = {"evaluation__interval": 1, "evaluation__early_stopping_patience": 3, "max_steps": 400}
    trainer, events, summary = fit("the same points", tmp_path, **settings)
    assert summary["reason"] == "stopped early"
    assert not trainer.judging
    assert summary["global_step"] < 400
    assert [move.verdict for move in moves(events)] == ["kept"]
    _, _, again = fit("the same points", tmp_path, {"resume": True}, **settings)
    assert (again["reason"], again["global_step"]) == ("stopped early", summary["global_step"])


# --- held-out data ---------------------------------------------------------------------------------------------------


def learned_by_heart(out: Path | None, held_out: Any = HELD_OUT, how: Any = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
    settings = {**QUICK, **SETTINGS, "max_steps": 200, **{key.replace("__", "."): one for key, one in changes.items()}}
    trainer = HybridTrainer(model, loss_fn=nn.MSELoss(), config=from_mapping(settings))
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    summary = trainer.fit([TRAINED], None if held_out is None else [held_out], out=out, progress=False, **(how or {}))
    return trainer, events, summary


def test_a_chain_goes_back_to_where_the_held_out_loss_was_lowest(tmp_path: Path) -> None:
    alone, _, _ = learned_by_heart(None, None)
    judged, events, summary = learned_by_heart(tmp_path, evaluation__interval=2)
    assert kind_of(judged).leaps.made > 3
    assert summary["final_val_loss"] < 0.8 * alone.evaluate([HELD_OUT])
    assert any("the held-out loss" in move.reason for move in moves(events) if move.chained)
    stays = [event.loss for event in events if isinstance(event, Evaluated)][-80:]  # after the chain
    assert summary["final_val_loss"] <= 1.001 * min(stays)
    assert judged.evaluate([HELD_OUT]) == pytest.approx(summary["final_val_loss"], rel=1e-6)


def test_the_best_weights_of_a_run_with_chains(tmp_path: Path) -> None:
    trainer, events, summary = learned_by_heart(tmp_path, how={"load_best": True}, evaluation__interval=2)
    assert summary["best_val_loss"] == pytest.approx(trainer.evaluate([HELD_OUT]), rel=1e-6)
    (kept,) = CheckpointStore(tmp_path / "checkpoints").best()
    assert kept == summary["best_step"]
    stays = [event.loss for event in events if isinstance(event, Evaluated) and event.best]
    assert summary["best_val_loss"] <= min(stays)


# --- memory ----------------------------------------------------------------------------------------------------------


def scarce(monkeypatch: pytest.MonkeyPatch, what: str, number: int) -> None:
    """Memory runs out in that call."""
    plain, calls = getattr(Linearisation, what), []

    def short(look: Linearisation, *arguments: Any, **others: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise shortage()
        return plain(look, *arguments, **others)

    monkeypatch.setattr(Linearisation, what, short)


@pytest.mark.parametrize(("what", "number"), [("__init__", 1), ("__init__", 9), ("rows", 6), ("tap_gradients", 1)])
def test_memory_that_runs_out_in_a_leap(
    what: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move is taken back, full steps go on, and nothing of the leap holds memory."""
    with monkeypatch.context() as patch:
        scarce(patch, what, number)
        trainer, events, points = trainer_of("the same points", memory__on_out_of_memory="retry")
        held = []

        def noted(event: Event) -> None:
            if isinstance(event, Recovered):
                held.append(kind_of(trainer).leaps.lookout._look)

        trainer.bus.subscribe(noted)
        summary = trainer.fit(points, [points.batch(-1)], out=tmp_path, progress=False)
    assert summary["reason"] == "finished"
    assert summary["out_of_memory"]["failed_moves"] == 1
    assert held == [None]
    assert moves(events)[0].verdict == "refused"
    assert "kept" in [move.verdict for move in moves(events)]
    assert trainer.engine.probe(LINE) < 1e-4


def test_without_a_retry_the_run_stops_and_goes_on_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        scarce(patch, "rows", 20)
        with pytest.raises(OutOfMemory, match="out of memory in predict"):
            fit("the same points", tmp_path / "run")
    resumed, _, _ = fit("the same points", tmp_path / "run", {"resume": True})
    whole, _, _ = fit("the same points", tmp_path / "apart" / "whole")  # a finished run beside it is forecast from
    assert_same_state(saved(resumed), saved(whole))


# --- freezing --------------------------------------------------------------------------------------------------------


@each_case
def test_frozen_in_mid_chain(name: str) -> None:
    """What was won so far stays; later chains move the other weights only."""
    trainer, events, points = trainer_of(name)
    while not (trainer.hybrid.chaining and kind_of(trainer).leaps.leaps >= 3):
        trainer.step(points.batch(trainer.position))
    trainer.model[0].requires_grad_(False)
    assert kind_of(trainer).leaps._norms is not None
    before = [p.detach().clone() for p in trainer.model[0].parameters()]
    while trainer.global_step < 80 or trainer.judging:
        trainer.step(points.batch(trainer.position))
    assert all(torch.equal(p, q) for p, q in zip(trainer.model[0].parameters(), before, strict=True))
    assert any("frozen" in event.message for event in events if isinstance(event, Notice))
    norms = kind_of(trainer).leaps._norms
    assert norms is None or len(norms) == len(trainer.engine.full_step.parameters)
    assert kind_of(trainer).leaps.failure == ""
    assert trainer.phase in (Phase.FULL, Phase.WARMUP)


def test_everything_frozen_in_mid_chain() -> None:
    trainer, _, points = trainer_of("the same points")
    while not trainer.hybrid.chaining:
        trainer.step(points.batch(trainer.position))
    trainer.model.requires_grad_(False)
    with pytest.raises(Exception, match=r"frozen|require"):
        trainer.step(points.batch(trainer.position))
