"""The command line: one short function per command. Heavy imports stay inside, so that `--help` is instant."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CoercionError, CycloptsError, MissingArgumentError, Parameter, Token, UnusedCliTokensError
from cyclopts.argument import Argument

from foretrain.cli.evaluate import evaluate
from foretrain.cli.models import adapters_app, finetune, generate
from foretrain.cli.options import Overwrite
from foretrain.cli.plan import plan
from foretrain.cli.report import report, watch
from foretrain.cli.terminal import (
    Document,
    Json,
    Quiet,
    Settings,
    Verbose,
    check_resume,
    check_target,
    chosen_level,
    end_run,
    flag,
    put,
    put_beside,
    put_json,
    put_written,
    say,
    silent,
)
from foretrain.environment import wait_shortly
from foretrain.errors import ConfigError, ForetrainError, InputError, OutOfMemory, is_out_of_memory
from foretrain.show.outlet import outlets, shortened


def _version() -> str:
    try:
        return metadata.version("foretrain")
    except metadata.PackageNotFoundError:
        return "not installed: runs from its source"


app = App(
    name="foretrain",
    help="Hybrid predictive training for PyTorch: learns how the weights move, moves them ahead where that is shown to "
    "pay, and says honestly what it was worth. Stop and resume at any moment, bit for bit.\n\n"
    "Start with `foretrain train`: with no file it trains a small GPT on Python's own source code. What words such as "
    "move, leap and audit mean: docs/glossary.md.",
    version=_version,
    version_flags=["--version"],
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)
config_app = App(name="config", help="Write, show and check configuration files.")
app.command(config_app)
app.command(  # a package of its own, for developers; it is imported when its command is typed
    "foretrain_bench.command:bench_app",
    name="bench",
    help="Time the hot paths, compare two versions under noise, find steps in a history of results.",
)
app.command(finetune)
app.command(generate)
app.command(evaluate)
app.command(adapters_app)
app.command(plan)
app.command(report)
app.command(watch)


@app.command
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
    out: Annotated[Path | None, Parameter(help="Run folder. Unset: a new one in `runs/`.")] = None,
    resume: Annotated[bool, flag("Go on from the newest intact checkpoint in `--out`.")] = False,
    overwrite: Annotated[bool, flag("Replace an earlier run in `--out`.")] = False,
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
    level = level or loaded.config.log.console
    tell = silent if level == "quiet" else say
    for text in loaded.notices:
        tell(f"note: {text}")
    from foretrain.recipes.train import default_folder
    from foretrain.recipes.train import train as run

    folder = out or default_folder(loaded.config)
    summary = run(loaded.config, folder, resume=resume, overwrite=overwrite, progress=level, table=False, say=tell)
    end_run(summary, folder, level, json_)


@app.command
def export(
    source: Annotated[Path, Parameter(help="A run folder (its newest checkpoint is taken) or one checkpoint folder.")],
    folder: Annotated[Path, Parameter(help="Where to write.")],
    /,
    *,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face GPT-2 folder: weights, settings and tokenizer.

    `AutoModelForCausalLM`, `AutoTokenizer` and `pipeline("text-generation")` of transformers load it.
    """
    from foretrain.recipes.train import export_checkpoint

    check_target(folder, overwrite)
    put_written(export_checkpoint(source, folder, say), json_)


@app.command
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


@app.command
def doctor(*, json_: Json = False) -> None:
    """Look at device, precision, compiler, memory and disk, and say what a run would use and what stands in the way.

    Exits with 1 when something is wrong, such as a GPU that is there but unused.
    """
    from foretrain.cli.doctor import examine

    findings = examine()
    if json_:
        put_json([vars(finding) for finding in findings])
    else:
        marks = {"ok": "ok  ", "note": "note", "problem": "!!! "}
        for finding in findings:
            put_beside(f"{marks[finding.level]} {finding.name:<10} ", finding.text)
    if any(finding.level == "problem" for finding in findings):
        sys.exit(1)


@app.command
def predictors(
    *, state: Annotated[bool, flag("List the 64 features that predictors see instead.")] = False, json_: Json = False
) -> None:
    """List the predictors, each with its measured verdict; `predictor.type` chooses one."""
    from foretrain.motion.predictors.verdicts import VERDICTS

    rows: list[dict[str, Any]] = [{"name": name, "verdict": verdict} for name, verdict in VERDICTS.items()]
    if state:
        from foretrain.motion.state import FEATURES

        rows = [{"index": f.index, "group": f.group, "name": f.name, "meaning": f.meaning} for f in FEATURES]
    if json_:
        put_json(rows)
        return
    *names, last = rows[0]
    widths = {name: max(len(str(row[name])) for row in rows) for name in names}
    for row in rows:
        put_beside("".join(f"{row[name]!s:<{width}}  " for name, width in widths.items()), str(row[last]))


