"""A move: a reversible excursion of the weights. The interface of all of them, and what they are handed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from foretrain.engine.engine import Engine
from foretrain.engine.hooks import StepHook
from foretrain.engine.step import StepOutput
from foretrain.events import Event, Phase
from foretrain.persist.stateful import Stateful

if TYPE_CHECKING:
    from foretrain.health.checkup import Checkup
    from foretrain.hybrid.correction import Correction
    from foretrain.hybrid.cycle import Transition, View
    from foretrain.hybrid.judges.audit import Forks, RecentBatches
    from foretrain.hybrid.judges.held_out import HeldOut
    from foretrain.hybrid.judges.judgement import Judgement
    from foretrain.hybrid.judges.probes import Probes
    from foretrain.hybrid.judges.worth import Worth
    from foretrain.hybrid.ledger import Counts
    from foretrain.hybrid.moves.judged import JudgedMove
    from foretrain.hybrid.moves.obstacles import KeptOff
    from foretrain.hybrid.plan import Decision, Plan
    from foretrain.hybrid.snapshot import Snapshots
    from foretrain.motion.observer import Observer
    from foretrain.motion.predictors.base import Array
    from foretrain.motion.trajectory import Trajectory


@dataclass(frozen=True)
class MoveTools:
    """What moves use, made once for a run. They see neither the trainer nor the policy."""

    engine: Engine
    snapshots: Snapshots
    probes: Probes
    held_out: HeldOut
    """The held-out batches of `fit`, which may object to a move that an exact loss judges."""
    worth: Worth
    forks: Forks
    recent: RecentBatches
    observer: Observer
    trajectory: Trajectory
    """The directions that forecasts are made of; the observer's, unless a comparison holds moves still."""
    correction: Correction
    counts: Counts
    checkup: Checkup
    """Looks at the steps of a chain, as at full steps."""
    monitor: Callable[[JudgedMove, float, float | None, bool], tuple[View, Transition]]
    """The policy's opinion of a predicted step: (move, probe loss, predicted loss or None, last step) -> stay or go."""
    emit: Callable[[Event], None]

    def count(self, steps: int) -> None:
        """Count virtual steps that a move is worth."""
        self.engine.progress.global_step += steps
        self.counts.steps[Phase.PREDICT.value] += steps

    def suggestion(self, coefficients: Array, steps: int) -> Array:
        """How to correct a move by these coefficients over so many steps; zeros while corrections do not help."""
        situation = self.observer.situation
        if not self.correction.active or situation is None:
            return np.zeros_like(coefficients)
        windows, step = steps / self.trajectory.window, self.engine.progress.global_step
        found = self.correction.suggest(situation.state, step, windows, coefficients, situation.gram)
        return np.zeros_like(coefficients) if found is None else found.coefficients


class Move(Stateful, ABC):
    """An excursion of the weights that can be undone to the bit.

    `begin` with a batch, `advance` with this and each further batch until it is `over`, then `judge`; whoever asked
    keeps it or calls `undo`. A move that sees by itself that it leads nowhere calls `refuse`, and so does whoever
    has to stop it.
    """

    kind: ClassVar[str]
    phase: Phase = Phase.PREDICT
    """PREDICT while it moves the weights, CORRECT while full steps validate it."""
    batch: Any = None
    """That it began with."""
    cost: float = 0.0
    """Full steps spent on it that plain training would not have spent."""
    refused: bool = False
    """It was undone without a judgement: its batch is still there to be trained on."""
    reason: str = ""
    """Why it was refused."""

    @abstractmethod
    def begin(self, batch: Any) -> None:
        """Take what `undo` needs, and measure where the weights are."""

    @abstractmethod
    def advance(self, batch: Any) -> StepOutput | None:
        """Go on by one step. None where the batch was not used: the move was refused, or, as chains do, it came to its
        end in this call without a step and is in CORRECT now."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Nothing is left to do but to judge."""

    @abstractmethod
    def judge(self) -> Judgement:
        """Say what the move was worth. An audit leaves the run at the better of its two forks, so the move may be
        rolled back after it (`Judgement.stands_at_fork`); otherwise whoever asked keeps or undoes it."""

    @abstractmethod
    def undo(self) -> None:
        """Bring back everything as it was before `begin`: weights, optimizer, random states and counters."""

    def refuse(self, reason: str) -> None:
        """Undo the move without a judgement: it leads nowhere, or something else stops it, in PREDICT or in CORRECT."""
        self.undo()
        self.refused, self.reason = True, reason


class MoveKind(Stateful, ABC):
    """One kind of move: knows when it applies, and makes moves. It lives as long as the run."""

    name: ClassVar[str]

    def __init__(self, tools: MoveTools) -> None:
        self.tools = tools

    # --- at the end of a window ---

    @property
    def ready(self) -> bool:
        """A move of this kind could begin now, at any learning rate."""
        return False

    @property
    def exact(self) -> bool:
        """Such a move would be judged by exact losses on its way: no confidence and no warm-up are needed."""
        return False

    @property
    def at_once(self) -> bool:
        """What it proposes may begin in WARMUP: nothing of the run so far has to be known."""
        return False

    def prepare(self) -> float:
        """In WARMUP: find out what this kind has to know. Returns what that cost in full steps."""
        return 0.0

    def propose(self, outlook: Outlook) -> Decision | None:
        """A move of this kind is wanted now. Moves that follow a forecast propose nothing by themselves: the policy
        weighs forecasts."""
        return None

    def obstacle(self) -> KeptOff | str | None:
        """What keeps moves of this kind off, with what to set; empty if nothing does, None while nobody knows."""
        return ""

    # --- a move ---

    def applies(self, decision: Decision, batch: Any) -> tuple[bool, float]:
        """Whether this kind makes the move that was decided for, and how many full steps it took to find out."""
        return decision.kind == self.name, 0.0

    @abstractmethod
    def make(self, plan: Plan) -> JudgedMove:
        """A new move that has not begun."""

    def ended(self, move: JudgedMove, judgement: Judgement | None) -> None:
        """A move of this kind was judged. None: it was refused."""

    # --- the run ---

    def watching(self) -> tuple[StepHook, ...]:
        """Hooks that watch the next full step."""
        return ()

    def cover(self) -> None:
        """Other weights are trained from now on; no move is open."""

    def evaluated(self, loss: float) -> None:
        """A held-out loss was measured while no move was open."""

    def at_lower_end(self) -> AbstractContextManager[None]:
        """Inside the block: the weights that the run would go back to, if it ended now."""
        return nullcontext()

    def finish(self, batch: Any) -> float | None:
        """The run is over. Returns the loss of the batch where the weights were changed once more."""
        return None


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where the run stands at the end of a window, for kinds that propose moves."""

    step: int
    steps_left: int
    """Virtual steps to the end of the run."""
    low_noise: bool
    """The loss right after a move can be trusted."""
    rate_trend: int
    """-1 while the learning rate falls, 1 while it rises."""
