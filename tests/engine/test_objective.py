"""Objectives: the loss of residuals, and how each output counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretrain import HybridTrainer, cross_entropy, logistic, supervised
from foretrain.engine.objective import Objective, OutputPart, Residuals, UnknownForm, objective_of
from foretrain.errors import ConfigError, InputError
from foretrain.events import Event, Moved, Notice

LINE = torch.linspace(-1, 1, 8).view(-1, 1)


def test_the_loss_is_the_weighted_sum_of_mean_squares() -> None:
    model = nn.Linear(1, 2)
    objective = Residuals(lambda m, x: {"a": m(x), "b": m(x[:2])[:, 0]}, {"a": 0.25})
    wanted = 0.25 * model(LINE).square().mean() + model(LINE[:2])[:, 0].square().mean()
    assert torch.allclose(objective(model, LINE), wanted)
    assert objective.latest["a"].item() == pytest.approx(model(LINE).square().mean().item())


def test_complex_residuals_count_by_their_modulus() -> None:
    values = torch.tensor([3 + 4j, 0 + 0j])
    objective = Residuals(lambda m, x: m.weight * 0 + values)
    assert objective(nn.Linear(1, 2), LINE).item() == pytest.approx(12.5)


def test_a_block_without_rows_counts_nothing() -> None:
    objective = Residuals(lambda m, x: {"a": m(x), "none": m(x)[:0]})
    model = nn.Linear(1, 1)
    assert torch.equal(objective(model, LINE), model(LINE).square().mean())
    assert [part.name for part in objective.parts(model, LINE)] == ["a"]


@pytest.mark.parametrize(
    ("function", "weights", "error", "words"),
    [
        (3, None, ConfigError, "cannot be called"),
        (lambda m, x: m(x), {"residuals": -1.0}, ConfigError, "not negative"),
        (lambda m, x: m(x), {"equation": 1.0}, ConfigError, "no block of residuals; there are 'residuals'"),
        (lambda m, x: {}, None, InputError, "gave no block"),
        (lambda m, x: {"a": 1.0}, None, InputError, "'a' are of type float"),
        (lambda m, x: m(x).long(), None, InputError, "whole numbers"),
        (lambda m, x: m(x)[:0], None, InputError, "nothing to train on"),
        (lambda m, x: m(x).square().mean(), None, InputError, "looks like a loss.*Hand a loss in as loss_fn"),
        (lambda m, x: {"a": m(x).square().mean(), "b": m(x).sum()}, None, InputError, "looks like a loss"),
        (
            lambda m, x: [m(x), m(x[:2])],
            None,
            InputError,
            "a list of 2, whose parts have no names; give",
        ),
        (lambda m, x: (m(x),), None, InputError, "a tuple of 1, whose parts have no names"),
    ],
)
def test_bad_residuals_are_refused_in_words(function: Any, weights: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Residuals(function, weights)(nn.Linear(1, 1), LINE)


def test_a_loss_in_place_of_residuals_is_refused_at_the_first_step() -> None:
    trainer = HybridTrainer(nn.Linear(1, 1), residuals=lambda model, x: model(x).square().mean())
    with pytest.raises(InputError, match=r"one row: residual.reshape\(1\)"):
        trainer.step(LINE)


def test_a_single_number_may_stand_beside_residuals() -> None:
    model = nn.Linear(1, 1)
    objective = Residuals(lambda m, x: {"points": m(x), "sum": m(x).sum() - 1})
    wanted = model(LINE).square().mean() + (model(LINE).sum() - 1).square()
    assert torch.allclose(objective(model, LINE), wanted)


@pytest.mark.parametrize(
    ("saved", "given", "said"),
    [
        ({"a": 2.0}, {"a": 3.0, "b": 1.0}, "'a' 3 and not 2."),
        ({"a": 2.0}, None, "'a' 1 and not 2."),
        ({"a": 2.0}, {"b": 1.0, "a": 2.0}, ""),
        (None, {"a": 1.0}, ""),
    ],
)
def test_other_weights_than_those_of_the_saved_run_are_told(saved: Any, given: Any, said: str) -> None:
    def trainer(weights: Any) -> HybridTrainer:
        return HybridTrainer(nn.Linear(1, 1), residuals=lambda m, x: {"a": m(x), "b": m(x) - 1}, weights=weights)

    first, events = trainer(saved), list[Event]()
    first.step(LINE)
    second = trainer(given)
    second.bus.subscribe(events.append)
    second.load_state_dict(first.state_dict())
    texts = [event.message for event in events if isinstance(event, Notice)]
    assert [said in text and "other weights now" in text for text in texts] == ([True] if said else [])
    assert second.engine.objective.weights == (given or {})  # type: ignore[union-attr]


def test_a_loss_and_residuals_are_not_both_taken() -> None:
    with pytest.raises(ConfigError, match="keep one of them"):
        HybridTrainer(nn.Linear(1, 1), loss_fn=nn.MSELoss(), residuals=lambda m, x: m(x))
    with pytest.raises(ConfigError, match="hand in residuals= as well"):
        HybridTrainer(nn.Linear(1, 1), loss_fn=nn.MSELoss(), weights={"a": 1.0})


# --- criteria --------------------------------------------------------------------------------------------------------

INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(12) % 3
CRITERIA: dict[str, tuple[Any, int, Tensor]] = {
    "mean squares": (nn.MSELoss(), 2, torch.randn(12, 2, generator=torch.Generator().manual_seed(1))),
    "logistic": (nn.BCEWithLogitsLoss(), 1, (CLASSES == 1).float().view(-1, 1)),
    "classes": (F.cross_entropy, 3, CLASSES),
}


def parts_of(name: str) -> tuple[OutputPart, Tensor, Tensor]:
    criterion, width, target = CRITERIA[name]
    torch.manual_seed(0)
    model = nn.Linear(4, width)
    objective = objective_of(supervised(criterion))
    assert isinstance(objective, Objective)
    (part,) = objective.parts(model, (INPUTS, target))
    return part, criterion(model(INPUTS), target), target


@pytest.mark.parametrize("name", CRITERIA)
def test_the_parts_of_a_criterion_have_its_loss(name: str) -> None:
    part, loss, _ = parts_of(name)
    assert torch.allclose(part.losses(part.outputs).mean(), loss)


@pytest.mark.parametrize("name", CRITERIA)
def test_gradient_and_curvature_are_those_of_the_criterion(name: str) -> None:
    part, _, target = parts_of(name)
    criterion = CRITERIA[name][0]
    outputs = part.outputs.detach() + (target if name == "mean squares" else 0)
    gradient, factor = part.curvature(torch.arange(part.units))
    wanted = torch.autograd.functional.jacobian(lambda out: criterion(out, target), outputs)
    torch.testing.assert_close(gradient.reshape(outputs.shape), wanted, check_dtype=False)
    curved = torch.autograd.functional.hessian(lambda out: criterion(out, target), outputs)
    curved = curved.reshape(outputs.numel(), -1)
    mine = torch.block_diag(*(factor @ factor.mT)) if factor.ndim == 3 else torch.diag(factor.square())
    torch.testing.assert_close(mine, curved, rtol=1e-4, atol=1e-6, check_dtype=False)


class Weighted(nn.MSELoss):
    """It looks like mean squares, and is none."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return (torch.arange(len(input)).view(-1, 1) * (input - target).square()).mean()


