"""LoRA: a trained low-rank update beside frozen linear layers, chosen by name patterns."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretrain.errors import CheckpointError, ConfigError

Bias = Literal["none", "all", "lora_only"]


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter is like; the update of a layer is `scaling * lora_b @ lora_a`."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    """Share of the adapter's input that is dropped, in training only."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    targets: tuple[str, ...] = ("*",)
    """Patterns for module paths or their last parts; "*" is every linear layer but an output head."""
    bias: Bias = "none"
    """Which biases of the model are trained too: none, all, or those of the layers with an adapter."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ConfigError(f"lora rank = {self.rank!r}: give a whole number of at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"lora alpha = {self.alpha!r}: give a finite number above 0")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora dropout = {self.dropout!r}: give a number from 0 to below 1")
        if isinstance(cast("object", self.targets), str) or not self.targets or not all(self.targets):
            raise ConfigError(
                f"lora targets = {self.targets!r}: give a tuple of patterns, such as ('*.attention.qkv',)"
            )
        if self.bias not in get_args(Bias):
            raise ConfigError(f"lora bias = {self.bias!r}: choose one of {', '.join(get_args(Bias))}")

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class AdaptedLinear(nn.Module):
    """Stands where a linear layer stood and holds that layer as `base`."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.train(base.training)

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.base.bias)


