"""The same weights give the same logits in Hugging Face's GPT-2, both ways, through files."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, pipeline

from foretrain.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer, train_bpe
from foretrain.errors import CheckpointError
from foretrain.models import huggingface
from foretrain.serve.generate import TextGenerator
from foretrain.serve.sampling import Sampling

Make = Callable[..., Any]


def foreign_model(vocab_size: int = 64, **changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    numbers = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, **changes}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, bos_token_id=None, eos_token_id=None, **numbers))
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too, so that a mix-up of any of them shows
            p.add_(torch.randn_like(p) * 0.05)
    return model.eval()


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """All weights away from their simple first values; rows that are padding stay zero."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
        model.token_embedding.weight[model.shape.vocab_size :] = 0
    return model.eval()


@pytest.mark.parametrize("vocab_size", [64, 1030])
def test_our_weights_in_their_model_give_our_logits(
    vocab_size: int, tmp_path: Path, make_model: Make, make_batch: Make
) -> None:
    ours = shaken(make_model(vocab_size=vocab_size))
    theirs = GPT2LMHeadModel.from_pretrained(huggingface.save(ours, tmp_path / "model")).eval()
    tokens = make_batch(vocab_size=vocab_size)[0]
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [64, 1030])
def test_their_weights_in_our_model_give_their_logits(
    vocab_size: int, tmp_path: Path, make_model: Make, make_batch: Make
) -> None:
    theirs = foreign_model(vocab_size)
    theirs.save_pretrained(tmp_path / "model")
    ours = make_model(vocab_size=vocab_size).eval()
    huggingface.load(ours, tmp_path / "model")
    tokens = make_batch(vocab_size=vocab_size)[0]
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    assert torch.count_nonzero(ours.token_embedding.weight[vocab_size:]) == 0


def test_the_bare_model_without_the_prefix_loads_too(tmp_path: Path, make_model: Make, make_batch: Make) -> None:
    theirs = foreign_model()
    theirs.transformer.save_pretrained(tmp_path / "model")
    ours = make_model().eval()
    huggingface.load(ours, tmp_path / "model")
    tokens = make_batch()[0]
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_both_models_have_the_same_loss_and_gradient(tmp_path: Path, make_model: Make, make_batch: Make) -> None:
    ours = shaken(make_model())
    theirs = GPT2LMHeadModel.from_pretrained(huggingface.save(ours, tmp_path / "model")).eval()
    tokens, targets = make_batch()
    ours(tokens, targets).backward()
    torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten()).backward()
    assert torch.allclose(ours.token_embedding.weight.grad, theirs.transformer.wte.weight.grad, atol=1e-5)
    qkv = ours.blocks[1].attention.qkv.weight.grad
    assert torch.allclose(qkv, theirs.transformer.h[1].attn.c_attn.weight.grad.t(), atol=1e-5)


def test_out_and_in_again_is_bit_exact(tmp_path: Path, make_model: Make) -> None:
    ours, again = shaken(make_model(vocab_size=1030)), make_model(seed=2, vocab_size=1030)
    huggingface.load(again, huggingface.save(ours, tmp_path / "model"))
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_the_written_configuration_describes_the_model(tmp_path: Path, make_model: Make) -> None:
    huggingface.save(make_model(dropout=0.25, vocab_size=1030), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    expected = {"vocab_size": 1030, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.25}
    assert expected.items() <= config.items()
    assert load_file(tmp_path / "model.safetensors")["transformer.wte.weight"].shape == (1030, 32)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_a_pipeline_writes_the_same_text_and_ends_where_we_end(
    kind: str, tmp_path: Path, make_model: Make, make_text: Make
) -> None:
    """Also where nobody says how long: at the end of the text, or of the context."""
    tokenizer: Tokenizer = ByteTokenizer()
    if kind != "byte":
        tokenizer = CharacterTokenizer(make_text(300)) if kind == "char" else train_bpe(iter([make_text(300)]), 280)
    model = make_model(vocab_size=tokenizer.vocab_size, context=24).eval()
    with torch.no_grad():
        model.token_embedding.weight.mul_(20)  # weights that say something, and not always the same
    theirs = pipeline("text-generation", model=str(huggingface.save(model, tmp_path / "model", tokenizer)))
    ours, reasons = TextGenerator(model, tokenizer), set()
    prompts = ["the cat", "a\nmat ", "été 🙂", "", "home again", "two", "s"]
    wanted = ours.generate(prompts, Sampling(max_tokens=1000, temperature=0))
    for prompt, want in zip(prompts, wanted, strict=True):
        assert theirs(prompt, do_sample=False)[0]["generated_text"] == prompt + want.text
        tokens = theirs(prompt, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
        assert tokens[-len(want.tokens) :] == list(want.tokens)
        reasons.add(want.finish_reason)
    assert reasons == {"eos", "context"}


def test_the_umask_says_who_may_read_the_files(tmp_path: Path, make_model: Make) -> None:
    before = os.umask(0o027)
    try:
        folder = huggingface.save(make_model(vocab_size=257), tmp_path / "model", ByteTokenizer())
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
        (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
        0o640,
    )


def test_without_a_tokenizer_there_are_no_files_of_one(tmp_path: Path, make_model: Make) -> None:
    folder = huggingface.save(make_model(), tmp_path / "model")
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None


@pytest.mark.parametrize("changes", [{"bias": False}, {"normalization": "rmsnorm"}])
def test_what_is_no_gpt2_is_not_exported(changes: dict[str, Any], tmp_path: Path, make_model: Make) -> None:
    with pytest.raises(CheckpointError, match=r"model\.bias = true and model\.normalization"):
        huggingface.save(make_model(**changes), tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 3}, "no tensor transformer.h.2.ln_1.weight"),
        ({"width": 64}, "has shape"),
        ({"context": 8}, "transformer.wpe.weight has shape [16, 32], the model needs [8, 32]"),
        ({"vocab_size": 65}, "transformer.wte.weight has shape [64, 32], the model needs [65, 32]"),
    ],
)
def test_weights_of_another_shape_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path, make_model: Make
) -> None:
    folder = huggingface.save(make_model(), tmp_path / "model")
    with pytest.raises(CheckpointError) as caught:
        huggingface.load(make_model(**changes), folder)
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)


def test_weights_with_more_layers_than_the_model_are_refused(tmp_path: Path, make_model: Make) -> None:
    folder = huggingface.save(make_model(layers=3), tmp_path / "model")
    with pytest.raises(CheckpointError):
        huggingface.load(make_model(layers=2), folder)


def test_refused_weights_leave_the_model_as_it_was(tmp_path: Path, make_model: Make) -> None:
    weights = huggingface.to_huggingface(make_model(seed=5))
    weights["transformer.ln_f.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors")
    model = make_model(seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"ln_f\.weight has shape"):
        huggingface.load(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_missing_or_broken_file_is_named(tmp_path: Path, make_model: Make) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        huggingface.load(make_model(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        huggingface.load(make_model(), tmp_path)


@pytest.mark.parametrize("changes", [{"n_head": 4}, {"activation_function": "relu"}, {"tie_word_embeddings": False}])
def test_a_folder_whose_configuration_says_another_model_is_refused(
    changes: dict[str, Any], tmp_path: Path, make_model: Make
) -> None:
    """The tensors have the same shapes, but the same weights mean another function."""
    foreign_model(**changes).save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        huggingface.load(make_model(), tmp_path / "model")
