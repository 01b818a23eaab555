"""The hot paths as benchmarks: each a setup that returns a call to be timed.

`worker.py` loads this file by its path, so that it can time another version of foretrain as well. So it imports what it
times inside the setups, and a benchmark that the other version does not have fails alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

HORIZONS = (1, 5, 10, 15, 25, 50, 75)
PREDICTORS = ("linear", "rssm")
_WINDOW = 10
_GROUPS = 52
"""Groups of weights of a 12-layer GPT, about."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    group: str
    """Benchmarks of one group are timed in one process: they share a setup that takes long."""
    description: str
    setup: Callable[[str], Call]
    """Device -> what is timed."""
    per_call: int = 1
    """Times that one call does what the benchmark is about."""


# --- predictors ------------------------------------------------------------------------------------------------------


class _Motion:
    """A drifting, noisy run: what a trainer would report at the end of each window."""

    def __init__(self) -> None:
        import numpy as np

        self.random = np.random.default_rng(0)
        self.past: list[Any] = []

    def next(self) -> tuple[Any, list[Any]]:
        import numpy as np

        from foretrain.motion.predictors.base import Followed, Situation
        from foretrain.motion.records import HORIZONS_IN_WINDOWS

        mix = self.random.normal(size=(_GROUPS, 4, 40)) + 0.5
        loss = 3.0 * 0.99 ** len(self.past) + 0.01 * float(self.random.normal())
        gram = mix @ mix.transpose(0, 2, 1) / 40
        now = Situation(self.random.normal(size=64), gram, _WINDOW, loss, (len(self.past) + 1) * _WINDOW)
        followed = []
        for horizon in HORIZONS_IN_WINDOWS:
            begin = len(self.past) - horizon
            if begin >= 0 and (horizon == 1 or begin % 8 == 0):
                before = self.past[begin]
                dots = 0.3 * horizon * before.gram[:, 1] + 0.1 * self.random.normal(size=(_GROUPS, 4))
                square = np.full(_GROUPS, 0.5 * horizon * horizon + horizon)
                followed.append(Followed(before, horizon * _WINDOW, dots, square, loss))
        self.past.append(now)
        return now, followed


def _predictor(kind: str, windows: int) -> tuple[Any, _Motion]:
    from foretrain.config.schema import PredictorConfig
    from foretrain.motion.predictors.registry import build

    config = PredictorConfig.model_validate({"type": kind})
    predictor, motion = build(config, seed=0), _Motion()
    for _ in range(windows):
        predictor.observe(*motion.next())
    return predictor, motion


def _forecast(kind: str, horizon: int, device: str) -> Call:
    import numpy as np

    from foretrain.motion.records import HORIZONS_IN_WINDOWS

    predictor, motion = _predictor(kind, 40)
    if hasattr(predictor, "_shares"):  # the corrections count also if they were of no use on this motion
        predictor._shares = np.ones(len(HORIZONS_IN_WINDOWS))
    now, horizons = motion.past[-1], [horizon]
    return lambda: predictor.forecast(now, horizons)


_OBSERVED = 16
"""Windows per call: learning is spread unevenly over windows."""


def _observe(kind: str, device: str) -> Call:
    predictor, motion = _predictor(kind, 0)
    windows = itertools.cycle([motion.next() for _ in range(16 * _OBSERVED)])

    def call() -> None:
        for _ in range(_OBSERVED):
            predictor.observe(*next(windows))

    for _ in range(3):  # so that what is timed is no longer the young predictor
        call()
    return call


def _encode(device: str) -> Call:
    from foretrain.motion.losses import WindowLosses
    from foretrain.motion.records import ForecastRecord, PhaseRecord, WindowRecord
    from foretrain.motion.state import StateEncoder

    encoder, steps = StateEncoder(_WINDOW, WindowLosses()), itertools.count(_WINDOW, _WINDOW)
    losses, norms = tuple(3 - 0.01 * n for n in range(_WINDOW)), tuple(1 + 0.1 * n for n in range(_WINDOW))
    phase = PhaseRecord("full", 20, 2, 40)
    forecast = ForecastRecord((0.5,) * 5, (0.5,) * 5, (0.01,) * 5, 0.5, 0.5)

    def call() -> object:
        rest = (20.0, 0.1, (0.5, 0.5, 0.5, 0.5), 2.0, 1e-5, 1e-3, 0.2, 1e-4, 1e-3, 1e-3, (0.9, 0.5))
        window = WindowRecord(next(steps), losses, norms, 1e-3, 1.0, 0.5, *rest)
        encoder.losses.add(window.losses)
        return encoder.encode(window, forecast, phase)

    return call


def _confidence_estimate(device: str) -> Call:
    confidence, features = _confidence()
    return lambda: confidence.estimate(features)


