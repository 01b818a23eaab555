"""A run inside of somebody else's loop: what is watched, told, saved and resumed while the host trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from foretrain.engine.memory.usage import MemoryMeter
from foretrain.engine.meters import Stopwatch
from foretrain.engine.own import described
from foretrain.engine.state import as_checkpoint_error
from foretrain.errors import CheckpointError, InputError, SaveError
from foretrain.events import Bus, Event, Moved, Notice
from foretrain.guest.engine import GuestEngine, MadeStep
from foretrain.guest.leaps import GuestHybrid
from foretrain.guest.voice import GuestVoice
from foretrain.health.checkup import Checkup
from foretrain.health.rescue import Rescue
from foretrain.hybrid.freezing import follow_freezing
from foretrain.persist import checkpoint
from foretrain.persist.codec import own_copy, put_together, take_apart
from foretrain.persist.stateful import entry

_FORM = 1
"""Names the form of what `state_dict` gives."""


class GuestRun:
    """Watches an optimizer through its own step hooks, and leaps where the host says that it is between two steps.

    `foretrain.wrap` makes one. Nothing of the host's is replaced: without a call of `between_steps` no weight changes.
    """

    def __init__(
        self,
        engine: GuestEngine,
        probe: list[Any],
        price: float | None,
        bus: Bus,
        out: str | Path | None = None,
        overwrite: bool = False,
    ) -> None:
        """price: full steps that one look at the probe costs; None: each of its batches is as large as a step's."""
        self.engine = engine
        self.bus = bus
        bus.around = engine.fence.hearing
        self.out, self.overwrite = out, overwrite
        rescue = Rescue(engine, MemoryMeter(engine.device, on=False), self._emit)
        self.checkup = Checkup(engine, self._emit)
        self.hybrid = GuestHybrid(engine, self.checkup, rescue, probe, price, self._emit)
        engine.rate_sources = ()
        self.voice = GuestVoice(engine, self.hybrid, probe, bus, self._emit)
        self._made: MadeStep | None = None
        """A step that the host has made and nobody has looked at."""
        self._moved: Moved | None = None
        self._missed = False
        self._origin = ""
        """What the state was loaded from."""
        self._open, self._closed = False, False
        self._anew = False
        """Weights may have been put back since they were watched."""
        self.at_end: list[Callable[[], None]] = []
        """Are called when the run is closed."""
        optimizer = engine.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        self._looked: MadeStep | None = None

    # --- the host's steps --------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """The optimizer is about to step. If nobody called `between_steps` since its last step, that step is taken in
        now, without its loss, and no leap can be made any more."""
        self.open()
        self._take_in()
        if self.hybrid.leap_is_due:
            self._miss()
        engine = self.engine
        if self._anew:
            self.hybrid.observer.restart()
            self._anew = False
        if engine.trained.changed:
            follow_freezing(engine, self.hybrid.policy, None, self._emit)
        engine.before_step(*((self.hybrid.observer,) if self.hybrid.watches else ()))
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
        self._looked = None if closure is not None else self._look()  # else the gradients are made in the step

    def _look(self) -> MadeStep:
        if self.hybrid.watches:
            self.hybrid.see_gradients()
        return self.engine.look_at_gradients()

    def _after_step(self) -> None:
        self._made, self._looked = self._look() if self._looked is None else self._looked, None

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has made a step that `between_steps` was not called for yet."""
        return self._made is not None

    def between_steps(self, loss: Tensor | float | None = None) -> Moved | None:
        """To be called after the optimizer's step, and before the next batch: here a leap may be made. Between two
        parts of a step, with gradient accumulation, it does nothing.

        loss: mean loss of that step, for the log, the loss forecast and health. Returns what became of a leap.
        """
        if self._made is None:
            return None
        if loss is not None:
            self._made.loss = torch.as_tensor(loss)
        self._moved = None
        self._take_in()
        if self.hybrid.leap_is_due:
            self.hybrid.leap()
        self.voice.tell()
        return self._moved

    def _take_in(self) -> None:
        """Look at the step that the host has made, if nobody has so far."""
        made, self._made = self._made, None
        if made is None:
            return
        self.voice.gradient_norm = made.gradient_norm
        self.hybrid.full(made)
        self.engine.world.step_done()
        if self.checkup.due and self.hybrid.may_be_examined:
            self.checkup.judge()

    def _settle(self) -> None:
        """Leave nothing open."""
        self._take_in()
        if self.hybrid.leap_is_due:
            self.hybrid.miss()

    def _miss(self) -> None:
        self.hybrid.miss()
        if not self._missed:
            text = "a leap was due, and the loop did not call between_steps() after its step: nothing is tried"
            self._emit(Notice(text))
        self._missed = True

    # --- what is told ------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        if isinstance(event, Moved):
            self._moved = event
        self.bus.emit(event)

    def evaluated(self, loss: Tensor | float) -> None:
        """Hear a held-out loss that the host has measured, for the log, the loss forecast and health. Set
        `evaluation.interval = 0` then: losses of the probe are of other data."""
        self.open()
        self.voice.note_held_out(float(loss), 0.0)

    # --- the beginning and the end -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to tell: the folder, the log and the first look at the probe. The first step does it by itself."""
        if self._closed:
            raise InputError("this run is closed; wrap the optimizer again")
        if not self._open:
            self._open = True
            self.voice.begin(self.out, self.overwrite, self._origin)

    def summary(self) -> dict[str, Any]:
        """What was seen, tried and kept so far."""
        return self.voice.summary()

    def close(self, failed: bool = False) -> None:
        """End the watch: hooks go, the summary and the report page are written. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for end in (*(hook.remove for hook in self._hooks), *self.at_end):
            end()
        if self._open:
            if not failed:  # else other ranks may not be here
                self._settle()
            self.voice.end(failed)

    def __enter__(self) -> GuestRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything of the watch that decides how it goes on. Weights and optimizer are the host's to save; tensors
        are referred to, not copied."""
        self._settle()
        engine, forecaster = self.engine, self.voice.forecaster
        state = {
            "form": _FORM,
            "groups": list(self.hybrid.observer.trajectory.groups),
            "meter": engine.meter.state_dict(),
            "progress": engine.progress.state_dict(),
            "rates": engine.rate.state_dict(),
            "seconds": engine.clock.seconds,
            "hybrid": self.hybrid.state_dict(),
            "checkup": self.checkup.state_dict(),
            "forecaster": None if forecaster is None else forecaster.state_dict(),
        }
        return dict(put_together(take_apart(state)))  # nothing but plain values and tensors

    def load_state_dict(self, state: Mapping[str, Any], origin: str = "the given state") -> None:
        """Put a state back, between two steps. The host puts back weights and optimizer, before this or after it."""
        if state.get("form") != _FORM:
            raise CheckpointError(f"{origin}: its form is {state.get('form')!r}, and this version reads {_FORM}")
        if state.get("groups") != list(self.hybrid.observer.trajectory.groups):
            raise CheckpointError(
                f"{origin}: it is of a model with other trained weights; wrap the model it was made with"
            )
        engine, forecaster = self.engine, self.voice.forecaster
        state = own_copy(state)
        with as_checkpoint_error(origin):
            engine.meter.load_state_dict(entry(state, "meter", "GuestRun"))
            engine.progress.load_state_dict(entry(state, "progress", "GuestRun"))
            engine.rate.load_state_dict(entry(state, "rates", "GuestRun"))
            engine.clock = Stopwatch(float(entry(state, "seconds", "GuestRun")))
            self.hybrid.load_state_dict(entry(state, "hybrid", "GuestRun"))
            self.checkup.load_state_dict(entry(state, "checkup", "GuestRun"))
            if forecaster is not None and state["forecaster"] is not None:
                forecaster.load_state_dict(state["forecaster"])
        self._made, self._origin = None, origin
        self._anew = not engine.config.checkpoint.directions
        if self._open:
            self.voice.resume(origin)

    def save(self, folder: str | Path) -> None:
        """Write the state as a folder of safetensors and JSON with checksums, whole or not at all. It belongs to a
        checkpoint of the host of the same step. All ranks call it, and the first one writes."""
        state, world, words = self.state_dict(), self.engine.world, None
        if world.rank == 0:
            try:
                checkpoint.write(Path(folder), self.engine.progress.global_step, state)
            except SaveError as error:
                words = str(error)
        failed = world.all_well(words)
        if failed is not None:
            raise SaveError(failed.words)

    def load(self, folder: str | Path) -> bool:
        """Read what `save` wrote. Where there is nothing False is returned: the run is watched anew."""
        folder, world = Path(folder), self.engine.world
        if world.rank == 0:
            checkpoint.put_back_replaced(folder)
        world.all_well()  # not before it is there
        if not folder.is_dir():
            self._emit(Notice(f"{folder} is not there: the run goes on, and is watched anew"))
            self._made, self._anew = None, True
            return False
        self.load_state_dict(checkpoint.read(folder), str(folder))
        return True

    def begin_at(self, step: int) -> None:
        """The host goes on at this step, and what was seen before it is not known."""
        self.engine.begin_at(step)
        self._origin = f"step {step}, of which nothing was saved here"


def checked_probe(probe: Any) -> list[Any]:
    """Return the batches of a probe; InputError where it is none."""
    if isinstance(probe, (str, bytes, Tensor, Mapping)) or not hasattr(probe, "__iter__"):
        raise InputError(
            f"probe is {described(probe)}; give a list of held-out batches, or a function that gives their loss"
        )
    batches = list(probe)
    if not batches:
        raise InputError(
            "probe holds no batch; give at least one that is never trained on, or probe=None to watch only"
        )
    return batches
