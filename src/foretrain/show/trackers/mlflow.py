"""MLflow: an SQLite store in `mlflow/` of the run folder, unless MLFLOW_TRACKING_URI names another."""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
import warnings

from foretrain.persist.files import make_folder
from foretrain.show.trackers.entries import SERIOUS, TrackerEntry
from foretrain.show.trackers.tracker import PROJECT, Place, Tracker

_LONGEST = 500
_MOST = 100
_STATES = {"finished": "FINISHED", "stopped early": "FINISHED", "interrupted": "KILLED", "paused": "KILLED"}


class MLflow(Tracker):
    """Speaks to the store as a client of its own: no active run of the program is touched."""

    def __init__(self, place: Place) -> None:
        store = os.environ.get("MLFLOW_TRACKING_URI") or _own_store(place)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would go to the network
        from mlflow import MlflowClient, entities

        self._entities = entities
        for name in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries among each other, while the store is made
            self._client = MlflowClient(tracking_uri=store)
            self.run_id = place.run_id or self._new_run(place, store.startswith("sqlite:"))
        self._tell_settings(place)
        self._tags: set[str] = set()
        command = f"mlflow server --backend-store-uri {shlex.quote(store)}"
        self.look = store if store.startswith("http") else f"{store} (look at it with: {command})"

    def _new_run(self, place: Place, local: bool) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        artifacts = (place.folder / "mlflow" / "artifacts").as_uri() if local else None
        experiment = found.experiment_id if found else self._client.create_experiment(name, artifacts)
        return str(self._client.create_run(experiment, run_name=place.name).info.run_id)

    def _tell_settings(self, place: Place) -> None:
        """A parameter cannot change; what a resumed run has changed becomes a tag."""
        known = self._client.get_run(self.run_id).data.params
        given = {name: str(value)[:_LONGEST] for name, value in place.settings.items()}
        new = [self._entities.Param(name, value) for name, value in given.items() if name not in known]
        for start in range(0, len(new), _MOST):
            self._client.log_batch(self.run_id, params=new[start : start + _MOST])
        for name, value in given.items():
            if known.get(name, value) != value:
                self._client.set_tag(self.run_id, f"resumed.{name}", value)

    def start(self, step: int) -> None:
        self._client.update_run(self.run_id, status="RUNNING")

    def log(self, entry: TrackerEntry) -> None:
        """It has no texts along a run: serious ones and sentences of the summary become tags."""
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_allowed(name), value, now, entry.step) for name, value in entry.numbers.items()
        ]
        tags = []
        for kind, text in entry.texts.items():
            if kind in SERIOUS or kind.startswith("summary/"):
                name = self._unused(f"{kind}.{entry.step}") if kind in SERIOUS else kind
                tags.append(self._entities.RunTag(_allowed(name), text[:_LONGEST]))
        self._client.log_batch(self.run_id, metrics=metrics, tags=tags)

    def _unused(self, name: str) -> str:
        """A second finding at the same step is `finding.100.2`."""
        number, free = 1, name
        while free in self._tags:
            number += 1
            free = f"{name}.{number}"
        self._tags.add(free)
        return free

    def close(self, reason: str) -> None:
        self._client.set_terminated(self.run_id, _STATES.get(reason, "FAILED"))


def _own_store(place: Place) -> str:
    """A file that cannot be written is found here: MLflow would try for minutes."""
    file = place.folder / "mlflow" / "mlflow.db"
    if set("%?") & set(str(file)):
        raise ValueError(f"{file}: % and ? in a path mean something else to it; set MLFLOW_TRACKING_URI")
    make_folder(file.parent)
    file.touch()
    return f"sqlite:///{file}"


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)
