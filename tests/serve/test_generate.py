"""Generation: with the cache as without, alone as in a batch, whole as in pieces, and usable after any interruption."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.waiting import HANGS

from foretrain.data.tokenizers import ByteTokenizer, CharacterTokenizer
from foretrain.errors import ForetrainError, InputError
from foretrain.models import lora
from foretrain.models.adapter_files import adapter_of
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.serve.adapters import AdapterRegistry
from foretrain.serve.generate import Completion, TextGenerator
from foretrain.serve.sampling import Chooser, Sampling

CONTEXT = 48
PROMPTS = ["a", "the cat sat on the mat", "", "🙂 and äöü", "x" * CONTEXT]
GREEDY = Sampling(temperature=0, max_tokens=CONTEXT)
SAMPLED = Sampling(temperature=0.8, top_k=80, top_p=0.95, repetition_penalty=1.2, seed=7, max_tokens=CONTEXT)


def make_model(seed: int = 1, **options: Any) -> GPT2:
    """Weights large enough that tokens and places matter."""
    model = GPT2(GPT2Shape(2, 2, 32, context=CONTEXT, vocab_size=257, **options), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model.eval()


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    return TextGenerator(make_model(), ByteTokenizer())


def without_cache(model: GPT2, prompt: str, sampling: Sampling) -> tuple[list[int], list[float], str]:
    """The definition: read everything anew for each token."""
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode_batch([prompt])[0].tolist()
    tokens = encoded or [tokenizer.end_of_text]
    chooser = Chooser([sampling], [encoded], sampling.max_tokens, 257, torch.device("cpu"))
    made: list[int] = []
    logs: list[float] = []
    while True:
        with torch.no_grad():
            token, log_probability = chooser.choose(model(torch.tensor([tokens]))[:, -1])
        tokens.append(int(token))
        made.append(int(token))
        logs.append(float(log_probability))
        if made[-1] == tokenizer.end_of_text:
            return made, logs, "eos"
        if len(made) == sampling.max_tokens:
            return made, logs, "length"
        if len(tokens) > CONTEXT:
            return made, logs, "context"


# --- the same with and without a cache, alone and together ---------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(seed=3, max_tokens=9)])
def test_cached_generation_is_uncached_generation_token_for_token(sampling: Sampling, generator: TextGenerator) -> None:
    together = generator.generate(PROMPTS, sampling)
    for prompt, in_batch in zip(PROMPTS, together, strict=True):
        tokens, logs, reason = without_cache(generator.model, prompt, sampling)
        (alone,) = generator.generate(prompt, sampling)
        for result in (in_batch, alone):
            assert list(result.tokens) == tokens
            assert result.log_probabilities == pytest.approx(logs, abs=1e-5)
            assert result.finish_reason == reason
            assert result.text == ByteTokenizer().decode(tokens)


def test_the_texts_of_these_tests_vary(generator: TextGenerator) -> None:
    results = generator.generate(PROMPTS[:4], SAMPLED)
    assert len({result.tokens for result in results}) == 4
    assert all(len(set(result.tokens)) > 3 for result in results)


def test_rows_may_have_their_own_settings(generator: TextGenerator) -> None:
    samplings = [GREEDY, SAMPLED, Sampling(seed=1, max_tokens=2), Sampling(seed=2, max_tokens=5)]
    together = generator.generate(PROMPTS[:4], samplings)
    alone = [generator.generate(p, s)[0] for p, s in zip(PROMPTS[:4], samplings, strict=True)]
    assert [result.tokens for result in together] == [result.tokens for result in alone]


def test_seeds_reproduce_and_no_seed_is_new_each_time(generator: TextGenerator) -> None:
    seeded = [generator.generate("a", Sampling(seed=5))[0].text for _ in range(2)]
    unseeded = [generator.generate("a", Sampling())[0].text for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert unseeded[0] != unseeded[1]


def test_half_precision_generates_too() -> None:
    generator = TextGenerator(make_model().to(torch.bfloat16), ByteTokenizer())
    assert all(result.text for result in generator.generate(["a", "the cat"], GREEDY))


# --- how a text ends -----------------------------------------------------------------------------------------------


def test_a_full_context_ends_a_text(generator: TextGenerator) -> None:
    (full,) = generator.generate("x" * CONTEXT, GREEDY)
    assert (len(full.tokens), full.finish_reason) == (1, "context")
    (exact,) = generator.generate("x" * (CONTEXT - 3), Sampling(temperature=0, max_tokens=4))
    assert (len(exact.tokens), exact.finish_reason) == (4, "length")


def test_too_long_a_prompt_is_an_error_that_says_by_how_much(generator: TextGenerator) -> None:
    with pytest.raises(InputError, match=r"prompt 2 of 2 has 51 tokens, 3 more than model\.context = 48; shorten it"):
        generator.generate(["a", "x" * 51], GREEDY)


class Scripted:
    """Makes the model want certain tokens, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generator: TextGenerator) -> None:
        self.generator = generator
        self._patch = monkeypatch

    def says(self, text: str, end: bool = False) -> TextGenerator:
        script = [*text.encode(), *([256] if end else [])]
        place = iter(script)

        def logits(tokens: torch.Tensor, cache: Any, adapters: Any) -> torch.Tensor:
            return 50.0 * torch.nn.functional.one_hot(torch.tensor([next(place)]), 257)

        self._patch.setattr(self.generator, "logits", logits)
        return self.generator


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch, TextGenerator(make_model(), ByteTokenizer()))


