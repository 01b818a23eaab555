"""`foretrain report` and `foretrain watch`: a run to look at, as a file and live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from foretrain.cli.terminal import Json, flag, put, put_json, say
from foretrain.errors import InputError


def report(
    runs: Annotated[
        list[Path], Parameter(consume_multiple=True, negative=(), help="Run folders; several are laid over each other.")
    ],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="File to write. Unset: `report.html` in the run folder.")] = None,
    json_: Json = False,
) -> None:
    """Write a run as one page: what it came to, its curves, every decision with its reason, what to change.

    `foretrain report runs/mine` writes `runs/mine/report.html`; `foretrain train` has done so at its end.

    `foretrain report runs/one runs/two --out both.html` lays runs over each other. The page is one file that needs no
    network, for light and dark screens.
    """
    from foretrain.show.follow import read_runs
    from foretrain.show.pages.report import NAME, write_report
    from foretrain.show.pages.report_lead import headline

    if not runs:
        raise InputError("name the folder of a run, such as runs/mine")
    if out is None and len(runs) > 1:
        raise InputError("the report of several runs needs a name: --out FILE.html")
    target = out or runs[0] / NAME
    if target.is_dir():
        raise InputError(f"--out {target}: a folder; name a file, such as {target / NAME}")
    size = write_report(runs, target)
    if json_:
        told = [
            {"name": record.name, "state": record.state, "sentence": headline(record)} for record in read_runs(runs)
        ]
        put_json({"page": str(target), "bytes": size, "runs": told})
        return
    put(str(target))


def watch(
    run: Annotated[Path, Parameter(help="Run folder, of a run that goes on, has ended, or is about to begin.")],
    /,
    *,
    port: Annotated[int, Parameter(help="Of this machine's own address. 0: any that is free.")] = 0,
    open_: Annotated[bool, flag("Open it in the browser.", "--open")] = False,
    json_: Json = False,
) -> None:
    """Look at a run while it goes on: the page of `foretrain report`, live, until Ctrl-C.

    It can be started before the run: it waits for it.

    It reads the run's files and never speaks to the trainer, so neither can hurt the other: a run that is stopped and
    resumed is followed. It answers on this machine only, to whoever has the printed address; nothing can be changed
    through it.
    """
    from foretrain.show.follow import has_begun
    from foretrain.show.pages.watch import WatchServer

    begun = has_begun(run)
    server = WatchServer(run, port)
    if json_:
        put_json({"address": server.address, "port": server.port})
    else:
        put(server.address)
        say("open this address in a browser on this machine; Ctrl-C ends it, the run goes on")
    if not begun:
        say(f"{run}: no run has begun there yet; it is shown as soon as it does")
    if open_:
        import webbrowser

        webbrowser.open(server.address_to_open())
    try:
        server.run()
    except KeyboardInterrupt:
        say("stopped; the run was not touched")
