"""Models and optimizers of all kinds: each trains as a loop by hand does, is predicted, saved and resumed, or it is
refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam, Optimizer, SparseAdam

from foretrain import ConfigError, HybridTrainer, load_weights
from foretrain.config import from_mapping
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.codec import put_together, snapshot

from .worlds import QUICK, Told, same_weights, trust

SETTINGS = {
    **{name: value for name, value in QUICK.items() if not name.startswith(("optimizer", "schedule"))},
    "max_steps": 70,
    "hybrid.warmup_steps": 10,
    "hybrid.full_steps": 5,
    "audit.time_budget": 1.0,
}
WIDTH = 6


def batch(number: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


class Model(nn.Module):
    """`make` says what it is made of, `run` what it computes."""

    def __init__(self, make: Callable[[nn.Module], None], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        make(self)
        self.run = run

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(self, inputs)

    def loss(self, inputs: Tensor) -> Tensor:
        return (self(inputs).sum(-1) - inputs.sum(-1)).square().mean()


class LossOfOneElement(Model):
    def loss(self, inputs: Tensor) -> Tensor:
        return super().loss(inputs).reshape(1)


def layers(**made: Any) -> Callable[[nn.Module], None]:
    """Sets attributes; functions are called first, so that all are made after the seed is set."""

    def make(model: nn.Module) -> None:
        for name, value in made.items():
            setattr(model, name, value())

    return make


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def weights(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(shape, dtype=dtype))


def embed(inputs: Tensor) -> Tensor:
    return (3 * inputs.abs().sum(-1)).long() % 10


def tied(model: nn.Module) -> None:
    model.a, model.b = linear(), linear()
    model.b.weight = model.a.weight


def views_of_one(model: nn.Module) -> None:
    memory = 0.3 * torch.randn(2, WIDTH * WIDTH)
    model.a, model.b = nn.Parameter(memory[0]), nn.Parameter(memory[1])


def numbers_of_all_kinds(model: nn.Module) -> None:
    model.a = linear()
    model.whole = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
    model.truth = nn.Parameter(torch.ones(WIDTH, dtype=torch.bool), requires_grad=False)
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    model.register_buffer("passing", torch.ones(3), persistent=False)


def counted(model: Any, inputs: Tensor) -> Tensor:
    if model.training:
        model.count += 1
    return model.a(inputs) * model.truth + 0 * model.whole


def hooked(model: nn.Module) -> None:
    model.a = linear()
    model.a.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    model.a.weight.register_hook(lambda gradient: 0.5 * gradient)


def channels_last(model: nn.Module) -> None:
    model.a = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
    model.b = nn.Conv2d(4, 2, 3, padding=1).to(memory_format=torch.channels_last)


def convolve(model: Any, inputs: Tensor) -> Tensor:
    image = inputs.view(-1, 1, 2, 3).to(memory_format=torch.channels_last)
    return model.b(torch.tanh(model.a(image))).flatten(1)


def chained(model: Any, inputs: Tensor) -> Tensor:
    return model.b(torch.tanh(model.a(inputs)))


class Strange(Optimizer):
    """Plain gradient descent that keeps all kinds of things."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"eta": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["name"], state["nothing"] = f"after {state['count']}", None
                state.setdefault("nested", {"means": [torch.zeros_like(p, dtype=torch.float64), (1, 2.5)]})
                state["nested"]["means"][0].mul_(0.9).add_(p.grad)
                p.sub_(group["eta"] * state["nested"]["means"][0].to(p.dtype))


