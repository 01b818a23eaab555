"""What can go wrong, said so that the reader knows what to do next."""

from __future__ import annotations


class ForetrainError(Exception):
    """Base of every error foretrain raises on purpose."""

    exit_code = 1


class InputError(ForetrainError):
    """Something handed in (a setting, a file, a folder) cannot be used. The message says what to change."""

    exit_code = 2


class ConfigError(InputError):
    """A setting is unknown, impossible, or contradicts another one."""


class DataError(InputError):
    """The data is missing, empty, too short, or does not fit the model."""


class CheckpointError(InputError):
    """A checkpoint cannot be used here: damaged, foreign, or of another model."""


class SaveError(ForetrainError):
    """Something could not be written. What was on the disk before is intact."""


class DivergenceError(ForetrainError):
    """The run produced non-finite losses and cannot go on by itself."""
