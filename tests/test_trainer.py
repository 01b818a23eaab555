"""HybridTrainer: one step, evaluation, any module, any optimizer, and the exact resumption of all of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foretrain import CheckpointStore, Config, HybridTrainer, InputError, supervised
from foretrain.config import with_beta2
from foretrain.data.loader import Loader, TokenWindows
from foretrain.errors import CheckpointError, ConfigError
from foretrain.persist.codec import take_apart

Make = Callable[..., Any]


class Perceptron(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def regression(rows: int = 32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :1] * x[:, 1:2]).sin()


# --- one step ------------------------------------------------------------------------------------------------------


def test_a_step_says_what_it_did(make_model: Make, make_batch: Make, make_config: Make) -> None:
    trainer = HybridTrainer(make_model(), config=make_config({"schedule.type": "cosine", "max_steps": 10}))
    expected = make_model().loss(make_batch()).item()
    first, second = trainer.step(make_batch()), trainer.step(make_batch())
    assert first.loss == pytest.approx(expected, rel=1e-6)
    assert (first.phase, first.global_step, second.global_step) == ("warmup", 1, 2)
    assert (first.predicted_loss, first.confidence) == (None, None)
    assert (first.learning_rate, second.learning_rate) == (trainer.engine.schedule(0), trainer.engine.schedule(1))
    assert first.gradient_norm > 0
    assert first.skipped is False
    assert trainer.engine.progress.tokens == 2 * 4 * 16


def test_a_step_equals_a_plain_loop(make_model: Make, make_batch: Make, make_config: Make) -> None:
    settings = {"optimizer.learning_rate": 0.01, "optimizer.weight_decay": 0.0, "optimizer.epsilon": 1e-4}
    settings["optimizer.type"] = "adamw"
    trainer = HybridTrainer(make_model(), config=make_config({**settings, "max_steps": 8}))
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    for number in range(8):
        result = trainer.step(make_batch(seed=number))
        for group in optimizer.param_groups:
            group["lr"] = result.learning_rate
        optimizer.zero_grad()
        loss = plain.loss(make_batch(seed=number))
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for one, other in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_rate_of_every_step_is_the_schedules(make_model: Make, make_batch: Make, make_config: Make) -> None:
    settings = {"optimizer.type": "muon", "optimizer.learning_rate": 0.02, "optimizer.rest_learning_rate": 0.005}
    trainer = HybridTrainer(make_model(), config=make_config({**settings, "max_steps": 20}))
    for step in range(20):
        rate = trainer.step(make_batch()).learning_rate
        assert rate == trainer.engine.schedule(step)
        assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([rate, rate / 4, rate / 4])


def test_without_a_loss_function_the_model_needs_one(make_config: Make) -> None:
    trainer = HybridTrainer(Perceptron(), config=make_config())
    with pytest.raises(ConfigError, match="Perceptron has no method loss"):
        trainer.step(regression())


def test_without_a_configuration_the_defaults_are_used() -> None:
    trainer = HybridTrainer(Perceptron(), loss_fn=supervised(F.mse_loss))
    assert trainer.config == with_beta2(Config())
    assert math.isfinite(trainer.step(regression()).loss)


# --- any module, any optimizer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "muon"])
def test_any_module_learns_with_a_loss_function(kind: str, make_config: Make) -> None:
    settings = {"optimizer.type": kind, "optimizer.learning_rate": 0.02, "max_steps": 150, "optimizer.weight_decay": 0}
    trainer = HybridTrainer(Perceptron(), loss_fn=supervised(F.mse_loss), config=make_config(settings))
    before = trainer.evaluate([regression(seed=99)])
    for number in range(150):
        trainer.step(regression(seed=number))
    assert trainer.evaluate([regression(seed=99)]) < 0.7 * before
    assert trainer.engine.progress.tokens == 150 * 32


def test_batches_may_be_dicts(make_config: Make) -> None:
    trainer = HybridTrainer(
        Perceptron(), None, lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]), make_config()
    )
    x, y = regression()
    assert trainer.step({"x": x, "y": y, "name": "text"}).loss == pytest.approx(F.mse_loss(Perceptron()(x), y).item())


class SignDescent(torch.optim.Optimizer):
    """An optimizer as a user writes one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(group["lr"] * p.grad.sign())


