"""What growth saves, and `growth.layers = "auto"`: whether a run grows, by what was measured, and a sentence why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from foretrain.config import Config
from foretrain.engine.moments import Moments

LIMIT = 5.0
"""Tokens per parameter up to which growth is shown to pay: the most at which the whole interval of its speed-up lies
above 1 (docs/results.md). At 20 the mean is as good, and its interval begins at 0.98."""
SHARE = 0.6
"""Share of a step's arithmetic that must lie in the blocks. It comes from the measurements in docs/results.md."""


@dataclass(frozen=True)
class Rule:
    """One row of the table: where growth pays, and how it is done there."""

    most_tokens: float
    """Tokens per parameter."""
    least_share: float
    """Share of a step's arithmetic in the blocks."""
    begin: float
    """Share of the blocks that the run begins with."""
    at: float
    """Share of the run at which it grows."""


RULES = (Rule(LIMIT, SHARE, begin=0.5, at=0.5),)
"""All that was measured (docs/results.md). Where no row applies, growth does not pay. The first that applies counts."""


@dataclass(frozen=True)
class Sizes:
    """The parameters of a model, as far as growth asks for them."""

    blocks: int
    in_blocks: int
    """Parameters of all blocks."""
    parameters: int
    """Parameters of the whole model."""

    @property
    def block_share(self) -> float:
        """Return the share of a step's arithmetic that lies in the blocks: about that of the parameters.

        124M GPT-2: 0.68, as its token embedding is also its output layer. An embedding beside an output layer of its
        own counts too, though looking up a row costs nothing: then the share is too low.
        """
        return self.in_blocks / self.parameters if self.parameters else 0.0


def sizes_of(model: nn.Module, blocks: nn.Module, count: int) -> Sizes:
    """Return the sizes of a module. blocks: the list of its blocks, `count` of them, also while some are hidden."""
    in_blocks, everything = (sum(p.numel() for p in module.parameters()) for module in (blocks, model))
    return Sizes(count, in_blocks, everything)


def trained_sizes(model: nn.Module, name: str) -> Sizes | None:
    """Return the sizes of a model by the name of its list of blocks; None where there is none, or where a part of it is
    frozen."""
    try:
        blocks = model.get_submodule(name)
    except AttributeError:
        return None
    if not isinstance(blocks, nn.ModuleList) or not all(p.requires_grad for p in blocks.parameters()):
        return None
    return sizes_of(model, blocks, len(blocks))


def step_cost(layers: int, blocks: int, block_share: float) -> float:
    """Return what a step with `layers` of `blocks` costs; one of the whole model costs 1."""
    return 1.0 - block_share * (1.0 - layers / blocks)


def planned_growth(blocks: int, block_share: float, tokens_per_parameter: float) -> tuple[int, float] | None:
    """Return the blocks to begin with, and the share of the run at which it grows; None where growth does not pay.

    block_share: the share of a step's arithmetic that lies in the blocks.
    """
    for rule in RULES:
        if blocks > 1 and tokens_per_parameter <= rule.most_tokens and block_share >= rule.least_share:
            return max(1, int(rule.begin * blocks)), rule.at
    return None


def explained(blocks: int, block_share: float, tokens_per_parameter: float) -> str:
    """Say in one line what `planned_growth` decides, and why."""
    planned = planned_growth(blocks, block_share, tokens_per_parameter)
    if planned is not None:
        layers, at = planned
        return (
            f"{layers} of {blocks} blocks until {at:.0%} of the run, because {block_share:.0%} of a step lies in the "
            f"blocks and the run has only {tokens_per_parameter:.2g} tokens per parameter"
        )
    if blocks < 2:
        return _off("the model has one block")
    least, most = min(rule.least_share for rule in RULES), max(rule.most_tokens for rule in RULES)
    if block_share < least:
        return _off(f"only {block_share:.0%} of a step lies in the blocks, and it was seen to pay from {least:.0%} on")
    return _off(
        f"the run has {tokens_per_parameter:.3g} tokens per parameter, and it was seen to pay up to {most:g} only"
    )


def with_growth(config: Config, sizes: Sizes | None, length: int | None) -> tuple[Config, str]:
    """Return the configuration with numbers in place of `growth.layers = "auto"`, and what is said of it.

    sizes: None where there are no blocks that could be hidden and trained. length: tokens in each sequence of a batch;
    None where nobody knows them. What is said is empty where growth was not `auto`.
    """
    if config.growth.layers != "auto":
        return config, ""
    obstacle = _obstacle(config, sizes, length)
    planned, text = None, _off(obstacle)
    if not obstacle and sizes is not None and length is not None:
        tokens = config.max_steps * config.batch_size * length / sizes.parameters
        known = sizes.blocks, sizes.block_share, tokens
        planned, text = planned_growth(*known), explained(*known)
        if planned is not None and not Moments((planned[1],), config.max_steps).fits():
            planned, text = None, _off(f"a run of {config.max_steps} steps is too short to judge it")
    values = {"layers": 0} if planned is None else {"layers": planned[0], "at": planned[1]}
    return config.model_copy(update={"growth": config.growth.model_copy(update=values)}), text


def _obstacle(config: Config, sizes: Sizes | None, length: int | None) -> str:
    """Return why nothing can be decided or nothing can grow; empty: nothing is in the way."""
    if config.model.weights:
        return "the run starts from weights that have learned, and growth would throw a part of them away"
    if sizes is None:
        return f"growth.blocks = {config.growth.blocks!r} is no list of blocks that are all trained"
    if not config.steps_are_limited:
        return "max_time does not say how many steps there will be"
    if length is None:
        return "it is not known how many tokens a step has; give growth.layers a number to use it"
    return ""


def _off(why: str) -> str:
    return f"off, because {why}"
