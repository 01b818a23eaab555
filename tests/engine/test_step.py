"""One full step: accumulation, clipping, skipping, and batches of any form."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain import HybridTrainer
from foretrain.config import OptimizerConfig, PrecisionConfig, from_mapping
from foretrain.engine.batch import map_tensors, part_weights, rows_of, split, tensors_of
from foretrain.engine.optim import build as optim
from foretrain.engine.precision import Precision
from foretrain.engine.step import FullStep
from foretrain.models.loss import IGNORED

Make = Callable[..., Any]
CPU = torch.device("cpu")


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model.loss(batch)


def full_step(model: nn.Module, optimizer: Optimizer | str = "adamw", **options: Any) -> FullStep:
    precision = Precision(PrecisionConfig(type=options.pop("precision", "fp32")), CPU)
    if isinstance(optimizer, str):
        optimizer = optim.build(model, OptimizerConfig(type=optimizer, learning_rate=0.01))
    loss = options.pop("loss", own_loss)
    return FullStep(model, optimizer, loss, precision, **options)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# --- accumulation --------------------------------------------------------------------------------------------------


def with_ignored(batch: tuple[Tensor, Tensor], places: list[tuple[int, slice]]) -> tuple[Tensor, Tensor]:
    targets = batch[1].clone()
    for row, columns in places:
        targets[row, columns] = IGNORED
    return batch[0], targets


IGNORING: dict[str, list[tuple[int, slice]]] = {
    "all count": [],
    "unevenly spread": [(0, slice(0, 15)), (1, slice(0, 3)), (5, slice(None)), (6, slice(2, 9))],
    "one part does not count at all": [(2, slice(None)), (3, slice(None))],
}


@pytest.mark.parametrize("ignoring", IGNORING)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_of_a_batch_equal_the_whole_batch(
    parts: int, fused: bool, ignoring: str, make_model: Make, make_batch: Make
) -> None:
    results = []
    for accumulation in (1, parts):
        model = make_model(options={"fused_loss": fused})
        step = full_step(model, accumulation=accumulation, clip=0.0)
        output = step(with_ignored(make_batch(rows=8), IGNORING[ignoring]))
        assert not bool(output.skipped)
        results.append((output, gradients(model)))
    (whole, whole_gradients), (split_up, split_gradients) = results
    assert float(split_up.loss) == pytest.approx(float(whole.loss), rel=1e-6)
    assert float(split_up.gradient_norm) == pytest.approx(float(whole.gradient_norm), rel=1e-5)
    torch.testing.assert_close(split_gradients, whole_gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ignoring", ["all count", "unevenly spread"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_four_times_two_is_once_eight_over_several_steps(
    kind: str, ignoring: str, make_model: Make, make_batch: Make
) -> None:
    ends = []
    for accumulation in (1, 4):
        model = make_model()
        # the default epsilon makes Adam blow up the difference of two gradients that are both nearly zero
        optimizer = optim.build(model, OptimizerConfig(type=kind, learning_rate=0.01, epsilon=1e-4))
        step = full_step(model, optimizer, accumulation=accumulation, clip=1.0)
        losses = [
            float(step(with_ignored(make_batch(rows=8, seed=number), IGNORING[ignoring])).loss) for number in range(6)
        ]
        ends.append((losses, weights(model)))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-5)
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-3, atol=2e-5)


def test_a_batch_that_does_not_divide_is_weighed_by_its_rows() -> None:
    model = nn.Linear(3, 1)
    inputs = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    results = []
    for accumulation in (1, 3):
        twin = nn.Linear(3, 1)
        twin.load_state_dict(model.state_dict())
        step = full_step(twin, accumulation=accumulation, loss=lambda model, batch: model(batch).pow(2).mean())
        results.append((float(step(inputs).loss), gradients(twin)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-7)


def test_fewer_rows_than_parts_still_give_the_whole_batch() -> None:
    model = nn.Linear(3, 1)
    inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    results = []
    for accumulation in (1, 4):
        twin = nn.Linear(3, 1)
        twin.load_state_dict(model.state_dict())
        step = full_step(twin, accumulation=accumulation, loss=lambda model, batch: model(batch).pow(2).mean())
        output = step(inputs)
        assert not bool(output.skipped)
        results.append(float(output.loss))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def labelled(form: str) -> Any:
    """Batches whose targets are ignored in some places, in the forms that people use."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=generator)
    labels = torch.randint(5, (8,), generator=generator)
    labels[[0, 1, 6]] = IGNORED
    tokens = torch.randint(5, (8, 3), generator=generator)
    targets = torch.randint(5, (8, 3), generator=generator)
    targets[0] = targets[1, 1:] = targets[7, :2] = IGNORED
    return {
        "class labels": {"x": x, "labels": labels},
        "targets last": {"x": x, "tokens": tokens, "labels": targets},
        "a mask last": {"x": x, "tokens": tokens, "labels": targets, "mask": torch.ones_like(tokens)},
    }[form]


