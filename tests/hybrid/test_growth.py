"""Growth: runs that begin with fewer blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend

from foretrain import Config, HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine import depth as depths
from foretrain.errors import CheckpointError, ConfigError
from foretrain.events import Event, Grown, Moved, Notice, RunStarted
from foretrain.hybrid import growth as growths
from foretrain.hybrid import new_blocks
from foretrain.models.gpt2 import GPT2, Block, GPT2Shape
from foretrain.persist.codec import put_together, snapshot

PLAIN: dict[str, Any] = {"max_steps": 40, "hybrid.mode": "off", "optimizer.learning_rate": 3e-3, "device": "cpu"}
TEXT = torch.randint(32, (70_000,), generator=torch.Generator().manual_seed(0)) // 2


def model_of(layers: int = 4, width: int = 16, **changes: Any) -> GPT2:
    return GPT2(GPT2Shape(layers=layers, heads=2, width=width, context=16, vocab_size=32, **changes), seed=1)


def batch(position: int) -> tuple[Tensor, Tensor]:
    rows = TEXT[position * 68 : position * 68 + 68].view(4, 17)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def config_of(**changes: Any) -> Config:
    return from_mapping(
        PLAIN | {"growth.layers": 2} | {name.replace("__", "."): value for name, value in changes.items()}
    )


class Run:
    def __init__(self, model: nn.Module | None = None, optimizer: Any = None, **changes: Any) -> None:
        self.trainer = HybridTrainer(model or model_of(), optimizer, config=config_of(**changes))
        self.events: list[Event] = []
        self.trainer.bus.subscribe(self.events.append)
        self.calls: list[int] = []
        """Of blocks, in each step; from `count` on."""
        self.passes: list[int] = []
        """Of the whole model."""

    def count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count forward passes from now on, step by step."""
        block, model, step = Block.forward, GPT2.forward, self.trainer.step

        def of_block(one: Any, x: Tensor) -> Tensor:
            self.calls[-1] += 1
            return block(one, x)

        def of_model(one: Any, *arguments: Any) -> Tensor:
            self.passes[-1] += 1
            return model(one, *arguments)

        def counting(batch: Any) -> Any:
            self.calls.append(0)
            self.passes.append(0)
            return step(batch)

        monkeypatch.setattr(Block, "forward", of_block)
        monkeypatch.setattr(GPT2, "forward", of_model)
        monkeypatch.setattr(self.trainer, "step", counting)

    def to(self, step: int) -> Run:
        while self.trainer.global_step < step:
            self.trainer.step(batch(self.trainer.position))
        return self

    @property
    def layers(self) -> int:
        assert self.trainer.growth is not None
        return self.trainer.growth.depth.layers

    @property
    def verdicts(self) -> list[tuple[str, int]]:
        return [(event.verdict, event.step) for event in self.events if isinstance(event, Grown)]

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.trainer.model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_begins_shallow_and_ends_deep() -> None:
    run = Run().to(20)
    assert run.layers == 2
    before = run.weights()
    run.to(21)
    assert run.layers == 4
    assert run.verdicts == [("made", 20)]
    assert not same(before, run.weights())
    run.to(40)
    assert [verdict for verdict, _ in run.verdicts] == ["made", "kept"]
    summary = run.trainer.summary()["growth"]
    assert (summary["layers"], summary["of"]) == (4, 4)
    assert [move["verdict"] for move in summary["moves"]] == ["made", "kept"]


def test_until_it_grows_it_is_the_run_of_a_shallow_model() -> None:
    deep = model_of()
    shallow = model_of(layers=2)
    for number, source in ((0, 0), (1, 2)):
        shallow.blocks[number].load_state_dict(deep.blocks[source].state_dict())
    for part in ("token_embedding", "position_embedding", "final_norm"):
        getattr(shallow, part).load_state_dict(getattr(deep, part).state_dict())
    grown = Run(deep).to(20)
    plain = Run(shallow, growth__layers=0)
    while plain.trainer.global_step < 20:
        plain.trainer.step(batch(plain.trainer.position))
    assert torch.equal(deep(batch(900)[0]), shallow(batch(900)[0]))
    assert grown.trainer.growth is not None
    grown.trainer.growth.depth.use(range(4))
    torch.testing.assert_close(deep(batch(900)[0]), shallow(batch(900)[0]))  # as the whole model, too


