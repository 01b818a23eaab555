"""Adapters beside a live model: each request gets its own, swaps cost nothing, errors change nothing."""

from __future__ import annotations

import copy
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import HANGS
from torch import Tensor, nn

from foretrain.errors import CheckpointError, ConfigError
from foretrain.models import lora
from foretrain.models.adapter_files import Adapter, adapter_of, save_adapter
from foretrain.models.lora import LoraSettings
from foretrain.serve.adapters import AdapterRegistry

Make = Callable[..., Any]
KINDS: dict[str, dict[str, Any]] = {
    "law": {"rank": 4},
    "code": {"rank": 8, "alpha": 3.0, "targets": ("qkv",)},
    "poems": {"rank": 1, "rank_stabilized": True, "targets": ("blocks.1.*",)},
    "news": {"rank": 16, "targets": ("feed_forward.*",)},
}


def adapter(model: nn.Module, seed: int, **settings: Any) -> Adapter:
    """A trained adapter for a copy of the model."""
    model = copy.deepcopy(model)
    lora.attach(model, LoraSettings(**settings), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora.adapted_layers(model).values():
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=generator) * 0.1)
    return adapter_of(model)


def logits_with(model: nn.Module, adapter: Adapter, tokens: Tensor) -> Tensor:
    """The reference: this adapter alone, attached as in training."""
    model = copy.deepcopy(model)
    lora.attach_to(model, {path: model.get_submodule(path) for path in adapter.layers}, adapter.settings, 0)
    lora.load_adapter_state(model, adapter.tensors)
    with torch.no_grad():
        return model(tokens)


class World:
    """A model with its registry, adapters for it, and the logits each must give."""

    def __init__(self, model: nn.Module, tokens: Tensor, **options: Any) -> None:
        self.model, self.tokens = model.eval(), tokens
        self.adapters = {name: adapter(model, seed, **kind) for seed, (name, kind) in enumerate(KINDS.items())}
        self.expected = {name: logits_with(model, value, tokens) for name, value in self.adapters.items()}
        with torch.no_grad():
            self.bare = model(tokens)
        self.registry = AdapterRegistry(model, **options)

    def load_all(self) -> None:
        for name, value in self.adapters.items():
            self.registry.load(name, value)

    def gives(self, name: str | None, logits: Tensor | None = None) -> bool:
        if logits is None:
            with torch.no_grad():
                logits = self.model(self.tokens)
        if name is None:
            return torch.equal(logits, self.bare)
        return torch.allclose(logits, self.expected[name], rtol=0, atol=1e-5)


@pytest.fixture
def world(make_model: Make, make_batch: Make) -> World:
    return World(make_model(), make_batch()[0])


@pytest.fixture
def loaded(world: World) -> World:
    world.load_all()
    return world


@pytest.fixture
def clean_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- choosing --------------------------------------------------------------------------------------------------------


def test_each_adapter_gives_its_own_logits_and_none_gives_the_base_models(loaded: World) -> None:
    assert len({tuple(value.flatten().tolist()) for value in loaded.expected.values()}) == 4
    assert loaded.gives(None)
    for name in ["law", "poems", "law", "news", "code"]:
        loaded.registry.activate(name)
        assert loaded.registry.active == name
        assert loaded.gives(name)
    loaded.registry.deactivate()
    assert loaded.registry.active is None
    assert loaded.gives(None)


def test_a_folder_loads_as_the_adapter_does(world: World, tmp_path: Path, make_model: Make) -> None:
    model = make_model()
    lora.attach(model, world.adapters["code"].settings, 0)
    lora.load_adapter_state(model, world.adapters["code"].tensors)
    world.registry.load("code", save_adapter(model, tmp_path / "code"))
    world.registry.activate("code")
    assert world.gives("code")


