"""Parameters that are frozen or unfrozen in mid-run: an open move is undone, and all that watches begins anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foretrain.engine.engine import Engine
from foretrain.events import Event, Notice, Phase
from foretrain.hybrid.policy import Policy

_WHY = "parameters were frozen or unfrozen"


def follow_freezing(engine: Engine, policy: Policy | None, batch: Any, emit: Callable[[Event], None]) -> Any:
    """Parameters were frozen or unfrozen since the last step. Returns the batch to go on with: an open move is undone
    with its data, but what is frozen now stays where its user froze it. policy: None in a run of full steps only."""
    frozen = [(p, p.detach().clone()) for p in engine.trained.parameters if not p.requires_grad]
    if policy is not None and policy.move is not None:
        position, first = engine.progress.position, policy.interrupt(_WHY)
        policy.tell_phase()
        with torch.no_grad():
            for parameter, value in frozen:
                parameter.copy_(value)
        batch = batch if first is None or engine.progress.position == position else engine.to_device(first)
    elif policy is not None and policy.cycle.phase is Phase.PREDICT:
        policy.abandon(_WHY)
        policy.tell_phase()
    change = engine.follow_trained()
    lost = engine.trained.without_optimizer()
    watched = "; what was seen of how weights move is dropped, and the run watches anew" if policy is not None else ""
    if change.frozen or change.unfrozen:
        text = f"from step {engine.progress.global_step} on {change.in_words()}{watched}"
        emit(Notice(text, level="info"))
    if lost and change.unfrozen:
        text = f"{next(iter(lost))} is trained now, but {type(engine.optimizer).__name__} does not hold it"
        emit(Notice(f"{text}, so it will not change; add it with optimizer.add_param_group"))
    return batch
