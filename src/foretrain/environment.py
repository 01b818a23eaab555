"""What a result was made with: versions, machine, device. Recorded beside every result."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

SPIN_COUNT = 2000
"""How often a thread of OpenMP looks for work before it sleeps. Its own default, 300,000, is milliseconds: beside other
programs threads then burn the cores that the others need to finish. None at all costs the time of a wake-up in every
operation. Measured by benchmarks/busy_machine.py."""


def wait_shortly() -> None:
    """Let the threads of OpenMP sleep soon when they wait, unless the user chose how they wait.

    It is read while torch is loaded, so it has an effect only before that.
    """
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    if "torch" not in sys.modules and not any(name in os.environ for name in chosen):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe(device: str | None = None) -> dict[str, Any]:
    """Plain facts, no names of people, machines or folders."""
    import torch

    facts: dict[str, Any] = {
        "foretrain": version("foretrain"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "safetensors": version("safetensors"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if device is not None:
        facts["device"] = device
    if device is not None and device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def commit_of(source: Path | None) -> str | None:
    """Commit of a folder that holds `foretrain`, with `-changed` where files differ; None where git knows nothing."""
    if source is None or not _git(source, "ls-files", "foretrain/__init__.py"):
        return None
    commit = _git(source, "rev-parse", "--short=12", "HEAD")
    return f"{commit}-changed" if commit and _git(source, "status", "--porcelain", "--", "foretrain") else commit


def _git(folder: Path, *words: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    command = [program, "-C", str(folder), *words]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
