"""Planned sizes against those of real weights, gradients, optimizer states, directions and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.planning.observed import Live

from foretrain.config import OptimizerConfig, from_mapping
from foretrain.config.schema import LoraConfig
from foretrain.engine.memory.host import host_bytes
from foretrain.engine.optim import build as optim
from foretrain.hybrid.moves.secant import Secant
from foretrain.models import lora
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.motion.hosted import HostedTrajectory
from foretrain.motion.records import DIRECTIONS
from foretrain.planning.estimate import Estimate, PlanTarget, estimate, pass_of, row_size, target_of
from foretrain.planning.parameters import adapted_parameters, parameters_of
from foretrain.trainer import HybridTrainer

SHAPES = [
    GPT2Shape(2, 2, 32, 16, 64),
    GPT2Shape(3, 4, 64, 32, 2000, bias=False),
    GPT2Shape(1, 2, 48, 8, 100, normalization="rmsnorm"),
]


def size_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_parameters_are_those_of_the_model(shape: GPT2Shape) -> None:
    model = GPT2(shape)
    planned = [(p.name, p.shape) for p in parameters_of(shape).all]
    assert planned == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert parameters_of(shape).weights == size_of(model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "muon", "adamw bf16", "adamw 8bit", "muon 8bit", "muon rows"])
@pytest.mark.parametrize("shape", SHAPES)
def test_optimizer_state_and_gradients_are_exact(shape: GPT2Shape, kind: str) -> None:
    kind, _, stored = kind.partition(" ")
    settings = {"row_beta2": 0.0} if stored == "rows" else {"state_type": stored or "fp32"}
    config = OptimizerConfig(type=kind, **settings)
    model = GPT2(shape)
    optimizer = optim.build(model, config)
    tokens = torch.zeros(1, shape.context, dtype=torch.long)
    model(tokens, tokens).backward()
    assert parameters_of(shape).learned == size_of(p.grad for p in model.parameters())
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert parameters_of(shape).optimizer_state(config) == size_of(states)


def test_sgd_without_momentum_has_no_state() -> None:
    assert parameters_of(SHAPES[0]).optimizer_state(OptimizerConfig(type="sgd", momentum=0.0)) == 0


def test_narrow_optimizer_states_are_a_half_and_a_quarter_of_large_tensors() -> None:
    parameters = parameters_of(GPT2Shape(12, 12, 768))
    wide, half, quarter = (
        parameters.optimizer_state(OptimizerConfig(type="adamw", state_type=kind)) for kind in ("fp32", "bf16", "8bit")
    )
    assert half == pytest.approx(wide / 2, rel=0.01)
    assert quarter == pytest.approx(wide / 4, rel=0.03)


@pytest.mark.parametrize(
    "chosen", [{}, {"rank": 4, "targets": ["qkv"]}, {"bias": "all"}, {"bias": "lora_only", "targets": ["*.up", "out"]}]
)
def test_adapters_are_exact(chosen: dict[str, Any]) -> None:
    shape, settings = SHAPES[0], LoraConfig(**chosen)
    model = GPT2(shape)
    lora.attach(model, lora.LoraSettings(settings.rank, targets=tuple(settings.targets), bias=settings.bias), 0)
    planned = adapted_parameters(shape, settings)
    assert planned.weights == size_of(model.parameters())
    assert planned.learned == size_of(p for p in model.parameters() if p.requires_grad)


def planned_for(trainer: HybridTrainer) -> Estimate:
    assert isinstance(trainer.model, GPT2)
    return estimate(trainer.config, target_of(trainer.config, trainer.model.shape))


@pytest.mark.parametrize("changes", [{}, {"hybrid.basis_type": "bf16"}, {"optimizer.type": "adamw"}])
def test_directions_and_snapshots_are_exact(
    changes: dict[str, Any], make_model: Callable[..., GPT2], make_config: Callable[..., Any], make_batch: Any
) -> None:
    trainer = HybridTrainer(make_model(), config=make_config({"evaluation.ema_decay": 0.9, **changes}))
    trainer.step(make_batch())
    planned = planned_for(trainer).phases["full"]
    trajectory = trainer.observer.trajectory
    assert planned["basis"] == trajectory.bytes + size_of([trajectory.layout._membership])
    trainer.policy.tools.snapshots.take(for_move=False)
    assert trainer.policy.tools.snapshots.taken is not None
    taken = trainer.policy.tools.snapshots.taken.tensors.items()
    kept = [tensor for name, tensor in taken if name.startswith(("model.", "optimizer.state", "average."))]
    assert planned["snapshot"] == size_of(kept)
    assert trainer.engine.average is not None
    assert planned["average"] == size_of(trainer.engine.average.average)


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_the_state_that_undoes_growth_is_exact(average: float, make_batch: Any, make_config: Any) -> None:
    shape = GPT2Shape(4, 2, 16, 16, 64)
    changes = {"growth.layers": 2, "hybrid.mode": "off", "max_steps": 20, "evaluation.ema_decay": average}
    config = make_config({**changes, "optimizer.type": "adamw"})
    trainer = HybridTrainer(GPT2(shape), config=config)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    while trainer.global_step < 11:
        trainer.step((tokens, tokens))
    assert trainer.growth is not None
    anchor = trainer.growth.anchor
    kept = [*anchor["model"].values(), *(anchor["average"]["average"] if average else ())]
    kept += [value for state in anchor["optimizer"]["state"].values() for value in state.values()]
    planned = estimate(config, PlanTarget(shape, False, "fp32", 16)).phases["full"]
    assert planned["state before growth"] == size_of(kept)
    without = estimate(make_config(), PlanTarget(shape, False, "fp32", 16)).phases["full"]
    assert "state before growth" not in without


def test_the_row_of_directions_is_the_layout_s_own(make_model: Callable[..., GPT2]) -> None:
    model = make_model()
    from foretrain.motion.trajectory import Layout

    assert row_size(parameters_of(model.shape))[0] == Layout(list(model.parameters()), ["x"] * 99).size


BIG = GPT2Shape(12, 12, 768)


def full(changes: dict[str, Any], shape: GPT2Shape = BIG) -> Estimate:
    """Of a run that is long enough to try moves."""
    config = from_mapping({"batch_size": 16, "max_steps": 10_000, **changes})
    return estimate(config, PlanTarget(shape, True, "bf16", shape.context))


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"accumulation_steps": 8}, "full"),
        ({"engine.activation_checkpointing": 0.5}, "full"),
        ({"engine.activation_checkpointing": True}, "full"),
        ({"optimizer.state_type": "8bit"}, "full"),
        ({"optimizer.type": "sgd"}, "predict"),
        ({"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0.0}, "predict"),
        ({"memory.snapshots": "pinned"}, "predict"),
        ({"memory.basis": "pinned"}, "predict"),
        ({"memory.offload": True}, "predict"),
        ({"model.context": 256}, "full"),
        ({"hybrid.mode": "off"}, "full"),
    ],
)
def test_each_lever_lowers_the_peak_it_is_meant_for(changes: dict[str, Any], phase: str) -> None:
    shape = GPT2Shape(12, 12, 768, changes.pop("model.context", 1024))
    assert full(changes, shape).peaks[phase] < full({}).peaks[phase]


def test_compiling_and_precision_decide_over_activations() -> None:
    plain = {"engine.compile": False, "hybrid.mode": "off", "optimizer.type": "adamw"}
    eager, compiled = full(plain).phases["full"], full(plain | {"engine.compile": True}).phases["full"]
    assert compiled["activations"] < eager["activations"]
    target = PlanTarget(BIG, True, "fp32", 1024)
    wide = estimate(from_mapping({"batch_size": 16, **plain}), target).phases["full"]
    assert wide["activations"] > 1.6 * eager["activations"]
    assert wide["casts of weights"] == 0 < eager["casts of weights"]


def test_probes_have_a_precision_of_their_own() -> None:
    assert full({"precision.predict": "fp32"}).peaks["predict"] > full({}).peaks["predict"]
    assert full({"precision.predict": "fp32"}).peaks["full"] == full({}).peaks["full"]


def test_a_budget_on_a_gpu_leaves_room_for_pages_that_are_partly_used() -> None:
    config = from_mapping({"hybrid.mode": "off"})
    on_gpu, elsewhere = (estimate(config, PlanTarget(BIG, cuda, "fp32", 1024)) for cuda in (True, False))
    assert on_gpu.needed - int(1.05 * (on_gpu.peak + on_gpu.pool)) >= 100 * 2**20
    assert elsewhere.needed == int(1.05 * elsewhere.peak)


def test_a_recorded_step_keeps_its_memory_for_itself() -> None:
    small = {"batch_size": 1, "engine.cuda_graph": True}
    assert full(small).needed > full(small | {"engine.cuda_graph": False}).needed
    alone = full(small | {"engine.cuda_graph": False})
    assert alone.pool == 0
    assert full(small).phases["full"]["workspaces"] == 3 * alone.phases["full"]["workspaces"] > 0  # two more streams


def test_a_budget_allows_for_the_graph_where_other_phases_run_beside_it() -> None:
    """A recorded step uses that memory itself; a probe or an evaluation needs its own on top."""
    found = full({"batch_size": 1, "engine.cuda_graph": True})
    peaks = found.peaks
    used = ("gradients", "activations", "casts of weights", "logits and loss", "optimizer buffers")
    assert found.pool == sum(found.phases["full"][part] for part in used[1:]) > 0
    beside = max(peak for phase, peak in peaks.items() if phase not in ("full", "correct"))
    assert max(peaks["full"], peaks["correct"]) < beside + found.pool
    assert found.needed == int(1.05 * (beside + found.pool)) + found.pages
    alone = replace(found, phases={"full": found.phases["full"]})
    assert alone.needed == int(1.05 * peaks["full"]) + found.pages


@pytest.mark.parametrize("why", [{"max_steps": 800}, {"audit.time_budget": 0.0}])
def test_where_nothing_will_be_tried_only_the_snapshot_for_emergencies_is_planned(why: dict[str, Any]) -> None:
    found, tried = full(why), full({})
    assert set(found.phases) == {"full", "evaluate"}
    assert found.phases["full"]["basis"] < 0.01 * tried.phases["full"]["basis"]
    assert found.phases["full"]["snapshot"] == tried.phases["full"]["snapshot"] > 0
    pinned = {"memory.snapshots": "pinned", "memory.basis": "pinned"}
    assert full({**why, **pinned}).host == found.phases["full"]["snapshot"] < full(pinned).host
    small = GPT2Shape(4, 4, 128, 128, 300)  # so small that it is watched only to say how predictable it is
    assert full(why, small).phases["full"]["basis"] == full({}, small).phases["full"]["basis"]
    assert "predict" in full(why, small).phases


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_an_audit_needs_a_second_snapshot_and_weights_twice(average: float) -> None:
    """The end of the move, the weights at its start and those of the fork, on the device or in main memory."""
    audited = {"audit.time_budget": 0.1, "evaluation.ema_decay": average}
    found = full(audited)
    parts = found.phases["audit"]
    fork = parts["forks of an audit"]
    assert fork == parts["snapshot"] + 2 * parts["weights"]
    assert found.peaks["audit"] == found.peaks["full"] + fork
    assert found.host == 0
    assert "audit" not in full(audited | {"audit.time_budget": 0.0}).phases

    pinned = {"memory.snapshots": "pinned"}
    moved, never = full(audited | pinned), full(audited | pinned | {"audit.time_budget": 0.0})
    assert moved.phases["audit"]["forks of an audit"] == 0
    assert moved.peaks["audit"] == moved.peaks["full"]
    assert never.host == parts["snapshot"]
    assert moved.host == parts["snapshot"] + fork


def test_a_state_that_returns_after_the_last_probe_is_not_there_while_it_is_made() -> None:
    here, early, late = (
        full({"optimizer.type": "adamw", **changes}).phases["predict"]
        for changes in (
            {"engine.cuda_graph": False},
            {"memory.offload": True, "memory.return_ahead": 2},
            {"memory.offload": True, "memory.return_ahead": 0},
        )
    )
    assert here["optimizer state"] == early["optimizer state"] > 2 * here["weights"] - 10**6
    assert late == early | {"optimizer state": 0}
    assert here == early | {"gradients": here["gradients"]}
    assert here["gradients"] == here["weights"]
    assert early["gradients"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"engine.update_in_backward": True, "optimizer.gradient_clip_norm": 0},
        {"hybrid.search": False},
        {"hybrid.mode": "rollout"},
    ],
)
def test_pairs_that_cannot_exist_are_not_counted(changes: dict[str, Any]) -> None:
    tiny, exact = GPT2Shape(2, 2, 64, 128, 256), {"optimizer.weight_decay": 0.0}
    assert full(exact, tiny).phases["full"]["quasi-Newton pairs"] > 0
    assert full(exact | changes, tiny).phases["full"]["quasi-Newton pairs"] == 0


def test_pairs_take_what_the_real_ones_do() -> None:
    """With a point to come back to."""
    shape = GPT2Shape(2, 2, 64, 128, 256)
    secant = Secant(list(GPT2(shape).parameters()), 20)
    secant.mark = secant.point()
    planned = full({"optimizer.weight_decay": 0.0, "hybrid.secant_pairs": 20}, shape).phases["full"]
    assert planned["quasi-Newton pairs"] == pytest.approx(secant.bytes, rel=0.03)  # rows of small tensors are filled up


def test_a_large_model_is_planned_without_making_it() -> None:
    xl = GPT2Shape(48, 25, 1600)
    found = full({"optimizer.type": "adamw"}, xl)
    assert found.phases["full"]["weights"] == 4 * 1_557_611_200 + 4 * (50304 - 50257) * 1600
    assert found.peak > 20 * 10**9


def test_a_pass_of_a_fine_tuning_run_has_adapters() -> None:
    config = from_mapping({"preset": "finetune"})
    target = PlanTarget(BIG, True, "bf16", 256, adapters=True, evaluated_rows=16)
    assert pass_of(config, target).rank == config.lora.rank
    found = estimate(config, target)
    assert found.phases["predict"]["gradients"] < 0.02 * found.phases["full"]["weights"]


@pytest.mark.parametrize("number", ["fp32", "bf16"])
def test_directions_in_main_memory_are_counted_as_they_are(number: str) -> None:
    """All that is there of them, and what a move takes on the device."""
    shape = GPT2Shape(1, 2, 64, 64, 60_000)
    config = from_mapping({"memory.basis": "pinned", "hybrid.basis_type": number, "hybrid.mode": "rollout"})
    weights = list(GPT2(shape).parameters())
    dtype = torch.float32 if number == "fp32" else torch.bfloat16
    before = host_bytes()
    trajectory = HostedTrajectory(weights, dtype=dtype)
    found = estimate(config, PlanTarget(shape, True, "bf16", 64))
    assert found.host == pytest.approx(host_bytes() - before, rel=0.01)
    live = Live()
    live.ignore((trajectory._rows, trajectory._scratch))
    with live:
        trajectory.displacement(np.ones((len(trajectory.groups), len(DIRECTIONS))))
    assert live.peak == pytest.approx(found.phases["predict"]["move"], rel=0.2)
