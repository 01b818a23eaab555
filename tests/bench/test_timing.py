"""Running benchmarks: the timing loop on a made-up clock, the order of processes, and what is recorded."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import foretrain
from foretrain import environment
from foretrain.errors import ForetrainError, InputError
from foretrain_bench import timing, worker
from foretrain_bench.hotpaths import BENCHMARKS, HORIZONS, PREDICTORS


class Device:
    """A clock that only moves when the device works, and the device works only while it is waited for."""

    def __init__(self, seconds_per_call: float) -> None:
        self.cost = seconds_per_call
        self.now = 0.0
        self.waiting = 0.0
        self.calls = 0
        self.collecting: set[bool] = set()

    def call(self) -> None:
        self.calls += 1
        self.waiting += self.cost
        self.collecting.add(gc.isenabled())

    def synchronise(self) -> None:
        self.now += self.waiting
        self.waiting = 0.0

    def clock(self) -> float:
        return self.now


class TestMeasure:
    @pytest.mark.parametrize("cost", [2e-7, 1e-5, 3e-3, 0.4])
    def test_work_that_is_still_under_way_counts(self, cost: float) -> None:
        device = Device(cost)
        samples, loops = worker.measure(device.call, device.synchronise, device.clock)
        assert samples == pytest.approx([cost] * len(samples))
        assert loops * cost >= worker.SHORTEST * 0.999
        assert loops == 1 or loops * cost < 20 * worker.SHORTEST
        assert worker.FEWEST_TIMINGS <= len(samples) <= worker.SAMPLES

    def test_slow_calls_have_few_samples(self) -> None:
        assert len(worker.measure(*_parts(Device(2.0)))[0]) == worker.FEWEST_TIMINGS
        assert len(worker.measure(*_parts(Device(1e-5)))[0]) == worker.SAMPLES

    def test_warm_up_does_not_count(self) -> None:
        device = Device(1e-3)
        slow_at_first = [5.0, 3.0]

        def call() -> None:
            device.waiting += slow_at_first.pop(0) if slow_at_first else 0.0
            device.call()

        samples, _ = worker.measure(call, device.synchronise, device.clock)
        assert max(samples) == pytest.approx(1e-3)

    def test_garbage_is_collected_outside(self) -> None:
        device = Device(1e-3)
        worker.measure(*_parts(device))
        assert False in device.collecting
        assert gc.isenabled()

    def test_a_call_that_takes_no_time_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker, "MOST_LOOPS", 100)
        device = Device(0.0)
        ticks = iter(range(10**9))
        samples, loops = worker.measure(device.call, device.synchronise, lambda: next(ticks) * 1e-4)
        assert loops == 100
        assert samples == pytest.approx([1e-6] * len(samples))

    def test_stretches(self) -> None:
        assert worker.stretches([1.0, 2.0]) == [1.0, 2.0]
        spiky = [1.0, 9.0, 1.0] * 100
        assert worker.stretches(spiky) == [1.0] * worker.SAMPLES


def _parts(device: Device) -> tuple[Any, Any, Any]:
    return device.call, device.synchronise, device.clock


class TestHotPaths:
    def test_every_hot_path_is_there(self) -> None:
        for kind in PREDICTORS:
            for horizon in HORIZONS:
                assert f"forecast {kind} {horizon}" in BENCHMARKS
        parts = ("observe", "state", "displacement", "confidence", "history", "full step", "look-ahead", "muon")
        for part in (*parts, "probe", "snapshot"):
            assert any(part in name for name in BENCHMARKS), part

    @pytest.mark.parametrize("name", list(BENCHMARKS))
    def test_can_be_called_again_and_again(self, name: str) -> None:
        call = BENCHMARKS[name].setup("cpu")
        for _ in range(3):
            call()

    def test_weights_do_not_fade_into_denormal_numbers(self) -> None:
        from foretrain_bench.hotpaths import _trajectory

        trajectory, call = _trajectory("cpu")
        for _ in range(200):
            call()
        assert float(trajectory.basis.abs().mean()) > 1e-6


class TestChoose:
    def test_all(self) -> None:
        assert timing.choose(None) == tuple(BENCHMARKS)

    def test_text_pattern_and_several(self) -> None:
        assert timing.choose("muon") == ("muon step",)
        assert timing.choose("forecast linear *") == tuple(f"forecast linear {h}" for h in HORIZONS)
        assert set(timing.choose("muon, probe")) == {"muon step", "probe"}

    def test_nothing(self) -> None:
        with pytest.raises(InputError, match="muon step"):
            timing.choose("no such thing")


class TestOther:
    def test_checkout_and_source_folder(self, tmp_path: Path) -> None:
        package = tmp_path / "old" / "src" / "foretrain"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        for path in (tmp_path / "old", tmp_path / "old" / "src"):
            assert timing.other_version(path).source == tmp_path / "old" / "src"

    def test_python(self) -> None:
        version = timing.other_version(Path(sys.executable))
        assert (version.source, version.label) == (None, Path(sys.executable).name)

    def test_neither(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="git worktree"):
            timing.other_version(tmp_path)


def fake_process(samples: list[float]) -> dict[str, Any]:
    return {"samples": samples, "loops": 1, "load": [0.5, 1.5], "clock_mhz": None}


class TestRun:
    def versions(self) -> list[timing.Version]:
        return [timing.Version("old", "python", None), timing.this_version()]

    def test_interleaved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[tuple[str, str]] = []

        def time(version: timing.Version, names: list[str], plan: timing.TimingPlan) -> dict[str, Any]:
            order.append((version.label, names[0]))
            return {"benchmarks": {name: fake_process([1.0]) for name in names}, "environment": {"x": 1}}

        monkeypatch.setattr(timing, "_time", time)
        said: list[tuple[int, int]] = []
        plan = timing.TimingPlan(("probe", "muon step"), 4)
        measured = timing.run(plan, self.versions(), lambda done, total, what: said.append((done, total)))
        assert [label for label, name in order if name == "probe"] == ["old", "this", "this", "old"] * 2
        assert [len(one.processes["probe"]) for one in measured] == [4, 4]
        assert said[0] == (0, 16)
        assert said[-1] == (16, 16)
        assert measured[0].environment == {"x": 1}

    def test_also_one_that_was_timed_before(self) -> None:
        """Its other processes would be a chosen few."""
        measured = timing.TimedVersion(timing.this_version())
        for process in (fake_process([1.0]), {"error": "broken"}, fake_process([2.0])):
            timing._take(measured, ["probe"], {"benchmarks": {"probe": process}})
        assert measured.processes == {}
        assert measured.failures == {"probe": "broken"}

    def test_a_failure_leaves_the_benchmark_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timed_names: list[list[str]] = []

        def time(version: timing.Version, names: list[str], plan: timing.TimingPlan) -> dict[str, Any]:
            timed_names.append(names)
            bad = version.label == "old"
            timed = {
                name: {"error": "no such thing"} if bad and name == "probe" else fake_process([1.0]) for name in names
            }
            return {"benchmarks": timed}

        monkeypatch.setattr(timing, "_time", time)
        old, this = timing.run(timing.TimingPlan(("probe", "snapshot"), 2), self.versions(), lambda *_: None)
        assert set(old.processes) == {"snapshot"}
        assert old.failures == {"probe": "no such thing"}
        assert len(this.processes["snapshot"]) == 2
        assert timed_names == [["probe", "snapshot"], ["snapshot"], ["snapshot"], ["snapshot"]]

    def test_nothing_left_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[int] = []
        monkeypatch.setattr(timing, "_time", lambda version, names, plan: timing._failed(names, "broken"))
        with pytest.raises(ForetrainError, match="broken"):
            timing.run(timing.TimingPlan(("probe",), 5), self.versions(), lambda done, total, what: said.append(done))
        assert said == [0]  # at once, not after all rounds

    def test_a_process_of_its_own(self) -> None:
        result = timing._time(
            timing.this_version(), ["confidence estimate"], timing.TimingPlan(("confidence estimate",), 1)
        )
        process = result["benchmarks"]["confidence estimate"]
        assert all(sample > 0 for sample in process["samples"])
        assert process["loops"] > 1
        assert result["environment"]["torch_threads"] == 1
        assert result["environment"]["device"] == "cpu"

    def test_the_other_version_is_what_is_timed(self, tmp_path: Path) -> None:
        source = tmp_path / "src" / "foretrain"
        shutil.copytree(
            Path(foretrain.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__", "measure")
        )
        (source / "motion" / "confidence.py").write_text("raise ImportError('an old one')\n", encoding="utf-8")
        names = ["confidence estimate", "state encode"]
        timed = timing._time(timing.other_version(tmp_path), names, timing.TimingPlan(tuple(names), 1))["benchmarks"]
        assert "an old one" in timed["confidence estimate"]["error"]
        assert timed["state encode"]["samples"]

    def test_a_python_without_foretrain(self, tmp_path: Path) -> None:
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n", encoding="utf-8")
        broken.chmod(0o755)
        timed = timing._time(timing.other_version(broken), ["probe"], timing.TimingPlan(("probe",), 1))
        assert timed["benchmarks"]["probe"]["error"] == "No module named torch"


class TestRecord:
    def test_what_may_have_disturbed(self) -> None:
        processes = [fake_process([1.0] * 9 + [5.0]), *(fake_process([m] * 4) for m in (1.0, 1.1, 1.2))]
        summary = timing.summary(processes)
        assert summary["process_medians"] == [1.0, 1.0, 1.1, 1.2]
        assert summary["median"] == 1.05
        assert summary["outlier_share"] == 0.025
        assert summary["drift_percent"] == pytest.approx(15.0)
        assert summary["load"] == 1.5

    def test_drift_needs_four(self) -> None:
        assert timing.drift_percent([1.0, 2.0, 3.0]) is None

    def test_no_names_of_folders_or_people(self) -> None:
        measured = timing.TimedVersion(timing.this_version(), {"probe": [fake_process([1.0])]})
        text = json.dumps(timing.record(measured, timing.TimingPlan(("probe",), 1), "foretrain bench run"))
        assert str(Path.cwd()) not in text
        assert str(Path(foretrain.__file__).parent) not in text
        assert os.sep + "home" not in text

    def test_commit(self, tmp_path: Path) -> None:
        source = tmp_path / "src"
        (source / "foretrain").mkdir(parents=True)
        (source / "foretrain" / "__init__.py").write_text("x = 1\n", encoding="utf-8")
        assert environment.commit_of(source) is None
        assert environment.commit_of(None) is None
        git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run([*git, "init", "-q"], check=True)
        assert environment.commit_of(source) is None  # git does not know the file
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "one"], check=True)
        commit = environment.commit_of(source)
        assert commit is not None
        assert len(commit) == 12
        (source / "foretrain" / "__init__.py").write_text("x = 2\n", encoding="utf-8")
        assert environment.commit_of(source) == f"{commit}-changed"
