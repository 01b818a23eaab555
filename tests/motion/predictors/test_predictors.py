"""One suite over all predictors, on synthetic motions made of real vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foretrain.config.schema import PredictorConfig
from foretrain.motion.predictors.base import Array, Followed, Forecast, Predictor, Situation, score
from foretrain.motion.predictors.guarded import GuardedPredictor
from foretrain.motion.predictors.registry import NAMES, build
from foretrain.motion.records import HORIZONS_IN_WINDOWS, LAST_WINDOW

from .motions import WINDOW, Run, geometric, modes, noisy, out_of_sample

SIZES = [200, 100, 50, 7, 1]
HORIZONS = [h * WINDOW for h in HORIZONS_IN_WINDOWS]
# Small networks: the same code, and the suite stays fast.
SMALL = {"hidden_dims": [16], "deterministic_dim": 16, "stochastic_dim": 4, "num_categoricals": 4}


def make(name: str, seed: int = 0, **settings: Any) -> Predictor:
    return build(PredictorConfig.model_validate({"type": name, **SMALL, **settings}), seed)


def watch(predictor: Predictor, run: Run) -> Situation:
    situation = None
    for situation, told, _ in run:
        predictor.observe(situation, told)
    assert situation is not None
    return situation


def same(first: Forecast, second: Forecast) -> bool:
    return (
        np.array_equal(first.coefficients, second.coefficients)
        and np.array_equal(first.loss, second.loss)
        and np.array_equal(first.loss_deviation, second.loss_deviation)
        and first.disagreement == second.disagreement
    )


class RepeatPredictor(Predictor):
    """What a user may write: it repeats the last displacement."""

    name = "repeat"

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        coefficients = np.zeros((len(horizons), *situation.gram.shape[:2]))
        coefficients[:, :, LAST_WINDOW] = np.asarray(horizons)[:, None] / situation.window
        flat = np.full(len(horizons), situation.loss)
        return Forecast(tuple(horizons), coefficients, flat, np.zeros(len(horizons)))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        pass

    def reset(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


every = pytest.mark.parametrize("name", NAMES)


@every
@pytest.mark.parametrize("rates", [[0.9] * 5, [1.0] * 5, [0.95, 0.8, 0.9, 0.7, 0.99]])
def test_geometric_motion_is_forecast_nearly_exactly(name: str, rates: list[float]) -> None:
    results = out_of_sample(make(name), Run(geometric(SIZES, rates), 20), after=6)
    assert sorted(results) == list(HORIZONS_IN_WINDOWS)
    for horizon, result in results.items():
        # One persistence for all groups cannot be exact where every group has its own.
        least = 0.98 if name == "momentum" and len(set(rates)) > 1 else 0.99
        assert result["r2"] > least, horizon
        assert result["r2"] >= result["repeat"] - 1e-3, horizon  # repeating is exact where nothing decays
        if min(rates) < 1:
            assert result["r2"] > result["repeat"], horizon


@every
def test_five_windows_of_evidence_are_enough_in_exact_motion(name: str) -> None:
    results = out_of_sample(make(name), Run(geometric(SIZES, [0.85] * 5), 14), after=5)
    assert all(result["r2"] > 0.99 and result["r2"] > result["repeat"] for result in results.values())


@every
def test_several_decays_at_once(name: str) -> None:
    results = out_of_sample(make(name), Run(modes(SIZES, [0.95, 0.7]), 24), after=8)
    assert all(result["r2"] > 0.9 for result in results.values())
    assert results[1]["r2"] > 0.99


@every
@pytest.mark.parametrize("signal", [0.1, 0.3, 0.6])
def test_strong_noise_is_never_worse_than_no_change(name: str, signal: float) -> None:
    results = out_of_sample(make(name), Run(noisy(SIZES, signal), 50, exact=False), after=5)
    for result in results.values():
        assert result["r2"] > -0.02
        assert result["r2"] > result["repeat"]


@pytest.mark.parametrize("name", ["linear", "mlp", "rssm"])
def test_a_genuine_signal_in_noise_is_found(name: str) -> None:
    results = out_of_sample(make(name), Run(noisy(SIZES, 0.3), 60, exact=False), after=10)
    assert results[1]["r2"] > 0.02
    assert results[8]["r2"] > 0.1  # noise averages out over longer motions, the signal does not


@every
def test_pure_noise_shrinks_the_forecast(name: str) -> None:
    results = out_of_sample(make(name), Run(noisy(SIZES, 0.0), 40, exact=False), after=8)
    assert all(result["length"] < 0.25 and result["r2"] > -0.02 for result in results.values())


@every
def test_oscillating_motion(name: str) -> None:
    results = out_of_sample(make(name), Run(geometric(SIZES, [-0.8] * 5), 20), after=8)
    assert results[1]["r2"] > 0.99
    assert all(result["r2"] > 0.9 > result["repeat"] for result in results.values())


@every
def test_nothing_known_means_no_motion(name: str) -> None:
    situation, _, _ = next(iter(Run(geometric(SIZES, [0.9] * 5), 1)))
    forecast = make(name).forecast(situation, HORIZONS)
    assert forecast.horizons == tuple(HORIZONS)
    assert forecast.coefficients.shape == (5, 5, 4)
    assert not forecast.coefficients.any()
    assert np.isfinite(forecast.loss).all()
    assert (forecast.loss_deviation > 0).all()
    assert forecast.disagreement == 0.0


@every
def test_horizons_between_and_beyond_windows(name: str) -> None:
    predictor = make(name)
    situation = watch(predictor, Run(geometric(SIZES, [0.9] * 5), 14))
    many = [1, 5, 10, 15, 20, 33, 80, 137, 400, 10_000]
    forecast = predictor.forecast(situation, many)
    assert np.isfinite(forecast.coefficients).all()
    moved = forecast.coefficients.sum(-1)[:, 0]
    assert (np.diff(moved) >= -1e-9).all()
    assert moved[0] == pytest.approx(moved[2] / 10, rel=1e-3)
    assert moved[3] == pytest.approx((moved[2] + moved[4]) / 2, rel=1e-3)
    alone = predictor.forecast(situation, [33])
    assert np.allclose(alone.coefficients[0], forecast.coefficients[5], atol=1e-12)
    assert moved[-1] < 20  # geometric: the whole future is worth about 9 windows


def broken(followed: Followed, where: str) -> Followed:
    if where == "gram":
        gram = followed.situation.gram.copy()
        gram[0, 0, 0] = np.inf
        return replace(followed, situation=replace(followed.situation, gram=gram))
    if where == "loss":
        return replace(followed, loss=float("nan"))
    values = getattr(followed, where).copy()
    values.flat[0] = np.nan
    return replace(followed, **{where: values})


@every
@pytest.mark.parametrize("where", ["dots", "square", "gram", "loss"])
def test_a_broken_observation_is_ignored(name: str, where: str) -> None:
    with_it, without = make(name), make(name)
    for number, (situation, told, _) in enumerate(Run(noisy(SIZES, 0.3), 14, exact=False)):
        with_it.observe(situation, [*told, broken(told[0], where)] if number > 3 else told)
        without.observe(situation, told)
        assert same(with_it.forecast(situation, HORIZONS), without.forecast(situation, HORIZONS))


@every
@pytest.mark.parametrize("where", ["state", "gram", "loss"])
def test_a_broken_situation_is_ignored_and_forecasts_no_motion(name: str, where: str) -> None:
    predictor = make(name)
    situation = watch(predictor, Run(geometric(SIZES, [0.9] * 5), 10))
    before = predictor.forecast(situation, HORIZONS)
    value: Any = float("nan")
    if where != "loss":
        value = getattr(situation, where).copy()
        value.flat[-1] = np.nan
    bad = replace(situation, **{where: value})
    assert not predictor.forecast(bad, HORIZONS).coefficients.any()
    predictor.observe(bad, [])
    assert same(predictor.forecast(situation, HORIZONS), before)


@every
@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e8, 1e30])
def test_the_scale_of_the_weights_does_not_matter(name: str, scale: float) -> None:
    inner = noisy(SIZES, 0.3)
    results = out_of_sample(make(name), Run(lambda w, g: [scale * d for d in inner(w, g)], 24, exact=False), after=8)
    assert all(np.isfinite(result["r2"]) and result["r2"] > -0.02 for result in results.values())


@every
def test_groups_that_do_not_move(name: str) -> None:
    inner = geometric(SIZES, [0.9] * 5)
    frozen = Run(lambda w, g: [d * (i != 1) for i, d in enumerate(inner(w, g))], 16)
    results = out_of_sample(make(name), frozen, after=6)
    assert all(result["r2"] > 0.99 for result in results.values())


@every
def test_a_single_group(name: str) -> None:
    results = out_of_sample(make(name), Run(geometric([300], [0.9]), 16), after=6)
    assert all(result["r2"] > 0.99 for result in results.values())


@every
def test_reset_forgets_everything(name: str) -> None:
    predictor, fresh = make(name), make(name)
    watch(predictor, Run(noisy(SIZES, 0.5, seed=7), 12, exact=False))
    predictor.reset()
    for situation, told, _ in Run(noisy([30, 20], 0.3), 12, exact=False):  # another number of groups, too
        predictor.observe(situation, told)
        fresh.observe(situation, told)
        assert same(predictor.forecast(situation, HORIZONS), fresh.forecast(situation, HORIZONS))


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(plain(one) for one in value)
    return value is None or type(value) in (int, float, str, bool, torch.Tensor)


def frozen_copy(value: Any) -> Any:
    """As a checkpoint would keep it: no tensor shared with the predictor."""
    if isinstance(value, dict):
        return {key: frozen_copy(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(frozen_copy(one) for one in value)
    return value.clone() if isinstance(value, torch.Tensor) else json.loads(json.dumps(value))


@every
@pytest.mark.parametrize("stop", [0, 1, 2, 9, 21])
def test_state_continues_exactly(name: str, stop: int) -> None:
    windows = list(Run(noisy(SIZES, 0.4), 34, exact=False))
    original = make(name)
    for situation, told, _ in windows[:stop]:
        original.observe(situation, told)
    state = original.state_dict()
    assert plain(state)
    state = frozen_copy(state)
    resumed = make(name, seed=5)  # everything comes from the state, not from the seed
    watch(resumed, Run(noisy(SIZES, 0.1, seed=3), 5, exact=False))
    resumed.load_state_dict(state)
    for situation, told, _ in windows[max(stop - 1, 0) :]:
        if situation.step > stop * WINDOW:
            original.observe(situation, told)
            resumed.observe(situation, told)
        assert same(original.forecast(situation, HORIZONS), resumed.forecast(situation, HORIZONS))


@every
def test_a_state_once_taken_does_not_change(name: str) -> None:
    predictor = make(name)
    run = iter(Run(noisy(SIZES, 0.4), 24, exact=False))
    for _ in range(12):
        predictor.observe(*next(run)[:2])
    state = predictor.state_dict()
    before = frozen_copy(state)
    for situation, told, _ in run:
        predictor.observe(situation, told)
    assert str(before) == str(state)


@every
def test_forecasts_change_nothing(name: str) -> None:
    asked, silent = make(name), make(name)
    for situation, told, _ in Run(noisy(SIZES, 0.4), 24, exact=False):
        asked.observe(situation, told)
        silent.observe(situation, told)
        first = asked.forecast(situation, [10, 400])
        assert same(first, asked.forecast(situation, [10, 400]))
        asked.forecast(replace(situation, step=situation.step + 3), [25])
    assert same(asked.forecast(situation, HORIZONS), silent.forecast(situation, HORIZONS))


@every
def test_deterministic_and_free_of_global_randomness(name: str) -> None:
    results = []
    for ambient in (1, 2):
        torch.manual_seed(ambient)
        np.random.seed(ambient)  # noqa: NPY002 - the global generator is what must not matter
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        predictor = make(name)
        with torch.no_grad():  # as inside a trainer's step
            situation = watch(predictor, Run(noisy(SIZES, 0.4), 24, exact=False))
        results.append(predictor.forecast(situation, HORIZONS))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert same(*results)


@every
def test_another_number_of_groups_is_an_error_that_says_so(name: str) -> None:
    predictor = make(name)
    watch(predictor, Run(geometric(SIZES, [0.9] * 5), 6))
    with pytest.raises(ValueError, match="5 groups and now saw 2"):
        watch(predictor, Run(geometric([3, 4], [0.9] * 2), 6))


@every
def test_loss_forecast(name: str) -> None:
    predictor = make(name)
    errors = []
    pending: dict[int, Forecast] = {}
    for situation, told, ended in Run(noisy(SIZES, 0.3), 40, exact=False):
        for one in ended:
            if one.situation.step >= 15 * WINDOW:
                forecast = pending[one.situation.step]
                index = HORIZONS.index(one.horizon)
                change = one.situation.loss - one.loss
                errors.append(abs(forecast.loss[index] - one.loss) / change)
        predictor.observe(situation, told)
        pending[situation.step] = predictor.forecast(situation, HORIZONS)
    assert np.mean(errors) < 0.1  # of the improvement: the loss decays smoothly here
    last = pending[max(pending)]
    assert (np.diff(last.loss) < 0).all()
    assert (last.loss_deviation > 0).all()


def test_names_and_settings() -> None:
    assert NAMES == ("momentum", "linear", "mlp", "rssm")
    for name in NAMES:
        predictor = make(name)
        assert predictor.name == name
        assert GuardedPredictor(predictor).state_dict()["name"] == name


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear", {"l2": 20.0}),
        ("linear", {"forgetting": 0.7}),
        ("mlp", {"l2": 20.0}),
        ("mlp", {"hidden_dims": [8, 8]}),
        ("mlp", {"ensemble_size": 2}),
        ("mlp", {"learning_rate": 0.01}),
        ("rssm", {"forgetting": 0.7}),
        ("rssm", {"deterministic_dim": 8}),
        ("rssm", {"stochastic_dim": 2}),
        ("rssm", {"num_categoricals": 3}),
        ("rssm", {"ensemble_size": 2}),
        ("rssm", {"bptt_steps": 2}),
        ("rssm", {"learning_rate": 0.01}),
    ],
)
def test_every_setting_changes_the_forecast(name: str, change: dict[str, Any]) -> None:
    forecasts = []
    for settings in ({}, change):
        predictor = make(name, **settings)
        open_gate(predictor)
        situation = watch(predictor, Run(noisy(SIZES, 0.4), 30, exact=False))
        open_gate(predictor)
        forecasts.append(predictor.forecast(situation, HORIZONS))
    assert not np.array_equal(forecasts[0].coefficients, forecasts[1].coefficients)


def test_the_seed_changes_the_networks() -> None:
    for name in ("mlp", "rssm"):
        forecasts = []
        for seed in (0, 1):
            predictor = make(name, seed)
            situation = watch(predictor, Run(noisy(SIZES, 0.4), 30, exact=False))
            open_gate(predictor)
            forecasts.append(predictor.forecast(situation, HORIZONS))
        assert not np.array_equal(forecasts[0].coefficients, forecasts[1].coefficients)


def open_gate(predictor: Predictor) -> None:
    """So that the corrections show, whether or not they helped."""
    if hasattr(predictor, "trust"):
        predictor._shares = np.ones(len(HORIZONS_IN_WINDOWS))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mlp", "rssm"])
def test_disagreement_is_the_spread_of_the_members(name: str) -> None:
    predictor = make(name)
    situation = watch(predictor, Run(noisy(SIZES, 0.4), 40, exact=False))
    open_gate(predictor)
    assert 0 < predictor.forecast(situation, HORIZONS).disagreement < 10
    alone = make(name, ensemble_size=1)
    situation = watch(alone, Run(noisy(SIZES, 0.4), 40, exact=False))
    open_gate(alone)
    assert alone.forecast(situation, HORIZONS).disagreement == 0.0


def test_a_users_own_predictor_fits_the_interface() -> None:
    results = out_of_sample(RepeatPredictor(), Run(geometric(SIZES, [0.9] * 5), 14), after=4)
    assert all(result["r2"] == pytest.approx(result["repeat"]) for result in results.values())


def test_score_is_what_the_vectors_say() -> None:
    """The dot products of the synthetic runs against the vectors themselves."""
    run = Run(noisy([40], 0.5), 6, exact=False)
    followed: list[Followed] = [one for _, _, ended in run for one in ended if one.horizon == WINDOW]
    coefficients: Array = np.zeros((1, 4))
    coefficients[0, LAST_WINDOW] = 1.0
    real, before = run.history[5][0], run.history[4][0]
    expected = 1 - ((real - before) ** 2).sum() / (real**2).sum()
    assert score(followed[-1], coefficients).r2 == pytest.approx(expected)


def test_a_predictor_that_does_not_exist_is_not_built() -> None:
    with pytest.raises(ValueError, match="there is no predictor 'oracle'; there are momentum, linear, mlp, rssm"):
        build(PredictorConfig.model_construct(type="oracle"), seed=0)
