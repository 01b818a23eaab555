"""Can a skipped backward pass pay? How well gradients that were predicted without it agree with true ones.

python benchmarks/skipped_backward.py                                  # Python's own source, a few minutes
python benchmarks/skipped_backward.py --tokens FILE.u16 --vocab 4096 --seeds 1 2 --out result.json

A share f of the sequences of a batch gets a true gradient, all of them get a predicted one, and the mean difference of
both corrects the predicted mean (a control variate). With a correlation of rho the variance is (1 - rho^2)/f + rho^2,
and where predictions are free a step costs (1 + 2f)/3. That pays from rho = 0.58 on.

A small GPT is trained. At some moments the gradient of each sequence's loss at the output of every block is predicted
from the gradient at the output of the last block, which needs only the head:
  identity                the same gradient
  map                     a linear map of it, by ridge regression
  map with activations    a linear map of it and of what the block put out
The maps are fitted on other sequences of the same moment, at no charge. Then each block alone makes weight gradients of
a predicted and of the true gradient at its output. "Cosine" is the mean over sequences. "Correlation" is that of the
deviations from the means over sequences: it is the rho above. The last block has nothing to predict and counts nowhere.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretrain import environment
from foretrain.config import DataConfig, OptimizerConfig, ScheduleConfig
from foretrain.data.loader import Loader, TokenWindows
from foretrain.data.tokens import prepare
from foretrain.engine import schedule
from foretrain.engine.optim.build import RateControl, build
from foretrain.models.gpt2 import GPT2, GPT2Shape

THRESHOLD = math.sqrt(1 / 3)
"""The correlation from which on free predictions pay."""
MOMENTS = (0.05, 0.25, 0.5, 1.0)
"""Shares of the steps after which gradients are compared."""
FIT = 10
"""Sequences that maps are fitted on, for each one that is judged; as many as are judged choose the ridge."""
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Ridges to choose from, as shares of the mean square of an input."""
MAPS = {"identity": 0, "map": 1, "map with activations": 2}
"""Predictors, and the products of width x width that each one needs for a token."""
CHARGES = ("nothing", "outer products", "own backward pass")
"""What a predicted gradient costs: nothing at all; only the products that make weight gradients of gradients; or what
this script does, the backward pass of the block itself, which all but the first matrix of the block need."""

Batch = tuple[Tensor, Tensor]


# --- text ------------------------------------------------------------------------------------------------------------


def read_tokens(path: Path | None, vocabulary: int) -> tuple[Any, int]:
    """Return tokens and the size of their vocabulary. The most frequent ones get numbers of their own, all others share
    one."""
    if path is None:
        corpus = prepare(DataConfig())
        tokens: Any = np.asarray(corpus.train)
    else:
        tokens = np.frombuffer(
            lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes(), dtype="<u2"
        )
    counts = np.bincount(tokens)
    order = np.argsort(-counts, kind="stable")[:vocabulary]
    order = order[counts[order] > 0]
    numbers = np.full(len(counts), len(order), dtype=np.int64)
    numbers[order] = np.arange(len(order))
    return numbers[tokens].astype(np.uint16), len(order) + 1


def held_apart(tokens: Any, context: int, count: int, seed: int) -> tuple[Any, Batch]:
    """Return the tokens to train on, and sequences from the end of the text in a random order."""
    length = count * context + 1
    if len(tokens) < 2 * length:
        raise SystemExit(f"{len(tokens)} tokens are too few: {length} are held apart; use more text or judge fewer")
    rows = torch.from_numpy(tokens[-length:].astype(np.int64))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    inputs, targets = rows[:-1].view(count, context)[order], rows[1:].view(count, context)[order]
    return tokens[:-length], (inputs, targets)


def cut(batch: Batch, size: int, device: str) -> Iterator[Batch]:
    for inputs, targets in zip(*(part.split(size) for part in batch), strict=True):
        yield inputs.to(device), targets.to(device)


# --- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """Input and output of every block, and the gradient of each sequence's loss at its output."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    gradients: list[Tensor]
    loss: float


