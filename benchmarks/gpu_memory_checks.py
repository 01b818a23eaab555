"""Checks of gpu_checks.py about memory: host memory changes nothing, nothing grows, and a real shortage is survived."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretrain.data.loader import held_out_batches
from foretrain.engine.memory.host import host_bytes
from foretrain.errors import OutOfMemory
from foretrain.motion.hosted import HostedTrajectory
from foretrain.motion.trajectory import Trajectory
from foretrain.persist.codec import take_apart
from gpu_trainer import TOKENS, trainer


def host_memory_equals_device() -> str:
    """Snapshots, directions and the optimizer's state in host memory: the same weights, bit for bit, in all phases."""
    places: tuple[dict[str, Any], ...] = (
        {},
        {"memory.snapshots": "pinned"},
        {"memory.basis": "pinned"},
        {"memory.offload": True},
        {"memory.snapshots": "pinned", "memory.basis": "pinned", "memory.offload": True},
        {"memory.snapshots": "pinned", "memory.offload": True, "memory.return_ahead": 0},
    )
    told = []
    for mode, optimizer in (("leap", "adamw"), ("rollout", "muon")):
        settings = {"hybrid.mode": mode, "optimizer.type": optimizer, "hybrid.warmup_steps": 50, "max_steps": 300}
        settings |= {"schedule.type": "constant", "hybrid.confidence_threshold": 0.0, "audit.time_budget": 0.2}
        settings |= {"optimizer.learning_rate": 1e-4, "engine.deterministic": True, "engine.cuda_graph": False}
        ends = []
        for place in places:
            made, loader = trainer(**settings, **{"engine.compile": False, "evaluation.ema_decay": 0.9}, **place)
            for batch in loader:
                made.step(batch)
                if made.global_step >= 300 and not made.judging:
                    break
            weights = torch.nn.utils.parameters_to_vector(made.model.parameters()).detach()
            ends.append((weights, made.summary()["moves"]))
        assert sum(ends[0][1].values()) > 0, ends[0][1]
        for place, (weights, moves) in zip(places, ends, strict=True):
            assert torch.equal(weights, ends[0][0]), (mode, place, moves, ends[0][1])
        told.append(f"{mode}, {optimizer}: {ends[0][1]}")
    return f"{len(places)} ways, the same bits; {'; '.join(told)}"


def directions_in_slices_equal_whole() -> str:
    """Dot products of a slice may be added up by another kernel than those of the whole."""
    worst, shapes = 0.0, ((3000, 700), (50,), (64, 9))
    for dtype in (torch.float32, torch.bfloat16):
        motions = []
        for small in (False, True):
            generator = torch.Generator("cuda").manual_seed(1)
            weights = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
            kinds = {False: Trajectory, True: partial(HostedTrajectory, buffer_bytes=2**20)}
            trajectory = kinds[small](weights, window=3, dtype=dtype)
            for _ in range(36):
                trajectory.before_step()
                for weight in weights:
                    weight.add_(0.01 * torch.randn(weight.shape, device="cuda", generator=generator) + 0.003)
                if trajectory.after_step():
                    motion = trajectory.close()
            trajectory.place(None, trajectory.displacement(np.full((3, 4), 0.1)))
            motions.append((motion, trajectory.state_dict(), weights))
        (one, state, mine), (other, sliced, theirs) = motions
        assert torch.equal(state["basis"].cpu(), sliced["basis"]), dtype
        assert torch.equal(state["previous"].cpu(), sliced["previous"]), dtype
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), dtype
        worst = max(worst, float(np.max(np.abs(one.gram - other.gram) / np.abs(one.gram).max())))
        assert worst < 1e-6, worst
    return f"the same directions and moves; dot products differ by {worst:.1e} of the largest"


def offload_frees_memory() -> str:
    """What the optimizer's state and the gradients took is free while they are away; host memory does not grow."""
    made, loader = trainer(**{"model.width": 1024, "memory.offload": True, "engine.compile": False})
    batches = iter(loader)
    for _ in range(3):
        made.step(next(batches))
    away, state = made.engine.away, made.optimizer.state
    assert away is not None
    gradients = sum(p.grad.numel() * 4 for p in made.engine.full_step.parameters if p.grad is not None)
    size = sum(t.numel() * 4 for values in state.values() for t in values.values() if t.ndim)
    expected = {p: values["exp_avg"].clone() for p, values in state.items()}
    torch.cuda.synchronize()
    before, used = torch.cuda.memory_allocated(), 0
    for cycle in range(200):
        away.leave()
        if cycle == 0:
            freed, used = before - torch.cuda.memory_allocated(), host_bytes()
        away.fetch()
        away.back()
    torch.cuda.synchronize()
    assert freed >= 0.99 * (size + gradients), (freed, size, gradients)
    assert host_bytes() == used
    assert torch.cuda.memory_allocated() <= before
    assert all(torch.equal(values["exp_avg"], expected[p]) for p, values in state.items())
    return f"{freed / 2**20:.0f} MB of the device freed, {used / 2**20:.0f} MB of the host used, also after 200 times"


