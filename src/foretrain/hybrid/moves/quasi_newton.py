"""A chain of quasi-Newton leaps, for losses that are exact: each goes to where the gradient should vanish, takes the
next gradient there, and is judged by the loss that comes with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretrain.engine.engine import Engine
from foretrain.engine.hooks import StepHook
from foretrain.engine.optim.moments import read_moment
from foretrain.engine.step import StepOutput
from foretrain.hybrid.moves.chained import ChainedLeaps
from foretrain.hybrid.moves.obstacles import obstacles
from foretrain.hybrid.moves.secant import Secant
from foretrain.motion.losses import WindowLosses
from foretrain.motion.samples import bias_corrections
from foretrain.persist.codec import same_random_numbers
from foretrain.persist.parts import local
from foretrain.persist.stateful import entry

_EXACT = 1e-5
"""Largest relative difference of two batches' losses at the same weights that still counts as the same loss. Full
batches differ by up to 2e-7 when shuffled; 90 % of the data already by 2e-4."""
LEAST_PAIRS = 4
"""Pairs before the first leap. Chosen: fewer say too little about curvature."""
_ARMIJO = 1e-4
"""Share of the fall that the slope promises which a leap must reach. Chosen: the usual value for quasi-Newton steps
(Nocedal and Wright, Numerical Optimization)."""
_MOST_BACKTRACKS = 4
"""Shorter leaps that are tried. Chosen: each is at most half as long, so the last is a sixteenth or less."""
_REACH = 10.0
"""A leap goes no further than this many times the longest step that its pairs were taken from. Chosen: the curvature
is not known further away."""
_FIRST_LENGTH = 512
"""Leaps of the first chain at the most. Chosen: every leap is judged by itself, so it need not be short."""
_SHORTEST_LENGTH = 4
"""Leaps before a chain is compared with the optimizer's own steps. Chosen: fewer say too little."""
_FADE = 0.7
"""Share that the pace of a chain keeps with each leap. Chosen: about the last three leaps count."""


