"""Freezing and unfreezing in mid-run: moves, rollbacks, averages and checkpoints know what is trained now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from foretrain import ConfigError, HybridTrainer, InputError
from foretrain.config import from_mapping
from foretrain.events import Event, Moved, Notice, OwnCodeFailed, Phase, PhaseChanged, Progress
from foretrain.hybrid.moves.leap import LeapKind
from foretrain.models import lora
from foretrain.persist.checkpoint import CheckpointStore

from .hybrid.moves.toy import ShrinkKind
from .worlds import QUICK, Net, Regression, Told, World, differences, everything, same_weights, trust, world

DATA = Regression()
MOVING = {"audit.time_budget": 1.0, "optimizer.learning_rate": 1e-3, "max_steps": 110}
OWN_SETTINGS = {name: value for name, value in QUICK.items() if not name.startswith(("optimizer", "schedule"))}
HOUSE = {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5}


def middle(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.middle.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def notices(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Notice)]


def until(run: World, when: str) -> World:
    trainer = run.trainer
    reached: dict[str, Callable[[], bool]] = {
        "warmup": lambda: run.position >= 12,
        "before a move": lambda: trainer.phase is Phase.PREDICT and not trainer.judging,
        "in a move": lambda: trainer.judging,
        "validation": lambda: trainer.phase is Phase.CORRECT and trainer.policy.move.steps > 1,
    }
    return run.run(reached[when])


# --- moves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["warmup", "before a move", "in a move", "validation"])
@pytest.mark.parametrize("how", ["repeat", "flipped"])
@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_what_is_frozen_stays_where_it_is(mode: str, how: str, when: str) -> None:
    run = until(world(Net(), DATA, {**MOVING, **HOUSE, "hybrid.mode": mode}, how), when)
    trainer, frozen = run.trainer, middle(run.trainer.model)
    others = [p.detach().clone() for p in trainer.model.last.parameters()]
    trainer.model.middle.requires_grad_(False)
    run.run()
    assert run.moves
    assert same(middle(trainer.model), frozen)
    assert not same([p.detach() for p in trainer.model.last.parameters()], others)
    assert all("middle" not in name for name in trainer.observer.trajectory.groups)
    told = [text for text in notices(run.events) if "frozen" in text]
    assert len(told) == 1
    assert "2 parameters are frozen (middle.weight, middle.bias)" in told[0]


@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_an_open_move_is_taken_back_before_others_are_trained(mode: str) -> None:
    """Everything is as before the move, but for what was frozen in it."""
    run = until(world(Net(dropout=0.2), DATA, {**MOVING, **HOUSE, "hybrid.mode": mode}, "repeat"), "before a move")
    trainer, before = run.trainer, everything(run.trainer)
    used = [run.position]
    until(run, "in a move")
    frozen = middle(trainer.model)
    trainer.model.middle.requires_grad_(False)
    trained: list[Any] = []
    full = trainer.engine.full

    def seen(batch: Any, *hooks: Any) -> Any:
        trained.append(everything(trainer))
        return full(batch, *hooks)

    trainer.engine.full = seen  # type: ignore[method-assign]
    run.step()
    now = differences(trained[0], before)
    assert {name for name in now if not name.startswith(("look_ahead", "predictor", "tree"))} == {
        "model.middle.weight",
        "model.middle.bias",
    }
    assert same([trained[0].tensors[f"model.middle.{name}"] for name in ("weight", "bias")], frozen)
    assert trainer.position == used[0] + 1
    assert run.moves[-1].verdict == "refused"


def test_a_move_that_has_not_begun_is_given_up() -> None:
    run = until(world(Net(), DATA, MOVING, "repeat"), "before a move")
    run.trainer.model.middle.requires_grad_(False)
    run.step()
    told = [event for event in run.events if isinstance(event, PhaseChanged)][-1]
    assert (told.phase, told.reason) == ("full", "parameters were frozen or unfrozen")
    assert (run.trainer.policy.decision, run.trainer.policy.last_reason) == (None, told.reason)


@pytest.mark.parametrize("late", [2, 30])
@pytest.mark.parametrize("kinds", [(), (ShrinkKind,)], ids=["leap", "shrink"])
def test_a_move_is_taken_back_however_late_in_its_validation(kinds: tuple[Any, ...], late: int) -> None:
    """After more validating steps than it made predicted ones, and after so many that it could count as unjudged."""
    run = world(Net(), DATA, {**MOVING, "audit.steps": 60, "max_steps": 200}, "repeat")
    trainer, policy = run.trainer, run.trainer.policy
    for kind in kinds:
        policy.add(kind)
    run.run(lambda: trainer.judging and policy.move.steps == late)
    assert policy.move.kind == ("shrink" if kinds else "leap")
    needed, frozen = policy.cycle.full_steps_needed, middle(trainer.model)
    trainer.model.middle.requires_grad_(False)
    run.step()
    assert run.moves[-1].verdict == "refused"
    assert policy.cycle.full_steps_needed == 2 * needed  # it counts as undone once
    told = [event for event in run.events if isinstance(event, PhaseChanged)][-1]
    assert (told.phase, told.reason) == ("full", "parameters were frozen or unfrozen")
    run.run()
    assert same(middle(trainer.model), frozen)


def full_batch(**settings: Any) -> World:
    inputs, targets = DATA.inputs[:64], DATA.targets[:64]
    chain = {"hybrid.secant_pairs": 20, "hybrid.max_predict_steps": 50, "max_steps": 160}
    return world(Net(), lambda position: (inputs, targets), {**chain, "optimizer.learning_rate": 1e-2, **settings})


@pytest.mark.parametrize("validating", [False, True])
def test_a_chain_keeps_what_it_reached(validating: bool) -> None:
    run = full_batch()
    trainer = run.trainer
    run.run(lambda: trainer.hybrid.chaining and trainer.policy.move.moved >= 6)
    if validating:
        run.run(lambda: trainer.phase is Phase.CORRECT and trainer.policy.move.steps > 0)
    step, frozen = trainer.global_step, middle(trainer.model)
    trainer.model.middle.requires_grad_(False)
    loss = run.step().loss
    assert trainer.global_step == step + 1
    assert run.moves[-1].verdict == "kept"
    assert loss < run.moves[-1].anchor
    run.run()
    assert same(middle(trainer.model), frozen)
    assert validating or any(move.chained for move in run.moves[1:])


def test_a_chain_that_has_not_leapt_yet_is_taken_back() -> None:
    run = full_batch()
    trainer = run.trainer
    run.run(lambda: trainer.phase is Phase.PREDICT and not trainer.judging)
    trainer.policy.open(run.data(0))
    trainer.model.middle.requires_grad_(False)
    run.run()
    assert run.moves[0].verdict == "refused"


class NeverAnew(Told):
    def reset(self) -> None:
        raise RuntimeError("there is no way back")


def test_a_predictor_that_cannot_start_anew_does_not_end_the_run() -> None:
    """Its forecasts are of weights that are gone, so it is off, and full steps go on."""
    run = world(Net(), DATA, MOVING, NeverAnew("repeat"))
    run.run(lambda: run.position >= 12)
    run.trainer.model.middle.requires_grad_(False)
    run.run()
    assert run.trainer.global_step == MOVING["max_steps"]
    assert run.trainer.policy.off
    (told,) = [event for event in run.events if isinstance(event, OwnCodeFailed)]
    assert (told.where, told.step) == ("NeverAnew.reset()", 12)


# --- emergencies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, HOUSE, {"memory.snapshots": "pinned"}], ids=["plain", "house", "pinned"])
@pytest.mark.parametrize("change", ["freeze", "unfreeze", "both"])
def test_an_emergency_brings_back_what_was_frozen_or_unfrozen_since(change: str, settings: dict[str, Any]) -> None:
    run = world(Net(frozen=change != "freeze"), DATA, {**MOVING, **settings})
    trainer = run.trainer
    run.run(lambda: run.position >= 8)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    optimizer = {p: {k: v.clone() for k, v in s.items()} for p, s in trainer.optimizer.state.items()}
    trainer.policy.tools.snapshots.take(for_move=False)
    for _ in range(2):
        run.step()
    if change != "freeze":
        trainer.model.middle.requires_grad_(True)
    if change != "unfreeze":
        trainer.model.first.requires_grad_(False)
    for _ in range(2):
        run.step()
    assert not torch.equal(trainer.model.middle.weight, weights["middle.weight"])
    trainer.policy.recover()
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    for parameter, state in optimizer.items():
        assert all(torch.equal(value, trainer.optimizer.state[parameter][name]) for name, value in state.items())
    if trainer.engine.average is not None:
        trainer.evaluate([DATA(0)])
    run.run()


def test_after_freezing_a_new_snapshot_is_due() -> None:
    run = world(Net(), DATA, MOVING)
    run.run(lambda: run.position >= 12)
    run.trainer.model.middle.requires_grad_(False)
    run.run(lambda: run.position >= 24)
    frozen = run.trainer.model.middle.weight.detach().clone()
    run.trainer.policy.recover()
    assert run.trainer.global_step >= 12
    assert torch.equal(run.trainer.model.middle.weight, frozen)


def test_when_all_is_frozen_it_is_said() -> None:
    trainer = world(Net(), DATA).trainer
    trainer.step(DATA(0))
    trainer.model.requires_grad_(False)
    with pytest.raises(InputError, match="all parameters of Net are frozen"):
        trainer.step(DATA(1))


def test_a_weight_that_is_replaced_is_said() -> None:
    model = Net()
    trainer = HybridTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config=from_mapping(OWN_SETTINGS))
    trainer.step(DATA(0))
    model.last = nn.Linear(12, 1)
    trainer.optimizer.add_param_group({"params": list(model.last.parameters())})
    with pytest.raises(InputError, match=r"last.weight of Net was replaced"):
        trainer.step(DATA(1))


# --- the plain loop --------------------------------------------------------------------------------------------------


def schedule(step: int, model: nn.Module) -> None:
    """The head alone, then all but the head, then all."""
    if step == 4:
        model.middle.requires_grad_(True)
    elif step == 8:
        model.last.requires_grad_(False)
    elif step == 12:
        model.last.requires_grad_(True)


OWN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("name", OWN)
def test_off_it_is_a_loop_by_hand(name: str) -> None:
    settings = {**OWN_SETTINGS, "hybrid.mode": "off", "optimizer.gradient_clip_norm": 0.3, "evaluation.ema_decay": 0.9}
    model, other = Net(frozen=True), Net(frozen=True)
    trainer = HybridTrainer(model, OWN[name](model.parameters()), config=from_mapping(settings))
    optimizer = OWN[name](other.parameters())
    average = {name: torch.zeros_like(p) for name, p in other.named_parameters()}
    for step in range(16):
        schedule(step, model)
        schedule(step, other)
        trainer.step(DATA(step))
        optimizer.zero_grad()
        other.loss(DATA(step)).backward()
        nn.utils.clip_grad_norm_([p for p in other.parameters() if p.requires_grad], 0.3)
        optimizer.step()
        with torch.no_grad():
            for key, p in other.named_parameters():
                average[key].lerp_(p, 1 - 0.9)
    same_norm = {"sgd": 1e-6, "adam": 1e-6, "fused": 1e-6}[name]  # torch adds 1e-6 to the norm that it divides by
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=same_norm)
    with trainer.averaged_weights():
        for key, p in model.named_parameters():
            assert torch.allclose(p, average[key] / (1 - 0.9**16), atol=1e-5)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_without_clipping_it_is_one_to_the_bit(name: str, watched: bool) -> None:
    mode = {"hybrid.warmup_steps": 10_000} if watched else {"hybrid.mode": "off"}
    model, other = Net(frozen=True, dropout=0.2), Net(frozen=True, dropout=0.2)
    trainer = HybridTrainer(model, OWN[name](model.parameters()), config=from_mapping({**OWN_SETTINGS, **mode}))
    optimizer = OWN[name](other.parameters())
    state = torch.get_rng_state()
    for step in range(16):
        schedule(step, model)
        trainer.step(DATA(step))
    torch.set_rng_state(state)
    for step in range(16):
        schedule(step, other)
        optimizer.zero_grad()
        other.loss(DATA(step)).backward()
        optimizer.step()
    assert same_weights(model, other)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_updates_in_the_backward_pass_follow(optimizer: str) -> None:
    settings = {"optimizer.type": optimizer, "optimizer.gradient_clip_norm": 0.0, "hybrid.warmup_steps": 10_000}
    runs = [world(Net(frozen=True), DATA, {**settings, "engine.update_in_backward": way}) for way in (False, True)]
    for run in runs:
        for step in range(30):
            schedule(step, run.trainer.model)
            run.step()
    if optimizer == "muon":
        pairs = zip(runs[0].trainer.model.parameters(), runs[1].trainer.model.parameters(), strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    else:
        assert same_weights(runs[0].trainer.model, runs[1].trainer.model)
    assert not torch.equal(runs[0].trainer.model.middle.weight, Net(frozen=True).middle.weight)


@pytest.mark.parametrize("space", ["adapter", "product"])
def test_adapters_are_frozen_one_by_one(space: str, make_model: Callable[..., Any], make_batch: Any) -> None:
    """With blocks that are recomputed in the backward pass."""
    model = make_model()
    lora.attach(model, lora.LoraSettings(rank=2), 0)
    settings = {**MOVING, "hybrid.space": space, "engine.activation_checkpointing": 1.0, "max_steps": 80}
    run = world(model, lambda position: make_batch(seed=position), settings, "repeat")
    until(run, "in a move")
    first = next(iter(lora.adapted_layers(model).values()))
    first.lora_a.requires_grad_(False)
    first.lora_b.requires_grad_(False)
    frozen = [first.lora_a.detach().clone(), first.lora_b.detach().clone()]
    run.run()
    assert same([first.lora_a.detach(), first.lora_b.detach()], frozen)
    products = next(kind for kind in run.trainer.policy.kinds if isinstance(kind, LeapKind)).products
    assert products is None or len(products.pairs) * 2 == len(run.trainer.engine.trained.names)
    assert set(run.trainer.state_dict()["model"]) == {n for n, _ in model.named_parameters() if "lora" in n}


def test_what_a_callback_unfreezes_inside_a_step_is_trained_by_it() -> None:
    """A move is refused, the callback hears of it, and the step goes on as a full one."""
    run = world(Net(frozen=True), DATA, {**MOVING, "hybrid.search": True}, "exploding")
    trainer, seen = run.trainer, []

    def callback(event: Event) -> None:
        if isinstance(event, Moved) and not trainer.model.middle.weight.requires_grad:
            trainer.model.middle.requires_grad_(True)
        if isinstance(event, Notice):
            seen.append([p.detach().clone() for p in trainer.model.middle.parameters()])

    trainer.bus.subscribe(callback)
    run.run(lambda: bool(run.moves))
    assert same(seen[0], middle(Net(frozen=True)))  # noticed before it was changed
    assert not same(middle(trainer.model), middle(Net(frozen=True)))


def test_a_scheduler_that_cannot_follow_says_so() -> None:
    model = Net(frozen=True)
    optimizer = torch.optim.Adam(model.last.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    model.first.requires_grad_(False)
    trainer = HybridTrainer(model, optimizer, config=from_mapping(OWN_SETTINGS), scheduler=scheduler)
    trainer.step(DATA(0))
    model.middle.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.middle.parameters())})
    with pytest.raises(ConfigError, match="LambdaLR was made for 1 of the optimizer's groups, and there are 2 now"):
        trainer.step(DATA(1))


def test_what_no_optimizer_holds_is_said() -> None:
    model = Net(frozen=True)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    trainer = HybridTrainer(model, optimizer, config=from_mapping(OWN_SETTINGS))
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    trainer.step(DATA(0))
    model.middle.requires_grad_(True)
    trainer.step(DATA(1))
    assert any("middle.weight is trained now, but Adam does not hold it" in text for text in notices(events))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def own_all(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def own_head(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def make(kind: str, **settings: Any) -> HybridTrainer:
    model = Net(frozen=True)
    optimizer = {"all": own_all, "added": own_head}.get(kind, lambda _: None)(model)
    named = {} if optimizer is not None else {"optimizer.type": kind}
    config = {**QUICK, **MOVING, **HOUSE, **named, **settings}
    for name in [name for name in config if optimizer is not None and name.startswith("optimizer")]:
        del config[name]
    trainer = HybridTrainer(model, optimizer, config=from_mapping(config))
    if trainer.policy is not None:
        trust(trainer)
    return trainer


def act(trainer: HybridTrainer, step: int, kind: str) -> None:
    """What a callback does, once."""
    model = trainer.model
    if step == 10:
        model.middle.requires_grad_(True)
        if kind == "added":
            trainer.optimizer.add_param_group({"params": list(model.middle.parameters()), "lr": 1e-3})
    elif step == 20:
        model.first.requires_grad_(False)


@pytest.mark.parametrize("mode", ["leap", "off"])
@pytest.mark.parametrize("kind", ["all", "added", "adamw", "sgd", "muon"])
def test_head_first_is_resumed_to_the_bit(kind: str, mode: str, tmp_path: Path) -> None:
    def run(trainer: HybridTrainer, first: int, last: int, acts: bool = True) -> list[float]:
        losses = []
        for step in range(first, last):
            if acts or step != first:
                act(trainer, step, kind)
            losses.append(trainer.step(DATA(step)).loss)
        return losses

    straight = make(kind, **{"hybrid.mode": mode})
    losses = run(straight, 0, 40)
    assert not torch.equal(straight.model.middle.weight, Net(frozen=True).middle.weight)
    for stop in (10, 20, 30):
        first, second = make(kind, **{"hybrid.mode": mode}), make(kind, **{"hybrid.mode": mode})
        run(first, 0, stop)
        act(first, stop, kind)  # frozen or unfrozen, and saved before the next step
        store = CheckpointStore(tmp_path / str(stop))
        store.save(stop, first.state_dict())
        second.load_state_dict(store.load_newest().state)
        assert run(second, stop, 40, acts=False) == losses[stop:]
        assert same_weights(straight.model, second.model)
        assert [p.requires_grad for p in second.model.parameters()] == [False, False, True, True, True, True]
        assert second.engine.average.names == straight.engine.average.names
        assert same(second.engine.average.average, straight.engine.average.average)


def fit(folder: Path, resume: bool = False, max_steps: int = 60, **settings: Any) -> tuple[HybridTrainer, list[Event]]:
    trainer = make("adamw", **{"evaluation.interval": 5, "checkpoint.interval": 15, "log.interval": 1, **settings})
    trainer.engine.end_at(60)
    events: list[Event] = []

    def callback(event: Event) -> None:
        events.append(event)
        if isinstance(event, Progress):
            if event.step == 22:
                trainer.model.middle.requires_grad_(True)
            if event.step >= max_steps:
                trainer.stop()

    batches = [DATA(position) for position in range(200)]
    held_out = [DATA(position) for position in range(1000, 1003)]
    trainer.fit(batches, held_out, callbacks=[callback], out=folder, resume=resume, progress=False)
    return trainer, events


@pytest.mark.parametrize("stop", [20, 40])
def test_a_callback_unfreezes_and_the_run_is_resumed(stop: int, tmp_path: Path) -> None:
    straight, events = fit(tmp_path / "straight")
    assert any("2 parameters are trained (middle.weight, middle.bias)" in text for text in notices(events))
    fit(tmp_path / "run", max_steps=stop)
    resumed, events = fit(tmp_path / "run", resume=True)
    assert same_weights(straight.model, resumed.model)
    told = [text for text in notices(events) if "as when this was saved" in text]
    assert len(told) == (stop == 40)


def test_the_best_weights_of_before_can_still_be_loaded(tmp_path: Path) -> None:
    """At the time when they were saved, what was frozen was not saved with them."""
    trainer = make(
        "adamw", **{"evaluation.interval": 5, "log.interval": 1, "max_steps": 30, "evaluation.ema_decay": 0.0}
    )
    seen: dict[int, dict[str, Tensor]] = {}

    def callback(event: Event) -> None:
        if isinstance(event, Progress):
            if event.step == 12:
                trainer.model.middle.requires_grad_(True)
                trainer.engine.progress.best_val_loss = -1.0  # nothing is better from now on
            seen[event.step] = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    batches = [DATA(position) for position in range(100)]
    summary = trainer.fit(
        batches, [DATA(1000)], callbacks=[callback], out=tmp_path / "run", load_best=True, progress=False
    )
    best = summary["best_step"]
    assert best <= 10
    now = trainer.model.state_dict()
    assert torch.equal(now["middle.weight"], Net(frozen=True).middle.weight)
    assert not torch.equal(now["last.weight"], Net(frozen=True).last.weight)


def test_an_optimizer_made_otherwise_goes_on_as_saved_and_says_so() -> None:
    def trainer_of(rate: float) -> tuple[HybridTrainer, list[Event]]:
        model = Net()
        trainer = HybridTrainer(
            model, torch.optim.AdamW(model.parameters(), lr=rate), config=from_mapping(OWN_SETTINGS)
        )
        events: list[Event] = []
        trainer.bus.subscribe(events.append)
        return trainer, events

    first, _ = trainer_of(0.01)
    first.step(DATA(0))
    second, events = trainer_of(0.1)
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups[0]["lr"] == 0.01
    (told,) = notices(events)
    assert "lr = 0.01 and not 0.1" in told
    assert "optimizer.param_groups" in told
    same_again, events = trainer_of(0.01)
    same_again.load_state_dict(first.state_dict())
    assert notices(events) == []


def test_moves_were_made_here() -> None:
    """Else the tests above would show nothing about moves."""
    run = world(Net(), DATA, MOVING, "repeat").run()
    assert {move.verdict for move in run.moves} - {"refused"}
    assert all(isinstance(move, Moved) for move in run.moves)


@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_in_fit_the_data_goes_back_with_the_move(mode: str, tmp_path: Path) -> None:
    """A callback freezes in the middle of a move, of a shuffled loader; what is resumed after that is the same."""

    def fit_to(folder: Path, stop: int, resume: bool = False) -> tuple[HybridTrainer, list[Tensor]]:
        config = from_mapping({**QUICK, **MOVING, "hybrid.mode": mode, "checkpoint.interval": 10, "log.interval": 1})
        trainer = HybridTrainer(Net(), config=config, predictor=Told("repeat"))
        trust(trainer)
        frozen: list[Tensor] = []

        def callback(event: Event) -> None:
            if isinstance(event, PhaseChanged) and event.phase == "correct" and not (frozen or resume):
                trainer.model.middle.requires_grad_(False)
                frozen.extend(middle(trainer.model))
            if isinstance(event, Progress) and event.step >= stop:
                trainer.stop()

        data = TensorDataset(DATA.inputs[:320], DATA.targets[:320])
        torch.manual_seed(3)
        loader = DataLoader(data, batch_size=16, shuffle=True)
        trainer.fit(loader, callbacks=[callback], out=folder, resume=resume, progress=False)
        return trainer, frozen

    straight, frozen = fit_to(tmp_path / "straight", 1000)
    assert frozen
    assert same(middle(straight.model), frozen)
    assert straight.policy.score.counts.moves["refused"]
    fit_to(tmp_path / "run", 80)
    resumed, _ = fit_to(tmp_path / "run", 1000, resume=True)
    assert same_weights(straight.model, resumed.model)
    assert straight.position == resumed.position
