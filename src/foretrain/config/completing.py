"""Settings that follow from what is trained, once that is known."""

from __future__ import annotations

from foretrain.config.schema import Config

HALF_LIFE = 2e6
"""Tokens after which a squared gradient counts half, with `optimizer.beta2 = "auto"`."""
LOWEST, HIGHEST = 0.9, 0.999


def with_beta2(config: Config, length: int | None = None) -> Config:
    """Return the configuration with a number in place of `optimizer.beta2 = "auto"`.

    length: tokens in each sequence of a batch. Where nobody knows them, it is the number that stands for "auto" then.
    """
    optimizer = config.optimizer
    if optimizer.beta2 != "auto":
        return config
    beta2 = optimizer.second_beta
    if length is not None:
        beta2 = min(max(0.5 ** (config.batch_size * length / HALF_LIFE), LOWEST), HIGHEST)
    return config.model_copy(update={"optimizer": optimizer.model_copy(update={"beta2": beta2})})
