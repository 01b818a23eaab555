"""Whole runs with snapshots, directions and the optimizer's state in host memory: the same bits as without."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain.engine.memory.host import host_bytes
from foretrain.engine.memory.offload import OptimizerParking
from foretrain.events import Phase
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.codec import take_apart

from .worlds import Bowl, Net, Regression, World, still, world

ALL = {"memory.snapshots": "pinned", "memory.basis": "pinned", "memory.offload": True}
EACH: dict[str, dict[str, Any]] = {
    "snapshots": {"memory.snapshots": "pinned"},
    "basis": {"memory.basis": "pinned"},
    "offload": {"memory.offload": True},
    "offload at the end": {"memory.offload": True, "memory.return_ahead": 0},
    "everything": ALL,
    "everything, early": ALL | {"memory.return_ahead": 4},
}
AUDITED = {"audit.time_budget": 1.0, "audit.steps": 8, "optimizer.learning_rate": 1e-3}
FULL_HOUSE = {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5}
SGD = {"optimizer.type": "sgd", "optimizer.momentum": 0.3, "optimizer.gradient_clip_norm": 0.0}
BOWL = {**SGD, "optimizer.learning_rate": 0.05}
CHAINS = {"optimizer.type": "adam", "optimizer.learning_rate": 3e-3, "hybrid.secant_pairs": 20}

Made = tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any], str | None]
RUNS: dict[str, Made] = {
    "kept": (Bowl, still, BOWL, "repeat"),
    "kept rollout": (Bowl, still, {**BOWL, "hybrid.mode": "rollout", "evaluation.ema_decay": 0.9}, "repeat"),
    "searched": (Bowl, still, {**BOWL, "hybrid.search": True, "evaluation.ema_decay": 0.9}, "mean"),
    "audited": (lambda: Net(dropout=0.2, norm=True), Regression(), {**AUDITED, **FULL_HOUSE}, "repeat"),
    "audited muon": (Net, Regression(), {**AUDITED, "optimizer.type": "muon"}, "repeat"),
    "audited rollout": (lambda: Net(dropout=0.2), Regression(), {**AUDITED, "hybrid.mode": "rollout"}, "repeat"),
    "rolled back": (lambda: Net(dropout=0.2, norm=True), Regression(), AUDITED, "flipped"),
    "refused": (lambda: Net(dropout=0.2), Regression(), {**AUDITED, **FULL_HOUSE}, "exploding"),
    "refused rollout": (Net, Regression(), {**AUDITED, "hybrid.mode": "rollout"}, "exploding"),
    "no number": (Net, Regression(), AUDITED, "nan"),
    "chains": (lambda: Net(seed=1), lambda position: Regression(rows=64)(0), CHAINS, None),
}


def make(name: str, **changes: Any) -> World:
    model, data, settings, predictor = RUNS[name]
    return world(model(), data, {**settings, "max_steps": 160, **changes}, predictor)


def bits(run: World) -> dict[str, Tensor]:
    """Every tensor that decides how a run goes on; what was learned too."""
    state = run.trainer.state_dict()
    return {name: tensor.detach().clone() for name, tensor in take_apart(state).tensors.items()}


def assert_same(one: World, other: World) -> None:
    mine, theirs = bits(one), bits(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert one.moves == other.moves
    assert one.used == other.used


@pytest.fixture(scope="module")
def plain() -> dict[str, World]:
    return {}


def in_one_process(names: Iterable[str]) -> list[Any]:
    """Tests that are compared with one and the same run, which is then made once."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(f"memory: {name}")) for name in names]


@pytest.mark.parametrize("where", EACH)
@pytest.mark.parametrize("name", in_one_process(RUNS))
def test_a_run_has_the_same_bits_wherever_its_memory_is(name: str, where: str, plain: dict[str, World]) -> None:
    if name not in plain:
        plain[name] = make(name).run()
    run = make(name, **EACH[where]).run()
    assert run.moves
    assert_same(run, plain[name])


def test_these_runs_have_moves_of_every_kind(plain: dict[str, World]) -> None:
    moves = [move for name in RUNS for move in (plain.get(name) or make(name).run()).moves]
    assert {move.verdict for move in moves} == {"kept", "shrunk", "refused", "rolled back"}
    assert any(move.chained for move in moves)
    assert {move.audited for move in moves} == {True, False}


