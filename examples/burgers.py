"""Burgers' equation: a wave becomes a steep front. python examples/burgers.py [--adaptive] [--plain] [--steps N]"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from foretrain import Config, HybridTrainer

POOL = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(4800) * torch.tensor([1, 2]) - torch.tensor([0, 1])
EDGE = torch.cat([POOL[:256] * torch.tensor([0, 1]), torch.stack([POOL[:256, 0], POOL[:256, 1].sign()], 1)])  # (t, x)


def solution(points: Tensor) -> Tensor:
    t, x = points.double().unsqueeze(2).unbind(1)
    nodes = torch.linspace(-12, 12, 241).double()
    y = torch.pi * (x - 0.2 * t.sqrt() * nodes)
    shares = torch.exp(-(nodes**2) - torch.cos(y) / (0.02 * torch.pi))  # Cole and Hopf's integral
    return -(shares * torch.sin(y)).sum(1, keepdim=True) / shares.sum(1, keepdim=True)


def residuals(model: nn.Module, points: Tensor) -> dict[str, Tensor]:
    points = points.detach().requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=True)
    equation = slope[:, :1] + u * slope[:, 1:] - 0.01 * bend[:, 1:]  # u_t + u u_x - 0.01 u_xx
    return {"equation": equation, "edge": model(EDGE) + torch.sin(torch.pi * EDGE[:, 1:])}  # u = -sin(pi x) on it


def batches(model: nn.Module, adaptive: bool) -> Iterator[Tensor]:
    points = POOL[:600]
    while True:
        yield from [points] * 20
        if adaptive:  # other points now, more of them where residuals are large
            left = residuals(model, POOL)["equation"].detach().abs().squeeze(1)
            points = POOL[torch.multinomial(left / left.mean() + 1, 600)]


def main(steps: int = 2000, plain: bool = False, adaptive: bool = False) -> tuple[nn.Module, float, float]:
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), *hidden, nn.Linear(16, 1))
    config = Config(max_steps=steps, device="cpu", hybrid={"mode": "off" if plain else "leap"})
    trainer = HybridTrainer(model, torch.optim.Adam(model.parameters(), lr=3e-3), config=config, residuals=residuals)
    trainer.fit(batches(model, adaptive), unit="points")
    loss, wanted = trainer.evaluate([POOL]), solution(POOL)
    error = float((model(POOL).detach() - wanted).norm() / wanted.norm())
    print(f"loss {loss:.3g} at all points, relative error of the solution {error:.2g}")
    return model, loss, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for switch in ("--plain", "--adaptive"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--steps", type=int, default=2000)
    main(**vars(parser.parse_args()))
