"""`fit` for a model of one's own: epochs, metrics, callbacks, a true record, and an interruption nobody misses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from foretrain import Config, ConfigError, HybridTrainer, InputError, load_weights
from foretrain.config import from_mapping
from foretrain.events import Evaluated, Event, Notice, Progress, RunEnded, RunStarted
from foretrain.show.pages.report import write_report

OFF = {"hybrid.mode": "off", "device": "cpu", "health.interval": 0, "log.report": False}


def points(rows: int = 40) -> TensorDataset:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def loader(rows: int = 40, size: int = 8) -> DataLoader[Any]:
    return DataLoader(points(rows), batch_size=size)


def made(
    changes: dict[str, Any] | None = None, scheduler: Callable[[Any], Any] | None = None, lr: float = 0.1
) -> tuple[HybridTrainer, list[Event]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = from_mapping(OFF | (changes or {}))
    trainer = HybridTrainer(model, optimizer, nn.CrossEntropyLoss(), config, scheduler=scheduler)
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    return trainer, events


def of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


# --- epochs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "steps"), [(3, 15), (0.5, 3), (0.01, 1)])
def test_epochs_are_passes_over_the_loader(epochs: float, steps: int) -> None:
    trainer, events = made()
    assert trainer.fit(loader(), epochs=epochs, progress=False)["global_step"] == steps
    assert of(events, RunStarted)[0].max_steps == steps
    in_config, _ = made({"epochs": epochs})
    assert in_config.fit(loader(), progress=False)["global_step"] == steps


def test_a_schedule_follows_the_epochs() -> None:
    trainer, events = made({"schedule.type": "cosine", "schedule.warmup_steps": 0, "log.interval": 1})
    trainer.fit(loader(), epochs=2, progress=False)
    rates = [event.learning_rate for event in of(events, Progress)]
    assert rates[0] == 0.1
    assert rates[5] == pytest.approx(0.05)  # half way
    assert len(rates) == 10


def test_epochs_need_a_length_and_exclude_max_steps() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(points())

    with pytest.raises(InputError, match=r"epochs needs a loader that says how many batches it has, by len\(loader\)"):
        made()[0].fit(DataLoader(Stream(), batch_size=8), epochs=2, progress=False)
    with pytest.raises(ConfigError, match="epochs = 2 and max_steps = 5 of the Config both say how long the run is"):
        made({"max_steps": 5})[0].fit(loader(), epochs=2, progress=False)
    with pytest.raises(ConfigError, match=r"epochs is for fit\(\), which knows the data; in a loop of your own"):
        made({"epochs": 2})[0].step(next(iter(loader())))


def test_a_second_fit_says_that_nothing_is_left() -> None:
    trainer, events = made({"max_steps": 3})
    trainer.fit(loader(), progress=False)
    trainer.fit(loader(), progress=False)
    assert [event.message for event in of(events, Notice)] == ["nothing is left to do: 3 of 3 steps are done"]


def test_a_generator_is_said_to_be_read_only_once() -> None:
    with pytest.raises(InputError, match=r"gave 5 batches and none when it was read again \(a generator or iterator"):
        made({"max_steps": 9})[0].fit((batch for batch in loader()), progress=False)


# --- metrics ---------------------------------------------------------------------------------------------------------


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def hits(model: nn.Module, batch: Any) -> Tensor:
    """One value per row."""
    return model(batch[0]).argmax(1) == batch[1]


def test_metrics_are_means_over_all_held_out_rows(tmp_path: Path) -> None:
    trainer, events = made({"max_steps": 4, "evaluation.interval": 2})
    held_out = loader(10, 8)  # a batch of 8 and one of 2
    metrics = {"accuracy": accuracy, "hits": hits, "one": lambda model, batch: 1}
    summary = trainer.fit(loader(), held_out, metrics=metrics, out=tmp_path / "run", progress=False)
    x, y = points(10).tensors
    expected = (trainer.model(x).argmax(1) == y).float().mean().item()
    assert summary["metrics"] == {"accuracy": pytest.approx(expected), "hits": pytest.approx(expected), "one": 1.0}
    assert [event.metrics["one"] for event in of(events, Evaluated)] == [1.0, 1.0]
    assert trainer.evaluate(held_out, metrics) == {"loss": summary["final_val_loss"], **summary["metrics"]}
    assert trainer.model.training
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["metrics"] for line in told if line["event"] == "Evaluated"][-1] == summary["metrics"]


def test_metrics_survive_a_resumption(tmp_path: Path) -> None:
    first, _ = made({"max_steps": 2})
    metrics, out = {"accuracy": accuracy}, tmp_path / "run"
    summary = first.fit(loader(), loader(8), metrics=metrics, out=out, progress=False)
    again, _ = made({"max_steps": 2})
    done = again.fit(loader(), loader(8), metrics=metrics, out=out, resume=True, progress=False)
    assert done["metrics"] == summary["metrics"] != {}


def test_what_is_no_metric_is_refused() -> None:
    for wrong in ([accuracy], {"accuracy": 0.5}, {1: accuracy}):
        with pytest.raises(InputError, match=r"metrics is a dict of names and functions of \(model, batch\) or"):
            made()[0].fit(loader(), loader(), metrics=wrong, progress=False)  # type: ignore[arg-type]


# --- schedulers ------------------------------------------------------------------------------------------------------


def test_a_scheduler_is_saved_and_goes_on_with_the_run(tmp_path: Path) -> None:
    def cycle(optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)

    changes = {"max_steps": 10, "log.interval": 1, "checkpoint.interval": 4}
    straight, whole = made(changes, cycle)
    straight.fit(loader(), progress=False)
    first, _ = made(changes, cycle)
    first.bus.subscribe(lambda event: first.stop() if isinstance(event, Progress) and event.step == 6 else None)
    assert first.fit(loader(), out=tmp_path / "run", progress=False)["reason"] == "stopped early"
    second, rest = made(changes, cycle)
    second.fit(loader(), out=tmp_path / "run", resume=True, progress=False)
    rates = {event.step: event.learning_rate for event in of(whole, Progress)}
    assert {event.step: event.learning_rate for event in of(rest, Progress)} == {n: rates[n] for n in range(7, 11)}
    assert torch.equal(straight.model.weight, second.model.weight)  # type: ignore[arg-type]


def test_a_scheduler_that_watches_a_loss_needs_one_and_gets_it() -> None:
    def watching(optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)

    with pytest.raises(ConfigError, match="ReduceLROnPlateau follows the held-out loss: give held-out batches to fit"):
        made({"max_steps": 4}, watching)[0].fit(loader(), progress=False)
    trainer, events = made({"max_steps": 4, "evaluation.interval": 1, "log.interval": 1}, watching)
    trainer.fit(loader(), loader(8), progress=False)
    assert [event.learning_rate for event in of(events, Progress)] == pytest.approx([0.1, 1e-2, 1e-3, 1e-4])


def test_a_scheduler_that_is_too_short_is_refused_at_once(tmp_path: Path) -> None:
    trainer, _ = made({}, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10))
    with pytest.raises(
        ConfigError, match=r"OneCycleLR was made for 10 steps, and the run has 15: make it with total_steps"
    ):
        trainer.fit(loader(), epochs=3, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_hear_the_run_and_no_other() -> None:
    trainer, _ = made({"max_steps": 2})
    heard: list[Event] = []
    trainer.fit(loader(), callbacks=[heard.append], progress=False)
    assert type(heard[-1]) is RunEnded
    count = len(heard)
    trainer.bus.emit(Notice("later"))
    assert len(heard) == count


def test_a_callback_that_fails_is_told_of_even_in_silence() -> None:
    def broken(event: Event) -> None:
        raise ValueError("no")

    with pytest.warns(UserWarning, match=r"the callback .*broken failed at RunStarted and is called no more \(Val"):
        summary = made({"max_steps": 2})[0].fit(loader(), callbacks=[broken], progress=False)
    assert summary["reason"] == "finished"


def test_a_callback_can_end_the_run(tmp_path: Path) -> None:
    trainer, _ = made({"max_steps": 50, "log.interval": 1})

    def enough(event: Event) -> None:
        if isinstance(event, Progress) and event.step == 3:
            trainer.stop()

    summary = trainer.fit(loader(), callbacks=[enough], out=tmp_path / "run", progress=False)
    assert (summary["reason"], summary["global_step"]) == ("stopped early", 3)
    assert (tmp_path / "run" / "model.safetensors").is_file()


# --- run folders -----------------------------------------------------------------------------------------------------


def test_a_folder_that_is_taken_is_refused_in_words_of_python(tmp_path: Path) -> None:
    for _ in range(2):  # as a cell of a notebook is run again
        made({"max_steps": 2})[0].fit(loader(), out=tmp_path / "run", overwrite=True, progress=False)
    with pytest.raises(InputError, match=r"^out='.*run': it already holds a run; go on with resume=True, replace it"):
        made({"max_steps": 2})[0].fit(loader(), out=tmp_path / "run", progress=False)


# --- the record ------------------------------------------------------------------------------------------------------


def test_the_record_is_what_happened(tmp_path: Path) -> None:
    changes = {"max_steps": 4, "optimizer.gradient_clip_norm": 2.0, "log.report": True}
    trainer, events = made(changes, lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5))
    summary = trainer.fit(loader(), out=tmp_path / "run", progress=False, unit="points")
    start, settings = of(events, RunStarted)[0], summary["config"]
    assert (start.unit, start.optimizer, start.title) == ("points", "torch.optim.SGD, lr 0.1, ExponentialLR", "Linear")
    assert (summary["tokens"], summary["unit"]) == (4 * 8, "points")
    assert settings["model"] == {"type": "torch.nn.Linear"}
    used = {"type": "torch.optim.SGD", "lr": 0.1, "momentum": 0, "gradient_clip_norm": 2.0}
    assert settings["optimizer"].items() >= used.items()
    assert settings["schedule"] == {"type": "torch.optim.lr_scheduler.ExponentialLR"}
    assert (settings["batch_size"], settings["hybrid"]) == (8, {"mode": "off"})
    assert not settings.keys() & {"data", "lora", "predictor", "audit", "correction"}
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "points per second" in page
    for false in ("muon", "gpt2", "tokens per second"):
        assert false not in page, false
    assert write_report([tmp_path / "run"], tmp_path / "again.html")


def test_without_a_schedule_none_is_recorded() -> None:
    summary = made({"max_steps": 2})[0].fit(loader(), progress=False)
    assert "schedule" not in summary["config"]
    assert summary["config"]["optimizer"].get("gradient_clip_norm") is None
    assert summary["unit"] == "samples"


def test_the_console_counts_in_samples(capsys: pytest.CaptureFixture[str]) -> None:
    made({"max_steps": 2, "log.interval": 1})[0].fit(loader(), loader(8), metrics={"accuracy": accuracy})
    shown = capsys.readouterr().err
    assert "samples/s" in shown
    assert "torch.optim.SGD, lr 0.1" in shown
    assert "accuracy" in shown
    assert "tok" not in shown


def test_a_metric_that_fails_does_so_before_anything_is_trained() -> None:
    trainer, events = made({"max_steps": 4})
    before = trainer.model.weight.detach().clone()
    with pytest.raises(InputError, match=r"the metric 'mae' failed .*It is called with \(model, batch\); name its"):
        trainer.fit(loader(), loader(8), metrics={"mae": lambda one, other: (one - other).abs()}, progress=False)
    assert torch.equal(trainer.model.weight, before)
    assert not of(events, Progress)


def test_held_out_data_leaves_the_order_of_a_shuffled_loader_alone() -> None:
    def train(held_out: DataLoader[Any] | None) -> Tensor:
        trainer, _ = made({"max_steps": 6, "seed": 5})
        trainer.fit(DataLoader(loader().dataset, batch_size=8, shuffle=True), held_out, progress=False)
        return trainer.model.weight.detach()

    assert torch.equal(train(None), train(loader(8)))


def test_metrics_need_held_out_data_and_one_folder_has_one_purpose(tmp_path: Path) -> None:
    trainer, _ = made({"max_steps": 2})
    with pytest.raises(InputError, match="metrics are measured on held-out batches"):
        trainer.fit(loader(), metrics={"accuracy": accuracy}, progress=False)
    with pytest.raises(InputError, match="choose one"):
        trainer.fit(loader(), out=tmp_path, resume=True, overwrite=True, progress=False)


def test_arguments_of_metrics_are_known_by_their_names() -> None:
    trainer, _ = made({"max_steps": 2})
    right = {
        "one": lambda out, expected: (out.argmax(1) == expected).float(),
        "two": lambda logits, tgt: (logits.argmax(1) == tgt).float(),
        "three": lambda net, batch: (net(batch[0]).argmax(1) == batch[1]).float(),
    }
    metrics = trainer.fit(loader(), loader(8), metrics=right, progress=False)["metrics"]
    assert metrics["one"] == metrics["two"] == metrics["three"]


def test_advice_names_what_has_an_effect_here() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    decaying = torch.optim.AdamW(model.parameters())
    trainer = HybridTrainer(model, decaying, nn.CrossEntropyLoss(), from_mapping(OFF))
    finding = trainer.checkup.health.advice.overfitting(10, 0.5, 3)
    assert dict(finding.change) == {"weight_decay of your AdamW": 0.1}
    trainer = HybridTrainer(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), from_mapping(OFF))
    advice = trainer.checkup.health.advice
    now = trainer.checkup.health.effective(1e-3, 0.0, 20)
    finding = advice.overfitting(10, 0.5, 3)
    assert not finding.change  # weight decay would end quasi-Newton leaps
    assert "dropout in your model" in finding.meaning
    assert dict(advice.divergence(10, 5.0, 2.0, 1.0, now).change) == {"lr of your Adam": 0.0005}
    assert dict(advice.vanishing(10, "layer", 0.0, 1.0, 0).change) == {"eps of your Adam": pytest.approx(1e-12)}
    assert dict(advice.explosion(10, 90.0, 1.0, 4, now).change) == {"optimizer.gradient_clip_norm": 1.0}


# --- interruptions ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, torch
from torch import nn
from foretrain import Config, HybridTrainer
trainer = HybridTrainer(nn.Linear(2, 2), torch.optim.Adam, nn.MSELoss(), Config(device="cpu", max_steps=10**6))

def interrupt(event):
    if type(event).__name__ == "Progress":
        os.kill(os.getpid(), signal.SIGINT)

trainer.fit([(torch.ones(4, 2), torch.ones(4, 2))], out=sys.argv[1], callbacks=[interrupt], progress=False)
print("saved as if it were finished")
"""


