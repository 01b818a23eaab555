"""Growth: a run begins with fewer blocks, and the deep model's weights are predicted from the shallow one's. It is a
move like others: made from a snapshot, judged by the loss some steps later, and undone where it did not return."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.depth import Depth, spread
from foretrain.engine.engine import Engine
from foretrain.engine.growing import sizes_of, step_cost
from foretrain.engine.hooks import StepHook
from foretrain.engine.moments import LONGEST_LOOK, Moments, in_decay
from foretrain.engine.step import StepOutput
from foretrain.errors import ConfigError
from foretrain.events import Event, Grown, Notice
from foretrain.hybrid.new_blocks import NewBlocks
from foretrain.persist.codec import random_state, restore_random_state
from foretrain.persist.stateful import Stateful

_RETURNED = 0.01
"""Share above the loss before growth that counts as returned, beside what is left of noise. Chosen: what growth wins is
several times as much."""
_ERRORS = 2.0
"""Standard errors that the difference of two mean losses may have by chance. Chosen: as usual."""


class Growth(StepHook, Stateful):
    """Follows the stages of `growth.layers`. Nothing is done in between but to note the last losses."""

    saved = ("depths", "stage", "grown_at", "before", "error_before", "off", "anchor", "told", "losses")
    anchor: Any
    depths: list[int]
    grown_at: int | None
    told: list[dict[str, Any]]

    def __init__(self, engine: Engine, emit: Callable[[Event], None]) -> None:
        config = engine.config.growth
        self.engine, self.emit = engine, emit
        self.depth = Depth(engine.named, config.blocks)
        self.stages = config.stages
        self._check()
        self.depths = [*(layers for layers, _ in self.stages), self.depth.total]
        """Blocks of all stages."""
        self.stage = 0
        self.before, self.error_before = math.nan, 0.0
        """Mean loss just before the last growth, and its standard error."""
        self.grown_at = None
        """Step of a growth that is on trial."""
        self.anchor = None
        """The state of the run just before it."""
        self.off = ""
        """Why the run does not grow any more."""
        self.told = []
        self._recent: deque[Tensor] = deque(maxlen=LONGEST_LOOK)
        """The last losses, on the device."""
        self._prepared = False
        self.rest: Callable[[int], None] = lambda steps: None
        """Nothing else is tried for so many steps. Set by the trainer."""
        self.healthy: Callable[[float], bool] = lambda loss: True
        """Whether a mean loss is a usual one in this run. Set by the trainer."""
        self.undone: Callable[[int], None] = lambda steps: None
        """Is told how many steps were taken back. Set by the trainer."""
        self.racing: Callable[[], bool] = lambda: False
        """Whether steps are made at several learning rates, of which most will not count. Set by the trainer."""
        self._block_share = sizes_of(engine.named, self.depth.list, self.depth.total).block_share
        self.depth.use(self._blocks_of(0))
        self.depth.silence()
        engine.follow_trained()
        engine.add_hook(self)
        engine.awaited = self._awaited

    def _check(self) -> None:
        total, layers = self.depth.total, [layers for layers, _ in self.stages]
        if layers[-1] >= total:
            raise ConfigError(
                f"growth.layers = {layers[-1]} is not less than the {total} blocks of the model; begin with fewer, or "
                "set growth.layers = 0"
            )
        for earlier, later in zip(layers, [*layers[1:], total], strict=True):
            if not set(spread(earlier, total)) <= set(spread(later, total)):
                raise ConfigError(
                    f"growth.layers = {layers}: blocks of {earlier} layers are not among those of {later}; let each "
                    "stage divide the next one"
                )
        held = {id(p) for group in self.engine.optimizer.param_groups for p in group["params"]}
        if any(id(p) not in held for p in self.depth.parameters):
            raise ConfigError(
                f"growth.layers: the optimizer does not hold all of {self.depth.name}; give it all of the model"
            )

    # --- between steps -----------------------------------------------------------------------------------------------

    def follow(self, batch: Any) -> None:
        """Before a step, while no other move is open: judge the growth that is on trial, and grow where that is due."""
        if not self._prepared:
            self._prepare(batch)
        step = self.engine.progress.global_step
        if self.grown_at is not None and step >= self.grown_at + self._moments.trial:
            self._judge()
        elif self.grown_at is None and self._may_grow and step >= self._moments.due(self.stage):
            self._grow()

    def end(self) -> None:
        """The run ends: judge what is still on trial."""
        if self.grown_at is not None:
            self._judge()

    @property
    def on_trial(self) -> bool:
        """A growth is neither kept nor undone yet."""
        return self.grown_at is not None

    def suit(self, step: int) -> None:
        """The model has its weights of an earlier step: show the blocks that were used then, where others would add
        what they never learned."""
        if self.depth.can_be_silent:
            return
        changes = {"made": 1, "undone": -1}
        stage = sum(changes.get(one["verdict"], 0) for one in self.told if one["step"] < step)
        self._use(self._blocks_of(stage))

    def warn_of_hidden(self) -> None:
        """Tell at the end of a run that weights of hidden blocks are saved with all others, but were not trained."""
        depth = self.depth
        if depth.layers < depth.total and not depth.can_be_silent:
            self.emit(
                Notice(
                    f"the model ends with {depth.layers} of {depth.total} blocks of {depth.name}; the others are saved "
                    f"with them, but were never trained: whoever reads the weights must use {list(depth.active)} only"
                )
            )

    @property
    def _to_come(self) -> bool:
        """Whether a stage is left that will end."""
        return self.stage < len(self.stages) and not self.off

    def _awaited(self) -> float:
        """Return the step at which no move may be open: it grows there."""
        waits = self._to_come and self.grown_at is None and not self.racing()
        return self._moments.due(self.stage) if waits else math.inf

    def forget_losses(self) -> None:
        """A chain of leaps has led to another loss: what was before it is nothing to judge a growth by."""
        self._recent.clear()

    @property
    def _may_grow(self) -> bool:
        """Whether losses are known to judge a growth by: after a race of learning rates they are noted anew."""
        enough = len(self._recent) >= min(self._moments.look, self.engine.progress.global_step)
        return self._to_come and not self.racing() and enough

    @property
    def _moments(self) -> Moments:
        return Moments(tuple(end for _, end in self.stages), self.engine.config.max_steps)

    def costs(self) -> list[tuple[int, float]]:
        """Return what steps cost from which step on, as far as it is planned; a step of the whole model costs 1."""
        later = enumerate(self._moments.steps(self.stage), self.stage + 1) if self._to_come else ()
        return [(0, self._cost(self.stage)), *((step, self._cost(stage)) for stage, step in later)]

    def _cost(self, stage: int) -> float:
        return step_cost(self.depths[stage], self.depth.total, self._block_share)

    def check_moments(self) -> None:
        """Refuse a growth that could not be judged before the end of the run, where that end is known."""
        if self._to_come and self.engine.has_end:
            self._moments.check(self.stage)

    def _check_end(self) -> None:
        if self._to_come and not self.engine.has_end:
            raise ConfigError("growth.at is a share of the run, which has no end; set max_steps, or epochs in fit")

    def _blocks_of(self, stage: int) -> tuple[int, ...]:
        """Which are used in a stage; after the last one all."""
        layers = self.stages[stage][0] if stage < len(self.stages) else self.depth.total
        return spread(layers, self.depth.total)

    def after_step(self, output: StepOutput) -> None:
        if not self.racing():
            self._recent.append(output.loss)

    # --- the move ----------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        engine, step = self.engine, self.engine.progress.global_step
        blocks = self._blocks_of(self.stage + 1)
        before, noise = self._mean_loss()
        if not self.healthy(before):
            return  # recovery comes first: the step after it is early enough
        self.before, self.error_before = before, noise
        new = NewBlocks(engine, self.depth, self._use)
        if (failed := new.make(blocks)) is not None:
            self.off = failed.words if engine.world.size == 1 else f"{failed.words} on rank {failed.rank}"
            self._tell("refused", math.nan, self.off)
            return
        self.anchor = new.anchor
        self.stage, self.grown_at = self.stage + 1, step
        self._recent.clear()
        self.rest(self._moments.trial)
        self._tell("made", math.nan, f"{new.count} parameters of new blocks are copies")

    def _judge(self) -> None:
        after, error = self._mean_loss()
        error = min(error, max(self.error_before, _RETURNED * abs(self.before)))  # a loss that explodes is no noise
        limit = self.before + _RETURNED * abs(self.before) + _ERRORS * math.hypot(self.error_before, error)
        if after <= limit or not math.isfinite(self.before):
            known = math.isfinite(self.before)
            self._tell(
                "kept", after, "the loss has returned" if known else "no loss before it is known to compare with"
            )
            progress, patience = self.engine.progress, self.anchor["progress"]["evaluations_without_best"]
            progress.evaluations_without_best = min(progress.evaluations_without_best, patience)
        else:
            self._undo(after)
        self.grown_at = self.anchor = None

    def _undo(self, after: float) -> None:
        """Go back to the weights before growth, and on with as few blocks. Data goes on."""
        engine, at = self.engine, self.engine.progress.global_step
        position, state = engine.progress.position, self.anchor
        self.stage -= 1
        self._use(self._blocks_of(self.stage))
        engine.rewind(state)
        engine.progress.position = position
        self._recent.clear()
        self.off = f"the loss did not return within {self._moments.trial} steps"
        self.undone(at - engine.progress.global_step)
        self._tell("undone", after, self.off)

    def _use(self, blocks: Iterable[int]) -> None:
        self._show(blocks)
        self.engine.follow_trained()

    def _show(self, blocks: Iterable[int]) -> None:
        self.depth.use(blocks)
        self.engine.recomputing.follow()

    def _mean_loss(self) -> tuple[float, float]:
        """Return the mean over the last steps whose loss was a number, and its standard error."""
        losses = [loss for loss in self.losses[-self._moments.look :] if math.isfinite(loss)]
        if len(losses) < 2:
            return (losses[0] if losses else math.nan), 0.0
        return statistics.fmean(losses), statistics.stdev(losses) / math.sqrt(len(losses))

    def _tell(self, verdict: str, loss: float, reason: str) -> None:
        step, known = self.engine.progress.global_step, None if math.isnan(loss) else loss
        before = None if math.isnan(self.before) else self.before
        event = Grown(step, verdict, self.depth.layers, self.depth.total, before, known, reason, self._cost(self.stage))
        self.told.append({"step": step, "verdict": verdict, "layers": event.layers, "before": before, "loss": known})
        self.engine.world.agree(self.told[-1], f"the growth that is {verdict}")
        self.engine.world.meet()  # at once: ranks of different depths could not make a step together
        self.emit(event)

    # --- ahead of time -----------------------------------------------------------------------------------------------

    def _prepare(self, batch: Any) -> None:
        """Where steps are compiled: compile that of the whole model now, not in the middle of the run."""
        self._prepared = True
        engine, step = self.engine, self.engine.full_step
        self._check_end()
        self.check_moments()
        engine.world.agree({"depths": self.depths, "steps": self._moments.steps(self.stage)}, "growth")
        if self._to_come and (notice := in_decay(engine.rate, self._moments.steps(self.stage))) is not None:
            self.emit(notice)
        if not step.compiled or step.in_backward is not None or not self._to_come:
            return
        used, random, buffers = self.depth.active, random_state(), [buffer.clone() for buffer in step.buffers]
        for stage in range(self.stage + 1, len(self.stages) + 1):
            self._show(self._blocks_of(stage))
            step.gradient(engine.to_device(batch))
        engine.optimizer.zero_grad(set_to_none=True)
        self._show(used)
        restore_random_state(random)
        with torch.no_grad():
            for buffer, before in zip(step.buffers, buffers, strict=True):
                buffer.copy_(before)

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def losses(self) -> list[float]:
        """The last losses, as they are saved: on several ranks their means."""
        self.engine.world.catch_up()
        recent = list(self._recent)
        return self.engine.world.to_host(torch.stack(recent).float()) if recent else []

    @losses.setter
    def losses(self, values: list[float]) -> None:
        self._recent = deque((torch.tensor(value, device=self.engine.device) for value in values), LONGEST_LOOK)

    def expect(self, state: Mapping[str, Any]) -> None:
        """A state follows that fits (`check_depths`): use as many blocks as it has."""
        self._use(self._blocks_of(min(max(0, int(state["stage"])), len(self.stages))))

    def after_load(self) -> None:
        if not 0 <= self.stage <= len(self.stages):
            raise ValueError(f"stage {self.stage} of {len(self.stages)}")
        if self.depth.active != self._blocks_of(self.stage):  # else those who watch would forget what was loaded
            self._use(self._blocks_of(self.stage))

    def summary(self) -> dict[str, Any]:
        """Tell where it began, and what became of every growth."""
        return {"layers": self.depth.layers, "of": self.depth.total, "moves": [dict(one) for one in self.told]}
