"""The predictors by name: how each is built from the settings, and what it was measured to be worth.

Their modules are imported when one is built, so that listing them needs no torch. docs/predictors has a page on each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrain.config.schema import PredictorConfig
    from foretrain.motion.predictors.base import Predictor

VERDICTS: dict[str, str] = {
    "momentum": "nearly as good as linear at half the cost; leaps do not pay on language models (0.93x, one run)",
    "linear": "default; best forecasts; leaps pay at small rates on exact losses, not on language models (0.91x)",
    "mlp": "no better than linear, and dearer: does not pay (language models 0.85x, one run)",
    "rssm": "no better than linear, and dearer: does not pay (language models 0.88x, one run)",
}
"""Measured by benchmarks/campaign.py (docs/results.md)."""
NAMES = tuple(VERDICTS)


def build(config: PredictorConfig, seed: int) -> Predictor:
    """The predictor that the settings name; what it draws at random comes from `seed` alone."""
    if config.type == "momentum":
        from foretrain.motion.predictors.momentum import MomentumPredictor

        return MomentumPredictor()
    if config.type == "linear":
        from foretrain.motion.predictors.linear import LinearPredictor

        return LinearPredictor(config.l2, config.forgetting)
    from foretrain.motion.predictors.learned import MlpPredictor, RssmPredictor

    ensemble = (config.ensemble_size, config.learning_rate, seed)
    if config.type == "mlp":
        return MlpPredictor(config.l2, config.forgetting, config.hidden_dims, *ensemble)
    if config.type != "rssm":
        raise ValueError(f"there is no predictor {config.type!r}; there are {', '.join(NAMES)}")
    sizes = (config.deterministic_dim, config.stochastic_dim, config.num_categoricals, config.bptt_steps)
    return RssmPredictor(config.l2, config.forgetting, *sizes, *ensemble)
