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


def check_size(look: Linearisation, elements: int, most_rows: int) -> int:
    """Raises UnknownForm where there are too few outputs, or too many in one sample. Returns how many outputs belong
    together at the most."""
    widest = max(map(outputs_of_unit, look.parts))
    if widest > most_rows:
        raise UnknownForm(f"hybrid.linear_memory_mb has no room for the rows of one sample of {widest} classes")
    if (count := look.count) < min(_FEWEST_OUTPUTS, elements):
        raise UnknownForm(f"{count} residuals say too little; give one for each point, not their mean")
    return widest
