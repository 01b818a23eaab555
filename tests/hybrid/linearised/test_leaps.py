"""Chains of linearised leaps: whatever the residuals, the model and the batches are made of, the run goes on."""

from __future__ import annotations

import math
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.hybrid.linearised.problems import POINTS, Inverse, Operator, derivative, inverse, network
from tests.worlds import QUICK, World, same_weights
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from foretrain import Config, HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine.objective import Residuals
from foretrain.errors import ConfigError, InputError
from foretrain.events import Event, HealthFound, Moved, Notice, Phase
from foretrain.hybrid.linearised.finding import agrees
from foretrain.hybrid.linearised.leaps import LinearisedLeaps
from foretrain.hybrid.linearised.matrix import RowMatrix
from foretrain.hybrid.linearised.rows import Linearisation
from foretrain.hybrid.linearised.solve import System
from foretrain.hybrid.moves.linearised import LinearisedKind

LINE = torch.linspace(-1, 1, 20).view(-1, 1)
CURVE = torch.sin(3 * LINE)
SETTINGS: dict[str, Any] = {
    "max_steps": 80,
    "optimizer.type": "adam",
    "optimizer.learning_rate": 0.01,
    "hybrid.linear_rows": 12,
}
Model = Callable[[], nn.Module]


def curve(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found - torch.sin(3 * x)


def world(
    model: nn.Module, batch: Any = LINE, residuals: Any = curve, loss: Any = None, weights: Any = None, **settings: Any
) -> World:
    """batch: the same one in every step, or a function of the position."""
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    trainer = HybridTrainer(
        model,
        loss_fn=loss,
        residuals=None if loss is not None else residuals,
        weights=weights,
        config=from_mapping({**QUICK, **SETTINGS, **changes}),
    )
    events: list[Event] = []
    trainer.bus.subscribe(events.append)
    return World(trainer, batch if callable(batch) else lambda position: batch, events)


def kind_of(run: World) -> LinearisedKind:
    return next(kind for kind in run.trainer.policy.kinds if isinstance(kind, LinearisedKind))


def leaps_of(run: World) -> LinearisedLeaps:
    return kind_of(run).leaps


def notices(run: World) -> list[str]:
    return [event.message for event in run.events if isinstance(event, Notice)]


def probe(run: World) -> float:
    return run.trainer.engine.probe(run.trainer.engine.to_device(run.data(0)))


def chaining(run: World, leaps: int = 1) -> World:
    run.run(lambda: run.trainer.hybrid.chaining and leaps_of(run).leaps >= leaps)
    return run


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what the test is there for
        yield


# --- everything a model may be made of -------------------------------------------------------------------------------


def made(**layers: nn.Module) -> nn.Sequential:
    """A small network with some of its layers exchanged."""
    model = network(width=6)
    for name, layer in layers.items():
        model[int(name[1:])] = layer
    return model


def seeded(make: Callable[[], nn.Module]) -> Model:
    def model() -> nn.Module:
        torch.manual_seed(0)
        with quiet():
            return make()

    return model


class Named(nn.Module):
    """Calls its layers by the name of their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 6), nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(input=torch.tanh(self.first(input=x)))
        return found


class Tied(nn.Module):
    """One layer is called twice, and another one has its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 6), nn.Linear(6, 1)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for layer in (self.one, self.one, self.other):
            hidden = torch.tanh(layer(hidden))
        found: Tensor = self.last(hidden)
        return found


class LowRank(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1])
        return found


class Idle(nn.Module):
    """Nothing depends on some of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.layer, self.number = network(width=6), nn.Linear(3, 3), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found


def replaced() -> nn.Module:
    model = network(width=6)
    forward = model[0].forward
    model[0].forward = lambda x: 2 * forward(x)
    return model


def frozen_below() -> nn.Module:
    model = network(width=6)
    model[0].requires_grad_(False)
    return model


def zero_above() -> nn.Module:
    """No gradient reaches the layer below, at first: what it is made of shows only later."""
    model = made(_0=weight_norm(nn.Linear(1, 6)))
    nn.init.zeros_(model[2].weight)
    return model


MODELS: dict[str, Model] = {
    "arguments by name, no bias": Named,
    "layers called twice, and tied": Tied,
    "low-rank adapters": lambda: nn.Sequential(LowRank(1, 6), nn.Tanh(), LowRank(6, 1)),
    "layer norm": lambda: made(_1=nn.Sequential(nn.LayerNorm(6), nn.Tanh())),
    "a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1)), nn.Conv1d(1, 8, 1), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)
    ),
    "an LSTM": Recurrent,
    "weight_norm": lambda: made(_0=weight_norm(nn.Linear(1, 6)), _2=weight_norm(nn.Linear(6, 6))),
    "weight_norm below zeros": zero_above,
    "a parametrisation": lambda: made(_0=parametrizations.weight_norm(nn.Linear(1, 6))),
    "parameters that nothing depends on": Idle,
    "a forward of one's own on a layer": replaced,
    "a frozen layer": frozen_below,
    "float64": lambda: network(width=6).double(),
    "bfloat16": lambda: network(width=6).bfloat16(),
}


@pytest.mark.parametrize("name", MODELS)
def test_any_model_is_linearised(name: str) -> None:
    """The same chain with half of the weights' precision, other layers, or hooks: far below the optimizer alone."""
    model = seeded(MODELS[name])
    batch = LINE.to(next(model().parameters()).dtype)
    run = world(model(), batch).run()
    assert notices(run) == []
    assert leaps_of(run).made > 5
    assert run.moves[0].verdict == "kept"
    plain = world(model(), batch, hybrid__mode="off").run()
    assert probe(run) < 0.5 * probe(plain)


