from __future__ import annotations

import numpy as np
import pytest

from foretrain.motion.predictors.momentum import MomentumPredictor

from .motions import WINDOW, Run, geometric, noisy


@pytest.mark.parametrize("rate", [-0.7, 0.5, 0.9, 1.0])
def test_the_closed_form(rate: float) -> None:
    """Displacement over n windows = last displacement x rho (1 - rho^n) / (1 - rho)."""
    predictor = MomentumPredictor()
    run = Run(geometric([60], [rate]), 12)
    for situation, told, _ in run:
        predictor.observe(situation, told)
    windows = np.array([1, 2, 3, 8])
    forecast = predictor.forecast(situation, (windows * WINDOW).tolist())
    length = np.sqrt(situation.gram[0, 1, 1])
    along = forecast.coefficients[:, 0] @ situation.gram[0, :, 1] / length**2
    expected = windows if rate == 1 else rate * (1 - rate**windows) / (1 - rate)
    assert along == pytest.approx(expected, rel=0.02)


def test_noise_does_not_shorten_the_persistence() -> None:
    """A steady drift under noise persists, although one window hardly resembles the next."""
    predictor = MomentumPredictor()
    for situation, told, _ in Run(noisy([20000], 0.4), 60, exact=False):
        predictor.observe(situation, told)
    one, eight = predictor.forecast(situation, [WINDOW, 8 * WINDOW]).coefficients[:, 0, 3]
    assert one > 0.2  # of the widest mean, not of the last window
    assert eight > 5 * one


def test_a_wide_mean_is_preferred_in_noise() -> None:
    predictor = MomentumPredictor()
    for situation, told, _ in Run(noisy([500, 300], 0.3), 50, exact=False):
        predictor.observe(situation, told)
    share = np.abs(predictor.forecast(situation, [WINDOW]).coefficients[0]).mean(0)
    assert share[3] > 10 * share[1]
