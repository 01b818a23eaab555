"""One run of a comparison: trained, timed and counted from outside."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import torch

from foretrain.config import Config, changed, to_mapping, with_beta2, with_warmup
from foretrain.engine.batch import count, rows_of, tensors_of
from foretrain.engine.growing import trained_sizes, with_growth
from foretrain.engine.precision import choose_device
from foretrain.errors import CheckpointError, ConfigError, DataError, ForetrainError, SaveError
from foretrain.events import Bus, Evaluated, Event, Listener, Moved, Notice, PhaseChanged, Progress
from foretrain.measure.controls import RepeatLast, hold_still
from foretrain.measure.tasks import Job, Task
from foretrain.persist.files import for_json
from foretrain.trainer import HybridTrainer

_WARM_STEPS = 4
"""A step that is recorded as a CUDA graph runs three times as it is first."""


class AccountingError(ForetrainError):
    """A run did more than it says it did."""


@dataclass(frozen=True)
class Spec:
    """Everything that tells one run from another."""

    arm: str
    seed: int
    rate_factor: float
    """Times the learning rates of the configuration."""
    max_steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    """What the arm changes in the configuration, by dotted names."""
    control: str = ""
    """"still": displacements are zero; "repeat": the last displacement is repeated; "": neither."""

    def config(self, base: Config) -> Config:
        """Return the configuration of this run. A schedule in steps is scaled with the budget."""
        with_arm = changed(base, self.settings)
        optimizer, schedule = with_arm.optimizer, with_arm.schedule
        values: dict[str, Any] = {
            "seed": self.seed,
            "max_steps": self.max_steps,
            "evaluation.early_stopping_patience": 0,  # nothing is read off a run whose schedule did not end
        }
        if optimizer.learning_rate != "auto":
            values["optimizer.learning_rate"] = optimizer.peak_rate * self.rate_factor
        if optimizer.rest_learning_rate is not None:
            values["optimizer.rest_learning_rate"] = optimizer.rest_learning_rate * self.rate_factor
        for name in ("warmup_steps", "stable_steps", "decay_steps"):
            if (steps := getattr(schedule, name)) is not None:
                values[f"schedule.{name}"] = max(1, round(steps * self.max_steps / base.max_steps)) if steps else 0
        return changed(with_arm, values)

    def key(self, base: Config, fingerprint: str) -> str:
        """Names the run by what decides it."""
        text = json.dumps([to_mapping(self.config(base)), self.control, fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def carry_out(
    task: Task, spec: Spec, base: Config, warmed: set[str], listener: Listener | None = None
) -> dict[str, Any]:
    """Train `spec` and return every number of it. `warmed`: what has already run once in this process."""
    config = _with_growth(task, spec.config(base))
    gc.collect()  # trainers before this one: neither their memory nor the time to free them is this run's
    _warm_up(task, config, warmed)
    gc.collect()
    job = task.job(config)
    weights = _checksum([p.detach() for p in job.model.parameters() if p.requires_grad])
    config = with_beta2(config, job.length)
    config = _compiled(with_warmup(config) if job.pretrains else config, job)
    trainer, recorder = _trainer(job, spec, config)
    if listener is not None:
        trainer.bus.subscribe(listener)
    drawn = _DrawnBatches(job.loader, count if trainer.engine.unit == "tokens" else rows_of)
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)
    updates = _count_updates(trainer)
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    try:
        summary = trainer.fit(drawn, job.held_out, progress=False)
    except (ConfigError, DataError, CheckpointError, SaveError):  # says nothing about the arm
        raise
    except ForetrainError as error:  # a learning rate that diverges is a result
        return _head(spec, config, started) | {"loss": None, "held_out_loss": None, "failed": str(error)}
    if summary["reason"] == "interrupted":
        raise KeyboardInterrupt
    test_loss = trainer.evaluate(job.test)
    graphed = trainer.engine.execution.records  # inside a graph nobody can count
    account = {
        "drawn_tokens": drawn.tokens,
        "updates": None if graphed else updates[0],
        "batches": drawn.checks,
        "first_weights": weights,
    }
    _check(spec, summary, account)
    moves = summary.get("moves") or {}
    result = _head(spec, config, started) | {
        "learning_rate": (summary.get("learning_rate") or {}).get("chosen", config.optimizer.peak_rate),
        "loss": test_loss,
        "held_out_loss": summary["final_val_loss"],
        "seconds": trainer.engine.clock.seconds,
        "steps": summary["global_step"],
        "backward_passes": summary["backward_passes"],
        "tokens": summary["tokens"],
        "probe_tokens": summary["probe_tokens"],
        "kept": moves.get("kept", 0) + moves.get("shrunk", 0),
        "refused": moves.get("refused", 0),
        "rolled_back": moves.get("rolled_back", 0),
        "account": account,
        "peak_memory_mb": summary.get("peak_memory_mb"),
        **recorder.series(trainer.engine.clock.seconds),
    }
    if not all(loss is not None and math.isfinite(loss) for loss in (test_loss, summary["final_val_loss"])):
        result |= {"loss": None, "held_out_loss": None, "failed": "it ended at a loss that is no number"}
    return dict(for_json(result))


def _with_growth(task: Task, config: Config) -> Config:
    """Decide on `growth.layers = "auto"` before anything is warmed up: all depths are compiled then."""
    if config.growth.layers != "auto":
        return config
    job = task.job(config)
    return with_growth(config, trained_sizes(job.model, config.growth.blocks), job.length)[0]


def _head(spec: Spec, config: Config, started: str) -> dict[str, Any]:
    return asdict(spec) | {"learning_rate": config.optimizer.peak_rate, "started": started, "failed": ""}


def _trainer(job: Job, spec: Spec, config: Config) -> tuple[HybridTrainer, _Recorder]:
    bus = Bus()
    predictor = RepeatLast() if spec.control == "repeat" else None
    trainer = HybridTrainer(
        job.model, None, job.loss_fn, config, predictor=predictor, probe=_probe(job, config), bus=bus
    )
    if spec.control == "still":
        hold_still(trainer)
    recorder = _Recorder(trainer)
    bus.subscribe(recorder, trusted=True)
    return trainer, recorder


def _probe(job: Job, config: Config) -> list[Any]:
    """The plain loop makes no leaps, and nothing judges them."""
    return job.probe if config.hybrid.mode != "off" else []


def _compiled(config: Config, job: Job) -> Config:
    """Return the configuration with language models compiled on a CUDA GPU, however short the runs are: they stand for
    longer ones, and the time that compiling takes is charged to none of them."""
    compiles = config.engine.compile == "auto" and job.length is not None
    if not compiles or choose_device(config.device).type != "cuda":
        return config
    return config.model_copy(update={"engine": config.engine.model_copy(update={"compile": True})})


def _warm_up(task: Task, config: Config, warmed: set[str]) -> None:
    """Compile, allocate and load kernels before any clock runs."""
    code = f"{(config.model, config.precision, config.engine, config.device)}"
    if code not in warmed:  # a task keeps one model with its compiled code: what was compiled before is gone
        warmed.clear()
        warmed.add(code)
    sizes = (config.optimizer.type, config.batch_size, config.accumulation_steps, config.growth)
    key = f"{code} {sizes} {config.hybrid.mode != 'off'}"
    if key in warmed:
        return
    job = task.job(config)
    longer = config.model_copy(update={"max_steps": config.max_steps + _WARM_STEPS + 2 * config.hybrid.window_steps})
    trainer = HybridTrainer(job.model, None, job.loss_fn, _compiled(longer, job), probe=_probe(job, config))
    with closing(iter(job.loader)) as batches:  # type: ignore[type-var]
        windows = 2 * config.hybrid.window_steps if trainer.policy is not None else 0  # the second scores a forecast
        if _WARM_STEPS + windows > config.max_steps:
            trainer.engine.end_at(_WARM_STEPS + windows)
        for _ in range(_WARM_STEPS + windows):
            batch = next(batches)
            trainer.step(batch)
        if trainer.policy is not None:
            trainer.engine.probe(trainer.engine.to_device(batch))
    trainer.evaluate(job.held_out[:1])
    warmed.add(key)


def _count_updates(trainer: HybridTrainer) -> list[int]:
    counter = [0]

    def count_one(*_: Any) -> None:
        counter[0] += 1

    trainer.optimizer.register_step_post_hook(count_one)
    return counter


def _check(spec: Spec, summary: dict[str, Any], account: dict[str, Any]) -> None:
    """What was counted from outside must not exceed what the run says of itself."""
    where = f"arm {spec.arm!r}, seed {spec.seed}"
    if account["updates"] is not None and account["updates"] > summary["backward_passes"]:
        raise AccountingError(
            f"{where}: the optimizer updated the weights {account['updates']} times, but the run reports only "
            f"{summary['backward_passes']} backward passes; such a run cannot be compared"
        )
    reported = summary["tokens"] + summary["probe_tokens"]
    if account["drawn_tokens"] > reported:
        raise AccountingError(
            f"{where}: it took {account['drawn_tokens']:,} tokens from the data, but reports only {reported:,}; such a "
            "run cannot be compared"
        )


def check_pairing(runs: list[dict[str, Any]]) -> None:
    """Runs of one seed must have begun at the same weights and seen the same batches at the same places."""
    seen: dict[tuple[int, str], tuple[str, list[int]]] = {}
    begun: dict[int, tuple[str, int]] = {}
    for run in runs:
        weights = run.get("account", {}).get("first_weights")
        arm, first = begun.setdefault(run["seed"], (run["arm"], weights)) if weights is not None else ("", None)
        if first != weights:
            raise AccountingError(
                f"seed {run['seed']}: arm {run['arm']!r} began at other weights than arm {arm!r}; "
                "the first weights must follow from config.seed"
            )
        for place, batch in run.get("account", {}).get("batches", {}).items():
            arm, expected = seen.setdefault((run["seed"], place), (run["arm"], batch))
            if list(batch) != list(expected):
                raise AccountingError(
                    f"seed {run['seed']}, batch {place}: arm {run['arm']!r} was given {batch[0]:,} tokens that differ "
                    f"from the {expected[0]:,} of arm {arm!r}; arms must train on the same data in the same order"
                )


class _DrawnBatches:
    """Hands on a loader's batches and keeps account of them."""

    def __init__(self, loader: Any, count: Callable[[Any], int]) -> None:
        self._loader = loader
        self._count = count
        self.tokens = 0
        self.checks: dict[str, list[int]] = {}
        """Place in the data -> tokens and checksum, at places 0, 1, 2, 4, 8 ..."""
        self._first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        follow = self._first
        self._first = False
        for place, batch in enumerate(self._loader):
            tokens = self._count(batch)
            self.tokens += tokens
            if follow and place & (place - 1) == 0:  # after a rollback the places are others
                self.checks[str(place)] = [tokens, _checksum(batch)]
            yield batch


