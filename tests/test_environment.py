"""What is recorded beside a result, and what is not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from foretrain import environment


def test_versions_and_machine_are_recorded_and_no_names_of_people_machines_or_folders() -> None:
    facts = environment.describe("cpu")
    assert facts == {
        "foretrain": metadata.version("foretrain"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "safetensors": metadata.version("safetensors"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_cores": facts["cpu_cores"],
        "torch_threads": torch.get_num_threads(),
        "device": "cpu",
    }
    assert facts["cpu_cores"] >= 1
    assert "device" not in environment.describe()


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert environment.version("no-such-package-at-all") is None


# --- how threads wait ----------------------------------------------------------------------------------------------

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("nothing_chosen")
def test_threads_sleep_soon_if_that_is_said_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # given back after the test, whatever it becomes
    monkeypatch.delenv("GOMP_SPINCOUNT")
    environment.wait_shortly()
    assert "GOMP_SPINCOUNT" not in os.environ  # torch is loaded: too late
    monkeypatch.delitem(sys.modules, "torch")
    environment.wait_shortly()
    assert os.environ["GOMP_SPINCOUNT"] == str(environment.SPIN_COUNT)


@pytest.mark.usefixtures("nothing_chosen")
@pytest.mark.parametrize("name", WAITING)
def test_what_the_user_chose_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "active")
    monkeypatch.delitem(sys.modules, "torch")
    environment.wait_shortly()
    assert {other: os.environ.get(other) for other in WAITING} == {
        other: "active" if other == name else None for other in WAITING
    }


@pytest.mark.usefixtures("nothing_chosen")
def test_the_command_line_says_it_to_the_library_that_torch_brings_along() -> None:
    """OpenMP prints what it was told while it is loaded."""
    code = (
        "import sys; sys.argv[1:] = ['config', 'check', 'none.toml']; import foretrain.cli.app as cli\n"
        "try: cli.main()\nexcept SystemExit: import torch"
    )
    told = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    answer = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True)
    if sys.platform == "linux":  # torch brings another OpenMP elsewhere
        assert f"GOMP_SPINCOUNT = '{environment.SPIN_COUNT}'" in answer.stderr


def test_make_sets_what_the_command_line_sets() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    assert f"export GOMP_SPINCOUNT := {environment.SPIN_COUNT}\n" in makefile
