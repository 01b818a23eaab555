"""How well each predictor forecasts the motion of a real language-model run, against both baselines.

All predictors watch the same run, which is not disturbed by them. Forecasts are scored on windows that nobody had seen.

python benchmarks/forecast_quality.py --data FILE --steps 1000 --set optimizer.learning_rate=1e-3
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import environment
from foretrain.config import Config, load
from foretrain.data import tokens
from foretrain.data.loader import Loader, TokenWindows
from foretrain.motion.predictors import registry
from foretrain.motion.predictors.base import Followed, Forecast, Predictor, Situation
from foretrain.motion.quality import Quality
from foretrain.recipes import train as run
from foretrain.trainer import HybridTrainer


class Panel(Predictor):
    """Asks every predictor, scores them all, and answers with the first."""

    name = "panel"

    def __init__(self, config: Config) -> None:
        settings = {name: config.predictor.model_copy(update={"type": name}) for name in registry.NAMES}
        self.members = {name: registry.build(setting, config.seed) for name, setting in settings.items()}
        self.quality = {name: Quality(config.hybrid.window_steps) for name in self.members}
        self.asked: dict[int, dict[str, Forecast]] = {}

    def forecast(self, situation: Situation, horizons: Sequence[int]) -> Forecast:
        self.asked[situation.step] = {name: each.forecast(situation, horizons) for name, each in self.members.items()}
        return next(iter(self.asked[situation.step].values()))

    def observe(self, situation: Situation, followed: Sequence[Followed]) -> None:
        for item in followed:
            for name, forecast in self.asked[item.situation.step].items():
                self.quality[name].add(item, forecast)
        for member in self.members.values():
            member.observe(situation, followed)

    def reset(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def watch(config: Config, skip: int) -> dict[str, Any]:
    """One run; forecasts of the first `skip` windows do not count."""
    corpus = tokens.prepare(config.data)
    size = run.vocabulary_size(config, corpus)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})
    model = run.build_model(config)
    panel = Panel(config)
    trainer = HybridTrainer(model, config=config, predictor=panel)
    windows = TokenWindows(corpus.train, model.shape.context, config.seed)
    for batch in Loader(windows, config.batch_size, config.seed):
        trainer.step(batch)
        if trainer.global_step == skip * config.hybrid.window_steps:
            panel.quality = {name: Quality(config.hybrid.window_steps) for name in panel.members}
        if trainer.global_step >= config.max_steps:
            break
    assert trainer.policy is not None
    assert trainer.policy.score.counts.tried == 0, "the run was disturbed"
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "final_train_loss": trainer.observer.smoothed_loss,
        "predictability": trainer.policy.predictability.summary(trainer.observer.quality),
        "quality": {name: quality.summary() for name, quality in panel.quality.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--skip", type=int, default=10, help="windows before forecasts count")
    parser.add_argument("--set", action="append", default=[], help="any setting")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = [f"data.path={options.data}"] if options.data else []
    # In WARMUP every window is watched and nothing is moved.
    settings += [f"max_steps={options.steps}", f"hybrid.warmup_steps={options.steps}", *options.set]
    config = load(None, ["optimizer.type=adamw", *settings]).config
    result = watch(config, options.skip)
    report = {
        "benchmark": "forecast quality",
        "command": " ".join(["python", "benchmarks/forecast_quality.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment.describe(str(torch.device("cuda" if torch.cuda.is_available() else "cpu"))),
        "result": result,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{'predictor':<10}{'steps':>6}{'n':>5}{'R2':>8}{'repeat':>8}{'cosine':>8}{'norm':>7}{'loss err':>9}")
    for name, rows in result["quality"].items():
        for horizon, row in rows.items():
            print(
                f"{name:<10}{horizon:>6}{row['count']:>5}{row['r2']:>8.3f}{row['repeat_r2']:>8.2f}"
                f"{row['cosine']:>8.3f}{row['norm_ratio']:>7.2f}{row['loss_error']:>9.4f}"
            )


if __name__ == "__main__":
    main()
