"""Every part of a trainer that has a state is in the saved one, once; a saved one with a hole is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.worlds import Net, Regression, World, world
from torch import Tensor, nn

from foretrain.errors import CheckpointError
from foretrain.persist.codec import put_together, snapshot
from foretrain.persist.stateful import Stateful

SETTINGS = {"evaluation.ema_decay": 0.9, "predictor.beta": 0.5}


def started() -> World:
    run = world(Net(), Regression(), SETTINGS)
    for _ in range(25):
        run.step()
    return run


def reachable(root: object) -> Iterator[Stateful]:
    """Objects of the package that have a state, over whatever they are held by."""
    todo, seen = [root], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (Tensor, nn.Module, type)):
            continue
        seen.add(id(one))
        if isinstance(one, Stateful):
            yield one
        if isinstance(one, dict):
            todo.extend(one.values())
        elif isinstance(one, (list, tuple)):
            todo.extend(one)
        elif type(one).__module__.startswith("foretrain"):
            todo.extend(getattr(one, "__dict__", {}).values())


def test_every_part_with_a_state_is_saved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, saved, original = started(), Counter[int](), Stateful.state_dict

    def counted(part: Stateful) -> dict[str, Any]:
        saved[id(part)] += 1
        return original(part)

    monkeypatch.setattr(Stateful, "state_dict", counted)
    run.trainer.state_dict()
    parts = list(reachable(run.trainer))
    assert len(parts) > 20
    assert {type(part).__name__: saved[id(part)] for part in parts if saved[id(part)] != 1} == {}


def holes(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in state.items() if isinstance(state, dict) else ():
        yield (*path, key)
        yield from holes(value, (*path, key))


def test_a_state_with_a_hole_is_refused_or_used_and_never_stumbled_over() -> None:
    run, refused = started(), list[str]()
    whole = snapshot(run.trainer.state_dict())
    paths = list(holes(put_together(whole)))
    for path in paths[:: len(paths) // 30]:
        state = part = put_together(whole)
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]
        try:
            run.trainer.load_state_dict(state)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(text.startswith("the given state: ") for text in refused)
    run.trainer.load_state_dict(put_together(whole))


def test_a_state_of_an_earlier_version_is_refused_by_name() -> None:
    run = started()
    state = run.trainer.state_dict()
    del state["format"]
    with pytest.raises(CheckpointError, match=r"^the given state: saved by an earlier development version"):
        run.trainer.load_state_dict(state)
    run.trainer.load_weights(state)
