"""The real packages: what each wrote of a run, read back with its own reader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.show.trackers.conftest import AFTER, LAST, Story, fit, tiny_config

PROGRESS = {
    "train/loss": "loss",
    "train/gradient_norm": "gradient_norm",
    "train/learning_rate": "learning_rate",
    "train/samples": "tokens",
    "train/samples_per_second": "tokens_per_second",
    "train/seconds": "seconds",
    "train/skipped_steps": "skipped_steps",
    "train/smoothed_loss": "smoothed_loss",
    "prediction/predicted_loss": "predicted_loss",
    "prediction/confidence": "confidence",
    "prediction/kept": "kept",
    "prediction/refused": "refused",
    "prediction/gain_percent": "gain_percent",
}
"""Names in trackers, and in `metrics.jsonl`."""
FOUND = "warning: dead layer at blocks.1: gradient norm = 0 (healthy: above 1e-8). it learns nothing"
ADVICE = "; set optimizer.learning_rate = 0.01"


Tell = Callable[[str], Story]


def check_the_story(story: Story) -> None:
    """It was resumed, did steps again, ended as without a tracker, and nothing went to the network."""
    assert [line["step"] for line in story.lines("Progress")] == [1, 2, 3, 4, 5, *range(AFTER + 1, LAST + 1)]
    assert story.calls_home == 0
    assert not [line for line in story.lines("Notice") if line["message"].startswith("tracker ")]
    (name,) = json.loads(str(story.settings[0]["log.trackers"]))
    (told,) = [line for line in story.lines("Notice") if line["message"].startswith(f"{name}: ")]
    assert story.lines("RunEnded")[-1]["reason"] == "finished"
    command = re.search(r"look at it with: (.*)\)$", told["message"])
    assert command is not None
    assert str(story.folder / name) in command[1]
    assert re.search(rf"(^| ){name} ", command[1]), "a command of its own"
    plain = fit(tiny_config(), story.folder.with_name("plain"))
    for name in ("final_val_loss", "final_train_loss"):
        assert plain[name] == story.summary[name]
    assert not {"tensorboard", "wandb", "mlflow", "trackio", "trackers.json"} & {
        path.name for path in story.folder.with_name("plain").iterdir()
    }


def test_tensorboard(tell: Tell) -> None:
    story = tell("tensorboard")
    check_the_story(story)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    read = EventAccumulator(str(story.folder / "tensorboard"))
    read.Reload()
    tags = set(read.Tags()["scalars"])
    for name, field in PROGRESS.items():
        found = {event.step: event.value for event in read.Scalars(name)} if name in tags else {}
        assert found == pytest.approx(story.lasting("Progress", field), rel=1e-6), name
    shown = [event.step for event in read.Scalars("train/loss")]
    assert shown == list(range(1, LAST + 1)), "steps that were done again are shown once"
    held_out = {event.step: event.value for event in read.Scalars("held_out/loss")}
    assert held_out == pytest.approx(story.lasting("Evaluated", "loss"), rel=1e-6)
    assert [event.value for event in read.Scalars("phase")] == [0.0] * LAST
    assert read.Scalars("summary/final_val_loss")[0].value == pytest.approx(story.summary["final_val_loss"], rel=1e-6)

    def texts(tag: str) -> list[str]:
        return [event.tensor_proto.string_val[0].decode() for event in read.Tensors(f"{tag}/text_summary")]

    assert texts("finding") == [FOUND + ADVICE]
    assert texts("warning") == ["the first warning", "the second warning"]
    assert "|optimizer.learning_rate|0.05|" in texts("configuration")[-1]
    assert texts("summary/reason") == ["finished"]
    session = read.summary_metadata["_hparams_/session_start_info"]
    given = metadata.parse_session_start_info_plugin_data(session.plugin_data.content).hparams
    assert given["optimizer.learning_rate"].number_value == 0.05
    assert given["optimizer.type"].string_value == "sgd"
    assert "_hparams_/session_end_info" in read.summary_metadata


def test_weights_and_biases(tell: Tell) -> None:
    story = tell("wandb")
    check_the_story(story)
    parts = sorted((story.folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(parts) == 2
    rows: list[dict[str, Any]] = []
    for path, settings, exit_code in zip(parts, story.settings, (1, 0), strict=True):
        command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", path]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        records = [json.loads(line) for line in printed.splitlines()]
        told = {kind: [record[kind] for record in records if record["type"] == kind] for kind in ("run", "exit")}
        run = told["run"][0]
        assert (run["run_id"], run["project"], run["display_name"]) == (story.ids["wandb"], "foretrain", "mine")
        assert settings.items() <= run["config"]["update"].items()
        assert [ending.get("exit_code", 0) for ending in told["exit"]] == [exit_code]
        rows += [record["history"]["item"] for record in records if record["type"] == "history"]
    for name, field in PROGRESS.items():
        found = [(row["step"], row[name]) for row in rows if name in row]
        logged = [(line["step"], line[field]) for line in story.lines("Progress") if line[field] is not None]
        assert found == logged, name
    places = [row["_step"] for row in rows]
    assert places == sorted(places), "rows only grow, or the server drops them"
    assert [row["_step"] for row in rows if row["step"] == AFTER + 1] == [AFTER + 1, AFTER + 2], "its rows go on"
    assert story.ids["wandb/row"] == places[-1]
    held_out = [(row["step"], row["held_out/loss"]) for row in rows if "held_out/loss" in row]
    assert held_out == [(line["step"], line["loss"]) for line in story.lines("Evaluated")]
    assert [row["finding"] for row in rows if "finding" in row] == [FOUND + ADVICE]
    assert [row["warning"] for row in rows if "warning" in row] == ["the first warning", "the second warning"]
    assert rows[-1]["summary/final_val_loss"] == story.summary["final_val_loss"]
    assert rows[-1]["summary/reason"] == "finished"


def test_mlflow(tell: Tell) -> None:
    story = tell("mlflow")
    check_the_story(story)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"  # under pytest it would be off anyway
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{story.folder / 'mlflow' / 'mlflow.db'}")
        (experiment,) = [found for found in client.search_experiments() if found.name == "foretrain"]
        (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == story.ids["mlflow"]
    assert (run.info.run_name, run.info.status) == (story.folder.name, "FINISHED")

    def history(name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]

    for name, field in PROGRESS.items():
        logged = [(line["step"], line[field]) for line in story.lines("Progress") if line[field] is not None]
        assert sorted(set(history(name))) == sorted(set(logged)), name
    assert sorted(set(history("held_out/loss"))) == sorted(story.lasting("Evaluated", "loss").items())
    assert run.data.metrics["train/loss"] == story.lasting("Progress", "loss")[LAST]
    assert run.data.metrics["summary/final_val_loss"] == story.summary["final_val_loss"]
    assert run.data.params == {name: str(value) for name, value in story.settings[0].items()}
    assert run.data.tags["finding.7"] == FOUND + ADVICE
    assert run.data.tags["warning.7"] == "the first warning"
    assert run.data.tags["warning.7.2"] == "the second warning"
    assert run.data.tags["summary/reason"] == "finished"
    changed = {name: value for name, value in run.data.tags.items() if name.startswith("resumed.")}
    assert changed == {"resumed.checkpoint.keep": "3"}


def test_trackio(tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = tell("trackio")
    check_the_story(story)
    from trackio import sqlite_storage
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", story.folder / "trackio")
    assert SQLiteStorage.get_projects() == ["foretrain"]
    (record,) = SQLiteStorage.get_run_records("foretrain")
    assert (record["name"], record["id"]) == (story.folder.name, story.ids["trackio"])
    rows = SQLiteStorage.get_logs("foretrain", record["name"], run_id=record["id"])
    for name, field in PROGRESS.items():
        found = [(row["step"], row[name]) for row in rows if name in row]
        logged = [(line["step"], line[field]) for line in story.lines("Progress") if line[field] is not None]
        assert sorted(found) == sorted(logged), name
    held_out = [(row["step"], row["held_out/loss"]) for row in rows if "held_out/loss" in row]
    assert sorted(held_out) == sorted((line["step"], line["loss"]) for line in story.lines("Evaluated"))
    (ending,) = [row for row in rows if row.get("summary/reason") == "finished"]
    assert ending["summary/final_val_loss"] == story.summary["final_val_loss"]
    config = SQLiteStorage.get_run_config("foretrain", record["name"], run_id=record["id"])
    assert story.settings[1].items() <= config.items()
    alerts = {alert["text"]: alert for alert in SQLiteStorage.get_alerts("foretrain")}
    assert alerts[FOUND + ADVICE]["level"] == "warn"
    assert {"the first warning", "the second warning"} <= alerts.keys()

    fit(tiny_config(log__trackers="trackio", max_steps=2), tmp_path / "other")
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "other" / "trackio")
    assert SQLiteStorage.get_runs("foretrain") == ["other"], "a second run of one process has its own folder"
