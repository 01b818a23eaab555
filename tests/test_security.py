"""Nothing that is read is ever executed: no unsafe call in the sources, and hostile files are refused, not run."""

from __future__ import annotations

import ast
import json
import os
import pickle  # noqa: TID251 - to attack with
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foretrain
from foretrain import HybridTrainer, config
from foretrain.cli.app import main
from foretrain.errors import CheckpointError
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.recipes import train as run

SOURCES = sorted(Path(foretrain.__file__).parent.rglob("*.py"))
PROJECT = Path(__file__).parents[1]

# --- the sources -----------------------------------------------------------------------------------------------------

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "pty"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "breakpoint"),
    *("os.system", "os.popen", "os.execv", "os.spawnl", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.export.load"),
    *("torch.distributed.checkpoint.load", "dcp.load", "yaml.load", "runpy.run_path", "code.interact"),
}
KEYWORDS = {"trust_remote_code", "shell"}


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def real_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: `from torch import load as l` makes `l` stand for `torch.load`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def unsafe(source: str) -> Iterator[str]:
    """Every unsafe construct, as "line: what"."""
    tree = ast.parse(source)
    names = real_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module] if node.module and node.module.partition(".")[0] in MODULES else []
        elif isinstance(node, ast.Call):
            first, _, rest = name_of(node.func).partition(".")
            called = ".".join(part for part in (names.get(first, first), rest) if part)
            found = [called] if called in CALLS else []
            given = {word.arg: word.value for word in node.keywords}
            found += [f"{word}=" for word in KEYWORDS & given.keys()]
            pickles = given.get("allow_pickle")
            refused = isinstance(pickles, ast.Constant) and pickles.value is False
            if (called in ("np.load", "numpy.load") or "allow_pickle" in given) and not refused:
                found.append("numpy.load without allow_pickle=False")
        else:
            continue
        yield from (f"{node.lineno}: {what}" for what in found)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_the_sources_hold_nothing_unsafe(path: Path) -> None:
    assert list(unsafe(path.read_text(encoding="utf-8"))) == []


VIOLATIONS = {
    "import pickle": "TID251",
    "from marshal import loads": "TID251",
    "import shelve": "TID251",
    "import dill": "TID251",
    "import pickle\npickle.loads(b'')": "S301",
    "import torch\ntorch.load('x')": "TID251",
    "from torch import load\nload('x')": "TID251",
    "import torch\ntorch.load('x', weights_only=False)": "TID251",
    "eval('1')": "S307",
    "exec('1')": "S102",
    "compile('1', '', 'exec')": "",
    "import os\nos.system('ls')": "S605",
    "import subprocess\nsubprocess.run('ls', shell=True)": "S602",
    "import subprocess\nsubprocess.run('ls', shell=unknown)": "",
    "import yaml\nyaml.load('x')": "S506",
    "import numpy as np\nnp.load('x')": "",
    "import numpy\nnumpy.load('x', allow_pickle=True)": "",
    "from numpy import load as read\nread('x')": "",
    "f(trust_remote_code=True)": "",
}


@pytest.mark.parametrize("source", VIOLATIONS)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(unsafe(source))


def test_the_search_lets_pass_what_is_safe() -> None:
    assert not list(unsafe("import numpy as np\nimport json, re\nnp.load('x', allow_pickle=False)\nre.compile('x')"))
    assert not list(unsafe("from foretrain.config import load\nload('x')\nmodel.eval()\ntorch.compile(model)"))


