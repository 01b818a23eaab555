"""What the commands of foretrain are given, spoilt: for every command and every kind of file a maker of inputs.

`fuzz_examples.py` writes good examples of every kind into a folder, once. A maker copies what it needs of them into the
current folder of one input, spoils some of it (`fuzz_mutations.py`) and returns the arguments. Everything that is legal
is tiny: what is fuzzed is how input is refused, not how long a long order takes.
"""

from __future__ import annotations

from collections.abc import Callable

import fuzz_files as files
import fuzz_runs as runs
import fuzz_settings as settings
from fuzz_maker import Input, Maker, Target


def _both(command: str, make: Callable[[Maker, bool], Input], weight: int = 1) -> list[Target]:
    return [
        Target(command, "--set", lambda maker: make(maker, False), weight),
        Target(command, "configuration", lambda maker: make(maker, True), weight),
    ]


TARGETS: tuple[Target, ...] = (
    *_both("config show", settings.config_show, 2),
    *_both("config check", settings.config_check, 2),
    Target("config init", "--set", settings.config_init),
    *_both("plan", settings.plan, 3),
    *_both("train", settings.train, 4),
    *_both("finetune", settings.finetune, 2),
    *_both("compare", settings.compare, 1),
    Target("compare", "comparison folder", runs.comparison, 2),
    Target("train", "data", files.train_data, 5),
    Target("train", "names", files.train_names, 2),
    Target("train", "token cache", files.train_cache, 2),
    Target("train", "tokenizer", files.train_tokenizer, 4),
    Target("train", "vocabulary", files.train_vocabulary),
    Target("train", "model folder", files.train_base, 2),
    Target("train", "run folder", runs.resume, 5),
    Target("finetune", "examples", files.finetune_examples, 4),
    Target("finetune", "model folder", files.finetune_base, 2),
    Target("finetune", "run folder", runs.resume_tuned, 3),
    Target("evaluate", "data", files.evaluate_data, 3),
    Target("evaluate", "examples", files.evaluate_examples, 3),
    Target("evaluate", "model folder", files.evaluate_base, 2),
    Target("evaluate", "adapter", files.evaluate_adapter, 2),
    Target("evaluate", "run folder", runs.evaluate_run, 2),
    Target("generate", "model folder", files.generate_base, 3),
    Target("generate", "tokenizer", files.generate_tokenizer, 4),
    Target("generate", "adapter", files.generate_adapter, 3),
    Target("generate", "run folder", runs.generate_run, 3),
    Target("generate", "text", files.generate_stdin, 2),
    Target("adapters list", "adapter", files.adapters_list, 2),
    Target("adapters merge", "adapter", files.adapters_merge, 2),
    Target("adapters merge", "run folder", runs.merge_run),
    Target("adapters export", "run folder", runs.adapters_export, 2),
    Target("export", "run folder", runs.export, 3),
    Target("report", "run folder", runs.report, 4),
    Target("forecast", "run folder", runs.forecast, 3),
    Target("forecast", "log", runs.forecast_log, 4),
    Target("sweep", "space", settings.sweep, 3),
    Target("watch", "run folder", runs.watch, 1),
    Target("bench compare", "results", runs.bench_compare, 3),
    Target("bench history", "results", runs.bench_history, 3),
    Target("bench run", "arguments", runs.bench_run),
    Target("plan", "model folder", files.plan_base),
    Target("any", "arguments", settings.command_line, 4),
)
