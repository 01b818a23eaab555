"""In a real hybrid run of 1,000 steps no feature of the training state stands still."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foretrain.config import from_mapping
from foretrain.motion.features import FEATURES
from foretrain.motion.state import StateEncoder
from foretrain.trainer import HybridTrainer


def test_no_feature_is_constant_over_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[np.ndarray] = []
    encode = StateEncoder.encode

    def recorded(self: StateEncoder, *records: object) -> np.ndarray:
        states.append(encode(self, *records))
        return states[-1]

    monkeypatch.setattr(StateEncoder, "encode", recorded)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2000, 20, generator=generator) * torch.logspace(-1.5, 0, 20)
    targets = inputs @ (3 * torch.randn(20, 1, generator=generator)) + 0.3 * torch.randn(2000, 1, generator=generator)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
    settings = {"optimizer.type": "adamw", "optimizer.learning_rate": 5e-4, "audit.time_budget": 0.2}
    config = from_mapping({"max_steps": 1000, "device": "cpu", **settings})
    trainer = HybridTrainer(model, None, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), config)
    while trainer.global_step < 1000 or trainer.judging:
        rows = torch.randint(0, 2000, (32,), generator=generator)
        trainer.step((inputs[rows], targets[rows]))
    assert trainer.policy is not None
    assert trainer.policy.score.counts.tried
    values = np.stack(states)
    assert [feature.name for feature in FEATURES if values[:, feature.index].std() == 0] == []
