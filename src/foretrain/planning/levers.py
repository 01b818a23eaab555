"""What can be changed to need less memory, and what each change costs in speed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from foretrain.config import Config
from foretrain.config.paths import value_of
from foretrain.planning.estimate import PlanTarget, tries_nothing

RECOMPUTING = 0.28
"""Share by which the part of a step that is spent in blocks grows when all of them are recomputed. One more forward
pass would be 1/3; GPT-2 124M on an H200 took 19 % longer, blocks being 69 % of its work (docs/results.md)."""
BUS_TOKENS = 80_000
"""Directions in main memory cross the bus at the end of a window, which takes as long as full steps on so many tokens.
Both grow with the model, so that its size cancels out. On an H200: 47,000 with 355M parameters, 105,000 with 124M and
81,000 with 1.56B (docs/results.md)."""
HALF_SPEED_TOKENS = 512
"""Tokens of a micro-batch at which kernels run at half their best speed. An assumption for large GPUs."""
COSTS: dict[str, dict[Any, float]] = {
    "engine.fused_loss": {True: 0.01},  # faster where logits are large, a little slower where they are small
    "engine.loss_rows": {4096: 0.02, 1024: 0.05},  # 0.02: 124M on an H200, 32 x 1024 tokens
    "optimizer.state_type": {"bf16": 0.005, "8bit": 0.005},  # 0.002 in the same run
    "engine.update_in_backward": {True: 0.04},  # 0.03 to 0.04 at 124M on an H200
    "memory.snapshots": {"pinned": 0.005},  # a copy over the bus per move
    "memory.offload": {True: 0.01},  # a copy out and back per move, mostly hidden; 0.007 at 124M on an H200
    "memory.return_ahead": {0: 0.005},  # the way back is hidden by the next step only
}
"""Share of a step's time, measured where it says so and assumed elsewhere. Where two plans fit, the one with the lower
sum is proposed."""
SHARES = (False, 0.25, 0.5, 0.75, True)
"""Shares of the blocks that are recomputed."""
EXPLANATIONS = {
    "hybrid.mode": "no prediction, which has not paid for such models, and no snapshots for emergencies",
    "accumulation_steps": "smaller parts of each batch go through the model at once; the result is the same",
    "engine.activation_checkpointing": "blocks are computed again in the backward pass instead of being kept",
    "engine.fused_loss": "logits are computed in slices and never all exist",
    "engine.loss_rows": "fewer tokens per slice of the logits",
    "optimizer.state_type": "the optimizer's averages are stored in fewer bits",
    "engine.update_in_backward": "gradients are used and freed a few at a time",
    "optimizer.gradient_clip_norm": "what is updated in the backward pass cannot wait for the norm of all gradients",
    "memory.snapshots": "the snapshot that undoes a move lies in main memory",
    "memory.basis": "the stored directions live in main memory",
    "memory.offload": "optimizer state and gradients leave the device while moves are predicted",
    "memory.return_ahead": "the optimizer state comes back only after the last predicted step",
}
LEVERS = tuple(EXPLANATIONS)


@dataclass(frozen=True)
class LeverChoice:
    """Settings that differ from the configuration's, and what they cost."""

    settings: dict[str, Any]
    cost: float
    """Share of a step's time."""
    costs: dict[str, float]
    """The cost of each setting alone."""


def choices(config: Config, given: frozenset[str], target: PlanTarget) -> list[LeverChoice]:
    """Return all allowed combinations, the fastest first. Settings that were given stay as they are."""
    values = _options(config, given, target)
    combinations = product(*values.values())
    found = [_choice(config, dict(zip(values, combination, strict=True)), target) for combination in combinations]
    return sorted((choice for choice in found if choice is not None), key=lambda one: (one.cost, len(one.settings)))


def _options(config: Config, given: frozenset[str], target: PlanTarget) -> dict[str, list[Any]]:
    """Return what each lever may be, its present value first."""
    divisors = [n for n in range(config.accumulation_steps, config.batch_size + 1) if config.batch_size % n == 0]
    kept = target.cuda and config.hybrid.mode != "off"  # without a GPU there is only main memory
    leaves = target.cuda and not tries_nothing(config, target)
    narrow = config.optimizer.type in ("adamw", "muon")
    # Updates in the backward pass cannot clip, and cannot undo what overflowed.
    clips = config.optimizer.gradient_clip_norm > 0 and "optimizer.gradient_clip_norm" in given
    in_backward = target.precision != "fp16" and not clips
    wanted: dict[str, list[Any]] = {
        "accumulation_steps": divisors,
        "engine.activation_checkpointing": list(SHARES),
        "engine.fused_loss": [True],
        "engine.loss_rows": [4096, 1024] if target.cuda and target.length * config.batch_size > 1024 else [],
        "optimizer.state_type": ["bf16", "8bit"] if narrow else [],
        "engine.update_in_backward": [True] if in_backward else [],
        "memory.snapshots": ["pinned"] if kept else [],
        "memory.basis": ["pinned"] if leaves else [],
        "memory.offload": [True] if leaves and config.engine.cuda_graph is not True else [],
        "memory.return_ahead": [0] if leaves else [],
    }
    found = {}
    for name, options in wanted.items():
        now = value_of(config, name)
        found[name] = [now] if name in given else [now, *(option for option in options if option != now)]
    return found


def _choice(config: Config, values: dict[str, Any], target: PlanTarget) -> LeverChoice | None:
    parts, in_backward = values["accumulation_steps"], values["engine.update_in_backward"]
    if in_backward and parts > 1:
        return None  # nothing keeps the gradients that parts of a batch would add up to
    if values["memory.return_ahead"] != config.memory.return_ahead and not values["memory.offload"]:
        return None  # nothing has left that could come back
    settings = {name: value for name, value in values.items() if value != value_of(config, name)}
    if in_backward and config.optimizer.gradient_clip_norm > 0:
        settings["optimizer.gradient_clip_norm"] = 0.0
    if "engine.loss_rows" in settings and not values["engine.fused_loss"]:
        return None  # there are no slices
    costs = {name: _cost(config, name, value, target) for name, value in settings.items()}
    return LeverChoice(settings, sum(costs.values()), costs)


def _cost(config: Config, name: str, value: Any, target: PlanTarget) -> float:
    length = target.length
    if name == "accumulation_steps":
        return _slowness(config, value, length) / _slowness(config, config.accumulation_steps, length) - 1
    if name == "engine.activation_checkpointing":
        more = float(value) - float(config.engine.activation_checkpointing)
        return RECOMPUTING * more * _share_of_blocks(target)
    if name == "memory.basis" and value == "pinned":
        return BUS_TOKENS / (config.hybrid.window_steps * config.batch_size * length)
    return COSTS.get(name, {}).get(value, 0.0)


def _share_of_blocks(target: PlanTarget) -> float:
    """Return the blocks' share of the multiplications of a pass, attention aside."""
    blocks = 12 * target.shape.layers * target.shape.width
    return blocks / (blocks + target.shape.padded_vocab_size)


def _slowness(config: Config, parts: int, length: int) -> float:
    """Return the time per token at this many parts; it is 1 for endless ones."""
    return 1 + HALF_SPEED_TOKENS * parts / (config.batch_size * length)
