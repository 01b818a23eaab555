"""Chains of quasi-Newton leaps: only where the loss is exact, never uphill, and every gradient counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.worlds import QUICK, Net, Regression, World, leaps_of, world
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Moved, Phase
from foretrain.health.act import Action, Kind
from foretrain.hybrid.moves.quasi_newton import QuasiNewton
from foretrain.hybrid.summary import prediction_progress
from foretrain.motion.losses import WindowLosses
from foretrain.persist.codec import put_together, snapshot

DATA = Regression()
ROWS = 400
INPUTS, TARGETS = DATA.inputs[:ROWS], DATA.targets[:ROWS]
CHAINED: dict[str, Any] = {
    "hybrid.secant_pairs": 20,
    "max_steps": 200,
    "optimizer.learning_rate": 3e-3,
    "audit.time_budget": 0.0,
}


def same(position: int) -> tuple[Tensor, Tensor]:
    return INPUTS, TARGETS


def drawn(share: float) -> Callable[[int], tuple[Tensor, Tensor]]:
    """That share of the rows, in a new order every time."""

    def batch(position: int) -> tuple[Tensor, Tensor]:
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(position))[: int(share * ROWS)]
        return INPUTS[rows], TARGETS[rows]

    return batch


class Random(Net):
    """Random numbers in the loss itself, so small that hardly anything else shows them."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss((batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]))


def run_of(model: nn.Module, data: Callable[[int], Any] = same, **settings: Any) -> World:
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    return world(model, data, {**CHAINED, **changes}, "repeat")


def chained(run: World) -> list[Moved]:
    return [move for move in run.moves if move.chained]


# --- only where the loss is exact ------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [same, drawn(1.0)], ids=["same batch", "shuffled"])
def test_a_full_batch_is_chained(data: Callable[[int], Any]) -> None:
    run = run_of(Net(), data).run()
    assert any(move.verdict == "kept" for move in chained(run))


@pytest.mark.parametrize(
    ("model", "data"),
    [(Net(), drawn(0.9)), (Net(dropout=0.1), same), (Net(norm=True), drawn(0.9)), (Random(), same)],
    ids=["90 % of the rows", "dropout", "batch statistics", "random numbers in the loss"],
)
def test_a_loss_that_is_not_exact_is_not_chained(model: nn.Module, data: Callable[[int], Any]) -> None:
    run = run_of(model, data)
    begun: list[bool] = []
    begin = leaps_of(run.trainer).begin
    # whatever noise was measured: the check alone decides
    type_of = type(run.trainer.policy.predictability)
    run.trainer.policy.predictability.__class__ = type("Low", (type_of,), {"low_noise": True})
    leaps_of(run.trainer).begin = lambda batch: begun.append(begin(batch)) or begun[-1]  # type: ignore[method-assign]
    run.run()
    assert begun
    assert not any(begun)
    assert chained(run) == []


def test_a_noisy_run_keeps_no_pairs() -> None:
    run = run_of(Net(), DATA).run()
    assert leaps_of(run.trainer).secant is None
    assert chained(run) == []


def test_the_check_changes_nothing() -> None:
    run = ready()
    before = [p.detach().clone() for p in run.trainer.model.parameters()]
    passes = run.trainer.backward_passes
    assert leaps_of(run.trainer).begin(same(0))
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))
    assert run.trainer.backward_passes == passes


# --- what it is good for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_far_lower_loss_in_the_same_number_of_backward_passes(kind: str) -> None:
    """Linear regression without noise in its targets, of condition 100."""
    targets = (INPUTS @ torch.linspace(-2, 2, 8))[:, None]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def last(mode: str) -> float:
        rate = 3e-3 if kind == "adamw" else 0.1
        settings = {"optimizer.type": kind, "optimizer.learning_rate": rate, "hybrid.mode": mode, "max_steps": 300}
        torch.manual_seed(0)
        trainer = HybridTrainer(nn.Linear(8, 1), loss_fn=loss, config=from_mapping({**QUICK, **CHAINED, **settings}))
        while trainer.backward_passes < 300 and trainer.global_step < 300:
            trainer.step((INPUTS, targets))
        assert trainer.backward_passes <= 302
        return trainer.engine.probe((INPUTS, targets))

    assert last("leap") < 0.01 * last("off")


def falling(share: float) -> WindowLosses:
    """What the optimizer's own steps do: the loss falls by that share per step."""
    slope = WindowLosses()
    slope.add(tuple((1 - share) ** step for step in range(5)))
    return slope


