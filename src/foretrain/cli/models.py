"""The commands around trained models: generate, adapters, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from foretrain.cli.options import AnyBase, Model, Overwrite, TargetFolder, Tokenizer, Vocabulary
from foretrain.cli.terminal import (
    Json,
    check_target,
    flag,
    for_reader,
    put,
    put_json,
    put_written,
    say,
)
from foretrain.errors import ForetrainError, InputError
from foretrain.show.outlet import is_lost

if TYPE_CHECKING:
    from foretrain.recipes.open_model import Base
    from foretrain.serve.sampling import Sampling

adapters_app = App(name="adapters", help="What fine-tuning made: list, merge and export adapters.")


def generate(
    model: Model,
    /,
    *,
    prompt: Annotated[
        list[str] | None,
        Parameter(negative=(), help="What to continue; repeatable. Unset: standard input."),
    ] = None,
    field: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Fine-tuning run: a further field of its prompt, `--field input=...`; repeatable."),
    ] = None,
    raw: Annotated[bool, flag("Fine-tuning run: the prompt as it is, not as the run was trained to be asked.")] = False,
    adapter: Annotated[
        Path | None,
        Parameter(help="Adapter folder (PEFT's format). Unset: the run's own, if it is a fine-tuning run."),
    ] = None,
    no_adapter: Annotated[bool, flag("Ask the base model, without the run's adapter.", "--no-adapter")] = False,
    any_base: AnyBase = False,
    max_tokens: Annotated[int, Parameter(help="New tokens at the most.")] = 100,
    temperature: Annotated[float, Parameter(help="0: always the most likely token.")] = 1.0,
    top_k: Annotated[int, Parameter(help="Only the k most likely tokens. 0: all.")] = 0,
    top_p: Annotated[float, Parameter(help="Only the most likely tokens that make up this share.")] = 1.0,
    repetition_penalty: Annotated[float, Parameter(help="Above 1: what was said before becomes less likely.")] = 1.0,
    seed: Annotated[int | None, Parameter(help="The same seed, the same text. Unset: another one every time.")] = None,
    stop: Annotated[list[str] | None, Parameter(negative=(), help="End before this text; repeatable.")] = None,
    stream: Annotated[bool, flag("Print tokens as they are made.")] = False,
    device: Annotated[str, Parameter(help="`auto`, `cpu`, `cuda`, `mps`.")] = "auto",
    tokenizer: Tokenizer = "",
    vocabulary: Vocabulary = "",
    json_: Json = False,
) -> None:
    """Let a model write.

    `foretrain generate runs/mine --prompt "Once upon a time" --stream` continues your prompt.

    `foretrain generate runs/tuned --prompt "Where is my card?" --temperature 0` asks a fine-tuned model as it was
    trained to be asked; `--raw` continues the text as it is. `--adapter OTHER` takes another adapter, `--no-adapter`
    none.
    """
    from foretrain.engine.precision import choose_device, choose_precision
    from foretrain.recipes.newest import open_newest
    from foretrain.recipes.open_model import asked_in_chats
    from foretrain.serve.sampling import Sampling

    if adapter is not None and no_adapter:
        raise InputError("--adapter and --no-adapter contradict each other; keep one of them")
    if stream and json_:
        raise InputError("--stream and --json contradict each other; keep one of them")
    sampling = Sampling(max_tokens, temperature, top_k, top_p, repetition_penalty, seed, stop_strings=tuple(stop or ()))
    place = choose_device(device)
    base = open_newest(model, tokenizer, vocabulary, say, precision=choose_precision("auto", place))
    prompts = prompt or [_standard_input()]
    asked = base.format or (asked_in_chats(base) if base.adapter is None else None)
    if asked is not None and not raw:
        prompts = [asked.ask(text, _fields(field or [])) for text in prompts]
    elif field:
        why = "--raw takes the text as it is" if raw else f"{model} was not fine-tuned on records"
        raise InputError(f"--field: {why}; give the whole text with --prompt")
    base.model.to(place)
    chosen = None if no_adapter else _adapter_folder(adapter) if adapter is not None else base.adapter
    if chosen is not None:
        from foretrain.models.adapter_files import load_adapter

        load_adapter(base.model, chosen, any_base)
    _write(base, prompts, sampling, stream, json_)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input: not {error.encoding} ({error.reason} at byte {error.start:,}); convert it, or name the "
            "text with --prompt"
        ) from None


def _fields(assignments: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in assignments]
    for name, sign, _ in pairs:
        if not sign or not name:
            raise InputError(f"--field {name!r}: write it as name=value, for example --field input=...")
    return {name: value for name, _, value in pairs}


def _write(base: Base, prompts: list[str], sampling: Sampling, stream: bool, as_json: bool) -> None:
    from foretrain.serve.generate import TextGenerator

    generator = TextGenerator(base.model, base.tokenizer)
    if stream:
        for text in prompts:
            for token in generator.stream(text, sampling):
                sys.stdout.write(for_reader(token.text))
                sys.stdout.flush()
                if is_lost(sys.stdout):
                    return
            put("")
        return
    completions = generator.generate(prompts, sampling)
    if as_json:
        keys = ("text", "tokens", "log_probabilities", "finish_reason")
        rows = [
            {"prompt": text, **{key: getattr(found, key) for key in keys}}
            for text, found in zip(prompts, completions, strict=True)
        ]
        put_json(rows)
        return
    for number, completion in enumerate(completions):
        if number:
            put("---")
        put(for_reader(completion.text))
    if any(completion.finish_reason == "context" for completion in completions):
        say(f"it ends where the model's context of {base.model.shape.context} tokens does")


@adapters_app.command(name="list")
def list_(
    folder: Annotated[Path, Parameter(help="Where to look, also below it.")] = Path("runs"),
    /,
    *,
    json_: Json = False,
) -> None:
    """Show the adapters in a folder: rank, layers, size, and what they belong to."""
    from foretrain.models.adapter_files import read_adapter

    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    rows: list[dict[str, Any]] = []
    for path in sorted(found.parent for found in folder.rglob("adapter_config.json")):
        try:
            adapter = read_adapter(path)
        except ForetrainError as error:
            say(f"warning: {error}")
            continue
        rows.append(
            {
                "folder": str(path),
                "base": adapter.base_model_name,
                "rank": adapter.settings.rank,
                "alpha": adapter.settings.alpha,
                "layers": len(adapter.layers),
                "parameters": sum(tensor.numel() for tensor in adapter.tensors.values()),
            }
        )
    if json_:
        put_json(rows)
        return
    if not rows:
        put(f"no adapters in {folder}")
        return
    from rich.markup import escape
    from rich.table import Table

    from foretrain.show.screen import screen

    table = Table("folder", "rank", "alpha", "layers", "parameters", "base", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            escape(row["folder"]),
            str(row["rank"]),
            f"{row['alpha']:g}",
            str(row["layers"]),
            f"{row['parameters']:,}",
            escape(row["base"]),
        )
    screen().print(table)


@adapters_app.command
def merge(
    adapter: Annotated[Path, Parameter(help="Adapter folder, or the fine-tuning run that made it.")],
    folder: Annotated[Path, Parameter(help="Where to write the merged model.")],
    /,
    *,
    base: Annotated[str, Parameter(help="The model it belongs to. Unset: as the adapter says.")] = "",
    any_base: AnyBase = False,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Add an adapter to its model and write the result as a complete Hugging Face folder."""
    from foretrain.data.handover import chat_template_of
    from foretrain.models import lora
    from foretrain.models.adapter_files import load_adapter, read_adapter
    from foretrain.recipes.export import write_base
    from foretrain.recipes.open_model import open_base

    path = _adapter_folder(adapter)
    read = read_adapter(path)
    source = base or read.base_model_name
    if not source:
        raise InputError(f"{path}: it does not say which model it belongs to; name it with --base FOLDER")
    tokenizer = path.parent / "tokenizer.json"
    opened = open_base(source, str(tokenizer) if tokenizer.is_file() else "")
    if opened.folder.resolve() == folder.resolve():
        raise InputError(f"{folder}: it holds the model itself; choose another folder")
    if opened.adapter is not None:
        raise InputError(f"{source}: a fine-tuning run; name the model that was fine-tuned")
    check_target(folder, overwrite)
    load_adapter(opened.model, read, any_base)
    lora.merge(opened.model)
    lora.detach(opened.model, keep_merged=True)
    write_base(opened, folder, "merge it again", chat_template_of(path))
    put_written(folder, json_)


@adapters_app.command(name="export")
def export_adapter(
    source: Annotated[Path, Parameter(help="Fine-tuning run; its newest checkpoint is taken.")],
    folder: TargetFolder,
    /,
    *,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Write the adapter of a run's newest checkpoint in PEFT's format, also while the run goes on."""
    from foretrain.recipes import finetune

    check_target(folder, overwrite)
    put_written(finetune.export_adapter(source, folder), json_)


def export(
    source: Annotated[Path, Parameter(help="A run folder (its newest checkpoint is taken) or one checkpoint folder.")],
    folder: TargetFolder,
    /,
    *,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face GPT-2 folder: weights, settings and tokenizer.

    `AutoModelForCausalLM`, `AutoTokenizer` and `pipeline("text-generation")` of transformers load it.
    """
    from foretrain.recipes.export import export_checkpoint

    check_target(folder, overwrite)
    put_written(export_checkpoint(source, folder, say), json_)


def _adapter_folder(path: Path) -> Path:
    return path / "adapter" if (path / "adapter").is_dir() else path
