"""Which runs are asked for, in which order."""

from __future__ import annotations

from typing import Any

import pytest

from foretrain.config import Config, changed
from foretrain.errors import InputError
from foretrain.measure.plan import HYBRID, PLAIN, STILL, Arm, ComparisonPlan, Options
from foretrain.measure.runs import Spec


class Store:
    """Finished runs, with losses that a function of the spec gives."""

    def __init__(self, base: Config, loss: Any) -> None:
        self.base, self.loss = base, loss
        self.done: dict[str, dict[str, Any]] = {}
        self.order: list[Spec] = []
        self._keys: dict[str, str] = {}

    def key(self, spec: Spec) -> str:
        text = repr(spec)
        if text not in self._keys:
            self._keys[text] = spec.key(self.base, "data")
        return self._keys[text]

    def find(self, spec: Spec) -> dict[str, Any] | None:
        return self.done.get(self.key(spec))

    def run(self, spec: Spec) -> None:
        self.order.append(spec)
        loss = self.loss(spec)
        extra = 1.05 if spec.arm.startswith("hybrid") else 1.0
        passes = round(spec.max_steps * extra)
        self.done[self.key(spec)] = {
            "arm": spec.arm,
            "seed": spec.seed,
            "loss": loss,
            "held_out_loss": loss,
            "learning_rate": spec.rate_factor,
            "seconds": 0.1 * passes,
            "backward_passes": passes,
            "tokens": passes,
        }

    def finish(self, plan: ComparisonPlan) -> list[Spec]:
        while specs := plan.next():
            self.run(specs[0])
        return self.order


def valley(best: float) -> Any:
    return lambda spec: 1.0 + abs(spec.rate_factor - best) + 10 / spec.max_steps


def test_a_comparison_runs_everything_once_and_then_asks_for_nothing(base: Config) -> None:
    store = Store(base, valley(1.0))
    plan = ComparisonPlan(base, Options(), store.find)
    order = store.finish(plan)
    keys = [spec.key(base, "data") for spec in order]
    assert len(keys) == len(set(keys))
    assert plan.next() == []
    arms = {(spec.arm, spec.seed) for spec in order}
    for arm in ("plain", "hybrid", "hybrid, not moving", "hybrid, repeating"):
        assert {(arm, seed) for seed in (1, 2, 3)} <= arms
    for seed in (1, 2, 3):
        assert {spec.max_steps for spec in order if spec.arm == "plain" and spec.seed == seed} >= {112, 160, 224}
        assert ("plain, equal passes", seed) in arms
        # the same seconds are, in this store, the same number of passes: one run serves both
        derived = plan.derived(seed)
        assert {spec.max_steps for spec in derived} == {168}


def test_the_sweep_comes_first_with_one_seed_and_arms_in_turns(base: Config) -> None:
    store = Store(base, valley(1.0))
    order = store.finish(ComparisonPlan(base, Options(), store.find))
    assert [(spec.arm, spec.rate_factor, spec.seed) for spec in order[:6]] == [
        (arm, rate, 1) for rate in (0.5, 1.0, 2.0) for arm in ("plain", "hybrid")
    ]


@pytest.mark.parametrize(
    ("best", "expected"), [(1.0, [0.5, 1, 2]), (4.0, [0.5, 1, 2, 4, 8]), (0.25, [0.125, 0.25, 0.5, 1, 2])]
)
def test_the_sweep_goes_on_beyond_its_edge_for_all_arms(base: Config, best: float, expected: list[float]) -> None:
    store = Store(base, valley(best))
    plan = ComparisonPlan(base, Options(), store.find)
    store.finish(plan)
    assert plan.rates() == expected
    assert plan.best_rate(PLAIN) == plan.best_rate(HYBRID) == best
    for arm in ("plain", "hybrid"):
        tried = {spec.rate_factor for spec in store.order if spec.arm == arm and spec.seed == 1}
        assert tried == set(expected)


def test_a_diverged_learning_rate_is_not_chosen(base: Config) -> None:
    store = Store(base, lambda spec: None if spec.rate_factor == 2 else 1 / spec.rate_factor)
    plan = ComparisonPlan(base, Options(), store.find)
    for spec in plan.sweep():
        store.run(spec)
    assert plan.best_rate(PLAIN) == 1.0


def test_the_learning_rate_is_chosen_by_the_held_out_loss_and_never_by_the_test(base: Config) -> None:
    store = Store(base, valley(1.0))
    plan = ComparisonPlan(base, Options(), store.find)
    for spec in plan.sweep():
        store.run(spec)
        store.find(spec)["loss"] = -spec.rate_factor
    assert plan.best_rate(PLAIN) == 1.0


