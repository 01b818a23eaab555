"""Checks of gpu_checks.py about Muon: its kernels do what its torch path does, eager and recorded, without waiting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from foretrain.engine.optim import muon_kernels
from foretrain.engine.optim.muon import Muon, step_ratio

SHAPES = {(768, 768): 1, (2304, 768): 3, (3072, 768): 1, (768, 3072): 1, (100, 37): 1, (37, 100): 1, (1, 64): 1}
"""And of how many parts a matrix of each shape is made."""
MOVE_TOLERANCE = 2e-2
"""Of a move, by its norm. Both paths round to bf16 before the iteration, which sees another last bit now and then."""
SCALE = 1024.0


class Arm:
    """Two matrices of every shape, and Muon for them."""

    def __init__(self, kernels: bool, device: str = "cuda", **settings: Any) -> None:
        generator = torch.Generator(device).manual_seed(1)
        self.params = [
            nn.Parameter(0.05 * torch.randn(shape, device=device, generator=generator))
            for shape in SHAPES
            for _ in range(2)
        ]
        parts = {p: SHAPES[p.shape[0], p.shape[1]] for p in self.params}
        self.muon = Muon([{"params": self.params}], parts=parts, **settings)
        self.muon._kernels_allowed = kernels
        for p in self.params:
            p.grad = torch.zeros_like(p)

    def set_gradients(self, step: int, factor: float = 1.0) -> None:
        """In place, as a recorded step needs it."""
        generator = torch.Generator(self.params[0].device).manual_seed(1000 + step)
        for p in self.params:
            assert p.grad is not None
            p.grad.normal_(generator=generator).mul_(factor)

    def states(self) -> list[torch.Tensor]:
        """Momenta, and mean squares of rows where there are any."""
        return [value for p in self.params for _, value in sorted(self.muon.state[p].items())]

    def values(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in (*self.params, *self.states())]

    @torch.no_grad()
    def take(self, other: Arm) -> None:
        """The next step is compared on its own."""
        mine, theirs = (*self.params, *self.states()), (*other.params, *other.states())
        for one, two in zip(mine, theirs, strict=True):
            one.copy_(two)


def largest_difference(one: Arm, other: Arm, before: list[torch.Tensor]) -> float:
    """Of what the two moved the weights by, as a share of it; asserted for each matrix, as well as equal states."""
    worst = 0.0
    group = other.muon.param_groups[0]
    for mine, theirs in zip(one.states(), other.states(), strict=True):
        rows = mine.shape[1] == 1 and one.muon.row_beta2  # of updates that are rounded to bf16 before the iteration
        torch.testing.assert_close(mine, theirs, rtol=MOVE_TOLERANCE if rows else 1e-5, atol=1e-6)
    for index, (p, q) in enumerate(zip(one.params, other.params, strict=True)):
        moved = float((q.detach() - before[index]).norm())
        difference = float((p.detach() - q.detach()).norm()) / moved
        assert difference < MOVE_TOLERANCE, (tuple(p.shape), difference)
        rows, columns = q.shape[0] // SHAPES[q.shape[0], q.shape[1]], q.shape[1]
        limit = MOVE_TOLERANCE * float(group["lr"]) * step_ratio(group["scale"], rows, columns)
        limit *= 4.0 if other.muon.row_beta2 else 1.0  # a row that is short is made longer
        assert float((p.detach() - q.detach()).abs().max()) <= limit, (tuple(p.shape), limit)
        worst = max(worst, difference)
    return worst


def assert_unchanged(before: list[torch.Tensor], arm: Arm) -> None:
    assert all(torch.equal(a, b) for a, b in zip(before, arm.values(), strict=True))


def compare_steps(device: str, steps: int, checked: bool, **settings: Any) -> float:
    """Step by step. checked: gradients are scaled, and the third step and the last are bad."""
    kernels, plain = Arm(True, device, **settings), Arm(False, device, **settings)
    worst = 0.0
    for step in range(steps):
        bad = checked and step in (2, steps - 1)
        if step:
            kernels.take(plain)
            before, had = plain.values(), kernels.values()
        else:
            before = [p.detach().clone() for p in plain.params]
        for arm in (kernels, plain):
            arm.set_gradients(step, SCALE if checked else 1.0)
            if checked:
                arm.muon.grad_scale = torch.tensor(SCALE, device=device)
                arm.muon.found_inf = torch.tensor(float(bad), device=device)
            if bad:
                for p in arm.params:
                    p.grad.view(-1)[0] = math.nan if step == 2 else math.inf  # type: ignore[union-attr]
            with _no_waiting(device):
                arm.muon.step()
        if bad:
            assert_unchanged(had, kernels)
            assert_unchanged(before, plain)
        else:
            worst = max(worst, largest_difference(kernels, plain, before))
    return worst


@contextmanager
def _no_waiting(device: str) -> Iterator[None]:
    """A step that waits for the device raises."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def muon_kernels_equal_torch() -> str:
    """Weights and momenta, with both kinds of momentum, scale and rate, with and without scaled gradients."""
    probe = Arm(True)
    assert all(muon_kernels.fit(p, torch.zeros_like(p)) for p in probe.params), "the kernels are not used"
    worst, ways = 0.0, 0
    for nesterov, scale, checked, as_tensor, row_beta2 in itertools.product(
        (True, False), ("original", "match_rms_adamw"), (False, True), (False, True), (0.0, 0.95)
    ):
        settings: dict[str, Any] = {"nesterov": nesterov, "scale": scale, "momentum": 0.9, "weight_decay": 0.1}
        settings["row_beta2"] = row_beta2
        settings["lr"] = torch.tensor(0.02, device="cuda") if as_tensor else 0.02
        worst = max(worst, compare_steps("cuda", 5, checked, **settings))
        ways += 1
    return f"{ways} ways, 5 steps each: moves differ by {worst:.1e} at the most"


def muon_kernels_are_recorded() -> str:
    """A graph of the kernels follows gradients, rate and bad steps that change between replays."""
    rate = torch.tensor(0.02, device="cuda")
    found_inf, scale = torch.zeros((), device="cuda"), torch.tensor(SCALE, device="cuda")
    kernels, plain = Arm(True, lr=rate, row_beta2=0.95), Arm(False, lr=rate, row_beta2=0.95)
    for arm in (kernels, plain):
        arm.muon.found_inf, arm.muon.grad_scale = found_inf, scale
        arm.set_gradients(0, SCALE)
        arm.muon.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.muon.step()
    worst = 0.0
    for step in range(1, 7):
        kernels.take(plain)
        before = plain.values()
        rate.fill_(0.02 / step)
        found_inf.fill_(float(step == 4))
        for arm in (kernels, plain):
            arm.set_gradients(step, SCALE if step != 4 else math.inf)
        graph.replay()
        plain.muon.step()
        if step == 4:
            assert_unchanged(before, kernels)
            assert_unchanged(before, plain)
        else:
            worst = max(worst, largest_difference(kernels, plain, before))
    return f"6 replays: moves differ by {worst:.1e} at the most"


MUON_CHECKS = (muon_kernels_equal_torch, muon_kernels_are_recorded)
