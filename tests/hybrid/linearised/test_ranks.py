"""Two gloo ranks leap as one process does on the batch of both: same phases, same rows, same losses, and replicas whose
bits never part; what goes wrong on one of them is refused on both.

Everything is in fp64: there the only difference, the order of sums, stays small for as long as a chain is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hybrid.linearised.problems import Operator, derivative
from tests.ranked import Found, digest, ranks, start, wrapped
from tests.worlds import QUICK
from torch import Tensor, nn

from foretrain import HybridTrainer
from foretrain.config import from_mapping
from foretrain.events import Event, Moved, Notice
from foretrain.hybrid.linearised import finding
from foretrain.hybrid.linearised.leaps import LinearisedLeaps
from foretrain.hybrid.linearised.lookout import Lookout
from foretrain.hybrid.linearised.of_ranks import LookoutOfRanks
from foretrain.hybrid.moves.linearised import LinearisedKind

pytestmark = pytest.mark.xdist_group("leaps on ranks")  # what is below is made once

SETTINGS: dict[str, Any] = {**QUICK, "device": "cpu", "optimizer.type": "adam", "optimizer.learning_rate": 0.01}
state: dict[str, str] = {"bad": ""}
"""What goes wrong in the residuals of this rank now."""


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def network(inputs: int = 1, width: int = 8, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers).double()


class Coefficient(nn.Module):
    """A network on sines, whose frequencies it holds as a buffer, and an unknown coefficient."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.coefficient = network(4), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.register_buffer("frequencies", torch.arange(1, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.u(torch.sin(x * self.frequencies))
        return found


def inside(model: nn.Module) -> Any:
    return getattr(model, "module", model)


