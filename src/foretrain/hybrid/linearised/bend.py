"""How outputs bend along a step, and what the step has to be changed by for it (geodesic acceleration, Transtrum and
Sethna). Nothing is read from the device.

Steps by all rows are bent; those by a part of them only in fp64, once the loss has fallen far. Measured on Burgers,
Helmholtz and Poisson with fresh points: where steps by a part of the rows are bent from the beginning, these are fewer
by up to a third, but take up to 40 % more seconds to the loss of a tuned Adam; late and in fp64 the loss in equal
seconds is 3 to 400 times as low.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretrain.hybrid.linearised.solve import System

AHEAD = 0.3
"""Share of a step at which outputs are looked at to see how they bend. Measured on Poisson, the cubic equation,
Burgers, Helmholtz and the diabetes network, two seeds each: 0.1, 0.3 and 1 win about as much in fp64; in fp32 what 0.1
sees is more often rounding."""
_MOST = 0.375
"""Share of a step's length that the change may have. Chosen: what Transtrum and Sethna recommend; where it is longer,
the step is too long for outputs to be parabolas along it."""


def bend_of(system: System, step: Tensor, here: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor]:
    """What to add to the last step that the system solved for; nothing where that would be long. Also whether it is
    anything, as a number.

    here, ahead: the chosen outputs where the step begins, and at `AHEAD` of it.
    """
    linear = system.rows.times(step).to(here.dtype)
    second = ((ahead - here) / AHEAD - linear) * (2 / AHEAD)
    bend = system.again(second).to(step.dtype) / 2
    short = bend.norm() <= _MOST * step.norm()  # not so where numbers are not finite
    return torch.where(short, bend, torch.zeros_like(bend)), short.to(here.dtype)
