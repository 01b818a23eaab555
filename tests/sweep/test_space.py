"""Space files: what they say, what they refuse, and which settings trials get."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import ConfigError, InputError
from foretrain.sweep.records import Standing, TrialRecord
from foretrain.sweep.sampling import values_of
from foretrain.sweep.space import Space, parse_space, read_space
from foretrain.sweep.study import check_optuna


def space_of(space: str, sweep: str = "", base: str = "max_steps = 64") -> Space:
    return parse_space(f"[base]\n{base}\n[space]\n{space}\n[sweep]\n{sweep}\n", "space.toml", Path())


RATE = '"optimizer.learning_rate" = {low = 1e-4, high = 1e-1, log = true}'
AUTO = "max_steps = 64\noptimizer.learning_rate = 'auto'"


def test_settings_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("max_steps = 99\n[optimizer]\ntype = 'adamw'\n")
    text = """
base = "my.toml"
[space]
"optimizer.learning_rate" = {low = 1e-4, high = 1e-1, log = true}
batch_size = [8, 16]
"data.path" = ["a.txt", ["b.txt", "c.txt"]]
[space.model]
width = {low = 64, high = 256, step = 64}
"""
    (tmp_path / "space.toml").write_text(text)
    space = read_space(tmp_path / "space.toml")
    assert space.base.max_steps == 99
    assert [one.name for one in space.ranges] == ["optimizer.learning_rate", "batch_size", "data.path", "model.width"]
    for number in range(20):
        values = values_of(space, number, [])
        config = space.config(values)
        assert 1e-4 <= values["optimizer.learning_rate"] <= 1e-1
        assert config.model.width in (64, 128, 192, 256)
        assert config.batch_size in (8, 16)
        assert config.data.path in ("a.txt", ["b.txt", "c.txt"])
    assert parse_space(space.text, "copy", Path()).base == space.base, "the copy needs no other file"


@pytest.mark.parametrize(
    ("space", "sweep", "words"),
    [
        ("", "", r"\[space\] is empty: name the settings to try"),
        ("lerning_rate = [1e-3]", "", "unknown key lerning_rate; did you mean"),
        ("batch_size = []", "", "an empty list"),
        ("batch_size = {low = 8}", "", "high is missing"),
        (f"batch_size = {{low = 8, high = 1{'0' * 400}}}", "", "batch_size: a number is too large"),
        ("batch_size = {low = 8, high = 4}", "", "low = 8 must not be above high = 4"),
        ("'optimizer.learning_rate' = {low = 0.0, high = 1.0, log = true}", "", "needs low above 0"),
        ("'optimizer.learning_rate' = {low = 0.1, high = 1.0, kind = 3}", "", "unknown kind"),
        ("'schedule.max_lr' = [1e-3]\n'optimizer.learning_rate' = [1e-2]", "", "optimizer.learning_rate twice"),
        ("batch_size = [0, 8]", "", "batch_size = 0: too small"),
        ("'optimizer.type' = ['adamw', 'adamx']", "", "there is no such value"),
        ("epochs = [1, 2]", "", "epochs ends runs at steps that nobody knows"),
        (RATE, "trails = 3", r"\[sweep\] has no trails; it has trials"),
        (RATE, "trials = 0", r"\[sweep\] trials = 0"),
        (RATE, "rungs = [0.5, 0.25]", "rungs must rise"),
        (RATE, "sampler = 'grid'", "a grid needs single values: add points = 5"),
        (RATE, "sampler = 'best'", r"\[sweep\] sampler = 'best'"),
    ],
)
def test_what_is_refused(space: str, sweep: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        space_of(space, sweep)


@pytest.mark.parametrize("end", ["epochs = 2", "max_time = '2h'", "until_loss = 3.2"])
def test_ends_that_are_not_steps_are_refused(end: str) -> None:
    with pytest.raises(ConfigError, match="give max_steps alone"):
        space_of(RATE, base=end)


def test_a_rate_that_is_auto_is_refused_where_it_would_be_used() -> None:
    for space, base in (("'optimizer.learning_rate' = ['auto', 1e-3]", ""), ("batch_size = [2, 4]", AUTO)):
        with pytest.raises(ConfigError, match="'auto' makes steps that a sweep does not count"):
            space_of(space, base=base)
    assert space_of(RATE, base=AUTO).trials


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the space file"):
        read_space(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        parse_space("[space", "space.toml", tmp_path)
    with pytest.raises(ConfigError, match="unknown table model"):
        parse_space("[model]\nwidth = 3", "space.toml", tmp_path)


def test_a_setting_may_need_another_one() -> None:
    """heads = 5 goes with width = 40 alone: it is no mistake."""
    space = space_of('"model.heads" = [2, 5]\n"model.width" = [32, 40]')
    assert space.trials == 4


def test_a_rare_partner_is_found_and_a_shape_that_no_model_has_is_refused() -> None:
    """heads = 61 goes with one of 64 widths; with a width that it never divides, nothing is started."""
    assert space_of('"model.heads" = [2, 61]\n"model.width" = {low = 64, high = 1072, step = 16}').trials == 24
    with pytest.raises(ConfigError, match=r"space.toml: \[space\] model.heads = 3 does not divide model.width = 64"):
        space_of('"model.heads" = [3, 5]\n' + RATE, base="max_steps = 64\nmodel.width = 64")


def test_a_space_of_few_points_has_as_many_trials_and_none_twice() -> None:
    space = space_of("batch_size = [2, 4]\n'optimizer.learning_rate' = [1e-3, 1e-2]", "trials = 50")
    assert space.trials == 4
    drawn = [tuple(values_of(space, number, []).values()) for number in range(4)]
    assert len(set(drawn)) == 4
    assert space_of("batch_size = [8]").trials == 1
    assert space_of("batch_size = {low = 8, high = 8}").trials == 1


def test_a_grid() -> None:
    space = space_of(
        "'optimizer.learning_rate' = {low = 1e-3, high = 1e-1, log = true, points = 3}\n"
        "batch_size = {low = 8, high = 16, step = 4}",
        "sampler = 'grid'\ntrials = 99",
    )
    points = {tuple(values_of(space, number, []).values()) for number in range(space.trials)}
    assert len(points) == 9
    assert sorted({rate for rate, _ in points}) == pytest.approx([1e-3, 1e-2, 1e-1])
    assert {batch for _, batch in points} == {8, 12, 16}


def test_by_lot_the_number_and_the_seed_decide() -> None:
    one, other = space_of(RATE), space_of(RATE, "seed = 2")
    assert values_of(one, 7, []) == values_of(one, 7, [TrialRecord(0, {"x": 1})])
    assert values_of(one, 7, []) != values_of(one, 8, [])
    assert values_of(one, 7, []) != values_of(other, 7, [])


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_optunas_samplers_learn_from_scores_of_paused_trials(sampler: str) -> None:
    space = space_of(RATE, f"sampler = '{sampler}'")

    def told(number: int, rate: float, score: float) -> TrialRecord:
        return TrialRecord(number, {"optimizer.learning_rate": rate}, "paused", rung=0, standings={0: Standing(score)})

    rates = [10 ** (-4 + 3 * place / 11) for place in range(12)]
    earlier = [told(number, rate, abs(2.5 + math.log10(rate))) for number, rate in enumerate(rates)]
    asked = [values_of(space, 12 + more, earlier)["optimizer.learning_rate"] for more in range(5)]
    near = sum(10**-3.2 < rate < 10**-1.8 for rate in asked)
    assert near >= 4, asked


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: Any = sys.modules
    monkeypatch.setitem(modules, "optuna", None)
    with pytest.raises(InputError, match=r"a sweep needs Optuna; install it with: .*foretrain\[sweep\]"):
        check_optuna()
