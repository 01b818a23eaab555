"""The doctor: what a run would use, and loudly what stands in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.cli import doctor

NVIDIA_SMI = """#!/bin/sh
echo "NVIDIA H200 NVL"
echo "NVIDIA H200 NVL"
"""


@pytest.fixture(autouse=True)
def no_gpu_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a machine without a usable GPU, on any machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def program(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / "nvidia-smi"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search path without nvidia-smi; a test may put one there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def findings() -> dict[str, doctor.DoctorFinding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_a_machine_without_gpu(no_driver: Path) -> None:
    found = findings()
    assert set(found) == {
        "foretrain",
        "device",
        "precision",
        "bf16",
        "compile",
        "memory",
        "threads",
        "load",
        "disk",
    }
    assert found["device"].level == "ok"
    assert "no GPU found" in found["device"].text
    assert found["precision"].text.startswith("fp32")
    assert torch.__version__ in found["foretrain"].text
    assert not any(finding.level == "problem" for finding in found.values())


def test_a_gpu_that_is_there_but_unused_is_said_loudly(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(no_driver, NVIDIA_SMI.replace("#!/bin/sh", "#!/bin/sh\n# a driver's own tool"))
    monkeypatch.setenv("PATH", f"{no_driver}:/bin:/usr/bin")
    device = findings()["device"]
    assert device.level == "problem"
    assert "A GPU IS HERE BUT UNUSED: NVIDIA H200 NVL" in device.text
    assert "a CPU-only build" in device.text
    assert "CUDA_VISIBLE_DEVICES" in device.text


def test_a_cuda_build_that_does_not_see_the_gpu(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(no_driver, NVIDIA_SMI)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "built for CUDA 13.0" in findings()["device"].text


@pytest.mark.parametrize(
    "text",
    ["#!/bin/sh\nexit 9\n", "#!/bin/sh\necho 'No devices were found'\nexit 6\n", "#!/bin/sh\n", "not a program"],
)
def test_a_driver_tool_that_finds_nothing_is_no_gpu(text: str, no_driver: Path) -> None:
    program(no_driver, text)
    assert doctor.installed_gpu() == ""
    assert findings()["device"].level == "ok"


def test_the_command_exits_with_1_and_prints_it(tmp_path: Path) -> None:
    program(tmp_path / "bin", NVIDIA_SMI)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",  # a machine with a GPU must not see it either
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # as a CPU without bf16 instructions
    }
    command = [sys.executable, "-m", "foretrain.cli.app", "doctor"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 1, answer.stderr
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("!!!")]
    assert "A GPU IS HERE BUT UNUSED" in line
    answer = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True)
    assert answer.returncode == 1
    levels = {finding["name"]: finding["level"] for finding in json.loads(answer.stdout)}
    assert levels["device"] == "problem"
    (products,) = [finding for finding in json.loads(answer.stdout) if finding["name"] == "bf16"]
    assert "Muon computes in fp32" in products["text"]


def test_a_folder_that_cannot_be_written_is_a_problem(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    disk = findings()["disk"]
    assert disk.level == "problem"
    assert "cannot be written" in disk.text


@pytest.mark.parametrize(("free_gigabytes", "level"), [(100, "ok"), (1, "note")])
def test_little_room_is_a_note(
    free_gigabytes: int, level: str, no_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = free_gigabytes * 2**30

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage)
    assert findings()["disk"].level == level


@pytest.mark.parametrize(("threads", "level"), [(1, "note"), (16, "ok")])
def test_idle_cores_are_a_note(threads: int, level: str, no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert findings()["threads"].level == level


@pytest.mark.parametrize(
    ("in_hardware", "words"), [(True, "in hardware; Muon computes in bf16"), (False, "emulate them slowly; Muon")]
)
def test_what_the_cpu_can_do_with_bf16(
    in_hardware: bool, words: str, no_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cpu_has_bf16_products", lambda: in_hardware)
    assert words in findings()["bf16"].text


@pytest.mark.parametrize(("load", "level"), [(0.3, "ok"), (2.9, "ok"), (3.1, "note"), (40.0, "note")])
def test_a_busy_machine_is_a_note(load: float, level: str, no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    found = findings()["load"]
    assert found.level == level
    assert found.text.startswith(f"{load:.1f} programs wanted a core in the last minute, on 4 cores")
    assert ("a run is slower here" in found.text) == (level == "note")


def test_a_system_that_tells_no_load_is_no_problem(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_load() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", no_load)
    assert "load" not in findings()


@pytest.mark.parametrize(("threads", "words"), [(1, "torch uses 1 thread"), (2, "torch uses 2 threads")])
def test_threads_are_counted_in_good_english(
    threads: int, words: str, no_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(threads)))
    monkeypatch.setattr(os, "cpu_count", lambda: threads)
    assert findings()["threads"].text == words


def test_with_a_gpu_that_works(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: "NVIDIA H200",
        "is_bf16_supported": lambda: True,
        "mem_get_info": lambda device: (100 * 2**30, 140 * 2**30),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    found = findings()
    assert "2 x NVIDIA H200, CUDA 13.0" in found["device"].text
    assert found["precision"].text.startswith("bf16")
    assert found["memory"].text.startswith("100.0 of 140.0 GB")
    assert found["compile"].level == "problem"
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    assert findings()["compile"].level == "ok"
