"""What a sweep is asked for: a file with the settings that all trials share, the space, and how to search it."""

from __future__ import annotations

import itertools
import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.config.kinds import Count, CountOrZero, Inside
from foretrain.config.paths import flattened
from foretrain.config.resolving import canonical_names
from foretrain.errors import ConfigError, InputError
from foretrain.models import gpt2
from foretrain.persist.files import user_path

_KEYS = frozenset({"low", "high", "log", "step", "points"})
_TRIES = 500
"""So many random settings of the others are tried beside a value before it is refused."""
_LARGEST_GRID = 100_000
_RATE = "optimizer.learning_rate"
_ENDS = ("epochs", "max_time", "until_loss")
Sampler = Literal["random", "grid", "tpe", "gp"]


class SweepSettings(BaseModel):
    """The `[sweep]` table."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    trials: Count = 24
    """Configurations that are tried. A space with fewer points has as many trials as points."""
    sampler: Sampler = "random"
    """`random`; `grid`: all points in a random order; `tpe` and `gp`: Optuna's, which learn from the trials so far."""
    seed: CountOrZero = 1
    """Decides which settings are tried and which trials are audited. The runs' own seed is in `base`."""
    workers: Count = 1
    """Processes on this machine; `--workers` goes before it."""
    rungs: list[Inside] = Field(default=[0.0625, 0.125, 0.25, 0.5], min_length=1)
    """Shares of a run at which trials are paused and ranked."""
    reduction: float = Field(default=2.0, gt=1, le=100)
    """One trial of so many goes on from each rung."""
    references: CountOrZero = 2
    """The first so many trials always run to the end: others are forecast from them."""
    audit_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the stopped trials, drawn by lot, that run to the end all the same: they tell what stopping missed."""
    storage: str = ""
    """Address of a database for many machines, such as `postgresql://...`. Empty: an SQLite file in the sweep's
    folder."""
    study: str = "sweep"
    """Name of the sweep in that database."""

    @field_validator("rungs")
    @classmethod
    def _rise(cls, value: list[float]) -> list[float]:
        if any(later <= earlier for earlier, later in itertools.pairwise(value)):
            raise ValueError("rungs must rise, as in [0.0625, 0.125, 0.25, 0.5]")
        return value


@dataclass(frozen=True)
class Range:
    """The values that one setting may have: a list of them, or everything between two numbers."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False
    """Only whole numbers."""
    points: int | None = None
    """So many values of it are in a grid."""

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.choices or ((self.low,) if self.low == self.high else (self.low, self.high))

    def grid(self) -> tuple[Any, ...] | None:
        """Return all its values; None where there is no end of them."""
        if self.choices or self.low == self.high:
            return self.ends
        if self.points is not None:
            return self._spread(self.points)
        step = self.step or (1 if self.whole and not self.log else None)
        if step is None:
            return None
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        if count > _LARGEST_GRID:
            return None
        values = [self.low + place * step for place in range(count)]
        return tuple(round(value) if self.whole else value for value in values)

    def _spread(self, points: int) -> tuple[Any, ...]:
        """Return so many values from one end to the other, evenly or by equal factors."""
        if points == 1:
            return (self.low,)
        shares = [place / (points - 1) for place in range(points)]
        if self.log:
            values = [self.low * (self.high / self.low) ** share for share in shares]
        else:
            values = [self.low + (self.high - self.low) * share for share in shares]
        values[-1] = self.high
        return tuple(dict.fromkeys(round(value) for value in values)) if self.whole else tuple(values)

    def draw(self, lot: np.random.Generator) -> Any:
        if self.choices:
            return self.choices[int(lot.integers(len(self.choices)))]
        if self.step is not None:
            steps = math.floor((self.high - self.low) / self.step + 1e-9)
            value = self.low + int(lot.integers(steps + 1)) * self.step
        elif self.log:
            value = math.exp(lot.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = lot.uniform(self.low, self.high)
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value


@dataclass(frozen=True)
class Space:
    """A whole sweep, as its file asks for it."""

    base: Config
    ranges: tuple[Range, ...]
    settings: SweepSettings
    text: str
    """The file itself, with the settings of `base` written out."""

    @property
    def finite(self) -> list[dict[str, Any]] | None:
        """Return all points of the space in a random order; None where there is no end of them."""
        grids = [one.grid() for one in self.ranges]
        known = [grid for grid in grids if grid is not None]
        if len(known) < len(grids) or math.prod(len(grid) for grid in known) > _LARGEST_GRID:
            return None
        names = [one.name for one in self.ranges]
        points = [dict(zip(names, values, strict=True)) for values in itertools.product(*known)]
        points = [points[place] for place in np.random.default_rng(self.settings.seed).permutation(len(points))]
        return points

    @property
    def trials(self) -> int:
        points = self.finite
        return self.settings.trials if points is None else min(self.settings.trials, len(points))

    def in_order(self, names: Sequence[str]) -> Space:
        """Return the same space with its settings in this order, which decides what is drawn; unchanged where these
        are not its settings."""
        known = {one.name: one for one in self.ranges}
        return replace(self, ranges=tuple(known[name] for name in names)) if set(names) == set(known) else self

    def config(self, values: Mapping[str, Any]) -> Config:
        """Return the configuration of a trial; ConfigError where these values do not go together."""
        return configuration.changed(self.base, values, "a trial")


def read_space(path: str | Path) -> Space:
    """Read a space file. Raises ConfigError with one clear line."""
    path = user_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read the space file ({error.strerror}); docs/sweep.md shows one") from None
    except ValueError:
        raise InputError(f"{path}: not UTF-8; a space file is a TOML file, docs/sweep.md shows one") from None
    return parse_space(text, str(path), path.parent)


def parse_space(text: str, origin: str, folder: Path) -> Space:
    """Read a space from TOML. folder: what a path in `base` is relative to."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not valid TOML: {error}") from None
    if unknown := sorted(set(content) - {"base", "space", "sweep"}):
        raise ConfigError(
            f"{origin}: unknown table {unknown[0]}; a space file has [base] (settings of all trials), [space] and "
            "[sweep]"
        )
    base = _base(content.get("base", {}), origin, folder)
    ranges = _ranges(content.get("space", {}), origin)
    space = Space(base, ranges, _settings(content.get("sweep", {}), origin), _written_out(content, base))
    _check(space, origin)
    return space


def _base(given: Any, origin: str, folder: Path) -> Config:
    if isinstance(given, str):
        return configuration.load(folder / user_path(given, "base")).config
    if not isinstance(given, Mapping):
        raise ConfigError(f"{origin}: base is the path of a configuration file, or a table of settings")
    return configuration.from_mapping(given, f"{origin}: [base]")


def _written_out(content: Mapping[str, Any], base: Config) -> str:
    """Write the file anew with all settings of `base` in it: other files may change while the sweep goes on."""
    import tomlkit

    changed = configuration.to_mapping(base, changed_only=True)
    return tomlkit.dumps({**content, "base": changed})


def _settings(given: Any, origin: str) -> SweepSettings:
    try:
        return SweepSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(SweepSettings.model_fields)
            raise ConfigError(f"{origin}: [sweep] has no {name}; it has {known}") from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{origin}: [sweep] {name} = {first['input']!r}: {message[0].lower()}{message[1:]}") from None


# --- ranges ----------------------------------------------------------------------------------------------------------


def _ranges(given: Any, origin: str) -> tuple[Range, ...]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f"{origin}: [space] is empty: name the settings to try, such as "
            '"optimizer.learning_rate" = {low = 1e-4, high = 1e-2, log = true} or "batch_size" = [8, 16]'
        )
    found: dict[str, Range] = {}
    for name, values in _entries(given):
        for canonical in canonical_names(name, f"{origin}: [space]"):
            if canonical in found:
                raise ConfigError(f"{origin}: [space] names {canonical} twice; keep one of them")
            found[canonical] = _range(canonical, values, f"{origin}: [space] {name}")
    return tuple(found.values())


def _entries(given: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted names with what stands there; a table without any key of a range is a section."""
    entries: list[tuple[str, Any]] = []
    for key, value in given.items():
        section = isinstance(value, Mapping) and value and not _KEYS & set(value)
        entries += _entries(value, f"{prefix}{key}.") if section else [(f"{prefix}{key}", value)]
    return entries


def _range(name: str, given: Any, where: str) -> Range:
    if isinstance(given, list):
        if not given:
            raise ConfigError(f"{where}: an empty list; name at least one value")
        return Range(name, choices=tuple(dict.fromkeys(map(_frozen, given))))
    if not isinstance(given, Mapping):
        return Range(name, choices=(given,))
    if unknown := sorted(set(given) - _KEYS):
        raise ConfigError(f"{where}: unknown {unknown[0]}; a range has low, high, and log, step or points")
    if missing := [key for key in ("low", "high") if key not in given]:
        raise ConfigError(f"{where}: {missing[0]} is missing; a range has low and high")
    numbers = [given[key] for key in ("low", "high", "step") if key in given]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers):
        raise ConfigError(f"{where}: low, high and step are numbers; other values are written as a list")
    if any(abs(value) > sys.float_info.max for value in numbers if isinstance(value, int)):
        raise ConfigError(f"{where}: a number is too large")
    low, high, log, step = given["low"], given["high"], given.get("log", False), given.get("step")
    points = given.get("points")
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ConfigError(f"{where}: low = {low} must not be above high = {high}")
    if not isinstance(log, bool):
        raise ConfigError(f"{where}: log is true or false")
    if log and low <= 0:
        raise ConfigError(f"{where}: log = true needs low above 0, not {low}")
    if step is not None and (log or step <= 0):
        raise ConfigError(f"{where}: step is a number above 0, and does not go with log = true")
    if points is not None and (isinstance(points, bool) or not isinstance(points, int) or points < 1):
        raise ConfigError(f"{where}: points is a whole number from 1 on")
    whole = all(isinstance(value, int) for value in numbers)
    return Range(name, (), low, high, log, step, whole, points)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


