"""What `foretrain compare` does with its arguments."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.errors import InputError
from foretrain.measure.compare import PAGE, compare
from foretrain.measure.ladder import rungs
from foretrain.measure.plan import Arm, Options
from foretrain.measure.tasks import FinetuneTask, Task, TextTask
from foretrain.models import gpt2
from foretrain.show.comparison import ComparisonConsole

DEMO = (
    "max_steps=240",
    "batch_size=8",
    "evaluation.batches=40",
    "evaluation.interval=60",
    "hybrid.warmup_steps=50",
    "audit.time_budget=0.1",
)
"""The demo task, short enough that a whole comparison takes minutes; moves are tried although they cannot pay."""


def run_comparison(
    path: Path | None,
    settings: Sequence[str],
    out: Path | None,
    seeds: int,
    rates: Sequence[float] | None,
    budgets: Sequence[float] | None,
    arms: Sequence[str],
    ladder: bool,
    minutes: float | None,
    arguments: Sequence[str],
    level: Level | None = None,
) -> tuple[dict[str, Any], Path, Level]:
    """Return the result, the path of its page, and how much is to be shown: as `level` says, or the configuration."""
    if minutes is not None and not 0 <= minutes < math.inf:
        raise InputError(f"--minutes {minutes}: give a number of minutes, for example --minutes 30")
    config = configuration.load(path, [*(DEMO if path is None else ()), *settings]).config
    level = level or config.log.console
    config = configuration.changed(config, {"log.console": "normal"})  # shown otherwise, it is the same comparison
    if config.optimizer.learning_rate == "auto":
        raise InputError(
            "optimizer.learning_rate = 'auto': the plain loop has no such rate; set a number, and add "
            '--arm "auto: optimizer.learning_rate=auto"'
        )
    if config.memory.budget:
        raise InputError(
            "memory.budget: a comparison must train every arm with the same settings; put those that `foretrain plan` "
            "prints into the file instead"
        )
    blocks = 0 if config.model.weights else gpt2.shape_from_config(config.model).layers
    further = (*(parse_arm(text) for text in arms), *(rungs(config, blocks) if ladder else ()))
    for arm in further:
        configuration.changed(config, arm.settings, f"--arm {arm.name!r}")
    options = Options(
        seeds=seeds,
        rates=tuple(rates) if rates else Options.rates,
        budgets=tuple(budgets) if budgets else Options.budgets,
        arms=further,
    )
    folder = out or default_folder(config)
    console = ComparisonConsole(level=level)
    try:
        command = "foretrain " + shlex.join(arguments)
        task: Task = FinetuneTask(config) if config.preset == "finetune" else TextTask(config)
        result = compare(task, config, folder, options, minutes=minutes, watcher=console, command=command)
    except KeyboardInterrupt:
        console.say(f"stopped; what is finished is kept in {folder}: the same command goes on")
        raise
    finally:
        console.close()
    return result, folder / PAGE, level


def default_folder(config: Config) -> Path:
    """Return a folder that the same configuration finds again."""
    text = json.dumps(configuration.to_mapping(config), sort_keys=True)
    return Path("runs") / f"compare-{config.model.type}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def parse_arm(text: str) -> Arm:
    """Read an arm, given as `name: key=value, key=value`."""
    name, colon, assignments = text.partition(":")
    if not colon or not name.strip() or not assignments.strip():
        raise InputError(
            f"--arm {text!r}: write it as name: key=value, key=value, for example "
            '--arm "muon: optimizer.type=muon, optimizer.learning_rate=0.01"'
        )
    settings = dict(configuration.parse_override(part.strip()) for part in assignments.split(","))
    same = ("max_steps", "seed", "device", "hybrid.probe_examples")
    fixed = [key for key in settings if key in same or key.startswith(("data.", "model."))]
    if fixed:
        raise InputError(f"--arm {name.strip()!r} changes {fixed[0]}, which must be the same in all arms; use --set")
    return Arm(name.strip(), "given with --arm", settings)
