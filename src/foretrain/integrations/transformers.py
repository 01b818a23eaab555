"""foretrain inside of transformers' Trainer, and of all that are made of it, such as TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import Trainer, TrainerCallback

from foretrain.config import Config, given
from foretrain.config.paths import with_settings
from foretrain.errors import ConfigError
from foretrain.events import Bus
from foretrain.guest.run import GuestRun
from foretrain.guest.wrap import wrap
from foretrain.hybrid.gate import FORWARD
from foretrain.persist.codec import same_random_numbers


class HybridCallback(TrainerCallback):
    """Watches a Trainer's run, and leaps between its steps: `HybridCallback(probe=64).bind(trainer)`.

    probe: so many examples of `eval_dataset`, or a list of examples, never to be trained on. config: of prediction and
    the log; `hybrid.mode = "off"` only watches. out: a folder for log, summary and report; overwrite: replace the run
    that is there. resume_from: the checkpoint that `train` goes on from, where it is not in `output_dir`.
    """

    def __init__(
        self,
        probe: int | Dataset[Any] | Sequence[Any] = 64,
        config: Config | None = None,
        *,
        out: str | Path | None = None,
        overwrite: bool = False,
        resume_from: str | Path | None = None,
        bus: Bus | None = None,
    ) -> None:
        self.probe, self.config, self.bus = probe, config or Config(), bus
        self.out, self.overwrite, self.resume_from = out, overwrite, resume_from
        self.run: GuestRun | None = None  # made when training begins
        self._trainer: Trainer | None = None
        self._losses: list[Tensor] = []  # of the parts of the step that is being made

    def bind(self, trainer: Trainer) -> HybridCallback:
        """Add this callback to a trainer: events alone do not give its loss function."""
        for name, what in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
            if getattr(trainer, name, False):
                raise ConfigError(
                    f"HybridCallback does not work with {what}, which keeps weights where nobody else sees them; use "
                    "DistributedDataParallel or one process, or leave the callback out"
                )
        _examples(self.probe, trainer)
        self._trainer, step = trainer, trainer.training_step
        trainer.add_callback(self)

        def heard(*arguments: Any, **options: Any) -> Tensor:
            self._losses.append(step(*arguments, **options))
            return self._losses[-1]

        trainer.training_step = heard
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Wrap the optimizer, which is made by now, and go on where a checkpoint was saved."""
        trainer = self._trainer
        if trainer is None:
            raise ConfigError("HybridCallback knows no trainer: add it with HybridCallback(...).bind(trainer)")
        if self.run is not None:
            self.run.close(failed=True)  # training that did not end by itself
        config, optimizer, scheduler = self.config, known["optimizer"], known.get("lr_scheduler")
        if args.eval_strategy != "no" and "evaluation.interval" not in given(config):
            config = with_settings(config, {"evaluation.interval": 0})  # the trainer's evaluations are told instead
        with same_random_numbers():
            batches = list(trainer.get_eval_dataloader(_examples(self.probe, trainer)))
        rows = sum(len(next(iter(batch.values()))) for batch in batches)
        self.run = run = wrap(
            trainer.model_wrapped,
            getattr(optimizer, "optimizer", optimizer),
            probe=batches,
            loss_fn=lambda model, batch: _loss(trainer, batch),
            config=config,
            max_steps=state.max_steps,
            scheduler=getattr(scheduler, "scheduler", scheduler),
            bus=self.bus,
            out=self.out,
            overwrite=self.overwrite,
            price=FORWARD * rows / (args.train_batch_size * args.gradient_accumulation_steps),
        )
        if state.global_step and not run.load(_folder(args, state, self.resume_from)):
            run.begin_at(state.global_step)
        run.open()

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Here a leap may be made."""
        if self.run is not None:
            self.run.between_steps(torch.stack(self._losses).sum() if self._losses else None)
        self._losses.clear()

    def on_evaluate(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """The trainer has measured a held-out loss."""
        loss = (known.get("metrics") or {}).get("eval_loss")
        if self.run is not None and loss is not None and not self.run.engine.config.evaluation.interval:
            self.run.evaluated(loss)

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """The checkpoint is written. A kill before this leaves one without our part, which can be gone on from, too."""
        if self.run is not None:
            self.run.save(_folder(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Write the summary and the page."""
        if self.run is not None:
            self.run.close()


def _folder(args: Any, state: Any, checkpoint: str | Path | None = None) -> Path:
    return Path(checkpoint or Path(args.output_dir) / f"checkpoint-{state.global_step}") / "foretrain"


def _examples(probe: int | Dataset[Any] | Sequence[Any], trainer: Trainer) -> Any:
    """Return the data set of the probe."""
    if not isinstance(probe, int):
        return probe
    data = trainer.eval_dataset
    if data is None or isinstance(data, dict) or not hasattr(data, "__len__") or probe < 1:
        raise ConfigError(
            f"probe = {probe} takes so many examples of the trainer's eval_dataset, which must be one data set of "
            "known length; give one, or probe=... a list of examples that are not trained on"
        )
    rows = range(min(probe, len(data)))
    return data.select(rows) if hasattr(data, "select") else Subset(data, rows)


def _loss(trainer: Trainer, batch: Any) -> Tensor:
    """The trainer's own loss, through the model as it calls it."""
    metrics = getattr(trainer, "_metrics", {})  # of TRL's trainers: those of a probe are not the run's
    kept = {mode: {name: list(values) for name, values in found.items()} for mode, found in metrics.items()}
    with trainer.compute_loss_context_manager():
        loss: Tensor = trainer.compute_loss(trainer.model_wrapped, trainer._prepare_inputs(dict(batch)))
    for mode, found in metrics.items():
        found.clear()
        found.update(kept.get(mode, {}))
    return loss