class LoraLinear(AdaptedLinear):
    """`base(x)` plus the adapter's update of it; adapters are at least float32 whatever the base is."""

    def __init__(self, base: nn.Module, settings: LoraSettings, generator: torch.Generator) -> None:
        super().__init__(base)
        inputs, outputs = layer_size(base)
        self.scaling = settings.scaling
        self.dropout = settings.dropout
        weight = cast("Tensor", base.weight)
        dtype = torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else torch.float32
        drawn = torch.empty(settings.rank, inputs)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(drawn.to(weight.device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(outputs, settings.rank, device=weight.device, dtype=dtype))
        self._original: Tensor | None = None

    @property
    def merged(self) -> bool:
        return self._original is not None

    @property
    def original(self) -> Tensor | None:
        """Return the base weight as it was before it was merged."""
        return self._original

    @property
    def weight(self) -> Tensor:
        """Return the adapted weight, for code that reads the weight instead of calling the layer."""
        weight = cast("Tensor", self.base.weight)
        return weight if self.merged else (weight + self.update()).to(weight.dtype)

    def update(self) -> Tensor:
        """Return what the adapter adds to the base weight, in that weight's orientation."""
        update = (self.lora_b @ self.lora_a) * self.scaling
        return update.t() if is_conv1d(self.base) else update

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if self.merged:
            return y
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        update = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return y + (update * self.scaling).to(y.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        weight = cast("Tensor", self.base.weight)
        merged = self.weight
        self._original = weight.clone()
        weight.copy_(merged)

    @torch.no_grad()
    def unmerge(self) -> None:
        if self._original is not None:
            cast("Tensor", self.base.weight).copy_(self._original)
            self._original = None

    def extra_repr(self) -> str:
        return f"rank={self.lora_a.shape[0]}, scaling={self.scaling:g}, merged={self.merged}"


@dataclass(frozen=True)
class Attachment:
    """What `attach` did to a model, so that `detach` can take it back."""

    settings: LoraSettings
    layers: tuple[str, ...]
    trainable_before: frozenset[str]
    biases_before: dict[str, Tensor] = field(repr=False)
    """The biases that are trained with the adapter, by their names in the bare model."""


def is_conv1d(module: nn.Module) -> bool:
    """Return whether this is Hugging Face's linear layer with its weight stored as [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def layer_size(layer: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear layer."""
    if is_conv1d(layer):
        inputs, outputs = cast("Tensor", layer.weight).shape
        return inputs, outputs
    return cast("nn.Linear", layer).in_features, cast("nn.Linear", layer).out_features


def _shared_weights(model: nn.Module) -> set[int]:
    counts = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {identity for identity, count in counts.items() if count > 1}


def matches(path: str, pattern: str) -> bool:
    """Return whether a pattern means this path, or its last parts."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def linear_layers(model: nn.Module, targets: Iterable[str] = ("*",)) -> dict[str, nn.Module]:
    """Return the linear layers that the patterns choose, by path; a pattern that chooses none is an error."""
    layers = {path: module for path, module in model.named_modules() if path and is_linear(module)}
    shared = _shared_weights(model)
    output = getattr(model, "output_layer", None)
    heads = {
        path
        for path, layer in layers.items()
        if path.split(".")[-1] == "lm_head" or layer is output or id(layer.weight) in shared
    }
    chosen: set[str] = set()
    for pattern in targets:
        found = {path for path in layers if matches(path, pattern)} - (heads if set(pattern) == {"*"} else set())
        if not found:
            raise ConfigError(
                f"lora targets: {pattern!r} matches no linear layer of the model; {_near(pattern, layers)}"
            )
        chosen |= found
    return {path: layer for path, layer in layers.items() if path in chosen}


def _near(pattern: str, paths: Iterable[str]) -> str:
    by_ending: dict[str, str] = {}
    for path in paths:
        parts = path.split(".")
        for start in range(len(parts)):
            by_ending.setdefault(".".join(parts[start:]), path)
    close = difflib.get_close_matches(pattern.strip("*."), by_ending, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    kinds = sorted({path.split(".")[-1] for path in paths})
    return f"its linear layers end in {', '.join(kinds[:12])}" if kinds else "it has none below its top level"


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` at every place where `old` is."""
    places = [(m, name) for m in model.modules() if m is not new for name, child in m._modules.items() if child is old]
    for parent, name in places:
        setattr(parent, name, new)


def refuse_adapted(model: nn.Module) -> None:
    """A layer holds one kind of adapter at a time."""
    path = next((path for path, module in model.named_modules() if isinstance(module, AdaptedLinear)), None)
    if path is not None:
        raise ConfigError(f"layer {path} already has adapters; detach those (or close their registry) first")


def attach(model: nn.Module, settings: LoraSettings, seed: int) -> list[str]:
    """Give the chosen layers untrained adapters, freeze everything else, and say which layers these are."""
    refuse_adapted(model)
    layers = linear_layers(model, settings.targets)
    for path, layer in layers.items():
        if settings.rank > min(layer_size(layer)):
            raise ConfigError(
                f"lora rank = {settings.rank} is more than layer {path} of size {layer_size(layer)} can use; "
                f"choose at most {min(layer_size(layer))} or leave this layer out of the targets"
            )
    return attach_to(model, layers, settings, seed)


def attach_to(model: nn.Module, layers: Mapping[str, nn.Module], settings: LoraSettings, seed: int) -> list[str]:
    """Attach adapters to exactly these layers."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    biases = [] if settings.bias == "none" else [name for name in parameters if "bias" in name.rpartition(".")[2]]
    if settings.bias == "lora_only":
        biases = [name for name in biases if name.rpartition(".")[0] in layers]
    model.__dict__["_lora"] = Attachment(
        settings,
        tuple(layers),
        frozenset(name for name, parameter in parameters.items() if parameter.requires_grad),
        {name: parameters[name].detach().clone() for name in biases},
    )
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in biases)
    for layer in layers.values():
        replace_module(model, layer, LoraLinear(layer, settings, generator))
    return list(layers)


def attachment(model: nn.Module) -> Attachment:
    """Return what is attached to the model."""
    found = model.__dict__.get("_lora")
    if not isinstance(found, Attachment):
        raise ConfigError("the model has no adapter; call lora.attach first")
    return found


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with an adapter, by path."""
    return {path: cast("LoraLinear", model.get_submodule(path)) for path in attachment(model).layers}


def detach(model: nn.Module, *, keep_merged: bool = False) -> None:
    """Put the original modules, weights and biases back; `keep_merged` leaves a merged adapter in the weights."""
    found = attachment(model)
    layers = adapted_layers(model)
    if keep_merged and not all(layer.merged for layer in layers.values()):
        raise ConfigError("keep_merged: the adapter is not merged; call lora.merge first")
    for layer in layers.values():
        if not keep_merged:
            layer.unmerge()
        replace_module(model, layer, layer.base)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in found.biases_before.items() if not keep_merged else ():
            parameters[name].copy_(value)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in found.trainable_before)
    del model.__dict__["_lora"]


def merge(model: nn.Module) -> None:
    """Add the adapter into the base weights: the same function at the base model's speed."""
    shared = _shared_weights(model)
    layers = adapted_layers(model)
    for path, layer in layers.items():
        weight = layer.base._parameters.get("weight")
        if layer.merged:
            raise ConfigError(f"layer {path} is merged already; call lora.unmerge first")
        if weight is None or not weight.is_floating_point():
            raise ConfigError(f"layer {path} has no plain floating-point weight to merge into; use it unmerged")
        if id(weight) in shared:
            raise ConfigError(f"layer {path} shares its weight with another module, which merging would change too")
    for layer in layers.values():
        layer.merge()


def unmerge(model: nn.Module) -> None:
    """Restore the base weights as they were before `merge`, to the bit; where nothing is merged, nothing happens."""
    for layer in adapted_layers(model).values():
        layer.unmerge()


def _adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    layers = adapted_layers(model)
    for path, layer in layers.items():
        tensors |= {f"{path}.lora_a": layer.lora_a, f"{path}.lora_b": layer.lora_b}
    for name in attachment(model).biases_before:
        path, _, kind = name.rpartition(".")
        tensors[name] = model.get_parameter(f"{path}.base.{kind}" if path in layers else name)
    return tensors


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all that is trained: `<path>.lora_a`, `<path>.lora_b`, and the biases by their names."""
    return {name: value.detach().clone() for name, value in _adapter_tensors(model).items()}


@torch.no_grad()
def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill the attached adapter; what does not fit is refused before anything is changed."""
    own = _adapter_tensors(model)
    if any(layer.merged for layer in adapted_layers(model).values()):
        raise ConfigError("the adapter is merged into the weights; call lora.unmerge before loading another")
    missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or foreign:
        what = (
            f"has no tensor {missing[0]}" if missing else f"has a tensor {foreign[0]} that the model has no place for"
        )
        raise CheckpointError(f"the adapter {what}; attach with the settings that it was trained with")
    for name, value in state.items():
        check_tensor(name, value, own[name].shape)
    for name, value in state.items():
        own[name].copy_(value)


def check_tensor(name: str, value: Tensor, shape: Iterable[int]) -> None:
    """Refuse a tensor of another shape or with values that are no numbers."""
    if list(value.shape) != list(shape):
        raise CheckpointError(f"the adapter's {name} has shape {list(value.shape)}, the model needs {list(shape)}")
    if not value.is_floating_point() or not bool(value.float().isfinite().all()):
        raise CheckpointError(f"the adapter's {name} holds values that are no finite numbers; it is damaged")
