"""What emergencies outside of a move ask of whoever makes moves: to undo them, to forget, or to stop predicting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretrain.engine.fence import Failure
from foretrain.events import Phase
from foretrain.health.advise import RunStatus
from foretrain.hybrid.policy import Policy


class Emergencies:
    """The moves of a run, as out-of-memory handling and health see them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def phase(self) -> Phase:
        return self.policy.cycle.phase

    @property
    def corrections(self) -> int:
        return self.policy.score.counts.corrections

    def abandon(self, reason: str) -> Any:
        moving = self.policy.decision is not None
        batch = self.policy.abandon(reason)
        if moving:
            self.policy.tell_phase()
        return batch

    def fail(self, failure: Failure) -> None:
        self.policy.fail(failure)

    def give_up_window(self, reason: str) -> None:
        if self.policy.cycle.phase is Phase.PREDICT:
            self.abandon(reason)
        self.policy.observer.restart()

    def forget_snapshots(self) -> None:
        self.policy.tools.snapshots.forget()

    def switch_off(self) -> None:
        self.policy.tools.snapshots.on = False
        self.policy.observer.trajectory.release()
        self.policy.rest.steps = max(self.policy.rest.steps, self.policy.tools.engine.planned_steps)

    def add_to(self, situation: RunStatus) -> RunStatus:
        """What health has to know of moves."""
        counts, recovery = self.policy.score.counts, self.policy.recovery
        return replace(
            situation,
            loops=recovery.loops,
            undone=counts.moves["rolled_back"],
            tried=counts.tried,
            distrusts=recovery.distrusts,
            confidence=recovery.lacking,
            threshold=recovery.threshold,
            leaps=bool(self.policy.score.exact.leaps),
            lowest_step=self.policy.score.exact.lowest.step,
        )
