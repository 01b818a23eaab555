"""Models out of finished runs and out of checkpoints, in Hugging Face's format."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.data.hub_tokenizers import ends_of
from foretrain.data.tokenizers import Tokenizer
from foretrain.engine.gathered import gathered
from foretrain.errors import CheckpointError, InputError, SaveError
from foretrain.launch.group import ALONE, Group
from foretrain.models import causal_files, gpt2, huggingface
from foretrain.models.causal_lm import CausalLM
from foretrain.models.gpt2 import GPT2
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.files import explain_failed_write, make_folder, remove, sync_file
from foretrain.recipes.open_model import Base, tokenizer_beside
from foretrain.trainer import HybridTrainer

NO_TOKENIZER = (
    "the data came as tokens; to write text with it name the one they were made with (`foretrain generate ... "
    "--tokenizer FILE`, or data.tokenizer when you train)"
)


def export(trainer: HybridTrainer, folder: Path, tokenizer: Tokenizer | None = None, group: Group = ALONE) -> None:
    """Write the finished model in Hugging Face's format, at averaged weights if there is an average."""
    model = trainer.model
    if isinstance(model, GPT2) and huggingface.is_exportable(model):
        with trainer.averaged_weights(), gathered(model, group.rank) as first:
            if first:
                write_model(model, folder, "go on with --resume", tokenizer)


def write_model(
    model: GPT2, folder: Path, next_step: str, tokenizer: Tokenizer | None = None, chat_template: str = ""
) -> None:
    """Write a GPT-2; each file appears by a rename, whole or not at all."""
    _write(lambda place: huggingface.save(model, place, tokenizer, chat_template), folder, next_step)


def write_base(base: Base, folder: Path, next_step: str, chat_template: str = "") -> None:
    """Write a base that was changed, such as by a merged adapter, as the folder of its own family. chat_template: for a
    GPT-2, which has none of its own."""
    model = base.model
    if isinstance(model, GPT2):
        write_model(model, folder, next_step, base.tokenizer, chat_template)
    elif isinstance(model, CausalLM):
        ends = (base.tokenizer.end_of_text, *sorted(ends_of(base.tokenizer) - {base.tokenizer.end_of_text}))
        generation = {"generation_config.json": causal_files.generation_config(base.folder, ends)}
        _write(lambda place: causal_files.save(model, place, base.files_beside() | generation), folder, next_step)


def _write(save: Callable[[Path], Any], folder: Path, next_step: str) -> None:
    temporary = folder.with_name(f".tmp-{folder.name}")
    try:
        remove(temporary)
        save(temporary)
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
        say(f"{target} has no tokenizer: {NO_TOKENIZER}")
    return target


def model_of(store: Path, state: dict[str, Any], config: Config) -> GPT2:
    """Return the model of a checkpoint, at averaged weights if there is an average."""
    model = gpt2.build(config.model, config.seed)
    alone = {"device": "cpu", "hybrid.mode": "off", "engine.compile": False}
    trainer = HybridTrainer(model, config=configuration.changed(config, alone))
    trainer.load_weights(state, str(store))
    if trainer.engine.average is not None:
        with trainer.averaged_weights():
            averaged = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(averaged)
    return model


def read_checkpoint(source: str | Path) -> tuple[Path, dict[str, Any], Config]:
    """Return path, state and configuration of the newest checkpoint of a run folder, or of one checkpoint folder."""
    source = Path(source)
    store = source if is_checkpoint(source) else _newest(source)
    state = checkpoint.read_weights(store)
    meta = state.get("meta")
    if not isinstance(meta, dict) or not isinstance(meta.get("config"), dict):
        raise CheckpointError(f"{store}: no run of `fit` has saved it; name a run folder or one of its checkpoints")
    return store, state, configuration.from_mapping(meta["config"], str(store))


def step_of(store: Path, state: dict[str, Any]) -> int:
    """Return the step that a checkpoint was saved at."""
    step = state.get("progress", {}).get("global_step") if isinstance(state.get("progress"), dict) else None
    if not isinstance(step, int):
        raise CheckpointError(f"{store}: it does not say at which step it was saved; name another one")
    return step


def is_checkpoint(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def run_of(store: Path) -> Path:
    """Return the run folder of a checkpoint."""
    return store.resolve().parent.parent


def _newest(run: Path) -> Path:
    newest = next(CheckpointStore(run / "checkpoints").steps(), None)
    if newest is None:
        raise InputError(f"{run}: neither a checkpoint nor a run folder with checkpoints; name one of the two")
    return newest[1]
