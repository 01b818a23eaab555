"""The commands that train: train, finetune, and compare, which trains many times."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from foretrain.cli.options import ReplaceRun, Resume, RunOut
from foretrain.cli.terminal import (
    Json,
    Quiet,
    Settings,
    Verbose,
    check_resume,
    chosen_level,
    end_run,
    flag,
    put,
    put_json,
    say,
    silent,
)
from foretrain.errors import InputError

if TYPE_CHECKING:
    from foretrain.config.loading import LoadedConfig
    from foretrain.config.schema import Level


def train(
    config: Annotated[
        Path | None,
        Parameter(
            help="TOML file; `foretrain config init FILE` writes one. None: the defaults, which train a small GPT on "
            "Python's own source code; with `--resume`, the run folder's own file."
        ),
    ] = None,
    /,
    *,
    set_: Settings = None,
    out: RunOut = None,
    resume: Resume = False,
    overwrite: ReplaceRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json_: Json = False,
) -> None:
    """Train a model.

    `foretrain train my.toml --out runs/mine` trains what `my.toml` says.

    `foretrain train --out runs/mine --resume` goes on after a stop, a crash or a kill, and ends with the same bits.

    `foretrain train --set data.path=book.txt --set max_steps=2000` trains on your text.

    `foretrain watch runs/mine --open`, in a second terminal, shows it live; at its end `report.html` is in its folder.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop it after the step it is in: everything is saved, and the exit code is 128
    plus the signal's number (Ctrl-C 130, SIGTERM 143). A second signal ends it at once. Out of memory: exit code 3, and
    `--resume` goes on with smaller settings.
    """
    from foretrain.config import load

    level = chosen_level(quiet, verbose)
    check_resume(resume, overwrite, out)
    if resume and config is None and out is not None:
        if (out / "config.toml").is_file():
            config = out / "config.toml"
        elif not set_:
            raise InputError(
                f"--out {out}: there is no run to go on with; check the folder, or name a CONFIG to start one"
            )
    loaded = load(config, set_ or ())
    if resume and loaded.config.preset == "finetune":
        raise InputError(f"--out {out}: a fine-tuning run; go on with `foretrain finetune --out {out} --resume`")
    level, tell = _tell_notices(loaded, level)
    from foretrain.recipes.train import default_folder
    from foretrain.recipes.train import train as run

    folder = out or default_folder(loaded.config)
    summary = run(loaded.config, folder, resume=resume, overwrite=overwrite, progress=level, table=False, say=tell)
    end_run(summary, folder, level, json_)


def finetune(
    config: Annotated[
        Path | None,
        Parameter(
            help="TOML file; `foretrain config init FILE --preset finetune` writes one. With `--resume`, unset: the "
            "run's own."
        ),
    ] = None,
    /,
    *,
    base: Annotated[
        str,
        Parameter(
            help="What to fine-tune: a run folder, a causal language model in Hugging Face's format (GPT-2; Llama, "
            "Qwen, SmolLM and others with transformers installed), or a name of the Hugging Face Hub (fetched once), "
            "such as `gpt2`. Sets `model.weights`."
        ),
    ] = "",
    data: Annotated[str, Parameter(help="JSONL file of examples. Sets `data.path`.")] = "",
    set_: Settings = None,
    out: RunOut = None,
    resume: Resume = False,
    overwrite: ReplaceRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json_: Json = False,
) -> None:
    """Fine-tune a model with an adapter (LoRA) on your examples.

    `foretrain finetune --base runs/mine --data examples.jsonl --out runs/tuned` trains an adapter: records with
    prompt/completion, instruction/output, question/answer, text/label or messages (chats) are understood; for others
    set `data.prompt` and `data.answer`. Only the answers are learned.

    `foretrain generate runs/tuned --prompt "..."` asks the result. `runs/tuned/adapter` is in PEFT's format.

    `foretrain watch runs/tuned --open`, in a second terminal, shows it live; at its end `report.html` is in its folder.
    """
    from foretrain.config import load

    level = chosen_level(quiet, verbose)
    check_resume(resume, overwrite, out)
    if resume and config is None and out is not None and (out / "config.toml").is_file():
        config = out / "config.toml"
        if not load(config).config.model.weights:
            raise InputError(
                f"--out {out}: a run of `foretrain train`; go on with `foretrain train --out {out} --resume`"
            )
    if resume and config is None and not base:
        raise InputError(f"--out {out}: there is no run to go on with; check the folder, or name --base and --data")
    named = [("model.weights", base), ("data.path", data)]
    overrides = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in named if value] + (set_ or [])
    loaded = load(config, overrides, preset="finetune")
    level, tell = _tell_notices(loaded, level)
    from foretrain.recipes.finetune import check, default_folder
    from foretrain.recipes.finetune import finetune as run

    check(loaded.config)
    folder = out or default_folder(loaded.config)
    summary = run(loaded.config, folder, resume=resume, overwrite=overwrite, progress=level, table=False, say=tell)
    end_run(summary, folder, level, json_, lambda: _result_lines(summary, folder))


def _result_lines(summary: dict[str, Any], folder: Path) -> list[str]:
    from foretrain.show.trouble import longer_in_words

    lines = []
    if "accuracy" in summary:
        where = f"{summary['answered']} held-out examples of {summary['classes']} classes"
        lines.append(f"accuracy {summary['accuracy']:.1%} on {where}")
    if "exact_match" in summary:
        lines.append(f"exact match {summary['exact_match']:.1%} on {summary['answered']} held-out examples")
    if advice := longer_in_words(summary, folder):
        lines.append(advice)
    return lines


def _tell_notices(loaded: LoadedConfig, level: Level | None) -> tuple[Level, Callable[[str], None]]:
    """Say what the configuration's reader should know; return how much is said from here on, and by what."""
    level = level or loaded.config.log.console
    tell = silent if level == "quiet" else say
    for text in loaded.notices:
        tell(f"note: {text}")
    return level, tell


