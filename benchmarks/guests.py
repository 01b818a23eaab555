"""Leaps of `foretrain.wrap` in a plain loop: what they reach beside the same loop, which may make more steps for them.

python benchmarks/guests.py --out benchmarks/results/DATE-guests.json       # all rates, two seeds; ten minutes

A small GPT is trained on a part of Python's standard library. Then, on another part of it, an adapter is trained
on its linear layers, or all of its weights, with AdamW at constant rates. The loop with leaps makes `--steps` steps;
the plain one makes as many more as the leaps were charged for. Both are judged on text that neither was trained on nor
looked at by a leap. Idle runs, with `hybrid.mode = "off"`, are compared with the plain loop bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sysconfig
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import foretrain
from foretrain import GPT2, Config, GPT2Shape, LoraSettings, environment
from foretrain.models.lora import attach

CONTEXT, ROWS = 64, 16
RATES = {"adapter": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), "all weights": (1e-4, 3e-4, 1e-3, 3e-3)}


def text(names: list[str]) -> Tensor:
    """Windows of the standard library's source, as bytes, in a fixed order."""
    source = b"".join((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_bytes() for name in names)
    tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    windows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]


def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
    loss: Tensor = model(rows[:, :-1], rows[:, 1:])
    return loss


def batch(rows: Tensor, step: int, seed: int) -> Tensor:
    return rows[torch.randint(len(rows), (ROWS,), generator=torch.Generator().manual_seed(10_000 * seed + step))]


def pretrained(rows: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = GPT2(GPT2Shape(layers=2, heads=4, width=64, context=CONTEXT, vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_fn(model, batch(rows, step, 0)).backward()
        optimizer.step()
    return model


def run(model: nn.Module, rate: float, data: dict[str, Tensor], steps: int, seed: int, mode: str) -> dict[str, Any]:
    """One loop. mode: "plain" is without foretrain."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    guest = None
    if mode != "plain":
        config = Config(hybrid={"mode": mode}, forecast={"enabled": False}, evaluation={"interval": 0})
        probe = [data["probe"][start : start + ROWS] for start in range(0, len(data["probe"]), ROWS)]
        guest = foretrain.wrap(model, optimizer, probe=probe, loss_fn=loss_fn, config=config, max_steps=steps)
    for step in range(steps):
        loss = loss_fn(model, batch(data["train"], step, seed))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if guest is not None:
            guest.between_steps(loss)
    with torch.no_grad():
        found: dict[str, Any] = {"loss": float(loss_fn(model, data["test"]))}
    if guest is not None:
        guest.close()
        found |= {"moves": guest.summary()["moves"], "charged": guest.hybrid.policy.score.ledger.cost}
    return found | {"weights": torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])}


def compare(base: nn.Module, kind: str, rate: float, data: dict[str, Tensor], steps: int, seed: int) -> dict[str, Any]:
    def fresh() -> nn.Module:
        model = copy.deepcopy(base)
        if kind == "adapter":
            attach(model, LoraSettings(rank=8), seed)
        return model

    leaps, idle, same = (run(fresh(), rate, data, steps, seed, mode) for mode in ("leap", "off", "plain"))
    more = math.ceil(leaps["charged"])
    plain = run(fresh(), rate, data, steps + more, seed, "plain")
    return {
        "leaps": leaps["loss"],
        "plain": plain["loss"],
        "more_steps": more,
        "moves": leaps["moves"],
        "idle_is_plain": torch.equal(idle["weights"], same["weights"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    base = pretrained(text(["argparse", "ast", "inspect", "typing", "subprocess"]), 1500)
    other = text(["turtle", "doctest", "pickletools", "tarfile"])
    data = {"probe": other[:64], "test": other[64:320], "train": other[320:]}
    rows = []
    print(f"{'trained':12} {'rate':>7} {'plain':>8} {'leaps':>8}  {'kept':>5} {'refused':>7} {'more':>5}  idle")
    for kind, rates in RATES.items():
        for rate in rates:
            found = [compare(base, kind, rate, data, given.steps, seed) for seed in range(1, given.seeds + 1)]
            plain, leaps = (statistics.mean(one[name] for one in found) for name in ("plain", "leaps"))
            kept = sum(one["moves"]["kept"] + one["moves"]["shrunk"] for one in found) / len(found)
            refused = sum(one["moves"]["refused"] for one in found) / len(found)
            more = statistics.mean(one["more_steps"] for one in found)
            exact = all(one["idle_is_plain"] for one in found)
            line = f"{kind:12} {rate:7.0e} {plain:8.4f} {leaps:8.4f}  {kept:5.1f} {refused:7.1f} {more:5.0f}  {exact}"
            print(line, flush=True)
            rows.append({"trained": kind, "rate": rate, "seeds": found})
    if given.out is not None:
        result = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "steps": given.steps,
            "environment": environment.describe("cpu"),
            "rows": rows,
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
