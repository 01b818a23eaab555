"""New blocks of a model that grows: they are made on all ranks or, where memory runs out on one of them, on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.depth import Depth, copy_state
from foretrain.engine.engine import Engine
from foretrain.engine.world import FailedRank
from foretrain.errors import is_out_of_memory
from foretrain.persist.codec import put_together, snapshot
from foretrain.persist.parts import local


class NewBlocks:
    """Makes blocks from others, and knows the way back to before."""

    def __init__(self, engine: Engine, depth: Depth, use: Callable[[tuple[int, ...]], None]) -> None:
        """use: shows blocks to the model, and tells all that knows what is trained."""
        self.engine, self.depth, self._use = engine, depth, use
        self.anchor: Any = None
        """The state of the run before they were made."""
        self.count = 0
        """Parameters that were made."""
        self._active = depth.active
        self._held = {parameter: engine.optimizer.state.get(parameter) for parameter in depth.parameters}

    def make(self, blocks: tuple[int, ...]) -> FailedRank | None:
        """Make what is new among these, and use all of them. Returns a rank on which memory ran out, if there is one:
        then nothing has changed. All ranks ask twice, so that none has other gradients to reduce than the others."""
        failed = self._on_all_ranks(lambda: self._copy(blocks)) or self._on_all_ranks(lambda: self._use(blocks))
        if failed is not None:
            self._take_back()
        return failed

    def _on_all_ranks(self, work: Callable[[], None]) -> FailedRank | None:
        short = None
        try:
            work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            short = "there is not enough memory for it"
        return self.engine.world.all_well(short)

    def _copy(self, blocks: tuple[int, ...]) -> None:
        """Remember the state of the run, and make new blocks, which are still hidden."""
        engine, depth = self.engine, self.depth
        self.anchor = put_together(snapshot(engine.changing_state_dict()), spread=True)
        pairs = depth.copy(depth.sources(blocks))
        copy_state(engine.optimizer, depth.model, pairs)
        if engine.average is not None:
            engine.average.copy(pairs)
        self.count = len(pairs)

    @torch.no_grad()
    def _take_back(self) -> None:
        """Nothing has changed but blocks that were hidden: they get back what they were, in no more memory."""
        engine, anchor = self.engine, self.anchor
        if self.depth.active != self._active:
            self._use(self._active)
        if anchor is None:  # memory ran out before anything was made
            return
        for name, value in self.depth.model.state_dict().items():
            if name.startswith(f"{self.depth.name}.") and isinstance(value, Tensor):
                local(value).copy_(local(anchor["model"][name]))
        if engine.average is not None:
            engine.average.load_state_dict(anchor["average"])
        for parameter, state in self._held.items():
            engine.optimizer.state.pop(parameter, None)
            if state is not None:
                engine.optimizer.state[parameter] = state
