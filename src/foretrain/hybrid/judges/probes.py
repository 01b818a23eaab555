"""Forward passes that judge a move, and what happens beside them: the optimizer's state leaves and comes back."""

from __future__ import annotations

import math
import time
from typing import Any

from foretrain.engine.engine import Engine
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.moves.move import Move
from foretrain.hybrid.policy import Pilot
from foretrain.hybrid.snapshot import Safety
from foretrain.persist.codec import random_state, restore_random_state


class Probes:
    """Made on the move's own batch, or on held-out ones where there are any. `engine` is the trainer itself."""

    def __init__(self, engine: Engine, pilot: Pilot, safety: Safety) -> None:
        self.engine = engine
        self.pilot = pilot
        self.safety = safety
        self.held_out: list[Any] = []
        """Batches that are never trained on; if there are any, they judge moves."""
        self.seconds = 0.0
        """The last one took so long."""
        self._seen: tuple[int, float] = (0, math.nan)
        """Backward passes and held-out loss of the last probe of weights that stayed."""
        self._fall = math.nan
        """Of the held-out loss per full step, lately."""

    def loss(self, move: Move, batch: Any = None) -> float:
        """With the random numbers of the anchor, so that only the weights differ. batch: another than the move's."""
        now, began = random_state(), time.monotonic()
        restore_random_state(move.random)
        try:
            if batch is None and self.held_out:
                return self.engine.probe_all(self.held_out)
            return self.engine.probe(move.batch if batch is None else batch)
        finally:
            restore_random_state(now)
            self.seconds = time.monotonic() - began

    def price(self, batch: Any) -> float:
        """In full steps."""
        count = self.engine.count
        tokens = sum(count(held_out) for held_out in self.held_out)
        return FORWARD * tokens / max(1, count(batch)) if tokens else FORWARD

    # --- beside them -------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """The optimizer's state leaves the device. With a look-ahead it is to cost no time: no more leaves at once than
        fits beside the next probe, because reading a loss waits for all copies that go the same way, and no more in all
        than can be back in time."""
        away, config = self.engine.away, self.pilot.config
        if away is None:
            return
        at_once, steps = math.inf, math.inf
        if config.memory.return_ahead:
            at_once = away.hidden_bytes(self.seconds)
            steps = 1 if config.hybrid.mode == "leap" else config.memory.return_ahead
        away.leave(None if away.begun else self.safety.optimizer_state(), at_once, at_once * steps)

    def bring_back(self, steps_left: int) -> None:
        """It begins to come back, beside what the device does meanwhile, if so few predicted steps follow on this one.

        -1: no more are made.
        """
        away = self.engine.away
        if away is not None and steps_left < self.pilot.config.memory.return_ahead:
            away.fetch(math.inf if steps_left < 0 else away.hidden_bytes(self.seconds))

    # --- what a held-out loss is worth -------------------------------------------------------------------------------

    def watch(self, loss: float) -> None:
        """At a move's beginning: how fast full steps alone lower the held-out loss."""
        passes, before = self._seen
        steps = self.engine.backward_passes - passes
        if self.held_out and steps > 0 and math.isfinite(before):
            self._fall = (before - loss) / steps
        self.remember(loss)

    def remember(self, loss: float) -> None:
        """Of weights that stay."""
        self._seen = (self.engine.backward_passes, loss)

    def worth(self, moved: int, gain: float, most: float) -> float:
        """Full steps that a fall of the held-out loss stands for."""
        fall = self._fall if math.isfinite(self._fall) else self.pilot.slope.per_step(low_noise=False)
        if not gain > 0:
            return 0.0
        if not fall > 0:  # full steps alone do not get there, or nobody knows yet
            return float(max(1, moved))
        return min(gain / fall, most)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> list[float]:
        return [*self._seen, self._fall]

    def load_state_dict(self, state: list[float]) -> None:
        passes, loss, self._fall = state
        self._seen = (int(passes), float(loss))
