"""Classes are told apart as if each had been scored alone, with far fewer passes; answers are compared as asked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretrain.data.examples import EncodedExamples, Example
from foretrain.data.tokenizers import ByteTokenizer
from foretrain.errors import InputError
from foretrain.serve.scoring import ClassScorer, exact_match

BYTE = ByteTokenizer()
ANSWERS = (" card", " card_arrival", " card_lost", " cash", " top_up", " top", "x")
PROMPTS = ["Where is it?\nLabel:", "", "Why?\nLabel:", "A much longer question than the others\nLabel:"]
answer_sets = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=9, unique=True)


class Counted:
    """A model, and how many rows it was given."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model = model
        self.rows = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        self.rows += len(tokens)
        return self.model(tokens)


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    made = make_model(3, vocab_size=257, context=64).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)  # far from uniform
    return made


def alone(model: Any, prompt: str, answer: str, context: int) -> float:
    """The plain way: the loss of one example, times its targets."""
    (batch,) = EncodedExamples([Example(prompt, answer)], BYTE, context).fixed_batches(1, 1)
    with torch.no_grad():
        return -float(model.loss(batch)) * (len(answer) + 1)


def test_scores_are_those_of_each_answer_alone(model: Any) -> None:
    scores = ClassScorer(ANSWERS, BYTE, 64).scores(model, PROMPTS, batch_size=3)
    expected = torch.tensor([[alone(model, prompt, answer, 64) for answer in ANSWERS] for prompt in PROMPTS])
    assert torch.allclose(scores, expected, atol=1e-3)
    assert len({*scores.argmax(dim=1).tolist()} | {*scores.argmin(dim=1).tolist()}) > 1


def test_the_prediction_is_the_best_of_all_scores_in_fewer_passes(model: Any) -> None:
    scorer, counted = ClassScorer(ANSWERS, BYTE, 64), Counted(model)
    best = scorer.scores(model, PROMPTS).argmax(dim=1).tolist()
    assert scorer.predict(counted, PROMPTS, batch_size=2) == [ANSWERS[place] for place in best]
    assert counted.rows < len(PROMPTS) * len(ANSWERS)


@given(answer_sets, st.integers(0, 50))
def test_any_set_of_answers_gives_the_best_one(answers: list[str], seed: int) -> None:
    table = torch.randn(257, 257, generator=torch.Generator().manual_seed(seed)) * 3

    def bigrams(tokens: Tensor) -> Tensor:
        return table[tokens]

    scorer = ClassScorer(answers, BYTE, 32)
    scores = scorer.scores(bigrams, ["p"])
    log_likelihoods = table.log_softmax(dim=1)
    for answer, score in zip(answers, scores[0].tolist(), strict=True):
        path = [*b"p", *answer.encode(), 256]
        assert score == pytest.approx(sum(float(log_likelihoods[pair]) for pair in pairwise(path)), abs=1e-3)
    assert scorer.predict(bigrams, ["p"]) == [answers[int(scores.argmax())]]


def test_long_prompts_lose_their_front_as_in_training(model: Any) -> None:
    scorer = ClassScorer(["yes", "no!"], BYTE, 16)
    scores = scorer.scores(model, ["a prompt that is far too long"])
    expected = [alone(model, "a prompt that is far too long", answer, 16) for answer in ("yes", "no!")]
    assert scores[0].tolist() == pytest.approx(expected, abs=1e-3)


def test_accuracy_is_the_share_of_right_classes(model: Any) -> None:
    scorer = ClassScorer(ANSWERS, BYTE, 64)
    predicted = scorer.predict(model, PROMPTS)
    examples = [Example(prompt, answer) for prompt, answer in zip(PROMPTS, predicted, strict=True)]
    assert scorer.accuracy(model, examples) == 1.0
    assert scorer.accuracy(model, [Example(examples[0].prompt, "other"), *examples[1:]]) == 0.75


@pytest.mark.parametrize("answers", [[], ["a", "a"]])
def test_classes_must_differ(answers: list[str]) -> None:
    with pytest.raises(InputError, match="name each one once"):
        ClassScorer(answers, BYTE, 16)


def test_a_class_must_fit() -> None:
    assert ClassScorer(["a" * 15], BYTE, 16)
    with pytest.raises(InputError, match="does not fit the context of 16"):
        ClassScorer(["a" * 16], BYTE, 16)


def test_no_prompts_give_no_predictions(model: Any) -> None:
    assert ClassScorer(ANSWERS, BYTE, 64).predict(model, []) == []


# --- text ----------------------------------------------------------------------------------------------------------


def test_white_space_around_does_not_matter() -> None:
    assert exact_match([" a\n", "b", "c c"], ["a", "B", "c c "]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("predicted", "right"),
    [
        ("so\n#### 1,234", True),
        ("#### 1234\nQuestion: and then #### 9", True),
        ("####1234 ", True),
        ("1234", False),
        ("#### -1234", False),
        ("####", False),
        ("", False),
    ],
)
def test_only_what_follows_the_marker_counts(predicted: str, right: bool) -> None:
    assert exact_match([predicted], ["two lines\n#### 1234"], final_answer="####") == right


def test_commas_stay_in_what_is_no_number() -> None:
    assert exact_match(["A: x,y"], ["A: xy"], final_answer="A:") == 0.0


def test_what_cannot_be_compared_is_an_error() -> None:
    with pytest.raises(InputError, match="1 predictions for 2 answers"):
        exact_match(["a"], ["a", "b"])
    with pytest.raises(InputError, match="0 predictions for 0 answers"):
        exact_match([], [])
    with pytest.raises(InputError, match="answer 2 has no '####'"):
        exact_match(["#### 1", "#### 2"], ["#### 1", "2"], final_answer="####")
