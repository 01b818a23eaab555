"""What `spread` makes of a model on gloo ranks: its units, its number formats, and steps that are those of one process.

Functions that begin with `on_` run on every rank. Tests read what they found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.causal import make_inner, write_causal
from tests.finetuning import config_for, write_base, write_colors
from tests.gloo import results
from tests.ranked import own_rows, ranks, whole, words
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain import HybridTrainer
from foretrain.config import Config, from_mapping
from foretrain.engine.ranks import local
from foretrain.events import Event, Progress
from foretrain.launch.group import Group, RankPlace
from foretrain.models.blocks import blocks_of
from foretrain.models.causal_lm import CausalLM
from foretrain.models.causal_shape import shape_of
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.planning.estimate import target_of
from foretrain.recipes.finetune import finetune
from foretrain.recipes.spreading import ONE_PROCESS, Spreading, choose, for_trainer, spread

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
FAMILIES: dict[str, Found] = {
    "llama": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen2": {},  # its head is its embedding
}
OPTIONS: dict[str, Found] = {"qwen2": {"fused_loss": True, "activation_checkpointing": 0.5}}


def ours(**options: Any) -> GPT2:
    return GPT2(GPT2Shape(layers=3, heads=2, width=24, context=16, vocab_size=97), seed=1, **options)


def theirs(family: str) -> CausalLM:
    """A model of transformers."""
    inner = make_inner(family, num_hidden_layers=3, vocab_size=97, **FAMILIES[family])
    return CausalLM(inner, shape_of(inner), **OPTIONS.get(family, {}))


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


# --- what is computed, and what is sent ------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Notes the number formats of all that goes between processes, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [one for one in pytree.tree_leaves(args) if isinstance(one, Tensor)]
            self.formats.setdefault(func.__name__.split(".")[0], []).append(str(tensors[0].dtype))
        return func(*args, **(kwargs or {}))


def on_bf16(kind: str) -> Found:
    """A step in bf16: formats of what blocks read and give, of weights, of gradients, and of what is sent."""
    found: Found = {}
    for narrow in (True, False):
        made = trainer(ours(narrow_residual=narrow), kind, precision__type="bf16", precision__narrow_residual=narrow)
        block, seen = blocks_of(made.model)[1], []

        def product(_: nn.Module, __: Any, made: Tensor, seen: list[str] = seen) -> None:
            seen.append(str(made.dtype))

        def given(_: nn.Module, given: Any, seen: list[str] = seen) -> None:
            seen.append(str(given[0].dtype))

        hooks = [block.register_forward_pre_hook(given), block.attention.register_forward_hook(product)]
        hooks.append(block.feed_forward.register_forward_hook(product))
        with Sent() as sent:
            made.step(own_rows(words(0)))
        for hook in hooks:
            hook.remove()
        reads = probed(kind) if narrow else []
        gradients = {str(p.grad.dtype) for p in made.model.parameters() if p.grad is not None}
        found[str(narrow)] = {
            "computed": seen,
            "sent": {name: sorted(set(formats)) for name, formats in sent.formats.items()},
            "gradients": sorted(gradients),
            "probed": reads,
            "held": sorted({str(p.dtype) for p in made.model.parameters()}),
            **trained(made),
        }
    return found


def probed(kind: str) -> list[str]:
    """What a block reads in steps in bf16, and in probes in fp32."""
    made = trainer(ours(), kind, precision__type="bf16", precision__predict="fp32")
    seen: list[str] = []
    hook = blocks_of(made.model)[1].register_forward_pre_hook(lambda _, given: seen.append(str(given[0].dtype)))
    made.step(own_rows(words(0)))
    made.engine.probe(own_rows(words(1)))
    hook.remove()
    return seen


def on_parts(kind: str) -> Found:
    """How often gradients are reduced in a step of one part of a batch, and of four; and where it leads to."""
    found = {}
    for parts in (1, 4):
        made = trainer(ours(), kind, accumulation_steps=parts)
        with Sent() as sent:
            made.step(own_rows(words(0)))
        found[str(parts)] = {"sent": {name: len(formats) for name, formats in sent.formats.items()}} | trained(made)
    return found


# --- blocks that are compiled ----------------------------------------------------------------------------------------


def on_compiled(kind: str) -> Found:
    """Graphs that are made of models of three blocks, in steps and in an evaluation; and where they lead to."""
    found: Found = {}
    for name, make in (("ours", ours), ("llama", partial(theirs, "llama"))):
        with counted_graphs() as graphs:
            made = trainer(make(), kind, engine__compile=kind != "one")
            for position in range(3):
                made.step(own_rows(words(position)))
            of_steps = len(graphs)
            found[name] = {"loss": made.evaluate([own_rows(words(5000))]), "graphs": [of_steps, len(graphs)]}
    return found


@contextmanager
def counted_graphs() -> Iterator[list[Any]]:
    """What `nn.Module.compile` makes graphs of inside the block, for both passes. No machine code is made of them."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    before = nn.Module.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", lambda module, **options: before(module, backend=backend, **options))
        yield graphs


