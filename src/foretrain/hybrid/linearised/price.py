"""What a leap costs in full steps. It is reckoned, not timed: a run that is resumed must decide as it would have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from foretrain.engine.engine import Engine
from foretrain.hybrid.linearised.rows import TOGETHER, Linearisation
from foretrain.hybrid.linearised.way import Way
from foretrain.persist.stateful import Stateful


@dataclass(frozen=True)
class Machine:
    """What leaps and full steps cost on one kind of device. It only has to tell a thousandfold cost from a twofold."""

    speed: float
    """Multiplications per second of the products of rows."""
    step: float
    """Seconds of a full step of a small network, beside its products."""
    look: float
    """Seconds of outputs and their rows, beside the products."""
    batched: float
    """Seconds of a batched backward pass, beside its products."""
    number: float
    """Seconds that each number a layer makes takes in a backward pass, beside the products."""


_MACHINES = {
    "cpu": Machine(speed=5e10, step=1e-3, look=1e-3, batched=2e-3, number=3e-9),
    "cuda": Machine(speed=3e13, step=5e-4, look=2e-3, batched=4e-3, number=1e-11),
}
"""Measured on one core, and on one H200, where full steps and leaps are recorded graphs."""
_USUAL_USES = 4
"""Uses of a layer in a row. Measured: 1 without derivatives, 4 with those of second order in one direction."""
_OF_LOOK = 2.0
"""Products of a full step that outputs and their rows take. Measured: 1.6 to 2.4 on one core."""
_BACKWARD = 0.6
"""Share of a full step that a backward pass takes. Measured where outputs are taken one by one, of convolutions, LSTMs,
attention and networks that are called through torch.func: 0.5 to 0.75."""


def numbers_of(way: Way) -> tuple[int, int, float, float]:
    """What of a way the price follows from, as `Price` holds it."""
    per_pass = 1 if way.one_by_one else 0 if way.grid is None else way.grid.size
    return len(way.passes), per_pass, way.pair_work, way.held


class Price(Stateful):
    """Knows how large the problem is, and how its rows are taken."""

    saved = ("outputs", "work", "numbers", "passes", "per_pass", "pair_work", "held")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs, self.work, self.numbers = 0, 0, 0
        """Outputs of the last batch, multiplications that they take, and numbers that layers make for them."""
        self.passes, self.per_pass = 1, 0
        """Backward passes that all rows together take; or else how many rows each of them takes."""
        self.pair_work, self.held = 0.0, 0.0
        """Multiplications that the product of two rows takes, and numbers that are held for each row."""

    def expect(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        """What is held for a row, before anything is known of it: factors of linear layers, numbers of all else."""
        layers = {id(layer.weight): layer for layer in model.modules() if type(layer) is nn.Linear}
        for parameter in parameters:
            held = parameter.numel()
            if (layer := layers.get(id(parameter))) is not None:
                held = min(held, _USUAL_USES * (layer.in_features + layer.out_features))
            self.held += held

    def note(self, look: Linearisation) -> None:
        self.outputs, self.work, self.numbers = look.count, look.work, look.numbers_made

    def note_way(self, way: Way) -> None:
        self.passes, self.per_pass, self.pair_work, self.held = numbers_of(way)

    def of(self, rows: int, elements: int) -> float:
        """Full steps that a leap by so many rows of so many weights costs."""
        machine = _MACHINES.get(self.engine.device.type, _MACHINES["cuda"])
        outputs = self.outputs or self.engine.progress.rows * self.engine.world.size
        rows = min(rows, outputs)
        products = 3.0 * (self.work or outputs * elements) / machine.speed  # forward once, backward twice
        if self.per_pass == 1:
            each = products + machine.number * self.numbers
            taken = math.ceil(rows / TOGETHER) * machine.batched + rows * _BACKWARD * each
        else:
            passes = rows / self.per_pass if self.per_pass else self.passes
            taken = max(0.0, passes - 1) * _BACKWARD * (machine.step + products)
        of_pairs = rows * rows * (self.pair_work or elements) if rows < elements else rows * elements * elements
        taken += (2.0 * of_pairs + min(rows, elements) ** 3 / 3) / machine.speed
        return (machine.look + machine.step + _OF_LOOK * products + taken) / (machine.step + products)

    def memory_mb(self, rows: int, elements: int) -> float:
        """That so many rows take: in fp32 and once more in fp64, and their products three times in fp64."""
        return (12.0 * (self.held or elements) * rows + 24.0 * rows * rows) / 2**20

    def most_rows(self, memory_mb: float, elements: int) -> int:
        """Rows that there is memory for."""
        room, row = memory_mb * 2**20, 12.0 * max(1.0, self.held or float(elements))
        return int((math.sqrt(row * row + 96.0 * room) - row) / 48.0)