def trace(model: GPT2, batch: Batch) -> Trace:
    """Make one forward and one backward pass."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(arguments[0].detach())
        outputs.append(output)

    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    try:
        loss = model.loss(batch)
    finally:
        for hook in hooks:
            hook.remove()
    gradients = torch.autograd.grad(loss * len(batch[0]), outputs)
    return Trace(inputs, [output.detach() for output in outputs], list(gradients), float(loss.detach()))


def weight_gradients(block: nn.Module, inputs: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of all weights of a block, as one vector, for each gradient at its output."""
    weights = list(block.parameters())
    output = block(inputs)
    found = []
    for gradient in gradients:
        parts = torch.autograd.grad(output, weights, gradient, retain_graph=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return found


@dataclass
class Agreement:
    """Sums over samples, from which cosine and correlation of predicted and true vectors follow."""

    count: int = 0
    cosines: float = 0.0
    products: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    sums: list[Tensor] = field(default_factory=list)

    def add(self, true: Tensor, predicted: Tensor) -> None:
        products = [float(one @ other) for one, other in ((true, predicted), (true, true), (predicted, predicted))]
        self.count += 1
        self.cosines += products[0] / math.sqrt(products[1] * products[2])
        self.products = [old + new for old, new in zip(self.products, products, strict=True)]
        if self.sums:
            self.sums[0] += true
            self.sums[1] += predicted
        else:
            self.sums = [true.clone(), predicted.clone()]

    @property
    def cosine(self) -> float:
        return self.cosines / self.count

    @property
    def correlation(self) -> float:
        true, predicted = (total.double() for total in self.sums)
        pairs = ((true, predicted), (true, true), (predicted, predicted))
        both, one, other = (
            product - float(a @ b) / self.count for product, (a, b) in zip(self.products, pairs, strict=True)
        )
        return both / math.sqrt(one * other)


Predictor = Callable[[int, Trace], Tensor]
"""Block and trace -> the gradient at the output of the block, predicted."""


def compare(
    model: GPT2, batches: Iterator[Batch], predictors: dict[str, Predictor]
) -> tuple[dict[tuple[int, str], Agreement], float]:
    """Return how far weight gradients of predicted gradients agree with true ones, for each block, and the loss."""
    agreements = {(layer, name): Agreement() for layer in range(model.shape.layers) for name in predictors}
    losses = []
    for batch in batches:
        passed = trace(model, batch)
        losses.append(passed.loss)
        for layer, block in enumerate(model.blocks):
            gradients = [passed.gradients[layer], *(predict(layer, passed) for predict in predictors.values())]
            for row in range(len(batch[0])):
                one = slice(row, row + 1)
                true, *others = weight_gradients(block, passed.inputs[layer][one], [each[one] for each in gradients])
                for name, predicted in zip(predictors, others, strict=True):
                    agreements[layer, name].add(true, predicted)
    return agreements, statistics.fmean(losses)


# --- predictors ------------------------------------------------------------------------------------------------------


def identity(_: int, passed: Trace) -> Tensor:
    return passed.gradients[-1]


def sources(name: str, layer: int, passed: Trace) -> Tensor:
    """Return what a map is given."""
    last = passed.gradients[-1]
    return last if name == "map" else torch.cat([last, passed.outputs[layer]], dim=-1)


class Moments:
    """Products of the inputs of a map with themselves and with its goals, summed over tokens."""

    def __init__(self) -> None:
        self.inner: Any = 0.0
        self.cross: Any = 0.0

    def add(self, inputs: Tensor, goals: Tensor) -> None:
        inputs, goals = inputs.flatten(0, 1).double(), goals.flatten(0, 1).double()
        self.inner = self.inner + inputs.T @ inputs
        self.cross = self.cross + inputs.T @ goals

    def solve(self, strength: float) -> Tensor:
        """Return the ridge map, of inputs that all have the same mean square."""
        scale = self.inner.diagonal().sqrt().clamp_min(1e-30)
        ridge = strength * torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
        solved = torch.linalg.solve(self.inner / scale / scale[:, None] + ridge, self.cross / scale[:, None])
        return solved / scale[:, None]

    def error(self, solved: Tensor) -> float:
        """Return the squared error of a map on these tokens, up to a constant."""
        return float((solved * (self.inner @ solved - 2 * self.cross)).sum())


def fit_maps(model: GPT2, fit: Iterator[Batch], choose: Iterator[Batch]) -> dict[tuple[int, str], tuple[Tensor, float]]:
    """Return a map and the ridge it was fitted with, for every block and way to predict."""
    names = [name for name, products in MAPS.items() if products]
    keys = [(layer, name) for layer in range(model.shape.layers) for name in names]
    seen: list[dict[tuple[int, str], Moments]] = []
    for batches in (fit, choose):
        moments = {key: Moments() for key in keys}
        for batch in batches:
            passed = trace(model, batch)
            for (layer, name), sums in moments.items():
                sums.add(sources(name, layer, passed), passed.gradients[layer])
        seen.append(moments)
    found = {}
    for key in keys:
        solved = {strength: seen[0][key].solve(strength) for strength in STRENGTHS}
        best = min(STRENGTHS, key=lambda strength: seen[1][key].error(solved[strength]))
        found[key] = solved[best].float(), best
    return found


def judge(
    model: GPT2, sequences: Batch, judged: int, batch_size: int, device: str
) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each block and predictor, and the loss on the judged sequences."""
    parts = [tuple(part.split([judged, judged, FIT * judged])) for part in sequences]
    on, choose, fit = (cut((inputs, targets), batch_size, device) for inputs, targets in zip(*parts, strict=True))
    maps = fit_maps(model, fit, choose)
    predictors: dict[str, Predictor] = {"identity": identity}
    for name in ("map", "map with activations"):
        predictors[name] = lambda layer, passed, name=name: sources(name, layer, passed) @ maps[layer, name][0]
    agreements, loss = compare(model, on, predictors)
    rows = []
    for (layer, name), agreement in agreements.items():
        row = {"block": layer + 1, "predictor": name}
        row |= {"cosine": round(agreement.cosine, 4), "correlation": round(agreement.correlation, 4)}
        rows.append(row | ({"ridge": maps[layer, name][1]} if (layer, name) in maps else {}))
    return rows, loss


# --- gains -----------------------------------------------------------------------------------------------------------


def best_gain(correlation: float, skipped: float = 2 / 3) -> float:
    """Return how many times less work reaches the same variance, with the best share of true gradients.

    skipped: the share of the work of a step that a predicted gradient does not need.
    """
    square = min(correlation**2, 1.0)
    share = min(1.0, math.sqrt((1 - skipped) * (1 - square) / (skipped * square))) if square else 1.0
    share = max(share, 1e-6)
    return 1 / ((1 - skipped * (1 - share)) * ((1 - square) / share + square))


def skipped(charge: str, predictor: str) -> float:
    """Return the share of a block's work that a predicted gradient does not need, in matrix products.

    Of 36 products of width x width 24 are the backward pass: 12 make weight gradients, 3 the gradient for the block
    below.
    """
    return {"nothing": 24, "outer products": 12, "own backward pass": 3 - MAPS[predictor]}[charge] / 36


def verdict(shape: GPT2Shape, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Say how many blocks are above the threshold, and what a whole step could gain.

    At the most: each block has the best share of true gradients for itself, as if the others were not there.
    Together: one share for all. A true gradient at a block needs the backward pass of all blocks above it, so the block
    that is predicted worst decides.
    """
    block = 12 * shape.width**2 + 2 * shape.context * shape.width
    share = block / (shape.layers * block + shape.vocab_size * shape.width)
    below = range(1, shape.layers)
    found = {
        (layer, name): statistics.fmean(
            row["correlation"] for row in rows if row["block"] == layer and row["predictor"] == name
        )
        for layer in below
        for name in MAPS
    }
    best = {layer: max(found[layer, name] for name in MAPS) for layer in below}
    lowest = {name: min(found[layer, name] for layer in below) for name in MAPS}
    at_most, together = {}, {}
    for charge in CHARGES:
        work = 1.0
        for layer in below:
            work -= share * (1 - 1 / max(best_gain(found[layer, name], skipped(charge, name)) for name in MAPS))
        at_most[charge] = round(1 / work, 4)
        gains = (best_gain(lowest[name], len(below) * share * skipped(charge, name)) for name in MAPS)
        together[charge] = round(max(gains), 4)
    above = sum(value > THRESHOLD for value in best.values())
    return {
        "best_correlation": {str(layer): round(value, 4) for layer, value in best.items()},
        "blocks_above": above,
        "share_of_block_parameters": round(above / shape.layers, 4),
        "share_of_work_of_a_block": round(share, 4),
        "gain_at_most": at_most,
        "gain_together": together,
    }


# --- the run ---------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, tokens: Any, vocabulary: int, seed: int) -> list[dict[str, Any]]:
    """Train once and judge at every moment."""
    shape = GPT2Shape(options.layers, options.heads, options.width, options.context, vocabulary)
    model = GPT2(shape, seed).to(options.device)
    config = OptimizerConfig(type=options.optimizer, learning_rate=options.rate)
    optimizer = build(model, config)
    control = RateControl(optimizer)
    rate = schedule.build(ScheduleConfig(type="cosine"), config.peak_rate, options.steps)
    text, sequences = held_apart(tokens, shape.context, (FIT + 2) * options.judged, seed)
    moments = {max(1, round(share * options.steps)): share for share in MOMENTS}
    results = []
    started = time.perf_counter()
    for step, batch in enumerate(Loader(TokenWindows(text, shape.context, seed), options.batch, seed), start=1):
        control.set(rate(step - 1))
        model.loss((batch[0].to(options.device), batch[1].to(options.device))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in moments:
            rows, loss = judge(model, sequences, options.judged, options.batch, options.device)
            result = {"seed": seed, "moment": moments[step], "step": step, "held_apart_loss": round(loss, 4)}
            results.append({**result, "rows": rows})
            print(
                f"seed {seed}, step {step}: loss {loss:.3f}, {time.perf_counter() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        if step == options.steps:
            break
    return results


def show(results: Sequence[dict[str, Any]], verdicts: dict[str, dict[str, Any]], layers: int) -> None:
    """Print means over seeds."""
    print(f"{'moment':>7}{'block':>7}  {'predictor':<22}{'cosine':>8}{'correlation':>13}")
    for moment in verdicts:
        rows = [row for result in results if str(result["moment"]) == moment for row in result["rows"]]
        for layer in range(1, layers + 1):
            for name in MAPS:
                same = [row for row in rows if row["block"] == layer and row["predictor"] == name]
                means = [statistics.fmean(row[key] for row in same) for key in ("cosine", "correlation")]
                print(f"{float(moment):>7.0%}{layer:>7}  {name:<22}{means[0]:>8.3f}{means[1]:>13.3f}")
    for moment, found in verdicts.items():
        gains = ", ".join(
            f"{gain:.3f}x ({found['gain_together'][charge]:.3f}x together) charged {charge}"
            for charge, gain in found["gain_at_most"].items()
        )
        print(
            f"after {float(moment):.0%}: {found['blocks_above']} of {layers} blocks "
            f"({found['share_of_block_parameters']:.0%} of their parameters) are above {THRESHOLD:.2f}; "
            f"gain of a whole step at the most {gains}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, help="uint16 tokens, may be .xz; default: Python's own source as bytes")
    parser.add_argument("--vocab", type=int, default=4096, help="most frequent tokens that stay apart")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--judged", type=int, default=32, help="sequences")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument("--rate", type=float, help="peak learning rate; default: that of foretrain")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.layers < 2:
        parser.error("with one block there is nothing to predict; use --layers 2 or more")
    tokens, vocabulary = read_tokens(options.tokens, options.vocab)
    results = [result for seed in options.seeds for result in run(options, tokens, vocabulary, seed)]
    shape = GPT2Shape(options.layers, options.heads, options.width, options.context, vocabulary)
    verdicts = {}
    for moment in dict.fromkeys(result["moment"] for result in results):
        rows = [row for result in results if result["moment"] == moment for row in result["rows"]]
        verdicts[str(moment)] = verdict(shape, rows)
    show(results, verdicts, options.layers)
    if options.out:
        words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
        report = {
            "benchmark": "skipped backward pass",
            "command": " ".join(["python", "benchmarks/skipped_backward.py", *words]),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "environment": environment.describe(options.device),
            "threshold": round(THRESHOLD, 4),
            "verdicts": verdicts,
            "results": results,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
