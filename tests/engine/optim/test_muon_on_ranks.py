"""Muon on four gloo ranks: each matrix is orthogonalised once, by its owner, and steps are those of one process.

All of it happens in one start; tests read what the ranks found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gloo import results
from tests.ranked import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain.engine.optim import muon, muon_parts
from foretrain.engine.optim.muon import Muon
from foretrain.engine.optim.muon_owners import Owners, rows_of, shared_out
from foretrain.engine.optim.muon_parts import MuonOnParts

pytestmark = pytest.mark.xdist_group("muon on ranks")  # what is below is made once

Found = dict[str, Any]
SHAPES = [(33, 5), (96, 32), (33, 33), (1, 7), (96, 32), (80, 65), (3, 9)]
"""Rows that do not divide by four, fewer rows than ranks, two of one shape, one too large for small ones."""
FUSED = {1: 3, 4: 3}
"""How many matrices are one, of which ones."""
ORTHOGONALISED = 3 * (len(SHAPES) + sum(FUSED.values()) - len(FUSED)) - 1
"""How many matrices three steps orthogonalise, which leave out one."""
CASES: dict[str, Found] = {
    "usual": {},
    "no nesterov": {"nesterov": False},
    "as AdamW": {"scale": "match_rms_adamw", "lr": torch.tensor(0.03)},
    "narrow": {"state_type": "bf16"},
    "rows": {"row_beta2": 0.9},
}
LAYOUTS = ("shards", "copies", "columns", "both")


def layout(name: str) -> tuple[DeviceMesh, list[Any]]:
    if name in ("shards", "columns"):
        return init_device_mesh("cpu", (4,)), [Shard(0 if name == "shards" else 1)]
    return init_device_mesh("cpu", (2, 2)), [Replicate() if name == "copies" else Shard(1), Shard(0)]


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Operations(TorchDispatchMode):
    """Counts operations between processes, and reads of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" or name in ("_local_scalar_dense", "all_gather_into_tensor"):
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def steps(kind: type[Muon], params: list[Tensor], gradients: list[list[Tensor]], settings: Found) -> Muon:
    """Three steps, the second of which is bad, and the last of which leaves out a matrix."""
    parts = {params[number]: count for number, count in FUSED.items()}
    made = kind([{"params": params}], parts=parts, **{"lr": 0.03, **settings})
    made.grad_scale = torch.tensor(2.0)
    for step, of_step in enumerate(gradients):
        for p, gradient in zip(params, of_step, strict=True):
            p.grad = None if step == 2 and p is params[0] else gradient
        made.found_inf = torch.tensor(float(step == 1))
        made.step()
    return made


def differences(mesh: DeviceMesh, placements: list[Any], settings: Found) -> Found:
    """How far weights are from those of one process, of the length of their way, and how many matrices were
    orthogonalised here."""
    counts: list[int] = []
    plain = muon.orthogonalize

    def counted(matrices: Tensor) -> Tensor:
        counts.append(len(matrices))
        return plain(matrices)

    def spread(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, placements)

    alone = [nn.Parameter(p) for p in drawn(0)]
    one = steps(Muon, alone, [drawn(seed) for seed in (1, 2, 3)], settings)
    ours = [nn.Parameter(spread(p)) for p in drawn(0)]
    gradients = [[spread(one) for one in drawn(seed)] for seed in (1, 2, 3)]
    with pytest.MonkeyPatch.context() as patch, Operations() as seen:
        patch.setattr(muon_parts, "orthogonalize", counted)
        here = steps(MuonOnParts, ours, gradients, settings)
    rows = [
        float((whole(here.state[p]["row_squares"]) / one.state[q]["row_squares"] - 1).abs().max())
        for p, q in zip(ours, alone, strict=True)
        if settings.get("row_beta2")
    ]
    far = [
        float((whole(own) - other).norm() / (other - begun).norm())
        for own, other, begun in zip(ours, alone, drawn(0), strict=True)
    ]
    return {"far": max(far), "rows": rows, "orthogonalised": sum(counts), "calls": seen.calls}


