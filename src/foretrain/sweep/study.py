"""The trials of a sweep in Optuna's storage: an SQLite file, or a database that many machines share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foretrain import config as configuration
from foretrain.errors import InputError, SaveError, how_to_install
from foretrain.persist.files import explain_failed_write
from foretrain.sweep.records import TrialRecord
from foretrain.sweep.sampling import coded, decoded, distributions, values_of
from foretrain.sweep.space import Range, Space

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

Answer = TypeVar("Answer")

_NAMELESS = timedelta(minutes=2)
"""A trial without any record for so long was left by a worker that died as it made it."""
_WAIT = 60
"""Seconds that SQLite waits for another process."""
_TRIES = 5
"""So often the tables of a new database are looked for, while other machines make them at the same moment."""
_DRIVERS = {"postgresql": "psycopg[binary]", "mysql": "mysqlclient", "mysql+pymysql": "pymysql"}
"""What is installed for an address that begins so."""
_PATIENCE = 120.0
"""Seconds that a server which does not answer is waited for: as long as a database takes to start again."""
_AT_FIRST = 20.0
"""Seconds of trying while a study is opened: somebody may have mistyped its address, and waits for the answer."""
_SURPLUS = "two machines made the last trial at the same moment: one too many"
_TOLD_EVERY = 60.0
"""Seconds between signs of life for other places."""
GONE_AFTER = 900.0
"""Seconds without a sign of life after which nobody waits for a place."""


def check_optuna() -> None:
    """Refuse to begin without Optuna, in words."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise InputError(f"a sweep needs Optuna; {how_to_install('foretrain[sweep]')}") from None


