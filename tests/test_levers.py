"""What saves memory, in combination: the same run as without it, to the bit where the arithmetic is the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretrain import HybridTrainer
from foretrain.engine.optim.in_backward import BATCHES
from foretrain.persist.checkpoint import CheckpointStore, read
from foretrain.persist.codec import take_apart
from foretrain.recipes import train as run

pytestmark = pytest.mark.xdist_group("levers")  # what is below is made once

Make = Callable[..., Any]
STEPS = 5
PLAIN = {"schedule.type": "constant", "optimizer.gradient_clip_norm": 0.0, "optimizer.type": "adamw"}
TOLERANCE = {"fp32": 0.0, "bf16": 2e-3, "8bit": 1e-2}
"""Relative difference of the loss in each of the first steps, by `optimizer.state_type`."""
OF_PARTS, COMPILED, MUON = 1e-5, 1e-5, 1e-3
"""The same for sums in another order, compiled arithmetic, and Muon's matrices one by one instead of in a batch."""
HIDDEN_BY_TORCH = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""While it compiles; as an error it comes through all the same."""


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of torch.compile but the generation of machine code, which takes a minute."""
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: original(function, **options, backend="aot_eager")
    )
    yield
    torch._dynamo.reset()


def combinations() -> Iterator[dict[str, Any]]:
    """Every one that is allowed; of compiled ones, which take longer, every pair."""
    for share, parts, compiled, on_the_way, state_type, dropout in itertools.product(
        (0, 0.5, 1), (1, 4), (False, True), (False, True), TOLERANCE, (0.0, 0.2)
    ):
        if on_the_way and parts > 1:  # refused
            continue
        if compiled and (dropout or (parts > 1 and share != 0.5) or (state_type != "fp32" and share != 1)):
            continue  # compiled dropout draws other numbers
        yield {
            "engine.activation_checkpointing": share,
            "accumulation_steps": parts,
            "engine.compile": compiled,
            "engine.update_in_backward": on_the_way,
            "optimizer.state_type": state_type,
            "model.dropout": dropout,
        }


def name_of(settings: dict[str, Any]) -> str:
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in settings.items())


def losses(settings: dict[str, Any], make_config: Make, make_batch: Make) -> tuple[list[tuple[float, float]], Any]:
    """(loss, gradient norm) of a few steps, and the weights they lead to."""
    config = make_config({**PLAIN, "model.vocab_size": 64, "hybrid.mode": "off", **settings})
    trainer = HybridTrainer(run.build_model(config), config=config)
    results = [trainer.step(make_batch(rows=8, seed=number)) for number in range(STEPS)]
    assert not any(result.skipped for result in results)
    weights = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    return [(result.loss, result.gradient_norm) for result in results], weights


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, Any]:
    """Those that were made already."""
    return {}


@HIDDEN_BY_TORCH
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("settings", list(combinations()), ids=name_of)
def test_every_combination_has_the_loss_curve_of_the_plain_run(
    settings: dict[str, Any], plain_runs: dict[str, Any], make_config: Make, make_batch: Make
) -> None:
    dropout = {"model.dropout": settings["model.dropout"]}
    if dropout["model.dropout"]:  # parts of a batch draw other numbers than the whole
        dropout["accumulation_steps"] = settings["accumulation_steps"]
    key = repr(dropout)
    if key not in plain_runs:
        plain_runs[key] = losses(dropout, make_config, make_batch)
    plain, plain_weights = plain_runs[key]
    found, weights = losses(settings, make_config, make_batch)
    of_parts = OF_PARTS if settings["accumulation_steps"] > dropout.get("accumulation_steps", 1) else 0.0
    tolerance = max(TOLERANCE[settings["optimizer.state_type"]], of_parts, COMPILED * settings["engine.compile"])
    if tolerance == 0:
        assert found == plain
        assert torch.equal(weights, plain_weights)
    else:
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in plain], rel=tolerance)


