"""`foretrain sweep`: many configurations for the price of a few runs."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from foretrain.cli.terminal import Json, Quiet, Verbose, chosen_level, put, put_json, say


def sweep(
    space: Annotated[
        Path | None,
        Parameter(
            help="TOML file with [base], [space] and [sweep]; docs/sweep.md explains it. With `--out`, unset: "
            "the sweep's own."
        ),
    ] = None,
    /,
    *,
    out: Annotated[
        Path | None,
        Parameter(help="Folder of the sweep; one that is there is gone on with. Unset: a new one in `runs/`."),
    ] = None,
    workers: Annotated[
        int | None, Parameter(help="Processes on this machine. Unset: as `[sweep] workers` says.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json_: Json = False,
) -> None:
    """Find the best settings: many trials, each a run that is paused, ranked, and gone on with while it can win.

    `foretrain sweep space.toml --out runs/sweep` tries the settings that `space.toml` names. Trials are ranked at a few
    shares of their length by annealed copies or held-out losses; the better half goes on. The first two always run to
    the end, and so does a tenth of those that were stopped, by lot: they tell what stopping has missed.

    `foretrain sweep --out runs/sweep` goes on after a stop, a crash or a kill: nothing is done twice. Several of them,
    in several terminals or on several machines with one `[sweep] storage`, work on the same sweep.

    `runs/sweep/best.toml` is the best configuration, `runs/sweep/sweep.html` the page, `runs/sweep/runs/` has every
    trial as a run folder.
    """
    from foretrain.show.screen import screen
    from foretrain.show.sweep import result_lines, trial_table
    from foretrain.sweep.run import run_sweep

    level = chosen_level(quiet, verbose) or "normal"
    summary = run_sweep(space, out, workers, level)
    folder = Path(summary["folder"])
    if json_:
        put_json(summary)
    elif level == "quiet":
        put("; ".join([*result_lines(summary), str(folder)]))
    else:
        screen(wide=False).print(trial_table(summary, None if level == "verbose" else 20))
        for line in result_lines(summary):
            put(line)
        for name in ("best.toml", "sweep.html"):
            if (folder / name).exists():
                say(f"{name:<10}  {folder / name}")
    if "signal" in summary:
        say(f"{summary['signal']}: every trial is saved; go on with: foretrain sweep --out {shlex.quote(str(folder))}")
        sys.exit(128 + signal.Signals[summary["signal"]])
