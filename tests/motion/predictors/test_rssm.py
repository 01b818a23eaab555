from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from foretrain.motion.predictors.linear import LinearPredictor
from foretrain.motion.predictors.networks import HORIZON_FEATURES, Matrices, Single, Weights
from foretrain.motion.predictors.rssm import RssmPredictor
from foretrain.motion.predictors.worldmodel import Segment, Shape, Target, advance

from .motions import Run, noisy, out_of_sample
from .test_mlp import Switching, switching


def small(**settings: int | float) -> RssmPredictor:
    return RssmPredictor(**{"deterministic_dim": 32, "stochastic_dim": 8, "num_categoricals": 6, **settings})  # type: ignore[arg-type]


def watch(predictor: RssmPredictor, windows: int) -> list[float]:
    nats = []
    for situation, told, _ in Switching(switching, windows, exact=False):
        predictor.observe(situation, told)
        nats.append(predictor.trained.nats)
    return nats


def test_the_divergence_is_real() -> None:
    """The posterior learns to tell windows apart, about as far as it is free to."""
    nats = watch(small(learning_rate=3e-3), 400)
    assert min(nats[8:]) > 0
    assert 0.1 < np.mean(nats[-80:]) < 2.0


def test_the_divergence_falls_where_it_costs() -> None:
    """A posterior that knows much more than the prior: the prior learns to foresee it."""
    predictor = small(learning_rate=3e-3)
    predictor.weights.all["posterior_out"] *= 12.0
    nats = watch(predictor, 500)
    early, late = np.mean(nats[8:40]), np.mean(nats[-80:])
    assert early > 2.0
    assert 0 < late < 0.6 * early, (early, late)


def test_the_state_is_reconstructed_better_and_better() -> None:
    predictor = small(learning_rate=3e-3)
    errors = []
    for situation, told, _ in Switching(switching, 400, exact=False):
        predictor.observe(situation, told)
        errors.append(predictor.trained.reconstruction)
    assert np.mean(errors[-80:]) < 0.5 * np.mean(errors[8:40])


def test_latents_are_sampled_from_its_own_generator() -> None:
    first, second = small(), small()
    shape = first.shape
    probabilities = np.full((400, 8, 6), 1 / 6, dtype=np.float32)
    drawn = shape.draw(probabilities, first._draws(400))
    assert np.array_equal(drawn, shape.draw(probabilities, second._draws(400)))
    assert not np.array_equal(drawn, shape.draw(probabilities, first._draws(400)))
    shares = np.bincount((drawn - 6 * np.arange(8)).ravel(), minlength=6) / drawn.size
    assert shares.tolist() == pytest.approx([1 / 6] * 6, abs=0.03)
    sure = np.zeros((3, 8, 6), dtype=np.float32)
    sure[..., 4] = 1.0
    assert (shape.draw(sure, first._draws(3)) == 4 + 6 * np.arange(8)).all()


