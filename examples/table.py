"""A network learns a table of 600 rows, five inputs and one output (Friedman's), with 200 rows held out.

python examples/table.py                # with leaps
python examples/table.py --noise 0.5    # noise can be learned by heart: watch held-out rows end the leaps
python examples/table.py --plain        # the same run of Adam without leaps
"""

import argparse

import torch
from torch import Tensor, nn

from foretrain import Config, HybridTrainer


def table(rows: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Makes inputs from 0 to 1 and outputs of mean 0 and spread 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 5, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + noise * torch.randn(rows, generator=generator)
    return x, ((y - 14.4) / 4.9).unsqueeze(1)


def explained(output: Tensor, target: Tensor) -> Tensor:
    """Returns the share of the outputs' variance that is explained."""
    return 1 - (output - target).square().mean() / target.var()


def main(steps: int = 1000, plain: bool = False, noise: float = 0.0) -> tuple[nn.Module, float, float]:
    """Returns the network, its loss and its relative error on new rows without noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    config = Config(max_steps=steps, device="cpu", hybrid={"mode": "off" if plain else "leap"})
    trainer = HybridTrainer(model, optimizer, nn.MSELoss(), config)  # mean squares are linearised by themselves
    train, held_out = table(600, noise, seed=1), table(200, noise, seed=2)
    trainer.fit([train], [held_out], metrics={"explained": explained}, unit="rows")

    loss, (x, y) = trainer.evaluate([train]), table(5000, 0.0, seed=3)
    error = float((model(x).detach() - y).norm() / y.norm())
    print(f"loss {loss:.3g}, held out {trainer.evaluate([held_out]):.3g}, relative error on new rows {error:.2g}")
    return model, loss, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="Adam alone, without leaps")
    parser.add_argument("--noise", type=float, default=0.0, help="spread of what is added to outputs (their own: 4.9)")
    parser.add_argument("--steps", type=int, default=1000)
    main(**vars(parser.parse_args()))
