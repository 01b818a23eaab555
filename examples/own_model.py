"""Any module, any optimizer, any scheduler, any loader: a small network learns to tell two spirals apart.

python examples/own_model.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from foretrain import Config, HybridTrainer, load_weights

EPOCHS = 30


def spirals(count: int, seed: int) -> TensorDataset:
    """Points on two interleaved spirals, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    angle = 1.0 + 8.0 * torch.rand(count, generator=generator)
    turned = angle + label * torch.pi
    points = torch.stack([turned.cos(), turned.sin()], dim=1) * angle.unsqueeze(1) / 9.0
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=generator), label)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def main() -> None:
    torch.manual_seed(1)
    loader = DataLoader(spirals(2000, seed=1), batch_size=100, shuffle=True)
    held_out = DataLoader(spirals(500, seed=2), batch_size=100)
    steps = EPOCHS * len(loader)

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    config = Config(max_steps=steps, device="cpu")
    trainer = HybridTrainer(model, optimizer, nn.CrossEntropyLoss(), config, scheduler=scheduler)

    # Your own loop: one call per step.
    for batch in loader:
        result = trainer.step(batch)
    print(f"after {result.global_step} steps: loss {result.loss:.3f}, learning rate {result.learning_rate:.2g}")

    # Or a whole run with progress, evaluation and checkpoints; it goes on where the loop above stopped.
    with tempfile.TemporaryDirectory() as folder:
        summary = trainer.fit(loader, held_out, metrics={"accuracy": accuracy}, out=f"{folder}/run")
        print(f"held-out loss {summary['final_val_loss']:.4f}, accuracy {summary['metrics']['accuracy']:.1%}")
        trained = load_weights(network(), f"{folder}/run")  # into a fresh network, in another program perhaps
    points, labels = spirals(500, seed=3)[:]
    print(f"accuracy on new points: {accuracy(trained(points), labels):.1%}")


if __name__ == "__main__":
    main()