def test_a_script_ends_at_ctrl_c_after_the_run_was_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in the background
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=heard)
    assert ended.returncode in (130, -signal.SIGINT)
    assert "as if it were finished" not in ended.stdout
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("KeyboardInterrupt: SIGINT: stopped after step 10; go on with fit(..., out=")
    assert load_weights(nn.Linear(2, 2), tmp_path / "run").weight.isfinite().all()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["reason"] == "interrupted"


def interrupting(number: signal.Signals) -> Callable[[Event], None]:
    return lambda event: os.kill(os.getpid(), number) if isinstance(event, Progress) else None


def test_other_signals_end_the_program_as_they_always_do(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = made({"max_steps": 30})
    with pytest.raises(SystemExit) as ended:
        trainer.fit(loader(), callbacks=[interrupting(signal.SIGTERM)], progress=False)
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == (
        "SIGTERM: stopped after step 10; nothing is saved without out=..., but the model has its weights\n"
    )


def test_the_summary_may_be_wanted_instead() -> None:
    trainer, _ = made({"max_steps": 30})
    with pytest.warns(UserWarning, match="SIGINT: stopped after step 10; nothing is saved without out="):
        summary = trainer.fit(loader(), callbacks=[interrupting(signal.SIGINT)], progress=False, on_interrupt="return")
    assert (summary["reason"], summary["signal"]) == ("interrupted", "SIGINT")
    with pytest.raises(InputError, match="on_interrupt = 'stop': it is 'raise' or 'return'"):
        trainer.fit(loader(), on_interrupt="stop")  # type: ignore[arg-type]


# --- configurations in Python ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"learning_rate": 0.1}, "unknown setting learning_rate; did you mean optimizer={'learning_rate': 0.1}?"),
        ({"max_step": 5}, "unknown setting max_step; did you mean max_steps=5?"),
        ({"max_steps": 0}, "max_steps = 0: too small; allowed: integer ≥ 1"),
        ({"hybrid": "off"}, "hybrid = 'off': settings are wanted, such as hybrid={'mode': ...}"),
        ({"epochs": 2, "max_steps": 3}, "epochs = 2 and max_steps = 3 both say how long the run is; keep one"),
        (
            {"optimizer": {"type": "lion"}},
            "optimizer.type = 'lion': there is no such value; allowed: \"adamw\" |",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_sentence(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(**settings)
    assert str(refused.value).startswith(f"Config: {text}")
    assert "\n" not in str(refused.value)
