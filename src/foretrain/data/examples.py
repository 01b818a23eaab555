"""Fine-tuning data: a prompt and its answer per record. Only the answer is learned, the prompt is given."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrain.data import documents, templates
from foretrain.data.chat_templates import ChatTemplate
from foretrain.data.hub_tokenizers import begun
from foretrain.data.templates import Format
from foretrain.data.tokenizers import Tokenizer, Tokens
from foretrain.errors import DataError
from foretrain.models.loss import IGNORED
from foretrain.persist.files import from_json

LENGTH_STEP = 16
"""Rows are padded to a multiple of this."""
MOST_CLASSES = 200
LONGEST_CLASS = 64
"""Tokens from which on an answer is no class."""
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


@dataclass(frozen=True, slots=True)
class Example:
    """What the model is given, and what it is to say."""

    prompt: str
    answer: str
    turns: tuple[str, ...] = ()
    """The prompt of a chat in parts, what is given and what is said by turns: what is said is learned too."""


# --- reading ---------------------------------------------------------------------------------------------------------


def read_examples(
    path: str | Path | list[str],
    prompt: str | Sequence[str] | None = None,
    answer: str | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    chat: ChatTemplate | None = None,
) -> list[Example]:
    """Return every record of JSONL files (also .gz and .xz) as an example, at most `limit` of them.

    `prompt` and `answer` are templates over the record's fields, such as "Question: {question}\\nAnswer:" and
    " {answer}". An empty field leaves nothing behind; where the text around it should go too, give two prompts, with
    and without it. What is None is guessed from the first record's fields, and `say` hears what was taken. chat: the
    model's own way to write chats.
    """
    records = _records(path)
    first = next(records, None)
    if first is None:
        raise DataError(f"{path}: holds no records; each line must be a JSON object")
    chosen = templates.with_chat(_format(first, prompt, answer), chat)
    if prompt is None or answer is None:
        say(f"{first.where.rpartition(':')[0]} read as {chosen}")
    rows = itertools.islice(itertools.chain([first], records), limit)
    return [_example(*chosen.read(row.fields, row.where)) for row in rows]


def _example(given: tuple[str, ...], answer: str) -> Example:
    return Example("".join(given), answer, given if len(given) > 1 else ())


def find_format(
    path: str | Path | list[str],
    prompt: str | Sequence[str] | None = None,
    answer: str | None = None,
    chat: ChatTemplate | None = None,
) -> Format:
    """Return what `read_examples` takes: its `ask` asks the trained model as it was asked in training."""
    first = next(_records(path), None)
    if first is None:
        raise DataError(f"{path}: holds no records; each line must be a JSON object")
    return templates.with_chat(_format(first, prompt, answer), chat)


@dataclass(frozen=True, slots=True)
class _Record:
    fields: dict[str, Any]
    where: str


def _format(first: _Record, prompt: str | Sequence[str] | None, answer: str | None) -> Format:
    if prompt is not None and answer is not None:
        return templates.make_format(prompt, answer)
    guessed = templates.guess(first.fields, first.where)
    prompts = [known.text for known in guessed.prompts] if prompt is None else prompt
    return templates.make_format(prompts, guessed.answer.text if answer is None else answer, guessed.name)


def _records(path: str | Path | list[str]) -> Iterator[_Record]:
    source = documents.find(path if isinstance(path, list) else [str(path)])
    if not path or source.hub_name:
        raise DataError(f"data.path: {source.hub_name or 'nothing'} cannot be read as examples; name a JSONL file")
    for file in source.files:
        try:
            with _OPENERS.get(file.suffix, open)(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip().removeprefix(b"\xef\xbb\xbf"):
                        yield _Record(_parse(line, f"{file}:{number}"), f"{file}:{number}")
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{file}: cannot be read ({error}); check the file and its permissions") from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = from_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except ValueError as error:
        hint = "; a JSON array must become one object per line" if line.lstrip().startswith(b"[") else ""
        raise DataError(f"{where}: not JSON ({error}); each line must be one object{hint}") from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: not an object but {type(record).__name__}; each line must be an object with fields, "
            'such as {"question": "...", "answer": "..."}'
        )
    return record


# --- splitting -------------------------------------------------------------------------------------------------------


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Return (to train on, held out). Decided by the prompts' digests: neither order nor repeats matter.

    Equal prompts stay on one side, so that no held-out question was seen with another answer.
    """
    if not 0 < share < 1:
        raise DataError(f"data.held_out = {share}: the share that is held out must lie between 0 and 1")
    key = hashlib.sha256(str(seed).encode()).digest()

    def digest(prompt: str) -> bytes:
        return hashlib.blake2b(prompt.encode("utf-8", errors="replace"), digest_size=16, key=key).digest()

    prompts = sorted({example.prompt for example in examples}, key=lambda prompt: (digest(prompt), prompt))
    if len(prompts) < 2:
        raise DataError(
            f"data.held_out: {len(examples)} examples with {len(prompts)} different prompts cannot be split; "
            "add examples, or name held-out ones in data.validation_path"
        )
    count = min(max(round(share * len(prompts)), 1), len(prompts) - 1)
    chosen = set(prompts[:count])
    train = [example for example in examples if example.prompt not in chosen]
    return train, [example for example in examples if example.prompt in chosen]


