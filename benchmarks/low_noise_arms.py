"""The arms of `low_noise.py`: runs of one problem and seed by foretrain and by its peers, each with its curve."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from broyden import Broyden, Search, Variant
from foretrain.config import from_mapping
from foretrain.trainer import HybridTrainer
from low_noise_problems import Problem, Settings
from soap import Soap

SLACK = 1 + 1e-5
"""Runs that end at the floor of float32 must be able to meet the target again."""
COSINE = {"schedule.type": "cosine", "schedule.warmup_steps": 0}
Setting = dict[str, Any]
"""What one try of a peer is run with."""


def tries(**values: tuple[Any, ...]) -> tuple[Setting, ...]:
    """All combinations."""
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))


# --- what is written down about a run --------------------------------------------------------------------------------


@dataclass
class Curve:
    """A run: when it had which loss."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)

    @property
    def final(self) -> float:
        """At the weights it ended with."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf

    def reach(self, target: float) -> int | None:
        return next((index for index, loss in enumerate(self.losses) if loss <= target), None)

    def within(self, seconds: float) -> float:
        """Lowest loss until then."""
        known = [loss for at, loss in zip(self.seconds, self.losses, strict=True) if at <= seconds]
        return min((loss for loss in known if math.isfinite(loss)), default=math.inf)

    def outcome(self, target: float, **more: Any) -> dict[str, Any]:
        at = self.reach(target)
        found = {"seconds": None, "gradients": self.gradients[-1], "loss": self.final}
        if at is not None:
            found |= {"seconds": self.seconds[at], "gradients": self.gradients[at]}
        return {**found, "total_seconds": self.seconds[-1], **more}


class Watch:
    """A clock that stops while the loss is judged."""

    def __init__(self, problem: Problem, settings: Settings, model: nn.Module, every: int = 0) -> None:
        """every: steps between judgements; 0: the losses of steps are taken as they come."""
        self.problem, self.settings, self.model = problem, settings, model
        self.every = every or (0 if problem.exact and settings.device == "cpu" else 10)
        self.curve, self.steps, self.gradients = Curve(), 0, 0
        self.clock = time.process_time if settings.clock == "cpu" else time.perf_counter
        self.away = 0.0
        self.started = self.now()

    def now(self) -> float:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        return self.clock()

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started - self.away

    def note(self, loss: float, gradients: int) -> None:
        """loss: of the step; it was read, so that the device is done with it."""
        self.steps, self.gradients = self.steps + 1, gradients
        if not self.every:
            self._add(self.elapsed, loss)
        elif self.steps % self.every == 0:
            self._judge()

    def _judge(self) -> None:
        before = self.now()
        at = self.elapsed
        self._add(at, self.problem.judge(self.model))
        self.away += self.now() - before

    def _add(self, at: float, loss: float) -> None:
        self.curve.seconds.append(at)
        self.curve.losses.append(loss)
        self.curve.gradients.append(self.gradients)

    def met(self, target: float) -> bool:
        return bool(self.curve.losses) and self.curve.losses[-1] <= target

    def end(self) -> Curve:
        self._judge()
        return self.curve


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    problem: Problem
    settings: Settings
    seed: int
    steps: int
    per_step: dict[str, float] = field(default_factory=dict)
    """Seconds, by optimizer, once they were measured."""

    def train(
        self, changes: Setting, steps: int, seconds: float = 600.0, target: float = -1.0, judged: bool = False
    ) -> Curve:
        """By foretrain: plain or hybrid. Ends after so many steps or seconds, or at the target.

        judged: the loss of all data is computed after every step, outside the clock.
        """
        kind = changes.get("optimizer.type", "adam")
        values = {
            "max_steps": steps,
            "device": self.settings.device,
            "seed": self.seed,
            "precision.type": "fp32",
            "engine.compile": False,  # it cannot take derivatives of derivatives
            "optimizer.type": "adam",
            "optimizer.weight_decay": 0.0,
            "optimizer.beta2": 0.999,
            "optimizer.gradient_clip_norm": 0.0,
            "optimizer.muon_scale": "original",
            "schedule.type": "constant",
            "precision.tf32": "auto" if changes.get("hybrid.mode") != "off" else True,  # peers are faster with it
            **changes,
        }
        torch.manual_seed(self.seed)
        model = self.problem.build()
        optimizer = None
        if kind == "soap":
            optimizer = Soap(model.parameters(), lr=values["optimizer.learning_rate"])
            values = {name: value for name, value in values.items() if not name.startswith("optimizer.")}
        trainer = HybridTrainer(model, optimizer, config=from_mapping(values), **self.problem.handed_in)
        watch = Watch(self.problem, self.settings, model, every=int(judged))
        position = 0
        while watch.elapsed < seconds and (trainer.global_step < steps or trainer.judging):
            loss = trainer.step(self.problem.batch(position)).loss
            position += 1
            watch.note(loss, trainer.backward_passes)
            if watch.met(target):
                break
        return watch.end()

    def hybrid(self, changes: Setting, seconds: float, target: float = -1.0) -> Curve:
        """Ended by the seconds, not by the steps."""
        return self.train(changes, 10 * self.steps, seconds, target, judged=True)

    def cosine(self, kind: str, rate: float, steps: int, seconds: float = 600.0) -> Curve:
        changes = {**COSINE, "hybrid.mode": "off", "optimizer.type": kind, "optimizer.learning_rate": rate}
        return self.train(changes, steps, seconds)

    def scheduled(self, kind: str, seconds: float, learning_rate: float, schedule_share: float) -> Curve:
        """SOAP or Muon, with a schedule that takes this share of the seconds."""
        if kind not in self.per_step:
            self.per_step[kind] = self.cosine(kind, 1e-2, steps=40).seconds[-1] / 40
        steps = max(20, int(schedule_share * seconds / self.per_step[kind]))
        return self.cosine(kind, learning_rate, steps, 1.3 * seconds)

    def lbfgs(
        self, history: int, seconds: float, learning_rate: float = 1.0, iterations: int = 20, wolfe: bool = True
    ) -> Curve:
        """Where batches differ, a new one every so many iterations."""
        torch.manual_seed(self.seed)
        model = self.problem.build()
        optimizer = torch.optim.LBFGS(
            model.parameters(),
            lr=learning_rate,
            max_iter=iterations,
            max_eval=iterations * 5 // 4,
            history_size=history,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe" if wolfe else None,
        )
        watch, position, count = Watch(self.problem, self.settings, model), 0, 0

        def closure() -> Tensor:
            nonlocal count
            optimizer.zero_grad()
            loss = self.problem.loss(model, batch)
            loss.backward()
            count += 1
            watch.note(float(loss.detach()), count)
            return loss

        while watch.elapsed < seconds and count < 8 * self.steps:
            batch, before = self.problem.batch(position), count
            position += 1
            optimizer.step(closure)
            stuck = count - before <= 2 and self.problem.exact
            if stuck or not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
                break
        return watch.end()

    def broyden(self, seconds: float, variant: Variant, scaled: bool, search: Search) -> Curve:
        """Dense quasi-Newton, all of it in fp64. Where batches differ, a new one every 20 iterations."""
        problem = self.problem.doubled()
        torch.manual_seed(self.seed)
        model = problem.build()
        parameters = list(model.parameters())
        watch, position, count = Watch(problem, self.settings, model), 0, 0

        def place(x: Tensor) -> None:
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(x, parameters)

        def evaluate(x: Tensor) -> tuple[float, Tensor]:
            nonlocal count
            place(x)
            loss = problem.loss(model, batch)
            gradient = torch.autograd.grad(loss, parameters)
            count += 1
            watch.note(float(loss.detach()), count)
            return float(loss.detach()), torch.cat([part.reshape(-1) for part in gradient])

        start = torch.nn.utils.parameters_to_vector(parameters).detach()
        method = Broyden(start, variant, scaled, search)
        lowers = True
        while lowers and watch.elapsed < seconds:
            batch = problem.batch(position)
            position += 1
            for _ in range(20):
                lowers = method.step(evaluate)
                if not lowers or watch.elapsed >= seconds:
                    break
            if not problem.exact:
                method.forget_point()
                lowers = True
        place(method.x)
        return watch.end()


# --- peers -----------------------------------------------------------------------------------------------------------

PeerName = Literal["soap", "muon", "l-bfgs 10", "l-bfgs 100", "broyden"]
ADAM_RATES = (1e-3, 3e-3, 6e-3, 1e-2, 2e-2, 3e-2, 1e-1, 3e-1)


@dataclass(frozen=True)
class Peer:
    settings: tuple[Setting, ...]
    run: Callable[..., Curve]
    """Of (bench, seconds) and a setting."""


_SCHEDULED = tries(learning_rate=(3e-3, 1e-2, 3e-2, 1e-1), schedule_share=(0.3, 1.0))
_LBFGS = (
    *tries(wolfe=(True,), learning_rate=(1.0, 0.3), iterations=(5, 20, 100)),
    *tries(wolfe=(False,), learning_rate=(1.0, 0.3, 0.1), iterations=(20,)),
)
_BROYDEN = tries(variant=("bfgs", "ssbfgs", "ssbroyden"), scaled=(False, True), search=("armijo", "wolfe"))
PEERS: dict[PeerName, Peer] = {
    "soap": Peer(_SCHEDULED, lambda bench, seconds, **setting: bench.scheduled("soap", seconds, **setting)),
    "muon": Peer(_SCHEDULED, lambda bench, seconds, **setting: bench.scheduled("muon", seconds, **setting)),
    "l-bfgs 10": Peer(_LBFGS, lambda bench, seconds, **setting: bench.lbfgs(10, seconds, **setting)),
    "l-bfgs 100": Peer(_LBFGS, lambda bench, seconds, **setting: bench.lbfgs(100, seconds, **setting)),
    "broyden": Peer(_BROYDEN, lambda bench, seconds, **setting: bench.broyden(seconds, **setting)),
}
Tuned = dict[str, list[Any]]
"""What the first seed found best, by optimizer."""


def reference(bench: Bench, tuned: Tuned) -> tuple[Curve, float]:
    """Adam with a cosine schedule at the rate that ends lowest."""
    curves = {rate: bench.cosine("adam", rate, bench.steps) for rate in tuned.get("adam", ADAM_RATES)}
    order = sorted(curves, key=lambda rate: curves[rate].final)
    tuned.setdefault("adam", order[:2])
    return curves[order[0]], order[0]


def peer(bench: Bench, name: PeerName, tuned: Tuned, target: float, seconds: float) -> dict[str, Any]:
    """All settings, or the two best that are known: the fastest to the target, and the lowest in equal seconds."""
    found: list[tuple[Setting, dict[str, Any]]] = []
    for setting in tuned.get(name, PEERS[name].settings):
        curve = PEERS[name].run(bench, seconds, **setting)
        lowest = min(curve.within(seconds), curve.final)
        found.append((setting, curve.outcome(target, equal_seconds_loss=lowest, setting=setting)))
    by_time = sorted(found, key=lambda one: (one[1]["seconds"] or math.inf, one[1]["equal_seconds_loss"]))
    by_loss = sorted(found, key=lambda one: one[1]["equal_seconds_loss"])
    best = [by_time[0][0], *(setting for setting, _ in (*by_loss, *by_time) if setting != by_time[0][0])]
    tuned.setdefault(name, best[:2])
    lowest = by_loss[0][1]
    return {
        **by_time[0][1],
        "equal_seconds_loss": lowest["equal_seconds_loss"],
        "lowest_setting": lowest["setting"],
        "tries": [outcome for _, outcome in found],
    }
