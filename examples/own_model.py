"""Any module, any optimizer, any loss function: a small network learns to tell two spirals apart.

python examples/own_model.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.utils.data import TensorDataset

from foretrain import Config, HybridTrainer, Loader, MappedSamples, supervised


def spirals(count: int, seed: int) -> TensorDataset:
    """Points on two interleaved spirals, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    angle = 1.0 + 8.0 * torch.rand(count, generator=generator)
    turned = angle + label * torch.pi
    points = torch.stack([turned.cos(), turned.sin()], dim=1) * angle.unsqueeze(1) / 9.0
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=generator), label)


def main() -> None:
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    loss_fn = supervised(nn.functional.cross_entropy)
    train, held_out = spirals(2000, seed=1), spirals(500, seed=2)
    loader = Loader(MappedSamples(train), batch_size=100, seed=1)

    # Your own loop: one call per step.
    trainer = HybridTrainer(model, optimizer, loss_fn, Config(max_steps=1000, device="cpu"))
    batches = iter(loader)
    for _ in range(100):
        result = trainer.step(next(batches))
    print(f"after {result.global_step} steps: loss {result.loss:.3f}")

    # Or a whole run with progress, evaluation and checkpoints; it goes on where the loop above stopped.
    trainer.position = trainer.global_step
    with tempfile.TemporaryDirectory() as folder:
        summary = trainer.fit(loader, [held_out[:]], out=f"{folder}/run")
    points, label = held_out[:]
    accuracy = (model(points).argmax(1) == label).float().mean()
    print(f"held-out loss {summary['final_val_loss']:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
