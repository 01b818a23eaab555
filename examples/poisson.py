"""A physics-informed network solves Poisson's equation u_xx + u_yy = f on a square, with u = 0 on its edge.

python examples/poisson.py            # with leaps
python examples/poisson.py --plain    # the same run of Adam without them
"""

import argparse

import torch
from torch import Tensor, nn

from foretrain import Config, HybridTrainer

SIDE = torch.linspace(0.0, 1.0, 25)
EDGE = torch.cat([torch.cartesian_prod(SIDE, SIDE[[0, -1]]), torch.cartesian_prod(SIDE[[0, -1]], SIDE)])
POINTS = torch.cartesian_prod(SIDE[1:-1], SIDE[1:-1])


def solution(points: Tensor) -> Tensor:
    """Gives what the network should find; f is made from it."""
    return (torch.sin(torch.pi * points[:, 0]) * torch.sin(2 * torch.pi * points[:, 1])).unsqueeze(1)


def residuals(model: nn.Module, points: Tensor) -> dict[str, Tensor]:
    """Gives what the equation leaves over inside, and the values on the edge: all of them should be 0."""
    points = points.detach().requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (of_x,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
    (of_y,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=True)
    right_side = -5 * torch.pi**2 * solution(points)
    return {"equation": of_x[:, :1] + of_y[:, 1:] - right_side, "edge": model(EDGE)}


def main(steps: int = 1000, plain: bool = False, out: str | None = None) -> tuple[nn.Module, float, float]:
    """Returns the network, its loss and the relative error of its solution."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # no weight decay: it would switch the leaps off
    config = Config(max_steps=steps, device="cpu", hybrid={"mode": "off" if plain else "leap"})
    trainer = HybridTrainer(model, optimizer, config=config, residuals=residuals, weights={"equation": 0.01})
    trainer.fit([POINTS], out=out, unit="points")

    fine = torch.cartesian_prod(torch.linspace(0.0, 1.0, 101), torch.linspace(0.0, 1.0, 101))
    loss, wanted = trainer.evaluate([POINTS]), solution(fine)
    error = float((model(fine).detach() - wanted).norm() / wanted.norm())
    print(f"loss {loss:.3g}, relative error of the solution {error:.2g}")
    return model, loss, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="Adam alone, without leaps")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", help="run folder, with a page to look at")
    main(**vars(parser.parse_args()))