def _confidence_learn(device: str) -> Call:
    confidence, features = _confidence()
    kept = itertools.cycle((True, False, True))
    return lambda: confidence.learn(features, next(kept))


def _confidence() -> tuple[Any, Any]:
    from foretrain.motion.confidence import Confidence, ConfidenceFeatures

    confidence = Confidence()
    for number in range(200):
        confidence.learn(ConfidenceFeatures(0.3 + 0.002 * number, 0.8, 0.1, 0.1), number % 3 > 0)
    return confidence, ConfidenceFeatures(0.4, 0.7, 0.1, 0.2)


def _score_history(device: str) -> Call:
    from foretrain.motion.quality import Quality

    predictor, motion = _predictor("linear", 40)
    quality, before = Quality(_WINDOW), motion.past[-1]
    forecast = predictor.forecast(before, [_WINDOW])
    followed = next(one for one in motion.next()[1] if one.horizon == _WINDOW)
    return lambda: quality.add(followed, forecast)


def _loss_history(device: str) -> Call:
    from foretrain.health.baseline import LossBaseline

    baseline = LossBaseline()
    losses = itertools.cycle([3 + 0.01 * ((37 * number) % 17) for number in range(101)])
    for _ in range(300):
        baseline.update(next(losses), 6.0)
    return lambda: baseline.update(next(losses), 6.0)


# --- weights ---------------------------------------------------------------------------------------------------------


def _trainer(device: str, **settings: Any) -> tuple[Any, Any]:
    """Make a trainer of a small GPT (0.4M parameters) and a batch of 8 x 64 tokens."""
    import torch

    from foretrain.config import from_mapping
    from foretrain.models import gpt2
    from foretrain.trainer import HybridTrainer

    model = {"model.layers": 2, "model.heads": 4, "model.width": 128, "model.context": 64, "model.vocab_size": 256}
    fixed = {"device": device, "batch_size": 8, "max_steps": 10**9, "schedule.type": "constant"}
    config = from_mapping({**model, **fixed, **settings})
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, 65), device=device)
    trainer = HybridTrainer(gpt2.build(config.model, 0), config=config)
    return trainer, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _full_step(device: str) -> Call:
    trainer, batch = _trainer(device, **{"hybrid.mode": "off"})

    def call() -> None:
        trainer.step(batch)
        if trainer.global_step % 100 == 0:
            trainer.engine.meter.read()

    return call


def _watched_window(device: str) -> Call:
    trainer, batch = _trainer(device, **{"hybrid.warmup_steps": 10**8})

    def call() -> None:
        for _ in range(_WINDOW):
            trainer.step(batch)
        trainer.engine.meter.read()

    return call


def _probe(device: str) -> Call:
    trainer, batch = _trainer(device, **{"hybrid.mode": "off"})
    trainer.step(batch)
    return lambda: trainer.engine.forward.probe(batch)


def _snapshot(device: str) -> Call:
    from foretrain.persist.codec import snapshot

    trainer, batch = _trainer(device, **{"hybrid.mode": "off"})
    trainer.step(batch)
    memory = snapshot(trainer.state_dict())
    return lambda: snapshot(trainer.state_dict(), into=memory)


def _optimizer_step(kind: str, device: str) -> Call:
    import torch

    trainer, _ = _trainer(device, **{"hybrid.mode": "off", "optimizer.type": kind})
    for parameter in trainer.engine.full_step.parameters:
        parameter.grad = torch.randn_like(parameter)
    step: Call = trainer.optimizer.step
    return step


def _parameters(device: str) -> list[Any]:
    trainer, _ = _trainer(device, **{"hybrid.mode": "off"})
    return [parameter.detach() for parameter in trainer.engine.full_step.parameters]


def _trajectory(device: str) -> tuple[Any, Call]:
    """Make a trajectory, and a call that moves the weights and closes a window."""
    import torch

    from foretrain.motion.trajectory import Trajectory

    weights = _parameters(device)
    trajectory = Trajectory(weights, window=_WINDOW)
    steps = [1e-3 * torch.randn_like(weight) for weight in weights]
    signs = itertools.cycle((1.0, 1.0, -1.0, -1.0))

    def call() -> object:
        trajectory.steps = _WINDOW - 1
        trajectory.before_step()
        # Without motion the means would fade into denormal numbers, which are slow.
        torch._foreach_add_(weights, steps, alpha=next(signs))
        return trajectory.close()

    for _ in range(8):
        call()
    return trajectory, call


def _close_window(device: str) -> Call:
    return _trajectory(device)[1]


def _move(device: str) -> Call:
    import numpy as np

    trajectory, _ = _trajectory(device)
    there = np.full((len(trajectory.groups), len(trajectory.basis)), 0.01)
    coefficients = itertools.cycle((there, -there))
    return lambda: trajectory.place(None, trajectory.displacement(next(coefficients)))