@pytest.mark.parametrize(
    ("hidden", "lookahead", "snapshots"), [(0, 2, "device"), (600, 2, "device"), (600, 0, "device"), (600, 2, "pinned")]
)
@pytest.mark.parametrize(
    "name", in_one_process(["kept", "kept rollout", "audited rollout", "rolled back", "refused rollout"])
)
def test_a_run_has_the_same_bits_when_its_state_leaves_and_comes_back_in_parts(
    name: str, hidden: int, lookahead: int, snapshots: str, plain: dict[str, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device where copies take time: a probe hides so many bytes."""
    monkeypatch.setattr(OptimizerParking, "hidden_bytes", lambda self, seconds: hidden)
    if name not in plain:
        plain[name] = make(name).run()
    where = {"memory.offload": True, "memory.return_ahead": lookahead, "memory.snapshots": snapshots}
    assert_same(make(name, **where).run(), plain[name])


@pytest.mark.parametrize("snapshots", ["device", "pinned"])
def test_no_more_leaves_than_probes_hide_and_can_be_back_in_time(
    snapshots: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OptimizerParking, "hidden_bytes", lambda self, seconds: 600)
    where = {"memory.offload": True, "memory.return_ahead": 3, "memory.snapshots": snapshots}
    run = make("audited rollout", **where)
    parking = run.trainer.engine.away
    assert parking is not None
    away: list[int] = []
    while run.trainer.global_step < 160:
        run.step()
        away.append(sum(tensor.nbytes for tensor, _ in parking.parking._away))
    state = sum(t.nbytes for s in run.trainer.optimizer.state.values() for t in s.values() if t.ndim)
    assert 600 < max(away) <= 3 * 600 < state
    # begun before the anchor, so the first predicted step sees two parts
    assert all(-600 <= now - before <= 2 * 600 for before, now in itertools.pairwise(away))


def is_away(run: World) -> bool:
    return run.trainer.engine.away is not None and run.trainer.engine.away.away


@pytest.mark.parametrize("changes", [ALL, {"memory.offload": True}], ids=["everything", "offload alone"])
@pytest.mark.parametrize("name", ["kept rollout", "audited rollout"])
def test_a_run_killed_while_its_state_is_away_goes_on_with_the_same_bits(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """A checkpoint in the middle of every rollout; one run goes on, others begin where it was saved."""
    whole, store = make(name, **changes), CheckpointStore(tmp_path, keep=50)
    saved: list[tuple[int, list[int], int]] = []
    while whole.trainer.global_step < 160 or whole.trainer.judging:
        whole.step()
        if is_away(whole) and len(saved) < 3:
            store.save(1000 + len(saved), whole.trainer.state_dict())
            saved.append((whole.position, list(whole.used), len(whole.moves)))
    assert len(saved) == 3
    for index, (position, used, moves) in enumerate(saved):
        for settings in (changes, {}):  # also into a run that keeps everything on the device
            run = make(name, **settings)
            run.trainer.load_state_dict(checkpoint.read(tmp_path / f"step-{1000 + index:08d}"))
            run.position, run.used = position, used.copy()
            run.step()
            assert is_away(run) == (bool(settings) and run.trainer.phase is Phase.PREDICT)
            run.run()
            mine, theirs = bits(run), bits(whole)
            assert [n for n in mine if not torch.equal(mine[n], theirs[n])] == []
            assert run.moves == whole.moves[moves:]


@pytest.mark.parametrize("name", ["audited", "audited rollout", "kept"])
def test_a_run_stopped_in_the_middle_of_a_validation_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole, store = make(name, **ALL), CheckpointStore(tmp_path)
    seen = 0
    while whole.trainer.global_step < 160 or whole.trainer.judging:
        whole.step()
        seen += whole.trainer.phase is Phase.CORRECT
        if seen == 6 - 3 * (name == "kept"):
            folder = store.save(1, whole.trainer.state_dict())
            place = whole.position, list(whole.used), len(whole.moves)
            seen += 1
    run = make(name, **ALL)
    run.trainer.load_state_dict(checkpoint.read(folder))
    run.position, run.used = place[0], place[1]
    run.run()
    mine, theirs = bits(run), bits(whole)
    assert [n for n in mine if not torch.equal(mine[n], theirs[n])] == []
    assert run.moves == whole.moves[place[2] :]


def test_a_trainer_whose_state_is_away_can_be_given_another() -> None:
    run, other = make("kept rollout", **ALL), make("kept rollout").run()
    run.run(lambda: is_away(run))
    run.trainer.load_state_dict(other.trainer.state_dict())
    assert not is_away(run)
    mine, theirs = bits(run), bits(other)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_a_state_saved_while_it_is_away_is_not_changed_by_its_return() -> None:
    run = make("kept rollout", **ALL)
    run.run(lambda: is_away(run))
    before = {k: v.clone() for k, v in take_apart(run.trainer.engine.state_dict()).tensors.items()}
    moments = [name for name in before if name.endswith("momentum_buffer")]
    assert moments
    assert run.trainer.engine.away is not None
    run.trainer.engine.away.back()
    after = take_apart(run.trainer.engine.state_dict()).tensors
    assert all(torch.equal(before[name], after[name]) for name in moments)


@pytest.mark.parametrize("changes", [ALL, {"memory.offload": True}], ids=["everything", "offload alone"])
def test_memory_does_not_grow_with_the_number_of_moves(changes: dict[str, Any]) -> None:
    run = make("audited rollout", **changes, max_steps=100_000)
    used: list[int] = []
    for _ in itertools.count():
        run.step()
        if run.moves and len(run.moves) > len(used):
            gc.collect()  # other runs may still be there
            used.append(host_bytes())
        if len(used) == 8:
            break
    assert set(used[2:]) == {used[-1]}


def test_an_emergency_brings_the_state_back() -> None:
    """Rolled back while nothing is judged, from a snapshot in host memory."""
    run = world(Net(), Regression(), {"audit.time_budget": 0.0, **ALL})
    run.run(lambda: run.trainer.global_step >= 100)
    weights = [p.detach().clone() for p in run.trainer.model.parameters()]
    run.trainer.policy.tools.snapshots.take()
    run.trainer.policy.tools.snapshots.wait()
    for _ in range(20):
        run.step()
    run.trainer.policy.recover()
    assert all(torch.equal(a, b) for a, b in zip(run.trainer.model.parameters(), weights, strict=True))


# --- checkpoints without directions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [{}, ALL], ids=["on the device", "in host memory"])
def test_a_checkpoint_without_directions_goes_on_after_watching_anew(where: dict[str, Any], tmp_path: Path) -> None:
    small, large = ({**where, "checkpoint.directions": saved} for saved in (False, True))
    whole = make("audited", **large)
    whole.run(lambda: whole.position >= 60 and whole.trainer.policy.move is None)
    state = take_apart(whole.trainer.state_dict()).tensors
    run = make("audited", **small)
    run.trainer.load_state_dict(whole.trainer.state_dict())
    left = take_apart(run.trainer.state_dict()).tensors
    rows = {name: tensor for name, tensor in state.items() if ".trajectory." in name}
    assert state.keys() - left.keys() == rows.keys()
    trained = sum(p.numel() for p in run.trainer.model.parameters())
    assert sum(tensor.nbytes for tensor in rows.values()) >= 20 * trained

    folder = CheckpointStore(tmp_path).save(1, run.trainer.state_dict())
    begun = make("audited", **small)
    begun.run(lambda: begun.position >= 30)  # what it saw itself is no part of that run
    begun.trainer.load_state_dict(checkpoint.read(folder))
    begun.position, begun.used = whole.position, []
    fresh = make("audited", **large)
    trajectory, seen = begun.trainer.observer.trajectory, fresh.trainer.observer.trajectory
    assert torch.equal(trajectory.basis, seen.basis)
    assert (trajectory.windows, trajectory.steps, trajectory.frozen_windows) == (0, 0, -1)
    assert begun.trainer.observer.forecast is None
    assert begun.trainer.observer.quality.state_dict() == whole.trainer.observer.quality.state_dict()
    same_weights = {name: t for name, t in bits(begun).items() if name.startswith("model.")}
    assert all(torch.equal(tensor, bits(whole)[name]) for name, tensor in same_weights.items())
    windows: list[int] = []
    moved = len(begun.moves)
    while len(begun.moves) == moved:
        begun.step()
        windows.append(begun.trainer.observer.windows)
    assert max(windows) >= 2  # no move before what it is made of was seen again


def test_in_the_middle_of_a_move_directions_are_saved_in_any_case(tmp_path: Path) -> None:
    whole = make("audited", **{"checkpoint.directions": False})
    whole.run(lambda: whole.trainer.phase is Phase.CORRECT)
    folder = CheckpointStore(tmp_path).save(1, whole.trainer.state_dict())
    position, used, moves = whole.position, list(whole.used), len(whole.moves)
    whole.run()
    run = make("audited", **{"checkpoint.directions": False})
    run.trainer.load_state_dict(checkpoint.read(folder))
    run.position, run.used = position, used
    run.run()
    mine, theirs = bits(run), bits(whole)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert run.moves == whole.moves[moves:]
