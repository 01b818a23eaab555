"""What users are told about what they handed in, where it shows only in mid-run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from foretrain.config import Config
from foretrain.config.reach import without_effect
from foretrain.engine import described
from foretrain.engine.engine import Engine, own_loss
from foretrain.engine.own import explain_first_failure
from foretrain.engine.rates import FollowedRates
from foretrain.engine.trained import Change
from foretrain.errors import ConfigError, ForetrainError
from foretrain.events import Event, Notice


def first_words(model: nn.Module, config: Config, growth: str) -> list[Notice]:
    """What there is to say of the configuration before the first step. growth: what was decided of it."""
    words = [Notice(f"growth: {growth}", level="info")] if growth else []
    unused = [] if described.is_configured(model) else without_effect(config)
    if unused:
        text = (
            f"no effect on {type(described.unwrapped(model)).__name__}, which HybridTrainer was handed: "
            f"{', '.join(unused)}; `foretrain train`, `finetune` and language models of foretrain's go by that"
        )
        words.append(Notice(text))
    return words


def first_failure(error: Exception, engine: Engine) -> ForetrainError | None:
    """What an error of the very first step says about how the loss or the optimizer was handed in; None: nothing."""
    if engine.progress.backward_passes:
        return None
    if isinstance(error, (TypeError, AttributeError)):
        return None if engine.loss_fn is own_loss else explain_first_failure(error)
    if "sparse" not in str(error):
        return None
    return ConfigError(
        f"the gradients are sparse, and {type(engine.optimizer).__name__} cannot use them ({error}); hand in "
        "torch.optim.SparseAdam, Adagrad or SGD without momentum, or make them dense"
    )


class KnownLength:
    """Tells once that steps go on after the last one that was planned: a schedule may have brought the learning rate
    down to nothing by then."""

    def __init__(self, engine: Engine, emit: Callable[[Event], None]) -> None:
        self.engine = engine
        self.emit = emit
        self._told = False

    def check(self, judging: bool) -> None:
        """Before every step. judging: a move is open, which may have gone past the end."""
        engine = self.engine
        if engine.config.epochs is not None:
            raise ConfigError(
                "epochs is for fit(), which knows the data; in a loop of your own give max_steps, or none"
            )
        if self._told or judging or not engine.ended:
            return
        self._told = True
        what_to_do = (
            "raise max_steps, or leave it out for a loop without an end"
            if engine.max_steps_given
            else "a schedule of the Config goes by max_steps: set it"
        )
        text = (
            f"step() goes on after the last of max_steps = {engine.config.max_steps}, with a learning rate of "
            f"{engine.schedule(engine.progress.global_step):.3g}; {what_to_do}"
        )
        warnings.warn(text, stacklevel=3)
        self.emit(Notice(text))


@dataclass(frozen=True, slots=True)
class HandedIn:
    """What a user handed in that a saved state may replace: the saved state wins, else it would be another run."""

    trained: frozenset[str]
    """Names of the parameters that were trained."""
    settings: dict[str, Any]
    """Those of the optimizer."""

    @classmethod
    def to(cls, engine: Engine) -> HandedIn:
        return cls(frozenset(engine.trained.names), described.optimizer_settings(engine.optimizer))

    def differences(self, engine: Engine) -> list[str]:
        """What is otherwise now, after the saved state was put back, in sentences."""
        found: list[str] = []
        now = set(engine.trained.names)
        if change := Change(sorted(self.trained - now), sorted(now - self.trained)).in_words():
            found.append(f"{change}, as when this was saved; freeze or unfreeze after that, in a callback")
        if not engine.own_optimizer or not isinstance(engine.rate, FollowedRates) or engine.rate.scheduler is not None:
            return found
        saved = described.optimizer_settings(engine.optimizer)
        differing = [name for name, value in self.settings.items() if name in saved and saved[name] != value]
        if differing:
            words = ", ".join(f"{name} = {saved[name]} and not {self.settings[name]}" for name in differing)
            found.append(
                f"{described.full_name(engine.optimizer)} goes on as it was saved, with {words}; to change that, write "
                "it into optimizer.param_groups when the state is loaded (in fit: in a callback, at the event Resumed)"
            )
        return found
