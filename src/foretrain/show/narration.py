"""Say events in words: one line each, with markup for colours."""

from __future__ import annotations

from rich.markup import escape

from foretrain.config.paths import assignments
from foretrain.config.units import chain_in_words, format_size, interval_text, loss_text
from foretrain.events import (
    Annealed,
    CheckpointRejected,
    CheckpointSaved,
    Evaluated,
    Event,
    Grown,
    HealthFound,
    HealthMeasured,
    LossForecasted,
    MemoryUsed,
    Moved,
    Notice,
    OwnCodeFailed,
    PhaseChanged,
    Planned,
    RatesPlanned,
    RatesToTry,
    RateTrial,
    RateTried,
    Recovered,
    Resumed,
    Tuned,
)
from foretrain.show.outlet import shortened


def needs_attention(event: Event) -> bool:
    """Tell whether even a quiet run must say it: something went wrong, or somebody should change something."""
    match event:
        case HealthFound() | CheckpointRejected():
            return True
        case Notice():
            return event.level == "warning"
        case Planned():
            return _is_bad(event)
        case Recovered():
            return event.action in ("roll_back", "abort", "out_of_memory", "prediction_off")
    return False


def is_detail(event: Event) -> bool:
    """Tell whether only a verbose run says it."""
    return isinstance(event, (MemoryUsed, HealthMeasured, OwnCodeFailed, LossForecasted, RatesPlanned))


def line(event: Event, verbose: bool = False) -> str | None:
    """Say an event in words. None: it is shown in another way, as progress, start and end are."""
    match event:
        case Evaluated():
            best = " (best so far)" if event.best else ""
            metrics = "".join(f", {escape(name)} {value:.4g}" for name, value in event.metrics.items())
            return f"step {event.step}: held-out loss {loss_text(event.loss)}{best}{metrics}"
        case RatesPlanned():
            known = "the plan of its learning rate" if event.steps else "no plan of its learning rate: nobody knows it"
            return f"step {event.step}: the end of the run is forecast by {known} (kind: {escape(event.kind)})"
        case LossForecasted():
            return _forecast(event)
        case CheckpointSaved():
            took = f" in {event.seconds:.2f} s" if verbose else ""
            return f"step {event.step}: saved {escape(event.path)} ({event.megabytes:.1f} MB{_parts(event)}{took})"
        case CheckpointRejected():
            return f"[yellow]warning:[/] damaged checkpoint put aside as {escape(event.path)}: {_told(event.reason)}"
        case Resumed():
            return f"resumed from step {event.step} ({escape(event.path)})"
        case PhaseChanged():
            return f"step {event.step}: [bold]{event.phase.upper()}[/] ({escape(event.reason)})"
        case Moved():
            return _move(event, verbose)
        case RatesToTry():
            return _price_of_rates(event)
        case RateTrial():
            which = (
                f"first, for {event.steps} steps, then others" if event.others else f"on the same {event.steps} steps"
            )
            return f"learning rate: trying {event.learning_rate:.2g} {which}"
        case RateTried():
            found = ", the best so far" if event.best else ""
            rate = f"learning rate {event.learning_rate:.2g}"
            if event.loss != event.loss:
                return f"{rate}: failed, and was ended early"
            return f"{rate}: held-out loss {loss_text(event.loss)} after {event.steps} steps{found}"
        case Annealed():
            losses = f"held-out loss {loss_text(event.loss)}, {loss_text(event.before)} before it"
            return f"step {event.step}: a copy, annealed over {event.steps} steps: {losses}"
        case Recovered() if event.action == "out_of_memory":
            return f"[yellow]warning:[/] {_told(event.text)}"  # it says when and in which phase
        case Recovered(action="roll_back", at=int(at)) if at > event.step:
            text = escape(event.text.removeprefix("rolled back"))
            return f"[yellow]step {at}: rolled back to step {event.step}[/]{text}"
        case Recovered():
            return f"[yellow]step {event.step}, {event.action.replace('_', ' ')}:[/] {_told(event.text)}"
        case HealthFound():
            return _finding(event)
        case Grown():
            return _growth(event)
        case Planned():
            text = _told(event.text)
            return f"[yellow]step {event.step}:[/] {text}" if _is_bad(event) else f"step {event.step}: {text}"
        case Tuned():
            return f"[yellow]step {event.step}, tuned:[/] {escape(assignments(event.change))} ({event.ailment})"
        case Notice():
            text = _told(event.message)
            return f"[yellow]warning:[/] {text}" if event.level == "warning" else text
        case MemoryUsed():
            return _memory(event)
        case HealthMeasured():
            return _look(event)
        case OwnCodeFailed():
            return escape(event.traceback.rstrip()) or None
    return None


def _price_of_rates(event: RatesToTry) -> str:
    """Say what looking for a learning rate will cost, before it begins."""
    shares = [f"{100 * steps / max(1, event.max_steps):.0f}" for steps in (event.least, event.most)]
    steps = f"{event.least:,}" if event.least == event.most else f"{event.least:,} to {event.most:,}"
    share = " to ".join(dict.fromkeys(shares))
    return (
        f"learning rate: looking for it takes {steps} steps beside the run, {share} % of its {event.max_steps:,}; "
        f"each rate is tried on the first {event.steps:,}"
    )


