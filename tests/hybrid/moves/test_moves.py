"""All moves keep the same promises: refused or undone they leave no trace, saved in the middle they resume to the bit,
and what they cost is charged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hybrid.moves import toy
from tests.worlds import QUICK, Bowl, Net, Regression, Told, World, differences, everything, still, trust
from torch import nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Event, Moved, Phase
from foretrain.hybrid.judges.audit import Audited
from foretrain.hybrid.judges.exact import Exact, OnProbes
from foretrain.hybrid.judges.judgement import Judgement, Trusted
from foretrain.hybrid.moves.base import Outlook
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.plan import Decision
from foretrain.hybrid.snapshot import Snapshots
from foretrain.persist.codec import put_together, snapshot

DATA = Regression()
SHORT = {"hybrid.warmup_steps": 20, "hybrid.full_steps": 5, "hybrid.max_predict_steps": 8, "max_steps": 200}
HOUSE = {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5, "predictor.stride": 2}
"""An average and a look-ahead are carried along."""
NOISY = {"audit.time_budget": 1.0, "audit.steps": 6, "optimizer.learning_rate": 1e-3}
EXACT = {"optimizer.type": "sgd", "optimizer.learning_rate": 0.05, "audit.time_budget": 0.0}


@dataclass(frozen=True)
class Case:
    """A run that makes moves of one kind, and how that kind is told from others."""

    settings: dict[str, Any]
    model: Callable[[], nn.Module] = Bowl
    data: Callable[[int], Any] = still
    judge: type[Any] | None = None
    probe: tuple[Any, ...] = ()
    prior: tuple[float, float, float] | None = None
    kinds: tuple[Any, ...] = ()
    residuals: Callable[[Any, Any], Any] | None = None
    house: dict[str, Any] = field(default_factory=lambda: HOUSE)

    def world(self) -> World:
        torch.manual_seed(0)
        trainer = HybridTrainer(
            self.model(),
            config=from_mapping({**QUICK, **SHORT, **self.house, **self.settings}),
            predictor=Told("repeat"),
            probe=self.probe,
            residuals=self.residuals,
        )
        events: list[Event] = []
        trainer.bus.subscribe(events.append)
        trust(trainer)
        if self.prior is not None:
            trainer.policy.gate.prior = self.prior
        for kind in self.kinds:
            trainer.policy.add(kind)
        return World(trainer, self.data, events)


def noisy_net() -> nn.Module:
    return Net(dropout=0.2, norm=True)


class Curve(nn.Module):
    """A network that is fitted to a curve. What it calls its loss are residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x) - torch.sin(3 * x)
        return found


def points(position: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 20).view(-1, 1)


def fresh_points(position: int) -> torch.Tensor:
    return torch.rand(20, 1, generator=torch.Generator().manual_seed(position)) / 10 + points(0)


LINEARISED = {"optimizer.type": "adam", "optimizer.learning_rate": 0.01, "hybrid.linear_rows": 12, "max_steps": 120}
CASES: dict[str, Case] = {
    "leap, audited": Case(NOISY, noisy_net, DATA, Audited),
    "leap, trusted": Case(NOISY | {"audit.time_budget": 0.0}, noisy_net, DATA, Trusted, prior=(1.0, 0.01, 100.0)),
    "leap, exact": Case(EXACT, judge=Exact),
    "leap, exact and audited": Case(EXACT | {"audit.time_budget": 1.0}, judge=Audited),
    "leap, held out": Case(NOISY, noisy_net, DATA, OnProbes, probe=(DATA(5000), DATA(5001))),
    "rollout": Case(EXACT | {"hybrid.mode": "rollout", "optimizer.learning_rate": 0.01}, judge=Exact),
    "rollout, audited": Case(NOISY | {"hybrid.mode": "rollout"}, noisy_net, DATA, Audited),
    "chain": Case(EXACT | {"hybrid.secant_pairs": 20}, judge=Exact),
    "linearised": Case(LINEARISED, Curve, points, Exact, residuals=lambda model, x: model.loss(x)),
    "linearised, fresh points": Case(LINEARISED, Curve, fresh_points, residuals=lambda model, x: model.loss(x)),
    "shrink": Case(EXACT, judge=Exact, kinds=(toy.ShrinkKind,)),
    "shrink, noisy": Case(NOISY, noisy_net, DATA, Audited, kinds=(toy.ShrinkKind,)),
}
moves = pytest.mark.parametrize("name", CASES)


