"""The kinds of values that settings have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foretrain.config.units import parse_size, parse_time

MOST, LARGEST = 2**31 - 1, 1e30
"""No setting is larger, so that what is computed from them overflows nowhere."""
UNSEEN_LIMITS = (MOST, LARGEST, 2**12, 2**16, 2**20, 2**24)
"""Nobody comes near these: they keep absurd numbers out, and listings leave them out."""
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
"""A share that is neither nothing nor all."""
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Layers = Annotated[int, Field(ge=1, le=2**12)]
Size = Annotated[int, Field(ge=1, le=2**16)]
"""A length of something that is allocated once."""
Rows = Annotated[int, Field(ge=1, le=2**24)]
"""A length of something that is allocated many times over."""
Switch = Literal["auto", True, False]
Share = bool | Annotated[float, Field(ge=0, le=1)]


def _amount(value: Any) -> Any:
    if value != "":
        parse_size(str(value))  # says what is wrong with it
    return value


Amount = Annotated[str, BeforeValidator(_amount)]


def _time(value: Any) -> Any:
    return parse_time(value) if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_time), Field(gt=0, le=LARGEST, allow_inf_nan=False)]
"""A time: a number of seconds, or a text such as "1h30m"."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