class Reference:
    """The same model in torch, by autograd: slow, and easy to read."""

    def __init__(self, shape: Shape, weights: Matrices) -> None:
        self.shape = shape
        self.weights = {name: torch.tensor(array).requires_grad_() for name, array in weights.items()}

    def mixed(self, logits: torch.Tensor) -> torch.Tensor:
        soft = logits.view(-1, self.shape.variables, self.shape.classes).softmax(-1)
        return 0.99 * soft + 0.01 / self.shape.classes

    def latent(self, mixed: torch.Tensor, uniform: Single) -> torch.Tensor:
        rows = torch.from_numpy(self.shape.draw(mixed.detach().numpy(), uniform))
        hot = torch.zeros(len(mixed), self.shape.variables * self.shape.classes).scatter_(1, rows, 1.0)
        return hot + mixed.flatten(1) - mixed.flatten(1).detach()

    def loss(self, states: torch.Tensor, start: torch.Tensor, uniform: Single, target: Target | None) -> torch.Tensor:
        w, silu, count = self.weights, functional.silu, len(states)
        embedded = silu(states @ w["embed"] + w["embed_bias"]) @ w["posterior_embed"]
        path, posteriors, latents = [start], [], []
        for t in range(count):
            posterior = self.mixed(silu(path[-1] @ w["posterior_in"] + embedded[t]) @ w["posterior_out"])
            latent = self.latent(posterior, uniform[t : t + 1])
            joined = torch.cat([(latent @ w["latent"])[0], path[-1]])
            reset, update, raw = (joined @ w["gru"] + w["gru_bias"][0]).chunk(3)
            update = torch.sigmoid(update - 1)
            path.append(update * torch.tanh(torch.sigmoid(reset) * raw) + (1 - update) * path[-1])
            posteriors.append(posterior)
            latents.append(latent)
        whole = torch.stack(path)
        prior = self.mixed(silu(whole @ w["prior_in"]) @ w["prior_out"])
        seen = self.context(whole[:-1], torch.cat(latents))
        imagined = self.context(whole[1:], self.latent(prior[1:], uniform[count:]))
        total = functional.smooth_l1_loss(seen @ w["decoder"] + w["decoder_bias"], states)
        posterior = torch.cat(posteriors)
        divergence = 0.8 * kl(posterior.detach(), prior[:-1]) + 0.2 * kl(posterior, prior[:-1].detach())
        total = total + 0.1 * divergence.clamp_min(1.0)
        return total if target is None else total + self.forecast(imagined[target.places], target)

    def context(self, path: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        w = self.weights
        return functional.silu(path @ w["context"] + w["context_bias"] + latent @ w["latent"])

    def forecast(self, context: torch.Tensor, target: Target) -> torch.Tensor:
        w = self.weights
        horizons = torch.from_numpy(HORIZON_FEATURES[target.indices])
        common = context @ w["head_context"] + w["head_context_bias"] + horizons @ w["head_horizon"]
        groups, gram, dots, surprises = map(
            torch.from_numpy, (target.groups, target.gram, target.dots, target.surprises)
        )
        correction = functional.silu(groups @ w["head_group"] + common[:, None]) @ w["head_last"]
        bent = (gram @ correction[..., None])[..., 0]
        error = ((bent - 2 * dots) * correction).sum() / correction[..., 0].numel()
        losses = (context @ w["loss_last"]).view(len(context), 2, -1)[range(len(context)), :, target.indices]
        width = losses[:, 1].clamp(-1, 1)
        return error + 0.1 * (0.5 * ((surprises - losses[:, 0]) * torch.exp(-width)) ** 2 + width).mean()


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first * (first / second).log()).sum() / len(first)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("spread", [0.1, 2.0])  # within the free nats, and beyond
def test_gradients_are_those_of_autograd(count: int, with_target: bool, spread: float) -> None:
    shape = Shape(7, 3, 4)
    generator = torch.Generator().manual_seed(count)
    weights = Weights(shape.matrices(), 2, generator)
    weights.values.copy_(weights.values + 0.2 * torch.randn(weights.values.shape, generator=generator))
    for name in ("posterior_out", "prior_out"):
        weights.all[name] *= np.float32(spread)
    random = np.random.default_rng(0)
    states, start = random.normal(size=(count, 64)).astype(np.float32), random.normal(size=7).astype(np.float32)
    uniform = random.random((2 * count, 3)).astype(np.float32)
    target = None
    if with_target:
        half = random.normal(size=(3, 5, 4, 4))
        target = Target(
            [0, count - 1, count - 1],
            [0, 3, 1],
            random.normal(size=(3, 5, 14)).astype(np.float32),
            (half @ half.transpose(0, 1, 3, 2)).astype(np.float32),
            random.normal(size=(3, 5, 4)).astype(np.float32),
            random.normal(size=3).astype(np.float32),
        )
    weights.gradient.fill_(float("nan"))  # every one must be written
    result = Segment(shape, weights.single[1], states, start, uniform).backward(target, weights.gradients)
    reference = Reference(shape, weights.single[1])
    loss = reference.loss(torch.from_numpy(states), torch.from_numpy(start), uniform, target)
    assert result.total == pytest.approx(loss.item(), rel=1e-4)
    assert (result.nats > 1) == (spread > 1)
    loss.backward()
    for name, leaf in reference.weights.items():
        expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(torch.from_numpy(weights.gradients[name]), expected, rtol=2e-3, atol=2e-5, msg=name)


def test_one_step_of_all_members_is_the_first_step_of_a_segment() -> None:
    predictor = small()
    watch(predictor, 8)
    random = np.random.default_rng(0)
    state = random.normal(size=64).astype(np.float32)
    uniform = random.random((2, 3, 8)).astype(np.float32)
    step = advance(predictor.shape, predictor.weights.all, state, predictor._recurrent, uniform)
    for member in range(3):
        start = predictor._recurrent[member]
        segment = Segment(predictor.shape, predictor.weights.single[member], state[None], start, uniform[:, member])
        np.testing.assert_allclose(segment.path[1], step.recurrent[member], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(segment.context[1], step.context[member, 0], rtol=1e-4, atol=1e-5)


def test_the_forecast_comes_from_the_prior() -> None:
    """Other weights of the prior alone change the imagined next window, not where the model is."""
    first, second = small(), small()
    watch(first, 6)
    watch(second, 6)
    second.weights.all["prior_out"] *= -5.0
    situation, _, _ = next(iter(Run(noisy([50], 0.3), 1)))
    first._advance(situation)
    second._advance(situation)
    assert first._now is not None
    assert second._now is not None
    assert np.array_equal(first._now.recurrent, second._now.recurrent)
    assert not np.array_equal(first._now.context, second._now.context)


def test_it_learns_what_a_constant_fit_cannot() -> None:
    linear = out_of_sample(LinearPredictor(), Switching(switching, 500, exact=False), after=400)
    rssm = out_of_sample(small(learning_rate=3e-3), Switching(switching, 500, exact=False), after=400)
    assert rssm[1]["r2"] > linear[1]["r2"] + 0.02


def test_members_differ_and_take_turns() -> None:
    predictor = small(ensemble_size=3)
    watch(predictor, 40)
    steps = predictor.weights.steps.tolist()
    assert max(steps) - min(steps) <= 1
    assert min(steps) > 0
    assert not np.array_equal(predictor._recurrent[0], predictor._recurrent[1])


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    predictor = small()
    watch(predictor, 8)
    before = predictor.weights.values.clone()
    predictor.weights.gradients["decoder"][3, 3] = np.nan
    predictor.weights.step(0, 1e-3)
    assert torch.equal(predictor.weights.values, before)