adam = partial(Adam, lr=1e-2)
plain = partial(SGD, lr=0.05)
complex_numbers = layers(w=lambda: weights(WIDTH, WIDTH, dtype=torch.cfloat))
embedding = layers(e=lambda: nn.Embedding(10, WIDTH, sparse=True))
look_up = lambda model, inputs: model.e(embed(inputs))  # noqa: E731
one_layer = (layers(a=linear), lambda model, inputs: model.a(inputs))

ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Optimizer]]] = {
    "complex": (lambda: Model(complex_numbers, lambda m, x: (x.to(m.w.dtype) @ m.w).abs()), adam),
    "complex128": (
        lambda: Model(
            layers(w=lambda: weights(WIDTH, WIDTH, dtype=torch.cdouble)), lambda m, x: (x.to(m.w.dtype) @ m.w).abs()
        ),
        plain,
    ),
    "sparse, plain": (lambda: Model(embedding, look_up), plain),
    "sparse, adam": (lambda: Model(embedding, look_up), lambda p: SparseAdam(list(p), lr=0.05)),
    "sparse and dense": (
        lambda: Model(
            layers(e=lambda: nn.Embedding(10, WIDTH, sparse=True), a=linear), lambda m, x: m.a(look_up(m, x))
        ),
        plain,
    ),
    "double": (lambda: Model(layers(a=lambda: linear().double()), lambda m, x: m.a(x.double())), adam),
    "two formats": (
        lambda: Model(layers(a=linear, b=lambda: linear().double()), lambda m, x: m.b(m.a(x).double())),
        adam,
    ),
    "bf16": (lambda: Model(layers(a=lambda: linear().bfloat16()), lambda m, x: m.a(x.bfloat16()).float()), adam),
    "whole numbers": (
        lambda: Model(numbers_of_all_kinds, counted),
        lambda p: adam([one for one in p if one.requires_grad]),
    ),
    "tied": (lambda: Model(tied, chained), adam),
    "used twice": (lambda: Model(layers(a=linear), lambda m, x: m.a(torch.tanh(m.a(x)))), adam),
    "no size, one number": (
        lambda: Model(
            layers(a=linear, zero=lambda: weights(0, 4), one=lambda: nn.Parameter(torch.tensor(1.0))),
            lambda m, x: m.a(x) * m.one + m.zero.sum(),
        ),
        adam,
    ),
    "parametrized": (
        lambda: Model(
            layers(
                a=lambda: parametrizations.weight_norm(linear()), b=lambda: parametrizations.spectral_norm(linear())
            ),
            chained,
        ),
        adam,
    ),
    "channels last": (lambda: Model(channels_last, convolve), adam),
    "transposed": (lambda: Model(layers(w=lambda: nn.Parameter(weights(5, WIDTH).t())), lambda m, x: x @ m.w), adam),
    "views of one": (
        lambda: Model(views_of_one, lambda m, x: torch.tanh(x @ m.a.view(WIDTH, WIDTH)) @ m.b.view(WIDTH, WIDTH)),
        adam,
    ),
    "dropout and norm": (
        lambda: Model(
            layers(
                a=lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, WIDTH))
            ),
            lambda m, x: m.a(x),
        ),
        adam,
    ),
    "hooks": (lambda: Model(hooked, lambda m, x: m.a(x)), adam),
    "wrapped": (lambda: Model(layers(a=lambda: nn.DataParallel(linear())), lambda m, x: m.a(x)), adam),
    "compiled": (lambda: torch.compile(Model(*one_layer), backend="eager"), adam),
    "unused": (lambda: Model(layers(a=linear, unused=linear), lambda m, x: m.a(x)), adam),
    "used at times": (lambda: Model(layers(a=linear, b=linear), lambda m, x: m.a(x) if x.sum() > 0 else m.b(x)), adam),
    "recurrent": (
        lambda: Model(layers(a=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)), lambda m, x: m.a(x[:, None])[0][:, 0]),
        adam,
    ),
    "loss of one element": (lambda: LossOfOneElement(*one_layer), adam),
    "strange state, no rate": (lambda: Model(*one_layer), Strange),
    "names": (lambda: Model(*one_layer), lambda p: adam([(f"p{index}", one) for index, one in enumerate(p)])),
}


def made(name: str, mode: str) -> HybridTrainer:
    make, optimizer = ZOO[name]
    model = make()
    told = Told("repeat") if mode != "off" else None
    config = from_mapping({**SETTINGS, "hybrid.mode": mode})
    trainer = HybridTrainer(model, optimizer(model.parameters()), config=config, predictor=told)
    if trainer.policy is not None:
        trust(trainer)
    return trainer