def test_hooks_of_layers_are_called() -> None:
    model, seen = network(width=6), []
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(1) or 2 * output)
    model[2].register_full_backward_hook(lambda *_: seen.append(2))
    run = world(model).run()
    assert leaps_of(run).made > 5
    assert set(seen) == {1, 2}
    assert probe(run) < 1e-4


def test_a_model_that_is_frozen_as_a_whole_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="all its parameters are frozen"):
        world(network().requires_grad_(False))


# --- everything residuals may be made of -----------------------------------------------------------------------------


def under_no_grad(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        size = model(x)
    return {"curve": curve(model, x), "size": size}


def in_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    return found.float() - torch.sin(3 * x)


def by_dual_numbers(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    return slope - torch.cos(3 * x)


def recomputed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x.clone().requires_grad_(), use_reentrant=False) - torch.sin(3 * x)


def unknown_coefficient(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """A parameter that is multiplied beside the layers, which their graph remembers."""
    x = x.detach().requires_grad_()
    u = model(x)
    return {"equation": derivative(u, x) - model[-1].bias * u, "data": u - torch.exp(x.detach())}


RESIDUALS: dict[str, Any] = {
    "a constant block": lambda model, x: {"curve": curve(model, x), "one": torch.ones(3)},
    "a block under no_grad": under_no_grad,
    "an empty block": lambda model, x: {"curve": curve(model, x), "none": model(x[:0])},
    "a block of weight 0 that is no number": lambda model, x: {"curve": curve(model, x), "off": model(x) * math.nan},
    "float64 of a float32 model": lambda model, x: model(x).double() - torch.sin(3 * x.double()),
    "the same row many times": lambda model, x: curve(model, x[:1].expand(20, 1)),
    "torch.func.vmap and grad": lambda model, x: (
        vmap(grad(lambda t: model(t.view(1, 1)).squeeze()))(x[:, 0]) - torch.cos(3 * x[:, 0])
    ),
    "torch.func.jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1] - torch.cos(3 * x),
    "torch.func.functional_call": lambda model, x: (
        functional_call(model, dict(model.named_parameters()), (x,)) - torch.sin(3 * x)
    ),
    "dual numbers": by_dual_numbers,
    "autocast of one's own": in_autocast,
    "recomputed layers": recomputed,
    "an unknown coefficient": unknown_coefficient,
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_any_residuals_are_linearised(name: str) -> None:
    weights = {"off": 0.0} if "weight 0" in name else None
    with quiet():
        run = world(network(width=6), residuals=RESIDUALS[name], weights=weights).run()
    assert leaps_of(run).made > 3
    assert run.moves[0].verdict == "kept"
    assert leaps_of(run).failure == ""
    with quiet():
        plain = world(network(width=6), residuals=RESIDUALS[name], weights=weights, hybrid__mode="off").run()
    assert probe(run) < probe(plain)


Pair = namedtuple("Pair", "x y")
BATCHES: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "none": (None, lambda batch: LINE),
    "a dict": ({"x": LINE}, lambda batch: batch["x"]),
    "a named tuple": (Pair(LINE, 3), lambda batch: batch.x),
    "NumPy": (LINE.numpy(), lambda batch: batch),
    "NumPy in float64": (LINE.double().numpy(), lambda batch: batch),
    "without rows": (np.float64(0.5), lambda batch: LINE * batch),
}


@pytest.mark.parametrize("name", BATCHES)
def test_any_batch_will_do(name: str) -> None:
    batch, points = BATCHES[name]
    run = world(network(width=6), lambda position: batch, lambda model, given: curve(model, points(given))).run()
    assert leaps_of(run).made > 5
    assert probe(run) < 1e-4


def test_means_instead_of_residuals_are_left_to_the_optimizer_in_words() -> None:
    """A few rows say next to nothing of where the linearised run goes."""
    run = world(network(width=6), residuals=lambda model, x: curve(model, x).square().mean().sqrt()[None]).run()
    assert leaps_of(run).made == 0
    assert "no linearised leaps are made: 1 residuals say too little; give one for each point" in notices(run)[0]
    plain = world(nn.Linear(1, 1), torch.ones(1, 1), lambda model, x: torch.cat([model(x) - 1, model(0 * x) - 2])).run()
    assert leaps_of(plain).made > 0  # as many as weights


def test_inputs_without_rows_and_whole_numbers() -> None:
    run = world(network(20, 20), LINE[:, 0]).run()
    assert leaps_of(run).made > 5
    assert probe(run) < 1e-6
    table = nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 1))
    run = world(table, torch.arange(20) % 5, lambda model, x: model(x)[:, 0] - x / 5).run()
    assert leaps_of(run).made > 5
    assert probe(run) < 1e-8


