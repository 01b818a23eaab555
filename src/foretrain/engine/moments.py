"""When a run grows, and how long each growth is on trial: numbers that follow from `growth.at` and the run's length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from foretrain.engine.rates import Rates, ScheduledRates
from foretrain.errors import ConfigError
from foretrain.events import Notice

_SHARE_OF_LOOK, _SHORTEST_LOOK, LONGEST_LOOK = 0.02, 4, 50
"""Steps whose mean loss is compared, before growth and at the end of its trial. Chosen: a mean of fifty batches is
known to some thousandths."""
_SHARE_OF_TRIAL = 0.05
"""Share of the run after which growth is judged. Chosen: new blocks that are copies raise the loss at first, and in all
runs that were looked at it had returned by then."""


@dataclass(frozen=True)
class Moments:
    """Tells the steps at which the stages of a run end. ends: `growth.at`, one share per stage."""

    ends: tuple[float, ...]
    length: int
    """Steps of the whole run."""

    @property
    def look(self) -> int:
        """Return how many losses are compared."""
        return min(max(round(_SHARE_OF_LOOK * self.length), _SHORTEST_LOOK), LONGEST_LOOK)

    @property
    def trial(self) -> int:
        """Return the steps after which a growth is judged."""
        return max(2 * self.look, round(_SHARE_OF_TRIAL * self.length))

    def due(self, stage: int) -> int:
        """Return the step from which on a stage may end."""
        return max(1, round(self.ends[stage] * self.length))

    def steps(self, first: int = 0) -> list[int]:
        """Return the step at which each stage ends, from stage `first` on: none while the one before is on trial."""
        found: list[int] = []
        for stage in range(first, len(self.ends)):
            found.append(max(self.due(stage), found[-1] + self.trial + 1) if found else self.due(stage))
        return found

    def fits(self, first: int = 0) -> bool:
        """Return whether all stages from `first` on can end, and be judged, before the run does."""
        return all(step + self.trial <= self.length for step in self.steps(first))

    def check(self, first: int = 0) -> None:
        """Refuse a moment that is so late that the growth could not be judged before the end of the run."""
        if self.fits(first):
            return
        step = self.steps(first)[-1]
        given = self.ends[0] if len(self.ends) == 1 else list(self.ends)
        what = (
            f"growth.at = {given}: the model would grow at step {step} of {self.length}, and it takes {self.trial} "
            "steps more to judge that"
        )
        latest = math.floor(100 * (self.length - self.trial) / self.length) / 100
        if latest <= 0:
            raise ConfigError(f"{what}; set growth.layers = 0, or train for more steps")
        if len(self.ends) == 1:
            raise ConfigError(f"{what}; set growth.at = {latest} or less, or growth.layers = 0")
        raise ConfigError(f"{what}; let the stages end earlier, the last one at {latest} or before, or use fewer")


def in_decay(rate: Rates, steps: Iterable[int]) -> Notice | None:
    """Return what is said where the learning rate falls at one of the steps at which the model grows; None where it
    does not, or where the user's own scheduler sets it, which nobody can ask ahead of time."""
    if not isinstance(rate, ScheduledRates) or rate.config.type not in ("wsd", "cosine"):
        return None
    late = next((step for step in steps if rate.at(step) < rate.at(step - 1)), None)
    if late is None:
        return None
    return Notice(
        f"the model grows at step {late}, when the learning rate is down to {rate.at(late) / rate.peak:.0%} of its "
        "peak, and new blocks learn badly while it decays; lower growth.at, or let the decay begin later"
    )
