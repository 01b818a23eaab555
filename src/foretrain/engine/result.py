"""What one step did, as its caller sees it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretrain.engine.step import StepOutput
from foretrain.engine.world import ALONE, World


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. Reading `loss` or `gradient_norm` waits for the device; not reading costs nothing."""

    phase: str
    """"warmup", "full", "predict" or "correct"."""
    global_step: int
    """Virtual steps done so far, this one included: full steps, and predicted ones as far as they were worth one."""
    rate: float | Tensor
    """As `learning_rate`, not read yet."""
    output: StepOutput
    predicted_loss: float | None = None
    """What the predictor said this loss would be, in PREDICT."""
    confidence: float | None = None
    """Probability that the open move will be kept, in PREDICT and CORRECT."""
    rewound: int = 0
    """How many of the last batches, that of this step included, are to be handed in again, because a move was undone
    together with its data: the next batch is the one at `HybridTrainer.position`. `fit` does this by itself."""
    world: World = ALONE
    """The way of these numbers to the host."""

    @property
    def learning_rate(self) -> float:
        """That the last update was made with, in the first group of parameters; what recovery did to it included."""
        return float(self.rate)

    @property
    def loss(self) -> float:
        return self.world.to_host(self.output.loss)[0]

    @property
    def gradient_norm(self) -> float:
        """Not a number in PREDICT, where there is no gradient."""
        return self.world.to_host(self.output.gradient_norm)[0]

    @property
    def skipped(self) -> bool:
        """True when the step was not finite and changed nothing."""
        return bool(self.world.to_host(self.output.skipped)[0])
