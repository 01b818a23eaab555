"""Chains of linearised leaps, also where a search for a better point is in vain."""

from __future__ import annotations

import torch
from tests.hybrid.linearised.problems import POINTS, Inverse, inverse

from foretrain import Config
from foretrain.trainer import HybridTrainer


def test_after_leaps_in_vain_a_run_with_an_unknown_coefficient_goes_on() -> None:
    """The graph of outputs holds the coefficient, and trials change it in place."""
    model = Inverse()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = HybridTrainer(model, adam, residuals=inverse, config=Config(max_steps=3000))
    while trainer.global_step < 3000:
        trainer.step(POINTS)
    assert trainer.backward_passes < 2000  # steps that passed without a try take none
    assert abs(float(model.coefficient.detach()) - 2) < 1e-3