def test_ruff_finds_planted_violations_with_the_projects_settings(tmp_path: Path) -> None:
    """As if they stood in src/: the rules are on there, and nothing switches them off."""
    caught = {source: code for source, code in VIOLATIONS.items() if code}
    for number, source in enumerate(caught):
        (tmp_path / "src" / "foretrain").mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / "foretrain" / f"planted_{number:02d}.py").write_text(source + "\n")
    (tmp_path / "pyproject.toml").write_text((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "json", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    findings = {(Path(entry["filename"]).name, entry["code"]) for entry in json.loads(done.stdout)}
    for number, (source, code) in enumerate(caught.items()):
        assert (f"planted_{number:02d}.py", code) in findings, source


def test_no_line_of_the_sources_silences_a_security_rule() -> None:
    """Except S603, which also complains about a command of fixed words."""
    for path in SOURCES:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert set(re.findall(r"\bS\d{3}\b", line)) <= {"S603"}, f"{path.name}: {line}"
            assert not re.search(r"noqa(?!:)|ruff: noqa", line), f"{path.name}: {line}"


# --- hostile files ---------------------------------------------------------------------------------------------------


class Payload:
    """Whoever unpickles it leaves a marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """The same attack in several wrappings. No test may end with the marker there."""
    marker = tmp_path / "marker"
    pickled = pickle.dumps(Payload(marker))
    pickle.loads(pickled)  # noqa: S301 - it works
    assert marker.is_dir()
    marker.rmdir()
    torch.save(Payload(marker), tmp_path / "payload.pt")
    np.save(tmp_path / "payload.npy", np.array([Payload(marker)] * 100, dtype=object), allow_pickle=True)
    wrappings = {
        "pickle": pickled,
        "old pickle": pickle.dumps(Payload(marker), protocol=0),
        "torch": (tmp_path / "payload.pt").read_bytes(),
        "numpy": (tmp_path / "payload.npy").read_bytes(),
        "python": f"__import__('os').mkdir({str(marker)!r})".encode(),
    }
    yield wrappings
    assert not marker.exists(), "the payload was executed"


WRAPPINGS = ["pickle", "old pickle", "torch", "numpy", "python"]
TINY = {
    "max_steps": 3,
    "batch_size": 2,
    "device": "cpu",
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 16,
    "model.context": 16,
    "checkpoint.interval": 1,
    "checkpoint.keep": 9,
}
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with checkpoints of steps 1, 2 and 3, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat " * 100)
    changed = config.from_mapping({**TINY, "data.path": "text.txt", "data.cache": "cache"})
    run.train(changed, "run", progress=False)
    return tmp_path / "run"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def foretrain_command(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return int(end.value.code or 0), capsys.readouterr().err

    return foretrain_command


FILES = ["model.safetensors", "optimizer.safetensors", "random.safetensors", "precision.safetensors"]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", [*FILES, "state.json", "manifest.json"])
@pytest.mark.parametrize("forged", [False, True], ids=["", "with a true checksum"])
def test_a_payload_in_a_checkpoint(
    forged: bool, name: str, wrapping: str, hostile: dict[str, bytes], finished: Path, call: Call
) -> None:
    folder = finished / "checkpoints" / "step-00000003"
    (folder / name).write_bytes(hostile[wrapping])
    if forged and name != "manifest.json":
        manifest = json.loads((folder / "manifest.json").read_text())
        size, digest = (folder / name).stat().st_size, checkpoint.digest(folder / name)
        manifest["files"][name] = {"size": size, "sha256": digest}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    code, printed = call("export", str(folder), "exported")
    assert (code, printed.count("\n")) == (2, 1)
    assert "step-00000003" in printed
    code, printed = call("train", "--out", "run", "--resume")
    assert code == 0
    assert "bad-step-00000003" in printed
    assert "resumed from step 2" in printed


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_payload_in_every_checkpoint(wrapping: str, hostile: dict[str, bytes], finished: Path, call: Call) -> None:
    for folder in (finished / "checkpoints").iterdir():
        (folder / "model.safetensors").write_bytes(hostile[wrapping])
    code, printed = call("train", "--out", "run", "--resume", "--quiet")
    assert (code, printed.count("\n")) == (2, 1)
    assert "no checkpoint can be used" in printed


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("tokenizer.json", "data.tokenizer=evil/tokenizer.json"),
        ("model.safetensors", "model.weights=evil"),
        ("tokens.npy", "data.path=evil/tokens.npy"),
        ("data.jsonl", "data.path=evil/data.jsonl"),
        ("data.parquet", "data.path=evil/data.parquet"),
        ("data.txt.gz", "data.path=evil/data.txt.gz"),
        ("encoder.json", "data.tokenizer=gpt2"),
    ],
)
def test_a_payload_in_what_a_run_begins_with(
    name: str, setting: str, wrapping: str, hostile: dict[str, bytes], finished: Path, call: Call
) -> None:
    Path("evil").mkdir()
    (Path("evil") / name).write_bytes(hostile[wrapping])
    (Path("evil") / "vocab.bpe").write_bytes(hostile[wrapping])
    changes: dict[str, Any] = {**TINY, "data.path": "text.txt", "data.cache": "cache", "model.vocab_size": 300}
    changes |= {"data.vocabulary": "evil", **dict([setting.split("=")])}
    arguments = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    code, printed = call("train", "--out", "new", "--quiet", *arguments)
    assert (code, printed.count("\n")) == (2, 1)
    assert "evil" in printed
    assert not Path("new").exists()


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_payload_in_a_configuration(wrapping: str, hostile: dict[str, bytes], finished: Path, call: Call) -> None:
    (finished / "config.toml").write_bytes(hostile[wrapping])
    code, printed = call("train", "--out", "run", "--resume", "--quiet")
    assert (code, printed.count("\n")) == (2, 1)
    assert "run/config.toml: not valid TOML" in printed


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "tokenizer.json", "summary.json", ".lock"])
def test_a_payload_in_a_file_of_the_run_is_not_even_read(
    name: str, wrapping: str, hostile: dict[str, bytes], finished: Path, call: Call
) -> None:
    (finished / name).write_bytes(hostile[wrapping])
    assert call("train", "--out", "run", "--resume")[0] == 0


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_payload_in_the_token_cache(wrapping: str, hostile: dict[str, bytes], finished: Path, call: Call) -> None:
    for name in ("meta.json", "tokenizer.json"):
        (path,) = Path("cache").glob(f"*/{name}")
        path.write_bytes(hostile[wrapping])
        code, printed = call("train", "--out", "run", "--resume")
        assert code == 0
        assert "the token cache is damaged" in printed
        assert path.read_bytes() != hostile[wrapping]


def test_a_checkpoint_cannot_set_other_attributes_of_the_trainer(finished: Path) -> None:
    state = checkpoint.read(finished / "checkpoints" / "step-00000003")
    state["progress"] |= {"bus": "gone", "__class__": "other", "evaluate": None}
    trainer = HybridTrainer(run.build_model(config.load("run/config.toml").config), config=config.from_mapping(TINY))
    bus = trainer.bus
    with pytest.raises(CheckpointError, match=r"RunProgress\.bus is not known here"):
        trainer.load_state_dict(state)
    assert trainer.bus is bus
    assert callable(trainer.evaluate)
    for name in ("bus", "__class__", "evaluate"):
        del state["progress"][name]
    trainer.load_state_dict(state)
    assert trainer.global_step == 3


def test_a_checkpoint_cannot_write_elsewhere(finished: Path, call: Call) -> None:
    """Not through links either: a step folder that leads elsewhere is put aside, its target is never touched."""
    precious = CheckpointStore("precious").save(1, {"a": torch.ones(1)})
    before = sorted(path.read_bytes() for path in precious.iterdir())
    link = finished / "checkpoints" / "step-00000009"
    link.symlink_to(precious)
    (finished / "checkpoints" / ".tmp-step-00000004").symlink_to(precious)
    (finished / "checkpoints" / ".old-step-00000005").symlink_to(precious)
    assert call("train", "--out", "run", "--resume", "--set", "max_steps=6", "--set", "checkpoint.keep=2")[0] == 0
    assert sorted(path.read_bytes() for path in precious.iterdir()) == before
