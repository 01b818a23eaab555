"""`foretrain bench`: run, list, compare, history. Heavy imports stay inside, so that `--help` is instant."""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from foretrain.cli.terminal import Json, Quiet, Verbose, chosen_level, put, put_beside, put_json, say
from foretrain.errors import InputError

if TYPE_CHECKING:
    from foretrain.config.schema import Level

bench_app = App(
    name="bench",
    help="Time the hot paths, compare two versions under noise, find steps in a history of results.",
    help_format="markdown",
)


@bench_app.command
def run(
    *,
    only: Annotated[
        str | None,
        Parameter(help="Benchmarks whose name holds this text or fits this pattern; commas separate several."),
    ] = None,
    processes: Annotated[
        int | None,
        Parameter(
            help="Separate processes per benchmark and version. Unset: 5; with `--against` as many as can show that "
            "one of the benchmarks regressed."
        ),
    ] = None,
    out: Annotated[Path | None, Parameter(help="Result file. Unset: a new one in `bench/`.")] = None,
    device: Annotated[str, Parameter(help="`cpu` or `cuda`.")] = "cpu",
    threads: Annotated[int, Parameter(help="Threads of each process; one is the steadiest.")] = 1,
    against: Annotated[
        Path | None,
        Parameter(
            help="Another version: a checkout, its source folder, or the Python of an environment that has it. Both "
            "are timed in turns, then compared: A is the other, B this one. The other's file is `OUT-against.json`."
        ),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json_: Json = False,
) -> None:
    """Time the hot paths, each in several processes.

    `foretrain bench run --only "forecast*" --out now.json` times the forecasts.

    `foretrain bench run --against ../old` says what got slower since that checkout. Exits with 1 if something did.
    """
    from foretrain.show.screen import screen
    from foretrain_bench import formats, tables, timing
    from foretrain_bench.verdict import FEWEST, fewest_processes

    level = chosen_level(quiet, verbose) or "normal"
    names = timing.choose(only)
    if processes is None:
        processes = FEWEST if against is None else fewest_processes(len(names))
    if processes < 1 or threads < 1:
        raise InputError("--processes and --threads are at least 1")
    _check_device(device)
    versions = [timing.this_version()] if against is None else [timing.other_version(against), timing.this_version()]
    out = out or Path("bench") / f"{datetime.now().astimezone():%Y-%m-%dT%H-%M-%S}.json"
    _make_room(out)
    plan = timing.TimingPlan(names, processes, device, threads)
    with tables.TimingProgress(level=level) as progress:
        measured = timing.run(plan, versions, progress)
    together = timing.new_token() if against is not None else None
    command = _command(only, processes, device, threads, against)
    files = [out] if against is None else [out.with_name(f"{out.stem}-against{out.suffix}"), out]
    records = [timing.record(one, plan, command, together) for one in measured]
    for file, one, record in zip(files, measured, records, strict=True):
        _write(file, record)
        for name, reason in one.failures.items():
            say(f"warning: {name} could not be timed in {one.version.label!r} and is left out: {reason}")
    wrote = f"wrote {' and '.join(str(file) for file in files)}"
    if against is not None:
        _compare(formats.read(files[0]), formats.read(files[1]), None, json_, level, wrote)
        return
    if json_:
        put_json(records[0] | {"written": str(out)})
    elif level == "quiet":
        put(f"{len(records[0]['benchmarks'])} benchmarks timed; {wrote}")
    else:
        say(wrote)
        screen().print(tables.run_table(records[0]))


@bench_app.command(name="list")
def list_(*, json_: Json = False) -> None:
    """List the benchmarks and what each of them times; `bench run --only NAME` runs one."""
    from foretrain_bench.hotpaths import BENCHMARKS

    if json_:
        put_json([{"name": name, "description": found.description} for name, found in BENCHMARKS.items()])
        return
    width = max(len(name) for name in BENCHMARKS)
    for name, found in BENCHMARKS.items():
        put_beside(f"{name:<{width}}  ", found.description)


@bench_app.command
def compare(
    a: Annotated[Path, Parameter(help="The old side: a result file, or a folder of them taken together.")],
    b: Annotated[Path, Parameter(help="The new side.")],
    /,
    *,
    delta: Annotated[float, Parameter(help="Changes smaller than this share are of no interest.")] = 0.02,
    json_: Json = False,
) -> None:
    """Say of each benchmark whether B regressed against A, is equivalent, or whether that is inconclusive.

    Reads files of `foretrain bench run`, plain JSON (`{"name": [median of each process, ...]}`), pytest-benchmark's
    JSON and Criterion's console text. Exits with 1 if something regressed, with 2 if a file cannot be used.
    """
    from foretrain_bench import formats

    if not 0 < delta < 1:
        raise InputError(f"--delta {delta}: give a share between 0 and 1, for example 0.02 for 2 %")
    _compare(formats.read(a), formats.read(b), delta, json_)


@bench_app.command
def history(*files: Annotated[Path, Parameter(help="Result files, or folders of them.")], json_: Json = False) -> None:
    """Show how each benchmark went over many result files, and where it stepped."""
    from foretrain.show.screen import screen
    from foretrain_bench import tables
    from foretrain_bench.history import read_all, series

    found = series(read_all(files))
    if json_:
        put_json(tables.history_json(found))
        return
    screen().print(tables.history_table(found))
    most = max(len(one.files) for one in found.values())
    if most < 4:
        say("note: a step needs two files on either side; with fewer than four files none can be found")


def _compare(a: Any, b: Any, delta: float | None, json_: bool, level: Level = "normal", wrote: str = "") -> None:
    """Judge, print, and exit with 1 if something regressed. wrote: what to say of the files that were made for it."""
    from foretrain.show.screen import screen
    from foretrain_bench import tables
    from foretrain_bench.verdict import DELTA, judge

    names = [name for name in a.benchmarks if name in b.benchmarks]
    if not names:
        raise InputError(f"{a.source} and {b.source} have no benchmark in common; compare results of the same ones")
    if a.seconds != b.seconds:
        raise InputError(
            f"{a.source} and {b.source}: one is in seconds, the other has no unit; use one format for both"
        )
    verdicts = judge({name: (a.benchmarks[name], b.benchmarks[name]) for name in names}, delta or DELTA)
    if wrote and level != "quiet":
        say(wrote)
    if json_:
        put_json(tables.comparison_json(verdicts))
    elif level == "quiet":
        put(f"{tables.comparison_line(verdicts)}; {wrote}")
    else:
        one, other = (Path(side.source).name for side in (a, b))
        if one == other:
            one, other = str(a.source), str(b.source)
        console = screen()
        console.print(tables.comparison_table(verdicts, a.seconds, one, other, console.width))
    for note in tables.comparison_notes(a, b, verdicts) if level != "quiet" else ():
        say(f"note: {note}")
    if any(verdict.verdict == "regressed" for verdict in verdicts.values()):
        sys.exit(1)


def _check_device(device: str) -> None:
    from foretrain.engine.precision import choose_device

    if device != "cpu" and not device.startswith("cuda"):
        raise InputError(f"--device {device}: give `cpu` or `cuda`")
    choose_device(device)


def _command(only: str | None, processes: int, device: str, threads: int, against: Path | None) -> str:
    """Return the command as it could be typed, without folders of this machine."""
    words = ["foretrain bench run"]
    words += [f"--only '{only}'"] if only else []
    words += [f"--processes {processes} --device {device} --threads {threads}"]
    words += [f"--against {against.name}"] if against else []
    return " ".join(words)


def _make_room(file: Path) -> None:
    """Make sure that the result can be written, before minutes of measuring."""
    from foretrain.persist.files import make_folder

    try:
        make_folder(file.parent)
        if file.is_dir():
            raise InputError(f"--out {file}: this is a folder; name a file in it")
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise InputError(f"--out {file}: nothing can be written there ({error.strerror}); choose another") from None


def _write(file: Path, record: dict[str, Any]) -> None:
    from foretrain.errors import SaveError
    from foretrain.persist.files import explain_failed_write, write_atomic

    try:
        write_atomic(file, json.dumps(record) + "\n")
    except OSError as error:
        cause, advice = explain_failed_write(error)
        raise SaveError(f"{file}: {cause}. {advice}") from None