@pytest.mark.parametrize("form", ["class labels", "targets last", "a mask last"])
def test_parts_equal_the_whole_whatever_the_form_of_the_batch(form: str) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 15).view(3, 5))

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            logits = batch["x"] @ self.weight
            if batch["labels"].ndim == 2:
                logits = (batch["x"].unsqueeze(2) * self.weight).flatten(0, 1)
            return nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED)

    results = []
    for accumulation in (1, 2):
        model = Classifier()
        output = full_step(model, accumulation=accumulation)(labelled(form))
        results.append((float(output.loss), gradients(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


def test_parts_are_the_batch_in_order() -> None:
    batch = (torch.arange(10), {"x": torch.arange(20).view(10, 2)})
    parts = [split(batch, 4, index) for index in range(4)]
    assert [len(part[0]) for part in parts] == [2, 3, 2, 3]
    assert torch.equal(torch.cat([part[0] for part in parts]), batch[0])
    assert torch.equal(torch.cat([part[1]["x"] for part in parts]), batch[1]["x"])


def test_part_weights_count_targets_of_tokens_and_rows_of_anything_else() -> None:
    tokens = [(torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), value)) for value in (1, IGNORED, 1)]
    tokens[2][1][0, :2] = IGNORED
    assert part_weights(tokens, CPU).tolist() == pytest.approx([8 / 14, 0.0, 6 / 14])
    rows = [(torch.zeros(size, 3), torch.zeros(size, 2)) for size in (1, 3)]
    assert part_weights(rows, CPU).tolist() == pytest.approx([0.25, 0.75])
    labels = [(torch.zeros(size, 3), torch.zeros(size, dtype=torch.long)) for size in (1, 3)]
    assert part_weights(labels, CPU).tolist() == pytest.approx([0.25, 0.75])


# --- clipping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("limit", [0.05, 0.5, 1e6])
def test_clipping_equals_torchs(kind: str, limit: float, make_model: Make, make_batch: Make) -> None:
    ours, theirs = make_model(), make_model()
    step = full_step(ours, kind, clip=limit)
    reference = optim.build(theirs, OptimizerConfig(type=kind, learning_rate=0.01))
    for number in range(5):
        output = step(make_batch(seed=number))
        reference.zero_grad()
        theirs.loss(make_batch(seed=number)).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        reference.step()
        assert float(output.gradient_norm) == pytest.approx(float(norm), rel=1e-4)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-3, atol=2e-5)


def test_no_clipping_leaves_the_gradient_as_it_is(make_model: Make, make_batch: Make) -> None:
    model, plain = make_model(), make_model()
    full_step(model, "sgd", clip=0.0)(make_batch())
    plain.loss(make_batch()).backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=0)


def test_a_clipped_step_has_the_length_of_the_limit(make_model: Make, make_batch: Make) -> None:
    model = make_model()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    full_step(model, optimizer, clip=0.01)(make_batch())
    assert (weights(model) - before).norm().item() == pytest.approx(0.5 * 0.01, rel=1e-4)


# --- skipping ------------------------------------------------------------------------------------------------------


