"""PEFT's files both ways, with PEFT itself as the judge, and damaged or foreign files refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretrain.errors import CheckpointError, SaveError
from foretrain.models import adapter_files, huggingface, lora
from foretrain.models.adapter_files import adapter_of, load_adapter, read_adapter, save_adapter
from foretrain.models.lora import LoraSettings

Make = Callable[..., Any]
FIRST = "base_model.model.0.lora_A.weight"


def shaken(model: nn.Module, seed: int = 8) -> nn.Module:
    """All that is trained away from its first values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model.eval()


def plain(seed: int = 0, bias: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Sequential(nn.Linear(8, 5))).eval()


def inputs() -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(4))


def written(folder: Path, **settings: Any) -> Path:
    model = plain()
    lora.attach(model, LoraSettings(**{"rank": 3, "targets": ("0",), **settings}), seed=0)
    return save_adapter(shaken(model), folder)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = {name: value.clone() for name, value in load_file(folder / "adapter_model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


# --- with PEFT itself ------------------------------------------------------------------------------------------------

KINDS = [{}, {"rank_stabilized": True}, {"bias": "lora_only"}, {"bias": "all"}, {"alpha": 2.5, "dropout": 0.5}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", [("*",), ("qkv",), ("attention.out",)])
def test_peft_loads_our_gpt2s_adapter(
    kind: dict[str, Any], targets: tuple[str, ...], tmp_path: Path, make_model: Make, make_batch: Make
) -> None:
    from peft import PeftModel
    from transformers import GPT2LMHeadModel

    ours, tokens = make_model().eval(), make_batch()[0]
    base = GPT2LMHeadModel.from_pretrained(huggingface.save(ours, tmp_path / "base")).eval()
    names = lora.attach(ours, LoraSettings(rank=4, targets=targets, **kind), seed=0)
    shaken(ours)
    save_adapter(ours, tmp_path / "adapter", "the base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    assert sum(hasattr(module, "lora_A") for module in theirs.modules()) == len(names)
    assert theirs.peft_config["default"].base_model_name_or_path == "the base"


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"bias": "lora_only"}, {"bias": "all"}])
@pytest.mark.parametrize("bare", [False, True])
def test_our_gpt2_loads_pefts_adapter(
    kind: dict[str, Any], bare: bool, tmp_path: Path, make_model: Make, make_batch: Make
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    ours, tokens = make_model().eval(), make_batch()[0]
    base = GPT2LMHeadModel.from_pretrained(huggingface.save(ours, tmp_path / "base")).eval()
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True, **kind)
    theirs = get_peft_model(base.transformer if bare else base, config)
    shaken(theirs).save_pretrained(tmp_path / "adapter")
    assert len(load_adapter(ours, tmp_path / "adapter")) == 4
    with torch.no_grad():
        expected = base.lm_head(theirs(tokens).last_hidden_state) if bare else theirs(tokens).logits
        assert torch.allclose(ours(tokens), expected, rtol=0, atol=1e-5)


def test_a_hugging_face_model_itself_can_be_ours_to_adapt(tmp_path: Path, make_model: Make, make_batch: Make) -> None:
    from peft import PeftModel
    from transformers import GPT2LMHeadModel

    base, tokens = huggingface.save(make_model(), tmp_path / "base"), make_batch()[0]
    model = GPT2LMHeadModel.from_pretrained(base).eval()
    assert len(lora.attach(model, LoraSettings(rank=4), seed=0)) == 8, "its tied head has none"
    save_adapter(shaken(model), tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = model(tokens).logits
        assert torch.allclose(logits, theirs(tokens).logits, atol=1e-5)
        lora.merge(model)
        assert torch.allclose(logits, model(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", [("*",), ("0",), ("2.0",)])
def test_a_plain_model_goes_both_ways(kind: dict[str, Any], targets: tuple[str, ...], tmp_path: Path) -> None:
    """The pattern "0" is also the last part of "2.0"; what is saved must name the same layers again."""
    from peft import PeftModel

    ours = plain()
    names = lora.attach(ours, LoraSettings(rank=3, targets=targets, **kind), seed=0)
    save_adapter(shaken(ours), tmp_path / "ours")
    theirs = PeftModel.from_pretrained(plain(), tmp_path / "ours").eval()
    assert torch.allclose(ours(inputs()), theirs(inputs()), atol=1e-6)
    assert sum(hasattr(module, "lora_A") for module in theirs.modules()) == len(names)
    theirs.save_pretrained(tmp_path / "theirs")
    again = plain()
    assert load_adapter(again, tmp_path / "theirs") == names
    assert torch.equal(ours(inputs()), again(inputs()))


@pytest.mark.parametrize("feature", [{"use_dora": True}, {"rank_pattern": {"0": 2}}])
def test_what_peft_can_and_we_cannot_is_refused(feature: dict[str, Any], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(plain(), LoraConfig(r=3, target_modules=["0"], **feature)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{next(iter(feature))} = .* not supported"):
        read_adapter(tmp_path)


# --- our own files ---------------------------------------------------------------------------------------------------


def test_an_adapter_goes_out_and_in_again_to_the_bit(tmp_path: Path, make_model: Make, make_batch: Make) -> None:
    model, tokens = make_model(bias=False).eval(), make_batch()[0]
    lora.attach(model, LoraSettings(rank=4, alpha=3.0, dropout=0.25, rank_stabilized=True), seed=0)
    shaken(model)
    folder = save_adapter(model, tmp_path / "deep" / "adapter", "somewhere/base")
    adapter = read_adapter(folder)
    assert adapter.base_model_name == "somewhere/base"
    assert (adapter.settings.rank, adapter.settings.alpha, adapter.settings.dropout) == (4, 3.0, 0.25)
    assert adapter.settings.rank_stabilized
    assert all(torch.equal(value, adapter.tensors[name]) for name, value in adapter_of(model).tensors.items())
    again = make_model(bias=False).eval()
    load_adapter(again, adapter)
    assert torch.equal(model(tokens), again(tokens))
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_saving_again_replaces_and_a_failed_save_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, alpha=2.0)
    written(tmp_path, alpha=4.0)
    assert read_adapter(tmp_path).settings.alpha == 4.0

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapter_files, "save_file", full)
    with pytest.raises(SaveError, match="No space left"):
        written(tmp_path, alpha=8.0)
    assert read_adapter(tmp_path).settings.alpha == 4.0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_was_killed_between_the_files_is_never_read_as_a_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, alpha=2.0)
    real = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == "adapter_config.json":
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, alpha=4.0)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json does not exist"):
        read_adapter(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config\.json does not exist"):
        read_adapter(tmp_path)
    folder = written(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle and is never opened"):
        read_adapter(folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors does not exist"):
        read_adapter(folder)


def test_no_damage_to_the_weights_file_goes_unseen_or_unnamed(tmp_path: Path) -> None:
    path = written(tmp_path) / "adapter_model.safetensors"
    whole = path.read_bytes()
    for length in (0, 5, 8, 60, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
            read_adapter(tmp_path)
    path.write_bytes(b"\xff" * 16 + whole[16:])
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"peft_type": "IA3"}', "{}", "[" * 5000])
def test_a_configuration_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (written(tmp_path) / "adapter_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"use_dora": True},
            {"lora_bias": True},
            {"rank_pattern": {"0": 2}},
            {"alpha_pattern": {"0": 2}},
            {"modules_to_save": ["2"]},
        ),
        *({"init_lora_weights": "pissa"}, {"target_parameters": ["0.weight"]}, {"a_feature_of_tomorrow": {"on": True}}),
        *({"r": 0}, {"r": "3"}, {"lora_alpha": None}, {"lora_alpha": -1}, {"bias": "some"}, {"lora_dropout": 2}),
    ],
)
def test_a_configuration_with_more_than_we_can_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    change_config(written(tmp_path), **changes)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.clear(), "holds no LoRA weights"),
        (lambda t: t.pop(FIRST), "only half of layer 0"),
        (lambda t: t.pop(FIRST.replace("_A", "_B")), "only half of layer 0"),
        (lambda t: t.update({FIRST: torch.zeros(4, 6)}), r"has shape \[4, 6\].*r = 3"),
        (lambda t: t.update({FIRST: torch.zeros(3)}), r"has shape \[3\]"),
        (lambda t: t.update({FIRST: torch.tensor(1.0)}), r"has shape \[\]"),
        (lambda t: t.update({FIRST: torch.zeros(3, 6, 1)}), "has shape"),
        (lambda t: t[FIRST].fill_(float("inf")), "no finite numbers"),
        (lambda t: t.update({"model.0.lora_A.weight": torch.zeros(3, 6)}), r"does not begin with base_model\.model\."),
        (lambda t: t.update({"base_model.model.0.lora_embedding_A": torch.zeros(3, 6)}), "is no LoRA weight"),
        (lambda t: t.update({"base_model.model.0.base_layer.bias": torch.zeros(8)}), "is no LoRA weight"),
    ],
)
def test_weights_that_make_no_sense_are_refused(damage: Any, words: str, tmp_path: Path) -> None:
    change_weights(written(tmp_path), damage)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_adapter(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(7, 8)), r"shape \[3, 6\], the model needs \[3, 7\]"),
        (lambda: nn.Sequential(nn.Linear(6, 9)), r"shape \[8, 3\], the model needs \[9, 3\]"),
        (lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 8)), "layer 0, which is no linear layer to adapt in this model"),
        (lambda: plain(bias=False), r"a tensor 0\.bias that the model has no place for"),
    ],
)
def test_an_adapter_of_another_model_leaves_the_model_as_it_was(other: Any, words: str, tmp_path: Path) -> None:
    folder = written(tmp_path, bias="lora_only")
    model = other()
    before = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=words):
        load_adapter(model, folder)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(p.requires_grad for p in model.parameters())
    assert "_lora" not in model.__dict__


def test_a_model_is_exported_without_an_adapter_only(tmp_path: Path, make_model: Make, make_batch: Make) -> None:
    from transformers import GPT2LMHeadModel

    model, tokens = make_model(), make_batch()[0]
    lora.attach(model, LoraSettings(rank=4), seed=0)
    with torch.no_grad():
        expected = shaken(model)(tokens)
    with pytest.raises(CheckpointError, match="has adapters on it"):
        huggingface.save(model, tmp_path)
    lora.merge(model)
    lora.detach(model, keep_merged=True)
    theirs = GPT2LMHeadModel.from_pretrained(huggingface.save(model, tmp_path)).eval()
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, expected, atol=1e-5)


def test_names_of_gpt2_go_over_and_back(make_model: Make) -> None:
    for name in make_model().state_dict():
        foreign = huggingface.foreign_name(name)
        assert huggingface.own_name(foreign) == huggingface.own_name(foreign.removeprefix("transformer.")) == name
        assert huggingface.own_name(name) == name
    assert huggingface.own_name("h.0.other.thing.weight") == "h.0.other.thing.weight"
    assert huggingface.own_name("lm_head.lora_a") == "lm_head.lora_a"
