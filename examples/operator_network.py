"""An operator network (DeepONet) learns to integrate: a function goes in, its integral at 20 places comes out.

python examples/operator_network.py            # with leaps
python examples/operator_network.py --plain    # the same run of Adam without them
"""

import argparse

import torch
from torch import Tensor, nn

from foretrain import Config, HybridTrainer

SENSORS, PLACES = torch.linspace(0, 1, 16), torch.linspace(0, 1, 20)  # where functions and integrals are known


def functions(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Makes functions of three waves each, and their integrals from 0 on."""
    generator, waves = torch.Generator().manual_seed(seed), torch.pi * torch.arange(1, 4).unsqueeze(1)
    sines, cosines = torch.randn(2, count, 3, generator=generator) / torch.arange(1, 4)
    values = sines @ torch.sin(waves * SENSORS) + cosines @ torch.cos(waves * SENSORS)
    return values, sines @ ((1 - torch.cos(waves * PLACES)) / waves) + cosines @ (torch.sin(waves * PLACES) / waves)


class DeepONet(nn.Module):
    """One network sees the function and one the place: their product is the answer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(len(SENSORS), width), nn.Tanh(), nn.Linear(width, width))
        hidden = [nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.trunk = nn.Sequential(*hidden, nn.Linear(width, width))

    def forward(self, values: Tensor) -> Tensor:
        return self.branch(values) @ self.trunk(PLACES.unsqueeze(1)).T


def main(steps: int = 1000, plain: bool = False) -> tuple[DeepONet, float, float]:
    """Returns the network, its loss and its relative error on functions that it never saw."""
    torch.manual_seed(0)
    model = DeepONet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    config = Config(max_steps=steps, device="cpu", hybrid={"mode": "off" if plain else "leap"})
    trainer = HybridTrainer(model, optimizer, nn.MSELoss(), config)  # mean squares are linearised by themselves
    train, (values, wanted) = functions(150, seed=1), functions(1000, seed=3)
    trainer.fit([train], [functions(50, seed=2)], unit="functions")
    loss, error = trainer.evaluate([train]), float((model(values).detach() - wanted).norm() / wanted.norm())
    print(f"loss {loss:.3g}, relative error on new functions {error:.2g}")
    return model, loss, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="Adam alone, without leaps")
    parser.add_argument("--steps", type=int, default=1000)
    main(**vars(parser.parse_args()))
