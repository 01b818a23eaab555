"""Hooks watch full steps: before the step, when its gradients are ready, and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrain.engine.step import StepOutput


class StepHook:
    """Watches full steps. A subclass overrides what it needs; the rest does nothing.

    `Engine.hooks` watch every full step, those that are handed to `Engine.full` watch that one step only and stand
    around the others: they are the first before the step and the last after it.
    """

    wants_gradients = False
    """Whether `gradients_ready` is to be called. Such a step cannot be replayed as one recorded graph."""

    def before_step(self) -> None:
        """A full step is about to begin."""

    def gradients_ready(self) -> None:
        """The gradients are on the parameters, and nothing is updated yet."""

    def after_step(self, output: StepOutput) -> None:
        """The step is done. `output` is on the device; whoever reads it waits for the device."""

    def take_back(self) -> None:
        """The step that was begun will not be done: undo what `before_step` changed."""
