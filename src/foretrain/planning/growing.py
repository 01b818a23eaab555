"""`growth.layers = "auto"` of a GPT-2 that is not built yet."""

from __future__ import annotations

from foretrain.config import Config
from foretrain.engine.growing import Sizes, with_growth
from foretrain.models.causal_shape import CausalShape
from foretrain.models.gpt2 import GPT2Shape
from foretrain.planning.estimate import model_parameters


def with_planned_growth(config: Config, shape: GPT2Shape | CausalShape) -> tuple[Config, str]:
    """Return the configuration with numbers in place of "auto", and what is said of it.

    While only `epochs` says how long the run is, it stays "auto".
    """
    if config.growth.layers == "auto" and config.epochs is not None:
        return config, "decided when the run begins, because only the data says how many steps its epochs have"
    return with_growth(config, sizes_of_shape(shape), shape.context)


def sizes_of_shape(shape: GPT2Shape | CausalShape) -> Sizes:
    """Return the sizes of a model by its shape."""
    everything = model_parameters(shape).all
    in_blocks = sum(p.numel for p in everything if p.block is not None)
    return Sizes(shape.layers, in_blocks, sum(p.numel for p in everything))
