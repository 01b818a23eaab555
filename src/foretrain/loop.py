"""One whole run: when to log, evaluate, save, stop and resume. What a step does is in `trainer.py`."""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from foretrain import environment
from foretrain.config import Config, to_mapping
from foretrain.config.paths import flattened
from foretrain.config.schema import OptimizerConfig
from foretrain.engine.batch import rows_of, split
from foretrain.engine.batches import Batches, checked_state
from foretrain.engine.described import unwrapped
from foretrain.engine.fence import Failure, Ordered
from foretrain.engine.meters import Stopwatch
from foretrain.engine.optim.muon import Muon, iteration_type
from foretrain.engine.own import Measure
from foretrain.engine.rates import FollowedRates
from foretrain.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    ForetrainError,
    InputError,
    OutOfMemory,
    SaveError,
)
from foretrain.events import (
    CheckpointRejected,
    CheckpointSaved,
    Evaluated,
    Event,
    Listener,
    Notice,
    Progress,
    Resumed,
    RunEnded,
    RunStarted,
)
from foretrain.health import shortage
from foretrain.hybrid.failures import tell
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.codec import Snapshot, put_together, take_apart
from foretrain.persist.folder import RunFolder
from foretrain.persist.signals import StopRequest

if TYPE_CHECKING:
    from foretrain.trainer import HybridTrainer, StepResult


def check_load_best(config: Config, folder: Any, held_out: Any) -> None:
    """Whether there can be best weights to load: said before hours of training, not after them."""
    if folder is None:
        raise InputError("load_best needs a run folder to keep the best weights in; name it with out=...")
    if held_out is None:
        raise InputError("load_best needs held-out batches that tell which weights are best; pass held_out=... to fit")
    if not config.checkpoint.keep_best:
        raise ConfigError("load_best needs checkpoint.keep_best = true")


