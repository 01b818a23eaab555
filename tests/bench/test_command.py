"""`foretrain bench` as a user types it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import foretrain
from foretrain.cli import app as cli
from foretrain_bench import tables

TIGHT = [1.0, 1.002, 0.998, 1.001, 0.999]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """B: one benchmark 30 % slower, one the same, one faster, one only there."""
    a = {"slow": TIGHT, "same": TIGHT, "fast": TIGHT, "gone": TIGHT}
    b = {"slow": [1.3 * t for t in TIGHT], "same": TIGHT[::-1], "fast": [0.7 * t for t in TIGHT], "new": TIGHT}
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, content in zip(paths, (a, b), strict=True):
        path.write_text(json.dumps(content), encoding="utf-8")
    return paths


class TestCompare:
    def test_table_and_exit_code(self, run: Run, files: tuple[Path, Path]) -> None:
        code, out, err = run("compare", *files)
        assert code == 1
        rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
        assert "regressed" in rows["slow"]
        assert "+30.0 %" in rows["slow"]
        assert "equivalent" in rows["same"]
        assert "improved" in rows["fast"]
        assert "only in a.json, not compared: gone" in err
        assert "only in b.json, not compared: new" in err
        assert "interleaved" in err

    def test_json(self, run: Run, files: tuple[Path, Path]) -> None:
        code, out, _ = run("compare", *files, "--json")
        verdicts = json.loads(out)
        assert code == 1
        assert set(verdicts) == {"slow", "same", "fast"}
        assert set(verdicts["slow"]) == {"verdict", "ratio", "low", "high", "runs_needed"}
        assert verdicts["slow"]["verdict"] == "regressed"
        assert verdicts["slow"]["ratio"] == pytest.approx(1.3)
        assert 1.29 < verdicts["slow"]["low"] < 1.3 < verdicts["slow"]["high"] < 1.31
        assert verdicts["same"]["runs_needed"] is None

    def test_nothing_regressed(self, run: Run, files: tuple[Path, Path]) -> None:
        assert run("compare", files[0], files[0])[0] == 0
        assert run("compare", *files, "--delta", "0.5")[0] == 0

    def test_few_processes(self, run: Run, tmp_path: Path) -> None:
        path = tmp_path / "few.json"
        path.write_text('{"a": [1.0, 1.1]}', encoding="utf-8")
        code, out, err = run("compare", path, path)
        assert code == 0
        assert "inconclusive" in out
        assert "fewer than 5 processes" in err

    @pytest.mark.parametrize("delta", ["0", "-1", "1.5", "nan"])
    def test_bad_delta(self, run: Run, files: tuple[Path, Path], delta: str) -> None:
        code, _, err = run("compare", *files, "--delta", delta)
        assert (code, "--delta" in err) == (2, True)

    def test_bad_files(self, run: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
        bad, other = tmp_path / "bad.json", tmp_path / "other.json"
        bad.write_text("{", encoding="utf-8")
        other.write_text('{"x": [1.0]}', encoding="utf-8")
        for second, words in ((bad, "not valid JSON"), (other, "in common"), (tmp_path / "none", "no such file")):
            code, out, err = run("compare", files[0], second)
            assert (code, out) == (2, "")
            assert words in err
            assert "Traceback" not in err

    def test_units_must_agree(self, run: Run, tmp_path: Path) -> None:
        plain, text = tmp_path / "a.json", tmp_path / "b.txt"
        plain.write_text('{"x": [1.0]}', encoding="utf-8")
        text.write_text("x   time:   [1.0 ms 1.5 ms 2.0 ms]\n", encoding="utf-8")
        code, _, err = run("compare", plain, text)
        assert (code, "no unit" in err) == (2, True)

    def test_criterion_has_units(self, run: Run, tmp_path: Path) -> None:
        text = tmp_path / "b.txt"
        text.write_text("x   time:   [1.0 ms 1.5 ms 2.0 ms]\n" * 5, encoding="utf-8")
        code, out, _ = run("compare", text, text)
        assert code == 0
        assert "1.5 ms" in out
        assert "equivalent" in out


class TestHistory:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for day in range(1, 9):
            median = (1.0 if day < 5 else 1.5) + 0.001 * day
            (tmp_path / f"2026-01-0{day}.json").write_text(json.dumps({"a": [median], "b": [2.0]}), encoding="utf-8")
        return tmp_path

    def test_table(self, run: Run, folder: Path) -> None:
        code, out, _ = run("history", folder)
        assert code == 0
        rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
        assert "between 2026-01-04.json and 2026-01-05.json" in rows["a"]
        assert "+50.3 %" in rows["a"]
        assert "▁▁▁▁████" in rows["a"]
        assert "none" in rows["b"]

    def test_json(self, run: Run, folder: Path) -> None:
        found = json.loads(run("history", *sorted(folder.iterdir()), "--json")[1])
        [step] = found["a"]["steps"]
        assert (step["before"], step["after"]) == ("2026-01-04.json", "2026-01-05.json")
        assert step["ratio"] == pytest.approx(1.5, abs=0.01)
        assert found["b"]["steps"] == []

    def test_too_few(self, run: Run, folder: Path) -> None:
        assert run("history", folder / "2026-01-01.json")[0] == 2
        assert run("history")[0] == 2
        code, _, err = run("history", folder / "2026-01-01.json", folder / "2026-01-02.json")
        assert (code, "fewer than four" in err) == (0, True)


class TestRun:
    def test_file_and_table(self, run: Run, tmp_path: Path) -> None:
        out_file = tmp_path / "new" / "now.json"
        code, out, err = run("run", "--only", "confidence estimate", "--processes", 2, "--out", out_file)
        assert code == 0, err
        assert "confidence estimate" in out
        assert any(unit in out for unit in (" ns ", " us ", " ms "))
        assert "process 2/2" in err
        record = json.loads(out_file.read_text(encoding="utf-8"))
        benchmark = record["benchmarks"]["confidence estimate"]
        assert len(benchmark["processes"]) == 2
        assert {"outlier_share", "drift_percent", "load"} <= set(benchmark)
        assert record["command"].startswith("foretrain bench run --only 'confidence estimate' --processes 2")
        assert record["environment"]["torch"]
        assert str(tmp_path) not in out_file.read_text(encoding="utf-8")
        assert run("compare", out_file, out_file)[0] == 0

    def test_quiet_is_one_line(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        measured = SimpleNamespace(failures={})
        monkeypatch.setattr("foretrain_bench.timing.run", lambda plan, versions, progress: [measured, measured])
        monkeypatch.setattr("foretrain_bench.timing.record", lambda *_: {})
        monkeypatch.setattr("foretrain_bench.command._write", lambda *_: None)
        (tmp_path / "old" / "foretrain").mkdir(parents=True)
        (tmp_path / "old" / "foretrain" / "__init__.py").touch()
        for name, factor in (("x.json", 1.3), ("x-against.json", 1.0)):
            times = {"slow": [factor * time for time in TIGHT], "same": TIGHT}
            (tmp_path / name).write_text(json.dumps(times), encoding="utf-8")
        code, out, err = run("run", "--out", tmp_path / "x.json", "--against", tmp_path / "old", "--quiet")
        assert (code, err) == (1, "")
        files = f"{tmp_path / 'x-against.json'} and {tmp_path / 'x.json'}"
        assert out == f"1 of 2 benchmarks regressed: slow; wrote {files}\n"

    @pytest.mark.parametrize(("level", "lines"), [("quiet", 0), ("normal", 21), ("verbose", 101)])
    def test_progress(self, level: Any, lines: int) -> None:
        for terminal in (False, True):
            text = io.StringIO()
            console = Console(file=text, force_terminal=terminal, width=120, color_system=None)
            with tables.TimingProgress(console, level) as progress:
                for done in range(101):
                    progress(done, 100, "step")
            said = re.findall(r"process \d+/100 \| step", text.getvalue())
            assert len(said) == (0 if terminal and level == "normal" else lines)
            assert ("\x1b" in text.getvalue()) is (terminal and level != "quiet")

    def test_against(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "old").mkdir()
        (tmp_path / "old" / "foretrain").symlink_to(Path(foretrain.__file__).parent)
        arguments = ("--only", "confidence estimate", "--processes", 1, "--out", tmp_path / "x.json", "--json")
        code, out, err = run("run", *arguments, "--against", tmp_path / "old")
        assert code == 0, err
        assert json.loads(out)["confidence estimate"]["verdict"] == "inconclusive"
        mine, other = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("x.json", "x-against.json"))
        assert (mine["version"], other["version"]) == ("this", "old")
        assert mine["together"] == other["together"] is not None
        assert "not measured interleaved" not in err
        assert str(tmp_path) not in json.dumps([mine, other])

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--only", "nothing like it"), "no benchmark has such a name"),
            (("--processes", "0"), "at least 1"),
            (("--device", "abacus"), "--device abacus"),
            (("--against", "nowhere"), "--against nowhere"),
        ],
    )
    def test_bad_arguments(self, run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
        code, _, err = run("run", *arguments, "--out", tmp_path / "x.json")
        assert (code, words in err) == (2, True), err
        assert not (tmp_path / "x.json").exists()

    def test_folder_as_file(self, run: Run, tmp_path: Path) -> None:
        code, _, err = run("run", "--out", tmp_path)
        assert (code, "this is a folder" in err) == (2, True)


def test_help_needs_no_heavy_imports() -> None:
    program = (
        "import sys\nfrom foretrain.cli.app import main\n"
        "try:\n    main(['bench', 'run', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'scipy', 'numpy') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"