def _is_bad(event: Planned) -> bool:
    """Tell whether a target will not be met as it was planned."""
    return event.what in ("out of reach", "above")


def _forecast(event: LossForecasted) -> str:
    calibrated = "calibrated" if event.calibrated else "not calibrated"
    simpler = "".join(f"; {escape(name)} {loss_text(value)}" for name, value in event.baselines.items())
    end = escape(interval_text(event.loss, event.low, event.high))
    how = f"{100 * event.level:.0f} % interval, {calibrated}, by {escape(event.method)}"
    return f"step {event.step}: held-out loss at the end {end} ({how}{simpler})"


def _growth(event: Grown) -> str:
    """Say what the model grew to, and what became of it."""
    blocks = f"{event.layers} of {event.of} blocks"
    if event.verdict == "made":
        before = "" if event.loss_before is None else f", loss {event.loss_before:.4f} before it"
        return f"step {event.step}: the model grows to {blocks}{before}"
    loss = "" if event.loss is None or event.loss_before is None else f", {event.loss_before:.4f} -> {event.loss:.4f}"
    if event.verdict == "kept":
        return f"step {event.step}: growth to {blocks} kept{loss}"
    return (
        f"[yellow]step {event.step}: growth {event.verdict}[/]{loss}; {_told(event.reason)}, it goes on with {blocks}"
    )


def _told(text: str) -> str:
    """Make words safe and short: they may quote a file."""
    return escape(shortened(text))


def _parts(event: CheckpointSaved) -> str:
    """Say what a checkpoint is made of, where most of it is not the model."""
    if event.prediction_megabytes <= event.megabytes / 2:
        return ""
    return f": {event.weights_megabytes:.1f} weights, {event.prediction_megabytes:.1f} for prediction"


def _move(event: Moved, verbose: bool) -> str:
    what = chain_in_words(event.horizon, event.leaps) if event.chained else f"move {event.horizon} steps ahead"
    how = f"audited {what}" if event.audited else what
    result = f"loss {loss_text(event.anchor)} -> {loss_text(event.loss)}, {_worth(event)}"
    if event.verdict == "refused":
        result = f"loss before {loss_text(event.anchor)}"
    colour = "green" if event.verdict in ("kept", "shrunk") else "yellow"
    reason = f": {escape(event.reason)}" if verbose and event.reason else ""
    confidence = "" if event.chained else f", confidence {event.confidence:.2f}"  # nothing was forecast for a chain
    return f"step {event.step}: {how} [{colour}]{event.verdict}[/] ({result}{confidence}){reason}"


def _worth(event: Moved) -> str:
    """Say what a move was worth, in steps; of leaps that cost more than a step, what they were counted as."""
    if event.returned:
        return "back where an earlier chain ended, as nothing lower was found"
    if event.chained and event.counted_steps > event.horizon:
        ratio = f", falls {event.fall_ratio:.2f} of the predicted ones" if event.fall_ratio is not None else ""
        return f"counted as {event.counted_steps:,} steps{ratio}"
    return f"worth {_whole(event.worth_steps)} steps"


def _finding(event: HealthFound) -> str:
    """Say what is wrong with the run, and on a line of its own what to set."""
    colour = "red" if event.level == "critical" else "yellow"
    place = "" if event.place == "run" else f" in {event.place}"
    value = "not finite" if event.value is None else f"{event.value:.3g}"
    text = (
        f"[{colour}]step {event.step}, {event.ailment}{escape(place)}:[/] {escape(event.meaning)} ({event.measure} "
        f"{value}, healthy {escape(event.healthy)})"
    )
    return f"{text}\n    [bold]set {escape(assignments(event.change))}[/]" if event.change else text


def _memory(event: MemoryUsed) -> str:
    if event.peak is None:
        most = event.resident_peak
        held = "not known" if most is None else f"the process held {format_size(most, 1)} at the most so far"
        return f"step {event.step}: memory in {event.phase}: {held}"
    reserved = "" if event.reserved is None else f", {format_size(event.reserved, 1)} reserved"
    pinned = f", {format_size(event.pinned, 1)} pinned on the host" if event.pinned else ""
    return f"step {event.step}: memory in {event.phase}: peak {format_size(event.peak, 1)}{reserved}{pinned}"


def _look(event: HealthMeasured) -> str:
    known = {
        "gradient norm": event.gradient_norm,
        "gradient/weight": event.gradient_to_weight,
        "update/weight": event.update_to_weight,
    }
    words = [f"{name} {value:.3g}" for name, value in known.items() if value is not None]
    if event.loss_deviation is not None:
        words.append(f"mean loss {event.loss_deviation:.2g} sigmas above its best")
    return f"step {event.step}: looked at {len(event.layers)} layers: {', '.join(words) or 'nothing to measure yet'}"


def _whole(number: float) -> str:
    """Write a whole number, and never "-0"."""
    text = f"{number:.0f}"
    return "0" if text == "-0" else text
