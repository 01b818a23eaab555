"""The top of a report: result and state in one line, how far a run is, its figures and files, what asks for a look."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from foretrain.show.console import short
from foretrain.show.numbers import duration, loss_text
from foretrain.show.pages.report_cards import cards, metrics, moves, speed, worth, worth_in_short
from foretrain.show.pages.report_health import findings
from foretrain.show.pages.report_text import clock, held_out_loss, mapping, number, signs, table, training_loss
from foretrain.show.pages.scales import finite
from foretrain.show.record import RunRecord
from foretrain.show.trouble import counted, longer_in_words

_STATES = {"finished": "gain", "stopped early": "gain", "failed": "slower", "interrupted": "caution"}
_RECENT = 30
"""Progress entries that the time left is reckoned from."""
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


def lead(records: Records, beside: Path | None = None) -> str:
    """beside: the folder in which the page will lie, for links to the files of its runs; None: there are no links."""
    if len(records) == 1:
        (record,) = records
        result = escape(_result(record)).replace("held-out loss", '<span class="whole">held-out loss</span>')
        head = f'<h1 class="verdict">{result}{_state(record)}</h1>'
        parts = (
            _progress(record),
            worth(record),
            _facts(record),
            _files(record, beside),
            cards(record),
            _alert(record),
            _longer(record),
        )
        return head + "".join(parts)
    losses = [(loss, record.name) for record in records if (loss := held_out_loss(record)) is not None]
    best = f": lowest held-out loss {loss_text(min(losses)[0])}, {min(losses)[1]}" if losses else ""
    return f'<h1 class="verdict">{len(records)} runs{escape(signs(best))}</h1>{_overview(records, beside)}'


# --- the line ---------------------------------------------------------------------------------------------------------


def headline(record: RunRecord) -> str:
    """Result and state: gpt2-tiny: held-out loss 2.534 after 800 steps, finished."""
    return f"{_result(record)}, {_state_words(record)}"


def _result(record: RunRecord) -> str:
    title = _short_paths(str(record.started.get("title") or record.name))
    held_out, training = held_out_loss(record), training_loss(record)
    loss = ""
    if held_out is not None:
        loss = f"held-out loss {loss_text(held_out)} "
    elif training is not None:
        loss = f"training loss {loss_text(training)} "
    planned = finite(record.started.get("max_steps")) or 0
    if record.state == "running":
        where = f"at step {record.step:,} of {planned:,.0f}" if planned else f"at step {record.step:,}"
    else:
        of = f" of {planned:,.0f}" if record.state != "finished" and record.step < planned else ""
        where = f"after {record.step:,}{of} step{'' if record.step == 1 and not of else 's'}"
    return f"{title}: {signs(loss)}{where}"


def _short_paths(text: str) -> str:
    """Of a path its last two names."""
    return re.sub(r"[^\s/]*(?:/[^\s/]+)*/([^\s/]+/[^\s/]+)", r"\1", text)


def _state_words(record: RunRecord) -> str:
    return f"{record.state}, with critical findings" if critical_ailments(record) else record.state


def _state(record: RunRecord) -> str:
    look = _STATES.get(record.state, "")
    if critical_ailments(record) and look != "slower":
        look = "caution"
    return f', <span class="state {look}">{escape(_state_words(record))}</span>'


def critical_ailments(record: RunRecord) -> list[str]:
    found = (entry.fields for entry in record.health if entry.kind == "HealthFound")
    return [str(fields.get("ailment")) for fields in found if fields.get("level") == "critical"]


# --- how far it is ----------------------------------------------------------------------------------------------------


def share_done(record: RunRecord) -> float | None:
    """Of a run that goes on, between 0 and 1."""
    planned = finite(record.started.get("max_steps")) or 0
    return min(1.0, record.step / planned) if record.state == "running" and planned > 0 else None


def seconds_left(record: RunRecord) -> float | None:
    """At the pace of the last entries, with what evaluations have taken per step so far."""
    planned = finite(record.started.get("max_steps")) or 0
    if record.state != "running" or not record.progress or planned <= 0:
        return None
    last = record.progress[-1]
    first = record.progress[max(0, len(record.progress) - _RECENT)]
    steps, seconds = last.step - first.step, last.seconds - first.seconds
    if steps <= 0:
        steps, seconds = last.step, last.seconds
    evaluated = sum(finite(entry.fields.get("seconds")) or 0.0 for entry in record.evaluations)
    per_step = seconds / max(1, steps) + evaluated / max(1, last.step)
    return per_step * max(0.0, planned - last.step)


def _progress(record: RunRecord) -> str:
    share, left = share_done(record), seconds_left(record)
    if share is None:
        return ""
    text = f"{100 * share:.0f} %" + ("" if left is None else f", about {duration(left)} left")
    bar = f'<progress max="100" value="{100 * share:.1f}" aria-label="Steps done">{100 * share:.0f} %</progress>'
    return f'<div class="going">{bar}<span>{text}</span></div>'


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
    return f'<p class="facts">{escape(" · ".join(fact for fact in facts if fact))}</p>'


def _files(record: RunRecord, beside: Path | None) -> str:
    if beside is None or not record.folder:
        return ""
    found = [(name, text) for name, text in _FILES.items() if (Path(record.folder) / name).exists()]
    links = [f'<a href="{_address(Path(record.folder) / name, beside)}">{text}</a>' for name, text in found]
    return f'<p class="facts files">Files: {", ".join(links)}</p>' if links else ""


def _address(path: Path, beside: Path) -> str:
    """A link that is right as long as the page stays where it is among the run folders."""
    relative = Path(os.path.relpath(path.resolve(), beside.resolve())).as_posix()
    return escape(quote(relative) + ("/" if path.is_dir() else ""))


def _alert(record: RunRecord) -> str:
    serious = [one for one in findings(record) if one["level"] in ("critical", "warning")]
    if not serious:
        return ""
    ailments = critical_ailments(record)
    rollbacks = int(finite(mapping(record.summary.get("rollbacks")).get("times")) or 0)
    back = f"; it was rolled back {'once' if rollbacks == 1 else f'{rollbacks:,} times'}" if rollbacks else ""
    critical = f"{counted(len(ailments), 'critical finding')}: {', '.join(dict.fromkeys(ailments))}{back}. "
    text = "1 finding asks" if len(serious) == 1 else f"{len(serious)} findings ask"
    link = f'<a href="#findings">{text} for a look</a>'
    return f'<p class="notice">{escape(critical) if ailments else ""}{link}: {escape(serious[0]["text"][:240])}</p>'


def _longer(record: RunRecord) -> str:
    """What the console says at the end of a fine-tuning run that ended too early."""
    text = longer_in_words(record.summary, record.folder)
    return f'<p class="notice">{escape(f"{text[0].upper()}{text[1:]}")}</p>' if text else ""


# --- several runs -----------------------------------------------------------------------------------------------------


def _overview(records: Records, beside: Path | None) -> str:
    units = {record.unit for record in records}
    measured = list(dict.fromkeys(name for record in records for name, _ in metrics(record)))
    tried = any(record.tried for record in records)
    head = ["run", "state", "steps", "held-out loss", "best", "training loss", *map(escape, measured), "time"]
    head += [escape(f"{units.pop()}/s" if len(units) == 1 else "per second"), *(["moves", "worth"] if tried else [])]
    rows = []
    for place, record in enumerate(records):
        summary, known = record.summary, dict(metrics(record))
        rows.append(
            [
                f'<span class="swatch-line run-{place % 8}" aria-hidden="true"></span>{_named(record, beside)}',
                escape(record.state),
                number(record.step, ",.0f"),
                number(held_out_loss(record)),
                number(summary.get("best_val_loss")),
                number(training_loss(record)),
                *(number(known.get(name)) for name in measured),
                clock(finite(summary.get("seconds")) or record.seconds),
                short(finite(speed(record)) or 0),
                *([f"{moves(record)[0]:,} kept" if record.tried else "none", worth_in_short(record)] if tried else []),
            ]
        )
    return table("What each run came to", head, rows, numbers_from=2, to=len(head) - tried)


def _named(record: RunRecord, beside: Path | None) -> str:
    """With a link to the run's own report, where it has one."""
    report = Path(record.folder) / "report.html"
    if beside is None or not record.folder or not report.is_file():
        return escape(record.name)
    return f'<a href="{_address(report, beside)}">{escape(record.name)}</a>'