def test_the_end_of_text_ends_the_text(scripted: Scripted) -> None:
    tokens = list(scripted.says("hi🙂", end=True).stream("", GREEDY))
    assert "".join(token.text for token in tokens) == "hi🙂"
    assert [token.is_eos for token in tokens] == [False] * 6 + [True]
    assert [token.finish_reason for token in tokens] == [None] * 6 + ["eos"]
    assert tokens[-1].log_probability == pytest.approx(0.0, abs=1e-6)


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(scripted: Scripted) -> None:
    (result,) = scripted.says("one. two.").generate("", Sampling(temperature=0, stop_tokens=(ord("."),)))
    assert (result.text, result.finish_reason, len(result.tokens)) == ("one", "stop", 4)


def test_a_stop_string_over_many_tokens_is_never_shown(scripted: Scripted) -> None:
    stop = Sampling(temperature=0, stop_strings=("\nUser:", "🙂!"))
    tokens = list(scripted.says("yes\nUse it 🙂!?").stream("", stop))
    assert "".join(token.text for token in tokens) == "yes\nUse it "
    assert tokens[-1].finish_reason == "stop"


def test_what_waited_for_a_stop_string_is_shown_at_the_end(scripted: Scripted) -> None:
    (result,) = scripted.says("yes\nUser").generate(
        "", Sampling(temperature=0, max_tokens=8, stop_strings=("\nUser:",))
    )
    assert (result.text, result.finish_reason) == ("yes\nUser", "length")
    (ended,) = scripted.says("yes\nUs", end=True).generate("", Sampling(temperature=0, stop_strings=("\nUser:",)))
    assert (ended.text, ended.finish_reason) == ("yes\nUs", "eos")


# --- streams -------------------------------------------------------------------------------------------------------


async def collected(generator: TextGenerator, prompt: str, sampling: Sampling) -> list[Any]:
    return [token async for token in generator.astream(prompt, sampling)]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streams_give_what_generate_gives(prompt: str, generator: TextGenerator) -> None:
    (whole,) = generator.generate(prompt, SAMPLED)
    for tokens in (list(generator.stream(prompt, SAMPLED)), asyncio.run(collected(generator, prompt, SAMPLED))):
        assert tuple(token.id for token in tokens) == whole.tokens
        assert "".join(token.text for token in tokens) == whole.text
        assert tuple(token.log_probability for token in tokens) == whole.log_probabilities
        assert tokens[-1].finish_reason == whole.finish_reason


