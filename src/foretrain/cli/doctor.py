"""`foretrain doctor`: what this machine offers, what a run would use, and what stands in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain import environment
from foretrain.engine.precision import choose_device, choose_precision, cpu_has_bf16_products


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report. `level` is "ok", "note" or "problem"."""

    name: str
    text: str
    level: str = "ok"


def examine(folder: str | Path = ".") -> list[DoctorFinding]:
    """Look at everything a run depends on. Nothing is changed."""
    import torch

    device = choose_device("auto")
    facts = environment.describe()
    findings = [
        DoctorFinding(
            "foretrain",
            f"{facts['foretrain']}, Python {facts['python']}, torch {facts['torch']}, {facts['platform']}",
        ),
        _device(device),
        DoctorFinding("precision", f"{choose_precision('auto', device)} (precision.type = 'auto')"),
        _products(device),
        _compile(device),
        _memory(device),
        _threads(torch.get_num_threads()),
        _load(),
        _disk(Path(folder)),
    ]
    return [finding for finding in findings if finding is not None]


def _device(device: Any) -> DoctorFinding:
    import torch

    if device.type == "cuda":
        count = torch.cuda.device_count()
        names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
        return DoctorFinding("device", f"{count} x {names}, CUDA {torch.version.cuda}; runs use {device}")
    if device.type == "mps":
        return DoctorFinding("device", "Apple GPU; runs use it")
    gpu = installed_gpu()
    if gpu:
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU-only build"
        return DoctorFinding(
            "device",
            f"A GPU IS HERE BUT UNUSED: {gpu}. The installed torch {torch.__version__} is {build} and does not see it; "
            "install a CUDA build of torch that fits the driver, and check CUDA_VISIBLE_DEVICES",
            "problem",
        )
    return DoctorFinding("device", f"CPU, {os.cpu_count()} cores; no GPU found")


def installed_gpu() -> str:
    """Return the name of an NVIDIA GPU that the driver reports, whether or not torch can use it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        command = [program, "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 - fixed words
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip().splitlines()[0] if answer.returncode == 0 and answer.stdout.strip() else ""


def _products(device: Any) -> DoctorFinding | None:
    """Return what the CPU makes of bf16, which matters where a run uses the CPU."""
    if device.type != "cpu":
        return None
    if cpu_has_bf16_products():
        return DoctorFinding("bf16", "this CPU multiplies bf16 matrices in hardware; Muon computes in bf16")
    return DoctorFinding(
        "bf16",
        "this CPU has no instructions for bf16 matrix products and would emulate them slowly; Muon computes in fp32, "
        "and precision.type = 'bf16' is slower than 'fp32' here",
    )


def _compile(device: Any) -> DoctorFinding:
    if device.type != "cuda":
        return DoctorFinding("compile", "off on this device (engine.compile = 'auto' compiles long runs on a CUDA GPU)")
    from torch.utils._triton import has_triton

    if has_triton():
        return DoctorFinding(
            "compile",
            "on for runs that are long enough to save more time than compiling takes (engine.compile = 'auto'); "
            "triton works",
        )
    return DoctorFinding(
        "compile",
        "torch.compile needs triton, which does not work here; set engine.compile = false",
        "problem",
    )


def _memory(device: Any) -> DoctorFinding:
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        level = "ok" if free > total / 2 else "note"
        return DoctorFinding("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GB of GPU memory free", level)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return DoctorFinding("memory", f"{pages * size / 2**30:.1f} GB of main memory")


def _threads(threads: int) -> DoctorFinding:
    cores = os.cpu_count() or 1
    if threads < cores // 2:
        return DoctorFinding(
            "threads", f"torch uses {threads} of {cores} cores; unset OMP_NUM_THREADS to use all", "note"
        )
    return DoctorFinding("threads", f"torch uses {threads} thread{'' if threads == 1 else 's'}")


def _load() -> DoctorFinding | None:
    """Return whether other programs want the cores that a run would use. Nothing is said where the system does not
    tell."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
    cores = usable_cores()
    text = f"{load:.1f} programs wanted a core in the last minute, on {cores} core{'' if cores == 1 else 's'}"
    if load < max(1.0, 0.75 * cores):
        return DoctorFinding("load", text)
    return DoctorFinding(
        "load",
        f"{text}: other programs run beside, so a run is slower here, and measured times and speeds mean little",
        "note",
    )


def usable_cores() -> int:
    """Return how many cores this process may use: fewer than the machine has where somebody set a limit."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _disk(folder: Path) -> DoctorFinding:
    free = shutil.disk_usage(folder).free / 2**30
    if not os.access(folder, os.W_OK):
        return DoctorFinding(
            "disk",
            f"the current folder cannot be written; name another with --out ({free:.1f} GB free)",
            "problem",
        )
    return DoctorFinding("disk", f"{free:.1f} GB free for runs", "ok" if free > 2 else "note")
