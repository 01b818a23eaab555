"""What a run did so far, in numbers: its summary, and what the progress line says of prediction."""

from __future__ import annotations

from typing import Any

import torch

from foretrain import environment
from foretrain.engine import described
from foretrain.engine.engine import Engine
from foretrain.engine.memory.usage import MemoryMeter
from foretrain.hybrid.account import account_of
from foretrain.hybrid.annealing import AnnealedCopies
from foretrain.hybrid.hybrid import Hybrid
from foretrain.hybrid.policy import Policy
from foretrain.hybrid.rate_race import RateRace

_NOT_IN_EVERY_RUN = (
    *("moves", "predicted_steps", "corrections", "recoveries", "rollbacks", "forecast", "confidence", "predictability"),
    *("exact", "audit", "learning_rate", "predictor", "basis_mb", "health", "memory", "peak_memory_mb"),
    *("out_of_memory", "signal", "best_checkpoint", "growth", "target", "annealed", "loss_forecast", "stopped_because"),
)
"""Keys of the summary that are None where there is nothing to say, so that every summary has the same keys."""


def settings_of(engine: Engine) -> dict[str, Any]:
    """The configuration as far as it has an effect here, with the model and the optimizer as they really are."""
    return described.settings_of_run(
        engine.config,
        engine.model,
        engine.optimizer,
        engine.rate,
        own=engine.own_optimizer,
        clip=engine.clip,
        rows=engine.progress.rows,
    )


def optimizer_in_words(engine: Engine) -> str:
    """torch.optim.Adam, lr 0.003."""
    return described.in_words(engine.optimizer, engine.config, engine.rate, engine.own_optimizer)


def of_steps(engine: Engine, memory: MemoryMeter) -> dict[str, Any]:
    """What full steps, evaluations and their memory come to; all keys of a summary are there."""
    progress, seconds = engine.progress, engine.clock.seconds
    summary = dict.fromkeys(_NOT_IN_EVERY_RUN) | {
        "final_val_loss": progress.last_val_loss,
        "final_train_loss": progress.last_train_loss,
        "best_val_loss": progress.best_val_loss,
        "metrics": dict(progress.last_metrics),
        "best_step": progress.best_step,
        "global_step": progress.global_step,
        "steps": {"warmup": 0, "full": progress.global_step, "predict": 0, "correct": 0},
        "backward_passes": progress.backward_passes,
        "tokens": progress.tokens,
        "probe_tokens": progress.probe_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(progress.tokens / seconds, 1) if seconds else None,
        "unit": engine.unit,
        "optimizer": optimizer_in_words(engine),
        "skipped_steps": engine.meter.skipped,
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "precision": engine.precision.name,
        "config": settings_of(engine),
        "environment": environment.describe(str(engine.device)),
    }
    if memory.on:
        summary["memory"] = memory.summary()
    if engine.device.type == "cuda":
        peak = memory.peak if memory.on else torch.cuda.max_memory_allocated(engine.device)
        summary["peak_memory_mb"] = round((peak or 0) / 2**20, 1)
    return summary


def of_prediction(engine: Engine, hybrid: Hybrid) -> dict[str, Any]:
    """What prediction did, and with what."""
    observer = hybrid.observer
    summary = account_of(hybrid.policy, engine.progress.backward_passes)
    basis_mb = round(observer.trajectory.bytes / 2**20, 1)
    return summary | {"predictor": observer.predictor.name, "basis_mb": basis_mb}


def with_copies(summary: dict[str, Any], copies: AnnealedCopies, race: RateRace | None) -> dict[str, Any]:
    """Add what copies of the run, annealed ones and those at other learning rates, measured and took."""
    summary = dict(summary)
    for replay in (copies.replay, *(() if race is None else (race.replay,))):
        summary["backward_passes"] += replay.passes
        summary["tokens"] += replay.tokens
        summary["probe_tokens"] += replay.probe_tokens
    seconds = summary["seconds"]
    summary["tokens_per_second"] = round(summary["tokens"] / seconds, 1) if seconds else None
    if copies.points:
        summary["annealed"] = copies.summary()
    if race is not None and race.tried:
        summary["learning_rate"] = race.summary()
    return summary


def prediction_progress(engine: Engine, policy: Policy) -> dict[str, Any]:
    """What the progress line says of prediction."""
    observer, move = policy.observer, policy.move
    moves, gain = policy.score.counts.moves, policy.score.ledger.gain(engine.progress.backward_passes)
    watched = observer.windows > 0 and not (policy.rest.steps or move is not None)  # else they are of long ago
    chained = move is not None and move.chained  # nothing was forecast for it
    return {
        "predicted_loss": observer.predicted_loss if watched else None,
        "smoothed_loss": observer.smoothed_loss if watched else None,
        "confidence": None if chained else round(policy.appraiser.current_confidence, 4),
        "kept": moves["kept"] + moves["shrunk"],
        "refused": moves["refused"] + moves["rolled_back"],
        "gain_percent": gain["gain_percent"],
    }
