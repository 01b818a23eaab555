"""Results of finished runs as a comparison keeps them: read back only if they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foretrain.errors import InputError
from foretrain.persist.files import from_json

_LARGEST = 1e30
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
Positive = Annotated[float, Field(gt=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=2**63)]
Row = Annotated[list[Any], Field(min_length=3)]


class _Account(BaseModel):
    model_config = ConfigDict(strict=True)
    batches: dict[str, Annotated[list[int], Field(min_length=2)]]


class _Result(BaseModel):
    """What every run has."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    arm: str
    seed: int
    learning_rate: Number
    failed: str
    started: str
    loss: Number | None
    held_out_loss: Number | None


class _Finished(_Result):
    """What a run has besides when it came to its end with a loss."""

    seconds: Positive
    steps: Count
    backward_passes: Annotated[Count, Field(gt=0)]
    tokens: Annotated[Count, Field(gt=0)]
    probe_tokens: Count = 0
    kept: Count = 0
    refused: Count = 0
    rolled_back: Count = 0
    account: _Account
    curve: list[Row]
    training: list[Row] = []
    phases: list[Row]
    moves: list[Row]


def read(path: Path) -> dict[str, Any]:
    """One object of a comparison's folder."""
    try:
        value = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); delete it to run this part again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a result of `foretrain compare`; delete it to run this part again")
    return value


def read_result(path: Path) -> dict[str, Any]:
    """Return the result of one run, with every number that is computed with."""
    value = read(path)
    try:
        (_Result if value.get("loss") is None else _Finished).model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{path}: damaged ({place}: {first['msg'].lower()}); delete it to run this part again"
        ) from None
    return value