def test_batches_that_differ_in_what_is_no_tensor_are_not_the_same() -> None:
    """A block that is only there in every third batch, as a number in the batch says."""

    def some(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        found = {"curve": curve(model, batch[0])}
        return found if batch[1] else found | {"ends": model(batch[0][[0, -1]])}

    run = world(network(width=6), lambda position: (LINE, position % 3), some).run()
    assert not run.trainer.policy.predictability.same_batch
    assert leaps_of(run).exact is not True


@pytest.mark.parametrize("rows", [lambda position: 15 + position % 7, lambda position: 20 + (position > 30)])
def test_the_number_of_rows_may_change(rows: Callable[[int], int]) -> None:
    run = world(network(width=6), lambda position: torch.linspace(-1, 1, rows(position)).view(-1, 1)).run()
    assert leaps_of(run).made > 5
    assert probe(run) < 1e-4


# --- criteria --------------------------------------------------------------------------------------------------------

CLASSES = torch.arange(20) // 7


def test_targets_of_another_precision_and_bytes_as_classes() -> None:
    run = world(network(width=6), (LINE, CURVE.double()), loss=nn.MSELoss()).run()
    assert leaps_of(run).made > 5
    assert probe(run) < 1e-4
    run = world(network(1, 3), (LINE, CLASSES.to(torch.uint8)), loss=nn.CrossEntropyLoss()).run()
    assert leaps_of(run).made > 5
    assert probe(run) < 1e-3


def test_digits_of_ten_classes() -> None:
    """Ten rows a sample are dear: the chain lowers the loss, and ends before it has cost too much of the run."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    batch = torch.tensor(digits.data[:600] / 16, dtype=torch.float32), torch.tensor(digits.target[:600])
    settings = {"optimizer__learning_rate": 3e-3, "hybrid__linear_rows": 160, "max_steps": 600}
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)))
    run = world(model(), batch, loss=nn.CrossEntropyLoss(), **settings)
    run.run(lambda: bool(run.moves))
    assert leaps_of(run).made > 5
    assert run.moves[0].verdict == "kept"
    assert run.moves[0].cost_steps < 200
    run.run()
    assert run.trainer.global_step == 600
    plain = world(model(), batch, loss=nn.CrossEntropyLoss(), **settings | {"max_steps": 300}, hybrid__mode="off").run()
    assert probe(run) < probe(plain)


def test_a_batch_of_another_form_in_mid_chain_ends_it_and_the_run_says_why() -> None:
    ignored = torch.where(torch.arange(20) == 3, -100, CLASSES)
    run = world(
        network(1, 3), lambda position: (LINE, ignored if position == 14 else CLASSES), loss=nn.CrossEntropyLoss()
    )
    run.run()
    assert [move.verdict for move in run.moves if move.chained] == ["kept"]  # what it had won stays
    assert [text for text in notices(run) if "linearised" in text] == [
        "no linearised leaps are made: targets are not one class per row"
    ]
    assert run.trainer.global_step == 80


def test_logits_beyond_doubt_and_numbers_that_are_none() -> None:
    for inputs in (1000 * LINE, LINE):
        data = lambda position, inputs=inputs: (inputs * (math.nan if position == 14 else 1), CLASSES)  # noqa: E731
        run = world(network(1, 3), data, loss=nn.CrossEntropyLoss()).run()
        assert math.isfinite(probe(run))
        assert notices(run) == []


# --- what draws, changes or fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "residuals", "words"),
    [
        (lambda: made(_1=nn.Dropout(0.2)), curve, "draws random numbers, as dropout does"),
        (network, lambda model, x: curve(model, torch.rand(20, 1)), "draws random numbers, as dropout does"),
        (network, lambda model, x: curve(model, x * np.random.rand()), "draws random numbers"),  # noqa: NPY002
        (lambda: made(_1=nn.BatchNorm1d(6)), curve, "changes its buffers in every pass, as batch norm does"),
    ],
    ids=["dropout", "random points", "random numbers of NumPy", "batch norm"],
)
def test_a_loss_that_is_no_function_of_weights_and_batch_is_told_once_and_left_to_others(
    model: Model, residuals: Any, words: str
) -> None:
    """A chain could not be resumed to the bit, and trials could not be compared."""
    run = world(seeded(model)(), residuals=residuals).run()
    assert leaps_of(run).made == 0
    assert len([text for text in notices(run) if words in text]) == 1
    assert len([move for move in run.moves if words in move.reason]) == 1


def test_batch_norm_that_evaluates_is_linearised() -> None:
    model = made(_1=nn.BatchNorm1d(6))
    model[1].eval()
    run = world(model).run()
    assert leaps_of(run).made > 5


class Failing:
    """Residuals that fail in some of their calls."""

    def __init__(self, *at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.at:
            raise ZeroDivisionError("some of it is missing")
        return curve(model, x)


@pytest.mark.parametrize("call", [7, 8, 9, 12, 25, 50])
def test_residuals_that_fail_once_do_not_end_the_run(call: int) -> None:
    run = world(network(width=6), residuals=Failing(call)).run()
    assert run.trainer.global_step == 80
    assert probe(run) < 1e-4


@pytest.mark.parametrize("call", [12, 25, 40])
def test_residuals_that_fail_again_end_the_chain_and_full_steps_go_on(call: int) -> None:
    run = world(network(width=6), residuals=Failing(call, call + 1)).run()
    assert run.trainer.global_step == 80
    told = [text for text in notices(run) if "ZeroDivisionError: some of it is missing" in text]
    assert len(told) == 1
    assert told[0].startswith("no linearised leaps are made: the loss cannot be linearised (")
    assert all("forward" not in vars(module) for module in run.trainer.model.modules())


def test_residuals_that_always_fail_are_the_users_to_see() -> None:
    run = world(network(width=6), residuals=Failing(*range(25, 1000)))
    with pytest.raises(ZeroDivisionError, match="some of it is missing"):
        run.run()


def test_sparse_gradients_are_left_to_others() -> None:
    model = seeded(lambda: nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Tanh(), nn.Linear(4, 1)))()
    trainer = HybridTrainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        residuals=lambda model, x: model(x) - CURVE,
        config=from_mapping({"device": "cpu", "max_steps": 40, "hybrid.window_steps": 5, "schedule.type": "constant"}),
    )
    while trainer.global_step < 40 or trainer.judging:
        trainer.step(torch.arange(20))
    assert "cannot be linearised" in next(k for k in trainer.policy.kinds if isinstance(k, LinearisedKind)).off


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_batches_that_are_no_numbers_in_mid_chain_cost_a_step_each(value: float) -> None:
    def data(position: int) -> Tensor:
        return torch.where(torch.arange(20).view(-1, 1) == 3, value, LINE) if position in (12, 13, 20) else LINE

    run = world(network(width=6), data)
    run.run(lambda: run.position == 12)
    before = leaps_of(run).damping
    run.run(lambda: run.position == 14)
    assert leaps_of(run).damping == before  # a batch that is no number says nothing about it
    run.run()
    assert probe(run) < 1e-4
    run.trainer.engine.meter.fetch()
    assert run.trainer.summary()["skipped_steps"] == 3


def test_a_loss_of_0_and_rows_of_0_are_refused_at_once() -> None:
    """Nothing is won by staying there, and no step of the run is spent on it."""
    for residuals in (lambda model, x: 0 * model(x), lambda model, x: model(x).detach() + 0 * model(x)):
        run = world(network(width=6), residuals=residuals).run()
        chained = [move for move in run.moves if move.chained]
        assert chained
        assert {move.verdict for move in chained} == {"refused"}
        assert run.trainer.backward_passes <= 80
        assert leaps_of(run).made == 0


# --- rows are those of the weights where the leap begins --------------------------------------------------------------


def test_more_rows_are_taken_at_the_weights_where_the_leap_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials have moved the weights away meanwhile."""
    run = chaining(world(network(width=6)), 3)
    leaps, model = leaps_of(run), run.trainer.model
    leaps.row_count.now, leaps.room = 5, 100
    start, seen, rows = [p.detach().clone() for p in model.parameters()], [], Linearisation.rows

    def noted(look: Linearisation, *arguments: Any) -> RowMatrix:
        seen.append(all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True)))
        return rows(look, *arguments)

    monkeypatch.setattr(Linearisation, "rows", noted)
    monkeypatch.setattr(System, "step", lambda system, *_: (torch.ones(system.rows.weights), 1.0))  # far uphill
    monkeypatch.setattr(System, "again", lambda system, _: torch.zeros(system.rows.weights))
    assert leaps.leap(LINE) is not None
    assert len(seen) > 2
    assert all(seen)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))


