"""Properties of plans: within the budget, never slower with more of it, never against the user."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.config import Config, from_mapping, to_mapping
from foretrain.config import given as named
from foretrain.config.paths import value_of, with_settings
from foretrain.models.gpt2 import GPT2Shape
from foretrain.planning.estimate import PlanTarget, estimate
from foretrain.planning.levers import LEVERS, choices
from foretrain.planning.plan import MemoryPlan, NothingFitsError, plan, toml_lines

SHAPES = [GPT2Shape(4, 4, 128, 128, 300), GPT2Shape(12, 12, 768, 1024), GPT2Shape(24, 16, 1024, 512)]
shapes = st.sampled_from(SHAPES)
precisions = st.sampled_from(["fp32", "bf16", "fp16"])
fixed_values: dict[str, Any] = {
    "accumulation_steps": st.sampled_from([1, 2, 4]),
    "engine.activation_checkpointing": st.sampled_from([False, True, 0.25]),
    "engine.fused_loss": st.sampled_from(["auto", True, False]),
    "optimizer.type": st.sampled_from(["adamw", "muon", "sgd"]),
    "engine.update_in_backward": st.just(False),
    "memory.snapshots": st.sampled_from(["device", "pinned"]),
    "memory.basis": st.sampled_from(["device", "pinned"]),
    "memory.offload": st.booleans(),
    "hybrid.mode": st.sampled_from(["leap", "off"]),
    "evaluation.ema_decay": st.just(0.99),
    "optimizer.gradient_clip_norm": st.sampled_from([0.0, 1.0]),
}
configs = st.dictionaries(st.sampled_from(sorted(fixed_values)), st.none(), max_size=5).flatmap(
    lambda names: st.fixed_dictionaries({name: fixed_values[name] for name in names})
)


def attempt(config: Config, target: PlanTarget, budget: float) -> MemoryPlan | None:
    try:
        return plan(config, target, int(budget), named(config))
    except NothingFitsError:
        return None


@settings(max_examples=25)
@given(configs, shapes, precisions, st.floats(0.02, 1.2), st.floats(1.0, 3.0))
def test_plans_fit_and_more_memory_is_never_slower(
    changes: dict[str, Any], shape: GPT2Shape, precision: str, share: float, more: float
) -> None:
    config = from_mapping({"batch_size": 8, **changes})
    target = PlanTarget(shape, True, precision, shape.context)
    budget = share * estimate(config, target).needed
    found, roomier = attempt(config, target, budget), attempt(config, target, more * budget)
    if found is not None:
        assert found.estimate.needed <= budget
        assert found.estimate == estimate(found.config, target)
        assert roomier is not None
        assert roomier.choice.cost <= found.choice.cost
    for result in (found, roomier):
        if result is not None:
            assert not set(result.choice.settings) & named(config)
            assert set(result.choice.settings) <= set(LEVERS)
            for name in named(config) - {"batch_size"}:
                assert value_of(result.config, name) == value_of(config, name)
            assert from_mapping(to_mapping(result.config)) == result.config  # it is a valid configuration


def test_what_fits_is_left_as_it_is() -> None:
    config = from_mapping({"batch_size": 8})
    target = PlanTarget(SHAPES[1], True, "bf16", 1024)
    found = plan(config, target, estimate(config, target).needed, named(config))
    assert found.choice.settings == {}
    assert found.config == config


def test_nothing_fits_says_the_smallest_figure_and_what_is_in_the_way() -> None:
    config = from_mapping({"batch_size": 8, "optimizer.state_type": "fp32", "hybrid.mode": "leap"})
    target = PlanTarget(SHAPES[2], True, "bf16", 512)
    words = r"smallest possible is \d\.\d\d GB.*leave settings .*\(hybrid\.mode, optimizer\.state_type\)"
    with pytest.raises(NothingFitsError, match=words) as failed:
        plan(config, target, 10**9, named(config))
    every = [estimate(with_settings(config, one.settings), target) for one in choices(config, named(config), target)]
    assert failed.value.smallest.estimate.needed == min(one.needed for one in every)
    assert failed.value.exit_code == 2


LONG = {"batch_size": 8, "max_steps": 10_000}


def test_what_does_not_pay_is_the_first_to_go() -> None:
    config, target = from_mapping(LONG), PlanTarget(SHAPES[1], True, "bf16", 1024)
    needed = estimate(with_settings(config, {"hybrid.mode": "off"}), target).needed
    assert estimate(config, target).needed > needed
    found = plan(config, target, needed, named(config))
    assert found.choice.settings == {"hybrid.mode": "off"}
    assert (found.choice.cost, found.before) == (0.0, estimate(config, target))
    kept = plan(from_mapping({**LONG, "hybrid.mode": "leap"}), target, needed, named(config) | {"hybrid.mode"})
    assert kept.config.hybrid.mode == "leap"
    assert kept.choice.cost > 0
    adapters = replace(target, adapters=True)
    small = int(0.9 * estimate(config, adapters).needed)
    assert "hybrid.mode" not in plan(config, adapters, small, named(config)).choice.settings
    with pytest.raises(NothingFitsError) as failed:
        plan(config, target, 10**8, named(config))
    assert failed.value.smallest.choice.settings["hybrid.mode"] == "off"


def test_updates_in_the_backward_pass_come_with_what_they_need() -> None:
    config, target = from_mapping({"batch_size": 8}), PlanTarget(SHAPES[1], True, "bf16", 1024)
    for choice in choices(config, named(config), target):
        if choice.settings.get("engine.update_in_backward"):
            assert choice.settings["optimizer.gradient_clip_norm"] == 0.0
            assert "accumulation_steps" not in choice.settings
    clipped = from_mapping({"batch_size": 8, "optimizer.gradient_clip_norm": 1.0})
    for configured, precision in ((clipped, "bf16"), (config, "fp16")):
        found = choices(configured, named(configured), PlanTarget(SHAPES[1], True, precision, 1024))
        assert not any("engine.update_in_backward" in choice.settings for choice in found)


@pytest.mark.parametrize("change", [{"batch_size": 16}, {"hybrid.window_steps": 20}])
def test_directions_in_main_memory_cost_the_less_the_more_is_done_between_two_windows(change: dict[str, Any]) -> None:
    target = PlanTarget(GPT2Shape(12, 12, 768, 1024, 50257), True, "bf16", 1024)

    def cost(changes: dict[str, Any]) -> float:
        usual = {"batch_size": 8, "hybrid.window_steps": 10, "hybrid.mode": "leap", "max_steps": 10_000}
        every = choices(from_mapping(usual | changes), frozenset(), target)
        return next(one.cost for one in every if one.settings == {"memory.basis": "pinned"})

    assert cost(change) == pytest.approx(cost({}) / 2)


def test_without_a_gpu_nothing_is_moved_to_main_memory() -> None:
    config = from_mapping({"batch_size": 8})
    found = choices(config, named(config), PlanTarget(SHAPES[1], False, "fp32", 1024))
    assert not any(name.startswith("memory.") for choice in found for name in choice.settings)
    target = PlanTarget(SHAPES[1], False, "fp32", 1024)
    pinned = from_mapping({"batch_size": 8, "memory.basis": "pinned", "memory.snapshots": "pinned"})
    assert estimate(pinned, target) == estimate(config, target)


def test_the_lines_for_the_file_say_the_same() -> None:
    chosen = {"accumulation_steps": 4, "engine.fused_loss": True, "memory.basis": "pinned", "engine.compile": False}
    lines = toml_lines(chosen)
    assert with_settings(Config(), chosen) == from_mapping(tomllib.loads(lines) | {"batch_size": 16})
