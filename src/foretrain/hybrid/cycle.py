"""The four phases as a pure state machine: WARMUP -> FULL -> PREDICT -> CORRECT -> FULL -> ...

It sees flags and numbers only, so every decision can be replayed, and it gives a reason in words for each of them,
also for staying where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.config.schema import HybridConfig
from foretrain.events import Phase
from foretrain.persist.stateful import Stateful

PATIENCE_OF_WARMUP = 3
"""WARMUP ends after this many times `warmup_steps`, whether or not the loss has settled. Chosen: a loss that has not
settled by then is noisy rather than young."""
PATIENCE_OF_CORRECT = 4
"""CORRECT ends, as a failure, after this many times `correct_steps` without a judgement. Chosen: a safety net, which no
move of this package reaches."""
MOST_FULL_STEPS = 8
"""Undone moves multiply `full_steps` by no more than this. Chosen: three doublings."""


@dataclass(frozen=True, slots=True)
class View:
    """Holds all that a transition may look at. The defaults are those of a run that knows nothing yet."""

    step: int
    """`global_step`."""
    loss_stable: bool = False
    baseline_recorded: bool = False
    """The usual gradient norm is known."""
    confidence: float = 0.0
    confidence_threshold: float = 0.5
    recent_divergence: bool = False
    exact: bool = False
    """The move would be a chain of leaps, each judged by the exact loss it leads to: nothing has to be known before."""
    at_once: bool = False
    """The move needs to know nothing of the run so far: it may begin in WARMUP, and after any number of full steps."""
    gate_open: bool = False
    gate_reason: str = "it has not paid so far"
    """Why the gate is shut, in words that follow "the gate is shut:"."""
    nothing_to_try: bool = False
    """The gate will not open later either, as far as can be seen: WARMUP need not go on."""
    horizon_reached: bool = False
    chained: bool = False
    """It is that of a chain of leaps, which has no horizon but an end."""
    prediction_error: float = 0.0
    """How far the loss lies above the predicted loss, relative to it; negative where it is better than predicted."""
    prediction_error_limit: float = 0.2
    oscillating: bool = False
    diverged: bool = False
    overfits: bool = False
    """The held-out loss rises, and the chain went back to where it was lowest."""
    worse_than_anchor: bool = False
    """The move was judged, and the run would be better without it."""
    correct_done: bool = False
    """The move was judged and corrected."""


@dataclass(frozen=True, slots=True)
class Transition:
    phase: Phase
    """The phase from now on; the one before if nothing changes."""
    reason: str
    changed: bool = False
    undo: bool = False
    """The open move must be undone: restore the snapshot."""


class Cycle(Stateful):
    """`count` the steps done, then ask `next` what follows. Only its own methods change it."""

    saved = (
        *("phase", "steps_in_phase", "number"),
        *("full_steps", "full_steps_needed", "earliest_predict_step"),
    )

    def __init__(self, config: HybridConfig) -> None:
        self.config = config
        self.phase = Phase.WARMUP
        self.steps_in_phase = 0
        self.number = 0
        """Cycles begun: FULL phases, with a move at their end or without."""
        self.full_steps = config.full_steps
        """Full steps between two predicted phases of a run that goes well."""
        self.full_steps_needed = config.full_steps
        self.earliest_predict_step = config.warmup_steps
        """No prediction before this `global_step`."""

    @property
    def predict_steps_left(self) -> int:
        """The longest move that may still be made in this PREDICT or, outside it, in the next one."""
        done = self.steps_in_phase if self.phase is Phase.PREDICT else 0
        return self.config.max_predict_steps - done

    def count(self, steps: int = 1, limited: bool = True) -> None:
        """Steps done in this phase: one for a full or predicted step, the whole horizon for a leap.

        limited: to `max_predict_steps`; leaps of a chain, which take a gradient each, are not.
        """
        if steps < 0:
            raise ValueError(f"{steps} steps cannot have been done")
        if limited and self.phase is Phase.PREDICT and steps > self.predict_steps_left:
            raise ValueError(
                f"{steps} more predicted steps would exceed hybrid.max_predict_steps = {self.config.max_predict_steps} "
                f"({self.steps_in_phase} are done)"
            )
        self.steps_in_phase += steps

    def next(self, view: View) -> Transition:
        """Decide by the view, and enter the phase decided for."""
        transition = self.decide(view)
        if transition.changed:
            if self.phase is Phase.CORRECT or transition.undo:
                self._judge(transition.undo, diverged=self.phase is Phase.CORRECT or view.diverged)
            self._enter(transition.phase)
        return transition

    def decide(self, view: View) -> Transition:
        """What `next` would answer, without entering it."""
        match self.phase:
            case Phase.WARMUP:
                return self._from_full(view) if view.at_once else self._from_warmup(view)
            case Phase.FULL:
                return self._from_full(view)
            case Phase.PREDICT:
                return self._from_predict(view)
            case Phase.CORRECT:
                return self._from_correct(view)

    def why_not_predict(self, view: View) -> tuple[str, ...]:
        """Everything that keeps FULL from PREDICT; empty when nothing does."""
        against = []
        if self.config.mode == "off":
            against.append("hybrid.mode is off")
        if self.phase is not Phase.FULL and not (view.at_once and self.phase is Phase.WARMUP):
            against.append(f"the phase is {self.phase}")
        elif not view.at_once and self.steps_in_phase < self.full_steps_needed:
            against.append(f"{self.steps_in_phase} of {self.full_steps_needed} full steps are done")
        if view.step < self.earliest_predict_step and not view.exact:
            against.append(f"step {view.step} is before step {self.earliest_predict_step}, the first that may predict")
        if not view.confidence > view.confidence_threshold and not view.exact:
            relation = "below" if view.confidence < view.confidence_threshold else "not above"
            against.append(f"confidence {view.confidence:.2f} is {relation} {view.confidence_threshold:.2f}")
        if view.diverged or (view.recent_divergence and not view.exact):
            against.append("the run diverged a short while ago")
        if not view.gate_open:
            against.append(f"the gate is shut: {view.gate_reason}")
        return tuple(against)

    def force_full(self, reason: str) -> Transition:
        """Full steps now, and all of `full_steps_needed`. An open move counts as undone. WARMUP goes on as it is."""
        if self.phase is Phase.WARMUP:
            return Transition(Phase.WARMUP, reason)
        undo = self.phase in (Phase.PREDICT, Phase.CORRECT)
        if undo:
            self._judge(undo=True, diverged=True)
            self._enter(Phase.FULL)
        self.steps_in_phase = 0
        return Transition(Phase.FULL, reason, changed=undo, undo=undo)

    def keep_unjudged(self, reason: str) -> Transition:
        """The open move is kept before its validation is over; full steps follow."""
        self._judge(undo=False, diverged=False)
        self._enter(Phase.FULL)
        return Transition(Phase.FULL, reason, changed=True)

    def begin_anew(self, steps: int = 0) -> None:
        """Count the full steps of this FULL phase from here on. steps: of them that are taken as done."""
        self.steps_in_phase = max(0, steps)

    def next_cycle(self) -> None:
        """A FULL phase that does not end in a move is a cycle too."""
        self.steps_in_phase = 0
        self.number += 1

    def use_full_steps(self, steps: int) -> None:
        """From now on so many full steps lie between two predicted phases of a run that goes well."""
        self.full_steps = steps

    def lengthen_full(self, factor: float) -> None:
        """More full steps before the next move, up to 8 times `full_steps`; a kept move brings them back to normal."""
        longer = int(self.full_steps_needed * factor)
        self.full_steps_needed = min(longer, MOST_FULL_STEPS * self.full_steps)

    def postpone(self, step: int) -> None:
        """No prediction before this `global_step`."""
        self.earliest_predict_step = max(self.earliest_predict_step, step)

    def _from_warmup(self, view: View) -> Transition:
        needed = self.config.warmup_steps
        if view.exact:
            return self._go(Phase.FULL, "every batch gives the same loss: leaps can be judged at once")
        if view.nothing_to_try:
            return self._go(Phase.FULL, view.gate_reason)
        if view.step < needed:
            return self._stay(f"{view.step} of {needed} warm-up steps are done")
        missing = []
        if not view.loss_stable:
            missing.append("the loss has not settled")
        if not view.baseline_recorded:
            missing.append("the usual gradient norm is not known yet")
        if not missing:
            return self._go(Phase.FULL, f"{view.step} warm-up steps are done, the loss has settled")
        if view.step >= PATIENCE_OF_WARMUP * needed:
            return self._go(
                Phase.FULL, f"{' and '.join(missing)}, but {PATIENCE_OF_WARMUP} x {needed} steps are enough"
            )
        return self._stay(" and ".join(missing))

    def _from_full(self, view: View) -> Transition:
        against = self.why_not_predict(view)
        if against:
            return self._stay("; ".join(against))
        if view.at_once:
            return self._go(Phase.PREDICT, "the form of the loss is known, and batches hardly differ")
        if view.exact:
            return self._go(Phase.PREDICT, f"{self.steps_in_phase} full steps are done and the loss is exact")
        return self._go(
            Phase.PREDICT,
            f"{self.steps_in_phase} full steps are done and confidence {view.confidence:.2f} is above "
            f"{view.confidence_threshold:.2f}",
        )

    def _from_predict(self, view: View) -> Transition:
        if view.diverged:
            return self._go(Phase.FULL, "the run diverged: the move is undone", undo=True)
        if not view.confidence >= view.confidence_threshold:
            below = f"confidence {view.confidence:.2f} is below {view.confidence_threshold:.2f}"
            return self._go(Phase.FULL, f"{below}: the move is undone", undo=True)
        error, limit = view.prediction_error, view.prediction_error_limit
        if not error <= limit:
            return self._go(Phase.CORRECT, f"the loss is {error:.0%} above its prediction, more than {limit:.0%}")
        if view.oscillating:
            return self._go(Phase.CORRECT, "the loss oscillates")
        if view.overfits:
            return self._go(Phase.CORRECT, "the held-out loss rises: back to where it was lowest")
        if view.horizon_reached and view.chained:
            return self._go(Phase.CORRECT, f"the chain is over after {_leaps(self.steps_in_phase)}")
        if view.horizon_reached:
            return self._go(Phase.CORRECT, f"the horizon is reached after {self.steps_in_phase} predicted steps")
        if self.steps_in_phase >= self.config.max_predict_steps:
            return self._go(Phase.CORRECT, f"{self.steps_in_phase} predicted steps are the most that is allowed")
        return self._stay(f"{self.steps_in_phase} predicted steps are done and the horizon is further")

    def _from_correct(self, view: View) -> Transition:
        if view.diverged:
            return self._go(Phase.FULL, "the run diverged after the move: it is undone", undo=True)
        if view.worse_than_anchor:
            return self._go(Phase.FULL, "the run is worse than without the move: it is undone", undo=True)
        needed = self.config.correct_steps
        if self.steps_in_phase < needed:
            return self._stay(f"{self.steps_in_phase} of {needed} validating steps are done")
        if view.correct_done and not needed:
            return self._go(Phase.FULL, "the move is kept: it was judged at once")
        if view.correct_done:
            return self._go(Phase.FULL, f"the move is kept after {self.steps_in_phase} validating steps")
        if self.steps_in_phase >= PATIENCE_OF_CORRECT * needed:
            steps = f"{self.steps_in_phase} validating steps"
            return self._go(Phase.FULL, f"the move could not be judged within {steps}: it is undone", undo=True)
        return self._stay(f"the move is not judged yet after {self.steps_in_phase} validating steps")

    def _stay(self, reason: str) -> Transition:
        return Transition(self.phase, reason)

    def _go(self, phase: Phase, reason: str, undo: bool = False) -> Transition:
        return Transition(phase, reason, changed=True, undo=undo)

    def _judge(self, undo: bool, diverged: bool) -> None:
        if not undo:
            self.full_steps_needed = self.full_steps
        elif diverged:  # doubt alone (low confidence) is no harm done, and costs no longer wait
            self.lengthen_full(2)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.steps_in_phase = 0
        self.number += phase is Phase.FULL


def _leaps(count: int) -> str:
    return "1 leap" if count == 1 else f"{count} leaps"
