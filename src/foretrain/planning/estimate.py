"""The memory a configuration needs, component by component, at the peak of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from foretrain.config import Config
from foretrain.engine.compiling import Workload, is_worthwhile, replays
from foretrain.engine.depth import spread
from foretrain.engine.precision import choose_device, choose_precision
from foretrain.hybrid.gate import no_audit_is_affordable
from foretrain.hybrid.moves.obstacles import FEWEST_PAIRS
from foretrain.hybrid.resting import NEED_A_REASON
from foretrain.models.causal_shape import CausalShape
from foretrain.models.gpt2 import GPT2Shape
from foretrain.motion.hosted import HOSTED_ROWS, elements_at_once
from foretrain.motion.records import DIRECTIONS
from foretrain.motion.trajectory import Layout, basis_type
from foretrain.planning.activations import Pass
from foretrain.planning.causal import CausalPass, adapted_causal, whole_parameters
from foretrain.planning.parameters import FP32, Parameters, adapted_parameters, parameters_of
from foretrain.planning.timeline import full_step

WORKSPACE = 32 * 2**20
"""What cuBLAS takes on Hopper, 8 MiB on older cards; again on each of the two streams that record a CUDA graph. It is
counted by the allocator, the CUDA context is not."""
RESERVE = 0.05
"""Share beyond the peak that a budget must leave: the allocator holds whole segments, a little more than it hands out.
Measured peaks are compared without it."""
PAGES = 160 * 2**20
"""A CUDA device needs so much besides, as its memory comes in pages of 20 MiB that are partly used: GPT-2 124M under
2 GB had 200 MB in them."""
TOKEN_BYTES = 16
"""A token and its target, 8 bytes each."""
BATCHES_AT_HAND = 5
"""The batch itself, the last three of a window, and the one that a move is probed on."""
_PHASES = ("full", "predict", "correct", "audit", "evaluate")


@dataclass(frozen=True)
class PlanTarget:
    """What is planned for: a model's shape, a device, and what the configuration does not say."""

    shape: GPT2Shape | CausalShape
    cuda: bool
    precision: str
    length: int
    """Tokens per sequence."""
    adapters: bool = False
    """Whether only adapters are trained, as `foretrain finetune` does."""
    evaluated_rows: int = 0
    """Sequences per held-out batch; 0: as many as in a micro-batch."""


