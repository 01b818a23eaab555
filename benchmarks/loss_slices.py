"""What smaller slices of logits cost: forward and backward of the fused loss, by rows per slice.

python benchmarks/loss_slices.py [--out result.json]      # on a CUDA GPU, half a minute
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import environment
from foretrain.models.loss import linear_cross_entropy

VOCABULARY, PADDED = 50257, 50304


def milliseconds(rows: int, width: int, slice_rows: int, rounds: int = 4, times: int = 5) -> float:
    """The fastest round; the first one warms up."""
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(PADDED, width, device="cuda", requires_grad=True)
    targets = torch.randint(VOCABULARY, (rows,), device="cuda")
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                linear_cross_entropy(hidden, weight, targets, VOCABULARY, slice_rows).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - started) / times)
    return round(min(found[1:]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: there is nothing to measure")
    rows: list[dict[str, Any]] = []
    for width in (768, 1600):
        for tokens in (8192, 32768):
            times = {str(size): milliseconds(tokens, width, size) for size in (16384, 8192, 4096, 2048)}
            rows.append({"width": width, "tokens": tokens, "milliseconds": times})
            print(f"width {width:>4}, {tokens:>5} tokens: {times} ms by rows per slice", flush=True)
    if options.out:
        found = {
            "benchmark": "slices of the fused loss",
            "command": "python benchmarks/loss_slices.py",
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "environment": environment.describe("cuda"),
            "results": rows,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