def test_rows_are_not_taken_of_a_graph_whose_weights_were_written_to() -> None:
    """As an evaluation at averaged weights does, or a callback."""
    run = chaining(world(made(_1=nn.LayerNorm(6))), 2)
    for _ in range(3):
        with torch.no_grad():
            for parameter in run.trainer.model.parameters():
                parameter.mul_(2).mul_(0.5)
        run.step()
    assert leaps_of(run).failure == ""
    assert leaps_of(run).lookout.tapped


def test_after_leaps_in_vain_a_run_with_an_unknown_coefficient_goes_on() -> None:
    """The graph of outputs holds the coefficient, and trials change it in place."""
    model = Inverse()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = HybridTrainer(model, adam, residuals=inverse, config=Config(max_steps=3000))
    while trainer.global_step < 3000:
        trainer.step(POINTS)
    assert trainer.backward_passes < 2000  # steps that passed without a try take none
    assert abs(float(model.coefficient.detach()) - 2) < 1e-3


def test_evaluations_at_averaged_weights_inside_a_chain() -> None:
    run = world(made(_1=nn.LayerNorm(6)), evaluation__ema_decay=0.9)
    other = world(made(_1=nn.LayerNorm(6)), evaluation__ema_decay=0.9)
    while run.trainer.global_step < 80 or run.trainer.judging:
        run.step()
        other.step()
        run.trainer.evaluate([LINE])
    assert leaps_of(run).made > 5
    assert same_weights(run.trainer.model, other.trainer.model)