def run(trainer: HybridTrainer, position: int, last: int | None = None) -> int:
    """Up to a step, or to the end; where it is then."""
    while trainer.global_step < (last or trainer.config.max_steps) or (last is None and trainer.judging):
        trainer.step(batch(position))
        position += 1
    return position


@pytest.mark.parametrize("name", ZOO)
def test_off_it_is_a_loop_by_hand_to_the_bit(name: str) -> None:
    trainer = made(name, "off")
    random = torch.get_rng_state()
    run(trainer, 0, 10)
    make, of = ZOO[name]
    model = make()
    optimizer = of(model.parameters())
    torch.set_rng_state(random)
    for number in range(10):
        optimizer.zero_grad()
        model.loss(batch(number)).backward()
        optimizer.step()
    assert same_weights(trainer.model, model)


ROLLED = ("complex", "sparse, adam", "two formats", "tied", "dropout and norm", "strange state, no rate")


@pytest.mark.parametrize(("name", "mode"), [(name, "leap") for name in ZOO] + [(name, "rollout") for name in ROLLED])
def test_it_is_predicted_saved_and_resumed(name: str, mode: str, tmp_path: Path) -> None:
    straight = made(name, mode)
    run(straight, 0)
    assert straight.policy.score.counts.tried
    first, position = made(name, mode), 0
    while not first.judging:
        first.step(batch(position))
        position += 1
    store = CheckpointStore(tmp_path)
    store.save(first.global_step, first.state_dict())
    second = made(name, mode)
    second.load_state_dict(store.load_newest().state)
    run(second, position)
    assert same_weights(straight.model, second.model)
    assert straight.backward_passes == second.backward_passes


@pytest.mark.parametrize("name", ["complex", "complex128", "sparse, plain", "no size, one number", "two formats"])
def test_chains_of_leaps_go_there_too(name: str) -> None:
    make, optimizer = ZOO[name]
    model = make()
    settings = {**SETTINGS, "hybrid.secant_pairs": 20, "evaluation.ema_decay": 0.9, "predictor.beta": 0.5}
    trainer = HybridTrainer(model, optimizer(model.parameters()), config=from_mapping(settings))
    first = trainer.step(batch(0)).loss
    while trainer.global_step < 70 or trainer.judging:
        last = trainer.step(batch(0)).loss
    assert trainer.policy.score.exact.leaps == "quasi-Newton"
    assert last < first
    trainer.evaluate([batch(0)])


