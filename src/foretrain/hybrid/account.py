"""The account of prediction in the summary of a run: what it did, and what that was worth."""

from __future__ import annotations

import math
from typing import Any

from foretrain.events import Phase
from foretrain.hybrid.deliberation import Deliberation

_OFF = "own code that it needs failed twice (see OwnCodeFailed in metrics.jsonl)"


def account_of(policy: Deliberation, backward_passes: int) -> dict[str, Any]:
    """The parts of the summary that are about prediction. backward_passes: of the whole run."""
    score, confidence = policy.score, policy.confidence
    counts, ledger = score.counts, score.ledger
    others = max(0.0, backward_passes - ledger.cost)
    quality, error = policy.observer.quality, confidence.calibration_error
    return {
        "steps": dict(counts.steps),
        "moves": dict(counts.moves),
        "predicted_steps": counts.predicted_steps,
        "corrections": {"applied": counts.corrections, "error_ratio": policy.correction.error_ratio},
        "recoveries": {kind: count for kind, count in counts.recoveries.items() if count},
        "rollbacks": {"times": counts.rollbacks, "undone_steps": counts.undone_steps},
        "forecast": quality.summary(),
        "confidence": {
            "last": round(policy.appraiser.current_confidence, 4),
            "calibration_error": None if math.isnan(error) else round(error, 4),
            "outcomes": confidence.outcomes,
            "reliability": confidence.reliability(),
        },
        "predictability": policy.predictability.summary(quality, policy.appraiser.judged_on_probes),
        "exact": score.exact.summary(),
        "audit": ledger.gain(others) | {"sentence": _sentence(policy, others)},
    }


def _sentence(policy: Deliberation, others: float) -> str:
    """What prediction was worth, or why nobody knows. others: full steps that the run did besides."""
    score, appraiser = policy.score, policy.appraiser
    if policy.off and not score.counts.tried:
        return _unmeasured(policy)
    if appraiser.too_dear(score.counts.tried):
        return f"prediction was {policy.gate.too_dear(appraiser.audit_cost)}"
    if score.exact.leaps and not score.ledger.audits:  # leaps take a gradient each, so their cost says nothing
        return f"{score.ledger.in_words()}; the time that this saved is not measured"
    return score.ledger.sentence(others, _unmeasured(policy))


def _unmeasured(policy: Deliberation) -> str:
    """Why no audit says what prediction was worth."""
    tried, moves = policy.score.counts.tried, policy.score.counts.moves
    if not tried:
        return f"prediction was not tried: {_why_not(policy)}"
    if moves["kept"] + moves["shrunk"]:
        return "no move was audited"
    return "the one move that was tried was not kept" if tried == 1 else f"none of {tried} moves tried was kept"


def _why_not(policy: Deliberation) -> str:
    """Why nothing was tried so far, in plain words: the last of several reasons, which weighs most."""
    if policy.off:
        return _OFF
    if policy.cycle.phase is Phase.WARMUP:
        return "the run was over before there was enough to forecast from"
    reason = policy.last_reason.rpartition("; ")[2].removeprefix("the gate is shut: ")
    return "no forecast was likely enough to help" if reason.startswith("confidence ") else reason
