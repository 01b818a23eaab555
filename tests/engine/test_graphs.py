"""When a step is worth recording as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine import execution
from foretrain.engine.graphs import (
    WARMUP_STEPS,
    GraphedGradient,
    GraphedLoss,
    GraphedStep,
    launch_bound,
    recording,
    same_form,
)
from foretrain.engine.step import FullStep
from foretrain.errors import ConfigError
from foretrain.events import Notice
from foretrain.health.shortage import RECORDING, Shortage

Make = Callable[..., Any]


def test_small_steps_are_bound_by_launches_and_large_ones_are_not() -> None:
    small, large = torch.zeros(4, 64, dtype=torch.long), torch.zeros(64, 1024, dtype=torch.long)
    assert launch_bound(124_000_000, (small, small))
    assert not launch_bound(124_000_000, (large, large))
    assert launch_bound(1_000_000, {"x": large})


def test_only_batches_of_the_recorded_form_are_replayed() -> None:
    batch = (torch.zeros(2, 3), {"y": torch.zeros(2)})
    assert same_form(batch, (torch.ones(2, 3), {"y": torch.ones(2)}))
    assert not same_form(batch, (torch.ones(2, 4), {"y": torch.ones(2)}))
    assert not same_form(batch, (torch.ones(2, 3).double(), {"y": torch.ones(2)}))
    assert not same_form(batch, (torch.ones(2, 3),))
    one, other = torch.ones(2), torch.zeros(2)
    assert same_form({"x": one, "rate": 0.3}, {"x": other, "rate": 0.3})
    assert not same_form({"x": one, "rate": 0.3}, {"x": other, "rate": 0.4})  # it is in the graph
    assert not same_form({"x": one, "y": other}, {"y": one, "x": other})  # they would be copied crosswise


def test_no_garbage_is_collected_while_something_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an older graph in the middle of it would break it."""
    ended: list[bool] = []

    class Older:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            ended.append(recorded)

    recorded = False

    @contextmanager
    def graph(*arguments: Any, **settings: Any) -> Iterator[None]:
        nonlocal recorded
        recorded = True
        yield
        recorded = False

    monkeypatch.setattr(torch.cuda, "graph", graph)
    Older()
    with recording(cast("torch.cuda.CUDAGraph", None)):
        assert not gc.isenabled()
        made = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
    assert made
    assert gc.isenabled()
    gc.collect()
    assert ended == [False]


class Recording:
    """Stands for a CUDA graph where there is no GPU: replaying it changes nothing."""

    replayed = 0

    def replay(self) -> None:
        Recording.replayed += 1


def test_a_recorded_gradient_is_put_back_on_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    modes = []
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, pool, capture_error_mode: nullcontext(modes.append(capture_error_mode))
    )
    monkeypatch.setattr(Recording, "replayed", 0)
    model = nn.Linear(3, 1)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    trainer = HybridTrainer(model, loss_fn=loss, config=from_mapping({"device": "cpu"}))
    batch = torch.ones(4, 3)
    expected, gradients = trainer.engine.full_step.gradient(batch), [p.grad for p in model.parameters()]
    graphed = GraphedGradient(trainer.engine.full_step)
    for _ in range(3):
        trainer.optimizer.zero_grad(set_to_none=True)
        found = graphed(batch)
        assert torch.equal(found, expected)
        assert all(isinstance(p.grad, Tensor) for p in model.parameters())
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))  # type: ignore[arg-type]
    assert Recording.replayed == 3
    assert modes == ["thread_local"]  # the loader's thread pins memory meanwhile
    graphed(torch.zeros(5, 3))  # of another form: without the graph
    assert Recording.replayed == 3
    assert float(torch.linalg.norm(model.weight.grad)) == 0  # type: ignore[arg-type]


def test_the_loss_alone_is_recorded_for_two_forms_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    pools = []
    monkeypatch.setattr(
        torch.cuda,
        "graph",
        lambda graph, pool, capture_error_mode: nullcontext(pools.append((pool, capture_error_mode))),
    )
    monkeypatch.setattr(Recording, "replayed", 0)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    trainer = HybridTrainer(nn.Linear(3, 1), loss_fn=loss, config=from_mapping({"device": "cpu"}))
    graphed = GraphedLoss(trainer.engine.full_step, "the memory of the step")
    for rows, replayed in ((4, 0), (4, 1), (2, 1), (2, 2), (4, 3), (1, 3), (1, 3)):  # of a third form: without a graph
        batch = torch.ones(rows, 3)
        assert torch.equal(graphed(batch), trainer.engine.full_step.loss(batch))
        assert Recording.replayed == replayed
    assert pools == [("the memory of the step", "thread_local")] * 2
    trainer.engine.precision.forward = "bf16"  # a probe in another format is not the recorded one
    graphed(torch.ones(4, 3))
    assert Recording.replayed == 3


