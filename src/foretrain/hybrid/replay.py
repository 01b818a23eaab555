"""An earlier point of the run and the batches that followed it: copies of the run are trained from there, and the run
goes on as if they had not been."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

from foretrain.engine.batch import map_tensors, tensors_of, typed_like
from foretrain.engine.engine import Engine
from foretrain.engine.hooks import StepHook
from foretrain.engine.meters import StepMeter
from foretrain.engine.step import StepOutput
from foretrain.errors import ConfigError, is_out_of_memory
from foretrain.hybrid.moves.lookahead import LookAhead
from foretrain.persist.codec import put_together, same_random_numbers, snapshot
from foretrain.persist.stateful import Stateful, plain

Interrupted = Callable[[], bool]
"""Whether the run is to stop: a copy is left then, and made anew when the run goes on."""
_MOST_BYTES = 2**28
"""Bytes of batches that are kept, by the size of the first one; a copy that is longer than they are begins with them
again. Chosen: enough for some thousand batches of text, and little beside any model that is trained on larger ones."""
_TOO_LARGE = "a copy of the run is too large"


class Replay(Stateful):
    """Where copies begin, the batches that came next, and what copies cost."""

    saved = ("anchor", "batches", "noted", "step", "position", "passes", "tokens", "probe_tokens")
    rows_of_rank = ("batches",)
    anchor: Any
    batches: list[Any]

    def __init__(self, engine: Engine, look_ahead: LookAhead | None = None) -> None:
        """look_ahead: its state belongs to that of a copy which it watches."""
        self.engine, self.look_ahead = engine, look_ahead
        self.anchor = None
        """The state of the run where copies begin; None while nothing is noted."""
        self.step = 0
        """Steps that the run had done there."""
        self.position = 0
        """Position in the data there."""
        self.batches = []
        """As they were handed in since."""
        self.noted = 0
        """How many were handed in; some may be too many to be kept."""
        self._room: int | None = None
        """How many may be kept, the same number in all processes; None: nobody has seen one since this process began
        to note them."""
        self.passes = self.tokens = self.probe_tokens = 0
        """What copies took so far, beside the run."""
        self._foreign: dict[type, str] = {}
        """What batches of a type hold that cannot be saved."""

    @property
    def open(self) -> bool:
        return self.anchor is not None

    def begin(self) -> None:
        """Copies will begin here."""
        progress = self.engine.progress
        self.forget()
        self.anchor = self.state()
        self.step, self.position = progress.global_step, progress.position

    def forget(self) -> None:
        self.anchor, self.batches, self.noted, self._room = None, [], 0, None

    def fits(self, take: Callable[[], object]) -> bool:
        """Do what needs memory for another copy of the run. Returns whether that was enough, in all processes."""
        failed = False
        try:
            take()
        except RuntimeError as error:
            failed = is_out_of_memory(error)
            if not failed:
                raise
        return not self.engine.world.anyone(_TOO_LARGE, failed)

    def is_bearable(self, error: RuntimeError) -> bool:
        """Whether memory ran out while a copy was trained, and the run can go on without it. One of several processes
        cannot: the others wait for it in the middle of a step."""
        return is_out_of_memory(error) and self.engine.world.size == 1

    def note(self, batch: Any, position: int) -> None:
        """A batch was handed in at this position of the data; after a rollback the same ones come again."""
        if not self.open or position != self.position + self.noted:
            return
        if found := self.foreign_to_states(batch):
            raise ConfigError(
                "optimizer.learning_rate = 'auto' trains copies of the run on its first batches again, and cannot save "
                f"what these hold: {found}; give batches of tensors, numbers and strings in tuples, lists and dicts, "
                "or set a rate"
            )
        if self._room is None:
            self._room = self._room_for(self.batches[0] if self.batches else batch)
        if len(self.batches) == self.noted < self._room:
            self.batches.append(map_tensors(batch, lambda tensor: tensor.clone()))
        self.noted += 1

    def _room_for(self, batch: Any) -> int:
        """Return how many such batches are kept. Those of several processes may differ in size: their mean counts."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch))
        mean = self.engine.world.total([size])[0] / self.engine.world.size
        return max(1, int(_MOST_BYTES / mean)) if mean else _MOST_BYTES

    def foreign_to_states(self, batch: Any) -> str:
        """Return the name of a type in a batch that cannot be saved; empty: there is none. Of each type of batches only
        the first one is looked at."""
        kind = type(batch)
        if kind not in self._foreign:
            self._foreign[kind] = _foreign_to_states(batch)
        return self._foreign[kind]

    def batch(self, index: int, given: Any) -> Any:
        """Return the batch of a step of a copy, on the device, typed as one that the loader has given."""
        return self.engine.to_device(typed_like(self.batches[index % len(self.batches)], given))

    @contextmanager
    def aside(self, *hooks: StepHook, stay: bool = False) -> Iterator[None]:
        """Inside the block the run is a copy, which nobody watches but `hooks`; after it the run is what it was, bit
        for bit. What it cost is counted here. The clock of the run goes on. stay: the run goes on as the copy."""
        engine, progress, end = self.engine, self.engine.progress, None if stay else self.state()
        kept, meter, used = engine.hooks, engine.meter, engine.rate.used
        spent, position = (progress.backward_passes, progress.tokens), progress.position
        in_backward = engine.full_step.in_backward
        watchers = [] if in_backward is None else in_backward.watchers
        engine.hooks, engine.meter = hooks, StepMeter(world=engine.world)
        if in_backward is not None:
            in_backward.watchers = []
        try:
            yield
        finally:
            engine.hooks, engine.meter = kept, meter
            if in_backward is not None:
                in_backward.watchers = watchers
            if end is None:
                progress.position = position
            else:
                self.put(end)
            engine.rate.used = used
            passes, tokens = spent
            self.passes += progress.backward_passes - passes
            self.tokens += progress.tokens - tokens
            progress.backward_passes, progress.tokens = spent

    def state(self) -> Any:
        """Return all that changes while the run goes on, as tensors of its own."""
        ahead = None if self.look_ahead is None else self.look_ahead.state_dict()
        return put_together(snapshot({"run": self.engine.changing_state_dict(), "look_ahead": ahead}), spread=True)

    def put(self, state: Any) -> None:
        """Go to such a state of this run, bit for bit."""
        self.engine.rewind(state["run"])
        if self.look_ahead is not None:
            self.look_ahead.load_state_dict(state["look_ahead"])

    def go_back(self) -> None:
        """To where copies begin."""
        self.put(self.anchor)

    def full(self, index: int, given: Any) -> StepOutput:
        """Make the step of a copy on the batch that the run had then."""
        return self.engine.full(self.batch(index, given))

    def loss(self, held_out: list[Any]) -> float:
        """Return the mean loss of held-out batches at the weights that evaluations are made at."""
        engine, progress = self.engine, self.engine.progress
        spent = progress.probe_tokens
        with same_random_numbers(), engine.averaged_weights():
            loss = engine.probe_all(held_out)
        self.probe_tokens += progress.probe_tokens - spent
        progress.probe_tokens = spent
        return loss


def _foreign_to_states(value: Any) -> str:
    """Return the name of a type in it that a state does not hold, or not as what it is; empty: there is none."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((found for item in value if (found := _foreign_to_states(item))), "")
    try:
        plain(value)
    except TypeError:
        return type(value).__name__
    return type(value).__name__ if is_dataclass(value) else ""
