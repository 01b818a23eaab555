"""Say how a run ended, in one line and in one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from foretrain.config.paths import assignments
from foretrain.config.units import clock, counted, duration, format_size, format_speed, interval_text, loss_text
from foretrain.show.record import STEPS
from foretrain.show.trouble import findings_in_words, rollbacks_in_words, trouble_in_words

GLOSSARY = "docs/glossary.md"


def result_line(summary: Mapping[str, Any]) -> str:
    """Say in one line how a quiet run ended."""
    losses = {"held-out loss": summary.get("final_val_loss"), "training loss": summary.get("final_train_loss")}
    known = [f"{name} {loss_text(loss)}" for name, loss in losses.items() if loss is not None][:1]
    if "accuracy" in summary:
        known.append(f"accuracy {summary['accuracy']:.1%}")
    if "exact_match" in summary:
        known.append(f"exact match {summary['exact_match']:.1%}")
    known.append(f"{summary['global_step']:,} steps in {duration(summary['seconds'])}")
    more = "".join(f"; {text}" for text in (trouble_in_words(summary), _no_better_than_guessing(summary)) if text)
    return f"{summary['reason']}: {', '.join(known)}{more}"


def summary_table(summary: Mapping[str, Any], verbose: bool = False) -> Table:
    """Make the table of results. What leaps reached comes first; what was idle is left out, unless verbose."""
    table = Table(show_header=False)
    unit = str(summary.get("unit") or "tokens")
    rows = {
        "result": (summary.get("exact") or {}).get("sentence"),
        "held-out loss": _number(summary.get("final_val_loss")),
        "best held-out loss": _number(summary.get("best_val_loss")),
        **_end_forecast(summary.get("loss_forecast") or {}),
        **{name: f"{value:.4g}" for name, value in (summary.get("metrics") or {}).items()},
        "training loss": _number(summary.get("final_train_loss")),
        "target": _target(summary.get("target")),
        "learning rate": _found_rate(summary.get("learning_rate")),
        "steps": _steps(summary, _tried(summary) or verbose),
        "backward passes": _passes(summary),
        unit: f"{summary['tokens']:,}",
        "training time": f"{duration(summary['seconds'])} ({summary['seconds']:.1f} s)",
        "total time": _total(summary.get("total_seconds")),
        "speed": format_speed(pace, unit) if (pace := summary.get("tokens_per_second")) else None,
        "growth": _growth(summary.get("growth")),
        "skipped steps": str(summary["skipped_steps"]) if summary.get("skipped_steps") else None,
        "recoveries": rollbacks_in_words(summary),
        "findings": findings_in_words(summary),
        "peak GPU memory": f"{summary['peak_memory_mb']:,.0f} MB" if summary.get("peak_memory_mb") else None,
        "memory": _memory(summary.get("memory") or {}),
        "out of memory": _made_smaller(summary.get("out_of_memory") or {}),
        **_prediction(summary, verbose),
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, escape(value))
    return table


def _number(value: float | None) -> str | None:
    return None if value is None else loss_text(value)


def _end_forecast(found: Mapping[str, Any]) -> dict[str, str | None]:
    """Say where a run that was stopped was going, and of a finished one how good its forecasts of the end were."""
    last, level = found.get("last"), f"{100 * found.get('level', 0):.0f} %"
    if not found.get("checks"):
        if not last or found.get("ended"):
            return {}
        told = f"{interval_text(last['loss'], last['low'], last['high'])}, made at step {last['step']:,}"
        return {f"forecast for step {last['end']:,}": f"{told}; {level} interval, {_calibrated(found)}"}
    lines = []
    for check in found["checks"]:
        error = "" if check["error_percent"] is None else f", {check['error_percent']:+.2f} %"
        held = "held" if check["held"] else "missed"
        end = interval_text(check["loss"], check["low"], check["high"])
        lines.append(f"step {check['step']:,}: {end}{error}, {held}")
    return {"forecasts of the end": "\n".join(lines) + f"\n{level} intervals, {_calibrated(found)}"}


def _calibrated(found: Mapping[str, Any]) -> str:
    runs = counted(found["own_finished_runs"], "finished run")
    return f"{'calibrated' if found['calibrated'] else 'not calibrated yet'} ({runs} of its kind beside it)"


def _found_rate(found: Mapping[str, Any] | None) -> str | None:
    """Say which rate was found, where the learning rate was `auto`."""
    if not found:
        return None
    low, high = found.get("low"), found.get("high")
    range_ = "" if low is None or high is None else f" ({low:.2g} to {high:.2g} should be about as good)"
    cost = f" for {found['cost']:.0%} of the run" if found.get("cost") is not None else ""
    return f"{found['chosen']:.3g}{range_}, by {len(found['tried'])} that were tried{cost}"


def _target(found: Mapping[str, Any] | None) -> str | None:
    """Say what was asked for, and what came of it."""
    if not found:
        return None
    told = []
    if found.get("max_time") is not None:
        told.append(f"{clock(found['spent'])} of max_time = {clock(found['max_time'])}")
    if found.get("until_loss") is not None:
        met = "not met" if found["met_at"] is None else f"met at step {found['met_at']:,}"
        told.append(f"until_loss = {loss_text(found['until_loss'])} {met}")
    return ", ".join(told)


def _growth(found: Mapping[str, Any] | None) -> str | None:
    """Say what the model grew to, and when, or why it did not."""
    if not found:
        return None
    told = [f"{move['layers']} blocks at step {move['step']:,}" for move in found["moves"] if move["verdict"] == "made"]
    ends = [move["verdict"] for move in found["moves"] if move["verdict"] != "made"]
    verdict = f": {', '.join(ends)}" if ends else ""
    return (
        f"{'to ' if told else ''}{', '.join(told) or 'not made'}{verdict}; {found['layers']} of {found['of']} are used"
    )


def _total(seconds: float | None) -> str | None:
    return None if seconds is None else f"{duration(seconds)} with start-up, evaluation and saving"


def _steps(summary: Mapping[str, Any], in_parts: bool) -> str:
    """Write 800 = 100 warm-up + 640 full + 40 predicted + 20 correcting, or the sum where all steps are full ones."""
    parts = [f"{count:,} {STEPS[phase]}" for phase, count in summary["steps"].items() if count]
    total = f"{summary['global_step']:,}"
    return f"{total} = {' + '.join(parts)}" if in_parts and len(parts) > 1 else total


def _passes(summary: Mapping[str, Any]) -> str | None:
    """Write how many backward passes there were, where that is not the number of steps."""
    passes = summary["backward_passes"]
    linearised = (summary.get("exact") or {}).get("leaps") == "linearised"
    leaps = ", each linearised leap counted as one" if linearised else ""
    return None if passes == summary["global_step"] else f"{passes:,}{leaps}"


def _memory(phases: Mapping[str, Mapping[str, int]]) -> str | None:
    """Write the peak of every phase, or the resident memory of the process where there is no GPU."""
    peaks = {phase: usage["peak"] for phase, usage in phases.items() if "peak" in usage}
    if peaks:
        words = [f"{format_size(peak, 1)} in {phase}" for phase, peak in peaks.items() if phase != "setup"]
        pinned = max(usage.get("pinned", 0) for usage in phases.values())
        return (
            "peak " + ", ".join(words) + (f"; {format_size(pinned, 1)} pinned on the host" if pinned else "")
            if words
            else None
        )
    resident = [usage["resident_peak"] for usage in phases.values() if "resident_peak" in usage]
    return f"the process held {format_size(max(resident), 1)} at the most" if resident else None


def _made_smaller(found: Mapping[str, Any]) -> str | None:
    """Say how often memory ran out, and with which settings the run went on."""
    if not found:
        return None
    changes = assignments(found["settings"])
    moves = f", {_times(found['failed_moves'])} in a move" if found["failed_moves"] else ""
    ended = f"; went on with {changes}" if changes else ""
    return f"{_times(found['times'])}{moves}{ended}; prediction {found['prediction']}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _tried(summary: Mapping[str, Any]) -> bool:
    """Tell whether a move was made, whatever became of it."""
    return any((summary.get("moves") or {}).values())


def closing_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return what is said below the table: that nothing was learned, and where its words are explained."""
    words = f"what a move, a leap, an audit and other words mean: {GLOSSARY}" if _tried(summary) else ""
    return [text for text in (_no_better_than_guessing(summary), words) if text]


