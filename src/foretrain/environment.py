"""What a result was made with: versions, machine, device. Recorded beside every result."""

from __future__ import annotations

import os
import platform
from importlib import metadata
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
