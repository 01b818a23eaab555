"""Chats: what the assistant says is learned, all of it and nothing else, and other tools make the same prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import make_base

from foretrain.data import chats, templates
from foretrain.data.examples import EncodedExamples, Example, find_format, read_examples
from foretrain.data.handover import tokenizer_files
from foretrain.data.templates import ChatFormat, make_format
from foretrain.data.tokenizers import ByteTokenizer
from foretrain.errors import DataError
from foretrain.models.loss import IGNORED

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi. "},
    {"role": "assistant", "content": "Hello!\n"},
    {"role": "user", "content": "Bye?"},
    {"role": "assistant", "content": "Bye."},
]
GIVEN = ("System: Be brief.\nUser: Hi.\nAssistant:", " Hello!", "\nUser: Bye?\nAssistant:")


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path, *records: dict[str, Any]) -> list[Example]:
    return read_examples(write(path, *records))


def test_a_chat_becomes_turns(tmp_path: Path) -> None:
    wanted = Example("".join(GIVEN), " Bye.", GIVEN)
    assert read(tmp_path / "a.jsonl", {"messages": CHAT, "id": 3}) == [wanted]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    others = [{"from": names[turn["role"]], "value": turn["content"]} for turn in CHAT]
    assert read(tmp_path / "b.jsonl", {"conversations": others}) == [wanted]
    unanswered = [*CHAT, {"role": "user", "content": "Still there?"}]
    assert read(tmp_path / "c.jsonl", {"messages": unanswered}) == [wanted]
    assert read(tmp_path / "d.jsonl", {"messages": CHAT[1:3]}) == [Example("User: Hi.\nAssistant:", " Hello!")]


def test_all_that_the_assistant_says_is_learned_and_nothing_else(tmp_path: Path) -> None:
    encoded = EncodedExamples(read(tmp_path / "a.jsonl", {"messages": CHAT}), ByteTokenizer(), 128)
    tokens, targets = (tensor[0] for tensor in encoded.fixed_batches(1, 1)[0])
    assert bytes(targets[targets < 256][targets[targets < 256] != IGNORED].tolist()) == b" Hello! Bye."
    assert int((targets == 256).sum()) == 2  # each turn ends, whatever is given next
    assert encoded.answer_tokens == 14
    learned = (targets != IGNORED) & (targets < 256)
    places = learned.nonzero()[:, 0]
    assert torch.equal(tokens[places + 1], targets[places])


def test_one_row_has_the_loss_of_all_its_turns(tmp_path: Path) -> None:
    """As if each turn were an example of its own, with all that was said before in its prompt."""
    model = make_base(3).eval()
    whole = EncodedExamples(read(tmp_path / "a.jsonl", {"messages": CHAT[1:]}), ByteTokenizer(), 64)
    pieces = [Example("User: Hi.\nAssistant:", " Hello!")]
    pieces.append(Example("User: Hi.\nAssistant: Hello!\nUser: Bye?\nAssistant:", " Bye."))
    apart = EncodedExamples(pieces, ByteTokenizer(), 64)
    with torch.no_grad():
        losses = [float(model.loss(data.fixed_batches(len(data), 1)[0])) for data in (whole, apart)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("context", [64, 40, 33, 32, 31, 28, 20, 8])
def test_a_chat_that_is_too_long_loses_its_front(tmp_path: Path, context: int) -> None:
    example = read(tmp_path / "a.jsonl", {"messages": CHAT[1:]})
    text = (example[0].prompt + example[0].answer).encode()
    encoded = EncodedExamples(example, ByteTokenizer(), context)
    tokens, targets = (tensor[0] for tensor in encoded.fixed_batches(1, 1)[0])
    kept = text[-context:]
    assert bytes(tokens[: len(kept)].tolist()) == kept
    for place in (targets != IGNORED).nonzero()[:, 0].tolist():
        if targets[place] < 256:
            assert targets[place] == kept[place + 1]
    lost, begin = len(text) - len(kept), text.index(b" Hello!")
    learned = [*range(begin, begin + 7 + 1), *range(len(text) - 5, len(text) + 1)]  # " Hello!", " Bye.", their ends
    assert int((targets != IGNORED).sum()) == sum(place > lost for place in learned) == encoded.answer_tokens


def test_a_model_is_asked_as_it_was_trained(tmp_path: Path) -> None:
    chat = find_format(write(tmp_path / "a.jsonl", {"messages": CHAT}))
    assert isinstance(chat, ChatFormat)
    again = make_format([prompt.text for prompt in chat.prompts], chat.answer.text)  # as config.toml has it
    assert isinstance(again, ChatFormat)
    assert again.ask(" Hi. ", {"system": "Be brief."}) == GIVEN[0]
    assert again.ask("Hi.") == "User: Hi.\nAssistant:"
    assert again.prompt_of({"messages": CHAT[:4]}) == again.prompt_of({"messages": CHAT}) == "".join(GIVEN)
    with pytest.raises(DataError, match="no field 'input' in a chat"):
        again.ask("Hi.", {"input": "x"})
    assert not isinstance(make_format("{question}", "{messages}"), ChatFormat)


def test_other_tools_make_the_same_prompt(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = ByteTokenizer()
    for name, text in tokenizer_files(tokenizer, 100, chats.JINJA).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    chat = make_format("{messages}", "{messages}")
    for length in (1, 2, 4):
        wanted = chat.prompt_of({"messages": CHAT[:length]})
        found = theirs.apply_chat_template(CHAT[:length], add_generation_prompt=True, return_dict=True)
        assert found["input_ids"] == tokenizer.encode(wanted)
    assert theirs.apply_chat_template(CHAT, tokenize=False) == "".join(GIVEN) + " Bye."


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "'messages' is an empty list; it must be a list of messages"),
        ("Hi", "'messages' is str; it must be a list"),
        (["Hi"], r"messages\[0\] is str; a message is an object"),
        ([{"content": "Hi"}], r"messages\[0\] has no 'role' \(found: content\)"),
        ([{"role": "user"}], r"messages\[0\] has no 'content' \(found: role\)"),
        ([CHAT[1], {"role": "tool", "content": "4"}], r"messages\[1\] has the role 'tool'; known are system, user"),
        (
            [CHAT[1], {"role": "assistant", "content": None}],
            r"messages\[1\]: its content is NoneType; write it as text",
        ),
        ([CHAT[1], {"role": "assistant", "content": " "}], r"messages\[1\]: its content is empty"),
        (CHAT[:2], "no message of the assistant, there is nothing to learn"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(tmp_path: Path, messages: Any, words: str) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": messages})
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {words}"):
        read_examples(path)
    with pytest.raises(DataError, match=r"a\.jsonl:2: no field 'messages'; the record has message; did you mean"):
        read(tmp_path / "a.jsonl", {"messages": CHAT}, {"message": []})


def test_chats_are_among_the_known_formats() -> None:
    with pytest.raises(DataError, match="known: messages; conversations; prompt, completion"):
        templates.guess(["dialogue"], "here")
