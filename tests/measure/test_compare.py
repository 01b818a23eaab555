"""Real runs of a small task through the whole comparison."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.config import Config, changed, from_mapping
from foretrain.engine.engine import Engine
from foretrain.errors import DataError, InputError
from foretrain.measure.compare import ComparisonRunner, compare
from foretrain.measure.plan import HYBRID, PLAIN_SETTINGS, REPEAT, STILL, Arm, Options
from foretrain.measure.runs import AccountingError, Spec, _trainer, _warm_up, carry_out
from foretrain.measure.tasks import Job
from foretrain.trainer import HybridTrainer

from .toys import BASE, STEPS, Rows, Toy, WorkClock

QUICK = Options(rates=(1.0,))
TWO_SEEDS = Options(rates=(1.0,), seeds=2)


def arm(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(arm for arm in result["analysis"]["arms"] if arm["arm"] == name)


def test_a_whole_comparison_with_every_arm_and_a_page(toy: Toy, base: Config, tmp_path: Path) -> None:
    result = compare(toy, base, tmp_path, QUICK)
    assert result["complete"]
    assert {arm["n"] for arm in result["analysis"]["arms"]} == {3}
    assert len(result["analysis"]["arms"]) == 6
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result))
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    for run in result["runs"]:
        assert run["loss"] > 0
        assert run["curve"]
        assert run["account"]["drawn_tokens"] > 0
    assert result["analysis"]["verdict"] in ("gain", "no gain shown", "slower")
    hybrid, plain = arm(result, "hybrid"), arm(result, "plain")
    assert hybrid["tokens_mean"] > 1.001 * plain["tokens_mean"], "audits train on more"
    assert "more tokens than plain" in hybrid["note"]


def test_arms_of_one_seed_start_alike_and_see_the_same_data(toy: Toy, base: Config, tmp_path: Path) -> None:
    """With prediction off and nothing else changed, hybrid's first steps are plain's, bit for bit."""
    comparison = ComparisonRunner(toy, base, QUICK, tmp_path)
    plain, hybrid = (
        carry_out(toy, Spec(name, 2, 1.0, 15, settings), base, set())
        for name, settings in (("plain", {"hybrid.mode": "off"}), ("hybrid", {}))
    )
    assert plain["loss"] == hybrid["loss"]
    assert plain["account"]["batches"] == hybrid["account"]["batches"]
    assert comparison.find(Spec("plain", 2, 1.0, 15, {"hybrid.mode": "off"})) is None


# --- resuming --------------------------------------------------------------------------------------------------------


class Watcher:
    def __init__(self, stop_after: int | None = None) -> None:
        self.runs: list[Spec] = []
        self.stop_after = stop_after
        self.counted: list[tuple[int, int]] = []

    def planned(self, steps_left: int, runs: tuple[int, int]) -> None:
        assert steps_left > 0
        self.counted.append(runs)

    def begins(self, spec: Spec) -> None:
        if len(self.runs) == self.stop_after:
            raise KeyboardInterrupt
        self.runs.append(spec)

    def happens(self, event: Any) -> None: ...

    def ended(self, spec: Spec, result: dict[str, Any]) -> None:
        assert result["arm"] == spec.arm


def test_several_calls_add_up_to_one_comparison(toy: Toy, base: Config, tmp_path: Path, work_clock: WorkClock) -> None:
    whole = compare(toy, base, tmp_path / "whole", TWO_SEEDS)
    first, second, third = Watcher(stop_after=4), Watcher(), Watcher()
    with pytest.raises(KeyboardInterrupt):
        compare(toy, base, tmp_path / "parts", TWO_SEEDS, watcher=first)
    partial = json.loads((tmp_path / "parts" / "result.json").read_text())
    assert partial["analysis"]["verdict"] == "incomplete"
    assert len(partial["runs"]) == 4
    assert partial["missing"]
    finished = compare(toy, base, tmp_path / "parts", TWO_SEEDS, watcher=second)
    compare(toy, base, tmp_path / "parts", TWO_SEEDS, watcher=third)
    assert third.runs == []
    assert len(first.runs) + len(second.runs) == len(whole["runs"])
    assert [done for done, _ in first.counted] == [0, 1, 2, 3, 4]
    assert [done for done, _ in second.counted] == list(range(4, len(whole["runs"])))
    assert second.counted[-1] == (len(whole["runs"]) - 1, len(whole["runs"]))
    assert all(len(whole["runs"]) <= total <= len(whole["runs"]) + 3 for _, total in first.counted + second.counted)
    assert finished["analysis"] == whole["analysis"]


def test_when_the_time_is_up_no_further_run_starts(toy: Toy, base: Config, tmp_path: Path) -> None:
    watcher = Watcher()
    result = compare(toy, base, tmp_path, QUICK, minutes=0.0, watcher=watcher)
    assert len(watcher.runs) <= 1
    assert result["analysis"]["verdict"] == "incomplete"


def test_a_folder_belongs_to_one_configuration(toy: Toy, base: Config, tmp_path: Path) -> None:
    ComparisonRunner(toy, base, QUICK, tmp_path)
    ComparisonRunner(toy, base, Options(seeds=5), tmp_path)  # more of the same is welcome
    with pytest.raises(InputError, match="another configuration"):
        ComparisonRunner(toy, changed(base, {"max_steps": STEPS + 1}), QUICK, tmp_path)
    toy.fingerprint = "changed"
    with pytest.raises(InputError, match="other data"):
        ComparisonRunner(toy, base, QUICK, tmp_path)


def test_an_arm_that_made_no_move_says_so(toy: Toy, base: Config, tmp_path: Path) -> None:
    idle = changed(base, {"audit.time_budget": 0.0})
    result = compare(toy, idle, tmp_path, Options(rates=(1.0,), seeds=1))
    assert arm(result, "hybrid")["note"].startswith("made no move: the same run as plain's, to the bit")
    assert arm(result, "hybrid")["identical"]
    assert not arm(result, "plain")["identical"]
    assert result["analysis"]["verdict"] == "identical"
    assert result["analysis"]["sentence"].startswith(
        "Identical runs: hybrid made no move and ended at the plain loop's loss, to the bit, with 1 seed; the time "
        "differs by noise."
    )
    assert "identical" in (tmp_path / "report.html").read_text()
    assert "made no move" not in arm(result, "plain")["note"]
    same = arm(result, "plain, equal passes")
    assert same["speedup"] is None or same["speedup"]["mean"] == 1.0, "it is the same run as plain"


def test_a_damaged_file_is_named(toy: Toy, base: Config, tmp_path: Path) -> None:
    comparison = ComparisonRunner(toy, base, QUICK, tmp_path)
    spec = comparison.plan.next()[0]
    path = tmp_path / "runs" / f"{spec.key(base, 'toy')}.json"
    path.write_text("{")
    with pytest.raises(InputError, match=path.name):
        comparison.find(spec)


def test_a_learning_rate_that_diverges_is_a_result(toy: Toy, base: Config, tmp_path: Path) -> None:
    wild = changed(base, {"optimizer.type": "sgd", "optimizer.gradient_clip_norm": 0.0})
    result = compare(toy, wild, tmp_path, Options(rates=(1.0, 1e30), seeds=1))
    failed = [run for run in result["runs"] if run["loss"] is None]
    assert failed
    assert all(run["failed"] for run in failed)
    assert arm(result, "plain")["learning_rate"] == 0.01


def test_a_loss_that_is_no_number_is_a_failure_with_a_reason(base: Config) -> None:
    class Blind(Toy):
        def job(self, config: Config) -> Job:
            job = super().job(config)
            inputs, targets = job.test[0]
            return Job(job.model, job.loader, job.held_out, [(inputs, targets * torch.nan)], job.loss_fn)

    result = carry_out(Blind(), Spec("plain", 1, 1.0, 20, {"hybrid.mode": "off"}), base, set())
    assert (result["loss"], result["held_out_loss"]) == (None, None)
    assert "no number" in result["failed"]


def test_an_error_that_says_nothing_about_the_arm_is_no_result(
    toy: Toy, base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be kept as a diverged run, and never be tried again."""

    def broken(self: HybridTrainer, *_: Any, **__: Any) -> Any:
        raise DataError("the file is gone")

    monkeypatch.setattr(HybridTrainer, "fit", broken)
    with pytest.raises(DataError, match="gone"):
        carry_out(toy, Spec("plain", 1, 1.0, 20, {"hybrid.mode": "off"}), base, set())


