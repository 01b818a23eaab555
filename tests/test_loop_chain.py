"""Inside a chain a run is evaluated, saved, looked at and stopped as elsewhere; what is taken back does not count."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.test_resume_hybrid import assert_same_state, saved
from tests.hybrid.judges.test_held_out import HELD_OUT, TRAINED, Wide
from tests.hybrid.moves.test_chain import CHAINED
from tests.worlds import QUICK, same_weights
from torch import nn

from foretrain import CheckpointStore, Config, HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import ConfigError, InputError
from foretrain.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    HealthMeasured,
    Moved,
    Notice,
    PhaseChanged,
    Progress,
    Resumed,
)
from foretrain.persist import checkpoint

EVEN = (TRAINED, TRAINED)
"""What lowers one loss lowers the other, and the chain is long."""


def trainer_of(**settings: Any) -> tuple[HybridTrainer, list[Event]]:
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    trainer = HybridTrainer(Wide(), config=from_mapping({**QUICK, **CHAINED, "log.interval": 10, **changes}))
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    return trainer, events


def fit(
    out: Path | None, noisy: bool = True, how: dict[str, Any] | None = None, **settings: Any
) -> tuple[HybridTrainer, list[Event], dict[str, Any]]:
    trainer, events = trainer_of(**settings)
    data, held_out = (TRAINED, HELD_OUT) if noisy else EVEN
    summary = trainer.fit([data], [held_out], out=out, progress=False, **(how or {}))
    return trainer, events, summary


def steps(events: list[Event], kind: type[Any]) -> list[int]:
    return [event.step for event in events if isinstance(event, kind)]


def inside(events: list[Event]) -> list[Event]:
    """What was told inside the first chain."""
    began = next(n for n, event in enumerate(events) if isinstance(event, PhaseChanged) and event.phase == "predict")
    rest = events[began + 1 :]
    return rest[: next(n for n, event in enumerate(rest) if isinstance(event, PhaseChanged))]


# --- at their intervals ----------------------------------------------------------------------------------------------


def test_a_chain_is_evaluated_saved_and_looked_at(tmp_path: Path) -> None:
    settings = {"evaluation__interval": 20, "checkpoint__interval": 25, "health__interval": 15}
    _, events, _ = fit(tmp_path, noisy=False, **settings)
    told = inside(events)
    assert next(event for event in events if isinstance(event, Moved)).horizon > 60
    assert steps(told, Evaluated)[:3] == [20, 40, 60]
    assert steps(told, CheckpointSaved)[:3] == [25, 50, 75]
    assert steps(told, HealthMeasured)[:3] == [30, 45, 60]
    progress = [event for event in told if isinstance(event, Progress) and event.phase == "predict"]
    assert len(progress) > 5
    for event in progress:
        assert event.smoothed_loss is event.predicted_loss is event.confidence is None


def test_early_stopping_ends_a_chain(tmp_path: Path) -> None:
    """The chain ends with its next leap, and the run when the move is judged."""
    settings = {"evaluation__interval": 1, "evaluation__early_stopping_patience": 3, "hybrid__correct_steps": 2}
    trainer, events, summary = fit(tmp_path, **settings)
    assert summary["reason"] == "stopped early"
    assert not trainer.judging
    moves = [event for event in events if isinstance(event, Moved)]
    assert len(moves) == 1
    assert events.index(moves[0]) > events.index(inside(events)[0])
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert [event.best for event in evaluated[-4:]].count(True) <= 1
    _, _, again = fit(tmp_path, how={"resume": True}, **settings)
    assert (again["reason"], again["global_step"]) == ("stopped early", summary["global_step"])


# --- what is taken back ----------------------------------------------------------------------------------------------


def test_an_evaluation_of_what_was_taken_back_is_no_record(tmp_path: Path) -> None:
    """The held-out loss is made to be low where the chain is, and the chain to be refused all the same."""
    trainer, events = trainer_of(evaluation__interval=2, checkpoint__interval=5, max_steps=60)
    evaluate = trainer.engine.forward.evaluate
    trainer.engine.forward.evaluate = lambda batches: evaluate(batches) - 100 * trainer.hybrid.chaining  # type: ignore[method-assign]
    rise = iter(range(1000))
    trainer.policy.tools.held_out.loss = lambda: float(next(rise))  # type: ignore[method-assign]
    trainer.fit([TRAINED], [HELD_OUT], out=tmp_path, progress=False)
    told = [event for event in events if isinstance(event, Evaluated)]
    assert min(event.loss for event in told) < -90
    assert any(event.verdict == "refused" for event in events if isinstance(event, Moved))
    assert trainer.engine.progress.best_val_loss is not None
    assert trainer.engine.progress.best_val_loss > 0
    (kept,) = CheckpointStore(tmp_path / "checkpoints").best()
    assert kept == trainer.engine.progress.best_step
    assert (
        checkpoint.read(tmp_path / "checkpoints" / f"best-step-{kept:08d}")["best"]["loss"]
        == trainer.engine.progress.best_val_loss
    )
    assert any("-after-rollback-" in event.path for event in events if isinstance(event, CheckpointSaved))


def test_a_run_resumed_inside_a_chain_that_is_taken_back_later_is_the_same(tmp_path: Path) -> None:
    """Also from checkpoints of steps that were taken back."""
    settings = {"evaluation__interval": 10, "checkpoint__interval": 5, "checkpoint__keep": 100, "max_steps": 80}
    whole, events, _ = fit(tmp_path / "whole", **settings)
    end = saved(whole)
    assert any(event.verdict == "kept" and event.chained for event in events if isinstance(event, Moved))
    folders = [path for _, path in CheckpointStore(tmp_path / "whole/checkpoints").steps()]
    places = [event.path for event in inside(events) if isinstance(event, CheckpointSaved)]
    assert len(places) > 5
    for number, place in enumerate([places[0], places[len(places) // 2], places[-1]]):
        out = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", out)
        for folder in folders[: [path.name for path in folders].index(Path(place).name)]:
            shutil.rmtree(out / "checkpoints" / folder.name)
        resumed, again, _ = fit(out, how={"resume": True}, **settings)
        assert steps(again, Resumed) == [int(Path(place).name[5:13])]
        assert_same_state(saved(resumed), end)


def test_a_run_that_makes_no_chain_ends_as_the_plain_loop_does() -> None:
    """Though the loss is exact, and evaluations have found a lower held-out loss."""
    idle, _, summary = fit(None, evaluation__interval=10, hybrid__full_steps=1000)
    plain, _, _ = fit(None, evaluation__interval=10, hybrid__mode="off")
    assert summary["best_val_loss"] < summary["final_val_loss"]
    assert same_weights(idle.model, plain.model)


# --- the best weights ------------------------------------------------------------------------------------------------

PLAIN = {"hybrid__mode": "off", "evaluation__interval": 10}


@pytest.mark.parametrize("settings", [PLAIN, {**PLAIN, "evaluation__ema_decay": 0.8}], ids=["", "averaged"])
def test_the_model_ends_with_its_best_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    trainer, events, summary = fit(tmp_path, how={"load_best": True}, **settings)
    last, _, _ = fit(None, **settings)
    losses = {event.step: event.loss for event in events if isinstance(event, Evaluated)}
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 200
    assert (summary["best_step"], summary["best_val_loss"]) == (best, losses[best])
    assert summary["best_checkpoint"] == f"checkpoints/best-step-{best:08d}"
    assert summary["final_val_loss"] == losses[200]
    assert trainer.evaluate([HELD_OUT]) == pytest.approx(losses[best], rel=1e-6)
    assert not same_weights(trainer.model, last.model)
    said = [event.message for event in events if isinstance(event, Notice)]
    told = f"the model has its weights of step {best}, with the lowest held-out loss, {losses[best]:.4g}; final losses"
    assert any(text.startswith(told) for text in said)
    again, _, _ = fit(tmp_path, how={"load_best": True, "resume": True}, **settings)
    assert same_weights(again.model, trainer.model)
    went_on, _, _ = fit(tmp_path, how={"resume": True}, **settings)
    assert same_weights(went_on.model, last.model)  # it goes on from the last checkpoint, not from the best


def test_one_best_is_kept_beside_the_newest_and_is_small(tmp_path: Path) -> None:
    fit(tmp_path, **PLAIN, checkpoint__interval=10)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[1:] == ["step-00000190", "step-00000200"]
    assert names[0].startswith("best-step-")
    assert sorted(path.name for path in (tmp_path / "checkpoints" / names[0]).iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "state.json",
    ]
    checkpoint.verify(tmp_path / "checkpoints" / names[0])


def test_none_is_kept_where_nobody_wants_it_or_nothing_tells(tmp_path: Path) -> None:
    fit(tmp_path / "off", **PLAIN, checkpoint__keep_best=False)
    trainer, _ = trainer_of(**PLAIN)
    trainer.fit([TRAINED], out=tmp_path / "nothing", progress=False)
    assert not list(tmp_path.rglob("best-*"))


def test_a_full_disk_costs_the_best_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **others: Any) -> None:
        raise checkpoint.SaveError("no space left")

    monkeypatch.setattr(CheckpointStore, "save_best", full)
    _, events, summary = fit(tmp_path, **PLAIN)
    assert summary["reason"] == "finished"
    assert any("no space left; the run goes on" in event.message for event in events if isinstance(event, Notice))


def test_best_weights_that_could_not_be_saved_are_saved_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they were then, though the run has gone on."""
    save, failed = CheckpointStore.save_best, []

    def full_at_the_best(store: CheckpointStore, step: int, *arguments: Any, **others: Any) -> Path:
        if step == best and not failed:
            failed.append(step)
            raise checkpoint.SaveError("no space left")
        return save(store, step, *arguments, **others)

    settings = {**PLAIN, "max_steps": 200, "checkpoint__interval": 14}
    _, _, whole = fit(tmp_path / "whole", **settings)
    best = whole["best_step"]
    assert best % 14
    monkeypatch.setattr(CheckpointStore, "save_best", full_at_the_best)
    _, _, summary = fit(tmp_path / "full", **settings)
    assert failed == [best]
    kept = [checkpoint.read(tmp_path / out / whole["best_checkpoint"])["model"] for out in ("whole", "full")]
    assert summary["best_checkpoint"] == whole["best_checkpoint"]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


