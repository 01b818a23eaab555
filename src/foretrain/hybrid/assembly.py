"""Puts together what moves use, and the kinds of moves that every run has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretrain.engine.engine import Engine
from foretrain.engine.ranks_limits import linearised_leaps_apply
from foretrain.events import Event
from foretrain.health.checkup import Checkup
from foretrain.hybrid.judges.audit import Forks, RecentBatches
from foretrain.hybrid.judges.held_out import HeldOut
from foretrain.hybrid.judges.probes import Probes
from foretrain.hybrid.judges.worth import Worth
from foretrain.hybrid.moves.base import MoveKind, MoveTools
from foretrain.hybrid.moves.chain import ChainKind
from foretrain.hybrid.moves.leap import LeapKind
from foretrain.hybrid.moves.linearised import LinearisedKind, left_out_on_shards
from foretrain.hybrid.moves.lookahead import LookAhead
from foretrain.hybrid.moves.rollout import RolloutKind
from foretrain.hybrid.policy import Policy
from foretrain.hybrid.snapshot import Snapshots

_LOOK_AHEAD_ENDS = 2 / 3
"""Share of a run after which nothing looks ahead: forward moves harm while the learning rate decays. Chosen: the decay
of the default schedule takes the last part of a run."""


def look_ahead_of(engine: Engine) -> LookAhead | None:
    """The look-ahead that the configuration wants: on after the warm-up, off for the last third, and only as far as the
    learning rate is up. None where it wants none."""
    wanted = engine.config.predictor

    def share() -> float:
        step, peak = engine.progress.global_step, engine.rate.peak
        if step < engine.config.hybrid.warmup_steps or step >= _LOOK_AHEAD_ENDS * engine.planned_steps:
            return 0.0
        return engine.schedule(step) / peak if peak else 0.0

    if not wanted.beta > 0:
        return None
    found = LookAhead(engine.trained.parameters, wanted.beta, wanted.gamma, wanted.stride, share)
    engine.add_hook(found)
    engine.on_cover.append(lambda: found.cover(engine.trained.parameters))
    return found


def equip(
    policy: Policy,
    engine: Engine,
    checkup: Checkup,
    look_ahead: LookAhead | None,
    probe_batches: list[Any],
    emit: Callable[[Event], None],
) -> None:
    """Give the policy what it makes moves with. probe_batches: batches that judge moves, if there are any."""
    observer = policy.observer
    snapshots = Snapshots(engine)
    _register(snapshots, policy, look_ahead)
    probes = Probes(engine, snapshots)
    probes.batches = probe_batches
    if probe_batches:
        policy.appraiser.judge_on_probes()
    tools = MoveTools(
        engine=engine,
        snapshots=snapshots,
        probes=probes,
        held_out=HeldOut(engine, probes, snapshots),
        worth=Worth(engine, policy.slope),
        forks=Forks(engine, observer.trajectory),
        recent=RecentBatches(engine, observer.trajectory),
        observer=observer,
        trajectory=observer.trajectory,
        correction=policy.correction,
        counts=policy.score.counts,
        checkup=checkup,
        monitor=policy.monitor,
        emit=emit,
    )
    kinds: list[MoveKind] = [ChainKind(tools, policy.predictability), LeapKind(tools), RolloutKind(tools)]
    if engine.objective is not None and linearised_leaps_apply(engine):
        kinds.insert(0, LinearisedKind(tools, policy.predictability, engine.objective))
    elif engine.objective is not None:
        policy.left_out = lambda: left_out_on_shards(tools, policy.predictability)
    policy.equip(tools, kinds)


def _register(snapshots: Snapshots, policy: Policy, look_ahead: LookAhead | None) -> None:
    """What a rollback brings back beside the engine: not what was learned from a move."""
    guard, counts, predictor = policy.guard, policy.score.counts, policy.observer.guarded

    def load_predictor(saved: Any) -> None:
        if predictor.name == saved["name"]:  # else another one took over when the run was resumed
            predictor.load(saved["state"])

    def load_steps(saved: Any) -> None:
        counts.steps = dict(saved)

    if look_ahead is not None:
        snapshots.register("look_ahead", look_ahead.state_dict, look_ahead.load_state_dict, of_weights=True)
    snapshots.register(
        "predictor",
        lambda: {"name": predictor.name, "state": predictor.state()},
        load_predictor,
        in_emergencies=False,
        of_weights=True,
    )
    snapshots.register("guard", guard.state_dict, guard.load_state_dict)
    snapshots.register("steps", lambda: dict(counts.steps), load_steps)
