"""Fine-tuning with adapters: a base model, examples, a run folder, and an adapter in PEFT's format at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.config.schema import Level
from foretrain.data import chats, examples
from foretrain.data.chat_templates import ChatTemplate
from foretrain.data.examples import EncodedExamples, Example
from foretrain.data.loader import Loader
from foretrain.data.nested import rows_of_rank
from foretrain.data.templates import ChatFormat, make_format
from foretrain.engine.batches import with_steps
from foretrain.engine.gathered import gathered
from foretrain.engine.growing import with_growth
from foretrain.engine.precision import choose_device, choose_precision
from foretrain.errors import CheckpointError, ConfigError, ForetrainError, InputError
from foretrain.events import Bus, Listener
from foretrain.launch.group import ALONE, Group
from foretrain.launch.joining import current_group
from foretrain.loop.targets import length_in_words
from foretrain.models import lora
from foretrain.models.adapter_files import save_adapter
from foretrain.models.language_model import LanguageModel
from foretrain.models.lora import LoraSettings
from foretrain.persist.files import user_path
from foretrain.persist.folder import RunFolder
from foretrain.planning.budget import within_budget
from foretrain.planning.estimate import PlanTarget, target_of
from foretrain.recipes import epochs
from foretrain.recipes.compiling import as_it_began, with_compiling
from foretrain.recipes.export import read_checkpoint
from foretrain.recipes.frame import RunOptions, TrainingJob, carry_out
from foretrain.recipes.open_model import Base, find_folder, open_base
from foretrain.recipes.spreading import (
    ONE_PROCESS,
    Spreading,
    check_rows,
    choose,
    for_trainer,
    spread,
)
from foretrain.serve.answers import answer_questions
from foretrain.show.follow import read_runs
from foretrain.show.numbers import finite
from foretrain.show.trackers.opening import check_installed
from foretrain.trainer import HybridTrainer

_PROBE_SEED = 2


@dataclass(frozen=True)
class ExampleSplit:
    """Examples to learn from, to judge leaps by, and to evaluate on. No prompt is in two of them, unless
    `data.validation_path` repeats some."""

    train: EncodedExamples
    probe: EncodedExamples | None
    held_out: EncodedExamples
    questions: list[Example]
    """The held-out examples as text."""
    classes: tuple[str, ...]
    """All answers, where they come from a small set."""


def finetune(
    config: Config,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | Level = True,
    table: bool = True,
    listeners: Sequence[Listener] = (),
    say: Callable[[str], None] = lambda _: None,
    pause_at: int | None = None,
) -> dict[str, Any]:
    """Train an adapter for `model.weights` on the examples of `data.path` and return the summary."""
    check(config)
    check_installed(config.log.trackers)
    named = configuration.given(config)
    config = configuration.changed(config, {"model.weights": str(find_folder(config.model.weights, say).resolve())})
    path = Path(out) if out is not None else default_folder(config)
    if Path(config.model.weights).is_relative_to(path.resolve()):
        raise InputError(f"--out {path}: it holds the model that is to be fine-tuned; choose another folder")
    if resume:
        _check_adapter(path, config)
        config = as_it_began(config, path)
    options = RunOptions(resume, overwrite, progress, table, listeners, say, pause_at)
    return carry_out(config, path, "finetune", options, partial(_job, config, named, path, say))


def _job(
    config: Config, named: frozenset[str], path: Path, say: Callable[[str], None], bus: Bus, group: Group
) -> TrainingJob:
    """Open the base, read the examples, choose what `memory.budget` asks for, and build the trainer."""
    check_rows(config, group.size)
    base = base_of(config)
    config, growth = with_growth(config, None, None)
    config = with_templates(config, say, base.chat)
    data = prepare(config, base, say)
    loader = build_loader(config, data, group)
    config, base = _within_budget(with_steps(config, loader), base, data, named, say)
    chosen = choose(config, _target(config, base, data), group)
    trainer = build_trainer(config, base.model, data, bus, chosen)
    config = trainer.config

    def finish(folder: RunFolder, summary: dict[str, Any]) -> None:
        with trainer.averaged_weights(), gathered(base.model, group.rank) as first:
            if not first:
                return
            summary |= _length(path, trainer, data)
            _save_adapter(base, path / "adapter", config)
            if chosen.kind == "fsdp2":
                say(f"note: shards answer no held-out examples; `foretrain evaluate {path} --data FILE` asks the model")
            else:
                summary |= _answered(base, data, config, say)
        folder.write_summary(summary)

    batches = data.held_out.fixed_batches(config.batch_size, config.evaluation.batches)
    held_out = [rows_of_rank(batch, group.rank, group.size) for batch in batches]
    details = _details(config, data, base.model, path) | ({"growth": growth} if growth else {})
    details |= {} if chosen is ONE_PROCESS else {"ranks": str(chosen)}
    title = f"adapter for {base.folder}"
    return TrainingJob(trainer, loader, held_out, title, details, data.train.fingerprint, base.tokenizer, finish)


def _answered(base: Base, data: ExampleSplit, config: Config, say: Callable[[str], None]) -> dict[str, Any]:
    """Return how many held-out examples are answered right. The run is finished, whatever its answers are."""
    try:
        found = answer(base, data, config)
    except ForetrainError as error:
        say(f"warning: held-out examples could not be answered: {error}")
        return {}
    if not found and config.evaluation.answers:
        say("note: no held-out example fits the model's context with its answer, so none was answered")
    return found


def _within_budget(
    config: Config, base: Base, data: ExampleSplit, named: frozenset[str], say: Callable[[str], None]
) -> tuple[Config, Base]:
    """Decide whether to compile, and choose the settings that fit `memory.budget`; the base is read anew where they
    concern the model."""
    target = _target(config, base, data)
    config = with_compiling(config, target, say)
    planned = within_budget(config, target, named, say)
    return planned, base_of(planned) if planned.engine != config.engine else base


def _target(config: Config, base: Base, data: ExampleSplit) -> PlanTarget:
    return target_of(
        config, base.model.shape, length=data.train.length, adapters=True, evaluated_rows=config.batch_size
    )


def check(config: Config) -> None:
    """Refuse a configuration that names no model or no data, before any folder is made."""
    if not config.model.weights:
        raise ConfigError(
            "model.weights is empty: name the folder of the model to fine-tune, a run folder or one in Hugging Face's "
            "format (`--base FOLDER`)"
        )
    if not config.data.path:
        raise ConfigError("data.path is empty: name a JSONL file of examples (`--data FILE`)")


def _check_adapter(path: Path, config: Config) -> None:
    """A run goes on with the adapter it began with."""
    if (path / "config.toml").is_file():
        before = configuration.load(path / "config.toml").config.lora
        for name, value in config.lora.model_dump().items():
            if (old := getattr(before, name)) != value:
                raise ConfigError(f"lora.{name} was {old} when this run began and is {value} now; start a new run")


def base_of(config: Config) -> Base:
    """Return the model of `model.weights`, with the tokenizer that lies beside it or is named."""
    check(config)
    base = open_base(
        config.model.weights,
        "" if config.data.tokenizer == "byte" else config.data.tokenizer,
        config.data.vocabulary,
        activation_checkpointing=config.engine.activation_checkpointing,
        fused_loss=config.engine.fused_loss,
        loss_rows=config.engine.loss_rows,
        narrow_residual=config.precision.narrow_residual,
        precision=choose_precision(config.precision.type, choose_device(config.device)),
    )
    if base.adapter is not None:
        raise InputError(
            f"{config.model.weights}: a fine-tuning run; merge it first (`foretrain adapters merge "
            f"{config.model.weights} FOLDER`) and fine-tune FOLDER"
        )
    return base


def default_folder(config: Config) -> Path:
    weights = user_path(config.model.weights, "model.weights").resolve()
    name = weights.parent.name if weights.name == "model" else weights.name
    return Path("runs") / f"{name}-adapter-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def build_loader(config: Config, data: ExampleSplit, group: Group = ALONE) -> Loader:
    """Make the loader of training examples in the order that `seed` gives; of each batch, the rows of this process."""
    pinned = choose_device(config.device).type == "cuda"
    share = {"rank": group.rank, "world": group.size}
    return Loader(data.train, config.batch_size, config.seed, config.data.prefetch, pin_memory=pinned, **share)


def build_trainer(
    config: Config, model: LanguageModel, data: ExampleSplit, bus: Bus | None = None, chosen: Spreading = ONE_PROCESS
) -> HybridTrainer:
    """Attaches the adapter; leaps are judged on the probe examples. chosen: how processes share the model."""
    config = configuration.with_beta2(config, data.train.length)
    lora.attach(model, settings_of(config), config.seed)
    ranks = 1 if chosen is ONE_PROCESS else chosen.replicate * chosen.shard
    probe = probe_batches(data, config, current_group().rank, ranks) if _judges(config) else []
    loss = spread(model, chosen, config)
    trainer = HybridTrainer(model, loss_fn=loss, config=for_trainer(config, chosen), probe=probe, bus=bus)
    trainer.engine.full_step.uneven = ranks > 1  # answers differ in length
    return trainer


def _judges(config: Config) -> bool:
    """Return whether something is judged on examples that are neither trained on nor evaluated."""
    return config.hybrid.mode != "off" or config.optimizer.learning_rate == "auto"


def probe_batches(data: ExampleSplit, config: Config, rank: int = 0, ranks: int = 1) -> list[Any]:
    """Return the batches that moves are judged on; of each, the rows of one of several processes."""
    if data.probe is None:
        return []
    size = -(-min(config.batch_size, len(data.probe)) // ranks) * ranks
    return [rows_of_rank(batch, rank, ranks) for batch in data.probe.fixed_batches(size, len(data.probe))]


def settings_of(config: Config) -> LoraSettings:
    chosen = config.lora
    return LoraSettings(
        chosen.rank, chosen.alpha, chosen.dropout, chosen.rank_stabilized, tuple(chosen.targets), chosen.bias
    )


def with_templates(
    config: Config, say: Callable[[str], None] = lambda _: None, chat: ChatTemplate | None = None
) -> Config:
    """What is guessed from the data is written down: the model must be asked as it was trained. chat: the model's own
    way to write chats."""
    data = config.data
    given = [data.prompt] if isinstance(data.prompt, str) else data.prompt
    prompts = [line_breaks(text) for text in given if text]
    found = examples.find_format(data.path, prompts or None, line_breaks(data.answer) or None, chat)
    say(f"{data.path} is read as {found}")
    prompts = [prompt.text for prompt in found.prompts]
    return configuration.changed(config, {"data.prompt": prompts, "data.answer": found.answer.text})


def line_breaks(template: str) -> str:
    """A shell hands a backslash and an n on as they are; a line break is what is meant."""
    return template.replace("\\n", "\n")


def prepare(config: Config, base: Base, say: Callable[[str], None] = lambda _: None) -> ExampleSplit:
    """Read and encode. Held-out examples are the same whatever judges the leaps."""
    data = config.data
    prompt, answer = data.prompt or None, data.answer or None

    def read(path: str | list[str]) -> list[Example]:
        return examples.read_examples(path, prompt, answer, data.max_documents, say, base.chat)

    train = read(data.path)
    if data.validation_path:
        held_out = read(data.validation_path)
    else:
        train, held_out = examples.split(train, data.held_out, config.seed)
    mark = config.evaluation.final_answer
    if mark and (without := sum(mark not in example.answer for example in held_out)):
        raise ConfigError(
            f"evaluation.final_answer = {mark!r}: {without} of {len(held_out)} held-out answers do not hold it; name a "
            "mark that all of them have, or none"
        )
    names = examples.classes([*train, *held_out], base.tokenizer)
    probe: list[Example] = []
    if _judges(config) and config.hybrid.probe_examples and len({one.prompt for one in train}) > 3:
        share = min(0.2, config.hybrid.probe_examples / len(train))
        train, probe = examples.split(train, share, config.seed + _PROBE_SEED)
    context = min(base.model.shape.context, data.max_length or base.model.shape.context)
    encoded, evaluated = examples.encode_split(train, held_out, base.tokenizer, context)
    judging = None
    if probe:
        judging = EncodedExamples(probe, base.tokenizer, context, encoded.length, name="probe examples")
    say(
        f"{encoded}; {len(held_out):,} held out"
        + (f"; {len(probe)} kept aside to judge predicted moves" if probe else "")
    )
    lost = encoded.left_out + encoded.shortened
    if lost > 0.1 * len(train):
        limit = "data.max_length" if context < base.model.shape.context else "the model's context, which is the limit"
        say(f"warning: {lost:,} of {len(train):,} examples are too long for {context} tokens, {limit}")
    return ExampleSplit(encoded, judging, evaluated, held_out, names)


def _details(config: Config, data: ExampleSplit, model: LanguageModel, path: Path) -> dict[str, str]:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    passes = epochs.in_words(config.max_steps, config.batch_size, len(data.train))
    return {
        "data": f"{len(data.train):,} examples to train on, {len(data.held_out):,} held out",
        "adapter": f"rank {config.lora.rank}, {trained:,} of {everything:,} parameters ({trained / everything:.1%})",
        "batch": f"{config.batch_size} x {data.train.length} tokens, {length_in_words(config)}",
        **({"epochs": passes} if config.steps_are_limited else {}),
        "folder": str(path),
    }


def _length(path: Path, trainer: HybridTrainer, data: ExampleSplit) -> dict[str, Any]:
    """Return how often the examples were seen, and whether that was too short. A run that was resumed is one run."""
    found: dict[str, Any] = {"epochs": round(trainer.position * trainer.config.batch_size / len(data.train), 3)}
    log = read_runs([path])[0].evaluations
    told = [(entry.step, loss) for entry in log if (loss := finite(entry.fields.get("loss"))) is not None]
    falling = epochs.still_falling(told, trainer.config.max_steps) if trainer.targets is None else None
    return found | ({"still_falling": falling} if falling else {})


def answer(base: Base, data: ExampleSplit, config: Config) -> dict[str, Any]:
    """Return how many held-out questions are answered right."""
    mark = config.evaluation.final_answer
    names = () if mark else data.classes
    return answer_questions(
        base.model, base.tokenizer, data.questions, names, data.held_out.length, config.evaluation.answers, mark
    )


def export_adapter(source: str | Path, folder: str | Path) -> Path:
    """Return the adapter of a run's newest checkpoint (or of one checkpoint folder), in PEFT's format."""
    store, state, config = read_checkpoint(source)
    if not config.model.weights:
        raise CheckpointError(f"{store}: no fine-tuning run has saved it; `foretrain export` writes whole models")
    base = base_of(config)
    trainer = restore_adapter(base, store, state, config)
    with trainer.averaged_weights():
        return _save_adapter(base, folder, config)


def restore_adapter(base: Base, store: Path, state: dict[str, Any], config: Config) -> HybridTrainer:
    """Attaches the adapter of a checkpoint to its base."""
    lora.attach(base.model, settings_of(config), config.seed)
    alone = {"device": "cpu", "hybrid.mode": "off", "engine.compile": False}
    alone |= {"optimizer.learning_rate": config.optimizer.peak_rate}
    trainer = HybridTrainer(base.model, config=configuration.changed(config, alone))
    trainer.load_weights(state, str(store))
    return trainer


def _save_adapter(base: Base, folder: str | Path, config: Config) -> Path:
    """Write the adapter with the tokenizer beside it, as other tools expect."""
    is_chat = isinstance(make_format(config.data.prompt, config.data.answer), ChatFormat)
    files = base.files_beside(chats.JINJA if is_chat else "")
    return save_adapter(base.model, folder, str(base.folder), files)