# --- what a result says ----------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_test_part_and_the_time_that_of_the_run(
    toy: Toy, base: Config, work_clock: WorkClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[HybridTrainer] = []
    fit = HybridTrainer.fit

    def watched(self: HybridTrainer, *arguments: Any, **options: Any) -> Any:
        kept.append(self)
        return fit(self, *arguments, **options)

    monkeypatch.setattr(HybridTrainer, "fit", watched)
    result = carry_out(toy, Spec("plain", 1, 1.0, 20, {"hybrid.mode": "off"}), base, set())
    job = toy.job(base)
    assert result["loss"] == kept[0].evaluate(job.test)
    assert result["held_out_loss"] == kept[0].evaluate(job.held_out) != result["loss"]
    assert result["seconds"] == 3.0 * 20, "20 backward passes, and nothing of the warm-up or the evaluation"


def test_nothing_of_earlier_runs_is_left_when_a_run_begins(
    toy: Toy, base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU their weights, snapshots and graphs would fill the memory."""
    made: list[weakref.ref[HybridTrainer]] = []
    alive: list[int] = []
    build, fit = HybridTrainer.__init__, HybridTrainer.fit

    def built(self: HybridTrainer, *arguments: Any, **options: Any) -> None:
        made.append(weakref.ref(self))
        build(self, *arguments, **options)

    def watched(self: HybridTrainer, *arguments: Any, **options: Any) -> Any:
        alive.append(sum(reference() is not None for reference in made))
        return fit(self, *arguments, **options)

    monkeypatch.setattr(HybridTrainer, "__init__", built)
    monkeypatch.setattr(HybridTrainer, "fit", watched)
    gc.disable()
    try:
        for seed in (1, 2, 3):
            carry_out(toy, Spec("hybrid", seed, 1.0, 20), base, set())
    finally:
        gc.enable()
    assert alive == [1, 1, 1]


def test_a_run_that_serves_two_arms_stays_the_plain_loops(toy: Toy, base: Config, tmp_path: Path) -> None:
    twin = Arm("twin", "", PLAIN_SETTINGS, rates_of="plain")
    options = Options(rates=(1.0,), seeds=1, arms=(twin,), controls=False)
    result = compare(toy, base, tmp_path, options)
    assert {run["arm"] for run in result["runs"]} == {"plain", "hybrid"}
    assert arm(result, "twin")["loss_mean"] == arm(result, "plain")["loss_mean"]


def test_arms_that_are_the_same_share_one_run(toy: Toy, base: Config, tmp_path: Path) -> None:
    twins = tuple(Arm(name, "", {"hybrid.full_steps": 20}, rates_of="hybrid") for name in ("one", "other"))
    watcher = Watcher()
    compare(toy, base, tmp_path, Options(rates=(1.0,), seeds=1, arms=twins, controls=False), watcher=watcher)
    assert [spec.arm for spec in watcher.runs if spec.arm in ("one", "other")] == ["one"]


def test_warm_up_is_done_again_when_another_engine_has_run_since(toy: Toy, base: Config) -> None:
    """The task keeps one model with its compiled code; compiling anew would be charged to the next run."""
    other = changed(base, {"engine.fused_loss": False})
    sgd = changed(base, {"optimizer.type": "sgd"})
    jobs: list[Config] = []

    class Counting(Toy):
        def job(self, config: Config) -> Job:
            jobs.append(config)
            return super().job(config)

    warmed: set[str] = set()
    for config in (base, base, sgd, base, other, other, base, sgd):
        _warm_up(Counting(), config, warmed)
    assert jobs == [base, sgd, other, base, sgd]


# --- it cannot be fooled ---------------------------------------------------------------------------------------------


def test_without_displacement_it_reports_the_overhead_and_no_gain(
    toy: Toy, base: Config, tmp_path: Path, work_clock: WorkClock
) -> None:
    """Time is work here, so the true overhead is known: what the phases did beyond one backward pass per step."""
    comparison = ComparisonRunner(toy, base, QUICK, tmp_path)
    comparison.plan.claims = [Arm("hybrid", "", STILL.settings, "still")]
    comparison.plan.controls = []
    comparison.run()
    result = comparison.result()
    runs = [run for run in result["runs"] if run["arm"] == "hybrid"]
    assert sum(len(run["moves"]) for run in runs) > 0, "the phases must have run"
    truths = []
    for run in runs:
        plain = next(
            r for r in result["runs"] if r["arm"] == "plain" and r["seed"] == run["seed"] and r["max_steps"] == STEPS
        )
        assert run["loss"] == pytest.approx(plain["loss"], rel=0.01), "only the data can have shifted by a batch"
        truths.append(plain["seconds"] / run["seconds"])
    speedup = arm(result, "hybrid")["speedup"]
    assert speedup["low"] <= sum(truths) / len(truths) <= speedup["high"]
    assert speedup["mean"] < 1
    assert result["analysis"]["verdict"] in ("slower", "no gain shown")


class Generous(Toy):
    """Hybrid arms are handed batches twice as large."""

    def job(self, config: Config) -> Job:
        job = super().job(config)
        if config.hybrid.mode == "off":
            return job
        return Job(job.model, Rows(config.seed, 64, self.noise), job.held_out, job.test, job.loss_fn)


def test_an_arm_given_larger_batches_is_caught(base: Config, tmp_path: Path) -> None:
    with pytest.raises(AccountingError, match="same data"):
        compare(Generous(), base, tmp_path, QUICK)


class Reordered(Toy):
    """Hybrid arms see other data."""

    def job(self, config: Config) -> Job:
        job = super().job(config)
        seed = config.seed if config.hybrid.mode == "off" else config.seed + 50
        return Job(job.model, Rows(seed, 32, self.noise), job.held_out, job.test, job.loss_fn)


def test_an_arm_given_other_data_is_caught(base: Config, tmp_path: Path) -> None:
    with pytest.raises(AccountingError, match="same order"):
        compare(Reordered(), base, tmp_path, QUICK)


class Drifting(Toy):
    """Every job begins at other weights."""

    def job(self, config: Config) -> Job:
        job = super().job(config)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        return job


def test_first_weights_that_do_not_follow_from_the_seed_are_caught(base: Config, tmp_path: Path) -> None:
    with pytest.raises(AccountingError, match="began at other weights"):
        compare(Drifting(), base, tmp_path, QUICK)


def test_an_arm_that_secretly_trains_more_is_caught(toy: Toy, base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Engine.full

    def twice(self: Engine, batch: Any, *hooks: Any) -> Any:
        if self.config.hybrid.mode != "off":
            self.full_step(batch)
        return honest(self, batch, *hooks)

    monkeypatch.setattr(Engine, "full", twice)
    carry_out(toy, Spec("plain", 1, 1.0, 20, {"hybrid.mode": "off"}), base, set())
    with pytest.raises(AccountingError, match="backward passes"):
        carry_out(toy, Spec("hybrid", 1, 1.0, 20), base, set())


def test_tokens_taken_must_be_reported(toy: Toy, base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.engine.engine.Engine.count", lambda self, batch: 16)
    with pytest.raises(AccountingError, match="took"):
        carry_out(toy, Spec("hybrid", 1, 1.0, 20), base, set())


# --- controls --------------------------------------------------------------------------------------------------------


def test_the_repeating_control_repeats_the_last_window(toy: Toy, base: Config) -> None:
    from foretrain.measure.controls import RepeatLast

    job = toy.job(base)
    trainer = HybridTrainer(job.model, None, job.loss_fn, base, predictor=RepeatLast())
    windows = 3 * base.hybrid.window_steps
    batches = iter(job.loader)
    marks = []
    for step in range(windows):
        if step % base.hybrid.window_steps == 0:
            marks.append([p.detach().clone() for p in trainer.model.parameters()])
        trainer.step(next(batches))
    now = [p.detach().clone() for p in trainer.model.parameters()]
    situation = trainer.observer.situation
    assert situation is not None
    forecast = trainer.observer.predictor.forecast(situation, [10, 20])
    moves = trainer.observer.trajectory.displacement(forecast.at(20))
    for move, before, after in zip(moves, marks[-1], now, strict=True):
        assert torch.allclose(move, 2 * (after - before), atol=1e-6)


@pytest.mark.parametrize(("arm", "name"), [(HYBRID, "linear"), (STILL, "linear"), (REPEAT, "repeat")])
def test_only_the_repeating_arm_has_the_naive_predictor(toy: Toy, base: Config, arm: Arm, name: str) -> None:
    spec = Spec(arm.name, 1, 1.0, 20, arm.settings, arm.control)
    trainer, _ = _trainer(toy.job(base), spec, spec.config(base))
    assert trainer.observer.predictor.name == name


def test_arms_are_what_they_say() -> None:
    config = from_mapping(BASE)
    assert Spec(HYBRID.name, 1, 1.0, 10, HYBRID.settings).config(config).hybrid.mode == "leap"
    assert Spec(STILL.name, 1, 1.0, 10, STILL.settings).config(config).hybrid.secant_pairs == 0
