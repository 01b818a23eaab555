"""The command line: one short function per command. Heavy imports stay inside, so that `--help` is instant."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from importlib import metadata
from typing import Annotated, Any

from cyclopts import App, CoercionError, CycloptsError, MissingArgumentError, Token, UnusedCliTokensError
from cyclopts.argument import Argument

from foretrain.cli.configs import config_app
from foretrain.cli.evaluate import evaluate
from foretrain.cli.forecast import forecast
from foretrain.cli.models import adapters_app, export, generate
from foretrain.cli.plan import plan
from foretrain.cli.report import report, watch
from foretrain.cli.sweep import sweep
from foretrain.cli.terminal import (
    Document,
    Json,
    OtherRank,
    flag,
    put_beside,
    put_json,
    say,
)
from foretrain.cli.training import compare, finetune, train
from foretrain.environment import wait_shortly
from foretrain.errors import ForetrainError, InputError, OutOfMemory, is_out_of_memory
from foretrain.launch.group import place_of
from foretrain.show.outlet import outlets, shortened


def _version() -> str:
    try:
        return metadata.version("foretrain")
    except metadata.PackageNotFoundError:
        return "not installed: runs from its source"


app = App(
    name="foretrain",
    help="A trainer for PyTorch that needs no babysitting: stops and resumes at any moment, bit for bit, finds its "
    "learning rate, says where a run will end, and explains it on one page. Where it is shown to pay it also learns "
    "how the weights move, and moves them ahead.\n\n"
    "Start with `foretrain train`: with no file it trains a small GPT on Python's own source code. What words such as "
    "move, leap and audit mean: docs/glossary.md.",
    version=_version,
    version_flags=["--version"],
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)
app.command(train)
app.command(config_app)
app.command(  # a package of its own, for developers; it is imported when its command is typed
    "foretrain_bench.command:bench_app",
    name="bench",
    help="Time the hot paths, compare two versions under noise, find steps in a history of results.",
)
app.command(finetune)
app.command(export)
app.command(compare)
app.command(sweep)
app.command(generate)
app.command(evaluate)
app.command(adapters_app)
app.command(plan)
app.command(forecast)
app.command(report)
app.command(watch)


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
    from foretrain.motion.predictors.registry import VERDICTS

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


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line. Errors of ours are one line and an exit code, never a traceback: 2 for what was handed in,
    3 for a lack of memory, 1 for any other run that failed. With `--json` they are a document as well. A reader of the
    output that goes away, as `head` does, ends nothing; nor does a disk that takes no output, which is told at the
    end."""
    wait_shortly()
    given = sys.argv[1:] if arguments is None else arguments
    with outlets() as output:
        with Document.wanted(given) as document:
            try:
                code = _carry_out(given, document)
            except SystemExit as end:
                code = end.code or 0  # type: ignore[assignment]
            if place_of() is not None:  # a launcher ends those that leave last, and would change their exit code
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        output.flush()
        if output.failure is not None and code == 0:
            say(f"error: standard output: {output.failure.strerror}; what was printed is cut off, print it elsewhere")
            code = 1
    sys.exit(code)


def _carry_out(arguments: list[str], document: Document | None) -> int:
    """Return the exit code."""

    def fail(error: BaseException, text: str, code: int) -> int:
        text = shortened(" ".join(text.split()))
        if place is not None:
            from foretrain.launch.joining import tells_of

            if not tells_of(error, place):
                return code
            text = f"rank {place.rank}: {text}" if place.rank else text
        if document is not None:
            document.fail(error, text, code)
        say(f"error: {text}", always=True)
        return code

    place = place_of()
    OtherRank.quiet = place is not None and place.rank > 0
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
    """Say in our words why a command line cannot be understood, and where help is."""
    command = " ".join(["foretrain", *(error.command_chain or ())])
    match error:
        case UnusedCliTokensError(unused_tokens=list() as tokens):
            text = f"{command}: there is no use for {shlex.join(tokens)}"
        case MissingArgumentError(argument=Argument() as argument):
            given = error.keyword or argument.name
            text = f"{command}: {given} is missing"
            if given.startswith("-"):
                text = f"{command}: {given} needs a value; one that begins with a minus is written {given}=-VALUE"
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