def _look_ahead(method: str, device: str) -> Call:
    import torch

    from foretrain.engine.step import StepOutput
    from foretrain.hybrid.moves.lookahead import LookAhead

    weights = _parameters(device)
    ahead = LookAhead(weights, beta=1.0, gamma=0.9)
    for average, weight in zip(ahead.m, weights, strict=True):
        average.copy_(weight).mul_(1e-4)
    ahead.before_step()
    output = StepOutput(*torch.zeros(3).unbind())
    return ahead.before_step if method == "before" else partial(ahead.after_step, output)


# --- serving ---------------------------------------------------------------------------------------------------------


def _small_gpt(device: str) -> Any:
    import torch

    from foretrain.models.gpt2 import GPT2, GPT2Shape

    model = GPT2(GPT2Shape(2, 4, 128, 256, 257)).to(torch.device(device))
    model.eval()
    return model


def _registry(device: str) -> tuple[Any, Any]:
    """Make two adapters of rank 8 on a small GPT."""
    from foretrain.models import lora
    from foretrain.models.adapter_files import adapter_of
    from foretrain.serve.adapters import AdapterRegistry

    other = _small_gpt(device)
    lora.attach(other, lora.LoraSettings(rank=8), seed=1)
    registry, adapter = AdapterRegistry(_small_gpt(device), capacity=3), adapter_of(other)
    for name in ("one", "other"):
        registry.load(name, adapter)
    return registry, adapter


def _adapter_load(device: str) -> Call:
    registry, adapter = _registry(device)

    def call() -> None:
        registry.load("third", adapter)
        registry.unload("third")

    return call


def _adapter_switch(device: str) -> Call:
    registry, _ = _registry(device)
    names = itertools.cycle(("one", "other"))
    return lambda: registry.activate(next(names))


_STREAMED = 32


def _stream(device: str) -> Call:
    from foretrain.data.tokenizers import ByteTokenizer
    from foretrain.serve.generate import TextGenerator
    from foretrain.serve.sampling import Sampling

    generator = TextGenerator(_small_gpt(device), ByteTokenizer())
    sampling = Sampling(max_tokens=_STREAMED, temperature=0.0)

    def call() -> None:
        for _ in generator.stream("How long does a token take?", sampling):
            pass

    return call


# --- all of them -----------------------------------------------------------------------------------------------------


def _all() -> list[Benchmark]:
    forecasts = [
        Benchmark(
            f"forecast {kind} {horizon}",
            f"forecast {kind}",
            f"{kind}: forecast {horizon} steps ahead, {_GROUPS} groups",
            partial(_forecast, kind, horizon),
        )
        for kind in PREDICTORS
        for horizon in HORIZONS
    ]
    observing = [
        Benchmark(
            f"observe {kind}", f"observe {kind}", f"{kind}: learn from a window", partial(_observe, kind), _OBSERVED
        )
        for kind in PREDICTORS
    ]
    host, weights, training, serving = "host", "weights", "training", "serving"
    others = [
        Benchmark("state encode", host, "the 64 numbers of the training state; aim: 100 µs", _encode),
        Benchmark(
            "confidence estimate", host, "probability that a move will be kept; aim: 10 µs", _confidence_estimate
        ),
        Benchmark("confidence learn", host, "take in an outcome, 200 remembered", _confidence_learn),
        Benchmark("history score", host, "score a forecast against what followed", _score_history),
        Benchmark("history loss", host, "take a loss into the guard's baseline", _loss_history),
        Benchmark("displacement close", weights, "close a window: dot products, basis; 0.4M weights", _close_window),
        Benchmark("displacement move", weights, "move all weights by basis x coefficients", _move),
        Benchmark("look-ahead before", weights, "move ahead before a step", partial(_look_ahead, "before")),
        Benchmark("look-ahead after", weights, "update the average motion", partial(_look_ahead, "after")),
        Benchmark("adamw step", weights, "AdamW's update alone", partial(_optimizer_step, "adamw")),
        Benchmark("muon step", weights, "Muon's update alone", partial(_optimizer_step, "muon")),
        Benchmark("full step", training, "plain full step, small GPT, 8 x 64 tokens", _full_step),
        Benchmark("watched step", training, "full step with prediction watching", _watched_window, _WINDOW),
        Benchmark("probe", training, "forward pass that judges a move", _probe),
        Benchmark("snapshot", training, "copy of the whole state into memory in use", _snapshot),
        Benchmark("adapter load", serving, "load and unload an adapter, rank 8, 8 layers", _adapter_load),
        Benchmark("adapter switch", serving, "activate another resident adapter", _adapter_switch),
        Benchmark("stream token", serving, f"a new token of a stream of {_STREAMED}", _stream, _STREAMED),
    ]
    return [*forecasts, *observing, *others]


BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _all()}