def nothing_grows() -> str:
    """5,000 steps in all phases with everything in host memory that can be: device, pinned and resident memory."""
    settings: dict[str, Any] = {"hybrid.mode": "leap", "hybrid.warmup_steps": 50, "max_steps": 100_000}
    settings |= {"schedule.type": "constant", "hybrid.confidence_threshold": 0.0, "audit.time_budget": 0.2}
    settings |= {"optimizer.learning_rate": 1e-4, "engine.compile": False, "model.layers": 2}
    settings |= {"memory.snapshots": "pinned", "memory.basis": "pinned", "memory.offload": True}
    made, loader = trainer(**settings)
    seen: dict[int, tuple[int, int, int, int]] = {}
    for count, batch in enumerate(loader, 1):
        made.step(batch)
        if count in (2500, 5000):
            while made.judging or made.phase.value != "full":  # between two moves, so that both times the same is there
                made.step(batch)
            torch.cuda.synchronize()
            gc.collect()
            held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host_bytes(), _resident()
            seen[count] = held
        if count == 5000:
            break
    half, whole = seen[2500], seen[5000]
    moves = made.summary()["moves"]
    assert sum(moves.values()) >= 5, moves
    assert whole[0] <= half[0] + 2**20, seen
    assert whole[1] <= half[1], seen
    assert whole[2] == half[2] > 0, seen
    assert whole[3] <= half[3] + 32 * 2**20, seen
    names = ("allocated", "reserved", "host", "resident")
    grown = ", ".join(f"{n} {a / 2**20:.1f} -> {b / 2**20:.1f}" for n, a, b in zip(names, half, whole, strict=True))
    return f"steps 2,500 -> 5,000, MB: {grown}; {moves}"


def levers_equal_plain() -> str:
    """Recomputed activations and updates inside the backward pass: the same weights and optimizer state, bit for bit,
    also with narrow averages."""
    levers: tuple[dict[str, Any], ...] = (
        {},
        {"engine.activation_checkpointing": True},
        {"engine.update_in_backward": True},
        {"engine.activation_checkpointing": True, "engine.update_in_backward": True},
    )
    settings: dict[str, Any] = {"hybrid.mode": "off", "schedule.type": "constant", "optimizer.gradient_clip_norm": 0.0}
    settings |= {"engine.deterministic": True, "engine.compile": False, "engine.cuda_graph": False}
    kinds = ("fp32", "bf16", "8bit")
    for kind in kinds:
        ends: list[dict[str, torch.Tensor]] = []
        for lever in levers:
            made, loader = trainer(**settings, **lever, **{"optimizer.state_type": kind})
            for _, batch in zip(range(20), loader, strict=False):
                assert not made.step(batch).skipped
            state = {"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()["state"]}
            ends.append(take_apart(state).tensors)
        for lever, end in zip(levers, ends, strict=True):
            assert end.keys() == ends[0].keys(), (kind, lever)
            other = [name for name, tensor in end.items() if not torch.equal(tensor, ends[0][name])]
            assert not other, (kind, lever, other)
    return f"{len(levers)} ways with {len(kinds)} kinds of averages, the same {len(ends[0])} tensors"


def _resident() -> int:
    """Of this process, in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@contextmanager
def _at_most(size: int) -> Iterator[None]:
    """The allocator may have no more than this."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory, 0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def a_shortage_is_survived() -> str:
    """A cap below what a step needs: stopping loses nothing, a retry ends at the same loss; eager and as a graph."""
    settings: dict[str, Any] = {"batch_size": 64, "model.width": 256, "max_steps": 30, "hybrid.mode": "off"}
    settings |= {"engine.compile": False, "engine.fused_loss": False, "precision.type": "fp32"}
    settings |= {"engine.deterministic": True, "checkpoint.interval": 10}
    told = []
    for graph in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            told.append(_short(Path(folder), settings | {"engine.cuda_graph": graph}))
    return "; ".join(told)


def _short(folder: Path, settings: dict[str, Any]) -> str:
    weights, straight, _ = _trained(folder / "straight", settings)
    need, held = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
    cap, stopped = held + int(0.55 * (need - held)), ""
    with _at_most(cap):
        _, loss, summary = _trained(folder / "retried", settings | {"memory.on_out_of_memory": "retry"})
        try:
            _trained(folder / "stopped", settings)
        except OutOfMemory as error:
            stopped = str(error)
    assert abs(loss - straight) < 2e-3 * straight, (loss, straight)
    assert "accumulation_steps" in stopped, stopped
    resumed, _, _ = _trained(folder / "stopped", settings, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed, strict=True))
    made = f"{summary['out_of_memory']['settings']} after {summary['out_of_memory']['times']} times"
    return f"{cap / 2**20:.0f} of {need / 2**20:.0f} MB: loss {loss:.6f} against {straight:.6f} with {made}; {stopped}"


def _trained(out: Path, settings: dict[str, Any], resume: bool = False) -> tuple[list[torch.Tensor], float, Any]:
    """The weights at the end, their loss on one batch, and the summary."""
    made, loader = trainer(**settings)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    made.fit(loader, held_out_batches(TOKENS[:20_000], 64, 8, 4), out=str(out), resume=resume, progress=False)
    loss = made.engine.probe(next(iter(loader)))
    return [p.detach().clone() for p in made.model.parameters()], loss, made.summary()


MEMORY_CHECKS = (
    host_memory_equals_device,
    directions_in_slices_equal_whole,
    offload_frees_memory,
    levers_equal_plain,
    nothing_grows,
    a_shortage_is_survived,
)