def test_the_length_follows_from_success() -> None:
    chain = leaps_of(ready().trainer)
    first = chain.length
    chain.start_loss, chain.loss, chain.cost = 1.0, 0.5, 2.0
    chain.longest = 10 * first
    chain.end(falling(0.01), refused=False)
    assert chain.length == 2 * first
    chain.end(falling(0.01), refused=True)
    assert chain.length == first
    chain.end(falling(0.5), refused=False)  # worse than the optimizer's own steps
    assert chain.length == first // 2
    for _ in range(10):
        chain.end(falling(0.5), refused=False)
    assert chain.length == 4
    for _ in range(10):
        chain.end(falling(0.01), refused=False)
    assert chain.length == chain.longest


def test_losses_below_zero_are_compared_by_their_fall() -> None:
    chain = leaps_of(ready().trainer)
    first = chain.length
    chain.start_loss, chain.loss, chain.cost, chain.longest = -1.0, -2.0, 2.0, 10 * first
    slow, fast = WindowLosses(), WindowLosses()
    slow.add((-0.8, -0.9, -1.0))
    fast.add((-0.5, -1.5, -2.5))
    chain.end(slow, refused=False)
    assert chain.length == 2 * first
    chain.end(fast, refused=False)
    assert chain.length == first


def test_a_chain_ends_at_its_length_or_when_it_is_slow() -> None:
    chain = leaps_of(ready().trainer)
    slope = falling(0.1)
    chain.loss, chain.length, chain.leaps, chain.rate = 1.0, 10, 3, 0.0
    assert not chain.over(slope)  # too early to tell
    chain.leaps = 4
    assert chain.over(slope)
    chain.rate = 0.2
    assert not chain.over(slope)
    assert chain.over(falling(0.3))
    assert not chain.over(WindowLosses())  # nothing is known of the optimizer's own steps
    chain.leaps = 10
    assert chain.over(slope)


def test_no_chain_is_longer_than_the_rest_of_the_run_allows() -> None:
    run = run_of(Net(), max_steps=120).run()
    assert chained(run)
    assert run.trainer.global_step == 120 == sum(run.trainer.summary()["steps"].values())


# --- one leap --------------------------------------------------------------------------------------------------------


def ready(**settings: Any) -> World:
    """A run that is about to begin a chain."""
    run = run_of(Net(), **settings)
    run.run(lambda: run.trainer.phase is Phase.PREDICT and leaps_of(run.trainer).ready)
    return run


def begun(**settings: Any) -> tuple[HybridTrainer, QuasiNewton]:
    trainer = ready(**settings).trainer
    assert leaps_of(trainer).begin(same(0))
    return trainer, leaps_of(trainer)


