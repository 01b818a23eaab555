"""What known additions to Muon's stack are worth, each alone: final loss of paired runs, and their time.

python benchmarks/stack_parts.py bytes --data ../shared/data --out result.json      # one CPU core, half an hour
python benchmarks/stack_parts.py lm30m --data FOLDER --device cuda --seeds 2 --out result.json

FOLDER of a GPU is that of `gpu_figures.py`. Every run of a seed begins with the same weights and sees the same tokens;
one rate serves all. Additions are written here, but for rows: one that pays belongs into the optimizer. On a GPU those
that change the optimizer run without its kernels, and only their losses count. "the last tenth averaged" is the plain
run's own weights, averaged from 90 % of it on, and so costs no run of its own. What --out holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auto_rate_tasks import BYTES, TASKS, RateTask, _text, settings_of
from foretrain import HybridTrainer, environment
from foretrain.config import from_mapping, with_beta2
from foretrain.engine.optim import muon
from foretrain.engine.optim.muon import Muon, orthogonalize, step_ratio
from foretrain.measure.stats import paired_interval

MODELS: dict[str, tuple[RateTask, dict[str, Any]]] = {
    "bytes": (
        RateTask(
            BYTES | {"optimizer.type": "muon", "model.layers": 4, "model.width": 128}, _text, "text/tinyshakespeare.txt"
        ),
        {"model.context": 64, "batch_size": 16, "max_steps": 800, "optimizer.learning_rate": 1e-2},
    ),
    "lm30m": (TASKS["lm30m-wiki-muon"], {"max_steps": 1200, "optimizer.learning_rate": 4e-3}),
    "lm30m-adamw": (TASKS["lm30m-wiki-adamw"], {"max_steps": 2160, "optimizer.learning_rate": 2e-3}),
    "lm124m": (TASKS["lm124m-wiki-muon"], {"max_steps": 350, "batch_size": 16, "optimizer.learning_rate": 4e-3}),
}
POLAR = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""Coefficients of Polar Express (Amsel et al., 2025), each iteration with its own."""


# --- additions to the optimizer ---------------------------------------------------------------------------------------


def polar(steps: int) -> Callable[[Tensor], Tensor]:
    """Return an orthogonalisation by the first steps of Polar Express."""

    def orthogonalized(matrices: Tensor) -> Tensor:
        dtype = torch.bfloat16 if muon.iteration_type(matrices.device, tuple(matrices.shape[1:])) == "bf16" else None
        x = matrices.to(dtype or torch.float32)
        tall = x.shape[1] > x.shape[2]
        x = x.mT if tall else x
        x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) * 1.01).clamp(min=muon.EPSILON)
        for place, (a, b, c) in enumerate(POLAR[:steps]):
            safe = 1.01 if place < steps - 1 else 1.0
            gram = torch.bmm(x, x.mT)
            update = torch.baddbmm(gram, gram, gram, beta=b / safe**3, alpha=c / safe**5)
            x = torch.baddbmm(x, update, x, beta=a / safe)
        return x.mT if tall else x

    return orthogonalized


def fewer(steps: int) -> Callable[[Tensor], Tensor]:
    """Return the usual orthogonalisation with another number of iterations."""

    def orthogonalized(matrices: Tensor) -> Tensor:
        usual, muon.NEWTON_SCHULZ_STEPS = muon.NEWTON_SCHULZ_STEPS, steps
        try:
            return orthogonalize(matrices)
        finally:
            muon.NEWTON_SCHULZ_STEPS = usual

    return orthogonalized


