"""Annealed copies: what they measure, that the run does not notice them, and what they are charged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worlds import QUICK, Net, Regression
from torch import Tensor, nn
from torch.utils.data import DataLoader

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import ConfigError, InputError
from foretrain.events import Annealed, Event, Notice, Phase
from foretrain.hybrid import annealing, replay
from foretrain.show import narration

DATA = Regression()
HELD_OUT = [(DATA.inputs[1200:1300], DATA.targets[1200:1300])]
UNTIL = {"until_loss": 1e-9, "max_steps": 50, "evaluation.interval": 2, "schedule.type": "wsd"}
STATEFUL = {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5, "hybrid.mode": "leap"}


def make(steps: int = 40, **settings: Any) -> HybridTrainer:
    given = {**QUICK, "max_steps": steps, "hybrid.mode": "off", **settings}
    return HybridTrainer(Net(dropout=0.2, norm=True), config=from_mapping(given), probe=HELD_OUT)


def steps(trainer: HybridTrainer, first: int, last: int) -> None:
    if first == 0:
        torch.manual_seed(5)  # dropout draws from it
    for position in range(first, last):
        trainer.step(DATA(position))


def tensors(trainer: HybridTrainer) -> list[Tensor]:
    held = [*trainer.model.state_dict().values()]
    held += [value for state in trainer.optimizer.state.values() for value in state.values()]
    return [tensor.clone() for tensor in held] + [torch.get_rng_state()]


@pytest.mark.parametrize("settings", [{}, STATEFUL], ids=["off", "leap"])
def test_a_run_with_copies_ends_with_the_bits_of_one_without(settings: dict[str, Any]) -> None:
    plain, copied = make(**settings), make(**settings, **{"forecast.copies": [0.25, 0.5], "forecast.copy_steps": 0.1})
    told: list[Event] = []
    copied.bus.subscribe(told.append)
    for trainer in (plain, copied):
        steps(trainer, 0, 40)
        trainer.ended_with = tensors(trainer)
    assert all(torch.equal(a, b) for a, b in zip(plain.ended_with, copied.ended_with, strict=True))
    annealed = [event for event in told if isinstance(event, Annealed)]
    assert [(event.step, event.steps) for event in annealed] == [(10, 4), (20, 4)]
    assert plain.engine.meter.read() == copied.engine.meter.read()
    a, b = plain.summary(), copied.summary()
    assert b["backward_passes"] - a["backward_passes"] == 8 == copied.backward_passes - plain.backward_passes
    assert b["tokens"] - a["tokens"] == 8 * 16
    assert b["annealed"]["backward_passes"] == 8
    assert [point["loss"] for point in b["annealed"]["copies"]] == [event.loss for event in annealed]
    assert "a copy, annealed over 4 steps: held-out loss" in str(narration.line(annealed[0]))


def test_a_copy_ends_where_a_run_that_decays_there_would_have_ended() -> None:
    """In one with dropout, batch statistics and random draws."""
    trainer = make(**{"forecast.copies": [0.5], "forecast.copy_steps": 0.25})
    decaying = make(30, **{"schedule.type": "wsd", "schedule.warmup_steps": 0, "schedule.decay_steps": 10})
    for one in (trainer, decaying):
        steps(one, 0, one.config.max_steps)
    (point,) = trainer.copies.points
    assert point.loss == decaying.engine.probe_all(HELD_OUT)
    assert point.before != point.loss


@pytest.mark.parametrize("stop", [9, 12, 14, 15])
def test_a_copy_is_exact_after_a_stop(stop: int) -> None:
    settings = {"forecast.copies": [0.25], "forecast.copy_steps": 0.1}
    whole, first, second = make(**settings), make(**settings), make(**settings)
    steps(whole, 0, 20)
    steps(first, 0, stop)
    second.load_state_dict(first.state_dict())
    steps(second, stop, 20)
    assert second.copies.points == whole.copies.points != []
    assert second.backward_passes == whole.backward_passes == 24


def test_an_interrupted_copy_is_made_anew() -> None:
    trainer, whole, calls = make(), make(), list[int]()
    trainer.copies.interrupted = lambda: bool(calls.append(1)) or len(calls) == 2
    for one in (trainer, whole):
        one.anneal(3)
        steps(one, 0, 5)
    assert trainer.copies.points == whole.copies.points != []
    assert trainer.backward_passes == whole.backward_passes + 1
    assert all(torch.equal(a, b) for a, b in zip(tensors(trainer)[:-1], tensors(whole)[:-1], strict=True))


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        return DATA.inputs[index], DATA.targets[index]


def test_a_loop_of_ones_own_with_an_optimizer_and_a_scheduler_of_ones_own() -> None:
    def run(anneal: bool) -> HybridTrainer:
        torch.manual_seed(3)
        model = Net(dropout=0.1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        config = from_mapping({"device": "cpu", "hybrid.mode": "off"})
        trainer = HybridTrainer(model, optimizer, config=config, scheduler=scheduler, probe=HELD_OUT)
        for epoch in range(2):
            if anneal and epoch == 1:
                trainer.anneal(5)
            for batch in DataLoader(Rows(), batch_size=16, shuffle=True):
                trainer.step(batch)
        return trainer

    plain, copied = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(tensors(plain), tensors(copied), strict=True))
    assert plain.optimizer.param_groups[0]["lr"] == copied.optimizer.param_groups[0]["lr"]
    (point,) = copied.copies.points
    assert (point.step, point.steps) == (10, 5)
    assert math.isfinite(point.loss)


def test_fit_judges_copies_by_its_held_out_batches_and_writes_them_down(tmp_path: Path) -> None:
    config = from_mapping({**QUICK, "max_steps": 30, "hybrid.mode": "off", "forecast.copies": [0.4]})
    trainer = HybridTrainer(Net(), config=config)
    summary = trainer.fit([DATA(i) for i in range(30)], HELD_OUT, out=tmp_path / "run", progress=False)
    (copy,) = summary["annealed"]["copies"]
    assert (copy["step"], copy["steps"]) == (12, 1)
    assert summary["backward_passes"] == 31
    assert '"event": "Annealed"' in (tmp_path / "run" / "metrics.jsonl").read_text().replace('":"', '": "')


def test_what_cannot_be_judged_is_refused() -> None:
    config = from_mapping({**QUICK, "forecast.copies": [0.5]})
    with pytest.raises(ConfigError, match="judged by held-out batches, and there are none"):
        HybridTrainer(Net(), config=config).fit([DATA(0)], progress=False)
    trainer = make()
    with pytest.raises(InputError, match="1 or more"):
        trainer.anneal(0)
    trainer.anneal(2)
    with pytest.raises(InputError, match="another copy is on its way"):
        trainer.anneal(2)


def test_few_batches_are_used_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_BYTES", 2 * 16 * 9 * 4)
    trainer = make()
    trainer.anneal(5)
    steps(trainer, 0, 5)
    assert (trainer.copies.replay.noted, len(trainer.copies.replay.batches)) == (5, 2)
    steps(trainer, 5, 6)
    assert trainer.backward_passes == 6 + 5


def test_a_copy_begins_anew_where_others_are_trained() -> None:
    trainer = make()
    trainer.anneal(4)
    steps(trainer, 0, 2)
    nn.Module.requires_grad_(trainer.model.first, False)
    steps(trainer, 2, 8)
    (point,) = trainer.copies.points
    assert point.step == 2


def test_what_copies_measured_at_undone_steps_is_forgotten_and_measured_again() -> None:
    copies = {"forecast.copies": [0.3, 0.5], "forecast.copy_steps": 0.1}
    trainer = make(60, **{"hybrid.mode": "leap", "hybrid.warmup_steps": 60, **copies})
    steps(trainer, 0, 32)
    (undone,) = trainer.copies.points
    assert (undone.step, trainer.copies.begun, trainer.copies.replay.open) == (18, [18, 30], True)
    usual, trainer.hybrid.end_window = trainer.hybrid.end_window, trainer.policy.recover
    steps(trainer, 32, 35)
    trainer.hybrid.end_window = usual
    assert trainer.global_step < 18
    assert (trainer.copies.points, trainer.copies.begun, trainer.copies.replay.open) == ([], [], False)
    steps(trainer, 35, 80)
    again, _ = trainer.copies.points
    assert again.step == undone.step
    assert again.loss != undone.loss


def test_a_copy_that_is_not_made_is_told_of_once_and_keeps_nothing() -> None:
    trainer, told = make(20, **{"forecast.copies": [0.2, 0.75], "forecast.copy_steps": 0.24}), list[Event]()
    trainer.bus.subscribe(told.append)
    steps(trainer, 0, 19)
    assert trainer.copies.replay.open
    steps(trainer, 19, 20)
    assert len(trainer.copies.points) == 1
    assert trainer.state_dict()["copies"]["replay"]["anchor"] is None
    trainer.copies.end()
    (notice,) = [event for event in told if isinstance(event, Notice)]
    assert "no annealed copy was made at 0.75 of the run (forecast.copies): the run ended first" in notice.message


def test_a_run_that_is_stopped_keeps_no_copy(tmp_path: Path) -> None:
    trainer, told = make(40, **{"forecast.copies": [0.1], "forecast.copy_steps": 0.5}), list[Event]()

    def listen(event: Event) -> None:
        told.append(event)
        if trainer.global_step >= 10:
            trainer.stop()

    given = {"out": tmp_path / "run", "callbacks": [listen], "progress": False}
    assert trainer.fit([DATA(i) for i in range(40)], HELD_OUT, **given)["reason"] == "stopped early"
    assert not trainer.copies.replay.open
    assert sum("no annealed copy was made at 0.1" in event.message for event in told if isinstance(event, Notice)) == 1


def test_a_copy_does_not_wait_for_a_chain_of_leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealing, "_PATIENCE", 6)
    trainer, told = make(), list[Event]()
    trainer.bus.subscribe(told.append)
    trainer.anneal(4)
    steps(trainer, 0, 2)
    monkeypatch.setattr(HybridTrainer, "phase", Phase.PREDICT)
    steps(trainer, 2, 11)
    assert trainer.copies.replay.open
    steps(trainer, 11, 12)
    assert not trainer.copies.replay.open
    assert ["annealed copy of step 0 is given up: moves" in e.message for e in told if isinstance(e, Notice)] == [True]


def test_a_copy_that_would_end_after_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"forecast\.copies = \[0\.97\].*begin before 0\.9"):
        make(**{"forecast.copies": [0.5, 0.97], "forecast.copy_steps": 0.1})


class Own:
    """A batch of one's own."""

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair = pair


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch["own"].pair
    return (model(inputs) - targets).square().mean()


