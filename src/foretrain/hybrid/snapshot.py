"""The state of a healthy run, and the way back to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrain.engine.engine import Engine
from foretrain.engine.memory.host import host_like
from foretrain.engine.memory.offload import HostSnapshots
from foretrain.engine.progress import HELD_OUT_RECORD, TAKEN_BACK
from foretrain.persist.codec import Snapshot, put_together, snapshot
from foretrain.persist.parts import form_of_spread, local

_ON_HOST = ("random.", "loader.", "predictor.")
"""Parts of a state that are never on the device begin with these."""
_EVERY = 500
"""Full steps between snapshots that an emergency can return to. Chosen: a snapshot costs less than a step, and as many
steps are lost at the most."""


class SnapshotPart(NamedTuple):
    """A part of the run, beside the engine, that a snapshot holds."""

    save: Callable[[], Any]
    load: Callable[[Any], None]
    in_emergencies: bool
    """Snapshots for emergencies hold it too."""
    of_weights: bool
    """It belongs to the weights that are trained: it is of no use where others are trained since."""


class Snapshots:
    """Up to three snapshots, each of the engine's state and of what `register` adds to it.

    `taken`: the beginning of a move while one is open, a healthy run otherwise. `best`: the point of the open chain
    where the held-out loss was lowest. `take_other`: the end of the fork with the move, while an audit makes the other.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parts: dict[str, SnapshotPart] = {}
        self.host: HostSnapshots | None = None
        """Snapshots are in host memory."""
        if engine.config.memory.snapshots == "pinned":
            self.host = HostSnapshots(engine.device, _ON_HOST)
        self.taken: Snapshot | None = None
        self.taken_at = 0
        """Backward passes."""
        self.loader_state: Callable[[], Any] = lambda: None
        """Where the data is; set by `fit`."""
        self.on = True
        """Off where memory has run out too often: then there is no way back, and nothing is tried either."""
        self.best: Snapshot | None = None
        """A snapshot of the point in the open chain where the held-out loss was lowest."""
        self._other: Snapshot | None = None
        """Host memory of the second snapshot, used over and over."""

    def register(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        *,
        in_emergencies: bool = True,
        of_weights: bool = False,
    ) -> None:
        """Snapshots taken from now on also hold what `save` returns; a rollback gives it to `load`."""
        self.parts[name] = SnapshotPart(save, load, in_emergencies, of_weights)

    @property
    def due(self) -> bool:
        passes = self.engine.progress.backward_passes
        first = self.taken is None or (self.taken_at == 0 and passes > 0)  # that of the beginning is soon replaced
        return self.on and (first or passes - self.taken_at >= _EVERY)

    def take(self, for_move: bool = True) -> None:
        """Take the snapshot. That of a move may be on its way to host memory until `wait`: only probes follow."""
        before, self.taken = self.taken, None  # half overwritten, should memory run out
        state = self.state(for_move)
        self.taken = snapshot(state, into=before) if self.host is None else self.host.take(state, into=before)
        self.taken_at = self.engine.progress.backward_passes
        if not for_move:
            self.wait()

    def take_other(self) -> Snapshot:
        """A second one, beside that of the beginning of the move."""
        if self.host is None:
            return snapshot(self.state())
        self._other = self.host.take(self.state(), into=self._other)
        self.wait()
        return self._other

    def take_best(self) -> None:
        """Remember this point of the open chain."""
        state = self.state(for_move=False)
        if self.host is None:
            self.best = snapshot(state, into=self.best)
            return
        self.best = self.host.take(state, into=self.best)
        self.wait()

    def go_to_best(self) -> None:
        """Back to there; data goes on, since every batch gives the same loss."""
        position = self.engine.progress.position
        self.rewind(self.best)
        self.engine.progress.position = position

    def drop_best(self) -> None:
        if self.best is not None and self.host is not None:
            self.host.lane.finish()  # its memory is given back
        self.best = None

    def wait(self) -> None:
        """From now on weights and optimizer may change. The host does not wait."""
        if self.host is not None:
            self.host.lane.join()

    def optimizer_state(self) -> dict[str, Any] | None:
        """The optimizer's state at the beginning of the move, if it is in host memory."""
        return None if self.host is None else put_together(self._snapshot())["optimizer"]

    def state(self, for_move: bool = True) -> dict[str, Any]:
        """All that a rollback brings back; what was learned from the move is not among it.

        A predictor takes no harm in an emergency, and its state can be larger than all else: it is not in then.
        """
        state = self.engine.changing_state_dict()
        state["progress"] = {name: state["progress"][name] for name in TAKEN_BACK}
        for name, part in self.parts.items():
            state[name] = part.save() if for_move or part.in_emergencies else None
        state["loader"] = self.loader_state()
        return state

    @property
    def names(self) -> list[str]:
        """Names of the trained weights in a snapshot."""
        return [f"model.{name}" for name in self.engine.trained.names]

    def cover_trained(self) -> None:
        """Others are trained from now on. What is trained for the first time has not changed since the snapshot: it
        becomes a part of it, so that there is a way back until the next one, which is due now."""
        trained = self.engine.trained
        snapshots = [one for one in (self.taken, self.best) if one is not None]
        if self.host is not None:
            self.host.lane.finish()
        for one in snapshots:
            for name, weight in zip(trained.names, trained.parameters, strict=True):
                key = f"model.{name}"
                if key not in one.tensors:
                    part = local(weight)
                    place = host_like(part, part.device) if self.host is not None else torch.empty_like(part)
                    one.tensors[key] = place.copy_(part)
                    one.tree["model"][name] = {"$tensor": key}
                    if (form := form_of_spread(weight)) is not None:
                        one.spread[key] = form
            for name in (name for name, part in self.parts.items() if part.of_weights):
                one.tree[name] = None
        self._other = None
        self.taken_at = min(self.taken_at, self.engine.progress.backward_passes - _EVERY)

    def forget(self) -> None:
        self.taken = self.best = None

    def forget_other(self) -> None:
        """Nothing will be audited soon."""
        self._other = None

    def rewind(self, to: Snapshot | None = None) -> None:
        """Back to the snapshot, or to another one."""
        self.wait()
        state = put_together(to or self._snapshot())
        self.engine.rewind(state)
        for name, part in self.parts.items():
            if state.get(name) is not None:  # else it was switched on since, or is not held in emergencies
                part.load(state[name])

    def recover(self) -> None:
        """Go back to the snapshot in an emergency. Data goes on, so that bad data is not met again."""
        if self.taken is not None:
            position = self.engine.progress.position
            record = {name: getattr(self.engine.progress, name) for name in HELD_OUT_RECORD}
            self.rewind()
            self.engine.progress.position = position
            for name, value in record.items():  # they were measured on weights that were sound
                setattr(self.engine.progress, name, value)
            self.engine.meter.fetch()
            self.engine.meter.skipped_in_a_row = 0  # they were steps of other weights

    def weights(self) -> list[Tensor]:
        """The trained weights of the snapshot, in host memory or not."""
        tensors = self._snapshot().tensors
        return [tensors[name] for name in self.names]

    def loader_state_then(self) -> Any:
        """Where the data was when the snapshot was taken."""
        taken = self._snapshot()
        own = {name: tensor.clone() for name, tensor in taken.tensors.items() if name.startswith("loader.")}
        return put_together(Snapshot(own, taken.tree["loader"]))

    def _snapshot(self) -> Snapshot:
        if self.taken is None:
            raise RuntimeError("there is no snapshot")  # every move begins with one
        return self.taken

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self.host is not None:
            self.host.lane.finish()
        best = None if self.best is None else put_together(self.best, spread=True)
        safe = None if self.taken is None else put_together(self.taken, spread=True)
        return {"safe": safe, "taken_at": self.taken_at, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self.engine.device
        self.taken_at = int(state["taken_at"])
        if self.host is not None:
            self.host.lane.finish()  # the memory of the one before is given back
        self.taken, self.best = self._loaded(state["safe"], device), self._loaded(state["best"], device)
        self.wait()

    def _loaded(self, state: Any, device: torch.device) -> Snapshot | None:
        if state is None:
            return None
        if self.host is not None:
            return self.host.take(state)
        taken = snapshot(state)
        placed = {name: _place(name, tensor, device) for name, tensor in taken.tensors.items()}
        return Snapshot(placed, taken.tree, taken.spread)


def _place(name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """Random states stay on the host."""
    return tensor if name.startswith(_ON_HOST) else tensor.to(device)