@pytest.mark.parametrize(
    "criterion",
    [
        Weighted(),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.L1Loss(),
        nn.MSELoss(reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)),
        lambda output, target: (output - target).square().mean(),
    ],
)
def test_other_criteria_have_no_known_form(criterion: Any) -> None:
    assert objective_of(supervised(criterion)) is None


def test_batches_that_a_criterion_takes_otherwise_are_no_known_form() -> None:
    objective = objective_of(supervised(nn.CrossEntropyLoss()))
    assert objective is not None
    for target in (torch.full((12,), -100), torch.rand(12, 3)):
        with pytest.raises(UnknownForm):
            objective.parts(nn.Linear(4, 3), (INPUTS, target))
    objective = objective_of(supervised(nn.MSELoss()))
    assert objective is not None
    with pytest.raises(UnknownForm, match="differ in shape"):
        objective.parts(nn.Linear(4, 1), (INPUTS, torch.rand(12)))


# --- blocks of a convex loss -----------------------------------------------------------------------------------------


def with_penalty(model: nn.Module, batch: Any) -> dict[str, Any]:
    inputs, targets = batch
    output = model(inputs)
    fit = logistic(output, targets) if targets.ndim == 2 else cross_entropy(output, targets)
    return {"fit": fit, "penalty": torch.cat([p.reshape(-1) for p in model.parameters()])}