@dataclass(frozen=True)
class Estimate:
    """Bytes per phase and component."""

    phases: Mapping[str, Mapping[str, int]]
    pool: int = 0
    """What a recorded CUDA graph keeps to itself while other phases run; reserved, but not allocated."""
    moment: str = ""
    """What exists at the moment of a full step that needs the most."""
    pages: int = 0
    """What the allocator cannot hand out of partly used pages."""
    host: int = 0
    """Main memory, locked, that stands in for the device's."""

    @property
    def peaks(self) -> dict[str, int]:
        """Return what the allocator's own counter will show, phase by phase."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def needed(self) -> int:
        """Return what a budget must allow for."""
        most = max(peak + (self.pool if phase not in ("full", "correct") else 0) for phase, peak in self.peaks.items())
        return int(most * (1 + RESERVE)) + self.pages

    def as_dict(self) -> dict[str, object]:
        return {
            "peak_bytes": self.peak,
            "needed_bytes": self.needed,
            "peak_by_phase": self.peaks,
            "components": {phase: dict(parts) for phase, parts in self.phases.items()},
            "moment": self.moment,
            "host_bytes": self.host,
        }


def target_of(
    config: Config,
    shape: GPT2Shape | CausalShape,
    *,
    length: int | None = None,
    adapters: bool = False,
    evaluated_rows: int = 0,
) -> PlanTarget:
    """Return the target for the device that the configuration chooses here."""
    device = choose_device(config.device)
    precision = choose_precision(config.precision.type, device)
    return PlanTarget(shape, device.type == "cuda", precision, length or shape.context, adapters, evaluated_rows)


def model_parameters(shape: GPT2Shape | CausalShape) -> Parameters:
    """Return the parameters of the model itself, without adapters."""
    return whole_parameters(shape) if isinstance(shape, CausalShape) else parameters_of(shape)


def all_parameters(config: Config, target: PlanTarget) -> Parameters:
    if isinstance(target.shape, CausalShape):
        chosen = config.lora
        return adapted_causal(target.shape, chosen.rank, tuple(chosen.targets), chosen.bias)
    return adapted_parameters(target.shape, config.lora) if target.adapters else parameters_of(target.shape)


def workload_of(config: Config, target: PlanTarget) -> Workload | None:
    """Return what a run of a recipe will compute; None where its length is given in epochs, which only data can say."""
    if config.epochs is not None:
        return None
    parameters = all_parameters(config, target)
    return Workload(
        blocks=target.shape.layers,
        parameters=parameters.count,
        trained=parameters.elements,
        tokens=config.batch_size * target.length,
        steps=config.max_steps,
    )


def compiles(config: Config, target: PlanTarget) -> bool:
    """Return whether the run will be compiled."""
    wanted = config.engine.compile
    if wanted == "auto":
        return target.cuda and is_worthwhile(workload_of(config, target), config)
    return wanted


def pass_of(config: Config, target: PlanTarget, precision: str = "same", rows: int = 0) -> Pass:
    """Return the pass of a micro-batch through the model."""
    kind: Any = CausalPass if isinstance(target.shape, CausalShape) else Pass
    made: Pass = kind(
        target.shape,
        rows or -(-config.batch_size // config.accumulation_steps),
        target.length,
        target.precision if precision == "same" else precision,
        cuda=target.cuda,
        compiled=compiles(config, target),
        by_block=compiles(config, target) and config.engine.update_in_backward,
        narrow=config.precision.narrow_residual,
        fused=config.engine.fused_loss,
        loss_rows=config.engine.loss_rows,
        recomputed=float(config.engine.activation_checkpointing),
        rank=config.lora.rank if target.adapters else 0,
    )
    return made


def tries_nothing(config: Config, target: PlanTarget) -> bool:
    """Return whether nothing will be predicted, as far as can be known before the run: directions are not even kept.

    (Where every batch gives the same loss the run finds out that moves can be judged, and makes room for them.)
    """
    if config.hybrid.mode == "off":
        return True
    judged = target.adapters and config.hybrid.probe_examples  # by held-out examples
    large = all_parameters(config, target).elements > NEED_A_REASON
    return large and not judged and no_audit_is_affordable(config, config.max_steps)


def estimate(config: Config, target: PlanTarget) -> Estimate:
    """Estimate all phases. Nothing of the size of the model is allocated."""
    parameters = all_parameters(config, target)
    in_backward, hybrid = config.engine.update_in_backward, config.hybrid.mode != "off"
    tries = not tries_nothing(config, target)
    state, learned = parameters.optimizer_state(config.optimizer), parameters.learned
    gradients = 0 if in_backward else learned
    snapshot = _snapshot(config, learned, state)
    pinned = target.cuda and config.memory.snapshots == "pinned"

    always = {"weights": parameters.weights, "optimizer state": state}
    always["batches"] = BATCHES_AT_HAND * config.batch_size * target.length * TOKEN_BYTES
    always["workspaces"] = WORKSPACE * (1 + 2 * _recorded(config, target)) if target.cuda else 0
    if config.evaluation.ema_decay:
        always["average"] = learned
    if config.predictor.beta > 0:
        always["look-ahead"] = 2 * learned
    if config.growth.stages:
        always["state before growth"] = _before_growth(config, target, parameters)
    if hybrid:
        always["basis"] = _basis(config, target, parameters, tries)
        always["snapshot"] = 0 if pinned else snapshot
        always["quasi-Newton pairs"] = _pairs(config, target, learned)
    work = pass_of(config, target)
    moment = full_step(work, parameters, config.optimizer, config.accumulation_steps, in_backward)
    step = {
        "gradients": moment.gradients,
        "activations": moment.activations,
        "casts of weights": moment.casts,
        "logits and loss": moment.logits,
        "optimizer buffers": moment.buffers,
    }
    phases = {"full": always | step}
    probed = min(config.batch_size, config.hybrid.probe_examples) if target.adapters else 0
    alone = pass_of(config, target, config.precision.predict, probed).forward_alone
    if tries:
        rest = dict(always)
        leaves = target.cuda and config.memory.offload
        if leaves and not config.memory.return_ahead:  # else it comes back beside the last probe
            rest["optimizer state"] = 0
        left = 0 if leaves else gradients
        phases["predict"] = rest | {"gradients": left, "activations": alone, "move": _move(config, target, parameters)}
        phases["correct"] = always | step
        if config.audit.time_budget > 0:
            fork = 0 if pinned else snapshot + 2 * learned
            phases["audit"] = always | step | {"forks of an audit": fork}
    rows = target.evaluated_rows or work.rows
    shown = pass_of(config, target, rows=rows).forward_alone
    swapped = 2 * learned if config.evaluation.ema_decay else 0
    left = gradients if _recorded(config, target) else 0
    phases["evaluate"] = always | {"gradients": left, "activations": shown, "weights put aside": swapped}
    return Estimate(
        {phase: phases[phase] for phase in _PHASES if phase in phases},
        _pool(config, target, step),
        moment.name,
        PAGES if target.cuda else 0,
        _host(config, parameters, snapshot, state, tries) if hybrid and target.cuda else 0,
    )


def _snapshot(config: Config, learned: int, state: int) -> int:
    """Return the bytes of trained weights, optimizer state, average and look-ahead, once."""
    size = learned + state
    size += learned if config.evaluation.ema_decay else 0
    return size + (2 * learned if config.predictor.beta > 0 else 0)


def _before_growth(config: Config, target: PlanTarget, parameters: Parameters) -> int:
    """Return the bytes of the state that undoes the last growth, kept while that is on trial beside the whole model."""
    layers, _ = config.growth.stages[-1]
    used = set(spread(layers, target.shape.layers)) if layers < target.shape.layers else set()
    shallow = Parameters(tuple(p for p in parameters.all if p.block is None or p.block in used))
    averages = parameters.learned if config.evaluation.ema_decay else 0
    return parameters.learned + averages + shallow.optimizer_state(config.optimizer)


def _host(config: Config, parameters: Parameters, snapshot: int, state: int, tries: bool) -> int:
    """Return what `memory.snapshots`, `memory.basis` and `memory.offload` keep in main memory."""
    size = 0
    if config.memory.basis == "pinned" and tries:
        size += _directions(config, parameters, HOSTED_ROWS)
    if config.memory.snapshots == "pinned":
        audited = snapshot + 2 * parameters.learned if tries and config.audit.time_budget > 0 else 0
        return size + snapshot + audited
    return size + (state if config.memory.offload and tries else 0)


@lru_cache(maxsize=64)
def row_size(parameters: Parameters) -> tuple[int, int]:
    """Return the elements of a row of the stored directions, and bytes of the matrix that sums its groups."""
    stand_ins = [torch.empty(()).expand(p.shape) for p in parameters.trained]  # one number each in memory
    layout = Layout(stand_ins, [p.name for p in parameters.trained])
    return layout.size, layout._membership.numel() * layout._membership.element_size()


def _basis(config: Config, target: PlanTarget, parameters: Parameters, held: bool) -> int:
    """Return the bytes on the device of the directions, if they are kept there, and of the matrix that sums their
    groups."""
    if not parameters.trained:
        return 0
    elsewhere = not held or (target.cuda and config.memory.basis == "pinned")
    return row_size(parameters)[1] + (0 if elsewhere else _directions(config, parameters, 2 * len(DIRECTIONS) + 2))


def _directions(config: Config, parameters: Parameters, rows: int) -> int:
    """Sum up two bases, one or two displacements, the weights at the window's start and a scratch row."""
    if not parameters.trained:
        return 0
    number = basis_type(config.hybrid.basis_type, parameters.elements).itemsize
    return row_size(parameters)[0] * (rows * number + 2 * FP32)


