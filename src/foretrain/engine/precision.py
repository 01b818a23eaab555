"""Number formats: which one a device gets, and fp16's loss scale, kept on the device."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from foretrain.config import PrecisionConfig
from foretrain.errors import ConfigError
from foretrain.persist.stateful import Buffer, Stateful

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device a configuration asks for; an absent one is an error, never a silent fallback."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda", "mps")
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(f"device = {name!r} is not a device to train on; use auto, cpu, cuda, cuda:1 or mps")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device = {name!r}, but torch {torch.__version__} sees no CUDA GPU; use device = 'auto' or 'cpu', "
                "or run `foretrain doctor` to see why"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device = {name!r}, but there are only {torch.cuda.device_count()} CUDA GPUs")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device = {name!r}, but torch sees no Apple GPU; use device = 'auto' or 'cpu'")
    return device


def choose_precision(name: str, device: torch.device) -> str:
    """ "auto" becomes bf16 on a GPU that has it, else fp32."""
    if name == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return name


@cache
def cpu_has_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware. Where it must emulate that, fp32 is 2 to 16 times faster.

    Told by the CPU's features, not by the clock: a run that is resumed on the same machine gets the same answer.
    """
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (available and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True  # elsewhere oneDNN says yes only where there are instructions
    return bool(torch.cpu._is_avx512_bf16_supported())  # oneDNN also says yes where it emulates with AVX-512


class Precision(Stateful):
    """Autocast for the forward pass, and a loss scale that adapts without the host ever waiting for it."""

    saved = ("scale", "good_steps")
    scale: Buffer
    good_steps: Buffer

    def __init__(self, config: PrecisionConfig, device: torch.device, exact: bool = False) -> None:
        """exact: what is left to us is not rounded."""
        self.name = "fp32" if exact and config.type == "auto" else choose_precision(config.type, device)
        self.forward = self.name
        """Format of the forward pass at this moment."""
        self.predict = self.name if config.predict == "same" else config.predict
        self.device = device
        self.scaled = self.name == "fp16"
        self.growth_interval = config.growth_interval
        self.scale = torch.tensor(config.loss_scale if self.scaled else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        if device.type == "cuda":
            allowed = not exact if config.tf32 == "auto" else config.tf32
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed

    def autocast(self, cache: bool = True) -> AbstractContextManager[Any]:
        """Context of the forward pass. cache: narrow copies of weights are kept to its end, for those used repeatedly;
        of what is recomputed later they need not be."""
        if self.forward == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.forward], cache_enabled=cache)

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Forward passes inside the block probe a move: they run in `precision.predict`."""
        self.forward = self.predict
        try:
            yield
        finally:
            self.forward = self.name

    def update(self, found_inf: Tensor) -> None:
        """After a step: halve the scale on overflow, double it after enough good steps."""
        if not self.scaled:
            return
        bad = found_inf > 0
        self.good_steps.copy_(torch.where(bad, 0, self.good_steps + 1))
        grown = self.good_steps >= self.growth_interval
        factor = torch.where(bad, 0.5, torch.where(grown, 2.0, 1.0))
        self.scale.mul_(factor).clamp_(1.0, 2.0**24)
        self.good_steps.mul_(torch.where(grown, 0, 1).to(torch.int32))


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch TF32 off inside the block: it rounds fp32 numbers to 10 bits before they are multiplied."""
    matmul: Any = torch.backends.cuda.matmul
    setting, exact, before = "allow_tf32", cast("Any", False), None
    try:
        before = matmul.allow_tf32
    except RuntimeError:  # somebody uses torch's newer name for it, and the two must not be mixed
        setting, exact, before = "fp32_precision", "ieee", matmul.fp32_precision
    setattr(matmul, setting, exact)
    try:
        yield
    finally:
        setattr(matmul, setting, before)
