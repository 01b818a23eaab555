"""Moments in fewer bits on shards: they train, go back, and are saved and loaded by any number of gloo ranks.

All of it happens in one start of three ranks; tests read what they found.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import ranked
from tests.faults.test_resume_ranks import OF_OTHER_RANKS, OF_THE_CLOCK, leaves
from tests.gloo import fewer, results
from tests.ranked import store_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from foretrain import HybridTrainer, supervised
from foretrain.config import from_mapping
from foretrain.engine.optim.moments import BLOCK, is_narrow, read_moment
from foretrain.errors import ConfigError
from foretrain.motion.samples import Sample, statistics_of
from foretrain.persist import checkpoint
from foretrain.persist.model_state import ROW_SQUARES, SCALE
from foretrain.persist.parts import SpreadForm, like

pytestmark = pytest.mark.xdist_group("narrow on ranks")  # all of it is made once

KINDS = ("adamw 8bit", "adamw bf16", "muon 8bit", "muon bf16")
SAVED_AT, END = 6, 10
SQUARES = "exp_avg_sq"


def model() -> nn.Sequential:
    """Rows of a multiple of 256 numbers and of others, rows that do not divide by the ranks, a matrix of one row, and a
    vector that is large."""
    torch.manual_seed(1)
    sizes = ((5, 24), (24, 256), (256, 17), (17, 3), (3, 4100), (4100, 1))
    layers = [layer for before, after in sizes for layer in (nn.Linear(before, after), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def trainer(optimizer: str, shards: bool, **more: Any) -> HybridTrainer:
    kind, state_type = optimizer.split()
    settings = {"optimizer.type": kind, "optimizer.state_type": state_type, "optimizer.learning_rate": 1e-3}
    config = from_mapping({**ranked.SETTINGS, "max_steps": 40, "hybrid.mode": "off", **settings, **more})
    made = ranked.wrapped(model(), "fsdp2" if shards else "one")
    return HybridTrainer(made, loss_fn=supervised(nn.functional.mse_loss), config=config)


def to(made: HybridTrainer, step: int) -> HybridTrainer:
    while made.global_step < step:
        made.step(ranked.own_rows(ranked.points(0)))
    return made


def stored(made: HybridTrainer) -> list[str]:
    """The formats of moments, by parameter."""
    states = [made.optimizer.state[p] for p in made.model.parameters()]
    return ["/".join(str(value.dtype).removeprefix("torch.") for value in state.values()) for state in states]


def bits(made: HybridTrainer) -> list[Any]:
    """Of weights and of all that the optimizer keeps, wherever it is."""
    states = [value for p in made.model.parameters() for value in made.optimizer.state[p].values()]
    return [ranked.digest(made), ranked.bits_of(states)]


def keep_moments(made: HybridTrainer, path: str) -> None:
    """Write the moments of all parameters, in fp32 and whole."""
    found: dict[str, Tensor] = {}
    for number, p in enumerate(made.model.parameters()):
        for name in made.optimizer.state[p]:
            if name == ROW_SQUARES:
                found[f"{number}.{name}"] = ranked.whole(made.optimizer.state[p][name]).contiguous()
            elif name != "step" and not name.endswith(SCALE):
                part = read_moment(made.optimizer.state[p], name)
                assert part is not None
                found[f"{number}.{name}"] = ranked.whole(like(part, p)).contiguous()
    if ranked.ranks()[0] == 0:
        save_file(found, path)


# --- what ranks do ---------------------------------------------------------------------------------------------------


def on_two(optimizer: str, folder: str) -> dict[str, Any]:
    """A run, one that goes on from its middle, one from that of one process, one with a bad step, and one that goes
    back."""
    whole = to(trainer(optimizer, True), SAVED_AT)
    store_of(whole, f"{folder}/2").save(SAVED_AT, whole.state_dict())
    keep_moments(whole, f"{folder}/two")
    saved, statistics, formats = bits(whole), sampled(whole), stored(whole)
    to(whole, END)
    rest, other = trainer(optimizer, True), trainer(optimizer, True)
    load(rest, f"{folder}/2")
    loaded = bits(rest)
    load(other, f"{folder}/1")
    keep_moments(other, f"{folder}/two-from-one")
    return {
        "formats": formats,
        "saved": saved,
        "loaded": loaded,
        "ends": [bits(whole), bits(to(rest, END))],
        "losses": [loss_of(whole), loss_of(to(other, END))],
        "statistics": statistics,
        "bad": bad_step(optimizer),
        "back": back(optimizer),
    }


def loss_of(made: HybridTrainer) -> float:
    return made.evaluate([ranked.own_rows(ranked.points(0))])


def sampled(made: HybridTrainer) -> list[float]:
    """Statistics of moments, as a window sees them."""
    world, sample = made.engine.world, Sample(list(made.model.parameters()), made.optimizer)
    made.engine.gradient(ranked.own_rows(ranked.points(0)))
    found = statistics_of(world.to_host(world.reduce(sample.sums(world.share), "sharded")))
    made.optimizer.zero_grad()
    return [found.moment_mean, found.moment_std, found.second_moment_mean]


def bad_step(optimizer: str) -> list[Any]:
    """No number on the last rank."""
    made = to(trainer(optimizer, True), 3)
    before, (x, y) = bits(made), ranked.own_rows(ranked.points(0))
    rank, size = ranked.ranks()
    made.step((torch.full_like(x, torch.nan) if rank == size - 1 else x, y))
    return [before, bits(made)]


def back(optimizer: str) -> list[Any]:
    """Steps from a snapshot, twice: from before the first step, and from later."""
    made = trainer(optimizer, True, **{"hybrid.mode": "leap"})
    assert made.policy is not None
    kept, found = made.policy.tools.snapshots, []
    for _ in range(2):
        kept.take()
        for _ in range(2):
            step = made.global_step
            found.append(bits(to(made, step + 2)))
            kept.rewind()
        to(made, made.global_step + 3)
    return found


def load(made: HybridTrainer, folder: str) -> None:
    loaded = store_of(made, folder).load_newest()
    assert loaded is not None
    made.load_state_dict(loaded.state)


def on_one(optimizer: str, folder: str) -> dict[str, Any]:
    """A run of one process that is saved, for two to go on with."""
    made = to(trainer(optimizer, False), SAVED_AT)
    store_of(made, f"{folder}/1").save(SAVED_AT, made.state_dict())
    keep_moments(made, f"{folder}/one")
    found = {"formats": stored(made), "statistics": sampled(made)}
    return found | {"loss": loss_of(to(made, END))}


def goes_on(optimizer: str, folder: str) -> dict[str, Any]:
    """What two ranks saved, in one process."""
    made = trainer(optimizer, False)
    load(made, f"{folder}/2")
    keep_moments(made, f"{folder}/one-from-two")
    return {"formats": stored(made), "loss": loss_of(to(made, END))}


def pass_on(optimizer: str, folder: str) -> None:
    """One state, from 2 ranks to 3 and back."""
    for size, source, target in ((3, "2", "3"), (2, "3", "2-again")):
        with fewer(size) as takes_part:
            if takes_part:
                made = trainer(optimizer, True)
                load(made, f"{folder}/{source}")
                store_of(made, f"{folder}/{target}").save(SAVED_AT, made.state_dict())


def refused() -> str:
    """A matrix that is cut between columns."""
    cut = model()
    mesh = init_device_mesh("cpu", (ranked.ranks()[1],))
    cut[2].weight = nn.Parameter(distribute_tensor(cut[2].weight.detach(), mesh, [Shard(1)], src_data_rank=None))
    settings = {**ranked.SETTINGS, "hybrid.mode": "off", "optimizer.type": "adamw", "optimizer.state_type": "8bit"}
    try:
        HybridTrainer(cut, loss_fn=supervised(nn.functional.mse_loss), config=from_mapping(settings))
    except ConfigError as error:
        return str(error)
    return ""


def everything(rank: int, folder: str) -> dict[str, Any]:
    """All of the above for each optimizer."""
    told: dict[str, Any] = {}
    for optimizer in KINDS:
        place = f"{folder}/{optimizer.replace(' ', '-')}"
        Path(place).mkdir(exist_ok=True)
        with fewer(1) as takes_part:
            if takes_part:
                told[f"one {optimizer}"] = on_one(optimizer, place)
        with fewer(2) as takes_part:
            if takes_part:
                told[f"two {optimizer}"] = on_two(optimizer, place)
        pass_on(optimizer, place)
        with fewer(1) as takes_part:
            if takes_part:
                told[f"goes on {optimizer}"] = goes_on(optimizer, place)
    return told | {"refused": refused()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and what each rank found."""
    folder = tmp_path_factory.mktemp("narrow")
    return folder, results(3, everything, str(folder))


