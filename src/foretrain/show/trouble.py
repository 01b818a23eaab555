"""Say what went wrong in a run, in the few words that stand beside its result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrain.config.paths import assignments
from foretrain.config.units import counted
from foretrain.show.numbers import finite

_MOST = 2
"""So many findings are told; the page has all."""


def rollbacks_in_words(summary: Mapping[str, Any]) -> str | None:
    """Say: 3 rollbacks, 260 steps done again."""
    found = summary.get("rollbacks") or {}
    if not found.get("times"):
        return None
    return f"{counted(found['times'], 'rollback')}, {counted(found['undone_steps'], 'step')} done again"


def findings_in_words(summary: Mapping[str, Any]) -> str | None:
    """Say the last findings, each with what to set. If an ailment came back, only its last advice is said."""
    findings = _findings(summary)
    last = list({finding["ailment"]: finding for finding in findings}.values())
    told = sorted(last, key=lambda finding: (finding["level"] == "critical", finding["step"]))[-_MOST:]
    lines = [_finding(finding) for finding in reversed(told)]
    left = len(findings) - len(told)
    return "\n".join([*lines, *([f"and {left} more: see the report"] if left else [])]) or None


def trouble_in_words(summary: Mapping[str, Any]) -> str:
    """Say: 3 rollbacks, 1 critical finding. Nothing is said of a run that was well."""
    rollbacks = (summary.get("rollbacks") or {}).get("times", 0)
    critical = sum(finding["level"] == "critical" for finding in _findings(summary))
    told = {"rollback": rollbacks, "critical finding": critical}
    return ", ".join(counted(count, thing) for thing, count in told.items() if count)


def longer_in_words(summary: Mapping[str, Any], folder: str | Path) -> str:
    """Say how to go on with a fine-tuning run that ended too early. Nothing is said of other runs."""
    falling = summary.get("still_falling")
    if not isinstance(falling, Mapping):
        return ""
    first, last, steps, longer = (finite(falling.get(name)) for name in ("from", "to", "steps", "max_steps"))
    epochs = finite(summary.get("epochs"))
    if first is None or last is None or steps is None or longer is None or epochs is None:
        return ""
    return (
        f"the held-out loss was still falling ({first:.4g} -> {last:.4g} in the last {steps:,.0f} steps; {epochs:.2g} "
        f"epochs): train longer with `foretrain finetune --out {shlex.quote(str(folder))} --resume --set "
        f"max_steps={longer:.0f}`"
    )


def _findings(summary: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (summary.get("health") or {}).get("findings") or []


def _finding(finding: Mapping[str, Any]) -> str:
    place = "" if finding["place"] == "run" else f" in {finding['place']}"
    advice = f"; set {assignments(finding['change'])}" if finding["change"] else ""
    return f"{finding['level']}: {finding['ailment']}{place}{advice}"
