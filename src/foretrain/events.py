"""One bus. Everything worth knowing is one event; console, log files and trackers are listeners."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """The phase that a run is in."""

    WARMUP = "warmup"
    FULL = "full"
    PREDICT = "predict"
    CORRECT = "correct"


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. Field names are the names in `metrics.jsonl`."""


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    step: int
    """0, or the step a resumed run goes on from."""
    max_steps: int
    """0 where it is not known: with `max_time` alone."""
    parameters: int
    trained_parameters: int
    device: str
    precision: str
    title: str
    details: Mapping[str, str] = field(default_factory=dict)
    unit: str = "tokens"
    """What `tokens` and `tokens_per_second` count: "tokens", "samples", or what the user named."""
    optimizer: str = ""
    """In words: "torch.optim.Adam, lr 0.003", or "muon"."""
    costs: Sequence[tuple[int, float]] = ()
    """From which step on a step costs how much, where the model grows; one of the whole model costs 1."""
    planned: bool = False
    """The run goes by `max_time` or `until_loss`: `max_steps` is only a limit, or not known yet."""


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """Averages since the last such event; read from the device once per interval, never per step."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second: float
    seconds: float
    skipped_steps: int
    phase: str = "full"
    predicted_loss: float | None = None
    """What the predictor said a window ago that the smoothed loss would be now."""
    smoothed_loss: float | None = None
    confidence: float | None = None
    kept: int = 0
    refused: int = 0
    """Moves that were refused or rolled back."""
    gain_percent: float | None = None
    """Time saved by prediction so far, by its own audits."""
    blocks: Mapping[str, float] | None = None
    """Mean square of each block of residuals when it was last computed, without its weight."""
    planned_end: int | None = None
    """Steps of the run, as far as can be told by now, where it goes by `max_time` or `until_loss`."""
    earliest_end: int | None = None
    latest_end: int | None = None
    """The interval of the forecast that says where `until_loss` is met."""
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseChanged(Event):
    step: int
    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class Moved(Event):
    """A predicted move and what became of it."""

    step: int
    horizon: int
    verdict: str
    """"kept", "shrunk", "refused" or "rolled back"."""
    share: float
    """A share of the forecast displacement."""
    audited: bool
    chained: bool
    """A chain of leaps: `horizon` counts them."""
    anchor: float
    """Probe loss before the move."""
    predicted_loss: float
    loss: float
    """Probe loss it was judged by; not a number where it was refused."""
    confidence: float
    worth_steps: float
    """Full steps that it saved, as measured."""
    cost_steps: float
    reason: str
    leaps: str = ""
    """What the leaps of a chain are called: "quasi-Newton" or "linearised"."""
    counted_steps: int = 0
    """Steps that it counted: of a linearised leap as many as it costs."""
    fall_ratio: float | None = None
    """Real falls of the loss by the linearised leaps of a chain, as a share of the predicted ones, on the average."""
    returned: bool = False
    """A chain found nothing lower than an earlier one had, and went back to where that ended."""


@dataclass(frozen=True, slots=True)
class Grown(Event):
    """The model goes on with more of its blocks, or that was judged."""

    step: int
    verdict: str
    """"made", then "kept" or "undone"; "refused" where it could not be made."""
    layers: int
    """Blocks that are used from now on."""
    of: int
    loss_before: float | None
    """Mean loss just before the growth."""
    loss: float | None
    """Mean loss at the end of its trial."""
    reason: str
    cost: float = 1.0
    """What a step costs from now on; one of the whole model costs 1."""


@dataclass(frozen=True, slots=True)
class RatesToTry(Event):
    """A learning rate that is `auto`: what looking for it will cost, told before anything is tried."""

    step: int
    steps: int
    """Steps of the run that each rate is tried on."""
    least: int
    most: int
    """Steps beside the run that all trials take together, unless rates fail early or a trial is interrupted."""
    max_steps: int


@dataclass(frozen=True, slots=True)
class RateTrial(Event):
    """A learning rate that is `auto`: one rate is at work. The first is that of the run itself; of others the step
    stands still."""

    step: int
    learning_rate: float
    done: int
    steps: int
    """How many of the run's first steps are done, and how many there are."""
    others: int = 0
    """Steps of other rates that must follow at the least."""


@dataclass(frozen=True, slots=True)
class RateTried(Event):
    """A learning rate that is `auto`: how one rate ended the first steps of the run."""

    step: int
    learning_rate: float
    steps: int
    loss: float
    """On held-out data, when the rate had fallen to 0 (not for adapters); no number where the trial failed."""
    best: bool
    """Whether it is the best of those tried so far."""


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The plan towards `until_loss` was made or changed."""

    step: int
    what: str
    """"decay": the decay begins; "above": it ended above the goal; "out of reach"; "in reach" again; "met"."""
    text: str
    end: int | None
    """Where the goal is to be met, as far as is known."""


@dataclass(frozen=True, slots=True)
class Annealed(Event):
    """A copy of the run was trained for a few steps while its rate fell to 0. The run itself went on without it."""

    step: int
    """Steps of the run where the copy was taken."""
    steps: int
    """Steps of the copy."""
    loss: float
    """Held-out loss of the copy at its end."""
    before: float
    """Held-out loss of the run where the copy was taken, on the same data."""


@dataclass(frozen=True, slots=True)
class Recovered(Event):
    """A recovery action that was carried out."""

    step: int
    """Where the run goes on."""
    action: str
    text: str
    at: int | None = None
    """The step at which it happened; after a rollback that is a later one."""


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    step: int
    loss: float
    seconds: float
    averaged_weights: bool
    best: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over all held-out rows, by the names that `fit(metrics=...)` gave."""