def test_memory_of_a_chain_is_given_back_at_its_end() -> None:
    run = chaining(world(network(width=6), max_steps=60))
    lookout = leaps_of(run).lookout
    assert lookout._look is not None
    run.run()
    assert lookout._look is lookout.way is lookout._batch is None
    run = chaining(world(network(width=6)))
    run.trainer.policy.move.refuse("the test wants it")
    assert leaps_of(run).lookout._look is None


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_classes_count_as_so_many_rows() -> None:
    """So that `hybrid.linear_memory_mb` and the price mean what they say."""
    seen = []
    run = world(network(1, 40), (LINE, CLASSES), loss=nn.CrossEntropyLoss(), hybrid__linear_rows=120, max_steps=400)
    count = leaps_of(run)._count
    leaps_of(run)._count = lambda batch, look, system: seen.append(system) or count(batch, look, system)
    chaining(run)
    assert len(seen[0].target) == 120
    run = world(
        network(1, 40), (LINE, CLASSES), loss=nn.CrossEntropyLoss(), hybrid__linear_memory_mb=12 * 440 * 30 / 2**20
    ).run()
    assert leaps_of(run).row_count.most < 40
    assert "hybrid.linear_memory_mb has no room for the rows of one sample of 40 classes" in " ".join(notices(run))


def make_room(leaps: LinearisedLeaps, rows: int) -> None:
    """Give memory for so many rows of a small network, and begin with them."""
    leaps._memory_mb, leaps.first_rows = (24 * rows**2 + 12 * leaps.elements * rows + 1) / 2**20, rows
    leaps.cover()
    assert leaps.row_count.most == leaps.rows == rows


def test_many_blocks_take_no_more_rows_than_there_is_memory_for() -> None:
    blocks = {f"block {number}": LINE + number for number in range(6)}
    run = world(
        network(width=6), residuals=lambda model, x: {name: curve(model, points) for name, points in blocks.items()}
    )
    leaps, seen = leaps_of(run), []
    count = leaps._count
    leaps._count = lambda batch, look, system: seen.append(len(system.target)) or count(batch, look, system)
    make_room(leaps, 18)
    chaining(run, 3)
    assert max(seen) <= 18


