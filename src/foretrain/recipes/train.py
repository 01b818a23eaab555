"""From a configuration to a finished run: data, model, trainer, run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.data import tokens
from foretrain.data.loader import Loader, TokenWindows, held_out_batches
from foretrain.data.tokenizers import Tokenizer
from foretrain.data.tokens import Corpus
from foretrain.engine.batches import with_steps
from foretrain.engine.precision import choose_device
from foretrain.errors import CheckpointError, ConfigError, DataError, InputError, SaveError
from foretrain.events import Bus, Listener
from foretrain.models import gpt2, huggingface
from foretrain.models.gpt2 import GPT2
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.files import explain_failed_write, make_folder, remove, sync_file
from foretrain.persist.folder import RunFolder
from foretrain.planning.budget import within_budget
from foretrain.planning.estimate import target_of
from foretrain.recipes.open_model import tokenizer_beside
from foretrain.show.pages import report
from foretrain.show.trackers.opening import check_installed
from foretrain.trainer import HybridTrainer

_NO_TOKENIZER = (
    "the data came as tokens; to write text with it name the one they were made with (`foretrain generate ... "
    "--tokenizer FILE`, or data.tokenizer when you train)"
)


def vocabulary_size(config: Config, corpus: Corpus) -> int:
    """The model's vocabulary: as configured, or as large as the tokenizer's; it must hold every token of the data."""
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
    """Fresh weights from `seed`, or those of `model.weights`."""
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


def build_loader(config: Config, corpus: Corpus, model: GPT2, device: torch.device) -> Loader:
    """Training batches in the order that `seed` gives."""
    return Loader(
        TokenWindows(corpus.train, model.shape.context, config.seed),
        config.batch_size,
        config.seed,
        config.data.prefetch,
        pin_memory=device.type == "cuda",
    )


def default_folder(config: Config) -> Path:
    """`runs/<model>-<date>-<time>`."""
    return Path("runs") / f"{config.model.type}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def check_steps(run: Path, config: Config) -> None:
    """A run that goes on must have something left to do. Raises ConfigError where `max_steps` was lowered too far."""
    newest = next(CheckpointStore(run / "checkpoints").steps(), None)
    if newest is None or newest[0] <= config.max_steps or not (run / "config.toml").is_file() or config.epochs:
        return
    before = configuration.load(run / "config.toml").config.max_steps
    if before > config.max_steps:
        raise ConfigError(
            f"max_steps = {config.max_steps}: nothing left to do: the run in {run} is at step {newest[0]}; leave "
            f"max_steps at {before}, or choose at least {newest[0]}"
        )


def written(folder: Path) -> dict[str, str]:
    """What a run has left in its folder for people and other programs."""
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
) -> dict[str, Any]:
    """Run a configuration to its end and return the summary, which is also written to the run folder."""
    check_installed(config.log.trackers)
    path = Path(out) if out is not None else default_folder(config)
    bus = Bus()
    for listener in listeners:
        bus.subscribe(listener)
    if resume:
        check_steps(path, config)
    with RunFolder(path, resume, overwrite) as folder:
        device = choose_device(config.device)
        corpus = tokens.prepare(config.data, say)
        named = configuration.given(config)
        config = with_vocabulary(config, corpus)
        config = within_budget(config, target_of(config, gpt2.shape_from_config(config.model)), named, say)
        model = build_model(config)
        loader = build_loader(config, corpus, model, device)
        config = with_steps(config, loader)
        trainer = HybridTrainer(model, config=config, bus=bus)
        micro_batch = config.batch_size // config.accumulation_steps
        parts = config.evaluation.batches * config.accumulation_steps  # the same text, however a batch is split
        held_out = held_out_batches(corpus.held_out, model.shape.context, micro_batch, parts)
        folder.files["config.toml"] = configuration.to_toml(config)
        if corpus.tokenizer is not None:
            folder.files["tokenizer.json"] = corpus.tokenizer.to_json()
        if overwrite and not resume:
            folder.clear()
        summary = trainer.fit(
            loader,
            held_out,
            out=folder,
            resume=resume,
            progress=progress,
            table=table,
            title=config.model.type,
            details=_details(config, corpus, model, path),
            data_fingerprint=corpus.fingerprint,
        )
        if summary["reason"] != "interrupted":
            export(trainer, path / "model", corpus.tokenizer)
            if corpus.tokenizer is None:
                say(f"{path / 'model'} has no tokenizer: {_NO_TOKENIZER}")
            if config.log.report:
                with contextlib.suppress(InputError):  # of a page that cannot be written the bus has told
                    report.write_report([path], path / report.NAME)  # once more: it links to the model now
    return summary


def _details(config: Config, corpus: Corpus, model: GPT2, path: Path) -> dict[str, str]:
    return {
        "data": f"{corpus.title}, {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out",
        "batch": f"{config.batch_size} x {model.shape.context} tokens, {config.max_steps:,} steps",
        "folder": str(path),
    }


def export(trainer: HybridTrainer, folder: Path, tokenizer: Tokenizer | None = None) -> None:
    """The finished model in Hugging Face's format, at averaged weights if there is an average."""
    model = trainer.model
    if isinstance(model, GPT2) and huggingface.is_exportable(model):
        with trainer.averaged_weights():
            write_model(model, folder, "go on with --resume", tokenizer)