class QuasiNewton(StepHook, ChainedLeaps):
    """Leaps, their length and their success. `length` adapts to how they do beside the optimizer's own steps."""

    saved = (
        *("length", "loss", "leaps", "start_loss", "rate", "cost", "returned", "lowest", "exact", "lowest_held_out"),
        *("stopped", "_last"),
    )
    name = "quasi-Newton"
    exact: bool | None = None
    """Whether two batches gave the same loss at the same weights when they were last compared."""
    _last: Tensor | None

    def __init__(self, engine: Engine, pairs: int, memory_mb: float, longest: int) -> None:
        self.engine = engine
        self.parameters = engine.full_step.parameters
        self._most_pairs = pairs
        self._memory_mb = memory_mb
        self.cover()
        self.longest = longest
        self.length = min(_FIRST_LENGTH, longest)
        self.loss = math.nan
        """At the point of the last gradient."""
        self.leaps = 0
        self.start_loss = math.nan
        self.rate = math.nan
        """Fading fall of the logarithm of the loss per full step, in this chain."""
        self.cost = 0.0
        self.returned = False
        """This chain began at the end of an earlier one, because the optimizer's own steps had led uphill since."""
        self.lowest = math.nan
        """Loss at the marked point: the lowest end of a chain so far, by the held-out loss where there is one."""
        self.lowest_held_out = math.nan
        """Held-out loss there."""
        self.stopped = False
        """It is to end with its next leap, whatever that brings."""
        self.exact = None

    def cover(self) -> None:
        """Others are trained: pairs and points of before are forgotten."""
        elements = sum(p.numel() for p in self.parameters)
        most = self._most_pairs
        self.pairs = min(most, int(self._memory_mb * 2**20 / (8 * elements)) if elements else 0)
        self.obstacles = obstacles(self.engine, self.pairs, elements)
        """What keeps leaps off, each with what to set."""
        self.possible = not self.obstacles
        self.secant: Secant | None = None
        """Made when it is first needed: most runs are noisy and never do."""
        self._last = None
        self.lowest = self.lowest_held_out = math.nan

    @property
    def parts(self) -> list[Tensor]:
        """The weights as far as this process holds them."""
        return [local(p) for p in self.parameters]

    # --- full steps of the optimizer ---------------------------------------------------------------------------------

    wants_gradients = True

    def before_step(self) -> None:
        if self.secant is None:
            self.secant = Secant(self.parameters, self.pairs, _REACH, self.engine.world)
        self.secant.at()

    def gradients_ready(self) -> None:
        if self.secant is not None:
            self.secant.gradient_known([p.grad for p in self.parameters])

    def after_step(self, output: StepOutput) -> None:
        self._last = output.loss

    def forget(self) -> None:
        """The loss is too noisy for pairs, for now at least. A marked point stays: it is compared before it is used."""
        if self.secant is not None:
            self.secant.forget()
        self._last = None

    @property
    def ready(self) -> bool:
        return self.secant is not None and len(self.secant.order) >= LEAST_PAIRS and self._last is not None

    @property
    def marked(self) -> bool:
        """There was a chain, and there is a point of it to come back to."""
        return self.secant is not None and self.secant.mark is not None

    # --- leaps -------------------------------------------------------------------------------------------------------

    def compare(self, batch: Any) -> None:
        """Find out whether another batch gives the same loss at the same weights, with one forward pass."""
        if self.secant is None or self._last is None:
            return
        with self.at_start(), same_random_numbers():
            self.exact = same_loss(self.engine.probe(batch), self._number(self._last))

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """The weights of the last gradient, where a chain begins, inside the block."""
        now = [p.clone() for p in self.parts]
        if self.secant is not None:
            self.secant.place()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parts, now)

    def begin(self, batch: Any) -> bool:
        """Whether another batch gives the same loss at the same weights. Costs one forward pass, or two.

        The chain begins at the point of the last gradient, or at the end of an earlier chain where that was lower.
        """
        if self.secant is None or self._last is None:
            return False
        secant = self.secant
        self.loss = self.start_loss = self._number(self._last)
        self.leaps, self.cost, self.rate, self.returned, self.stopped = 0, 0.0, math.nan, False, False
        with self.at_start(), same_random_numbers():
            self.exact = same_loss(self.engine.probe(batch), self.loss)
            if self.exact and self._probe_mark(batch) < self.loss and secant.mark is not None:
                secant.go_to(secant.mark)
                self.loss, self.start_loss, self.returned = self.lowest, self.lowest, True
        return self.exact

    def _probe_mark(self, batch: Any) -> float:
        """Loss at the marked point; nan if there is none, or it is another by now: then the mark is of no use any more.

        The weights stay there.
        """
        if self.secant is None or self.secant.mark is None or not self.lowest < math.inf:
            return math.nan
        self._go_to_mark(self.secant)
        loss = self.engine.probe(batch)
        if same_loss(loss, self.lowest):
            return loss
        self.secant.mark, self.lowest, self.lowest_held_out = None, math.nan, math.nan
        return math.nan

    @torch.no_grad()
    def _go_to_mark(self, secant: Secant) -> None:
        if secant.mark is not None:
            torch._foreach_copy_(secant.parameters, secant.layout.views(secant.mark[0]))

    def finish(self, batch: Any, held_out: Callable[[], float] | None = None) -> tuple[float, float] | None:
        """The end of a run: at the lowest point that is known. held_out: measures the held-out loss of the
        weights as they are, if it is to judge.

        Returns what the judging loss was where the run came to, and what it is where it goes back to; None if it stays.
        """
        if self.secant is None or self.secant.mark is None:
            return None
        now = [p.clone() for p in self.parts]
        judge = held_out or partial(self.engine.probe, batch)
        here = judge()
        self._go_to_mark(self.secant)
        there = judge()
        if math.isnan(there) or there >= here:  # false where the run ended at no number
            with torch.no_grad():
                torch._foreach_copy_(self.parts, now)
            return None
        return here, there

    def leap(self, batch: Any) -> StepOutput | None:
        """One leap and the gradient there; None when no length of it lowers the loss: the optimizer's step stands."""
        secant = self.secant
        if secant is None:
            return None
        engine, before = self.engine, [p.clone() for p in self.parts]
        direction, slope = secant.leap(self._scales(secant))
        share, probes, loss = self._accept(batch, direction, slope)
        if share == 0:
            with torch.no_grad():
                torch._foreach_copy_(self.parts, before)
            self.cost += 1 + probes / 3
            return None
        secant.at()
        secant.gradient_known([p.grad for p in self.parameters])
        output = engine.update(loss)
        secant.place()  # the optimizer has learned from the gradient; its own step is not wanted
        engine.count_step(batch, output)
        cost, new = 1 + probes / 3, self._number(loss)
        fall = _fall(self.loss, new) / cost
        self.rate = fall if math.isnan(self.rate) else _FADE * self.rate + (1 - _FADE) * fall
        self.loss, self._last = new, output.loss
        self.cost += cost
        self.leaps += 1
        return output

    def _accept(self, batch: Any, direction: Tensor, slope: float) -> tuple[float, float, Tensor]:
        """Share of the direction that lowers the loss enough (0: none), probes in forward passes, and the loss there.

        The gradient at the whole leap is taken at once: nearly always it is accepted, and its loss is the probe.
        """
        secant, engine = self.secant, self.engine
        nothing = torch.tensor(math.nan)
        if secant is None or not slope < 0:
            return 0.0, 0, nothing
        secant.place(direction, 1.0)
        loss = engine.gradient(batch)
        value, share, probes = self._number(loss), 1.0, 0
        if value <= self.loss + _ARMIJO * slope:
            return 1.0, 0, loss
        engine.progress.backward_passes += 1  # this gradient is of no use
        engine.progress.probe_tokens += engine.count(batch)
        wasted = 3
        for _ in range(_MOST_BACKTRACKS):
            bend = value - self.loss - slope * share
            best = -slope * share * share / (2 * bend) if math.isfinite(bend) and bend > 0 else 0.1 * share
            share = min(max(best, 0.1 * share), 0.5 * share)
            secant.place(direction, share)
            value = engine.probe(batch)
            probes += 1
            if value <= self.loss + _ARMIJO * share * slope:
                return share, probes + wasted, engine.gradient(batch)
        return 0.0, probes + wasted, nothing

    def _number(self, loss: Tensor) -> float:
        self.engine.world.catch_up()
        return self.engine.world.to_host(loss)[0]

    def _scales(self, secant: Secant) -> Tensor | None:
        """The optimizer's own scale per weight, where it has one: it makes the first guess of the curvature."""
        states = [self.engine.optimizer.state.get(p, {}) for p in self.parameters]
        moments = [read_moment(state, "exp_avg_sq") for state in states]
        found = states[0].get("step", 1) if states else 1
        step = self._number(found) if isinstance(found, Tensor) else float(found)
        _, correction = bias_corrections(self.engine.optimizer, max(1, int(step)))
        return secant.scales(moments, correction, 1e-8)

    def over(self, slope: WindowLosses) -> bool:
        """Long enough, or no better than the optimizer's own steps."""
        whole = _fall(self.start_loss, self.loss) / max(self.cost, 1.0)
        slow = self.leaps >= _SHORTEST_LENGTH and not (self.rate > self._usual(slope) or whole > self._usual(slope))
        return self.leaps >= self.length or slow or self.stopped

    def note_best(self) -> None:
        if self.secant is not None:
            self.secant.best = self.secant.point()

    def go_back(self, leaps: int, loss: float) -> None:
        """To the point that was remembered as the best, where the loss was this."""
        if self.secant is not None and self.secant.best is not None:
            self.secant.go_to(self.secant.best)
            self.leaps, self.loss = leaps, loss
            self._last = torch.full((), loss, device=self.engine.device)

    def end(self, slope: WindowLosses, refused: bool, held_out: float | None = None) -> None:
        """Longer chains while leaps beat the optimizer's own steps, shorter ones otherwise. held_out: the held-out loss
        at the end, if it judges."""
        if self.secant is not None and (self.leaps or held_out is not None):
            here, lowest = (self.loss, self.lowest) if held_out is None else (held_out, self.lowest_held_out)
            if not here >= lowest:
                self.secant.mark = self.secant.point()
                self.lowest, self.lowest_held_out = self.loss, math.nan if held_out is None else held_out
            self.secant.best = None
        fall = _fall(self.start_loss, self.loss)
        good = self.cost > 0 and fall / self.cost > self._usual(slope) and not refused
        self.length = min(2 * self.length, self.longest) if good else max(self.length // 2, _SHORTEST_LENGTH)

    def _usual(self, slope: WindowLosses) -> float:
        """Fall per full step of the optimizer alone, in the window before; 0 where it only made up for its own rise."""
        if self.returned:
            return 0.0
        usual = slope.last_log_fall if self.loss > 0 else slope.last_fall
        return max(usual, 0.0) if math.isfinite(usual) else 0.0

    def return_to_end(self) -> None:
        """Put the weights back to where the last leap ended."""
        if self.secant is not None:
            self.secant.place()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides about later leaps; the pairs as well, once there are any."""
        return super().state_dict() | {"secant": self.secant.state_dict() if self.secant is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back. Pairs are forgotten where settings make leaps impossible now."""
        pairs = entry(state, "secant", "QuasiNewton")
        super().load_state_dict({name: value for name, value in state.items() if name != "secant"})
        self.length = min(self.length, self.longest)
        if self._last is not None:
            self._last = self._last.to(self.engine.device)
        if not self.possible or pairs is None:
            self.secant = None
            return
        self.secant = self.secant or Secant(self.parameters, self.pairs, _REACH, self.engine.world)
        self.secant.load_state_dict(pairs)


def same_loss(loss: float, other: float) -> bool:
    """Whether two losses differ by rounding only."""
    return abs(loss - other) <= _EXACT * max(abs(other), 1e-30)


def _fall(before: float, after: float) -> float:
    """The fall of the logarithm of a loss, or of the loss itself where that is not positive."""
    return math.log(before / after) if before > 0 and after > 0 else before - after
