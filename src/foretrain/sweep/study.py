"""The trials of a sweep in Optuna's storage: an SQLite file, or a database that many machines share."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

_NAMELESS = timedelta(minutes=2)
"""A trial without any record for so long was left by a worker that died as it made it."""
_WAIT = 60
"""Seconds that SQLite waits for another process."""


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
        from sqlalchemy.exc import SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self.own_storage = not space.settings.storage
        self.address = space.settings.storage or f"sqlite:///{folder.resolve() / 'sweep.db'}"
        self._failures = (SQLAlchemyError, optuna.exceptions.StorageInternalError)
        try:
            self._study = optuna.create_study(
                storage=self._storage(), study_name=space.settings.study, load_if_exists=True
            )
            self._claim_study()
        except self._failures as error:
            raise self._unusable(error) from None
        except (ImportError, ValueError) as error:
            raise InputError(f"[sweep] storage = {self.shown_address}: cannot be used ({error})") from None

    def _storage(self) -> optuna.storages.RDBStorage:
        import optuna

        options = {"connect_args": {"timeout": _WAIT}} if self.address.startswith("sqlite") else {}
        return optuna.storages.RDBStorage(self.address, engine_kwargs=options)

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

    # --- records -----------------------------------------------------------------------------------------------------

    def records(self) -> list[TrialRecord]:
        """Return all trials, by number."""
        try:
            told = self._study.user_attrs
            return [self._record(trial, told) for trial in self._study.get_trials(deepcopy=False)]
        except self._failures as error:
            raise self._unusable(error) from None

    def _record(self, trial: FrozenTrial, told: Mapping[str, Any]) -> TrialRecord:
        ranges = {one.name: one for one in self.space.ranges}
        values = {name: decoded(ranges[name], value) for name, value in trial.params.items() if name in ranges}
        return TrialRecord.from_json(trial.number, values, told.get(_key(trial.number), {}))

    def write(self, record: TrialRecord) -> None:
        """Keep a record; whoever reads it sees the old one or this one."""
        try:
            self._study.set_user_attr(_key(record.number), record.to_json())
        except self._failures as error:
            raise self._unusable(error) from None

    def nameless(self, record: TrialRecord) -> bool:
        """Say whether the worker that made this trial is gone, having told nothing of it."""
        if record.state != "new" or record.place:
            return False
        if self.own_storage:
            return True  # trials are made under the lock of the folder
        started = self._frozen(record.number).datetime_start
        return started is None or datetime.now() - started > _NAMELESS  # noqa: DTZ005 - Optuna's are local, too

    # --- trials ------------------------------------------------------------------------------------------------------

    def new_trial(self) -> TrialRecord | None:
        """Make a trial; None where another machine has just made the last one."""
        try:
            trial = self._study.ask()
            if trial.number >= self.space.trials:
                self._study.tell(trial, state=_states().FAIL)
                return None
            return self._settled(trial)
        except self._failures as error:
            raise self._unusable(error) from None

    def complete_trial(self, record: TrialRecord) -> TrialRecord:
        """Give a trial the settings that it lacks, since its worker died as it made it."""
        import optuna

        return self._settled(optuna.trial.Trial(self._study, self._frozen(record.number)._trial_id))

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
        import optuna

        frozen = self._frozen(record.number)
        if frozen.state.is_finished():
            return
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for step, loss in record.losses:
                    if step not in frozen.intermediate_values:
                        trial.report(loss, step)
            if record.state == "finished" and record.final is not None and math.isfinite(record.final):
                self._study.tell(trial, record.final)
            elif record.state in ("finished", "failed"):
                self._study.tell(trial, state=_states().FAIL)
        except self._failures as error:
            raise self._unusable(error) from None

    def close_stopped(self, record: TrialRecord) -> None:
        """Tell Optuna's own tools that a trial was stopped; it can still go on here if the sweep is made larger."""
        frozen = self._frozen(record.number)
        if not frozen.state.is_finished():
            self._study.tell(frozen.number, state=_states().PRUNED)

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
