"""What a result was made with: versions, machine, device. Recorded beside every result."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


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
