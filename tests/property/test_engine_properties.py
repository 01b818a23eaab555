"""Properties of the engine: states survive, parts make the whole, the fused loss is the plain one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from foretrain.config import PrecisionConfig
from foretrain.engine.batch import map_tensors, part_weights, split, tensors_of
from foretrain.engine.optim.muon import orthogonalize
from foretrain.engine.precision import Precision
from foretrain.models.loss import IGNORED, linear_cross_entropy
from foretrain.persist.codec import Snapshot, put_together, snapshot, take_apart

# --- states --------------------------------------------------------------------------------------------------------

keys = st.integers() | st.text(max_size=6) | st.booleans() | st.none() | st.floats(allow_nan=False) | st.just("$tensor")
tensors = st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.uint8]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: (torch.arange(math.prod(shape)) % 5).view(shape).to(dtype)
    )
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
states = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other or (one != one and other != other)


@given(states)
def test_any_state_survives(state: Any) -> None:
    parts = take_apart(state)
    tree = json.loads(json.dumps(parts.tree, allow_nan=False))
    assert same(put_together(Snapshot(parts.tensors, tree)), state)
    copy = snapshot(state)
    assert same(put_together(copy), state)
    for name, tensor in copy.tensors.items():
        assert tensor.numel() == 0 or tensor.data_ptr() != parts.tensors[name].data_ptr()


# --- batches -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(1, 8))
def test_parts_make_the_whole(rows: int, parts: int) -> None:
    batch = {"x": torch.arange(rows), "y": (torch.arange(rows * 2).view(rows, 2),)}
    pieces = [split(batch, parts, index) for index in range(parts)]
    sizes = [len(piece["x"]) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    for place in range(2):
        assert torch.equal(torch.cat([tensors_of(piece)[place] for piece in pieces]), tensors_of(batch)[place])
    assert float(part_weights(pieces, torch.device("cpu")).sum()) == pytest.approx(1.0)
    assert same(map_tensors(batch, lambda tensor: tensor), batch)


@given(st.integers(1, 4), st.lists(st.booleans(), min_size=8, max_size=8))
def test_weighed_means_of_parts_are_the_mean_of_what_counts(parts: int, ignored: list[bool]) -> None:
    values = torch.arange(8.0).view(4, 2)
    targets = torch.where(torch.tensor(ignored).view(4, 2), IGNORED, 1)
    batch = (values, targets)
    pieces = [split(batch, parts, index) for index in range(parts)]
    weights = part_weights(pieces, torch.device("cpu"))
    total = 0.0
    for (value, target), weight in zip(pieces, weights.tolist(), strict=True):
        counted = value[target != IGNORED]
        total += weight * float(counted.mean()) if len(counted) else 0.0
    counted = values[targets != IGNORED]
    assert total == pytest.approx(float(counted.mean()) if len(counted) else 0.0)


# --- the fused loss ------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 12),
    vocab_size=st.integers(2, 20),
    padding=st.integers(0, 5),
    slice_rows=st.integers(1, 14),
    seed=st.integers(0, 1000),
    ignored=st.lists(st.integers(0, 11), max_size=6),
)
def test_the_fused_loss_is_the_plain_one(
    rows: int, vocab_size: int, padding: int, slice_rows: int, seed: int, ignored: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(vocab_size + padding, 4, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(vocab_size, (rows,), generator=generator)
    targets[[place for place in ignored if place < rows]] = IGNORED
    if bool((targets == IGNORED).all()):
        targets[0] = 0
    fused = linear_cross_entropy(hidden, weight, targets, vocab_size, slice_rows)
    expected = F.cross_entropy(F.linear(hidden, weight)[:, :vocab_size], targets, ignore_index=IGNORED)
    torch.testing.assert_close(fused, expected)
    got, wanted = (torch.autograd.grad(loss, (hidden, weight)) for loss in (fused, expected))
    torch.testing.assert_close(got, wanted)


# --- the loss scale and Muon ---------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(0, 24))
def test_the_loss_scale_follows_its_rule(bad_steps: list[bool], interval: int, exponent: int) -> None:
    precision = Precision(
        PrecisionConfig(type="fp16", loss_scale=2.0**exponent, growth_interval=interval), torch.device("cpu")
    )
    scale, good = 2.0**exponent, 0
    for bad in bad_steps:
        precision.update(torch.tensor(float(bad)))
        good = 0 if bad else good + 1
        if bad:
            scale = max(scale / 2, 1.0)
        elif good == interval:
            scale, good = min(scale * 2, 2.0**24), 0
        assert float(precision.scale) == scale


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
def test_orthogonalised_matrices_are_bounded_and_keep_their_direction(
    batch: int, rows: int, columns: int, seed: int
) -> None:
    matrices = torch.randn(batch, rows, columns, generator=torch.Generator().manual_seed(seed))
    result = orthogonalize(matrices).float()
    assert result.shape == matrices.shape
    assert torch.linalg.matrix_norm(result, ord=2).max() < 1.35
    assert bool(((result * matrices).sum(dim=(1, 2)) > 0).all())
