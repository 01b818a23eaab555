"""Hooks watch full steps: before the step, when its gradients are ready, and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrain.engine.step import StepOutput


class StepHook:
    """Watches full steps. A subclass overrides what it needs; the rest does nothing.

    `Engine.add_hook` is the way to watch every full step: `trainer.engine.add_hook(hook)`. Hooks that are handed to
    `Engine.full` watch that one step only. They stand around the others: first before the step, last after it.

    What counts as a full step:

    - Those that validate a move, too, and those that are undone later: the fork of an audit, and the steps of all rates
      in a race of learning rates.
    - The leaps of a chain are none, though each takes a gradient: no hook is called for them.

    What a hook has to know:

    - `after_step` comes before the step is counted: `progress.global_step` is the same in all three methods.
    - `gradients_ready` does not come with `engine.update_in_backward`, where updates happen on the way.
    - A rollback does not take a hook back. One with a state that belongs to the weights registers it:
      `trainer.policy.tools.snapshots.register(name, save, load)`.
    - A checkpoint does not hold it. Save its state beside the trainer's, if the run has to go on with it.
    - What it raises ends the run, as an error of the loss does.
    """

    wants_gradients = False
    """Whether `gradients_ready` is to be called. Such a step cannot be replayed as one recorded graph."""

    def before_step(self) -> None:
        """A full step is about to begin."""

    def gradients_ready(self) -> None:
        """The gradients are on the parameters, and nothing is updated yet. They are not clipped, and with fp16 they
        carry the loss scale (`engine.precision.scale`)."""

    def after_step(self, output: StepOutput) -> None:
        """The weights are updated, the step is not counted yet. `output` is on the device; whoever reads it waits."""

    def take_back(self) -> None:
        """The step will not be done: undo what `before_step` changed. It may not have been called yet. Only hooks that
        watch every step are told."""
