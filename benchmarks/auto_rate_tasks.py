"""Tasks of `auto_rate.py`: language models of bytes in two sizes on two texts and on a little of one, one of 8,192
tokens of GPT-2's, an image classifier, two tables; and, for a GPU, language models of 30M and 124M parameters on two
corpora of GPT-2's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretrain import Loader
from foretrain.config import Config
from foretrain.data import tokens
from foretrain.data.tokens import Corpus
from foretrain.engine.step import LossFunction
from foretrain.recipes import train as recipe

BYTES: dict[str, Any] = {
    "data.tokenizer": "byte",
    "model.heads": 2,
    "evaluation.batches": 8,
    "optimizer.gradient_clip_norm": 1.0,
}
SMALL = BYTES | {"model.layers": 2, "model.width": 64, "model.context": 64, "batch_size": 8, "max_steps": 1000}
LITTLE = 20_000
"""Bytes of text that a run of `SMALL` passes over 25 times."""
OTHER = BYTES | {"model.layers": 2, "model.width": 96, "model.context": 48, "batch_size": 6, "max_steps": 1000}
"""Another size, batch and length than any that constants were chosen on."""
FREQUENT = 8192
WORDS = {"data.tokenizer": "gpt2", "model.vocab_size": FREQUENT, "evaluation.batches": 8, "max_steps": 1000}
WORDS |= {"model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 64, "batch_size": 16}
"""Most of the vocabulary is seen seldom, as in large models; of tokens, all but the most frequent are one."""
TABLE: dict[str, Any] = {"batch_size": 32, "max_steps": 1000, "evaluation.ema_decay": 0.0}
TOKENS: dict[str, Any] = {"data.tokenizer": "gpt2", "model.vocab_size": 50257, "evaluation.batches": 12}
LM30M = TOKENS | {"model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256, "batch_size": 64}
LM124M = TOKENS | {"model.type": "gpt2-small", "model.context": 1024, "batch_size": 16}


@dataclass(frozen=True)
class Work:
    """What one run needs. held_out judges rates; test is measured once, at the end."""

    model: nn.Module
    loader: Any
    held_out: list[Any]
    test: list[Any]
    loss_fn: LossFunction | None = None


@dataclass(frozen=True)
class RateTask:
    """settings: of every run. text: a file under --data; empty: data of scikit-learn."""

    settings: dict[str, Any]
    build: Callable[[Config], Work]
    text: str = ""


def _text(config: Config) -> Work:
    return _of_corpus(config, tokens.prepare(config.data))


def _of_corpus(config: Config, corpus: Corpus) -> Work:
    config = recipe.with_vocabulary(config, corpus)
    model = recipe.build_model(config)
    batches = recipe.build_held_out(config, corpus, model, times=2)
    loader = recipe.build_loader(config, corpus, model.shape.context, torch.device(config.device))
    return Work(model, loader, batches[0::2], batches[1::2])


class Rows:
    """Rows of a table, or images, all in memory."""

    deterministic = True

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def fetch(self, indices: Any, epoch: int) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def _rows(config: Config, inputs: np.ndarray[Any, Any], targets: Tensor, model: nn.Module, loss: LossFunction) -> Work:
    """A third of the rows is held out: half of it judges rates, half is the test."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(inputs)))
    x = torch.from_numpy(inputs).float()[order]
    x, y = (x - x.mean(0)) / (x.std(0) + 1e-6), targets[order]
    first, last = len(x) * 2 // 3, len(x) * 5 // 6
    loader = Loader(Rows(x[:first], y[:first]), config.batch_size, config.seed)
    return Work(model, loader, [(x[first:last], y[first:last])], [(x[last:], y[last:])], loss)


def _digits(config: Config) -> Work:
    from sklearn.datasets import load_digits

    data = load_digits()
    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    return _rows(config, data.data, torch.from_numpy(data.target).long(), model, loss)


def _diabetes(config: Config) -> Work:
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    target = torch.from_numpy(data.target).float()
    target = (target - target.mean()) / target.std()
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square().mean()

    return _rows(config, data.data, target, model, loss)


def _cancer(config: Config, wrong: float = 0.0) -> Work:
    """wrong: share of the labels that are turned round, of all rows."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Linear(30, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    turned = torch.from_numpy(np.random.default_rng(1).random(len(data.target)) < wrong)
    labels = torch.from_numpy(data.target).long()
    return _rows(config, data.data, torch.where(turned, 1 - labels, labels), model, loss)


def _little_text(config: Config) -> Work:
    """The beginning of the text alone is trained on, so that the run passes over it many times."""
    corpus = tokens.prepare(config.data)
    return _of_corpus(config, dataclasses.replace(corpus, train=corpus.train[:LITTLE]))


def _words(config: Config) -> Work:
    """Tokens are numbered by how frequent they are, and the rare ones are one."""
    corpus = tokens.prepare(config.data)
    order = np.argsort(-np.bincount(corpus.train, minlength=50257), kind="stable")
    number = np.full(50257, FREQUENT - 1, np.uint16)
    number[order[: FREQUENT - 1]] = np.arange(FREQUENT - 1)
    corpus = dataclasses.replace(corpus, train=number[corpus.train], held_out=number[corpus.held_out])
    return _of_corpus(config, corpus)


def _both(name: str, settings: dict[str, Any], build: Callable[[Config], Work], text: str) -> dict[str, RateTask]:
    return {f"{name}-{kind}": RateTask(settings | {"optimizer.type": kind}, build, text) for kind in ("adamw", "muon")}


TASKS: dict[str, RateTask] = {
    **_both("bytes", SMALL, _text, "text/tinyshakespeare.txt"),
    **_both("bytes-wiki", SMALL, _text, "text/wikitext2_train.txt.xz"),
    **_both("other", OTHER, _text, "text/tinystories_part1.txt.xz"),
    **_both("words", WORDS, _words, "enwiki_train.bin"),
    "digits": RateTask(TABLE | {"optimizer.type": "adamw", "batch_size": 64}, _digits),
    "cancer": RateTask(TABLE | {"optimizer.type": "adamw"}, _cancer),
    "noisy-cancer": RateTask(TABLE | {"optimizer.type": "adamw"}, partial(_cancer, wrong=0.1)),
    "little-adamw": RateTask(SMALL | {"optimizer.type": "adamw"}, _little_text, "text/tinyshakespeare.txt"),
    "diabetes": RateTask(TABLE | {"optimizer.type": "adamw"}, _diabetes),
    **_both("lm30m-wiki", LM30M | {"max_steps": 3000}, _text, "enwiki_train.bin"),
    **_both("lm30m-stories", LM30M | {"max_steps": 3000}, _text, "stories_train.bin"),
    **_both("lm124m-wiki", LM124M | {"max_steps": 2000}, _text, "enwiki_train.bin"),
    **_both("lm124m-stories", LM124M | {"max_steps": 2000}, _text, "stories_train.bin"),
}


def settings_of(task: RateTask, data: Path, device: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a run."""
    source = {"data.path": str(data / task.text)} if task.text else {}
    usual = {"device": device, "seed": seed, "hybrid.mode": "off", "evaluation.interval": 0, "health.interval": 0}
    return task.settings | source | usual | changes
