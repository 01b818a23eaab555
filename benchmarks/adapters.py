"""What adapters cost while serving: loading one, switching, and a forward pass with 0, 1 and 8 of them in memory.

python benchmarks/adapters.py --device cpu --models tiny        # tiny GPT
python benchmarks/adapters.py --device cuda                     # tiny GPT and GPT-2 124M

All forward passes run in turns on the same tokens, in float32 (bfloat16 with --dtype); "bare" is the model without a
registry. Times are medians over the rounds with the device synchronised, ratios are medians of each round's own.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretrain import environment
from foretrain.config import ModelConfig
from foretrain.models import gpt2, lora
from foretrain.models.adapter_files import Adapter, adapter_of, save_adapter
from foretrain.models.lora import LoraSettings
from foretrain.serve.adapters import AdapterRegistry

MODELS = {
    "tiny": ModelConfig(type="gpt2-tiny", vocab_size=256),
    "small": ModelConfig(type="gpt2-small", vocab_size=50257),
}
RESIDENT = 8


def seconds(device: str, act: Callable[[], Any]) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def make_adapter(model: gpt2.GPT2, rank: int, folder: Path) -> Adapter:
    """A trained adapter on every linear layer, also as PEFT's files in `folder`."""
    model = copy.deepcopy(model)
    lora.attach(model, LoraSettings(rank=rank), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in lora.adapted_layers(model).values():
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=generator) * 0.02)
    save_adapter(model, folder)
    return adapter_of(model)


class Arm:
    """One way to serve: a model, with a registry of `resident` adapters or bare, and what its requests ask for."""

    def __init__(self, model: gpt2.GPT2, options: argparse.Namespace) -> None:
        self.model = copy.deepcopy(model)
        self.run = torch.compile(self.model) if options.compile else self.model
        self.request: Callable[[], AbstractContextManager[None]] = nullcontext

    def with_registry(self, adapter: Adapter, resident: int, names: Any, rank: int) -> Arm:
        registry = AdapterRegistry(self.model, capacity=max(resident, 1), max_rank=rank)
        for number in range(resident):
            registry.load(str(number), adapter)
        self.request = lambda: registry.serving(names)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        with self.request(), torch.inference_mode():
            return self.run(tokens)


def in_turns(device: str, acts: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    for act in acts.values():
        for _ in range(3):
            act()
    measured: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(rounds):
        for name in list(acts) if turn % 2 == 0 else list(reversed(acts)):
            measured[name].append(seconds(device, acts[name]))
    return measured


def keeping_house(model: gpt2.GPT2, adapter: Adapter, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Loading (from files, from memory), switching, and how much memory the stacks take."""
    registry = AdapterRegistry(copy.deepcopy(model), capacity=RESIDENT, max_rank=options.rank)
    for name in ("a", "b"):
        registry.load(name, adapter)

    def load(source: Adapter | Path) -> None:
        registry.load("new", source)

    times: dict[str, list[float]] = {"load_files": [], "load_memory": [], "switch": []}
    for _ in range(options.rounds + 3):
        for kind, source in (("load_files", folder), ("load_memory", adapter)):
            times[kind].append(seconds(options.device, lambda source=source: load(source)))
            registry.unload("new")
        for name in ("a", "b"):
            times["switch"].append(seconds(options.device, lambda name=name: registry.activate(name)))
    per_slot = registry.bytes / (RESIDENT + 1)
    return {
        **{f"{kind}_ms": round(1000 * statistics.median(values[3:]), 4) for kind, values in times.items()},
        "megabytes_per_adapter": round(per_slot / 2**20, 2),
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    model = gpt2.build(MODELS[name], seed=0).to(options.device, getattr(torch, options.dtype)).eval()
    length = min(options.length, model.shape.context)
    tokens = torch.randint(MODELS[name].vocab_size or 256, (options.rows, length), device=options.device)
    with tempfile.TemporaryDirectory() as folder:
        adapter = make_adapter(model, options.rank, Path(folder))
        house = keeping_house(model, adapter, Path(folder), options)
    every_row = [str(row % RESIDENT) for row in range(options.rows)]
    arms = {
        "bare": Arm(model, options),
        "0 resident": Arm(model, options).with_registry(adapter, 0, None, options.rank),
        "1 resident": Arm(model, options).with_registry(adapter, 1, "0", options.rank),
        "8 resident": Arm(model, options).with_registry(adapter, RESIDENT, "7", options.rank),
        "8, none asked": Arm(model, options).with_registry(adapter, RESIDENT, None, options.rank),
        "8, one a row": Arm(model, options).with_registry(adapter, RESIDENT, every_row, options.rank),
    }
    same = torch.equal(arms["bare"].forward(tokens), arms["8, none asked"].forward(tokens))
    acts = {arm: (lambda arm=arm: arms[arm].forward(tokens)) for arm in arms}
    measured = in_turns(options.device, acts, options.rounds)
    ratios = {arm: [a / b for a, b in zip(times, measured["bare"], strict=True)] for arm, times in measured.items()}
    return {
        "model": MODELS[name].type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": options.device,
        "dtype": options.dtype,
        "compiled": options.compile,
        "batch": [options.rows, length],
        "rank": options.rank,
        **house,
        "forward_ms": {arm: round(1000 * statistics.median(times), 3) for arm, times in measured.items()},
        "ratio": {arm: round(statistics.median(values), 4) for arm, values in ratios.items()},
        "same_logits_without_adapter": same,
        "seconds": measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.models:
        result = measure(name, options)
        results.append(result)
        print({k: v for k, v in result.items() if k != "seconds"}, file=sys.stderr, flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    report = {
        "benchmark": "adapters",
        "command": " ".join(["python", "benchmarks/adapters.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(options.device),
        "results": results,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for result in results:
        print(
            f"{result['model']:<11} load {result['load_files_ms']:.2f} ms "
            f"({result['load_memory_ms']:.2f} from memory), switch {1000 * result['switch_ms']:.1f} us, "
            f"{result['megabytes_per_adapter']} MB each"
        )
        for arm, milliseconds in result["forward_ms"].items():
            print(f"  {arm:<14} {milliseconds:>9.3f} ms   {100 * (result['ratio'][arm] - 1):+6.2f} %")


if __name__ == "__main__":
    main()