def test_a_table_takes_a_part_of_a_diagonal_where_there_is_no_memory_for_one() -> None:
    draw = torch.Generator().manual_seed(1)
    batch = (
        (torch.randn(30, 3, generator=draw), torch.linspace(0, 1, 25).view(-1, 1)),
        torch.rand(30, 25, generator=draw),
    )
    run = world(Operator(), batch, lambda model, given: model(*given[0]) - given[1], max_steps=60)
    leaps, seen = leaps_of(run), []
    count = leaps._count
    leaps._count = lambda batch, look, system: seen.append(len(system.target)) or count(batch, look, system)
    make_room(leaps, 20)
    chaining(run, 5)
    assert leaps.lookout.way.grid is not None
    assert set(seen) == {20}


def test_rows_that_are_taken_one_by_one_are_paid_for() -> None:
    """A convolution cannot be tapped: each row takes a backward pass."""
    model = seeded(lambda: nn.Sequential(nn.Conv1d(1, 20, 3, padding=1), nn.Flatten(), nn.Linear(200, 1)))()
    inputs = torch.randn(300, 1, 10, generator=torch.Generator().manual_seed(0))
    batch = inputs, inputs[:, :, 0]
    run = world(model, batch, loss=nn.MSELoss(), hybrid__linear_rows=160, max_steps=1000)
    chaining(run)
    assert leaps_of(run).price(160) > 20
    assert leaps_of(run).steps_of_leap > 20


def test_dear_tries_in_vain_are_rare() -> None:
    run = world(network(width=6), max_steps=400)
    kind = kind_of(run)
    kind.leaps.price = lambda rows: 30.0
    kind.leaps._try = lambda *arguments, **others: None
    run.run()
    tries = [move for move in run.moves if move.chained]
    assert 1 <= len(tries) <= 4
    assert sum(move.cost_steps for move in tries) < 0.4 * 400


def test_a_dear_chain_that_is_slower_than_the_optimizer_ends_soon() -> None:
    run = world(network(width=6), max_steps=2000)
    leaps = leaps_of(run)
    leaps.price = lambda rows: 30.0
    chaining(run)
    leaps._try = lambda look, *arguments, **others: look  # nothing is won any more
    run.run(lambda: not run.trainer.hybrid.chaining)
    assert leaps.leaps < 10


@pytest.mark.parametrize("steps", [8, 11, 17, 33, 60, 61, 100])
def test_a_run_is_as_long_as_it_is_meant_to_be(steps: int) -> None:
    run = world(network(width=6), max_steps=steps).run()
    assert run.trainer.global_step == steps == sum(run.trainer.summary()["steps"].values())
    assert run.trainer.engine.progress.tokens == 20 * run.position
    assert run.trainer.backward_passes <= run.position
    assert run.trainer.engine.rate.used == pytest.approx(0.01)


def test_a_leap_that_needs_more_rows_does_not_run_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run = world(network(width=6), torch.linspace(-1, 1, 400).view(-1, 1), max_steps=40)
    leaps, tried = leaps_of(run), LinearisedLeaps._try
    leaps.price = lambda rows: rows / 12  # type: ignore[method-assign]
    monkeypatch.setattr(
        LinearisedLeaps,
        "_try",
        lambda self, *a, whole: tried(self, *a, whole=whole) if whole or self.made < 4 else None,
    )
    run.run()
    assert run.trainer.global_step == 40


def test_the_schedule_goes_on_where_the_chain_led_to() -> None:
    run = world(network(width=6), schedule__type="wsd", max_steps=100)
    run.run(lambda: bool(run.moves) and not run.trainer.judging)
    run.trainer.engine.end_at(run.trainer.global_step + 10)
    run.step()
    assert run.trainer.engine.rate.used == pytest.approx(run.trainer.engine.schedule(run.trainer.global_step - 1))


def test_without_an_end_a_chain_goes_on_and_stays_cheap() -> None:
    settings = {
        name: value for name, value in {**QUICK, **SETTINGS}.items() if name not in ("max_steps", "schedule.type")
    }
    trainer = HybridTrainer(network(width=6), residuals=curve, config=from_mapping(settings))
    calls = []
    trainer.model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(400):
        trainer.step(LINE)
    assert trainer.engine.probe(LINE) < 1e-6
    assert len(calls) < 2000


