"""The examples inside of other trainers run as they are printed, and the page shows them as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from tests.integrations.hosts import forget_accelerate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
NAMES = ["wrap_loop", "transformers_trainer", "trl_adapter", "lightning_trainer", "accelerate_loop"]


@pytest.mark.xdist_group("hosts")  # they take seconds to import
@pytest.mark.filterwarnings("ignore")  # their own
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_and_keeps_leaps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foretrain.loop.forecaster.forecast", lambda *_, **__: None)  # it takes most of their time
    monkeypatch.setattr("foretrain.loop.forecaster.finished", lambda *_, **__: None)
    forget_accelerate()
    found = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    summary = (found["hybrid"] if "hybrid" in found else found["callback"].run).summary()
    assert summary["moves"]["kept"] + summary["moves"]["shrunk"] >= 1
    assert summary["audit"]["sentence"] in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_an_example_as_it_is_and_it_is_short(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert f"```python\n{source}```" in PAGE.read_text(encoding="utf-8")
    assert len([line for line in source.splitlines() if line.strip()]) < 30