# --- whole runs ------------------------------------------------------------------------------------------------------


def on_finetuned(kind: str, folder: str) -> Found:
    """Adapters that a recipe trains: weights of the base are frozen, those of Llama in bf16, and answers differ in
    length."""
    found: Found = {}
    for name in ("gpt2", "llama"):
        config = config_for(
            Path(folder, name),
            Path(folder, "colors.jsonl"),
            distributed__type="auto" if kind == "one" else kind,
            hybrid__mode="off",
            max_steps=5,
            accumulation_steps=2,
            optimizer__type="sgd",
            optimizer__learning_rate=0.05,
            optimizer__gradient_clip_norm=0.0,
            precision__type="bf16" if name == "llama" else "fp32",
            evaluation__answers=0,
        )
        out = Path(folder, f"{kind}-{name}")
        summary = finetune(config, out, progress=False)
        adapter = load_file(out / "adapter" / "adapter_model.safetensors")
        found[name] = {
            "loss": summary["final_val_loss"],
            "steps": summary["global_step"],
            "adapter": {name: [float(p.norm()), float(p.sum())] for name, p in adapter.items()},
        }
    return found


def on_stopped(kind: str, folder: str) -> Found:
    """A run that the last rank alone asks to end, long before its last step."""
    rank, size = ranks()
    made = trainer(ours(), kind, max_steps=100_000)

    def enough(event: Event) -> None:
        if isinstance(event, Progress) and event.step >= 7 and rank == size - 1:
            made.stop("the last rank has seen enough")

    summary = made.fit([own_rows(words(position)) for position in range(4)], callbacks=[enough], progress=False)
    return {name: summary[name] for name in ("reason", "stopped_because", "global_step")}


# --- all of it -------------------------------------------------------------------------------------------------------

ALIKE: tuple[Callable[[str], Found], ...] = (on_families, on_bf16, on_parts, on_compiled)
WHOLE: tuple[Callable[[str, str], Found], ...] = (on_finetuned,)


def on_two_ranks(_: int, folder: str) -> Found:
    found = {f"{check.__name__} {kind}": check(kind) for check in ALIKE for kind in KINDS}
    return found | {f"{check.__name__} {kind}": check(kind, folder) for check in (*WHOLE, on_stopped) for kind in KINDS}


