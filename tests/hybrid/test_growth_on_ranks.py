"""Growth on two gloo ranks: replicas and shards grow as one process does, go back as one, and are resumed as one.

All functions that run on ranks are called in one start; tests read what they found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import ranked
from tests.gloo import fewer, results
from torch import nn

from foretrain import HybridTrainer, supervised
from foretrain.config import from_mapping
from foretrain.engine.depth import copy_state
from foretrain.engine.engine import Engine
from foretrain.errors import RanksError
from foretrain.events import Grown
from foretrain.hybrid import growth as growths
from foretrain.hybrid import new_blocks

pytestmark = pytest.mark.xdist_group("growth on ranks")  # what is below is made once

KINDS = ("ddp", "fsdp2")
GROWS_AT, END = 27, 40
IN_MOVE, AFTER_MOVE, IN_TRIAL = 21, 27, 30
"""Steps of a run that also predicts: a leap comes first, then it grows."""
SETTINGS = {
    "max_steps": END,
    "growth.layers": 1,
    "growth.at": GROWS_AT / END,
    "optimizer.learning_rate": 3e-3,
    "evaluation.ema_decay": 0.9,
    "evaluation.interval": 0,
    "hybrid.warmup_steps": 5,
    "hybrid.full_steps": 5,
    "checkpoint.interval": 3,
    "checkpoint.keep": 50,
    "health.interval": 0,
    "dropout": 0.1,
}
UNDONE = -10.0
"""What `_RETURNED` is where no loss has returned."""


class Run:
    """A trainer, and what it says of growth."""

    def __init__(self, kind: str, **more: Any) -> None:
        given = {name.replace("__", "."): value for name, value in more.items()}
        self.trainer = ranked.trainer(kind, True, {**SETTINGS, **given})
        self.verdicts: list[tuple[str, int, str]] = []
        self.trainer.bus.subscribe(self._hear)

    def _hear(self, event: Any) -> None:
        if isinstance(event, Grown):
            self.verdicts.append((event.verdict, event.step, event.reason))

    @property
    def growth(self) -> growths.Growth:
        assert self.trainer.growth is not None
        return self.trainer.growth

    def to(self, step: int) -> Run:
        while self.trainer.global_step < step:
            self.trainer.step(ranked.own_rows(ranked.words(self.trainer.position)))
        return self

    def follow(self) -> None:
        """What stands before the next step."""
        self.growth.follow(ranked.own_rows(ranked.words(self.trainer.position)))

    def bits(self) -> list[Any]:
        """Of weights, moments and averages, whole, and of this rank's random numbers."""
        engine = self.trainer.engine
        states = [engine.optimizer.state.get(p, {}) for p in self.trainer.model.parameters()]
        moments = [value for state in states for value in state.values()]
        averages = engine.average.state_dict()["average"]  # type: ignore[union-attr]
        return [ranked.digest(self.trainer), *map(ranked.bits_of, (moments, averages, [torch.get_rng_state()]))]


class Rows:
    """A rank's rows of every batch."""

    position = 0

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield ranked.own_rows(ranked.words(self.position))
            self.position += 1


# --- what ranks do ---------------------------------------------------------------------------------------------------


def grown(kind: str) -> dict[str, Any]:
    """A run that grows, and keeps that."""
    run = Run(kind, dropout=0.0)
    told = ranked.run(run.trainer, END, ranked.words)
    moves = run.trainer.summary()["growth"]["moves"]
    return {name: told[name] for name in ("phases", "position", "loss", "hash")} | {
        "verdicts": run.verdicts,
        "layers": run.growth.depth.layers,
        "losses": [[move["before"], move["loss"]] for move in moves],
        "updates": run.trainer.engine.average.updates,  # type: ignore[union-attr]
    }


def watching(kind: str) -> Run:
    """A run that predicts nothing so far, and is about to grow."""
    return Run(kind, hybrid__warmup_steps=1000).to(GROWS_AT)


def undone(kind: str) -> dict[str, Any]:
    """The bits before a growth that does not return, and after it."""
    run = watching(kind)
    before = run.bits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growths, "_RETURNED", UNDONE)
        run.to(GROWS_AT + 8)
        grown = ranked.digest(run.trainer)
        run.follow()
    after, position = run.bits(), run.trainer.position
    run.to(GROWS_AT + 3)
    return {
        "bits": [before, after],
        "grown": grown,
        "position": position,
        "verdicts": run.verdicts,
        "layers": run.growth.depth.layers,
        "end": run.bits()[:3],
    }


