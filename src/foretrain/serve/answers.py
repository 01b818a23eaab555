"""Questions are put to a model, and its answers are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foretrain.data.examples import Example, encode_prompts
from foretrain.data.tokenizers import Tokenizer
from foretrain.models.language_model import LanguageModel
from foretrain.serve.generate import TextGenerator
from foretrain.serve.sampling import Sampling
from foretrain.serve.scoring import ClassScorer, exact_match

_AT_ONCE = 32
_BATCHES_SORTED = 2
"""Batches of classes that are sorted by length together, for little padding."""


def answer_questions(
    model: LanguageModel,
    tokenizer: Tokenizer,
    questions: list[Example],
    classes: tuple[str, ...],
    longest: int,
    count: int | None = None,
    final_answer: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Return how many are answered right: the most likely class where there are classes, else what the model writes.

    longest: tokens of an answer at the most. count: so many of the questions, evenly over all of them; None: all.
    progress: hears how many are answered, of how many.
    """
    asked = spread(fitting(model, tokenizer, questions), count)
    if not asked:
        return {}
    if classes:
        said = _choose(model, ClassScorer(classes, tokenizer, model.shape.context), asked, progress)
        right = exact_match(said, [example.answer for example in asked])
        return {"answered": len(asked), "classes": len(classes), "accuracy": round(right, 4)}
    said = _write(TextGenerator(model, tokenizer), asked, longest, progress)
    right = exact_match(said, [example.answer for example in asked], final_answer or None)
    return {"answered": len(asked), "exact_match": round(right, 4)}


def fitting(model: LanguageModel, tokenizer: Tokenizer, questions: list[Example]) -> list[Example]:
    """Return those that fit the context with their whole prompt and answer."""
    prompts = encode_prompts([question.prompt for question in questions], tokenizer)
    answers = tokenizer.encode_batch([question.answer for question in questions])
    lengths = [len(prompt) + len(answer) + 1 for prompt, answer in zip(prompts, answers, strict=True)]
    return [question for question, length in zip(questions, lengths, strict=True) if length <= model.shape.context]


def spread(questions: list[Example], count: int | None) -> list[Example]:
    """Pick so many, evenly over all of them: files may be sorted by answer."""
    count = len(questions) if count is None else min(count, len(questions))
    return [questions[index * len(questions) // count] for index in range(count)]


def _choose(
    model: LanguageModel, scorer: ClassScorer, asked: list[Example], progress: Callable[[int, int], None]
) -> list[str]:
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    said: list[str] = []
    with torch.no_grad():
        for first in range(0, len(asked), _AT_ONCE * _BATCHES_SORTED):
            prompts = [example.prompt for example in asked[first : first + _AT_ONCE * _BATCHES_SORTED]]
            said += scorer.predict(model, prompts, _AT_ONCE, device)
            progress(len(said), len(asked))
    model.train(training)
    return said


def _write(
    generator: TextGenerator, asked: list[Example], longest: int, progress: Callable[[int, int], None]
) -> list[str]:
    sampling = Sampling(max_tokens=longest, temperature=0.0)
    said: list[str] = []
    for first in range(0, len(asked), _AT_ONCE):
        prompts = [example.prompt for example in asked[first : first + _AT_ONCE]]
        said += [completion.text for completion in generator.generate(prompts, sampling)]
        progress(len(said), len(asked))
    return said
