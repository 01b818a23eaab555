"""Muon's kernels, run program by program without a GPU, equal the same in torch; they are used where they fit.

A stand-in for Triton runs their source on tensors: its arithmetic, its indices and what is outside. Whether Triton
compiles it and what a GPU does with it is asserted by benchmarks/gpu_checks.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrain.engine import precision
from foretrain.engine.optim import muon as muon_module
from foretrain.engine.optim import muon_kernels
from foretrain.engine.optim.muon import Muon

RATE = 0.02
SHAPES = [(16, 16), (8, 24), (24, 8), (1, 12), (12, 1), (48, 16), (70, 130), (130, 70)]
PARTS = {(48, 16): 3, (130, 70): 2}


class Pointer:
    """Where a kernel's tensor begins, or places in it."""

    def __init__(self, tensor: Tensor, place: Any = 0) -> None:
        self.tensor, self.place = tensor, place

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.place + offset)

    def elements(self) -> Tensor:
        """All that lies behind the pointer, whatever the strides of the tensor that was handed in."""
        start, size = self.tensor.storage_offset(), self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        return self.tensor.as_strided((size - start,), (1,), start)


class Language(ModuleType):
    """As much of `triton.language` as the kernels use."""

    constexpr, float32, int64, bfloat16 = object, torch.float32, torch.int64, torch.bfloat16
    arange = staticmethod(torch.arange)
    where = staticmethod(torch.where)
    program: tuple[int, ...] = (0, 0, 0)

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self.program[axis])

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
        place = torch.as_tensor(pointer.place)
        return torch.where(
            torch.as_tensor(mask), pointer.elements()[torch.where(torch.as_tensor(mask), place, 0)], other
        )

    def store(self, pointer: Pointer, value: Tensor, mask: Tensor) -> None:
        elements = pointer.elements()
        elements[pointer.place[mask]] = value[mask].to(elements.dtype)


LANGUAGE = Language("triton.language")


class Kernel:
    """A kernel that runs its programs one after the other."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.launches = function, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, num_warps: int, **settings: Any) -> None:
            assert num_warps in (1, 2, 4, 8)
            self.launches += 1
            told = [Pointer(value) if isinstance(value, Tensor) else value for value in values]
            for program in itertools.product(*map(range, grid)):
                LANGUAGE.program = program
                self.function(*told, **settings)

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The real source of the kernels, in use on the CPU."""
    triton = ModuleType("triton")
    triton.jit, triton.language = Kernel, LANGUAGE  # type: ignore[attr-defined]
    source = Path(muon_kernels.__file__).with_name("kernels.py")
    spec = importlib.util.spec_from_file_location("kernels_on_the_cpu", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as loading:  # torch must not find the stand-in
        loading.setitem(sys.modules, "triton", triton)
        loading.setitem(sys.modules, "triton.language", LANGUAGE)
        spec.loader.exec_module(module)
    monkeypatch.setattr(muon_kernels, "_kernels", lambda: module)
    monkeypatch.setattr(muon_kernels, "_available", lambda device: True)
    monkeypatch.setattr(precision, "cpu_has_bf16_products", lambda: False)
    return module


def made(seed: int = 0, **settings: Any) -> tuple[list[nn.Parameter], Muon]:
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in SHAPES for _ in range(2)]
    parts = {p: PARTS[tuple(p.shape)] for p in params if tuple(p.shape) in PARTS}
    return params, Muon([{"params": params}], parts=parts, **{"lr": RATE, **settings})


def both(**settings: Any) -> tuple[tuple[list[nn.Parameter], Muon], tuple[list[nn.Parameter], Muon]]:
    """One optimizer with kernels, one without."""
    one, other = made(**settings), made(**settings)
    other[1]._kernels_allowed = False
    return one, other