class HandWritten(Optimizer):
    """Knows nothing of loss scales or of skipping; keeps a plain number in its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
                p.sub_(group["lr"] * p.grad)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    **{
        kind: lambda model, kind=kind: optim.build(model, OptimizerConfig(type=kind, learning_rate=0.01))
        for kind in ("adamw", "adam", "sgd", "muon")
    },
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    "plain adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False),
    "hand-written": lambda model: HandWritten(model.parameters(), lr=0.01),
}


def poisoned(bad: float, where: str, at: set[int]) -> Callable[[nn.Module, Any], Tensor]:
    """A loss that is bad, or has a bad gradient, in the calls numbered `at`."""
    count = iter(range(10**6))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = model.loss(batch)
        if next(count) not in at:
            return value
        if where == "loss":
            return value * bad
        next(model.parameters()).register_hook(lambda gradient: gradient * bad)
        return value

    return loss


def optimizer_state(optimizer: Optimizer) -> list[Any]:
    values = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            for name, value in sorted(optimizer.state[p].items()):
                values.append((name, value.clone() if isinstance(value, Tensor) else value))
    return values


def same_state(one: list[Any], other: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return len(one) == len(other) and all(a[0] == b[0] and equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_is_not_finite_changes_nothing(
    clip: float, name: str, bad: float, make_model: Make, make_batch: Make
) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    step = full_step(model, optimizer, loss=poisoned(bad, "loss", {2}), clip=clip)
    for number in range(2):
        assert not bool(step(make_batch(seed=number)).skipped)
    before, state = weights(model), optimizer_state(optimizer)
    assert bool(step(make_batch(seed=2)).skipped)
    assert torch.equal(weights(model), before)
    assert same_state(optimizer_state(optimizer), state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_good_loss_with_a_bad_gradient_changes_nothing(name: str, make_model: Make, make_batch: Make) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    step = full_step(model, optimizer, loss=poisoned(math.nan, "gradient", {1}))
    step(make_batch())
    before, state = weights(model), optimizer_state(optimizer)
    output = step(make_batch(seed=1))
    assert math.isfinite(float(output.loss))
    assert not math.isfinite(float(output.gradient_norm))
    assert bool(output.skipped)
    assert torch.equal(weights(model), before)
    assert same_state(optimizer_state(optimizer), state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_loss_with_a_good_gradient_changes_nothing(name: str, make_model: Make, make_batch: Make) -> None:
    """As where a part of it that is only told along, and has no gradient, is no number."""
    model = make_model()
    step = full_step(
        model, OPTIMIZERS[name](model), loss=lambda model, batch: model.loss(batch) + torch.tensor(math.nan)
    )
    before = weights(model)
    output = step(make_batch())
    assert math.isfinite(float(output.gradient_norm))
    assert bool(output.skipped)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_a_bad_step_as_if_it_had_not_been(name: str, make_model: Make, make_batch: Make) -> None:
    ends = []
    for at in ({2}, set()):
        model = make_model()
        step = full_step(model, OPTIMIZERS[name](model), loss=poisoned(math.nan, "loss", at))
        for number in (0, 1, 2, 3, 4) if at else (0, 1, 3, 4):
            step(make_batch(seed=number))
        ends.append(weights(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_first_step_is_as_if_it_had_not_been(name: str, make_model: Make, make_batch: Make) -> None:
    """fp16 overflows in its first steps as a rule: what an optimizer sets up there must be sound."""
    ends = []
    for at in ({0}, set()):
        model = make_model()
        optimizer = OPTIMIZERS[name](model)
        step = full_step(model, optimizer, loss=poisoned(math.nan, "loss", at))
        for number in (9, 0, 1, 2) if at else (0, 1, 2):
            output = step(make_batch(seed=number))
            assert bool(output.skipped) is (number == 9)
            for _, value in optimizer_state(optimizer):
                assert not isinstance(value, Tensor) or bool(value.isfinite().all())
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)


def test_a_skipped_first_step_sets_up_clean_momentum(make_model: Make, make_batch: Make) -> None:
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model)
    # memory that was used before holds anything: make that likely
    rubbish = [torch.full_like(p, 1e30) for p in model.parameters() for _ in range(3)]
    del rubbish
    full_step(model, optimizer, loss=poisoned(math.nan, "loss", {0}))(make_batch())
    for name, value in optimizer_state(optimizer):
        assert name == "momentum_buffer"
        assert value is None or torch.count_nonzero(value) == 0


def test_a_batch_that_is_not_finite_does_not_reach_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    step = full_step(model, loss=lambda model, batch: model(batch).pow(2).mean())
    good = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    step(good)
    bad = good.clone()
    bad[3, 1] = math.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert bool(step(bad).skipped)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_step_that_fails_leaves_running_statistics_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value = model(batch).pow(2).mean()
        if bool((batch > 100).any()):
            raise RuntimeError("no memory is left")
        return value

    step = full_step(model, loss=loss)
    good = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    step(good)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="no memory is left"):
        step(good + 1000)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_without_the_check_a_bad_step_reaches_the_weights(make_model: Make, make_batch: Make) -> None:
    for name in ("adamw", "rmsprop"):
        model = make_model()
        step = full_step(model, OPTIMIZERS[name](model), loss=poisoned(math.nan, "loss", {0}), nan_check=False)
        output = step(make_batch())
        assert not bool(output.skipped)
        assert not bool(weights(model).isfinite().any())


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "hand-written"])
def test_the_guard_and_the_scale_do_not_change_a_good_step(name: str, make_model: Make, make_batch: Make) -> None:
    ends = []
    for check in (True, False):
        model = make_model()
        step = full_step(model, OPTIMIZERS[name](model), nan_check=check, clip=1.0)
        for number in range(3):
            step(make_batch(seed=number))
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_a_user_supplied_optimizer_equals_a_plain_loop(make_model: Make, make_batch: Make) -> None:
    ours, theirs = make_model(), make_model()
    # an epsilon above the rounding of small gradients, which would be blown up otherwise
    step = full_step(ours, torch.optim.RMSprop(ours.parameters(), lr=0.01, eps=1e-3), clip=0.5)
    optimizer = torch.optim.RMSprop(theirs.parameters(), lr=0.01, eps=1e-3)
    for number in range(4):
        step(make_batch(seed=number))
        optimizer.zero_grad()
        theirs.loss(make_batch(seed=number)).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-3, atol=1e-5)


def test_parameters_that_take_no_part_are_left_alone(make_batch: Make, make_model: Make) -> None:
    model = make_model()
    model.unused = nn.Linear(3, 3)
    before = model.unused.weight.detach().clone()
    full_step(model, "adamw", clip=1.0)(make_batch())
    assert torch.equal(model.unused.weight, before)


def test_frozen_parameters_stay_and_the_others_move(make_model: Make, make_batch: Make) -> None:
    model = make_model()
    model.blocks[0].requires_grad_(False)
    before = [weights(block) for block in model.blocks]
    full_step(model)(make_batch())
    assert torch.equal(weights(model.blocks[0]), before[0])
    assert not torch.equal(weights(model.blocks[1]), before[1])


# --- batches -------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


def test_rows_are_counted_whatever_a_batch_is_made_of() -> None:
    rows = torch.zeros(3, 2)
    for batch in (rows, (rows, 1), {"scale": torch.tensor(2.0), "x": rows}, [torch.tensor(1), rows], ["a", "b", "c"]):
        assert rows_of(batch) == 3
    assert rows_of("a text") == rows_of(torch.tensor(1.0)) == 1


def test_tensors_are_found_and_mapped_in_any_nesting() -> None:
    batch = {"a": torch.ones(1), "b": [torch.ones(2), (torch.ones(3), "text", 7)], "c": Pair(torch.ones(4), None)}
    assert [tensor.numel() for tensor in tensors_of(batch)] == [1, 2, 3, 4]
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert [float(tensor[0]) for tensor in tensors_of(doubled)] == [2, 2, 2, 2]
    assert doubled["b"][1][1:] == ("text", 7)
    assert isinstance(doubled["c"], Pair)
    assert [type(value) for value in doubled.values()] == [Tensor, list, Pair]


def test_evaluation_runs_in_the_precision_of_training(make_model: Make, make_batch: Make) -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        seen.append(logits.dtype)
        return logits.float().mean()

    full_step(make_model(), precision="bf16", loss=loss).loss(make_batch())
    assert seen == [torch.bfloat16]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracer looks at it
def test_a_loss_that_takes_derivatives_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses derivatives of derivatives of compiled code; the loss is then run as it is, and gives the same."""
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda loss, **settings: original(loss, backend="aot_eager", **settings))

    def bend(model: nn.Module, points: Tensor) -> Tensor:
        points = points.clone().requires_grad_()
        values = model(points)
        (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), points, create_graph=True)
        return (curvature + 1).square().mean()

    losses = []
    for compile_loss in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        config = from_mapping({"device": "cpu", "max_steps": 6, "engine.compile": compile_loss, "hybrid.mode": "off"})
        trainer = HybridTrainer(model, None, bend, config)
        losses.append([trainer.step(torch.linspace(0, 1, 9).view(-1, 1)).loss for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_other_errors_of_a_compiled_loss_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda loss, **settings: loss)

    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        raise RuntimeError("something else")

    config = from_mapping({"device": "cpu", "engine.compile": True, "hybrid.mode": "off"})
    trainer = HybridTrainer(nn.Linear(1, 1), None, broken, config)
    with pytest.raises(RuntimeError, match="something else"):
        trainer.step(torch.zeros(1, 1))