def about_to_move(name: str) -> World:
    """The next step is the first of a move."""
    run = CASES[name].world()
    run.run(lambda: run.trainer.phase is Phase.PREDICT or run.position > 150)
    assert run.trainer.phase is Phase.PREDICT, run.trainer.policy.last_reason
    return run


def begun(run: World, name: str) -> JudgedMove:
    move = run.trainer.policy.open(run.data(run.position))
    assert move.kind == name.partition(",")[0]
    assert isinstance(move.judge_of_move, CASES[name].judge or object)
    return move


def whole(run: World, name: str) -> JudgedMove:
    """A move up to its judgement; the trainer knows nothing of it."""
    move = begun(run, name)
    for number in range(200):
        if move.phase is Phase.CORRECT and move.over:
            break
        move.advance(run.data(run.position + number))
        assert not move.refused, move.reason
    assert move.over
    return move


# --- moves that the policy makes -------------------------------------------------------------------------------------


@moves
def test_a_refused_move_leaves_no_trace(name: str) -> None:
    run = about_to_move(name)
    before = everything(run.trainer)
    move = begun(run, name)
    if name.startswith(("rollout", "chain", "linearised")):  # in the middle of it
        move.advance(run.data(run.position))
    move.refuse("the test wants it")
    assert move.refused
    assert differences(before, everything(run.trainer)) == []


@moves
def test_an_undone_move_leaves_no_trace(name: str) -> None:
    """After all its full steps: weights, buffers, optimizer, average, random states and counters, byte for byte."""
    run = about_to_move(name)
    before, passes = everything(run.trainer), run.trainer.backward_passes
    move = whole(run, name)
    assert run.trainer.backward_passes > passes
    assert differences(before, everything(run.trainer))
    move.undo()
    assert differences(before, everything(run.trainer)) == []


@moves
def test_a_move_says_that_weights_change_before_they_do(name: str) -> None:
    """Else what ends it there would take them for those of before the step."""
    run = about_to_move(name)
    move, model, full_step = begun(run, name), run.trainer.model, run.trainer.engine.full_step
    before, loss, said = [p.detach().clone() for p in full_step.parameters], model.loss, []

    def looked(batch: Any) -> Any:
        if not all(torch.equal(p, old) for p, old in zip(full_step.parameters, before, strict=True)):
            said.append(full_step.changing)
        return loss(batch)

    model.loss = looked
    for number in range(20):
        full_step.changing = False  # as at the beginning of a step
        move.advance(run.data(run.position + number))
        if said:
            break
    assert said
    assert all(said)


@moves
@pytest.mark.parametrize("phase", [Phase.PREDICT, Phase.CORRECT])
def test_a_move_saved_in_the_middle_resumes_to_the_bit(name: str, phase: Phase) -> None:
    run = about_to_move(name)
    if phase is Phase.CORRECT:
        run.run(lambda: run.trainer.judging and run.trainer.policy.move.steps == 1)
    elif name.startswith(("rollout", "chain", "linearised")):
        run.run(lambda: run.trainer.judging and run.trainer.policy.move.made == 2)
    state = put_together(snapshot(run.trainer.state_dict()))
    other = CASES[name].world()
    other.trainer.load_state_dict(state)
    other.position = run.position
    told = len(run.moves)
    generator = torch.get_rng_state()
    ends = []
    for each in (run, other):
        torch.set_rng_state(generator)
        each.run(lambda each=each: each.position >= 130 or each.trainer.engine.ended)
        ends.append(everything(each.trainer))
    assert differences(*ends) == []
    assert repr(run.moves[told:]) == repr(other.moves)
    assert other.moves


@moves
def test_what_a_move_cost_is_charged(name: str) -> None:
    """Of all that was computed, only what a kept move validated with is no cost."""
    run = about_to_move(name)
    ledger, passes = run.trainer.policy.score.ledger, run.trainer.backward_passes
    before, steps = ledger.cost, run.trainer.global_step
    run.run(lambda: bool(run.moves))
    move = run.moves[0]
    assert move.cost_steps > 0
    assert ledger.cost - before == pytest.approx(move.cost_steps, abs=0.01)
    spent = run.trainer.backward_passes - passes
    progress = run.trainer.global_step - steps
    assert ledger.cost - before >= spent - progress - 1e-6


@pytest.mark.parametrize("name", ["leap, exact", "shrink"])
def test_a_judgement_that_says_no_undoes_the_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = about_to_move(name)
    before = everything(run.trainer)
    monkeypatch.setattr(JudgedMove, "judge", lambda move: Judgement(False, 0.0, move.cost, "the test wants it; "))
    run.run(lambda: bool(run.moves))
    assert run.moves[0].verdict == "rolled back"
    assert "the test wants it" in run.moves[0].reason
    assert differences(before, everything(run.trainer)) == []


