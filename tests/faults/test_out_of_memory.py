"""Memory runs out at a random point of every phase: clear words, nothing lost, and retries that end as they should."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.faults.test_resume_hybrid import CASES, Case, Regression, Scripted, assert_same_state, saved
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import OutOfMemory
from foretrain.events import Event, HealthMeasured, MemoryUsed, Moved, Notice, Phase, PhaseChanged, Progress, Recovered
from foretrain.health.rescue import MOST_FAILED_MOVES
from foretrain.health.shortage import next_smaller

SAVES = {"checkpoint.interval": 15, "evaluation.interval": 20, "log.interval": 10}
TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1.00 GiB"


def shortage() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(TEXT)


class Scarce(TorchDispatchMode):
    """The allocator that fails: once, at the given one of all operations of torch that make a new tensor."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at = at
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            self.count += 1
            if self.count in self.at:
                raise shortage()
        return func(*args, **(kwargs or {}))


class Batches:
    """The batches of a case, anywhere. For making them there is memory enough."""

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self.batch = batch
        self.position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            with _disable_current_modes():
                batch = self.batch(self.position - 1)
            yield batch


def case(name: str, **changes: Any) -> Case:
    return replace(CASES[name], settings={**CASES[name].settings, **SAVES, **changes})


def fit(one: Case, out: Path | None, *at: int, resume: bool = False) -> tuple[HybridTrainer, list[Event], int]:
    """Trains, and gives the operations counted. Memory runs out at each of `at`."""
    trainer, events = one.trainer()
    held_out = [one.batch(10_000 + number) for number in range(3)]
    with Scarce(*at) as scarce:
        trainer.fit(Batches(one.batch), held_out, out=out, resume=resume, progress=False)
    return trainer, events, scarce.count


@functools.cache
def straight(name: str) -> tuple[Any, int]:
    """The end of the run that nothing happens to, and how many operations it takes."""
    trainer, _, operations = fit(case(name), None)
    return saved(trainer), operations


