"""Open the trackers of a run, or say what is missing before it begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any

from foretrain.config import Config, to_mapping
from foretrain.errors import InputError, SaveError, how_to_install
from foretrain.events import Listener
from foretrain.persist.files import explain_failed_write, from_json, write_atomic
from foretrain.show.trackers.entries import hyperparameters
from foretrain.show.trackers.listener import TrackerListener
from foretrain.show.trackers.tracker import Place, Tracker

IDS = "trackers.json"
"""This file of the run folder holds each tracker's own id of the run, and the last row of those that count rows."""
_ROW = "{}/row"

_CLASSES = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "mlflow": "MLflow", "trackio": "Trackio"}
_PACKAGES = {
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
}
"""These packages have to be there; nothing is imported to find out."""
_LIGHTER = {"mlflow": "mlflow-skinny"}
"""Instead of such a package, a smaller one can be installed."""


def check_installed(names: Sequence[str]) -> None:
    """Check this before data are read and models are made."""
    for name in names:
        missing = [package for package in _PACKAGES[name] if not _is_there(package)]
        if missing:
            how = how_to_install(*(_LIGHTER.get(package, package) for package in missing))
            raise InputError(f"log.trackers = {name}: needs {' and '.join(missing)}; {how}")


def _is_there(package: str) -> bool:
    try:
        return util.find_spec(package) is not None
    except (ImportError, ValueError):  # taken away on purpose
        return False


def open_trackers(
    config: Config, folder: Path, resume: bool, emit: Listener, settings: Mapping[str, Any] | None = None
) -> list[TrackerListener]:
    """One listener for each name. resume: go on in the trackers' own runs, where the folder has their ids. settings:
    what they are told of the configuration; else all of it."""
    names = config.log.trackers
    if not names:
        return []
    check_installed(names)
    kept = _read_ids(folder / IDS) if resume else {}
    given = hyperparameters(to_mapping(config) if settings is None else settings)
    opened: dict[str, Tracker] = {}
    for name in dict.fromkeys(names):
        row = kept.get(_ROW.format(name), -1)
        keep_row = partial(_keep_row, folder / IDS, _ROW.format(name))
        place = Place(folder.absolute(), given, kept.get(name), row, keep_row)
        try:
            opened[name] = getattr(import_module(f"foretrain.show.trackers.{name}"), _CLASSES[name])(place)
        except Exception as error:
            for tracker in opened.values():
                tracker.close("failed")
            raise InputError(
                f"log.trackers = {name}: it cannot begin ({type(error).__name__}: {' '.join(str(error).split())}); "
                f"take it out of log.trackers, or delete its line in {folder / IDS} if its own run is lost"
            ) from error
    ids = {name: tracker.run_id for name, tracker in opened.items() if tracker.run_id is not None}
    if kept | ids != kept:
        _write_ids(folder / IDS, kept | ids)
    return [TrackerListener(name, tracker, emit) for name, tracker in opened.items()]


def _keep_row(path: Path, name: str, row: int) -> None:
    _write_ids(path, _read_ids(path) | {name: row})


def _write_ids(path: Path, ids: Mapping[str, Any]) -> None:
    try:
        write_atomic(path, json.dumps(ids, indent=2) + "\n")
    except OSError as error:
        cause, advice = explain_failed_write(error)
        raise SaveError(f"{path}: cannot be written: {cause}. {advice}") from None


def _read_ids(path: Path) -> dict[str, Any]:
    try:
        read = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); delete it, and trackers begin new runs") from None
    if not isinstance(read, dict) or not all(
        isinstance(value, int if name.endswith(_ROW.format("")) else str) for name, value in read.items()
    ):
        raise InputError(f"{path}: it does not name a run for each tracker; delete it, and trackers begin new runs")
    return read
