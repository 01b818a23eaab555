"""An inverse problem: how fast a substance spreads and decays, u_t = D u_xx - k u, is found from 100 measurements.

python examples/inverse.py    # --plain: the same run of Adam without leaps
"""

import argparse

import torch
from torch import Tensor, nn

from foretrain import Config, HybridTrainer

TRUE = torch.tensor([0.1, 0.5])  # D and k


def solution(points: Tensor) -> Tensor:
    """Gives the sum of two waves that fade; columns of the points are t and x."""
    t, x = points[:, :1], points[:, 1:]
    waves = [torch.sin(k * torch.pi * x) * torch.exp(-((k * torch.pi) ** 2) * TRUE[0] * t) for k in (1, 2)]
    return (waves[0] + waves[1]) * torch.exp(-TRUE[1] * t)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        self.coefficients = nn.Parameter(torch.tensor([1.0, 0.0]))  # trained like any weight


def residuals(model: Unknown, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    points, places, measured = batch
    points = points.detach().requires_grad_()
    u = model.u(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=True)
    equation = slope[:, :1] - model.coefficients[0] * bend[:, 1:] + model.coefficients[1] * u
    return {"equation": equation, "measured": model.u(places) - measured}


def main(steps: int = 1000, plain: bool = False) -> tuple[Unknown, float, float]:
    torch.manual_seed(0)
    model, points, places = Unknown(), torch.rand(500, 2), torch.rand(100, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    config = Config(max_steps=steps, device="cpu", hybrid={"mode": "off" if plain else "leap"})
    trainer = HybridTrainer(model, optimizer, config=config, residuals=residuals, weights={"equation": 0.1})
    batch = (points, places, solution(places))
    trainer.fit([batch], unit="points")
    loss, found = trainer.evaluate([batch]), model.coefficients.detach()
    error = float((found / TRUE - 1).abs().max())
    print(f"loss {loss:.3g}, D {found[0]:.4f} (true: 0.1), k {found[1]:.4f} (true: 0.5), largest error {error:.2%}")
    return model, loss, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="Adam alone, without leaps")
    parser.add_argument("--steps", type=int, default=1000)
    main(**vars(parser.parse_args()))
