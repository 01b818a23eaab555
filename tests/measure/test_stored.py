"""Results of a comparison that were damaged since: refused with the file's name, before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.measure import stored

GOOD: dict[str, Any] = {
    "arm": "plain",
    "seed": 1,
    "learning_rate": 1e-3,
    "failed": "",
    "started": "2026-11-16T10:00:00+00:00",
    "loss": 2.5,
    "held_out_loss": 2.4,
    "seconds": 1.5,
    "steps": 10,
    "backward_passes": 10,
    "tokens": 320,
    "account": {"batches": {"0": [32, 7]}},
    "curve": [[1, 0.1, None]],
    "phases": [[0.0, 1.5, "FULL"]],
    "moves": [],
}
FAILED = {name: GOOD[name] for name in ("arm", "seed", "learning_rate", "started")}
FAILED |= {"failed": "diverged", "loss": None, "held_out_loss": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


@pytest.mark.parametrize("result", [GOOD, FAILED], ids=["finished", "failed"])
def test_what_is_whole_is_read(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result))
    assert stored.read_result(path) == result


@pytest.mark.parametrize("value", [None, "x", [1], {}, True, 10**400, -(10**31)])
@pytest.mark.parametrize(
    "name", ["seconds", "tokens", "backward_passes", "curve", "account", "phases", "kept", "probe_tokens"]
)
def test_what_is_computed_with_must_be_there(name: str, value: Any, path: Path) -> None:
    path.write_text(json.dumps(GOOD | {name: value}))
    with pytest.raises(InputError, match=r"result\.json: damaged \(.*; delete it to run this part again"):
        stored.read_result(path)


@pytest.mark.parametrize("result", [GOOD, FAILED], ids=["finished", "failed"])
@pytest.mark.parametrize("name", ["arm", "seed", "started", "failed"])
def test_what_is_shown_must_be_there(name: str, result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps({key: value for key, value in result.items() if key != name}))
    with pytest.raises(InputError, match=rf"result\.json: damaged \({name}: field required"):
        stored.read_result(path)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "null", "[" * 100_000, '{"loss": NaN}', "{}"),
        *(json.dumps(GOOD | {"loss": value}) for value in ("x", 10**31, [])),
        *(json.dumps(GOOD | {"account": {"batches": {"0": 5}}}), json.dumps(GOOD | {"curve": [5]})),
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_result(content: str, path: Path) -> None:
    path.write_text(content)
    with pytest.raises(InputError, match="delete it to run this part again"):
        stored.read_result(path)