def test_blocks_are_told_of_the_weights_that_a_step_was_made_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of trials that were given up."""
    run = chaining(world(network(width=6), residuals=RESIDUALS["an unknown coefficient"]), 3)
    monkeypatch.setattr(System, "step", lambda system, *_: (torch.ones(system.rows.weights), 1.0))  # far uphill
    monkeypatch.setattr(System, "again", lambda system, _: torch.zeros(system.rows.weights))
    result = run.step()
    told = run.trainer.engine.objective.latest
    assert set(told) == {"equation", "data"}
    assert float(sum(told.values())) == pytest.approx(float(result.loss), rel=1e-6)


def test_waiting_where_nothing_is_left_to_win_is_no_illness() -> None:
    """The gradient of such a step is the last one that is known, not none: no layer is dead."""
    run = world(network(width=6), max_steps=600, health__interval=10).run()
    assert leaps_of(run).idle > 10
    assert [event for event in run.events if isinstance(event, HealthFound)] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulation_steps": 4},
        {"evaluation__ema_decay": 0.9},
        {"predictor__beta": 0.5, "predictor__stride": 2},
        {"memory__offload": True, "memory__snapshots": "pinned", "memory__basis": "pinned"},
        {"engine__update_in_backward": True, "optimizer__gradient_clip_norm": 0.0},
        {"precision__type": "bf16"},
        {"guard__nan_check": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_chains_live_with(settings: dict[str, Any]) -> None:
    run = world(network(width=6), **settings).run()
    assert leaps_of(run).made > 5
    assert run.trainer.global_step == 80
    assert probe(run) < 1e-3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hybrid__search": False}, "hybrid.search = false"),
        ({"hybrid__mode": "rollout"}, 'hybrid.mode = "rollout"'),
        ({"precision__type": "fp16"}, 'precision.type = "fp16"'),
        ({"optimizer__weight_decay": 0.1}, "optimizer.weight_decay = 0.1"),
        ({"hybrid__linear_memory_mb": 0.001}, "hybrid.linear_memory_mb = 0.001"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_keep_them_off_are_named(settings: dict[str, Any], words: str) -> None:
    run = world(network(width=6), **settings).run()
    assert leaps_of(run).made == 0
    told = [text for text in notices(run) if "linearised leaps could be tried" in text]
    assert len(told) == 1
    assert words in told[0]


def test_noisy_batches_are_trained_as_without_prediction() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 6, generator=draw)
    targets = inputs[:, :1] + torch.randn(1000, 1, generator=draw)

    def some(position: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(1000, (32,), generator=torch.Generator().manual_seed(position))
        return inputs[rows], targets[rows]

    run, plain = (
        world(network(6), some, loss=nn.MSELoss(), max_steps=200, hybrid__mode=mode, optimizer__learning_rate=3e-3)
        for mode in ("leap", "off")
    )
    run.run()
    plain.run()
    assert leaps_of(run).made == 0
    assert run.trainer.evaluate([(inputs, targets)]) < 1.05 * plain.trainer.evaluate([(inputs, targets)])


@pytest.mark.parametrize("handed_in", ["residuals", "a loss"])
def test_who_hands_in_residuals_is_told_once_that_batches_differ_too_much(handed_in: str) -> None:
    def some(position: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(position)
        return torch.randn(8, 6, generator=draw), torch.randn(8, 1, generator=draw)

    def residuals(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = model(batch[0])
        return found - batch[1]

    run = world(network(6), some, residuals, nn.MSELoss() if handed_in == "a loss" else None, max_steps=200).run()
    told = [text for text in notices(run) if "batches differ too much (cosine of their gradients" in text]
    assert len(told) == (handed_in == "residuals")


@pytest.mark.parametrize("points", [20, 400])
def test_many_coupled_rows_are_left_to_others_and_that_is_told(points: int) -> None:
    def coupled(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = model(x)
        return found - torch.sin(3 * x) + found.mean()

    run = world(network(width=6), torch.linspace(-1, 1, points).view(-1, 1), coupled, hybrid__linear_rows=160).run()
    told = [text for text in notices(run) if "rows depend on each other, so that a leap takes as long as" in text]
    assert len(told) == (points == 400)
    assert bool(leaps_of(run).made) == (points == 20)


def in_cells(position: int) -> Tensor:
    """A point in each of 40 cells."""
    inside = torch.rand(40, 1, generator=torch.Generator().manual_seed(position))
    return (torch.arange(40).view(-1, 1) + inside) / 20 - 1


def test_leaps_begin_in_the_first_window_with_fresh_points_and_keep_what_they_won() -> None:
    """The optimizer's steps, which are long, never get to throw it away."""
    run = chaining(world(network(width=6), in_cells, max_steps=1000, optimizer__learning_rate=0.03))
    assert run.trainer.global_step < 20
    run.run()
    assert leaps_of(run).holding.known
    assert leaps_of(run).leaps > 200
    assert probe(run) < 1e-6


