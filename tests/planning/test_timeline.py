"""What exists together at each moment of a step."""

from __future__ import annotations

import pytest

from foretrain.config import OptimizerConfig
from foretrain.engine.optim.build import build
from foretrain.engine.optim.in_backward import UpdatesInBackward
from foretrain.models.gpt2 import GPT2, GPT2Shape
from foretrain.planning.activations import Pass
from foretrain.planning.parameters import parameters_of
from foretrain.planning.timeline import MUON_BYTES, StepMoment, moments

SHAPE = GPT2Shape(3, 2, 64, 32, 300)


def of(optimizer: str, in_backward: bool) -> dict[str, list[StepMoment]]:
    work = Pass(SHAPE, 4, 32, "fp32", cuda=True)
    found: dict[str, list[StepMoment]] = {}
    for moment in moments(work, parameters_of(SHAPE), OptimizerConfig(type=optimizer), 1, in_backward):
        found.setdefault(moment.name, []).append(moment)
    return found


def most_waiting() -> int:
    """Bytes of gradients that a real backward pass lets wait at the most."""
    model = GPT2(SHAPE)
    updates = UpdatesInBackward(build(model, OptimizerConfig(type="adamw")), list(model.parameters()), nan_check=True)
    return updates._enough


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gradients_that_wait_for_their_update_are_counted(optimizer: str) -> None:
    parameters, waiting = parameters_of(SHAPE), most_waiting()
    largest = parameters.largest_gradient
    assert 0 < waiting < largest
    in_backward, at_the_end = of(optimizer, True), of(optimizer, False)
    together = 0
    if optimizer == "muon":  # matrices of one shape, as many as wait with the last one
        sizes = [min(one.elements, one.largest + waiting // 4) for one in parameters.batches(split_fused=True)]
        together = MUON_BYTES * max(sizes)
    assert {moment.buffers for moment in in_backward["backward"]} == {largest + waiting + together}
    assert {moment.buffers for moment in at_the_end["backward"]} == {largest}
    (late,), (usual,) = in_backward["embedding"], at_the_end["embedding"]
    assert late.buffers == usual.buffers + waiting
    assert late.gradients == parameters.head_gradient < usual.gradients
    assert "update" not in in_backward
