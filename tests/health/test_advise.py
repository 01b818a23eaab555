"""Every ailment has a run that has it, a finding that names it, and advice that helps; healthy runs have none."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ailing import PATIENTS, distrustful, hasty
from tests.conftest import TINY, words
from tests.worlds import Bowl, Net, Regression, still, world

from foretrain import HybridTrainer
from foretrain.config import from_mapping, settings
from foretrain.config.schema import GuardConfig, HybridConfig
from foretrain.data.loader import Loader, TokenWindows
from foretrain.errors import DivergenceError
from foretrain.events import Event, HealthFound, HealthMeasured, Phase, Tuned
from foretrain.health.advise import Health, RunStatus
from foretrain.health.detect import Detector
from foretrain.health.findings import Ailment, Effective, HealthFinding
from foretrain.health.signs import Signal, StepReading
from foretrain.persist.codec import put_together, take_apart
from foretrain.persist.stateful import from_plain, plain
from foretrain.recipes import train as run


def the(findings: list[HealthFinding], name: str) -> HealthFinding:
    found = [finding for finding in findings if name.startswith(finding.ailment)]
    assert len(found) == 1, [finding.ailment for finding in findings]
    return found[0]


@pytest.mark.parametrize("name", PATIENTS)
def test_an_ailing_run_is_found_out_and_ends_better_with_the_advice(name: str) -> None:
    patient = PATIENTS[name]
    before, findings = patient.run()
    finding = the(findings, name)
    assert finding.level in ("warning", "critical")
    assert finding.change
    assert finding.change.keys() <= {setting.name for setting in settings()}
    told = [event for event in patient.events if isinstance(event, HealthFound)]
    assert [event.ailment for event in told] == [found.ailment for found in findings]
    after, _ = patient.run(**finding.change)
    assert after < before


def test_overfitting_is_three_evaluations_without_a_new_best_while_the_training_loss_falls() -> None:
    health = Health(from_mapping({}), ["layer"])
    health.note([(5.0, 1.0, False)])
    found = []
    for number, (held_out, training) in enumerate([(2.0, 2.0), (2.2, 1.8), (2.3, 1.6), (2.4, 1.4)]):
        found.append(health.evaluated(RunStatus(100 * number, Effective(1e-3, 1.0, 20)), held_out, training))
    assert [[finding.ailment for finding in some] for some in found] == [[], [], [], [Ailment.OVERFITTING]]


def test_low_confidence_is_found_and_a_longer_warm_up_helps() -> None:
    before = distrustful()
    finding = the(before.trainer.checkup.health.findings, "low confidence")
    assert finding.change == {"hybrid.warmup_steps": 120}
    assert finding.value < 0.8
    after = distrustful(**finding.change)
    assert not after.trainer.checkup.health.findings
    assert after.trainer.evaluate([still(0)]) < 0.2 * before.trainer.evaluate([still(0)])


def test_frequent_divergence_is_found_and_more_full_steps_help() -> None:
    before = hasty()
    finding = the(before.trainer.checkup.health.findings, "frequent divergence")
    assert finding.change == {"hybrid.full_steps": 20}
    after = hasty(**finding.change)
    undone = [run.trainer.summary()["moves"]["rolled_back"] for run in (before, after)]
    assert undone[1] < undone[0]
    assert after.trainer.backward_passes < before.trainer.backward_passes - 50  # for the same number of steps


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_healthy_runs_of_ten_seeds_raise_nothing(optimizer: str) -> None:
    """As the demo, but smaller; several of the looks at full rate, and ten evaluations."""
    characters = np.frombuffer(words(20_000).encode(), dtype=np.uint8)
    for seed in range(1, 11):
        changes = {"max_steps": 80, "batch_size": 8, "health.interval": 20, "optimizer.type": optimizer, "seed": seed}
        config = from_mapping({**TINY, **changes, "model.vocab_size": 128})
        model = run.build_model(config)
        windows = TokenWindows(characters[:60_000].astype(np.uint16), model.shape.context, seed)
        others = TokenWindows(characters[60_000:].astype(np.uint16), model.shape.context, seed)
        held_out = list(itertools.islice(Loader(others, 32, seed), 1))
        summary = HybridTrainer(model, config=config).fit(Loader(windows, 8, seed), held_out, progress=False)
        assert summary["health"]["findings"] == []
        assert summary["health"]["looks"] == 4


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_small_healthy_problems_raise_nothing(kind: str) -> None:
    """Also where the loss falls to nothing, or to the noise, long before the end."""
    changes = {"max_steps": 600, "optimizer.type": kind, "optimizer.learning_rate": 0.01, "hybrid.mode": "off"}
    exact = world(Bowl(), still, {"max_steps": 300})
    for problem in (exact, *(world(Net(seed=seed), Regression(seed=seed), changes) for seed in range(3))):
        problem.run()
        problem.trainer.checkup.finish()
        assert problem.trainer.checkup.health.findings == []


# --- once each, and by itself only if wanted -------------------------------------------------------------------------


def test_looking_changes_nothing() -> None:
    weights = []
    for interval in (0, 7):
        trainer = world(Net(), Regression(), {"health.interval": interval, "max_steps": 60}).run().trainer
        weights.append(torch.nn.utils.parameters_to_vector(trainer.model.parameters()))
        assert bool(trainer.summary().get("health")) == bool(interval)
    assert torch.equal(*weights)


def test_a_finding_is_said_once() -> None:
    patient = PATIENTS["explosion"]
    patient.run()
    told = [event.ailment for event in patient.events if isinstance(event, HealthFound)]
    assert len(told) == len(set(told))
    assert sum(isinstance(event, HealthMeasured) for event in patient.events) == 4
    assert not [event for event in patient.events if isinstance(event, Tuned)]


@pytest.mark.parametrize("name", ["explosion", "oscillation", "divergence", "plateau", "plateau of long steps"])
def test_auto_tune_makes_safe_changes_by_itself(name: str) -> None:
    patient = PATIENTS[name]
    before, _ = patient.run(max_steps=1000)
    after, findings = patient.run(**{"max_steps": 1000, "guard.auto_tune": True})
    assert after < before
    tuned = [event for event in patient.events if isinstance(event, Tuned)]
    assert tuned
    assert {event.ailment for event in tuned} <= {finding.ailment.value for finding in findings}
    for event in tuned:
        assert event.change.keys() <= {"optimizer.learning_rate", "optimizer.gradient_clip_norm"}


def test_auto_tune_lengthens_full_phases_for_good() -> None:
    tuned = hasty(**{"guard.auto_tune": True})
    assert next(event.change for event in tuned.events if isinstance(event, Tuned)) == {"hybrid.full_steps": 20}
    assert tuned.trainer.policy is not None
    assert tuned.trainer.policy.cycle.full_steps >= 20


def test_what_is_not_safe_is_never_done() -> None:
    for name in ("overfitting", "underfitting", "vanishing layer", "dead layer"):
        patient = PATIENTS[name]
        _, findings = patient.run(**{"guard.auto_tune": True, "max_steps": 400})
        assert not the(findings, name).safe
        assert name not in [event.ailment for event in patient.events if isinstance(event, Tuned)]


def noted(health: Health, losses: list[float], step: int) -> list[Ailment]:
    """What a look after these losses finds."""
    health.note([(loss, 1.0, 0.0) for loss in losses])
    health.monitor.close()
    situation = RunStatus(step, health.effective(5.0, 1.0, 10))
    return [finding.ailment for finding in health.examine(situation)[1]]


def test_a_run_that_is_ruined_before_its_first_look_is_no_measure_of_itself() -> None:
    """It began at 5.5, was at 130 by the first look, and comes back no farther than 90."""
    health = Health(from_mapping({}), [])
    random = np.random.default_rng(0)
    first = [5.5, 5.4, 5.6, *(130 + 20 * random.normal(size=97))]
    assert noted(health, first, 100) == [Ailment.DIVERGENCE]
    finding = health.findings[0]
    assert (finding.level, finding.safe, dict(finding.change)) == ("critical", True, {"optimizer.learning_rate": 0.5})
    assert "where the run began" in finding.meaning
    assert noted(health, list(90 + 20 * random.normal(size=100)), 200) == []
    assert health.monitor.best == math.inf
    assert noted(health, list(5 + 0.1 * random.normal(size=100)), 300) == []
    assert health.monitor.best == pytest.approx(5, abs=0.1)


@pytest.mark.parametrize(("level", "ruined"), [(9.5, False), (10.6, True)])
def test_who_acts_and_who_advises_agree_on_what_ruin_is(level: float, ruined: bool) -> None:
    """Twice the first loss is the limit of both, and of what is worth going back to."""
    losses = [5.0, 5.1, 4.9, *(level + 0.05 * np.random.default_rng(0).normal(size=97))]
    detector = Detector(HybridConfig(), GuardConfig())
    seen = [detector.check(StepReading(step, Phase.FULL, loss, 1.0)) for step, loss in enumerate(losses)]
    assert (Signal.RUIN in seen[-1].signals) is ruined
    assert detector.losses.sound is not ruined
    health = Health(from_mapping({}), [])
    found = noted(health, losses, 100)
    assert (Ailment.DIVERGENCE in found) is ruined


def test_who_acts_and_who_advises_agree_on_what_a_runaway_is() -> None:
    """Half of what was gained, beyond noise, is lost again, by the averages of both."""
    random = np.random.default_rng(0)
    learned = [*(2 + 4 * 0.95 ** np.arange(300) + 0.02 * random.normal(size=300))]
    for level, lost in ((3.4, False), (4.6, True)):
        after = [*(level + 0.02 * random.normal(size=300))]
        detector, health = Detector(HybridConfig(), GuardConfig()), Health(from_mapping({}), [])
        seen = [detector.check(StepReading(0, Phase.FULL, loss, 1.0)).signals for loss in (*learned, *after)]
        assert any(Signal.RUNAWAY in signals for signals in seen) is lost
        assert noted(health, learned[:100], 100) == noted(health, learned[100:], 300) == []
        assert (Ailment.DIVERGENCE in noted(health, after, 600)) is lost


def gone_back(health: Health, losses: list[float], at: int) -> list[HealthFinding]:
    """What is said of the losses that a rollback undid, with a tenth of the rate from now on."""
    health.note([(loss, 1.0, 0.0) for loss in losses])
    found = health.rolled_back(RunStatus(at, health.effective(5.0, 1.0, 10)))
    health.keep(0.1, 5.0, 1.0)
    return found


def test_what_a_rollback_undid_counts_for_no_look_and_what_ails_the_run_after_it_is_tuned_again() -> None:
    random = np.random.default_rng(0)
    health = Health(from_mapping({"guard.auto_tune": True}), [])
    (finding,) = gone_back(health, [5.5, 5.4, 5.6, *(500 + 50 * random.normal(size=47))], at=50)
    assert (finding.step, dict(finding.change)) == (50, {"optimizer.learning_rate": 0.5})
    assert health.rate_factor == pytest.approx(0.1)
    assert noted(health, [9.0] * 5, 60) == []  # too few to say anything
    assert noted(health, list(12 + random.normal(size=40)), 100) == [Ailment.DIVERGENCE]
    again = health.findings[-1]
    assert 11 < (again.value or 0) < 13
    assert "optimizer.learning_rate" in health.tune(again, 5.0)
    assert noted(health, list(12 + random.normal(size=100)), 200) == [], "what was tuned is given time to work"
    assert noted(health, list(12 + random.normal(size=100)), 300) == [Ailment.DIVERGENCE]


def test_a_run_that_is_well_after_a_rollback_is_left_alone() -> None:
    random = np.random.default_rng(0)
    health = Health(from_mapping({"guard.auto_tune": True}), [])
    gone_back(health, [5.5, 5.4, 5.6, *(500 + 50 * random.normal(size=47))], at=50)
    assert noted(health, list(5 - 0.01 * np.arange(100) + 0.1 * random.normal(size=100)), 100) == []


def test_few_steps_that_a_rollback_undid_are_said_if_they_were_no_number() -> None:
    health = Health(from_mapping({}), [])
    (finding,) = gone_back(health, [5.5, 5.4, math.nan, math.nan, math.nan], at=5)
    assert (finding.ailment, finding.value, finding.level) == (Ailment.NOT_FINITE, 3, "critical")
    assert noted(health, [5.4] * 30, 100) == []


def test_gradients_usual_in_ruin_are_no_advice_to_clip() -> None:
    health = Health(from_mapping({}), [])
    health.note([(5.5 if step < 3 else 1e20, 3e8 if step % 20 else 1e14, 0.0) for step in range(100)])
    health.monitor.close()
    _, found = health.examine(RunStatus(100, Effective(30.0, 0.0, 10)))
    assert [finding.ailment for finding in found] == [Ailment.DIVERGENCE]


def test_large_gradients_of_a_loss_that_falls_all_the_while_are_no_explosion() -> None:
    """Equations begin with losses of hundreds, and nothing is clipped where the optimizer is the user's own."""

    def look(losses: np.ndarray) -> list[Ailment]:
        health = Health(from_mapping({}), [])
        for step in (100, 200):
            health.note([(loss, 5e3 if place % 20 == 0 else 1e2, 0.0) for place, loss in enumerate(losses[:100])])
            losses = losses[100:]
            health.monitor.close()
            _, found = health.examine(RunStatus(step, Effective(3e-3, 0.0, 10)))
        return [finding.ailment for finding in found]

    falling = np.geomspace(400.0, 0.01, 200)
    assert look(falling) == []
    assert Ailment.EXPLOSION in look(np.concatenate([falling[:100], np.full(100, 300.0)]))


