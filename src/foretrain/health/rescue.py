"""Undoes a step that ran out of memory, bit for bit, and repeats it with the same batch in less memory.

Where a step can fail, and what follows:

  before the update      nothing has changed that cannot be put back: the step is done again, or the run is saved
  in the update          half a step may be done: only an earlier state will do
  in a move              the move is taken back, and full steps go on
  while watching         the step is done; what was learned from this window is given up
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from foretrain.config import Config, changed
from foretrain.config.paths import value_of
from foretrain.engine.engine import Engine
from foretrain.engine.fence import Failure, OwnCodeError
from foretrain.engine.memory.usage import MemoryMeter
from foretrain.engine.recomputing import can_recompute
from foretrain.errors import ForetrainError, InputError, OutOfMemory
from foretrain.events import Event, Notice, Phase, Recovered
from foretrain.health import shortage as shortages
from foretrain.health.shortage import Shortage
from foretrain.persist.files import from_json

MOST_FAILED_MOVES = 3
"""Moves (or windows) that run out of memory before prediction ends. Chosen: a move needs the same memory each time."""
_LOOK_AT_ALL = 100
"""Steps between two reads of the generators of Python and NumPy, which are slow to read, to see whether steps draw from
them. Chosen: rarely enough that reading them costs next to nothing."""
_KEPT = ("accumulation_steps", "engine.activation_checkpointing", "engine.cuda_graph")
Result = TypeVar("Result")


def in_words(changes: Mapping[str, Any]) -> str:
    """Say what settings are, as one would set them."""
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in changes.items())


class Excursions(Protocol):
    """Whoever moves the weights in other ways than by full steps, as far as emergencies concern it."""

    @property
    def phase(self) -> Phase: ...

    @property
    def corrections(self) -> int:
        """Corrections of moves so far: they change weights, and no other count shows them."""

    def abandon(self, reason: str) -> Any:
        """Undo the open move, wherever it is. Returns the batch it began with, None if it had not begun."""

    def fail(self, failure: Failure) -> None:
        """The loss failed where it only probes."""

    def give_up_window(self, reason: str) -> None:
        """What was seen since the last window is not to be learned from."""

    def forget_snapshots(self) -> None: ...

    def switch_off(self) -> None:
        """Full steps to the end of the run, unwatched and without snapshots."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the run is before a step. If all of it is the same afterwards, the step has changed nothing for good."""

    phase: Phase
    counts: tuple[int, ...]
    randomness: tuple[Any, ...]


