"""What a guest tells: the log, the held-out loss, forecasts and the page of its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.described import unwrapped
from foretrain.engine.fence import OwnCodeError
from foretrain.engine.memory.usage import MemoryMeter
from foretrain.events import Bus, Evaluated, Event, Notice, Progress, Resumed, RunEnded, RunStarted
from foretrain.guest.engine import GuestEngine
from foretrain.guest.leaps import GuestHybrid
from foretrain.hybrid import summary as summaries
from foretrain.loop.forecaster import LossForecaster, kind_of
from foretrain.persist.codec import same_random_numbers
from foretrain.persist.files import user_path
from foretrain.persist.folder import RunFolder
from foretrain.show.listening import listen

_NEVER_STEADY = (
    "the learning rate changes all the way, and leaps wait while it warms up or decays: none will be tried; a schedule "
    "that stays constant for a while (constant, or warm-up, stable, decay) lets them"
)
_DEAR = 8.0
"""Full steps that a look at the probe may cost before that is told. Chosen: a leap then costs a window or more."""
_EVALUATIONS = 10
"""In a run, where no interval is set."""


class GuestVoice:
    """Tells listeners of a run that somebody else makes. It reads the device once per `log.interval`."""

    def __init__(
        self, engine: GuestEngine, hybrid: GuestHybrid, probe: list[Any], bus: Bus, emit: Callable[[Event], None]
    ) -> None:
        self.engine, self.hybrid, self.probe = engine, hybrid, probe
        self.bus, self.emit = bus, emit
        self.memory = MemoryMeter(engine.device, on=False)
        self.forecaster: LossForecaster | None = None
        if engine.config.forecast.enabled:
            self.forecaster = LossForecaster(engine, lambda: (), emit)
        self.gradient_norm: Tensor | None = None
        """It is that of the last step."""
        self.next_log = self.next_evaluation = 0
        self._logged = (0, 0.0)
        self._unsteady = False
        self._measured_at = -1
        """The held-out loss is known at this step."""
        self._stack = ExitStack()
        self._folder: RunFolder | None = None

    # --- the beginning ------------------------------------------------------------------------------------------------

    def begin(self, out: str | Path | None, overwrite: bool, origin: str) -> None:
        """Open the folder, say what is trained, and look at the probe for the first time. origin: of the state."""
        engine, resumed, first = self.engine, bool(origin), self.engine.world.rank == 0
        if out is not None and first:
            folder = RunFolder(user_path(out, "out"), resumed, overwrite, in_python=True)
            folder.again = "the checkpoint of the loop that it belongs to"
            self._folder = self._stack.enter_context(folder)
            if overwrite and not resumed:
                folder.clear()
        if first:
            self._listen(resumed)
        self._announce()
        self.resume(origin)
        if engine.progress.global_step == 0:
            self.evaluate()
        if engine.config.hybrid.mode == "off":
            return
        if (price := self.hybrid.policy.tools.probes.price(None)) > _DEAR:
            text = (
                f"one look at the probe costs about {price:.0f} steps, and a leap takes three to nine: a few batches do"
            )
            self.emit(Notice(text))
        self._tell_unsteady()

    def _tell_unsteady(self) -> None:
        """Once: that no leap will be tried."""
        if not self._unsteady and self.engine.rate_never_steady:
            self._unsteady = True
            self.emit(Notice(_NEVER_STEADY))

    def resume(self, origin: str) -> None:
        """Go on at the step that the run is at. origin: of the state that was put back; empty if none was."""
        engine, step = self.engine, self.engine.progress.global_step
        if origin:
            self.emit(Resumed(step, origin))
        self.next_log, self.next_evaluation = (
            (step // every + 1) * every if every else 0 for every in (engine.config.log.interval, self.evaluate_every)
        )
        engine.clock.start()
        self._logged = (step, engine.clock.seconds)

    def _listen(self, resumed: bool) -> None:
        """The console says only what needs attention, unless its level was asked for: a host shows its own progress."""
        config = self.engine.config
        level = config.log.console if "console" in config.log.model_fields_set else "quiet"
        settings = summaries.settings_of(self.engine)
        listen(self._stack, self.bus, config, self._folder, resume=resumed, level=level, table=False, settings=settings)

    def _announce(self) -> None:
        engine = self.engine
        step, parameters = engine.progress.global_step, list(engine.model.parameters())
        title = type(unwrapped(engine.model)).__name__
        kind = kind_of(engine, title, "", self.probe)
        self.emit(
            RunStarted(
                step=step,
                max_steps=engine.config.max_steps if engine.has_end else 0,
                parameters=sum(p.numel() for p in parameters),
                trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
                device=str(engine.device),
                precision=engine.precision.name,
                title=title,
                details={} if self._folder is None else {"folder": str(self._folder.path)},
                unit=engine.unit,
                optimizer=summaries.optimizer_in_words(engine),
            )
        )
        if self.forecaster is not None:
            self.forecaster.begin(kind, None if self._folder is None else self._folder.path)

    # --- steps

    @property
    def evaluate_every(self) -> int:
        """Steps between two looks at the probe, for the held-out loss; 0: none."""
        every = self.engine.config.evaluation.interval
        if not self.probe:
            return 0
        return max(1, self.engine.config.max_steps // _EVALUATIONS) if every is None else every

    def tell(self) -> None:
        """Tell what is due after a step."""
        step = self.engine.progress.global_step
        if step >= self.next_log:
            every = self.engine.config.log.interval
            self.next_log = (step // every + 1) * every
            self.log()
            if self.engine.config.hybrid.mode != "off" and step >= 2 * self.engine.config.hybrid.warmup_steps:
                self._tell_unsteady()
        if self.evaluate_every and step >= self.next_evaluation:
            self.next_evaluation = (step // self.evaluate_every + 1) * self.evaluate_every
            self.evaluate()

    def log(self) -> None:
        """Tell the means since the last time."""
        engine, progress = self.engine, self.engine.progress
        reading, seconds = engine.meter.read(), engine.clock.seconds
        loss, norm = torch.nan, torch.nan
        if reading is not None:
            loss, norm = reading.loss, reading.gradient_norm
            progress.last_train_loss = loss
            if self.forecaster is not None:
                self.forecaster.trained(progress.global_step, loss)
        elif self.gradient_norm is not None:
            norm = engine.world.to_host(self.gradient_norm)[0]
        step, before = self._logged
        speed = (progress.global_step - step) / max(seconds - before, 1e-9)
        self._logged = (progress.global_step, seconds)
        self.emit(
            Progress(
                step=progress.global_step,
                loss=loss,
                gradient_norm=norm,
                learning_rate=float(engine.rate.used),
                tokens=progress.tokens,
                tokens_per_second=round(speed, 1),
                seconds=round(seconds, 3),
                skipped_steps=engine.meter.skipped,
                phase=self.hybrid.phase.value,
                **summaries.prediction_progress(engine, self.hybrid.policy),
            )
        )

    # --- the held-out loss -------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Look at the probe: it is never trained on."""
        if not self.evaluate_every:
            return
        started = time.perf_counter()
        try:
            with self.engine.untimed(), same_random_numbers():
                loss = self.engine.probe_all(self.probe)
        except OwnCodeError as error:
            self.hybrid.policy.fail(error.failure)
            return
        self.note_held_out(loss, time.perf_counter() - started)

    def note_held_out(self, loss: float, seconds: float) -> None:
        """A held-out loss was measured."""
        progress = self.engine.progress
        self._measured_at = progress.global_step
        best = loss == loss and (progress.best_val_loss is None or loss < progress.best_val_loss)
        progress.last_val_loss = loss
        if best:
            progress.best_val_loss, progress.best_step = loss, progress.global_step
        self.emit(Evaluated(progress.global_step, loss, round(seconds, 3), averaged_weights=False, best=best))
        self.hybrid.checkup.evaluated(loss)
        if self.forecaster is not None:
            self.forecaster.evaluated(loss)

    # --- the end -----------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What was seen, tried and kept so far."""
        engine, hybrid = self.engine, self.hybrid
        summary = summaries.of_steps(engine, self.memory) | summaries.of_prediction(engine, hybrid)
        ledger, tried = hybrid.policy.score.ledger, hybrid.policy.score.counts.tried
        if engine.config.hybrid.mode == "off":
            summary["audit"]["sentence"] = "the run was only watched: " + (
                "hybrid.mode is off" if self.probe else "without a probe nothing judges a leap"
            )
        elif not tried and engine.rate_never_steady:
            summary["audit"]["sentence"] = "prediction was not tried: the learning rate was never steady"
        elif ledger.exact_moves:
            leaps = "1 leap was" if ledger.exact_moves == 1 else f"{ledger.exact_moves} leaps were"
            cost = f"looking took {summary['audit']['cost_percent']:.1f} % of the time"
            summary["audit"]["sentence"] = f"{leaps} kept, for a lower loss on the probe, of {tried} tried; {cost}"
        if self.forecaster is not None:
            summary["loss_forecast"] = self.forecaster.summary()
        return summary | hybrid.checkup.summary() | hybrid.rescue.summary()

    def end(self, failed: bool) -> None:
        """Tell the last numbers, write summary and page, and let the folder go."""
        engine = self.engine
        step = engine.progress.global_step
        with self._stack:
            if not failed:
                if self._logged[0] < step:
                    self.log()
                if self._measured_at < step:
                    self.evaluate()
                self.hybrid.checkup.finish()
            engine.clock.stop()
            reason = "failed" if failed else "finished" if engine.ended else "stopped early"
            summary = self.summary() | {"reason": reason, "total_seconds": round(engine.clock.seconds, 3)}
            if self._folder is not None:
                self._folder.write_summary(summary)
            self.emit(RunEnded(step, reason, summary))