def on_four_ranks(_: int) -> Found:
    """Two copies of the weights, each of them shared by two ranks, as settings ask for."""
    rank, size = ranks()
    config = settings(distributed__replicate=2, distributed__shard=2)
    model = ours()
    numbers = sum(p.numel() for p in model.parameters())
    chosen = choose(config, target_of(config, model.shape), Group(RankPlace(rank, size)))
    made = HybridTrainer(model, loss_fn=spread(model, chosen, config), config=for_trainer(config, chosen))
    with Sent() as sent:
        made.step(own_rows(words(0)))
    parts = [local(p) for p in model.parameters()]
    return {
        "chosen": str(chosen),
        "held": sum(part.numel() for part in parts) / numbers,
        "part": sum(float(part.double().sum()) for part in parts),
        "sent": {name: len(formats) for name, formats in sent.formats.items()},
    } | trained(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases and examples."""
    made = tmp_path_factory.mktemp("bases")
    write_base(made / "gpt2")
    write_causal(made / "llama", dtype=torch.bfloat16)
    write_colors(made / "colors.jsonl")
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Found]:
    """What each of two ranks found."""
    return results(2, on_two_ranks, str(folder))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Found]:
    """What one process finds."""
    found = {check.__name__: check("one") for check in ALIKE}
    return found | {check.__name__: check("one", str(folder)) for check in WHOLE}


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


@pytest.mark.parametrize(
    ("family", "blocks"),
    [("llama", "inner.model.layers"), ("gpt2", "inner.transformer.h"), ("qwen2", "inner.model.layers")],
)
def test_each_block_of_a_model_of_transformers_is_gathered_by_itself(
    family: str, blocks: str, found: list[Found]
) -> None:
    sharded, replicated = (found[0][f"on_families {kind}"][family] for kind in ("fsdp2", "ddp"))
    assert sharded["units"] == ["", *(f"{blocks}.{number}" for number in range(3))]
    assert sharded["whole"] == [[0], [1], [2]]
    assert replicated["units"] == []


@pytest.mark.parametrize("narrow", ["True", "False"])
def test_bf16_is_computed_with_and_gradients_are_reduced_in_fp32(
    narrow: str, found: list[Found], alone: dict[str, Found]
) -> None:
    theirs = alone["on_bf16"][narrow]
    assert theirs["computed"] == [f"torch.{'bfloat16' if narrow == 'True' else 'float32'}", *2 * ["torch.bfloat16"]]
    sent = {
        "ddp": {"allreduce_": ["torch.float32"]},
        "fsdp2": {
            "_allgather_base_": [theirs["computed"][0]],  # as wide as the sum that runs through the blocks
            "_reduce_scatter_base_": ["torch.float32"],
            "allreduce_": ["torch.float64"],  # the norm of gradients
        },
    }
    for kind in KINDS:
        ours = found[0][f"on_bf16 {kind}"][narrow]
        assert ours["sent"] == sent[kind]
        assert ours["computed"] == theirs["computed"]
        assert ours["probed"] == theirs["probed"]
        assert ours["gradients"] == ours["held"] == ["torch.float32"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_probes_have_the_format_that_is_set_for_them(found: list[Found]) -> None:
    for kind in KINDS:
        assert found[0][f"on_bf16 {kind}"]["True"]["probed"] == ["torch.bfloat16", "torch.float32"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_parts_of_a_batch_are_reduced_once(
    kind: str, found: list[Found], alone: dict[str, Found]
) -> None:
    ours, theirs = found[0][f"on_parts {kind}"], alone["on_parts"]
    reduced = {
        "ddp": ("allreduce_", 1),
        "fsdp2": ("_reduce_scatter_base_", 4),
    }  # all at once; three blocks and the rest
    name, times = reduced[kind]
    assert [ours[parts]["sent"][name] for parts in ("1", "4")] == [times, times]
    for parts in ("1", "4"):
        assert ours[parts]["loss"] == pytest.approx(theirs["1"]["loss"], rel=1e-5)
        assert ours[parts]["weights"] == pytest.approx(theirs["1"]["weights"], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ours", "llama"])
def test_blocks_are_compiled_once_for_all(kind: str, name: str, found: list[Found], alone: dict[str, Found]) -> None:
    ours = found[0][f"on_compiled {kind}"][name]
    assert ours["graphs"] == [1, 2], "one of steps, and one without gradients"
    assert ours["loss"] == pytest.approx(alone["on_compiled"][name]["loss"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fine_tuning_is_that_of_one_process(kind: str, name: str, found: list[Found], alone: dict[str, Found]) -> None:
    ours, theirs = found[0][f"on_finetuned {kind}"][name], alone["on_finetuned"][name]
    near = 1e-5 if name == "gpt2" else 3e-3  # bf16
    assert ours["steps"] == theirs["steps"] == 5
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=near)
    assert ours["adapter"].keys() == theirs["adapter"].keys()
    for weight, numbers in theirs["adapter"].items():
        assert ours["adapter"][weight] == pytest.approx(numbers, rel=10 * near, abs=10 * near)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_that_one_rank_asks_for_ends_all_after_the_same_step(kind: str, found: list[Found]) -> None:
    one, other = (rank[f"on_stopped {kind}"] for rank in found)
    assert one == other
    assert (one["reason"], one["stopped_because"]) == ("stopped early", "the last rank has seen enough")
    assert 7 <= one["global_step"] < 100_000


def test_copies_of_shards_are_what_settings_ask_for(alone: dict[str, Found]) -> None:
    found = results(4, on_four_ranks)
    theirs = alone["on_parts"]["1"]
    for rank in found:
        assert rank["chosen"] == "4 ranks, each with a shard of the weights (FSDP2, 2 times 2)"
        assert rank["held"] == pytest.approx(0.5, abs=0.05)
        assert rank["sent"]["_reduce_scatter_base_"] == 4  # between two ranks, and once more between the copies
        assert rank["sent"]["allreduce_"] == 4 + 1
        assert rank["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert rank["weights"] == pytest.approx(theirs["weights"], rel=1e-4)
    first, second, third, fourth = (rank["part"] for rank in found)
    assert (first, second) == (third, fourth)
    assert first != second