def equation(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    x, edge = batch
    x = x.detach().requires_grad_()
    return {"equation": derivative(model(x), x) - torch.cos(3 * x), "edge": model(edge) - torch.sin(3 * edge) / 3}


def coefficient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    x, u = batch[0].detach().requires_grad_(), torch.exp(2 * batch[0]) / 4
    found = model(x)
    return {"equation": derivative(found, x) - inside(model).coefficient * found, "data": found - u}


def curve(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    found: Tensor = model(batch[0]) - torch.sin(4 * batch[0])
    if state["bad"] == "rows":  # they are no numbers, though the residual is one
        found = found + (found[:, :1] * 0).sqrt() * 0
    return found


def one_by_one(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Taps cannot see what is called through torch.func."""
    found: Tensor = torch.func.vmap(lambda x: model(x.view(1, 1)).squeeze())(batch[0][:, 0]) - torch.sin(
        4 * batch[0][:, 0]
    )
    return found.unsqueeze(1)


def here_one_by_one(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """On the second rank only."""
    return (one_by_one if ranks()[0] else curve)(model, batch)


def table(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    places = torch.linspace(0, 1, 18, dtype=torch.float64).view(-1, 1)
    found: Tensor = model(batch[0], places)
    return found - torch.sin(batch[0].sum(1, keepdim=True) + places.T)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[Tensor, ...], int]] = {
    "few rows of many": (lambda: network(width=20), equation, (drawn(160, 1), drawn(6, 1)), 24),
    "more rows than weights": (lambda: network(width=5), equation, (drawn(48, 1), drawn(4, 1)), 400),
    "fewer rows than weights": (lambda: network(width=20), curve, (drawn(20, 1),), 400),
    "an unknown coefficient": (Coefficient, coefficient, (drawn(20, 1), drawn(20, 1)), 400),
    "classes": (lambda: network(4, 8, 3), nn.CrossEntropyLoss(), (drawn(20, 4), drawn(20, 4)[:, :3].argmax(1)), 96),
    "rows one by one": (network, one_by_one, (drawn(12, 1),), 400),
}
ALONE = {**CASES, "rows one by one on one rank": CASES["rows one by one"]}
NARROW = {"fewer rows than weights": False, "more rows than weights": True, "an unknown coefficient": False}
"""Whether there are fewer weights than rows."""
SHARED = {**CASES, "rows one by one on one rank": (network, here_one_by_one, (drawn(12, 1),), 400)}


class Run:
    """A run on this rank's rows, and what was seen of it."""

    def __init__(self, make: Callable[[], nn.Module], function: Any, batch: tuple[Tensor, ...], rows: int, **more: Any):
        model = wrapped(make().double(), "ddp" if ranks()[1] > 1 else "one")
        config = from_mapping({**SETTINGS, "max_steps": 45, "hybrid.linear_rows": rows, **more})
        criterion = isinstance(function, nn.Module)
        given = {"loss_fn": function} if criterion else {"residuals": function}
        self.trainer = HybridTrainer(model, config=config, **given)
        self.events: list[Event] = []
        self.trainer.bus.subscribe(self.events.append)
        self.batch = batch
        self.phases, self.losses, self.hashes, self.rows = "", [], [], []

    def step(self, batch: tuple[Tensor, ...] | None = None) -> None:
        rank, size = ranks()
        whole = self.batch if batch is None else batch
        mine = tuple(some[len(some) * rank // size : len(some) * (rank + 1) // size] for some in whole)
        result = self.trainer.step(mine)
        self.phases += result.phase[0]
        self.losses.append(result.loss)
        self.hashes.append(digest(self.trainer))
        self.rows.append(self.leaps.rows)

    def to_the_end(self) -> Run:
        while self.trainer.global_step < self.trainer.config.max_steps or self.trainer.judging:
            self.step()
        return self

    def to_a_chain(self, leaps: int) -> Run:
        while not (self.trainer.hybrid.chaining and self.leaps.leaps >= leaps):
            self.step()
        return self

    @property
    def leaps(self) -> LinearisedLeaps:
        return leaps_of(self.trainer)

    def told(self) -> Found:
        return {
            "phases": self.phases,
            "losses": [loss for loss, phase in zip(self.losses, self.phases, strict=True) if phase == "p"],
            "rows": self.rows,
            "hashes": self.hashes,
            "moves": [[event.verdict, event.horizon] for event in self.events if isinstance(event, Moved)],
            "notices": [event.message for event in self.events if isinstance(event, Notice)],
            "why": self.leaps.failure,
        }


def leaps_of(trainer: HybridTrainer) -> LinearisedLeaps:
    return next(kind.leaps for kind in trainer.policy.kinds if isinstance(kind, LinearisedKind))


def problem(name: str) -> tuple[Any, ...]:
    return (SHARED if ranks()[1] > 1 else ALONE)[name]


# --- what ranks do ---------------------------------------------------------------------------------------------------


def runs() -> Found:
    return {name: Run(*problem(name)).to_the_end().told() for name in SHARED}


def a_table() -> Found:
    """Rows are whole diagonals of each rank's part of the table."""
    run = Run(Operator, table, (drawn(24, 3),), 36, max_steps=60).to_the_end()
    return run.told() | {"loss": run.trainer.engine.probe((run.batch[0][: 24 // ranks()[1]],))}


def other_factors() -> Found:
    """Rows of the second rank are held in another form: both write theirs out."""
    plain = finding.pair_work
    if ranks()[0]:
        finding.pair_work = lambda uses, out, into: (plain(uses, out, into)[0], False)  # type: ignore[assignment]
    try:
        return Run(*problem("few rows of many"), max_steps=20).to_the_end().told()
    finally:
        finding.pair_work = plain


def taken_back() -> Found:
    """A chain that is undone after some leaps."""
    run = Run(*problem("few rows of many"))
    before = ""
    while not run.trainer.hybrid.chaining:
        before = bits(run.trainer)
        run.step()
    run.to_a_chain(4)
    during = bits(run.trainer)
    run.trainer.policy.abandon("for a test")
    after = bits(run.trainer)
    run.to_the_end()
    return {"before": before, "during": during, "after": after, "end": run.hashes[-1]}


def bits(trainer: HybridTrainer) -> str:
    """Of weights and moments."""
    moments = [float(value.double().sum()) for each in trainer.optimizer.state.values() for value in each.values()]
    return f"{digest(trainer)} {moments}"


def goes_wrong() -> Found:
    """In the middle of a chain the rows of the second rank are no numbers, its points are, or its look fails."""
    found = {}
    for what in ("rows", "points", "raises"):
        run = Run(*problem("fewer rows than weights")).to_a_chain(3)
        hurt = torch.cat([run.batch[0][:10], run.batch[0][10:] * torch.nan]) if what == "points" else run.batch[0]
        look = LookoutOfRanks.outputs
        if ranks()[0]:
            state["bad"] = what
            if what == "raises":
                LookoutOfRanks.outputs = fails  # type: ignore[method-assign]
        try:
            if what == "rows":  # those of the next leap were taken with the last trial
                run.step()
            before = digest(run.trainer)
            run.step((hurt,))
        finally:
            state["bad"], LookoutOfRanks.outputs = "", look  # type: ignore[method-assign]
        then = digest(run.trainer)
        run.to_the_end()
        found[what] = run.told() | {"before": before, "then": then}
    return found


def fails(*given: Any, **options: Any) -> Any:
    raise ValueError("no such table")


def uneven() -> Found:
    """The second rank has a row more."""
    return Run(network, curve, (drawn(21, 1),), 400, max_steps=30).to_the_end().told()


def sent() -> Found:
    """What goes through torch.distributed in each leap and which of its trials were bent; and the buffers of a step."""
    return {name: sent_in(Run(*problem(name))) for name in NARROW}


def sent_in(run: Run) -> Found:
    calls, tries, told = Counter[str](), list[bool](), list[tuple[dict[str, int], list[bool]]]()
    leap, attempt, model = run.leaps.leap, run.leaps.lookout.attempt, run.trainer.model
    buffers: Any = model._sync_buffers

    def tried(look: Any, system: Any, trial: Any) -> Any:
        tries.append(trial.bent)
        return attempt(look, system, trial)

    def counted(batch: Any) -> Any:
        calls.clear()
        tries.clear()
        result = leap(batch)
        told.append((dict(calls), list(tries)))
        return result

    with listening(calls), pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.leaps, "leap", counted)
        patch.setattr(run.leaps.lookout, "attempt", tried)
        patch.setattr(model, "_sync_buffers", lambda: calls.update(["buffers"]) or buffers())
        run.to_a_chain(10)
        calls.clear()
        run.trainer.engine.full(tuple(some[:4] for some in run.batch))
    return {"leaps": told, "of a step": dict(calls)}


@contextmanager
def listening(calls: Counter[str]) -> Iterator[None]:
    """Count what goes through torch.distributed, by the name of the call."""
    names = ["all_reduce", "broadcast", "all_gather", "barrier"]
    before = {name: getattr(dist, name) for name in names}

    def of(name: str) -> Any:
        return lambda *given, **options: calls.update([name]) or before[name](*given, **options)

    for name in names:
        setattr(dist, name, of(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def example() -> Found:
    """The program of the page, with fewer points and steps."""
    page = (Path(__file__).parents[3] / "docs" / "science.md").read_text(encoding="utf-8")
    code = page.partition("## Several GPUs")[2].partition("```python\n")[2].partition("```")[0]
    for written, shorter in (("4096", "64"), ("max_steps=300", "max_steps=40"), ('out="runs/waves", ', "")):
        assert written in code
        code = code.replace(written, shorter)
    known: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        exec(code, known)  # noqa: S102
    trainer = known["trainer"]
    return {"moves": trainer.summary()["moves"], "hash": digest(trainer), "made": leaps_of(trainer).made}


CHECKS = (example, runs, a_table, other_factors, taken_back, goes_wrong, uneven, sent)


def on_ranks() -> Found:
    return {check.__name__: check() for check in CHECKS}


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two ranks found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return [rank["on_ranks"] for rank in start(__name__, ["on_ranks"], 2, folder)]


@pytest.mark.parametrize("name", SHARED)
def test_ranks_leap_as_one_process_does(name: str, found: list[Found]) -> None:
    """Sums in another order part the losses by some 1e-8 within tens of leaps, losses in fp32 by 1e-7: 1e-4 is far
    more, and far less than another choice of rows or another damping makes."""
    ours, theirs = found[0]["runs"][name], Run(*ALONE[name]).to_the_end().told()
    for same in ("phases", "moves", "notices"):
        assert ours[same] == theirs[same]
    assert ours["rows"] == theirs["rows"]
    assert ours["phases"].count("p") >= 5
    assert ours["losses"][:5] == pytest.approx(theirs["losses"][:5], rel=1e-6)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["losses"][-1] < 0.01 * ours["losses"][0]


def test_replicas_have_the_same_bits_after_every_leap(found: list[Found]) -> None:
    one, other = found
    for name in SHARED:
        assert one["runs"][name]["hashes"] == other["runs"][name]["hashes"]
        assert len(set(one["runs"][name]["hashes"])) > 5
        assert one["runs"][name]["losses"] == other["runs"][name]["losses"]
    assert one["a_table"] == other["a_table"]


def test_the_table_of_an_operator_network(found: list[Found]) -> None:
    ours = found[0]["a_table"]
    assert ours["moves"][0][0] == "kept"
    assert ours["losses"][-1] < 1e-2 * ours["losses"][0]
    assert ours["loss"] == pytest.approx(ours["losses"][-1], rel=0.5)


def test_rows_in_other_forms_are_written_out(found: list[Found]) -> None:
    ours, theirs = found[0]["other_factors"], Run(*ALONE["few rows of many"], max_steps=20).to_the_end().told()
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["hashes"] == found[1]["other_factors"]["hashes"]


def test_a_chain_is_undone_to_the_bit(found: list[Found]) -> None:
    for rank in found:
        ours = rank["taken_back"]
        assert ours["before"] == ours["after"] != ours["during"]
    assert found[0]["taken_back"] == found[1]["taken_back"]


@pytest.mark.parametrize("what", ["rows", "points"])
def test_rows_of_one_rank_that_are_no_numbers_are_refused_by_both(what: str, found: list[Found]) -> None:
    one, other = (rank["goes_wrong"][what] for rank in found)
    assert one["before"] == one["then"] == other["then"]
    assert one["hashes"] == other["hashes"]
    assert one["phases"] == other["phases"]
    assert one["moves"] == other["moves"]
    assert one["moves"][0][0] == "kept"


def test_residuals_that_fail_on_one_rank_end_the_leaps_of_both(found: list[Found]) -> None:
    one, other = (rank["goes_wrong"]["raises"] for rank in found)
    assert one["why"] == other["why"] == "the loss cannot be linearised (ValueError: no such table)"
    assert one["notices"] == other["notices"]
    assert one["notices"][0] == f"no linearised leaps are made: {one['why']}"
    assert one["hashes"] == other["hashes"]
    assert "p" not in one["phases"].partition("c")[2]


def test_ranks_with_unlike_numbers_of_rows_are_refused(found: list[Found]) -> None:
    one, other = (rank["uneven"] for rank in found)
    assert one["notices"] == other["notices"]
    which = "rank 1 has 11 x 1 of 'residuals', and rank 0 has not"
    why = f"ranks have different numbers of residuals ({which}); give each rank as many of each block"
    assert one["notices"][0] == f"no linearised leaps are made: {why}"
    assert one["hashes"] == other["hashes"]


def test_few_messages_are_sent_in_a_leap(found: list[Found]) -> None:
    """They meet for the look, for the problem and for each trial, and for outputs that show how it bends. Rows and
    their products are sent once, or products of weights are summed once; once more where a better type is needed."""
    for name, narrow in NARROW.items():
        for calls, bent in found[0]["sent"][name]["leaps"]:
            trials, bends = len(bent), sum(bent)
            gathers = 2 + 2 * trials + 2 * bends if narrow else 4 + trials + 2 * bends
            sums = 2 + trials + bends if narrow else 1 + trials + bends
            more = (calls["all_reduce"] - sums) if narrow else (calls["all_gather"] - gathers)
            assert more in (0, 1)
            anew = {"all_reduce" if narrow else "all_gather": more}
            assert calls == Counter({"all_gather": gathers, "all_reduce": sums}) + Counter(anew)
        assert len(found[0]["sent"][name]["leaps"]) >= 10
    assert found[0]["sent"]["an unknown coefficient"]["of a step"] == {"buffers": 1}


def test_the_program_of_the_page_leaps(found: list[Found]) -> None:
    one, other = (rank["example"] for rank in found)
    assert one == other
    assert one["made"] > 5
    assert one["moves"]["kept"] > 0


def test_one_process_looks_by_itself() -> None:
    assert type(Run(*ALONE["fewer rows than weights"]).leaps.lookout) is Lookout