def test_each_row_may_have_its_own(loaded: World) -> None:
    names = ["poems", None, "law", "news"]
    with loaded.registry.serving(names), torch.no_grad():
        logits = loaded.model(loaded.tokens)
    for row, name in enumerate(names):
        expected = loaded.bare if name is None else loaded.expected[name]
        assert torch.allclose(logits[row], expected[row], rtol=0, atol=1e-5)
    assert torch.equal(logits[1], loaded.bare[1]), "a row of the base model has its very logits"
    for row, name in enumerate(names):
        with loaded.registry.serving(name), torch.no_grad():
            alone = loaded.model(loaded.tokens[row : row + 1])
        assert torch.allclose(alone[0], logits[row], rtol=0, atol=1e-5)


def test_serving_holds_its_choice_and_gives_back_the_active_one(loaded: World) -> None:
    registry = loaded.registry
    registry.activate("law")
    with registry.serving("code"):
        assert loaded.gives("code")
        registry.activate("poems")
        assert loaded.gives("code")
    assert loaded.gives("poems")
    with registry.serving():
        assert loaded.gives("poems")
        registry.deactivate()
        assert loaded.gives("poems")
    with registry.serving(["code"] * 4):
        assert loaded.gives("code")
    with pytest.raises(RuntimeError), registry.serving("law"):
        raise RuntimeError
    assert loaded.gives(None)


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=6), st.integers(1, 12), st.booleans())
def test_padding_to_one_rank_changes_nothing(names: list[str | None], max_rank: int, flat: bool) -> None:
    """Any ranks up to the largest, any mix of rows, inputs with or without a sequence: as a loop over the rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 14)).eval()
    bare = copy.deepcopy(model)
    registry = AdapterRegistry(model, capacity=3, max_rank=max_rank)
    adapters = {name: adapter(bare, i, rank=max(1, max_rank - i), targets=("*",)) for i, name in enumerate("abc")}
    for name, value in adapters.items():
        registry.load(name, value)
    x = torch.randn(len(names), *([] if flat else [3, 2]), 12)
    with registry.serving(names), torch.no_grad():
        got = model(x)
    for row, name in enumerate(names):
        expected = bare(x[row]) if name is None else logits_with(bare, adapters[name], x[row])
        assert torch.allclose(got[row], expected, atol=1e-5)


def test_nothing_active_is_the_base_model_to_the_bit_even_where_numbers_are_odd() -> None:
    """Minus zero, infinities and not-a-numbers: adding zeros would change them."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.eye_(model[0].weight)
    x = torch.tensor([[-0.0, -0.0], [float("inf"), 1.0], [float("nan"), 1.0], [1.0, 2.0]])
    expected = model(x).detach().view(torch.int32)
    registry = AdapterRegistry(model, max_rank=2)
    bare = nn.Sequential(nn.Linear(2, 2, bias=False))
    registry.load("a", adapter(bare, 1, rank=2, targets=("0",)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(model(x).detach().view(torch.int32), expected)
    assert torch.equal(compiled(x).detach().view(torch.int32), expected)
    with registry.serving([None, None, None, "a"]):
        assert torch.equal(model(x)[:3].detach().view(torch.int32), expected[:3])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bfloat16_model_serves_too(autocast: bool, make_model: Make, make_batch: Make) -> None:
    model = make_model() if autocast else make_model().bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        world = World(model, make_batch()[0])
        world.load_all()
        assert world.gives(None)
        with world.registry.serving(["law", "code", None, "news"]), torch.no_grad():
            logits = world.model(world.tokens)
        assert torch.equal(logits[2], world.bare[2])
        assert torch.allclose(logits[0], world.expected["law"][0], atol=0.05)
        assert (logits[0] - world.bare[0]).abs().max() > 0.1


def test_code_that_reads_the_weight_sees_the_chosen_adapter() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    mine = adapter(model, 1, rank=4)
    with torch.no_grad():
        bare = model(x)
        expected = logits_with(model, mine, x)
        registry = AdapterRegistry(model)
        registry.load("mine", mine)
        assert torch.equal(model(x), bare)
        registry.activate("mine")
        assert torch.allclose(model(x), expected, atol=1e-5)
        with registry.serving(["mine", None]), pytest.raises(ConfigError, match="same adapter"):
            model(x)


# --- keeping house ---------------------------------------------------------------------------------------------------


def test_the_list_says_what_is_there(loaded: World) -> None:
    loaded.registry.activate("code")
    listed = {resident.name: resident for resident in loaded.registry.list()}
    assert list(listed) == ["law", "code", "poems", "news"]
    assert [resident.name for resident in listed.values() if resident.active] == ["code"]
    assert listed["code"].rank == 8
    assert listed["code"].layers == ("blocks.0.attention.qkv", "blocks.1.attention.qkv")


def test_a_freed_slot_holds_nothing_of_its_last_adapter(make_model: Make, make_batch: Make) -> None:
    world = World(make_model(), make_batch()[0], capacity=1)
    for name in ("law", "news", "code", "poems", "law"):
        world.registry.load(name, world.adapters[name])
        world.registry.activate(name)
        assert world.gives(name)
        world.registry.deactivate()
        world.registry.unload(name)
    assert world.registry.list() == []


def test_a_full_registry_says_so_and_can_grow(make_model: Make, make_batch: Make) -> None:
    world = World(make_model(), make_batch()[0], capacity=2)
    registry = world.registry
    registry.load("law", world.adapters["law"])
    registry.load("code", world.adapters["code"])
    registry.activate("code")
    with pytest.raises(ConfigError, match="capacity of 2 is full: unload one or make the registry larger"):
        registry.load("news", world.adapters["news"])
    with pytest.raises(ConfigError, match="adds nothing"):
        registry.grow(2)
    before = registry.bytes
    registry.grow(4)
    assert registry.bytes * 3 == before * 5
    assert world.gives("code")
    registry.load("news", world.adapters["news"])
    registry.activate("news")
    assert world.gives("news")


def test_inference_mode_may_begin_and_end_anywhere(make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model(), make_batch()[0]
    with torch.inference_mode():
        world = World(model, tokens, capacity=1)
        world.registry.load("law", world.adapters["law"])
        world.registry.grow(4)
    world.registry.load("code", world.adapters["code"])
    world.registry.activate("code")
    assert world.gives("code")
    assert torch.allclose(world.model(world.tokens), world.expected["code"], atol=1e-5)
    with torch.inference_mode():
        world.registry.activate("law")
        assert world.gives("law")


def test_closing_leaves_the_bare_model(loaded: World, make_model: Make) -> None:
    loaded.registry.activate("law")
    loaded.registry.close()
    assert loaded.gives(None)
    assert loaded.model.state_dict().keys() == make_model().state_dict().keys()
    assert lora.attach(loaded.model, LoraSettings(), seed=0)


def test_a_model_has_one_kind_of_adapters(world: World, make_model: Make) -> None:
    with pytest.raises(ConfigError, match="already has adapters"):
        lora.attach(world.model, LoraSettings(), seed=0)
    with pytest.raises(ConfigError, match="already has adapters"):
        AdapterRegistry(world.model)
    model = make_model()
    lora.attach(model, LoraSettings(), seed=0)
    with pytest.raises(ConfigError, match="already has adapters"):
        AdapterRegistry(model)


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"max_rank": 0}, {"max_rows": 0}, {"targets": ("qkw",)}])
def test_impossible_registries_are_refused(wrong: dict[str, Any], make_model: Make) -> None:
    model = make_model()
    with pytest.raises(ConfigError):
        AdapterRegistry(model, **wrong)
    lora.refuse_adapted(model)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def with_tensor(adapter: Adapter, name: str, value: Tensor) -> Adapter:
    return replace(adapter, tensors={**adapter.tensors, name: value})