def short_of_memory(kind: str) -> dict[str, Any]:
    """Memory runs out on rank 1 when it has copied the half of what it needs; the others have all of it."""

    def short(optimizer: Any, model: nn.Module, pairs: Any) -> None:
        if ranked.ranks()[0] == 1:
            copy_state(optimizer, model, pairs[:3])
            raise torch.OutOfMemoryError("CUDA out of memory")
        copy_state(optimizer, model, pairs)

    return _short(kind, new_blocks, "copy_state", short)


def short_of_buckets(kind: str) -> dict[str, Any]:
    """It runs out there when all is copied, and others are to be trained."""
    replicas = nn.parallel.DistributedDataParallel
    place, name = (replicas, "_ddp_init_helper") if kind == "ddp" else (Engine, "cover_trained")
    real, asked = getattr(place, name), list[Any]()

    def short(own: Any, *arguments: Any) -> None:
        asked.append(own)
        if ranked.ranks()[0] == 1 and len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(own, *arguments)

    return _short(kind, place, name, short)


def _short(kind: str, place: Any, name: str, short: Any) -> dict[str, Any]:
    run = watching(kind)
    before = run.bits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, short)
        run.follow()
    after = run.bits()
    run.to(GROWS_AT + 3)
    return {
        "bits": [before, after],
        "verdicts": run.verdicts,
        "layers": run.growth.depth.layers,
        "end": run.bits()[:3],
    }


def resumed(kind: str, folder: str) -> dict[str, Any]:
    """A run in a folder, and what goes on from its files: in a leap, before it grows, and while that is on trial."""
    whole = Run(kind)
    whole.trainer.fit(Rows(), out=f"{folder}/{kind}", progress=False)
    told: dict[str, Any] = {"whole": [whole.bits(), whole.verdicts]}
    for step in (IN_MOVE, AFTER_MOVE, IN_TRIAL):
        rest = Run(kind)
        load(rest, f"{folder}/{kind}", step)
        rest.to(END)
        told[str(step)] = [rest.bits(), rest.verdicts]
    return told


def load(run: Run, folder: str, step: int) -> None:
    """The state of a checkpoint, as this world needs it."""
    saved = Path(folder, "checkpoints", f"step-{step:08d}")
    run.trainer.load_state_dict(ranked.store_of(run.trainer, str(saved.parent)).read(saved))


def apart(kind: str) -> str:
    """Ranks that were told other moments."""
    run = Run(kind, growth__at=0.5 + 0.1 * ranked.ranks()[0])
    try:
        run.to(GROWS_AT)
    except RanksError as error:
        return str(error)
    return ""


def frozen(kind: str) -> dict[str, Any]:
    """A layer is frozen in mid-run, and trained again. Replicas have a hook of their own for gradients."""
    model, buckets = ranked.wrapped(ranked.curve(), kind), list[int]()

    def mean(state: Any, bucket: Any) -> Any:
        buckets.append(bucket.index())
        sums = torch.distributed.all_reduce(bucket.buffer().div_(ranked.ranks()[1]), async_op=True)
        return sums.get_future().then(lambda done: done.value()[0])  # type: ignore[union-attr]

    mean.__annotations__ = {}  # torch knows its own types only, and no names of them
    if kind == "ddp":
        model.register_comm_hook(None, mean)  # type: ignore[operator]
    layer = (model.module if kind == "ddp" else model)[2]  # type: ignore[index]
    config = from_mapping({**ranked.SETTINGS, "max_steps": 100, "hybrid.mode": "off", "optimizer.type": "adam"})
    trainer, seen = HybridTrainer(model, loss_fn=supervised(nn.functional.mse_loss), config=config), []
    for step in range(15):
        if step in (5, 10):
            layer.requires_grad_(step == 10)
        before = len(buckets)
        trainer.step(ranked.own_rows(ranked.points(0)))
        seen.append(len(buckets) > before)
    weights = [float(ranked.whole(p).double().norm()) for p in model.parameters()]
    return {"weights": weights, "hash": ranked.digest(trainer), "hooked": all(seen)}


CHECKS = (grown, undone, short_of_memory, short_of_buckets, apart, frozen)


