"""Held-out data judges moves whose loss is exact: chains end where it was lowest, and no move may raise it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.faults.test_resume_hybrid import assert_same_state, saved
from tests.hybrid.moves.test_chain import CHAINED, DATA
from tests.worlds import Net, World, leaps_of, world
from torch import Tensor, nn

from foretrain.events import Notice, Phase
from foretrain.hybrid.judges.held_out import HeldOut

DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(100, 5, generator=DRAW)
TARGETS = INPUTS[:, :1] + torch.randn(100, 1, generator=DRAW)
TRAINED, HELD_OUT = (INPUTS[:30], TARGETS[:30]), (INPUTS[30:], TARGETS[30:])
"""So few and so noisy examples that a network learns them by heart."""


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])


def run_of(judged: bool = True, **settings: Any) -> World:
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    run = world(Wide(), lambda position: TRAINED, {**CHAINED, **changes}, "repeat")
    if judged:
        run.trainer.hybrid.judge_by([HELD_OUT])
    return run


def held_out_loss(run: World) -> float:
    return run.trainer.evaluate([HELD_OUT])


def held_out_of(run: World) -> HeldOut:
    return run.trainer.policy.tools.held_out


def chaining(run: World) -> World:
    return run.run(lambda: run.trainer.hybrid.chaining)


# --- chains ----------------------------------------------------------------------------------------------------------


def test_alone_chains_learn_by_heart() -> None:
    """What the others are tested against: so it goes without held-out data."""
    run = run_of(judged=False).run()
    assert held_out_loss(run) > 1.3 * held_out_loss(run_of().run())


def test_a_chain_goes_back_to_where_its_held_out_loss_was_lowest() -> None:
    run = chaining(run_of())
    held_out, began, passes = held_out_of(run), run.trainer.global_step - 1, run.trainer.backward_passes
    losses: dict[int, float] = {}
    look = held_out.look

    def noted(leaps: int, training_loss: float) -> bool:
        found = look(leaps, training_loss)
        losses[leaps] = held_out.last
        return found

    held_out.look = noted  # type: ignore[method-assign]
    run.run(lambda: run.trainer.phase is not Phase.PREDICT)
    lowest = min(losses, key=lambda leaps: losses[leaps])
    assert max(losses) - lowest == 4 * 8  # four looks, every eighth leap
    assert held_out_loss(run) == pytest.approx(losses[lowest], rel=1e-6)
    assert run.trainer.global_step == began + lowest == sum(run.trainer.summary()["steps"].values())
    assert run.trainer.backward_passes - passes > max(losses) - 2  # what was spent stays spent
    run.run(lambda: not run.trainer.judging)
    assert run.moves[-1].verdict == "kept"
    assert run.moves[-1].horizon == lowest
    assert "the held-out loss rose" in run.moves[-1].reason
    assert held_out_loss(run) <= losses[lowest] * (1 + 1e-6)


def test_the_gate_does_not_begin_the_next_chain_at_once() -> None:
    run = chaining(run_of(max_steps=400))
    run.run(lambda: bool(run.moves))
    gate = run.trainer.policy.gate
    assert gate.wait == 4
    after = run.trainer.global_step
    run.run(lambda: len(run.moves) > 1 or run.trainer.global_step >= 400)
    assert run.trainer.global_step > after + 4 * run.trainer.config.hybrid.full_steps
    assert len(run.moves) == 1 or gate.wait >= 4


def test_a_chain_that_only_raises_it_is_undone() -> None:
    run = run_of()
    run.run(lambda: run.trainer.phase is Phase.PREDICT and leaps_of(run.trainer).ready)
    losses = iter([1.0] + [2.0 + step for step in range(100)])
    held_out_of(run).loss = lambda: next(losses)  # type: ignore[method-assign]
    before, step = [p.detach().clone() for p in run.trainer.model.parameters()], run.trainer.global_step
    run.run(lambda: bool(run.moves) or run.trainer.phase is Phase.FULL)
    move = run.moves[-1]
    assert (move.verdict, move.step) == ("refused", step)
    assert "the held-out loss only rose" in move.reason
    assert run.trainer.global_step == step + 1  # the batch was learned from in a full step
    moved = [
        float((p.detach() - old).abs().max()) for p, old in zip(run.trainer.model.parameters(), before, strict=True)
    ]
    assert max(moved) < 2 * run.trainer.config.optimizer.learning_rate


def judge(losses: list[float], training: list[float]) -> list[bool]:
    """Whether the chain is over after each look; the first loss is where it begins."""
    held_out = held_out_of(run_of())
    held_out.snapshots.take_best = lambda: None  # type: ignore[method-assign]
    given = iter(losses)
    held_out.loss = lambda: next(given)  # type: ignore[method-assign]
    held_out.begin(training[0])
    over = []
    for number, loss in enumerate(training[1:], start=1):
        held_out.look(4 * number, loss)
        over.append(held_out.over)
    return over


FALL = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3]


@pytest.mark.parametrize(
    ("losses", "training", "over"),
    [
        ([1.0, 1.2, 1.3, 1.4, 1.5, 1.6], FALL, [False, False, False, True, True]),
        ([1.0, 1.2, 1.3, 0.9, 1.2, 1.6], FALL, [False] * 5),
        ([1.0, 1.01, 1.02, 1.03, 1.04, 1.049], FALL, [False] * 5),
        ([0.2, 0.25, 0.25, 0.25, 0.25, 0.25], FALL, [False] * 5),
        ([1.0, math.nan, math.nan, math.nan, math.nan, math.nan], FALL, [False, False, False, True, True]),
    ],
    ids=["learned by heart", "a wobble", "hardly any rise", "below the training loss", "no number"],
)
def test_when_a_chain_is_over(losses: list[float], training: list[float], over: list[bool]) -> None:
    assert judge(losses, training) == over


@pytest.mark.parametrize(("rows", "every"), [(1, 4), (30, 4), (60, 7), (300, 34)])
def test_looks_take_a_tenth_of_a_chain_at_the_most(rows: int, every: int) -> None:
    held_out = held_out_of(run_of())
    held_out.batches = [(torch.zeros(rows, 5), torch.zeros(rows, 1))]
    assert next(leaps for leaps in range(1, 100) if held_out.look_due(leaps, TRAINED, last=False)) == every
    assert held_out.look_due(1, TRAINED, last=True)


def test_a_look_changes_no_generator() -> None:
    run = run_of()
    loss, drawn = Wide.loss, list[float]()

    def draws(batch: tuple[Tensor, Tensor]) -> Tensor:
        drawn.append(float(torch.rand(())))
        return loss(run.trainer.model, batch)  # type: ignore[arg-type]

    run.trainer.model.loss = draws  # type: ignore[assignment]
    before = torch.get_rng_state()
    held_out_of(run).loss()
    assert len(drawn) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_looks_are_charged() -> None:
    """To the tokens of probes, and to what the move cost."""
    with_looks, without = chaining(run_of()), chaining(run_of(judged=False))
    for run in (with_looks, without):
        run.run(lambda run=run: run.trainer.policy.move.moved == 9)
    price = held_out_of(with_looks).price(TRAINED)
    assert price == pytest.approx(70 / 90)
    assert (
        with_looks.trainer.engine.progress.probe_tokens == without.trainer.engine.progress.probe_tokens + 2 * 70
    )  # where it began, and after 8 leaps
    assert with_looks.trainer.policy.move.cost == pytest.approx(without.trainer.policy.move.cost + 2 * price)


def test_the_run_ends_where_its_held_out_loss_was_lowest() -> None:
    run = run_of()
    run.run(lambda: run.trainer.global_step >= 199)
    before = held_out_loss(run)
    run.run()
    after = held_out_loss(run)
    assert after < before
    (said,) = [event.message for event in run.events if isinstance(event, Notice)]
    assert said.startswith("the run ends with the weights of its lowest held-out loss, ")
    assert f"{after:.4g} (" in said
    assert run.trainer.policy.end_loss == pytest.approx(run.trainer.engine.probe(TRAINED))


def test_also_where_an_evaluation_found_it() -> None:
    run = run_of(max_steps=120)
    run.run(lambda: run.trainer.global_step >= 10)
    best = [p.detach().clone() for p in run.trainer.model.parameters()]
    run.trainer.evaluated(held_out_loss(run))
    first = next(run.trainer.model.parameters())
    held_out_of(run).loss = lambda: float((first.detach() - best[0]).square().sum())  # type: ignore[method-assign]
    run.run()
    assert all(torch.equal(a, b) for a, b in zip(best, run.trainer.model.parameters(), strict=True))


def test_but_not_where_that_is_no_lower() -> None:
    run = run_of()
    held_out = held_out_of(run)
    held_out.note(held_out_loss(run))
    run.run(lambda: run.trainer.global_step >= 30)
    before = [p.detach().clone() for p in run.trainer.model.parameters()]
    assert held_out.loss() < held_out.evaluated
    assert held_out.finish() is None
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))


# --- other moves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["leap", "rollout"])
@pytest.mark.parametrize(("rise", "verdict"), [(-0.1, "kept"), (0.0, "kept"), (0.001, "rolled back")])
def test_a_move_that_raises_it_is_not_kept(mode: str, rise: float, verdict: str) -> None:
    run = run_of(hybrid__secant_pairs=0, hybrid__mode=mode, audit__time_budget=1.0)
    losses = iter(1.0 + rise * number for number in range(100))
    held_out_of(run).loss = lambda: next(losses)  # type: ignore[method-assign]
    run.run(lambda: any(move.verdict != "refused" for move in run.moves) or run.trainer.global_step >= 200)
    move = run.moves[-1]
    assert move.verdict.replace("shrunk", "kept") == verdict
    assert ("the held-out loss rose" in move.reason) == (rise > 0)
    assert (run.trainer.policy.gate.wait >= 4) == (rise > 0)
    assert not move.audited  # an audit would judge by what is trained on, and claim to have saved time


def test_where_batches_differ_it_is_not_asked() -> None:
    run = world(Net(), DATA, {"audit.time_budget": 1.0}, "repeat")
    run.trainer.hybrid.judge_by([DATA(5000)])
    held_out_of(run).loss = lambda: pytest.fail("asked")  # type: ignore[method-assign]
    run.run(lambda: bool(run.moves))
    assert run.moves[-1].audited


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"evaluation.ema_decay": 0.9}, {"memory.snapshots": "pinned"}], ids=str)
def test_a_judged_chain_goes_on_bit_for_bit(settings: dict[str, Any]) -> None:
    """After every leap of it, until the move is settled."""
    changes = {name.replace(".", "__"): value for name, value in settings.items()}
    whole = chaining(run_of(**changes))
    states = []
    while whole.trainer.judging:
        states.append(saved(whole.trainer))
        whole.step()
    end = saved(whole.trainer)
    assert whole.moves[-1].verdict == "kept"
    steps = len(states)
    for place in [*range(0, steps, 5), *range(steps - 7, steps)]:
        resumed = run_of(**changes)
        resumed.trainer.load_state_dict(states[place])
        resumed.position = resumed.trainer.position
        for _ in range(place, steps):
            resumed.step()
        assert_same_state(saved(resumed.trainer), end)


def test_what_is_remembered_of_evaluations_is_resumed() -> None:
    run = run_of(max_steps=120)
    run.run(lambda: run.trainer.global_step >= 10)
    run.trainer.evaluated(held_out_loss(run))
    other = run_of(max_steps=120)
    other.trainer.load_state_dict(saved(run.trainer))
    assert held_out_of(other).evaluated == held_out_of(run).evaluated
    assert_same_state(saved(other.trainer), saved(run.trainer))
