"""The memory of every phase: what is added up, what is told, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foretrain.config.units import format_size
from foretrain.engine.memory.usage import MemoryMeter, Usage
from foretrain.events import Event, MemoryUsed


@dataclass
class Allocator:
    """Stands for CUDA's allocator where there is no GPU."""

    current: int = 0
    peak: int = 0
    pinned: int = 0
    resets: list[Any] = field(default_factory=list)
    reads: int = 0

    def use(self, most: int, then: int) -> None:
        self.peak, self.current = max(self.peak, most), then

    def counters(self, device: Any) -> dict[str, Any]:
        self.reads += 1
        return {
            "allocated_bytes": {"all": {"current": self.current, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.current, "peak": self.peak + 100}},
        }

    def reset(self, device: Any) -> None:
        self.resets.append(device)
        self.peak = self.current


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", made.counters)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": made.pinned})
    return made


def meter(**options: Any) -> tuple[MemoryMeter, list[Event]]:
    events: list[Event] = []
    return MemoryMeter(torch.device("cuda"), events.append, lambda: 7, **options), events


def test_every_phase_has_its_own_peak(allocator: Allocator) -> None:
    made, _ = meter()
    allocator.use(1000, 400)
    made.enter("full")
    for most in (3000, 2500):
        made.enter("full")
        allocator.use(most, 500)
        made.enter("predict")
        allocator.pinned = 64
        allocator.use(700, 600)
        made.enter("full")
    made.enter("predict")
    assert made.summary() == {
        "setup": {"allocated": 400, "reserved": 1100, "peak": 1000, "pinned": 0},
        "full": {"allocated": 600, "reserved": 3100, "peak": 3000, "pinned": 64},
        "predict": {"allocated": 600, "reserved": 800, "peak": 700, "pinned": 64},
    }
    assert made.peak == 3000


def test_the_counters_are_read_when_the_phase_changes_and_not_in_between(allocator: Allocator) -> None:
    made, _ = meter()
    made.enter("full")
    reads, resets = allocator.reads, len(allocator.resets)
    for _ in range(1000):
        made.enter("full")
    assert (allocator.reads, len(allocator.resets)) == (reads, resets)


def test_an_evaluation_interrupts_a_phase(allocator: Allocator) -> None:
    made, events = meter()
    made.enter("full")
    allocator.use(1000, 500)
    with made.during("evaluation"):
        allocator.use(4000, 500)
    allocator.use(900, 500)
    assert made.phase == "full"
    assert {phase: usage["peak"] for phase, usage in made.summary().items() if phase != "setup"} == {
        "full": 1000,
        "evaluation": 4000,
    }
    assert [(event.step, event.phase, event.peak) for event in events if isinstance(event, MemoryUsed)] == [
        (7, "full", 1000),
        (7, "evaluation", 4000),
    ]


def test_a_run_of_any_length_tells_a_limited_number_of_peaks(allocator: Allocator) -> None:
    made, events = meter()
    for step in range(10_000):
        made.enter(("full", "predict")[step % 2])
        allocator.use(10_000 + step, 500)  # creeps up all the time
    assert 50 < len(events) < 200


def test_switched_off_it_touches_nothing_but_knows_the_phase(allocator: Allocator) -> None:
    made, events = meter(on=False)
    made.enter("full")
    with made.during("evaluation"):
        assert made.phase == "evaluation"
    assert (made.phase, made.summary(), made.peak, events) == ("full", {}, None, [])
    assert (allocator.reads, allocator.resets) == (0, [])


def test_a_torch_that_does_not_count_pinned_memory(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "host_memory_stats")
    made, _ = meter()
    assert made.summary()["setup"]["pinned"] == 0


def test_before_anything_is_allocated_the_counters_are_empty(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device: {})
    assert meter()[0].summary()["setup"] == {"allocated": 0, "reserved": 0, "peak": 0, "pinned": 0}


def test_without_a_gpu_the_process_is_measured() -> None:
    made = MemoryMeter(torch.device("cpu"))
    made.enter("full")
    kept = torch.ones(40_000_000)  # written to, so that it is there
    usage = made.summary()
    assert set(usage["full"]) == {"resident_peak"}
    assert usage["full"]["resident_peak"] > kept.numel() * kept.element_size()
    assert usage["setup"]["resident_peak"] <= usage["full"]["resident_peak"]
    assert made.peak is None


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (812_000_000, "812 MB"), (3_140_000_000, "3.1 GB"), (2_500, "2.5 kB")]
)
def test_bytes_in_words(count: int, text: str) -> None:
    assert format_size(count, 1) == text


def test_usage_in_words() -> None:
    assert str(Usage(1_000_000, 3_000_000, 2_000_000)) == "1.0 MB allocated, 3.0 MB reserved, peak 2.0 MB"
    assert str(Usage(1_000_000, 3_000_000, 2_000_000, 5_000_000)).endswith(", 5.0 MB pinned")
    assert str(Usage(resident_peak=4_000_000)) == "the process held 4.0 MB at the most"
