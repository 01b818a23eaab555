"""The command that says how much memory a run will need, before there is one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from foretrain.cli.terminal import Json, Settings, flag, put, put_json, say
from foretrain.errors import InputError

_SAY_THE_VOCABULARY = {"data.path", "data.tokenizer", "data.vocabulary", "model.vocab_size", "model.weights"}
"""Settings by which the vocabulary is known, or meant to be looked up."""

if TYPE_CHECKING:
    from rich.table import Table

    from foretrain.config import Config
    from foretrain.models.causal_shape import CausalShape
    from foretrain.models.gpt2 import GPT2Shape
    from foretrain.planning.estimate import PlanTarget
    from foretrain.planning.plan import MemoryPlan


def plan(
    config: Annotated[Path | None, Parameter(help="TOML file. None: the defaults.")] = None,
    /,
    *,
    set_: Settings = None,
    budget: Annotated[
        str,
        Parameter(help="Memory that must suffice: `14GB`, `6GiB`, `800MB`. Unset: what is free on the GPU, if any."),
    ] = "",
    device: Annotated[
        str,
        Parameter(
            help="Plan for a `cuda` GPU or for the `cpu`, whatever is here. Unset: what a run would use here; with a "
            "budget and no GPU, a GPU."
        ),
    ] = "",
    finetune: Annotated[bool, flag("Plan what `foretrain finetune` would do with this file, not `train`.")] = False,
    base: Annotated[
        str,
        Parameter(help="The model to fine-tune, as `foretrain finetune --base` takes it; with `--finetune` or not."),
    ] = "",
    time: Annotated[
        str,
        Parameter(help="Say instead which depth, width and batch would end lowest in this time: `1h`, `30m`, `1h30m`."),
    ] = "",
    runs: Annotated[
        Path, Parameter(help="With `--time`: folder of finished runs, which set the level of the losses.")
    ] = Path("runs"),
    json_: Json = False,
) -> None:
    """Say how much device memory a run will need, phase by phase, and which settings fit a budget.

    `foretrain plan my.toml --budget 14GB` proposes the fastest settings that fit, explains each of them, and prints the
    lines for your file. Where prediction does not pay (language models at full weights) it is switched off first.
    `memory.budget = "14GB"` in the file does the same by itself. Settings that your file names stay as they are.
    Nothing is read or allocated but the file: a large model is planned on a laptop.

    `foretrain plan my.toml --time 1h` measures this machine for some seconds, and says which model and batch would end
    lowest in an hour, and where the one of the file would end: an estimate, by a published law and your finished runs.

    Exits with 2 when nothing fits, and says what the smallest possible is.
    """
    from foretrain.config import given, load
    from foretrain.planning.estimate import estimate, tries_nothing
    from foretrain.planning.growing import with_planned_growth
    from foretrain.planning.plan import NothingFitsError, without_prediction
    from foretrain.planning.plan import plan as make_plan

    named = [f"model.weights={json.dumps(base, ensure_ascii=False)}"] if base else []
    loaded = load(config, named + (set_ or []), preset="finetune" if finetune or base else "measured")
    for text in loaded.notices:
        say(f"note: {text}")
    settings = loaded.config
    where = _device(settings, device, wanted=bool(budget or settings.memory.budget))
    target = _target(settings, where.name)
    if time:
        from foretrain.cli.advice import advise

        advise(settings, target, time, runs, "" if json_ else where.line(target.precision))
        return
    settings, growth = with_planned_growth(settings, target.shape)
    found = estimate(settings, target)
    limit = _budget(settings, budget, target)
    planned = _planned(settings, target) | ({"growth": growth} if growth else {})
    if limit is None:
        if json_:
            put_json({"planned": planned, "fits": None, "budget_bytes": None, "estimate": found.as_dict()})
        else:
            put(where.line(target.precision))
            put(_planned_line(planned))
            _print_estimate(found)
        return
    try:
        made = make_plan(settings, target, limit, given(settings))
    except NothingFitsError as error:
        error.facts = {"planned": planned, "fits": False} | _smallest(error.smallest)
        say(where.line(target.precision))
        raise
    cheaper = without_prediction(settings, target, limit, given(settings), made.choice.cost)
    other = None
    if "hybrid.mode" in made.choice.settings:
        cheaper, other = None, _predicting(settings, target, limit)
    if json_:
        both = {"without_prediction": cheaper, "with_prediction": other.as_dict() if other else None}
        put_json({"planned": planned, "fits": True} | both | made.as_dict())
        return
    put(where.line(target.precision))
    put(_planned_line(planned))
    _print_estimate(found)
    _print_plan(made)
    if "hybrid.mode" in made.choice.settings:
        _print_other(other, tries_nothing(settings, target))
    if cheaper:
        say(f"note: {cheaper}")


@dataclass(frozen=True)
class _Device:
    """What is planned for, and what is said of it."""

    name: str
    """"cuda", "cpu", or empty: what a run would use here."""
    words: str

    def line(self, precision: str) -> str:
        return f"planned for {self.words.format(precision=precision)}"


def _device(config: Config, asked: str, wanted: bool) -> _Device:
    """Choose the device. wanted: a budget is given, which without a GPU here means one elsewhere."""
    from foretrain.engine.precision import choose_device

    if asked:
        return _Device(asked, "a CUDA GPU, {precision}" if asked == "cuda" else "a CPU, {precision}")
    here = choose_device(config.device).type
    if here == "cuda":
        return _Device("", "this machine's GPU, {precision}")
    if here == "cpu" and config.device == "auto" and wanted:
        return _Device(
            "cuda", "a CUDA GPU, {precision}: there is none here, but a budget means one; for the CPU: --device cpu"
        )
    return _Device("", f"this machine's {here.upper()}, {{precision}}; for a GPU: --device cuda")


def _predicting(config: Config, target: PlanTarget, limit: int) -> MemoryPlan | None:
    """Return what prediction would take; None where it does not fit."""
    from foretrain.config import given
    from foretrain.planning.plan import NothingFitsError, with_prediction

    try:
        return with_prediction(config, target, limit, given(config))
    except NothingFitsError:
        return None


def _planned(config: Config, target: PlanTarget) -> dict[str, Any]:
    """Return what the plan is for."""
    from foretrain.planning.estimate import all_parameters, model_parameters

    return {
        "model": config.model.weights or config.model.type,
        "parameters": model_parameters(target.shape).elements,
        "trained_parameters": all_parameters(config, target).elements,
        "vocabulary": target.shape.vocab_size,
        "batch_size": config.batch_size,
        "length": target.length,
        "device": "cuda" if target.cuda else "cpu",
        "precision": target.precision,
    }


def _planned_line(planned: dict[str, Any]) -> str:
    adapter = planned["trained_parameters"] != planned["parameters"]
    trained = f", {planned['trained_parameters']:,} of an adapter" if adapter else ""
    kind = f"{planned['device']}, {planned['precision']}"
    growth = f"\ngrowth: {planned['growth']}" if "growth" in planned else ""
    return (
        f"{planned['model']}, {planned['parameters']:,} parameters{trained}, vocabulary of {planned['vocabulary']:,}; "
        f"batches of {planned['batch_size']} x {planned['length']} tokens; {kind}{growth}"
    )


def _smallest(plan: MemoryPlan) -> dict[str, Any]:
    return {"smallest_bytes": plan.estimate.needed} | plan.as_dict()


def _target(config: Config, device: str) -> PlanTarget:
    """Return the shape of what would be trained; a fine-tuning run takes it from the model's folder."""
    from foretrain.models.gpt2 import shape_from_config
    from foretrain.planning.estimate import PlanTarget, target_of

    if device not in ("", "cuda", "cpu"):
        raise InputError(f"--device {device!r}: plan for cuda or cpu")
    adapters = config.preset == "finetune"
    shape: GPT2Shape | CausalShape = replace(shape_from_config(config.model), vocab_size=_vocabulary(config))
    length, rows = None, 0
    if adapters:
        if not config.model.weights:
            raise InputError("model.weights is empty: name the model to fine-tune, as in --base FOLDER")
        shape = _base_shape(config, device)
        length, rows = min(shape.context, config.data.max_length or shape.window), config.batch_size
        if length < shape.context and not config.data.max_length:
            say(f"note: rows are taken to be {length:,} tokens; set data.max_length to what your examples need")
    if not device:
        return target_of(config, shape, length=length, adapters=adapters, evaluated_rows=rows)
    precision = _precision(config, device)
    return PlanTarget(shape, device == "cuda", precision, length or shape.context, adapters, rows)


