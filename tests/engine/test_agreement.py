"""Decisions are compared number by number, to the last bit, by sums that every process can make."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from foretrain.engine.agreement import Agreement, all_the_same, named_values
from foretrain.events import Phase
from foretrain.hybrid.cycle import View

BITS = math.nextafter(0.5, 1.0)


def sums(*decisions: Any) -> list[float]:
    """What processes get that sum their signatures, each after a decision of its own."""
    signatures = []
    for decision in decisions:
        agreement = Agreement()
        agreement.add(decision, "the decision")
        signatures.append(agreement.signature())
    return np.sum(signatures, axis=0).tolist()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.5, BITS),
        (1, 2),
        (True, False),
        (None, "none"),
        ("stopped", "finished"),
        (Phase.FULL, Phase.PREDICT),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"b": 1}),
        (np.array([1.0, 2.0]), np.array([1.0, np.nextafter(2.0, 3.0)])),
        (View(3, confidence=0.5), View(3, confidence=BITS)),
        ((1, math.nan), (1, math.inf)),
    ],
    ids=str,
)
def test_decisions_that_differ_are_told_apart(one: Any, other: Any) -> None:
    for size in (2, 3, 100):
        assert all_the_same(sums(*[one] * size), size)
        assert not all_the_same(sums(*[one] * (size - 1), other), size)


def test_every_number_has_a_name() -> None:
    values = dict(named_values((View(3, confidence=0.25), [None, {"horizon": np.float64(2.0)}]), "it"))
    assert values["it[0].confidence"] == (0.25).hex()
    assert values["it[0].step"] == "3"
    assert values["it[1][0]"] == "None"
    assert values["it[1][1].horizon"] == (2.0).hex()


def test_what_is_no_data_is_told_by_its_form_only() -> None:
    assert dict(named_values([torch.ones(2), object()], "it"))["it[1]"] == "object"
    assert dict(named_values(torch.ones(2, 3), "it")) == {"it": "[2, 3] torch.float32"}


def test_entries_are_forgotten_and_what_was_decided_before_still_counts() -> None:
    one, other = Agreement(), Agreement()
    one.add(1, "first")
    other.add(2, "first")
    for agreement in (one, other):
        agreement.forget(len(agreement.entries))
        agreement.add(3, "second")
        assert [entry.name for entry in agreement.entries] == ["second"]
    assert one.signature() != other.signature()