def test_errors_come_with_the_call_not_with_the_first_token(generator: TextGenerator) -> None:
    with pytest.raises(InputError, match="shorten it"):
        generator.stream("x" * 99)
    with pytest.raises(InputError, match="shorten it"):
        generator.astream("x" * 99)


def test_a_stream_can_be_dropped_in_the_middle_and_the_generator_used_again(generator: TextGenerator) -> None:
    expected = generator.generate("a", SAMPLED)
    stream = generator.stream("a", SAMPLED)
    next(stream)
    stream.close()
    assert list(stream) == []
    for number, _ in enumerate(generator.stream("b", SAMPLED)):
        if number == 3:
            break
    assert generator.generate("a", SAMPLED) == expected


def test_streams_may_alternate(generator: TextGenerator) -> None:
    one, other = generator.stream("a", SAMPLED), generator.stream("the cat", GREEDY)
    pairs = [(next(one).id, next(other).id) for _ in range(10)]
    assert [first for first, _ in pairs] == list(generator.generate("a", SAMPLED)[0].tokens[:10])
    assert [second for _, second in pairs] == list(generator.generate("the cat", GREEDY)[0].tokens[:10])


class Slow:
    """A generator whose first forward pass lasts until the test lets it go on, and says when it runs."""

    def __init__(self) -> None:
        self.generator = TextGenerator(make_model(), ByteTokenizer())
        self.running = 0
        self.begun, self.go_on = threading.Event(), threading.Event()
        original = self.generator.model.decode

        def decode(*arguments: Any) -> torch.Tensor:
            self.running += 1
            self.begun.set()
            assert self.running == 1, "two forward passes at once"
            assert self.go_on.wait(HANGS)
            try:
                return original(*arguments)
            finally:
                self.running -= 1

        self.generator.model.decode = decode  # type: ignore[method-assign]


def test_cancelling_a_task_waits_for_the_token_in_progress_and_leaves_all_usable() -> None:
    slow = Slow()

    async def cancelled() -> None:
        task = asyncio.create_task(collected(slow.generator, "a", SAMPLED))
        await asyncio.to_thread(slow.begun.wait)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # impatience changes nothing
        assert slow.running == 1
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert slow.running == 0
        short = Sampling(temperature=0, max_tokens=3)
        assert len(await collected(slow.generator, "a", short)) == 3

    asyncio.run(cancelled())
    assert len(slow.generator.generate("a", Sampling(max_tokens=2))[0].tokens) == 2


