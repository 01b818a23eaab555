from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from foretrain.motion.predictors.learned import Lesson, Remembered, RssmPredictor
from foretrain.motion.predictors.linear import LinearPredictor
from foretrain.motion.records import HORIZONS_IN_WINDOWS

from .motions import Run, noisy, out_of_sample
from .test_mlp import Switching, switching


def small(**settings: int | float) -> RssmPredictor:
    return RssmPredictor(**{"deterministic_dim": 32, "stochastic_dim": 8, "num_categoricals": 6, **settings})  # type: ignore[arg-type]


def watch(predictor: RssmPredictor, windows: int) -> list[float]:
    nats = []
    for situation, told, _ in Switching(switching, windows, exact=False):
        predictor.observe(situation, told)
        nats.append(predictor.nats)
    return nats


def test_the_divergence_is_real() -> None:
    """The posterior learns to tell windows apart, about as far as it is free to."""
    nats = watch(small(learning_rate=3e-3), 400)
    assert min(nats[10:]) > 0
    assert 0.1 < np.mean(nats[-80:]) < 2.0


def test_the_divergence_falls_where_it_costs() -> None:
    """A posterior that knows much more than the prior: the prior learns to foresee it."""
    predictor = small(learning_rate=3e-3)
    predictor.model.posterior_out.weight.data *= 12.0
    nats = watch(predictor, 500)
    early, late = np.mean(nats[8:40]), np.mean(nats[-80:])
    assert early > 2.0
    assert 0 < late < 0.6 * early, (early, late)


def test_the_state_is_reconstructed_better_and_better() -> None:
    predictor = small(learning_rate=3e-3)
    errors = []
    for situation, told, _ in Switching(switching, 400, exact=False):
        predictor.observe(situation, told)
        errors.append(predictor.reconstruction)
    assert np.mean(errors[-80:]) < 0.5 * np.mean(errors[8:40])


def test_latents_are_sampled_from_its_own_generator() -> None:
    first, second = small(), small()
    probabilities = torch.full((3, 400, 8, 6), 1 / 6)
    drawn = first.model.sample(probabilities, first.generator)
    assert torch.equal(drawn, second.model.sample(probabilities, second.generator))
    assert not torch.equal(drawn, first.model.sample(probabilities, first.generator))
    hot = drawn.unflatten(-1, (8, 6))
    assert hot.mean((0, 1, 2)).tolist() == pytest.approx([1 / 6] * 6, abs=0.03)
    assert torch.allclose(hot.sum(-1), torch.ones(3, 400, 8))
    sure = torch.zeros(3, 2, 8, 6)
    sure[..., 4] = 1.0
    assert torch.equal(first.model.sample(sure, first.generator).unflatten(-1, (8, 6)), sure)


