"""A whole run: what happens when, what is told, what is left on disk, and going on with it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from foretrain import (
    Bus,
    CheckpointError,
    DivergenceError,
    HybridTrainer,
    InputError,
    Loader,
    MappedSamples,
    supervised,
)
from foretrain.config import from_mapping
from foretrain.engine import precision
from foretrain.engine.forward import Forward
from foretrain.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    HealthFound,
    MemoryUsed,
    Notice,
    Progress,
    Resumed,
    RunEnded,
    RunStarted,
)
from foretrain.persist import checkpoint
from foretrain.persist.folder import RunFolder

Make = Callable[..., Any]


class Small(nn.Module):
    """Drops out, so that random states matter."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 2, generator=generator))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.3, self.training) @ self.weight + self.bias


def data(count: int = 20) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :2] * 2 + 1)


def batches(count: int = 5, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = data(count * rows).tensors
    return list(zip(x.split(rows), y.split(rows), strict=True))


@pytest.fixture
def make_trainer() -> Callable[..., tuple[HybridTrainer, list[Event]]]:
    """make_trainer({"max_steps": 3}) gives a trainer of a small module, and its events as they come."""

    def make(
        changes: dict[str, Any] | None = None, loss: Any = None, model: nn.Module | None = None
    ) -> tuple[HybridTrainer, list[Event]]:
        events: list[Event] = []
        bus = Bus()
        bus.subscribe(events.append)
        given = {"max_steps": 6, "batch_size": 4, "device": "cpu", "log.interval": 1}
        given |= {"schedule.type": "constant", "optimizer.learning_rate": 0.02}
        config = from_mapping({**given, **(changes or {})})
        return HybridTrainer(model or Small(), None, loss or supervised(F.mse_loss), config, bus=bus), events

    return make


def of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def poisoned(bad: set[int]) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A loss that is NaN in the training steps numbered `bad` (from 0)."""
    calls = iter(range(10**6))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = F.mse_loss(model(batch[0]), batch[1])
        return value * math.nan if model.training and next(calls) in bad else value

    return loss


# --- what happens when ---------------------------------------------------------------------------------------------


def test_a_run_tells_its_story_in_order(make_trainer: Make, tmp_path: Path) -> None:
    trainer, events = make_trainer({"max_steps": 4, "evaluation.interval": 2, "checkpoint.interval": 3})
    summary = trainer.fit(batches(), batches(1), out=tmp_path / "run", progress=False, title="small")
    assert [type(event).__name__ for event in events if not isinstance(event, MemoryUsed)] == [
        "RunStarted",
        "RatesPlanned",
        "HealthMeasured",
        "Progress",
        "Progress",
        "Evaluated",
        "LossForecasted",
        "Progress",
        "CheckpointSaved",
        "Progress",
        "Evaluated",
        "CheckpointSaved",
        "RunEnded",
    ]
    start, end = events[0], events[-1]
    assert (start.step, start.max_steps, start.parameters, start.title) == (0, 4, 10, "small")
    assert (end.step, end.reason) == (4, "finished")
    assert end.summary == summary
    assert [event.step for event in of(events, Progress)] == [1, 2, 3, 4]
    assert [event.tokens for event in of(events, Progress)] == [4, 8, 12, 16]


def test_progress_is_the_mean_since_the_last_and_the_end_is_always_told(make_trainer: Make) -> None:
    every, events_of_every = make_trainer({"max_steps": 7, "log.interval": 1})
    every.fit(batches(), progress=False)
    third, events_of_third = make_trainer({"max_steps": 7, "log.interval": 3})
    third.fit(batches(), progress=False)
    losses = [event.loss for event in of(events_of_every, Progress)]
    assert [event.step for event in of(events_of_third, Progress)] == [3, 6, 7]
    means = [sum(losses[:3]) / 3, sum(losses[3:6]) / 3, losses[6]]
    assert [event.loss for event in of(events_of_third, Progress)] == pytest.approx(means, rel=1e-6)


def test_best_and_last_held_out_loss(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([3.0, 2.0, math.nan, 2.5, 1.5])
    monkeypatch.setattr(Forward, "evaluate", lambda forward, batches: next(values))
    trainer, events = make_trainer({"max_steps": 5, "evaluation.interval": 1})
    summary = trainer.fit(batches(), batches(1), progress=False)
    assert [event.best for event in of(events, Evaluated)] == [True, True, False, False, True]
    assert (summary["final_val_loss"], summary["best_val_loss"]) == (1.5, 1.5)


def test_a_held_out_loss_that_is_no_number_at_first_does_not_stay_the_best(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([math.nan, 3.0, 4.0])
    monkeypatch.setattr(Forward, "evaluate", lambda forward, batches: next(values))
    trainer, _ = make_trainer({"max_steps": 3, "evaluation.interval": 1})
    assert trainer.fit(batches(), batches(1), progress=False)["best_val_loss"] == 3.0


def test_early_stopping(make_trainer: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = iter([3.0, 2.0, 2.1, 1.9, 2.0, 2.2, 2.1, 9.0])
    monkeypatch.setattr(Forward, "evaluate", lambda forward, batches: next(values))
    settings = {"max_steps": 20, "evaluation.interval": 1, "evaluation.early_stopping_patience": 3}
    trainer, events = make_trainer(settings)
    summary = trainer.fit(batches(), batches(1), out=tmp_path / "run", progress=False)
    assert (summary["global_step"], summary["reason"], summary["best_val_loss"]) == (7, "stopped early", 1.9)
    assert of(events, CheckpointSaved)[-1].step == 7
    again, _ = make_trainer(settings)
    assert again.fit(batches(), batches(1), out=tmp_path / "run", resume=True, progress=False)["global_step"] == 7


def test_without_held_out_data_there_is_no_held_out_loss(make_trainer: Make) -> None:
    trainer, events = make_trainer()
    assert trainer.fit(batches(), progress=False)["final_val_loss"] is None
    assert of(events, Evaluated) == []


def test_training_lowers_the_loss(make_trainer: Make) -> None:
    trainer, _ = make_trainer({"max_steps": 120, "optimizer.learning_rate": 0.05})
    before = trainer.evaluate(batches())
    summary = trainer.fit(batches(), batches(), progress=False)
    assert summary["final_val_loss"] < 0.5 * before


def test_a_cyclic_schedule_comes_with_a_warning(make_trainer: Make) -> None:
    trainer, events = make_trainer({"schedule.type": "cyclic"})
    trainer.fit(batches(), progress=False)
    assert ["disturbs prediction" in event.message for event in of(events, Notice)] == [True]


def test_a_finished_trainer_has_nothing_left_to_do(make_trainer: Make) -> None:
    trainer, events = make_trainer({"max_steps": 2})
    trainer.fit(batches(), progress=False)
    weights = trainer.model.weight.detach().clone()
    events.clear()
    assert trainer.fit(batches(), progress=False)["global_step"] == 2
    assert of(events, Progress) == []
    assert torch.equal(trainer.model.weight, weights)


def test_steps_of_ones_own_before_fit_count(make_trainer: Make) -> None:
    trainer, events = make_trainer({"max_steps": 5})
    trainer.step(batches()[0])
    trainer.fit(batches(), progress=False)
    assert [event.step for event in of(events, Progress)] == [2, 3, 4, 5]


# --- what is left on disk ------------------------------------------------------------------------------------------


def test_a_run_folder_of_any_module(make_trainer: Make, tmp_path: Path) -> None:
    trainer, _ = make_trainer({"max_steps": 4})
    summary = trainer.fit(batches(), batches(1), out=tmp_path / "run", progress=False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8")) == summary
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines][:4] == ["RunStarted", "RatesPlanned", "MemoryUsed", "HealthMeasured"]
    state = checkpoint.read(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert torch.equal(state["model"]["weight"], trainer.model.weight)
    assert state["meta"]["config"]["max_steps"] == 4


def test_without_a_folder_nothing_is_written(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_trainer()[0].fit(batches(), batches(1), progress=False)
    assert list(tmp_path.iterdir()) == []


# --- loaders -------------------------------------------------------------------------------------------------------


class Counted:
    """An iterable that says how often it was started."""

    def __init__(self) -> None:
        self.starts = 0

    def __iter__(self) -> Iterator[Any]:
        self.starts += 1
        return iter(batches(3))


def test_a_finite_loader_starts_over(make_trainer: Make) -> None:
    loader = Counted()
    trainer, _ = make_trainer({"max_steps": 8})
    assert trainer.fit(loader, progress=False)["global_step"] == 8
    assert loader.starts == 3


@pytest.mark.parametrize("loader", [[], iter([])])
def test_a_loader_without_batches_is_an_error(loader: Any, make_trainer: Make) -> None:
    with pytest.raises(InputError, match="no batch at all"):
        make_trainer()[0].fit(loader, progress=False)


def test_a_generator_that_ends_too_early_is_an_error(make_trainer: Make) -> None:
    trainer, events = make_trainer({"max_steps": 8})
    with pytest.raises(InputError):
        trainer.fit((batch for batch in batches(3)), progress=False)
    assert trainer.global_step == 3
    assert events[-1].reason == "failed"


class Noisy(Dataset):
    """The same samples with noise from a global generator, as augmentation draws it."""

    def __len__(self) -> int:
        return len(data())

    def __getitem__(self, index: int) -> Any:
        inputs, *rest = data()[index]
        return inputs + torch.randn_like(inputs), *rest


LOADERS: dict[str, Callable[[], Any]] = {
    "list": batches,
    "own loader": lambda: Loader(MappedSamples(data()), 4, seed=3, prefetch=2),
    "own loader of samples that draw": lambda: Loader(MappedSamples(Noisy()), 4, seed=3),
    "own loader with workers": lambda: Loader(MappedSamples(Noisy()), 4, seed=3, workers=1),
    "DataLoader in order": lambda: DataLoader(data(), batch_size=4),
    "DataLoader with a generator": lambda: DataLoader(
        data(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "DataLoader shuffled": lambda: DataLoader(data(), batch_size=4, shuffle=True),
    "uneven DataLoader": lambda: DataLoader(data(18), batch_size=4),
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of fork, from Python 3.12 on
@pytest.mark.parametrize("stop", [2, 5, 8])
@pytest.mark.parametrize("name", LOADERS)
def test_any_loader_is_resumed_exactly(name: str, stop: int, make_trainer: Make, tmp_path: Path) -> None:
    """Five batches an epoch: stopped within the first, at its end, and within the second."""
    straight, events = make_trainer({"max_steps": 12})
    straight.fit(LOADERS[name](), progress=False)
    losses = [event.loss for event in of(events, Progress)]

    first, _ = make_trainer({"max_steps": stop})
    first.fit(LOADERS[name](), out=tmp_path / "run", progress=False)
    torch.rand(3)
    second, events = make_trainer({"max_steps": 12})
    second.fit(LOADERS[name](), out=tmp_path / "run", resume=True, progress=False)
    assert of(events, Resumed)[0].step == of(events, RunStarted)[0].step == stop
    assert [event.loss for event in of(events, Progress)] == losses[stop:]
    assert torch.equal(second.model.weight, straight.model.weight)
    assert second.engine.progress.tokens == straight.engine.progress.tokens


def test_a_loader_that_has_to_be_read_past_says_so(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer({"max_steps": 3})[0].fit(batches(), out=tmp_path / "run", progress=False)
    trainer, events = make_trainer({"max_steps": 5})
    trainer.fit(batches(), out=tmp_path / "run", resume=True, progress=False)
    assert any("reading 3 batches again" in event.message for event in of(events, Notice))


def test_gpt2_on_token_windows(make_model: Make, make_config: Make, make_batch: Make, tmp_path: Path) -> None:
    """Without a loss function the model's own is used."""
    config = make_config({"max_steps": 30, "optimizer.learning_rate": 0.01})
    trainer = HybridTrainer(make_model(), config=config)
    summary = trainer.fit([make_batch(rows=4)], [make_batch(rows=4)], progress=False)
    assert summary["final_val_loss"] < 3.0


# --- going on ------------------------------------------------------------------------------------------------------


def test_resume_without_a_folder_is_an_error(make_trainer: Make) -> None:
    with pytest.raises(InputError, match="resume needs a run folder"):
        make_trainer()[0].fit(batches(), resume=True, progress=False)


def test_resume_in_an_empty_folder_starts_and_says_so(make_trainer: Make, tmp_path: Path) -> None:
    trainer, events = make_trainer({"max_steps": 2})
    assert trainer.fit(batches(), out=tmp_path / "run", resume=True, progress=False)["global_step"] == 2
    assert any("no checkpoint yet: starting at step 0" in event.message for event in of(events, Notice))


def test_a_folder_that_holds_a_run_is_not_written_over(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer({"max_steps": 2})[0].fit(batches(), out=tmp_path / "run", progress=False)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    with pytest.raises(InputError, match="already holds a run"):
        make_trainer({"max_steps": 2})[0].fit(batches(), out=tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_resuming_a_finished_run_trains_no_further(make_trainer: Make, tmp_path: Path) -> None:
    first, _ = make_trainer({"max_steps": 3})
    summary = first.fit(batches(), batches(1), out=tmp_path / "run", progress=False)
    second, events = make_trainer({"max_steps": 3})
    again = second.fit(batches(), batches(1), out=tmp_path / "run", resume=True, progress=False)
    assert of(events, Progress) == of(events, Evaluated) == []
    for name in ("steps", "tokens", "final_val_loss", "final_train_loss", "best_val_loss"):
        assert again[name] == summary[name], name


def test_other_data_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer({"max_steps": 2})[0].fit(batches(), out=tmp_path / "run", progress=False, data_fingerprint="one")
    with pytest.raises(CheckpointError, match="trained on other data"):
        make_trainer({"max_steps": 4})[0].fit(
            batches(), out=tmp_path / "run", resume=True, progress=False, data_fingerprint="two"
        )


def test_changed_settings_are_named_and_in_force(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer({"max_steps": 2})[0].fit(batches(), out=tmp_path / "run", progress=False)
    changes = {
        "max_steps": 4,
        "optimizer.weight_decay": 0.7,
        "optimizer.learning_rate": 0.005,
        "optimizer.beta1": 0.5,
    }
    trainer, events = make_trainer(changes)
    trainer.fit(batches(), out=tmp_path / "run", resume=True, progress=False)
    (said,) = [event for event in of(events, Notice) if "checkpoint was saved" in event.message]
    assert said.level == "info"  # it is what was asked for
    assert said.message == (
        "changed since this checkpoint was saved: max_steps 2 -> 4, optimizer.beta1 0.9 -> 0.5, "
        "optimizer.learning_rate 0.02 -> 0.005, optimizer.weight_decay 0.1 -> 0.7"
    )
    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]
    assert groups[0]["betas"] == (0.5, 0.95)
    assert [event.learning_rate for event in of(events, Progress)] == pytest.approx([0.005, 0.005])
    assert [group["lr"] for group in groups] == pytest.approx([0.005, 0.005])


def test_an_unset_learning_rate_is_named_by_what_it_was(make_trainer: Make, tmp_path: Path) -> None:
    unset = {"max_steps": 2, "optimizer.type": "muon", "optimizer.learning_rate": None}
    make_trainer(unset)[0].fit(batches(), out=tmp_path / "run", progress=False)
    trainer, events = make_trainer(unset | {"optimizer.learning_rate": 0.003})
    trainer.fit(batches(), out=tmp_path / "run", resume=True, progress=False)
    said = [event.message for event in of(events, Notice)]
    assert "changed since this checkpoint was saved: optimizer.learning_rate 0.006 -> 0.003" in said


@pytest.mark.parametrize("settings", [{"hybrid.mode": "off", "health.interval": 0}, {}])
def test_every_summary_has_the_same_keys(make_trainer: Make, settings: dict[str, Any]) -> None:
    summary = make_trainer({"max_steps": 2, **settings})[0].fit(batches(), progress=False)
    for name in ("audit", "exact", "moves", "forecast", "confidence", "predictability", "rollbacks", "health"):
        assert name in summary
    assert (summary["audit"] is None) is ("hybrid.mode" in settings)
    assert (summary["health"] is None) is ("health.interval" in settings)
    other = {"hybrid.mode": "leap"} if settings else {"hybrid.mode": "off"}
    assert make_trainer({"max_steps": 2, **other})[0].fit(batches(), progress=False).keys() == summary.keys()


def test_a_checkpoint_says_what_it_is_made_of(make_trainer: Make, tmp_path: Path) -> None:
    trainer, events = make_trainer({"max_steps": 2, "hybrid.mode": "leap"})
    trainer.fit(batches(), out=tmp_path / "run", progress=False)
    saved = of(events, CheckpointSaved)[-1]
    size = (Path(saved.path) / "model.safetensors").stat().st_size / 2**20
    assert saved.weights_megabytes == pytest.approx(size, abs=0.006)
    assert saved.megabytes >= saved.weights_megabytes + saved.prediction_megabytes - 0.02


def test_an_unchanged_resume_says_nothing_of_settings(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer({"max_steps": 2})[0].fit(batches(), out=tmp_path / "run", progress=False)
    trainer, events = make_trainer({"max_steps": 2})
    trainer.fit(batches(), out=tmp_path / "run", resume=True, progress=False)
    assert of(events, Notice) == []


@pytest.mark.parametrize(("kind", "told"), [("muon", True), ("adamw", False)])
def test_a_run_of_muon_that_goes_on_on_another_cpu_says_that_its_number_format_changed(
    kind: str, told: bool, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_steps": 2, "optimizer.type": kind}
    monkeypatch.setattr(precision, "cpu_has_bf16_products", lambda: True)
    make_trainer(settings)[0].fit(batches(), out=tmp_path / "run", progress=False)
    monkeypatch.setattr(precision, "cpu_has_bf16_products", lambda: False)
    trainer, events = make_trainer(settings)
    trainer.fit(batches(), out=tmp_path / "run", resume=True, progress=False)
    said = [event.message for event in of(events, Notice)]
    expected = (
        "Muon computed in bf16 when this checkpoint was saved and computes in fp32 now (this CPU has no bf16 "
        "instructions): results may differ in the last bits"
    )
    assert said == ([expected] if told else [])


def test_the_log_of_a_resumed_run_stays_valid(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer({"max_steps": 2})[0].fit(batches(), out=tmp_path / "run", progress=False)
    log = tmp_path / "run" / "metrics.jsonl"
    with log.open("a", encoding="utf-8") as file:
        file.write('{"event": "Progress", "st')  # what a crash leaves
    make_trainer({"max_steps": 4})[0].fit(batches(), out=tmp_path / "run", resume=True, progress=False)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if line["event"] == "Progress"] == [1, 2, 3, 4]
    assert sum(line["event"] == "Resumed" for line in lines) == 1


# --- steps that are not finite -------------------------------------------------------------------------------------


def test_a_first_loss_that_is_no_number_is_an_error(make_trainer: Make, tmp_path: Path) -> None:
    trainer, events = make_trainer({"max_steps": 4}, poisoned({0}))
    with pytest.raises(InputError, match=r"the first loss is nan.*nothing can be learned"):
        trainer.fit(batches(), out=tmp_path / "run", progress=False)
    assert events[-1].reason == "failed"


def test_skipped_steps_are_told_and_the_run_goes_on(make_trainer: Make) -> None:
    trainer, events = make_trainer({"max_steps": 9, "log.interval": 3}, poisoned({4}))
    summary = trainer.fit(batches(), progress=False)
    assert (summary["global_step"], summary["skipped_steps"], summary["reason"]) == (9, 1, "finished")
    assert [event.skipped_steps for event in of(events, Progress)] == [0, 1, 1]
    assert all(math.isfinite(event.loss) for event in of(events, Progress))
    assert [event.message for event in of(events, Notice)] == [
        "1 of the last 3 steps were not finite and changed nothing"
    ]


def test_an_interval_of_nothing_but_skipped_steps_is_told_too(make_trainer: Make) -> None:
    trainer, events = make_trainer({"max_steps": 6, "log.interval": 2}, poisoned({2, 3}))
    assert trainer.fit(batches(), progress=False)["skipped_steps"] == 2
    assert [event.message for event in of(events, Notice)] == [
        "2 of the last 2 steps were not finite and changed nothing"
    ]


def test_too_many_skipped_steps_end_the_run_with_a_checkpoint_of_the_last_good_weights(
    make_trainer: Make, tmp_path: Path
) -> None:
    settings = {"max_steps": 50, "guard.max_skipped_steps": 3, "checkpoint.interval": 0}
    good, _ = make_trainer({**settings, "max_steps": 4})
    good.fit(batches(), progress=False)
    trainer, events = make_trainer(settings, poisoned(set(range(4, 99))))
    with pytest.raises(DivergenceError, match=r"3 steps in a row were not finite \(step 7\)"):
        trainer.fit(batches(), out=tmp_path / "run", progress=False)
    assert [event.step for event in of(events, CheckpointSaved)] == [7]
    assert of(events, RunEnded)[0].reason == "failed"
    state = checkpoint.read(tmp_path / "run" / "checkpoints" / "step-00000007")
    assert torch.equal(state["model"]["weight"], good.model.weight)
    assert state["meter"]["skipped_in_a_row"] == 3

    again, events = make_trainer({**settings, "max_steps": 12})
    summary = again.fit(batches(), out=tmp_path / "run", resume=True, progress=False)
    assert (summary["global_step"], summary["skipped_steps"]) == (12, 3)


def test_a_run_that_was_given_up_gets_as_many_skipped_steps_again(make_trainer: Make, tmp_path: Path) -> None:
    settings = {"max_steps": 20, "guard.max_skipped_steps": 3, "log.interval": 1, "checkpoint.interval": 0}
    trainer, _ = make_trainer(settings, poisoned({4, 5, 6}))
    with pytest.raises(DivergenceError):
        trainer.fit(batches(), out=tmp_path / "run", progress=False)
    again, _ = make_trainer(settings, poisoned({0, 1}))
    summary = again.fit(batches(), out=tmp_path / "run", resume=True, progress=False)
    assert (summary["global_step"], summary["skipped_steps"]) == (20, 5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_the_loss_itself_is_no_number_resuming_is_not_advised(precision: str, make_trainer: Make) -> None:
    settings = {"max_steps": 20, "guard.max_skipped_steps": 3, "log.interval": 1, "precision.type": precision}
    trainer, _ = make_trainer(settings, poisoned(set(range(4, 99))))
    with pytest.raises(DivergenceError, match=r"the loss itself is nan .* they are ruined.* start anew") as caught:
        trainer.fit(batches(), progress=False)
    assert ("precision.type = 'fp32'" in str(caught.value)) is (precision != "fp32")


def test_where_only_gradients_overflow_the_run_can_go_on(make_trainer: Make, tmp_path: Path) -> None:
    calls = iter(range(10**6))

    def steep(model: nn.Module, batch: Any) -> torch.Tensor:
        """Finite, with a gradient that is not from the fifth step on."""
        value = F.mse_loss(model(batch[0]), batch[1])
        if next(calls) > 3:
            value.register_hook(lambda gradient: gradient * math.inf)
        return value

    trainer, _ = make_trainer({"max_steps": 20, "guard.max_skipped_steps": 3, "log.interval": 1}, steep)
    with pytest.raises(DivergenceError, match=r"only gradients overflow\. Go on with a lower .*resume=True"):
        trainer.fit(batches(), out=tmp_path / "run", progress=False)


def test_skipped_steps_with_good_ones_between_do_not_end_the_run(make_trainer: Make) -> None:
    bad = {number for number in range(2, 40) if number % 3}
    trainer, _ = make_trainer({"max_steps": 40, "guard.max_skipped_steps": 3}, poisoned(bad))
    assert trainer.fit(batches(), progress=False)["skipped_steps"] == len(bad)


def test_with_the_check_off_a_loss_that_is_no_number_ends_the_run(make_trainer: Make) -> None:
    trainer, _ = make_trainer({"max_steps": 20, "guard.nan_check": False}, poisoned({4}))
    with pytest.raises(DivergenceError, match=r"the loss is NaN .* guard\.nan_check is off"):
        trainer.fit(batches(), progress=False)
    assert not bool(trainer.model.weight.isfinite().any())


def test_fp16_may_overflow_at_first(make_trainer: Make) -> None:
    settings = {"max_steps": 30, "precision.type": "fp16", "precision.loss_scale": 2.0**24}
    trainer, _ = make_trainer(settings)
    summary = trainer.fit(batches(), progress=False)
    assert summary["global_step"] == 30
    assert 0 < summary["skipped_steps"] < 25
    assert float(trainer.engine.precision.scale) < 2.0**24


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "muon"])
def test_every_optimizer_learns_after_overflowing_at_first(kind: str, make_trainer: Make) -> None:
    settings = {"precision.type": "fp16", "precision.loss_scale": 2.0**24, "optimizer.type": kind}
    trainer, _ = make_trainer({"max_steps": 100, **settings})
    before = trainer.evaluate(batches())
    summary = trainer.fit(batches(), batches(), progress=False)
    assert summary["skipped_steps"] > 0
    assert summary["final_val_loss"] < before


# --- listeners and errors ------------------------------------------------------------------------------------------


def test_a_listener_that_raises_is_dropped_and_training_goes_on(make_trainer: Make) -> None:
    trainer, events = make_trainer({"max_steps": 5})
    calls: list[Event] = []

    def tracker(event: Event) -> None:
        calls.append(event)
        if isinstance(event, Progress):
            raise ConnectionError("the tracker is down")

    trainer.bus.subscribe(tracker)
    assert trainer.fit(batches(), progress=False)["global_step"] == 5
    assert len(of(calls, Progress)) == 1
    (notice,) = of(events, Notice)
    assert "tracker stopped listening after ConnectionError: the tracker is down" in notice.message


def test_listeners_of_a_run_leave_with_it(make_trainer: Make, tmp_path: Path) -> None:
    trainer, _ = make_trainer({"max_steps": 2})
    before = len(trainer.bus._listeners)
    trainer.fit(batches(), out=tmp_path / "run")
    assert len(trainer.bus._listeners) == before


def test_an_error_in_the_loader_ends_the_run_as_failed(make_trainer: Make) -> None:
    def broken() -> Iterator[Any]:
        yield batches()[0]
        raise OSError("the file is gone")

    trainer, events = make_trainer({"max_steps": 5})
    with pytest.raises(OSError, match="the file is gone"):
        trainer.fit(broken(), progress=False)
    assert (events[-1].step, events[-1].reason) == (1, "failed")


def test_overfitting_is_advised_against(make_config: Any, make_model: Any, make_batch: Any) -> None:
    """Held-out loss up, training loss down, evaluation after evaluation: one batch learned by heart."""
    config = make_config(
        {"max_steps": 60, "optimizer.learning_rate": 1e-2, "evaluation.interval": 5, "log.interval": 5}
    )
    trainer = HybridTrainer(make_model(), config=config)
    events: list[Any] = []
    trainer.bus.subscribe(events.append)
    trainer.fit([make_batch(seed=1)], [make_batch(seed=2)], progress=False)
    found = [event for event in events if isinstance(event, HealthFound)]
    assert "overfitting" in [event.ailment for event in found]


def test_the_total_time_counts_start_up_and_every_part_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("foretrain.loop.run.time", clock)
    monkeypatch.setattr("foretrain.loop.saver.time", clock)
    monkeypatch.setattr("foretrain.persist.folder.time", clock)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        now[0] += 10.0
        value: torch.Tensor = model(batch).square().mean()
        return value

    def total(steps: int, resume: bool) -> float:
        config = from_mapping({"device": "cpu", "max_steps": steps})
        with RunFolder(tmp_path / "run", resume) as folder:
            now[0] += 3.0  # data are read, a model is made
            trainer = HybridTrainer(nn.Linear(2, 2), loss_fn=loss, config=config)
            summary = trainer.fit([torch.ones(3, 2)] * 4, out=folder, resume=resume, progress=False)
        seconds: float = summary["total_seconds"]
        return seconds

    assert total(2, resume=False) == 23.0
    now[0] += 1000.0  # nobody was there
    assert total(4, resume=True) == 46.0