def test_new_blocks_begin_as_copies_with_the_state_of_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(optimizer__type="adamw", evaluation__ema_decay=0.9).to(20)
    growth, engine = run.trainer.growth, run.trainer.engine
    assert growth is not None
    growth.follow(batch(20))
    assert growth.depth.layers == 4
    named = dict(run.trainer.model.named_parameters())
    averages = dict(zip(engine.average.names, engine.average.average, strict=True))  # type: ignore[union-attr]
    for name, parameter in named.items():
        if name.startswith(("blocks.1.", "blocks.3.")):
            source = name.replace("blocks.1.", "blocks.0.").replace("blocks.3.", "blocks.2.")
            assert torch.equal(parameter, named[source])
            assert torch.equal(averages[name], averages[source])
            states = engine.optimizer.state
            assert torch.equal(states[parameter]["exp_avg"], states[named[source]]["exp_avg"])


def test_several_stages() -> None:
    run = Run(growth__layers=[1, 2], growth__at=[0.25, 0.5])
    seen = [run.to(step).layers for step in (9, 11, 19, 22, 40)]
    assert seen == [1, 2, 2, 4, 4]


Met = Callable[[Run], None]
"""Asserts after a run that it really was what its name says."""


@dataclass(frozen=True)
class Other:
    """Something that growth has to go together with."""

    changes: dict[str, Any]
    met: Met
    model: Callable[[], nn.Module] = model_of
    batch: Callable[[int], tuple[Tensor, Tensor]] = batch

    def run(self) -> Run:
        return Run(self.model(), **self.changes)

    def advance(self, run: Run) -> None:
        run.trainer.step(self.batch(run.trainer.position))


def state_of(run: Run, name: str) -> dict[str, Any]:
    """The optimizer's state of a weight."""
    named = dict(run.trainer.model.named_parameters())
    return run.trainer.optimizer.state[named[name]]


def uses_adamw(run: Run) -> None:
    assert {"exp_avg", "exp_avg_sq"} <= set(state_of(run, "blocks.1.attention.qkv.weight"))


def uses_muon(run: Run) -> None:
    assert "exp_avg_sq" not in state_of(run, "blocks.1.attention.qkv.weight")


def has_8_bit_states(run: Run) -> None:
    for number in range(4):
        for layer in ("attention.qkv", "attention.out", "feed_forward.up", "feed_forward.down"):
            state = state_of(run, f"blocks.{number}.{layer}.weight")
            assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)


def has_an_average(run: Run) -> None:
    average, named = run.trainer.engine.average, dict(run.trainer.model.named_parameters())
    assert average is not None
    kept = dict(zip(average.names, average.average, strict=True))
    assert all(f"blocks.{number}.attention.qkv.weight" in kept for number in range(4))
    assert not torch.equal(kept["blocks.1.attention.qkv.weight"], named["blocks.1.attention.qkv.weight"])


def adds_up_parts(run: Run) -> None:
    assert run.passes == [2] * 40, "forward passes of the whole model per step"


def computes_blocks_twice(run: Run) -> None:
    assert run.calls == [4] * 20 + [8] * 20, "calls of blocks per step"


def computes_some_blocks_twice(run: Run) -> None:
    assert run.calls == [3] * 20 + [6] * 20


def updates_on_the_way(run: Run) -> None:
    assert run.trainer.engine.full_step.in_backward is not None
    assert all(p.grad is None for p in run.trainer.model.parameters())


def moves_before(run: Run) -> None:
    """A move that was kept, before the growth."""
    made = next(step for verdict, step in run.verdicts if verdict == "made")
    moves = [event for event in run.events if isinstance(event, Moved)]
    assert any(event.verdict == "kept" and event.step <= made and event.horizon > 0 for event in moves)


def moves_on_both_sides(run: Run) -> None:
    """Moves that were kept, in part or whole: before the growth and after its trial."""
    moves_before(run)
    kept = next(step for verdict, step in run.verdicts if verdict == "kept")
    moves = [event for event in run.events if isinstance(event, Moved)]
    assert any(event.verdict in ("kept", "shrunk") and event.step > kept for event in moves)


def chains_on_both_sides(run: Run) -> None:
    """A chain of leaps ends where the model is to grow, and another one follows after the trial."""
    chains = [event for event in run.events if isinstance(event, Moved) and event.chained and event.verdict == "kept"]
    (made, kept) = (step for _, step in run.verdicts)
    assert chains[0].step == 20
    assert chains[0].horizon > 1
    assert made == 20 + 4, "the losses that growth is judged by are those since the chain"
    assert chains[1].step > kept


def scales_losses(run: Run) -> None:
    precision = run.trainer.engine.precision
    assert precision.scaled
    assert float(precision.scale) > 1
    assert precision.forward == "fp16"


def grows_twice(run: Run) -> None:
    assert [event.layers for event in run.events if isinstance(event, Grown) and event.verdict == "made"] == [2, 4]


def grows_from_three(run: Run) -> None:
    assert [event.layers for event in run.events if isinstance(event, Grown) and event.verdict == "made"] == [4]
    assert set(run.calls) == {3, 4}


