"""Snapshots in host memory whose copies come late, as on a side stream of a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.slow_lane import LaneForHost, SlowLane
from tests.worlds import Net, Regression, World, differences, everything, world

from foretrain.engine.memory import offload
from foretrain.persist.codec import put_together, snapshot, take_apart

PINNED = {"memory.snapshots": "pinned", "evaluation.ema_decay": 0.9, "predictor.beta": 0.5}
ALL = {"memory.snapshots": "pinned", "memory.basis": "pinned", "memory.offload": True}
AUDITED = {"audit.time_budget": 1.0, "audit.steps": 8, "optimizer.learning_rate": 1e-3, "max_steps": 110}


def started(monkeypatch: pytest.MonkeyPatch, lane: type[SlowLane] = SlowLane) -> World:
    monkeypatch.setattr(offload, "Lane", lane)
    run = world(Net(dropout=0.2, norm=True), Regression(), PINNED)
    for _ in range(8):
        run.step()
    return run


def test_weights_may_change_after_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch)
    safety, before = run.trainer.policy.tools.snapshots, everything(run.trainer)
    safety.take()
    safety.wait()
    for _ in range(3):
        run.step()
    assert differences(everything(run.trainer), before)
    safety.rewind()
    assert differences(everything(run.trainer), before) == []


def test_a_rewind_finds_a_snapshot_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch)
    before = everything(run.trainer)
    run.trainer.policy.tools.snapshots.take()
    run.trainer.policy.tools.snapshots.rewind()
    assert differences(everything(run.trainer), before) == []


def test_snapshots_beside_a_move_are_complete_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch)
    safety = run.trainer.policy.tools.snapshots
    weights = [p.detach().clone() for p in run.trainer.model.parameters()]
    safety.take(for_move=False)
    for saved, own in zip(safety.weights(), weights, strict=True):
        assert torch.equal(saved, own)
    other = safety.take_other()
    for name, own in zip(safety.names, weights, strict=True):
        assert torch.equal(other.tensors[name], own)


@pytest.mark.parametrize("lane", [SlowLane, LaneForHost])
def test_a_snapshot_on_its_way_is_saved_whole(lane: type[SlowLane], monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch, lane)
    safety = run.trainer.policy.tools.snapshots
    expected = snapshot(safety.state())
    safety.take()
    safety.wait()
    assert differences(snapshot(safety.state_dict()["safe"]), expected) == []


def test_a_snapshot_that_was_saved_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch)
    safety = run.trainer.policy.tools.snapshots
    saved = snapshot(safety.state())
    safety.take()  # on its way into memory that is given back
    safety.load_state_dict({"safe": put_together(saved), "taken_at": 3, "best": None})
    assert safety.taken is not None
    assert differences(safety.taken, saved) == []


@pytest.mark.parametrize(("mode", "told"), [("leap", "repeat"), ("rollout", "repeat"), ("leap", "flipped")])
def test_a_whole_run_has_the_same_bits_however_late_copies_come(
    mode: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves that are audited, kept and rolled back."""
    settings = AUDITED | {"hybrid.mode": mode}
    plain = world(Net(dropout=0.2, norm=True), Regression(), settings, told).run()
    monkeypatch.setattr(offload, "Lane", SlowLane)
    late = world(Net(dropout=0.2, norm=True), Regression(), settings | ALL, told).run()
    assert late.moves
    assert late.moves == plain.moves
    mine, theirs = (take_apart(run.trainer.state_dict()).tensors for run in (late, plain))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