Found = tuple[Path, list[dict[str, Any]]]
each = pytest.mark.parametrize("optimizer", KINDS)


# --- tests -----------------------------------------------------------------------------------------------------------


@each
def test_shards_hold_moments_in_the_formats_of_one_process(optimizer: str, found: Found) -> None:
    """But for large vectors, which have no rows."""
    one, two = (found[1][0][f"{size} {optimizer}"]["formats"] for size in ("one", "two"))
    differ = [number for number, (ours, theirs) in enumerate(zip(two, one, strict=True)) if ours != theirs]
    vectors = [number for number, p in enumerate(model().parameters()) if p.ndim == 1 and is_narrow(p, "8bit")]
    assert len(vectors) == 1
    assert differ == (vectors if optimizer.endswith("8bit") else [])
    narrow = "bfloat16" if optimizer.endswith("bf16") else "int8/float32"
    assert sum(narrow in formats for formats in two) == (4 if optimizer.endswith("8bit") else 5)


@each
def test_a_run_on_shards_goes_on_with_the_same_bits(optimizer: str, found: Found) -> None:
    for rank in found[1][:2]:
        told = rank[f"two {optimizer}"]
        assert told["loaded"] == told["saved"]
        assert told["ends"][0] == told["ends"][1]
        assert told["ends"][0] != told["saved"]


