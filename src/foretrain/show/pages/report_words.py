"""What the signs and words of a report mean: the key below its first chart, and the few words that need saying."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from foretrain.show.pages.markup import details

PHASES = {"warmup": "warm-up", "full": "full", "predict": "predict", "correct": "correct"}
_MARKS = {
    "kept": "move kept",
    "shrunk": "shrunk",
    "refused": "refused",
    "rolled back": "rolled back",
    "recovery": "recovery",
    "not finite": "loss not finite",
    "resumed": "resumed",
}
_WORDS = {
    "loss": "how wrong the model is; lower is better. The training loss is measured on what it learns from, the "
    "held-out loss on data that it never learns from.",
    "perplexity": "e to the loss: among how many tokens the model is in doubt, on average.",
    "gradient norm": "how steep the loss is. A jump says that training is not stable.",
    "move": "a jump of the weights to where they are forecast to be some steps later. It is checked on data before it "
    "is kept; a refused move or one that is rolled back leaves no trace in the weights.",
    "leap": "a move over many steps at once. Where every batch gives the same loss, a chain of leaps is judged by it.",
    "window": "the steps over which the weights are watched for one forecast.",
    "audit": "the run goes on from one step with the move and without it, to measure what it is worth.",
    "confidence": "how likely the next move is to be kept, by what came of the ones before.",
    "phase": "full: ordinary steps. Warm-up: ordinary steps before forecasts begin. Predict: a move is made. Correct: "
    "ordinary steps that check a move.",
    "R²": "the share of the weights' motion that was forecast: 1 is exact, 0 no better than standing still.",
}


def words() -> str:
    """What is said here must not need another page."""
    told = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in _WORDS.items())
    return details("What the words on this page mean", f'<dl class="words">{told}</dl>', "block")


def key(shared: Mapping[str, Any]) -> str:
    """Of phases and marks those that there are."""
    runs = shared["runs"]
    phases = {phase for run in runs for _, _, phase, _ in run["phases"]} if shared["prediction"] == "tried" else set()
    marks = {kind for run in runs for _, _, kind, _, _ in run["marks"]}
    made = _list("Phases, the ribbon below the chart", "phase", PHASES, phases)
    return made + _list("Marks above the curves", "mark", _MARKS, marks)


def _list(label: str, sign: str, names: Mapping[str, str], found: set[str]) -> str:
    items = "".join(
        f'<li><i class="{sign} {name.replace(" ", "-")}" aria-hidden="true"></i>{text}</li>'
        for name, text in names.items()
        if name in found
    )
    what = "phase" if sign == "phase" else "marks"
    return f'<ul class="key" aria-label="{label}"><li class="what">{what}</li>{items}</ul>' if items else ""