def _base_shape(config: Config, device: str) -> GPT2Shape | CausalShape:
    """Return the shape of the model that would be fine-tuned."""
    from foretrain.recipes.open_model import any_shape_of, find_folder

    try:
        folder = find_folder(config.model.weights, fetch=False)
    except InputError as error:
        raise InputError(f"{error}; name the model to fine-tune, as in --base FOLDER") from None
    place = folder if (folder / "config.json").is_file() else folder / "model"
    return any_shape_of(place, _precision(config, device), config.precision.narrow_residual)


def _precision(config: Config, device: str) -> str:
    """Return the number format of the products; device: empty for the one that a run would use here."""
    from foretrain.engine.precision import choose_device, choose_precision

    wanted = config.precision.type
    if not device:
        return choose_precision(wanted, choose_device(config.device))
    return ("bf16" if device == "cuda" else "fp32") if wanted == "auto" else wanted


def _vocabulary(config: Config) -> int:
    """Return how many tokens the tokenizer will know; GPT-2's number where only the data tells, or none is named."""
    from foretrain.config import given
    from foretrain.data.tokenizers import ByteTokenizer
    from foretrain.models.gpt2 import SIZES

    known = {"byte": ByteTokenizer().vocab_size, "bpe": config.data.bpe_size}
    largest = SIZES[config.model.type].vocab_size
    named = given(config)
    if "model.type" in named and config.model.type != "gpt2-tiny" and not named & _SAY_THE_VOCABULARY:
        say(
            f"note: the vocabulary is taken to be GPT-2's {largest:,}, as no data is named; with data.tokenizer = "
            f"{config.data.tokenizer!r}, the default, it would be {known[config.data.tokenizer]:,}"
        )
        return largest
    if config.model.vocab_size is None and config.data.tokenizer not in (*known, "gpt2"):
        say(f"note: the vocabulary is taken to be {largest}, as GPT-2's; set model.vocab_size if it is another")
    return config.model.vocab_size or known.get(config.data.tokenizer, largest)


