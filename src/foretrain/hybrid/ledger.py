"""What a run counts, and what its audits say together: time saved in percent, with an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from foretrain.events import Phase
from foretrain.health.act import Kind
from foretrain.persist.stateful import Stateful

_TWO_SIDED_95 = 0.975
"""Quantile of Student's distribution for an interval of 95 %. This is mathematics."""
_LEAST_SHARE = 0.05
"""Share of full steps in a run below which nothing is said of time saved, where leaps were its steps. Chosen: there is
hardly a plain run to compare with, and the percentages of a few steps go to thousands."""


@dataclass
class Counts(Stateful):
    """What the summary counts."""

    saved = ("steps", "moves", "predicted_steps", "corrections", "recoveries", "rollbacks", "undone_steps")

    steps: dict[str, int] = field(default_factory=lambda: {phase.value: 0 for phase in Phase})
    """Virtual steps per phase; together `global_step`."""
    moves: dict[str, int] = field(default_factory=lambda: {"kept": 0, "shrunk": 0, "refused": 0, "rolled_back": 0})
    predicted_steps: int = 0
    """Steps ahead that all kept moves went, whatever they turned out to be worth."""
    corrections: int = 0
    """Moves that a residual correction followed on."""
    recoveries: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in Kind if kind != "continue"})
    rollbacks: int = 0
    """In an emergency; a move that is undone is none."""
    undone_steps: int = 0
    """Steps that they made necessary once more."""

    def recovered(self, kind: Kind) -> None:
        """An action of recovery is taken."""
        self.recoveries[kind.value] = self.recoveries.get(kind.value, 0) + 1

    @property
    def tried(self) -> int:
        """Moves so far."""
        return sum(self.moves.values())

    @property
    def acceptance_rate(self) -> float:
        return (self.moves["kept"] + self.moves["shrunk"] + 1) / (self.tried + 2)


@dataclass(frozen=True, slots=True)
class Audit:
    """One pair of forks from one snapshot: with the move and without it, then the same batches."""

    step: int
    horizon: int
    loss_with: float
    loss_without: float
    gain_steps: float
    """The difference, in full steps at the run's own loss slope."""
    deviation_steps: float
    """Its standard error, from the probed batches."""


@dataclass
class Ledger(Stateful):
    """All audits and all moves of a run."""

    saved = ("audits", "exact_moves", "unaudited_moves", "cost")

    audits: list[Audit] = field(default_factory=list)
    exact_moves: int = 0
    """Moves that were kept because they lowered an exact loss, without an audit."""
    unaudited_moves: int = 0
    """Moves that were kept on the evidence of earlier audits."""
    cost: float = 0.0
    """Full steps that probes, audits and undone steps have cost."""

    def gain(self, full_steps: float) -> dict[str, Any]:
        """`audit` of the summary: percent of the time to this loss that prediction saved, all its costs charged.

        full_steps: what the run did besides, in full steps.
        """
        audited = [audit.gain_steps for audit in self.audits]
        spent = full_steps + self.cost
        result: dict[str, Any] = {"gain_percent": None, "low": None, "high": None, "n": len(audited)}
        result["exact_moves"] = self.exact_moves
        result["cost_percent"] = round(100 * self.cost / spent, 2) if spent > 0 else 0.0
        if not audited or (self.exact_moves and full_steps < _LEAST_SHARE * spent):
            return result
        # A run goes on from the better fork. That its look was better proves nothing by itself, so every kept move
        # counts what moves gain on average, the lost ones included.
        kept = sum(gain > 0 for gain in audited) + self.unaudited_moves + self.exact_moves
        total = kept * math.fsum(audited) / len(audited)
        half = kept * self._half_width(audited)
        plain = max(1e-9, full_steps)
        percents = [
            round(100 * (gain - self.cost) / (plain + max(0.0, gain)), 2)
            for gain in (total, total - half, total + half)
        ]
        result["gain_percent"] = percents[0]
        if len(audited) > 1:  # the interval of a single measurement is the whole line
            result["low"], result["high"] = percents[1:]
        return result

    @staticmethod
    def _half_width(gains: list[float]) -> float:
        count = len(gains)
        if count < 2:
            return 0.0
        mean = math.fsum(gains) / count
        deviation = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (count - 1))
        from scipy import special  # here, as most runs have no two audits

        student = float(special.stdtrit(count - 1, _TWO_SIDED_95))
        return student * deviation / math.sqrt(count)

    def sentence(self, full_steps: float, unmeasured: str = "prediction was never tried") -> str:
        """The figure in words; never more than was measured. unmeasured: what is said where nothing was."""
        gain = self.gain(full_steps)
        cost = f"it cost {gain['cost_percent']:.1f} % of the time"
        if gain["gain_percent"] is None and self.exact_moves:
            known = "too few full steps to compare with" if gain["n"] else "not audited in time"
            return f"{self.in_words()}, {known}; leaps took {gain['cost_percent']:.1f} % of the time"
        if gain["gain_percent"] is None:
            return f"{unmeasured}; {cost}" if self.cost > 0 else unmeasured
        count = f"{gain['n']} audit" + ("" if gain["n"] == 1 else "s")
        if gain["exact_moves"]:
            count += f" for {gain['exact_moves']} further moves that lowered the exact loss"
        percent, low, high = gain["gain_percent"], gain["low"], gain["high"]
        interval = f"95 % interval [{low:.1f}, {high:.1f}], {count}" if low is not None else f"{count}, no interval"
        if low is not None and low > 0:
            return f"prediction saved {percent:.1f} % of the time to this loss, {interval}"
        return f"prediction is not shown to pay ({percent:.1f} %, {interval}); {cost}"

    def in_words(self) -> str:
        """Say how many moves were kept that need no audit."""
        moves = f"{self.exact_moves} move" + (" was" if self.exact_moves == 1 else "s were")
        return f"{moves} kept for lowering the loss by which moves are judged"
