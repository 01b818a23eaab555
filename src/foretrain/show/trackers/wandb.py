"""Weights & Biases: offline, in `wandb/` of the run folder, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import shlex

from foretrain.show.trackers.entries import TrackerEntry
from foretrain.show.trackers.tracker import PROJECT, Place, Tracker

_AHEAD = 1000
"""So many rows are written down as used before they are."""


class WeightsAndBiases(Tracker):
    """A resumed run has the same id, so `wandb sync` puts its parts together."""

    def __init__(self, place: Place) -> None:
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # crash reports would go to the network
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or place.name,
            id=place.run_id,
            resume="allow",
            dir=str(place.folder),
            config=dict(place.settings),
            reinit="create_new",  # a run that the program has open by itself stays as it is
            settings=wandb.Settings(mode=mode, console="off", silent=True),
        )
        self.run_id = self._run.id
        folder = place.folder / "wandb"
        if mode == "offline":
            self.look = f"{folder} (look at it with: wandb leet {shlex.quote(str(folder))})"
        elif mode != "disabled":
            self.look = str(self._run.url or folder)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._step, self._row = -1, place.row
        self._kept, self._keep = place.row, place.keep_row
        self._said: set[str] = set()

    def start(self, step: int) -> None:
        """A resumed run goes on after the last row it wrote, which may be ahead of its step."""
        self._row = max(step - 1, self._row)

    def log(self, entry: TrackerEntry) -> None:
        """Rows can only grow: after a rollback they run ahead of the steps, which are the charts' axis."""
        if entry.step != self._step or self._said & entry.texts.keys():  # a row holds one text of a kind
            self._step, self._row = entry.step, max(entry.step, self._row + 1)
            self._said.clear()
            if self._row > self._kept:  # well ahead, so that it is rarely written and a kill costs a gap at most
                self._kept = self._row + _AHEAD
                self._keep(self._kept)
        self._said |= entry.texts.keys()
        self._run.log({"step": entry.step, **entry.numbers, **entry.texts}, step=self._row)

    def close(self, reason: str) -> None:
        self._keep(self._row)
        self._run.finish(exit_code=int(reason == "failed"))
