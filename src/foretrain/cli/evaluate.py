"""The command that scores a trained model on other data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from foretrain.cli.options import AnyBase, Model, Tokenizer, Vocabulary
from foretrain.cli.terminal import Json, put, put_json, say

_QUIET_SECONDS = 10.0


def evaluate(
    model: Model,
    /,
    *,
    data: Annotated[
        list[str],
        Parameter(
            negative=(), help="Text, JSONL or token files, a folder or a glob, as `data.path` takes them; repeatable."
        ),
    ],
    adapter: Annotated[
        Path | None,
        Parameter(help="Adapter folder (PEFT's format). Unset: the run's own, if it is a fine-tuning run."),
    ] = None,
    any_base: AnyBase = False,
    prompt: Annotated[
        str | None,
        Parameter(help="Template of a record's prompt, such as `Question: {question}`. Unset: as the run had it."),
    ] = None,
    answer: Annotated[
        str | None, Parameter(help="Template of a record's answer, such as ` {answer}`. Unset: as the run had it.")
    ] = None,
    final_answer: Annotated[
        str | None, Parameter(help="Compare only what follows this mark, such as `####`. Unset: as the run did.")
    ] = None,
    batch_size: Annotated[int | None, Parameter(help="Rows at once. Unset: as the run had it.")] = None,
    batches: Annotated[int | None, Parameter(help="At most so many batches, spread evenly. Unset: all.")] = None,
    answers: Annotated[int | None, Parameter(help="Ask so many of the examples. Unset: all. 0: none.")] = None,
    device: Annotated[str, Parameter(help="`auto`, `cpu`, `cuda`, `mps`.")] = "auto",
    tokenizer: Tokenizer = "",
    vocabulary: Vocabulary = "",
    json_: Json = False,
) -> None:
    """Score a model on data that it was not trained on.

    `foretrain evaluate runs/mine --data book.txt` prints the loss and the perplexity of a text.

    `foretrain evaluate runs/tuned --data test.jsonl` also lets a fine-tuned model answer: accuracy where the answers
    are classes, exact match otherwise. Records are read as the run was trained to read them; for a merged model or a
    base give `--prompt` and `--answer`, unless their fields are known (see `foretrain finetune --help`).

    The loss is the one that the run itself would print for this data: of examples only the answers count.
    """
    from foretrain.recipes.evaluate import evaluate as score
    from foretrain.recipes.finetune import line_breaks

    found = score(
        model,
        data,
        adapter=adapter,
        any_base=any_base,
        prompt=None if prompt is None else line_breaks(prompt),
        answer=None if answer is None else line_breaks(answer),
        final_answer=final_answer,
        batch_size=batch_size,
        batches=batches,
        answers=answers,
        device=device,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        say=say,
        report=EvaluationProgress(),
    )
    if json_:
        put_json(found)
        return
    for line in result_lines(found):
        put(line)


def result_lines(found: dict[str, Any]) -> list[str]:
    """Return what came of it, in words."""
    text = found["kind"] == "text"
    where = f"{found['tokens']:,} tokens" if text else f"{found['tokens']:,} tokens of {found['examples']:,} answers"
    if text and found["tokens"] < found["tokens_in_data"] - 1:
        where += f" of {found['tokens_in_data']:,} (whole windows)"
    lines = [f"loss {found['loss']:.4f}, perplexity {found['perplexity']:.4g}, on {where}"]
    if not text and found["left_out"]:
        lines[0] += f"; {found['left_out']:,} left out as too long"
    if "accuracy" in found:
        lines.append(
            f"accuracy {found['accuracy']:.2%} on {found['answered']:,} examples of {found['classes']} classes"
        )
    if "exact_match" in found:
        lines.append(f"exact match {found['exact_match']:.2%} on {found['answered']:,} examples")
    return lines


class EvaluationProgress:
    """Says how far long work has come, and the time left, every ten seconds."""

    def __init__(self) -> None:
        self._what = ""
        self._began = self._told = self._heard = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._began, self._told = what, self._heard, self._heard
        self._heard = now
        if done == total or now - self._told < _QUIET_SECONDS:
            return
        self._told = now
        from foretrain.config.units import duration

        left = duration((now - self._began) / done * (total - done))
        say(f"{what} {done:,} of {total:,} ({done / total:.0%}), {left} left")
