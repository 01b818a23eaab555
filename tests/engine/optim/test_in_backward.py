"""Updates in the backward pass: the same bits as at its end, and gradients that never all exist at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.worlds import Net, Regression, World, differences, everything, leaps_of, same_weights, world
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.optim.in_backward import BATCHES, waiting_bytes
from foretrain.errors import ConfigError
from foretrain.persist.codec import snapshot

Make = Callable[..., Any]
ON = {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0}
OFF = {**ON, "engine.update_in_backward": False}


def trainer_for(model: nn.Module, settings: dict[str, Any], make_config: Make) -> HybridTrainer:
    return HybridTrainer(model, config=make_config({"schedule.type": "constant", "hybrid.mode": "off", **settings}))


def tensors(trainer: HybridTrainer) -> dict[str, Tensor]:
    state = trainer.state_dict()
    return snapshot({"model": state["model"], "optimizer": state["optimizer"]["state"]}).tensors


# --- the same as at the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("settings", ["adamw fp32", "adamw bf16", "adamw 8bit", "adam fp32", "sgd fp32"])
def test_the_bits_are_those_of_one_update_at_the_end(
    settings: str, share: float, dropout: float, make_config: Make, make_model: Make, make_batch: Make
) -> None:
    kind, state_type = settings.split()
    chosen = {"optimizer.type": kind, "optimizer.state_type": state_type}
    ends, outputs = [], []
    for how in (OFF, ON):
        model = make_model(options={"activation_checkpointing": share}, dropout=dropout)
        trainer = trainer_for(model, {**how, **chosen}, make_config)
        results = [trainer.step(make_batch(seed=number)) for number in range(5)]
        outputs.append([(result.loss, result.gradient_norm, result.skipped) for result in results])
        ends.append(tensors(trainer))
    assert outputs[0] == outputs[1]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_muon_takes_smaller_batches_of_matrices(make_config: Make, make_model: Make, make_batch: Make) -> None:
    curves = []
    for how in (OFF, ON):
        trainer = trainer_for(make_model(), how, make_config)
        curves.append([trainer.step(make_batch(seed=number)).loss for number in range(6)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_gradients_never_all_exist_at_once(make_config: Make, make_model: Make, make_batch: Make) -> None:
    most: dict[bool, int] = {}
    for on, how in ((False, OFF), (True, ON)):
        model = make_model(layers=4)
        trainer = trainer_for(model, {**how, "optimizer.type": "adamw"}, make_config)
        sizes = [p.numel() * p.element_size() for p in model.parameters()]
        seen: list[int] = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, seen=seen, model=model: seen.append(
                    sum(q.grad.numel() * q.grad.element_size() for q in model.parameters() if q.grad is not None)
                )
            )
        trainer.step(make_batch())
        most[on] = max(seen)
        assert all(p.grad is None for p in model.parameters()) is on
    assert most[False] == sum(sizes)
    assert 0 < most[True] < waiting_bytes(sum(sizes)) < sum(sizes) / 31  # what is too small for an update of its own


def test_there_are_few_updates_and_all_parameters_are_in_one(
    make_config: Make, make_model: Make, make_batch: Make
) -> None:
    model = make_model(layers=4)
    trainer = trainer_for(model, {**ON, "optimizer.type": "adamw"}, make_config)
    updated: list[list[Any]] = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: updated.append([p for group in optimizer.param_groups for p in group["params"]])
    )
    trainer.step(make_batch())
    together = [p for some in updated for p in some]
    assert sorted(map(id, together)) == sorted(map(id, model.parameters()))
    assert 1 < len(updated) <= min(BATCHES, len(together) // 2)


@pytest.mark.parametrize("how", [OFF, ON], ids=["at the end", "in the backward pass"])
def test_a_trainer_that_is_let_go_leaves_no_weights_behind(
    how: dict[str, Any], make_config: Make, make_model: Make, make_batch: Make
) -> None:
    def train() -> list[weakref.ref[Tensor]]:
        trainer = trainer_for(make_model(), {**how, "optimizer.type": "adamw"}, make_config)
        trainer.step(make_batch())
        moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
        return [weakref.ref(tensor) for tensor in [*trainer.model.parameters(), *moments]]

    left = train()
    gc.collect()
    assert [tensor for tensor in left if tensor() is not None] == []


def test_a_gradient_alone_updates_nothing(make_config: Make, make_model: Make, make_batch: Make) -> None:
    trainer = trainer_for(make_model(), ON, make_config)
    before = tensors(trainer)
    trainer.engine.gradient(make_batch())
    assert all(p.grad is not None for p in trainer.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in tensors(trainer).items())


def test_the_learning_rate_follows_its_schedule(make_config: Make, make_model: Make, make_batch: Make) -> None:
    ends = []
    for how in (OFF, ON):
        settings = {**how, "schedule.type": "wsd", "optimizer.type": "adamw", "max_steps": 8}
        trainer = trainer_for(make_model(), settings, make_config)
        for number in range(8):
            trainer.step(make_batch(seed=number))
        ends.append(trainer.model)
    assert same_weights(*ends)


def test_what_the_optimizer_does_not_know_is_left_alone(make_config: Make, make_model: Make, make_batch: Make) -> None:
    ends, norms = [], []
    for how in (OFF, ON):
        model = make_model()
        optimizer = torch.optim.AdamW(model.blocks.parameters(), lr=1e-3, fused=True)
        with pytest.warns(UserWarning, match="parameters that require gradients are not in the AdamW"):
            trainer = HybridTrainer(model, optimizer, config=make_config({**how, "hybrid.mode": "off"}))
        norms.append(trainer.step(make_batch()).gradient_norm)
        trainer.step(make_batch(seed=1))
        ends.append(model)
    assert norms[0] == norms[1]
    assert same_weights(*ends)


# --- what is not finite ----------------------------------------------------------------------------------------------


class Poisoned(nn.Module):
    """Two weights; a negative batch makes the gradient of the second one infinite, a zero the loss no number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, batch: Tensor) -> Tensor:
        self.seen += 1
        steep = (self.two - 1).abs().add(torch.where(batch < 0, 0.0, 1.0)).sqrt().sum()
        return (self.one * batch).square().sum() / batch.abs() + steep


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_a_gradient_that_is_not_finite_spares_its_own_parameter(kind: str, make_config: Make) -> None:
    model = Poisoned()
    trainer = trainer_for(model, {**ON, "optimizer.type": kind}, make_config)
    assert not trainer.step(torch.tensor(1.0)).skipped
    one, two, state = model.one.clone(), model.two.clone(), trainer.optimizer.state[model.two]
    model.two.data.fill_(1.0)
    two, moments = model.two.clone(), {name: value.clone() for name, value in state.items()}
    result = trainer.step(torch.tensor(-1.0))
    assert result.skipped
    assert torch.equal(model.two, two)
    assert all(torch.equal(value, moments[name]) for name, value in state.items())
    assert not torch.equal(model.one, one)
    assert torch.isfinite(model.one).all()
    assert float(model.seen) == 1  # of the good step alone
    trainer.engine.meter.fetch()
    assert trainer.engine.meter.skipped == 1


