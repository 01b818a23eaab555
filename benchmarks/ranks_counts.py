"""What one rank of many holds and sends: shards, collective operations per step and per window, bytes.

python benchmarks/ranks_counts.py                        # 2 to 1,024 ranks; --out FILE writes the results as JSON

torch's fake process group stands for the others: it sends nothing, so each sum is taken as if all ranks had the same
numbers. Counts and sizes are those of a real run; losses, times and bandwidths are not, and none is told.

Models: "gpt" is a GPT of 0.9M parameters. "7B" and "70B" have the shapes of Llama 2: their shards are counted on
torch's meta device, which holds no numbers, and what is sent of as many tensors that are 8 numbers wide, as sends go by
tensors and not by their sizes. These two need transformers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

STEPS, WINDOW = 20, 5
WATCHING = {"hybrid.mode": "leap", "hybrid.warmup_steps": 1000}
MODES = {"off": {"hybrid.mode": "off"}, "watching": {**WATCHING, "distributed.basis": "replicated"}}
MODES["muon"] = {"hybrid.mode": "off", "optimizer.type": "muon"}
MODES["shared"] = {**WATCHING, "distributed.basis": "sharded"}
"""The last one is of replicas, which share their directions."""
LOADED = ["foretrain.trainer", "foretrain.recipes.spreading", "foretrain.models.causal_lm", "torch.distributed.fsdp"]
"""What processes have in common, and load once."""
PLACES = [(0, 2), (0, 8), (0, 1024), (700, 1024), (1023, 1024)]
"""Ranks, and how many there are."""
LLAMA = {
    "7B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "70B": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}
KEYS = {"7B": 32, "70B": 8}
"""Heads of keys and values."""
NARROW = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}


def llama(name: str, device: str, **narrow: int) -> Any:
    """Make a model of transformers, without anything that is ours."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{"vocab_size": 32000, "num_key_value_heads": KEYS[name], **LLAMA[name], **narrow})
    with torch.device(device):
        return LlamaForCausalLM(config)


def shards(name: str, rank: int, ranks: int) -> dict[str, Any]:
    """Count the numbers that a rank holds of a model of real size."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from foretrain.config import Config
    from foretrain.recipes import spreading

    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    model = llama(name, "meta")
    whole = sum(p.numel() for p in model.parameters())
    spreading.shard(model, spreading.Spreading("fsdp2", shard=ranks), Config(device="cpu"))
    parts = [p.to_local().numel() for p in model.parameters()]
    counted = {"parameters": whole, "held": sum(parts), "empty": parts.count(0), "tensors": len(parts)}
    return {"model": name, "type": "fsdp2", "mode": "shards", "rank": rank, "ranks": ranks, **counted}


def measure(name: str, kind: str, mode: str, rank: int, ranks: int) -> dict[str, Any]:
    """Count what a rank does in some windows of full steps."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from foretrain import HybridTrainer
    from foretrain.config import from_mapping
    from foretrain.launch.group import Group, RankPlace
    from foretrain.models.causal_lm import CausalLM
    from foretrain.models.causal_shape import shape_of
    from foretrain.models.gpt2 import GPT2, GPT2Shape
    from foretrain.planning.estimate import target_of
    from foretrain.recipes import spreading

    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    settings = {"max_steps": 1000, "device": "cpu", "optimizer.type": "adamw", "batch_size": ranks}
    settings |= {"hybrid.window_steps": WINDOW, "hybrid.linear_rows": 0, "health.interval": 0, "distributed.type": kind}
    config = from_mapping({**settings, **MODES[mode]})
    shape: Any = GPT2Shape(layers=4, heads=4, width=128, context=64, vocab_size=1000)
    model: Any = GPT2(shape, 1) if name == "gpt" else None
    if model is None:
        inner = llama(name, "cpu", **NARROW, vocab_size=1000, max_position_embeddings=64)
        shape = shape_of(inner)
        model = CausalLM(inner, shape)
    whole = sum(p.numel() for p in model.parameters())
    chosen = spreading.choose(config, target_of(config, shape), Group(RankPlace(rank, ranks)))
    loss = spreading.spread(model, chosen, config)
    if isinstance(loss, spreading.ReplicatedLoss):
        loss.replicas.register_comm_hook(None, take_gradients_as_they_are)
    calls, sent = count_calls(ranks)
    trainer = HybridTrainer(model, loss_fn=loss, config=config)
    tokens = torch.randint(0, 1000, (1, 65))
    batch = tokens[:, :-1], tokens[:, 1:]
    for _ in range(WINDOW):
        trainer.step(batch)
    calls.clear()
    sent.clear()
    for _ in range(STEPS):
        trainer.step(batch)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return {
        "model": name,
        "type": kind,
        "mode": mode,
        "rank": rank,
        "ranks": ranks,
        "parameters": whole,
        "held": sum(part.numel() for part in parts),
        "empty": sum(part.numel() == 0 for part in parts),
        "tensors": len(parts),
        "groups": 0 if trainer.observer is None else len(trainer.observer.trajectory.groups),
        "directions_bytes": 0 if trainer.observer is None else trainer.observer.trajectory.bytes,
        "own_per_step": round(calls["own"] / STEPS, 3),
        "own_bytes_per_step": round(sent["own"] / STEPS, 1),
        "gathers_per_step": calls["gather"] / STEPS,
        "scatters_per_step": calls["scatter"] / STEPS,
    }