def test_where_leaps_were_kept_the_optimizers_rate_is_not_blamed() -> None:
    """Neither for a climb after them, which is taken back, nor for short steps, which it did not make."""
    falling = np.geomspace(400.0, 0.01, 100)
    for leaps in (False, True):
        health = Health(from_mapping({}), [])
        for step, losses in ((100, falling), (200, np.full(100, 300.0))):
            health.note([(loss, 5e3 if place % 20 == 0 else 1e2, 0.0) for place, loss in enumerate(losses)])
            health.monitor.close()
            _, found = health.examine(RunStatus(step, Effective(3e-3, 0.0, 10), leaps=leaps))
        assert (Ailment.EXPLOSION in {finding.ailment for finding in found}) is not leaps


def test_a_lucky_first_batch_is_no_measure_of_ruin() -> None:
    """Squared errors of single examples: the first can be next to nothing."""
    for seed in range(20):
        losses = np.random.default_rng(seed).normal(size=200) ** 2
        health = Health(from_mapping({}), [])
        assert noted(health, [1e-6, *losses[:100]], 100) == noted(health, list(losses[100:]), 200) == []


def test_a_run_that_diverged_does_not_learn_by_heart() -> None:
    def after(held_out: list[float], training: list[float]) -> list[Ailment]:
        health = Health(from_mapping({}), [])
        health.note([(5.5, 1.0, 0.0)])
        situation = RunStatus(0, Effective(5.0, 1.0, 10))
        found = [health.evaluated(situation, *pair) for pair in zip(held_out, training, strict=True)]
        return [finding.ailment for findings in found for finding in findings]

    assert after([2.0, 2.1, 2.2, 2.3], [2.0, 1.5, 1.2, 1.0]) == [Ailment.OVERFITTING]
    assert after([90.0, 92.0, 129.0, 169.0], [135.0, 130.0, 128.0, 126.0]) == []  # worse than it began
    assert after([3.56, 3.9, 3.7, 3.69], [3.9, 3.85, 3.86, 3.84]) == []  # both suffer