# --- checks ----------------------------------------------------------------------------------------------------------


def _check(space: Space, origin: str) -> None:
    if space.settings.sampler == "grid":
        _check_grid(space.ranges, origin)
    lot = np.random.default_rng(0)
    named = {one.name for one in space.ranges} | {name for name in _ENDS if getattr(space.base, name) is not None}
    if other := next((name for name in _ENDS if name in named), None):
        raise ConfigError(
            f"{origin}: {other} ends runs at steps that nobody knows beforehand, and a sweep pauses them at shares of "
            "their length; give max_steps alone"
        )
    rates = [value for one in space.ranges if one.name == _RATE for value in one.ends]
    if "auto" in (rates or [space.base.optimizer.learning_rate]):
        raise ConfigError(
            f"{origin}: {_RATE} = 'auto' makes steps that a sweep does not count, and begins with what other trials "
            f"have found; give a range of rates, such as {_RATE} = {{low = 1e-4, high = 1e-2, log = true}}"
        )
    for one in space.ranges:
        for value in one.ends:
            _check_value(space, one, value, lot, origin)


def _check_grid(ranges: Sequence[Range], origin: str) -> None:
    endless = next((one for one in ranges if one.grid() is None), None)
    if endless is not None:
        raise ConfigError(
            f"{origin}: [space] {endless.name}: a grid needs single values: add points = 5 to it, or write a list"
        )


def _check_value(space: Space, one: Range, value: Any, lot: np.random.Generator, origin: str) -> None:
    """Refuse a value that goes with none of several random settings of the others."""
    for tried in range(_TRIES):
        others = {other.name: other.draw(lot) for other in space.ranges if other is not one}
        try:
            config = space.config(flattened({**others, one.name: value}))
            if config.preset != "finetune":  # there the folder with the weights decides the shape
                gpt2.shape_from_config(config.model)
            return
        except ConfigError as error:
            if tried == _TRIES - 1:
                raise ConfigError(f"{origin}: [space] {str(error).removeprefix('a trial: ')}") from None


def shown(value: Any) -> str:
    """Write a value of a setting in few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