def set_gradients(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = factor * torch.randn(p.shape, generator=generator)


def assert_equal(one: tuple[list[nn.Parameter], Muon], other: tuple[list[nn.Parameter], Muon]) -> None:
    for p, q in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
        mine, theirs = one[1].state[p], other[1].state[q]
        assert mine.keys() == theirs.keys() == {"momentum_buffer"} | ({"row_squares"} if one[1].row_beta2 else set())
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("row_beta2", [0.0, 0.9])
def test_the_kernels_equal_torch(kernels: ModuleType, nesterov: bool, scale: str, row_beta2: float) -> None:
    one, other = both(nesterov=nesterov, scale=scale, momentum=0.9, row_beta2=row_beta2)
    for step in range(4):
        for params, muon in (one, other):
            set_gradients(params, step)
            muon.step()
    assert_equal(one, other)
    assert kernels.muon_momentum.launches == kernels.muon_weights.launches == 4 * len(one[0])


@pytest.mark.parametrize("rate", [RATE, torch.tensor(RATE)])
def test_scaled_and_checked_gradients_equal_torchs(kernels: ModuleType, rate: Any) -> None:
    one, other = both(lr=rate)
    for step in range(4):
        for params, muon in (one, other):
            set_gradients(params, step, factor=8.0)
            muon.grad_scale, muon.found_inf = torch.tensor(8.0), torch.tensor(0.0)
            muon.step()
    assert_equal(one, other)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_bad_step_changes_no_bit(kernels: ModuleType, bad: float, nesterov: bool) -> None:
    params, muon = made(nesterov=nesterov, row_beta2=0.9)

    def values() -> list[Tensor]:
        return [value for p in params for value in (p.detach(), *muon.state[p].values())]

    set_gradients(params, 0)
    muon.step()
    before = [value.clone() for value in values()]
    set_gradients(params, 1)
    for p in params:
        p.grad.view(-1)[0] = bad
    muon.found_inf = torch.tensor(1.0)
    muon.step()
    assert len(before) == 3 * len(params)
    assert all(torch.equal(a, b) for a, b in zip(before, values(), strict=True))


def test_one_iteration_for_each_shape_of_parts(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = muon_module.orthogonalize
    monkeypatch.setattr(muon_module, "orthogonalize", lambda batch: (seen.append(tuple(batch.shape)), plain(batch))[1])
    params, muon = made()
    set_gradients(params, 0)
    muon.step()
    assert sorted(seen) == sorted(
        [(8, 16, 16), (2, 8, 24), (2, 24, 8), (2, 1, 12), (2, 12, 1), (2, 70, 130), (4, 65, 70)]
    )


def test_gradients_may_have_any_strides(kernels: ModuleType) -> None:
    one, other = both()
    for params, muon in (one, other):
        set_gradients(params, 0)
        for p in params:
            p.grad = p.grad.mT.contiguous().mT
        muon.step()
    assert_equal(one, other)


def test_what_does_not_fit_goes_through_torch(kernels: ModuleType) -> None:
    in_pieces = nn.Parameter(torch.randn(6, 4).mT)
    halves = [nn.Parameter(torch.randn(4, 6).to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    for p in (in_pieces, *halves):
        p.grad = torch.randn_like(p)
        before = p.detach().clone()
        Muon([{"params": [p]}], lr=0.1).step()
        assert not torch.equal(p, before)
    large = nn.Parameter(torch.randn(64, 64))
    large.grad = torch.randn(64, 64)
    Muon([{"params": [large]}], state_type="bf16").step()
    assert kernels.muon_momentum.launches == kernels.muon_weights.launches == 0


def test_parameters_that_fit_and_others_of_their_shape_are_updated_beside_each_other(kernels: ModuleType) -> None:
    one, other = both()
    for params, muon in (one, other):
        set_gradients(params, 0)
        params[0].data = params[0].data.mT.contiguous().mT
        muon.step()
    assert_equal(one, other)
    assert kernels.muon_weights.launches == len(one[0]) - 1


def test_a_cpu_has_no_kernels() -> None:
    params, _ = made()
    set_gradients(params, 0)
    assert not muon_kernels.fit(params[0], torch.zeros_like(params[0]))


def test_without_triton_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "foretrain.engine.optim.kernels", raising=False)
    muon_kernels._kernels.cache_clear()
    try:
        assert not muon_kernels._available(torch.device("cuda"))
    finally:
        muon_kernels._kernels.cache_clear()
