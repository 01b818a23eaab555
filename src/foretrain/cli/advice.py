"""`foretrain plan --time`: which model and batch would end lowest in a time, and where the one asked for would end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from foretrain.cli.terminal import put, put_json, say
from foretrain.errors import InputError
from foretrain.planning.scaling import GPT2_VOCABULARY

if TYPE_CHECKING:
    from foretrain.config import Config
    from foretrain.models.gpt2 import GPT2Shape
    from foretrain.planning.estimate import PlanTarget
    from foretrain.planning.scaling import Candidate, LossLaw, Speed

_ROUNDS = 3
"""Models that are measured at the most: the one asked for, and what is proposed by what was measured before."""
H200 = 252e12
"""Operations per second of eager bf16 training on one H200, as measured (engine/compiling.py), without a GPU here."""


def advise(config: Config, target: PlanTarget, time: str, runs: Path, device: str) -> None:
    """Print the advice. runs: folder of finished runs that set the law's level. device: the line that says what is
    planned for; empty: print JSON."""
    from foretrain.config.units import clock, parse_time
    from foretrain.planning import scaling

    try:
        seconds = parse_time(time)
    except ValueError as error:
        raise InputError(f"--time: {error}") from None
    if target.adapters:
        raise InputError("--time plans a model that is trained from fresh weights; leave --finetune out")
    law = scaling.law_by(scaling.finished_runs(runs, _shape(target).vocab_size), _shape(target).vocab_size)
    speed, how, found = _speed(config, target, seconds, law)
    asked = scaling.candidate(_shape(target), target.length, seconds, speed, law, config.batch_size)
    if not device:
        told = {"seconds": seconds, "speed": how, "estimate": True, "law": asdict(law)}
        put_json(told | {"asked": asdict(asked), "best": None if found is None else asdict(found)})
        return
    put(device)
    put(how)
    _print(asked, found, clock(seconds), math.log(_shape(target).vocab_size))
    put(_caveat(law, target))
    if found is not None and found.loss < asked.loss:
        put(
            f'\nmax_time = "{time}"\nbatch_size = {found.batch_size}\n\n[model]\nlayers = {found.layers}\n'
            f"width = {found.width}\nheads = {found.heads}"
        )


def _shape(target: PlanTarget) -> GPT2Shape:
    """Return the shape of a model that is trained from fresh weights, which is always a GPT-2."""
    return cast("GPT2Shape", target.shape)


def _speed(config: Config, target: PlanTarget, seconds: float, law: LossLaw) -> tuple[Speed, str, Candidate | None]:
    """Measure the model that was asked for, then what seems best, until the best one was measured."""
    import torch

    from foretrain.planning import scaling
    from foretrain.planning.speed import operations_per_second

    fits = _fitting(config, target)
    if target.cuda and not torch.cuda.is_available():
        speed = scaling.Speed(((1.0, H200),))
        best = scaling.best(_shape(target), target.length, seconds, speed, law, fits)
        return speed, "speed: reckoned for one H200, as there is no CUDA GPU here", best
    shape, best = _shape(target), None
    measured: dict[float, float] = {}
    for _ in range(_ROUNDS):
        per_token = scaling.operations(shape, target.length)
        if per_token in measured:
            break
        say(f"measuring {shape.layers} layers of {shape.width} for two seconds ...")
        found = operations_per_second(config, shape)
        if found is None:
            if not measured:
                raise InputError("the model that was asked for does not fit into memory; try `foretrain plan` first")
            break
        measured[per_token] = found
        best = scaling.best(_shape(target), target.length, seconds, scaling.Speed(tuple(measured.items())), law, fits)
        if best is None:
            break
        shape = replace(_shape(target), layers=best.layers, width=best.width, heads=best.heads)
    speed = scaling.Speed(tuple(measured.items()))
    rates = ", ".join(f"{rate / 1e9:,.1f}" for rate in measured.values())
    return speed, f"speed: {rates} billion operations per second, measured on this machine", best


def _fitting(config: Config, target: PlanTarget) -> Callable[[Candidate], bool]:
    """Return whether a model and its batch fit into the memory of the GPU, or into `memory.budget`."""
    import torch

    from foretrain.config import changed
    from foretrain.config.units import parse_size
    from foretrain.planning.estimate import estimate

    room = parse_size(config.memory.budget) if config.memory.budget else None
    if room is None and target.cuda and torch.cuda.is_available():
        room = torch.cuda.mem_get_info()[0]

    def fits(one: Candidate) -> bool:
        if room is None:
            return True
        shape = replace(_shape(target), layers=one.layers, width=one.width, heads=one.heads)
        plain = changed(config, {"batch_size": one.batch_size, "accumulation_steps": 1, "hybrid.mode": "off"})
        return estimate(plain, replace(target, shape=shape)).needed <= room

    return fits


def _print(asked: Candidate, found: Candidate | None, time: str, highest: float) -> None:
    """highest: the loss of a model that knows nothing. What the law says above it is not told."""
    from rich.table import Table

    from foretrain.config.units import loss_text, short
    from foretrain.show.screen import screen

    table = Table()
    for name in ("", "layers", "width", "batch", "parameters", "tokens", "steps", "expected loss"):
        table.add_column(name, justify="left" if not name else "right")
    rows: dict[str, Any] = {"asked for": asked} | ({} if found is None else {f"lowest in {time}": found})
    for name, one in rows.items():
        numbers = (one.layers, one.width, one.batch_size, short(one.parameters), short(one.tokens), f"{one.steps:,}")
        table.add_row(name, *map(str, numbers), loss_text(one.loss) if one.loss < highest else "?")
    screen().print(table)
    if found is None:
        put("no model would make enough steps in that time")
    elif found.loss >= asked.loss:
        put("nothing that was looked at would end lower than what was asked for")


def _caveat(law: LossLaw, target: PlanTarget) -> str:
    """Say what the figures rest on."""
    level = "no finished run with this vocabulary was found to set its level"
    if law.runs:
        level = f"its level is set by {law.runs} finished run{'s' if law.runs > 1 else ''} with this vocabulary"
    elif _shape(target).vocab_size < GPT2_VOCABULARY:
        level += ", which is not the one it was fitted to: the order of models counts, not their losses"
    return (
        f"an estimate, by a published law of loss against size and data (Chinchilla, re-fitted): {level}. The batch is "
        "Step Law's. Data is taken to suffice for all tokens"
    )
