"""Draw what was tried for a learning rate that is `auto`: a point per rate, and the rate that the run goes on with."""

from __future__ import annotations

from typing import Any

from foretrain.config.units import loss_text, rate_text
from foretrain.show.numbers import finite, mapping
from foretrain.show.pages.charts import points
from foretrain.show.record import RunRecord


def rate_curves(record: RunRecord, limit: int) -> list[dict[str, Any]]:
    """Draw the held-out loss of each trial by its rate, and the range of rates that should be about as good as the
    one that was chosen, at the height of the best trial."""
    tried: dict[float, float | None] = {}
    for entry in record.decisions:
        if entry.kind == "RateTried" and (rate := finite(entry.fields.get("learning_rate"))):
            tried[rate] = finite(entry.fields.get("loss"))
    losses = [loss for loss in tried.values() if loss is not None]
    if not losses:
        return []
    tips = [
        f"{rate_text(rate)}: {'failed' if loss is None else loss_text(loss)}" for rate, loss in sorted(tried.items())
    ]
    drawn = [points("tried", "plain", tried.items(), tips=tips)]
    found = mapping(record.summary.get("learning_rate"))
    chosen, low, high = (finite(found.get(name)) for name in ("chosen", "low", "high"))
    if chosen is not None:
        ends = [rate for rate in (low, chosen, high) if rate is not None]
        words = [f"{rate_text(rate)}{', chosen' if rate == chosen else ', about as good'}" for rate in ends]
        drawn.append(points("the run goes on with", "dots", [(rate, min(losses)) for rate in ends], tips=words))
    return drawn
