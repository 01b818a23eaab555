"""Code of the user's own can neither end nor harm a run: every hook does every misdeed, and the weights are those of
the plain loop."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.waiting import HANGS
from tests.worlds import Net, Regression, same_weights
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import ConfigError, InputError
from foretrain.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    HealthMeasured,
    Moved,
    Notice,
    OwnCodeFailed,
    Progress,
    Recovered,
    RunEnded,
    RunStarted,
)
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
from foretrain.persist.checkpoint import CheckpointStore, verify

from .conftest import wait_until

STEPS = 20
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_steps": STEPS,
    "hybrid.warmup_steps": 15,
    "hybrid.full_steps": 5,
    "hybrid.window_steps": 5,
    "hybrid.confidence_threshold": 0.99999,  # everything is forecast and scored, nothing is tried
    "audit.time_budget": 1.0,
    "audit.steps": 2,
    "evaluation.interval": 10,
    "checkpoint.interval": 10,
    "checkpoint.keep_best": False,
    "log.interval": 5,
    "log.report": False,
    "memory.timeline": False,
}
DATA = Regression(rows=8)
HELD_OUT = [DATA(1000 + position) for position in range(2)]


class Ordinary(Predictor):
    """What a user may write: it repeats the last window."""

    name = "ordinary"

    def __init__(self) -> None:
        self.windows = 0

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        coefficients = np.zeros((len(horizons), *situation.gram.shape[:2]))
        coefficients[:, :, 1] = np.asarray(horizons)[:, None] / situation.window
        flat = np.full(len(horizons), situation.loss)
        return Forecast(tuple(horizons), coefficients, flat, np.zeros(len(horizons)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        self.windows += 1

    def reset(self) -> None:
        self.windows = 0

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self.windows, "memory": torch.full((2,), float(self.windows))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows = int(state["windows"])


class Loader:
    """The same batches every time. With `most` it breaks after so many."""

    def __init__(self, most: int = 10**9, error: type[BaseException] = OSError) -> None:
        self.most, self.error = most, error

    def __iter__(self) -> Iterator[Any]:
        for position in range(STEPS + 1):
            random.random()  # noqa: S311 - a loader may draw
            if position == self.most:
                torch.rand(3)
                raise self.error("the disk is gone")
            yield DATA(position)


def made(predictor: Predictor | None = None, model: nn.Module | None = None, **changes: Any) -> HybridTrainer:
    settings = {**SETTINGS, **{name.replace("__", "."): value for name, value in changes.items()}}
    return HybridTrainer(model or Net(dropout=0.2), config=from_mapping(settings), predictor=predictor)


def fitted(trainer: HybridTrainer, out: Path | None = None, most: int = 10**9, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer.fit(Loader(most), HELD_OUT, out=out, progress=False, **options)


@functools.cache
def plain() -> HybridTrainer:
    """The loop without prediction, metrics and callbacks."""
    trainer = made(hybrid__mode="off")
    fitted(trainer)
    return trainer


def same_end(trainer: HybridTrainer) -> bool:
    """The weights and the random states of the plain loop."""
    after = trainer.state_dict()["random"]
    before = plain().end_state  # type: ignore[attr-defined]
    same = torch.equal(after["torch"], before["torch"]) and torch.equal(after["python"][1], before["python"][1])
    return same and torch.equal(after["numpy"][1], before["numpy"][1]) and same_weights(trainer.model, plain().model)


@pytest.fixture(autouse=True, scope="module")
def end_of_the_plain_loop() -> None:
    plain().end_state = plain().state_dict()["random"]  # type: ignore[attr-defined]


def heard(trainer: HybridTrainer) -> list[Event]:
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    return events


def actions(events: list[Event]) -> list[str]:
    return [event.action for event in events if isinstance(event, Recovered)]


# --- what own code may do wrong --------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even that")


class Foreign(BaseException):
    """Neither an error nor an order to end."""


def raises(kind: type[BaseException]) -> Callable[..., Any]:
    def deed(*_: Any) -> Any:
        raise kind("boom")

    return deed


def recurses(*_: Any) -> Any:
    return recurses()


def draws(*_: Any) -> None:
    torch.rand(5)
    torch.manual_seed(3)
    random.seed(4)
    np.random.rand(3)  # noqa: NPY002


def switches(*_: Any) -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    np.seterr(all="raise")


def writes(*arguments: Any) -> None:
    """Into every array and tensor that it can reach."""
    for argument in arguments:
        if isinstance(argument, (np.ndarray, Tensor)):
            argument[...] = 7.0
        elif isinstance(argument, (list, tuple)):
            writes(*argument)
        elif isinstance(argument, (Situation, Followed)):
            writes(*(getattr(argument, name) for name in argument.__slots__))


RAISED = {
    "an error": raises(ValueError),
    "no error": raises(Foreign),
    "an error that cannot be printed": raises(Unprintable),
    "an end of iteration": raises(StopIteration),
    "out of memory": raises(MemoryError),
    "endless recursion": recurses,
}
BORNE = {"random numbers": draws, "switches": switches, "arguments written": writes}


class Hooked(Ordinary):
    """Does something in one of its methods, before or after what it should do."""

    def __init__(self, hook: str, deed: Callable[..., Any], change: Callable[[Any], Any] | None = None) -> None:
        self.hook, self.deed, self.change = hook, deed, change
        super().__init__()

    def _do(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        if name != self.hook:
            return method(*arguments)
        if self.change is not None:
            return self.change(method(*arguments))
        result = method(*arguments)
        self.deed(*arguments)
        return result

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        return self._do("forecast", super().forecast, situation, horizons)

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        self._do("observe", super().observe, situation, followed)

    def reset(self) -> None:
        self._do("reset", super().reset)

    def state_dict(self) -> dict[str, Any]:
        return self._do("state_dict", super().state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._do("load_state_dict", super().load_state_dict, state)


def ends_as_plain(predictor: Callable[[], Predictor], out: Path | None = None) -> tuple[list[Event], HybridTrainer]:
    """Whole, and with a folder broken off and resumed, the run ends with the weights of the plain loop; what the whole
    one told."""
    whole = made(predictor())
    events = heard(whole)
    summary = fitted(whole, out and out / "whole")
    assert (summary["reason"], summary["global_step"], summary["backward_passes"]) == ("finished", STEPS, STEPS)
    assert same_end(whole)
    if out is None:
        return events, whole
    with pytest.raises(OSError, match="the disk is gone"):
        fitted(made(predictor()), out / "broken", most=13)
    resumed = made(predictor())
    assert fitted(resumed, out / "broken", resume=True)["reason"] == "finished"
    assert same_end(resumed)
    for name in ("whole", "broken"):
        verify(out / name / "checkpoints" / f"step-{STEPS:08d}")
    return events, whole


@pytest.mark.parametrize("hook", ["observe", "forecast", "state_dict"])
@pytest.mark.parametrize("deed", RAISED)
def test_a_predictor_that_raises_starts_anew_and_is_then_off(hook: str, deed: str) -> None:
    events, trainer = ends_as_plain(lambda: Hooked(hook, RAISED[deed]))
    assert actions(events) == ["reset_predictor", "prediction_off"]
    assert trainer.summary()["recoveries"] == {"reset_predictor": 1, "prediction_off": 1}
    failures = [event for event in events if isinstance(event, OwnCodeFailed)]
    assert [event.where for event in failures] == [f"Hooked.{hook}()"] * 2
    assert all(event.traceback.startswith("Traceback") and len(event.error) < 400 for event in failures)


@pytest.mark.parametrize("hook", ["observe", "forecast", "state_dict"])
def test_so_does_a_run_that_is_resumed(hook: str, tmp_path: Path) -> None:
    ends_as_plain(lambda: Hooked(hook, raises(ValueError)), tmp_path)
    told = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    failures = [line["traceback"] for line in told if line["event"] == "OwnCodeFailed"]
    assert len(failures) == 2
    assert all('raise kind("boom")' in traceback for traceback in failures)
    recovered = [line["text"] for line in told if line["event"] == "Recovered"]
    assert recovered[0].startswith(f"the predictor starts anew: Hooked.{hook}() failed (")
    assert recovered[1].startswith("nothing is predicted any more in this run, full steps go on: Hooked.")


def test_one_failure_is_forgiven(tmp_path: Path) -> None:
    class Once(Ordinary):
        def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
            if situation.step == 10:
                raise ValueError("boom")
            return super().forecast(situation, horizons)

    events, trainer = ends_as_plain(Once, tmp_path)
    assert actions(events) == ["reset_predictor"]
    assert trainer.observer.predictor.windows == STEPS // 5 - 2  # type: ignore[attr-defined]
    assert trainer.observer.forecast is not None


def test_a_mended_predictor_under_another_name_is_tried_again(tmp_path: Path) -> None:
    class Mended(Ordinary):
        name = "mended"

    for predictor, off in ((Hooked("observe", raises(ValueError)), True), (Ordinary(), True), (Mended(), False)):
        trainer = made(predictor)
        if off:
            with pytest.raises(OSError, match="the disk is gone"):
                fitted(trainer, tmp_path, most=13, resume=tmp_path.joinpath("checkpoints").exists())
        else:
            fitted(trainer, tmp_path, resume=True)
        assert trainer.policy is not None
        assert trainer.policy.off is off
    assert trainer.observer.predictor.windows == 1  # type: ignore[attr-defined]
    assert same_end(trainer)


def test_a_predictor_that_cannot_start_anew_is_off_at_once(tmp_path: Path) -> None:
    class Stubborn(Hooked):
        def reset(self) -> None:
            raise OSError("no")

    events, trainer = ends_as_plain(lambda: Stubborn("observe", raises(ValueError)), tmp_path)
    assert actions(events) == ["reset_predictor", "prediction_off"]
    assert trainer.policy is not None
    assert trainer.policy.off


@pytest.mark.parametrize("deed", RAISED)
def test_a_state_that_cannot_be_loaded_costs_what_was_learned(deed: str, tmp_path: Path) -> None:
    events, _ = ends_as_plain(lambda: Hooked("load_state_dict", RAISED[deed]), tmp_path)
    assert actions(events) == []
    told = (tmp_path / "broken" / "metrics.jsonl").read_text()
    assert told.count('"action": "reset_predictor"') == 1
    assert "Hooked.load_state_dict() failed" in told


@pytest.mark.parametrize("hook", ["observe", "forecast", "state_dict", "load_state_dict", "reset"])
@pytest.mark.parametrize("deed", BORNE)
def test_what_a_predictor_does_to_others_things_has_no_effect(hook: str, deed: str, tmp_path: Path) -> None:
    resumed = hook == "load_state_dict"
    events, trainer = ends_as_plain(lambda: Hooked(hook, BORNE[deed]), tmp_path if resumed else None)
    assert actions(events) == []
    assert trainer.observer.predictor.windows == STEPS // 5  # type: ignore[attr-defined]


def coefficients(change: Callable[[Any], Any]) -> Callable[[Forecast], Forecast]:
    return lambda forecast: replace(forecast, coefficients=change(forecast.coefficients))


class GrudgingArray:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ValueError("no")


NO_FORECASTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda given: None, "must return a foretrain.Forecast, and returned None"),
    "a text": (lambda given: "up", "returned an object of type str"),
    "a tuple": (lambda given: (1, 2), "returned an object of type tuple"),
    "one group too many": (coefficients(lambda a: np.pad(a, ((0, 0), (0, 1), (0, 0)))), "[horizons, G, R] = [5, 6, 4]"),
    "one number": (coefficients(lambda a: 1.0), "and has the shape []"),
    "texts": (coefficients(lambda a: a.astype(str)), "must be an array of numbers"),
    "complex numbers": (coefficients(lambda a: a + 1j), "of complex128"),
    "objects": (coefficients(lambda a: a.astype(object)), "of object"),
    "a tensor that learns": (coefficients(lambda a: torch.ones(a.shape, requires_grad=True)), "of type Tensor"),
    "no array": (coefficients(lambda a: GrudgingArray()), "of type GrudgingArray"),
    "a loss too few": (lambda given: replace(given, loss=given.loss[1:]), "Forecast.loss must be an array"),
    "no deviation": (lambda given: replace(given, loss_deviation=None), "Forecast.loss_deviation must be"),
    "horizons as texts": (lambda given: replace(given, horizons=("a",)), "Forecast.horizons must be whole steps"),
    "horizons unsorted": (lambda given: replace(given, horizons=given.horizons[::-1]), "ascending"),
    "no horizon": (lambda given: replace(given, horizons=()), "Forecast.horizons must be"),
    "horizons as a number": (lambda given: replace(given, horizons=5), "Forecast.horizons must be"),
    "disagreement as text": (lambda given: replace(given, disagreement="much"), "Forecast.disagreement must be"),
}


@pytest.mark.parametrize("kind", NO_FORECASTS)
def test_what_is_no_forecast_is_named(kind: str) -> None:
    change, words = NO_FORECASTS[kind]
    events, _ = ends_as_plain(lambda: Hooked("forecast", draws, change))
    assert actions(events) == ["reset_predictor", "prediction_off"]
    failure = next(event for event in events if isinstance(event, OwnCodeFailed))
    assert words in failure.error


ODD_FORECASTS = {
    "not a number": coefficients(lambda a: a * np.nan),
    "infinite": coefficients(lambda a: a + np.inf),
    "huge": coefficients(lambda a: a * 1e308),
    "float32": coefficients(lambda a: a.astype(np.float32)),
    "whole numbers": coefficients(lambda a: a.astype(np.int64)),
    "a tensor of another format": coefficients(lambda a: torch.from_numpy(a).half()),
    "a list": coefficients(lambda a: a.tolist()),
    "losses that are no numbers": lambda given: replace(given, loss=given.loss * np.nan, disagreement=np.nan),
}


@pytest.mark.parametrize("kind", ODD_FORECASTS)
def test_odd_forecasts_are_borne(kind: str) -> None:
    events, _ = ends_as_plain(lambda: Hooked("forecast", draws, ODD_FORECASTS[kind]))
    assert [event for event in events if isinstance(event, OwnCodeFailed)] == []


def nested(depth: int) -> dict[str, Any]:
    return {"deeper": nested(depth - 1)} if depth else {}


def circle() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["self"] = state
    return state


NO_STATES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda given: None, "state_dict() must return a dict, and returned None"),
    "a list": (lambda given: [1], "returned an object of type list"),
    "a lock": (lambda given: {"lock": object()}, "not object"),
    "an array": (lambda given: {"array": np.zeros(3)}, "not ndarray"),
    "a function": (lambda given: {"function": draws}, "not function"),
    "itself": (lambda given: circle(), "RecursionError"),
    "far too deep": (lambda given: nested(70), "nested more than 50 deep"),
    "much text": (lambda given: {"text": "a" * (9 * 2**20)}, "9 MB that are not tensors"),
    "a number too long": (lambda given: {"number": 10**5000}, "ValueError"),
    "sparse tensor": (lambda given: {"s": torch.zeros(2, 2).to_sparse()}, "torch.sparse_coo"),
    "a tensor without numbers": (lambda given: {"m": torch.zeros(2, device="meta")}, "on meta"),
}


@pytest.mark.parametrize("kind", NO_STATES)
def test_a_state_that_no_checkpoint_can_hold_costs_the_predictor_and_no_save(kind: str, tmp_path: Path) -> None:
    change, words = NO_STATES[kind]
    trainer = made(Hooked("state_dict", draws, change))
    events = heard(trainer)
    fitted(trainer, tmp_path / "run")
    assert same_end(trainer)
    assert actions(events) == ["reset_predictor", "prediction_off"]
    assert words in next(event for event in events if isinstance(event, OwnCodeFailed)).error
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert saved == [10, 20]


def test_a_state_that_grows_is_saved_as_it_is(tmp_path: Path) -> None:
    class Growing(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []

        def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
            super().observe(situation, followed)
            self.kept.append(torch.zeros(1000))

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "kept": self.kept}

    events, _ = ends_as_plain(Growing, tmp_path)
    assert actions(events) == []


def test_a_state_is_a_copy_of_what_the_predictor_keeps() -> None:
    trainer = made(Ordinary())
    mine = torch.zeros(2)
    trainer.observer.predictor.state_dict = lambda: {"windows": 0, "mine": mine}  # type: ignore[method-assign]
    state = trainer.state_dict()
    mine.fill_(5)
    assert state["hybrid"]["predictor"]["state"]["mine"].tolist() == [0, 0]


def test_the_predictor_of_the_page_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "predictors" / "own.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)  # noqa: S102
    events, trainer = ends_as_plain(names["Repeat"])
    assert actions(events) == []
    assert trainer.summary()["forecast"]["5"]["made"] > 2


def test_what_is_no_predictor_is_refused_before_the_run() -> None:
    class Nameless(Ordinary):
        name = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"predictor is the class Ordinary; give an object of it: Ordinary\(\)"):
        made(Ordinary)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"predictor is of type dict; give an object of a class that implements fore"):
        made({"forecast": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the predictor Nameless has no name; give its class one"):
        made(Nameless())


# --- metrics ---------------------------------------------------------------------------------------------------------


def error(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).abs().mean()


class Late:
    """A metric that is in order before anything is trained, and then does something."""

    def __init__(self, deed: Callable[..., Any]) -> None:
        self.calls, self.deed = 0, deed

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        value = error(model, batch)
        if self.calls == 1:
            return value
        done = self.deed(model, batch)
        return value if done is None else done


FAILING: dict[str, Callable[..., Any]] = {
    **RAISED,
    "a text": lambda *_: "good",
    "a dict": lambda *_: {"accuracy": 1},
    "an object": lambda *_: object(),
}


@pytest.mark.parametrize("deed", FAILING)
def test_a_metric_that_fails_is_no_number_and_the_run_goes_on(deed: str, tmp_path: Path) -> None:
    trainer = made(hybrid__mode="off")
    events = heard(trainer)
    metrics = {"bad": Late(FAILING[deed]), "good": error}
    summary = fitted(trainer, tmp_path / "run", metrics=metrics)
    assert summary["reason"] == "finished"
    assert np.isnan(summary["metrics"]["bad"])
    assert np.isfinite(summary["metrics"]["good"])
    assert len([event for event in events if isinstance(event, Evaluated)]) == 2
    told = [event.message for event in events if isinstance(event, Notice) and event.level == "warning"]
    assert len(told) == 1
    assert told[0].startswith("the metric 'bad' failed (")
    assert told[0].endswith("; the run goes on")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"traceback": "Traceback') == 1
    assert same_end(trainer)


def changes_weights(model: nn.Module, batch: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.data.add_(1.0)


def trains(model: nn.Module, batch: Any) -> None:
    model.train()
    with torch.enable_grad():
        error(model, batch).backward()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)


def replaces(model: nn.Module, batch: Any) -> None:
    for p in model.parameters():
        p.data = torch.zeros(2, 3)


HARM = {**BORNE, "weights changed": changes_weights, "weights replaced": replaces, "trained": trains}


@pytest.mark.parametrize(
    ("deed", "average"), [*((deed, 0.0) for deed in HARM), ("weights changed", 0.9), ("weights replaced", 0.9)]
)
def test_what_a_metric_does_to_the_model_or_the_data_is_put_back(deed: str, average: float) -> None:
    def run(metrics: dict[str, Any]) -> tuple[HybridTrainer, dict[str, Any], list[Event]]:
        trainer = made(None, Net(dropout=0.2, norm=True), hybrid__mode="off", evaluation__ema_decay=average)
        trainer.model.norm.eval()
        events = heard(trainer)
        return trainer, fitted(trainer, metrics=metrics), events

    disturbed, summary, events = run({"bad": Late(HARM[deed]), "good": error})
    undisturbed, expected, _ = run({"good": error})
    assert same_weights(disturbed.model, undisturbed.model)
    assert not disturbed.model.norm.training
    assert summary["final_val_loss"] == expected["final_val_loss"]
    if deed in BORNE:  # what was changed in the model is put back after all metrics
        assert summary["metrics"]["good"] == expected["metrics"]["good"]
    told = [event.message for event in events if isinstance(event, Notice) and "changed weights" in event.message]
    assert len(told) == (deed in ("weights changed", "weights replaced"))


def test_a_metric_that_fails_at_once_is_refused_before_anything_is_trained() -> None:
    trainer = made(hybrid__mode="off")
    with pytest.raises(InputError, match=r"the metric 'bad' failed \(ZeroDivisionError: division by zero\)"):
        fitted(trainer, metrics={"bad": lambda model, batch: 1 / 0})
    assert trainer.backward_passes == 0


# --- callbacks -------------------------------------------------------------------------------------------------------


EVENTS = (RunStarted, Progress, HealthMeasured, Evaluated, CheckpointSaved, RunEnded)


@pytest.mark.parametrize(
    ("kind", "deed"),
    [
        *((kind, deed) for kind in EVENTS for deed in ("an error", "random numbers")),
        *((Progress, deed) for deed in (*RAISED, *BORNE) if deed not in ("an error", "random numbers")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_callback_neither_ends_nor_harms_a_run(kind: type[Event], deed: str, tmp_path: Path) -> None:
    calls: list[Event] = []

    def callback(event: Event) -> None:
        if isinstance(event, kind):
            calls.append(event)
            {**RAISED, **BORNE}[deed](event)

    trainer = made(Ordinary())
    events = heard(trainer)
    summary = fitted(trainer, tmp_path / "run" if kind is CheckpointSaved else None, callbacks=[callback])
    assert summary["reason"] == "finished"
    assert same_end(trainer)
    failures = [event for event in events if isinstance(event, OwnCodeFailed)]
    if deed in RAISED:
        assert len(calls) == 1
        assert [event.where for event in failures] == [callback.__qualname__]
        assert sum(f"{callback.__qualname__} stopped listening after" in str(event) for event in events) == 1
    else:
        assert calls
        assert failures == []


def test_so_is_one_that_subscribed_by_itself() -> None:
    trainer = made(Ordinary())
    trainer.bus.subscribe(draws)
    trainer.bus.subscribe(switches)
    fitted(trainer)
    assert same_end(trainer)


# --- probes ----------------------------------------------------------------------------------------------------------


class Probed(Net):
    """Its loss calls `deed` where it only probes."""

    deed: Callable[..., None] = staticmethod(lambda: None)

    def loss(self, batch: Any) -> Tensor:
        if not self.training:
            self.deed()
        return super().loss(batch)


def moving(mode: str, deed: Callable[..., Any]) -> tuple[HybridTrainer, list[Event]]:
    model = Probed(dropout=0.2)
    model.deed = deed
    changes = {"hybrid__confidence_threshold": 0.0, "hybrid__warmup_steps": 10, "evaluation__interval": 0}
    trainer = made(Ordinary(), model, hybrid__mode=mode, max_steps=120, checkpoint__interval=15, **changes)
    if trainer.policy is not None:
        trainer.observer.quality.trusted = lambda windows: True  # type: ignore[method-assign]
        trainer.policy.confidence.estimate = lambda features: 0.9  # type: ignore[method-assign]
    return trainer, heard(trainer)


def moved(trainer: HybridTrainer, out: Path | None = None, resume: bool = False) -> dict[str, Any]:
    return trainer.fit([DATA(position) for position in range(121)], out=out, resume=resume, progress=False)


@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_an_order_in_a_probe_leaves_the_last_checkpoint(mode: str, tmp_path: Path) -> None:
    trainer, _ = moving(mode, Giving(KeyboardInterrupt, 3))
    with pytest.raises(KeyboardInterrupt, match="enough"):
        moved(trainer, tmp_path)
    resumed, events = moving(mode, lambda: None)
    moved(resumed, tmp_path, resume=True)
    assert [event for event in events if isinstance(event, Moved)] != []
    whole, _ = moving(mode, lambda: None)
    moved(whole)
    assert same_weights(resumed.model, whole.model)


@pytest.mark.parametrize("mode", ["leap", "rollout"])
def test_a_loss_that_fails_in_probes_costs_the_moves(mode: str) -> None:
    def broken() -> None:
        raise KeyError("no cache in evaluation")

    disturbed, events = moving(mode, broken)
    summary = moved(disturbed)
    undisturbed, _ = moving("off", lambda: None)
    moved(undisturbed)
    assert (summary["reason"], summary["global_step"]) == ("finished", 120)
    assert actions(events) == ["reset_predictor", "prediction_off"]
    assert [event.verdict for event in events if isinstance(event, Moved)] == ["refused", "refused"]
    failure = next(event for event in events if isinstance(event, OwnCodeFailed))
    assert failure.error == "KeyError: 'no cache in evaluation'"
    assert same_weights(disturbed.model, undisturbed.model)


# --- orders to end ---------------------------------------------------------------------------------------------------


class Giving:
    """Gives an order to end, once, at the call with this number."""

    def __init__(self, order: type[BaseException], call: int) -> None:
        self.order, self.left = order, call

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.order("enough")


class Obedient(Net):
    """Its loss calls `deed` while it trains."""

    deed: Callable[..., None] = staticmethod(lambda: None)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.training:
            self.deed()
        return loss


def ordered(place: str, deed: Callable[..., None]) -> tuple[HybridTrainer, dict[str, Any]]:
    """A trainer, and what `fit` gets, that calls `deed` in this place."""
    model = Obedient(dropout=0.2)
    hook = place if place in ("observe", "forecast", "state_dict") else ""
    options: dict[str, Any] = {"metrics": {"error": error}}
    if place == "loss":
        model.deed = deed
    if place == "metric":
        options["metrics"] = {"error": Late(deed)}
    if place == "callback":
        options["callbacks"] = [lambda event: deed() if isinstance(event, Progress) else None]
    return made(Hooked(hook, deed), model), options


ORDERS = [("observe", 2), ("forecast", 2), ("forecast", 3), ("metric", 2), ("metric", 4), ("callback", 3), ("loss", 13)]


@functools.cache
def obeyed() -> tuple[dict[str, Any], Any]:
    """The summary, and the state of prediction, of a run that nobody ended."""
    trainer, options = ordered("", lambda *_: None)
    summary = fitted(trainer, **options)
    return summary, folded(trainer.state_dict()["hybrid"])


@pytest.mark.parametrize(
    ("place", "call", "order"),
    [*((*place, KeyboardInterrupt) for place in ORDERS), ("forecast", 2, SystemExit), ("callback", 3, SystemExit)],
)
def test_an_order_is_obeyed_with_a_saved_state(
    place: str, call: int, order: type[BaseException], tmp_path: Path
) -> None:
    trainer, options = ordered(place, Giving(order, call))
    with pytest.raises(order, match="enough"):
        fitted(trainer, tmp_path / "run", **options)
    stopped = trainer.global_step
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load_newest().step == stopped > 0  # type: ignore[union-attr]
    assert actions(heard(trainer)) == []

    resumed, options = ordered(place, lambda *_: None)
    summary = fitted(resumed, tmp_path / "run", resume=True, **options)
    expected, state = obeyed()
    assert same_end(resumed)
    for name in ("forecast", "metrics", "final_val_loss", "best_val_loss", "final_train_loss", "steps"):
        assert summary[name] == expected[name], name
    assert folded(resumed.state_dict()["hybrid"]) == state


def folded(tree: Any) -> Any:
    """Without tensors and times, to be compared."""
    if isinstance(tree, dict):
        return {key: folded(value) for key, value in tree.items() if "second" not in str(key)}
    if isinstance(tree, (list, tuple)):
        return [folded(value) for value in tree]
    return tree.tolist() if isinstance(tree, Tensor) else repr(tree)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, OSError])
def test_what_a_loader_raises_is_raised_and_costs_no_step(kind: type[BaseException], tmp_path: Path) -> None:
    trainer = made(Ordinary())
    with pytest.raises(kind, match="the disk is gone"):
        trainer.fit(Loader(13, kind), HELD_OUT, out=tmp_path, progress=False)
    assert (tmp_path / "checkpoints" / "step-00000013").is_dir()
    resumed = made(Ordinary())
    fitted(resumed, tmp_path, resume=True)
    assert same_end(resumed)


def test_what_a_loss_raises_is_raised_and_costs_no_step(tmp_path: Path) -> None:
    trainer, _ = ordered("loss", Giving(ZeroDivisionError, 18))
    events = heard(trainer)
    with pytest.raises(ZeroDivisionError, match="enough"):
        fitted(trainer, tmp_path)
    told = [event.message for event in events if isinstance(event, Notice)]
    assert told[-1].startswith("ZeroDivisionError after step 17: the state after step 17 is saved; go on with fit(")
    resumed, _ = ordered("loss", lambda: None)
    fitted(resumed, tmp_path, resume=True)
    assert same_end(resumed)


def test_on_interrupt_return_gives_the_summary_of_an_order(tmp_path: Path) -> None:
    trainer, options = ordered("callback", Giving(KeyboardInterrupt, 2))
    summary = fitted(trainer, tmp_path, on_interrupt="return", **options)
    assert (summary["reason"], summary["signal"], summary["global_step"]) == ("interrupted", "KeyboardInterrupt", 10)


def test_in_a_loop_of_ones_own_an_order_comes_after_the_step() -> None:
    trainer = made(Hooked("forecast", Giving(KeyboardInterrupt, 2)))
    for position in range(9):
        trainer.step(DATA(position))
    with pytest.raises(KeyboardInterrupt, match="enough"):
        trainer.step(DATA(9))
    assert trainer.global_step == 10
    state = copy.deepcopy(trainer.state_dict())
    for position in range(10, 20):
        trainer.step(DATA(position))
    resumed = made(Hooked("forecast", lambda *_: None))
    resumed.load_state_dict(state)
    for position in range(10, 20):
        resumed.step(DATA(position))
    assert folded(trainer.state_dict()["hybrid"]) == folded(resumed.state_dict()["hybrid"])
    assert same_weights(trainer.model, resumed.model)
    assert trainer.observer.predictor.windows == 4  # type: ignore[attr-defined]


HANGING = """
import signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.faults import test_own_code as own
signal.signal(signal.SIGINT, signal.default_int_handler)

def hang(*_):
    Path("hangs").touch()
    while True:
        pass

once = iter([0, 0, 1])
trainer, options = own.ordered(sys.argv[2], lambda *_: hang() if next(once) else None)
own.fitted(trainer, Path("run"), **options)
"""


@pytest.mark.parametrize("place", ["forecast", "metric"])
def test_ctrl_c_saves_a_run_whose_own_code_hangs(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = str(Path(__file__).parents[2])
    with Path("output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", HANGING, root, place],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_until(Path("hangs").exists, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANGS) == -signal.SIGINT, Path("output.txt").read_text()
    finally:
        process.kill()
        process.wait()
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["reason"], summary["signal"]) == ("interrupted", "SIGINT")
    assert CheckpointStore("run/checkpoints").load_newest().step == summary["global_step"]  # type: ignore[union-attr]
    resumed, options = ordered(place, lambda *_: None)
    fitted(resumed, Path("run"), resume=True, **options)
    assert same_end(resumed)
