"""One whole run: when to log, evaluate, save, stop and resume. What a step does is in `trainer.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from foretrain.config import Config
from foretrain.engine.batches import Batches
from foretrain.engine.described import unwrapped
from foretrain.engine.meters import Stopwatch
from foretrain.engine.objective import block_losses
from foretrain.engine.rates import FollowedRates
from foretrain.engine.result import StepResult
from foretrain.errors import DivergenceError, ForetrainError, InputError, OutOfMemory
from foretrain.events import LEFT_OPEN, Notice, Progress, RunEnded, RunStarted
from foretrain.health import shortage
from foretrain.health.rescue import in_words
from foretrain.hybrid.summary import optimizer_in_words, prediction_progress
from foretrain.launch.group import ALONE
from foretrain.launch.roll import LostRank, Roll
from foretrain.launch.stopping import AgreedStop
from foretrain.loop import words
from foretrain.loop.earlier import begin_with_last
from foretrain.loop.evaluator import Evaluator
from foretrain.loop.forecaster import kind_of
from foretrain.loop.saver import Saver
from foretrain.persist.signals import StopRequest

if TYPE_CHECKING:
    from foretrain.trainer import HybridTrainer

_EVALUATIONS, _SAVES = 10, 5
"""In a run, where no interval is set."""


class Loop:
    """One call of `HybridTrainer.fit`. saver: None where nothing is written."""

    def __init__(
        self,
        trainer: HybridTrainer,
        evaluator: Evaluator,
        saver: Saver | None,
        stop: StopRequest,
        roll: Roll | None = None,
    ) -> None:
        self.roll = roll or Roll(ALONE)
        self.trainer = trainer
        self.engine = trainer.engine
        self.progress = trainer.engine.progress
        self.targets = trainer.targets
        self.emit = trainer.bus.emit
        self.rescue = trainer.rescue
        self.hybrid = trainer.hybrid
        self.forecaster = trainer.forecaster if evaluator.held_out else None
        self.evaluator = evaluator
        self.saver = saver
        self.folder = saver.folder if saver is not None else None
        self.again = self.folder.again if self.folder is not None else "resume=True"
        self.stop = stop
        self.pause_at: int | None = None
        """The run is saved and left at the first step from this one on at which nothing is open."""
        self.last_words = ""
        """What an interrupted run says at its end."""
        self.batches: Batches | None = None
        self.loader_state: dict[str, Any] | None = None
        self.untrained = False
        """A batch was taken, and its step is not done."""
        self.last_batch: Any = None
        self.rewound = False
        """The data was turned back by a rollback and is not opened there yet."""
        self.farthest_log = 0
        self.logged_tokens = 0
        self.logged_seconds = 0.0
        self.began = time.monotonic()
        self.parts_done = 0.0
        """Share of the time of the run at which it was last looked what is due by it."""
        if self.hybrid is not None:
            self.hybrid.judge_by(evaluator.held_out)
        self.engine.first_trained = self._first_trained
        for aside in (trainer.copies, trainer.race):
            if aside is not None:
                aside.interrupted = self._interrupted_aside

    @property
    def config(self) -> Config:
        """The configuration as it is now: the end of a run may become known, and change, while it goes on."""
        return self.engine.config

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations; 0: none."""
        every = self.config.evaluation.interval
        return max(1, self.config.max_steps // _EVALUATIONS) if every is None else every

    @property
    def save_every(self) -> int:
        every = self.config.checkpoint.interval
        return max(1, self.config.max_steps // _SAVES) if every is None else every

    @property
    def spent(self) -> float:
        """Seconds that all parts of the run took so far, with start-up, evaluation and saving."""
        return time.monotonic() - self.began if self.saver is None else self.saver.total_seconds

    def train(
        self,
        loader: Iterable[Any],
        resume: bool,
        title: str,
        details: dict[str, str],
        load_best: bool = False,
        fingerprint: str = "",
    ) -> dict[str, Any]:
        """All steps that are left, and what follows on the last one. Returns the summary. fingerprint: of the data."""
        if resume:
            self._resume()
            self._take_smaller()
        if self.targets is not None:
            self.targets.begin(lambda: self.spent, len(self.evaluator.held_out), self.saver is not None)
            self.parts_done = self.targets.share or 0.0
        if self.folder is not None:
            self.folder.describe()
        kind = kind_of(self.engine, self._title(title), fingerprint, self.evaluator.held_out)
        if self.trainer.race is not None and self.folder is not None and not self.progress.backward_passes:
            begin_with_last(self.trainer.race, kind, self.config.max_steps, self.folder.path, self.roll.group)
        self._announce(title, details)
        if self.forecaster is not None:
            beside = None if self.folder is None or not self.roll.group.first else self.folder.path
            self.forecaster.begin(kind, beside)  # what others have shown, rank 0 alone goes by
        self.engine.clock.start()
        self.logged_tokens, self.logged_seconds = self.progress.tokens, self.engine.clock.seconds
        try:
            reason = self._finish(self._go_on(loader, resume))
            self.engine.clock.stop()
            if load_best and reason not in LEFT_OPEN and self.saver is not None:
                self.saver.load_best()
                if self.trainer.growth is not None and self.progress.best_step is not None:
                    self.trainer.growth.suit(self.progress.best_step)
            if self.trainer.growth is not None and reason not in LEFT_OPEN:
                self.trainer.growth.warn_of_hidden()
            summary = self._summary(reason)
        except BaseException as error:
            failure = self._fail(error)
            self.emit(RunEnded(self.progress.global_step, "failed", self.trainer.summary()))
            if failure is not error:
                raise failure from None
            raise
        finally:
            self.engine.clock.stop()
        self.emit(RunEnded(self.progress.global_step, reason, summary))
        if reason == "interrupted":  # the last that is said
            nothing = "; nothing is saved without out=..., but the model has its weights"
            after = words.how_to_go_on(self.folder) or nothing
            self.last_words = f"{self._interrupted}: stopped after step {self.progress.global_step}{after}"
            self.emit(Notice(self.last_words, level="info"))
        return summary

    def _go_on(self, loader: Iterable[Any], resume: bool) -> str:
        """What an earlier run left undone, then the steps. Returns the reason to end."""
        trainer, progress = self.trainer, self.progress
        trainer.catch_up()
        due = progress.evaluation_due and not self.engine.ended
        if (due and self._evaluate()) or self.evaluator.patience_is_over:
            return "stopped early"
        if self._interrupted and (self._window_due or progress.evaluation_due):
            return "interrupted"  # what comes before the next step was left
        if self.targets is not None and self.targets.evaluation_due and not self.engine.ended:
            self._look()
        if self.engine.ended or self._met:
            if not resume and not self._met:
                done = f"{progress.global_step} of {self.config.max_steps} steps are done"
                self.emit(Notice(f"nothing is left to do: {done}"))
            return "finished"
        if self._pausing:
            return "paused"
        self.batches = Batches(loader, self.emit)
        if self.hybrid is not None:
            self.hybrid.policy.tools.snapshots.loader_state = self.batches.state
        return self._steps(self.batches)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _steps(self, source: Batches) -> str:
        trainer, progress = self.trainer, self.progress
        first = progress.global_step == 0 and progress.position == 0
        self._plan_ahead()
        if self.rescue.retries and self._saved_step < 0:
            self._save(must=False)  # half an update cannot be taken back: there must be something to go back to
        while True:
            with closing(source.after(progress.position, self.loader_state)) as batches:
                for batch in batches:
                    self.rewound, self.untrained, self.last_batch = False, True, batch
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
                    if result.rewound and self.hybrid is not None:
                        snapshots = self.hybrid.policy.tools.snapshots
                        self.loader_state, self.rewound = snapshots.loader_state_then(), True
                    if first:
                        self._check_first(result)
                        first = False
                    reason = self._after(result)
                    if reason is not None:
                        return reason
                    if self.rewound:
                        break

    def _plan_ahead(self) -> None:
        """A leap can jump over a step that is a multiple of an interval: each is due at the first step from it on."""
        step = self.progress.global_step
        self.next_log, self.next_evaluation, self.next_save = (
            (step // every + 1) * every if every else math.inf
            for every in (self.config.log.interval, self.evaluate_every, self.save_every)
        )
        self.reached = step

    def _after(self, result: StepResult) -> str | None:
        """What is due after a step; the reason to stop, if there is one."""
        trainer, step = self.trainer, self.progress.global_step
        self._agree_on_stop(step)
        if self.targets is not None:
            self.targets.after_step()
            self._plan_by_share()
        last = self.engine.ended and not trainer.judging
        if step < self.reached:  # a rollback: what is done again is told, measured and saved again
            self._plan_ahead()
            if self.saver is not None:
                self.saver.prune_best()
        self.reached = step
        if step >= self.next_log or last:
            self.next_log = (step // self.config.log.interval + 1) * self.config.log.interval
            new = self.next_log > self.farthest_log or last
            self.farthest_log = max(self.farthest_log, self.next_log)
            if self._log(result) and new:
                self._check_finite()
        settled = not trainer.judging or (self.hybrid is not None and self.hybrid.chaining)  # a short move comes first
        if step >= self.next_evaluation and not last and settled:
            self.next_evaluation = (step // self.evaluate_every + 1) * self.evaluate_every
            if self._window_due:  # it comes first, in the run that is resumed
                self.progress.evaluation_due = bool(self.evaluator.held_out)
            elif self._evaluate() and self.hybrid is not None:
                self.hybrid.end_soon()
        if self.targets is not None and self.targets.evaluation_due and not last and settled and not self._window_due:
            self._look()
        reason = self.engine.world.agree("finished" if last else self._reason_to_stop(), "the reason to stop")
        if reason is None and step >= self.next_save:
            self.next_save = (step // self.save_every + 1) * self.save_every
            self._save(must=False)
        return reason

    def _agree_on_stop(self, step: int) -> None:
        """Let all processes hear of it where one has got a signal, or called `HybridTrainer.stop`."""
        trainer, stop = self.trainer, self.stop
        if isinstance(stop, AgreedStop) and trainer.stopping:
            stop.ask(trainer.stopped_because)
        stop.after_step(step)
        if isinstance(stop, AgreedStop) and stop.early is not None:
            trainer.stop(stop.early)
            if self.hybrid is not None:
                self.hybrid.end_soon()

    @property
    def stopping_early(self) -> bool:
        """Somebody has called `HybridTrainer.stop`, and all processes know."""
        return self.stop.early is not None if isinstance(self.stop, AgreedStop) else self.trainer.stopping

    def _reason_to_stop(self) -> str | None:
        if self._interrupted:
            return "interrupted"
        growth = self.trainer.growth
        if self._met and not self.trainer.judging:
            if growth is not None:
                growth.end()
            return "finished"
        impatient = self.evaluator.patience_is_over and (growth is None or not growth.on_trial)
        if (self.stopping_early or impatient) and not self.trainer.judging:
            if growth is not None:
                growth.end()
            return "stopped early"
        return "paused" if self._pausing else None

    @property
    def _pausing(self) -> bool:
        reached = self.pause_at is not None and self.progress.global_step >= self.pause_at
        return reached and not (self.trainer.judging or self._window_due or self.progress.evaluation_due)

    def _plan_by_share(self) -> None:
        """In a run by the clock, ten evaluations and five checkpoints come by the share of its time that is over."""
        share = None if self.targets is None else self.targets.share
        if share is None:
            return
        step, before, self.parts_done = self.progress.global_step, self.parts_done, share
        if self.config.evaluation.interval is None:
            passed = int(share * _EVALUATIONS) > int(before * _EVALUATIONS)
            self.next_evaluation = step if passed else max(self.next_evaluation, step + 1)
        if self.config.checkpoint.interval is None:
            passed = int(share * _SAVES) > int(before * _SAVES)
            self.next_save = step if passed else max(self.next_save, step + 1)

    def _evaluate(self) -> bool:
        """Evaluate; True when it is time to stop early."""
        with self._aside("evaluating"), self._at_lower_end():
            return self.evaluator.evaluate()

    def _look(self) -> None:
        """Measure the held-out loss for a target."""
        with self._aside("evaluating"), self._at_lower_end():
            self.evaluator.look()
        if self._met and self.hybrid is not None:
            self.hybrid.end_soon()

    def _aside(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.targets is None else self.targets.aside(what)

    def _at_lower_end(self) -> AbstractContextManager[None]:
        """Where the run would end now: what the optimizer does between two chains of leaps is often taken back."""
        return nullcontext() if self.hybrid is None else self.hybrid.policy.at_lower_end()

    @property
    def _met(self) -> bool:
        return self.targets is not None and self.targets.met

    @property
    def _window_due(self) -> bool:
        return self.hybrid is not None and self.hybrid.window_due

    def _check_first(self, result: StepResult) -> None:
        """A run whose first loss is no number would never learn; fp16 may overflow at first and finds its scale. One
        whose optimizer cannot be saved is not to find out at its first checkpoint."""
        if self.saver is not None:
            self.engine.check_optimizer_state()
        finite_gradient = self.engine.precision.scaled or math.isfinite(result.gradient_norm)
        if not math.isfinite(result.loss) or not finite_gradient:
            raise words.first_loss_is_no_number(result.loss, result.gradient_norm)

    def _log(self, result: StepResult) -> bool:
        """Whether there was anything to tell."""
        reading = self.rescue.again(self.engine.meter.read)
        if reading is None:
            return False
        progress, seconds = self.progress, self.engine.clock.seconds
        progress.last_train_loss = reading.loss
        planned = {} if self.targets is None else self.targets.progress(seconds / max(1, progress.global_step))
        if self.forecaster is not None:
            self.forecaster.trained(progress.global_step, reading.loss)
        speed = (progress.tokens - self.logged_tokens) / max(seconds - self.logged_seconds, 1e-9)
        self.logged_tokens, self.logged_seconds = progress.tokens, seconds
        self.emit(
            Progress(
                step=progress.global_step,
                loss=reading.loss,
                gradient_norm=reading.gradient_norm,
                learning_rate=result.learning_rate,
                tokens=progress.tokens,
                tokens_per_second=round(speed, 1),
                seconds=round(seconds, 3),
                skipped_steps=self.engine.meter.skipped,
                phase=result.phase,
                blocks=block_losses(self.engine.objective, self.engine.world),
                **({} if self.hybrid is None else prediction_progress(self.engine, self.hybrid.policy)),
                **planned,
            )
        )
        if reading.skipped:
            self.emit(
                Notice(f"{reading.skipped} of the last {reading.steps} steps were not finite and changed nothing")
            )
        return True

    def _check_finite(self) -> None:
        engine, guard, rate = self.engine, self.config.guard, self.trainer.checkup.levers.rate
        loss = self.progress.last_train_loss
        if guard.nan_check and engine.meter.skipped_in_a_row >= guard.max_skipped_steps:
            self._save(must=False)
            raise DivergenceError(words.skipped_in_a_row(engine, rate, self.again, words.how_to_go_on(self.folder)))
        if not guard.nan_check and loss != loss:
            raise DivergenceError(words.loss_is_nan(self.progress.global_step, rate, self.again))

    # --- the beginning and the end -----------------------------------------------------------------------------------

    def _announce(self, title: str, details: dict[str, str]) -> None:
        engine = self.engine
        parameters = list(engine.model.parameters())
        self.emit(
            RunStarted(
                step=self.progress.global_step,
                max_steps=self.config.max_steps if self.engine.has_end else 0,
                parameters=sum(p.numel() for p in parameters),
                trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
                device=str(engine.device),
                precision=engine.precision.name,
                title=self._title(title),
                details=details,
                unit=engine.unit,
                optimizer=optimizer_in_words(engine),
                costs=() if self.trainer.growth is None else self.trainer.growth.costs(),
                planned=self.targets is not None,
            )
        )
        if self.config.schedule.type == "cyclic" and not isinstance(engine.rate, FollowedRates):
            self.emit(Notice("schedule.type = 'cyclic' disturbs prediction; wsd is the better choice for hybrid runs"))

    def _title(self, title: str) -> str:
        return title or type(unwrapped(self.engine.model)).__name__

    @property
    def _interrupted(self) -> str:
        """The signal, or the order of own code, to stop after this step and save."""
        order = self.engine.fence.order
        return self.stop.requested or ("" if order is None else type(order).__name__)

    def _interrupted_aside(self) -> bool:
        """Whether to leave a copy of the run after its step. Several processes agree on that; orders of a process's own
        code wait there until the copy is made."""
        if not isinstance(self.stop, AgreedStop):
            return bool(self._interrupted)
        self.stop.after_step(self.progress.global_step)
        return bool(self.stop.requested)

    def _finish(self, reason: str) -> str:
        """Last evaluation and last checkpoint; an interrupted run is saved at once. Returns the reason to end, which an
        order in the last evaluation changes."""
        if reason in LEFT_OPEN:
            if reason == "interrupted" or self._saved_step != self.progress.global_step:
                self._save(must=True)
            return reason
        progress = self.progress
        if not self.engine.ended and self.last_batch is not None:
            self.trainer.finish(self.last_batch)
        complete = self._saved_step == progress.global_step and not progress.evaluation_due
        end_loss = None if self.hybrid is None else self.hybrid.policy.end_loss
        if end_loss is not None:
            progress.last_train_loss = end_loss
        if reason == "finished" and self.evaluator.held_out and not complete:
            self.evaluator.evaluate()
            if progress.evaluation_due:
                return self._finish("interrupted")
        self.trainer.checkup.finish()
        if self.trainer.race is not None:
            self.trainer.race.finish()
        if not complete:
            self.trainer.copies.end()
            self._save(must=True)
        if self.saver is not None:
            self.saver.prune_best()
        return reason

    def _summary(self, reason: str) -> dict[str, Any]:
        summary = self.trainer.summary() | {"reason": reason, "total_seconds": round(self.spent, 3)}
        if reason == "interrupted":
            summary["signal"] = self._interrupted
        if reason == "stopped early" and self.trainer.stopped_because:
            summary["stopped_because"] = self.trainer.stopped_because
        if self.saver is not None:
            summary["best_checkpoint"] = self.saver.best_checkpoint
            self.saver.folder.write_summary(summary)
        return summary

    def _fail(self, error: BaseException) -> BaseException:
        """Save what can be saved. Returns the error to end with."""
        if not self.roll.group.alone:
            return self._fail_among_others(error)
        found = shortage.look_at(error)
        if found is not None:  # outside of everything that can be done again
            error = OutOfMemory(f"{self.rescue.explain(found)}; {self.rescue.advice()}")
        if isinstance(error, OutOfMemory):
            if error.intact and self._saved_step != self.progress.global_step:
                self._save(must=False)
            stands = words.what_stands(self._saved_step, self.folder)
            error.args = (f"{error}. {stands[0].upper()}{stands[1:]}",)
        elif isinstance(error, DivergenceError):
            self.trainer.checkup.finish()
        elif not isinstance(error, ForetrainError):
            self._save_what_is_sound(error)
        return error

    def _fail_among_others(self, error: BaseException) -> BaseException:
        """Nothing can be saved: that takes all processes, and the others are in the middle of a step."""
        stands = words.what_stands(self._saved_step, self.folder)
        lost = self.roll.explain(error)
        if lost is not None:
            return LostRank(f"{lost}. {stands[0].upper()}{stands[1:]}")
        found = shortage.look_at(error)
        if found is None and not isinstance(error, OutOfMemory):
            return error
        text = str(error) if found is None else f"{self.rescue.explain(found)}; {self.rescue.advice()}"
        if self.folder is not None and (changes := self.rescue.smaller(self.roll.group.size)):
            self.folder.note_smaller(changes)
            text += f". The next attempt begins with {in_words(changes)}"
        return OutOfMemory(f"{text}. {stands[0].upper()}{stands[1:]}")

    def _save_what_is_sound(self, error: BaseException) -> None:
        """The user's model, loss or loader ended the run: the steps up to there are not lost. A second Ctrl-C does not
        wait for it."""
        if self.saver is None or self.progress.backward_passes == 0 or self._interrupted:
            return
        if self.rescue.sound and self.saver.saved_step != self.progress.global_step:
            if self.untrained and self.batches is not None:
                self.batches.give_back()
            try:
                self._save(must=False)
            except Exception as other:  # noqa: BLE001 - what ended the run is what its user must see
                self.emit(Notice(f"the state could not be saved ({type(other).__name__}: {other})"))
        if self.saver.saved_step >= 0:
            stands = words.what_stands(self.saver.saved_step, self.folder)
            self.emit(Notice(f"{type(error).__name__} after step {self.progress.global_step}: {stands}"))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def _saved_step(self) -> int:
        return -1 if self.saver is None else self.saver.saved_step

    def _save(self, must: bool) -> None:
        if self.saver is not None:
            with self._aside("saving"):
                self.saver.save(must, self._place)

    def _place(self) -> Any:
        """Where the data is, for a checkpoint."""
        return self.loader_state if self.batches is None or self.rewound else self.batches.state()

    def _resume(self) -> None:
        if self.saver is None:
            raise InputError("resume needs a run folder; name it with out=...")
        self.loader_state = self.saver.resume()

    def _take_smaller(self) -> None:
        """Memory ran out in an earlier attempt: this one begins with the smaller settings that it has noted."""
        folder = self.folder
        noted = "" if folder is None else self.roll.group.from_first(folder.smaller)
        if noted:
            self.rescue.begin_with(noted)

    def _go_back(self, error: OutOfMemory) -> bool:
        """To the last checkpoint, with smaller settings, when memory ran out in the middle of an update."""
        saver, rescue, engine = self.saver, self.rescue, self.engine
        if not (error.half_done and rescue.retries) or saver is None or saver.saved_step < 0:
            return False
        text = f"{str(error).partition('; to make it fit')[0]}; back to the checkpoint of step {saver.saved_step}"
        if not rescue.shrink(None, text):
            return False
        spent, settings, earlier = engine.clock.seconds, rescue.settings, saver.earlier_seconds
        self._resume()
        saver.earlier_seconds = earlier
        rescue.settings = settings  # what was saved may have had larger ones
        engine.use(settings)
        engine.clock = Stopwatch(spent)
        engine.clock.start()
        self.logged_tokens, self.logged_seconds = self.progress.tokens, spent
        self._plan_ahead()
        return True

    def _first_trained(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Weights are trained that nobody saved so far: what is saved next holds them."""
        if math.isfinite(self.next_save):
            self.next_save = min(self.next_save, self.progress.global_step)
        if self.saver is not None:
            self.saver.complete_best(weights)