def test_a_leap_lowers_the_loss_and_costs_one_backward_pass() -> None:
    trainer, chain = begun()
    passes = trainer.backward_passes
    for leaps in range(1, 6):
        before = chain.loss
        output = chain.leap(same(0))
        assert output is not None
        assert chain.loss == float(output.loss) < before
        assert trainer.engine.probe(same(0)) < before
        assert chain.leaps == leaps
    assert trainer.backward_passes == passes + chain.leaps + round((chain.cost - chain.leaps) // 4)


def test_a_refused_leap_restores_the_weights_to_the_bit() -> None:
    trainer, chain = begun()
    assert chain.secant is not None
    chain.secant.gradient.neg_()  # what it knows is wrong: every direction leads uphill
    chain.secant.leap = lambda scales: (chain.secant.gradient.clone(), -1.0)  # type: ignore[method-assign,union-attr]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    chain.loss = -1.0  # no loss is as low as this
    passes, leaps = trainer.backward_passes, chain.leaps
    assert chain.leap(same(0)) is None
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert chain.leaps == leaps
    assert trainer.backward_passes == passes + 1  # the gradient of no use is counted, too
    assert chain.cost == pytest.approx(1 + (3 + 4) / 3)  # and its probes


def test_a_leap_that_is_too_long_is_shortened_and_both_gradients_are_counted() -> None:
    trainer, chain = begun()
    secant, before = chain.secant, chain.loss
    assert secant is not None
    leap = secant.leap
    secant.leap = lambda scales: tuple(100 * value for value in leap(scales))  # type: ignore[method-assign,assignment]
    passes = trainer.backward_passes
    assert chain.leap(same(0)) is not None
    assert chain.loss < before
    assert trainer.backward_passes == passes + 2
    assert chain.cost > 2


def test_a_direction_uphill_is_not_even_tried() -> None:
    trainer, chain = begun()
    assert chain.secant is not None
    chain.secant.leap = lambda scales: (torch.ones_like(chain.secant.weights), 1.0)  # type: ignore[method-assign,union-attr]
    passes = trainer.backward_passes
    before = [p.detach().clone() for p in trainer.model.parameters()]
    assert chain.leap(same(0)) is None
    assert trainer.backward_passes == passes
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_refused_chain_leaves_the_run_as_it_was() -> None:
    """The step that was to be a leap becomes a full step, and the run goes on."""
    run = ready()
    chain = leaps_of(run.trainer)
    assert chain.secant is not None
    chain.secant.leap = lambda scales: (torch.ones_like(chain.secant.weights), 1.0)  # type: ignore[method-assign,union-attr]
    length, step = chain.length, run.trainer.global_step
    result = run.step()
    assert (result.phase, result.global_step) == ("full", step + 1)
    assert run.moves[-1].verdict == "refused"
    assert chain.length == max(4, length // 2)


def test_all_backward_passes_are_counted() -> None:
    """By counting them where they happen."""
    run = run_of(Net(), max_steps=120)
    step, taken = run.trainer.engine.full_step, []
    backward = step._backward
    step._backward = lambda loss: taken.append(1) or backward(loss)  # type: ignore[method-assign]
    run.run()
    assert chained(run)
    assert run.trainer.backward_passes == len(taken)


# --- an exact loss needs no caution ----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [same, drawn(1.0)], ids=["same batch", "shuffled"])
def test_leaps_need_no_warm_up(data: Callable[[int], Any]) -> None:
    """Every leap is judged by the loss it leads to, so nothing has to be known before."""
    run = run_of(Net(), data, hybrid__warmup_steps=150)
    run.run(lambda: run.trainer.phase is Phase.PREDICT)
    assert run.trainer.global_step <= 30


@pytest.mark.parametrize("model", [Net(), Random()], ids=["exact", "random numbers in the loss"])
def test_comparing_batches_changes_nothing(model: nn.Module) -> None:
    """Neither the weights nor what the generators give next."""
    run = run_of(model)
    trainer, chain = run.trainer, leaps_of(run.trainer)
    run.run(lambda: chain.ready)
    before, random = [p.detach().clone() for p in trainer.model.parameters()], torch.get_rng_state()
    chain.compare(drawn(1.0)(0))
    assert chain.exact is not isinstance(model, Random)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("data", [drawn(0.9), DATA], ids=["90 % of the rows", "minibatches"])
def test_any_other_loss_does(data: Callable[[int], Any]) -> None:
    run = run_of(Net(), data, hybrid__warmup_steps=150)
    run.run(lambda: run.trainer.global_step >= 150)
    assert run.moves == []


def test_neither_does_one_that_turned_out_not_to_be_exact() -> None:
    """Dropout in every step of the same batch: found out at the first try, and never taken for exact again."""
    run = run_of(Net(dropout=0.1), hybrid__warmup_steps=40, max_steps=120)
    policy, asked = run.trainer.policy, []
    decide = policy.cycle.decide
    policy.cycle.decide = lambda view: asked.append(view.exact) or decide(view)  # type: ignore[method-assign]
    run.run()
    assert leaps_of(run.trainer).exact is False
    assert not any(asked[len(asked) // 2 :])


def test_a_chain_may_be_longer_than_a_predicted_phase() -> None:
    run = run_of(Net(), max_steps=400).run()
    longest = max(move.horizon for move in chained(run))
    assert run.trainer.config.hybrid.max_predict_steps < longest <= 10 * run.trainer.config.hybrid.max_predict_steps


@pytest.mark.parametrize("rate", [3e-3, 0.1, 1.0])
def test_the_optimizers_own_steps_cannot_spoil_what_leaps_have_gained(rate: float) -> None:
    """At the end of the run the weights are where the loss was lowest at the end of a chain, or at a lower loss."""
    run = run_of(Net(), optimizer__learning_rate=rate, max_steps=150)
    ends: list[float] = []
    end = leaps_of(run.trainer).end
    leaps_of(run.trainer).end = (  # type: ignore[method-assign]
        lambda slope, **how: ends.append(leaps_of(run.trainer).loss) or end(slope, **how)
    )
    run.run()
    assert ends
    assert run.trainer.engine.probe(same(0)) <= min(ends) * (1 + 1e-5)


def after_a_chain() -> tuple[World, QuasiNewton]:
    """A run whose first chain was kept, and whose weights were spoilt since."""
    run = ready()
    run.run(lambda: bool(run.moves) and run.trainer.phase is Phase.FULL)
    assert run.moves[-1].chained
    assert run.moves[-1].verdict == "kept"
    chain = leaps_of(run.trainer)
    with torch.no_grad():
        for p in run.trainer.model.parameters():
            p.add_(0.3)
    run.trainer.engine.end_at(run.trainer.global_step + 100)  # a chain may have taken all of the run
    run.step()
    return run, chain


def test_a_chain_begins_at_the_lowest_end_of_the_ones_before() -> None:
    run, chain = after_a_chain()
    before = [p.detach().clone() for p in run.trainer.model.parameters()]
    lowest = chain.lowest
    assert chain.begin(same(0))
    assert chain.returned
    assert chain.loss == chain.start_loss == lowest < run.trainer.engine.probe(same(0))
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))
    output = chain.leap(same(0))
    assert output is None or float(output.loss) < lowest


def test_but_not_if_its_loss_is_another_by_now() -> None:
    """The data may have changed since."""
    _, chain = after_a_chain()
    chain.lowest *= 0.99
    assert chain.begin(same(0))
    assert not chain.returned
    assert math.isnan(chain.lowest)  # so that the next chain sets its own mark
    assert chain.secant is not None
    assert chain.secant.mark is None


def test_the_end_of_a_run_is_the_lowest_point_known() -> None:
    run, chain = after_a_chain()
    spoilt = run.trainer.engine.probe(same(0))
    chain.finish(same(0))
    assert run.trainer.engine.probe(same(0)) == pytest.approx(chain.lowest, rel=1e-5)
    assert chain.lowest < spoilt
    with torch.no_grad():
        next(run.trainer.model.parameters()).fill_(torch.nan)
    chain.finish(same(0))
    assert run.trainer.engine.probe(same(0)) == pytest.approx(chain.lowest, rel=1e-5)
    chain.lowest = 1e9  # a mark that is no lower leaves the weights as they are
    before = [p.detach().clone() for p in run.trainer.model.parameters()]
    chain.finish(same(0))
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))