class Rescue:
    """Stands around every step. In a run with memory enough it notes some numbers per step, nothing else."""

    def __init__(self, engine: Engine, memory: MemoryMeter, emit: Callable[[Event], None]) -> None:
        self.engine = engine
        self.memory = memory
        self.emit = emit
        engine.execution.tell = lambda text: emit(Notice(text, level="info"))
        self.excursions: Excursions | None = None
        """None in a run of full steps only. Set by `Hybrid`, which is made later."""
        self.retries = engine.config.memory.on_out_of_memory == "retry"
        self.settings = engine.config
        """The settings that count now, after all that was made smaller."""
        self.next_smaller: Callable[[Config], Config | None] = shortages.next_smaller
        self.failed_moves = 0
        self.told: list[str] = []
        self.sound = True
        """The run is at the end of a step, or back there, so its state can be saved."""
        self._draws_elsewhere = False
        self._looked_at = -_LOOK_AT_ALL

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(self, batch: Any, step: Callable[[Any], Result]) -> Result:
        """Do the step, and repeat it in less memory as long as memory runs out and something can be made smaller."""
        if self.failed_moves >= MOST_FAILED_MOVES and self.excursions is not None:
            self.excursions.forget_snapshots()  # only now: the data may have had to go back to where it was taken
        while True:
            mark = self._mark()
            self.sound = False
            try:
                result = step(batch)
                self._see_randomness(mark)
            except OwnCodeError as error:
                batch = self._give_up_move(error, mark, batch)
                continue
            except BaseException as error:
                found = shortages.look_at(error)
                if found is None:
                    self._fall_back(mark)
                    raise
                text = self.explain(found)
            else:
                self.sound = True
                return result
            # Only here, where the error is gone, is the memory of the step gone that its traceback held.
            batch = self._recover(found, text, mark, batch)

    def _fall_back(self, mark: _Mark) -> None:
        """The user's code ended the step by an error or an order: go back to before the step where possible."""
        self.sound = self._is_as_before(mark)
        if self.sound:
            self._undo(mark)

    def _give_up_move(self, error: OwnCodeError, mark: _Mark, batch: Any) -> Any:
        """The loss failed in a probe: the move is taken back. Returns the batch to go on with."""
        if self.excursions is None or mark.phase not in (Phase.PREDICT, Phase.CORRECT):
            raise error.__cause__ or error
        first = self.excursions.abandon("a probe of it failed")
        self.engine.full_step.changing = False
        self.excursions.fail(error.failure)
        if self.engine.progress.position == mark.counts[0]:
            return batch
        if first is None:  # there is no way back to the batch that the data is at
            raise error.__cause__ or error
        return first

    def _recover(self, found: Shortage, text: str, mark: _Mark, batch: Any) -> Any:
        """Put back what can be. Returns the batch to go on with, or raises what says why it cannot go on."""
        self.engine.release()
        intact = self._is_as_before(mark)
        if intact:
            self._undo(mark)
        if not self.retries:
            raise OutOfMemory(f"{text}; {self.advice()}", intact=intact, half_done=not intact)
        if self.excursions is not None and mark.phase in (Phase.PREDICT, Phase.CORRECT):
            first = self.excursions.abandon("memory ran out in it")
            self.engine.full_step.changing = False
            self._count_failed_move(f"{text}; the move is taken back")
            if self.engine.progress.position == mark.counts[0]:
                return batch
            if first is not None:  # the data went back as well
                return first
            intact = False
        if not intact:
            raise OutOfMemory(f"{text}; {self.advice()}", half_done=True)
        if not self.shrink(found, text):
            raise OutOfMemory(f"{text}; nothing smaller is left to try; {self.advice()}", intact=True)
        return batch

    def aside(self, watch: Callable[..., None], *arguments: Any) -> None:
        """Do what follows a finished step. If memory runs out in it, only what it would have learned is lost."""
        try:
            watch(*arguments)
        except OwnCodeError as error:
            if self.excursions is None:
                raise
            self.excursions.give_up_window("a probe failed")
            self.excursions.fail(error.failure)
            return
        except (RuntimeError, MemoryError) as error:
            found = shortages.look_at(error)
            if found is None or not self.retries or self.engine.full_step.changing:
                raise
            text = self.explain(found)
        else:
            return
        self.engine.release()
        if self.excursions is not None:
            self.excursions.give_up_window("memory ran out")
        self._count_failed_move(f"{text}; the window is given up")

    def again(self, function: Callable[[], Result]) -> Result:
        """Call a function that changes nothing before it succeeds; free memory and repeat it where memory runs out."""
        try:
            return function()
        except (RuntimeError, MemoryError) as error:
            if not self.retries or shortages.look_at(error) is None:
                raise
        self.engine.release()
        return function()

    # --- what was, and back to it ------------------------------------------------------------------------------------

    def _mark(self) -> _Mark:
        self.engine.full_step.changing = False
        return _Mark(self._phase, self._counts(), self._randomness())

    def _counts(self) -> tuple[int, ...]:
        """Counts that change with everything a step cannot undo. The position in the data comes first."""
        progress, corrections = self.engine.progress, 0 if self.excursions is None else self.excursions.corrections
        return progress.position, progress.global_step, progress.backward_passes, progress.probe_tokens, corrections

    @property
    def _phase(self) -> Phase:
        return Phase.FULL if self.excursions is None else self.excursions.phase

    def _is_as_before(self, mark: _Mark) -> bool:
        same = self._phase is mark.phase and self._counts() == mark.counts
        return same and not self.engine.full_step.changing

    def _undo(self, mark: _Mark) -> None:
        """Restore random states, bit for bit. Gradients are gone already, and changed buffers were put back."""
        self.engine.take_back_step()
        self._looked_at = -_LOOK_AT_ALL  # what is done again may fail again
        own, on_device, python, numpy = mark.randomness
        torch.set_rng_state(own)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self.engine.device)
        if python is not None:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - user code may use it

    def _randomness(self) -> tuple[Any, ...]:
        """The states of the generators that a step draws from."""
        device = self.engine.device
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        python = numpy = None
        passes = self.engine.progress.backward_passes
        if self._draws_elsewhere or not 0 <= passes - self._looked_at < _LOOK_AT_ALL:
            self._looked_at = passes
            python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - user code may use it
        return torch.get_rng_state(), on_device, python, numpy

    def _see_randomness(self, mark: _Mark) -> None:
        """Whether the step drew from the generators that are not read before every step."""
        python, numpy = mark.randomness[2:]
        if python is not None and not self._draws_elsewhere:
            now: Any = np.random.get_state()  # noqa: NPY002 - user code may use it
            same = numpy[2] == now[2] and np.array_equal(numpy[1], now[1])
            self._draws_elsewhere = not same or python != random.getstate()

    # --- smaller -----------------------------------------------------------------------------------------------------

    def shrink(self, found: Shortage | None, text: str) -> bool:
        """Switch to the next smaller settings. Return False when there are none."""
        if found is not None and found.recording:  # without the graph it did fit
            smaller: Config | None = changed(self.settings, {"engine.cuda_graph": False})
        else:
            smaller = self.next_smaller(self.settings)
        if smaller is None or not (changes := self._changes(self.settings, smaller)):
            return False
        self.settings = smaller
        self.engine.use(smaller)
        self.tell(f"{text}; once more with {in_words(changes)}")
        return True

    def smaller(self, ranks: int) -> dict[str, Any]:
        """The settings that a run of several processes goes on with after a new start, where memory ran out in one of
        them; empty where nothing is left to try. ranks: they share a batch, and each divides its own rows."""
        rows = {"batch_size": self.settings.batch_size // ranks}
        smaller = self.next_smaller(changed(self.settings, rows))
        return {} if smaller is None else self._changes(self.settings, smaller)

    def begin_with(self, noted: str) -> None:
        """Go on with settings that an earlier attempt has noted as JSON, unless they are as small already."""
        try:
            found = from_json(noted)
            changes = {name: found[name] for name in _KEPT if name in found}
            settings = changed(self.settings, changes)
        except (ValueError, TypeError, ForetrainError) as error:
            raise InputError(f"smaller.json of the run folder cannot be read ({error}); delete it") from None
        if changes and settings.accumulation_steps >= self.settings.accumulation_steps:
            self.settings = settings
            self.engine.use(settings)
            self.tell(f"memory ran out in an earlier attempt; this one goes on with {in_words(changes)}")

    def _changes(self, before: Config, after: Config) -> dict[str, Any]:
        """The changes that are possible in mid-run: parts of a batch always, blocks where they can be recomputed."""
        possible = can_recompute(self.engine.model, self.engine.config)
        names = [name for name in _KEPT if possible or name != "engine.activation_checkpointing"]
        return {name: value_of(after, name) for name in names if value_of(before, name) != value_of(after, name)}

    def _count_failed_move(self, text: str) -> None:
        self.failed_moves += 1
        if self.failed_moves >= MOST_FAILED_MOVES:
            if self.excursions is not None:
                self.excursions.switch_off()
            text += f". Memory ran out in {self.failed_moves} of them: nothing is predicted any more in this run"
        self.tell(text)

    # --- what is said ------------------------------------------------------------------------------------------------

    def explain(self, found: Shortage) -> str:
        """Say where memory ran out, in what, and how much was in use. Call it before anything is freed."""
        step = self.engine.progress.global_step
        return f"out of memory in {self.memory.phase} after step {step}: {found}; {self.memory.now()}"

    def advice(self) -> str:
        return shortages.advice(self.settings, self.engine.model)

    def tell(self, text: str) -> None:
        self.told.append(text)
        self.emit(Recovered(self.engine.progress.global_step, "out_of_memory", text))

    def summary(self) -> dict[str, Any]:
        """The `out_of_memory` part of `summary.json`; empty for a run with enough memory."""
        if not self.told:
            return {}
        return {
            "out_of_memory": {
                "times": len(self.told),
                "failed_moves": self.failed_moves,
                "prediction": "off" if self.failed_moves >= MOST_FAILED_MOVES else "on",
                "settings": self._changes(self.engine.config, self.settings),
                "told": self.told[-10:],
            }
        }

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self._changes(self.engine.config, self.settings), "failed_moves": self.failed_moves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as small as the saved run had become, unless the run shall now stop when memory runs out."""
        if not self.retries or not state:
            return
        self.failed_moves = int(state["failed_moves"])
        if self.failed_moves >= MOST_FAILED_MOVES and self.excursions is not None:
            self.excursions.switch_off()
        settings = dict(state["settings"])
        parts = int(settings.get("accumulation_steps", 1))
        fixed = self.settings.engine.update_in_backward  # it needs the batch whole
        if fixed or parts <= self.settings.accumulation_steps or self.settings.batch_size % parts:
            settings.pop("accumulation_steps", None)
        if settings:
            self.settings = changed(self.settings, settings)
            self.engine.use(self.settings)
