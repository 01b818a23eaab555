"""Directions of replicated weights that ranks share: they are those of one process, in a part of its memory each, and
are saved and loaded by any number of ranks. All of it happens in one start of three gloo ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import ranked
from tests.engine import test_ranks
from tests.faults.test_resume_ranks import OF_OTHER_RANKS, OF_THE_CLOCK, Rows, as_of, differences, noisy
from tests.gloo import fewer, results

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.errors import ConfigError
from foretrain.motion import shared
from foretrain.motion.shared import SharedTrajectory
from foretrain.motion.trajectory import Trajectory

pytestmark = pytest.mark.xdist_group("shared directions")  # what is below is made once

END, OPEN = 150, 140
"""Steps of a run, and one at which a leap is being validated."""
PARAMETERS = 28
"""Tensors of the model: each is split by itself."""
SHARED = {"distributed.basis": "sharded"}
WAYS = {"other numbers": [(1, "one"), (3, "ddp"), (2, "ddp")], "shards": [(3, "fsdp2"), (2, "ddp")]}
"""How many ranks, of which kind, a state is handed to after the two that it is from."""


# --- what ranks do ---------------------------------------------------------------------------------------------------


def train(folder: str) -> dict[str, Any]:
    """A run with an audited leap, with shared directions and without, and what goes on from its middle."""
    told: dict[str, Any] = {}
    for name, settings in (("shared", SHARED), ("replicated", {"distributed.basis": "replicated"})):
        whole = noisy("ddp", **settings)
        whole.fit(Rows(ranked.words), out=f"{folder}/{name}", progress=False, pause_at=END)
        told[name] = facts(whole)
    rest = noisy("ddp", **SHARED)
    out = as_of(torch.distributed.get_rank(), f"{folder}/shared", OPEN)
    rest.fit(Rows(ranked.words), out=out, resume=True, progress=False, pause_at=END)
    return told | {"resumed": facts(rest)}


def facts(trainer: HybridTrainer) -> dict[str, Any]:
    summary, trajectory = trainer.summary(), trainer.policy.observer.trajectory
    return {
        "class": type(trajectory).__name__,
        "numbers": sum(part.numel() for part in trajectory.watched),
        "bytes": trajectory.bytes,
        "moves": summary["moves"],
        "steps": [trainer.global_step, trainer.position],
        "loss": trainer.evaluate([ranked.own_rows(ranked.words(5000))]),
        "hash": ranked.digest(trainer),
    }


def count() -> dict[str, int]:
    """Calls between ranks in windows that are watched, beyond those of a run that predicts nothing."""
    still = {"hybrid.warmup_steps": 1000, "max_steps": 60, "evaluation.interval": 0}
    calls = {}
    for name, settings in (("watching", SHARED), ("off", {"hybrid.mode": "off"})):
        made = ranked.trainer("ddp", True, {**still, **settings})
        ranked.run(made, 10, ranked.words)
        with test_ranks.listening() as heard:
            ranked.run(made, 30, ranked.words)
        calls[name] = sum(heard.values())
    return calls


def pass_on(rank: int, folder: str) -> None:
    """One state on its ways."""
    for way, stations in WAYS.items():
        source = f"{folder}/begun"
        for number, (size, kind) in enumerate(stations):
            target = f"{folder}/{way}-{number}"
            with fewer(size) as takes_part:
                if takes_part:
                    trainer = noisy(kind, **(SHARED if kind == "ddp" else {}))
                    loaded = ranked.store_of(trainer, source).load_newest()
                    assert loaded is not None
                    trainer.load_state_dict(loaded.state)
                    ranked.store_of(trainer, target).save(loaded.step, trainer.state_dict())
            source = target


def refuse() -> list[str]:
    """What does not go with shared directions, and what they are left out for by themselves."""
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    said = []
    for basis in ("sharded", "auto"):
        config = from_mapping({**ranked.SETTINGS, "distributed.basis": basis, "optimizer.type": "adam"})
        try:
            made = HybridTrainer(ranked.wrapped(model, "ddp"), loss_fn=torch.nn.functional.mse_loss, config=config)
            said.append(type(made.policy.observer.trajectory).__name__)
        except ConfigError as error:
            said.append(str(error))
    return said


def everything(rank: int, folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {"path": test_ranks.path("ddp", SharedTrajectory)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_AT_ONCE", 1000)  # several gathers per move
        told["path in pieces"] = test_ranks.path("ddp", SharedTrajectory)
    with fewer(2) as takes_part:
        if takes_part:
            told |= train(folder) | {"calls": count(), "refused": refuse()}
    if rank == 0:
        shutil.copytree(f"{folder}/shared/checkpoints/step-{OPEN:08d}", f"{folder}/begun/step-{OPEN:08d}")
    pass_on(rank, folder)
    return told


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, results(3, everything, str(folder))


# --- what is compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["path", "path in pieces"])
def test_three_ranks_see_and_move_what_one_process_does(name: str, ran: tuple[Path, list[dict[str, Any]]]) -> None:
    alone = test_ranks.path("one")
    for rank in ran[1]:
        assert rank[name]["dots"] == ran[1][0][name]["dots"]
        assert rank[name]["moved"] == alone["moved"]
        for own, other in zip(rank[name]["dots"], alone["dots"], strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())


def test_a_run_has_the_moves_of_replicated_directions_in_half_the_memory(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in ran[1][:2]:
        shared, replicated = rank["shared"], rank["replicated"]
        assert (shared["class"], replicated["class"]) == (SharedTrajectory.__name__, Trajectory.__name__)
        assert shared["numbers"] <= replicated["numbers"] / 2 + PARAMETERS
        assert shared["bytes"] < 0.7 * replicated["bytes"]  # so small a model is mostly padding
        assert shared["moves"] == replicated["moves"]
        assert shared["moves"]["kept"] > 0
        assert shared["steps"] == replicated["steps"]
        assert shared["loss"] == pytest.approx(replicated["loss"], abs=1e-5)
        assert shared["hash"] == ran[1][0]["shared"]["hash"]


def test_a_run_is_resumed_in_a_leap_with_the_same_bits(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, told = ran
    for rank in told[:2]:
        assert rank["resumed"] == rank["shared"]
    ends = [folder / name / "checkpoints" / f"step-{END:08d}" for name in ("shared", f"shared-{OPEN}")]
    assert differences(*ends, frozenset(OF_THE_CLOCK)) == []


@pytest.mark.parametrize("way", WAYS)
def test_directions_are_the_same_on_any_number_of_ranks(way: str, ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = ran
    first, last = folder / "begun", folder / f"{way}-{len(WAYS[way]) - 1}"
    states = [path / f"step-{OPEN:08d}" for path in (first, last)]
    assert differences(*states, frozenset(OF_THE_CLOCK | OF_OTHER_RANKS)) == []
    where = (states[1] / "where.json").read_text()
    assert "hybrid.policy.observer.trajectory.basis_flat.0" in where


def test_watching_sends_one_sum_per_window(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    """Twenty steps in windows of five: beside the meeting of each window, and an evaluation at the end."""
    for rank in ran[1][:2]:
        assert rank["calls"]["off"] == 4 + 2
        assert rank["calls"]["watching"] == rank["calls"]["off"] + 4


def test_what_does_not_go_is_refused_in_a_sentence(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in ran[1][:2]:
        sentence, left_out = rank["refused"]
        assert "distributed.basis = 'sharded' does not go here: some weights do not lie in memory" in sentence
        assert left_out == Trajectory.__name__
