"""What `spread` makes of a model on gloo ranks: its units, its number formats, and steps that are those of one process.

Functions that begin with `on_` run on every rank. Tests read what they found.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.causal import make_inner
from tests.gloo import results
from tests.ranked import own_rows, ranks, whole, words
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from foretrain import HybridTrainer
from foretrain.config import Config, from_mapping
from foretrain.models.blocks import blocks_of
from foretrain.models.causal_lm import CausalLM
from foretrain.models.causal_shape import shape_of
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.recipes.spreading import ONE_PROCESS, Spreading, for_trainer, spread

pytestmark = pytest.mark.xdist_group("spreading on ranks")  # what is below is made once

Found = dict[str, Any]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_steps": 100,
    "batch_size": 8,
    "optimizer.type": "sgd",  # its steps are as long as gradients are
    "optimizer.learning_rate": 0.1,
    "optimizer.gradient_clip_norm": 0.0,
    "hybrid.mode": "off",
    "health.interval": 0,
}
KINDS = ("ddp", "fsdp2")
FAMILIES: dict[str, Found] = {"llama": {}, "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


def ours() -> GPT2:
    return GPT2(GPT2Shape(layers=3, heads=2, width=24, context=16, vocab_size=97), seed=1)


def theirs(family: str) -> CausalLM:
    """A model of transformers."""
    inner = make_inner(family, num_hidden_layers=3, vocab_size=97, **FAMILIES[family])
    return CausalLM(inner, shape_of(inner))


def spreading(kind: str) -> Spreading:
    _, size = ranks()
    if kind == "ddp":
        return Spreading("ddp", size)
    return Spreading("fsdp2", shard=size) if kind == "fsdp2" else ONE_PROCESS


def settings(**changes: Any) -> Config:
    return from_mapping(SETTINGS | {name.replace("__", "."): value for name, value in changes.items()})


def trainer(model: nn.Module, kind: str, **changes: Any) -> HybridTrainer:
    """Make one as the recipes do."""
    config, chosen = settings(**changes), spreading(kind)
    return HybridTrainer(model, loss_fn=spread(model, chosen, config), config=for_trainer(config, chosen))


def trained(made: HybridTrainer, steps: int = 3) -> Found:
    """How some steps end."""
    for position in range(steps):
        made.step(own_rows(words(position)))
    weights = {name: float(whole(p).double().norm()) for name, p in made.model.named_parameters() if p.requires_grad}
    return {"loss": made.evaluate([own_rows(words(5000))]), "weights": weights}


# --- models of others ------------------------------------------------------------------------------------------------


def on_families(kind: str) -> Found:
    found = {}
    for family in FAMILIES:
        made = trainer(theirs(family), kind)
        units = [name for name, module in made.model.named_modules() if isinstance(module, FSDPModule)]
        found[family] = {"units": units, "whole": whole_at_once(made)} | trained(made)
    return found


def whole_at_once(made: HybridTrainer) -> list[list[int]]:
    """The blocks that are gathered in the forward pass of each block."""
    blocks, found = blocks_of(made.model), []

    def look(*_: Any) -> None:
        found.append([n for n, block in enumerate(blocks) if not isinstance(next(block.parameters()), DTensor)])

    hooks = [next(block.children()).register_forward_pre_hook(look) for block in blocks]
    made.engine.probe(own_rows(words(0)))
    for hook in hooks:
        hook.remove()
    return found


CHECKS = (on_families,)


def on_ranks(rank: int) -> Found:
    return {f"{check.__name__} {kind}": check(kind) for check in CHECKS for kind in KINDS}


@pytest.fixture(scope="module")
def found() -> list[Found]:
    """What each of two ranks found."""
    return results(2, on_ranks)


@pytest.fixture(scope="module")
def alone() -> dict[str, Found]:
    """What one process finds."""
    return {check.__name__: check("one") for check in CHECKS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_a_model_of_transformers_are_those_of_one_process(
    kind: str, family: str, found: list[Found], alone: dict[str, Found]
) -> None:
    theirs = alone["on_families"][family]
    for rank in found:
        ours = rank[f"on_families {kind}"][family]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-4)


@pytest.mark.parametrize(("family", "blocks"), [("llama", "inner.model.layers"), ("gpt2", "inner.transformer.h")])
def test_each_block_of_a_model_of_transformers_is_gathered_by_itself(
    family: str, blocks: str, found: list[Found]
) -> None:
    sharded, replicated = (found[0][f"on_families {kind}"][family] for kind in ("fsdp2", "ddp"))
    assert sharded["units"] == ["", *(f"{blocks}.{number}" for number in range(3))]
    assert sharded["whole"] == [[0], [1], [2]]
    assert replicated["units"] == []
