"""Muon's update on a GPU: by kernels, in torch, and AdamW's fused one beside them. Called by muon_cost.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from foretrain import environment
from foretrain.engine.optim import muon_kernels
from foretrain.engine.optim.muon import Muon

SHAPES = {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072)}
"""Of one layer of GPT-2 with 124M parameters; queries, keys and values are three parts."""
LAYERS = 12
RATE = 2e-3


def matrices(device: str, layers: int) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator(device).manual_seed(1)
    made = []
    for name, shape in [pair for _ in range(layers) for pair in SHAPES.items()]:
        p = nn.Parameter(0.02 * torch.randn(shape, device=device, generator=generator))
        p.grad = 1e-3 * torch.randn(shape, device=device, generator=generator)
        made.append((name, p))
    return made


def optimizers(device: str = "cuda", layers: int = LAYERS) -> dict[str, Optimizer]:
    """Each with weights, gradients and a state of its own."""
    made: dict[str, Optimizer] = {}
    for name in ("muon, kernels", "muon, torch", "adamw, fused"):
        named = matrices(device, layers)
        params, rate = [p for _, p in named], torch.tensor(RATE, device=device)
        if name.startswith("adamw"):
            made[name] = AdamW(params, lr=rate, weight_decay=0.1, fused=True, capturable=True)
            continue
        parts = {p: 3 for kind, p in named if kind == "qkv"}
        muon = Muon([{"params": params}], lr=rate, momentum=0.9, scale="match_rms_adamw", parts=parts)
        muon._kernels_allowed = name == "muon, kernels"
        muon.found_inf = torch.zeros((), device=device)  # as in training: every step is checked
        made[name] = muon
    return made


def recorded(optimizer: Optimizer) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def milliseconds(step: Callable[[], Any], steps: int) -> float:
    """Of one step, by the clock of the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / steps


def room(optimizer: Optimizer) -> float:
    """What a step needs for a while, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def measure(steps: int, rounds: int) -> dict[str, Any]:
    """Every arm in turn, eager and as a graph."""
    arms = optimizers()
    kernels = muon_kernels._available(torch.device("cuda"))
    assert kernels, "without Triton there are no kernels to be timed"
    for optimizer in arms.values():
        for _ in range(3):
            optimizer.step()
    rooms = {name: round(room(optimizer), 1) for name, optimizer in arms.items()}
    ways: dict[str, dict[str, Callable[[], Any]]] = {
        "eager": {name: optimizer.step for name, optimizer in arms.items()},
        "graph": {name: recorded(optimizer) for name, optimizer in arms.items()},
    }
    taken: dict[str, dict[str, list[float]]] = {way: {name: [] for name in arms} for way in ways}
    for turn in range(rounds + 1):
        for way, by_name in ways.items():
            for name, step in by_name.items():
                value = milliseconds(step, steps)
                if turn:  # the first is for warming up
                    taken[way][name].append(round(value, 4))
    medians = {
        way: {name: round(statistics.median(values), 4) for name, values in by_name.items()}
        for way, by_name in taken.items()
    }
    weights = sum(p.numel() for group in arms["muon, kernels"].param_groups for p in group["params"])
    return {
        "environment": environment.describe("cuda"),
        "weights": weights,
        "update_ms": medians,
        "room_mb": rooms,
        "updates_ms": taken,
    }


def tell(result: dict[str, Any]) -> None:
    print(f"one update of {result['weights'] / 1e6:.0f}M weights in matrices, milliseconds of the device:")
    print(f"  {'':<14} {'eager':>8} {'graph':>8} {'to AdamW':>9} {'MB for a while':>15}")
    graphs = result["update_ms"]["graph"]
    for name, graph in graphs.items():
        eager, ratio = result["update_ms"]["eager"][name], graph / graphs["adamw, fused"]
        print(f"  {name:<14} {eager:>8.3f} {graph:>8.3f} {ratio:>8.2f}x {result['room_mb'][name]:>15.0f}")