QKV = "blocks.0.attention.qkv"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda a: with_tensor(a, "blocks.9.attention.qkv.lora_a", torch.zeros(8, 32)), r"layer blocks\.9\.attention"),
        (lambda a: with_tensor(a, f"{QKV}.lora_a", torch.zeros(8, 33)), r"shape \[8, 33\], the model needs \[8, 32\]"),
        (lambda a: with_tensor(a, f"{QKV}.lora_b", torch.full((96, 8), float("nan"))), "no finite numbers"),
        (lambda a: replace(a, settings=replace(a.settings, rank=17)), "rank 17, the registry holds up to 16"),
        (lambda a: replace(a, settings=replace(a.settings, bias="all")), "also changes biases"),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(break_it: Any, words: str, loaded: World) -> None:
    loaded.registry.activate("law")
    stacks = [layer.a.clone() for layer in loaded.registry._layers.values()]
    with pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        loaded.registry.load("broken", break_it(loaded.adapters["code"]))
    assert "'broken'" in str(caught.value)
    assert [resident.name for resident in loaded.registry.list()] == list(KINDS)
    assert loaded.gives("law")
    assert all(torch.equal(a, layer.a) for a, layer in zip(stacks, loaded.registry._layers.values(), strict=True))


def test_a_broken_file_or_a_wrong_name_changes_nothing(loaded: World, tmp_path: Path) -> None:
    registry = loaded.registry
    registry.activate("law")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}', encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        registry.load("broken", tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        registry.load("missing", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is loaded already"):
        registry.load("law", loaded.adapters["code"])
    with pytest.raises(ConfigError, match="needs a name"):
        registry.load("", loaded.adapters["code"])
    for call in (registry.activate, registry.unload):
        with pytest.raises(ConfigError, match=r"'lew' is not loaded; .*loaded: law, code, poems, news"):
            call("lew")
    for names in ("lew", ["law", "lew"], [], ["law"] * 257):
        with pytest.raises(ConfigError), registry.serving(names):
            pass
    with pytest.raises(ConfigError, match="is active; deactivate it"):
        registry.unload("law")
    assert loaded.gives("law")
    with registry.serving(["law", "code"]), pytest.raises(ConfigError, match="chosen for 2 rows, but a layer got 4"):
        loaded.model(loaded.tokens)
    assert loaded.gives("law")