def classes(examples: Sequence[Example], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the different answers, sorted, where this is a classification; nothing otherwise.

    It is one when there are 2 to 200 different answers, all shorter than 64 tokens, that come twice on average.
    """
    answers = sorted({example.answer for example in examples})
    if not 2 <= len(answers) <= MOST_CLASSES or 2 * len(answers) > len(examples):
        return ()
    if max(map(len, tokenizer.encode_batch(answers))) >= LONGEST_CLASS:
        return ()
    return tuple(answers)


# --- encoding --------------------------------------------------------------------------------------------------------


def encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> list[Tokens]:
    """Encode prompts as the model sees them in training and when it is asked.

    A prompt is never encoded together with its answer: merged at the boundary, they would be other tokens than those
    of the prompt alone, which is all there is when the model is asked. An empty prompt is the end of the text before.
    """
    return [begun_text(tokens, tokenizer) for tokens in tokenizer.encode_batch(prompts)]


def begun_text(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Return a text as the model reads it from its beginning; an empty one begins a new document."""
    text = begun(tokens, tokenizer)
    return text if len(text) else np.array([tokenizer.end_of_text], dtype=np.uint32)


def _encode_turns(
    examples: Sequence[Example], tokenizer: Tokenizer
) -> list[tuple[Tokens, tuple[tuple[int, int], ...]]]:
    """Return each prompt, and where in it something is said. Turns are encoded by themselves, as prompts are."""
    parts = [example.turns or (example.prompt,) for example in examples]
    encoded = iter(tokenizer.encode_batch([text for turns in parts for text in turns]))
    prompts = []
    for turns in parts:
        pieces = [begun_text(next(encoded), tokenizer), *(next(encoded) for _ in turns[1:])]
        ends = list(itertools.accumulate(map(len, pieces)))
        said = tuple(itertools.pairwise(ends))[::2] if len(ends) > 1 else ()
        prompts.append((np.concatenate(pieces) if len(pieces) > 1 else pieces[0], said))
    return prompts


@dataclass(frozen=True, slots=True)
class _EncodedRow:
    prompt: Tokens
    said: tuple[tuple[int, int], ...]
    """First and last place, the last not included, of what is said in the prompt."""
    answer: Tokens

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    def cut_to(self, length: int) -> _EncodedRow:
        """Cut off the front of the prompt, where it is too long."""
        lost = len(self) - length
        if lost <= 0:
            return self
        said = tuple((max(first - lost, 0), last - lost) for first, last in self.said if last > lost)
        return _EncodedRow(self.prompt[lost:], said, self.answer)


class EncodedExamples:
    """Examples as rows of one static length: prompt, answer, end of text, padding. Only answer and end are targets.

    The length is the smallest multiple of 16 that holds the longest row, but no more than `context`. Where a row does
    not fit the front of its prompt is cut off; an answer that does not fit even so is left out.
    """

    deterministic = True

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        context: int,
        least_length: int = 0,
        name: str = "data.path",
    ) -> None:
        prompts = _encode_turns(examples, tokenizer)
        answers = tokenizer.encode_batch([example.answer for example in examples])
        # The end is a target but no input; a prompt keeps one token at least, or the answer's first were no target.
        fitting = [
            _EncodedRow(*prompt, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
            if len(answer) < context
        ]
        if not fitting:
            raise DataError(
                f"{name}: none of {len(examples)} examples fits model.context = {context} with its whole answer; "
                "use shorter answers or a longer context"
            )
        rows = [row.cut_to(context) for row in fitting]
        self.left_out = len(examples) - len(fitting)
        """Examples whose answer is too long."""
        self.shortened = sum(len(old) > len(new) for old, new in zip(fitting, rows, strict=True))
        """Examples that lost the front of their prompt."""
        longest = max(map(len, rows))
        self.length = min(context, max(least_length, -(-longest // LENGTH_STEP) * LENGTH_STEP))
        self.used_tokens = sum(map(len, rows))
        """Inputs that are no padding."""
        self.end_of_text = tokenizer.end_of_text
        self._fill(rows, np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4"))
        self.answer_tokens = int((self._targets != IGNORED).sum())
        """Targets that count in the loss."""

    def _fill(self, rows: list[_EncodedRow], dtype: np.dtype[Any]) -> None:
        self._tokens = np.full((len(rows), self.length), self.end_of_text, dtype)
        self._targets = np.full((len(rows), self.length), IGNORED, np.int32)
        digest = hashlib.sha256()
        for tokens, targets, row in zip(self._tokens, self._targets, rows, strict=True):
            start, stop = len(row.prompt), len(row)
            tokens[:start], tokens[start:stop] = row.prompt, row.answer
            for first, last in (*row.said, (start, stop)):
                targets[max(first - 1, 0) : last - 1] = tokens[max(first, 1) : last]
                targets[last - 1] = self.end_of_text  # whatever is given next
            places = np.array([start, stop, *itertools.chain(*row.said)], "<u4")
            digest.update(places.tobytes() + tokens[:stop].astype("<u4").tobytes())
        self.fingerprint = digest.hexdigest()
        """SHA-256 of all prompts and answers in order: a resumed run must find the same data."""

    def __len__(self) -> int:
        return len(self._tokens)

    def __str__(self) -> str:
        cut = f", {self.shortened:,} with a shortened prompt" if self.shortened else ""
        lost = f", {self.left_out:,} left out as too long" if self.left_out else ""
        used = self.used_tokens / self._tokens.size
        return (
            f"{len(self):,} examples in rows of {self.length} tokens ({used:.0%} text, the rest is padding), with "
            f"{self.answer_tokens:,} tokens of answers to learn{cut}{lost}"
        )

    def fetch(self, indices: NDArray[np.int64], epoch: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._tokens[indices], self._targets[indices]
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))

    def fixed_batches(self, batch_size: int, limit: int) -> list[tuple[Tensor, Tensor]]:
        """Yield always the same batches to evaluate on, at most `limit`, spread evenly over all examples.

        Every batch has the same shape; what is missing in the last one is filled with targets that do not count.
        Weighed by their targets that count, as the engine does, their mean loss is the mean over tokens.
        """
        count = min(len(self), limit * batch_size)
        chosen = np.linspace(0, len(self) - 1, count).round().astype(np.int64)
        batches = []
        for first in range(0, count, batch_size):
            tokens, targets = self.fetch(chosen[first : first + batch_size], 0)
            missing = (0, 0, 0, batch_size - len(tokens))
            filled = torch.nn.functional.pad(tokens, missing, value=self.end_of_text)
            batches.append((filled, torch.nn.functional.pad(targets, missing, value=IGNORED)))
        return batches


def encode_split(
    train: Sequence[Example], held_out: Sequence[Example], tokenizer: Tokenizer, context: int
) -> tuple[EncodedExamples, EncodedExamples]:
    """Encode both sides in rows of the same length, so that one compiled model serves both."""
    encoded = EncodedExamples(held_out, tokenizer, context, name="held-out data")
    first = EncodedExamples(train, tokenizer, context, least_length=encoded.length)
    if first.length > encoded.length:
        encoded = EncodedExamples(held_out, tokenizer, context, least_length=first.length, name="held-out data")
    return first, encoded