def test_what_is_known_of_evaluations_and_looks_does_not_grow_with_the_run() -> None:
    def look(health: Health, step: int) -> None:
        noted(health, [5.0 + 0.01 * (step % 3)] * 20, step)

    def size(evaluations: int) -> int:
        health = Health(from_mapping({}), [])
        for number in range(evaluations):
            look(health, 100 * number)
            health.evaluated(RunStatus(100 * number, Effective(5.0, 1.0, 10)), 2.0 + 0.001 * number, 1.0)
        for number in range(1200):
            look(health, 100 * (evaluations + number))
        kept = health.state_dict()
        return len(json.dumps([kept[name] for name in ("evaluations", "best_evaluation", "trained", "findings")]))

    assert size(400) < size(40) + 20


def test_evaluations_before_a_checkpoint_count_after_it() -> None:
    status = RunStatus(0, Effective(5.0, 1.0, 10))
    new, old = Health(from_mapping({}), []), Health(from_mapping({}), [])
    pairs = [(2.0, 2.0), (2.1, 1.5), (2.2, 1.2)]
    new.note([(5.5, 1.0, 0.0)])
    for pair in pairs:
        new.evaluated(status, *pair)
    old.load_state_dict(put_together(take_apart(new.state_dict())))
    for health in (new, old):
        (finding,) = health.evaluated(status, 2.3, 1.0)
        assert finding.ailment is Ailment.OVERFITTING
        assert finding.value == pytest.approx(0.3)


