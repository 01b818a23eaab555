"""One worker of a sweep: takes the piece that is due, trains it, tells how the trial stands, and takes the next."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretrain.config import Config, changed
from foretrain.environment import wait_shortly
from foretrain.errors import ConfigError, DivergenceError, ForetrainError, InputError, OutOfMemory, SaveError
from foretrain.events import LEFT_OPEN, Event, Progress, RunStarted
from foretrain.show.follow import read_runs
from foretrain.show.numbers import finite
from foretrain.show.outlet import shortened
from foretrain.sweep.pieces import rung_steps, trial_config
from foretrain.sweep.place import SPACE_FILE, Claim, SweepFolder
from foretrain.sweep.policy import HalvingPolicy, NextPiece
from foretrain.sweep.records import TrialRecord
from foretrain.sweep.scoring import rate_plan, standing
from foretrain.sweep.space import Space, read_space
from foretrain.sweep.study import SweepStudy

_IDLE_SECONDS = 0.5
_MOST_DEATHS = 5
"""A trial whose workers died this often while they trained it, with no checkpoint between, is given up."""


def policy_of(space: Space) -> HalvingPolicy:
    """Return how a sweep decides."""
    asked = space.settings
    return HalvingPolicy(
        space.trials, len(asked.rungs), asked.reduction, asked.references, asked.audit_share, asked.seed
    )


class SweepStopped(ForetrainError):
    """A signal asked for the end; the run was saved."""


class Worker:
    """Works until nothing is left to do. index: chooses the GPU where there are several."""

    def __init__(self, folder: SweepFolder, space: Space, index: int = 0, parent: int | None = None) -> None:
        self.folder = folder
        self.space = space
        self.index = index
        self.parent = parent
        """The process that must be alive; None: whoever started this one may go."""
        self.study = SweepStudy(space, folder.path)
        self.policy = policy_of(space)
        self.place = folder.place

    def work(self, wait: Callable[[float], None] = time.sleep) -> None:
        """Do piece after piece until the sweep is over: what others are at may make trials of this place due again."""
        while not self._orphaned:
            self.study.show_life(self.place)
            with self.folder.deciding():
                records = self.study.current_records(self.place)
                taken = self._take(records)
            if taken is not None:
                record, claim = taken
                try:
                    self._carry_out(record, claim)
                finally:
                    claim.release()
            elif self.policy.is_complete(records):
                return
            else:
                wait(_IDLE_SECONDS)

    @property
    def _orphaned(self) -> bool:
        return self.parent is not None and os.getppid() != self.parent

    # --- choosing ----------------------------------------------------------------------------------------------------

    def _take(self, records: list[TrialRecord]) -> tuple[TrialRecord, Claim] | None:
        """Claim the next piece: first what a worker that died has left, then what the policy says."""
        for record in records:
            if record.open and (record.place == self.place or self.study.nameless(record)):
                claim = self._claim(record)
                if claim is not None:
                    return self._take_over(record), claim
        piece = self.policy.next_piece(records, lambda record: record.place == self.place)
        return None if piece is None else self._begin(piece, records)

    def _claim(self, record: TrialRecord) -> Claim | None:
        """Claim a trial that is still as the record says: its worker may have come to a rung since that was read."""
        claim = self.folder.claim(record.number)
        if claim is not None and self.study.records()[record.number].state != record.state:
            claim.release()
            return None
        return claim

    def _take_over(self, record: TrialRecord) -> TrialRecord:
        if len(record.values) < len(self.space.ranges):
            record = self.study.complete_trial(record)
        if self.folder.told_step(record.number) >= 0:  # its run had begun: perhaps it is what kills its workers
            saved = self.folder.saved_step(record.number)
            deaths = record.deaths + 1 if saved == record.died_at else 1
            record = record.with_changes(deaths=deaths, died_at=saved)
        return self._mark(record)

    def _begin(self, piece: NextPiece, records: list[TrialRecord]) -> tuple[TrialRecord, Claim] | None:
        record = self.study.new_trial() if piece.number is None else records[piece.number]
        if record is None:
            return None
        claim = self._claim(record)
        if claim is None:
            return None
        if piece.why == "audit" and not record.audited:
            record = record.with_changes(audited_from=record.rung)
        return self._mark(record), claim

    def _mark(self, record: TrialRecord) -> TrialRecord:
        record = record.with_changes(state="running", place=self.place)
        self.study.write(record)
        return record

    # --- one piece ---------------------------------------------------------------------------------------------------

    def _carry_out(self, record: TrialRecord, claim: Claim) -> None:
        """Train up to the next rung. What goes wrong with the trial itself ends the trial; all else ends the worker,
        and the trial goes on later."""
        if record.deaths >= _MOST_DEATHS:
            self._tell_failure(record, f"its worker died {record.deaths} times after step {max(0, record.died_at)}")
            return
        begun: list[bool] = []
        try:
            config = self._on_device(trial_config(self.space, record.values))
            steps = rung_steps(config, self.space.settings.rungs)
            rung = record.rung + 1
            record = record.with_changes(total_steps=config.max_steps)
            pause = steps[rung] if rung < len(steps) else None
            summary = self._train(record, config, pause, claim, begun)
        except (DivergenceError, OutOfMemory, ConfigError) as error:
            self._tell_failure(record, str(error))
            return
        except InputError as error:
            if not begun or type(error) is not InputError:
                raise
            self._tell_failure(record, str(error))
            return
        if summary["reason"] == "interrupted":
            raise SweepStopped(f"{summary['signal']}: trial {record.number} is saved at step {summary['global_step']}")
        self._tell_piece(record, rung, config, summary)

    def _train(
        self, record: TrialRecord, config: Config, pause: int | None, claim: Claim, begun: list[bool]
    ) -> dict[str, Any]:
        if config.preset == "finetune":
            from foretrain.recipes.finetune import finetune as run
        else:
            from foretrain.recipes.train import train as run
        path = self.folder.run(record.number)
        claim.tell(-1)

        def listen(event: Event) -> None:
            if isinstance(event, RunStarted):
                begun.append(True)
                claim.tell(event.step)
            if isinstance(event, Progress):
                claim.tell(event.step)
                with contextlib.suppress(SaveError):  # a storage that is gone is told of when the piece is done
                    self.study.show_life(self.place)
                if self._orphaned:
                    os.kill(os.getpid(), signal.SIGTERM)  # the run saves itself and ends

        started = path.is_dir() and any(path.iterdir())
        return run(config, path, resume=started, progress=False, table=False, listeners=[listen], pause_at=pause)

    def _on_device(self, config: Config) -> Config:
        """Give each worker a GPU of its own, as far as there are several."""
        if config.device != "auto":
            return config
        import torch

        count = torch.cuda.device_count()
        return changed(config, {"device": f"cuda:{self.index % count}"}) if count > 1 else config

    # --- telling -----------------------------------------------------------------------------------------------------

    def _tell_piece(self, record: TrialRecord, rung: int, config: Config, summary: dict[str, Any]) -> None:
        record = self.with_curve(record).with_changes(step=int(summary["global_step"]), deaths=0)
        if summary["reason"] in LEFT_OPEN:
            others = [one for one in self.study.records() if one.number != record.number]
            stands = {**record.standings, rung: standing(record, rung, rate_plan(config), others)}
            record = record.with_changes(state="paused", rung=rung, standings=stands)
            if not math.isfinite(stands[rung].score):
                record = record.with_changes(state="failed", reason="its held-out loss is no number")
        else:
            final = finite(summary["final_val_loss"])
            record = record.with_changes(state="finished", rung=len(self.space.settings.rungs), final=final)
            if final is None:
                record = record.with_changes(state="failed", reason="it ended at a loss that is no number")
        self._write(record)

    def _tell_failure(self, record: TrialRecord, reason: str) -> None:
        record = self.with_curve(record)
        reached = max((step for step, _ in record.losses), default=0)
        step = max(record.step, reached, self.folder.live_step(record))
        self._write(record.with_changes(state="failed", reason=shortened(reason), step=step))

    def _write(self, record: TrialRecord) -> None:
        self.study.report(record)
        self.study.write(record)

    def with_curve(self, record: TrialRecord) -> TrialRecord:
        """Return the record with the losses and annealed copies that the run's log tells of."""
        path = self.folder.run(record.number)
        if not (path / "metrics.jsonl").is_file():
            return record
        log = read_runs([path])[0]
        told = ((entry.step, finite(entry.fields.get("loss"))) for entry in log.evaluations)
        losses = [(step, loss) for step, loss in told if loss is not None]
        copies: dict[int, tuple[int, int, float, float]] = {}
        for entry in log.of_kind("Annealed"):
            numbers = [finite(entry.fields.get(name)) for name in ("steps", "loss", "before")]
            if None not in numbers:
                steps, loss, before = (float(number) for number in numbers if number is not None)
                copies[entry.step] = (entry.step, int(steps), loss, before)
        extra = sum(copy[1] for copy in copies.values())
        return record.with_changes(losses=tuple(losses), annealed=tuple(copies.values()), extra_steps=extra)


def main(arguments: list[str] | None = None) -> int:
    """Run one worker of a sweep that has been begun; `foretrain sweep` starts these."""
    parser = argparse.ArgumentParser(prog="python -m foretrain.sweep.worker", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args(arguments)
    wait_shortly()
    folder = SweepFolder(given.folder)
    try:
        space = read_space(folder.path / SPACE_FILE)
        Worker(folder, space, given.index, given.parent).work()
    except SweepStopped as error:
        sys.stderr.write(f"{error}\n")
        return 130
    except ForetrainError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
