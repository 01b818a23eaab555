"""foretrain: hybrid predictive training for PyTorch.

Public names are loaded on first use, so that `import foretrain` and `foretrain --help` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrain.config import Config, load
    from foretrain.data.loader import Loader, MappedSamples, TokenWindows
    from foretrain.engine.objective import cross_entropy, logistic
    from foretrain.engine.optim.muon import Muon
    from foretrain.engine.own import supervised
    from foretrain.engine.result import StepResult
    from foretrain.engine.weights import load_weights
    from foretrain.errors import CheckpointError, ConfigError, DataError, DivergenceError, ForetrainError, InputError
    from foretrain.events import Bus
    from foretrain.guest.wrap import wrap
    from foretrain.models.gpt2 import GPT2, GPT2Shape
    from foretrain.models.lora import LoraSettings
    from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
    from foretrain.persist.checkpoint import CheckpointStore
    from foretrain.recipes.evaluate import evaluate
    from foretrain.recipes.finetune import finetune
    from foretrain.recipes.train import train
    from foretrain.serve.adapters import AdapterRegistry
    from foretrain.serve.generate import Completion, TextGenerator
    from foretrain.serve.sampling import Sampling
    from foretrain.serve.streaming import StreamToken
    from foretrain.trainer import HybridTrainer

_HOMES = {
    "AdapterRegistry": "serve.adapters",
    "Bus": "events",
    "CheckpointError": "errors",
    "CheckpointStore": "persist.checkpoint",
    "Completion": "serve.generate",
    "Config": "config",
    "ConfigError": "errors",
    "DataError": "errors",
    "DivergenceError": "errors",
    "Followed": "motion.predictors.base",
    "Forecast": "motion.predictors.base",
    "ForetrainError": "errors",
    "GPT2": "models.gpt2",
    "GPT2Shape": "models.gpt2",
    "HybridTrainer": "trainer",
    "InputError": "errors",
    "Loader": "data.loader",
    "LoraSettings": "models.lora",
    "MappedSamples": "data.loader",
    "Muon": "engine.optim.muon",
    "Predictor": "motion.predictors.base",
    "Sampling": "serve.sampling",
    "Situation": "motion.predictors.base",
    "StepResult": "engine.result",
    "StreamToken": "serve.streaming",
    "TextGenerator": "serve.generate",
    "TokenWindows": "data.loader",
    "cross_entropy": "engine.objective",
    "evaluate": "recipes.evaluate",
    "finetune": "recipes.finetune",
    "load": "config",
    "load_weights": "engine.weights",
    "logistic": "engine.objective",
    "supervised": "engine.own",
    "train": "recipes.train",
    "wrap": "guest.wrap",
}

__all__ = [
    "GPT2",
    "AdapterRegistry",
    "Bus",
    "CheckpointError",
    "CheckpointStore",
    "Completion",
    "Config",
    "ConfigError",
    "DataError",
    "DivergenceError",
    "Followed",
    "Forecast",
    "ForetrainError",
    "GPT2Shape",
    "HybridTrainer",
    "InputError",
    "Loader",
    "LoraSettings",
    "MappedSamples",
    "Muon",
    "Predictor",
    "Sampling",
    "Situation",
    "StepResult",
    "StreamToken",
    "TextGenerator",
    "TokenWindows",
    "cross_entropy",
    "evaluate",
    "finetune",
    "load",
    "load_weights",
    "logistic",
    "supervised",
    "train",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretrain' has no attribute {name!r}")
    return getattr(import_module(f"foretrain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