OWN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
    "sign descent": lambda params: SignDescent(params, lr=0.002),
}


@pytest.mark.parametrize("name", OWN)
def test_an_optimizer_of_ones_own_trains_at_its_own_rate(name: str, make_config: Make) -> None:
    model = Perceptron()
    optimizer = OWN[name](model.parameters())
    trainer = HybridTrainer(model, optimizer, supervised(F.mse_loss), make_config({"max_steps": 100}))
    peak = trainer.engine.rate.peak
    before = trainer.evaluate([regression(seed=99)])
    rates = [trainer.step(regression(seed=number)).learning_rate for number in range(100)]
    assert set(rates) == {peak, optimizer.param_groups[0]["lr"]}
    assert trainer.evaluate([regression(seed=99)]) < before


# --- evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation_weighs_batches_by_what_they_count(make_model: Make, make_batch: Make, make_config: Make) -> None:
    trainer = HybridTrainer(make_model(), config=make_config())
    inputs, targets = make_batch(rows=6)
    targets = targets.clone()
    targets[4:] = -100
    batches = [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])]
    with torch.no_grad():
        expected = F.cross_entropy(trainer.model(inputs[:4]).flatten(0, 1), targets[:4].flatten()).item()
    assert trainer.evaluate(batches) == pytest.approx(expected, rel=1e-5)


def test_where_nothing_is_predicted_there_is_nothing_that_predicts(make_model: Make, make_config: Make) -> None:
    trainer = HybridTrainer(make_model(), config=make_config({"hybrid.mode": "off"}))
    assert (trainer.hybrid, trainer.policy, trainer.observer) == (None, None, None)


def test_an_evaluation_does_not_hold_gradients(make_model: Make, make_config: Make, make_batch: Make) -> None:
    """The next step makes them anew: losses are those of a run that is not evaluated."""
    losses = []
    for evaluated in (False, True):
        trainer = HybridTrainer(make_model(), config=make_config({"hybrid.mode": "off"}))
        for step in range(4):
            losses.append(trainer.step(make_batch(4, step)).loss)
            assert all(p.grad is not None for p in trainer.model.parameters())
            if evaluated:
                trainer.evaluate([make_batch(4, 9)])
                assert all(p.grad is None for p in trainer.model.parameters())
    assert losses[:4] == losses[4:]


def test_evaluation_drops_nothing_and_changes_nothing(make_model: Make, make_batch: Make, make_config: Make) -> None:
    trainer = HybridTrainer(make_model(dropout=0.5), config=make_config())
    expected = make_model().loss(make_batch()).item()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    state = torch.get_rng_state()
    one, other = trainer.evaluate([make_batch()]), trainer.evaluate([make_batch()])
    assert torch.equal(torch.get_rng_state(), state)
    assert one == other == pytest.approx(expected, rel=1e-5)
    assert trainer.model.training
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(p, kept) for p, kept in zip(trainer.model.parameters(), before, strict=True))


def test_evaluation_needs_a_batch(make_model: Make, make_config: Make) -> None:
    with pytest.raises(InputError, match="at least one held-out batch"):
        HybridTrainer(make_model(), config=make_config()).evaluate([])


def test_the_model_is_back_in_training_after_a_failed_evaluation(make_model: Make, make_config: Make) -> None:
    trainer = HybridTrainer(make_model(), config=make_config())
    with pytest.raises(IndexError):
        trainer.evaluate([(torch.full((1, 4), 999), torch.zeros(1, 4, dtype=torch.long))])
    assert trainer.model.training


# --- the summary ---------------------------------------------------------------------------------------------------


