"""Amounts of memory in words."""

from __future__ import annotations

import pytest

from foretrain.config import load
from foretrain.config.units import format_size, parse_size
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
    [(13.2e9, "13.20 GB"), (141e9, "141 GB"), (8e8, "800 MB"), (1_500_000, "1.50 MB"), (12_300, "12.3 KB")],
)
def test_amounts_are_written_for_people(size: float, text: str) -> None:
    assert format_size(size) == text


def test_a_wrong_budget_is_a_wrong_configuration() -> None:
    for wrong in ("14 gigs", "14"):
        with pytest.raises(ConfigError, match=rf"memory\.budget={wrong}: '{wrong}' is not .*14GB, 6GiB or 800MB"):
            load(None, [f"memory.budget={wrong}"])
    assert load(None, ["memory.budget=14GB"]).config.memory.budget == "14GB"
