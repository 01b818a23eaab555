"""The state of a whole run: that of the engine, and of the parts around it that save themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from foretrain.engine.engine import Engine
from foretrain.engine.explain import HandedIn
from foretrain.engine.objective import block_weights, other_weights
from foretrain.engine.state import as_checkpoint_error
from foretrain.events import Event, Notice
from foretrain.persist.form import check_form, check_format


class Part(Protocol):
    """Something that saves itself."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


class ComposedState:
    """parts: by the names of their states, in the order in which they are put back; None: it is switched off."""

    def __init__(self, engine: Engine, parts: Mapping[str, Part | None], emit: Callable[[Event], None]) -> None:
        self.engine = engine
        self.parts = parts
        self.emit = emit

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on. Tensors are referred to, not copied."""
        state = self.engine.state_dict()  # first: with it the last numbers of the meter reach the parts
        return state | {name: None if part is None else part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any], origin: str) -> None:
        """Put a state back, in place. A part that was switched on since it was saved starts anew."""
        with as_checkpoint_error(origin):
            check_format(state.get("format"), origin)
            check_form(self.state_dict(), state)
            handed_in = HandedIn.to(self.engine)
            self.engine.put_back(state, origin)
            for text in handed_in.differences(self.engine):
                self.emit(Notice(text, level="info"))
            if text := other_weights(state.get("block_weights") or {}, block_weights(self.engine.objective) or {}):
                self.emit(Notice(text))
            for name, part in self.parts.items():
                if part is not None and state[name] is not None:
                    part.load_state_dict(state[name])
            self.engine.freeze_as_saved(state)
