"""Settings in words, the same wherever they are shown."""

from __future__ import annotations

import io
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console as RichConsole
from tests.show.runs import FINDING, STARTED, write_run

from foretrain.config import Config, from_mapping
from foretrain.config.paths import assignments, flattened, nested, value_of, with_settings
from foretrain.errors import ConfigError
from foretrain.events import Tuned
from foretrain.show.console import Console
from foretrain.show.follow import read_runs
from foretrain.show.pages.report_page import page
from foretrain.show.trackers.entries import entry_of

CHANGE = {"optimizer.learning_rate": 0.002, "model.tied": True, "optimizer.type": "muon"}
WORDS = 'optimizer.learning_rate = 0.002, model.tied = true, optimizer.type = "muon"'


def on_the_console(tuned: Tuned, folder: Path) -> str:
    text = io.StringIO()
    Console(RichConsole(file=text, width=200))(tuned)
    return text.getvalue()


def for_trackers(tuned: Tuned, folder: Path) -> str:
    entry = entry_of(tuned, 0)
    assert entry is not None
    return entry.texts["recovery"]


def on_the_page(tuned: Tuned, folder: Path) -> str:
    return unescape(page(read_runs([write_run(folder / "run", [STARTED, tuned, FINDING])])))


@pytest.mark.parametrize("shown", [on_the_console, for_trackers, on_the_page])
def test_a_change_is_said_in_the_same_words_everywhere(shown: Callable[[Tuned, Path], str], tmp_path: Path) -> None:
    assert WORDS in shown(Tuned(3, "plateau", CHANGE), tmp_path)


def test_what_is_no_change_has_no_words() -> None:
    assert (assignments(None), assignments("text"), assignments({})) == ("", "", "")


def test_nested_names_are_joined() -> None:
    nested = {"seed": 1, "model": {"type": "x", "sizes": [1, 2], "more": {"deep": None}, "none": {}}}
    assert flattened(nested) == {"seed": 1, "model.type": "x", "model.sizes": [1, 2], "model.more.deep": None}
    assert flattened({"a": {"b": 1}}, "summary", "/") == {"summary/a/b": 1}


def test_flattened_and_nested_undo_each_other() -> None:
    flat = {"seed": 1, "model.type": "x", "optimizer.beta1": 0.5, "model.layers": 3}
    assert nested(flat) == {"seed": 1, "model": {"type": "x", "layers": 3}, "optimizer": {"beta1": 0.5}}
    assert flattened(nested(flat)) == flat


def test_settings_are_got_and_set_by_their_dotted_names() -> None:
    config = Config()
    changed = with_settings(config, {"batch_size": 4, "engine.loss_rows": 64, "engine.fused_loss": True})
    assert [value_of(changed, name) for name in ("batch_size", "engine.loss_rows", "engine.fused_loss")] == [
        4,
        64,
        True,
    ]
    assert changed == from_mapping({"batch_size": 4, "engine": {"loss_rows": 64, "fused_loss": True}})
    assert config == Config()
    assert with_settings(config, {}) is config


@pytest.mark.parametrize("depth", [6, 5000])
def test_what_is_nested_too_deeply_is_refused(depth: int) -> None:
    deep: dict[str, object] = {}
    for _ in range(depth):
        deep = {"a": deep or 1}
    with pytest.raises(ConfigError, match="nothing below that"):
        from_mapping(deep)