def test_the_summary_of_an_own_loop(make_model: Make, make_batch: Make, make_config: Make) -> None:
    trainer = HybridTrainer(make_model(), config=make_config())
    trainer.step(make_batch())
    summary = trainer.summary()
    assert (summary["global_step"], summary["tokens"], summary["backward_passes"]) == (1, 64, 1)
    assert summary["steps"] == {"warmup": 1, "full": 0, "predict": 0, "correct": 0}
    assert summary["final_val_loss"] is None
    assert summary["parameters"] == sum(p.numel() for p in trainer.model.parameters())
    assert summary["config"]["max_steps"] == 6
    assert summary["environment"]["device"] == "cpu"


# --- exact resumption ----------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {"optimizer.type": "adam"},
    "sgd": {"optimizer.type": "sgd"},
    "muon": {"optimizer.type": "muon", "optimizer.rest_learning_rate": 1e-3},
    "averaged": {"evaluation.ema_decay": 0.9},
    "fp16": {"precision.type": "fp16", "precision.loss_scale": 2.0**22, "precision.growth_interval": 3},
    "bf16": {"precision.type": "bf16"},
    "accumulated": {"accumulation_steps": 2},
    "cyclic": {"schedule.type": "cyclic", "schedule.cycle_length": 4},
    "everything": {
        "optimizer.type": "muon",
        "evaluation.ema_decay": 0.8,
        "precision.type": "fp16",
        "precision.loss_scale": 2.0**22,
        "precision.growth_interval": 2,
        "accumulation_steps": 2,
    },
}
STEPS = 8


def new_run(make_model: Make, config: Config) -> tuple[HybridTrainer, Loader]:
    """Fresh objects, and random states that have nothing to do with the run."""
    torch.rand(7)
    tokens = np.random.default_rng(0).integers(64, size=400)
    trainer = HybridTrainer(make_model(dropout=0.2), config=config)
    return trainer, Loader(TokenWindows(tokens, 16, config.seed), config.batch_size, config.seed, prefetch=2)


def advance(trainer: HybridTrainer, loader: Loader, steps: int) -> list[float]:
    loader.seek(trainer.position)
    losses = []
    for _, batch in zip(range(steps), loader, strict=False):
        losses.append(trainer.step(batch).loss)
    return losses


def assert_same(one: HybridTrainer, other: HybridTrainer) -> None:
    """All weights, moments, averages, scales and positions. (The generators are those of the process: what they give
    is in the losses, because the model drops out.)"""
    states = [take_apart(trainer.state_dict() | {"random": None}) for trainer in (one, other)]
    assert states[0].tensors.keys() == states[1].tensors.keys()
    for name, tensor in states[0].tensors.items():
        assert torch.allclose(tensor, states[1].tensors[name], rtol=0, atol=0, equal_nan=True), name
    for part in ("progress", "meter"):
        assert states[0].tree[part] == states[1].tree[part]