def _move(config: Config, target: PlanTarget, parameters: Parameters) -> int:
    """Return what making a move needs: a direction in fp32, and with an average the way that was gone."""
    number = basis_type(config.hybrid.basis_type, parameters.elements).itemsize
    way = parameters.learned if config.evaluation.ema_decay else 0
    if target.cuda and config.memory.basis == "pinned":
        widened = FP32 if number != FP32 else 0
        return elements_at_once(number) * (number + widened + FP32) + way  # a direction, in fp32, and their sum
    return way + (FP32 * row_size(parameters)[0] if parameters.trained and number != FP32 else 0)


def _pairs(config: Config, target: PlanTarget, learned: int) -> int:
    """Return the bytes of quasi-Newton pairs, which exist only where the loss may be exact: no weight decay, no loss
    scale."""
    possible = config.hybrid.mode == "leap" and not config.optimizer.decay and target.precision != "fp16"
    judged = target.adapters and config.hybrid.probe_examples  # by held-out examples, which search instead
    possible = possible and not (config.engine.update_in_backward or config.hybrid.search is False or judged)
    pairs = min(config.hybrid.secant_pairs, int(config.hybrid.secant_memory_mb * 2**20 / (2 * learned or 1)))
    return learned * (2 * pairs + 6) if possible and pairs >= FEWEST_PAIRS else 0


def _recorded(config: Config, target: PlanTarget) -> bool:
    """Return whether the step will be a CUDA graph."""
    leaves = config.memory.offload and config.hybrid.mode != "off"  # then the state does not stay where it was
    elements = all_parameters(config, target).elements
    return target.cuda and not leaves and replays(config, elements, config.batch_size * target.length)


def _pool(config: Config, target: PlanTarget, step: Mapping[str, int]) -> int:
    """A recorded step keeps its activations and buffers for the next replay."""
    return sum(step.values()) - step["gradients"] if _recorded(config, target) else 0