# --- rare cases ------------------------------------------------------------------------------------------------------


def test_a_single_bad_batch_is_a_warning_about_data() -> None:
    def data(position: int) -> Any:
        inputs, targets = Regression()(position)
        return inputs, targets * (math.nan if position == 50 else 1.0)

    trainer = world(Net(), data, {"max_steps": 150, "hybrid.mode": "off"}).run().trainer
    trainer.checkup.finish()
    finding = the(trainer.checkup.health.findings, "NaN")
    assert (finding.level, finding.value, finding.change, finding.safe) == ("warning", 1, {}, False)
    assert "look at the data" in finding.meaning


def test_numbers_that_nobody_checks_are_found_too() -> None:
    _, findings = PATIENTS["NaN"].run(**{"guard.nan_check": False})
    assert the(findings, "NaN").change["guard.nan_check"] is True


def test_a_run_that_is_given_up_says_why(tmp_path: Path) -> None:
    patient = PATIENTS["NaN"]
    trainer = patient.trainer({"log.interval": 10})
    with pytest.raises(DivergenceError):
        trainer.fit([patient.data(number) for number in range(100)], out=tmp_path / "run", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["event"] == "HealthFound"]
    assert [line["ailment"] for line in found] == ["NaN"]
    assert found[0]["change"] == {"optimizer.learning_rate": 0.03}


