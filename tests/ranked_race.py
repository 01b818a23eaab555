"""Runs that look for their learning rate, as several ranks and one process make them."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tests.ranked import Found, digest, own_rows, ranks, store_of, trainer, words, wrapped
from torch import nn

from foretrain import HybridTrainer, supervised
from foretrain.config import from_mapping
from foretrain.events import Event, RateTrial
from foretrain.launch.joining import current_group

RACED: dict[str, Any] = {
    "max_steps": 40,
    "optimizer.learning_rate": "auto",
    "hybrid.mode": "off",
    "health.interval": 0,
    "schedule.type": "wsd",
}
STEPS, FIRST = 80, 2e-3
END = 17
"""A step after the race."""


def made(kind: str, **more: Any) -> HybridTrainer:
    return trainer(kind, True, {**RACED, **more}, probe=[own_rows(words(900))])


def raced(kind: str) -> Found:
    """Which rates were tried, and what was found: where all weights are trained, and where only adapters are."""
    return {"all": _raced(kind, adapters=False), "adapters": _raced(kind, adapters=True)}


def _raced(kind: str, adapters: bool) -> Found:
    """The answer is short, so that the rates that are tried learn it without any chaos."""
    drawn = torch.Generator().manual_seed(3)
    inputs, target = torch.randn(STEPS, 16, 8, generator=drawn), 0.02 * torch.randn(8, 1, generator=drawn)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 40, bias=False), nn.Linear(40, 1, bias=False))
    model[0].requires_grad_(not adapters)
    given = {**RACED, "device": "cpu", "max_steps": STEPS, "optimizer.type": "adamw", "optimizer.weight_decay": 0.0}
    held_out = [own_rows((torch.ones(4, 8), torch.ones(4, 8) @ target))]
    loss = supervised(nn.functional.mse_loss)
    run = HybridTrainer(wrapped(model, kind), None, loss, from_mapping(given), probe=held_out)
    assert run.race is not None
    run.race.begin_with(FIRST, "the test")
    for rows in inputs[: run.race.plan.length + 2]:
        run.step(own_rows((rows, rows @ target)))
    found = dict(run.summary()["learning_rate"])
    return {**found.pop("tried"), "loss": run.evaluate(held_out), "passes": run.backward_passes, **found}


def raced_again(kind: str) -> Found:
    """A run with dropout that a signal to rank 1 stops in the middle of its last trial, and what goes on with it."""
    still = {"dropout": 0.1, "evaluation.ema_decay": 0.9, "schedule.warmup_share": 0.6}  # longer than a trial
    first, second, heard = made(kind, **still), made(kind, **still), list[Event]()
    race, (rank, size), store = first.race, ranks(), current_group().store
    assert race is not None

    def halt(event: Event) -> None:
        if isinstance(event, RateTrial) and len(race.tried) == 2 and not heard:
            heard.append(event)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            number = store.add(f"foretrain/runs/{rank}", 0)
            promises = [f"foretrain/run-{number}/promise/{other}" for other in range(size)]
            store.wait(promises, timedelta(seconds=60))  # all know then after which step they stop

    folder = Path(os.environ["RANKS_FOLDER"], f"raced-{kind}")
    batches = [own_rows(words(position)) for position in range(END)]
    summary = first.fit(batches, out=folder, callbacks=[halt], progress=False, on_interrupt="return")
    loaded = store_of(second, str(folder / "checkpoints")).load_newest()
    assert loaded is not None
    second.load_state_dict(loaded.state)
    assert second.race is not None
    tried = len(second.race.tried)
    there = {"reason": summary["reason"], "step": second.global_step, "racing": second.racing, "tried": tried}
    return {"there": there, "whole": train(made(kind, **still)), "rest": train(second)}


def train(run: HybridTrainer) -> Found:
    """Train until the race is over, and tell what was found."""
    while run.global_step < END:
        run.step(own_rows(words(run.position)))
    found = {name: run.summary()["learning_rate"][name] for name in ("tried", "chosen")}
    return {"hash": digest(run), **found, "rate": float(run.engine.rate.used)}
