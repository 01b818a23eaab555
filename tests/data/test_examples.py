"""Fine-tuning data: templates, reading, splitting, and rows of which exactly the answer is learned."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretrain.data import templates
from foretrain.data.examples import (
    EncodedExamples,
    Example,
    classes,
    encode_prompts,
    encode_split,
    find_format,
    read_examples,
    split,
)
from foretrain.data.loader import Loader
from foretrain.data.tokenizers import BPETokenizer, ByteTokenizer, CharacterTokenizer, Tokenizer, train_bpe
from foretrain.errors import DataError
from foretrain.models.loss import IGNORED
from foretrain.trainer import HybridTrainer

QUESTION = {"question": "How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
texts = st.text(st.characters(codec="utf-8"), max_size=30)
answers = texts.filter(lambda text: bool(text.strip()))
example_lists = st.lists(st.builds(Example, texts, answers), min_size=1, max_size=8)


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def bpe() -> BPETokenizer:
    return train_bpe(iter(["question answer the cat sat on the mat and saw two dogs " * 20]), 290)


def made(count: int) -> list[Example]:
    return [Example(f"prompt {number}", f" answer {number % 7}") for number in range(count)]


# --- templates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Question: {question}\nAnswer:", "Question: How many?\nAnswer:"),
        ("no field", "no field"),
        ("{question}{question}", "How many?How many?"),
        ("{{question}} {{{ question }}}", "{question} {How many?}"),
        ("{}}}".replace("{}", "{question}"), "How many?}"),
    ],
)
def test_fields_and_doubled_braces_are_all_that_is_special(text: str, expected: str) -> None:
    assert templates.parse(text).render(QUESTION, "here") == expected


@pytest.mark.parametrize("text", ["{question", "question}", "{question}}", "{", "}", "{{}", "{a{b}}"])
def test_a_lone_brace_is_an_error(text: str) -> None:
    with pytest.raises(DataError, match="a lone"):
        templates.parse(text)


def test_a_field_needs_a_name() -> None:
    with pytest.raises(DataError, match="field without a name"):
        templates.parse("Question: { }")


@pytest.mark.parametrize("name", ["a.__class__", "a[0]", "a:>10", "a!r", "0"])
def test_parts_and_formats_are_not_evaluated(name: str) -> None:
    template = templates.parse(f"{{{name}}}")
    with pytest.raises(DataError, match=f"no field '{name.replace('[0]', '.0.')}'"):
        template.render({"a": "x"}, "here")
    assert template.render({name: "its own field"}, "here") == "its own field"


def test_values_are_text_or_rendered_as_json() -> None:
    record = {"i": 3, "f": 0.5, "t": True, "n": None, "s": "half \ud83d pair"}
    assert templates.parse("{i} {f} {t} <{n}> {s}").render(record, "here") == "3 0.5 true <> half ? pair"


@pytest.mark.parametrize(("value", "kind"), [([1], "a list"), ({"a": 1}, "an object")])
def test_lists_and_objects_are_refused(value: Any, kind: str) -> None:
    with pytest.raises(DataError, match=f"there:3: field 'x' is {kind}"):
        templates.parse("{x}").render({"x": value}, "there:3")


@given(texts, st.dictionaries(st.sampled_from("abc"), texts, min_size=3))
def test_what_a_field_says_is_never_read_as_a_template(literal: str, record: dict[str, str]) -> None:
    escaped = literal.replace("{", "{{").replace("}", "}}")
    rendered = templates.parse(f"{{a}}{escaped}{{b}}").render(record, "here")
    assert rendered == record["a"] + literal + record["b"]


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        (QUESTION, "Question: How many?\nAnswer:", " 3 + 4 = <<3+4=7>>7\n#### 7"),
        ({"text": "Where is my card?", "label": "card_arrival"}, "Where is my card?\nLabel:", " card_arrival"),
        ({"text": "Good", "label": 1}, "Good\nLabel:", " 1"),
        ({"prompt": "Say", "completion": "it"}, "Say", "it"),
        ({"prompt": "Say", "response": "it"}, "Say", "it"),
        (
            {"instruction": "Edit.", "input": "He go.", "output": "He goes."},
            "### Instruction:\nEdit.\n\n### Input:\nHe go.\n\n### Response:\n",
            "He goes.",
        ),
        (
            {"instruction": "Name one.", "input": "", "output": "Two."},
            "### Instruction:\nName one.\n\n### Response:\n",
            "Two.",
        ),
        (
            {"instruction": "Name one.", "input": None, "output": "Two."},
            "### Instruction:\nName one.\n\n### Response:\n",
            "Two.",
        ),
        ({"instruction": "Name one.", "output": "Two."}, "### Instruction:\nName one.\n\n### Response:\n", "Two."),
        (
            {"instruction": "Who?", "context": "I am.", "response": "You.", "category": "qa"},
            "### Instruction:\nWho?\n\n### Input:\nI am.\n\n### Response:\n",
            "You.",
        ),
    ],
)
def test_well_known_fields_need_no_templates(tmp_path: Path, record: dict[str, Any], prompt: str, answer: str) -> None:
    said: list[str] = []
    path = write(tmp_path / "a.jsonl", record)
    assert read_examples(path, say=said.append) == [Example(prompt, answer)]
    assert len(said) == 1
    assert "a.jsonl read as" in said[0]
    assert find_format(path).prompt_of({key: record[key] for key in list(record)[:2]}) == prompt


def test_given_templates_are_taken_and_nothing_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    path = write(tmp_path / "a.jsonl", QUESTION)
    assert read_examples(path, "Q: {question} A:", "{answer}", say=said.append)[0].prompt == "Q: How many? A:"
    assert said == []


def test_one_template_may_be_given_and_the_other_guessed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION)
    assert read_examples(path, prompt="{question}") == [Example("How many?", " " + QUESTION["answer"])]
    assert read_examples(path, answer="{answer}")[0].answer == QUESTION["answer"]


def test_of_several_prompts_the_first_that_is_filled_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"q": "Q", "hint": "H", "a": 1}, {"q": "Q", "hint": " ", "a": 2})
    found = read_examples(path, ["{q} ({hint})", "{q}"], "{a}")
    assert [example.prompt for example in found] == ["Q (H)", "Q"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_compressed_files_blank_lines_marks_and_any_line_end(tmp_path: Path, suffix: str) -> None:
    line = json.dumps(QUESTION).encode()
    content = b"\xef\xbb\xbf" + line + b"\r\n\n  \n" + line
    opener: Any = {"": open, ".gz": gzip.open, ".xz": lzma.open}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    with opener(path, "wb") as file:
        file.write(content)
    assert len(read_examples(path)) == 2
    assert len(read_examples(str(path), limit=1)) == 1
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl"):
        read_examples(path)


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    for name in "ba":
        write(tmp_path / f"{name}.jsonl", {"prompt": name, "completion": name})
    both = [Example("a", "a"), Example("b", "b")]
    assert read_examples(f"{tmp_path}/*.jsonl") == both
    assert read_examples([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")]) == both[::-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"a\.jsonl:2: not JSON .*each line must be one object"),
        ("[", r"a\.jsonl:2: not JSON .*a JSON array must become one object per line"),
        ("[" * 100_000, r"a\.jsonl:2: not JSON"),
        ('"text"', r"a\.jsonl:2: not an object but str"),
        ("[1]", r"a\.jsonl:2: not an object but list"),
        ("{}", r"a\.jsonl:2: no field 'question'.*the record is empty"),
        (
            '{"questions": "x", "answer": "y"}',
            r"2: no field 'question'.*has questions, answer; did you mean {questions}",
        ),
        ('{"question": "x", "zzz": "y"}', r"2: no field 'answer'.*the record has question, zzz; name one of them"),
        ('{"question": "x", "answer": " "}', r"a\.jsonl:2: the answer is empty.*remove the record"),
        ('{"question": "x", "answer": null}', r"a\.jsonl:2: the answer is empty"),
        ('{"question": "x", "answer": ["y"]}', r"a\.jsonl:2: field 'answer' is a list"),
    ],
)
def test_a_bad_line_is_named_with_what_to_do(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(QUESTION) + "\n" + line, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_examples(path)
    assert len(read_examples(path, limit=1)) == 1


def test_other_encodings_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xe9", "completion": "x"}')
    with pytest.raises(DataError, match=r"a\.jsonl:1: not UTF-8"):
        read_examples(tmp_path / "a.jsonl")


def test_an_answer_is_empty_also_inside_other_words(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "completion": ""})
    with pytest.raises(DataError, match="the answer is empty"):
        read_examples(path, "{prompt}", "Answer: {completion}.")


def test_unknown_fields_ask_for_templates(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"dialogue": []})
    with pytest.raises(DataError, match=r"a\.jsonl:1: no known set of fields \(found: dialogue; .*give templates"):
        read_examples(path)


def test_what_cannot_be_examples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    for path, message in [
        (tmp_path / "a.jsonl", "holds no records"),
        (tmp_path / "none.jsonl", "does not exist"),
        ("hf:gsm8k", "cannot be read as examples"),
        ("", "name a JSONL file"),
    ]:
        with pytest.raises(DataError, match=message):
            read_examples(path)
        with pytest.raises(DataError, match=message):
            find_format(path)
    write(tmp_path / "a.jsonl", QUESTION)
    with pytest.raises(DataError, match="names no field"):
        read_examples(tmp_path / "a.jsonl", "{question}", "yes")
    with pytest.raises(DataError, match="no prompt template"):
        read_examples(tmp_path / "a.jsonl", [], "{answer}")


# --- splitting -----------------------------------------------------------------------------------------------------


@given(example_lists, st.floats(0.01, 0.99), st.integers(0, 2**63 - 1), st.randoms(use_true_random=False))
def test_a_split_is_disjoint_complete_and_independent_of_order(
    examples: list[Example], share: float, seed: int, generator: random.Random
) -> None:
    examples = [*examples, Example("one", "a"), Example("two", "b"), *examples[:3]]
    train, held_out = split(examples, share, seed)
    assert train
    assert held_out
    assert not {example.prompt for example in train} & {example.prompt for example in held_out}
    assert sorted(train + held_out, key=repr) == sorted(examples, key=repr)
    mixed = generator.sample(examples, len(examples))
    other_train, other_held_out = split(mixed, share, seed)
    assert set(other_train) == set(train)
    assert set(other_held_out) == set(held_out)


def test_the_share_is_kept_and_the_seed_matters() -> None:
    examples = made(1000)
    train, held_out = split(examples, 0.1, seed=1)
    assert (len(train), len(held_out)) == (900, 100)
    assert train == [example for example in examples if example in set(train)]
    assert split(examples, 0.1, seed=2)[1] != held_out


@pytest.mark.parametrize("examples", [[], made(1), made(1) * 5, [Example("", "a"), Example("", "b")]])
def test_too_few_to_split_are_an_error(examples: list[Example]) -> None:
    with pytest.raises(DataError, match=r"cannot be split; .*data\.validation_path"):
        split(examples, 0.5, 1)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_the_share_must_be_one(share: float) -> None:
    with pytest.raises(DataError, match="between 0 and 1"):
        split(made(10), share, 1)


# --- classes -------------------------------------------------------------------------------------------------------


def test_few_short_repeated_answers_are_classes() -> None:
    assert classes(made(14), ByteTokenizer()) == tuple(f" answer {number}" for number in range(7))


@pytest.mark.parametrize(
    "examples",
    [
        [],
        made(13),  # not twice each
        made(1) * 9,  # one answer only
        [Example("", str(number % 201)) for number in range(1000)],
        [Example("", "x" * (64 * (number % 2) + 1)) for number in range(10)],
    ],
)
def test_other_answers_are_not_classes(examples: list[Example]) -> None:
    assert classes(examples, ByteTokenizer()) == ()


# --- encoding ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["byte", "char", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    kinds = {"byte": ByteTokenizer, "char": lambda: CharacterTokenizer("abc x"), "bpe": bpe}
    made: Tokenizer = kinds[request.param]()
    return made


@given(example_lists, st.integers(2, 90))
def test_exactly_the_answer_and_the_end_are_targets(
    tokenizer: Tokenizer, examples: list[Example], context: int
) -> None:
    wanted = [list(tokens) for tokens in tokenizer.encode_batch([example.answer for example in examples])]
    prompts = [list(tokens) for tokens in encode_prompts([example.prompt for example in examples], tokenizer)]
    kept = [place for place, answer in enumerate(wanted) if len(answer) < context]
    if not kept:
        with pytest.raises(DataError, match=f"none of {len(examples)} examples fits"):
            EncodedExamples(examples, tokenizer, context)
        return
    encoded = EncodedExamples(examples, tokenizer, context)
    tokens, targets = encoded.fetch(np.arange(len(encoded)), epoch=3)
    assert tokens.shape == targets.shape == (len(kept), encoded.length)
    assert encoded.length <= context
    assert encoded.left_out == len(examples) - len(kept)
    shortened = 0
    for row, goal, place in zip(tokens.tolist(), targets.tolist(), kept, strict=True):
        prompt, answer = prompts[place], wanted[place]
        counted = [number for number, target in enumerate(goal) if target != IGNORED]
        assert [goal[number] for number in counted] == [*answer, tokenizer.end_of_text]
        assert counted == list(range(counted[0], counted[0] + len(answer) + 1))
        whole = [*row[: counted[0] + 1], *(goal[number] for number in counted)]
        assert whole[:-1] == row[: len(whole) - 1]  # what was a target is the next input
        assert set(row[len(whole) - 1 :]) <= {tokenizer.end_of_text}
        cut = prompt[-(counted[0] + 1) :]
        assert row[: counted[0] + 1] == cut
        assert cut == prompt or len(cut) + len(answer) == context
        shortened += cut != prompt
        if isinstance(tokenizer, ByteTokenizer):
            assert tokenizer.decode(goal[number] for number in counted) == examples[place].answer
    assert encoded.shortened == shortened
    assert encoded.answer_tokens == int((targets != IGNORED).sum())


def test_the_length_is_the_smallest_multiple_that_holds_the_longest() -> None:
    byte = ByteTokenizer()
    lengths = [
        EncodedExamples([Example("p" * prompt, "a"), Example("p", "a")], byte, context).length
        for prompt, context in [(1, 64), (15, 64), (16, 64), (63, 64), (90, 64), (20, 30), (3, 10)]
    ]
    assert lengths == [16, 16, 32, 64, 64, 30, 10]


def test_the_end_needs_no_place_of_its_own() -> None:
    encoded = EncodedExamples([Example("pp", "aa")], ByteTokenizer(), context=4)
    tokens, targets = encoded.fetch(np.array([0]), 0)
    assert tokens.tolist() == [[112, 112, 97, 97]]
    assert targets.tolist() == [[IGNORED, 97, 97, 256]]
    assert tokens.dtype is targets.dtype is torch.int64
    assert (encoded.shortened, encoded.left_out) == (0, 0)


def test_the_front_of_a_prompt_is_cut_and_a_long_answer_is_left_out() -> None:
    examples = [Example("0123456789", "abc"), Example("p", "a" * 8), Example("p", "a" * 7)]
    encoded = EncodedExamples(examples, ByteTokenizer(), context=8)
    tokens, _ = encoded.fetch(np.arange(2), 0)
    assert bytes(tokens[0].tolist()) == b"56789abc"
    assert bytes(tokens[1].tolist()) == b"paaaaaaa"
    assert (len(encoded), encoded.shortened, encoded.left_out) == (2, 1, 1)
    assert str(encoded) == (
        "2 examples in rows of 8 tokens (100% text, the rest is padding), with 12 tokens of answers to learn, "
        "1 with a shortened prompt, 1 left out as too long"
    )


def test_an_empty_prompt_still_learns_the_whole_answer() -> None:
    tokens, targets = EncodedExamples([Example("", "ab")], ByteTokenizer(), 4).fetch(np.array([0]), 0)
    assert tokens.tolist() == [[256, 97, 98, 256]]
    assert targets.tolist() == [[97, 98, 256, IGNORED]]


def test_nothing_that_fits_is_an_error() -> None:
    for examples in ([], [Example("p", "too long")]):
        with pytest.raises(DataError, match=r"data\.path: none of \d examples fits model\.context = 4"):
            EncodedExamples(examples, ByteTokenizer(), 4)


def test_large_vocabularies_keep_their_token_numbers() -> None:
    class Wide(ByteTokenizer):
        vocab_size = 70_001
        end_of_text = 70_000

    _, targets = EncodedExamples([Example("p", "a")], Wide(), 4).fetch(np.array([0]), 0)
    assert targets.tolist() == [[97, 70_000, IGNORED, IGNORED]]


def test_the_prompt_ends_in_the_same_tokens_as_when_the_model_is_asked() -> None:
    tokenizer = bpe()
    joined = tokenizer.encode_batch(["the ca" + "t sat"])[0]
    (prompt,) = encode_prompts(["the ca"], tokenizer)
    assert list(joined[: len(prompt)]) != list(prompt)
    tokens, _ = EncodedExamples([Example("the ca", "t sat")], tokenizer, 32).fetch(np.array([0]), 0)
    assert tokens[0, : len(prompt)].tolist() == list(prompt)


def test_the_fingerprint_is_the_contents_and_not_the_paddings() -> None:
    byte, examples = ByteTokenizer(), made(5)
    first = EncodedExamples(examples, byte, 64).fingerprint
    assert len(first) == 64
    assert EncodedExamples(examples, byte, 64, least_length=48).fingerprint == first
    others = [examples[::-1], examples[:4], [*examples[:4], Example("prompt 4 ", "answer 4")]]
    assert len({first, *(EncodedExamples(other, byte, 64).fingerprint for other in others)}) == 4


def test_the_loader_gives_every_example_once_an_epoch() -> None:
    encoded = EncodedExamples(made(10), ByteTokenizer(), 64)
    loader = Loader(encoded, batch_size=5, seed=1, prefetch=0)
    rows = torch.cat([loader.batch(0)[0], loader.batch(1)[0]])
    everything = encoded.fetch(np.arange(10), 0)[0]
    assert sorted(rows.tolist()) == sorted(everything.tolist())
    assert loader.batch(7)[1].shape == (5, encoded.length)


@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 6))
def test_fixed_batches_have_one_shape_and_count_each_example_once(count: int, size: int, limit: int) -> None:
    encoded = EncodedExamples([Example(f"{n:03}", f"{n:03}") for n in range(count)], ByteTokenizer(), 16)
    batches = encoded.fixed_batches(size, limit)
    assert {tokens.shape for tokens, _ in batches} == {targets.shape for _, targets in batches} == {(size, 16)}
    rows = [row for _, targets in batches for row in targets.tolist() if set(row) != {IGNORED}]
    assert len(rows) == len({*map(tuple, rows)}) == min(count, size * limit)
    assert all((targets != IGNORED).any() for _, targets in batches)
    if size * limit >= count:
        assert sum(int((targets != IGNORED).sum()) for _, targets in batches) == encoded.answer_tokens


def test_the_engine_means_over_tokens_not_over_batches(make_model: Any, make_config: Any) -> None:
    answers = ["a", "a much longer answer than the other ones", "bb", "ccc", "d"]
    encoded = EncodedExamples([Example("p", answer) for answer in answers], ByteTokenizer(), 64)
    model = make_model(vocab_size=257, context=64)
    trainer = HybridTrainer(model, config=make_config())
    singly = [float(trainer.evaluate([batch])) for batch in encoded.fixed_batches(1, 5)]
    expected = sum(loss * (len(answer) + 1) for loss, answer in zip(singly, answers, strict=True))
    for size in (1, 2, 3, 5, 8):
        assert trainer.evaluate(encoded.fixed_batches(size, 5)) == pytest.approx(expected / encoded.answer_tokens)


def test_both_sides_have_one_length() -> None:
    long, short = [Example("p" * 40, "a")], [Example("p", "a")]
    for train, held_out in [(long, short), (short, long), (short, short)]:
        first, second = encode_split(train, held_out, ByteTokenizer(), 64)
        assert first.length == second.length == (16 if train is held_out else 48)
    with pytest.raises(DataError, match="held-out data: none of 0"):
        encode_split(long, [], ByteTokenizer(), 64)
