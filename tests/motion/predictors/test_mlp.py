from __future__ import annotations

import math

import numpy as np
import torch

from foretrain.motion.predictors.base import Array
from foretrain.motion.predictors.learned import MlpPredictor, Trust
from foretrain.motion.predictors.linear import LinearPredictor
from foretrain.motion.predictors.networks import Head
from foretrain.motion.records import HORIZONS_IN_WINDOWS

from .motions import WINDOW, Run, noisy, out_of_sample


def test_it_starts_as_the_linear_predictor() -> None:
    mlp, linear = MlpPredictor(), LinearPredictor()
    for number, (situation, told, _) in enumerate(Run(noisy([40, 30], 0.4), 3, exact=False)):
        mlp.observe(situation, told)
        linear.observe(situation, told)
        assert number > 2 or np.array_equal(
            mlp.forecast(situation, [WINDOW]).coefficients, linear.forecast(situation, [WINDOW]).coefficients
        )


def test_the_gate_opens_for_what_helps_and_stays_shut_for_what_does_not() -> None:
    helpful, useless, harmful = Trust(), Trust(), Trust()
    random = np.random.default_rng(0)
    for _ in range(40):
        helpful.add(0, 0.1, 0.1, 1.0)
        useless.add(0, 0.1 * float(random.normal()), 0.1, 1.0)
        harmful.add(0, -0.1, 0.1, 1.0)
    assert helpful.value()[0] > 0.5
    assert useless.value()[0] < 0.3
    assert harmful.value()[0] == 0.0
    assert Trust().value().max() == 0.0
    helpful.add(0, float("1e30"), 1e30, 1.0)
    assert (helpful.value() <= 1).all()


def test_members_are_computed_as_if_alone() -> None:
    """All members in one pass, against a slow reference of one."""
    generator = torch.Generator().manual_seed(0)
    head = Head(2, 64, (8, 6))
    for weight in head.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    context, groups = torch.randn(3, 64, generator=generator), torch.randn(3, 5, 14, generator=generator)
    places = [0, 4, 2]
    together = head(context, groups, places)
    (together**2).sum().backward()
    horizons = torch.tensor([[math.log2(h) / 3, h / 8] for h in (HORIZONS_IN_WINDOWS[place] for place in places)])
    for member in range(2):
        w = {name: weight.detach()[member].clone().requires_grad_() for name, weight in head.named_parameters()}
        common = context @ w["context.weight"] + w["context.bias"] + horizons @ w["horizons.weight"]
        rows = torch.nn.functional.silu(groups @ w["groups.weight"] + common[:, None])
        rows = torch.nn.functional.silu(rows @ w["hidden.0.weight"] + w["hidden.0.bias"])
        result = rows @ w["last.weight"]
        torch.testing.assert_close(together[member], result)
        (result**2).sum().backward()
        for name, weight in head.named_parameters():
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad[member], w[name].grad, rtol=1e-4, atol=1e-4)
    everywhere = head(context[:1], groups[:1], range(5))
    torch.testing.assert_close(everywhere[:, 0], together[:, 0])


def switching(window: int, generator: np.random.Generator) -> list[Array]:
    """Motion whose persistence follows the state: what a constant fit cannot know."""
    return [np.ones(50) * (1 if window % 6 < 3 else -1) + 0.05 * generator.normal(size=50)]


class Switching(Run):
    """The state tells in which half of the cycle the run is."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        for situation, told, ended in super().__iter__():
            phase = ((situation.step // WINDOW) - 1) % 6
            situation.state[:] = 0.0
            situation.state[phase] = 3.0
            yield situation, told, ended


def test_it_learns_what_a_constant_fit_cannot() -> None:
    linear = out_of_sample(LinearPredictor(), Switching(switching, 240, exact=False), after=160)
    mlp = out_of_sample(MlpPredictor(learning_rate=3e-3), Switching(switching, 240, exact=False), after=160)
    assert mlp[1]["r2"] > linear[1]["r2"] + 0.1


def test_members_see_different_data() -> None:
    predictor = MlpPredictor(ensemble_size=3)
    for situation, told, _ in Run(noisy([40, 30], 0.4), 30, exact=False):
        predictor.observe(situation, told)
    for weight in predictor.head.parameters():
        assert not torch.equal(weight[0], weight[1])
    seen = np.array([lesson.seen.numpy() for lesson in predictor._replay])
    assert 0.4 < seen.mean() < 0.95
    assert (seen[:, 0] != seen[:, 1]).any()
