"""Evaluations of a run: the held-out loss, the user's metrics, and whether patience is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from foretrain.engine.batch import rows_of, split
from foretrain.engine.engine import Engine
from foretrain.engine.fence import Failure, Ordered
from foretrain.engine.memory.usage import MemoryMeter
from foretrain.engine.own import Measure
from foretrain.errors import OutOfMemory
from foretrain.events import Evaluated, Event, Notice
from foretrain.health import shortage
from foretrain.health.rescue import Rescue
from foretrain.hybrid.failures import tell


class Evaluator:
    """Measures held-out batches at the weights that evaluations are made at, and keeps the record of them."""

    def __init__(
        self,
        engine: Engine,
        held_out: list[Any],
        metrics: Mapping[str, Measure],
        memory: MemoryMeter,
        rescue: Rescue,
        emit: Callable[[Event], None],
        *,
        evaluated: Callable[[float], None],
        looked: Callable[[float], None] = lambda loss: None,
        is_best: Callable[[float], None] | None = None,
    ) -> None:
        """evaluated: called with every loss, when all else is done; looked: with one that only a target asked for.
        is_best: called where a loss is the lowest."""
        self.engine = engine
        self.held_out = held_out
        self.metrics = metrics
        self.memory = memory
        self.rescue = rescue
        self.emit = emit
        self.patience = engine.config.evaluation.early_stopping_patience
        self.evaluated = evaluated
        self.looked = looked
        self.is_best = is_best
        self._failed_metrics: set[str] = set()

    @property
    def patience_is_over(self) -> bool:
        return bool(self.patience) and self.engine.progress.evaluations_without_best >= self.patience

    def evaluate(self) -> bool:
        """Measure the held-out loss; True when it is time to stop early."""
        if not self.held_out:
            return False
        engine, progress = self.engine, self.engine.progress
        progress.evaluation_due = True
        with engine.untimed(), self.memory.during("evaluation"):
            started = time.perf_counter()
            loss = self._held_out_loss()
            try:
                progress.last_metrics = engine.forward.measure(self.held_out, self.metrics, self._metric_failed)
            except Ordered:  # the run stops here, and is resumed with this evaluation
                return False
            seconds = time.perf_counter() - started
        best = loss == loss and (progress.best_val_loss is None or loss < progress.best_val_loss)
        best = engine.world.agree(best, "whether the held-out loss is the lowest")
        progress.last_val_loss = loss
        progress.evaluations_without_best = 0 if best else progress.evaluations_without_best + 1
        if best:
            progress.best_val_loss, progress.best_step = loss, progress.global_step
        averaged, metrics = engine.average is not None, dict(progress.last_metrics)
        self.emit(Evaluated(progress.global_step, loss, round(seconds, 3), averaged, best, metrics))
        if best and self.is_best is not None:
            self.is_best(loss)
        self.evaluated(loss)
        progress.evaluation_due = False
        return self.patience_is_over

    def look(self) -> None:
        """Measure the held-out loss for a target alone: patience, best weights and schedulers know nothing of it."""
        engine, progress = self.engine, self.engine.progress
        with engine.untimed(), self.memory.during("evaluation"):
            started = time.perf_counter()
            loss = self._held_out_loss()
            seconds = time.perf_counter() - started
        progress.last_val_loss = loss
        self.emit(Evaluated(progress.global_step, loss, round(seconds, 3), engine.average is not None, best=False))
        self.looked(loss)

    def _metric_failed(self, name: str, failure: Failure) -> None:
        """Told once; it is called again at the next evaluation. name: empty where it is not known which one."""
        if name in self._failed_metrics:
            return
        self._failed_metrics.add(name)
        tell(failure, self.engine.progress.global_step, self.emit)
        text = f"{failure.where} failed ({failure.error})" if name else f"{failure.where}: {failure.error}"
        self.emit(Notice(f"{text}; the run goes on"))

    def _held_out_loss(self) -> float:
        """The mean over all held-out batches; where memory runs out and that is to be borne, over halves of them."""
        freed = False
        while True:
            try:
                return self.engine.forward.evaluate(self.held_out)
            except (RuntimeError, MemoryError) as error:
                found = shortage.look_at(error)
                if found is None:
                    raise
                text = self.rescue.explain(found)
            self.engine.release()
            halves = [split(batch, 2, index) for batch in self.held_out for index in range(2)]
            halves = [half for half in halves if rows_of(half)]
            whole = len(halves) == len(self.held_out)
            if not self.rescue.retries or (whole and freed):
                raise OutOfMemory(f"{text}; {self.rescue.advice()}", intact=True)
            self.held_out, freed = halves, True
            self.rescue.tell(f"{text}; {'once more' if whole else 'held-out batches are halved'}")