@pytest.mark.parametrize("stop", [1, 4, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_and_resumed_is_as_never_stopped(
    variant: str, stop: int, make_model: Make, make_config: Make, tmp_path: Path
) -> None:
    config = make_config({"max_steps": STEPS, **VARIANTS[variant]})
    straight, loader = new_run(make_model, config)
    losses = advance(straight, loader, STEPS)

    first, loader = new_run(make_model, config)
    assert advance(first, loader, stop) == losses[:stop]
    store = CheckpointStore(tmp_path)
    store.save(stop, first.state_dict())

    second, loader = new_run(make_model, config)
    second.load_state_dict(store.load_newest().state)
    assert_same(first, second)
    assert (second.global_step, second.position) == (stop, stop)
    assert advance(second, loader, STEPS - stop) == losses[stop:]
    assert_same(straight, second)


@pytest.mark.parametrize("name", OWN)
def test_an_optimizer_of_ones_own_resumes_exactly(name: str, make_config: Make, tmp_path: Path) -> None:
    def fresh() -> HybridTrainer:
        model = Perceptron()
        return HybridTrainer(
            model, OWN[name](model.parameters()), supervised(F.mse_loss), make_config({"max_steps": 10})
        )

    straight, first, second = fresh(), fresh(), fresh()
    losses = [straight.step(regression(seed=number)).loss for number in range(10)]
    for number in range(5):
        first.step(regression(seed=number))
    store = CheckpointStore(tmp_path)
    store.save(5, first.state_dict())
    second.load_state_dict(store.load_newest().state)
    assert [second.step(regression(seed=number)).loss for number in range(5, 10)] == losses[5:]
    assert_same(straight, second)


def test_all_random_states_are_resumed(make_model: Make, make_config: Make, make_batch: Make, tmp_path: Path) -> None:
    config = make_config()
    trainer = HybridTrainer(make_model(), config=config)
    trainer.step(make_batch())

    def draw() -> list[float]:
        return [float(torch.rand(())), np.random.rand(), random.random()]  # noqa: NPY002, S311 - user code may use them

    for _ in range(5):  # a new trainer starts all of them anew, and must not be there by that alone
        draw()
    store = CheckpointStore(tmp_path)
    store.save(1, trainer.state_dict())
    expected = draw()
    again = HybridTrainer(make_model(), config=config)
    assert not set(draw()) & set(expected)
    again.load_state_dict(store.load_newest().state)
    assert draw() == expected


def test_a_state_of_before_there_were_copies_and_forecasts_goes_on(make_model: Make, make_config: Make) -> None:
    first, second = (HybridTrainer(make_model(), config=make_config()) for _ in range(2))
    saved = first.state_dict()
    for later in ("copies", "forecaster"):
        del saved[later]
    second.load_state_dict(saved)
    assert (second.copies.points, second.forecaster.evaluations) == ([], [])
    damaged = {name: part for name, part in first.state_dict().items() if name != "checkup"}
    with pytest.raises(CheckpointError, match="checkup"):
        second.load_state_dict(damaged)


def test_a_rate_is_looked_for_at_the_beginning_of_a_run_only(make_model: Make, make_config: Make) -> None:
    saved = HybridTrainer(make_model(), config=make_config()).state_dict()
    other = HybridTrainer(make_model(), config=make_config({"optimizer.learning_rate": "auto"}))
    with pytest.raises(CheckpointError, match="begun with a learning rate that was set"):
        other.load_state_dict(saved)


def test_a_state_of_another_model_is_refused(make_model: Make, make_config: Make) -> None:
    saved = HybridTrainer(make_model(layers=3), config=make_config()).state_dict()
    with pytest.raises(CheckpointError, match="belongs to another model"):
        HybridTrainer(make_model(), config=make_config()).load_state_dict(saved)


def test_averaging_cannot_be_switched_in_between(make_model: Make, make_config: Make) -> None:
    saved = HybridTrainer(make_model(), config=make_config()).state_dict()
    other = HybridTrainer(make_model(), config=make_config({"evaluation.ema_decay": 0.9}))
    with pytest.raises(CheckpointError, match=r"evaluation\.ema_decay was switched"):
        other.load_state_dict(saved)


# --- bad steps -----------------------------------------------------------------------------------------------------


def test_a_bad_step_is_counted_and_training_goes_on(make_model: Make, make_batch: Make, make_config: Make) -> None:
    calls = iter(range(100))
    trainer = HybridTrainer(
        make_model(),
        None,
        lambda model, batch: model.loss(batch) * (math.nan if next(calls) == 2 else 1.0),
        make_config({"max_steps": 20, "optimizer.learning_rate": 0.01}),
    )
    results = [trainer.step(make_batch()) for _ in range(20)]
    assert [result.skipped for result in results] == [number == 2 for number in range(20)]
    assert results[-1].loss < 0.9 * results[0].loss
    trainer.engine.meter.fetch()
    assert trainer.summary()["skipped_steps"] == 1
