"""`foretrain forecast` on run folders and on logs: what it knows, what it refuses, and its back-tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.show.runs import append, write_run

from foretrain.errors import InputError
from foretrain.events import Evaluated, Event, Progress, RatesPlanned, RunStarted
from foretrain.forecast.logged import ColumnNames
from foretrain.recipes.forecast import forecast_runs
from foretrain.recipes.seen import ForecastRequest, read_run

TOTAL = 1000


def loss_at(step: float) -> float:
    """A power law and, over the last 300 steps, what the fall of the rate gives."""
    return 2.5 + 4 * step**-0.4 - 0.2 * max(0.0, step - 700) / 300


def csv(path: Path, last: int = TOTAL, every: int = 25, rates: bool = False, above: float = 0.0) -> Path:
    rows = ["step,val_loss" + (",lr" if rates else "")]
    for step in range(every, last + 1, every):
        rate = f",{min(1.0, (TOTAL - step) / 300):.4f}" if rates else ""
        rows.append(f"{step},{loss_at(step) + above:.6f}{rate}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def folder(path: Path, last: int = TOTAL, every: int = 25, kind: str = "tiny") -> Path:
    told: list[Event] = [
        RunStarted(0, TOTAL, 5, 5, "cpu", "fp32", "tiny"),
        RatesPlanned(0, TOTAL, kind, [0, 700, TOTAL], [1, 1, 0]),
    ]
    for step in range(5, last + 1, 5):
        told.append(Progress(step, loss_at(step - 2.5) - 0.3, 1.0, 1e-3, step, 1.0, step / 10, 0))
        if step % every == 0:
            told.append(Evaluated(step, loss_at(step), 0.1, False, True))
    return write_run(path, told)


def test_a_run_that_was_stopped_is_forecast_to_its_end(tmp_path: Path) -> None:
    (made,) = forecast_runs([folder(tmp_path / "run", last=850)], ForecastRequest())
    assert (made.seen, made.made.step, made.truth) == (850, TOTAL, None)
    assert made.made.loss == pytest.approx(loss_at(TOTAL), rel=0.03)
    assert made.made.low < made.made.loss < made.made.high


def test_logged_rates_of_nothing_count(tmp_path: Path) -> None:
    told: list[Event] = [RunStarted(0, TOTAL, 5, 5, "cpu", "fp32", "tiny")]
    for step in range(50, TOTAL + 1, 50):
        told.append(Progress(step, 1.0, 1.0, 0.0 if step >= 500 else 1e-3, step, 1.0, step / 10, 0))
        told.append(Evaluated(step, loss_at(step), 0.1, False, True))
    plan = read_run(write_run(tmp_path / "run", told), ForecastRequest()).curve.plan
    assert plan.multipliers[plan.steps >= 600].max() == 0.0


def test_its_log_names_the_same_run(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", last=850)
    by_folder, by_file = (forecast_runs([path], ForecastRequest())[0].made for path in (run, run / "metrics.jsonl"))
    assert by_folder == by_file


def test_a_finished_run_is_a_back_test_at_three_shares_or_at_the_one_asked_for(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    made = forecast_runs([run], ForecastRequest())
    assert [one.seen for one in made] == [250, 500, 750]
    for one in made:
        assert one.truth == pytest.approx(loss_at(TOTAL), abs=1e-5)
        assert one.error_percent == pytest.approx(100 * (one.made.loss / loss_at(TOTAL) - 1), abs=1e-3)
        assert one.held == (one.made.low <= loss_at(TOTAL) <= one.made.high)
    (half,) = forecast_runs([run], ForecastRequest(at=0.5))
    assert half.made == made[1].made


def test_few_evaluations_are_helped_by_the_training_loss(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", last=200, every=100)
    (made,) = forecast_runs([run], ForecastRequest())
    assert made.seen == 200


def test_runs_are_ranked_by_their_forecast(tmp_path: Path) -> None:
    worse = csv(tmp_path / "worse.csv", last=500, above=0.5)
    better = csv(tmp_path / "better.csv", last=500)
    asked = ForecastRequest(total_steps=TOTAL, shape="wsd")
    assert [one.run.name for one in forecast_runs([worse, better], asked)] == ["better.csv", "worse.csv"]


def test_a_log_needs_its_length_and_says_when_the_plan_is_unknown(tmp_path: Path) -> None:
    file = csv(tmp_path / "log.csv", last=500)
    with pytest.raises(InputError, match=r"give --total-steps N, or for a finished run --at 0.5"):
        forecast_runs([file], ForecastRequest())
    (blind,) = forecast_runs([file], ForecastRequest(total_steps=TOTAL))
    assert not blind.run.curve.plan.known
    assert any("name it with --schedule" in note for note in blind.notes)
    (told,) = forecast_runs([file], ForecastRequest(total_steps=TOTAL, shape="wsd", decay_share=0.3))
    assert told.run.curve.plan.known
    assert told.made.loss < blind.made.loss


def test_the_rates_in_a_log_of_a_finished_run_are_its_plan(tmp_path: Path) -> None:
    (made,) = forecast_runs([csv(tmp_path / "log.csv", rates=True)], ForecastRequest(at=0.5))
    plan = made.run.curve.plan
    assert plan.at(np.array([400.0, 850.0, 1000.0])) == pytest.approx([1.0, 0.5, 0.0], abs=0.01)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("wsd", [1.0, 1.0, 0.0]),
        ("linear", [0.789, 0.526, 0.0]),
        ("cosine", [0.895, 0.541, 0.0]),
        ("constant", [1.0, 1.0, 1.0]),
    ],
)
def test_schedules_have_their_shapes(tmp_path: Path, shape: Any, wanted: list[float]) -> None:
    file = csv(tmp_path / "log.csv", last=500)
    (made,) = forecast_runs([file], ForecastRequest(total_steps=TOTAL, shape=shape))
    assert made.run.curve.plan.at(np.array([250.0, 500.0, 1000.0])) == pytest.approx(wanted, abs=0.01)


def test_siblings_are_given_or_found_beside_a_run_folder(tmp_path: Path) -> None:
    given = ForecastRequest(total_steps=TOTAL, shape="wsd", siblings=(csv(tmp_path / "done.csv"),))
    (made,) = forecast_runs([csv(tmp_path / "log.csv", last=500)], given)
    assert [one.plan.total_steps for one in made.run.siblings] == [TOTAL]
    run, done = folder(tmp_path / "runs" / "new", last=500), folder(tmp_path / "runs" / "done")
    curve = {
        "kind": "tiny",
        "total_steps": TOTAL,
        "rate_steps": [0, 700, TOTAL],
        "rates": [1, 1, 0],
        "steps": list(range(25, TOTAL + 1, 25)),
        "losses": [loss_at(step) for step in range(25, TOTAL + 1, 25)],
        "annealed": [],
    }
    summary = {"reason": "finished", "loss_forecast": {"curve": curve, "finished": {"kind": "tiny", "residuals": []}}}
    (done / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (found,) = forecast_runs([run], ForecastRequest())
    assert len(found.run.siblings) == 1
    assert len(found.run.history.runs) == 1


def test_annealed_copies_of_the_log_are_used(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", last=400)
    append(run, {"event": "Annealed", "step": 250, "steps": 15, "loss": 2.4, "before": 2.6})
    (made,) = forecast_runs([run], ForecastRequest())
    assert [(point.step, point.steps) for point in made.run.curve.annealed] == [(250, 15)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step,val_loss\n1,nan\n2,nan\n", "the last of the losses in 'val_loss' is not a number"),
        ("step,val_loss\n5,2\n", "one point, at step 5, is all that is left of the losses in 'val_loss'"),
        ("step,val_loss\n5,2\n5,2\n5,2\n", "name another column with --loss, or with --step one that rises"),
        ("step,val_loss\n5,2\n4,2\n3,2\n", "with --step one that rises"),
        ("step,val_loss\n1,2\n2,2\n", "2 losses are too few for a forecast"),
        ("step,val_loss\n1,2\n2000,2\n", "beyond --total-steps 1000"),
        ("step,val_loss\n", "no numbers in it"),
    ],
)
def test_what_cannot_be_forecast_says_why(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "log.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        forecast_runs([file], ForecastRequest(total_steps=TOTAL))


def test_losses_that_allow_no_forecast_are_told_in_words(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    lines = [f"{step},{8 * 0.99**step:.6g}" for step in range(25, TOTAL + 1, 25)]
    file.write_text("\n".join(["step,val_loss", *lines[:20]]), encoding="utf-8")
    with pytest.raises(InputError, match="its losses allow no forecast: they diverge, or fall so far"):
        forecast_runs([file], ForecastRequest(total_steps=TOTAL))


def test_a_back_test_leaves_out_a_share_that_allows_no_forecast(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    log = run / "metrics.jsonl"
    lines = [(json.loads(line), line) for line in log.read_text(encoding="utf-8").splitlines()]
    kept = [line for told, line in lines if told["event"] not in ("Evaluated", "Progress") or told["step"] > 300]
    log.write_text("\n".join(kept) + "\n", encoding="utf-8")
    made = forecast_runs([run], ForecastRequest())
    assert [one.seen for one in made] == [500, 750]
    assert all(any("25% of the run" in note for note in one.notes) for one in made)


def test_a_run_without_evaluations_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [RunStarted(0, TOTAL, 5, 5, "cpu", "fp32", "tiny")])
    with pytest.raises(InputError, match="no held-out losses; the run has measured none yet"):
        forecast_runs([run], ForecastRequest())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ForecastRequest(at=1.5), "--at 1.5: a share between 0 and 1"),
        (ForecastRequest(level=0.0), "--level 0"),
        (ForecastRequest(total_steps=0), "--total-steps 0"),
        (ForecastRequest(decay_share=0.2), "give both"),
        (ForecastRequest(ColumnNames(loss="x"), total_steps=TOTAL), "no column of numbers is called 'x'"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, asked: ForecastRequest, words: str) -> None:
    with pytest.raises(InputError, match=words):
        forecast_runs([csv(tmp_path / "log.csv", last=500)], asked)
