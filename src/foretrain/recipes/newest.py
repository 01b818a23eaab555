"""The model of a run as it stands: what it left at its end or, while it goes on or is interrupted, its newest
checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from foretrain.config import Config
from foretrain.events import LEFT_OPEN
from foretrain.loop.targets import length_in_words
from foretrain.models import lora
from foretrain.models.adapter_files import adapter_of
from foretrain.persist.checkpoint import CheckpointStore
from foretrain.persist.files import from_json
from foretrain.recipes.export import is_checkpoint, model_of, read_checkpoint, run_of, step_of
from foretrain.recipes.finetune import restore_adapter
from foretrain.recipes.open_model import Base, asked_as, find_folder, find_tokenizer, open_base


def open_newest(
    path: str | Path,
    tokenizer: str = "",
    vocabulary: str = "",
    say: Callable[[str], None] = lambda _: None,
    precision: str = "fp32",
) -> Base:
    """Open a model like `open_base`, also of a run that is not finished, or of one checkpoint. say: hears which step it
    is. precision: what it will be computed in."""
    path = find_folder(path, say)
    if not is_checkpoint(path) and not _is_unfinished(path):
        return open_base(path, tokenizer, vocabulary, precision)
    store, state, config = read_checkpoint(path)
    run = run_of(store)
    beside = run / "tokenizer.json"
    step = step_of(store, state)
    if config.model.weights and state.get("frozen"):
        wanted = tokenizer or (str(beside) if beside.is_file() else "")
        base = open_base(config.model.weights, wanted, vocabulary, precision)
        trainer = restore_adapter(base, store, state, config)
        with trainer.averaged_weights():
            adapter = adapter_of(base.model, str(base.folder))
        lora.detach(base.model)
        found = replace(base, adapter=adapter, format=asked_as(config, base))
    else:
        found = Base(model_of(store, state, config), find_tokenizer(run, tokenizer, vocabulary), run)
    say(f"{path}: {_why(path, config, step)} ({store})")
    return found


def _is_unfinished(run: Path) -> bool:
    """Return whether its newest checkpoint is newer than the model or adapter it left at its end, if it left one."""
    newest = next(CheckpointStore(run / "checkpoints").steps(), None)
    if newest is None:
        return False
    if not (run / "model").is_dir() and not (run / "adapter").is_dir():
        return True
    try:
        summary = from_json((run / "summary.json").read_text(encoding="utf-8"))
        return bool(summary["reason"] in LEFT_OPEN or newest[0] > summary["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _why(path: Path, config: Config, step: int) -> str:
    if is_checkpoint(path):
        return f"the checkpoint of step {step}"
    return f"not finished, so its newest checkpoint is taken: step {step} of {length_in_words(config)}"