def compare(
    config: Annotated[
        Path | None,
        Parameter(help="TOML file. None: the demo task, cut short (about 10 minutes on two cores)."),
    ] = None,
    /,
    *,
    set_: Settings = None,
    out: Annotated[
        Path | None, Parameter(help="Folder. Unset: one in `runs/` that the same command finds again.")
    ] = None,
    seeds: Annotated[int, Parameter(help="Seeds per arm. Fewer than 3 prove nothing.")] = 3,
    rates: Annotated[
        list[float] | None,
        Parameter(consume_multiple=True, negative=(), help="Sweep: factors on the learning rate. Unset: 0.5 1 2."),
    ] = None,
    budgets: Annotated[
        list[float] | None,
        Parameter(consume_multiple=True, negative=(), help="Lengths of the plain loop, as factors. Unset: 0.7 1 1.4."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        Parameter(
            negative=(), help='A further arm: `--arm "muon: optimizer.type=muon, optimizer.learning_rate=0.01"`.'
        ),
    ] = None,
    ladder: Annotated[
        bool, flag("Add the ladder: engine, optimizer, look-ahead, leaps, averaging, one by one.")
    ] = False,
    minutes: Annotated[
        float | None, Parameter(help="Start no further run after this time; call again to go on.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json_: Json = False,
) -> None:
    """Measure whether a configuration is faster than the plain loop, to the same loss, tuned as hard.

    Arms x seeds, interleaved: plain at several budgets, hybrid, hybrid not moving (its overhead), hybrid repeating its
    last displacement, plain with equal passes, plain with equal seconds. All costs are charged. Every finished
    run is kept: the same command goes on where it stopped. Writes `result.json` (every raw number) and `report.html`.

    `foretrain compare my.toml --set max_steps=2000 --minutes 30` measures your own run, half an hour at a time. A file
    with `preset = "finetune"` is compared as `foretrain finetune` would train it.
    """
    level = chosen_level(quiet, verbose)
    from foretrain.measure.commands import run_comparison

    result, page, level = run_comparison(
        config, set_ or (), out, seeds, rates, budgets, arm or (), ladder, minutes, ["compare", *sys.argv[2:]], level
    )
    if json_:
        put_json(result | {"page": str(page)})
        return
    if level == "quiet":
        put(f"{result['analysis']['sentence']} ({page})")
        return
    from foretrain.show.comparison import print_comparison

    print_comparison(result, str(page))
