"""Amounts in words: memory, losses, rates, times."""

from __future__ import annotations

import math

import pytest

from foretrain.config import load
from foretrain.config.units import clock, format_size, loss_text, parse_size, rate_text
from foretrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("14GB", 14 * 10**9),
        ("14 GB", 14 * 10**9),
        ("6GiB", 6 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("512KiB", 2**19),
        ("2TB", 2 * 10**12),
    ],
)
def test_an_amount_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "14", "GB", "14gb", "-1GB", "1e3GB", "14 G", "14GBs", "fourteen GB", "0GB", "nanGB"]
)
def test_anything_else_is_refused_in_our_words(text: str) -> None:
    with pytest.raises(ValueError, match="14GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (13.2e9, "13.20 GB"),
        (141e9, "141 GB"),
        (8e8, "800 MB"),
        (1_500_000, "1.50 MB"),
        (12_300, "12.30 kB"),
        (812, "812 bytes"),
    ],
)
def test_amounts_are_written_for_people(size: float, text: str) -> None:
    assert format_size(size) == text


def test_a_wrong_budget_is_a_wrong_configuration() -> None:
    for wrong in ("14 gigs", "14"):
        with pytest.raises(ConfigError, match=rf"memory\.budget={wrong}: '{wrong}' is not .*14GB, 6GiB or 800MB"):
            load(None, [f"memory.budget={wrong}"])
    assert load(None, ["memory.budget=14GB"]).config.memory.budget == "14GB"


# --- losses, rates, times ---------------------------------------------------------------------------------------------


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


def test_rates_are_written_as_people_write_them() -> None:
    assert [rate_text(value) for value in (3e-4, 2.5e-3, 0.02, 0.0, 1.0)] == ["3e-4", "2.5e-3", "0.02", "0", "1"]