def test_without_a_recorded_step_gradients_are_taken_as_they_come() -> None:
    model = nn.Linear(3, 1)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    trainer = HybridTrainer(model, loss_fn=loss, config=from_mapping({"device": "cpu"}))
    trainer.step(torch.ones(4, 3))
    assert torch.equal(trainer.engine.gradient(torch.ones(4, 3)), trainer.engine.full_step.gradient(torch.ones(4, 3)))
    assert trainer.engine.execution._gradient is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_that_is_drawn_again_is_not_recorded(
    dropout: float, make_model: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "GraphedStep", lambda *_: "recorded")
    chosen: dict[Any, Any] = {}
    for wanted in ("auto", True):
        model = make_model(options={"activation_checkpointing": 0.5}, dropout=dropout)
        trainer = HybridTrainer(model, config=from_mapping({"device": "cpu", "engine.cuda_graph": wanted}))
        trainer.engine.execution.device = torch.device("cuda")  # where steps this small are recorded
        try:
            chosen[wanted] = trainer.engine.execution.step_for(make_batch())
        except ConfigError as error:
            chosen[wanted] = str(error)
    if dropout:
        assert isinstance(chosen["auto"], FullStep)
        assert "no dropout in blocks that engine.activation_checkpointing recomputes" in chosen[True]
    else:
        assert chosen == {"auto": "recorded", True: "recorded"}


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for CUDA streams and graphs where there is no GPU."""

    class Stream:
        def __init__(self, device: object = None) -> None: ...
        def wait_stream(self, other: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **settings: nullcontext())


@pytest.mark.usefixtures("recordings")
def test_what_is_recorded_changes_nothing_and_what_is_replayed_does() -> None:
    """A failure while recording can be taken back; one after a replay cannot."""
    fails = [False]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if fails[0]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(batch).square().mean()

    trainer = HybridTrainer(nn.Linear(3, 1), loss_fn=loss, config=from_mapping({"device": "cpu"}))
    step, batch = trainer.engine.full_step, torch.ones(4, 3)
    graphed = GraphedStep(step)
    for _ in range(WARMUP_STEPS):
        graphed(batch)
    fails[0] = True
    with pytest.raises(torch.OutOfMemoryError):
        graphed(batch)
    assert not step.changing
    assert not graphed.recorded
    fails[0] = False
    graphed(batch)
    assert step.changing


@pytest.mark.usefixtures("recordings")
def test_blocks_of_residuals_are_those_of_the_replayed_step() -> None:
    config = from_mapping({"device": "cpu", "hybrid.mode": "off"})
    trainer = HybridTrainer(nn.Linear(3, 1), residuals=lambda m, x: {"a": m(x)}, config=config)
    step, batch = trainer.engine.full_step, torch.ones(4, 3)
    graphed = GraphedStep(step)
    for _ in range(WARMUP_STEPS + 1):
        graphed(batch)
    of_step = step.loss_function.latest["a"]
    trainer.engine.probe(7 * batch)
    assert step.loss_function.latest["a"] is not of_step
    graphed(batch)
    assert step.loss_function.latest["a"] is of_step


@pytest.mark.parametrize("wanted", ["auto", True])
def test_what_cannot_be_recorded_is_told_and_runs_as_it_is(wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, device: object = None) -> None: ...
        def wait_stream(self, other: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    inside = [False]

    @contextmanager
    def graph(*arguments: Any, **settings: Any) -> Iterator[None]:
        inside[0] = True
        try:
            yield
        finally:
            inside[0] = False

    monkeypatch.setattr(torch.cuda, "graph", graph)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if inside[0]:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture\nand more")
        return model(batch).square().mean()

    config = from_mapping({"device": "cpu", "engine.cuda_graph": wanted, "hybrid.mode": "off"})
    plain, trainer = (HybridTrainer(nn.Linear(3, 1), loss_fn=loss, config=config) for _ in range(2))
    plain.model.load_state_dict(trainer.model.state_dict())
    plain.engine.execution.cuda_graph = False
    trainer.engine.execution.device = torch.device("cuda")  # where steps this small are recorded
    trainer.engine.full_step.device_skip = True
    told: list[Any] = []
    trainer.bus.subscribe(told.append)
    batch = torch.ones(4, 3)
    if wanted is True:
        for _ in range(WARMUP_STEPS):
            trainer.step(batch)
        with pytest.raises(ConfigError, match=r"cuda_graph = true, but the step cannot be recorded .*; use 'auto'"):
            trainer.step(batch)
        return
    for _ in range(WARMUP_STEPS + 3):
        plain.step(batch)
        trainer.step(batch)
    (notice,) = (event.message for event in told if isinstance(event, Notice))
    assert "cannot be recorded as a CUDA graph (Cannot copy between CPU and CUDA tensors" in notice
    assert "make them once, on the device" in notice
    assert trainer.engine.execution.step_for(batch) is trainer.engine.full_step
    for one, other in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)  # no step was lost or done twice


def test_a_step_that_cannot_be_recorded_is_run_as_it_is() -> None:
    config = from_mapping({"device": "cpu", "memory.on_out_of_memory": "retry"})
    trainer = HybridTrainer(nn.Linear(3, 1), loss_fn=lambda model, batch: model(batch).mean(), config=config)
    recording = Shortage("1.00 GiB", f"the forward pass of {RECORDING}", "here")
    assert trainer.rescue.shrink(recording, "out of memory")
    assert trainer.engine.execution.cuda_graph is False
    assert trainer.engine.full_step.accumulation == 1
