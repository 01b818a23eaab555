"""What training and fine-tuning share: a run folder around a job, its files, and its page at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.data.loader import Loader
from foretrain.data.tokenizers import Tokenizer
from foretrain.errors import ConfigError, ForetrainError
from foretrain.events import LEFT_OPEN, Bus, Listener
from foretrain.launch.group import Group
from foretrain.launch.joining import joined
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.folder import RunFolder
from foretrain.show.pages import report
from foretrain.show.trackers.opening import check_installed
from foretrain.trainer import HybridTrainer


@dataclass(frozen=True)
class RunOptions:
    """How a run is started and followed, whatever it trains."""

    resume: bool
    overwrite: bool
    progress: bool | Level
    table: bool
    listeners: Sequence[Listener]
    say: Callable[[str], None]
    pause_at: int | None = None


@dataclass(frozen=True)
class TrainingJob:
    """A trainer with its data, ready to run."""

    trainer: HybridTrainer
    loader: Loader
    held_out: Iterable[Any]
    title: str
    details: dict[str, str]
    data_fingerprint: str
    tokenizer: Tokenizer | None
    finish: Callable[[RunFolder, dict[str, Any]], None]
    """Writes what a finished run leaves, and may add to its summary."""


def carry_out(
    config: Config, path: Path, command: str, options: RunOptions, prepare: Callable[[Bus, Group], TrainingJob]
) -> dict[str, Any]:
    """Run a job in its folder and return the summary. An earlier run there is deleted only once the job is ready.

    Of several processes that were started together all do this; rank 0 alone owns the folder, and all that is shown.
    """
    with joined(config.device, config.distributed.timeout_seconds) as group:
        return _carry_out(config, path, command, options, prepare, group)


def _carry_out(
    config: Config,
    path: Path,
    command: str,
    options: RunOptions,
    prepare: Callable[[Bus, Group], TrainingJob],
    group: Group,
) -> dict[str, Any]:
    bus = Bus()
    for listener in options.listeners:
        bus.subscribe(listener)
    with ExitStack() as stack:
        with group.together():
            check_installed(config.log.trackers)
            if options.resume:
                check_steps(path, config)
            folder = stack.enter_context(RunFolder(path, options.resume, options.overwrite, owner=group.first))
        folder.command = command
        with group.together():
            job = prepare(bus, group)
        folder.files["config.toml"] = configuration.to_toml(job.trainer.config)
        if job.tokenizer is not None:
            folder.files["tokenizer.json"] = job.tokenizer.to_json()
        if options.overwrite and not options.resume:
            if job.trainer.growth is not None:
                job.trainer.growth.check_moments()  # what is there is deleted for a run that can begin
            folder.clear()
            group.meet()
        summary = job.trainer.fit(
            job.loader,
            job.held_out,
            out=folder,
            resume=options.resume,
            progress=options.progress,
            table=options.table,
            title=job.title,
            details=job.details,
            data_fingerprint=job.data_fingerprint,
            pause_at=options.pause_at,
        )
        if summary["reason"] not in LEFT_OPEN:
            with group.together():
                job.finish(folder, summary)
            if config.log.report and group.first:
                with contextlib.suppress(ForetrainError):  # the bus has told of a page that cannot be written
                    report.write_report([path], path / report.NAME)  # once more, with what was made since
    return summary


def check_steps(run: Path, config: Config) -> None:
    """Refuse to go on with a run that has nothing left to do, because `max_steps` was lowered too far."""
    newest = next(CheckpointStore(run / "checkpoints").steps(), None)
    limited = config.steps_are_limited and not config.epochs
    if newest is None or newest[0] <= config.max_steps or not (run / "config.toml").is_file() or not limited:
        return
    before = configuration.load(run / "config.toml").config.max_steps
    if before > config.max_steps:
        raise ConfigError(
            f"max_steps = {config.max_steps}: nothing left to do: the run in {run} is at step {newest[0]}; leave "
            f"max_steps at {before}, or choose at least {newest[0]}"
        )
