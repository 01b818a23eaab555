"""Text from a trained model: whole, as a stream, or as an asynchronous stream."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretrain.data.hub_tokenizers import begun, ends_of
from foretrain.data.tokenizers import Tokenizer
from foretrain.errors import ForetrainError, InputError
from foretrain.models.language_model import LanguageModel
from foretrain.serve.sampling import Chooser, Sampling
from foretrain.serve.streaming import FinishReason, StreamToken, TextStream, decoder_factory


@dataclass(frozen=True)
class Completion:
    """A prompt's continuation, the prompt not included."""

    text: str
    tokens: tuple[int, ...]
    """All that were chosen, those that ended the text included."""
    log_probabilities: tuple[float, ...]
    """One number per token, under the model's own distribution: before penalty, temperature, top-k and top-p."""
    finish_reason: FinishReason


class Adapters(Protocol):
    """What is needed of a registry of adapters."""

    @property
    def active(self) -> str | None:
        """Return the adapter of requests that name none."""

    def serving(self, names: Sequence[str | None]) -> AbstractContextManager[object]:
        """Inside, row i of a batch goes through adapter `names[i]`, None being the model alone."""


class TextGenerator:
    """Continues prompts. One object serves any number of threads and tasks; share one per model.

    A request owns all its state (cache, random numbers, text), so that one can be dropped at any time. The model is in
    use only while a token is made: under a lock, in evaluation mode, inside its row's adapters.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, registry: Adapters | None = None) -> None:
        if tokenizer.vocab_size > model.shape.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.shape.vocab_size}; "
                "use the tokenizer the model was trained with"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.registry = registry
        self._new_decoder = decoder_factory(tokenizer)
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="foretrain-generate")

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling: Sampling | Sequence[Sampling] | None = None,
        adapters: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """One completion per prompt, all in one batch; settings and adapters are one for all, or one each.

        Without `adapters` the registry's active one is used; None in a list of them is the model alone. Rows of one
        prompt and one seed get one text: for several texts give several seeds.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not prompts:
            return []
        request = self._request(prompts, sampling, adapters)
        while not request.is_finished:
            request.step()
        return [row.completion() for row in request.rows]

    def stream(
        self, prompt: str, sampling: Sampling | None = None, adapter: str | None = None
    ) -> Generator[StreamToken, None, None]:
        """Yield tokens as they are made. Stop reading, or `close()`, to cancel."""
        request = self._request([prompt], sampling, adapter)
        return self._tokens(request)

    def astream(
        self, prompt: str, sampling: Sampling | None = None, adapter: str | None = None
    ) -> AsyncGenerator[StreamToken, None]:
        """Stream like `stream`; the event loop stays free. Cancelling waits for the token in progress."""
        request = self._request([prompt], sampling, adapter)
        return self._tokens_in_worker(request)

    @staticmethod
    def _tokens(request: _Request) -> Generator[StreamToken, None, None]:
        while not request.is_finished:
            yield request.step()[0]

    async def _tokens_in_worker(self, request: _Request) -> AsyncGenerator[StreamToken, None]:
        while not request.is_finished:
            in_progress = self._worker.submit(request.step)
            try:
                tokens = await asyncio.wrap_future(in_progress)
            except asyncio.CancelledError:
                await _settled(in_progress)
                raise
            yield tokens[0]

    def _request(
        self,
        prompts: list[str],
        sampling: Sampling | Sequence[Sampling] | None,
        adapters: str | Sequence[str | None] | None,
    ) -> _Request:
        samplings = [sampling or Sampling()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        names = [adapters] * len(prompts) if adapters is None or isinstance(adapters, str) else list(adapters)
        for what, values in (("settings", samplings), ("adapters", names)):
            if len(values) != len(prompts):
                raise InputError(
                    f"{len(values)} {what} for {len(prompts)} prompts; give one for all of them, or one for each"
                )
        if adapters is not None and self.registry is None:
            raise InputError(f"adapters = {adapters!r} needs a registry; make the TextGenerator with registry=...")
        if self.registry is None:
            return _Request(self, prompts, samplings, None)
        if adapters is None:  # what is active now, to the end of the text
            names = [self.registry.active] * len(prompts)
        with self.registry.serving(names):  # a wrong name is said at once
            return _Request(self, prompts, samplings, names)

    def new_text(self, sampling: Sampling) -> TextStream:
        """Return an empty text that ends where `sampling` says."""
        return TextStream(self._new_decoder(), sampling.stop_strings)

    def logits(self, tokens: Tensor, cache: Any, adapters: Sequence[str | None] | None) -> Tensor:
        """Make one forward pass, with the model for itself."""
        serving = nullcontext() if self.registry is None or adapters is None else self.registry.serving(adapters)
        with serving, self._lock, _evaluating(self.model):
            logits: Tensor = self.model.decode(tokens, cache)
            return logits


class _GeneratedRow:
    """One prompt and what has been made of it so far."""

    def __init__(self, sampling: Sampling, room: int, text: TextStream, ends: frozenset[int]) -> None:
        self.sampling = sampling
        self.limit = min(sampling.max_tokens, room)
        self.finish_reason: FinishReason | None = None
        self._text = text
        self._ends = ends
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._log_probabilities: list[float] = []

    def accept(self, token: int, log_probability: float) -> StreamToken:
        """Take the next token, and say what it adds to the text."""
        self._tokens.append(token)
        self._log_probabilities.append(log_probability)
        is_eos = token in self._ends
        reason: FinishReason | None = None
        piece = ""
        if is_eos or token in self.sampling.stop_tokens:
            reason = "eos" if is_eos else "stop"
            piece, _ = self._text.finish()
        else:
            piece, stopped = self._text.push(token)
            if not stopped and len(self._tokens) == self.limit:
                reason = "length" if self.limit == self.sampling.max_tokens else "context"
                rest, stopped = self._text.finish()
                piece += rest
            if stopped:
                reason = "stop"
        self._pieces.append(piece)
        self.finish_reason = reason
        return StreamToken(token, piece, log_probability, is_eos, reason)

    def completion(self) -> Completion:
        if self.finish_reason is None:
            raise RuntimeError("the row is not finished")  # generate asks after its last step
        return Completion(
            "".join(self._pieces), tuple(self._tokens), tuple(self._log_probabilities), self.finish_reason
        )


class _Request:
    """Prompts that are continued together, and all the state this takes."""

    def __init__(
        self,
        generator: TextGenerator,
        prompts: list[str],
        samplings: list[Sampling],
        adapters: list[str | None] | None,
    ) -> None:
        tokenizer, context = generator.tokenizer, generator.model.shape.context
        self._generator = generator
        self._adapters = adapters
        self._prompts = [begun(tokens, tokenizer).tolist() for tokens in tokenizer.encode_batch(prompts)]
        ends = ends_of(tokenizer)
        self.rows: list[_GeneratedRow] = []
        for number, (prompt, sampling) in enumerate(zip(self._prompts, samplings, strict=True), 1):
            room = context + 1 - max(1, len(prompt))
            if room < 1:
                raise InputError(
                    f"prompt {number} of {len(prompts)} has {len(prompt)} tokens, {1 - room} more than "
                    f"model.context = {context}; shorten it"
                )
            self.rows.append(_GeneratedRow(sampling, room, generator.new_text(sampling), ends))
        self._steps = max(row.limit for row in self.rows)
        self._made = 0
        self._next: Tensor | None = None
        self.is_finished = False

    def step(self) -> list[StreamToken]:
        """Make one more token for every row that is not finished."""
        if self._next is None:
            self._next = self._prepare()
        # the registry is entered outside of inference mode: a tensor it makes there could not be trained with later
        logits = self._generator.logits(self._next, self._cache, self._adapters)
        with torch.inference_mode():
            tokens, log_probabilities = self._chooser.choose(logits)
            self._next = tokens[:, None]
            numbers, logs = torch.stack((tokens.double(), log_probabilities.double())).tolist()
        self._made += 1
        made: list[StreamToken] = []
        for row, number, log_probability in zip(self.rows, numbers, logs, strict=True):
            if row.finish_reason is not None:
                continue
            if math.isnan(log_probability):
                self.is_finished = True
                raise ForetrainError(
                    f"the model's logits for token {self._made} are not finite: its weights are damaged; "
                    "load an earlier checkpoint"
                )
            made.append(row.accept(int(number), log_probability))
        self.is_finished = all(row.finish_reason is not None for row in self.rows)
        return made

    @torch.inference_mode()
    def _prepare(self) -> Tensor:
        """Return the prompts as one batch, each pushed to the right; an empty one begins a new document."""
        model = self._generator.model
        device = next(model.parameters()).device
        prompts = [prompt or [self._generator.tokenizer.end_of_text] for prompt in self._prompts]
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        # the last token made is never read, and a row cannot read beyond the context
        self._cache = model.make_cache(len(prompts), longest + self._steps - 1, padding)
        samplings = [row.sampling for row in self.rows]
        self._chooser = Chooser(samplings, self._prompts, self._steps, model.shape.vocab_size, device)
        padded = [[0] * empty + prompt for empty, prompt in zip(padding, prompts, strict=True)]
        return torch.tensor(padded, device=device)


async def _settled(in_progress: Future[list[StreamToken]]) -> None:
    """Wait until it is over, however often this task is cancelled meanwhile; what it raises is of no use any more."""
    over = asyncio.wrap_future(in_progress)
    while not over.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([over])
    if not over.cancelled():
        over.exception()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and afterwards give every module the mode it had."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
