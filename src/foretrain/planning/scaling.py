"""How large a model should be for a given time: a published law of loss against size and data, set to this machine's
speed and to runs that were finished here. All of it is an estimate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from foretrain.forecast.stored import summaries
from foretrain.models.gpt2 import GPT2Shape
from foretrain.planning.parameters import parameters_of

FLOOR, SIZE_SCALE, SIZE_POWER, DATA_SCALE, DATA_POWER = 1.817, 482.0, 0.348, 2085.0, 0.366
"""Loss = floor + scale / parameters^power + scale / tokens^power: the re-fit of Chinchilla's runs (Besiroglu et al.
2024), for GPT-2-like tokens and all parameters."""
GPT2_VOCABULARY = 50257
_LEAST_TOKENS = 100_000
"""A run with fewer says nothing of others. Chosen: below, the law is far from what it was fitted to."""
_BATCH_SCALE, _BATCH_POWER = 0.58, 0.571
"""Tokens of a step by the tokens of a run (Step Law, Li et al. 2025)."""
_USED = 0.9
"""Share of the time that steps get; the rest is for evaluations and saving."""
_ASPECT = (32, 64, 128)
"""Widths per block that are looked at."""
_HEAD = 64
_DEEPEST = 48
_FEWEST_STEPS = 100
"""A model that makes fewer steps is not proposed. Chosen: no schedule has room in them."""


@dataclass(frozen=True)
class Candidate:
    """A model and a batch, and where they would end."""

    layers: int
    width: int
    heads: int
    batch_size: int
    parameters: int
    tokens: float
    steps: int
    loss: float


@dataclass(frozen=True)
class Speed:
    """Operations per second that training reaches here, where it was measured; between sizes it is interpolated."""

    measured: tuple[tuple[float, float], ...]
    """(operations per token, operations per second), in order."""

    def at(self, per_token: float) -> float:
        """Return the operations per second of a model with so many operations per token."""
        points = sorted(self.measured)
        if per_token <= points[0][0]:
            return points[0][1]
        for (low, slow), (high, fast) in pairwise(points):
            if per_token <= high:
                share = math.log(per_token / low) / math.log(high / low)
                return float(slow * (fast / slow) ** share)
        return points[-1][1]


def operations(shape: GPT2Shape, length: int) -> float:
    """Return the operations per token of a training step: six per parameter, and attention's own products."""
    return 6.0 * parameters_of(shape).elements + 12.0 * shape.layers * shape.width * length


@dataclass(frozen=True)
class LossLaw:
    """The published law, with a floor and a scale that suit a vocabulary and the runs that were finished with it."""

    floor: float = FLOOR
    scale: float = 1.0
    runs: int = 0
    """Finished runs that it was set by."""

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the expected loss of a run with so many tokens."""
        return self.floor + self.scale * reducible(parameters, tokens)


def reducible(parameters: float, tokens: float) -> float:
    """Return what the published law says above its floor."""
    return float(SIZE_SCALE / max(1.0, parameters) ** SIZE_POWER + DATA_SCALE / max(1.0, tokens) ** DATA_POWER)


def step_tokens(tokens: float) -> float:
    """Return the tokens of a step that suit a run with so many tokens."""
    return _BATCH_SCALE * float(tokens**_BATCH_POWER)


def candidate(
    shape: GPT2Shape, length: int, seconds: float, speed: Speed, law: LossLaw, batch_size: int | None = None
) -> Candidate:
    """Return where this model would end in this time. batch_size: None for the one that suits the run."""
    per_token = operations(shape, length)
    tokens = _USED * seconds * speed.at(per_token) / per_token
    rows = batch_size or max(1, 2 ** round(math.log2(max(1.0, step_tokens(tokens) / length))))
    loss = law.loss(parameters_of(shape).elements, tokens)
    steps = int(tokens / (rows * length))
    return Candidate(shape.layers, shape.width, shape.heads, rows, parameters_of(shape).elements, tokens, steps, loss)


def shapes(asked: GPT2Shape) -> Iterable[GPT2Shape]:
    """Yield models of many sizes with the vocabulary and the context of the one that was asked for."""
    for layers in range(1, _DEEPEST + 1):
        for width in sorted({max(_HEAD, round(layers * aspect / _HEAD) * _HEAD) for aspect in _ASPECT}):
            yield replace(asked, layers=layers, width=width, heads=width // _HEAD)


def best(
    asked: GPT2Shape,
    length: int,
    seconds: float,
    speed: Speed,
    law: LossLaw,
    fits: Callable[[Candidate], bool] = lambda candidate: True,
) -> Candidate | None:
    """Return the model and batch that would end lowest in this time; None where nothing fits or has enough steps."""
    made = (candidate(shape, length, seconds, speed, law) for shape in shapes(asked))
    able = [one for one in made if one.steps >= _FEWEST_STEPS]
    for one in sorted(able, key=lambda one: one.loss):
        if fits(one):
            return one
    return None


def finished_runs(folder: Path, vocabulary: int) -> list[tuple[float, float, float]]:
    """Return (parameters, tokens, final held-out loss) of the runs in this folder that trained such a model from fresh
    weights to their end, the newest first."""
    found = []
    for _, summary in summaries(folder):
        if not isinstance(summary, Mapping):
            continue
        try:
            model = summary["config"]["model"]
            if summary["reason"] != "finished" or model["vocab_size"] != vocabulary or model["weights"]:
                continue
            numbers = tuple(float(summary[name]) for name in ("parameters", "tokens", "final_val_loss"))
        except (ValueError, KeyError, TypeError):  # of another kind, or damaged
            continue
        if all(math.isfinite(number) and number > 0 for number in numbers) and numbers[1] >= _LEAST_TOKENS:
            found.append((numbers[0], numbers[1], numbers[2]))
    return found


def law_by(runs: Sequence[tuple[float, float, float]], vocabulary: int) -> LossLaw:
    """Return the law that suits finished runs of (parameters, tokens, loss): its scale by the median of them. Its floor
    is the published one, less for a smaller vocabulary: by the logarithm of its size."""
    floor = FLOOR * min(1.0, math.log(vocabulary) / math.log(GPT2_VOCABULARY))
    scales = [(loss - floor) / reducible(parameters, tokens) for parameters, tokens, loss in runs if loss > floor]
    return LossLaw(floor, statistics.median(scales), len(scales)) if scales else LossLaw(floor)
