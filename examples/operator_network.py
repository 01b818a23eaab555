"""An operator network (DeepONet) learns to integrate: a function and a place go in, the integral comes out.

python examples/operator_network.py            # with leaps
python examples/operator_network.py --plain    # the same run of Adam without them
"""

import argparse

import torch
from torch import Tensor, nn

from foretrain import Config, HybridTrainer

SENSORS = torch.linspace(0, 1, 16)  # where functions are measured
WAVES = torch.pi * torch.arange(1, 4)


def functions(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Gives rows of a function at the sensors and a place y, and the integral of each from 0 to its y."""
    generator = torch.Generator().manual_seed(seed)
    sines, cosines = torch.randn(2, count, 3, generator=generator) / torch.arange(1, 4)
    values = sines @ torch.sin(WAVES.outer(SENSORS)) + cosines @ torch.cos(WAVES.outer(SENSORS))
    place = torch.rand(count, 1, generator=generator)
    integral = sines * (1 - torch.cos(WAVES * place)) / WAVES + cosines * torch.sin(WAVES * place) / WAVES
    return torch.cat([values, place], 1), integral.sum(1, keepdim=True)


class DeepONet(nn.Module):
    """One network sees the function, one the place; their product is the answer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(len(SENSORS), width), nn.Tanh(), nn.Linear(width, width))
        hidden = [nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.trunk = nn.Sequential(*hidden, nn.Linear(width, width))

    def forward(self, rows: Tensor) -> Tensor:
        return (self.branch(rows[:, :-1]) * self.trunk(rows[:, -1:])).sum(1, keepdim=True)


def main(steps: int = 1000, plain: bool = False) -> tuple[DeepONet, float, float]:
    torch.manual_seed(0)
    model = DeepONet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    config = Config(max_steps=steps, device="cpu", hybrid={"mode": "off" if plain else "leap"})
    trainer = HybridTrainer(model, optimizer, nn.MSELoss(), config)  # mean squares are linearised by themselves
    trainer.fit([functions(1000, seed=1)], [functions(500, seed=2)])
    loss, (rows, wanted) = trainer.evaluate([functions(1000, seed=1)]), functions(5000, seed=3)
    error = float((model(rows).detach() - wanted).norm() / wanted.norm())
    print(f"loss {loss:.3g}, relative error on new functions {error:.2g}")
    return model, loss, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="Adam alone, without leaps")
    parser.add_argument("--steps", type=int, default=1000)
    main(**vars(parser.parse_args()))
