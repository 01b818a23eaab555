"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from foretrain.show.numbers import clock, loss_text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (2.5341, "2.5341"),
        (2.5, "2.5000"),
        (1.27849, "1.2785"),
        (0.475, "0.4750"),
        (14.03125, "14.0312"),
        (0.0123456, "0.01235"),
        (0.05, "0.05000"),
        (3.1e-4, "0.0003100"),
        (2.784e-7, "2.784e-7"),
        (2.8e-7, "2.800e-7"),
        (4.419e-19, "4.419e-19"),
        (123456.0, "1.235e5"),
        (-3.118, "-3.1180"),
        (-9.5e-6, "-9.500e-6"),
        (0.0, "0"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_a_loss_is_readable_whatever_its_size(loss: float, text: str) -> None:
    assert loss_text(loss) == text


@pytest.mark.parametrize("exponent", range(-30, 12))
def test_no_loss_loses_its_digits(exponent: int) -> None:
    loss = 1.2345678 * 10.0**exponent
    assert float(loss_text(loss)) == pytest.approx(loss, rel=1e-3)
    assert "e+00" not in loss_text(loss)


@pytest.mark.parametrize(("seconds", "text"), [(8.12, "8.1 s"), (283.0, "4:43"), (7800.0, "2h10m")])
def test_a_time_of_a_run(seconds: float, text: str) -> None:
    assert clock(seconds) == text
