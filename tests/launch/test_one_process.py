"""What several processes brought to a run, as far as one process shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import ConfigError, InputError
from foretrain.events import Event, Progress, Recovered
from foretrain.recipes import spreading
from foretrain.recipes import train as run

SETTINGS = {"device": "cpu", "max_steps": 30, "hybrid.mode": "off", "health.interval": 0, "log.interval": 1}


def trainer(**settings: Any) -> HybridTrainer:
    torch.manual_seed(0)
    return HybridTrainer(nn.Linear(3, 1), loss_fn=nn.MSELoss(), config=from_mapping({**SETTINGS, **settings}))


def batches() -> list[Any]:
    return [(torch.ones(4, 3), torch.zeros(4, 1))] * 5


def test_the_summary_says_why_somebody_stopped_the_run() -> None:
    made = trainer()

    def enough(event: Event) -> None:
        if isinstance(event, Progress) and event.step == 7:
            made.stop("the pruner has seen enough")

    summary = made.fit(batches(), callbacks=[enough], progress=False)
    assert (summary["reason"], summary["global_step"]) == ("stopped early", 7)
    assert summary["stopped_because"] == "the pruner has seen enough"
    again = made.fit(batches(), progress=False)  # it counts for one run only
    assert (again["reason"], again["stopped_because"]) == ("finished", None)


def test_without_a_reason_there_is_none() -> None:
    made = trainer()
    made.bus.subscribe(lambda event: made.stop() if isinstance(event, Progress) and event.step == 3 else None)
    summary = made.fit(batches(), progress=False)
    assert (summary["reason"], summary["stopped_because"]) == ("stopped early", None)


def test_an_attempt_begins_with_what_an_earlier_one_has_noted(
    tmp_path: Path, make_config: Callable[..., Any], text_file: Path
) -> None:
    config = make_config({"data.path": str(text_file), "checkpoint.interval": 3})
    run.train(config, tmp_path / "run", progress=False, pause_at=3)
    (tmp_path / "run" / "smaller.json").write_text(json.dumps({"accumulation_steps": 2}))
    told: list[Event] = []
    summary = run.train(config, tmp_path / "run", resume=True, progress=False, listeners=[told.append])
    said = [event.text for event in told if isinstance(event, Recovered)]
    assert said == ["memory ran out in an earlier attempt; this one goes on with accumulation_steps = 2"]
    assert summary["out_of_memory"]["settings"] == {"accumulation_steps": 2}


def test_a_damaged_note_is_refused(tmp_path: Path, make_config: Callable[..., Any], text_file: Path) -> None:
    config = make_config({"data.path": str(text_file)})
    run.train(config, tmp_path / "run", progress=False, pause_at=3)
    (tmp_path / "run" / "smaller.json").write_text("{half")
    with pytest.raises(InputError, match=r"smaller\.json of the run folder cannot be read"):
        run.train(config, tmp_path / "run", resume=True, progress=False)


def test_what_is_smaller_fits_the_rows_of_a_rank() -> None:
    rescue = trainer(batch_size=12, accumulation_steps=2).rescue
    assert rescue.smaller(ranks=1) == {"accumulation_steps": 4}
    assert rescue.smaller(ranks=2) == {"accumulation_steps": 6}


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    spreading.check_rows(from_mapping({"batch_size": 16, "accumulation_steps": 2}), ranks=4)
    with pytest.raises(ConfigError, match="must be a multiple of 12, such as 24"):
        spreading.check_rows(from_mapping({"batch_size": 16, "accumulation_steps": 4}), ranks=3)


def test_blocks_are_compiled_one_by_one_and_the_trainer_does_not_compile_them_again(
    monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Any]
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(self))
    monkeypatch.setattr(spreading, "shard", lambda *arguments: None)
    config = make_config({"engine.compile": True, "model.vocab_size": 256})
    model = run.build_model(config)
    assert spreading.spread(model, spreading.ONE_PROCESS, config) is None
    assert spreading.for_trainer(config, spreading.ONE_PROCESS) is config
    assert compiled == []
    chosen = spreading.Spreading("fsdp2", shard=2)
    spreading.spread(model, chosen, config)
    assert compiled == list(model.blocks)
    assert spreading.for_trainer(config, chosen).engine.compile == "auto"
