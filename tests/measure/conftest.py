"""Fixtures of the tests of measurement."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from foretrain.config import Config, from_mapping
from foretrain.engine.engine import Engine
from foretrain.engine.step import FullStep

from .toys import BASE, Toy, WorkClock


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def base() -> Config:
    return from_mapping(BASE)


@pytest.fixture
def work_clock(monkeypatch: pytest.MonkeyPatch) -> WorkClock:
    clock = WorkClock()
    step, probe = FullStep.gradient, Engine.probe

    def counted_step(self: FullStep, batch: Any) -> Tensor:
        clock.now += 3.0
        return step(self, batch)

    def counted_probe(self: Engine, batch: Any) -> float:
        clock.now += 1.0
        return probe(self, batch)

    monkeypatch.setattr(FullStep, "gradient", counted_step)
    monkeypatch.setattr(Engine, "probe", counted_probe)
    monkeypatch.setattr("foretrain.engine.meters.time.perf_counter", clock)
    return clock