def test_what_leaps_win_on_noisy_batches_does_not_hold_and_they_end_soon() -> None:
    """The gradients of the first steps hardly differ, so that leaps are tried."""

    def some(position: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(position)
        inputs = torch.randn(64, 6, generator=draw)
        return inputs, inputs[:, :1] + 3 + torch.randn(64, 1, generator=draw)

    run, plain = (
        world(network(6), some, loss=nn.MSELoss(), max_steps=400, hybrid__mode=mode, hybrid__linear_rows=64)
        for mode in ("leap", "off")
    )
    run.run()
    plain.run()
    assert 0 < leaps_of(run).made < 40
    assert "did not hold" in run.moves[0].reason
    many = [some(position) for position in range(1000, 1040)]
    assert run.trainer.evaluate(many) < 1.05 * plain.trainer.evaluate(many)


def test_weights_of_blocks_are_any_numbers_and_any_names() -> None:
    objective = Residuals(lambda model, x: {0: model(x)}, {0: np.float32(4.0)})  # type: ignore[dict-item]
    model = network()
    torch.testing.assert_close(objective(model, LINE), 4 * model(LINE).square().mean())
    assert objective.parts(model, LINE)[0].weight == 4.0
    with pytest.raises(InputError, match="there is nothing to train on"):
        Residuals(lambda model, x: {"a": model(x)}, {"a": 0.0})(model, LINE)


def test_the_phase_after_a_failure_is_full() -> None:
    run = world(network(width=6), residuals=Failing(25, 26))
    run.run(lambda: bool(kind_of(run).off))
    assert run.trainer.phase is Phase.FULL
    assert isinstance([event for event in run.events if isinstance(event, Moved)][-1], Moved)


def test_wide_layers_need_no_memory_for_their_rows() -> None:
    """They are held as factors: there is room for a hundred rows of numbers only, and leaps are made by more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
    weights = sum(p.numel() for p in model.parameters())
    points, memory = torch.linspace(-1, 1, 400).view(-1, 1), 12 * weights * 100 / 2**20
    run = world(model, points, hybrid__linear_rows=160, hybrid__linear_memory_mb=memory, max_steps=100)
    chaining(run, 2)
    assert leaps_of(run).row_count.most > 400
    assert leaps_of(run).loss < leaps_of(run).start_loss


def test_rows_that_turn_out_to_be_large_are_told() -> None:
    """Weights that are scaled on their way cannot be held as factors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 1))
    weights = sum(p.numel() for p in model.parameters())

    def scaled(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (x,))
        return found - x

    points, memory = torch.linspace(-1, 1, 400).view(-1, 1), 12 * weights * 100 / 2**20
    settings = {"hybrid__linear_rows": 160, "hybrid__linear_memory_mb": memory, "max_steps": 60}
    run = world(model, points, residuals=scaled, **settings).run()
    assert leaps_of(run).made == 0
    assert "has no room for enough rows; set " in " ".join(notices(run))


def test_few_samples_of_many_classes_are_not_leapt_by() -> None:
    settings = {"hybrid__linear_rows": 60, "max_steps": 60}
    run = world(network(1, 40), (LINE, CLASSES), loss=nn.CrossEntropyLoss(), **settings).run()
    assert leaps_of(run).made == 0
    told = " ".join(notices(run))
    assert "60 rows are those of less than 2 samples of 40 classes" in told
    assert "set hybrid.linear_rows = 640 or more" in told


def test_a_chain_tells_how_true_its_predictions_were() -> None:
    run = world(network(width=6), max_steps=100).run()
    kept = [event for event in run.events if isinstance(event, Moved) and event.verdict == "kept" and event.leaps]
    assert kept
    assert all(0.1 < (event.fall_ratio or 0) < 1.5 for event in kept if event.leaps == "linearised")
    assert all(event.fall_ratio is None for event in run.events if isinstance(event, Moved) and not event.leaps)


def test_residuals_that_choose_other_rows_in_every_batch_are_noticed() -> None:
    """All batches have one form, but which row belongs to which residual is in the batch."""

    def batch(position: int) -> tuple[Tensor, Tensor]:
        return LINE, torch.randperm(len(LINE), generator=torch.Generator().manual_seed(position))

    def residuals(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, chosen = batch
        found: Tensor = (model(x) - torch.sin(3 * x))[chosen]
        return found

    run = world(network(width=6), batch, residuals, max_steps=200)
    chaining(run, 8)
    assert leaps_of(run).lookout.volatile
    assert agrees(*leaps_of(run).lookout.seen(run.trainer.engine.to_device(batch(1000)), leaps_of(run).made))