def test_a_cancelled_task_is_cancelled_even_where_its_token_fails(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    slow.generator.model.final_norm = None  # type: ignore[assignment]

    async def cancelled() -> None:
        task = asyncio.create_task(collected(slow.generator, "a", SAMPLED))
        await asyncio.to_thread(slow.begun.wait)
        task.cancel()
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()

    asyncio.run(cancelled())
    assert not caplog.records, "an exception nobody can read is not reported as lost"


def test_an_asynchronous_stream_can_be_closed_in_the_middle(generator: TextGenerator) -> None:
    async def closed() -> list[int]:
        stream = generator.astream("a", SAMPLED)
        first = [(await anext(stream)).id, (await anext(stream)).id]
        await stream.aclose()
        assert [token async for token in stream] == []
        return first

    assert asyncio.run(closed()) == list(generator.generate("a", SAMPLED)[0].tokens[:2])


def test_the_event_loop_stays_free_while_tokens_are_made() -> None:
    slow = Slow()

    async def ticks() -> int:
        task = asyncio.create_task(collected(slow.generator, "a", Sampling(temperature=0, max_tokens=2)))
        count = 0
        while not task.done():
            await asyncio.sleep(0)
            count += 1
            if count == 10:
                slow.go_on.set()
        return count

    assert asyncio.run(ticks()) >= 10


def test_a_failure_in_the_model_reaches_the_reader_and_the_next_request_works(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(generator.model, "decode", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            next(generator.stream("a"))
        with pytest.raises(RuntimeError, match="out of memory"):
            asyncio.run(collected(generator, "a", SAMPLED))
    assert generator.generate("a", Sampling(max_tokens=1))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_weights_that_are_not_finite_are_an_error_not_a_text(sampling: Sampling) -> None:
    model = make_model()
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    with pytest.raises(ForetrainError, match="token 1 are not finite: its weights are damaged"):
        TextGenerator(model, ByteTokenizer()).generate("a", sampling)


# --- threads, modes, adapters --------------------------------------------------------------------------------------


def test_many_threads_and_tasks_share_one_generator(generator: TextGenerator) -> None:
    samplings = [Sampling(seed=seed, max_tokens=15) for seed in range(8)]
    expected = [generator.generate("the cat", sampling)[0].tokens for sampling in samplings]

    def streamed(sampling: Sampling) -> tuple[int, ...]:
        return tuple(token.id for token in generator.stream("the cat", sampling))

    async def gathered() -> list[tuple[int, ...]]:
        results = await asyncio.gather(*(collected(generator, "the cat", sampling) for sampling in samplings))
        return [tuple(token.id for token in result) for result in results]

    with ThreadPoolExecutor(5) as pool:
        in_tasks = pool.submit(lambda: asyncio.run(gathered()))
        assert list(pool.map(streamed, samplings)) == expected
        assert in_tasks.result() == expected


def test_the_mode_of_every_module_is_restored_and_dropout_is_off() -> None:
    model = make_model(dropout=0.5).train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    generator = TextGenerator(model, ByteTokenizer())
    stream = generator.stream("a", GREEDY)
    first = next(stream)
    assert [module.training for module in model.modules()] == modes
    stream.close()
    assert first.id == generator.generate("a", GREEDY)[0].tokens[0]
    assert [module.training for module in model.modules()] == modes
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()


class Registry:
    """Adds to the token embedding's output what the row's adapter says; remembers who was served."""

    def __init__(self, model: GPT2) -> None:
        self.served: list[list[str | None]] = []
        self.active: str | None = None
        self._turn = threading.Lock()
        self._names: Sequence[str | None] | None = None
        model.final_norm.register_forward_hook(self._change)

    @contextmanager
    def serving(self, names: Sequence[str | None]) -> Iterator[None]:
        assert all(name in (None, "one", "two") for name in names), "no such adapter"
        with self._turn:
            self._names = names
            self.served.append(list(names))
            try:
                yield
            finally:
                self._names = None

    def _change(self, module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        if not self._names:
            return output
        sizes = torch.tensor([{None: 0.0, "one": 3.0, "two": -3.0}[name] for name in self._names])
        return output + sizes[:, None] * torch.arange(output.shape[-1]).sin()


@pytest.fixture
def adapted() -> TextGenerator:
    model = make_model()
    return TextGenerator(model, ByteTokenizer(), Registry(model))


def texts(completions: list[Completion]) -> list[str]:
    return [completion.text for completion in completions]


def test_rows_of_one_batch_use_their_own_adapters(adapted: TextGenerator) -> None:
    names = [None, "one", "two"]
    together = texts(adapted.generate(["a"] * 3, SAMPLED, names))
    assert together == [texts(adapted.generate("a", SAMPLED, [name]))[0] for name in names]
    assert len(set(together)) == 3
    assert texts(adapted.generate(["a", "b"], SAMPLED, "one"))[0] == together[1]


def test_streams_with_different_adapters_interleave(adapted: TextGenerator) -> None:
    names = [None, "one", "two", "one"]
    expected = texts(adapted.generate(["a"] * 4, SAMPLED, names))

    def streamed(name: str | None) -> str:
        return "".join(token.text for token in adapted.stream("a", SAMPLED, name))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(streamed, names)) == expected
    stream = adapted.stream("a", SAMPLED, "one")
    next(stream)
    assert texts(adapted.generate("a", SAMPLED, "two"))[0] == expected[2]
    assert "".join(token.text for token in stream) in expected[1]


def test_an_error_of_the_registry_leaves_it_usable(adapted: TextGenerator) -> None:
    with pytest.raises(AssertionError, match="no such adapter"):
        adapted.generate("a", SAMPLED, "three")
    assert adapted.generate("a", SAMPLED, "one")


def test_without_names_what_is_active_holds_to_the_end_of_a_text(adapted: TextGenerator) -> None:
    assert isinstance(adapted.registry, Registry)
    expected = texts(adapted.generate("a", SAMPLED, "one"))[0]
    adapted.registry.active = "one"
    stream = adapted.stream("a", SAMPLED)
    first = next(stream).text
    adapted.registry.active = "two"
    assert first + "".join(token.text for token in stream) == expected
    assert texts(adapted.generate("a", SAMPLED)) == texts(adapted.generate("a", SAMPLED, "two"))


def test_a_request_inside_another_turn_of_the_registry_does_not_lock_up(adapted: TextGenerator) -> None:
    """Whoever waits for the registry must not hold the model meanwhile."""
    assert isinstance(adapted.registry, Registry)
    with adapted.registry.serving(["one"]):
        waiting = threading.Thread(target=lambda: adapted.generate("a", SAMPLED, "two"), daemon=True)
        waiting.start()
        assert adapted._lock.acquire(timeout=HANGS)
        adapted._lock.release()
    waiting.join(timeout=HANGS)
    assert not waiting.is_alive()


def test_the_registry_of_this_library_gives_each_row_its_adapter() -> None:
    model = make_model()
    adapters = {}
    for seed, name in enumerate(["law", "code"]):
        changed = copy.deepcopy(model)
        lora.attach(changed, lora.LoraSettings(rank=4), seed)
        with torch.no_grad():
            for layer in lora.adapted_layers(changed).values():
                layer.lora_b.normal_(generator=torch.Generator().manual_seed(seed))
        adapters[name] = (adapter_of(changed), TextGenerator(changed.eval(), ByteTokenizer()))
    names = ["law", None, "code", "law"]
    prompts = ["a", "the cat sat", "🙂", "on"]
    plain = TextGenerator(copy.deepcopy(model), ByteTokenizer())
    alone = [adapters[name][1] if name else plain for name in names]
    expected = [texts(one.generate(prompt, GREEDY))[0] for one, prompt in zip(alone, prompts, strict=True)]
    registry = AdapterRegistry(model)
    for name, (adapter, _) in adapters.items():
        registry.load(name, adapter)
    generator = TextGenerator(model, ByteTokenizer(), registry)
    assert texts(generator.generate(prompts, GREEDY, names)) == expected
    stream = generator.stream("a", GREEDY, "law")
    first = next(stream).text
    registry.activate("code")
    assert texts(generator.generate("🙂", GREEDY))[0] == expected[2]
    assert first + "".join(token.text for token in stream) == expected[0]
    with pytest.raises(InputError, match="poems"):
        generator.generate("a", GREEDY, "poems")
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()


# --- what does not fit ---------------------------------------------------------------------------------------------


def test_adapters_without_a_registry_are_an_error(generator: TextGenerator) -> None:
    with pytest.raises(InputError, match="adapters = 'one' needs a registry"):
        generator.stream("a", GREEDY, "one")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda generator: generator.generate(["a", "b"], [GREEDY]), "1 settings for 2 prompts"),
        (lambda generator: generator.generate(["a"], GREEDY, ["x", "y"]), "2 adapters for 1 prompts"),
    ],
)
def test_counts_must_match(call: Callable[[TextGenerator], Any], words: str, generator: TextGenerator) -> None:
    with pytest.raises(InputError, match=words):
        call(generator)


def test_a_foreign_tokenizer_is_refused() -> None:
    model = GPT2(GPT2Shape(1, 1, 8, context=8, vocab_size=3))
    assert TextGenerator(model, CharacterTokenizer("ab")).generate("ab", Sampling(max_tokens=1))
    with pytest.raises(InputError, match="the tokenizer has 257 tokens, the model 3"):
        TextGenerator(model, ByteTokenizer())


def test_no_prompts_no_completions(generator: TextGenerator) -> None:
    assert generator.generate([], GREEDY) == []
