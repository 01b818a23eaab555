"""The hybrid loop once more, naive and slow, to be read from top to bottom: it says what foretrain does, not how.

    theta    all weights as one vector          h, W     steps of a move, steps of a window
    b[0..3]  directions, displacements per window: the last step, the last window, means of 3 and of 10 windows
    c[0..3]  the forecast: in h steps the weights will be at theta + sum of c[i] b[i]
    anchor   the loss before a move             exact    all batches are the same, so the loss has no noise

Costs and worths are in full steps; a forward pass is a third. A test steps this beside `HybridTrainer`. Left out:
rollouts, chains, residual corrections, held-out data, low noise, the choice of h, trust in forecasts, audits of exact
losses, the limit of disasters, the steps that a move counts, the guard, rests for good, and what saves time or memory.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

FORWARD = 1 / 3


def hybrid(w: Any, batch_at: Callable[[int], Any], c: Tensor, s: dict[str, Any], moves: list[Any]) -> Iterator[str]:
    """Yields the phase of each step before it makes it. w: `Weights` of the test; s: settings; moves: to be filled."""
    W, h, full = s["hybrid.window_steps"], s["hybrid.max_predict_steps"], s["hybrid.full_steps"]
    gate = Gate(s["audit.time_budget"] * s["max_steps"], s["audit.steps"] + 16 * FORWARD)
    b, start, phase, steps, needed = torch.zeros(4, len(w.theta)), w.theta, "warmup", 0, full
    losses, recent, curve = list[float](), list[Any](), list[Any]()
    position = windows = watched = rest = rests = last_rest = 0

    while True:
        # --- WARMUP and FULL: full steps, watched in windows
        yield phase
        batch, before = batch_at(position), w.theta
        loss, position, steps = w.step(batch), position + 1, steps + 1
        if rest:
            rest, steps, watched, start = (rest - 1, steps, watched, start) if rest > 1 else (0, 0, 0, w.theta)
            continue
        losses, recent = [*losses, loss], [*recent, batch][-3:]
        if len(losses) < W:
            continue

        # --- the end of a window: directions, and how fast the loss falls
        windows, watched, displacement = windows + 1, watched + 1, w.theta - start
        b[0], b[1] = W * (w.theta - before), displacement
        b[2].lerp_(displacement, max(1 / 3, 1 / windows))
        b[3].lerp_(displacement, max(1 / 10, 1 / windows))
        exact = all(torch.equal(x, y) for other in recent for x, y in zip(other, recent[0], strict=True))
        curve = [*curve, (windows * W, math.fsum(losses) / W)][-12:]
        log_fall = math.log(losses[0] / losses[-1]) / (W - 1)
        start, losses = w.theta, []

        # --- a move, a rest, or just on?
        if phase == "warmup" and windows * W >= s["hybrid.warmup_steps"]:
            phase, steps = "full", 0
        if phase == "warmup" or steps < needed:
            continue
        pays, audited = gate.ask(exact)
        if not pays or not (exact or watched >= 2):  # a forecast must have met what followed
            if exact or watched >= max(2, min(last_rest, 10)):  # a cycle without a move
                steps, rests, gate.wait = 0, 0 if pays else rests + 1, max(0, gate.wait - 1)
                if not pays:  # nothing is watched for a while
                    last_rest = max(min(256, 2**rests, max(2, s["max_steps"] // (8 * W))), gate.wait * full // W)
                    rest, gate.wait = last_rest * W, max(0, gate.wait - last_rest * W // full)
            continue

        # --- PREDICT: snapshot, anchor, and a leap as far as probes allow it
        snapshot, batch, begin, leap = w.state(), batch_at(position), position, c @ b
        anchor, steps = w.loss(batch), 0
        share, landed, cost = search(w, leap, batch, anchor) if exact else (1.0, math.nan, 2 * FORWARD)
        if share == 0:
            moves.append(("refused", audited, anchor, math.nan, 0.0, cost))
            gate.settle(pays=False)
            needed = min(2 * needed, 8 * full)
            continue  # with a full step on the same batch
        yield "predict"
        w.theta, position = w.theta + share * leap, position + 1

        # --- CORRECT: full steps validate it; then it is kept or undone
        path = list[Tensor]()
        for _ in range(s["audit.steps"] if audited else s["hybrid.correct_steps"]):
            yield "correct"
            w.step(batch_at(position))
            path, position = [*path, w.theta], position + 1
        if audited:  # the same steps without the move; the run goes on at the better end
            with_move, end = w.losses_at_mean(path, [*recent, batch]), w.state()
            w.restore(snapshot)
            path = [(w.step(batch_at(begin + k)), w.theta)[1] for k in range(1, 1 + len(path))]
            without = w.losses_at_mean(path, [*recent, batch])
            fall = -np.polyfit(*np.asarray(curve).T, 1)[0]  # of the loss per full step
            worth = (without - with_move).mean() / fall if fall > 0 else 0.0
            kept, loss, cost = worth > 0, with_move.mean(), cost + len(path) + 8 * FORWARD
            if kept:
                w.restore(end)
            gate.audited(worth, cost, h)
        else:  # its loss before and after
            loss, cost = w.loss(batch), cost + FORWARD
            kept, worth = loss < anchor, math.log(anchor / landed) / log_fall if exact else 0.0
            if not kept:
                w.restore(snapshot)
                position, cost = begin, cost + len(path)
            gate.settle(pays=kept and (worth > cost or not exact))
        verdict = "rolled back" if not kept else "kept" if share >= 1 else "shrunk"
        moves.append((verdict, audited, anchor, loss, worth, cost))
        needed = full if kept else min(2 * needed, 8 * full)
        start, watched = (w.theta, 0) if kept or audited else (start, watched)


def search(w: Any, leap: Tensor, batch: Any, loss: float) -> tuple[float, float, float]:
    """Share, loss, cost: doubled while the loss falls; where it never does, the first shorter one that lowers it."""
    best, share, probes = 0.0, 1.0, 1
    while (found := w.loss(batch, w.theta + share * leap)) < loss:
        best, loss, share, probes = share, found, 2 * share, probes + 1
    for probes, share in enumerate((0.5, 0.25, 0.125, 0.0625) if not best else (), start=2):
        if (found := w.loss(batch, w.theta + share * leap)) < loss:
            return share, found, FORWARD * (1 + probes)
    return best, loss, FORWARD * (1 + probes)


class Gate:
    """Keeps account of what moves cost and were worth."""

    def __init__(self, budget: float, cost_of_audit: float) -> None:
        self.budget, self.cost_of_audit, self.spent = budget, cost_of_audit, 0.0
        self.worths: list[float] = []  # of a predicted step, one per audit
        self.since_audit = self.wait = self.failures = 0  # wait: cycles without a move

    def ask(self, exact: bool) -> tuple[bool, bool]:
        """Whether a move pays, and whether it must be audited."""
        affordable, proven = self.spent + self.cost_of_audit <= self.budget, self.least_worth() > 0
        pays = self.wait == 0 and (exact or affordable or proven)
        return pays, affordable and not exact and not (proven and self.since_audit < 8)

    def audited(self, worth: float, cost: float, h: int) -> None:
        self.worths.append(max(-1.0, min(2.0, worth / h)))
        self.spent = max(0.0, self.spent + cost - (max(0.0, self.least_worth()) * h if worth > 0 else 0.0))
        self.settle(worth > 0)
        self.since_audit = 0

    def settle(self, pays: bool) -> None:
        self.since_audit += 1
        self.wait, self.failures = (0, 0) if pays else (min(64, 2**self.failures), self.failures + 1)

    def least_worth(self) -> float:
        """Of a predicted step, with a confidence of 90 %: by audits, and a prior of 0.02 +- 0.2 that counts for two."""
        n = 2 + len(self.worths)
        mean = (2 * 0.02 + sum(self.worths)) / n
        variance = (2 * (0.2**2 + (0.02 - mean) ** 2) + sum((worth - mean) ** 2 for worth in self.worths)) / n
        return mean - 1.28 * math.sqrt(variance / n)
