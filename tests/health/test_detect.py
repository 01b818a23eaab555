"""The detector: every signal fires where it should, and ordinary noise does not set it off."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from foretrain.config.schema import GuardConfig, HybridConfig
from foretrain.events import Phase
from foretrain.health.detect import Detector
from foretrain.health.signs import Severity, Signal, StepDiagnosis, StepReading

NOISE = ("gaussian", "multiplicative", "heavy-tailed", "skewed", "correlated", "none")


def make(**changes: float) -> Detector:
    return Detector(HybridConfig(), GuardConfig.model_validate(changes))


def losses_of_a_run(noise: str, seed: int, steps: int = 2000) -> np.ndarray:
    """As of a language model: a steep fall, then a power law."""
    random = np.random.default_rng(seed)
    time = np.arange(steps)
    curve = 2 + 8.8 * np.exp(-time / 60) + 1.5 * (1 + time / 100) ** -0.5
    if noise == "gaussian":
        return curve + random.normal(0, 0.08, steps)
    if noise == "multiplicative":
        return curve * np.exp(random.normal(0, 0.05, steps))
    if noise == "heavy-tailed":
        return curve + 0.06 * random.standard_t(6, steps)
    if noise == "skewed":
        return curve * random.gamma(40, 1 / 40, steps)
    if noise == "correlated":
        white = random.normal(0, 0.07, steps + 1)
        return curve + white[1:] + 0.5 * white[:-1]
    return np.exp(-time / 150.0)


def gradients_of_a_run(seed: int, steps: int = 2000) -> np.ndarray:
    random = np.random.default_rng(seed + 1000)
    return np.exp(random.normal(0, 0.3, steps)) * (0.3 + 5 * np.exp(-np.arange(steps) / 80))


def feed(guard: Detector, losses: np.ndarray, gradients: np.ndarray | None = None) -> list[StepDiagnosis]:
    norms = np.ones(len(losses)) if gradients is None else gradients
    return [
        guard.check(StepReading(step, Phase.FULL, float(loss), float(norm)))
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]


def settled(seed: int = 0, **changes: float) -> Detector:
    """A guard that has seen 200 steps of loss 2.0 +- 0.05 and gradient norm 1."""
    guard = make(**changes)
    feed(guard, 2 + np.random.default_rng(seed).normal(0, 0.05, 200))
    guard.streak = 0
    return guard


def full(loss: float, norm: float = 1.0) -> StepReading:
    return StepReading(200, Phase.FULL, loss, norm)


def predicted(loss: float, expected: float | None = None, confidence: float | None = None) -> StepReading:
    return StepReading(200, Phase.PREDICT, loss, None, expected, confidence)


@pytest.mark.parametrize("noise", NOISE)
def test_ordinary_runs_hardly_ever_warn_and_are_never_critical(noise: str) -> None:
    levels: Counter[Severity] = Counter()
    for seed in range(20):
        guard = make()
        levels.update(v.level for v in feed(guard, losses_of_a_run(noise, seed), gradients_of_a_run(seed)))
    assert levels.total() == 40_000
    assert levels[Severity.WARNING] < 0.01 * levels.total()
    assert levels[Severity.CRITICAL] == 0


def test_independent_noise_does_not_look_like_oscillation_or_drift() -> None:
    signals: Counter[Signal] = Counter()
    for seed in range(20):
        for verdict in feed(make(), 2 + np.random.default_rng(seed).normal(0, 0.1, 1000)):
            signals.update(verdict.signals)
    assert signals[Signal.OSCILLATION] < 0.002 * 20_000
    assert signals[Signal.DRIFT] == 0


def test_a_loss_above_its_average_warns_and_three_are_critical() -> None:
    guard = settled()
    assert guard.check(full(2.0)).level is Severity.NORMAL
    assert guard.check(full(guard.losses.fast + 2.5 * guard.losses.sigma)).level is Severity.CAUTION
    levels = [guard.check(full(2.5)).level for _ in range(3)]
    assert levels == [Severity.WARNING, Severity.WARNING, Severity.CRITICAL]
    assert guard.recent_divergence
    assert guard.check(full(2.0)).level is Severity.NORMAL


def test_a_warning_is_recent_for_five_steps_and_a_critical_state_for_a_phase() -> None:
    guard = settled()
    assert not guard.recent_divergence
    guard.check(full(2.5))
    after = []
    for _ in range(6):
        after.append(guard.recent_divergence)
        guard.check(full(2.0))
    assert after == [True] * 5 + [False]
    guard.check(full(math.nan))
    after = []
    for _ in range(guard.hybrid.full_steps + 1):
        after.append(guard.recent_divergence)
        guard.check(full(2.0))
    assert after == [True] * guard.hybrid.full_steps + [False]


def test_patience_decides_when_warnings_are_critical() -> None:
    guard = settled(patience=2)
    assert [guard.check(full(2.5)).level for _ in range(2)] == [Severity.WARNING, Severity.CRITICAL]


def test_divergence_threshold_decides_what_is_too_high() -> None:
    strict = Detector(HybridConfig(divergence_threshold=2.0), GuardConfig())
    feed(strict, 2 + np.random.default_rng(0).normal(0, 0.05, 200))
    loss = strict.losses.fast + 2.5 * strict.losses.sigma
    assert strict.check(full(loss)).level is Severity.WARNING
    assert settled().check(full(loss)).level is Severity.CAUTION


def test_an_early_fall_does_not_blind_the_guard() -> None:
    guard = make()
    random = np.random.default_rng(0)
    feed(guard, 2 + 9 * np.exp(-np.arange(150) / 15) + random.normal(0, 0.05, 150))
    assert guard.losses.sigma == pytest.approx(0.05, rel=0.4)
    assert guard.check(full(2.4)).level is Severity.WARNING


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    losses = scale * np.concatenate([losses_of_a_run("gaussian", 1, 500), [4.0]])
    assert feed(make(), losses)[-1].level is Severity.WARNING
    assert [v.level for v in feed(make(), losses)] == [v.level for v in feed(make(), losses / scale)]


def test_a_big_improvement_never_trips_it() -> None:
    guard = settled()
    for loss in (1.0, 0.5, 0.1, 0.1, 0.1):
        assert guard.check(full(loss)).level is Severity.NORMAL
    better = settled().check(predicted(1.0, expected=2.0))
    assert better.level is Severity.CAUTION
    assert better.exit_to is None


def test_explosion_and_vanishing() -> None:
    guard = settled()
    assert guard.check(full(2.0, 9.0)).level is Severity.NORMAL
    high = guard.check(full(2.0, 11.0))
    assert high.signals == {Signal.GRADIENT_EXPLOSION}
    assert "11 is 10." in high.text
    assert settled().check(full(2.0, 0.009)).signals == {Signal.GRADIENT_VANISHING}
    assert settled().check(full(2.0, 0.0)).signals == {Signal.GRADIENT_VANISHING}
    assert settled().check(full(2.0, 0.02)).level is Severity.NORMAL
    assert settled(explosion_factor=5).check(full(2.0, 6.0)).level is Severity.WARNING
    assert settled(vanishing_factor=0.1).check(full(2.0, 0.05)).level is Severity.WARNING


def test_a_gradient_that_fades_over_a_whole_run_is_no_vanishing() -> None:
    verdicts = feed(make(), np.full(2000, 2.0), np.exp(-np.arange(2000) / 150.0))
    assert all(verdict.level is Severity.NORMAL for verdict in verdicts)


@pytest.mark.parametrize(
    "reading",
    [full(math.nan), full(math.inf), full(2.0, math.nan), StepReading(1, Phase.CORRECT, 2.0, 1.0, finite=False)],
)
def test_what_is_not_finite_is_critical_at_once_and_is_not_learned(reading: StepReading) -> None:
    guard = settled()
    before = json.dumps(guard.losses.state_dict())
    verdict = guard.check(reading)
    assert verdict.level is Severity.CRITICAL
    assert verdict.signals == {Signal.NOT_FINITE}
    assert verdict.exit_to is (Phase.FULL if reading.phase is Phase.CORRECT else None)
    assert json.dumps(guard.losses.state_dict()) == before


def test_prediction_error_takes_the_predicted_loss() -> None:
    exact = settled().check(predicted(2.0, expected=2.0))
    assert exact.level is Severity.NORMAL
    guard = settled()
    verdicts = [guard.check(predicted(2.05, expected=1.75)) for _ in range(9)]  # 15 % too optimistic
    assert verdicts[-1].level is Severity.CAUTION
    assert verdicts[-1].exit_to is None
    guard = settled()
    verdicts = [guard.check(predicted(2.05, expected=1.5)) for _ in range(9)]  # 27 %
    assert verdicts[-1].exit_to is Phase.CORRECT
    assert guard.prediction_error > 0.2
    assert "above its prediction" in verdicts[-1].text
    guard.check(full(2.0))
    assert guard.prediction_error == 0.0
    assert settled(prediction_error=0.5).check(predicted(2.05, expected=1.5)).exit_to is None
    assert settled().check(predicted(2.0, expected=math.nan)).exit_to is Phase.CORRECT


def test_a_perfect_predictor_is_not_thrown_out_by_noise() -> None:
    exits = 0
    for seed in range(50):
        guard = settled(seed)
        losses = 2 + np.random.default_rng(seed + 100).normal(0, 0.05, 40)
        exits += any(guard.check(predicted(float(loss), 2.0, 0.9)).exit_to is not None for loss in losses)
    assert exits <= 2


def test_a_rollout_that_goes_wrong_is_left_for_full_steps() -> None:
    guard = settled()
    assert guard.check(predicted(2.21)).exit_to is None  # one hard batch
    assert guard.check(predicted(2.21)).exit_to is Phase.FULL
    assert settled().check(predicted(2.6)).exit_to is Phase.FULL


def test_predicted_losses_do_not_move_what_they_are_judged_by() -> None:
    guard = settled()
    average = guard.losses.fast
    for _ in range(100):
        guard.check(predicted(2.1))
    assert guard.losses.fast == average


def test_confidence_counts_only_while_predicting() -> None:
    assert settled().check(predicted(2.0, confidence=0.4)).exit_to is Phase.FULL
    assert settled().check(predicted(2.0, confidence=math.nan)).exit_to is Phase.FULL
    assert settled().check(predicted(2.0, confidence=0.6)).level is Severity.NORMAL
    raised = StepReading(200, Phase.PREDICT, 2.0, confidence=0.6, confidence_threshold=0.7)
    assert settled().check(raised).signals == {Signal.CONFIDENCE}
    assert settled().check(StepReading(200, Phase.FULL, 2.0, 1.0, confidence=0.1)).level is Severity.NORMAL


@pytest.mark.parametrize(("height", "within"), [(5.0, 20), (2.0, 80)])
def test_a_loss_that_alternates_is_an_oscillation(height: float, within: int) -> None:
    for seed in range(10):
        guard = settled(seed)
        noise = np.random.default_rng(seed + 50).normal(0, 0.05, within)
        verdicts = feed(guard, 2 + noise + 0.05 * height * (-1) ** np.arange(within))
        assert any(Signal.OSCILLATION in verdict.signals for verdict in verdicts), seed


def test_oscillation_changes_decides_how_much_is_borne() -> None:
    losses = np.tile([2.3, 1.7, 2.3, 1.7, 1.7], 30)
    for changes, seen in ((2.5, True), (4.0, False)):
        verdicts = feed(settled(oscillation_changes=changes), losses)[80:]
        assert any(Signal.OSCILLATION in verdict.signals for verdict in verdicts) is seen


def test_a_run_that_loses_what_it_had_gained_is_running_away() -> None:
    guard = make()
    feed(guard, losses_of_a_run("gaussian", 3, 600))
    verdicts = feed(guard, 8 + np.random.default_rng(0).normal(0, 0.1, 200))
    assert any(Signal.RUNAWAY in verdict.signals for verdict in verdicts)
    assert verdicts[-1].level is Severity.CRITICAL


def test_a_setback_is_measured_by_what_was_gained() -> None:
    guard = make()
    feed(guard, 1.0 * np.exp(-np.arange(400) / 40))
    spike = feed(guard, np.full(4, 0.01))[-1]  # many times the loss before, and still next to nothing
    assert spike.level is Severity.CRITICAL
    assert spike.setback < 0.02
    assert feed(guard, np.full(4, 0.8))[-1].setback > 0.7
    young = make()
    assert feed(young, np.concatenate([np.full(40, 2.0), np.full(5, 9.0)]))[-1].setback == 1.0


def test_anchors_that_rise_across_cycles_are_drift() -> None:
    random = np.random.default_rng(0)
    guard = settled()
    levels = [guard.anchor(cycle, 2 + 0.02 * cycle + random.normal(0, 0.004)) for cycle in range(10)]
    found = [verdict for verdict in levels if Signal.DRIFT in verdict.signals]
    assert 1 <= len(found) <= 2
    assert found[0].exit_to is Phase.FULL
    false = 0
    for seed in range(100):
        guard = settled(seed)
        noise = np.random.default_rng(seed).normal(0, 0.02, 20)
        false += sum(guard.anchor(cycle, 2.0 + float(noise[cycle])).level > Severity.NORMAL for cycle in range(20))
    assert false < 0.01 * 2000
    falling = settled()
    assert all(falling.anchor(cycle, 3 - 0.05 * cycle).level is Severity.NORMAL for cycle in range(20))


def test_a_slow_rise_over_the_run_is_drift_and_said_once_in_a_while() -> None:
    random = np.random.default_rng(0)
    rising = 2 + np.maximum(0, np.arange(2500) - 800) * 1e-4 + random.normal(0, 0.05, 2500)
    verdicts = feed(make(), rising)
    times = [verdict.step for verdict in verdicts if Signal.DRIFT in verdict.signals]
    assert times
    assert 800 < times[0] < 2000
    assert len(times) < 10
    assert all(verdict.level < Severity.CRITICAL for verdict in verdicts)


def test_the_run_is_ready_for_full_steps_when_it_does_not_rise() -> None:
    guard = make()
    assert not guard.loss_stable
    assert not guard.baseline_recorded
    feed(guard, losses_of_a_run("gaussian", 0, 100))
    assert guard.loss_stable
    assert guard.baseline_recorded
    rising = make()
    feed(rising, np.linspace(2, 6, 100))
    assert not rising.loss_stable


def test_many_steps_are_taken_in_at_once_only_while_nothing_is_remarkable() -> None:
    noise = np.random.default_rng(9).normal(0, 0.05, 40)
    guard = settled()
    assert guard.check_calmly([float(loss) for loss in 2 + noise[:10].clip(-0.05, 0.05)], [1.0] * 10)
    assert guard.losses.count == 210
    alternating = [float(loss) for loss in 2 + 0.06 * (-1.0) ** np.arange(64)]
    for losses, norms in (
        ([2.0, 3.0], [1.0] * 2),
        ([2.0, math.nan], [1.0] * 2),
        ([2.0], [50.0]),
        (alternating, [1.0] * 64),
    ):
        before = json.dumps(guard.state_dict())
        assert not guard.check_calmly(losses, norms)
        assert json.dumps(guard.state_dict()) == before


def test_state_survives_a_round_trip() -> None:
    losses = losses_of_a_run("heavy-tailed", 5, 400)
    whole, first, second = make(), make(), make()
    expected = feed(whole, losses)[250:]
    feed(first, losses[:250])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [second.check(StepReading(step, Phase.FULL, float(losses[step]), 1.0)) for step in range(250, 400)]
    assert rest == expected
    assert json.dumps(second.state_dict()) == json.dumps(whole.state_dict())


# --- many steps at once ----------------------------------------------------------------------------------------------


def calm(steps: int, last_norm: float = 1.0) -> tuple[list[float], list[float]]:
    losses = 2 + np.random.default_rng(1).normal(0, 0.02, steps)
    return losses.tolist(), np.geomspace(1.0, last_norm, steps).tolist()


def test_calm_steps_that_are_taken_in_at_once_change_what_is_usual() -> None:
    """As one by one, only that of many norms ten are looked at."""
    at_once, one_by_one = settled(), settled()
    losses, norms = calm(100, last_norm=3.0)
    assert at_once.check_calmly(losses, norms)
    feed(one_by_one, np.asarray(losses), np.asarray(norms))
    assert 1.05 < at_once.gradients.norm < one_by_one.gradients.norm
    assert at_once.gradients.count == settled().gradients.count + 10
    assert at_once.losses.count == one_by_one.losses.count
    assert (at_once.since_warning, at_once.since_critical) == (one_by_one.since_warning, one_by_one.since_critical)


def test_of_few_calm_steps_every_norm_counts() -> None:
    guard = settled()
    assert guard.check_calmly(*calm(5))
    assert guard.gradients.count == settled().gradients.count + 5


@pytest.mark.parametrize("norm", [0.0, 1e-9, 1e9, math.nan])
def test_remarkable_norms_are_not_taken_in_at_once(norm: float) -> None:
    guard = settled()
    before = json.dumps(guard.state_dict())
    losses, norms = calm(20)
    assert not guard.check_calmly(losses, [*norms[:-1], norm])
    assert json.dumps(guard.state_dict()) == before


@pytest.mark.parametrize("tail", [[math.nan], [9.0] * 8])
def test_remarkable_losses_are_not_taken_in_at_once(tail: list[float]) -> None:
    guard = settled()
    before = json.dumps(guard.state_dict())
    losses, norms = calm(20)
    assert not guard.check_calmly([*losses[: -len(tail)], *tail], norms)
    assert json.dumps(guard.state_dict()) == before