def _checksum(batch: Any) -> int:
    value = 0
    for tensor in tensors_of(batch):
        value = zlib.crc32(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes(), value)
    return value


class _Recorder:
    """The run over time, from its events."""

    def __init__(self, trainer: HybridTrainer) -> None:
        self._trainer = trainer
        self._curve: list[list[Any]] = []
        self._training: list[list[Any]] = []
        self._changes: list[tuple[float, str]] = [(0.0, trainer.phase.value)]
        self._moves: list[list[Any]] = []
        self._notices: list[str] = []

    def __call__(self, event: Event) -> None:
        seconds = round(self._trainer.engine.clock.seconds, 4)
        match event:
            case Evaluated():
                self._curve.append([event.step, seconds, event.loss])
            case Progress():
                self._training.append([event.step, event.seconds, event.loss])
            case PhaseChanged():
                self._changes.append((seconds, event.phase))
            case Moved():
                self._moves.append([event.step, seconds, event.verdict, event.horizon, event.worth_steps])
            case Notice(level="warning"):
                self._notices.append(event.message)

    def series(self, seconds: float) -> dict[str, Any]:
        ends = [start for start, _ in self._changes[1:]] + [round(seconds, 4)]
        return {
            "curve": self._curve,
            "training": self._training,
            "phases": [[start, end, phase] for (start, phase), end in zip(self._changes, ends, strict=True)],
            "moves": self._moves,
            "notices": self._notices[:20],
        }
