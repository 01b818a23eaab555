"""A model's own chat template: as transformers writes it, by turns, and in a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.causal import CHAT, MARKS, write_tokenizer

from foretrain.data.chat_templates import LONGEST, ChatTemplate, template_in
from foretrain.data.chats import ROLES, Message
from foretrain.errors import DataError

SAID = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"), ("assistant", "Goodbye.")]
MESSAGES = [Message(ROLES[role], text) for role, text in SAID]


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, MARKS)


THINKING = (
    "{%- set last = messages | length - 1 %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 == last %}<think></think>{% endif %}"
    "{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like Qwen 3's: an answer is written otherwise once more follows."""


@pytest.mark.parametrize("text", [CHAT, THINKING, "{{ bos_token }}{{ messages | tojson }}"])
@pytest.mark.parametrize("asked", [True, False])
def test_chats_are_written_as_transformers_writes_them(text: str, asked: bool, tmp_path: Path) -> None:
    theirs = write_tokenizer(tmp_path, chat=text)
    given = [{"role": role, "content": said} for role, said in SAID]
    wanted = theirs.apply_chat_template(given, tokenize=False, add_generation_prompt=asked)
    found = template_in(tmp_path, MARKS)
    assert found is not None
    assert found.render(MESSAGES, asked) == wanted


def test_every_answer_is_learned_between_what_is_given() -> None:
    given, answer = template(CHAT).turns(MESSAGES, "here")
    assert answer == "Goodbye."
    first, said, second = given
    assert said == "Hello!"
    assert first == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert second == "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(given) == template(CHAT).question(MESSAGES[:-1])


def test_where_earlier_answers_change_only_the_last_one_is_learned() -> None:
    given, answer = template(THINKING).turns(MESSAGES, "here")
    assert given == (template(THINKING).question(MESSAGES[:-1]),)
    assert answer == "<think></think>Goodbye."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot write this chat"),
        ("{% for x in range(10**9) %}{% endfor %}", "cannot write this chat"),
        ("{{ raise_exception('roles must alternate') }}", r"cannot write this chat \(roles must alternate\)"),
        ("{{ messages[99].content.strip() }}", "cannot write this chat"),
        ("{% if %}", "is no Jinja template"),
        ("{{ messages.append(1) }}", "cannot write this chat"),
        ("{% include 'secret' %}", "cannot write this chat"),
    ],
)
def test_what_a_template_may_not_do_is_said(text: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as refused:
        template(text).render(MESSAGES, asked=True)
    assert "\n" not in str(refused.value)


def test_a_template_knows_no_other_day_than_one() -> None:
    found = template("{{ strftime_now('%d %b %Y') }}")
    assert found.render(MESSAGES, asked=True) == "26 Jul 2024"


def test_chats_that_teach_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="there is nothing to learn"):
        template(CHAT).turns(MESSAGES[:2], "here")
    with pytest.raises(DataError, match="leaves the answer out"):
        template("{{ messages[0].content }}").turns(MESSAGES, "here")
    with pytest.raises(DataError, match="does not write an answer behind its question"):
        template("{{ messages | length }}").turns(MESSAGES, "here")


def test_templates_are_found_where_models_have_them(tmp_path: Path) -> None:
    assert template_in(tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": [{"name": "default", "template": "a"}, {"name": "tool", "template": "b"}]}')
    found = template_in(tmp_path, {})
    assert found is not None
    assert found.text == "a"
    (tmp_path / "chat_template.jinja").write_text("x" * (LONGEST + 1))
    with pytest.raises(DataError, match="no model has such a one"):
        template_in(tmp_path, {})
