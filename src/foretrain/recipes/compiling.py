"""`engine.compile = "auto"` in a run: decided before it begins, written down, and kept when it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foretrain import config as configuration
from foretrain.config import Config
from foretrain.engine.compiling import weigh
from foretrain.engine.precision import choose_device
from foretrain.planning.estimate import PlanTarget, compiles, workload_of


def with_compiling(config: Config, target: PlanTarget, say: Callable[[str], None] = lambda _: None) -> Config:
    """Return the configuration with `true` or `false` in place of `engine.compile = "auto"`, and say if it is `false`.

    Off a CUDA GPU "auto" stays, which means no there.
    """
    if config.engine.compile != "auto" or not target.cuda:
        return config
    chosen, work = compiles(config, target), workload_of(config, target)
    if not chosen and work is not None:
        say(f"torch.compile is left out: {weigh(work, config)}; engine.compile = true uses it all the same")
    return _with(config, chosen)


def as_it_began(config: Config, run: Path) -> Config:
    """Return the configuration with what the run in this folder decided when it began: its rounding stays the same,
    also where `max_steps` is another one now. Runs of before wrote "auto" and were compiled on every CUDA GPU."""
    decides = config.engine.compile == "auto" and choose_device(config.device).type == "cuda"
    if not decides or not (run / "config.toml").is_file():
        return config
    return _with(config, configuration.load(run / "config.toml").config.engine.compile is not False)


def _with(config: Config, chosen: bool) -> Config:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"compile": chosen})})
