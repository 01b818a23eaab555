"""Leaps between two steps of a host: made, judged on held-out examples and kept or taken back, all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from foretrain.engine.engine import Engine
from foretrain.engine.fence import OwnCodeError
from foretrain.engine.result import StepResult
from foretrain.events import Event, Phase
from foretrain.guest.engine import MadeStep
from foretrain.health.act import Action, Kind
from foretrain.health.checkup import Checkup
from foretrain.health.rescue import Rescue
from foretrain.hybrid.gate import FORWARD
from foretrain.hybrid.hybrid import Hybrid
from foretrain.hybrid.judges.audit import RecentBatches
from foretrain.hybrid.judges.exact import OnProbes
from foretrain.hybrid.judges.judgement import Judgement
from foretrain.hybrid.judges.probes import Probes
from foretrain.hybrid.moves.judged import JudgedMove
from foretrain.hybrid.moves.leap import Leap, LeapKind
from foretrain.hybrid.plan import FORECAST, Decision, Plan
from foretrain.hybrid.snapshot import Snapshots
from foretrain.persist.codec import copy_all, real_view


class AtOnce(OnProbes):
    """Keeps a leap that its search found to lower the loss on the probe. It counts no step: those are the host's."""

    def credit(self, move: JudgedMove) -> int:
        return 0

    def judge(self, move: JudgedMove) -> Judgement:
        worth = self.worth(move, move.anchor, move.loss)
        return Judgement(move.loss < move.anchor, worth, move.cost, loss=move.loss)


class GuestLeapKind(LeapKind):
    """Makes a leap wherever a forecast is trusted."""

    def applies(self, decision: Decision, batch: Any) -> tuple[bool, float]:
        return decision.kind == FORECAST, 0.0

    def make(self, plan: Plan) -> Leap:
        move = Leap(self.tools, plan, AtOnce())
        move.products = self.products
        return move


class WeightSnapshots(Snapshots):
    """Weights and buffers alone, and only while a leap is open: no step is made in between, so nothing else changes."""

    @property
    def due(self) -> bool:
        """A guest takes no step of its host back, in no emergency."""
        return False

    def state(self, for_move: bool = True) -> dict[str, Any]:
        return {"model": self._now()}

    def _now(self) -> dict[str, Tensor]:
        trained = self.engine.trained
        weights: dict[str, Tensor] = dict(zip(trained.names, trained.parameters, strict=True))
        return weights | dict(self.engine.model.named_buffers())

    def rewind(self, to: Any = None) -> None:
        before = self._snapshot().tensors
        pairs = [(real_view(tensor.detach()), before[f"model.{name}"]) for name, tensor in self._now().items()]
        copy_all(pairs)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()


class UnseenBatches(RecentBatches):
    """A guest does not see what the host trains on."""

    def remember(self, batch: Any) -> None:
        return


class GuestProbes(Probes):
    """price: full steps that one look at all probe batches costs."""

    def __init__(self, engine: Engine, snapshots: Snapshots, batches: list[Any], price: float | None) -> None:
        super().__init__(engine, snapshots)
        self.batches = batches
        cost = FORWARD * len(batches) if price is None else price
        self.cost = engine.world.total([cost])[0] / engine.world.size

    def price(self, batch: Any) -> float:
        return self.cost


class GuestHybrid(Hybrid):
    """Watches the steps of a host, and leaps between them."""

    def __init__(
        self,
        engine: Engine,
        checkup: Checkup,
        rescue: Rescue,
        probe: Iterable[Any],
        price: float | None,
        emit: Callable[[Event], None],
    ) -> None:
        """probe: batches that are never trained on; without any no leap is made."""
        super().__init__(engine, checkup, rescue, None, None, probe, emit)
        snapshots, recent = WeightSnapshots(engine), UnseenBatches(engine, self.observer.trajectory)
        probes = GuestProbes(engine, snapshots, self.policy.tools.probes.batches, price)
        tools = replace(self.policy.tools, snapshots=snapshots, probes=probes, recent=recent)
        self.policy.equip(tools, [GuestLeapKind(tools)])
        if engine.config.hybrid.mode == "off":
            checkup.known_of_moves = lambda status: status  # nothing ails moves that nobody wants
        self.see = self.observer.sample.watch()
        """Is called with weights while their gradients are there: a host may free them before the step is looked at."""

    def full(self, batch: MadeStep) -> StepResult:
        """Follow on a step of the host. Where its loss is not told one step of each window bears the held-out loss that
        was measured last: forecasts of the motion need to know of some loss, and nothing else is made of it."""
        if batch.loss is None and self.observer.trajectory.steps == 0:
            known = self.engine.progress.last_val_loss
            batch.stand_in = known if known is not None and math.isfinite(known) else 1.0
        return super().full(batch)

    def see_gradients(self) -> None:
        """Note the sampled gradients of a step that is about to be made."""
        for parameter in self.observer.sample.parameters:
            self.see(parameter)

    @property
    def leap_is_due(self) -> bool:
        return self.phase is Phase.PREDICT

    def leap(self) -> None:
        """Make the leap that was decided for. Where anything goes wrong it leaves no trace."""
        policy, engine = self.policy, self.engine
        try:
            move = policy.open(None)
            if not move.refused:
                policy.advance(None)
            if not move.refused:
                self.carry_out(policy.settle())
        except OwnCodeError as error:
            policy.abandon("a probe of it failed")
            policy.fail(error.failure)
        except BaseException:
            policy.abandon("it was interrupted")
            raise
        finally:
            engine.full_step.changing = False
            policy.tools.snapshots.forget()
            policy.tell_phase()

    def miss(self) -> None:
        """The host went on to its next step: the leap is not made."""
        self.policy.abandon("the host was already at its next step")
        self.policy.tell_phase()

    def carry_out(self, actions: list[Action]) -> bool:
        """Steps and rates are the host's: in an emergency there are only no leaps for a while. Health tells of it."""
        for action in actions:
            harsh = action.kind in (Kind.ROLL_BACK, Kind.ABORT)
            self.policy.apply(
                replace(action, kind=Kind.FORCE_FULL) if harsh else action, self.engine.progress.global_step
            )
        return False