def test_the_best_weights_make_no_folder_anew(tmp_path: Path) -> None:
    """The run folder is moved away just before they are saved."""
    trainer, events = trainer_of(**PLAIN, max_steps=20)
    out = tmp_path / "run"
    evaluate = trainer.engine.forward.evaluate

    def moved(batches: Any) -> float:
        if out.exists():
            out.rename(tmp_path / "elsewhere")
        return evaluate(batches)

    trainer.engine.forward.evaluate = moved  # type: ignore[method-assign,assignment]
    with pytest.raises(checkpoint.SaveError, match="was moved or deleted while the run goes on"):
        trainer.fit([TRAINED], [HELD_OUT], out=out, progress=False)
    assert not out.exists()
    assert any("was moved or deleted" in event.message for event in events if isinstance(event, Notice))


@pytest.mark.parametrize(
    ("how", "settings", "kind", "words"),
    [
        ({"out": None}, {}, InputError, "run folder"),
        ({"held_out": None}, {}, InputError, "held-out batches"),
        ({}, {"checkpoint__keep_best": False}, ConfigError, "checkpoint.keep_best = true"),
    ],
)
def test_what_load_best_needs_is_said_before_anything_is_done(
    how: dict[str, Any], settings: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    trainer, events = trainer_of(**settings)
    options = {"held_out": [HELD_OUT], "out": tmp_path / "run", **how}
    with pytest.raises(kind, match=words):
        trainer.fit([TRAINED], load_best=True, progress=False, **options)
    assert events == []
    assert not (tmp_path / "run").exists()


def test_a_best_checkpoint_goes_into_a_model_and_into_no_other(tmp_path: Path) -> None:
    trainer, _, summary = fit(tmp_path, **PLAIN)
    state = checkpoint.read(tmp_path / summary["best_checkpoint"])
    other, _ = trainer_of(**PLAIN)
    other.load_weights(state)
    assert other.evaluate([HELD_OUT]) == pytest.approx(summary["best_val_loss"], rel=1e-6)
    wrong = HybridTrainer(
        torch.nn.Linear(5, 1), config=trainer.config, loss_fn=lambda model, batch: model(batch).mean()
    )
    with pytest.raises(checkpoint.CheckpointError, match="another model"):
        wrong.load_weights(state, "best")


def test_a_callback_can_stop_a_run_in_the_middle_of_linearised_leaps() -> None:
    """A chain of them is often the whole run."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    points = torch.linspace(0, 1, 30).view(-1, 1)
    trainer = HybridTrainer(model, adam, residuals=lambda m, x: m(x) - x.square(), config=Config(max_steps=400))

    def stop(event: Event) -> None:
        if isinstance(event, Progress) and event.phase == "predict":
            trainer.stop()

    summary = trainer.fit([points], callbacks=[stop], progress=False)
    assert summary["reason"] == "stopped early"
    assert trainer.global_step < 100


# --- between two chains ----------------------------------------------------------------------------------------------


def stopped_between_chains(held_out: list[torch.Tensor], **settings: Any) -> tuple[HybridTrainer, list[Event], int]:
    """A run that is stopped some steps of Adam after a chain, at a rate that leads far up from there; the events, and
    the step at which the chain had ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    points = torch.linspace(-1, 1, 64).view(-1, 1)
    config = from_mapping({"max_steps": 400, "device": "cpu", "log.interval": 1, **settings})
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = HybridTrainer(model, adam, residuals=lambda m, x: m(x) - (3 * x).sin(), config=config)
    told: list[Event] = []
    ended: list[int] = []

    def follow(event: Event) -> None:
        told.append(event)
        if isinstance(event, Progress) and event.phase == "predict" and event.step > 20 and trainer.hybrid:
            trainer.hybrid.end_soon()
        if isinstance(event, Moved):
            ended.append(event.step)
        if isinstance(event, Progress) and event.phase == "full" and ended and event.step >= ended[0] + 4:
            trainer.stop("enough")

    summary = trainer.fit([points], held_out, callbacks=[follow], progress=False)
    assert summary["reason"] == "stopped early"
    assert trainer.phase.value == "full"
    return trainer, told, ended[0]


def test_a_run_that_is_stopped_between_two_chains_ends_at_the_lowest_loss() -> None:
    trainer, told, ended = stopped_between_chains([])
    at_chain = next(event for event in told if isinstance(event, Moved)).loss
    strayed = [event.loss for event in told if isinstance(event, Progress) and event.step > ended + 1]
    points = torch.linspace(-1, 1, 64).view(-1, 1)
    assert max(strayed) > 10 * at_chain
    assert trainer.evaluate([points]) <= 1.01 * at_chain
    assert trainer.summary()["final_train_loss"] <= 1.01 * at_chain


def test_between_two_chains_the_point_is_evaluated_that_the_run_would_end_at() -> None:
    held_out = torch.linspace(-0.95, 0.95, 20).view(-1, 1)
    trainer, told, ended = stopped_between_chains([held_out], **{"evaluation.interval": 1})
    after = [event.loss for event in told if isinstance(event, Evaluated) and event.step > ended]
    before = [event.loss for event in told if isinstance(event, Evaluated) and event.step <= ended]
    assert len(after) >= 3
    assert max(after) <= 1.01 * before[-1]
    assert trainer.evaluate([held_out]) <= 1.01 * before[-1]


def test_a_loop_of_ones_own_goes_back_to_the_lowest_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    points = torch.linspace(-1, 1, 64).view(-1, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = HybridTrainer(
        model, adam, residuals=lambda m, x: m(x) - (3 * x).sin(), config=Config(max_steps=400, device="cpu")
    )
    while trainer.global_step < 30:
        trainer.step(points)
    assert trainer.hybrid is not None
    trainer.hybrid.end_soon()
    while trainer.judging:
        trainer.step(points)
    at_chain = trainer.evaluate([points])
    for _ in range(4):
        trainer.step(points)
    assert trainer.evaluate([points]) > 10 * at_chain
    trainer.finish(points)
    assert trainer.evaluate([points]) <= at_chain
