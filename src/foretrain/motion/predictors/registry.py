"""From settings to a predictor."""

from __future__ import annotations

from collections.abc import Callable

from foretrain.config.schema import PredictorConfig
from foretrain.motion.predictors.base import Predictor
from foretrain.motion.predictors.learned import MlpPredictor, RssmPredictor
from foretrain.motion.predictors.linear import LinearPredictor
from foretrain.motion.predictors.momentum import MomentumPredictor

_BUILDERS: dict[str, Callable[[PredictorConfig, int], Predictor]] = {
    "momentum": lambda config, seed: MomentumPredictor(),
    "linear": lambda config, seed: LinearPredictor(config.l2, config.forgetting),
    "mlp": lambda config, seed: MlpPredictor(
        l2=config.l2,
        forgetting=config.forgetting,
        hidden_dims=config.hidden_dims,
        ensemble_size=config.ensemble_size,
        learning_rate=config.learning_rate,
        seed=seed,
    ),
    "rssm": lambda config, seed: RssmPredictor(
        l2=config.l2,
        forgetting=config.forgetting,
        deterministic_dim=config.deterministic_dim,
        stochastic_dim=config.stochastic_dim,
        num_categoricals=config.num_categoricals,
        ensemble_size=config.ensemble_size,
        bptt_steps=config.bptt_steps,
        learning_rate=config.learning_rate,
        seed=seed,
    ),
}
NAMES = tuple(_BUILDERS)


def build(config: PredictorConfig, seed: int) -> Predictor:
    """The predictor that the settings name; what it draws at random comes from `seed` alone."""
    return _BUILDERS[config.type](config, seed)
