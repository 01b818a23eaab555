"""The pruner inside of real Optuna."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import optuna
import pytest

from foretrain.errors import InputError
from foretrain.integrations.optuna import ANNEALED, RATES, ForecastPruner

STEPS = 32


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def power_law(floor: float, step: int, exponent: float = 0.5) -> float:
    return floor + 3.0 * step**-exponent


def run(study: optuna.Study, floor: float, told: dict[str, Any] | None = None) -> int:
    """Train one trial; returns the step at which it ended."""
    trial = study.ask()
    for name, value in (told or {}).items():
        trial.set_user_attr(name, value)
    for step in range(1, STEPS + 1):
        trial.report(power_law(floor, step), step)
        if trial.should_prune():
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return step
    study.tell(trial, power_law(floor, STEPS))
    return STEPS


def study_of(**options: Any) -> optuna.Study:
    return optuna.create_study(pruner=ForecastPruner(STEPS, **options))


def test_the_worse_are_stopped_at_rungs_and_the_best_and_the_first_two_are_not() -> None:
    study = study_of()
    floors = [2.0, 1.8, 2.5, 2.6, 2.7, 1.0, 2.8, 1.5, 2.9, 3.0]
    lengths = [run(study, floor) for floor in floors]
    assert lengths[:2] == [STEPS, STEPS]
    assert lengths[5] == STEPS
    assert study.best_trial.number == 5
    assert sum(lengths) < 0.6 * STEPS * len(floors)
    stopped = {length for length in lengths if length < STEPS}
    assert stopped <= {2, 4, 8, 16}, "at rungs only"


def test_losses_that_are_no_numbers_are_pruned_at_once() -> None:
    study = study_of()
    trial = study.ask()
    trial.report(math.nan, 1)
    assert trial.should_prune()


def test_with_a_rate_that_falls_ranks_count_from_half_of_the_run_on() -> None:
    def falling(step: int) -> float:
        return 1e-3 * (1 - step / STEPS)

    study = study_of(rates=falling)
    lengths = [run(study, floor) for floor in (2.0, 2.0, 2.0, 2.01, 2.02, 2.03)]
    assert min(lengths) >= STEPS // 2
    constant = study_of(rates=[1e-3, 1e-3])
    assert min(run(constant, floor) for floor in (2.0, 2.0, 2.0, 2.01, 2.02, 2.03)) < STEPS // 2


def test_annealed_copies_count_before_half_of_the_run() -> None:
    """By losses the third is worse; by what its copy came to it is better, and it goes on."""
    study = study_of(rates=[1.0, 0.0], rungs=[0.25])
    for floor, annealed in ((2.0, 1.9), (2.0, 1.9), (2.0, 1.9)):
        run(study, floor, {ANNEALED: [[7, 1, annealed, floor]]})
    assert run(study, 2.1, {ANNEALED: [[7, 1, 1.5, 2.1]]}) == STEPS
    assert run(study, 2.1, {ANNEALED: [[7, 1, 2.4, 2.1]]}) == 8


def test_a_trial_tells_its_own_rates() -> None:
    pruner = ForecastPruner(STEPS)
    study = optuna.create_study(pruner=pruner)
    trial = study.ask()
    trial.set_user_attr(RATES, [1.0, 1.0, 0.0])
    plan = pruner._plan(study.trials[0])
    assert list(plan.multipliers) == [1.0, 1.0, 0.0]
    assert list(plan.steps) == [0, 16, 32]
    trial.set_user_attr(RATES, [0.0, 0.0])
    with pytest.raises(InputError, match="trial 0: foretrain:rates: all are 0"):
        pruner._plan(study.trials[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total_steps": 0}, "total_steps = 0"),
        ({"total_steps": 9, "rungs": [0.5, 0.2]}, "rungs"),
        ({"total_steps": 9, "rungs": []}, "rungs"),
        ({"total_steps": 9, "reduction": 1}, "reduction"),
        ({"total_steps": 9, "rates": "cosine"}, "rates = 'cosine': must be learning rates spread evenly"),
        ({"total_steps": 9, "rates": 0.1}, "rates = 0.1: must be learning rates"),
        ({"total_steps": 9, "rates": []}, "rates: 0 numbers for 9 steps: give from 2 to 10"),
        ({"total_steps": 9, "rates": [1e-3] * 11}, "rates: 11 numbers for 9 steps"),
        ({"total_steps": 9, "rates": lambda step: None}, "rates: None at step 0 is no learning rate"),
        ({"total_steps": 9, "rates": [1e-3, math.nan]}, "rates: nan at step 9 is no learning rate"),
        ({"total_steps": 9, "rates": [1e-3, -1e-3]}, "rates: -0.001 at step 9 is no learning rate"),
        ({"total_steps": 9, "rates": [0, 0]}, "rates: all are 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ForecastPruner(**options)


def test_a_study_that_maximizes_is_refused_in_words() -> None:
    study = optuna.create_study(direction="maximize", pruner=ForecastPruner(STEPS))
    trial = study.ask()
    with pytest.raises(InputError, match="losses, which are minimized"):
        trial.should_prune()  # before anything is reported


def test_the_example_is_short_and_stops_most_of_its_trials(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "optuna_pruner.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 30
    study = runpy.run_path(str(path))["study"]
    states = [trial.state for trial in study.trials]
    assert states.count(optuna.trial.TrialState.PRUNED) >= 5
    assert study.best_value < 0.5
    assert capsys.readouterr().out.startswith("best rate ")
