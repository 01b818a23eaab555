"""What is parked or saved has its values also where copies come late, as on a side stream of a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.slow_lane import LaneForHost, SlowLane
from torch import Tensor, nn

from foretrain.engine.memory import offload
from foretrain.engine.memory.offload import HostSnapshots, OptimizerParking, Parking
from foretrain.persist.codec import put_together

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def copies_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "Lane", SlowLane)


def slow(owner: Any) -> SlowLane:
    assert isinstance(owner.lane, SlowLane)
    return owner.lane


def some() -> list[Tensor]:
    return [torch.arange(6.0).view(2, 3), torch.arange(40).to(torch.uint8), torch.full((5,), 3.0).to(torch.bfloat16)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- parking ---------------------------------------------------------------------------------------------------------


def test_what_is_back_can_be_used_at_once() -> None:
    tensors, parking = some(), Parking(CPU)
    for _ in range(3):
        parking.park(tensors)
        parking.back()
        assert same(tensors, some())


def test_what_is_away_is_there_once_the_host_has_waited() -> None:
    tensors, parking = some(), Parking(CPU)
    parking.park(tensors)
    assert not same(tensors, some())  # beside what the device does, not before
    parking.lane.finish()
    assert same(tensors, some())


def test_it_leaves_with_what_the_device_has_still_to_write() -> None:
    tensors, parking = some(), Parking(CPU)
    memory = [tensor.view(tensor.shape) for tensor in tensors]
    slow(parking).ahead += [lambda old=old: old.add_(1) for old in memory]  # type: ignore[misc]
    parking.park(tensors)
    del memory
    parking.back()
    assert same(tensors, [tensor + 1 for tensor in some()])


def test_it_comes_back_into_memory_that_others_have_done_with(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, parking = some(), Parking(CPU)
    parking.park(tensors)
    parking.lane.finish()
    make = torch.empty_like

    def used_before(*values: Any, **named: Any) -> Tensor:
        made = make(*values, **named)
        if not made.is_meta:
            slow(parking).ahead.append(lambda: made.fill_(9))
        return made

    monkeypatch.setattr(torch, "empty_like", used_before)
    parking.fetch()
    parking.lane.join()
    slow(parking).catch_up()
    assert same(tensors, some())


def test_what_came_back_does_not_wait_for_others_that_leave() -> None:
    tensors, parking = some(), Parking(CPU)
    parking.park(tensors)
    parking.fetch()
    parking.park(tensors[:1])
    assert same(tensors[1:], some()[1:])
    parking.back()
    assert same(tensors, some())


def test_a_tensor_that_ends_on_its_way_back_keeps_its_memory_till_then() -> None:
    tensors, parking = some(), Parking(CPU)
    parking.park(tensors)
    parking.fetch()
    del tensors[0]
    parking.lane.join()
    assert same(tensors, some()[1:])


def test_whatever_comes_first_nothing_is_lost() -> None:
    for order in itertools.product(["park", "fetch", "park one", "back"], repeat=4):
        tensors, parking = some(), Parking(CPU)
        for name in order:
            if name.startswith("park"):
                parking.park(tensors if name == "park" else tensors[1:2])
            else:
                parking.fetch(10) if name == "fetch" else parking.back()
        parking.back()
        assert same(tensors, some()), order


# --- an optimizer ----------------------------------------------------------------------------------------------------


def trained() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.linspace(-1, 1, 12))
    optimizer = torch.optim.AdamW([parameter], 0.1)
    for seed in range(3):
        update(parameter, optimizer, seed)
    return parameter, optimizer


def update(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, seed: int) -> None:
    parameter.grad = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


def averages(state: dict[str, Any]) -> list[Tensor]:
    return [state["state"][0][name].clone() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("where", ["leaving", "on its way back", "with a snapshot"])
def test_a_step_finds_the_state_of_an_optimizer_complete(where: str) -> None:
    (parameter, optimizer), (other, plain) = trained(), trained()
    parking, snapshots = OptimizerParking(optimizer, [parameter], CPU), HostSnapshots(CPU)
    for seed in range(4):
        taken = snapshots.take(optimizer.state_dict())
        snapshots.lane.join()
        parking.leave(put_together(taken) if where == "with a snapshot" else None)
        if where == "on its way back":
            parking.fetch()
        update(parameter, optimizer, seed)
        update(other, plain, seed)
    assert torch.equal(parameter, other)
    assert same(averages(optimizer.state_dict()), averages(plain.state_dict()))


@pytest.mark.parametrize("lane", [SlowLane, LaneForHost])
def test_a_state_that_is_leaving_can_be_read(lane: type[SlowLane], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "Lane", lane)
    parameter, optimizer = trained()
    expected = averages(optimizer.state_dict())
    parking = OptimizerParking(optimizer, [parameter], CPU)
    parking.leave()
    assert same(averages(optimizer.state_dict()), expected)


def test_a_state_on_its_way_back_can_be_read() -> None:
    parameter, optimizer = trained()
    expected = averages(optimizer.state_dict())
    parking = OptimizerParking(optimizer, [parameter], CPU)
    parking.leave()
    parking.fetch()
    assert same(averages(optimizer.state_dict()), expected)


# --- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_of_what_the_device_has_still_to_write() -> None:
    state, snapshots = {"a": torch.zeros(3)}, HostSnapshots(CPU)
    slow(snapshots).ahead.append(lambda: state["a"].fill_(2))
    taken = snapshots.take(state)
    snapshots.lane.join()
    state["a"].fill_(3)
    assert taken.tensors["a"].tolist() == [2, 2, 2]


def test_a_snapshot_holds_what_is_given_back_meanwhile() -> None:
    snapshots = HostSnapshots(CPU)
    taken = snapshots.take({"random": torch.full((3,), 7, dtype=torch.uint8), "a": torch.ones(4)})
    snapshots.lane.join()
    assert taken.tensors["random"].tolist() == [7, 7, 7]
    assert taken.tensors["a"].tolist() == [1, 1, 1, 1]


def test_memory_of_a_snapshot_is_not_given_back_while_it_is_filled() -> None:
    snapshots = HostSnapshots(CPU)
    taken = snapshots.take({"a": torch.ones(4), "b": torch.ones(2)})
    taken = snapshots.take({"a": torch.full((5,), 2.0), "b": torch.zeros(2)}, into=taken)
    snapshots.lane.join()
    assert taken.tensors["a"].tolist() == [2, 2, 2, 2, 2]
    assert taken.tensors["b"].tolist() == [0, 0]
