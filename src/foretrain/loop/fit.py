"""`HybridTrainer.fit`: the arguments of a run, its folder, who listens to it, and what its caller is told at last."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.engine.batches import batches_in, steps_in
from foretrain.engine.gathered import gathered
from foretrain.engine.own import Measure, as_tensors, check_metrics
from foretrain.engine.rates import FollowedRates, Rates
from foretrain.engine.weights import write_weights
from foretrain.errors import ConfigError, InputError
from foretrain.events import LEFT_OPEN, Event, Listener
from foretrain.hybrid.summary import settings_of
from foretrain.launch.group import Group
from foretrain.launch.joining import current_group
from foretrain.launch.roll import Roll
from foretrain.launch.stopping import AgreedStop
from foretrain.loop.evaluator import Evaluator
from foretrain.loop.run import Loop
from foretrain.loop.saver import Saver
from foretrain.persist.codec import random_state, restore_random_state
from foretrain.persist.folder import WEIGHTS, RunFolder
from foretrain.persist.signals import StopRequest
from foretrain.show.listening import listen

if TYPE_CHECKING:
    from foretrain.trainer import HybridTrainer


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The arguments of `HybridTrainer.fit`, where they are explained."""

    epochs: float | None = None
    metrics: Mapping[str, Measure] = field(default_factory=dict)
    callbacks: Sequence[Listener] = ()
    out: str | Path | RunFolder | None = None
    resume: bool = False
    overwrite: bool = False
    load_best: bool = False
    progress: bool | Level = True
    table: bool = True
    on_interrupt: str = "raise"
    pause_at: int | None = None
    title: str = ""
    details: Mapping[str, str] = field(default_factory=dict)
    data_fingerprint: str = ""

    def check(self, config: Config, held_out: Iterable[Any] | None) -> None:
        """Refuse what does not go together, before hours of training and not after them."""
        if self.on_interrupt not in ("raise", "return"):
            raise InputError(f"on_interrupt = {self.on_interrupt!r}: it is 'raise' or 'return'")
        if self.pause_at is not None and self.pause_at < 1:
            raise InputError(f"pause_at = {self.pause_at}: a step from 1 on at which the run is left")
        check_metrics(self.metrics)
        if self.metrics and held_out is None:
            raise InputError("metrics are measured on held-out batches: give some to fit()")
        if self.resume and self.overwrite:
            raise InputError("resume goes on with the run in out=..., overwrite replaces it: choose one")
        if not all(callable(callback) for callback in self.callbacks):
            raise InputError("callbacks is a list of functions of one event, such as [listen]")
        if self.load_best:
            self._check_load_best(config, held_out)

    def _check_load_best(self, config: Config, held_out: Iterable[Any] | None) -> None:
        if self.out is None:
            raise InputError("load_best needs a run folder to keep the best weights in; name it with out=...")
        if held_out is None:
            raise InputError(
                "load_best needs held-out batches that tell which weights are best; pass held_out=... to fit"
            )
        if not config.checkpoint.keep_best:
            raise ConfigError("load_best needs checkpoint.keep_best = true")

    def console_level(self, config: Config) -> Level | None:
        """How much is shown; None: nothing."""
        if not self.progress:
            return None
        return config.log.console if self.progress is True else self.progress


def fit(
    trainer: HybridTrainer, loader: Iterable[Any], held_out: Iterable[Any] | None, options: FitOptions
) -> dict[str, Any]:
    """A whole run; returns its summary."""
    engine, out = trainer.engine, options.out
    options.check(engine.config, held_out)
    engine.execution.check()
    trainer.stopping, trainer.stopped_because = False, ""
    _set_length(trainer, loader, options.epochs)
    if trainer.growth is not None and not options.resume:  # else the saved state says which stages are left
        trainer.growth.check_moments()
    random = random_state()  # a DataLoader draws from it when it is read
    held = [as_tensors(batch, engine.float_type) for batch in held_out] if held_out is not None else []
    check_scheduler(engine.rate, engine.config.max_steps if engine.has_end else 0, bool(held))
    trainer.copies.held_out = held or trainer.copies.held_out
    if engine.config.forecast.copies:
        trainer.copies.check()
    if trainer.race is not None:
        trainer.race.held_out = trainer.race.held_out or held
        trainer.race.check()
        trainer.race.per_pass = batches_in(loader)
        trainer.race.may_overfit = not (options.load_best or engine.config.evaluation.early_stopping_patience)
    engine.forward.measure(held[:1], options.metrics)  # a metric that fails does so before anything is trained
    restore_random_state(random)
    config, bus, group = engine.config, trainer.bus, current_group()
    level = options.console_level(engine.config) if group.first else None
    _check_out(group, out is not None)
    with ExitStack() as stack:
        folder, details = out if isinstance(out, RunFolder) else None, dict(options.details)
        if out is not None and not isinstance(out, RunFolder):
            folder = _open_folder(stack, Path(out), options, group)
            details["folder"] = str(folder.path)
        settings, resume, table = settings_of(engine), options.resume, options.table
        if group.first:
            listen(stack, bus, config, folder, resume=resume, level=level, table=table, settings=settings)
        for callback in options.callbacks:
            stack.callback(bus.subscribe(warning_of_failure(callback)))
        roll = stack.enter_context(Roll(group))
        stop = stack.enter_context(StopRequest() if group.alone else AgreedStop(roll))
        stop.leave = lambda: engine.fence.interruptible
        memory, rescue = trainer.memory, trainer.rescue
        saver = None
        if folder is not None:
            saver = Saver(
                engine,
                config,
                folder,
                options.data_fingerprint,
                memory,
                rescue,
                bus.emit,
                state=trainer.state_dict,
                load=lambda state, origin: load(trainer, state, origin),
                judging=lambda: trainer.judging or (trainer.growth is not None and trainer.growth.on_trial),
            )
        evaluator = Evaluator(
            engine,
            held,
            options.metrics,
            memory,
            rescue,
            bus.emit,
            evaluated=trainer.evaluated,
            looked=trainer.looked,
            is_best=saver.save_best if saver is not None and config.checkpoint.keep_best else None,
        )
        loop = Loop(trainer, evaluator, saver, stop, roll)
        loop.pause_at = options.pause_at
        stack.enter_context(engine.fence.postponed())
        summary = loop.train(
            loader, options.resume, options.title, details, options.load_best, options.data_fingerprint
        )
        if folder is not None and folder is not out and summary["reason"] not in LEFT_OPEN:
            with engine.averaged_weights(), gathered(engine.model, group.rank) as first, group.together():
                if first:
                    write_weights(engine.model, folder.path / WEIGHTS)
    order = engine.fence.taken()
    if order is not None and not (isinstance(order, KeyboardInterrupt) and options.on_interrupt == "return"):
        raise order
    if summary["reason"] == "interrupted" and not isinstance(out, RunFolder):
        shown = (level is not None and level != "quiet") or not group.first
        tell_interruption(summary["signal"], loop.last_words, options.on_interrupt, shown)
    return summary


