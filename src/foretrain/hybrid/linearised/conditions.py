"""What must hold for a loss to be linearised, beside its form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from foretrain.engine.batch import same_batch
from foretrain.engine.objective import UnknownForm
from foretrain.hybrid.linearised.choice import outputs_of_unit
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.persist.codec import random_state

_FEWEST_OUTPUTS = 8
"""Outputs that there must be, or as many as weights. Chosen: blocks are fewer, in case somebody gives their means."""

_FEWEST_SAMPLES, _ENOUGH_SAMPLES = 2, 16
"""Samples of several classes that a leap takes at the least, and that are advised. Measured with 100 classes: leaps by
one sample win nothing, and take as long as 180 steps."""


@contextmanager
def repeatable(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Outputs that are computed in the block are a function of weights and batch alone: no generator is drawn from, and
    no buffer changes. Else trials could not be compared, and no chain would be resumed to the bit."""
    random, before = random_state(), [buffer.clone() for buffer in buffers]
    yield
    if not same_batch(random, random_state()):
        raise UnknownForm(
            "the loss draws random numbers, as dropout does; points, for example, are to be drawn where batches are"
        )
    if any(not torch.equal(one, now) for one, now in zip(before, buffers, strict=True)):
        raise UnknownForm("the model changes its buffers in every pass, as batch norm does")


def check_size(look: Linearisation, count: int, elements: int, rows: int, most_rows: int) -> int:
    """Raises UnknownForm where there are too few outputs, or too many in one sample. Returns how many outputs belong
    together at the most. count: outputs of all processes; rows: that the first leap is to take."""
    widest = max(map(outputs_of_unit, look.parts))
    if widest > most_rows:
        raise UnknownForm(f"hybrid.linear_memory_mb has no room for the rows of one sample of {widest} classes")
    if widest > 1 and rows < min(_FEWEST_SAMPLES * widest, count):
        what = f"{rows} rows are those of less than {_FEWEST_SAMPLES} samples of {widest} classes"
        raise UnknownForm(f"{what}, which say too little; set hybrid.linear_rows = {_ENOUGH_SAMPLES * widest} or more")
    if count < min(_FEWEST_OUTPUTS, elements):
        raise UnknownForm(f"{count} residuals say too little; give one for each point, not their mean")
    return widest