class SweepStudy:
    """One study: its trials with their settings, and a record of each, which can change until the sweep ends."""

    def __init__(self, space: Space, folder: Path) -> None:
        check_optuna()
        import optuna
        from sqlalchemy.exc import ArgumentError, SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self.own_storage = not space.settings.storage
        self.address = space.settings.storage or f"sqlite:///{folder.resolve() / 'sweep.db'}"
        self._failures = (SQLAlchemyError, optuna.exceptions.StorageInternalError)
        self._served = not self.address.startswith("sqlite")
        """A server keeps it."""
        self._shown = 0.0
        """When the last sign of life was given."""
        try:
            self._study = self._ask(self._open, _AT_FIRST)
            self._ask(self._claim_study)
        except (ArgumentError, ValueError) as error:
            raise InputError(f"[sweep] storage = {self.shown_address}: cannot be used ({error})") from None
        except ImportError:
            driver = _DRIVERS.get(self.address.partition(":")[0])
            advice = f"`pip install '{driver}'`" if driver else "install the one that this address names"
            raise InputError(f"[sweep] storage = {self.shown_address}: its driver is missing; {advice}") from None

    def _open(self) -> optuna.Study:
        import optuna

        return optuna.create_study(storage=self._storage(), study_name=self.space.settings.study, load_if_exists=True)

    def _storage(self, tries: int = _TRIES) -> optuna.storages.RDBStorage:
        """Open the storage. Who makes the tables of an empty database while another machine does is refused by the
        server, and finds them there at the next try."""
        import optuna
        from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

        # a server may close a connection that nobody used for hours, as between two rungs of a long run
        options = {"pool_pre_ping": True} if self._served else {"connect_args": {"timeout": _WAIT}}
        try:
            return optuna.storages.RDBStorage(self.address, engine_kwargs=options)
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            made_meanwhile = not isinstance(error, OperationalError) or "already exists" in str(error)
            if tries == 1 or not made_meanwhile:
                raise
        return self._storage(tries - 1)

    @property
    def shown_address(self) -> str:
        """Return the address without a password."""
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            return make_url(self.address).render_as_string(hide_password=True)
        except ArgumentError:
            return self.address

    def _unusable(self, error: Exception) -> SaveError:
        cause, advice = explain_failed_write(error)
        if "database or disk is full" in str(error):
            cause, advice = "the disk is full (No space left on device)", "Free some space"
        elif self._served:
            cause, advice = cause.partition(" [SQL:")[0], "See that its server runs and that the address is right"
        return SaveError(f"{self.shown_address}: {cause}. {advice}, then give the same command again: nothing is lost")

    def _claim_study(self) -> None:
        """Refuse a study of another space: its trials cannot be compared with ours. Settings are drawn in the order in
        which the study was begun, in whatever order a file names them later."""
        told = self._study.user_attrs
        self.space = self.space.in_order(told.get("order", []))
        mine, theirs = fingerprint(self.space), told.get("space")
        if theirs is None:
            self._study.set_user_attr("order", [one.name for one in self.space.ranges])
            self._study.set_user_attr("space", mine)
        elif theirs != mine:
            raise InputError(
                f"{self.shown_address}: the study {self.space.settings.study!r} there is a sweep of another base or "
                "space; choose another folder or another [sweep] study, or give its own space file"
            )

    def _ask(self, action: Callable[[], Answer], patience: float | None = None) -> Answer:
        """Do something with the storage. A server that starts anew is waited for."""
        from sqlalchemy.exc import ArgumentError

        ends = time.monotonic() + (_PATIENCE if patience is None else patience)
        while True:
            try:
                return action()
            except ArgumentError:
                raise  # no address of a database: waiting would not make it one
            except self._failures as error:
                if not self._served or time.monotonic() > ends:
                    raise self._unusable(error) from None
            time.sleep(1.0)

    # --- records -----------------------------------------------------------------------------------------------------

    def records(self) -> list[TrialRecord]:
        """Return all trials, by number."""
        return self._ask(self._read)[0]

    def _read(self) -> tuple[list[TrialRecord], Mapping[str, Any]]:
        told = self._study.user_attrs
        found = [self._record(trial, told) for trial in self._study.get_trials(deepcopy=False)]
        while found and found[-1].reason == _SURPLUS and found[-1].number >= self.space.trials:
            found.pop()
        return found, told

    def _record(self, trial: FrozenTrial, told: Mapping[str, Any]) -> TrialRecord:
        known = told.get(_key(trial.number))
        if known is None and trial.state.is_finished():
            return TrialRecord(trial.number, state="failed", reason=_SURPLUS)
        ranges = {one.name: one for one in self.space.ranges}
        values = {name: decoded(ranges[name], value) for name, value in trial.params.items() if name in ranges}
        return TrialRecord.from_json(trial.number, values, known or {})

    def write(self, record: TrialRecord) -> None:
        """Keep a record; whoever reads it sees the old one or this one."""
        self._ask(lambda: self._study.set_user_attr(_key(record.number), record.to_json()))

    # --- places ------------------------------------------------------------------------------------------------------

    def current_records(self, place: str) -> list[TrialRecord]:
        """Return all trials as a place sees them. Those at a place of which nothing was heard for long count as failed:
        nobody waits for them. They count again when it is back."""
        known, told = self._ask(self._read)
        waited_for = {"", place} | {one for one in _places(known) if time.time() - told.get(_sign(one), 0) < GONE_AFTER}
        return [
            record.with_changes(state="failed", reason="its machine is gone")
            if record.place not in waited_for and (record.open or record.state == "paused")
            else record
            for record in known
        ]

    def show_life(self, place: str) -> None:
        """Tell other places, once in a while, that this one is at work."""
        if not self.own_storage and time.time() - self._shown > _TOLD_EVERY:
            self._shown = time.time()
            self._ask(lambda: self._study.set_user_attr(_sign(place), self._shown))

    def sign_off(self, place: str) -> None:
        """Tell other places that nobody works at this one for now."""
        if not self.own_storage:
            self._ask(lambda: self._study.set_user_attr(_sign(place), 0.0))

    # --- trials ------------------------------------------------------------------------------------------------------

    def nameless(self, record: TrialRecord) -> bool:
        """Say whether the worker that made this trial is gone, having told nothing of it."""
        if record.state != "new" or record.place:
            return False
        if self.own_storage:
            return True  # trials are made under the lock of the folder
        started = self._ask(lambda: self._frozen(record.number)).datetime_start
        return started is None or datetime.now() - started > _NAMELESS  # noqa: DTZ005 - Optuna's are local, too

    def new_trial(self) -> TrialRecord | None:
        """Make a trial; None where another machine has just made the last one."""
        trial = self._ask(self._study.ask)
        if trial.number >= self.space.trials:
            self._unless_ended(lambda: self._study.tell(trial, state=_states().FAIL))
            return None
        return self._ask(lambda: self._settled(trial))

    def complete_trial(self, record: TrialRecord) -> TrialRecord:
        """Give a trial the settings that it lacks, since its worker died as it made it."""
        import optuna

        return self._ask(lambda: self._settled(optuna.trial.Trial(self._study, self._frozen(record.number)._trial_id)))

    def _settled(self, trial: Trial) -> TrialRecord:
        earlier = [record for record in self.records() if record.number < trial.number]
        values = values_of(self.space, trial.number, earlier)
        self._study.sampler = _decided({name: coded(value) for name, value in values.items()})
        found = {one.name: decoded(one, _suggested(trial, one)) for one in self.space.ranges}
        return TrialRecord(trial.number, found)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def report(self, record: TrialRecord) -> None:
        """Tell Optuna's own tools how a trial is doing: its losses, and its end."""
        self._unless_ended(lambda: self._report(record))

    def _report(self, record: TrialRecord) -> None:
        import optuna

        frozen = self._frozen(record.number)
        if frozen.state.is_finished():
            return
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step, loss in record.losses:
                if step not in frozen.intermediate_values:
                    trial.report(loss, step)
        if record.state == "finished" and record.final is not None and math.isfinite(record.final):
            self._study.tell(trial, record.final, skip_if_finished=True)
        elif record.state in ("finished", "failed"):
            self._study.tell(trial, state=_states().FAIL, skip_if_finished=True)

    def close_stopped(self, record: TrialRecord) -> None:
        """Tell Optuna's own tools that a trial was stopped; it can still go on here if the sweep is made larger."""
        self._unless_ended(lambda: self._study.tell(record.number, state=_states().PRUNED, skip_if_finished=True))

    def _unless_ended(self, tell: Callable[[], object]) -> None:
        """Tell Optuna something of a trial. Another machine may tell its end at this moment: then that counts."""
        from optuna.exceptions import UpdateFinishedTrialError

        with contextlib.suppress(UpdateFinishedTrialError):
            self._ask(tell)

    def importances(self) -> dict[str, float]:
        """Return how much each setting mattered for the scores, as Optuna's evaluator sees it; empty if unknown."""
        import optuna

        forms = {name: form for name, form in distributions(self.space.ranges).items() if not form.single()}
        study = optuna.create_study()
        for record in self.records():
            guess = record.best_guess
            known = {name: coded(value) for name, value in record.values.items() if name in forms}
            if guess is not None and math.isfinite(guess) and len(known) == len(forms) > 0:
                made = optuna.trial.create_trial(value=guess, params=known, distributions=dict(forms))
                study.add_trial(made)
        if len(study.trials) < 4:
            return {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                evaluator = optuna.importance.PedAnovaImportanceEvaluator()
                return optuna.importance.get_param_importances(study, evaluator=evaluator)
        except (ValueError, RuntimeError):
            return {}


def fingerprint(space: Space) -> str:
    """Return what must be equal for trials to be compared: base, and space in one order."""
    text = json.dumps([configuration.to_mapping(space.base), [repr(one) for one in space.ranges]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def are_comparable(one: Space, other: Space) -> bool:
    """Say whether two files ask for the same base and space, in whatever order they name settings."""
    return fingerprint(one) == fingerprint(other.in_order([known.name for known in one.ranges]))


def _key(number: int) -> str:
    return f"trial-{number:04d}"


def _sign(place: str) -> str:
    return f"seen-{place}"


def _places(records: list[TrialRecord]) -> set[str]:
    return {record.place for record in records}


def _states() -> Any:
    from optuna.trial import TrialState

    return TrialState


def _suggested(trial: Trial, one: Range) -> Any:
    """Return what Optuna has for this setting; the sampler is asked where it has nothing."""
    if one.choices:
        return trial.suggest_categorical(one.name, [coded(value) for value in one.choices])
    if one.whole:
        return trial.suggest_int(one.name, int(one.low), int(one.high), log=one.log, step=int(one.step or 1))
    return trial.suggest_float(one.name, one.low, one.high, log=one.log, step=one.step)


def _decided(values: Mapping[str, Any]) -> BaseSampler:
    """Return a sampler that gives the values that were decided on."""
    from optuna.samplers import BaseSampler

    class Decided(BaseSampler):
        """Gives values that were decided on before."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return values[param_name]

    return Decided()