def write_model(
    model: GPT2, folder: Path, next_step: str, tokenizer: Tokenizer | None = None, chat_template: str = ""
) -> None:
    """Each file appears by a rename, whole or not at all."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    try:
        remove(temporary)
        huggingface.save(model, temporary, tokenizer, chat_template)
        make_folder(folder)
        for path in sorted(temporary.iterdir()):
            sync_file(path)
            path.replace(folder / path.name)
        sync_file(folder)
        temporary.rmdir()
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        cause, advice = explain_failed_write(error)
        raise SaveError(
            f"{folder}: cannot write the model: {cause}; all checkpoints are intact. {advice}, then {next_step}"
        ) from error


def export_checkpoint(source: str | Path, folder: str | Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """Export the newest checkpoint of a run folder, or one checkpoint folder, in Hugging Face's format."""
    store, state, config = read_checkpoint(source)
    if state.get("frozen"):
        raise InputError(f"{source}: a fine-tuning run; `foretrain adapters export {source} FOLDER` writes its adapter")
    target, tokenizer = Path(folder), tokenizer_beside(run_of(store))
    write_model(model_of(store, state, config), target, "export it again", tokenizer)
    if tokenizer is None:
        say(f"{target} has no tokenizer: {_NO_TOKENIZER}")
    return target


def model_of(store: Path, state: dict[str, Any], config: Config) -> GPT2:
    """The model of a checkpoint, at averaged weights if there is an average."""
    model = gpt2.build(config.model, config.seed)
    trainer = HybridTrainer(model, config=configuration.changed(config, {"device": "cpu", "hybrid.mode": "off"}))
    trainer.load_weights(state, str(store))
    if trainer.average is not None:
        with trainer.averaged_weights():
            averaged = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(averaged)
    return model


def read_checkpoint(source: str | Path) -> tuple[Path, dict[str, Any], Config]:
    """The newest checkpoint of a run folder, or one checkpoint folder: where it is, its weights, its configuration."""
    source = Path(source)
    store = source if is_checkpoint(source) else _newest(source)
    state = checkpoint.read_weights(store)
    meta = state.get("meta")
    if not isinstance(meta, dict) or not isinstance(meta.get("config"), dict):
        raise CheckpointError(f"{store}: no run of `fit` has saved it; name a run folder or one of its checkpoints")
    return store, state, configuration.from_mapping(meta["config"], str(store))


def step_of(store: Path, state: dict[str, Any]) -> int:
    """The step that a checkpoint was saved at."""
    step = state.get("progress", {}).get("global_step") if isinstance(state.get("progress"), dict) else None
    if not isinstance(step, int):
        raise CheckpointError(f"{store}: it does not say at which step it was saved; name another one")
    return step


def is_checkpoint(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def run_of(store: Path) -> Path:
    """The run folder of a checkpoint."""
    return store.resolve().parent.parent


def _newest(run: Path) -> Path:
    newest = next(CheckpointStore(run / "checkpoints").steps(), None)
    if newest is None:
        raise InputError(f"{run}: neither a checkpoint nor a run folder with checkpoints; name one of the two")
    return newest[1]
