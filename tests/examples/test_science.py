"""The examples of scientific machine learning do what their pages say."""

from __future__ import annotations

import functools
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from tests.scripts import load_script

from foretrain import Config, HybridTrainer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = {"poisson": 100, "burgers": 600, "inverse": 300, "operator_network": 300, "table": 100}
FURTHER = {"poisson": 50.0, "burgers": 3.0, "inverse": 50.0, "operator_network": 4.0, "table": 50.0}
"""How many times lower the loss must be with leaps. Seen: 1,900, 25, 40,000, 6 and 2,300."""
examples = pytest.mark.parametrize("name", STEPS)


@functools.cache
def example(name: str) -> ModuleType:
    return load_script(EXAMPLES / f"{name}.py")


@functools.cache
def outcome(name: str, plain: bool) -> tuple[float, float]:
    """Runs an example for a few steps and returns its loss and its error."""
    _, loss, error = example(name).main(steps=STEPS[name], plain=plain)
    return loss, error


@examples
def test_leaps_lower_loss_and_error(name: str) -> None:
    loss, error = outcome(name, plain=False)
    plain_loss, plain_error = outcome(name, plain=True)
    assert loss < plain_loss / FURTHER[name]
    assert error < plain_error / 2


def test_a_run_says_what_its_leaps_were_worth(capsys: pytest.CaptureFixture[str]) -> None:
    example("poisson").main(steps=60)
    assert "Linearised leaps took the training loss from" in " ".join(capsys.readouterr().err.replace("│", "").split())


@examples
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60


@examples
def test_the_command_says_loss_and_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--steps", "12", "--plain"])
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr()
    assert re.match(r"loss [0-9.e-]+.* error (of the solution |on new \w+ )?[0-9.e-]+", told.out)
    assert "step 12/12" in " ".join(told.err.split())


def test_points_that_follow_residuals_lower_the_loss_between_them() -> None:
    _, loss, error = example("burgers").main(steps=STEPS["burgers"], adaptive=True)
    plain_loss, plain_error = outcome("burgers", plain=True)
    assert loss < plain_loss / 2
    assert error < plain_error / 2


def derivatives(function: Callable[[torch.Tensor], torch.Tensor], points: torch.Tensor) -> Any:
    """Returns u, its slopes and its second derivatives along the two columns."""
    points = points.double().requires_grad_()
    u = function(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    second = [torch.autograd.grad(slope[:, k].sum(), points, retain_graph=True)[0][:, k] for k in range(2)]
    return u.squeeze(1), slope.unbind(1), second


def test_the_reference_solutions_solve_their_equations() -> None:
    points = torch.rand(50, 2, generator=torch.Generator().manual_seed(1)) * 0.9 + 0.05
    _, _, (of_x, of_y) = derivatives(example("poisson").solution, points)
    assert torch.allclose(of_x + of_y, -5 * torch.pi**2 * example("poisson").solution(points.double()).squeeze(1))

    u, (of_t, of_x), (_, bend) = derivatives(example("burgers").solution, points)
    assert torch.allclose(of_t + u * of_x, 0.01 * bend, atol=1e-6)

    spread, decay = example("inverse").TRUE.double()
    u, (of_t, _), (_, bend) = derivatives(example("inverse").solution, points)
    assert torch.allclose(of_t, spread * bend - decay * u)


def test_noise_in_a_table_is_not_learned_by_heart() -> None:
    _, loss, error = example("table").main(steps=200, noise=0.5)
    noise = (0.5 / 4.9) ** 2
    assert loss > noise / 2
    assert error < 0.1


@pytest.mark.parametrize("page", ["README.md", "docs/science.md"])
def test_the_residuals_of_the_pages_train(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    code = next(block for block in blocks if block.startswith("def residuals"))
    points = torch.rand(40, 2, generator=torch.Generator().manual_seed(1))
    edge = points * torch.tensor([0, 1])
    known: dict[str, Any] = {"torch": torch, "Config": Config, "HybridTrainer": HybridTrainer}
    known |= {"points": points, "other_points": points / 2, "edge": edge, "wanted": torch.sin(edge[:, 1:])}
    known["model"] = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    exec(code.replace("max_steps=2000", "max_steps=60"), known)  # noqa: S102
    assert known["trainer"].global_step == 60
    assert known["trainer"].evaluate([points]) < 0.01
    assert (tmp_path / "runs" / "burgers" / "report.html").exists()


def test_solutions_and_errors_can_be_drawn(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, ROOT / "docs" / "draw_science.py", tmp_path, "12"]).returncode == 0
    for name in ("poisson", "burgers"):
        picture = ET.parse(tmp_path / f"{name}.svg").getroot()  # noqa: S314
        texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert "u after 12 steps, with leaps" in texts
        assert sum("error" in text for text in texts) == 2
        fields = list(picture.iter("{http://www.w3.org/2000/svg}g"))
        assert len(fields) == 3
        assert all(len(list(field)) > 1 for field in fields)
