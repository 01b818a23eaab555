"""When the weights are watched at all: directions take memory and time, and a rest saves both."""

from __future__ import annotations

from foretrain.config import Config
from foretrain.health import shortage
from foretrain.hybrid.gate import Answer, Gate
from foretrain.motion.observer import Observer
from foretrain.motion.trajectory import LARGEST_FP32_BASIS
from foretrain.persist.stateful import Stateful

_LONGEST_REST = 256
"""Windows. Chosen: it doubles up to there, so that even a run of a million steps looks again now and then; a short run
rests an eighth of its length at the most, unless nothing will ever be tried."""
NEED_A_REASON = LARGEST_FP32_BASIS
"""Trained parameters up to which directions are kept in the warm-up though nothing will be tried, only to say how
predictable the run is. Chosen: as many as are kept in fp32."""


class Rest(Stateful):
    """Full steps for which the weights are not watched, because nothing would come of it. Each rest in a row is twice
    as long as the one before."""

    saved = ("steps", "windows", "no_room", "_in_a_row")

    def __init__(self, config: Config, observer: Observer) -> None:
        self.config = config
        self.observer = observer
        self.steps = 0
        """Left of the rest."""
        self.windows = 0
        """Length of the last rest."""
        self.no_room = False
        """There was not enough memory for directions when they were wanted."""
        self._in_a_row = 0

    def begin(self, answer: Answer, gate: Gate, max_steps: int) -> None:
        """A cycle without a move is over: rest if the gate's answer allows it."""
        self._in_a_row = self._in_a_row + 1 if answer.rest else 0
        if not answer.rest:
            return
        window, full_steps = self.config.hybrid.window_steps, self.config.hybrid.full_steps
        windows = min(_LONGEST_REST, 2**self._in_a_row, max(2, max_steps // (8 * window)))
        windows = max(windows, gate.wait * full_steps // window)  # nothing can happen while the gate waits
        if answer.long:
            windows = _LONGEST_REST
            self.observer.trajectory.release()
        self.steps, self.windows = windows * window, windows
        gate.new_cycle(self.steps // full_steps)

    def for_good(self) -> None:
        """Prediction is off: full steps, of which only the losses are looked at. Not while a move is open."""
        self.steps = _LONGEST_REST * self.config.hybrid.window_steps
        self.observer.restart()
        self.observer.trajectory.release()

    def hold_directions(self, in_vain: bool, first: bool) -> None:
        """Make room for directions, once there is something that may be made of them. in_vain: nothing will be tried.
        first: no window was watched yet, so want of memory is an error."""
        trajectory = self.observer.trajectory
        trained = sum(p.numel() for p in trajectory.parameters)
        if trajectory.held or self.no_room or (in_vain and trained > NEED_A_REASON):
            return
        try:
            trajectory.hold()
        except (RuntimeError, MemoryError) as error:
            if first or shortage.look_at(error) is None:
                raise
            self.no_room = True  # the run was fine without, and goes on so
