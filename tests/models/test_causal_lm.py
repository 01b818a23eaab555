"""Models of other families than GPT-2, opened by transformers: the same numbers as theirs, and what is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.causal import FAMILIES, make_inner, write_causal
from torch.nn import functional as F

from foretrain import Sampling, TextGenerator
from foretrain.errors import CheckpointError, ConfigError, ForetrainError, InputError
from foretrain.models import base_weights, huggingface, lora
from foretrain.models.causal_files import checked_config, open_causal, shape_in
from foretrain.models.causal_lm import CausalLM
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.models.loss import IGNORED
from foretrain.recipes.open_model import any_shape_of, asked_in_chats, open_base

TEXTS = ["Once upon a time there was", "x", "Where is my card? It is"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_causal(tmp_path_factory.mktemp("bases") / "llama", begins=True)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[:, :9] = IGNORED
    targets[0, 20:] = IGNORED
    return tokens, targets


def change(folder: Path, target: Path, **values: Any) -> Path:
    """Link a folder with another config.json; None takes a value away."""
    target.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_loss_and_text_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_causal(tmp_path / family, family, begins=family == "llama")
    base = open_base(folder, fused_loss=True)
    assert isinstance(base.model, CausalLM)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens, targets = batch()
    with torch.no_grad():
        logits = theirs(tokens).logits
        wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        assert torch.equal(base.model(tokens), logits)
        torch.testing.assert_close(base.model.loss((tokens, targets)), wanted, rtol=1e-5, atol=1e-6)
    assert (base.model._head_to_fuse(tokens) is None) == (family == "gemma2")  # which caps its logits
    told = transformers.AutoTokenizer.from_pretrained(folder)
    ours = TextGenerator(base.model, base.tokenizer).generate(TEXTS, Sampling(max_tokens=12, temperature=0))
    for text, completion in zip(TEXTS, ours, strict=True):
        given = told(text, return_tensors="pt")
        made = theirs.generate(given.input_ids, max_new_tokens=12, do_sample=False)[0, given.input_ids.shape[1] :]
        assert list(completion.tokens) == made.tolist()


def test_a_fused_loss_has_the_gradients_of_a_plain_one() -> None:
    found = []
    for fused in (True, False):
        inner = make_inner("llama")
        model = CausalLM(inner, shape=_shape(inner), fused_loss=fused, loss_rows=16)
        lora.attach(model, lora.LoraSettings(rank=4), 0)
        model.loss(batch()).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-6)


def _shape(inner: Any) -> Any:
    from foretrain.models.causal_shape import shape_of

    return shape_of(inner)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputed_blocks_give_the_same_bits(dropout: float) -> None:
    gradients = []
    for share in (False, 0.5, True):
        inner = make_inner("llama")
        model = CausalLM(inner, _shape(inner), activation_checkpointing=share).train()
        lora.attach(model, lora.LoraSettings(rank=4, dropout=dropout), 0)
        blocks = list(inner.model.layers)
        calls: Counter[int] = Counter()
        for block in blocks:
            block.input_layernorm.register_forward_hook(lambda norm, *_, seen=calls: seen.update([id(norm)]))
        torch.manual_seed(0)
        model.loss(batch()).backward()
        assert sorted(calls.values()) == {False: [1, 1], 0.5: [1, 2], True: [2, 2]}[share]
        assert model.draws_again == (bool(share) and dropout > 0)
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for other in gradients[1:]:
        assert all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))


def test_adapters_stand_beside_all_linear_layers_but_the_output(tmp_path: Path) -> None:
    for family, output in (("llama", "lm_head"), ("gpt_neox", "embed_out"), ("qwen2", "lm_head")):
        inner = make_inner(family)
        model = CausalLM(inner, _shape(inner))
        names = lora.attach(model, lora.LoraSettings(rank=2), 0)
        assert len(names) == (8 if family == "gpt_neox" else 14)
        assert not any(output in name for name in names)


# --- number formats --------------------------------------------------------------------------------------------------


def test_weights_are_held_in_the_format_that_they_are_multiplied_in(tmp_path: Path) -> None:
    folder = write_causal(tmp_path / "llama", dtype=torch.bfloat16)

    def formats(**options: Any) -> set[torch.dtype]:
        model = open_causal(folder, **options)
        assert model.shape == shape_in(folder, options.get("precision", "fp32"), options.get("narrow_residual", True))
        return {p.dtype for p in model.parameters()}

    assert formats() == {torch.float32}
    assert formats(precision="bf16") == {torch.bfloat16}
    assert formats(precision="bf16", narrow_residual=False) == {torch.float32}
    assert formats(precision="fp16") == {torch.float32}
    one, other = open_causal(folder), open_causal(folder, precision="bf16")
    assert base_weights.checksum(one) == base_weights.checksum(other)


@pytest.mark.parametrize("narrow", [True, False])
def test_the_residual_stream_is_narrow_where_it_is_wanted(narrow: bool) -> None:
    inner = make_inner("llama")
    model = CausalLM(inner, _shape(inner), narrow_residual=narrow)
    seen: list[torch.dtype] = []
    inner.model.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.loss(batch())
    assert seen == [torch.bfloat16 if narrow else torch.float32]


# --- files -----------------------------------------------------------------------------------------------------------


def test_weights_in_several_files_open(tmp_path: Path) -> None:
    folder = write_causal(tmp_path / "base", shard="20KB")
    assert not (folder / "model.safetensors").exists()
    one = open_base(folder).model(batch()[0])
    assert torch.equal(one, make_inner("llama")(batch()[0]).logits)
    index = folder / "model.safetensors.index.json"
    for name in ("../elsewhere.safetensors", "weights.bin", 7):
        values = json.loads(index.read_text())
        values["weight_map"]["lm_head.weight"] = name
        index.write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match="only safetensors files beside it can be opened"):
            open_base(folder)


def test_a_config_chooses_no_code(llama: Path, tmp_path: Path) -> None:
    chosen = {"attn_implementation": "somebody/kernel", "_attn_implementation": "somebody/kernel"}
    folder = change(llama, tmp_path / "chosen", **chosen, transformers_weights="other.bin", dtype="load")
    model: Any = open_base(folder).model
    assert model.inner.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map asks for code .* which is never run"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder with a decoder"),
        ({"model_type": "no_such_model"}, "'no_such_model' is no causal language model that transformers"),
        ({"model_type": 5}, "model_type = 5; it must name a type of model"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantized"),
        ({"vocab_size": 10**9}, "vocab_size = 1000000000; no model has so many"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000; no model has so many"),
        ({"num_hidden_layers": 999}, "config.json says 999 layers"),
        ({"hidden_size": 2**20}, "a model of .* weights, its files hold"),
        ({"intermediate_size": 40}, "no tensor fits model.layers.0.mlp.down_proj.weight"),
        ({"hidden_size": "wide"}, "cannot use it"),
        ({"rope_parameters": {"factor": float("inf")}}, "factor = inf; it must be a finite number"),
        ({"model_type": "mamba", "state_size": 4}, "a model of type mamba keeps no keys and values"),
    ],
)
def test_what_cannot_be_a_base_is_refused_in_a_sentence(
    values: dict[str, Any], sentence: str, llama: Path, tmp_path: Path
) -> None:
    folder = change(llama, tmp_path / "refused", **values)
    with pytest.raises(InputError, match=sentence) as refused:
        open_base(folder)
    assert "\n" not in str(refused.value)


def test_pickles_are_never_opened(llama: Path, tmp_path: Path) -> None:
    folder = change(llama, tmp_path / "pickle")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle either")
    with pytest.raises(InputError, match=r"pytorch_model\.bin, a pickle, which can run any code and is never opened"):
        open_base(folder)


def test_a_base_needs_its_tokenizer_and_transformers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = change(llama, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer\.json beside the weights; write one with"):
        open_base(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"need transformers; install it with: .* 'foretrain\[transformers\]'"):
        open_base(llama)


def test_full_weights_of_another_family_are_not_trained(llama: Path) -> None:
    with pytest.raises(CheckpointError, match="model_type = 'llama', but only a GPT-2 is trained at full weights"):
        huggingface.load(GPT2(GPT2Shape(1, 1, 8, 8, 264)), llama)


def test_no_end_of_text_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = change(llama, tmp_path / "endless", eos_token_id=None)
    for name in ("tokenizer_config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        values.pop("eos_token", None), values.pop("eos_token_id", None)
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(values))
    with pytest.raises(InputError, match="nothing says which token ends a text"):
        open_base(folder)


STRANGE: list[Any] = [None, -1, 0, 1.5, "x", [], {}, [1, 2], True, 2**40, {"a": {"b": 3}}]


def test_whatever_a_config_says_comes_as_a_sentence_of_ours(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    names = sorted(set(config) - {"transformers_version", "architectures", "model_type"})
    for number, name in enumerate(names):
        for value in STRANGE[number % 3 :: 3]:
            folder = change(llama, tmp_path / f"{name}-{STRANGE.index(value)}", **{name: value})
            with suppress(ForetrainError):
                any_shape_of(folder)


# --- asking ----------------------------------------------------------------------------------------------------------


def test_an_instructed_model_is_asked_by_its_own_template(llama: Path) -> None:
    base = open_base(llama)
    asked = asked_in_chats(base)
    assert asked is not None
    told = transformers.AutoTokenizer.from_pretrained(llama)
    wanted = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert asked.ask("Hi", {"system": "Be brief."}) == told.apply_chat_template(
        wanted, tokenize=False, add_generation_prompt=True
    )


def test_generation_ends_at_any_of_the_tokens_that_the_model_names(llama: Path, tmp_path: Path) -> None:
    folder = change(llama, tmp_path / "ends")
    (folder / "generation_config.json").unlink()
    first = open_base(llama)
    made = TextGenerator(first.model, first.tokenizer).generate("Once", Sampling(max_tokens=9, temperature=0))[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, made.tokens[3]]}))
    base = open_base(folder)
    ended = TextGenerator(base.model, base.tokenizer).generate("Once", Sampling(max_tokens=9, temperature=0))[0]
    assert ended.finish_reason == "eos"
    assert ended.tokens == made.tokens[: made.tokens.index(made.tokens[3]) + 1]


def test_what_does_not_fit_the_context_is_refused(llama: Path) -> None:
    model = open_base(llama).model
    with pytest.raises(ConfigError, match="97 tokens does not fit the model's context of 96"):
        model(torch.zeros(1, 97, dtype=torch.long))
    with pytest.raises(InputError, match="a cache of 97 tokens does not fit"):
        model.make_cache(1, 97)
    cache = model.make_cache(1, 2)
    with pytest.raises(InputError, match="2 rows of 1 were given"):
        model.decode(torch.zeros(2, 1, dtype=torch.long), cache)


def test_the_config_is_read_before_anything_else(llama: Path, tmp_path: Path) -> None:
    broken: list[Callable[[Path], Any]] = [
        lambda path: path.write_text("["),
        lambda path: path.write_text("[1]"),
        lambda path: path.unlink(),
    ]
    for number, breaks in enumerate(broken):
        folder = change(llama, tmp_path / str(number))
        breaks(folder / "config.json")
        with pytest.raises(CheckpointError):
            checked_config(folder)
        with pytest.raises(ForetrainError):
            open_base(folder)
