"""`engine.activation_checkpointing` of whatever module a trainer is handed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import ranked
from tests.gloo import results
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine import recomputing
from foretrain.engine.execution import Execution
from foretrain.engine.recomputing import can_recompute
from foretrain.errors import ConfigError, OutOfMemory
from foretrain.health.shortage import advice
from foretrain.models import gpt2

STEPS = 6


class Block(nn.Module):
    """A block of somebody's own: with dropout, running statistics and an argument that is given by name."""

    def __init__(self, width: int = 8, drop: float = 0.3, norm: bool = False) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(drop)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls += 1
        return x + scale * self.drop(torch.tanh(self.norm(self.linear(x))))


class Own(nn.Module):
    def __init__(self, name: str = "stack", **of_block: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.name = name
        self.add_module(name, nn.ModuleList(Block(**of_block) for _ in range(4)))

    @property
    def listed(self) -> Any:
        return getattr(self, self.name)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.listed:
            x = block(x, scale=torch.ones(()))
        return self.last(x)


class Inlined(Own):
    """Goes past the blocks' own forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.listed:
            x = x + block.linear(x)
        return self.last(x)


class TwoLists(Own):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(1, 1)])


def trainer_of(model: nn.Module, **changes: Any) -> HybridTrainer:
    given = {"max_steps": STEPS, "device": "cpu", "hybrid.mode": "off"}
    given |= {name.replace("__", "."): value for name, value in changes.items()}
    return HybridTrainer(model, "adamw", nn.MSELoss(), from_mapping(given))


def called(model: nn.Module) -> int:
    """Calls of all blocks, hidden ones included."""
    return sum(block.calls for block in model.modules() if isinstance(block, Block))


def trained(model: Callable[[], Own], **changes: Any) -> tuple[Own, list[int]]:
    """A model after some steps, and how often its blocks were called in each."""
    torch.manual_seed(3)
    made = model()
    trainer = trainer_of(made, **changes)
    draw, calls = torch.Generator().manual_seed(0), []
    while trainer.global_step < trainer.config.max_steps:
        before = called(made)
        x = torch.randn(16, 4, generator=draw)
        trainer.step((x, x[:, :1] * x[:, 1:2]))
        calls.append(called(made) - before)
    return made, calls


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == also and torch.equal(a, b) for (name, a), (also, b) in pairs)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "parts of a batch": {"accumulation_steps": 2, "batch_size": 16},
    "updates in the backward pass": {"engine__update_in_backward": True, "optimizer__gradient_clip_norm": 0.0},
    "bf16": {"precision__type": "bf16"},
    "an average": {"evaluation__ema_decay": 0.9},
}


@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "running statistics"])
@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_ones_own_are_computed_again_to_the_same_bits(way: str, norm: bool) -> None:
    passes = 4 * (2 if way == "parts of a batch" else 1)
    plain, once = trained(lambda: Own(norm=norm), **WAYS[way])
    every, twice = trained(lambda: Own(norm=norm), **WAYS[way], engine__activation_checkpointing=True)
    half, some = trained(lambda: Own(norm=norm), **WAYS[way], engine__activation_checkpointing=0.5)
    assert (once, twice) == ([passes] * STEPS, [2 * passes] * STEPS)
    assert some == [passes + passes // 2] * STEPS
    assert same(plain, every)
    assert same(plain, half)


def test_dropout_of_the_check_above_makes_a_difference() -> None:
    one, _ = trained(lambda: Own(drop=0.3))
    other, _ = trained(lambda: Own(drop=0.0))
    assert not same(one, other)


def test_the_list_is_the_one_that_is_named() -> None:
    _, calls = trained(lambda: Own(name="layers"), engine__activation_checkpointing=True, growth__blocks="layers")
    assert calls == [8] * STEPS
    trainer = trainer_of(TwoLists(), engine__activation_checkpointing=True, growth__blocks="stack")
    kinds = [type(block) is Block for block in trainer.model.stack]  # type: ignore[union-attr]
    assert kinds == [False] * 4
    assert type(trainer.model.heads[0]) is nn.Linear  # type: ignore[index]


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (lambda: nn.Linear(4, 1), {}, r"= true: Linear has no nn.ModuleList of blocks that could be recomputed; leave it"),
    (TwoLists, {}, r"TwoLists has several lists of blocks, 'stack' and 'heads'; name one of them in growth.blocks"),
    (Own, {"growth__blocks": "h"}, r"growth.blocks = 'h' names no nn.ModuleList of blocks in Own; it has 'stack'"),
]


@pytest.mark.parametrize(("model", "changes", "words"), REFUSED)
def test_what_cannot_be_recomputed_is_refused_before_the_first_step(
    model: Callable[[], nn.Module], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer_of(model(), **changes, engine__activation_checkpointing=True)


@pytest.mark.parametrize("in_backward", [False, True])
def test_blocks_that_are_not_called_are_refused_before_the_first_update(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where something was compiled, as by tests before this one: calls in compiled code are not seen."""
    monkeypatch.setattr(recomputing, "anything_compiled", lambda: False)
    model = Inlined()
    before = copy.deepcopy(model)
    more = {"engine__update_in_backward": True, "optimizer__gradient_clip_norm": 0.0} if in_backward else {}
    trainer = trainer_of(model, engine__activation_checkpointing=0.5, **more)
    with pytest.raises(ConfigError, match=r"= 0.5: Inlined calls no block of 'stack' as a module, block\(x\)"):
        trainer.step((torch.ones(2, 4), torch.ones(2, 1)))
    assert same(model, before)
    trainer_of(model).step((torch.ones(2, 4), torch.ones(2, 1)))
    monkeypatch.setattr(recomputing, "anything_compiled", lambda: True)
    trainer_of(model, engine__activation_checkpointing=0.5, **more).step((torch.ones(2, 4), torch.ones(2, 1)))


def test_evaluation_and_frozen_modes_compute_once() -> None:
    trainer = trainer_of(Own(), engine__activation_checkpointing=True)
    trainer.evaluate([(torch.ones(2, 4), torch.ones(2, 1))])
    assert [block.calls for block in trainer.model.stack] == [1] * 4  # type: ignore[union-attr]


def test_a_copy_is_the_module_as_it_was_and_a_later_trainer_begins_anew() -> None:
    model = Own()
    trainer_of(model, engine__activation_checkpointing=True)
    assert isinstance(model.stack[0], Block)  # type: ignore[index]
    other = copy.deepcopy(model)
    assert [type(block) for block in other.stack] == [Block] * 4  # type: ignore[union-attr]
    assert same(model, other)
    assert set(vars(other.stack[0])) == set(vars(Block()))  # type: ignore[index]
    assert model.stack[0].__reduce_ex__(4)[:2] == (object.__new__, (Block,)), "so it is pickled"  # type: ignore[index]
    trainer_of(model)
    assert [type(block) for block in model.stack] == [Block] * 4  # type: ignore[union-attr]
    assert set(vars(model.stack[0])) == set(vars(Block()))  # type: ignore[index]


def test_shown_blocks_are_recomputed_while_a_model_grows() -> None:
    growing = {"growth__layers": 2, "growth__blocks": "stack", "max_steps": 60}
    plain, once = trained(Own, **growing)
    for share, factor in ((True, 2.0), (0.5, 1.5)):
        again, calls = trained(Own, **growing, engine__activation_checkpointing=share)
        assert calls == [factor * count for count in once]
        assert same(plain, again)
    assert {2, 4} == set(once)


class Curve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(x))


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(Curve() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.layers:
            x = block(x)
        return self.last(x)


def residuals(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return {"equation": bend + 9 * u, "edge": model(torch.zeros(1, 1)) - 1}


def solved(share: Any) -> tuple[Field, int, int]:
    torch.manual_seed(0)
    model = Field()
    config = from_mapping({"max_steps": 120, "device": "cpu", "engine.activation_checkpointing": share})
    trainer = HybridTrainer(model, torch.optim.Adam(model.parameters(), 3e-3), residuals=residuals, config=config)
    x = torch.linspace(0, 1, 32)[:, None]
    trainer.step(x)
    calls = sum(block.calls for block in model.layers)
    while trainer.global_step < 120:
        trainer.step(x)
    return model, calls, len(trainer.summary()["moves"] or [])


def test_derivatives_and_leaps_of_the_linearised_run_are_the_same_bits() -> None:
    plain, once, moves = solved(False)
    again, more, others = solved(True)
    assert once < more
    assert moves == others > 0
    assert same(plain, again)


def test_blocks_of_transformers_leave_out_their_cache() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    found = []
    for share in (False, True):
        torch.manual_seed(1)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        calls: list[int] = []
        for block in model.transformer.h:
            block.ln_1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        config = from_mapping(
            {"max_steps": 3, "device": "cpu", "hybrid.mode": "off", "engine.activation_checkpointing": share}
        )
        trainer = HybridTrainer(model, "adamw", lambda model, batch: model(batch, labels=batch).loss, config)
        for step in range(3):
            trainer.step(torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(step)))
        found.append((model, len(calls)))
    assert [count for _, count in found] == [9, 18]
    assert same(found[0][0], found[1][0])


# --- language models of ours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_gpt2_that_is_handed_in_does_as_the_configuration_says(
    make_model: Callable[..., Any], make_batch: Callable[..., Any], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[nn.Module] = []
    original = gpt2.Block.forward

    def counted(block: Any, x: Tensor) -> Tensor:
        calls.append(block)
        return original(block, x)

    monkeypatch.setattr(gpt2.Block, "forward", counted)
    weights, counts = [], []
    for share in (False, 0.5, True):
        calls.clear()
        config = from_mapping(
            {"max_steps": 4, "device": "cpu", "hybrid.mode": "off", "engine.activation_checkpointing": share}
        )
        trainer = HybridTrainer(make_model(layers=2, dropout=dropout), config=config)
        for step in range(4):
            trainer.step(make_batch(seed=step))
        counts.append(len(calls))
        weights.append(trainer.model)
    assert counts == [8, 12, 16]
    assert same(weights[0], weights[1])
    assert same(weights[0], weights[2])


# --- what depends on it ----------------------------------------------------------------------------------------------


def test_a_step_that_reads_random_states_is_not_recorded() -> None:
    for share in (False, True):
        step = trainer_of(Own(), engine__activation_checkpointing=share).engine.full_step
        step.device_skip = True
        execution = Execution(step, "auto", recordable=True)
        execution.device = torch.device("cuda")
        assert execution.check() is not share


def test_it_is_advised_where_blocks_can_be_recomputed() -> None:
    config = from_mapping({})
    for model, possible in ((Own(), True), (nn.Linear(1, 1), False), (TwoLists(), False)):
        assert can_recompute(model, config) is possible
        assert ("engine.activation_checkpointing = true" in advice(config, model)) is possible


class Short:
    """A loss for which memory runs out as long as every block keeps what it computed."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(model, Own) and type(model.listed[0]) is Block:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)


@pytest.mark.parametrize("model", [Own, TwoLists])
def test_a_run_that_is_short_of_memory_goes_on_with_recomputed_blocks_where_there_are_some(
    model: Callable[[], Own],
) -> None:
    given = {"max_steps": 4, "device": "cpu", "hybrid.mode": "off", "batch_size": 1}
    config = from_mapping(given | {"memory.on_out_of_memory": "retry"})
    loss = Short()
    trainer = HybridTrainer(model(), "adamw", loss, config)
    batch = torch.ones(1, 4), torch.ones(1, 1)
    if model is TwoLists:
        with pytest.raises(OutOfMemory, match="nothing smaller is left to try"):
            trainer.step(batch)
        return
    trainer.step(batch)
    trainer.step(batch)
    assert loss.failed == 1
    assert trainer.engine.recomputing.share is True
    assert trainer.summary()["out_of_memory"]["settings"] == {"engine.activation_checkpointing": True}


# --- on several ranks ------------------------------------------------------------------------------------------------


def on_ranks(rank: int) -> dict[str, Any]:
    """Calls of blocks and last weights of models of somebody's own, replicated and sharded, with all blocks kept and
    with all of them computed again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    told: dict[str, Any] = {}
    for kind in ("ddp", "fsdp2"):
        for share in (False, True):
            torch.manual_seed(3)
            model = Own()
            blocks = list(model.stack)  # type: ignore[call-overload]
            given: nn.Module = model
            if kind == "ddp":
                given = nn.parallel.DistributedDataParallel(model)
            else:
                mesh = init_device_mesh("cpu", (2,))
                for block in blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(model, mesh=mesh)
            trainer = trainer_of(given, engine__activation_checkpointing=share)
            draw = torch.Generator().manual_seed(rank)
            for _ in range(STEPS):
                x = torch.randn(8, 4, generator=draw)
                trainer.step((x, x[:, :1] * x[:, 1:2]))
            told[f"{kind} {share}"] = {"calls": called(model), "weights": ranked.digest(trainer)}
    return told


def test_replicas_and_shards_compute_blocks_again_to_the_same_bits() -> None:
    for told in results(2, on_ranks):
        for kind in ("ddp", "fsdp2"):
            plain, again = told[f"{kind} False"], told[f"{kind} True"]
            assert (plain["calls"], again["calls"]) == (4 * STEPS, 8 * STEPS)
            assert plain["weights"] == again["weights"]