def everything(rank: int, folder: str) -> dict[str, Any]:
    """All of the above on both kinds; then one process goes on with what two saved."""
    told: dict[str, Any] = {f"{check.__name__} {kind}": check(kind) for kind in KINDS for check in CHECKS}
    told |= {f"resumed {kind}": resumed(kind, folder) for kind in KINDS}
    with fewer(1) as goes_on:
        if goes_on:
            told |= {f"goes on {kind}": goes_on_alone(kind, folder) for kind in KINDS}
    return told


def goes_on_alone(kind: str, folder: str) -> dict[str, Any]:
    """What two ranks saved while a growth was on trial, gone on with to the end, and with a growth that is undone."""
    kept, back, then = Run("one"), Run("one"), Run("one")
    name = f"{folder}/{kind}"
    load(kept, name, IN_TRIAL)
    kept.to(END)
    load(then, name, AFTER_MOVE)
    load(back, name, IN_TRIAL)
    back.to(AFTER_MOVE + 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growths, "_RETURNED", UNDONE)
        back.follow()
    return {
        "kept": kept.verdicts,
        "bits": [then.bits()[:3], back.bits()[:3]],
        "verdicts": back.verdicts,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return results(2, everything, str(tmp_path_factory.mktemp("growth")))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process finds."""
    return {check.__name__: check("one") for check in (grown, frozen)}


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_grow_as_one_process_does(kind: str, found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    ours, other, theirs = found[0][f"grown {kind}"], found[1][f"grown {kind}"], alone["grown"]
    assert ours == other
    assert [list(verdict) for verdict in theirs["verdicts"]] == ours["verdicts"]
    assert [verdict[:2] for verdict in ours["verdicts"]] == [["made", AFTER_MOVE], ["kept", AFTER_MOVE + 8]]
    for name in ("phases", "position", "layers", "updates"):
        assert ours[name] == theirs[name]
    assert ours["layers"] == 2
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    for one, another in zip(ours["losses"], theirs["losses"], strict=True):
        assert one == pytest.approx(another, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_growth_that_does_not_return_leaves_no_bit_on_any_rank(kind: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        told = rank[f"undone {kind}"]
        before, after = told["bits"]
        assert before == after
        assert told["grown"] != before[0]
        assert [verdict for verdict, *_ in told["verdicts"]] == ["made", "undone"]
        assert (told["layers"], told["position"]) == (1, GROWS_AT + 8)
    ours, other = (rank[f"undone {kind}"]["end"] for rank in found)
    assert ours == other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("short", ["short_of_memory", "short_of_buckets"])
def test_where_one_rank_has_no_memory_all_go_on_shallow(kind: str, short: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        told = rank[f"{short} {kind}"]
        before, after = told["bits"]
        assert before == after
        assert told["verdicts"] == [["refused", GROWS_AT, "there is not enough memory for it on rank 1"]]
        assert told["layers"] == 1
    ours, other = (rank[f"{short} {kind}"]["end"] for rank in found)
    assert ours == other


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_around_the_moment_of_growth_with_the_same_bits(kind: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        told = rank[f"resumed {kind}"]
        bits, verdicts = told["whole"]
        assert [verdict for verdict, *_ in verdicts] == ["made", "kept"]
        assert told[str(IN_MOVE)] == told[str(AFTER_MOVE)] == [bits, verdicts]
        assert told[str(IN_TRIAL)] == [bits, verdicts[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_judges_what_two_have_grown(kind: str, found: list[dict[str, Any]]) -> None:
    told, verdicts = found[0][f"goes on {kind}"], found[0][f"resumed {kind}"]["whole"][1]
    assert told["kept"] == verdicts[1:]
    assert [verdict for verdict, *_ in told["verdicts"]] == ["undone"]
    before, back = told["bits"]
    assert before == back


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_were_told_other_moments_stop_before_they_grow(kind: str, found: list[dict[str, Any]]) -> None:
    assert all("ranks disagree on growth.steps" in rank[f"apart {kind}"] for rank in found)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_frozen_and_trained_again_on_ranks(
    kind: str, found: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    ours, other, theirs = found[0][f"frozen {kind}"], found[1][f"frozen {kind}"], alone["frozen"]
    assert ours == other
    assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-5)
    assert ours["hooked"] == (kind == "ddp")