class VariedMuon(Muon):
    """Muon as it is, in plain torch, with what an addition changes."""

    orthogonalized: Callable[[Tensor], Tensor] = staticmethod(orthogonalize)
    cautious = False
    """Whether only weights that the step makes smaller decay."""

    def _muon_batch(self, group: dict[str, Any], same_shaped: list[list[Tensor]]) -> None:
        update = torch.cat([self._part_updates(group, params, 1 - group["momentum"]) for params in same_shaped])
        params = [p for some in same_shaped for p in some]
        step = self.orthogonalized(update).float()
        factors = self._factors(params, step)
        if factors is not None:
            step.mul_(factors.unsqueeze(2))
        step.mul_(group["lr"] * step_ratio(group["scale"], *update.shape[1:]))
        steps = [part.flatten(0, 1) for part in step.split_with_sizes([self.parts.get(p, 1) for p in params])]
        decay = group["lr"] * group["weight_decay"]
        if self.cautious:
            for p, own in zip(params, steps, strict=True):
                p.mul_(1 - decay * (p * own > 0))
        else:
            torch._foreach_mul_(params, 1 - decay)
        torch._foreach_sub_(params, steps)


# --- additions to the run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One addition. settings: of the configuration; optimizer: attributes of `VariedMuon`; momentum: from and to
    within the first quarter; ramp: what is halved in the first `share` of the tokens; frequencies: whether the first
    output is how frequent each token is."""

    settings: tuple[tuple[str, Any], ...] = ()
    optimizer: tuple[tuple[str, Any], ...] = ()
    momentum: tuple[float, float] | None = None
    silenced: bool = False
    ramp: str = ""
    share: float = 1 / 3
    frequencies: bool = False


PARTS: dict[str, Part] = {
    "plain": Part(),
    "output projections begin at zero": Part(silenced=True),
    "start in closed form": Part(frequencies=True),
    "NorMuon's rows": Part(settings=(("optimizer.row_beta2", 0.95),)),
    "cautious weight decay": Part(optimizer=(("cautious", True),)),
    "momentum from 0.8 to 0.9": Part(momentum=(0.8, 0.9)),
    "momentum from 0.85 to 0.95": Part(momentum=(0.85, 0.95)),
    "Polar Express, 5 iterations": Part(optimizer=(("orthogonalized", polar(5)),)),
    "Polar Express, 4 iterations": Part(optimizer=(("orthogonalized", polar(4)),)),
    "Newton-Schulz, 4 iterations": Part(optimizer=(("orthogonalized", fewer(4)),)),
    "half the context at first": Part(ramp="context"),
    "half the batch at first": Part(ramp="batch"),
    "half the batch throughout": Part(ramp="batch", share=1.0),
    "rows, cautious, projections at zero": Part(
        settings=(("optimizer.row_beta2", 0.95),), optimizer=(("cautious", True),), silenced=True
    ),
}
AVERAGED = "the last tenth averaged"
COUNTED = 100
"""Batches whose tokens are counted for a start in closed form."""


def ramped(batches: Iterator[Any], kind: str, until: int) -> Iterator[Any]:
    """Yield batches whose first `until` are cut: rows of half the length, or half the rows each."""
    for place, batch in enumerate(batches):
        if place >= until or not kind:
            yield batch
            continue
        x, y = batch
        if kind == "context":
            yield tuple(z.reshape(2 * z.shape[0], z.shape[1] // 2) for z in (x, y))
        else:
            yield from zip(x.chunk(2), y.chunk(2), strict=True)


@torch.no_grad()
def begin_with_frequencies(model: Any, batches: Iterator[Any]) -> None:
    """Set the bias before the output layer so that, by least squares, logits are logarithms of the frequencies."""
    weight = model.token_embedding.weight
    counts = torch.ones(len(weight), device=weight.device)
    for _, (_, targets) in zip(range(COUNTED), batches, strict=False):
        counts += torch.bincount(targets.flatten().to(weight.device), minlength=len(counts))
    logarithms = (counts / counts.sum()).log()
    wanted = (logarithms - logarithms.mean()).unsqueeze(1)
    model.final_norm.bias.copy_(torch.linalg.lstsq(weight.double(), wanted.double()).solution[:, 0])


def run(model: str, part: Part, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Make one whole run, and return its losses on the test set."""
    task, usual = MODELS[model]
    steps = options.steps or usual["max_steps"]
    ramp = round(part.share * steps)
    total = steps + (ramp if part.ramp == "batch" else 0)
    changes = (
        usual
        | {"optimizer.row_beta2": 0.0}
        | dict(part.settings)
        | {"max_steps": total, "schedule.warmup_steps": steps // 12}
    )
    if part.optimizer or part.momentum:
        changes["engine.cuda_graph"] = False  # it would keep the usual optimizer
    config = from_mapping(settings_of(task, options.data, options.device, seed, changes))
    work = task.build(config)
    config = with_beta2(config, work.model.shape.context)  # as `foretrain train` does
    if part.silenced:
        for block in work.model.blocks:
            block.silence()
    if part.frequencies:
        begin_with_frequencies(work.model, iter(task.build(config).loader))
    trainer = HybridTrainer(work.model, loss_fn=work.loss_fn, config=config, probe=work.held_out)
    optimizer = trainer.optimizer
    if part.optimizer:
        optimizer.__class__ = VariedMuon
        optimizer._kernels_allowed = False
    for name, value in part.optimizer:
        setattr(optimizer, name, value)
    batches = ramped(iter(work.loader), part.ramp, ramp)
    weights = list(work.model.parameters())
    mean, taken = [torch.zeros_like(p) for p in weights], 0
    started = clock(options.device)
    for step in range(total):
        if part.momentum is not None:
            share = min(1.0, step / (total / 4))
            value = part.momentum[0] + share * (part.momentum[1] - part.momentum[0])
            for group in optimizer.param_groups:
                group["momentum"] = value
        trainer.step(next(batches))
        if step >= 0.9 * total and step % 5 == 0:
            taken += 1
            torch._foreach_lerp_(mean, [p.detach() for p in weights], 1 / taken)
    seconds = clock(options.device) - started
    result = {"seed": seed, "test": trainer.evaluate(work.test), "seconds": round(seconds, 2), "steps": total}
    with torch.no_grad():
        torch._foreach_copy_(weights, mean)
    return result | {"averaged": trainer.evaluate(work.test)}


def clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()  # other programs do not count
    torch.cuda.synchronize()
    return time.perf_counter()


def rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each addition, how far its loss is from the plain run's of the same seed."""
    plain = {one["seed"]: one for one in runs if one["part"] == "plain"}
    found = []
    for name in (*PARTS, AVERAGED):
        own = [one for one in runs if one["part"] == ("plain" if name == AVERAGED else name) and one["seed"] in plain]
        if name == "plain" or not own:
            continue
        losses = [one["averaged" if name == AVERAGED else "test"] for one in own]
        apart = [loss - plain[one["seed"]]["test"] for one, loss in zip(own, losses, strict=True)]
        interval = paired_interval(apart)
        found.append(
            {
                "part": name,
                "loss": statistics.fmean(losses),
                "from plain": apart,
                "interval": [interval.low, interval.high],
                "time": statistics.fmean(one["seconds"] / plain[one["seed"]]["seconds"] for one in own),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of the model's own")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
    kept |= {
        "benchmark": "additions to Muon's stack, each alone",
        "command": " ".join(["python", "benchmarks/stack_parts.py", *sys.argv[1:]]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": environment.commit_of(Path(__file__).parents[1] / "src"),
        "environment": environment.describe(options.device),
        "settings": MODELS[options.model][0].settings | MODELS[options.model][1],
    }
    for seed in range(1, options.seeds + 1):
        for name in options.parts:
            if any(one["part"] == name and one["seed"] == seed for one in kept["runs"]):
                continue
            result = {"part": name} | run(options.model, PARTS[name], options, seed)
            kept["runs"].append(result)
            print(f"seed {seed}, {name}: {result['test']:.4f}, {result['seconds']:.1f} s", flush=True)
            kept["rows"] = rows(kept["runs"])
            options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for row in kept["rows"]:
        low, high = (math.nan if end is None else end for end in row["interval"])
        print(
            f"{row['part']:<38} {row['loss']:.4f}  {statistics.fmean(row['from plain']):+.4f} "
            f"[{low:+.4f}, {high:+.4f}]  time {row['time']:.3f}x"
        )


if __name__ == "__main__":
    main()