def test_a_finding_survives_being_written_down() -> None:
    finding = HealthFinding(Ailment.PLATEAU, 5, "measure", "run", math.nan, "range", "warning", "words", {"a": 1})
    again = from_plain(HealthFinding, put_together(take_apart(plain(finding))), "findings")
    assert again.record() == finding.record()
    assert math.isnan(again.value)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    patient = PATIENTS["explosion"]
    batches = [patient.data(number) for number in range(400)]
    ends = []
    for stop in (None, 233):
        out = tmp_path / str(stop)
        change: dict[str, Any] = {"guard.auto_tune": True, "checkpoint.interval": 233}
        if stop:
            first = patient.trainer(change)
            _stop_at(first, stop)
            with pytest.raises(SystemExit):
                first.fit(batches, out=out, progress=False)
        trainer = patient.trainer(change)
        summary = trainer.fit(batches, out=out, resume=stop is not None, progress=False)
        ends.append((summary["health"], torch.nn.utils.parameters_to_vector(trainer.model.parameters())))
    assert ends[0][0] == ends[1][0]
    assert ends[0][0]["findings"]
    assert torch.equal(ends[0][1], ends[1][1])


def _stop_at(trainer: HybridTrainer, step: int) -> None:
    import os
    import signal

    from foretrain.events import Progress

    def stop(event: Event) -> None:
        if isinstance(event, Progress) and event.step >= step - step % 10:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.bus.subscribe(stop)


@pytest.mark.parametrize(("lowest_step", "found"), [(0, True), (150, True), (650, False)])
def test_what_leaps_lowered_lately_is_no_plateau(lowest_step: int, found: bool) -> None:
    """Averages know only the optimizer's own steps in between."""
    health, told = Health(from_mapping({}), []), []
    draw = np.random.default_rng(0)
    for step in range(100, 800, 100):
        health.note([(1.0 + 0.01 * draw.normal(), 1.0, 0.0) for _ in range(100)])
        health.monitor.close()
        now = RunStatus(step, Effective(3e-3, 0.0, 10), leaps=True, lowest_step=min(lowest_step, step))
        told += [finding.ailment for finding in health.examine(now)[1]]
    assert (Ailment.PLATEAU in told) is found
