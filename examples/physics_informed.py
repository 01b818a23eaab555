"""A physics-informed network solves the nonlinear equation u'' - u^3 = f on [-1, 1], u(-1) = u(1) = 0.

Every step sees the same points, so the loss is exact: here foretrain's quasi-Newton leaps pay.

python examples/physics_informed.py            # with leaps
python examples/physics_informed.py --plain    # the same run of Adam without them
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from foretrain import Config, HybridTrainer


def solution(x: Tensor) -> Tensor:
    """What the network should find; f is made from it."""
    return torch.sin(torch.pi * x) + 0.3 * torch.sin(3 * torch.pi * x)


def right_side(x: Tensor) -> Tensor:
    curvature = -(torch.pi**2) * (torch.sin(torch.pi * x) + 2.7 * torch.sin(3 * torch.pi * x))
    return curvature - solution(x) ** 3


def loss_fn(model: nn.Module, points: Tensor) -> Tensor:
    """Mean square of what the equation leaves over inside, and of the values at both ends."""
    x = points.detach().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    equation = (curvature - u**3 - right_side(x)).square().mean()
    ends = model(torch.tensor([[-1.0], [1.0]], device=points.device)).square().mean()
    return equation + 100.0 * ends


def main(steps: int = 1000, plain: bool = False, out: str | None = None) -> tuple[float, float]:
    """Returns the last loss and the largest error of the solution."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # no weight decay: it would switch the leaps off
    config = Config(max_steps=steps, device="cpu", hybrid={"mode": "off" if plain else "leap"})
    points = torch.linspace(-1.0, 1.0, 128).unsqueeze(1)

    trainer = HybridTrainer(model, optimizer, loss_fn, config)
    summary = trainer.fit([points], out=out)

    x = torch.linspace(-1.0, 1.0, 1001).unsqueeze(1)
    with torch.no_grad():
        error = (model(x) - solution(x)).abs().max().item()
    loss = float(summary["final_train_loss"])
    print(f"loss {loss:.3g}, largest error of the solution {error:.2g}")
    return loss, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="Adam alone, without leaps")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", help="run folder, with a page to look at")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.plain, arguments.out)
