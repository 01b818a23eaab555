from __future__ import annotations

import numpy as np
import torch

from foretrain.motion.predictors.base import Array
from foretrain.motion.predictors.corrected import Gate
from foretrain.motion.predictors.linear import LinearPredictor
from foretrain.motion.predictors.mlp import MlpPredictor
from foretrain.motion.predictors.networks import HORIZON_FEATURES, HeadPass, Weights, head, head_shapes

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
    helpful, useless, harmful = Gate(), Gate(), Gate()
    random = np.random.default_rng(0)
    for _ in range(40):
        helpful.add(0, 0.1, 0.1, 1.0)
        useless.add(0, 0.1 * float(random.normal()), 0.1, 1.0)
        harmful.add(0, -0.1, 0.1, 1.0)
    assert helpful.value()[0] > 0.5
    assert useless.value()[0] < 0.3
    assert harmful.value()[0] == 0.0
    assert Gate().value().max() == 0.0
    helpful.add(0, float("1e30"), 1e30, 1.0)
    assert (helpful.value() <= 1).all()


def test_gradients_are_those_of_autograd() -> None:
    """The passes written out by hand against a slow reference."""
    generator = torch.Generator().manual_seed(0)
    weights = Weights(head_shapes(64, (8, 6)), 2, generator)
    weights.values.copy_(torch.randn(weights.values.shape, generator=generator) * 0.3)
    context, groups = torch.randn(3, 64, generator=generator), torch.randn(3, 5, 14, generator=generator)
    run = HeadPass(weights.single[1], context.numpy(), groups.numpy(), [0, 4, 2])
    leaves = {name: torch.tensor(array).requires_grad_() for name, array in weights.single[1].items()}
    given = context.clone().requires_grad_()
    horizons = torch.from_numpy(HORIZON_FEATURES[[0, 4, 2]])
    common = given @ leaves["head_context"] + leaves["head_context_bias"] + horizons @ leaves["head_horizon"]
    rows = torch.nn.functional.silu(groups @ leaves["head_group"] + common[:, None])
    rows = torch.nn.functional.silu(rows @ leaves["head_hidden1"] + leaves["head_hidden1_bias"])
    result = rows @ leaves["head_last"]
    torch.testing.assert_close(torch.from_numpy(run.result), result.detach())
    (result**2).sum().backward()
    context_error = run.backward(2 * run.result, weights.gradients)
    torch.testing.assert_close(torch.from_numpy(context_error), given.grad, rtol=1e-4, atol=1e-4)
    for name, leaf in leaves.items():
        torch.testing.assert_close(torch.from_numpy(weights.gradients[name]), leaf.grad, rtol=1e-4, atol=1e-4)
    everywhere = head(weights.all, context[:1, None].numpy(), groups[0].numpy())
    np.testing.assert_allclose(everywhere[1, 0], run.result[0], rtol=1e-4, atol=1e-5)


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
    values = predictor.weights.values
    assert not torch.equal(values[0], values[1])
    seen = np.array([seen for _, _, seen in predictor._replay])
    assert 0.4 < seen.mean() < 0.95
    assert (seen[:, 0] != seen[:, 1]).any()
