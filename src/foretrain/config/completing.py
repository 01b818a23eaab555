"""Settings that follow from what is trained, once that is known."""

from __future__ import annotations

from foretrain.config.schema import Config

HALF_LIFE = 2e6
"""Tokens after which a squared gradient counts half, with `optimizer.beta2 = "auto"`."""
LOWEST, HIGHEST = 0.9, 0.999
_ADAM = ("adamw", "adam")
LONG_WARMUP = 0.1
"""Share of a run in which the rate of AdamW rises while a language model begins with random weights, with
`schedule.warmup_share = "auto"`. Chosen: docs/results.md#how-long-the-warm-up-should-be."""


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


def with_warmup(config: Config) -> Config:
    """Return the configuration of a language model, with a number in place of `schedule.warmup_share = "auto"` where it
    begins with random weights and its optimizer wants a longer warm-up then."""
    schedule = config.schedule
    if schedule.warmup_share != "auto" or schedule.warmup_steps is not None:
        return config
    if config.model.weights or config.optimizer.type not in _ADAM:
        return config
    return config.model_copy(update={"schedule": schedule.model_copy(update={"warmup_share": LONG_WARMUP})})
