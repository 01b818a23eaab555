"""What everyone learns from a judgement: counts, ledger, gate, horizons and confidence."""

from __future__ import annotations

from foretrain.events import Phase
from foretrain.hybrid.appraisal import Appraiser
from foretrain.hybrid.exact_gain import ExactGain, Point
from foretrain.hybrid.judges.judgement import Judgement, credited
from foretrain.hybrid.ledger import Counts, Ledger
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.plan import Plan
from foretrain.persist.stateful import Stateful


class Scorekeeper(Stateful):
    """Keeps the books of a run. Moves that no forecast asked for are counted, but teach nothing about forecasts."""

    saved = ("counts", "ledger", "exact", "since_move")

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser = appraiser
        self.counts = Counts()
        self.ledger = Ledger()
        self.exact = ExactGain()
        self.since_move = 0
        """Full steps."""

    def count(self, steps: int, phase: Phase) -> None:
        """Full steps, or virtual steps that a move is worth."""
        self.counts.steps[phase.value] += steps
        if phase is not Phase.PREDICT:
            self.since_move += steps

    def learn_from(self, step: int, plan: Plan, judgement: Judgement) -> None:
        """A move was judged."""
        kept, worth, cost, audit = judgement.kept, judgement.worth_steps, judgement.cost_steps, judgement.audit
        gate = self.appraiser.gate
        self.ledger.cost += cost
        self.since_move = 0
        if audit is not None:
            self.ledger.audits.append(audit)
        elif plan.low_noise:
            self.ledger.exact_moves += kept
        else:
            self.ledger.unaudited_moves += kept
        if plan.forecast is None:
            return
        self.appraiser.learn(plan.forecast, plan.horizon, kept)
        self.appraiser.reward(step, plan.horizon, worth if kept else 0.0, cost)
        if audit is not None:
            gate.audited(plan.horizon, audit.gain_steps, cost, exact=plan.low_noise)
        elif plan.low_noise and judgement.overfits:
            gate.overfitted()
        else:
            gate.moved(kept and (worth > cost or not plan.low_noise))

    def refused(self, step: int, plan: Plan, cost: float, overfits: bool = False) -> None:
        """A move was refused. overfits: it raised the held-out loss."""
        gate = self.appraiser.gate
        if plan.forecast is not None:
            self.appraiser.learn(plan.forecast, plan.horizon, kept=False)
            self.appraiser.reward(step, plan.horizon, 0.0, cost)
        self.spent(plan, cost)
        if plan.forecast is not None and overfits:
            gate.overfitted()
        elif plan.forecast is not None:
            gate.moved(False)
        self.counts.moves["refused"] += 1

    def spent(self, plan: Plan, cost: float) -> None:
        """A move cost so much and says nothing about forecasts: nobody learns from it."""
        self.ledger.cost += cost
        if plan.forecast is not None:
            self.appraiser.gate.spend(0.0 if plan.low_noise else cost)

    def kept(self, move: JudgedMove) -> None:
        self.counts.moves["shrunk" if move.share < 1 else "kept"] += 1
        self.counts.predicted_steps += move.moved

    def audited_credit(self, move: JudgedMove, judgement: Judgement) -> int:
        """Virtual steps that an audited move counts: what it gained, but one audit alone is no proof."""
        audit = judgement.audit
        if audit is None or move.plan.low_noise or move.chained:
            return 0  # what they count was known before
        gain = audit.gain_steps - audit.deviation_steps
        return credited(gain, min(self.appraiser.gate.likely_worth, 1.0) * move.moved)

    def note_exact(self, move: JudgedMove, after: float) -> None:
        """What a kept move did to a loss without noise, for the summary."""
        tools, engine = move.tools, move.tools.engine
        if tools.probes.batches or not (move.chained or self.appraiser.predictability.same_batch):
            return
        counted = move.counted
        began = engine.progress.global_step - move.steps - counted
        start = Point(move.start_loss, began, passes=tools.snapshots.taken_at)
        now = Point(after, engine.progress.global_step, engine.clock.seconds, engine.progress.backward_passes)
        steps = max(move.moved, counted) if move.chained else move.moved
        self.exact.kept(start, move.loss, now, tools.worth.slope, steps, move.leaps_name, steps - move.moved)
