"""Parking: tensors leave, their memory is free, and they come back with the same bits."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from foretrain.engine.memory.host import host_bytes
from foretrain.engine.memory.offload import Aside, HostSnapshots, OptimizerParking, Parking
from foretrain.engine.optim.muon import Muon
from foretrain.persist.codec import put_together

CPU = torch.device("cpu")
FORMS = [((3, 5), torch.float32), ((64,), torch.bfloat16), ((2, 3, 4), torch.uint8), ((3, 5), torch.float32)]


def settled_host_bytes() -> int:
    """Without what other tests left behind."""
    gc.collect()
    return host_bytes()


def some(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(50 * torch.rand(shape, generator=generator)).to(dtype) for shape, dtype in FORMS]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_memory_of_what_is_parked_is_free_and_its_values_can_be_read() -> None:
    tensors = some()
    expected = [tensor.clone() for tensor in tensors]
    memories = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    parking = Parking(CPU)
    parking.park(tensors)
    gc.collect()
    assert all(memory.expired() for memory in memories)
    assert parking.away
    parking.lane.finish()
    assert same(tensors, expected)
    parking.back()
    assert not parking.away
    assert same(tensors, expected)


def test_what_comes_back_is_a_memory_of_its_own() -> None:
    tensors = some()
    parking = Parking(CPU)
    parking.park(tensors)
    parking.back()
    values = [tensor.clone() for tensor in tensors]
    parking.park(some(1))
    assert same(tensors, values)  # the host memory it had is used by others now
    for tensor in tensors:
        tensor.zero_()
    parking.back()
    assert not any(tensor.any() for tensor in tensors)


def test_a_view_stays_with_what_it_is_a_view_of() -> None:
    whole = torch.randn(10)
    part = whole[2:5]
    alone = torch.randn(4)
    parking = Parking(CPU)
    parking.park([whole, part, alone])
    part.fill_(7.0)
    assert bool((whole[2:5] == 7.0).all())
    parking.back()
    part.fill_(8.0)
    assert bool((whole[2:5] == 8.0).all())


def test_a_copy_that_exists_is_used_and_not_made_again() -> None:
    before = settled_host_bytes()
    tensor = torch.randn(5000)
    copy = tensor.clone()
    parking = Parking(CPU)
    parking.park([tensor], {id(tensor): copy})
    assert host_bytes() == before
    assert tensor.data_ptr() == copy.data_ptr()
    parking.back()
    tensor.zero_()
    assert bool(copy.any())
    parking.park([tensor])  # the copy is the lender's: it is not written to
    assert bool(copy.any())


@given(
    st.lists(st.tuples(st.sampled_from(["park", "fetch", "back", "write"]), st.sets(st.integers(0, 3))), max_size=30)
)
def test_in_any_order_of_events_the_values_are_those_of_tensors_that_never_left(events: list[Any]) -> None:
    tensors = some()
    expected = [tensor.clone() for tensor in tensors]
    identity = [id(tensor) for tensor in tensors]
    parking = Parking(CPU)
    for step, (event, chosen) in enumerate(events):
        if event == "park":
            parking.park([tensors[index] for index in chosen])
        elif event == "fetch":
            parking.fetch()
        elif event == "back":
            parking.back()
        else:
            parking.back()
            for index in chosen:
                tensors[index].fill_(step)
                expected[index].fill_(step)
        assert same(tensors, expected)
    parking.back()
    assert same(tensors, expected)
    assert [id(tensor) for tensor in tensors] == identity


def test_a_thousand_ways_to_and_fro_use_the_memory_of_the_first() -> None:
    tensors, parking = some(), Parking(CPU)
    parking.park(tensors)
    parking.back()
    used = settled_host_bytes()
    for cycle in range(1000):
        parking.park(tensors[:: 1 if cycle % 2 else -1])
        parking.back()
    assert host_bytes() == used


# --- snapshots -------------------------------------------------------------------------------------------------------


def state_of(number: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((40,), number), "b": torch.full((3,), number, dtype=torch.bfloat16)},
        "random": {"torch": torch.full((9,), int(number), dtype=torch.uint8)},
        "count": int(number),
    }


def test_a_snapshot_in_host_memory_is_a_copy_and_uses_its_memory_again() -> None:
    host = HostSnapshots(CPU, ("random.",))
    before = settled_host_bytes()
    state = state_of(1.0)
    taken = host.take(state)
    used = settled_host_bytes()
    assert used > before
    state["model"]["w"].zero_()
    assert float(put_together(taken)["model"]["w"].sum()) == 40.0
    for number in range(1000):
        taken = host.take(state_of(float(number % 200)), into=taken)
        assert host_bytes() == used
    found = put_together(taken)
    assert found["count"] == 199
    assert bool((found["model"]["w"] == 199.0).all())
    assert bool((found["random"]["torch"] == 199).all())


def test_a_snapshot_of_another_form_has_memory_of_its_own() -> None:
    host = HostSnapshots(CPU)
    first = host.take({"a": torch.ones(3), "b": torch.ones(2)})
    second = host.take({"a": torch.ones(5), "b": torch.zeros(2)}, into=first)
    assert second.tensors["a"].shape == (5,)
    assert second.tensors["b"] is first.tensors["b"]


# --- copies aside ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True])
def test_copies_aside_are_copies_and_can_be_summed(on_host: bool) -> None:
    tensors = [torch.randn(5), torch.randn(2, 3)]
    aside = Aside(tensors, on_host)
    sums = aside.keep("sum")
    expected = [tensor.clone() for tensor in tensors]
    for _ in range(3):
        for tensor, total in zip(tensors, expected, strict=True):
            tensor.mul_(1.1)
            total.add_(tensor)
        aside.add_to(sums)
    assert same(sums, expected)
    others = [torch.ones(5), torch.ones(2, 3)]
    assert same(aside.keep("sum", others), others)
    used = settled_host_bytes()
    for _ in range(10):
        aside.keep("sum")
        aside.keep("weights")
    assert (host_bytes() > used) is on_host  # of the second name, once
    used = settled_host_bytes()
    aside.keep("weights")
    assert host_bytes() == used


# --- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adam with maxima": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, fused=True),
    "no state": lambda p: torch.optim.SGD(p, 0.01),
    "muon": lambda p: Muon([{"params": [p[0]]}, {"params": p[1:], "algorithm": "adamw"}], lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
}


def trained(kind: str, seed: int = 0) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (5,))]
    optimizer = OPTIMIZERS[kind](parameters)
    for step in range(3):
        update(parameters, optimizer, step)
    return parameters, optimizer


def update(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_whose_state_was_away_goes_on_as_if_it_had_stayed(kind: str) -> None:
    ours, theirs = trained(kind), trained(kind)
    parking = OptimizerParking(ours[1], ours[0], CPU)
    before = {id(p): {k: id(v) for k, v in ours[1].state[p].items()} for p in ours[0]}
    for step in range(10):
        parking.leave()
        assert all(p.grad is None for p in ours[0])
        if step % 3 == 0:
            parking.fetch()
        if step % 3 == 1:
            parking.back()
        update(*ours, seed=100 + step)  # else it is fetched by the step itself
        update(*theirs, seed=100 + step)
        assert not parking.away
    assert same([*ours[0]], [*theirs[0]])
    assert {id(p): {k: id(v) for k, v in ours[1].state[p].items()} for p in ours[0]} == before


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("at_once", [10, 40, 100, 1000])
def test_a_state_that_leaves_and_comes_back_in_parts_is_the_same(at_once: int, kind: str) -> None:
    ours, theirs = trained(kind), trained(kind)
    parking = OptimizerParking(ours[1], ours[0], CPU)

    def gone() -> int:
        return sum(tensor.nbytes for tensor, _ in parking.parking._away)

    for step in range(4):
        away = [0]
        for _ in range(4):
            parking.leave(at_once=at_once, in_all=200)
            away.append(gone())
        for _ in range(step):
            parking.fetch(at_once)
            away.append(gone())
            parking.leave()  # it is on its way back
        assert all(abs(now - before) <= at_once for before, now in itertools.pairwise(away))
        assert max(away) <= 200
        assert (max(away) > 0) == (at_once >= 20 and kind != "no state")
        update(*ours, seed=step)
        update(*theirs, seed=step)
        assert not parking.away
    assert same([*ours[0]], [*theirs[0]])


def test_host_memory_is_made_once_however_little_leaves_at_first() -> None:
    parameters, optimizer = trained("adamw")
    parking, used = OptimizerParking(optimizer, parameters, CPU), settled_host_bytes()
    parking.leave(at_once=20)
    everything = host_bytes()
    assert everything >= used + sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.ndim)
    for at_once in (20, 100, 1000):
        parking.leave(at_once=at_once)
        assert host_bytes() == everything
        parking.back()


def test_memory_that_runs_out_on_the_way_back_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = some()
    expected = [tensor.clone() for tensor in tensors]
    parking = Parking(CPU)
    parking.park(tensors)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
        with pytest.raises(torch.OutOfMemoryError):
            parking.fetch()
    assert parking.away
    parking.back()
    assert same(tensors, expected)
    assert not parking.away


def test_a_state_that_is_away_can_be_saved_and_replaced() -> None:
    parameters, optimizer = trained("adamw")
    expected = [optimizer.state[p]["exp_avg"].clone() for p in parameters]
    parking = OptimizerParking(optimizer, parameters, CPU)
    parking.leave()
    saved = optimizer.state_dict()
    assert parking.away
    assert same([saved["state"][index]["exp_avg"] for index in range(2)], expected)
    other = trained("adamw", seed=1)[1]
    optimizer.load_state_dict(other.state_dict())
    assert not parking.away
    assert same(*[[o.state_dict()["state"][index]["exp_avg"] for index in range(2)] for o in (optimizer, other)])


def test_a_state_in_a_snapshot_is_not_copied_a_second_time() -> None:
    parameters, optimizer = trained("adamw")
    host, parking = HostSnapshots(CPU), OptimizerParking(optimizer, parameters, CPU)
    taken = host.take(optimizer.state_dict())
    used = settled_host_bytes()
    parking.leave(put_together(taken))
    assert parking.away
    assert host_bytes() == used
    parking.back()
    expected = [tensor.clone() for tensor in taken.tensors.values()]
    update(parameters, optimizer, 5)
    assert same(list(taken.tensors.values()), expected)
