"""Blocks of residuals have a chart with one curve each, and runs without blocks have none."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.hybrid.linearised.problems import POINTS, network, poisson

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.show.follow import read_runs
from foretrain.show.pages.report_page import page, parts


def test_a_run_of_residuals_shows_one_curve_per_block(tmp_path: Path) -> None:
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    settings = from_mapping({"device": "cpu", "max_steps": 30, "log.interval": 5})
    trainer = HybridTrainer(model, adam, residuals=poisson, weights={"equation": 0.1}, config=settings)
    trainer.fit([POINTS], out=tmp_path / "run", progress=False)
    (record,) = read_runs([tmp_path / "run"])
    (run,) = parts([record]).charts["blocks"]["runs"]
    assert [(one["label"], one["place"]) for one in run["series"]] == [("equation", 0), ("ends", 1)]
    assert all(value > 0 for one in run["series"] for value in one["values"])
    assert "<figure data-optional><h3>Blocks of residuals</h3>" in page([record])
