"""Decides whether `torch.compile` is worth its time in a run: the seconds it saves against the seconds it takes.

Nothing is timed. The answer follows from the configuration and the sizes of the model, so that a plan, a run and a run
that is resumed decide alike. The settings that a memory plan may change (`accumulation_steps`, `memory.offload`,
`engine.update_in_backward` ...) are left out for the same reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from foretrain.config import Config
from foretrain.engine.described import unwrapped
from foretrain.engine.graphs import LAUNCH_BOUND_FLOPS
from foretrain.models.gpt2 import GPT2

EAGER_FLOPS = 252e12
"""Operations per second of eager bf16 training, attention's own products not counted. Measured: GPT-2 124M, context
1024, 337,600 tokens/s on one H200. A slower GPU saves more seconds than is reckoned here."""
SAVED_SHARE = 1 / 3
"""Share of the eager seconds that a compiled run saves. Measured: 509,400 instead of 337,600 tokens/s in that run."""
LAUNCHING = 20e-3 / 12
"""Seconds per block that an eager step takes at least, however few tokens it has: its kernels are launched one by one.
Measured: some 20 ms with 12 blocks."""
REPLAYING = 0.3e-3
"""Seconds per block that a step takes at least where it is recorded as a CUDA graph. Chosen: a compiled and recorded
step of 12 blocks takes about 4 ms, one of 4 small blocks 0.73 ms (docs/results.md); an eager one was not measured."""
COMPILING = 2.5
"""Seconds per block that compiling takes. Measured: about 30 s with 12 blocks, 10 s with 4 small ones; what earlier
runs left in torch's cache is not counted on."""
LEAST_COMPILING = 10.0
"""Seconds that compiling takes at least. Chosen: what the smallest model took."""


@dataclass(frozen=True)
class Workload:
    """Says how much a run computes, as far as it is known before the first step."""

    blocks: int
    parameters: int
    """All that a token passes through, frozen ones too."""
    trained: int
    tokens: int
    """Tokens of one step."""
    steps: int

    @property
    def step_flops(self) -> float:
        """Return the operations of a step: each parameter takes 2 per token in the forward pass and 2 for the gradients
        of activations; a trained one takes 2 more for its own gradient."""
        return (4.0 * self.parameters + 2.0 * self.trained) * self.tokens


@dataclass(frozen=True)
class CompileBalance:
    """Holds what compiling saves and costs in one run, in seconds."""

    eager: float
    """What all steps take without it."""
    compiling: float

    @property
    def saved(self) -> float:
        return SAVED_SHARE * self.eager

    @property
    def pays(self) -> bool:
        return self.saved > self.compiling

    def __str__(self) -> str:
        return (
            f"compiling takes about {self.compiling:.0f} s and would save some {self.saved:.0f} s of this run's steps, "
            "by a rough reckoning"
        )


def weigh(work: Workload, config: Config) -> CompileBalance:
    """Return the balance of a run on a CUDA GPU."""
    least_per_block = REPLAYING if replays(config, work.trained, work.tokens) else LAUNCHING
    step = max(work.step_flops / EAGER_FLOPS, work.blocks * least_per_block)
    depths = [layers for layers, _ in config.growth.stages if layers < work.blocks] + [work.blocks]
    eager = work.steps * step if config.steps_are_limited else math.inf
    return CompileBalance(min(eager, config.max_time or math.inf), max(LEAST_COMPILING, COMPILING * sum(depths)))


def replays(config: Config, trained: int, tokens: int) -> bool:
    """Return whether steps on a CUDA GPU are recorded as a graph, if nothing but their size stands against it."""
    if config.engine.cuda_graph == "auto":
        return 6.0 * trained * tokens < LAUNCH_BOUND_FLOPS
    return config.engine.cuda_graph


def known_workload(config: Config, model: nn.Module, has_end: bool) -> Workload | None:
    """Return what a trainer will compute; None where its length or its tokens are not known before the first batch.

    Only a GPT-2 of ours says how many tokens a row has, and only a `batch_size` that was given says how many rows.
    """
    model = unwrapped(model)
    if not (isinstance(model, GPT2) and has_end and "batch_size" in config.model_fields_set):
        return None
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return Workload(
        blocks=model.shape.layers,
        parameters=sum(size for size, _ in sizes),
        trained=sum(size for size, is_trained in sizes if is_trained),
        tokens=config.batch_size * model.shape.context,
        steps=config.max_steps,
    )


def is_worthwhile(work: Workload | None, config: Config) -> bool:
    """Return whether `engine.compile = "auto"` compiles on a CUDA GPU. Where nobody knows what is computed, it does."""
    return work is None or weigh(work, config).pays