def _no_better_than_guessing(summary: Mapping[str, Any]) -> str:
    """Say of a language model whose loss is that of guessing, or above, that it has learned nothing."""
    loss = summary.get("final_val_loss")
    vocabulary = ((summary.get("config") or {}).get("model") or {}).get("vocab_size")
    if loss is None or not vocabulary or summary.get("unit") != "tokens" or loss < math.log(vocabulary):
        return ""
    guessing = loss_text(math.log(vocabulary))
    return f"nothing was learned: guessing among {vocabulary:,} tokens has a loss of {guessing}; try a lower rate"


def _prediction(summary: Mapping[str, Any], verbose: bool) -> dict[str, str | None]:
    """Say what prediction did: nothing for a plain run, one sentence where nothing was tried."""
    audit, moves = summary.get("audit"), summary.get("moves")
    if not audit or not moves:
        return {}
    exact = bool(summary.get("exact"))
    tried = _tried(summary)
    told = {"moves": _counted(moves) if tried or verbose else None}
    if verbose or (tried and not exact):  # leaps judged by the exact loss rest on no forecast
        forecasts = [f"{horizon} steps: {_scores(values)}" for horizon, values in summary["forecast"].items()]
        error, outcomes = summary["confidence"]["calibration_error"], summary["confidence"]["outcomes"]
        told["forecasts"] = "\n".join(forecasts) or None
        told["calibration error"] = None if error is None else f"{error:.3f} ({outcomes} outcomes)"
        told["predictability"] = summary["predictability"]["verdict"]
    if not exact or verbose or audit["gain_percent"] is not None:  # else the first row says what they were worth
        told["prediction"] = str(audit["sentence"]).removeprefix("prediction was ")
    return told


def _counted(moves: Mapping[str, int]) -> str:
    """Write: 3 kept, 1 rolled back."""
    return ", ".join(f"{count} {verdict.replace('_', ' ')}" for verdict, count in moves.items() if count) or "none"


def _scores(values: Mapping[str, Any]) -> str:
    """Write how good the forecasts of one horizon were. A predictor makes none before it knows something."""
    if values.get("made") == 0:
        return f"no forecast yet (repeat {values['repeat_r2']:.2f})"
    return f"R2 {values['r2']:.2f} (repeat {values['repeat_r2']:.2f}), cosine {values['cosine']:.2f}"