def count_calls(ranks: int) -> tuple[Counter[str], Counter[str]]:
    """Count the operations that foretrain asks for itself, and those of FSDP2."""
    from torch import distributed

    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def counted(name: str, function: Any, place: int) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            tensor = arguments[place] if len(arguments) > place else next(iter(named.values()))
            sent[name] += tensor.numel() * tensor.element_size()
            done = function(*arguments, **named)
            if name == "own" and function.__name__ == "all_reduce" and named.get("op") is None:
                tensor.mul_(ranks)
            return done

        return call

    names = {"all_reduce": "own", "broadcast": "own", "all_to_all_single": "own"}
    names |= {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}  # FSDP2 of torch 2.12
    names |= {"all_gather_single": "gather", "reduce_scatter_single": "scatter"}  # of torch 2.13
    for function, name in names.items():
        if hasattr(distributed, function):
            setattr(distributed, function, counted(name, getattr(distributed, function), 0))
    return calls, sent


def take_gradients_as_they_are(state, bucket):
    """Stand for the sum of gradients over replicas: the fake group gives the reducer nothing to wait for."""
    import torch

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def counted(case: tuple[str, str, str, int, int]) -> dict[str, Any]:
    """Count one case."""
    return shards(case[0], *case[3:]) if case[2] == "shards" else measure(*case)


def cases() -> Iterator[tuple[str, str, str, int, int]]:
    """Give the model, the type, the mode, the rank and the ranks of each case."""
    for kind in ("ddp", "fsdp2"):
        for mode in ("off", "watching", "shared" if kind == "ddp" else "muon"):
            for place in PLACES if kind == "fsdp2" else PLACES[:3]:
                yield "gpt", kind, mode, *place
    for name in LLAMA:
        for mode in ("off", "watching"):
            yield name, "fsdp2", mode, 0, 8
        for ranks in (8, 64, 1024):
            yield name, "fsdp2", "shards", 0, ranks
        yield name, "fsdp2", "shards", 1023, 1024


def told(row: dict[str, Any]) -> str:
    """Say one case in a line."""
    text = (
        f"{row['model']:<4}{row['type']:<6}{row['mode']:<9} rank {row['rank']:>4} of {row['ranks']:>4}: holds "
        f"{row['held']:>8,} of {row['parameters']:,}, {row['empty']:>2} of {row['tensors']} shards empty"
    )
    if row["mode"] == "shards":
        return text
    return (
        f"{text}, {row['directions_bytes'] / 2**20:.1f} MiB of directions; a step: "
        f"{row['own_per_step']:.2f} own operations ({row['own_bytes_per_step']:,.0f} bytes), "
        f"{row['gathers_per_step']:.2f} gathers, {row['scatters_per_step']:.2f} scatters"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    chosen = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    rows = []
    with context.Pool(1, maxtasksperchild=1) as pool:  # a process of its own for each
        for row in pool.imap(counted, cases()):
            rows.append(row)
            print(told(row), flush=True)
    if chosen.out is not None:
        from foretrain import environment

        facts = {**environment.describe(), "date": f"{datetime.now().astimezone():%Y-%m-%d}"}
        chosen.out.write_text(json.dumps({"environment": facts, "window": WINDOW, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