@pytest.mark.parametrize("mode", ["leap", "rollout"])
@pytest.mark.parametrize("name", ["complex", "sparse, adam"])
def test_in_host_memory_it_is_the_same(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = made(name, mode)
    run(here, 0)
    monkeypatch.setitem(SETTINGS, "memory.snapshots", "pinned")
    monkeypatch.setitem(SETTINGS, "memory.basis", "pinned")
    monkeypatch.setitem(SETTINGS, "memory.offload", True)
    there = made(name, mode)
    run(there, 0)
    assert there.policy.score.counts.tried
    assert same_weights(here.model, there.model)


def test_complex_batches_are_remembered() -> None:
    """Also those that torch has not conjugated yet."""
    model = ZOO["complex"][0]()
    config = from_mapping({**SETTINGS, "hybrid.mode": "leap"})
    trainer = HybridTrainer(
        model, adam(model.parameters()), lambda m, x: (x @ m.w).abs().square().mean(), config, predictor=Told("repeat")
    )
    trust(trainer)
    position = 0
    while not trainer.judging:
        trainer.step(torch.complex(batch(position), batch(position + 1)).conj())
        position += 1
    states = [snapshot(trainer.state_dict()) for _ in range(2)]
    assert put_together(states[0])["hybrid"]["policy"]["recent"]["batches"][0].is_complex()


@pytest.mark.parametrize("name", ["complex", "complex128"])
def test_complex_weights_are_written_and_read(name: str, tmp_path: Path) -> None:
    trainer = made(name, "off")
    trainer.fit([batch(number) for number in range(50)], out=tmp_path / "run", progress=False)
    assert same_weights(load_weights(ZOO[name][0](), tmp_path / "run"), trainer.model)
    (tmp_path / "run" / "model.safetensors").unlink()
    assert same_weights(load_weights(ZOO[name][0](), tmp_path / "run"), trainer.model)


# --- refused ---------------------------------------------------------------------------------------------------------


class Bad(Strange):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["deep"] = [{"in it": object()}]


def mixed() -> nn.Module:
    return Model(layers(e=lambda: nn.Embedding(10, WIDTH, sparse=True), a=linear), lambda m, x: m.a(look_up(m, x)))


def functional() -> nn.Module:
    made_here = layers(w=lambda: weights(10, WIDTH))
    return Model(made_here, lambda m, x: F.embedding(embed(x), m.w, sparse=True))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Optimizer] | None, str]] = {
    "expanded": (
        lambda: Model(layers(w=lambda: nn.Parameter(torch.ones(1).expand(WIDTH))), lambda m, x: x * m.w),
        plain,
        r"w of Model was made with expand\(\)",
    ),
    "sparse, configured": (mixed, None, r"e of Model gives sparse gradients \(sparse=True\), which .* cannot use"),
    "sparse, fused": (mixed, partial(SGD, lr=0.1, fused=True), "which SGD with fused=True cannot use"),
    "sparse, momentum": (mixed, partial(SGD, lr=0.1, momentum=0.9), "which SGD with momentum cannot use"),
    "sparse, Adam": (mixed, adam, "which Adam cannot use"),
    "dense, SparseAdam": (mixed, lambda p: SparseAdam(list(p)), "SparseAdam takes sparse gradients only"),
    "sparse by a function": (functional, adam, "the gradients are sparse, and Adam cannot use them"),
}


@pytest.mark.parametrize("mode", ["off", "leap"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_before_anything_is(name: str, mode: str) -> None:
    make, optimizer, words = REFUSED[name]
    model = make()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match=words):
        HybridTrainer(
            model,
            optimizer(model.parameters()) if optimizer is not None else None,
            config=from_mapping({**SETTINGS, "hybrid.mode": mode}),
        ).step(batch(0))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("mode", ["off", "leap"])
def test_a_state_that_cannot_be_saved_is_refused_after_the_first_step(mode: str, tmp_path: Path) -> None:
    model = Model(*one_layer)
    trainer = HybridTrainer(model, Bad(model.parameters()), config=from_mapping({**SETTINGS, "hybrid.mode": mode}))
    with pytest.raises(ConfigError, match="Bad keeps deep in object, which snapshots and checkpoints cannot copy"):
        trainer.fit([batch(number) for number in range(50)], out=tmp_path / "run", progress=False)
    assert trainer.backward_passes == 1


def test_sparse_by_a_function_trains_with_what_can_use_it() -> None:
    model = functional()
    trainer = HybridTrainer(model, SparseAdam(list(model.parameters())), config=from_mapping(SETTINGS))
    run(trainer, 0, 30)


def test_sparse_gradients_are_clipped_as_dense_ones_are() -> None:
    clipped = from_mapping({**SETTINGS, "hybrid.mode": "off", "optimizer.gradient_clip_norm": 0.01})
    models = [Model(layers(e=partial(nn.Embedding, 10, WIDTH, sparse=sparse)), look_up) for sparse in (True, False)]
    outputs = []
    for model in models:
        trainer = HybridTrainer(model, plain(model.parameters()), config=clipped)
        outputs.append([float(trainer.step(batch(number)).gradient_norm) for number in range(5)])
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-5)
    assert torch.allclose(models[0].e.weight, models[1].e.weight, atol=1e-6)


def test_parameters_of_another_than_the_model_are_said() -> None:
    model, weight = Model(*one_layer), nn.Parameter(torch.ones(()))
    with pytest.warns(UserWarning, match="1 parameters in the Adam are none of Model's"):
        HybridTrainer(model, adam([*model.parameters(), weight]), config=from_mapping(SETTINGS))