@pytest.mark.parametrize("name", ["logistic", "classes"])
def test_a_convex_loss_may_stand_beside_residuals(name: str) -> None:
    criterion, width, target = CRITERIA[name]
    model = nn.Linear(4, width)
    objective = Residuals(with_penalty, {"penalty": 0.5})
    weights = torch.cat([p.reshape(-1) for p in model.parameters()])
    wanted = criterion(model(INPUTS), target) + 0.5 * weights.square().mean()
    torch.testing.assert_close(objective(model, (INPUTS, target)), wanted)
    torch.testing.assert_close(objective.latest["fit"], criterion(model(INPUTS), target).detach())
    fit, penalty = objective.parts(model, (INPUTS, target))
    assert (fit.name, fit.weight, penalty.name, penalty.weight) == ("fit", 1.0, "penalty", 0.5)
    torch.testing.assert_close(fit.losses(fit.outputs).mean(), criterion(model(INPUTS), target))


@pytest.mark.parametrize("name", ["logistic", "classes"])
def test_a_penalised_convex_loss_is_trained_to_its_minimum(name: str) -> None:
    """Full batches: linearised leaps get there in few steps, where the gradient vanishes."""
    _, width, target = CRITERIA[name]
    model = nn.Linear(4, width)
    objective = Residuals(with_penalty, {"penalty": 0.1})
    trainer = HybridTrainer(model, "adam", residuals=with_penalty, weights={"penalty": 0.1})
    for _ in range(120):
        trainer.step((INPUTS, target))
    gradients = torch.autograd.grad(objective(model, (INPUTS, target)), list(model.parameters()))
    assert max(g.abs().max().item() for g in gradients) < 1e-4


def test_targets_of_booleans_are_logistic() -> None:
    part = logistic(torch.zeros(3, 1), torch.tensor([[True], [False], [True]]))
    assert not part.by_class
    assert part.losses(part.outputs).mean().item() == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.uint8])
@pytest.mark.parametrize("criterion", [nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, nn.MSELoss()])
def test_targets_of_yes_and_no_are_trained_on_as_0_and_1(criterion: Any, kind: torch.dtype) -> None:
    targets = (CLASSES == 1).view(-1, 1)
    losses, moves = [], []
    for wanted in (targets.float(), targets.to(kind)):
        torch.manual_seed(0)
        trainer = HybridTrainer(nn.Linear(4, 1), "adam", criterion)
        events: list[Event] = []
        trainer.bus.subscribe(events.append)
        losses.append([trainer.step((INPUTS, wanted)).loss for _ in range(30)])
        moves.append([event.verdict for event in events if isinstance(event, Moved)])
        assert not any("no linearised leaps" in str(event) for event in events)
    assert losses[0] == losses[1]
    assert moves[0] == moves[1]


def test_rows_of_no_class_are_no_known_form() -> None:
    objective = Residuals(with_penalty)
    with pytest.raises(UnknownForm, match="one class per row"):
        objective.parts(nn.Linear(4, 3), (INPUTS, torch.full((12,), -100)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: logistic(torch.zeros(3, 1), torch.zeros(3)), r"outputs \[3, 1\] and targets \[3\]"),
        (lambda: logistic(torch.zeros(3), [0, 1, 1]), "a list of 3: it takes tensors"),
        (lambda: cross_entropy(torch.zeros(3, 2), torch.zeros(3)), "one whole number per row"),
        (lambda: cross_entropy(torch.zeros(3), torch.zeros(3).long()), "one whole number per row"),
        (lambda: cross_entropy(torch.zeros(3, 2).long(), torch.zeros(3).long()), "outputs are real"),
    ],
)
def test_bad_outputs_and_targets_are_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()