MOVING: dict[str, Any] = {
    "hybrid__warmup_steps": 5,
    "hybrid__full_steps": 3,
    "hybrid__window_steps": 2,
    "hybrid__correct_steps": 2,
    "optimizer__type": "adamw",
    "schedule__type": "constant",
}
OTHERS: dict[str, Other] = {
    "plain": Other({}, uses_muon),
    "adamw": Other({"optimizer__type": "adamw"}, uses_adamw),
    "8-bit states": Other(
        {"optimizer__type": "adamw", "optimizer__state_type": "8bit"}, has_8_bit_states, lambda: model_of(width=64)
    ),
    "average": Other({"evaluation__ema_decay": 0.9}, has_an_average),
    "accumulation": Other({"accumulation_steps": 2, "batch_size": 4}, adds_up_parts),
    "recomputed blocks": Other(
        {"engine__activation_checkpointing": True}, computes_blocks_twice, lambda: model_of(dropout=0.1)
    ),
    "half of the blocks recomputed": Other({"engine__activation_checkpointing": 0.5}, computes_some_blocks_twice),
    "updates in the backward pass": Other(
        {"engine__update_in_backward": True, "optimizer__gradient_clip_norm": 0.0}, updates_on_the_way
    ),
    "prediction": Other(
        {
            **MOVING,
            "hybrid__mode": "leap",
            "hybrid__max_predict_steps": 4,
            "max_steps": 80,
            "growth__at": 0.4,
        },
        moves_on_both_sides,
        batch=lambda position: batch(0),
    ),
    "chains of leaps": Other(
        {
            **MOVING,
            "hybrid__mode": "leap",
            "optimizer__weight_decay": 0.0,
            "max_steps": 80,
            "growth__at": 0.25,
        },
        chains_on_both_sides,
        batch=lambda position: batch(0),
    ),
    "a rollout before it": Other(
        {
            **MOVING,
            "hybrid__mode": "rollout",
            "hybrid__max_predict_steps": 4,
            "audit__time_budget": 1.0,
            "audit__steps": 4,
            "max_steps": 60,
        },
        moves_before,
    ),
    "a leap before it": Other(
        {
            "hybrid__mode": "leap",
            "hybrid__warmup_steps": 5,
            "hybrid__full_steps": 5,
            "hybrid__window_steps": 5,
            "hybrid__correct_steps": 5,
            "audit__time_budget": 0.3,
            "optimizer__type": "adamw",
            "schedule__type": "constant",
            "max_steps": 60,
        },
        moves_before,
    ),
    "fp16": Other({"precision__type": "fp16"}, scales_losses),
    "two stages": Other({"growth__layers": [1, 2], "growth__at": [0.3, 0.5]}, grows_twice),
    "a depth that does not divide": Other({"growth__layers": 3}, grows_from_three),
}


@pytest.mark.parametrize("name", OTHERS)
def test_resumed_around_the_moment_of_growth_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = OTHERS[name]
    whole = other.run()
    whole.count(monkeypatch)
    config, states, moving = whole.trainer.config, {}, 0
    due = [round(at * config.max_steps) for _, at in config.growth.stages]
    around = {at + more for at in due for more in (-8, -1, 0, 1, 5, 8, 9, 15)}
    while whole.trainer.global_step < config.max_steps:
        other.advance(whole)
        step, moving = whole.trainer.global_step, moving + whole.trainer.judging
        if step in around or (whole.trainer.judging and moving % 3 == 1):
            states[step, whole.trainer.position] = put_together(snapshot(whole.trainer.state_dict()))
    assert whole.layers == 4
    other.met(whole)
    monkeypatch.undo()
    for at, state in states.items():
        resumed = other.run()
        resumed.trainer.load_state_dict(state)
        assert (resumed.trainer.global_step, resumed.trainer.position) == at
        while resumed.trainer.global_step < resumed.trainer.config.max_steps:
            other.advance(resumed)
        assert same(whole.weights(), resumed.weights()), f"resumed at step {at[0]}"
        assert resumed.layers == 4