def on_own_batches(folder: Path, **settings: Any) -> tuple[dict[str, Any], list[Event]]:
    given = {**QUICK, "max_steps": 20, "hybrid.mode": "off", "checkpoint.interval": 5, **settings}
    trainer, told = HybridTrainer(nn.Linear(8, 1), loss_fn=own_loss, config=from_mapping(given)), list[Event]()
    trainer.bus.subscribe(told.append)
    held_out = [{"own": Own(HELD_OUT[0])}]
    return trainer.fit([{"own": Own(DATA(i))} for i in range(50)], held_out, out=folder, progress=False), told


@pytest.mark.parametrize("settings", [{"forecast.copies": [0.2, 0.5]}, UNTIL])
def test_copies_on_batches_that_cannot_be_saved_are_given_up_and_the_run_goes_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    summary, told = on_own_batches(tmp_path / "run", **settings)
    assert (summary["reason"], summary["annealed"]) == ("finished", None)
    notices = [event.message for event in told if isinstance(event, Notice) and "given up" in event.message]
    assert len(notices) == 1
    assert "batches hold what cannot be saved: Own" in notices[0]


def test_a_race_on_batches_that_cannot_be_saved_is_refused_at_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot save what these hold: Own; .* or set a rate"):
        on_own_batches(tmp_path / "run", **{"optimizer.learning_rate": "auto"})


def test_only_the_first_batch_of_a_type_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(replay, "_foreign_to_states", lambda batch: looked.append(batch) or "")
    trainer = make()
    trainer.anneal(5)
    steps(trainer, 0, 6)
    assert len(looked) == 1
