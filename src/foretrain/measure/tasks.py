"""What is trained in a comparison: the same model, data order and held-out sets for every arm of one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from foretrain.config import Config
from foretrain.data import tokens
from foretrain.engine.depth import show_all
from foretrain.engine.precision import choose_device
from foretrain.engine.step import LossFunction
from foretrain.errors import DataError
from foretrain.models import lora
from foretrain.models.language_model import LanguageModel
from foretrain.persist.model_state import checksum
from foretrain.recipes import finetune as tuning
from foretrain.recipes import train as run


@dataclass(frozen=True)
class Job:
    """What one run needs."""

    model: nn.Module
    """It has its first weights, as `seed` gives them."""
    loader: Iterable[Any]
    held_out: list[Any]
    """Seen during the run, and what learning rates are chosen by."""
    test: list[Any]
    """Seen once, after the run: the loss that is reported. No decision knows it."""
    loss_fn: LossFunction | None = None
    probe: list[Any] = field(default_factory=list)
    """What judges leaps of adapters; no arm trains on it."""
    length: int | None = None
    """Tokens in each sequence of a batch; None where there are no tokens."""
    pretrains: bool = False
    """It is a language model that `train` trains."""


class Task(Protocol):
    """Anything that can be trained again and again. Your own: any object with these three."""

    title: str
    fingerprint: str
    """Changes when the data does."""

    def job(self, config: Config) -> Job: ...


class TextTask:
    """The language model and the text of a configuration."""

    def __init__(self, config: Config, say: Callable[[str], None] = lambda _: None) -> None:
        self._corpus = tokens.prepare(config.data, say)
        self.config = run.with_vocabulary(config, self._corpus)
        self.title = f"{config.model.type}, {self._corpus.title}"
        self.fingerprint = self._corpus.fingerprint
        self._models = ModelShelf()

    def job(self, config: Config) -> Job:
        corpus, device = self._corpus, choose_device(config.device)
        config = run.with_vocabulary(config, corpus)
        model = self._models.with_weights_of(config, run.build_model)
        batches = run.build_held_out(config, corpus, model, times=2)
        if len(batches) < 2:
            raise DataError(
                "held-out data: a comparison needs two parts of it, one to choose learning rates by and one for the "
                "result; use more text, a smaller batch_size or a larger data.held_out"
            )
        loader = run.build_loader(config, corpus, model.shape.context, device)
        length = model.shape.context
        return Job(model, loader, held_out=batches[0::2], test=batches[1::2], length=length, pretrains=True)


class FinetuneTask:
    """The base model and the examples of a fine-tuning configuration. What judges leaps is left out for every arm."""

    def __init__(self, config: Config, say: Callable[[str], None] = lambda _: None) -> None:
        self._base = tuning.base_of(config)
        config = tuning.with_templates(config, say, self._base.chat)
        self._data = tuning.prepare(config, self._base, say)
        self.title = f"adapter for {self._base.folder}, {len(self._data.train):,} examples"
        self.fingerprint = f"{self._data.train.fingerprint} {checksum(dict(self._base.model.named_parameters()))}"
        self._models = ModelShelf()

    def job(self, config: Config) -> Job:
        def build(config: Config) -> LanguageModel:
            model = tuning.base_of(config).model
            lora.attach(model, tuning.settings_of(config), config.seed)
            return model

        data = self._data
        batches = data.held_out.fixed_batches(config.batch_size, 2 * config.evaluation.batches)
        if len(batches) < 2:
            raise DataError(
                f"held-out examples: {len(data.held_out)} are less than two batches, one to choose learning rates by "
                "and one for the result; use more examples, a smaller batch_size or a larger data.held_out"
            )
        model, loader = self._models.with_weights_of(config, build), tuning.build_loader(config, data)
        probe = tuning.probe_batches(data, config)
        return Job(model, loader, batches[0::2], batches[1::2], probe=probe, length=data.train.length)


class ModelShelf:
    """Keeps the model object from run to run and only sets its weights anew, so that compiled code stays valid."""

    def __init__(self) -> None:
        self._key = ""
        self._model: Any = None

    def with_weights_of(self, config: Config, build: Callable[[Config], Any]) -> Any:
        """Return the model of `config` with the first weights of its seed."""
        fresh = build(config)
        key = config.model_dump_json(include={"model", "lora", "engine", "precision", "device"})
        if key != self._key:
            torch.compiler.reset()  # it keeps a few versions per function and would then stop compiling
            self._key, self._model = key, fresh
            return fresh
        show_all(self._model)
        self._model.load_state_dict(fresh.state_dict())
        return self._model
