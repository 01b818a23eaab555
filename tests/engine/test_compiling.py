"""`engine.compile = "auto"`: the seconds that compiling saves against those it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.engine import compiling
from foretrain.engine import engine as engines
from foretrain.engine.compiling import Workload, is_worthwhile, known_workload, weigh
from foretrain.models import gpt2
from foretrain.models.gpt2 import GPT2

PLAIN = from_mapping({})
GPT2_SMALL = Workload(blocks=12, parameters=124_000_000, trained=124_000_000, tokens=16_384, steps=400)
TINY = Workload(blocks=4, parameters=800_000, trained=800_000, tokens=1024, steps=800)
ADAPTER = replace(GPT2_SMALL, trained=1_000_000)
works = st.builds(
    Workload,
    blocks=st.integers(1, 96),
    parameters=st.integers(10**7, 10**10),
    trained=st.integers(1, 10**7),
    tokens=st.integers(1, 10**6),
    steps=st.integers(1, 10**6),
)


@pytest.mark.parametrize("work", [GPT2_SMALL, ADAPTER, TINY, replace(GPT2_SMALL, tokens=256, steps=2000)])
def test_short_runs_are_not_compiled(work: Workload) -> None:
    assert not weigh(work, PLAIN).pays


@pytest.mark.parametrize(
    "work",
    [replace(GPT2_SMALL, steps=10_000), replace(ADAPTER, steps=10_000), replace(TINY, steps=100_000)],
)
def test_long_runs_are_compiled(work: Workload) -> None:
    assert weigh(work, PLAIN).pays


def test_the_figures_are_those_that_were_measured() -> None:
    one_second = weigh(replace(GPT2_SMALL, tokens=337_600, steps=1), PLAIN)
    assert one_second.eager == pytest.approx(1.0, rel=0.01)
    assert one_second.saved == pytest.approx(1 - 337_600 / 509_400, rel=0.02)
    assert one_second.compiling == pytest.approx(30)
    assert weigh(TINY, PLAIN).compiling == pytest.approx(10)


def test_frozen_weights_have_no_gradients_of_their_own() -> None:
    assert GPT2_SMALL.step_flops == 6.0 * 124e6 * 16_384
    assert replace(GPT2_SMALL, trained=0).step_flops == 4.0 * 124e6 * 16_384


def test_launches_count_where_the_step_is_not_recorded() -> None:
    small = replace(TINY, steps=1000)
    launched = from_mapping({"engine.cuda_graph": False})
    assert weigh(small, launched).eager == pytest.approx(1000 * 4 * compiling.LAUNCHING)
    assert weigh(small, PLAIN).eager == pytest.approx(1000 * 4 * compiling.REPLAYING)


def test_every_depth_of_a_growing_model_is_compiled() -> None:
    grown = from_mapping({"growth.layers": [3, 6], "growth.at": [0.25, 0.5]})
    assert weigh(GPT2_SMALL, grown).compiling == pytest.approx((3 + 6 + 12) * compiling.COMPILING)


@given(works, st.integers(1, 100), st.sampled_from(["auto", True, False]))
def test_more_steps_and_more_tokens_never_speak_against_it(work: Workload, times: int, recorded: Any) -> None:
    config = from_mapping({"engine.cuda_graph": recorded})
    before = weigh(work, config)
    for more in (replace(work, steps=times * work.steps), replace(work, tokens=times * work.tokens)):
        assert weigh(more, config).saved >= before.saved
        assert weigh(more, config).pays >= before.pays


@given(works)
def test_it_says_both_sides(work: Workload) -> None:
    balance = weigh(work, PLAIN)
    assert f"{balance.compiling:.0f} s and would save some {balance.saved:.0f} s" in str(balance)


# --- in Python -------------------------------------------------------------------------------------------------------

SIZES = {"model.layers": 2, "model.width": 16, "model.heads": 2, "model.context": 8, "model.vocab_size": 32}
GIVEN: dict[str, Any] = {**SIZES, "device": "cpu", "hybrid.mode": "off", "max_steps": 100, "batch_size": 4}


def model_of(settings: dict[str, Any]) -> GPT2:
    return gpt2.build(from_mapping(settings).model, 1)


def test_a_trainer_knows_its_work_from_model_batch_and_steps() -> None:
    model = model_of(GIVEN)
    model.token_embedding.requires_grad_(False)
    size, frozen = sum(p.numel() for p in model.parameters()), model.token_embedding.weight.numel()
    assert known_workload(from_mapping(GIVEN), model, has_end=True) == Workload(2, size, size - frozen, 4 * 8, 100)


def test_what_is_not_known_is_compiled() -> None:
    config = from_mapping(GIVEN)
    assert known_workload(config, model_of(GIVEN), has_end=False) is None
    assert known_workload(config, nn.Linear(2, 2), has_end=True) is None
    unsaid = {name: value for name, value in GIVEN.items() if name != "batch_size"}
    assert known_workload(from_mapping(unsaid), model_of(GIVEN), has_end=True) is None
    assert is_worthwhile(None, config)


@pytest.mark.parametrize(
    ("setting", "steps", "cuda", "wanted"),
    [
        ("auto", 100, True, False),
        ("auto", 10**6, True, True),
        ("auto", None, True, True),
        ("auto", 10**6, False, False),
        (True, 100, True, True),
        (True, 100, False, True),
        (False, 10**6, True, False),
    ],
)
def test_the_trainer_decides_when_it_is_made(
    setting: Any, steps: int | None, cuda: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that is taken for a GPU for as long as it is decided."""
    settings = {name: value for name, value in GIVEN.items() if name != "max_steps"} | {"engine.compile": setting}
    settings |= {} if steps is None else {"max_steps": steps}
    decide, cpu = engines.Engine._compiling_pays, torch.device("cpu")

    def elsewhere(engine: engines.Engine) -> bool:
        engine.device = torch.device("cuda" if cuda else "cpu")
        chosen = decide(engine)
        engine.device = cpu
        return chosen

    monkeypatch.setattr(engines.Engine, "_compiling_pays", elsewhere)
    monkeypatch.setattr(torch, "compile", lambda loss, **options: loss)
    trainer = HybridTrainer(model_of(GIVEN), config=from_mapping(settings))
    assert trainer.engine.full_step.compiled is wanted