def _budget(config: Config, budget: str, target: PlanTarget) -> int | None:
    """Return the budget as given, as configured, or what is free on the GPU that a run would use."""
    from foretrain.config.units import format_size, parse_size

    if budget or config.memory.budget:
        try:
            return parse_size(budget or config.memory.budget)
        except ValueError as error:
            raise InputError(f"--budget: {error}") from None
    import torch

    if not (target.cuda and torch.cuda.is_available()):
        return None
    free, _ = torch.cuda.mem_get_info()
    say(f"budget: {format_size(free)}, what is free on {torch.cuda.get_device_name()}")
    return free


def _print_estimate(estimate: Any) -> None:
    from foretrain.planning.tables import component_table, needed_line

    _print(component_table(estimate))
    put(needed_line(estimate))


def _print_plan(plan: MemoryPlan) -> None:
    from foretrain.config.units import format_size
    from foretrain.planning.plan import toml_lines
    from foretrain.planning.tables import component_table, lever_table, needed_line

    budget = format_size(plan.budget or 0)
    put("")
    if not plan.choice.settings:
        put(f"it fits into {budget} as it is")
        return
    put(f"to fit into {budget}, {_price(plan)}:")
    _print(lever_table(plan))
    put("")
    _print(component_table(plan.estimate))
    put(needed_line(plan.estimate))
    put("")
    put(toml_lines(plan.choice.settings))


def _price(plan: MemoryPlan) -> str:
    return f"at about {1 + plan.choice.cost:.0%} of the time per step"


def _print_other(plan: MemoryPlan | None, idle: bool) -> None:
    """The alternative that keeps prediction, as comments, so that all lines are for the file.

    idle: the run is too short to try any move.
    """
    from foretrain.config.units import format_size
    from foretrain.planning.plan import toml_lines
    from foretrain.planning.tables import host_line

    what = "with prediction"
    if idle:
        what += " (of which only the snapshots for emergencies would be used: no audit is affordable in so few steps)"
    put("")
    if plan is None:
        put(f"# {what} nothing fits")
        return
    lines = [f"{what} instead: {format_size(plan.estimate.needed)} {_price(plan)}"]
    lines += [host_line(plan.estimate)] if plan.estimate.host else []
    lines += toml_lines(plan.choice.settings).splitlines()
    put("\n".join(f"# {line}".rstrip() for line in lines))


def _print(table: Table) -> None:
    from foretrain.show.screen import screen

    screen().print(table)