@config_app.command
def init(
    file: Path,
    /,
    *,
    preset: Annotated[
        str,
        Parameter(
            help="Preset to start from. `small`, `medium`, `large`, `specialist` and `generalist` set phases and "
            "rates, no model size."
        ),
    ] = "measured",
    set_: Settings = None,
    json_: Json = False,
) -> None:
    """Write a configuration file with every setting, its default and its meaning."""
    from foretrain.config import load, to_toml

    loaded = load(None, [f"preset={preset}", *(set_ or ())])
    text = to_toml(loaded.config)
    for notice in loaded.notices:
        say(f"note: {notice}")
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise InputError(f"{file} exists already; choose another name or delete it first") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror})") from None
    command = f"foretrain {'finetune' if preset == 'finetune' else 'train'} {shlex.quote(str(file))}"
    if json_:
        put_json({"written": str(file), "command": command})
    else:
        put(f"wrote {file}; train it with: {command}")


@config_app.command
def show(file: Path | None = None, /, *, set_: Settings = None, json_: Json = False) -> None:
    """Print the whole configuration as a run would see it, with the meaning of every setting."""
    from foretrain.config import load, to_mapping, to_toml

    config = load(file, set_ or ()).config
    if json_:
        put_json(to_mapping(config))
    else:
        put(to_toml(config).rstrip())


@config_app.command
def check(file: Path, /, *, set_: Settings = None, json_: Json = False) -> None:
    """Check a configuration file. Exit code 0: it can be used. 2: it cannot, and the reason is printed."""
    from foretrain.config import load

    try:
        loaded = load(file, set_ or ())
    except ConfigError as error:
        error.facts = {"ok": False}
        raise
    if json_:
        put_json({"ok": True, "notices": list(loaded.notices)})
        return
    for text in loaded.notices:
        put(f"note: {text}")
    put(f"{file}: ok")


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Errors of ours are one line and an exit code, never a traceback: 2 for what was handed in, 3 for a
    lack of memory, 1 for any other run that failed. With `--json` they are a document as well. A reader of the output
    that goes away, as `head` does, ends nothing; nor does a disk that takes no output, which is told at the end."""
    wait_shortly()
    given = sys.argv[1:] if arguments is None else arguments
    with outlets() as output:
        with Document.wanted(given) as document:
            try:
                code = _carry_out(given, document)
            except SystemExit as end:
                code = end.code or 0  # type: ignore[assignment]
        output.flush()
        if output.failure is not None and code == 0:
            say(f"error: standard output: {output.failure.strerror}; what was printed is cut off, print it elsewhere")
            code = 1
    sys.exit(code)


def _carry_out(arguments: list[str], document: Document | None) -> int:
    """The exit code."""

    def fail(error: BaseException, text: str, code: int) -> int:
        text = shortened(" ".join(text.split()))
        if document is not None:
            document.fail(error, text, code)
        say(f"error: {text}")
        return code

    try:
        if any("\0" in argument for argument in arguments):
            raise InputError("an argument holds a zero byte, which no name and no text on a command line can")
        app(arguments, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        return fail(error, _misuse(error), 2)
    except ForetrainError as error:
        return fail(error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        if document is not None:
            document.fail(error, "interrupted", 130)
        say("interrupted")
        return 130
    except Exception as error:
        if is_out_of_memory(error):
            where = "Out of memory outside of the run's steps: use a smaller model or batch_size, or another device."
            return fail(error, f"{error} {where}", OutOfMemory.exit_code)
        if isinstance(error, OSError) and error.filename is not None:  # a name or path, from wherever it came
            name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
            return fail(error, f"{name}: {error.strerror}; check the path and its permissions", 2)
        if document is not None:  # a fault of ours: the program that reads us is told, and the traceback follows
            document.fail(error, f"{type(error).__name__}: {error}", 1)
        raise
    return 0


def _misuse(error: CycloptsError) -> str:
    """A command line that cannot be understood, in our words, and where help is."""
    command = " ".join(["foretrain", *(error.command_chain or ())])
    match error:
        case UnusedCliTokensError(unused_tokens=list() as tokens):
            text = f"{command}: there is no use for {shlex.join(tokens)}"
        case MissingArgumentError(argument=Argument() as argument):
            given = error.keyword or argument.name
            text = f"{command}: {given} needs a value" if given.startswith("-") else f"{command}: {given} is missing"
        case CoercionError(token=Token() as token) if error.msg is None:
            kinds = {bool: "neither true nor false", int: "not a whole number", float: "not a number"}
            name = f"{token.keyword} " if token.keyword else ""
            kind = kinds.get(error.target_type, "not understood") if error.target_type else "not understood"
            text = f"{command}: {name}{token.value}: {kind}"
        case _:
            text = str(error).partition(" Available commands")[0].rstrip(".")
    return f"{text}{'' if text.endswith('?') else ';'} `{command} --help` shows how"


if __name__ == "__main__":
    main()