def on_ranks(rank: int) -> Found:
    found: Found = {}
    for name in LAYOUTS:
        mesh, placements = layout(name)
        for case, settings in CASES.items():
            if name == "shards" or case in ("usual", "rows"):
                found[f"{name}, {case}"] = differences(mesh, placements, settings)
    with pytest.MonkeyPatch.context() as patch:
        for module in (muon, muon_parts):
            patch.setattr(module, "iteration_type", lambda *_: "bf16")
        found["bf16"] = differences(*layout("shards"), {})
        found["bf16, rows"] = differences(*layout("shards"), {"row_beta2": 0.9})
    return found


@pytest.fixture(scope="module")
def found() -> list[Found]:
    """What each of four ranks found."""
    return results(4, on_ranks)


@pytest.mark.parametrize(
    "case",
    [
        *(f"shards, {case}" for case in CASES),
        *(f"{name}, {case}" for name in LAYOUTS[1:] for case in ("usual", "rows")),
    ],
)
def test_steps_are_those_of_one_process(case: str, found: list[Found]) -> None:
    for rank in found:
        assert rank[case]["far"] < (5e-3 if "narrow" in case else 1e-5)


def test_an_iteration_in_bf16_is_that_of_one_process(found: list[Found]) -> None:
    for case in ("bf16", "bf16, rows"):
        assert all(rank[case]["far"] < 2e-2 for rank in found)
        assert found[0][case]["calls"] == {"alltoall_base_": 6}


@pytest.mark.parametrize("case", [f"{name}, rows" for name in LAYOUTS])
def test_mean_squares_of_rows_are_those_of_one_process(case: str, found: list[Found]) -> None:
    for rank in found:
        assert len(rank[case]["rows"]) == len(SHAPES)
        assert max(rank[case]["rows"]) < 1e-4


def test_each_matrix_is_orthogonalised_once_with_two_operations_per_step(found: list[Found]) -> None:
    """Copies of shards, of which there are two, do so each for themselves."""
    for case, copies in (("shards, usual", 1), ("shards, rows", 1), ("copies, usual", 2), ("copies, rows", 2)):
        assert sum(rank[case]["orthogonalised"] for rank in found) == copies * ORTHOGONALISED
        assert max(rank[case]["orthogonalised"] for rank in found) < copies * ORTHOGONALISED
        assert all(rank[case]["calls"] == {"alltoall_base_": 2 * 3} for rank in found)


def test_matrices_that_are_cut_in_another_way_are_gathered_by_all(found: list[Found]) -> None:
    for rank in found:
        for case in ("columns, usual", "both, usual"):
            assert rank[case]["orthogonalised"] == ORTHOGONALISED
            assert "alltoall_base_" not in rank[case]["calls"]


def test_matrices_are_shared_out_by_what_they_cost() -> None:
    assert shared_out([(4, 4)] * 4, 2) == [0, 1, 0, 1]
    assert shared_out([(2, 2), (8, 8), (4, 4), (4, 2)], 2) == [1, 0, 1, 1]
    assert shared_out([(4, 4)], 3) == [0]
    assert shared_out([], 2) == []


@pytest.mark.parametrize(("rows", "size"), [(33, 4), (3, 4), (1, 4), (8, 4), (5, 3), (7, 1)])
def test_rows_are_cut_as_torch_cuts_them(rows: int, size: int) -> None:
    pieces = [len(piece) for piece in torch.zeros(rows, 2).chunk(size)]
    assert [rows_of(place, rows, size) for place in range(size)] == pieces + [0] * (size - len(pieces))


def test_one_process_keeps_its_matrices() -> None:
    matrices = drawn(4)
    alone = Owners(None, 0, 1, SHAPES)
    gathered = alone.gather(matrices)
    back = alone.scatter(gathered, matrices[0])
    assert all(torch.equal(one, other) for one, other in zip(back, matrices, strict=True))
    assert [tuple(one.shape) for one in gathered] == [SHAPES[number] for number in alone.own]
