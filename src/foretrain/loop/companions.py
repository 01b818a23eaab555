"""What goes along with the steps of a run where it is wanted: growth, a race of learning rates, annealed copies, a
forecast of the end, and targets. Each is one object that may be missing; the trainer asks them all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.engine.composed import Part
from foretrain.engine.engine import Engine
from foretrain.events import Event, Phase
from foretrain.hybrid import summary as summaries
from foretrain.hybrid.annealing import AnnealedCopies
from foretrain.hybrid.growth import Growth
from foretrain.hybrid.hybrid import Hybrid
from foretrain.hybrid.moves.lookahead import LookAhead
from foretrain.hybrid.rate_race import RateRace
from foretrain.loop.forecaster import LossForecaster
from foretrain.loop.targets import Targets


@dataclass(frozen=True)
class Companions:
    """growth: begins with fewer blocks. race: looks for a learning rate of `auto`. copies: annealed ones. forecaster:
    says where the run ends. targets: `max_time` and `until_loss`. None: not wanted in this run."""

    engine: Engine
    growth: Growth | None
    race: RateRace | None
    copies: AnnealedCopies
    forecaster: LossForecaster | None
    targets: Targets | None

    def connect(self, hybrid: Hybrid | None) -> None:
        """Tell them of each other, and of what predicts."""
        engine, growth, targets = self.engine, self.growth, self.targets
        engine.rate_sources = (*engine.rate_sources, *(() if self.race is None else (self.race,)), self.copies)
        if growth is not None:
            growth.racing = lambda: self.racing
        if growth is not None and hybrid is not None:
            growth.rest, growth.undone, growth.healthy = hybrid.rest, hybrid.taken_back, hybrid.is_usual
            hybrid.policy.new_level = growth.forget_losses
        if hybrid is not None:
            hybrid.racing = lambda: self.racing
        if targets is not None:
            targets.learn_from(self.copies, self.forecaster)
            targets.racing = lambda: self.racing

    @property
    def racing(self) -> bool:
        """Learning rates are tried: it is not settled yet at which one the run goes on."""
        return self.race is not None and self.race.open

    @property
    def parts(self) -> dict[str, Part | None]:
        """Return what is saved, by name; None: a part of every run that is switched off."""
        found: dict[str, Part | None] = {"copies": self.copies, "forecaster": self.forecaster}
        wanted = {"growth": self.growth, "race": self.race, "targets": self.targets}
        return found | {name: part for name, part in wanted.items() if part is not None}

    # --- steps -------------------------------------------------------------------------------------------------------

    def before_step(self, batch: Any, phase: Phase) -> None:
        """Grow where that is due, and do what is done on copies of the run while nothing is on trial."""
        full = phase in (Phase.WARMUP, Phase.FULL)
        if self.growth is not None and full:
            self.growth.follow(batch)
        quiet = full and not (self.growth is not None and self.growth.on_trial)
        if self.race is not None and self.race.open and quiet:
            self.race.follow(batch)
        if quiet and not self.racing:
            self.copies.follow(batch)
        for noting in (self.race, self.copies):
            if noting is not None:
                noting.note(batch, self.engine.progress.position)

    def end(self) -> None:
        """The last step is done: judge and tell what is still open."""
        if self.growth is not None:
            self.growth.end()
        if self.race is not None:
            self.race.finish()

    def taken_back(self) -> None:
        """The run went back: what was measured at steps that are undone is forgotten."""
        self.copies.taken_back()
        if self.targets is not None:
            self.targets.taken_back()

    # --- what the run did --------------------------------------------------------------------------------------------

    @property
    def backward_passes(self) -> int:
        """Those of copies, and of other learning rates."""
        return sum(replay.passes for replay in self._replays)

    @property
    def _replays(self) -> Iterator[Any]:
        return (one.replay for one in (self.copies, self.race) if one is not None)

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return the summary of the steps with what came of each of these."""
        if self.growth is not None:
            summary["growth"] = self.growth.summary()
        if self.targets is not None:
            summary["target"] = self.targets.summary()
        if self.forecaster is not None:
            summary["loss_forecast"] = self.forecaster.summary(None if self.targets is None else self.targets.as_it_was)
        return summaries.with_copies(summary, self.copies, self.race)


def companions_of(
    engine: Engine,
    growth: Growth | None,
    adapters: bool,
    probe: Sequence[Any],
    look_ahead: LookAhead | None,
    emit: Callable[[Event], None],
) -> Companions:
    """Make those that the configuration wants. adapters: less than a fifth of the model is trained. probe: batches that
    are never trained on."""
    race = None
    if engine.config.optimizer.learning_rate == "auto":
        race = RateRace(engine, adapters, list(probe), look_ahead, emit)
    copies, config = AnnealedCopies(engine, probe, emit), engine.config  # the race has put a first rate into it
    forecaster = LossForecaster(engine, lambda: copies.points, emit) if config.forecast.enabled else None
    has_target = config.max_time is not None or config.until_loss is not None
    return Companions(engine, growth, race, copies, forecaster, Targets(engine, emit) if has_target else None)
