"""`foretrain forecast`: where runs are going, by their losses so far."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from foretrain.cli.terminal import Json, put_json, say
from foretrain.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from foretrain.recipes.forecast import EndForecast


def forecast(
    runs: Annotated[
        list[Path],
        Parameter(
            consume_multiple=True,
            negative=(),
            help="Run folders, finished or not; or other tools' logs: JSON lines, CSV, TensorBoard's event files.",
        ),
    ],
    /,
    *,
    total_steps: Annotated[
        int | None, Parameter(help="Length of the runs in steps. Unset: as a run folder says, or the file.")
    ] = None,
    schedule: Annotated[
        Literal["wsd", "cosine", "linear", "constant"] | None,
        Parameter(help="What the learning rate will do. Unset: as a run folder says; of other logs it is not known."),
    ] = None,
    decay_share: Annotated[
        float | None, Parameter(help="Share of the run over which `--schedule wsd` decays. Unset: 0.3.")
    ] = None,
    at: Annotated[
        float | None,
        Parameter(help="Pretend that only this share of the run had been seen, and tell the error where it is over."),
    ] = None,
    sibling: Annotated[
        list[Path] | None,
        Parameter(negative=(), help="A finished run like these, with the same schedule; repeatable."),
    ] = None,
    step: Annotated[str, Parameter(show_default=False, help="Column or field of steps in a log. Unset: guessed.")] = "",
    loss: Annotated[
        str, Parameter(show_default=False, help="Column, field or tag of losses. Unset: guessed, held-out ones first.")
    ] = "",
    rate: Annotated[
        str, Parameter(show_default=False, help="Column, field or tag of learning rates. Unset: guessed.")
    ] = "",
    level: Annotated[float, Parameter(help="Probability with which the end should lie in the interval.")] = 0.8,
    json_: Json = False,
) -> None:
    """Forecast the loss at the end of runs from their beginning, with an interval.

    `foretrain forecast runs/mine` says where a run ends that goes on, was interrupted or was killed. Several runs are
    ranked by their forecast, not by the loss they have now.

    `foretrain forecast runs/done` tests itself on a finished run: its end as forecast from a quarter, a half and three
    quarters of it, and how wrong that was; `--at 0.1` for another share.

    `foretrain forecast log.csv --total-steps 20000 --schedule cosine` reads what other tools have logged. How the
    learning rate will fall decides where a run ends, so say it: without it the interval is wide.

    `docs/forecast.md` tells how it is made and how good it is.
    """
    from foretrain.forecast.logged import ColumnNames
    from foretrain.recipes.forecast import forecast_runs
    from foretrain.recipes.seen import ForecastRequest

    if not runs:
        raise InputError("name a run folder, such as runs/mine, or a log")
    names = ColumnNames(step, loss, rate)
    asked = ForecastRequest(names, total_steps, schedule, decay_share, at, tuple(sibling or ()), level)
    made = forecast_runs(runs, asked)
    if json_:
        put_json([one.as_dict() for one in made])
        return
    from foretrain.show.screen import screen

    screen().print(_table(made))
    for text in dict.fromkeys(f"{one.run.name}: {note}" for one in made for note in one.notes):
        say(f"note: {text}")


def _table(made: list[EndForecast]) -> Table:
    """Lay out the forecasts. What nobody asked for has no column."""
    from rich.markup import escape
    from rich.table import Table

    from foretrain.config.units import interval_text, loss_text
    from foretrain.show.outlet import visible

    known = any(one.truth is not None for one in made)
    simpler = list(dict.fromkeys(name for one in made for name in one.made.baselines))
    table = Table(title="loss at the end, by its forecast", title_justify="left")
    head = ["run", "seen", f"end, {100 * made[0].made.level:.0f} % interval"]
    for name in [*head, *(["came", "error", "interval"] if known else []), *simpler, "made by"]:
        table.add_column(escape(name))
    for one in made:
        end = interval_text(one.made.loss, one.made.low, one.made.high)
        came = ["", "", ""]
        if one.truth is not None:
            error = "" if one.error_percent is None else f"{one.error_percent:+.2f} %"
            came = [loss_text(one.truth), error, "held" if one.held else "missed"]
        seen = f"{one.seen:,} of {one.made.step:,}"
        others = [loss_text(one.made.baselines[name]) if name in one.made.baselines else "" for name in simpler]
        cells = [one.run.name, seen, end, *(came if known else []), *others, one.made.method]
        table.add_row(*(escape(visible(cell)) for cell in cells))
    return table