def test_what_would_wait_for_itself_is_refused(loaded: World) -> None:
    registry = loaded.registry
    with registry.serving("law"):
        for call in (lambda: registry.unload("code"), lambda: registry.grow(9), registry.close):
            with pytest.raises(ConfigError, match="would wait for itself"):
                call()
        with pytest.raises(ConfigError, match="would wait for itself"), registry.serving("code"):
            pass
        assert loaded.gives("law")


# --- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clean_compiler")
def test_swapping_compiles_nothing_anew(loaded: World) -> None:
    registry = loaded.registry
    compiled = torch.compile(loaded.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert loaded.gives(None, compiled(loaded.tokens))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for name in ["law", "code", "poems", "news"]:
                registry.activate(name)
                assert loaded.gives(name, compiled(loaded.tokens))
            registry.deactivate()
            registry.unload("law")
            registry.load("again", loaded.adapters["law"])
            assert loaded.gives(None, compiled(loaded.tokens))
            with registry.serving("again"):
                assert loaded.gives("law", compiled(loaded.tokens))
        with registry.serving(["code", None, "news", "poems"]):
            mixed = compiled(loaded.tokens)
            assert torch.equal(mixed[1], loaded.bare[1])
        with torch._dynamo.config.patch(error_on_recompile=True):
            with registry.serving([None, "code", "code", "poems"]):
                assert torch.allclose(compiled(loaded.tokens)[1], loaded.expected["code"][1], atol=1e-5)
            registry.activate("code")
            assert loaded.gives("code", compiled(loaded.tokens))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.usefixtures("clean_compiler")
def test_generated_code_gives_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    mine, x = adapter(model, 1, rank=2), torch.randn(3, 8)
    expected = logits_with(model, mine, x)
    registry = AdapterRegistry(model, max_rank=4)
    registry.load("mine", mine)
    backend = "inductor" if shutil.which("g++") else "aot_eager"  # generated code needs a C++ compiler
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        bare = compiled(x)
        registry.activate("mine")
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.allclose(compiled(x), expected, atol=1e-5)
            registry.deactivate()
            assert torch.equal(compiled(x), bare)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_a_swap_in_another_thread_waits_for_no_request_and_disturbs_none(loaded: World) -> None:
    registry = loaded.registry
    with ThreadPoolExecutor(1) as other:
        with registry.serving("law"):
            other.submit(registry.activate, "code").result(timeout=HANGS)
            other.submit(registry.load, "more", loaded.adapters["news"]).result(timeout=HANGS)
            assert loaded.gives("law")
            unloading = other.submit(registry.unload, "law")
            while not unloading.running():
                time.sleep(0.001)
            assert loaded.gives("law")
            assert not unloading.done(), "an adapter in use stays until its request is done"
        unloading.result(timeout=HANGS)
    assert loaded.gives("code")
    assert [resident.name for resident in registry.list()] == ["code", "poems", "news", "more"]


def test_a_request_may_end_in_another_thread(loaded: World) -> None:
    """A stream that is dropped is closed by whichever thread collects it."""
    request = loaded.registry.serving("law")
    request.__enter__()
    with ThreadPoolExecutor(1) as other:
        other.submit(request.__exit__, None, None, None).result(timeout=HANGS)
    with loaded.registry.serving("code"):
        assert loaded.gives("code")


def test_a_thousand_operations_from_four_threads(make_model: Make, make_batch: Make) -> None:
    world = World(make_model(), make_batch(rows=3)[0], capacity=6)
    registry = world.registry
    stacks = {id(s): s.data_ptr() for layer in registry._layers.values() for s in (layer.a, layer.b)}
    memory, problems, counts = registry.bytes, [], {"forward": 0, "refused": 0}
    counting = threading.Lock()

    def count(what: str) -> None:
        with counting:
            counts[what] += 1

    def forward(names: Any) -> None:
        with registry.serving(names), torch.no_grad():
            logits = world.model(world.tokens)
            again = world.model(world.tokens)
        rows = names if isinstance(names, list) else [names] * 3
        for row, name in enumerate(rows):
            expected = world.bare if name is None else world.expected[name.rpartition("-")[0]]
            if not torch.allclose(logits[row], expected[row], rtol=0, atol=1e-5) or not torch.equal(logits, again):
                problems.append((names, row))
        count("forward")

    def work(thread: int) -> None:
        generator = random.Random(thread)  # noqa: S311 - no secret
        for _ in range(250):
            kind = generator.choice(list(KINDS))
            name = f"{kind}-{generator.randrange(2)}"
            loaded = [resident.name for resident in registry.list()]
            some = generator.choice([None, *loaded])
            try:
                match generator.randrange(8):
                    case 0 | 1:
                        registry.load(name, world.adapters[kind])
                    case 2:
                        registry.unload(generator.choice(loaded) if loaded else name)
                    case 3:
                        registry.activate(some) if some else registry.deactivate()
                    case 4:
                        forward([generator.choice([None, *loaded]) for _ in range(3)])
                    case _:
                        forward(some)
            except ConfigError:
                count("refused")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANGS)
        assert not thread.is_alive(), "a thread waits for ever"
    assert problems == []
    assert counts["forward"] > 300
    assert counts["refused"] < 700
    assert registry.bytes == memory
    assert stacks == {id(s): s.data_ptr() for layer in registry._layers.values() for s in (layer.a, layer.b)}
    registry.deactivate()
    for resident in registry.list():
        registry.unload(resident.name)
    assert world.gives(None)