def test_arms_are_as_long_and_as_tuned_as_they_say(base: Config) -> None:
    short = Arm("short", "", {"predictor.beta": 0.2}, budget=0.5)
    tied = Arm("tied", "", {"predictor.beta": 0.3}, rates_of="short", once=True)
    store = Store(base, lambda spec: valley(0.5 if spec.arm == "short" else 1.0)(spec))
    plan = ComparisonPlan(base, Options(rates=(0.25, 0.5, 1.0, 2.0), arms=(short, tied)), store.find)
    store.finish(plan)
    assert {spec.max_steps for spec in store.order if spec.arm == "short"} == {base.max_steps // 2}
    assert (plan.best_rate(PLAIN), plan.best_rate(short), plan.best_rate(tied)) == (1.0, 0.5, 0.5)
    assert [(spec.seed, spec.rate_factor) for spec in store.order if spec.arm == "tied"] == [(1, 0.5)]


def test_the_plain_loop_may_be_given_as_much_time_as_the_claim_took(base: Config) -> None:
    store = Store(base, valley(1.0))
    plan = ComparisonPlan(base, Options(), store.find)
    store.finish(plan)
    store.find(plan.spec(HYBRID, 2))["seconds"] *= 1.5
    passes, seconds = plan.derived(2)
    assert (passes.max_steps, seconds.max_steps) == (168, 252)


def test_no_two_arms_have_one_name(base: Config) -> None:
    with pytest.raises(InputError, match="same name"):
        ComparisonPlan(base, Options(arms=(Arm("plain", "", {}),)), lambda _: None)


def test_no_run_of_a_comparison_ends_before_its_schedule_does(base: Config) -> None:
    impatient = changed(base, {"evaluation.early_stopping_patience": 2})
    assert Spec("plain", 1, 1.0, 100).config(impatient).evaluation.early_stopping_patience == 0


def test_plain_and_the_arm_that_does_not_move_do_not_look_ahead(base: Config) -> None:
    ahead = changed(base, {"predictor.beta": 0.4})
    configs = {arm.name: Spec(arm.name, 1, 1.0, 10, arm.settings).config(ahead) for arm in (PLAIN, STILL, HYBRID)}
    assert [config.predictor.beta for config in configs.values()] == [0.0, 0.0, 0.4]
    assert configs["plain"].hybrid.mode == "off"


def test_an_arm_that_always_diverges_does_not_end_the_comparison(base: Config) -> None:
    bad = Arm("bad", "", {"hybrid.full_steps": 3})
    store = Store(base, lambda spec: None if spec.arm == "bad" else valley(1.0)(spec))
    plan = ComparisonPlan(base, Options(arms=(bad,)), store.find)
    store.finish(plan)
    assert plan.best_rate(HYBRID) == 1.0
    assert sum(spec.arm == "bad" for spec in store.order) >= 5


def test_a_plain_loop_that_always_diverges_is_told(base: Config) -> None:
    store = Store(base, lambda spec: None)
    plan = ComparisonPlan(base, Options(), store.find)
    with pytest.raises(InputError, match="lower --rates"):
        store.finish(plan)


def test_rounds_are_interleaved_forth_and_back(base: Config) -> None:
    store = Store(base, valley(1.0))
    plan = ComparisonPlan(base, Options(), store.find)
    store.finish(plan)
    first, second = plan.round(1), plan.round(2)
    undone = [[(spec.arm, spec.max_steps) for spec in specs if "," not in spec.arm] for specs in (first, second)]
    assert undone[0] == undone[1][::-1]


def test_the_schedule_is_scaled_with_the_budget(base: Config) -> None:
    given = changed(base, {"schedule.warmup_steps": 20, "schedule.decay_steps": 50})
    config = Spec("plain", 1, 1.0, 2 * base.max_steps).config(given)
    assert (config.schedule.warmup_steps, config.schedule.decay_steps) == (40, 100)
    assert config.max_steps == 2 * base.max_steps


def test_an_arm_that_finds_its_rate_is_not_swept(base: Config) -> None:
    auto = Arm("auto", "", {"optimizer.learning_rate": "auto"})
    store = Store(base, valley(1.0))
    plan = ComparisonPlan(base, Options(arms=(auto,)), store.find)
    runs = [spec for spec in store.finish(plan) if spec.arm == "auto"]
    assert sorted(spec.seed for spec in runs) == list(plan.seeds)
    assert plan.best_rate(auto) == 1.0


def test_both_learning_rates_of_muon_are_swept_together(base: Config) -> None:
    muon = changed(base, {"optimizer.type": "muon", "optimizer.rest_learning_rate": 0.001})
    config = Spec("plain", 1, 2.0, base.max_steps).config(muon)
    assert config.optimizer.learning_rate == 0.02
    assert config.optimizer.rest_learning_rate == 0.002
    muon = changed(base, {"optimizer.type": "muon", "optimizer.rest_rate_factor": 0.5})
    config = Spec("plain", 1, 2.0, base.max_steps).config(muon)
    assert (config.optimizer.peak_rate, config.optimizer.rest_rate) == (0.02, 0.01)


def test_runs_that_compute_the_same_have_one_key(base: Config) -> None:
    one = Spec("plain", 1, 1.0, 100, {"hybrid.mode": "off"})
    other = Spec("plain, equal seconds", 1, 1.0, 100, {"hybrid.mode": "off"})
    assert one.key(base, "data") == other.key(base, "data")
    assert one.key(base, "data") != one.key(base, "other data")
    assert one.key(base, "data") != Spec("x", 1, 1.0, 100, {"hybrid.mode": "off"}, "still").key(base, "data")


def test_a_configuration_without_prediction_has_nothing_to_compare(base: Config) -> None:
    plain = changed(base, {"hybrid.mode": "off"})
    with pytest.raises(InputError, match="nothing to compare"):
        ComparisonPlan(plain, Options(), lambda _: None)
    ComparisonPlan(plain, Options(arms=(Arm("muon", "", {"optimizer.type": "muon"}),)), lambda _: None)
    ahead = ComparisonPlan(changed(plain, {"predictor.beta": 0.4}), Options(), lambda _: None)
    assert ahead.controls == []


@pytest.mark.parametrize(
    "wrong", [{"seeds": 0}, {"rates": ()}, {"rates": (0.0, 1.0)}, {"budgets": (1.0, 2.0)}, {"budgets": (0.5, 0.7, 2.0)}]
)
def test_options_that_cannot_give_a_result_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--"):
        Options(**wrong)
