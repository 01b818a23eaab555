"""What each predictor was measured to be worth; docs/predictors has a page on each."""

from __future__ import annotations

VERDICTS: dict[str, str] = {
    "linear": "default; best forecasts; leaps pay at small rates on exact losses, not on language models (0.91x)",
    "momentum": "nearly as good as linear at half the cost; leaps do not pay on language models (0.93x, one run)",
    "mlp": "no better than linear, and dearer: does not pay (language models 0.85x, one run)",
    "rssm": "no better than linear, and dearer: does not pay (language models 0.88x, one run)",
}
