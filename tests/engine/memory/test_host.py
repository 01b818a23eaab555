"""Host memory that stands in for device memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretrain.engine.memory import host
from foretrain.engine.memory.host import Lane, add_each, copy_each, host_bytes, host_like, host_zeros, on_device
from foretrain.errors import ConfigError

CPU = torch.device("cpu")


def settled_host_bytes() -> int:
    """Without what other tests left behind."""
    gc.collect()
    return host_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4)])
def test_memory_has_the_form_that_is_asked_for_and_holds_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = (100 * torch.rand(shape)).to(dtype)
    copy = host_like(source, CPU)
    assert (copy.shape, copy.dtype, copy.stride()) == (source.shape, source.dtype, source.stride())
    assert not copy.any()
    assert torch.equal(copy.copy_(source), source)


def test_memory_keeps_the_order_of_dimensions_but_not_gaps() -> None:
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert host_like(last, CPU).stride() == last.stride()
    spread = torch.randn(4, 6)[:, ::2]
    copy = host_like(spread, CPU)
    assert torch.equal(copy.copy_(spread), spread)
    assert copy.untyped_storage().nbytes() == spread.numel() * 4


def test_memory_is_counted_and_given_back_with_the_last_tensor_in_it() -> None:
    before = settled_host_bytes()
    memory = host_zeros((1000, 1000), torch.float32, CPU)
    assert 4_000_000 <= host_bytes() - before < 4_100_000
    part = memory[:3]
    del memory
    gc.collect()
    assert host_bytes() > before
    part.fill_(1.0)
    assert float(part.sum()) == 3000.0
    del part
    gc.collect()
    assert host_bytes() == before


def test_nothing_needs_no_memory() -> None:
    before = settled_host_bytes()
    assert host_zeros((0, 3), torch.float32, CPU).shape == (0, 3)
    assert host_bytes() == before


class Cudart:
    """Counts what is locked, or refuses."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def _check(result: int) -> None:
    if result:
        raise RuntimeError("out of memory")


def test_for_a_gpu_whole_pages_are_locked_and_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(host.torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(host.torch.cuda, "check_error", _check)
    memory = host_zeros((5,), torch.float32, torch.device("cuda"))
    assert cudart.locked == {memory.data_ptr(): host.mmap.PAGESIZE}
    del memory
    gc.collect()
    assert cudart.locked == {}


def test_memory_that_cannot_be_locked_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.torch.cuda, "cudart", lambda: Cudart(result=2))
    monkeypatch.setattr(host.torch.cuda, "check_error", _check)
    before = settled_host_bytes()
    already = before / 2**20
    words = rf"^1 MB of host memory cannot be pinned, {already:.0f} MB are already .*out of memory.*memory\.offload"
    with pytest.raises(ConfigError, match=words):
        host_zeros((2**18,), torch.float32, torch.device("cuda"))
    gc.collect()
    assert host_bytes() == before


def test_lists_are_copied_and_added_with_the_same_bits_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [torch.randn(7, 3), torch.randn(4)]
    sources = [torch.randn(7, 3), torch.randn(4)]
    expected = [target.add(source, alpha=0.3) for target, source in zip(targets, sources, strict=True)]
    one = [target.clone() for target in targets]
    add_each(one, sources, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(one, expected, strict=True))
    # as if the sources were on another device than the targets
    elsewhere: list[Any] = [SimpleNamespace(device="host", to=source.to, is_cuda=False) for source in sources]
    other = [target.clone() for target in targets]
    add_each(other, elsewhere, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(other, expected, strict=True))
    copy_each(other, sources)
    assert all(torch.equal(a, b) for a, b in zip(other, sources, strict=True))
    add_each([], [])
    copy_each([], [])


def test_without_a_gpu_nothing_is_left_to_wait_for() -> None:
    lane, source = Lane(CPU), torch.ones(3)
    target = torch.zeros(3)
    with lane.behind():
        target.copy_(source)
    lane.used(source)
    lane.join()
    lane.finish()
    assert torch.equal(target, source)
    assert on_device(source, CPU) is source


class Recorded:
    """Stands in for torch.cuda: notes what is asked of streams, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        main = self.stream("main")

        @contextmanager
        def inside(stream: Any) -> Iterator[None]:
            self.told.append(f"into {stream.name}")
            yield
            self.told.append(f"out of {stream.name}")

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
        monkeypatch.setattr(torch.cuda, "stream", inside)

    def stream(self, name: str) -> Any:
        event = SimpleNamespace(name=f"event of {name}")
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.told.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.told.append(f"{name} waits for {event.name}"),
            record_event=lambda timer=event: self.told.append(f"{name} records") or timer,
        )


def test_a_lane_waits_for_what_was_queued_and_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    lane = Lane(torch.device("cuda"))
    lane.join()
    assert recorded.told == []  # nothing is under way
    with lane.behind():
        recorded.told.append("copy")
    lane.join()
    lane.join()
    copied = ["side waits for main", "into side", "copy", "out of side", "side records"]
    assert recorded.told == [*copied, "main waits for event of side"]


def test_a_lane_knows_its_rate_by_copies_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorded(monkeypatch)
    done = False
    timer = SimpleNamespace(query=lambda: done, elapsed_time=lambda other: 250.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: timer)
    lane = Lane(torch.device("cuda"))
    first = lane.rate
    assert 1e9 < first < 1e11
    with lane.behind(5_000_000_000):
        pass
    assert lane.rate == first  # the host does not wait for it
    done = True
    assert lane.rate == lane.rate == 20e9
    with lane.behind():
        pass
    assert lane.rate == 20e9
    assert Lane(CPU).rate == math.inf


def test_memory_that_a_lane_copies_from_is_not_given_to_others_before(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorded(monkeypatch)
    lane = Lane(torch.device("cuda"))
    held: list[str] = []
    lane.used(SimpleNamespace(is_cuda=True, record_stream=lambda stream: held.append(stream.name)))  # type: ignore[arg-type]
    lane.used(SimpleNamespace(is_cuda=False))  # type: ignore[arg-type]  # host memory is its owner's
    assert held == ["side"]