class Reference:
    """One member of the model in plain formulas: slow, and easy to read."""

    def __init__(self, predictor: RssmPredictor, member: int) -> None:
        model = predictor.model
        self.variables, self.classes, self.member = model.variables, model.classes, member
        self.weights = {name: w.detach()[member].clone().requires_grad_() for name, w in model.named_parameters()}

    def mixed(self, logits: torch.Tensor) -> torch.Tensor:
        return 0.99 * logits.view(-1, self.variables, self.classes).softmax(-1) + 0.01 / self.classes

    def latent(self, mixed: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """All members draw at once; this one takes its share."""
        uniform = torch.rand((3, *mixed.shape[:-1], 1), generator=generator)[self.member]
        classes = (mixed.cumsum(-1) < uniform).sum(-1).clamp(max=self.classes - 1)
        hot = torch.zeros_like(mixed).scatter_(-1, classes[..., None], 1.0)
        return (hot + mixed - mixed.detach()).flatten(1)

    def loss(self, windows: list[Remembered], generator: torch.Generator) -> torch.Tensor:
        w, silu, count = self.weights, functional.silu, len(windows)
        states = torch.stack([one.state for one in windows])
        embedded = silu(states @ w["embed.weight"] + w["embed.bias"]) @ w["posterior_embed.weight"]
        path, posteriors, latents = [windows[0].recurrent[self.member]], [], []
        for t in range(count):
            hidden = silu(path[-1] @ w["posterior_in.weight"] + embedded[t])
            posterior = self.mixed(hidden @ w["posterior_out.weight"])
            latent = self.latent(posterior, generator)
            joined = torch.cat([(latent @ w["latent.weight"])[0], path[-1]])
            reset, update, raw = (joined @ w["gru.weight"] + w["gru.bias"][0]).chunk(3)
            update = torch.sigmoid(update - 1)
            path.append(update * torch.tanh(torch.sigmoid(reset) * raw) + (1 - update) * path[-1])
            posteriors.append(posterior)
            latents.append(latent)
        whole = torch.stack(path)
        prior = self.mixed(silu(whole @ w["prior_in.weight"]) @ w["prior_out.weight"])
        imagined = self.context(whole[1:], self.latent(prior[1:], generator))
        seen = self.context(whole[:-1], torch.cat(latents))
        total = functional.smooth_l1_loss(seen @ w["decoder.weight"] + w["decoder.bias"], states)
        posterior = torch.cat(posteriors)
        self.nats = kl(posterior, prior[:-1]).item()
        divergence = 0.8 * kl(posterior.detach(), prior[:-1]) + 0.2 * kl(posterior, prior[:-1].detach())
        total = total + 0.1 * divergence.clamp_min(1.0)
        known = [(place, one, lesson) for place, one in enumerate(windows) for lesson in one.lessons]
        for place, one, lesson in known:
            total = total + lesson.seen[self.member] / len(known) * self.forecast(imagined[place], one, lesson)
        return total

    def context(self, path: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        w = self.weights
        return functional.silu(path @ w["context.weight"] + w["context.bias"] + latent @ w["latent.weight"])

    def forecast(self, context: torch.Tensor, window: Remembered, lesson: Lesson) -> torch.Tensor:
        w = self.weights
        windows = HORIZONS_IN_WINDOWS[lesson.index]
        horizon = torch.tensor([math.log2(windows) / 3, windows / 8])
        common = context @ w["head.context.weight"] + w["head.context.bias"] + horizon @ w["head.horizons.weight"]
        correction = functional.silu(lesson.groups @ w["head.groups.weight"] + common) @ w["head.last.weight"]
        bent = (lesson.gram @ correction[..., None])[..., 0]
        error = ((bent - 2 * lesson.dots) * correction).sum() / len(correction)
        shift, width = (context @ w["losses.weight"]).view(2, -1)[:, lesson.index]
        width = width.clamp(-1, 1)
        return error + 0.1 * (0.5 * ((window.surprise(lesson) - shift) * torch.exp(-width)) ** 2 + width)


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first * (first / second).log()).sum() / len(first)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("with_lessons", [True, False])
@pytest.mark.parametrize("spread", [0.1, 2.0])  # within the free nats, and beyond
def test_members_are_trained_as_if_alone(count: int, with_lessons: bool, spread: float) -> None:
    predictor = RssmPredictor(deterministic_dim=7, stochastic_dim=3, num_categoricals=4)
    generator = torch.Generator().manual_seed(count)
    for name, weight in predictor.model.named_parameters():
        factor = spread if name.startswith(("posterior_out", "prior_out")) else 1.0
        weight.data.copy_(factor * (weight + 0.2 * torch.randn(weight.shape, generator=generator)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def lesson(index: int, seen: list[float]) -> Lesson:
        half = normal(5, 4, 4)
        return Lesson(index, normal(64), normal(5, 14), half @ half.mT, normal(5, 4), torch.tensor(seen), 1.3)

    path = [np.stack([np.linspace(1, 2, 5), np.linspace(0.1, 0.5, 5)]) for _ in range(count)]
    windows = [Remembered(number, normal(64), normal(3, 7), loss) for number, loss in enumerate(path)]
    if with_lessons:
        windows[0].lessons.append(lesson(0, [1.0, 1.0, 0.0]))
        windows[-1].lessons.extend([lesson(3, [1.0, 0.0, 1.0]), lesson(1, [1.0, 1.0, 1.0])])
    drawn = predictor.generator.get_state()
    loss = predictor._segment_loss(windows)
    loss.backward()
    references = [Reference(predictor, member) for member in range(3)]
    losses = [one.loss(windows, torch.Generator().set_state(drawn)) for one in references]
    torch.testing.assert_close(loss, torch.stack(losses).sum())
    assert predictor.nats == pytest.approx(np.mean([one.nats for one in references]), rel=1e-4)
    assert (predictor.nats > 1) == (spread > 1)
    for member, reference in enumerate(references):
        losses[member].backward()
        for name, weight in predictor.model.named_parameters():
            expected = reference.weights[name].grad
            found = torch.zeros_like(weight) if weight.grad is None else weight.grad
            expected = torch.zeros_like(weight[member]) if expected is None else expected
            torch.testing.assert_close(found[member], expected, rtol=2e-3, atol=2e-5, msg=name)


def test_the_forecast_comes_from_the_prior() -> None:
    """Other weights of the prior alone change the imagined next window, not where the model is."""
    first, second = small(), small()
    watch(first, 6)
    watch(second, 6)
    second.model.prior_out.weight.data *= -5.0
    situation, _, _ = next(iter(Run(noisy([50], 0.3), 1)))
    with torch.no_grad():
        first._advance(situation)
        second._advance(situation)
    assert torch.equal(first._recurrent, second._recurrent)
    assert not torch.equal(first._context, second._context)


def test_it_learns_what_a_constant_fit_cannot() -> None:
    linear = out_of_sample(LinearPredictor(), Switching(switching, 500, exact=False), after=400)
    rssm = out_of_sample(small(learning_rate=3e-3), Switching(switching, 500, exact=False), after=400)
    assert rssm[1]["r2"] > linear[1]["r2"] + 0.02


def test_members_differ_and_learn_equally_often() -> None:
    predictor = small(ensemble_size=3)
    watch(predictor, 40)
    steps = {int(moments["step"]) for moments in predictor.optimizer.state.values()}
    assert len(steps) == 1
    assert min(steps) > 0
    assert not torch.equal(predictor._recurrent[0], predictor._recurrent[1])


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    predictor = small()
    watch(predictor, 12)
    before = [weight.detach().clone() for weight in predictor.model.parameters()]
    assert predictor.model.decoder.weight.grad is not None
    predictor.model.decoder.weight.grad[0, 3, 3] = torch.nan
    predictor._step()
    assert all(torch.equal(weight, was) for weight, was in zip(predictor.model.parameters(), before, strict=True))