@dataclass(frozen=True, slots=True)
class RatesPlanned(Event):
    """What the learning rate will do, as far as it is known: forecasts go by it. Told at the start, and when it is
    changed."""

    step: int
    total_steps: int
    kind: str
    """Runs of one kind may be forecast from each other."""
    steps: Sequence[float]
    """Knots, with straight lines between them; none where nobody knows the rate."""
    rates: Sequence[float]
    """As multiples of the highest one."""


@dataclass(frozen=True, slots=True)
class LossForecasted(Event):
    """The held-out loss at the end of the run, as forecast from what was seen so far."""

    step: int
    end: int
    """The step that it is forecast for: the last one."""
    loss: float
    low: float
    high: float
    level: float
    """Probability with which it should lie between `low` and `high`."""
    method: str
    calibrated: bool
    """The interval is made from enough own finished runs."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """What simpler rules say."""
    path: Sequence[tuple[int, float, float, float]] = ()
    """The way there: step, loss, low, high."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    step: int
    path: str
    megabytes: float
    seconds: float
    weights_megabytes: float = 0.0
    """The part of them that weights take; the others are the optimizer's state and what follows."""
    prediction_megabytes: float = 0.0
    """What prediction needs to go on: directions, and the snapshot that a move can be taken back to."""


@dataclass(frozen=True, slots=True)
class CheckpointRejected(Event):
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class MemoryUsed(Event):
    """Memory of a phase, in bytes; told when its peak has risen."""

    step: int
    phase: str
    """"setup", "warmup", "full", "predict", "correct", "evaluation" or "checkpoint"."""
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    pinned: int | None = None
    """On the host."""
    resident_peak: int | None = None
    """Without a GPU: highest resident memory of the whole process since it began."""


@dataclass(frozen=True, slots=True)
class HealthMeasured(Event):
    """Every layer was measured around one step, and all steps since the last measurement were judged."""

    step: int
    """Steps done before that one."""
    gradient_norm: float | None
    """The norm over all layers together, before clipping."""
    gradient_to_weight: float | None
    update_to_weight: float | None
    layers: Mapping[str, Mapping[str, float | None]]
    """These three numbers of each layer; None where there is none."""
    loss_deviation: float | None = None
    """How far the mean loss is above the best so far, in sigmas of one loss."""
    gradient_variance: float | None = None
    """Variance of the gradient norm over its squared mean."""
    sign_changes: float | None = None
    """Changes of the loss around its trend, in 10 steps, above the 5 of independent noise."""


@dataclass(frozen=True, slots=True)
class HealthFound(Event):
    """Something ails the run; said once."""

    ailment: str
    step: int
    measure: str
    place: str
    """A layer, or "run"."""
    value: float | None
    healthy: str
    level: str
    """"warning" or "critical"."""
    meaning: str
    change: Mapping[str, Any]
    """Settings as in the configuration file: what to set, and to what."""


@dataclass(frozen=True, slots=True)
class Tuned(Event):
    """A finding's change that `guard.auto_tune` made by itself."""

    step: int
    ailment: str
    change: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """Something the user should know: `level` is "info" or "warning"."""

    message: str
    level: str = "warning"


@dataclass(frozen=True, slots=True)
class OwnCodeFailed(Event):
    """Code of the user's own failed: a predictor, a loss that probed a move, a metric, a callback. What follows is told
    by another event."""

    step: int
    where: str
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    step: int
    reason: str
    """"finished", "interrupted", "paused", "stopped early" or "failed"."""
    summary: Mapping[str, Any]


LEFT_OPEN = ("interrupted", "paused")
"""A run that ended for one of these reasons is saved, has not come to its end, and can be gone on with."""

Listener = Callable[[Event], None]
_LONGEST_LINE = 300
_LONGEST_TRACE = 20_000
"""Characters that are told of what code of the user's own raised."""


def told_of(error: BaseException, text: str = "") -> tuple[str, str]:
    """An error in one line, or the words given for it, and its traceback; not more of either than one reads."""
    text = text or " ".join("".join(traceback.format_exception_only(error)).split())
    trace = "".join(traceback.format_exception(error))
    cut = len(trace) - _LONGEST_TRACE
    return (
        text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} ...",
        trace if cut <= 0 else f"... {cut:,} characters ...\n{trace[-_LONGEST_TRACE:]}",
    )


class Bus:
    """Hands every event to every listener, in the order they subscribed."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._trusted: set[int] = set()
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        """What listeners are called in that are not trusted: the fence of a trainer."""

    def subscribe(self, listener: Listener, *, trusted: bool = False) -> Callable[[], None]:
        """Add a listener; the returned function removes it again. trusted: it draws no random numbers."""
        self._listeners.append(listener)
        if trusted:
            self._trusted.add(id(listener))

        def unsubscribe() -> None:
            self._trusted.discard(id(listener))
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """A listener that fails is dropped and reported to the others: showing must never stop training."""
        failed: list[tuple[Listener, Exception]] = []
        for listener in tuple(self._listeners):
            try:
                if id(listener) in self._trusted:
                    listener(event)
                else:
                    with self.around():
                        listener(event)
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything
                failed.append((listener, error))
        for listener, _ in failed:
            if listener in self._listeners:  # it may have left by itself before it failed
                self._listeners.remove(listener)
        for listener, cause in failed:
            name = str(getattr(listener, "__qualname__", type(listener).__name__))
            text, trace = told_of(cause)
            self.emit(OwnCodeFailed(getattr(event, "step", 0), name, text, trace))
            self.emit(Notice(f"{name} stopped listening after {text}"))
