"""Runs towards a time or a loss, as console, page and trackers show them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from foretrain.events import Event, Planned, Progress, RunEnded, RunStarted
from foretrain.show.console import Console
from foretrain.show.follow import read_runs
from foretrain.show.narration import line, needs_attention
from foretrain.show.pages.report_charts import marks
from foretrain.show.pages.report_lead import seconds_left, share_done
from foretrain.show.summary import summary_table
from foretrain.show.trackers.entries import entry_of

STARTED = RunStarted(0, 0, 10, 10, "cpu", "fp32", "Linear", planned=True)
MISSED = Planned(40, "out of reach", "until_loss = 1.0 is out of reach within max_steps = 300", None)
MET = Planned(90, "met", "held-out loss 0.99 meets until_loss = 1.0", 100)


def progress(step: int, **planned: float | int) -> Progress:
    return Progress(step, 2.5, 1.0, 3e-4, 100 * step, 100.0, float(step), 0, **planned)  # type: ignore[arg-type]


def shown(*events: Event, terminal: bool = False) -> str:
    text, now = io.StringIO(), 0.0
    rich = RichConsole(file=text, width=160, color_system=None, force_terminal=terminal, force_interactive=terminal)
    console = Console(rich, clock=lambda: now)
    for event in events:
        now = event.seconds if isinstance(event, Progress) else now
        console(event)
    console.close()
    return text.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_an_estimated_end_is_marked_and_the_time_left_is_the_runs_own(terminal: bool) -> None:
    text = shown(STARTED, progress(10), progress(20, planned_end=1520, seconds_left=95.0), terminal=terminal)
    assert "20/~1520" in text
    assert "eta 1:35" in text
    assert "10/?" in text or terminal


def test_a_forecast_gives_the_time_left_with_its_interval() -> None:
    text = shown(STARTED, progress(20, planned_end=120, seconds_left=100.0, earliest_end=70, latest_end=320))
    assert "eta 1:40 (0:50 to 5:00)" in text


def test_what_is_planned_is_said_and_a_goal_out_of_reach_even_in_quiet_runs() -> None:
    assert line(MET) == "step 90: held-out loss 0.99 meets until_loss = 1.0"
    assert "out of reach" in str(line(MISSED))
    assert (needs_attention(MISSED), needs_attention(MET)) == (True, False)
    entry = entry_of(MET, 0)
    assert entry is not None
    assert entry.texts == {"target": MET.text}


def test_the_page_knows_the_end_and_the_time_left(tmp_path: Path) -> None:
    lines = [
        {"event": "RunStarted", "step": 0, "max_steps": 0, "title": "Linear"},
        {"event": "Progress", "step": 50, "loss": 2.0, "seconds": 5.0, "planned_end": 200, "seconds_left": 33.0},
        {"event": "Planned", "step": 50, "what": "decay", "text": "the learning rate falls from here", "end": 200},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    record = read_runs([tmp_path])[0]
    assert share_done(record) == 0.25
    assert seconds_left(record) == 33.0
    assert [mark[3] for mark in marks(record)] == ["the learning rate falls from here"]


def test_the_table_says_what_came_of_a_target() -> None:
    summary = {"steps": {"full": 5}, "global_step": 5, "backward_passes": 5, "tokens": 5, "seconds": 1.0}
    targets = {
        "11.1 s of max_time = 12.0 s, until_loss = 3.2000 not met": {
            "max_time": 12.0,
            "spent": 11.1,
            "until_loss": 3.2,
            "met_at": None,
        },
        "until_loss = 3.2000 met at step 1,234": {"until_loss": 3.2, "met_at": 1234},
    }
    for words, target in targets.items():
        text = io.StringIO()
        RichConsole(file=text, width=160).print(summary_table(summary | {"target": target}))
        assert words in text.getvalue()
    assert shown(STARTED, RunEnded(5, "finished", summary | {"target": targets[words]})).count("met at step") == 1
