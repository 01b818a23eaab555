"""What a leap costs in full steps. It is reckoned, not timed: a run that is resumed must decide as it would have."""

from __future__ import annotations

import math

from foretrain.engine.engine import Engine
from foretrain.hybrid.linearised.rows import TOGETHER, Linearisation
from foretrain.hybrid.linearised.way import Way
from foretrain.persist.stateful import Stateful

_LOOK = 2.0
"""Full steps that outputs and their rows take beside the products. Measured: 1.6 to 2.4 on one CPU core."""
_SPEED = {"cpu": 5e10}
"""Multiplications per second of such products on one core, measured; `_FAST` elsewhere, which is no measurement: they
only have to tell a thousandfold cost from a twofold one."""
_FAST = 1e13
_PASS = 1e-3
"""Seconds of a full step of a small network, beside its products. Measured: 0.6 to 2 ms on one core."""
_BACKWARD = 0.6
"""Share of a full step that a backward pass takes. Measured where outputs are taken one by one, of convolutions, LSTMs,
attention and networks that are called through torch.func: 0.5 to 0.75."""
_BATCHED = 2e-3
"""Seconds of a batched backward pass, beside its products. Measured: 1 to 2 ms on one core."""


class Price(Stateful):
    """Knows how large the problem is, and how its rows are taken."""

    saved = ("outputs", "work", "passes", "per_pass", "pair_work", "held")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs, self.work = 0, 0
        """Outputs of the last batch, and multiplications that they take."""
        self.passes, self.per_pass = 1, 0
        """Backward passes that all rows together take; or else how many rows each of them takes."""
        self.pair_work, self.held = 0.0, 0.0
        """Multiplications that the product of two rows takes, and numbers that are held for each row."""

    def note(self, look: Linearisation) -> None:
        self.outputs, self.work = look.count, look.work

    def note_way(self, way: Way) -> None:
        self.passes = len(way.passes)
        self.per_pass = 1 if way.one_by_one else 0 if way.grid is None else way.grid.size
        self.pair_work, self.held = way.pair_work, way.held

    def of(self, rows: int, elements: int) -> float:
        """Full steps that a leap by so many rows of so many weights costs."""
        outputs = self.outputs or self.engine.progress.rows
        rows, speed = min(rows, outputs), _SPEED.get(self.engine.device.type, _FAST)
        few = min(rows, elements)
        products = 3.0 * (self.work or outputs * elements) / speed  # forward once, backward twice
        if self.per_pass == 1:
            taken = math.ceil(rows / TOGETHER) * _BATCHED + rows * _BACKWARD * products
        else:
            passes = rows / self.per_pass if self.per_pass else self.passes
            taken = max(0.0, passes - 1) * _BACKWARD * (_PASS + products)
        of_pairs = rows * rows * (self.pair_work or elements) if rows < elements else rows * elements * elements
        return _LOOK + (taken + (2.0 * of_pairs + few**3 / 3) / speed) / (_PASS + products)
