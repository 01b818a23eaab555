"""Checkpoints of a run: the newest states, the best weights, and the way back to either."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretrain import environment
from foretrain.config import Config, to_mapping
from foretrain.engine.batches import checked_state
from foretrain.engine.engine import Engine
from foretrain.engine.memory.usage import MemoryMeter
from foretrain.engine.optim.muon import iteration_type
from foretrain.errors import CheckpointError, OutOfMemory, SaveError
from foretrain.events import CheckpointRejected, CheckpointSaved, Event, Notice, Resumed
from foretrain.health import shortage
from foretrain.health.rescue import Rescue
from foretrain.loop import words
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore, sizes_of
from foretrain.persist.codec import Snapshot, put_together, random_state_anew, take_apart
from foretrain.persist.folder import RunFolder
from foretrain.persist.parts import flat_forms
from foretrain.persist.pieces import Layouts, ReadBy


class Saver:
    """Writes and reads the checkpoints of one run folder.

    fingerprint: of the data; a checkpoint of other data is refused. state: gives everything that decides how the run
    goes on; load: puts such a state back, and is told where it comes from. judging: whether a move is open, which may
    be undone. Of several processes each saves and loads its part, and all learn whether that went well.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        folder: RunFolder,
        fingerprint: str,
        memory: MemoryMeter,
        rescue: Rescue,
        emit: Callable[[Event], None],
        *,
        state: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any], str], None],
        judging: Callable[[], bool],
    ) -> None:
        self.engine = engine
        self.config = config
        self.folder = folder
        self.fingerprint = fingerprint
        self.memory = memory
        self.rescue = rescue
        self.emit = emit
        self.state = state
        self.load = load
        self.judging = judging
        self.store = CheckpointStore(folder.checkpoints, config.checkpoint.keep, engine.world, self._reader)
        self.saved_step = -1
        self.earlier_seconds = 0.0
        """What the parts of this run took before it was resumed, with start-up, evaluation and saving."""
        self.unsaved_best: dict[str, Any] | None = None
        """The best weights, where they could not be saved; they wait for the next save."""

    @property
    def total_seconds(self) -> float:
        """What all parts of the run took, with start-up, evaluation and saving."""
        return self.earlier_seconds + time.monotonic() - self.folder.opened

    def _reader(self, step: int) -> ReadBy:
        """How this process reads the checkpoint of a step."""
        world, model, device = self.engine.world, self.engine.model, self.engine.device.type
        shared = flat_forms(world.size, device) if self.engine.shares_directions else None
        layouts = Layouts(dict(model.named_parameters(remove_duplicate=False)), shared)
        return ReadBy(world.rank, world.size, layouts, lambda: random_state_anew(self.config.seed, step, world.rank))

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, must: bool, place: Callable[[], Any]) -> None:
        """Save the whole state. In mid-run a failure is a warning; the last save must work. place: says where the data
        is."""
        started = time.perf_counter()
        path = self._saved(lambda: self._write(place), must)
        if path is None:
            return
        step = self.saved_step = self.engine.progress.global_step
        if self.engine.world.rank == 0:
            self._tell_saved(step, path, started)
        self._write_best()

    def _tell_saved(self, step: int, path: Path, started: float) -> None:
        sizes = sizes_of(path)
        seconds = round(time.perf_counter() - started, 3)
        weights, prediction = (round(sizes.get(part, 0.0), 2) for part in ("model", "hybrid"))
        size = round(sum(sizes.values()), 2)
        self.emit(CheckpointSaved(step, str(path), size, seconds, weights, prediction))

    def _write(self, place: Callable[[], Any]) -> Path:
        self.engine.meter.fetch()
        self.engine.world.catch_up()
        where = place()
        return self.store.save(self.engine.progress.global_step, self.state() | {"loader": where, "meta": self._meta()})

    def _saved(self, save: Callable[[], Path], must: bool) -> Path | None:
        with self.engine.untimed(), self.memory.during("checkpoint"):
            try:
                self.store.together.only_first(self.folder.check_place, SaveError)
                return save()
            except SaveError as error:
                if must:
                    raise SaveError(f"{error}, then go on with {self.folder.again}") from error
                text = str(error)
            except (RuntimeError, MemoryError) as error:
                found = shortage.look_at(error)
                if found is None:
                    raise
                text = self.rescue.explain(found)
                if must:
                    raise OutOfMemory(f"{text}; {self.rescue.advice()}") from None
            self.emit(Notice(f"{text}; the run goes on and tries again at the next save"))
            return None

    def _meta(self) -> dict[str, Any]:
        return {
            "config": to_mapping(self.config),
            "data": self.fingerprint,
            "torch": torch.__version__,
            "foretrain": environment.version("foretrain"),
            "muon_type": iteration_type(self.engine.device),
            "total_seconds": self.total_seconds,
        } | ({"ranks": self.engine.world.size} if self.engine.world.size > 1 else {})

    # --- the best weights --------------------------------------------------------------------------------------------

    def save_best(self, loss: float) -> None:
        """What was learned so far has the lowest held-out loss. The one before it stays while a move is open: with the
        move this one could be taken back."""
        best = {"step": self.engine.progress.global_step, "loss": loss}
        self.unsaved_best = self.engine.weights_state_dict() | {"best": best, "meta": self._meta()}
        self._write_best()
        if self.unsaved_best is not None:  # at the next save the weights are others
            parts = take_apart(self.unsaved_best)
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in parts.tensors.items()}
            self.unsaved_best = put_together(Snapshot(copies, parts.tree, parts.spread), spread=True)

    def _write_best(self) -> None:
        """The best weights that are not on the disk yet, as far as they are the best still."""
        state, keep_others = self.unsaved_best, self.judging()
        if state is not None:
            step = int(state["best"]["step"])
            gone = step != self.engine.progress.best_step
            if gone or self._saved(lambda: self.store.save_best(step, state, keep_others), must=False) is not None:
                self.unsaved_best = None

    def complete_best(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Weights are trained for the first time: the best ones so far get them as they still are, since later nobody
        could tell what they were."""
        frozen = self.engine.frozen
        if self.unsaved_best is not None:
            added = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
            self.unsaved_best |= {"model": {**self.unsaved_best["model"], **added}, "frozen": frozen}
        for step, path in self.store.best().items():
            try:
                state = self.store.read(path)
            except CheckpointError:  # damaged: nothing can be made of it anyway
                continue
            model = {**state["model"], **{name: weight.detach() for name, weight in weights.items()}}
            state |= {"model": model, "frozen": frozen}
            self._saved(partial(self.store.save_best, step, state, keep_others=True), must=False)

    def prune_best(self) -> None:
        self.store.prune_best(self.engine.progress.best_step)

    def load_best(self) -> None:
        """The model as it was where the held-out loss was lowest; everything else stays at the end of the run."""
        found = self.store.best()
        if not found:
            self.emit(Notice("load_best: no evaluation was made, so the model stays as it is"))
            return
        best = self.engine.progress.best_step
        step = best if best in found else next(iter(found))
        path = found[step]
        state = self.store.read(path)
        self.engine.load_weights(state, str(path))
        loss = float(state["best"]["loss"])
        self.emit(
            Notice(
                f"the model has its weights of step {step}, with the lowest held-out loss, {loss:.4g}; final losses "
                "and metrics of the summary are those of the last weights",
                "info",
            )
        )

    @property
    def best_checkpoint(self) -> str | None:
        """Its path inside of the run folder."""
        best = self.store.best()
        return str(next(iter(best.values())).relative_to(self.folder.path)) if best else None

    # --- resuming ----------------------------------------------------------------------------------------------------

    def resume(self) -> dict[str, Any] | None:
        """Go on from the newest checkpoint. Returns where the data was then, None if that is not known."""
        try:
            return self._load_newest()
        except (RuntimeError, MemoryError) as error:
            found = shortage.look_at(error)
            if found is None:
                raise
            text = f"{self.rescue.explain(found)}; {self.rescue.advice()}. All checkpoints are as they were"
        raise OutOfMemory(text)

    def _load_newest(self) -> dict[str, Any] | None:
        loaded = self.store.load_newest(lambda path, reason: self.emit(CheckpointRejected(str(path), reason)))
        if loaded is None:
            self.emit(words.no_checkpoint(self.folder))
            return None
        meta = self._check_origin(loaded)
        self.load(loaded.state, str(loaded.path))
        place = checked_state(loaded.state.get("loader"), str(loaded.path))
        self.saved_step = loaded.step
        try:
            self.earlier_seconds = float(meta.get("total_seconds") or self.engine.clock.seconds)
        except (TypeError, ValueError):
            raise CheckpointError(f"{loaded.path}: its total_seconds are no number; start from another one") from None
        self.emit(Resumed(loaded.step, str(loaded.path)))
        for notice in words.since_saved(meta, self.config, self.engine):
            self.emit(notice)
        return place

    def _check_origin(self, loaded: checkpoint.Loaded) -> dict[str, Any]:
        """Refuse a checkpoint of another kind or of other data."""
        meta = loaded.state.get("meta")
        if not isinstance(meta, dict) or not isinstance(meta.get("config"), dict):
            raise CheckpointError(f"{loaded.path}: no run of `fit` has saved it; start a new run in another folder")
        if meta.get("data") != self.fingerprint:
            raise CheckpointError(
                f"{loaded.path}: it was trained on other data than data.path gives now; use "
                "the same data, or start a new run"
            )
        return meta
