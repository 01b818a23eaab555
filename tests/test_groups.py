"""Tests that share what is dear to make run in one process of pytest-xdist; a new version may silently end that."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("together")
def test_a_group_is_known_to_the_workers(request: pytest.FixtureRequest) -> None:
    among_others = hasattr(request.config, "workerinput")
    assert request.node.nodeid.endswith("@together") == among_others