def test_a_growth_whose_loss_does_not_return_is_undone_and_leaves_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new blocks are made of noise."""
    plain = Run(growth__at=0.8).to(20)

    def noise(self: depths.Depth, sources: dict[int, int]) -> depths.Pairs:
        with torch.no_grad():
            for number in sources:
                for parameter in self.blocks[number].parameters():
                    parameter.normal_(std=30.0)
        return []

    monkeypatch.setattr(depths.Depth, "copy", noise)
    run = Run().to(20)
    before = run.weights()
    assert same(before, plain.weights())
    while run.trainer.growth.off == "":  # type: ignore[union-attr]
        run.trainer.step(batch(run.trainer.position))
    assert run.verdicts[0] == ("made", 20)
    assert run.verdicts[1][0] == "undone"
    assert run.layers == 2
    assert run.trainer.global_step == 21
    assert run.trainer.position > 21, "data goes on"
    run.to(40)
    assert run.layers == 2
    assert math.isfinite(run.trainer.evaluate([batch(800)]))


def test_a_growth_after_a_chain_is_judged_by_the_losses_since_the_chain() -> None:
    """The chain has led far below what was noted before it, and the grown model does not return to there."""
    run = Run(**MOVING, hybrid__mode="leap", optimizer__weight_decay=0.0, max_steps=100)
    while len(run.verdicts) < 2:
        run.trainer.step(batch(0))
    chain = next(event for event in run.events if isinstance(event, Moved))
    (made, undone) = (event for event in run.events if isinstance(event, Grown))
    assert (chain.chained, chain.step) == (True, 50)
    assert (made.verdict, made.step, undone.verdict) == ("made", 54, "undone")
    assert made.loss_before is not None
    assert made.loss_before < 1.1 * chain.loss < 0.5 * chain.anchor
    assert run.layers == 2


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([2.05, 2.15, 2.05, 2.15], "kept"),  # within 1 % and two standard errors of 2
        ([2.15, 2.25, 2.15, 2.25], "undone"),
        ([2.1, 2.1, 2.1, 2.1], "kept"),
        ([2.0, 2.0, 2.0, 9.0], "undone"),  # one that explodes is no noise
        ([math.nan, 2.0, math.nan, 2.0], "kept"),
        ([math.nan, 3.0, math.nan, 3.0], "undone"),
        ([math.nan] * 4, "undone"),
    ],
)
def test_what_counts_as_returned(losses: list[float], verdict: str) -> None:
    """The loss before was 2.00, with a standard error of 0.05."""
    run = Run().to(20)
    growth = run.trainer.growth
    assert growth is not None
    growth.follow(batch(20))
    assert growth.on_trial
    growth.before, growth.error_before, growth.losses = 2.0, 0.05, losses
    growth.end()
    assert [one for one, _ in run.verdicts] == ["made", verdict]
    growth.end()
    assert len(run.verdicts) == 2, "it is judged once"
    assert growth.anchor is None


def test_without_a_loss_before_it_growth_is_kept() -> None:
    run = Run().to(20)
    growth = run.trainer.growth
    assert growth is not None
    growth.follow(batch(20))
    growth.before = math.nan
    run.to(28)
    growth.follow(batch(28))
    assert [verdict for verdict, _ in run.verdicts] == ["made", "kept"]


def test_a_run_that_ends_in_the_trial_is_judged_by_losses_since_growth_alone() -> None:
    run = Run().to(20)
    growth = run.trainer.growth
    assert growth is not None
    seen = [run.trainer.step(batch(run.trainer.position)).loss for _ in range(2)]
    growth.end()
    judged = run.events[-1]
    assert isinstance(judged, Grown)
    assert judged.loss == pytest.approx(sum(seen) / 2)


@pytest.mark.parametrize("mode", ["off", "leap"])
def test_weights_after_an_undone_growth_are_those_before_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growths, "_RETURNED", -10.0)
    run = Run(hybrid__mode=mode).to(20)
    growth, before = run.trainer.growth, run.weights()
    assert growth is not None
    run.to(28)
    state = put_together(snapshot(run.trainer.state_dict()))
    growth.follow(batch(run.trainer.position))
    assert run.trainer.global_step == 20
    assert same(before, run.weights())
    other = Run(hybrid__mode=mode)
    other.trainer.load_state_dict(state)
    other.trainer.growth.follow(batch(0))  # type: ignore[union-attr]
    assert same(before, other.weights()), "also where it is resumed in between"


def test_steps_that_a_growth_takes_back_are_told_to_what_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growths, "_RETURNED", -10.0)
    run = Run(hybrid__mode="leap").to(28)
    hybrid, growth = run.trainer.hybrid, run.trainer.growth
    assert hybrid is not None
    assert growth is not None
    before = hybrid.policy.score.counts.undone_steps
    growth.follow(batch(run.trainer.position))
    assert run.verdicts[-1] == ("undone", 20)
    assert growth.losses == [], "those of steps that are undone are forgotten"
    assert hybrid.policy.score.counts.undone_steps - before == 8


def test_without_memory_the_run_goes_on_shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(new_blocks, "copy_state", short)
    run = Run().to(40)
    assert run.verdicts == [("refused", 20)]
    assert run.layers == 2
    plain = Run()
    assert plain.trainer.growth is not None
    plain.trainer.growth.off = "this one stays as it is"
    plain.to(39)
    rest = Run()
    monkeypatch.setattr(new_blocks, "copy_state", short)
    assert same(rest.to(39).weights(), plain.weights())


def test_both_depths_are_compiled_ahead_and_not_in_the_middle_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda loss, dynamic: plain(loss, dynamic=dynamic, backend=counting))
    run = Run(engine__compile=True).to(1)
    ahead = graphs
    assert ahead >= 2
    assert run.to(40).layers == 4
    assert graphs == ahead
    eager = Run().to(40)
    for one, other in zip(run.weights(), eager.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.stack = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.stack:
            x = x + block(x)
        return self.last(x)


def test_a_module_of_ones_own_with_ones_own_optimizer() -> None:
    model = Own()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = from_mapping({"max_steps": 60, "growth.layers": 2, "growth.blocks": "stack", "hybrid.mode": "off"})
    trainer = HybridTrainer(model, optimizer, nn.MSELoss(), config)
    draw = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        x = torch.randn(64, 4, generator=draw)
        losses.append(float(trainer.step((x, x[:, :1] * x[:, 1:2])).loss))
    assert trainer.growth is not None
    assert trainer.growth.depth.layers == 4
    assert losses[-1] < losses[0]


def own_trainer(**changes: Any) -> HybridTrainer:
    torch.manual_seed(5)
    model = Own()
    given = {"max_steps": 60, "growth.layers": 2, "growth.blocks": "stack", "hybrid.mode": "off", "device": "cpu"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return HybridTrainer(model, optimizer, nn.MSELoss(), from_mapping(given | changes))


class Restless(nn.Module):
    """A block that draws random numbers, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.norm(self.linear(x))), 0.2, self.training)


