"""The benchmark of predicted gradients: true ones agree fully, and its figures are what they are said to be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.scripts import BENCHMARKS, load_script

from foretrain.models.gpt2 import GPT2, GPT2Shape

SHAPE = GPT2Shape(layers=3, heads=2, width=16, context=8, vocab_size=32)


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(BENCHMARKS / "skipped_backward.py")


@pytest.fixture(scope="module")
def model() -> GPT2:
    model = GPT2(SHAPE, 1)
    with torch.no_grad():  # as much is done in the blocks as after a long training
        for block in model.blocks:
            for weight in block.parameters():
                weight.mul_(4)
    return model


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(32, (6, 9), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def test_true_gradients_agree_with_themselves(script: Any, model: GPT2, batch: Any) -> None:
    predictors = {"true": lambda layer, passed: passed.gradients[layer], "identity": script.identity}
    found, loss = script.compare(model, iter([batch]), predictors)
    assert loss == pytest.approx(float(model.loss(batch).detach()))
    for layer in range(SHAPE.layers):
        assert found[layer, "true"].cosine == pytest.approx(1, abs=1e-5)
        assert found[layer, "true"].correlation == pytest.approx(1, abs=1e-5)
    last = SHAPE.layers - 1
    assert found[last, "identity"].cosine == pytest.approx(1, abs=1e-5)
    assert found[last, "identity"].correlation == pytest.approx(1, abs=1e-5)
    assert all(found[layer, "identity"].correlation < 0.99 for layer in range(last))


def test_a_block_alone_makes_the_gradients_of_the_whole_model(script: Any, model: GPT2, batch: Any) -> None:
    passed = script.trace(model, batch)
    model.loss(batch).backward()
    for layer, block in enumerate(model.blocks):
        (found,) = script.weight_gradients(block, passed.inputs[layer], [passed.gradients[layer]])
        whole = torch.cat([weight.grad.flatten() for weight in block.parameters() if weight.grad is not None])
        torch.testing.assert_close(found / len(batch[0]), whole, rtol=1e-4, atol=1e-7)
    model.zero_grad()


def test_the_correlation_is_that_of_deviations(script: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(20, 50, generator=generator) + 3
    predicted = 0.5 * true + torch.randn(20, 50, generator=generator) - 1
    agreement = script.Agreement()
    for one, other in zip(true, predicted, strict=True):
        agreement.add(one, other)
    a, b = (rows - rows.mean(dim=0) for rows in (true, predicted))
    assert agreement.correlation == pytest.approx(float((a * b).sum() / (a.norm() * b.norm())), abs=1e-4)
    cosines = torch.nn.functional.cosine_similarity(true, predicted)
    assert agreement.cosine == pytest.approx(float(cosines.mean()), abs=1e-5)


def test_a_linear_map_is_found(script: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs, wanted = (torch.randn(*sizes, generator=generator).double() for sizes in ((4, 30, 5), (5, 3)))
    inputs[..., 0] *= 1e-4  # gradients are far smaller than activations
    moments = script.Moments()
    moments.add(inputs, inputs @ wanted)
    torch.testing.assert_close(moments.solve(1e-9), wanted, rtol=1e-4, atol=1e-4)
    assert moments.error(moments.solve(1e-9)) < moments.error(moments.solve(0.1))


def test_gains_of_free_predictions(script: Any) -> None:
    gains = [script.best_gain(correlation) for correlation in (0.0, 0.5, 0.58, 0.7, 0.8, 0.9, 1.0)]
    assert gains == pytest.approx([1, 1, 1, 1.026, 1.104, 1.305, 3], abs=1e-3)
    assert script.best_gain(script.THRESHOLD - 0.01) == 1 < script.best_gain(script.THRESHOLD + 0.01)
    rows = [{"block": block, "predictor": name, "correlation": 0.9} for block in (1, 2, 3) for name in script.MAPS]
    found = script.verdict(SHAPE, rows)
    assert found["blocks_above"] == 2, "the last one has nothing to predict"
    for charge in script.CHARGES:
        assert found["gain_at_most"][charge] >= found["gain_together"][charge] >= 1


def test_a_whole_run(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(1).zipf(1.5, 6000).clip(max=60).astype("<u2")
    text.tofile(tmp_path / "text.u16")
    tokens, size = script.read_tokens(tmp_path / "text.u16", 20)
    assert size == 21
    assert (tokens == 0).sum() == (text == 1).sum(), "the most frequent one is the first"
    assert (tokens == 20).sum() == len(text) - np.sort(np.bincount(text))[-20:].sum()
    sizes = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocab": 20, "steps": 20, "batch": 4, "judged": 4}
    settings = [f"--{name}={value}" for name, value in sizes.items()]
    files = ["--tokens", str(tmp_path / "text.u16"), "--out", str(tmp_path / "result.json")]
    monkeypatch.setattr(sys, "argv", ["skipped_backward.py", *settings, *files])
    script.main()
    written = (tmp_path / "result.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in written
    report = json.loads(written)
    assert [result["step"] for result in report["results"]] == [1, 5, 10, 20]
    last = [row for result in report["results"] for row in result["rows"] if row["block"] == 2]
    assert all(row["correlation"] == 1 for row in last if row["predictor"] == "identity")
    assert all(-1 <= row["correlation"] <= 1 for result in report["results"] for row in result["rows"])
