"""The top of a report: result and state in one line, how far a run is, its figures and files, what asks for a look."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from foretrain.config.units import counted, duration, loss_text, short
from foretrain.events import LEFT_OPEN
from foretrain.show.numbers import finite, mapping
from foretrain.show.pages.render import Cell, PageTable, Shown, number, sentence
from foretrain.show.pages.report_cards import (
    cards,
    held_out_loss,
    metrics,
    moves,
    speed,
    time_cell,
    training_loss,
    worth,
    worth_in_short,
)
from foretrain.show.pages.report_health import findings
from foretrain.show.record import RunRecord
from foretrain.show.remaining import Costs, after_growth, costs_in, weighed
from foretrain.show.trouble import longer_in_words

_STATES = {"finished": "gain", "stopped early": "gain", "failed": "slower"}
_STATES |= dict.fromkeys(LEFT_OPEN, "caution")
_RECENT = 30
"""The time left is reckoned from so many progress entries."""
_FILES = {
    "model": "model",
    "adapter": "adapter",
    "model.safetensors": "weights",
    "config.toml": "config.toml",
    "metrics.jsonl": "metrics.jsonl",
    "summary.json": "summary.json",
    "checkpoints": "checkpoints",
}
Records = Sequence[RunRecord]


def lead(records: Records, beside: Path | None = None) -> dict[str, Any]:
    """What the template `lead` shows. beside: the folder in which the page will lie, for links to the files of its
    runs; None: there are no links."""
    if len(records) == 1:
        (record,) = records
        return {
            "result": _result(record),
            "state": (_state_words(record), _state_look(record)),
            "progress": _progress(record),
            "worth": worth(record),
            "facts": _facts(record),
            "files": _files(record, beside),
            "cards": cards(record),
            "alert": _alert(record),
            "longer": sentence(longer_in_words(record.summary, record.folder)),
            "overview": None,
        }
    losses = [(loss, record.name) for record in records if (loss := held_out_loss(record)) is not None]
    best = f": lowest held-out loss {_minus(loss_text(min(losses)[0]))}, {min(losses)[1]}" if losses else ""
    return {"result": f"{len(records)} runs{best}", "overview": _overview(records, beside)}


# --- the line ---------------------------------------------------------------------------------------------------------


def headline(record: RunRecord) -> str:
    """Say result and state: gpt2-tiny: held-out loss 2.534 after 800 steps, finished."""
    return f"{_result(record)}, {_state_words(record)}"


def _result(record: RunRecord) -> str:
    title = _short_paths(str(record.started.get("title") or record.name))
    held_out, training = held_out_loss(record), training_loss(record)
    loss = ""
    if held_out is not None:
        loss = f"held-out loss {_minus(loss_text(held_out))} "
    elif training is not None:
        loss = f"training loss {_minus(loss_text(training))} "
    planned = record.planned_steps
    if record.state == "running":
        where = f"at step {record.step:,} of {planned:,.0f}" if planned else f"at step {record.step:,}"
    else:
        of = f" of {planned:,.0f}" if record.state != "finished" and record.step < planned else ""
        where = f"after {record.step:,}{of} step{'' if record.step == 1 and not of else 's'}"
    return f"{title}: {loss}{where}"


def _minus(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text


def _short_paths(text: str) -> str:
    """Shorten every path in the text to its last two names."""
    return re.sub(r"[^\s/]*(?:/[^\s/]+)*/([^\s/]+/[^\s/]+)", r"\1", text)


def _state_words(record: RunRecord) -> str:
    return f"{record.state}, with critical findings" if critical_ailments(record) else record.state


def _state_look(record: RunRecord) -> str:
    look = _STATES.get(record.state, "")
    return "caution" if critical_ailments(record) and look != "slower" else look


def critical_ailments(record: RunRecord) -> list[str]:
    found = (entry.fields for entry in record.health if entry.kind == "HealthFound")
    return [str(fields.get("ailment")) for fields in found if fields.get("level") == "critical"]


# --- how far it is ----------------------------------------------------------------------------------------------------


def share_done(record: RunRecord) -> float | None:
    """Tell how far a run that goes on is, between 0 and 1."""
    planned = record.planned_steps
    return min(1.0, record.step / planned) if record.state == "running" and planned > 0 else None


def seconds_left(record: RunRecord) -> float | None:
    """Guess the time left by the pace of the last entries, and by what evaluations have taken per step so far. Steps
    cost more once the model has grown."""
    planned = record.planned_steps
    if record.state != "running" or not record.progress or planned <= 0:
        return None
    if record.told_left is not None:  # the run knows: it goes by the clock, or by a forecast
        return record.told_left
    last = record.progress[-1]
    first = record.progress[max(0, len(record.progress) - _RECENT)]
    steps, seconds = last.step - first.step, last.seconds - first.seconds
    if steps <= 0:
        steps, seconds = last.step, last.seconds
    evaluated = sum(finite(entry.fields.get("seconds")) or 0.0 for entry in record.evaluations)
    costs = _costs(record)
    spent = seconds / (weighed(costs, last.step - steps, last.step) or 1.0)
    per_cost = spent + evaluated / (weighed(costs, 0, last.step) or 1.0)
    return per_cost * weighed(costs, last.step, int(planned))


def _costs(record: RunRecord) -> Costs:
    """Tell what steps cost, by what was planned and by what became of it since."""
    costs = costs_in(record.started.get("costs"))
    begun = finite(record.started.get("step")) or 0
    for entry in record.of_kind("Grown"):
        cost = finite(entry.fields.get("cost"))
        if cost is not None and entry.step >= begun:
            costs = after_growth(costs, entry.step, str(entry.fields.get("verdict")), cost)
    return costs


def _progress(record: RunRecord) -> dict[str, Any] | None:
    share, left = share_done(record), seconds_left(record)
    if share is None:
        return None
    return {"percent": 100 * share, "left": "" if left is None else f", about {duration(left)} left"}


# --- facts, files, findings -------------------------------------------------------------------------------------------


def _facts(record: RunRecord) -> str:
    started = record.started
    parameters = finite(started.get("parameters"))
    facts = [
        f"{short(parameters)} parameters" if parameters else "",
        str(started.get("optimizer") or ""),
        ", ".join(str(started[name]) for name in ("device", "precision") if started.get(name)),
        *(str(text) for name, text in mapping(started.get("details")).items() if name != "folder"),
    ]
    return " · ".join(fact for fact in facts if fact)


def _files(record: RunRecord, beside: Path | None) -> list[tuple[str, str]]:
    """List (address, name) of every file that is there."""
    if beside is None or not record.folder:
        return []
    folder = Path(record.folder)
    return [(_address(folder / name, beside), text) for name, text in _FILES.items() if (folder / name).exists()]


def _address(path: Path, beside: Path) -> str:
    """Make a link that is right as long as the page stays where it is among the run folders."""
    relative = Path(os.path.relpath(path.resolve(), beside.resolve())).as_posix()
    return quote(relative) + ("/" if path.is_dir() else "")


def _alert(record: RunRecord) -> dict[str, str] | None:
    """{"critical", "link", "first"}: what was found that asks for a look."""
    serious = [one for one in findings(record) if one["level"] in ("critical", "warning")]
    if not serious:
        return None
    ailments = critical_ailments(record)
    rollbacks = int(finite(mapping(record.summary.get("rollbacks")).get("times")) or 0)
    back = f"; it was rolled back {'once' if rollbacks == 1 else f'{rollbacks:,} times'}" if rollbacks else ""
    critical = f"{counted(len(ailments), 'critical finding')}: {', '.join(dict.fromkeys(ailments))}{back}. "
    asks = "1 finding asks" if len(serious) == 1 else f"{len(serious)} findings ask"
    return {
        "critical": critical if ailments else "",
        "link": f"{asks} for a look",
        "first": serious[0]["text"][:240],
    }


# --- several runs -----------------------------------------------------------------------------------------------------


def _overview(records: Records, beside: Path | None) -> PageTable:
    units = {record.unit for record in records}
    measured = list(dict.fromkeys(name for record in records for name, _ in metrics(record)))
    tried = any(record.tried for record in records)
    head = ["run", "state", "steps", "held-out loss", "best", "training loss", *measured, "time"]
    head += [f"{units.pop()}/s" if len(units) == 1 else "per second", *(["moves", "worth"] if tried else [])]
    rows: list[list[Shown]] = []
    for place, record in enumerate(records):
        summary, known = record.summary, dict(metrics(record))
        rows.append(
            [
                Cell(record.name, href=_own_report(record, beside), swatch=place % 8),
                record.state,
                number(record.step, ",.0f"),
                number(held_out_loss(record)),
                number(summary.get("best_val_loss")),
                number(training_loss(record)),
                *(number(known.get(name)) for name in measured),
                time_cell(finite(summary.get("seconds")) or record.seconds),
                short(finite(speed(record)) or 0),
                *([f"{moves(record)[0]:,} kept" if record.tried else "none", worth_in_short(record)] if tried else []),
            ]
        )
    return PageTable("What each run came to", head, rows, 2, len(head) - tried)


def _own_report(record: RunRecord, beside: Path | None) -> str:
    """Return the address of the run's own report, where it has one."""
    report = Path(record.folder) / "report.html"
    return _address(report, beside) if beside is not None and record.folder and report.is_file() else ""