@moves
def test_a_move_whose_snapshot_fails_has_not_begun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the next batch then, also in a run that was saved and resumed in between."""
    run = about_to_move(name)
    before = everything(run.trainer)

    def fail(snapshots: Snapshots, for_move: bool = True) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "take", fail)
        with pytest.raises(MemoryError):
            run.trainer.policy.open(run.data(run.position))
    assert run.trainer.policy.move is None
    assert differences(before, everything(run.trainer)) == []
    assert begun(run, name).batch is not None


# --- look-ahead ------------------------------------------------------------------------------------------------------


def looking() -> World:
    """A run whose next full step looks ahead."""
    run = Case(EXACT | {"hybrid.warmup_steps": 10_000}).world()
    run.run(lambda: run.position >= 12)
    assert run.trainer.look_ahead.over
    return run


def test_one_that_is_begun_and_refused_leaves_no_trace() -> None:
    run = looking()
    move, before = run.trainer.look_ahead, everything(run.trainer)
    move.begin(run.data(run.position))
    assert differences(before, everything(run.trainer))
    move.refuse("the test wants it")
    found = differences(before, everything(run.trainer))
    assert [one for one in found if not one.startswith("look_ahead.before")] == []  # the next one begins with it anew


@pytest.mark.parametrize("steps", [1, 3])
def test_one_that_is_saved_in_the_middle_resumes_to_the_bit(steps: int) -> None:
    run = looking()
    for _ in range(steps):
        run.step()
    state = put_together(snapshot(run.trainer.state_dict()))
    other = looking()
    other.trainer.load_state_dict(state)
    other.position = run.position
    generator, ends = torch.get_rng_state(), []
    for each in (run, other):
        torch.set_rng_state(generator)
        each.run(lambda each=each: each.position >= 40)
        ends.append(everything(each.trainer))
    assert differences(*ends) == []


def test_looking_ahead_is_free() -> None:
    ahead = looking()
    assert ahead.trainer.look_ahead.judge().cost_steps == 0.0
    assert ahead.trainer.backward_passes == ahead.trainer.global_step == ahead.position


# --- the toy ---------------------------------------------------------------------------------------------------------


def test_the_toy_is_short_and_the_documentation_shows_it() -> None:
    source = Path(toy.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 40
    page = Path(__file__).parents[3] / "docs" / "moves.md"
    shown = source[source.index("import torch") :].strip()
    assert shown in page.read_text(encoding="utf-8")


def test_the_toy_is_made_whenever_it_may_be_and_reported_like_any_move() -> None:
    run = CASES["shrink"].world()
    run.run(lambda: len(run.moves) >= 3)
    assert {move.verdict for move in run.moves} == {"kept"}
    assert all("smaller weights are tried" in move.reason for move in run.moves)
    summary = run.trainer.summary()
    assert summary["moves"]["kept"] == 3
    assert summary["audit"]["exact_moves"] == 3
    assert run.trainer.policy.gate.count == run.trainer.policy.bandit.rewards == 0  # it teaches nothing about forecasts


class AuditedShrinkKind(toy.ShrinkKind):
    def propose(self, outlook: Outlook) -> Decision | None:
        return Decision(self.name, horizon=1, audited=True, longest=1, reason="smaller weights are tried")


@pytest.mark.parametrize(("length", "room"), [(60, False), (70, True)])
def test_the_validation_of_an_audited_move_ends_with_the_run_at_the_latest(length: int, room: bool) -> None:
    """It is longer than that of other moves: a proposed move for which it leaves no room is not begun."""
    settings = NOISY | {"audit.steps": 25, "max_steps": length}
    run = Case(settings, noisy_net, DATA, house={}, kinds=(AuditedShrinkKind,)).world().run()
    assert [move.audited for move in run.moves] == [True] * room
    assert run.trainer.global_step == length


def test_a_kind_that_is_missing_is_named() -> None:
    run = about_to_move("shrink")
    run.step()
    assert run.trainer.judging
    other = Case(EXACT).world()
    with pytest.raises(Exception, match="a move of the kind 'shrink' is open, and nobody makes such moves here"):
        other.trainer.load_state_dict(run.trainer.state_dict())
    assert isinstance(run.trainer.policy.move, toy.Shrink)
    assert not isinstance(run.events[-1], Moved)