class Evaluating(Net):
    """It computes a little otherwise where it evaluates, as torch's transformer layers do."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1.0 if self.training else 1.0 + 1e-4)


def test_a_run_ends_there_also_where_a_model_evaluates_otherwise_than_it_trains() -> None:
    run = run_of(Evaluating(), max_steps=150)
    run.run(lambda: bool(chained(run)) and not run.trainer.judging)
    lowest = leaps_of(run.trainer).lowest
    assert lowest < math.inf
    with torch.no_grad():
        for p in run.trainer.model.parameters():
            p.add_(0.3)
    leaps_of(run.trainer).finish(same(0))
    assert run.trainer.engine.probe(same(0)) == pytest.approx(lowest, rel=1e-2)


def test_it_stays_where_it_is_if_that_is_lower() -> None:
    run, chain = after_a_chain()
    assert chain.marked
    before = [p.detach().clone() for p in run.trainer.model.parameters()]
    losses = iter([1.0, 2.0])  # here, and at the end of the chain
    assert chain.finish(same(0), lambda: next(losses)) is None
    assert next(losses, None) is None
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))
    losses = iter([2.0, 1.0])
    assert chain.finish(same(0), lambda: next(losses)) == (2.0, 1.0)
    assert not all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))


def test_validating_steps_that_go_astray_do_not_undo_a_chain() -> None:
    run = ready()
    run.run(lambda: run.trainer.phase is Phase.CORRECT)
    end = run.trainer.policy.move.loss
    undo = [Action(Kind.ROLL_BACK, "the loss is far too high")]
    run.trainer.policy.check_validation = lambda readings: undo  # type: ignore[method-assign]
    with torch.no_grad():
        for p in run.trainer.model.parameters():
            p.add_(10.0)
    run.run(lambda: run.trainer.phase is Phase.FULL)
    assert run.moves[-1].verdict == "kept"
    assert run.trainer.engine.probe(same(0)) == pytest.approx(end, rel=1e-5)


def test_between_leaps_the_weights_are_where_the_loss_was_measured() -> None:
    """So that an evaluation or a checkpoint in mid-chain sees what was reported."""
    trainer, chain = begun()
    for _ in range(3):
        output = chain.leap(same(0))
        assert output is not None
        assert trainer.engine.probe(same(0)) == pytest.approx(float(output.loss), rel=1e-6)


def test_nothing_is_told_of_before_a_chain_as_if_it_were_now() -> None:
    """Means and forecasts are of full steps: inside a chain and right after it there are none."""
    run = ready(max_steps=400)
    assert prediction_progress(run.trainer.engine, run.trainer.policy)["smoothed_loss"] > 0
    run.step()
    told: list[dict[str, Any]] = []
    run.run(lambda: told.append(prediction_progress(run.trainer.engine, run.trainer.policy)) or bool(run.moves))
    run.trainer.engine.end_at(run.trainer.global_step + 100)  # a chain may have taken all of the run
    run.step()
    told.append(prediction_progress(run.trainer.engine, run.trainer.policy))
    assert len(told) > 5
    for progress in told:
        assert progress["smoothed_loss"] is None
        assert progress["predicted_loss"] is None
    assert [progress["confidence"] for progress in told[1:-2]] == [None] * (len(told) - 3)
    run.run(lambda: run.trainer.observer.windows == 1)
    after = prediction_progress(run.trainer.engine, run.trainer.policy)
    assert after["smoothed_loss"] < 2 * leaps_of(run.trainer).loss  # not the mean of before
    assert after["predicted_loss"] is None  # nothing was said of this window


# --- where it is impossible ------------------------------------------------------------------------------------------


def make(pairs: int = 50, memory: float = 256.0, scaled: bool = False, decay: float = 0.0) -> QuasiNewton:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=decay)
    trainer = HybridTrainer(model, optimizer, lambda model, batch: model(batch).square().mean())
    trainer.engine.precision.scaled = scaled
    return QuasiNewton(trainer.engine, pairs, memory, 60)


def test_weight_decay_never_chains() -> None:
    """A leap goes to where the loss alone is lowest; decay would lead away from there."""
    assert make().possible
    assert not make(decay=0.01).possible


def test_fp16_never_chains() -> None:
    """Its gradients carry the loss scale, and its losses are too coarse."""
    assert make().possible
    assert not make(scaled=True).possible


@pytest.mark.parametrize(("pairs", "possible"), [(0, False), (4, False), (5, True)])
def test_a_handful_of_pairs_is_needed(pairs: int, possible: bool) -> None:
    assert make(pairs).possible is possible


@pytest.mark.parametrize(("memory", "pairs"), [(256.0, 50), (8 * 4160 * 10.5 / 2**20, 10), (0.1, 3), (0.0, 0)])
def test_memory_limits_the_pairs(memory: float, pairs: int) -> None:
    chain = make(memory=memory)
    assert chain.pairs == pairs
    assert chain.possible is (pairs >= 5)


@pytest.mark.parametrize("settings", [{"hybrid__secant_pairs": 0}, {"hybrid__secant_memory_mb": 0.001}])
def test_without_room_for_pairs_there_is_no_chain(settings: dict[str, Any]) -> None:
    run = run_of(Net(), max_steps=120, **settings).run()
    assert leaps_of(run.trainer).secant is None
    assert run.moves
    assert chained(run) == []


def test_rollouts_do_not_chain() -> None:
    assert not leaps_of(run_of(Net(), hybrid__mode="rollout").trainer).possible


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaps", [0, 1, 3])
def test_a_chain_goes_on_bit_for_bit(leaps: int) -> None:
    one = ready()
    for _ in range(leaps):
        one.step()
    assert one.trainer.judging == (leaps > 0)
    state = put_together(snapshot(one.trainer.state_dict()))
    other = run_of(Net(seed=1))
    other.trainer.load_state_dict(state)
    other.position = one.position
    plain = (bool, int, float, type(None))
    before, after = (
        {name: repr(value) for name, value in vars(leaps_of(each.trainer)).items() if isinstance(value, plain)}
        for each in (one, other)
    )
    assert before == after
    for _ in range(30):
        assert one.step().loss == other.step().loss
    for mine, theirs in zip(one.trainer.model.parameters(), other.trainer.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert leaps_of(one.trainer).length == leaps_of(other.trainer).length
