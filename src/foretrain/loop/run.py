"""One whole run: when to log, evaluate, save, stop and resume. What a step does is in `trainer.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from foretrain.engine.batches import Batches
from foretrain.engine.described import unwrapped
from foretrain.engine.meters import Stopwatch
from foretrain.engine.objective import block_losses
from foretrain.engine.rates import FollowedRates
from foretrain.engine.result import StepResult
from foretrain.errors import DivergenceError, ForetrainError, InputError, OutOfMemory
from foretrain.events import Notice, Progress, RunEnded, RunStarted
from foretrain.health import shortage
from foretrain.hybrid.summary import optimizer_in_words, prediction_progress
from foretrain.loop import words
from foretrain.loop.evaluator import Evaluator
from foretrain.loop.saver import Saver
from foretrain.persist.signals import StopRequest

if TYPE_CHECKING:
    from foretrain.trainer import HybridTrainer


class Loop:
    """One call of `HybridTrainer.fit`. saver: None where nothing is written."""

    def __init__(self, trainer: HybridTrainer, evaluator: Evaluator, saver: Saver | None, stop: StopRequest) -> None:
        self.trainer = trainer
        self.engine = trainer.engine
        self.progress = trainer.engine.progress
        self.config = trainer.config
        self.emit = trainer.bus.emit
        self.rescue = trainer.rescue
        self.hybrid = trainer.hybrid
        self.evaluator = evaluator
        self.saver = saver
        self.folder = saver.folder if saver is not None else None
        self.again = self.folder.again if self.folder is not None else "resume=True"
        self.stop = stop
        self.last_words = ""
        """What an interrupted run says at its end."""
        self.batches: Batches | None = None
        self.loader_state: dict[str, Any] | None = None
        self.untrained = False
        """A batch was taken, and its step is not done."""
        self.rewound = False
        """The data was turned back by a rollback and is not opened there yet."""
        self.farthest_log = 0
        self.logged_tokens = 0
        self.logged_seconds = 0.0
        self.began = time.monotonic()
        max_steps, evaluate, save = self.config.max_steps, self.config.evaluation, self.config.checkpoint
        self.evaluate_every = max(1, max_steps // 10) if evaluate.interval is None else evaluate.interval
        self.save_every = max(1, max_steps // 5) if save.interval is None else save.interval
        if self.hybrid is not None:
            self.hybrid.judge_by(evaluator.held_out)
        self.engine.first_trained = self._first_trained

    def train(
        self, loader: Iterable[Any], resume: bool, title: str, details: dict[str, str], load_best: bool = False
    ) -> dict[str, Any]:
        """All steps that are left, and what follows on the last one. Returns the summary."""
        if resume:
            self._resume()
        if self.folder is not None:
            self.folder.describe()
        self._announce(title, details)
        self.engine.clock.start()
        self.logged_tokens, self.logged_seconds = self.progress.tokens, self.engine.clock.seconds
        try:
            reason = self._finish(self._go_on(loader, resume))
            self.engine.clock.stop()
            if load_best and reason != "interrupted" and self.saver is not None:
                self.saver.load_best()
                if self.trainer.growth is not None and self.progress.best_step is not None:
                    self.trainer.growth.suit(self.progress.best_step)
            if self.trainer.growth is not None and reason != "interrupted":
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
        due = progress.evaluation_due and progress.global_step < self.config.max_steps
        if (due and self.evaluator.evaluate()) or self.evaluator.patience_is_over:
            return "stopped early"
        if self._interrupted and (self._window_due or progress.evaluation_due):
            return "interrupted"  # what comes before the next step was left
        if progress.global_step >= self.config.max_steps:
            if not resume:
                done = f"{progress.global_step} of {self.config.max_steps} steps are done"
                self.emit(Notice(f"nothing is left to do: {done}"))
            return "finished"
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
                    self.rewound, self.untrained = False, True
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
        last = step >= self.config.max_steps and not trainer.judging
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
            elif self.evaluator.evaluate() and self.hybrid is not None:
                self.hybrid.end_soon()
        reason = self.engine.world.agree("finished" if last else self._reason_to_stop())
        if reason is None and step >= self.next_save:
            self.next_save = (step // self.save_every + 1) * self.save_every
            self._save(must=False)
        return reason

    def _reason_to_stop(self) -> str | None:
        if self._interrupted:
            return "interrupted"
        growth = self.trainer.growth
        impatient = self.evaluator.patience_is_over and (growth is None or not growth.on_trial)
        if (self.trainer.stopping or impatient) and not self.trainer.judging:
            if growth is not None:
                growth.end()
            return "stopped early"
        return None

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
                max_steps=self.config.max_steps,
                parameters=sum(p.numel() for p in parameters),
                trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
                device=str(engine.device),
                precision=engine.precision.name,
                title=title or type(unwrapped(engine.model)).__name__,
                details=details,
                unit=engine.unit,
                optimizer=optimizer_in_words(engine),
            )
        )
        if self.config.schedule.type == "cyclic" and not isinstance(engine.rate, FollowedRates):
            self.emit(Notice("schedule.type = 'cyclic' disturbs prediction; wsd is the better choice for hybrid runs"))

    @property
    def _interrupted(self) -> str:
        """The signal, or the order of own code, to stop after this step and save."""
        order = self.engine.fence.order
        return self.stop.requested or ("" if order is None else type(order).__name__)

    def _finish(self, reason: str) -> str:
        """Last evaluation and last checkpoint; an interrupted run is saved at once. Returns the reason to end, which an
        order in the last evaluation changes."""
        if reason == "interrupted":
            self._save(must=True)
            return reason
        progress = self.progress
        complete = self._saved_step == progress.global_step and not progress.evaluation_due
        end_loss = None if self.hybrid is None else self.hybrid.policy.end_loss
        if reason == "finished" and end_loss is not None:
            progress.last_train_loss = end_loss
        if reason == "finished" and self.evaluator.held_out and not complete:
            self.evaluator.evaluate()
            if progress.evaluation_due:
                return self._finish("interrupted")
        self.trainer.checkup.finish()
        if not complete:
            self._save(must=True)
        if self.saver is not None:
            self.saver.prune_best()
        return reason

    def _summary(self, reason: str) -> dict[str, Any]:
        seconds = time.monotonic() - self.began if self.saver is None else self.saver.total_seconds
        summary = self.trainer.summary() | {"reason": reason, "total_seconds": round(seconds, 3)}
        if reason == "interrupted":
            summary["signal"] = self._interrupted
        if self.saver is not None:
            summary["best_checkpoint"] = self.saver.best_checkpoint
            self.saver.folder.write_summary(summary)
        return summary

    def _fail(self, error: BaseException) -> BaseException:
        """Save what can be saved. Returns the error to end with."""
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
            self.saver.save(must, self._place)

    def _place(self) -> Any:
        """Where the data is, for a checkpoint."""
        return self.loader_state if self.batches is None or self.rewound else self.batches.state()

    def _resume(self) -> None:
        if self.saver is None:
            raise InputError("resume needs a run folder; name it with out=...")
        self.loader_state = self.saver.resume()

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