@each
def test_a_state_is_the_same_on_any_number_of_shards(optimizer: str, found: Found) -> None:
    folder = found[0] / optimizer.replace(" ", "-")
    name = f"step-{SAVED_AT:08d}"
    first, last = (checkpoint.read(folder / number / name) for number in ("2", "2-again"))
    left_out = frozenset(OF_THE_CLOCK | OF_OTHER_RANKS)
    one, other = (dict(leaves(state, left_out)) for state in (first, last))
    assert one == other
    scales = [path for path in one if path.endswith(SCALE)]
    assert bool(scales) == optimizer.endswith("8bit")
    where = json.loads((folder / "3" / name / "where.json").read_text())
    for path in scales:
        pieces = where["patterns"][where["tensors"][path.removeprefix(".")]["pieces"]]
        assert len(pieces) == 3, "each rank has written those of its rows"


@each
def test_one_process_and_shards_go_on_with_each_others_moments(optimizer: str, found: Found) -> None:
    """To the bit where their blocks are the same; else rounded once more, as a step rounds them."""
    folder = found[0] / optimizer.replace(" ", "-")
    shapes = [p.shape for p in model().parameters()]
    for saved, read in (("one", "two-from-one"), ("two", "one-from-two")):
        before, after = load_file(folder / saved), load_file(folder / read)
        assert before.keys() == after.keys()
        exact = 0
        for name, moment in before.items():
            number, _, kind = name.partition(".")
            shape = shapes[int(number)]
            to_vector_of_one = len(shape) == 1 and shape[0] >= 4096 and read == "one-from-two"
            by_rows = len(shape) > 1 and shape[0] > 1 and shape.numel() >= 4096 and shape[1:].numel() % BLOCK > 0
            if kind != ROW_SQUARES and optimizer.endswith("8bit") and (by_rows or to_vector_of_one):
                assert not torch.equal(moment, after[name])
                root = torch.sqrt if kind != SQUARES else lambda numbers: numbers.sqrt().sqrt()
                largest = float(moment.abs().max())
                off = (root(moment.abs() / largest) - root(after[name].abs() / largest)).abs()
                assert float(off.max()) <= (0.5 / 127 if kind != SQUARES else 1 / 255) + 1e-6
            else:
                assert torch.equal(moment, after[name])
                exact += 1
        assert exact > 0
    rank = found[1][0]
    losses = rank[f"two {optimizer}"]["losses"]
    alone = [rank[f"goes on {optimizer}"]["loss"], rank[f"one {optimizer}"]["loss"]]
    assert losses == pytest.approx(alone, rel=1e-3)
    assert rank[f"goes on {optimizer}"]["formats"] == rank[f"one {optimizer}"]["formats"]


@each
def test_moments_are_seen_as_in_one_process(optimizer: str, found: Found) -> None:
    ours, theirs = (found[1][0][f"{size} {optimizer}"]["statistics"] for size in ("two", "one"))
    assert ours == pytest.approx(theirs, rel=2e-2, nan_ok=True)


@each
def test_a_bad_step_of_one_rank_changes_no_bit(optimizer: str, found: Found) -> None:
    for rank in found[1][:2]:
        before, after = rank[f"two {optimizer}"]["bad"]
        assert before == after


@each
def test_steps_from_a_snapshot_are_repeated_bit_for_bit(optimizer: str, found: Found) -> None:
    for rank in found[1][:2]:
        first, again, later, later_again = rank[f"two {optimizer}"]["back"]
        assert first == again
        assert later == later_again
        assert first != later


def test_weights_that_are_cut_between_columns_need_bf16(found: Found) -> None:
    told = found[1][0]["refused"]
    assert told.startswith("this is one of 3 processes, where optimizer.state_type = '8bit' is for weights that are ")
    assert told.endswith("set 'bf16'")
    for placements, yes in (([Shard(0)], True), ([Replicate(), Shard(0)], True), ([Shard(0), Shard(1)], False)):
        assert SpreadForm(None, tuple(placements), (4, 4)).by_rows is yes
