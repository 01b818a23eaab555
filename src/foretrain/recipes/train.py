"""Takes a configuration to a finished run: data, model, trainer, run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.data import tokens
from foretrain.data.loader import Loader, TokenWindows, held_out_batches
from foretrain.data.nested import rows_of_rank
from foretrain.data.tokens import Corpus
from foretrain.engine.batches import with_steps
from foretrain.engine.precision import choose_device
from foretrain.errors import ConfigError, DataError
from foretrain.events import Bus, Listener
from foretrain.launch.group import ALONE, Group
from foretrain.loop.targets import length_in_words
from foretrain.models import gpt2, huggingface
from foretrain.models.gpt2 import GPT2
from foretrain.persist.folder import RunFolder
from foretrain.planning.budget import within_budget
from foretrain.planning.estimate import target_of
from foretrain.planning.growing import with_planned_growth
from foretrain.recipes.compiling import as_it_began, with_compiling
from foretrain.recipes.export import NO_TOKENIZER, export
from foretrain.recipes.frame import RunOptions, TrainingJob, carry_out
from foretrain.recipes.spreading import (
    ONE_PROCESS,
    Spreading,
    check_rows,
    choose,
    for_trainer,
    spread,
)
from foretrain.show.pages import report
from foretrain.trainer import HybridTrainer


def vocabulary_size(config: Config, corpus: Corpus) -> int:
    """Return the model's vocabulary: as configured, or as large as the tokenizer's; it must hold every token of the
    data."""
    size = config.model.vocab_size or corpus.vocab_size
    if size is None:
        raise ConfigError("token files do not say how large their vocabulary is: set model.vocab_size (GPT-2: 50257)")
    if corpus.vocab_size is not None and size < corpus.vocab_size and corpus.tokenizer is not None:
        raise ConfigError(
            f"model.vocab_size = {size} is smaller than the tokenizer's vocabulary of {corpus.vocab_size}; "
            "raise or remove it"
        )
    if not corpus.checked:
        parts = [part for part in (corpus.train, corpus.held_out) if len(part)]
        if (largest := max(int(part.max()) for part in parts)) >= size:
            raise DataError(
                f"vocabulary mismatch: the data holds token {largest}, but model.vocab_size = {size}; "
                f"set it to at least {largest + 1}"
            )
        if (smallest := min(int(part.min()) for part in parts)) < 0:
            raise DataError(f"vocabulary mismatch: the data holds token {smallest}; tokens are numbers from 0 on")
    return size


def with_vocabulary(config: Config, corpus: Corpus) -> Config:
    size = vocabulary_size(config, corpus)
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})


def build_model(config: Config) -> GPT2:
    """Build the model with fresh weights from `seed`, or with those of `model.weights`."""
    model = gpt2.build(
        config.model,
        config.seed,
        activation_checkpointing=config.engine.activation_checkpointing,
        fused_loss=config.engine.fused_loss,
        loss_rows=config.engine.loss_rows,
        narrow_residual=config.precision.narrow_residual,
    )
    if config.model.weights:
        huggingface.load(model, config.model.weights)
    return model


def build_loader(config: Config, corpus: Corpus, context: int, device: torch.device, group: Group = ALONE) -> Loader:
    """Make the loader of training batches in the order that `seed` gives; of each batch, the rows of this process."""
    return Loader(
        TokenWindows(corpus.train, context, config.seed),
        config.batch_size,
        config.seed,
        config.data.prefetch,
        pin_memory=device.type == "cuda",
        rank=group.rank,
        world=group.size,
    )


def build_held_out(config: Config, corpus: Corpus, model: GPT2, times: int = 1, group: Group = ALONE) -> list[Any]:
    """Return the batches that are evaluated, or so many times as many: the same text, however a batch is split."""
    micro_batch = config.batch_size // config.accumulation_steps
    limit = times * config.evaluation.batches * config.accumulation_steps
    batches = held_out_batches(corpus.held_out, model.shape.context, micro_batch, limit)
    return [rows_of_rank(batch, group.rank, group.size) for batch in batches]


def _judging(config: Config, corpus: Corpus, model: GPT2, evaluated: int, group: Group) -> list[Any]:
    """Return held-out batches that judge learning rates: text beyond that which is evaluated; where there is none, the
    same."""
    batches = build_held_out(config, corpus, model, times=2, group=group)
    return batches[evaluated:] or batches


def default_folder(config: Config) -> Path:
    """Return `runs/<model>-<date>-<time>`."""
    return Path("runs") / f"{config.model.type}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def written(folder: Path) -> dict[str, str]:
    """Return what a run has left in its folder for people and other programs."""
    parts = {"report": report.NAME, "model": "model", "adapter": "adapter"}
    return {"folder": str(folder)} | {
        name: str(folder / part) for name, part in parts.items() if (folder / part).exists()
    }


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | Level = True,
    table: bool = True,
    listeners: Sequence[Listener] = (),
    say: Callable[[str], None] = lambda _: None,
    pause_at: int | None = None,
) -> dict[str, Any]:
    """Run a configuration to its end and return the summary, which is also written to the run folder.

    pause_at: leave the run at this step, saved; `resume` goes on with it.
    """
    path = Path(out) if out is not None else default_folder(config)
    config = _with_warmup(as_it_began(config, path) if resume else config, path, resume)
    options = RunOptions(resume, overwrite, progress, table, listeners, say, pause_at)
    return carry_out(config, path, "train", options, partial(_job, config, path, say))


def _with_warmup(config: Config, run: Path, resume: bool) -> Config:
    """Complete the warm-up of a model with random weights; a run of before that is resumed keeps the one it had."""
    completed, file = configuration.with_warmup(config), run / "config.toml"
    if completed is config:
        return config
    before = resume and file.is_file() and configuration.load(file).config.schedule.warmup_share == "auto"
    return config if before else completed


def _job(config: Config, path: Path, say: Callable[[str], None], bus: Bus, group: Group) -> TrainingJob:
    """Read the data, choose what `memory.budget` asks for, and build model and trainer."""
    device = choose_device(config.device)
    check_rows(config, group.size)
    corpus = group.by_first(lambda: tokens.prepare(config.data, say))
    named = configuration.given(config)
    config = with_vocabulary(config, corpus)
    shape = gpt2.shape_from_config(config.model)
    loader = build_loader(config, corpus, shape.context, device, group)
    config, growth = with_planned_growth(with_steps(config, loader), shape)
    target = target_of(config, shape)
    config = within_budget(with_compiling(config, target, say), target, named, say)
    chosen = choose(config, target, group)
    model = build_model(config)
    config = configuration.with_beta2(config, shape.context)
    loss = spread(model, chosen, config)
    trainer = HybridTrainer(model, loss_fn=loss, config=for_trainer(config, chosen), bus=bus)
    held_out = build_held_out(config, corpus, model, group=group)
    if trainer.race is not None:
        trainer.race.use(_judging(config, corpus, model, len(held_out), group), shape.context)

    def finish(folder: RunFolder, summary: dict[str, Any]) -> None:
        export(trainer, path / "model", corpus.tokenizer, group)
        if corpus.tokenizer is None:
            say(f"{path / 'model'} has no tokenizer: {NO_TOKENIZER}")

    details = _details(config, corpus, model, path, growth, chosen)
    return TrainingJob(
        trainer, loader, held_out, config.model.type, details, corpus.fingerprint, corpus.tokenizer, finish
    )


def _details(config: Config, corpus: Corpus, model: GPT2, path: Path, growth: str, chosen: Spreading) -> dict[str, str]:
    """Return what a run announces. growth: what was decided of it, where it was `auto`."""
    return {
        "data": f"{corpus.title}, {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out",
        "batch": f"{config.batch_size} x {model.shape.context} tokens, {length_in_words(config)}",
        **({"growth": growth} if growth else {}),
        **({} if chosen is ONE_PROCESS else {"ranks": str(chosen)}),
        "folder": str(path),
    }