def _check_out(group: Group, given: bool) -> None:
    """Refuse a folder that some processes know of and others do not: they would wait for each other."""
    if group.alone:
        return
    first = group.from_first(lambda: str(given))
    with group.together():
        if str(given) != first:
            raise InputError("out=... is given on some ranks only; give it on all of them: rank 0 owns the folder")


def _open_folder(stack: ExitStack, path: Path, options: FitOptions, group: Group) -> RunFolder:
    """Rank 0 locks and clears the folder; the others go on when it has."""
    with group.together():
        made = RunFolder(path, options.resume, options.overwrite, in_python=True, owner=group.first)
        folder = stack.enter_context(made)
        if options.overwrite and not options.resume:
            folder.clear()
    return folder


def load(trainer: HybridTrainer, state: dict[str, Any], origin: str) -> None:
    """Put a state back. A run that was given up, and is gone on with, gets as many tries as any other."""
    trainer.load_state_dict(state, origin)
    trainer.engine.meter.skipped_in_a_row = 0
    if trainer.hybrid is not None:
        trainer.hybrid.start_counting_anew()


def _set_length(trainer: HybridTrainer, loader: Iterable[Any], epochs: float | None) -> None:
    """`fit` needs an end: so many epochs, `max_steps`, or `max_time`."""
    engine = trainer.engine
    if epochs is not None and engine.max_steps_given:
        raise ConfigError(
            f"epochs = {epochs:g} and max_steps = {engine.config.max_steps} of the Config both say how long the run "
            "is; keep one"
        )
    epochs = epochs if epochs is not None else engine.config.epochs
    if epochs is not None:
        engine.end_at(steps_in(epochs, loader))
        if trainer.targets is not None:
            trainer.targets.limit = engine.config.max_steps
    elif not engine.has_end and engine.config.steps_are_limited:
        engine.end_at(engine.config.max_steps)


def check_scheduler(rate: Rates, max_steps: int, evaluates: bool) -> None:
    """Refuse a scheduler of the user's own that could not go on to the end."""
    if not isinstance(rate, FollowedRates) or rate.scheduler is None:
        return
    name, last = type(rate.scheduler).__name__, getattr(rate.scheduler, "total_steps", None)
    if rate.watches_loss and not evaluates:
        raise ConfigError(f"{name} follows the held-out loss: give held-out batches to fit()")
    if last is not None and last < max_steps:
        raise ConfigError(
            f"{name} was made for {last} steps, and the run has {max_steps}: make it with total_steps={max_steps}"
        )


def warning_of_failure(callback: Listener) -> Listener:
    """Wrap a listener: before it is dropped, as any that fails, its user is told, however quiet the run is."""

    def listen(event: Event) -> None:
        try:
            callback(event)
        except Exception as error:
            warnings.warn(
                f"the callback {name} failed at {type(event).__name__} and is called no more "
                f"({type(error).__name__}: {error})",
                stacklevel=2,
            )
            raise

    name = getattr(callback, "__qualname__", type(callback).__name__)
    listen.__qualname__ = name
    return listen


def tell_interruption(name: str, text: str, how: str, shown: bool) -> None:
    """After the run was saved: what its caller must not take for a finished one. shown: the console has said it."""
    if how == "return":
        if not shown:
            warnings.warn(text, stacklevel=4)
        return
    if name == "SIGINT":
        raise KeyboardInterrupt(text)
    if not shown:
        sys.stderr.write(f"{text}\n")
    raise SystemExit(128 + signal.Signals[name].value)
