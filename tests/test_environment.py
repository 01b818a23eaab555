"""What is recorded beside a result, and what is not."""

from __future__ import annotations

import platform
from importlib import metadata

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