class Run:
    """One call of `HybridTrainer.fit`."""

    def __init__(
        self,
        trainer: HybridTrainer,
        folder: RunFolder | None,
        held_out: list[Any],
        stop: StopRequest,
        fingerprint: str,
        metrics: Mapping[str, Measure] | None = None,
        load_best: bool = False,
    ) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.emit = trainer.bus.emit
        self.folder = folder
        self.store = CheckpointStore(folder.checkpoints, self.config.checkpoint.keep) if folder is not None else None
        self.held_out = held_out
        trainer.judge_by(held_out)
        trainer.engine.first_trained = self._complete_best
        self.stop = stop
        self.fingerprint = fingerprint
        self.metrics = metrics or {}
        self.again = "resume=True" if folder is None else folder.again
        self.last_words = ""
        """Of a run that was interrupted."""
        self.failed_metrics: set[str] = set()
        self.load_best = load_best
        self.batches: Batches | None = None
        self.loader_state: dict[str, Any] | None = None
        self.untrained = False
        """A batch was taken, and its step is not done."""
        self.rewound = False
        """The data was turned back by a rollback and is not opened there yet."""
        self.saved_step = -1
        self.unsaved_best: dict[str, Any] | None = None
        """The best weights, where they could not be saved; they wait for the next save."""
        self.farthest_log = 0
        self.logged_tokens = 0
        self.logged_seconds = 0.0
        self.began = time.monotonic() if folder is None else folder.opened
        self.earlier_seconds = 0.0
        """Of the parts of this run before it was resumed, all in all."""
        max_steps = self.config.max_steps
        self.evaluate_every = _interval(self.config.evaluation.interval, max(1, max_steps // 10))
        self.save_every = _interval(self.config.checkpoint.interval, max(1, max_steps // 5))

    def train(self, loader: Iterable[Any], resume: bool, title: str, details: dict[str, str]) -> dict[str, Any]:
        trainer = self.trainer
        if resume:
            self._resume()
        if self.folder is not None:
            self.folder.describe()
        self._announce(title, details)
        trainer.engine.clock.start()
        self.logged_tokens, self.logged_seconds = trainer.engine.progress.tokens, trainer.engine.clock.seconds
        reason = "finished"
        try:
            trainer.catch_up()
            due = trainer.engine.progress.evaluation_due and trainer.global_step < self.config.max_steps
            if (due and self._evaluate()) or self._patience_is_over():
                reason = "stopped early"
            elif self._interrupted and (trainer.window_due or trainer.engine.progress.evaluation_due):
                reason = "interrupted"  # what comes before the next step was left
            elif trainer.global_step >= self.config.max_steps:
                if not resume:
                    done = f"{trainer.global_step} of {self.config.max_steps} steps are done"
                    self.emit(Notice(f"nothing is left to do: {done}"))
            else:
                batches = self.batches = Batches(loader, self.emit)
                if trainer.pilot is not None:
                    trainer.mover.safety.loader_state = batches.state
                reason = self._loop(batches)
            reason = self._finish(reason)
            trainer.engine.clock.stop()
            if self.load_best and reason != "interrupted":
                self._load_best()
            summary = trainer.summary() | {"reason": reason, "total_seconds": round(self._total_seconds(), 3)}
            if reason == "interrupted":
                summary["signal"] = self._interrupted
            if self.folder is not None:
                if self.store is not None and (best := self.store.best()):
                    summary["best_checkpoint"] = str(next(iter(best.values())).relative_to(self.folder.path))
                self.folder.write_summary(summary)
        except BaseException as error:
            found = shortage.look_at(error)
            if found is None:
                failure = error
            else:  # outside of everything that can be done again
                failure = OutOfMemory(f"{trainer.rescue.explain(found)}; {trainer.rescue.advice()}")
            if isinstance(failure, OutOfMemory):
                self._salvage(failure)
            elif isinstance(failure, DivergenceError):
                trainer.checkup.finish()
            elif not isinstance(failure, ForetrainError):
                self._save_what_is_sound(failure)
            self.emit(RunEnded(trainer.global_step, "failed", trainer.summary()))
            if failure is not error:
                raise failure from None
            raise
        finally:
            trainer.engine.clock.stop()
        self.emit(RunEnded(trainer.global_step, reason, summary))
        if reason == "interrupted":  # the last that is said
            after = self._how_to_go_on() or "; nothing is saved without out=..., but the model has its weights"
            self.last_words = f"{self._interrupted}: stopped after step {trainer.global_step}{after}"
            self.emit(Notice(self.last_words, level="info"))
        return summary

    def _loop(self, source: Batches) -> str:
        trainer = self.trainer
        first = trainer.global_step == 0 and trainer.position == 0
        self._plan_ahead()
        if trainer.rescue.retries and self.saved_step < 0:
            self._save(must=False)  # half an update cannot be taken back: there must be something to go back to
        while True:
            with closing(source.after(trainer.position, self.loader_state)) as batches:
                for batch in batches:
                    self.rewound = False
                    position, self.untrained = trainer.position, True
                    try:
                        result = trainer.step(batch)
                    except DivergenceError:  # given up, but not lost
                        self._save(must=False)
                        raise
                    except OutOfMemory as error:
                        if not self._go_back(error):
                            raise
                        break
                    self.untrained = False
                    if trainer.position <= position:  # a rollback went back in the data too
                        self.loader_state, self.rewound = trainer.mover.safety.loader_state_then(), True
                    if first:
                        self._check_first(result)
                        first = False
                    reason = self._after(result)
                    if reason is not None:
                        return reason
                    if self.rewound:
                        break

    def _go_back(self, error: OutOfMemory) -> bool:
        """To the last checkpoint, with smaller settings, when memory ran out in the middle of an update."""
        trainer = self.trainer
        if not (error.half_done and trainer.rescue.retries) or self.store is None or self.saved_step < 0:
            return False
        text = f"{str(error).partition('; to make it fit')[0]}; back to the checkpoint of step {self.saved_step}"
        if not trainer.rescue.shrink(None, text):
            return False
        spent, settings, earlier = trainer.engine.clock.seconds, trainer.rescue.settings, self.earlier_seconds
        self._resume()
        self.earlier_seconds = earlier
        trainer.rescue.settings = settings  # what was saved may have had larger ones
        trainer.engine.use(settings)
        trainer.engine.clock = Stopwatch(spent)
        trainer.engine.clock.start()
        self.logged_tokens, self.logged_seconds = trainer.engine.progress.tokens, spent
        self._plan_ahead()
        return True

    @property
    def _interrupted(self) -> str:
        """The signal, or the order of own code, to stop after this step and save."""
        order = self.trainer.engine.fence.order
        return self.stop.requested or ("" if order is None else type(order).__name__)

    def _save_what_is_sound(self, error: BaseException) -> None:
        """The user's model, loss or loader ended the run: the steps up to there are not lost. A second Ctrl-C does not
        wait for it."""
        trainer = self.trainer
        if self.store is None or trainer.backward_passes == 0 or self._interrupted:
            return
        if trainer.rescue.sound and self.saved_step != trainer.global_step:
            if self.untrained and self.batches is not None:
                self.batches.give_back()
            try:
                self._save(must=False)
            except Exception as other:  # noqa: BLE001 - what ended the run is what its user must see
                self.emit(Notice(f"the state could not be saved ({type(other).__name__}: {other})"))
        if self.saved_step >= 0:
            stands = f"the state after step {self.saved_step} is saved{self._how_to_go_on()}"
            self.emit(Notice(f"{type(error).__name__} after step {trainer.global_step}: {stands}"))

    def _salvage(self, error: OutOfMemory) -> None:
        """Before the run ends: save it if it is in order, and say what there is to go on from."""
        if error.intact and self.saved_step != self.trainer.global_step:
            self._save(must=False)
        if self.saved_step < 0:
            stands = "nothing was saved yet" if self.store is not None else "the run has no folder, so nothing is saved"
        else:
            stands = f"the state after step {self.saved_step} is saved{self._how_to_go_on()}"
        error.args = (f"{error}. {stands[0].upper()}{stands[1:]}",)

    def _plan_ahead(self) -> None:
        """A leap can jump over a step that is a multiple of an interval: each is due at the first step from it on."""
        step = self.trainer.global_step
        self.next_log, self.next_evaluation, self.next_save = (
            (step // every + 1) * every if every else math.inf
            for every in (self.config.log.interval, self.evaluate_every, self.save_every)
        )
        self.reached = step

    def _after(self, result: StepResult) -> str | None:
        """What is due after a step; the reason to stop, if there is one."""
        trainer, step = self.trainer, self.trainer.global_step
        last = step >= self.config.max_steps and not trainer.judging
        if step < self.reached:  # a rollback: what is done again is told, measured and saved again
            self._plan_ahead()
            if self.store is not None:
                self.store.prune_best(trainer.engine.progress.best_step)
        self.reached = step
        if step >= self.next_log or last:
            self.next_log = (step // self.config.log.interval + 1) * self.config.log.interval
            new = self.next_log > self.farthest_log or last
            self.farthest_log = max(self.farthest_log, self.next_log)
            if self._log(result) and new:
                self._check_finite()
        settled = trainer.chaining or not trainer.judging  # a short move had better be judged first
        if step >= self.next_evaluation and not last and settled:
            self.next_evaluation = (step // self.evaluate_every + 1) * self.evaluate_every
            if trainer.window_due:  # it comes first, in the run that is resumed
                trainer.engine.progress.evaluation_due = bool(self.held_out)
            elif self._evaluate() and trainer.chaining:
                trainer.mover.chain.stopped = True
        if last:
            return "finished"
        if self._interrupted:
            return "interrupted"
        if (trainer.stopping or self._patience_is_over()) and not trainer.judging:
            return "stopped early"
        if step >= self.next_save:
            self.next_save = (step // self.save_every + 1) * self.save_every
            self._save(must=False)
        return None

    def _finish(self, reason: str) -> str:
        """Last evaluation and last checkpoint; an interrupted run is saved at once. Returns the reason to end, which an
        order in the last evaluation changes."""
        if reason == "interrupted":
            self._save(must=True)
            return reason
        complete = self.saved_step == self.trainer.global_step and not self.trainer.engine.progress.evaluation_due
        if reason == "finished" and self.trainer.pilot is not None and self.trainer.mover.end_loss is not None:
            self.trainer.engine.progress.last_train_loss = self.trainer.mover.end_loss
        if reason == "finished" and self.held_out and not complete:
            self._evaluate()
            if self.trainer.engine.progress.evaluation_due:
                return self._finish("interrupted")
        self.trainer.checkup.finish()
        if not complete:
            self._save(must=True)
        if self.store is not None:
            self.store.prune_best(self.trainer.engine.progress.best_step)
        return reason

    def _load_best(self) -> None:
        """The model as it was where the held-out loss was lowest; everything else stays at the end of the run."""
        found = self.store.best() if self.store is not None else {}
        if not found:
            self.emit(Notice("load_best: no evaluation was made, so the model stays as it is"))
            return
        step = (
            self.trainer.engine.progress.best_step
            if self.trainer.engine.progress.best_step in found
            else next(iter(found))
        )
        path = found[step]
        state = checkpoint.read(path)
        self.trainer.load_weights(state, str(path))
        loss = float(state["best"]["loss"])
        self.emit(
            Notice(
                f"the model has its weights of step {step}, with the lowest held-out loss, {loss:.4g}; final losses "
                "and metrics of the summary are those of the last weights",
                "info",
            )
        )

    def _how_to_go_on(self) -> str:
        if self.folder is None:
            return ""
        path = str(self.folder.path)
        if "config.toml" in self.folder.files:
            return f"; go on with: foretrain {self.folder.command} --out {shlex.quote(path)} --resume"
        return f"; go on with fit(..., out={path!r}, resume=True)"

    def _announce(self, title: str, details: dict[str, str]) -> None:
        trainer = self.trainer
        parameters = list(trainer.model.parameters())
        self.emit(
            RunStarted(
                step=trainer.global_step,
                max_steps=self.config.max_steps,
                parameters=sum(p.numel() for p in parameters),
                trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
                device=str(trainer.device),
                precision=trainer.engine.precision.name,
                title=title or type(unwrapped(trainer.model)).__name__,
                details=details,
                unit=trainer.engine.unit,
                optimizer=trainer.optimizer_in_words,
            )
        )
        if self.config.schedule.type == "cyclic" and not isinstance(trainer.engine.rate, FollowedRates):
            self.emit(Notice("schedule.type = 'cyclic' disturbs prediction; wsd is the better choice for hybrid runs"))

    def _check_first(self, result: StepResult) -> None:
        """A run whose first loss is no number would never learn; fp16 may overflow at first and finds its scale. One
        whose optimizer cannot be saved is not to find out at its first checkpoint."""
        if self.store is not None:
            self.trainer.engine.check_optimizer_state()
        finite_gradient = self.trainer.engine.precision.scaled or math.isfinite(result.gradient_norm)
        if not math.isfinite(result.loss) or not finite_gradient:
            raise InputError(
                f"the first loss is {result.loss} (gradient norm {result.gradient_norm}): nothing can be learned from "
                "it. Look for NaN in the data or the starting weights, or a loss function that divides by zero"
            )

    def _log(self, result: StepResult) -> bool:
        """Whether there was anything to tell."""
        trainer = self.trainer
        reading = trainer.rescue.again(trainer.engine.meter.read)
        if reading is None:
            return False
        trainer.engine.progress.last_train_loss = reading.loss
        seconds = trainer.engine.clock.seconds
        speed = (trainer.engine.progress.tokens - self.logged_tokens) / max(seconds - self.logged_seconds, 1e-9)
        self.logged_tokens, self.logged_seconds = trainer.engine.progress.tokens, seconds
        self.emit(
            Progress(
                step=trainer.global_step,
                loss=reading.loss,
                gradient_norm=reading.gradient_norm,
                learning_rate=result.learning_rate,
                tokens=trainer.engine.progress.tokens,
                tokens_per_second=round(speed, 1),
                seconds=round(seconds, 3),
                skipped_steps=trainer.engine.meter.skipped,
                phase=result.phase,
                **trainer.prediction_progress(),
            )
        )
        if reading.skipped:
            self.emit(
                Notice(f"{reading.skipped} of the last {reading.steps} steps were not finite and changed nothing")
            )
        return True

    def _check_finite(self) -> None:
        trainer = self.trainer
        limit = self.config.guard.max_skipped_steps
        if self.config.guard.nan_check and trainer.engine.meter.skipped_in_a_row >= limit:
            self._save(must=False)
            raise DivergenceError(
                f"{trainer.engine.meter.skipped_in_a_row} steps in a row were not finite (step {trainer.global_step}); "
                f"{self._what_to_do()}"
            )
        loss = trainer.engine.progress.last_train_loss
        if not self.config.guard.nan_check and loss != loss:
            raise DivergenceError(
                f"the loss is NaN (step {trainer.global_step}) and guard.nan_check is off; switch it on or lower "
                f"{trainer.checkup.levers.rate}, and go on from the last checkpoint with {self.again}"
            )

    def _what_to_do(self) -> str:
        """Skipped steps change no weight: where the loss itself is no number, batch after batch, a lower rate will not
        make it one, and there is nothing to go on from."""
        loss, rate = self.trainer.engine.progress.last_train_loss, self.trainer.checkup.levers.rate
        more_precise = "" if self.trainer.engine.precision.name == "fp32" else ", or with precision.type = 'fp32'"
        if loss is not None and math.isfinite(loss):
            return (
                "the weights are those of the last good step, and only gradients overflow. Go on with a lower "
                f"{rate}{more_precise}{self._how_to_go_on()}"
            )
        return (
            f"the loss itself is {loss} at the weights of the last good step: they are ruined, or the data is. Look "
            f"for NaN in the data; else {self.again} cannot help, since it goes on from these weights: start anew, in "
            f"another folder, with a tenth of {rate}{more_precise}"
        )

    def _evaluate(self) -> bool:
        """Measure the held-out loss; True when it is time to stop early."""
        if not self.held_out:
            return False
        trainer = self.trainer
        trainer.engine.progress.evaluation_due = True
        with trainer.engine.untimed(), trainer.memory.during("evaluation"):
            started = time.perf_counter()
            loss = self._held_out_loss()
            try:
                trainer.engine.progress.last_metrics = trainer.engine.measure(
                    self.held_out, self.metrics, self._metric_failed
                )
            except Ordered:  # the run stops here, and is resumed with this evaluation
                return False
            seconds = time.perf_counter() - started
        best = loss == loss and (
            trainer.engine.progress.best_val_loss is None or loss < trainer.engine.progress.best_val_loss
        )
        trainer.engine.progress.last_val_loss = loss
        trainer.engine.progress.evaluations_without_best = (
            0 if best else trainer.engine.progress.evaluations_without_best + 1
        )
        if best:
            trainer.engine.progress.best_val_loss, trainer.engine.progress.best_step = loss, trainer.global_step
        averaged = trainer.engine.average is not None
        metrics = dict(trainer.engine.progress.last_metrics)
        self.emit(Evaluated(trainer.global_step, loss, round(seconds, 3), averaged, best, metrics))
        if best and self.config.checkpoint.keep_best:
            self._save_best(loss)
        trainer.evaluated(loss)
        trainer.engine.progress.evaluation_due = False
        return self._patience_is_over()

    def _metric_failed(self, name: str, failure: Failure) -> None:
        """Told once; it is called again at the next evaluation. name: empty where it is not known which one."""
        if name in self.failed_metrics:
            return
        self.failed_metrics.add(name)
        tell(failure, self.trainer.global_step, self.emit)
        text = f"{failure.where} failed ({failure.error})" if name else f"{failure.where}: {failure.error}"
        self.emit(Notice(f"{text}; the run goes on"))

    def _held_out_loss(self) -> float:
        """The mean over all held-out batches; where memory runs out and that is to be borne, over halves of them."""
        trainer, freed = self.trainer, False
        while True:
            try:
                return trainer.engine.evaluate(self.held_out)
            except (RuntimeError, MemoryError) as error:
                found = shortage.look_at(error)
                if found is None:
                    raise
                text = trainer.rescue.explain(found)
            trainer.engine.release()
            halves = [split(batch, 2, index) for batch in self.held_out for index in range(2)]
            halves = [half for half in halves if rows_of(half)]
            whole = len(halves) == len(self.held_out)
            if not trainer.rescue.retries or (whole and freed):
                raise OutOfMemory(f"{text}; {trainer.rescue.advice()}", intact=True)
            self.held_out, freed = halves, True
            trainer.rescue.tell(f"{text}; {'once more' if whole else 'held-out batches are halved'}")

    def _patience_is_over(self) -> bool:
        patience = self.config.evaluation.early_stopping_patience
        return bool(patience) and self.trainer.engine.progress.evaluations_without_best >= patience

    def _save(self, must: bool) -> None:
        """Save the whole state. In mid-run a failure is a warning; the last save must work."""
        if self.store is None:
            return
        trainer, started = self.trainer, time.perf_counter()
        path = self._saved(partial(self._write, self.store), must)
        if path is None:
            return
        sizes = {file.stem: file.stat().st_size / 1e6 for file in path.iterdir()}
        self.saved_step = trainer.global_step
        seconds = round(time.perf_counter() - started, 3)
        weights, prediction = (round(sizes.get(part, 0.0), 2) for part in ("model", "hybrid"))
        size = round(sum(sizes.values()), 2)
        self.emit(CheckpointSaved(trainer.global_step, str(path), size, seconds, weights, prediction))
        self._write_best(self.store)

    def _save_best(self, loss: float) -> None:
        """What was learned so far has the lowest held-out loss. The one before it stays while a move is open: with the
        move this one could be taken back."""
        if self.store is None:
            return
        best = {"step": self.trainer.global_step, "loss": loss}
        self.unsaved_best = self.trainer.engine.weights_state_dict() | {"best": best, "meta": self._meta()}
        self._write_best(self.store)
        if self.unsaved_best is not None:  # at the next save the weights are others
            parts = take_apart(self.unsaved_best)
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in parts.tensors.items()}
            self.unsaved_best = put_together(Snapshot(copies, parts.tree))

    def _write_best(self, store: CheckpointStore) -> None:
        """The best weights that are not on the disk yet, as far as they are the best still."""
        state, keep_others = self.unsaved_best, self.trainer.judging
        if state is not None:
            step = int(state["best"]["step"])
            gone = step != self.trainer.engine.progress.best_step
            if gone or self._saved(lambda: store.save_best(step, state, keep_others), must=False) is not None:
                self.unsaved_best = None

    def _complete_best(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Weights are trained for the first time: the best ones so far get them as they still are, since later nobody
        could tell what they were. What is saved next holds them, too."""
        trainer, store = self.trainer, self.store
        if math.isfinite(self.next_save):
            self.next_save = min(self.next_save, trainer.global_step)
        if store is None:
            return
        if self.unsaved_best is not None:
            added = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
            self.unsaved_best |= {"model": {**self.unsaved_best["model"], **added}, "frozen": trainer.engine.frozen}
        for step, path in store.best().items():
            try:
                state = checkpoint.read(path)
            except CheckpointError:  # damaged: nothing can be made of it anyway
                continue
            model = {**state["model"], **{name: weight.detach() for name, weight in weights.items()}}
            state |= {"model": model, "frozen": trainer.engine.frozen}
            self._saved(partial(store.save_best, step, state, keep_others=True), must=False)

    def _saved(self, save: Callable[[], Path], must: bool) -> Path | None:
        trainer = self.trainer
        with trainer.engine.untimed(), trainer.memory.during("checkpoint"):
            try:
                if self.folder is not None:
                    self.folder.check_place()
                return save()
            except SaveError as error:
                if must:
                    raise SaveError(f"{error}, then go on with {self.again}") from error
                text = str(error)
            except (RuntimeError, MemoryError) as error:
                found = shortage.look_at(error)
                if found is None:
                    raise
                text = trainer.rescue.explain(found)
                if must:
                    raise OutOfMemory(f"{text}; {trainer.rescue.advice()}") from None
            self.emit(Notice(f"{text}; the run goes on and tries again at the next save"))
            return None

    def _write(self, store: CheckpointStore) -> Path:
        trainer = self.trainer
        trainer.engine.meter.fetch()
        place = self.loader_state if self.batches is None or self.rewound else self.batches.state()
        return store.save(trainer.global_step, trainer.state_dict() | {"loader": place, "meta": self._meta()})

    def _meta(self) -> dict[str, Any]:
        return {
            "config": to_mapping(self.config),
            "data": self.fingerprint,
            "torch": torch.__version__,
            "foretrain": environment.version("foretrain"),
            "muon_type": iteration_type(self.trainer.device),
            "total_seconds": self._total_seconds(),
        }

    def _total_seconds(self) -> float:
        """With start-up, evaluation and saving."""
        return self.earlier_seconds + time.monotonic() - self.began

    def _resume(self) -> None:
        if self.store is None:
            raise InputError("resume needs a run folder; name it with out=...")
        try:
            self._load_newest(self.store)
        except (RuntimeError, MemoryError) as error:
            found, rescue = shortage.look_at(error), self.trainer.rescue
            if found is None:
                raise
            text = f"{rescue.explain(found)}; {rescue.advice()}. All checkpoints are as they were"
        else:
            return
        raise OutOfMemory(text)

    def _load_newest(self, store: CheckpointStore) -> None:
        loaded = store.load_newest(lambda path, reason: self.emit(CheckpointRejected(str(path), reason)))
        if loaded is None:
            self._tell_no_checkpoint(store.root)
            return
        meta = self._check_origin(loaded)
        self.trainer.load_state_dict(loaded.state, str(loaded.path))
        self.trainer.start_counting_anew()
        self.loader_state = checked_state(loaded.state.get("loader"), str(loaded.path))
        self.saved_step = loaded.step
        try:
            self.earlier_seconds = float(meta.get("total_seconds") or self.trainer.engine.clock.seconds)
        except (TypeError, ValueError):
            raise CheckpointError(f"{loaded.path}: its total_seconds are no number; start from another one") from None
        self.emit(Resumed(loaded.step, str(loaded.path)))
        self._tell_changes(meta)

    def _tell_no_checkpoint(self, root: Path) -> None:
        """A warning where there must have been some: the log tells of steps."""
        logged = self.folder is not None and self.folder.metrics.is_file() and self.folder.metrics.stat().st_size > 0
        text = f"{root} holds no checkpoint yet: starting at step 0"
        if logged:
            text = f"{root} holds no checkpoint, though metrics.jsonl tells of an earlier run: starting over at step 0"
        self.emit(Notice(text, level="warning" if logged else "info"))

    def _check_origin(self, loaded: checkpoint.Loaded) -> dict[str, Any]:
        """Refuse a checkpoint of another kind or of other data."""
        meta = loaded.state.get("meta")
        if not isinstance(meta, dict) or not isinstance(meta.get("config"), dict):
            raise CheckpointError(f"{loaded.path}: no run of `fit` has saved it; start a new run in another folder")
        if meta.get("data") != self.fingerprint:
            raise CheckpointError(
                f"{loaded.path}: it was trained on other data than data.path gives now; use "
                "the same data, or start a new run"
            )
        return meta

    def _tell_changes(self, meta: dict[str, Any]) -> None:
        """Say what changed since the checkpoint was saved."""
        before, now = flattened(meta["config"]), flattened(to_mapping(self.config))
        changed = [
            f"{name} {_effective(name, before)} -> {_effective(name, now)}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            self.emit(Notice(f"changed since this checkpoint was saved: {', '.join(changed)}", level="info"))
        if (saved_with := meta.get("torch")) != torch.__version__:
            self.emit(
                Notice(f"saved with torch {saved_with}, now {torch.__version__}: results may differ in the last bits")
            )
        earlier, chosen = meta.get("muon_type"), iteration_type(self.trainer.device)
        if earlier not in (None, chosen) and isinstance(self.trainer.optimizer, Muon):
            why = "" if chosen == "bf16" else " (this CPU has no bf16 instructions)"
            text = f"Muon computed in {earlier} when this checkpoint was saved and computes in {chosen} now{why}"
            self.emit(Notice(f"{text}: results may differ in the last bits", level="info"))


def _effective(name: str, settings: Mapping[str, Any]) -> str:
    """What a setting was; of a learning rate or weight decay that was left unset, what it then is."""
    value: Any = settings.get(name)
    kind: Any = settings.get("optimizer.type")  # a forged checkpoint may hold anything
    if value is None and kind in get_args(OptimizerConfig.model_fields["type"].annotation):
        unset = OptimizerConfig(type=kind)
        value = {"optimizer.learning_rate": unset.peak_rate, "optimizer.weight_decay": unset.decay}.get(name)
    return "unset" if value is None else json.dumps(value)


def _interval(setting: int | None, unset: int) -> int:
    return unset if setting is None else setting


def warning_of_failure(callback: Listener) -> Listener:
    """The same listener; before it is dropped, as any that fails, its user is told, however quiet the run is."""

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
            warnings.warn(text, stacklevel=3)
        return
    if name == "SIGINT":
        raise KeyboardInterrupt(text)
    if not shown:
        sys.stderr.write(f"{text}\n")
    raise SystemExit(128 + signal.Signals[name].value)
