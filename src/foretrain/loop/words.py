"""What is said where a run cannot go on, or goes on otherwise than before."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any, get_args

import torch

from foretrain.config import Config, to_mapping
from foretrain.config.paths import flattened
from foretrain.config.schema import OptimizerConfig
from foretrain.engine.engine import Engine
from foretrain.engine.optim.muon import Muon, iteration_type
from foretrain.errors import InputError
from foretrain.events import Notice
from foretrain.persist.folder import RunFolder


def how_to_go_on(folder: RunFolder | None) -> str:
    """The command or the call that resumes a run; empty where it has no folder."""
    if folder is None:
        return ""
    path = str(folder.path)
    if "config.toml" in folder.files:
        return f"; go on with: foretrain {folder.command} --out {shlex.quote(path)} --resume"
    return f"; go on with fit(..., out={path!r}, resume=True)"


def what_stands(saved_step: int, folder: RunFolder | None) -> str:
    """What there is to go on from when a run fails. saved_step: -1 where nothing was saved."""
    if saved_step >= 0:
        return f"the state after step {saved_step} is saved{how_to_go_on(folder)}"
    return "nothing was saved yet" if folder is not None else "the run has no folder, so nothing is saved"


def first_loss_is_no_number(loss: float, gradient_norm: float) -> InputError:
    return InputError(
        f"the first loss is {loss} (gradient norm {gradient_norm}): nothing can be learned from it. Look for NaN in "
        "the data or the starting weights, or a loss function that divides by zero"
    )


def skipped_in_a_row(engine: Engine, rate: str, again: str, go_on: str) -> str:
    """Why a run is given up that skips step after step, and what to do. rate: what its user calls the learning rate.

    Skipped steps change no weight: where the loss itself is no number, batch after batch, a lower rate will not make
    it one, and there is nothing to go on from.
    """
    loss, progress = engine.progress.last_train_loss, engine.progress
    given_up = f"{engine.meter.skipped_in_a_row} steps in a row were not finite (step {progress.global_step})"
    more_precise = "" if engine.precision.name == "fp32" else ", or with precision.type = 'fp32'"
    if loss is not None and math.isfinite(loss):
        return (
            f"{given_up}; the weights are those of the last good step, and only gradients overflow. Go on with a lower "
            f"{rate}{more_precise}{go_on}"
        )
    return (
        f"{given_up}; the loss itself is {loss} at the weights of the last good step: they are ruined, or the data is. "
        f"Look for NaN in the data; else {again} cannot help, since it goes on from these weights: start anew, in "
        f"another folder, with a tenth of {rate}{more_precise}"
    )


def loss_is_nan(step: int, rate: str, again: str) -> str:
    """Why a run is given up whose weights took the harm."""
    return (
        f"the loss is NaN (step {step}) and guard.nan_check is off; switch it on or lower {rate}, and go on from the "
        f"last checkpoint with {again}"
    )


def since_saved(meta: Mapping[str, Any], config: Config, engine: Engine) -> list[Notice]:
    """What changed since a checkpoint was saved. meta: what was saved with it about the run."""
    notices: list[Notice] = []
    before, now = flattened(meta["config"]), flattened(to_mapping(config))
    changed = [
        f"{name} {_effective(name, before)} -> {_effective(name, now)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        notices.append(Notice(f"changed since this checkpoint was saved: {', '.join(changed)}", level="info"))
    if (saved_with := meta.get("torch")) != torch.__version__:
        notices.append(
            Notice(f"saved with torch {saved_with}, now {torch.__version__}: results may differ in the last bits")
        )
    ranks, were = engine.world.size, meta.get("ranks", 1)
    if were != ranks:
        text = f"saved by {were} process{'es' * (were != 1)}, and goes on in {ranks}: the same data and decisions"
        text += ", but random numbers such as those of dropout begin anew"
        notices.append(Notice(f"{text}, and sums may differ in the last bits", level="info"))
    earlier, chosen = meta.get("muon_type"), iteration_type(engine.device)
    if earlier not in (None, chosen) and isinstance(engine.optimizer, Muon):
        why = "" if chosen == "bf16" else " (this CPU has no bf16 instructions)"
        text = f"Muon computed in {earlier} when this checkpoint was saved and computes in {chosen} now{why}"
        notices.append(Notice(f"{text}: results may differ in the last bits", level="info"))
    return notices


def _effective(name: str, settings: Mapping[str, Any]) -> str:
    """What a setting was; of a learning rate or weight decay that was left unset, what it then is."""
    value: Any = settings.get(name)
    kind: Any = settings.get("optimizer.type")  # a forged checkpoint may hold anything
    if value is None and kind in get_args(OptimizerConfig.model_fields["type"].annotation):
        unset = OptimizerConfig(type=kind)
        value = {"optimizer.learning_rate": unset.peak_rate, "optimizer.weight_decay": unset.decay}.get(name)
    return "unset" if value is None else json.dumps(value)


def no_checkpoint(folder: RunFolder) -> Notice:
    """There is nothing to resume. A warning where there must have been something: the log tells of steps."""
    root = folder.checkpoints
    logged = folder.metrics.is_file() and folder.metrics.stat().st_size > 0
    text = f"{root} holds no checkpoint yet: starting at step 0"
    if logged:
        text = f"{root} holds no checkpoint, though metrics.jsonl tells of an earlier run: starting over at step 0"
    return Notice(text, level="warning" if logged else "info")
