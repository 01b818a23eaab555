"""What all commands share: options, and the ways to say something: a result, one JSON document, or what happens."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from foretrain.errors import InputError
from foretrain.persist.files import for_json
from foretrain.show.outlet import shortened, visible

if TYPE_CHECKING:
    from foretrain.config.schema import Level


def flag(text: str, name: str | None = None) -> Parameter:
    return Parameter(name=name, negative=(), show_default=False, help=text)


Settings = Annotated[
    list[str] | None,
    Parameter(
        name=["--set", "-s"],
        negative=(),
        help="Change one setting, for example `--set optimizer.learning_rate=3e-4`. Repeatable.",
    ),
]
JSON_FLAG = "--json"
_TRUE = ("true", "t", "yes", "y", "1")
Json = Annotated[bool, flag("Print the result as one JSON document; an error too.", JSON_FLAG)]
Quiet = Annotated[bool, flag("Only warnings, findings and errors, and the result in one line.")]
Verbose = Annotated[bool, flag("Everything that happens.")]


def chosen_level(quiet: bool, verbose: bool) -> Level | None:
    """Return the level that the flags ask for; None: as `log.console` says."""
    if quiet and verbose:
        raise InputError("--quiet and --verbose contradict each other; keep one of them")
    return "quiet" if quiet else "verbose" if verbose else None


def check_resume(resume: bool, overwrite: bool, out: Path | None) -> None:
    if resume and out is None:
        raise InputError("--resume needs --out DIR, the folder of the run to go on with")
    if resume and overwrite:
        raise InputError("--resume and --overwrite contradict each other; keep one of them")


def check_target(folder: Path, overwrite: bool) -> None:
    """Nobody's files are written over by mistake."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file, not a folder; choose another name")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise InputError(
            f"{folder}: there is something in it already; choose another folder, or add --overwrite to replace "
            "files of the same names"
        )


class OtherRank:
    """One of several processes of a run, and not the first: what all of them would say is said once, by that one."""

    quiet = False


# --- saying something -------------------------------------------------------------------------------------------------


def put(text: str) -> None:
    """Print a result on standard output. It may name files; programs get their names as they are."""
    if OtherRank.quiet:
        return
    sys.stdout.write(for_reader(text) + "\n")
    sys.stdout.flush()


def for_reader(text: str) -> str:
    """Prepare what a model wrote, or what a file is called, for standard output: a terminal shows control characters in
    it and does not obey them."""
    return visible(text) if sys.stdout.isatty() else text


def put_beside(start: str, text: str) -> None:
    """Print a result that begins with a name or a mark; on a terminal, further lines of the text stay beside it."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, max(20, width - len(start)), break_long_words=False, break_on_hyphens=False)
    put(start + text.replace("\n", "\n" + " " * len(start)))


def say(text: str, always: bool = False) -> None:
    """Print what happens on standard error. It may quote files. always: also where another process speaks for all."""
    if OtherRank.quiet and not always:
        return
    sys.stderr.write(visible(shortened(text)) + "\n")
    sys.stderr.flush()


def silent(text: str) -> None:
    return


class Document:
    """The one JSON document of a command that was called with `--json`.

    While it is open, standard output is for the document alone: whatever else is printed goes to standard error.
    """

    _open: Document | None = None

    def __init__(self, target: TextIO) -> None:
        self.target = target
        self.printed = False

    @classmethod
    @contextlib.contextmanager
    def wanted(cls, arguments: list[str]) -> Iterator[Document | None]:
        """Open a document if the arguments ask for one."""
        if not _asks_for_json(arguments):
            yield None
            return
        cls._open = cls(sys.stdout)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield cls._open
        finally:
            cls._open = None

    def put(self, value: Any) -> None:
        """Print the document once: a second one would make the output unreadable."""
        if self.printed or OtherRank.quiet:
            return
        self.printed = True
        self.target.write(as_json(value) + "\n")
        self.target.flush()

    def fail(self, error: BaseException, text: str, exit_code: int) -> None:
        """Print an error as a document. What its raiser had found out is beside it."""
        facts = dict(getattr(error, "facts", {}))
        self.put(facts | {"error": text, "type": type(error).__name__, "exit_code": exit_code})


def _asks_for_json(arguments: list[str]) -> bool:
    """Look for `--json`, or `--json=true` in the words that a switch takes; the last one counts."""
    asked = False
    for argument in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        name, given, value = argument.partition("=")
        if name == JSON_FLAG:
            asked = not given or value.lower() in _TRUE
    return asked


def put_json(value: Any) -> None:
    """Print the result of a command that was called with `--json`."""
    (Document._open or Document(sys.stdout)).put(value)


def put_written(path: Path, json_: bool) -> None:
    """Print where a command wrote something."""
    if json_:
        put_json({"written": str(path)})
    else:
        put(str(path))


def as_json(value: Any) -> str:
    """Write JSON that is valid everywhere: numbers in full, null for those that JSON does not have, ASCII only."""
    return json.dumps(for_json(value), indent=2, allow_nan=False)


# --- the end of a run -------------------------------------------------------------------------------------------------


def end_run(
    summary: Mapping[str, Any], folder: Path, level: Level, json_: bool, results: Callable[[], list[str]] = list
) -> None:
    """Say what came of a run, on standard output, and where it is, then exit as its end demands.

    results: further lines on standard output.
    """
    from foretrain.recipes.train import written

    files = written(folder)
    level = "quiet" if OtherRank.quiet else level
    interrupted = summary["reason"] == "interrupted"
    if level != "quiet" and not interrupted:
        from foretrain.show.screen import screen
        from foretrain.show.summary import closing_lines, summary_table

        put(f"run {summary['reason']}")
        screen(wide=False).print(summary_table(summary, level == "verbose"))
        for line in closing_lines(summary):
            say(line)
    if json_:
        put_json({**summary, "files": files})
    elif level == "quiet":
        from foretrain.show.summary import result_line

        how = ", go on with --resume" if interrupted else ""
        put(f"{result_line(summary)}; {files['folder']}{how}")
    elif not interrupted:  # else the run's last line has said how to go on
        for line in results():
            put(line)
        run = shlex.quote(str(folder))
        advice = {"report": "open it in a browser", "model": f'foretrain generate {run} --prompt "..."'}
        advice["adapter"] = advice["model"]
        for name, path in files.items():
            say(f"{name:<7}  {path}" + (f"  ({advice[name]})" if name in advice else ""))
    if interrupted:  # saved but not finished: a shell's `&&` and a scheduler must know
        sys.exit(128 + signal.Signals[summary["signal"]])