@pytest.mark.parametrize("share", [False, 0.5, True])
def test_compiling_ahead_leaves_no_trace(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in random numbers nor in running statistics, and nothing is compiled in the middle of the run."""
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)

    def made(compiled: bool) -> tuple[nn.Module, int, list[str]]:
        torch.manual_seed(5)
        model = Own()
        model.stack = nn.ModuleList(Restless() for _ in range(4))
        given = {"max_steps": 40, "growth.layers": 2, "growth.blocks": "stack", "hybrid.mode": "off", "device": "cpu"}
        given |= {"engine.compile": compiled, "engine.activation_checkpointing": share}
        trainer = HybridTrainer(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), from_mapping(given))
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(16, 4, generator=draw)
        trainer.step((x, x[:, :1]))
        ahead = graphs
        while trainer.global_step < 22:
            trainer.step((x, x[:, :1]))
        assert trainer.growth is not None
        return model, ahead, [move["verdict"] for move in trainer.growth.told]

    eager, _, _ = made(compiled=False)
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda loss, dynamic: plain(loss, dynamic=dynamic, backend=counting))
    torch._dynamo.reset()
    compiled, ahead, verdicts = made(compiled=True)
    assert verdicts == ["made"]
    assert graphs == ahead >= 2
    for (name, one), other in zip(eager.state_dict().items(), compiled.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("returned", [0.01, -10.0], ids=["kept", "undone"])
@pytest.mark.parametrize("share", [False, True])
def test_a_module_of_ones_own_is_resumed_on_both_sides_of_the_moment(
    share: bool, returned: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From checkpoints in a run folder: before the growth, at it, in its trial, and after the verdict."""
    monkeypatch.setattr(growths, "_RETURNED", returned)
    draw = torch.Generator().manual_seed(0)
    data = [(x, x[:, :1] * x[:, 1:2]) for x in (torch.randn(16, 4, generator=draw) for _ in range(80))]
    changes = {"engine.activation_checkpointing": share}
    whole = own_trainer(**changes)
    summary = whole.fit(data, out=tmp_path / "whole", progress=False)
    verdict = "kept" if returned > 0 else "undone"
    assert [move["verdict"] for move in summary["growth"]["moves"]] == ["made", verdict]
    last = [p.detach().clone() for p in whole.model.parameters()]
    layers = {29: 2, 30: 2, 31: 4, 35: 4, 45: 4 if returned > 0 else 2}
    for at, used in layers.items():
        out = tmp_path / str(at)
        first = own_trainer(**changes)
        assert first.fit(data, out=out, progress=False, pause_at=at)["global_step"] == at
        assert len(first.model.stack) == used  # type: ignore[arg-type]
        second = own_trainer(**changes)
        resumed = second.fit(data, out=out, resume=True, progress=False)
        assert resumed["growth"] == summary["growth"]
        assert same(last, list(second.model.parameters())), f"resumed at step {at}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"growth__layers": 4}, "is not less than the 4 blocks of the model"),
        (
            {"model": model_of(8), "growth__layers": [3, 4], "growth__at": [0.2, 0.4]},
            "let each stage divide the next one",
        ),
        ({"growth__layers": [2, 3]}, "give one end for each"),
        ({"growth__layers": [3, 2], "growth__at": [0.2, 0.4]}, "must rise from stage to stage"),
        ({"growth__layers": [1, 2], "growth__at": [0.4, 0.4]}, "must rise from stage to stage"),
        ({"growth__blocks": "layers"}, "it has 'blocks'"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Run(**changes)


def test_what_was_learned_is_not_thrown_away() -> None:
    with pytest.raises(ConfigError, match=r"would throw away what the others of model.weights have learned"):
        from_mapping({"growth.layers": 2, "model.weights": "some/run"})


@pytest.mark.filterwarnings("ignore:.*will not change")
def test_an_optimizer_of_a_part_of_the_blocks_is_refused() -> None:
    model = model_of()
    config = from_mapping({"max_steps": 40, "growth.layers": 2, "hybrid.mode": "off"})
    with pytest.raises(ConfigError, match="the optimizer does not hold all of blocks"):
        HybridTrainer(model, torch.optim.SGD(model.blocks[0].parameters(), lr=0.1), config=config)


def test_a_run_without_an_end_is_refused_before_its_first_step() -> None:
    config = from_mapping({"growth.layers": 2, "hybrid.mode": "off"})
    trainer = HybridTrainer(model_of(), config=config)
    with pytest.raises(ConfigError, match=r"growth.at is a share of the run, which has no end; set max_steps"):
        trainer.step(batch(0))


def test_the_whole_model_is_saved_and_read_from_both_sides(tmp_path: Path) -> None:
    """A checkpoint of the shallow part is one of the whole model, and says the same."""
    run = Run().to(15)
    shallow = run.trainer.evaluate([batch(700)])
    whole = model_of()
    whole.load_state_dict(run.trainer.model.state_dict())
    with torch.no_grad():
        assert float(whole(*batch(700))) == pytest.approx(shallow, rel=1e-6)


@pytest.mark.parametrize("returned", [10.0, -10.0])
def test_an_emergency_goes_back_to_weights_of_the_same_depth(returned: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a growth that is kept, in its trial, and after one that was undone."""
    monkeypatch.setattr(growths, "_RETURNED", returned)
    run = Run(hybrid__mode="leap", max_steps=200).to(104)
    hybrid, seen = run.trainer.hybrid, []
    assert hybrid is not None
    hybrid.policy.recover()
    seen.append((run.layers, run.trainer.global_step))
    while run.trainer.growth.grown_at is not None:  # type: ignore[union-attr]
        run.trainer.step(batch(run.trainer.position))
    run.to(run.trainer.global_step + 2)
    before = run.trainer.global_step
    hybrid.policy.recover()
    assert run.trainer.global_step <= before
    seen.append((run.layers, run.trainer.global_step))
    assert seen == [(4, 100), (4 if returned > 0 else 2, 100)]


@pytest.mark.parametrize(
    ("saved_at", "then", "now"),
    [
        (10, {}, {"growth__layers": 1}),
        (10, {}, {"growth__layers": 3}),
        (10, {}, {"growth__layers": 0}),
        (10, {"growth__layers": 0}, {}),
        (35, {}, {"growth__layers": [1, 2], "growth__at": [0.2, 0.4]}),
        (35, {"growth__layers": [1, 2], "growth__at": [0.2, 0.4]}, {}),
    ],
)
def test_a_run_goes_on_with_the_depths_that_it_began_with(
    saved_at: int, then: dict[str, Any], now: dict[str, Any]
) -> None:
    """Else blocks that learned nothing would be used, or those that have learned overwritten."""
    first = Run(**then)
    while first.trainer.global_step < saved_at:
        first.trainer.step(batch(first.trainer.position))
    state = put_together(snapshot(first.trainer.state_dict()))
    with pytest.raises(CheckpointError, match=r"it was saved with growth.layers = .*, and now it is .*; go on with"):
        Run(**now).trainer.load_state_dict(state)


def test_a_run_that_has_grown_goes_on_without_growth_and_with_nothing_to_say() -> None:
    state = put_together(snapshot(Run().to(35).trainer.state_dict()))
    for changes in ({"growth__layers": 0}, {}):
        other = Run(**changes)
        other.trainer.load_state_dict(state)
        assert not [event for event in other.events if isinstance(event, Notice)]
        assert len(other.trainer.model.blocks) == 4  # type: ignore[arg-type]


def ruin(model: nn.Module) -> None:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 3)


@pytest.mark.parametrize("at", [98, 109])
def test_a_loss_that_explodes_just_before_growth_or_its_judgement_is_not_taken_for_usual(at: int) -> None:
    run = Run(hybrid__mode="leap", max_steps=200).to(at)
    ruin(run.trainer.model)
    run.to(200)
    assert run.trainer.evaluate([batch(800)]) < 3.0
    judged = [event for event in run.events if isinstance(event, Grown) and event.verdict == "kept"]
    assert all(event.loss is not None and event.loss < 4.0 for event in judged)


def test_a_run_that_is_stopped_in_the_trial_is_judged_and_keeps_the_best_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growths, "_RETURNED", -10.0)
    run = Run(evaluation__interval=1, log__interval=1)
    run.trainer.bus.subscribe(lambda event: run.trainer.stop() if run.trainer.global_step == 26 else None)
    loader = [batch(position) for position in range(60)]
    summary = run.trainer.fit(loader, [batch(800)], out=tmp_path / "run", progress=False, load_best=True)
    assert [move["verdict"] for move in summary["growth"]["moves"]] == ["made", "undone"]
    assert (summary["reason"], summary["global_step"], summary["best_step"], run.layers) == ("stopped early", 20, 20, 2)
    assert summary["best_checkpoint"] == "checkpoints/best-step-00000020"
    assert run.trainer.evaluate([batch(800)]) == pytest.approx(summary["best_val_loss"])
    assert run.trainer.growth is not None
    assert run.trainer.growth.anchor is None


@pytest.mark.parametrize(("after", "reason"), [(0, "finished"), (1, "finished"), (2, "stopped early")])
def test_evaluations_in_the_trial_use_up_no_patience(after: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """after: evaluations after the trial that are worse than the best one, of which two are borne."""
    run = Run(evaluation__interval=1, evaluation__early_stopping_patience=2)
    engine = run.trainer.engine
    plain = type(engine.forward).evaluate

    def worse(forward: Any, *arguments: Any) -> Any:
        loss, on_trial = plain(forward, *arguments), run.trainer.growth.on_trial  # type: ignore[union-attr]
        kept = next((event.step for event in run.events if isinstance(event, Grown) and event.verdict == "kept"), 99)
        return loss + 5.0 if on_trial or 0 < run.trainer.global_step - kept <= after else loss

    monkeypatch.setattr(type(engine.forward), "evaluate", worse)
    summary = run.trainer.fit([batch(position) for position in range(60)], [batch(800)], progress=False)
    assert [verdict for verdict, _ in run.verdicts] == ["made", "kept"]
    assert (summary["reason"], summary["global_step"]) == (reason, 40 if reason == "finished" else 30)


def test_hidden_blocks_of_ones_own_module_are_not_taken_for_trained_ones(tmp_path: Path) -> None:
    """The best weights are those of before growth: the model shows the blocks that they belong to."""
    draw = torch.Generator().manual_seed(0)
    data = [(x, x[:, :1] * x[:, 1:2]) for x in (torch.randn(64, 4, generator=draw) for _ in range(80))]
    torch.manual_seed(5)
    model, events = Own(), []
    given = {"max_steps": 60, "growth.layers": 2, "growth.blocks": "stack", "hybrid.mode": "off"}
    given |= {"device": "cpu", "evaluation.interval": 30}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = HybridTrainer(model, optimizer, nn.MSELoss(), from_mapping(given))
    trainer.bus.subscribe(events.append)

    def ruin_what_follows(event: Event) -> None:
        if isinstance(event, Grown) and event.verdict == "kept":
            optimizer.param_groups[0]["lr"] = 1.0

    trainer.bus.subscribe(ruin_what_follows)
    summary = trainer.fit(data[:70], data[70:], out=tmp_path / "run", progress=False, load_best=True)
    assert [move["verdict"] for move in summary["growth"]["moves"]] == ["made", "kept"]
    assert summary["best_step"] == 30
    assert trainer.evaluate(data[70:]) == pytest.approx(summary["best_val_loss"])
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any("ends with 2 of 4 blocks of stack" in text for text in told)


# --- moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"growth__at": 0.99}, r"growth.at = 0.99: .* at step 40 of 40, .* 8 steps more .*; set growth.at = 0.8 or"),
        ({"growth__at": 0.85}, r"at step 34 of 40, and it takes 8 steps more"),
        ({"growth__at": 0.5, "max_steps": 8}, r"set growth.layers = 0, or train for more steps"),
        ({"growth__layers": [1, 2], "growth__at": [0.2, 0.9]}, r"let the stages end earlier, the last one at 0.8 or"),
        ({"growth__layers": [1, 2], "growth__at": [0.79, 0.8]}, r"at step 41 of 40"),
    ],
)
def test_a_growth_that_cannot_be_judged_before_the_end_is_refused(changes: dict[str, Any], words: str) -> None:
    run = Run(**changes)
    with pytest.raises(ConfigError, match=words):
        run.to(1)
    assert run.trainer.backward_passes == 0
    with pytest.raises(ConfigError, match=words):
        run.trainer.fit([batch(0)], progress=False)


def test_it_is_refused_when_the_length_becomes_known_and_before_a_folder_is_emptied(tmp_path: Path) -> None:
    earlier = tmp_path / "run"
    Run(growth__layers=0).trainer.fit([batch(one) for one in range(40)], out=earlier, progress=False)
    kept = sorted(path.name for path in earlier.rglob("*"))
    given = {name: value for name, value in PLAIN.items() if name != "max_steps"}
    config = from_mapping(given | {"growth.layers": 2, "growth.at": 0.9})
    trainer = HybridTrainer(model_of(), config=config)
    loader = [batch(one) for one in range(20)]
    with pytest.raises(ConfigError, match=r"at step 18 of 20, .*; set growth.at = 0.6 or less"):
        trainer.fit(loader, epochs=1, out=earlier, overwrite=True, progress=False)
    assert sorted(path.name for path in earlier.rglob("*")) == kept


def test_a_run_that_has_grown_may_go_on_whatever_growth_at_says() -> None:
    state = put_together(snapshot(Run().to(35).trainer.state_dict()))
    other = Run(growth__at=0.99)
    other.trainer.load_state_dict(state)
    assert other.to(40).layers == 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, 0),
        ({"growth__at": 0.7}, 0),
        ({"growth__at": 0.75}, 1),
        ({"schedule__type": "cosine"}, 1),
        ({"growth__at": 0.75, "schedule__type": "constant"}, 0),
        ({"growth__at": 0.75, "schedule__decay_steps": 5}, 0),
        ({"growth__layers": [1, 2], "growth__at": [0.4, 0.8]}, 1),
    ],
)
def test_a_growth_in_the_decay_of_the_learning_rate_is_told_once(changes: dict[str, Any], told: int) -> None:
    run = Run(**changes).to(3)
    texts = [event.message for event in run.events if isinstance(event, Notice)]
    assert sum("new blocks learn badly while it decays; lower growth.at" in text for text in texts) == told


# --- the time left ----------------------------------------------------------------------------------------------------


def test_the_events_of_a_run_tell_what_its_steps_cost() -> None:
    run = Run(growth__layers=[1, 2], growth__at=[0.25, 0.5])
    run.trainer.fit([batch(one) for one in range(40)], progress=False)
    (started,) = [event for event in run.events if isinstance(event, RunStarted)]
    model = run.trainer.model
    share = sum(p.numel() for p in model.blocks.parameters()) / sum(p.numel() for p in model.parameters())  # type: ignore[union-attr]
    one, two = 1 - 0.75 * share, 1 - 0.5 * share
    assert [step for step, _ in started.costs] == [0, 10, 20]
    assert [cost for _, cost in started.costs] == pytest.approx([one, two, 1.0])
    grown = [event.cost for event in run.events if isinstance(event, Grown) and event.verdict == "made"]
    assert grown == pytest.approx([two, 1.0])


def test_a_run_that_goes_on_tells_what_its_steps_cost_from_there() -> None:
    states = {step: put_together(snapshot(Run().to(step).trainer.state_dict())) for step in (10, 35)}
    costs = {}
    for step, state in states.items():
        other = Run()
        other.trainer.load_state_dict(state)
        costs[step] = [at for at, _ in other.trainer.growth.costs()]  # type: ignore[union-attr]
    assert costs == {10: [0, 20], 35: [0]}


# --- together with a race of learning rates ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.2, 0.5])
def test_losses_of_rates_that_are_tried_are_none_of_the_run(at: float) -> None:
    """The first step of a growth that is due in the race comes after it, when there are losses to judge it by."""
    config = config_of(hybrid__mode="leap", optimizer__learning_rate="auto", growth__at=at)
    trainer = HybridTrainer(model_of(), config=config, probe=[batch(700), batch(701)])
    growth, race, grown, losses = trainer.growth, trainer.race, [], []
    assert growth is not None
    assert race is not None
    trainer.bus.subscribe(lambda event: grown.append(event) if isinstance(event, Grown) else None)
    while not grown:
        result = trainer.step(batch(trainer.position))
        raced = race.open
        if not raced and not grown:
            losses.append(result.loss)
            assert growth.losses == pytest.approx(losses[-50:])
        elif raced:
            assert growth.losses == []
            assert growth.depth.layers == 2
    assert len(race.tried) > 1
    assert grown[0].step == max(round(at * 40), race.plan.length + 4)
    assert grown[0].loss_before == pytest.approx(sum(losses[-4:]) / 4)
