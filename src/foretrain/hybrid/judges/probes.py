"""Forward passes that judge a move, and what happens beside them: the optimizer's state leaves and comes back."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from foretrain.engine.engine import Engine
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.snapshot import Snapshots
from foretrain.persist.codec import random_state, restore_random_state


class Start(Protocol):
    """What all probes of a move have in common."""

    batch: Any
    random: dict[str, Any]


class Probes:
    """Forward passes on the move's own batch, or on the probe batches where there are any."""

    def __init__(self, engine: Engine, snapshots: Snapshots) -> None:
        self.engine = engine
        self.snapshots = snapshots
        self.batches: list[Any] = []
        """The probe batches, `HybridTrainer(probe=)`: never trained on. If there are any, they alone judge moves."""
        self.seconds = 0.0
        """The last one took so long."""

    def loss(self, move: Start, batch: Any = None) -> float:
        """With the random numbers of the anchor, so that only the weights differ. batch: another than the move's."""
        now, began = random_state(), time.monotonic()
        restore_random_state(move.random)
        try:
            if batch is None and self.batches:
                return self.engine.probe_all(self.batches)
            return self.engine.probe(move.batch if batch is None else batch)
        finally:
            restore_random_state(now)
            self.seconds = time.monotonic() - began

    def price(self, batch: Any) -> float:
        """In full steps."""
        count = self.engine.count
        if not self.batches:
            return FORWARD
        tokens, whole = self.engine.world.total([sum(count(one) for one in self.batches), count(batch)])
        return FORWARD * tokens / max(1, whole) if tokens else FORWARD

    # --- beside them -------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """The optimizer's state leaves the device. With a look-ahead it is to cost no time: no more leaves at once than
        fits beside the next probe, because reading a loss waits for all copies that go the same way, and no more in all
        than can be back in time."""
        away, config = self.engine.away, self.engine.config
        if away is None:
            return
        at_once, steps = math.inf, math.inf
        if config.memory.return_ahead:
            at_once = away.hidden_bytes(self.seconds)
            steps = 1 if config.hybrid.mode == "leap" else config.memory.return_ahead
        away.leave(None if away.begun else self.snapshots.optimizer_state(), at_once, at_once * steps)

    def bring_back(self, steps_left: int) -> None:
        """It begins to come back, beside what the device does meanwhile, if so few predicted steps follow on this one.

        -1: no more are made.
        """
        away = self.engine.away
        if away is not None and steps_left < self.engine.config.memory.return_ahead:
            away.fetch(math.inf if steps_left < 0 else away.hidden_bytes(self.seconds))