@pytest.mark.parametrize("state_type", TOLERANCE)
@pytest.mark.parametrize("on_the_way", [False, True])
@pytest.mark.parametrize("share", [0, 0.5])
def test_muon_too(state_type: str, on_the_way: bool, share: float, make_config: Make, make_batch: Make) -> None:
    muon = {"optimizer.type": "muon"}
    settings = {
        "engine.activation_checkpointing": share,
        "engine.update_in_backward": on_the_way,
        "optimizer.state_type": state_type,
    }
    plain, _ = losses(muon, make_config, make_batch)
    found, _ = losses({**muon, **settings}, make_config, make_batch)
    if state_type == "fp32" and not on_the_way:
        assert found == plain
    tolerance = max(TOLERANCE[state_type], MUON)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in plain], rel=tolerance)


@HIDDEN_BY_TORCH
@pytest.mark.usefixtures("quick_compiler")
def test_blocks_are_compiled_once_for_all_and_give_their_gradients_in_turn(make_config: Make, make_batch: Make) -> None:
    config = make_config(
        {**PLAIN, "model.layers": 6, "model.vocab_size": 64, "engine.compile": True, "engine.update_in_backward": True}
    )
    trainer = HybridTrainer(run.build_model(config), config=config)
    parameters, most = list(trainer.model.parameters()), []
    for p in parameters:  # asked when another gradient comes: how much of them there is
        p.register_hook(lambda gradient: most.append(sum(q.numel() for q in parameters if q.grad is not None)))
    torch._dynamo.utils.counters.clear()
    trainer.step(make_batch())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert max(most) <= sum(p.numel() for p in parameters) / BATCHES


# --- whole runs ------------------------------------------------------------------------------------------------------

EVERYTHING = {
    "engine.activation_checkpointing": 0.5,
    "engine.update_in_backward": True,
    "model.dropout": 0.1,
    "optimizer.gradient_clip_norm": 0.0,
    "precision.type": "bf16",
    "precision.predict": "fp32",
    "max_steps": 100,
    "hybrid.warmup_steps": 10,
    "hybrid.full_steps": 5,
    "hybrid.window_steps": 5,
    "hybrid.correct_steps": 3,
    "audit.time_budget": 1.0,
    "audit.steps": 4,
    "hybrid.confidence_threshold": 0.0,
    "checkpoint.interval": 0,
    "evaluation.ema_decay": 0.9,
    "schedule.type": "constant",
}


@pytest.mark.parametrize(("kind", "state_type"), [("adamw", "8bit"), ("muon", "bf16"), ("muon", "8bit")])
def test_a_run_with_everything_on_goes_on_where_it_stopped(
    kind: str, state_type: str, make_config: Make, make_batch: Make, tmp_path: Path
) -> None:
    config = make_config(
        {**EVERYTHING, "optimizer.type": kind, "optimizer.state_type": state_type, "model.vocab_size": 64}
    )

    def trainer() -> HybridTrainer:
        return HybridTrainer(run.build_model(config), config=config)

    def steps(one: HybridTrainer, count: int) -> list[tuple[str, int, float]]:
        results = [one.step(make_batch(seed=one.position)) for _ in range(count)]
        return [(result.phase, result.global_step, result.loss) for result in results]

    whole = trainer()
    seen = steps(whole, 33)
    folder = CheckpointStore(tmp_path).save(whole.global_step, whole.state_dict())
    seen += (rest := steps(whole, 26))
    assert {phase for phase, _, _ in seen} == {"warmup", "full", "predict", "correct"}
    resumed = trainer()
    resumed.load_state_dict(read(folder))
    assert steps(resumed, 26) == rest
    ends = [take_apart(one.state_dict()["model"]).tensors for one in (whole, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    moments = [take_apart(one.optimizer.state_dict()["state"]).tensors for one in (whole, resumed)]
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
