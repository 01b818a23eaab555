"""What a new token costs: with and without the cache at growing lengths, and what streaming adds to it.

python benchmarks/generation.py --device cpu
python benchmarks/generation.py --device cuda --model gpt2-small --dtype bfloat16

The weights are random and the end of text is never chosen: time depends on neither. gpt2-tiny gets a context of 1024.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import environment
from foretrain.data.tokenizers import ByteTokenizer
from foretrain.models.gpt2 import GPT2, SIZES
from foretrain.serve.generate import TextGenerator
from foretrain.serve.sampling import Sampling

LENGTHS = [16, 64, 128, 256, 512, 1000]


class NeverEnding(ByteTokenizer):
    """Bytes, and an end that a model of this vocabulary does not choose in a short text."""

    end_of_text = -1


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def cached_milliseconds(model: GPT2, length: int, device: str, tokens: int) -> float:
    """One step at a cache of `length` tokens; the same place again each time, so that the length does not drift."""
    cache = model.make_cache(1, length + 1)
    model.decode(torch.zeros(1, length, dtype=torch.long, device=device), cache)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    seconds = []
    for _ in range(tokens):
        cache.used = length
        started = time.perf_counter()
        model.decode(token, cache)
        wait(device)
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


@torch.inference_mode()
def uncached_milliseconds(model: GPT2, length: int, device: str, tokens: int) -> float:
    """All of `length` + 1 tokens anew; the logits of the last one only, as fair as it gets."""
    window = torch.zeros(1, length + 1, dtype=torch.long, device=device)
    seconds = []
    for _ in range(tokens):
        started = time.perf_counter()
        model.hidden(window)[:, -1] @ model.token_embedding.weight.t()
        wait(device)
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def flatness(model: GPT2, device: str, tokens: int) -> list[dict[str, float]]:
    rows = []
    for length in LENGTHS:
        cached_milliseconds(model, length, device, 5)
        uncached_milliseconds(model, length, device, 2)
        row = {
            "length": length,
            "cached_ms": round(cached_milliseconds(model, length, device, tokens), 4),
            "uncached_ms": round(uncached_milliseconds(model, length, device, max(5, tokens // 10)), 4),
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def streaming(generator: TextGenerator, count: int, rounds: int) -> dict[str, Any]:
    """Seconds for `count` tokens: generate() of one prompt, stream() and astream(), taking turns."""
    sampling = Sampling(max_tokens=count, temperature=0.8, top_k=40, seed=1)

    async def read() -> int:
        return len([token async for token in generator.astream("a", sampling)])

    arms: dict[str, Callable[[], int]] = {
        "generate": lambda: len(generator.generate("a", sampling)[0].tokens),
        "stream": lambda: len([token.text for token in generator.stream("a", sampling)]),
        "astream": lambda: asyncio.run(read()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 2):
        order = list(arms)
        for name in order[turn % 3 :] + order[: turn % 3]:
            started = time.perf_counter()
            made = arms[name]()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - started)
            assert made == count
    result: dict[str, Any] = {"tokens": count, "rounds": rounds}
    result["generate_ms_per_token"] = round(1000 * statistics.median(seconds["generate"]) / count, 4)
    for name in ("stream", "astream"):
        ratios = sorted(mine / whole for mine, whole in zip(seconds[name], seconds["generate"], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        result[f"{name}_percent"] = round(100 * (statistics.median(ratios) - 1), 2)
        result[f"{name}_percent_quartiles"] = [round(100 * (ratio - 1), 2) for ratio in (low, high)]
        # the fastest round is the one least disturbed by other work on the machine
        result[f"{name}_percent_of_fastest"] = round(100 * (min(seconds[name]) / min(seconds["generate"]) - 1), 2)
    result["seconds"] = seconds
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="gpt2-tiny", choices=["gpt2-tiny", "gpt2-small"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tokens", type=int, default=200, help="timed steps at each length")
    parser.add_argument("--rounds", type=int, default=30, help="of streaming against generating 100 tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    changes = {"context": 1024} | ({"vocab_size": 257} if options.model == "gpt2-tiny" else {})
    model = GPT2(replace(SIZES[options.model], **changes)).eval()
    model = model.to(options.device, getattr(torch, options.dtype))
    rows = flatness(model, options.device, options.tokens)
    stream = streaming(TextGenerator(model, NeverEnding()), 100, options.rounds)
    growth = rows[-1]["cached_ms"] / rows[0]["cached_ms"]
    report = {
        "benchmark": "generation",
        "command": " ".join(["python", "benchmarks/generation.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(options.device),
        "results": [
            {
                "model": options.model,
                "device": options.device,
                "dtype": options.dtype,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "per_token": rows,
                "cached_growth": round(growth, 3),
                "streaming": stream,
            }
        ],
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{options.model}, {options.device}, {options.dtype}: milliseconds per new token\n")
    print("length   cached   uncached   times faster")
    for row in rows:
        faster = row["uncached_ms"] / row["cached_ms"]
        print(f"{row['length']:>6} {row['cached_ms']:>8.3f} {row['uncached_ms']:>10.3f} {faster:>14.1f}")
    print(f"\ncached: {growth:.2f} times the cost at {LENGTHS[-1]} tokens that it has at {LENGTHS[0]}")
    for name in ("stream", "astream"):
        low, high = stream[f"{name}_percent_quartiles"]
        print(
            f"{name:<8} {stream[f'{name}_percent']:+.2f} % over generate (half of {options.rounds} rounds within "
            f"{low:+.2f} .. {high:+.2f} %), {stream['generate_ms_per_token']} ms a token"
        )


if __name__ == "__main__":
    main()