NAMES = ["leap, noisy", "leap, noisy, rolled back", "rollout, noisy", "leap, quasi-Newton", "leap, averaged weights"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_at_a_random_point_nothing_is_lost(name: str, seed: int, tmp_path: Path) -> None:
    """It says what happened; resumed, the run ends with the bits of one that nothing happened to."""
    end, operations = straight(name)
    at = random.Random(f"{name} {seed}").randrange(operations)  # noqa: S311 - no secret
    try:
        trainer, events, _ = fit(case(name), tmp_path / "run", at)
        assert any(isinstance(event, Notice) and "tries again at the next save" in event.message for event in events)
    except OutOfMemory as error:
        text = str(error)
        assert text.startswith("out of memory in ")
        assert "20.00 MiB more could not be had" in text
        assert "saved" in text
        trainer, events, _ = fit(case(name), tmp_path / "run", resume=True)
    assert_same_state(saved(trainer), end)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_a_retry_at_random_points_ends_at_the_right_loss(name: str, seed: int, tmp_path: Path) -> None:
    """Twice in one run, wherever that is: it goes on by itself, and counts every step once."""
    end, operations = straight(name)
    draw = random.Random(f"again {name} {seed}")  # noqa: S311 - no secret
    one = case(name, **{"memory.on_out_of_memory": "retry"})
    trainer, events, _ = fit(one, tmp_path, *(draw.randrange(operations) for _ in range(2)))
    assert trainer.global_step == one.steps
    assert trainer.policy is not None
    assert sum(trainer.policy.score.counts.steps.values()) == one.steps
    told = [event.text for event in events if isinstance(event, Recovered) and event.action == "out_of_memory"]
    told += [event.message for event in events if isinstance(event, Notice) and event.level != "info"]
    assert len(told) >= 2
    assert all("20.00 MiB more could not be had" in text for text in told)
    expected = end["progress"]["last_val_loss"]
    assert trainer.engine.progress.last_val_loss is not None
    assert trainer.engine.progress.last_val_loss <= 1.25 * expected + 1e-3
    moves = end["hybrid"]["policy"]["score"]["counts"]["moves"]
    if trainer.policy.score.counts.moves == moves:  # windows begin elsewhere afterwards, so others may have been made
        assert trainer.engine.progress.last_val_loss == pytest.approx(expected, rel=0.25, abs=1e-3)


# --- at known points -------------------------------------------------------------------------------------------------


class Tight(nn.Module):
    """A small network with dropout and batch statistics, which runs out of memory where it is told to.

    fails: (what, number) with what "forward", "backward" or "eval"; the number counts from 0, None means every time.
    """

    def __init__(self, *fails: tuple[str, int | None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(5, 3)
        self.fails = fails
        self.counts = {"forward": 0, "backward": 0, "eval": 0}
        self.largest = {"forward": 10**6, "eval": 10**6}
        """Rows that fit."""
        self.drawn: list[float] = []
        self.first.register_forward_hook(lambda module, inputs, output: self._forward(output))

    def _fail(self, what: str) -> None:
        number = self.counts[what]
        self.counts[what] += 1
        if (what, number) in self.fails or (what, None) in self.fails:
            raise shortage()

    def _forward(self, output: Tensor) -> None:
        what = "forward" if self.training else "eval"
        if len(output) > self.largest[what]:
            raise shortage()
        self._fail(what)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._fail("backward"))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.training:
            self.drawn.append(random.random() + np.random.rand())  # noqa: NPY002, S311 - as user code may
        hidden = torch.tanh(self.dropout(self.norm(self.first(batch[0]))))
        scale = 1 + 0.01 * (self.drawn[-1] if self.training else 0.0)
        return (self.last(hidden).sum(1) - batch[1]).square().mean() * scale


def rows(position: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(position)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, inputs @ torch.linspace(-1, 1, 6)


PLAIN = {
    "device": "cpu",
    "max_steps": 24,
    "batch_size": 8,
    "hybrid.mode": "off",
    "optimizer.learning_rate": 0.01,
    "schedule.type": "constant",
    "memory.on_out_of_memory": "retry",
    **SAVES,
}


def tight(model: Tight, **changes: Any) -> tuple[HybridTrainer, list[Event]]:
    trainer = HybridTrainer(model, config=from_mapping({**PLAIN, **changes}))
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    return trainer, events


def smaller_from(step: int, steps: int = 24, times: int = 1, **changes: Any) -> Any:
    """The state at the end of an undisturbed run that had the smaller setting from that step on."""
    trainer, _ = tight(Tight(), **changes)
    while trainer.global_step < steps:
        if trainer.global_step == step:
            settings = trainer.config
            for _ in range(times):
                settings = next_smaller(settings) or settings
            trainer.engine.use(settings)
        trainer.step(rows(trainer.position))
    return saved(trainer)


def same_training(one: Any, other: Any) -> None:
    for part in ("model", "optimizer", "random", "average"):
        assert_same_state(one[part], other[part])


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 1, 13])
@pytest.mark.parametrize(
    "settings", [{}, {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5, "hybrid.warmup_steps": 1}], ids=["", "ahead"]
)
def test_the_same_batch_again_in_smaller_parts(what: str, step: int, settings: dict[str, Any]) -> None:
    """Dropout, batch statistics, every generator, the look-ahead: all is as if the step had been small at once."""
    trainer, events = tight(Tight((what, step)), **settings)
    for position in range(24):
        assert trainer.step(rows(position)).global_step == position + 1
    same_training(saved(trainer), smaller_from(step, **settings))
    (event,) = (event for event in events if isinstance(event, Recovered))
    assert (event.step, event.action) == (step, "out_of_memory")
    part = {"forward": "the forward pass", "backward": "the backward pass"}[what]
    assert event.text.startswith(f"out of memory in full after step {step}: during {part} (test_out_of_memory.py, line")
    assert event.text.endswith("; once more with accumulation_steps = 2")
    found = trainer.summary()["out_of_memory"]
    assert (found["times"], found["settings"]) == (1, {"accumulation_steps": 2})


@pytest.mark.parametrize("what", ["forward", "backward", "look"])
def test_a_look_that_was_begun_with_the_step_is_made_when_the_run_goes_on(what: str, tmp_path: Path) -> None:
    settings = {"memory.on_out_of_memory": "stop", "health.interval": 6}
    whole, _ = tight(Tight(), **settings)
    whole.fit(Batches(rows), progress=False)
    trainer, _ = tight(Tight() if what == "look" else Tight((what, 12)), **settings)
    if what == "look":
        begin = trainer.checkup.layers.begin

        def short() -> None:
            if trainer.global_step == 12:
                raise shortage()
            begin()

        trainer.checkup.layers.begin = short  # type: ignore[method-assign]
    with pytest.raises(OutOfMemory, match="The state after step 12 is saved"):
        trainer.fit(Batches(rows), out=tmp_path, progress=False)
    resumed, events = tight(Tight(), **settings)
    resumed.fit(Batches(rows), out=tmp_path, resume=True, progress=False)
    assert [event.step for event in events if isinstance(event, HealthMeasured)] == [12, 18]
    assert resumed.checkup.measurements == whole.checkup.measurements == 4
    assert_same_state(saved(resumed), saved(whole))


def test_memory_that_runs_out_while_a_checkpoint_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program of one's own: an error of ours, and nothing is put aside."""
    from foretrain.persist import reading

    def short(path: Path) -> None:
        raise shortage()

    tight(Tight())[0].fit(Batches(rows), out=tmp_path, progress=False)
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    monkeypatch.setattr(reading, "load_file", short)
    with pytest.raises(OutOfMemory, match=r"out of memory in setup .* All checkpoints are as they were"):
        tight(Tight())[0].fit(Batches(rows), out=tmp_path, resume=True, progress=False)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before


def test_smaller_and_smaller_until_it_fits_and_as_small_after_a_resume(tmp_path: Path) -> None:
    model = Tight()
    model.largest["forward"] = 2
    trainer, events = tight(model)
    trainer.fit(Batches(rows), out=tmp_path, progress=False)
    assert trainer.engine.full_step.accumulation == 4
    assert [event.step for event in events if isinstance(event, Recovered)] == [0, 0]
    same_training(saved(trainer), smaller_from(0, times=2))

    resumed, events = tight(Tight(), max_steps=30)
    resumed.fit(Batches(rows), out=tmp_path, resume=True, progress=False)
    assert resumed.engine.full_step.accumulation == 4
    same_training(saved(resumed), smaller_from(0, times=2, steps=30, max_steps=30))
    stopping, _ = tight(Tight(), max_steps=36, **{"memory.on_out_of_memory": "stop"})
    stopping.fit(Batches(rows), out=tmp_path, resume=True, progress=False)
    assert stopping.engine.full_step.accumulation == 1


def test_nothing_smaller_is_left(tmp_path: Path) -> None:
    model = Tight()
    model.largest["forward"] = 0
    trainer, events = tight(model)
    with pytest.raises(OutOfMemory, match=r"nothing smaller is left to try.*state after step 0 is saved") as failed:
        trainer.fit(Batches(rows), out=tmp_path, progress=False)
    assert failed.value.exit_code == 3
    assert trainer.engine.full_step.accumulation == 8
    assert len([event for event in events if isinstance(event, Recovered)]) == 3
    resumed, _ = tight(Tight(), **{"memory.on_out_of_memory": "stop"})
    resumed.fit(Batches(rows), out=tmp_path, resume=True, progress=False)
    same_training(saved(resumed), smaller_from(99))


# --- in the middle of an update --------------------------------------------------------------------------------------


def half_updates(monkeypatch: pytest.MonkeyPatch, trainer: HybridTrainer, step: int) -> None:
    """In that step Muon runs out of memory when it has changed one of its two matrices."""
    plain, calls = torch.baddbmm, []

    def baddbmm(*arguments: Any, **options: Any) -> Tensor:
        if trainer.global_step == step and not trainer.rescue.told:
            calls.append(len(calls))
            if len(calls) == 12:  # ten of them orthogonalize one matrix
                raise shortage()
        return plain(*arguments, **options)

    monkeypatch.setattr(torch, "baddbmm", baddbmm)


@pytest.mark.parametrize(("step", "back_to"), [(2, 0), (17, 15), (15, 15)])
def test_half_an_update_goes_back_to_the_last_checkpoint(
    step: int, back_to: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, events = tight(Tight())
    half_updates(monkeypatch, trainer, step)
    summary = trainer.fit(Batches(rows), out=tmp_path, progress=False)
    assert summary["reason"] == "finished"
    (event,) = (event for event in events if isinstance(event, Recovered))
    assert "during the update of the weights" in event.text
    assert event.text.endswith(f"back to the checkpoint of step {back_to}; once more with accumulation_steps = 2")
    monkeypatch.undo()
    same_training(saved(trainer), smaller_from(back_to))
    assert [event.step for event in events if isinstance(event, Progress)][-1] == 24


def test_half_an_update_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = tight(Tight(), **{"memory.on_out_of_memory": "stop"})
    half_updates(monkeypatch, trainer, 17)
    with pytest.raises(OutOfMemory, match="The state after step 15 is saved"):
        trainer.fit(Batches(rows), out=tmp_path, progress=False)
    monkeypatch.undo()
    resumed, _ = tight(Tight())
    resumed.fit(Batches(rows), out=tmp_path, resume=True, progress=False)
    same_training(saved(resumed), smaller_from(99))


def test_in_a_loop_of_ones_own_half_an_update_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = tight(Tight())
    half_updates(monkeypatch, trainer, 1)
    trainer.step(rows(0))
    with pytest.raises(OutOfMemory) as failed:
        trainer.step(rows(1))
    assert failed.value.half_done
    assert not failed.value.intact


@pytest.mark.parametrize("answer", ["stop", "retry"])
def test_memory_that_runs_out_among_updates_leaves_half_a_step_and_says_so(answer: str) -> None:
    """Also where nothing is tried again: a loop of one's own must know."""
    settings = {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0}
    settings |= {"memory.on_out_of_memory": answer, "hybrid.mode": "off", "optimizer.type": "adamw", "device": "cpu"}
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    trainer = HybridTrainer(model, None, lambda model, batch: model(batch).square().mean(), from_mapping(settings))
    trainer.step(torch.ones(3, 4))
    calls = itertools.count()

    def fail(*_: Any) -> None:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    trainer.optimizer.register_step_pre_hook(fail)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(OutOfMemory) as failed:
        trainer.step(torch.ones(3, 4))
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert any(changed)
    assert not all(changed)
    assert failed.value.half_done
    assert not failed.value.intact


# --- evaluation and checkpoints --------------------------------------------------------------------------------------


def test_an_evaluation_in_halves(tmp_path: Path) -> None:
    losses = []
    for largest in (10**6, 2):
        model = Tight()
        model.largest["eval"] = largest
        trainer, events = tight(model)
        trainer.fit(Batches(rows), [rows(100), rows(101)], out=tmp_path / str(largest), progress=False)
        losses.append(trainer.engine.progress.last_val_loss)
        same_training(saved(trainer), smaller_from(99))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    texts = [event.text for event in events if isinstance(event, Recovered)]
    assert len(texts) == 2
    assert texts[0].startswith("out of memory in evaluation after step 20: during the forward pass of an evaluation")
    assert trainer.summary()["out_of_memory"]["settings"] == {}


@pytest.mark.parametrize("how", ["stop", "retry"])
def test_an_evaluation_that_never_fits(how: str, tmp_path: Path) -> None:
    trainer, _ = tight(Tight(("eval", None)), **{"memory.on_out_of_memory": how})
    with pytest.raises(OutOfMemory, match=r"in evaluation after step 20.*The state after step 20 is saved"):
        trainer.fit(Batches(rows), [rows(100)], out=tmp_path, progress=False)
    resumed, _ = tight(Tight())
    resumed.fit(Batches(rows), [rows(100)], out=tmp_path, resume=True, progress=False)
    same_training(saved(resumed), smaller_from(99))


@pytest.mark.parametrize(("save", "ends"), [(1, True), (2, False)], ids=["in mid-run", "the last"])
def test_a_checkpoint_that_does_not_fit(save: int, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory, this time, while the tensors are written."""
    from foretrain.persist import checkpoint

    plain, calls = checkpoint.save_file, []

    def save_file(tensors: Any, path: Any) -> None:
        calls.append(path.parent)
        if len(dict.fromkeys(calls)) == save:
            raise MemoryError
        plain(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    trainer, events = tight(Tight(), **{"memory.on_out_of_memory": "stop"})
    if ends:
        trainer.fit(Batches(rows), out=tmp_path, progress=False)
        (notice,) = (event.message for event in events if isinstance(event, Notice))
        assert notice.startswith("out of memory in checkpoint after step 15: during a checkpoint")
        assert notice.endswith("the run goes on and tries again at the next save")
    else:
        with pytest.raises(OutOfMemory, match="The state after step 15 is saved"):
            trainer.fit(Batches(rows), out=tmp_path, progress=False)
    assert not list(tmp_path.rglob(".tmp-*"))
    monkeypatch.undo()
    resumed, _ = tight(Tight())
    resumed.fit(Batches(rows), out=tmp_path, resume=True, progress=False)
    same_training(saved(resumed), smaller_from(99))


# --- moves -----------------------------------------------------------------------------------------------------------


class Probed(Regression):
    """Its probes do not fit while there is a move, or its validating steps."""

    def __init__(self, trained: bool, times: int) -> None:
        super().__init__()
        self.trained = trained
        self.times = times
        self.trainer: HybridTrainer | None = None

    def loss(self, batch: Any) -> Tensor:
        if self.trainer is not None and self.trainer.judging and self.training == self.trained and self.times:
            self.times -= 1
            raise shortage()
        return super().loss(batch)


def moving(model: Probed, steps: int = 300, **changes: Any) -> tuple[HybridTrainer, list[Event]]:
    one = case("leap, noisy", **{"memory.on_out_of_memory": "retry", "memory.timeline": True, **changes})
    trainer, events = replace(one, model=lambda: model, predictor=lambda: Scripted(1.0), steps=steps).trainer()
    model.trainer = trainer
    return trainer, events


@pytest.mark.parametrize("mode", ["leap", "rollout"])
@pytest.mark.parametrize("trained", [False, True], ids=["probe", "validation"])
def test_a_move_that_does_not_fit_is_taken_back(trained: bool, mode: str, tmp_path: Path) -> None:
    """Every move fails: after some of them nothing is predicted any more, and the weights are those of a plain run."""
    trainer, events = moving(Probed(trained, 100), **{"hybrid.mode": mode})
    summary = trainer.fit(Batches(CASES["leap, noisy"].batch), out=tmp_path, progress=False)
    moves = [event for event in events if isinstance(event, Moved)]
    assert [(move.verdict, move.reason.endswith("memory ran out in it")) for move in moves] == [
        ("refused", True)
    ] * MOST_FAILED_MOVES
    texts = [event.text for event in events if isinstance(event, Recovered)]
    assert len(texts) == MOST_FAILED_MOVES
    assert all("; the move is taken back" in text for text in texts)
    assert "nothing is predicted any more" in texts[-1]
    told = [event for event in events if isinstance(event, PhaseChanged)]
    assert [event.phase for event in told if event.reason == "memory ran out in it"] == ["full"] * MOST_FAILED_MOVES
    assert all(one.phase != other.phase for one, other in itertools.pairwise(told))
    assert summary["out_of_memory"]["prediction"] == "off"
    assert trainer.policy.tools.snapshots.taken is None
    assert trainer.observer.trajectory.bytes == 0
    plain, _ = moving(Probed(trained, 0), **{"hybrid.mode": "off"})
    plain.fit(Batches(CASES["leap, noisy"].batch), progress=False)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name
    assert trainer.position == plain.position

    resumed, events = moving(Probed(trained, 100), 400, **{"hybrid.mode": mode})
    resumed.fit(Batches(CASES["leap, noisy"].batch), out=tmp_path, resume=True, progress=False)
    assert not [event for event in events if isinstance(event, Moved)]


def test_a_move_fails_once_and_the_next_is_made() -> None:
    trainer, events = moving(Probed(False, 1))
    trainer.fit(Batches(CASES["leap, noisy"].batch), progress=False)
    verdicts = [event.verdict for event in events if isinstance(event, Moved)]
    assert verdicts[0] == "refused"
    assert {"kept", "rolled back"} & set(verdicts[1:])
    assert "predict" in {event.phase for event in events if isinstance(event, MemoryUsed)}


def test_a_window_that_is_given_up_takes_its_decision_along() -> None:
    """Memory runs out after the end of a window has decided for a move: nothing of the decision is left."""
    trainer, events = moving(Probed(False, 0))
    policy, failed = trainer.policy, []

    def fail() -> None:
        if trainer.phase is Phase.PREDICT and not failed:
            failed.append(trainer.global_step)
            raise shortage()

    trainer.hybrid._tell_obstacles = fail  # type: ignore[method-assign]
    while not failed:
        trainer.step(CASES["leap, noisy"].batch(trainer.position))
    told = [event for event in events if isinstance(event, PhaseChanged)]
    assert [(event.phase, event.step) for event in told[-2:]] == [("predict", *failed), ("full", *failed)]
    assert (policy.decision, policy.last_reason, told[-1].reason) == (None, "memory ran out", "memory ran out")
    while not [event for event in events if isinstance(event, Moved)]:
        trainer.step(CASES["leap, noisy"].batch(trainer.position))


def test_another_error_is_left_alone() -> None:
    model = Tight()
    model.first.register_forward_pre_hook(lambda module, inputs: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    trainer, events = tight(model)
    with pytest.raises(RuntimeError, match="shapes differ"):
        trainer.step(rows(0))
    assert not [event for event in events if isinstance(event, Recovered)]


def test_blocks_are_computed_twice_when_single_rows_do_not_fit(
    make_model: Callable[..., Any], make_batch: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    """The last resort of a GPT-2, and then nothing is left."""
    model = make_model()

    def too_large(module: nn.Module, inputs: Any) -> None:
        if not model.activation_checkpointing or len(inputs[0]) > largest:
            raise shortage()

    largest = 1
    model.blocks[0].register_forward_pre_hook(too_large)
    settings = {"memory.on_out_of_memory": "retry", "schedule.type": "constant", "optimizer.type": "sgd"}
    trainer = HybridTrainer(model, config=make_config(settings))
    for seed in range(3):
        trainer.step(make_batch(seed=seed))
    assert trainer.engine.full_step.accumulation == 4
    assert model.activation_checkpointing is True
    plain = HybridTrainer(make_model(), config=make_config(settings))
    for seed in range(3):
        plain.step(make_batch(seed=seed))
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-3, atol=1e-4), name
    largest = 0
    with pytest.raises(OutOfMemory, match="nothing smaller is left to try") as failed:
        trainer.step(make_batch(seed=3))
    assert failed.value.intact
    assert "accumulation_steps" not in str(failed.value).partition("to make it fit")[2]


# --- on the command line ---------------------------------------------------------------------------------------------


def scarce_attention(monkeypatch: pytest.MonkeyPatch, what: str, number: int) -> None:
    """torch's attention runs out of memory once, in a training step, on the way there or back."""
    plain, calls = torch.nn.functional.scaled_dot_product_attention, []

    def fail(gradient: Tensor) -> None:
        raise shortage()

    def attention(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        output = plain(query, *arguments, **options)
        if query.requires_grad:
            calls.append(what)
            if len(calls) == number + 1 and what == "backward":
                output.register_hook(fail)
            elif len(calls) == number + 1:
                raise shortage()
        return output

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_the_command_stops_with_its_own_exit_code_and_says_what_to_do(
    what: str, workshop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        scarce_attention(patch, what, 7)
        code, printed = workshop.foretrain("train", "tiny.toml", "--out", "fresh")
    assert code == 3
    assert "Traceback" not in printed
    line = next(line for line in printed.splitlines() if line.startswith("error: "))
    assert f"out of memory in warmup after step 7: during the {what} pass" in line
    assert "20.00 MiB more could not be had; the process held" in line
    advised = ("engine.fused_loss = true", "accumulation_steps = 2", "engine.activation_checkpointing = true")
    assert all(text in line for text in advised)
    assert line.endswith("The state after step 7 is saved; go on with: foretrain train --out fresh --resume")
    code, printed = workshop.foretrain("train", "--out", "fresh", "--resume")
    assert code == 0
    assert "resumed from step 7" in printed
    assert workshop.is_as_undisturbed("fresh")


def test_the_command_goes_on_by_itself(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    retry = ["--set", "memory.on_out_of_memory=retry", "--set", "model.dropout=0"]
    assert workshop.foretrain("train", "tiny.toml", "--out", "plain", *retry)[0] == 0
    with monkeypatch.context() as patch:
        scarce_attention(patch, "backward", 7)
        code, printed = workshop.foretrain("train", "tiny.toml", "--out", "fresh", "--quiet", *retry)
    assert code == 0
    assert printed.startswith("warning: out of memory in warmup after step 7")
    assert printed.rstrip().endswith("once more with accumulation_steps = 2")
    plain, fresh = (json.loads((workshop.folder / name / "summary.json").read_text()) for name in ("plain", "fresh"))
    assert fresh["final_val_loss"] == pytest.approx(plain["final_val_loss"], rel=1e-4)
    assert fresh["out_of_memory"]["settings"] == {"accumulation_steps": 2}
    assert plain["out_of_memory"] is None
    assert plain["memory"]["warmup"]["resident_peak"] > 0
    lines = [json.loads(line) for line in (workshop.folder / "fresh" / "metrics.jsonl").read_text().splitlines()]
    assert {line["phase"] for line in lines if line["event"] == "MemoryUsed"} >= {"warmup"}


def test_no_memory_for_the_model_itself(workshop: Any) -> None:
    """Before there is a run: still one line and the same exit code."""
    code, printed = workshop.foretrain("train", "tiny.toml", "--out", "fresh", "--set", f"model.width={2**20}")
    assert code == 3
    assert printed.splitlines()[-1].startswith("error: ")
    assert "Out of memory outside of the run's steps" in printed
    assert "Traceback" not in printed
