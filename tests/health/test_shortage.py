"""What counts as a lack of memory, how it is told, and what is smaller."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foretrain import HybridTrainer
from foretrain.config import changed, from_mapping, parse_override
from foretrain.engine.graphs import GraphedGradient
from foretrain.errors import OutOfMemory, is_out_of_memory
from foretrain.health.shortage import Shortage, advice, look_at, next_smaller


def raised(function: Any) -> BaseException:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("nothing was raised")


def test_what_cannot_be_had_from_the_host() -> None:
    """Real ones: torch's allocator and Python's."""
    found = look_at(raised(lambda: torch.empty(2**50)))
    assert found is not None
    assert found.asked == "4503600 GB"
    assert found.place.startswith("test_shortage.py, line")
    found = look_at(raised(lambda: bytearray(2**60)))
    assert found is not None
    assert found.asked == ""
    assert "no more could be had" in str(found)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB ...)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA out of memory"), False),
        (OutOfMemory("CUDA out of memory, as we say it"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_a_lack_of_memory(error: BaseException, found: bool) -> None:
    assert is_out_of_memory(error) is found
    assert (look_at(error) is not None) is found


def test_what_was_going_on_is_told_from_the_outside_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(nn.Linear):
        def loss(self, batch: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer = HybridTrainer(Failing(2, 1), config=from_mapping({"device": "cpu"}))
    batch = torch.ones(2, 2)
    for function, words in (
        (lambda: trainer.engine.full(batch), "the forward pass"),
        (lambda: trainer.engine.probe(batch), "the forward pass of a probe"),
        (lambda: trainer.evaluate([batch]), "the forward pass of an evaluation"),
    ):
        found = look_at(raised(function))
        assert found is not None
        assert (found.doing, found.asked, found.recording) == (words, "2.00 GiB", False)
        assert str(found).startswith(f"during {words} (test_shortage.py, line ")
        assert str(found).endswith(") 2.00 GiB more could not be had")

    class Graph:
        """Ending a recording that was broken off is an error of its own."""

        def __enter__(self) -> None: ...
        def __exit__(self, *arguments: object) -> None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **settings: Graph())
    found = look_at(raised(lambda: GraphedGradient(trainer.engine.full_step)(batch)))
    assert found is not None
    assert found.recording
    assert found.asked == "2.00 GiB"
    assert found.doing == "the forward pass of the recording of a CUDA graph"


@given(batch_size=st.integers(1, 200))
def test_smaller_and_smaller_down_to_one_row_and_checkpointing(batch_size: int) -> None:
    config = from_mapping({"batch_size": batch_size})
    seen = [config]
    while (smaller := next_smaller(seen[-1])) is not None:
        seen.append(smaller)
    assert all(one.batch_size == batch_size for one in seen)
    parts = [one.accumulation_steps for one in seen]
    assert all(batch_size % count == 0 for count in parts)
    assert all(2 * one <= other for one, other in pairwise(parts[:-1]))
    assert parts[-2:] == [batch_size, batch_size]
    assert [bool(one.engine.activation_checkpointing) for one in seen] == [False] * (len(seen) - 1) + [True]


class Ours(nn.Linear):
    fused_loss: Any = "auto"
    activation_checkpointing: Any = False


def test_advice_names_what_is_not_on_yet_and_what_costs_least_first() -> None:
    text = advice(from_mapping({"batch_size": 6}), Ours(1, 1))
    assert text.startswith(
        "to make it fit, what costs least first: engine.fused_loss = true; accumulation_steps = 2; "
        "engine.activation_checkpointing = true"
    )
    text = advice(
        from_mapping({"batch_size": 6, "accumulation_steps": 2, "engine.fused_loss": True, "hybrid.mode": "off"}),
        Ours(1, 1),
    )
    assert "accumulation_steps = 6; engine.activation_checkpointing = true" in text
    assert "fused_loss" not in text
    assert "memory." not in text
    assert "engine." not in advice(from_mapping({}), nn.Linear(1, 1)).replace("engine.update_in_backward", "")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer.type": "sgd"},
        {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0},
        {"accumulation_steps": 2, "optimizer.state_type": "bf16"},
        {"precision.type": "fp16", "memory.snapshots": "pinned"},
    ],
)
def test_advice_can_be_followed(settings: dict[str, Any]) -> None:
    config = from_mapping({"batch_size": 8, **settings})
    _, _, remedies = advice(config, Ours(1, 1)).partition(": ")
    for remedy in remedies.split("; "):
        words = remedy.removesuffix(" (in a new run)").split(" with ")
        changes = dict(parse_override(word.replace("'", '"')) for word in words)
        assert changed(config, changes) != config
        assert ("in a new run" in remedy) is ("optimizer.state_type" in changes)


@given(batch_size=st.integers(1, 200))
def test_updates_in_the_backward_pass_leave_the_batch_whole(batch_size: int) -> None:
    settings = {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0}
    smaller = next_smaller(from_mapping({"batch_size": batch_size, **settings}))
    assert smaller is not None
    assert (smaller.accumulation_steps, smaller.engine.activation_checkpointing) == (1, True)
    assert next_smaller(smaller) is None


def test_a_shortage_keeps_no_tensor_alive() -> None:
    error = raised(lambda: torch.empty(2**50))
    found = look_at(error)
    assert isinstance(found, Shortage)
    assert all(isinstance(getattr(found, name), str) for name in ("asked", "doing", "place"))
