"""A plan for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from foretrain.config.units import format_size
from foretrain.planning.estimate import RESERVE, Estimate
from foretrain.planning.plan import MemoryPlan

_TITLES = {
    "full": "WARMUP, FULL",
    "predict": "PREDICT",
    "correct": "CORRECT",
    "audit": "audit",
    "evaluate": "evaluation",
}


def component_table(estimate: Estimate) -> Table:
    """One row per component, one column per phase."""
    table = Table("component", box=None, pad_edge=False)
    for phase in estimate.phases:
        table.add_column(_TITLES[phase], justify="right")
    names = dict.fromkeys(name for parts in estimate.phases.values() for name in parts)
    for name in names:
        sizes = [parts.get(name, 0) for parts in estimate.phases.values()]
        if any(sizes):
            table.add_row(name, *(format_size(size) if size else "" for size in sizes))
    table.add_row("peak", *(format_size(peak) for peak in estimate.peaks.values()), style="bold")
    return table


def lever_table(plan: MemoryPlan) -> Table:
    """Return every setting that was changed, what it costs, and why."""
    table = Table("setting", "value", "step time", "what it does", box=None, pad_edge=False)
    for row in plan.rows:
        table.add_row(row["setting"], _word(row["value"]), f"{row['cost']:+.1%}", row["effect"])
    return table


def needed_line(estimate: Estimate) -> str:
    """Return what the device must have; main memory in a line of its own."""
    line = (
        f"device memory: peak {format_size(estimate.peak)}; with {RESERVE:.0%}"
        + (f" and {format_size(estimate.pages)}" if estimate.pages else "")
        + f" for what the allocator cannot hand out and what a recorded step keeps: {format_size(estimate.needed)}"
    )
    return f"{line}\n{host_line(estimate)}" if estimate.host else line


def host_line(estimate: Estimate) -> str:
    """Return what this machine's own memory must have beside the process itself."""
    return f"main memory: {format_size(estimate.host)}, locked, beside what the process itself takes"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
