"""What follows where own code failed that prediction needs: the predictor starts anew, then prediction is off."""

from __future__ import annotations

from collections.abc import Callable

from foretrain.engine.fence import Failure
from foretrain.events import Event, OwnCodeFailed, Recovered
from foretrain.health.act import Kind
from foretrain.hybrid.ledger import Counts
from foretrain.motion.predictors.guarded import GuardedPredictor


def heed(guarded: GuardedPredictor, counts: Counts, step: int, emit: Callable[[Event], None]) -> None:
    """Tell of all failures since the last call. With the second one nothing is predicted any more."""
    failures, guarded.untold = guarded.untold, []
    for failure, off in failures:
        kind = Kind.PREDICTION_OFF if off else Kind.RESET_PREDICTOR
        counts.recovered(kind)
        what = f"{failure.where} failed ({failure.error})"
        text = f"the predictor starts anew: {what}"
        if off:
            text = f"nothing is predicted any more in this run, full steps go on: {what}"
        tell(failure, step, emit)
        emit(Recovered(step, kind.value, text))


def tell(failure: Failure, step: int, emit: Callable[[Event], None]) -> None:
    """The traceback is for the log."""
    emit(OwnCodeFailed(step, failure.where, failure.error, failure.traceback))
