"""What emergencies outside of a move ask of whoever makes moves: to undo them, to forget, or to stop predicting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretrain.engine.engine import Engine
from foretrain.engine.fence import Failure
from foretrain.events import Phase
from foretrain.health.advise import RunStatus
from foretrain.hybrid.mover import Mover
from foretrain.hybrid.policy import Pilot


class Emergencies:
    """The moves of a run, as out-of-memory handling and health see them."""

    def __init__(self, engine: Engine, pilot: Pilot, mover: Mover) -> None:
        self.engine = engine
        self.pilot = pilot
        self.mover = mover

    @property
    def phase(self) -> Phase:
        return self.pilot.machine.phase

    def abandon(self, reason: str) -> Any:
        return self.mover.abandon(reason)

    def fail(self, failure: Failure) -> None:
        self.mover.fail(failure)

    def give_up_window(self, reason: str) -> None:
        if self.pilot.machine.phase is Phase.PREDICT:
            self.pilot.machine.force_full(reason)
        self.pilot.observer.restart()

    def forget_snapshots(self) -> None:
        self.mover.safety.forget()

    def switch_off(self) -> None:
        self.mover.safety.on = False
        self.pilot.observer.trajectory.release()
        self.pilot.rest_steps = max(self.pilot.rest_steps, self.engine.planned_steps)

    def add_to(self, situation: RunStatus) -> RunStatus:
        """What health has to know of moves."""
        counts, recovery = self.pilot.counts, self.pilot.recovery
        return replace(
            situation,
            loops=recovery.loops,
            undone=counts.moves["rolled_back"],
            tried=counts.tried,
            distrusts=recovery.distrusts,
            confidence=recovery.lacking,
            threshold=recovery.threshold,
            leaps=self.pilot.exact.chains > 0,
        )