class PoisonedBeside(Poisoned):
    """The same beside a weight so large that the other two wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(1000))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.large.square().mean()


def test_a_gradient_that_is_not_finite_spares_those_updated_with_it(make_config: Make) -> None:
    model = PoisonedBeside()
    trainer = trainer_for(model, {**ON, "optimizer.type": "adamw"}, make_config)
    trainer.step(torch.tensor(1.0))
    model.two.data.fill_(1.0)
    before = tensors(trainer)
    assert trainer.step(torch.tensor(-1.0)).skipped
    after = tensors(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("large" in name for name in changed)
    assert not any("one" in name or "two" in name for name in changed)


def test_a_loss_that_is_not_finite_changes_nothing(make_config: Make) -> None:
    trainer = trainer_for(Poisoned(), {**ON, "optimizer.type": "adamw"}, make_config)
    trainer.step(torch.tensor(1.0))
    before = tensors(trainer)
    assert trainer.step(torch.tensor(0.0)).skipped
    assert all(torch.equal(value, before[name]) for name, value in tensors(trainer).items())


def test_without_the_check_nothing_is_skipped(make_config: Make) -> None:
    model = Poisoned()
    trainer = trainer_for(model, {**ON, "optimizer.type": "adamw", "guard.nan_check": False}, make_config)
    assert not trainer.step(torch.tensor(-1.0)).skipped
    assert not torch.isfinite(model.two).all()


def test_a_limit_set_in_an_emergency_acts_on_each_parameter(make_config: Make) -> None:
    model = Poisoned()
    settings = {**ON, "optimizer.type": "sgd", "optimizer.momentum": 0.0, "optimizer.learning_rate": 0.5}
    trainer = trainer_for(model, settings, make_config)
    trainer.engine.clip = 0.1
    model.two.data.add_(1.0)
    before = [p.clone() for p in model.parameters()]
    result = trainer.step(torch.tensor(1.0))
    assert result.gradient_norm > 1.0
    moved = [(now - then).detach().norm() for now, then in zip(model.parameters(), before, strict=True)]
    assert [float(length) for length in moved] == pytest.approx([0.5 * 0.1] * 2, rel=1e-5)


# --- what it excludes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer.gradient_clip_norm": 1.0}, r"set optimizer\.gradient_clip_norm = 0"),
        ({"accumulation_steps": 2}, r"set accumulation_steps = 1"),
        ({"precision.type": "fp16"}, r"set precision\.type = 'bf16' or 'fp32'"),
    ],
)
def test_what_needs_all_gradients_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.update_in_backward = true .*{words}"):
        from_mapping({**ON, **settings})


def test_an_optimizer_that_cannot_skip_is_refused(make_config: Make, make_model: Make) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="which RMSprop cannot; use a fused one"):
        HybridTrainer(model, torch.optim.RMSprop(model.parameters()), config=make_config(ON))


# --- hybrid runs -----------------------------------------------------------------------------------------------------

HYBRID = {
    "optimizer.type": "adamw",
    "optimizer.learning_rate": 3e-3,
    "audit.time_budget": 1.0,
    "audit.steps": 8,
    "hybrid.secant_pairs": 100,
    "max_steps": 150,
}


def hybrid(settings: dict[str, Any], steps: int) -> World:
    run = world(Net(dropout=0.2), Regression(), {**HYBRID, **settings}, "repeat")
    return run.run(lambda: run.position >= steps)


def test_a_hybrid_run_has_the_same_phases_moves_and_bits() -> None:
    one, other = hybrid({**OFF, "hybrid.secant_pairs": 0}, 130), hybrid(ON, 130)
    assert len(one.moves) > 1
    assert one.moves == other.moves
    assert one.trainer.global_step == other.trainer.global_step
    found = differences(everything(one.trainer), everything(other.trainer))
    assert set(found) <= {"tree"}  # moments were made in another order
    assert torch.equal(one.trainer.observer.sample.gradient(), other.trainer.observer.sample.gradient())


def test_there_are_no_quasi_newton_leaps() -> None:
    off, on = (hybrid(how, 1).trainer for how in (OFF, ON))
    assert leaps_of(off).possible
    assert not leaps_of(on).possible
