"""How good is a trained model on other data? Loss and perplexity; of examples also how many it answers right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.data import documents, examples, tokens
from foretrain.data.examples import EncodedExamples, Example
from foretrain.data.hub_tokenizers import begun
from foretrain.data.loader import window_batches, windows_in
from foretrain.data.templates import Format
from foretrain.data.tokenizers import Tokenizer
from foretrain.engine.precision import Precision, choose_device
from foretrain.errors import DataError, ForetrainError, InputError
from foretrain.models.adapter_files import load_adapter
from foretrain.models.language_model import LanguageModel
from foretrain.models.loss import IGNORED
from foretrain.recipes.newest import open_newest
from foretrain.recipes.open_model import Base, find_folder
from foretrain.serve.answers import answer_questions

Report = Callable[[str, int, int], None]
"""What is done (a word), how much of it, of how much."""
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class _Work:
    """A model with what belongs to it, ready to be evaluated."""

    base: Base
    config: Config
    """The run's settings, or the defaults."""
    device: torch.device
    precision: Precision
    batch_size: int
    report: Report

    @property
    def model(self) -> LanguageModel:
        return self.base.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.base.tokenizer


def evaluate(
    model: str | Path,
    data: str | Path | list[str],
    *,
    adapter: str | Path | None = None,
    any_base: bool = False,
    prompt: str | Sequence[str] | None = None,
    answer: str | None = None,
    final_answer: str | None = None,
    batch_size: int | None = None,
    batches: int | None = None,
    answers: int | None = None,
    device: str = "auto",
    tokenizer: str = "",
    vocabulary: str = "",
    say: Callable[[str], None] = lambda _: None,
    report: Report = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure loss and perplexity of a run, a model folder or a checkpoint on `data`, for examples also accuracy or
    exact match.

    data: what `foretrain train` or `finetune` read. JSONL records are examples if the run was fine-tuned, if `prompt`
    and `answer` say how to read them, or if their fields are known; else they are text. batches: at most so many,
    spread evenly. answers: so many examples are asked; None: all. final_answer, batch_size: None: as the run had them.
    any_base: with an adapter that was trained on other weights, too.
    """
    for name, value in (("batch_size", batch_size), ("batches", batches)):
        if value is not None and value < 1:
            raise InputError(f"{name} = {value}: give at least 1")
    sources = [str(data)] if isinstance(data, (str, Path)) else list(data)
    if not sources or "" in sources:
        raise InputError("data: an empty name; name the text, examples or token files to score")
    path = find_folder(model, say)
    config, place = _settings(path), choose_device(device)
    precision = Precision(config.precision, place)
    base = open_newest(path, tokenizer, vocabulary, say, precision=precision.name)
    chosen = Path(adapter) if adapter is not None else base.adapter
    if chosen is not None:
        load_adapter(base.model, chosen, any_base)
    base.model.to(place)
    base.model.eval()
    work = _Work(base, config, place, precision, batch_size or config.batch_size, report)
    chosen_format = _format(sources, base.format, prompt, answer)
    if chosen_format is None:
        found = _text(work, sources, batches)
    else:
        mark = config.evaluation.final_answer if final_answer is None else final_answer
        found = _examples(work, sources, chosen_format, batches, answers, mark, say)
    return {"model": str(path), "data": sources if len(sources) > 1 else sources[0], **found}


def _settings(path: Path) -> Config:
    """Return the settings of the run that a model or checkpoint belongs to."""
    for place in (path, path.parent, path.parent.parent):
        if (place / "config.toml").is_file():
            with suppress(ForetrainError):
                return configuration.load(place / "config.toml").config
    return Config()


def _format(
    sources: list[str], trained: Format | None, prompt: str | Sequence[str] | None, answer: str | None
) -> Format | None:
    """Return how records are read as examples; None: it is text."""
    if prompt is not None or answer is not None:
        return examples.find_format(sources, prompt, answer)
    if not documents.find(sources, "--data").holds_records:
        return None
    if trained is not None:
        return trained
    with suppress(DataError):  # then its records are documents
        return examples.find_format(sources)
    return None


def _text(work: _Work, sources: list[str], limit: int | None) -> dict[str, Any]:
    stream = _tokens(work, sources)
    context, size = work.model.shape.window, work.batch_size
    if len(stream) < 2:
        raise DataError(f"{', '.join(sources)}: holds no text; name files that do")
    if len(stream) <= context:  # one window that is not full
        rows = torch.from_numpy(stream.astype(np.int64))[None]
        whole: Iterable[tuple[Tensor, Tensor]] = [(rows[:, :-1], rows[:, 1:])]
        total = 1
    else:
        whole = window_batches(stream, context, size, limit)
        total = math.ceil(windows_in(stream, context, size, limit) / size)
    loss, counted = _mean_loss(work, whole, total)
    return {"kind": "text", **_losses(loss), "tokens": counted, "tokens_in_data": len(stream)}


def _tokens(work: _Work, sources: list[str]) -> tokens.TokenArray:
    """Return all documents, each with its end, as one stream: as a run reads its held-out files."""
    source = documents.find(sources, "--data")
    if source.is_tokens:
        stream = tokens.read_token_files(source)
        for token in (int(stream.max()), int(stream.min())):
            if not 0 <= token < work.model.shape.vocab_size:
                raise DataError(
                    f"{', '.join(sources)}: holds token {token}, the model knows {work.model.shape.vocab_size}; name "
                    "tokens of the tokenizer that it was trained with"
                )
        return stream
    end = np.array([work.tokenizer.end_of_text], np.uint32)
    texts = documents.read(source, work.config.data.text_field)
    parts: list[Any] = []
    while batch := list(itertools.islice(texts, _DOCUMENTS_AT_ONCE)):
        for encoded in work.tokenizer.encode_batch(batch):
            parts += [begun(encoded, work.tokenizer).astype(np.uint32), end]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


def _examples(
    work: _Work,
    sources: list[str],
    chosen: Format,
    limit: int | None,
    answers: int | None,
    final_answer: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    say(f"{', '.join(sources)}: read as {chosen}")
    prompts, chat = [prompt.text for prompt in chosen.prompts], work.base.chat
    found = examples.read_examples(sources, prompts, chosen.answer.text, chat=chat)
    if final_answer and (without := sum(final_answer not in example.answer for example in found)):
        raise InputError(
            f"the final answer is to follow {final_answer!r}, but {without} of {len(found)} answers do not hold it; "
            "name a mark that all of them have, or none"
        )
    context = min(work.model.shape.context, work.config.data.max_length or work.model.shape.context)
    encoded = EncodedExamples(found, work.tokenizer, context, name=", ".join(sources))
    batches = encoded.fixed_batches(work.batch_size, limit or len(encoded))
    loss, counted = _mean_loss(work, batches, len(batches))
    names = () if final_answer else _classes(work, found)
    answered = answer_questions(
        work.model,
        work.tokenizer,
        found,
        names,
        encoded.length,
        answers,
        final_answer,
        lambda done, total: work.report("answered", done, total),
    )
    sizes = {"tokens": counted, "examples": len(found), "left_out": encoded.left_out, "shortened": encoded.shortened}
    return {"kind": "examples", **_losses(loss), **sizes, **answered}


def _classes(work: _Work, found: list[Example]) -> tuple[str, ...]:
    """Return all answers, where they come from a small set; those of the training data count too, as they did in the
    run."""
    data = work.config.data
    trained: list[Example] = []
    if work.base.format is not None and data.path:
        with suppress(ForetrainError):  # it may lie elsewhere by now
            trained = examples.read_examples(
                data.path, data.prompt, data.answer, data.max_documents, chat=work.base.chat
            )
    return examples.classes([*trained, *found], work.tokenizer)


@torch.inference_mode()
def _mean_loss(work: _Work, batches: Iterable[tuple[Tensor, Tensor]], count: int) -> tuple[float, int]:
    """Return the mean over all targets that count, as in a run's own evaluation, and how many there are."""
    total, counted = 0.0, 0
    for number, (inputs, targets) in enumerate(batches, 1):
        here = int((targets != IGNORED).sum())
        with work.precision.autocast():
            loss = work.model.loss((inputs.to(work.device), targets.to(work.device)))
        total += float(loss) * here
        counted += here
        work.report("evaluated", number, count)
    return total / counted, counted


def _losses(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
