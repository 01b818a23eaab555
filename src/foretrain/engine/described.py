"""What is trained, and by what, as it really is: in words, and as settings for the record of a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.config import Config, to_mapping
from foretrain.config.reach import OF_COMMANDS, OF_LANGUAGE_MODELS
from foretrain.engine.rates import FollowedRates, Rates
from foretrain.models.language_model import LanguageModel

_OF_MODEL = ("model", "data", "lora")
_OF_PREDICTION = ("predictor", "correction", "audit")
_HIDDEN = frozenset({"params", "peak_lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize"})


def is_configured(model: nn.Module) -> bool:
    """Whether a model is what the sections `model` and `data` speak of."""
    return isinstance(unwrapped(model), LanguageModel)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile's or DistributedDataParallel's."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def full_name(thing: object) -> str:
    """torch.optim.Adam, MyOptimizer."""
    kind = type(thing)
    for package in ("torch.optim.lr_scheduler", "torch.optim", "torch.nn"):
        if kind.__module__.startswith(package):
            return f"{package}.{kind.__name__}"
    return kind.__name__ if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__name__}"


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """As its groups have them; a list where groups differ."""
    found: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            value = group.get("initial_lr", value) if name == "lr" else value  # what a scheduler began with
            value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
            if name not in _HIDDEN and _is_plain(value):
                found.setdefault(name, []).append(list(value) if isinstance(value, (tuple, list)) else value)
    return {name: values[0] if values.count(values[0]) == len(values) else values for name, values in found.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, (int, float)) for item in value)
    return isinstance(value, (bool, int, float, str))


def in_words(optimizer: Optimizer, config: Config, rates: Rates, own: bool) -> str:
    """torch.optim.Adam, lr 0.003."""
    scheduler = rates.scheduler if isinstance(rates, FollowedRates) else None
    followed = [] if scheduler is None else [type(scheduler).__name__]
    if not own:
        decay = [f"weight_decay {config.optimizer.decay:g}"] if config.optimizer.decay else []
        rate = "auto" if config.optimizer.learning_rate == "auto" else f"{config.optimizer.peak_rate:g}"
        return ", ".join([config.optimizer.type, f"lr {rate}", *decay, *followed])
    settings = optimizer_settings(optimizer)
    told = [f"{name} {_number(settings[name])}" for name in ("lr", "weight_decay") if settings.get(name)]
    return ", ".join([full_name(optimizer), *told, *followed])


def _number(value: Any) -> str:
    return " and ".join(f"{one:g}" for one in value) if isinstance(value, list) else f"{value:g}"


def settings_of_run(
    config: Config, model: nn.Module, optimizer: Optimizer, rates: Rates, *, own: bool, clip: float, rows: int
) -> dict[str, Any]:
    """The configuration as far as it had an effect, and what took the place of the rest of it.

    own: the optimizer is the user's. rows: of a batch; 0 where none was seen.
    """
    values = to_mapping(config)
    if not is_configured(model):
        for section in _OF_MODEL:
            values.pop(section, None)
        values.pop("batch_size", None)
        for setting in OF_COMMANDS | OF_LANGUAGE_MODELS:
            section, _, name = setting.rpartition(".")
            values.get(section, {}).pop(name, None)
        values["model"] = {"type": full_name(unwrapped(model))}
        if rows:
            values["batch_size"] = rows
        if config.hybrid.mode == "off":
            values = {name: value for name, value in values.items() if name not in _OF_PREDICTION}
            values["hybrid"] = {"mode": "off"}
    if own:
        clipped = {"gradient_clip_norm": clip} if clip else {}
        values["optimizer"] = {"type": full_name(optimizer), **optimizer_settings(optimizer), **clipped}
    if isinstance(rates, FollowedRates):
        values.pop("schedule", None)
        if rates.scheduler is not None:
            values["schedule"] = {"type": full_name(rates.scheduler)}
    return values
