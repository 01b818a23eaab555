"""What is known of the trials of a sweep. Plain values: they are kept in the database, and decided upon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

State = Literal["new", "running", "paused", "finished", "failed"]


@dataclass(frozen=True)
class Standing:
    """How a trial stood at a rung."""

    score: float
    """Trials are ranked by this: what an annealed copy, or the run itself, has come to."""
    low: float | None = None
    high: float | None = None
    """An interval for the last loss; None: nothing is known of it."""
    calibrated: bool = False
    """The interval follows from own trials that came to their end; else from a forecast that decides nothing."""
    method: str = "held-out loss"
    loss: float | None = None
    """The held-out loss itself."""


@dataclass(frozen=True)
class TrialRecord:
    """One configuration and how far it has come."""

    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    """What it sets, by dotted names."""
    state: State = "new"
    total_steps: int = 0
    step: int = 0
    """Steps done."""
    rung: int = -1
    """The last rung that was reached; as many as there are rungs: the end."""
    standings: Mapping[int, Standing] = field(default_factory=dict)
    """By rung."""
    final: float | None = None
    """Held-out loss at the end."""
    losses: tuple[tuple[int, float], ...] = ()
    annealed: tuple[tuple[int, int, float, float], ...] = ()
    """The step, the own steps, the loss of each annealed copy, and the loss of the run there."""
    extra_steps: int = 0
    """Steps of annealed copies."""
    audited_from: int | None = None
    """It was stopped at this rung, and goes to the end by lot."""
    reason: str = ""
    """Why it failed."""
    place: str = ""
    """The folder that holds its run; trials go on where they are."""
    deaths: int = 0
    """How often its worker died while it trained, since the run was last saved."""
    died_at: int = -1
    """The step of its newest checkpoint when that happened."""

    @property
    def audited(self) -> bool:
        return self.audited_from is not None

    @property
    def open(self) -> bool:
        """Say whether a worker has it, or will soon."""
        return self.state in ("new", "running")

    @property
    def cost(self) -> float:
        """Return what it took so far, as a share of a whole run."""
        return (self.step + self.extra_steps) / self.total_steps if self.total_steps else 0.0

    @property
    def standing(self) -> Standing | None:
        """Return how it stood at its last rung."""
        return self.standings[max(self.standings)] if self.standings else None

    @property
    def best_guess(self) -> float | None:
        """Return its last loss, or the newest score in place of it."""
        return self.final if self.final is not None else self.standing.score if self.standing else None

    def with_changes(self, **changes: Any) -> TrialRecord:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values without the number and the values, which the database has."""
        values = asdict(self)
        del values["number"], values["values"]
        values["standings"] = {str(rung): asdict(standing) for rung, standing in self.standings.items()}
        return values

    @classmethod
    def from_json(cls, number: int, settings: Mapping[str, Any], values: Mapping[str, Any]) -> TrialRecord:
        """Read what `to_json` gave."""
        read = dict(values)
        read["standings"] = {int(rung): Standing(**one) for rung, one in read.get("standings", {}).items()}
        read["losses"] = tuple((int(step), float(loss)) for step, loss in read.get("losses", ()))
        read["annealed"] = tuple(tuple(point) for point in read.get("annealed", ()))
        return cls(number, dict(settings), **read)
