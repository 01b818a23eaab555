"""The fence around code of the user's own: predictors, metrics, callbacks, and the loss where it only probes.

Whatever such code raises is caught here with its traceback. Random states and switches of torch and NumPy are put back
after it. Its order to end the program (KeyboardInterrupt, SystemExit) is kept, and obeyed when the run is saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from foretrain.events import told_of
from foretrain.persist.parts import is_spread, local
from foretrain.persist.signals import Interrupted

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Failure:
    """What own code did, in words that hold on to nothing of it."""

    where: str
    """Mine.forecast(), the metric 'accuracy'."""
    error: str
    """In one line."""
    traceback: str


class OwnCodeError(Exception):
    """Own code failed; never seen outside of foretrain."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.where} failed ({failure.error})")
        self.failure = failure


class Ordered(BaseException):
    """Own code was left by an order to end: the run stops where it can be gone on from. Never seen outside."""


class ContractError(TypeError):
    """Own code returned, or keeps, what it may not."""


def failure_of(where: str, error: BaseException) -> Failure:
    return Failure(where, *told_of(error, str(error) if isinstance(error, ContractError) else ""))


class Fence:
    """One per trainer."""

    def __init__(self) -> None:
        self.order: BaseException | None = None
        """Own code wants the program to end; to be obeyed when the run is saved."""
        self._postponed = False
        self.interruptible = False
        """A signal to stop may leave what runs now: it will be done again."""

    def call(self, where: str, function: Callable[..., Result], *arguments: Any, again: bool = False) -> Result:
        """What `function` returns. Raises OwnCodeError for whatever it raises, Ordered if that is an order to end.

        again: it is done again from the same state if it is interrupted, so a signal need not wait for it.
        """
        with untouched():
            try:
                self.interruptible = again
                return function(*arguments)
            except (KeyboardInterrupt, SystemExit) as order:
                self.interruptible = False
                self.give(order)
                raise Ordered from order
            except Ordered:
                raise
            except BaseException as error:
                self.interruptible = False
                raise OwnCodeError(failure_of(where, error)) from error
            finally:
                self.interruptible = False

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Around a callback: what it raises is its caller's to see, except for an order to end."""
        with untouched():
            try:
                yield
            except (KeyboardInterrupt, SystemExit) as order:
                self.give(order)
            except Exception:
                raise
            except BaseException as error:
                raise RuntimeError(failure_of("", error).error) from error

    def give(self, order: BaseException) -> None:
        """Keep an order; where a signal is its cause, that is known already."""
        if not isinstance(order, Interrupted):
            self.order = self.order or order

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Inside the block somebody else sees to it that the run is saved before an order is obeyed."""
        self.order, self._postponed = None, True
        try:
            yield
        finally:
            self._postponed = False

    def obey(self) -> None:
        """End the program if own code wants that, unless it is postponed. To be called where the run can go on from."""
        if self.order is not None and not self._postponed:
            order, self.order = self.order, None
            raise order

    def taken(self) -> BaseException | None:
        """The order, to be obeyed now."""
        order, self.order = self.order, None
        return order


class untouched:
    """Random states and switches are the same after the block. Some 100 microseconds: for rare calls, not for steps."""

    def __enter__(self) -> None:
        self._random = randomness()
        self._gradients, self._type = torch.is_grad_enabled(), torch.get_default_dtype()
        self._numpy = np.geterr()

    def __exit__(self, *_: object) -> None:
        put_back(self._random)
        torch.set_grad_enabled(self._gradients)
        if torch.get_default_dtype() != self._type:
            torch.set_default_dtype(self._type)
        np.seterr(**self._numpy)


def randomness() -> tuple[Any, ...]:
    """All random states, as the libraries give them: faster than `random_state`, and not to be saved."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    on_device = [torch.cuda.get_rng_state(index) for index in range(devices)]
    return torch.get_rng_state(), on_device, random.getstate(), np.random.get_state()  # noqa: NPY002 - user code may use it


def put_back(states: tuple[Any, ...]) -> None:
    """What `randomness` gave, or the first part of it."""
    on_host, *others = states
    torch.set_rng_state(on_host)
    if others:
        on_device, python, numpy = others
        for index, state in enumerate(on_device):
            torch.cuda.set_rng_state(state, index)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - user code may use it


def same_randomness(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether nobody drew from Python's and NumPy's generators in between."""
    (kind, words, *rest), (other_kind, other_words, *other_rest) = one[3], other[3]
    return one[2] == other[2] and (kind, rest) == (other_kind, other_rest) and bool((words == other_words).all())


# --- the model -------------------------------------------------------------------------------------------------------


@contextmanager
def same_model(model: nn.Module) -> Iterator[list[str]]:
    """Trained weights, buffers, gradients and modes are the same after the block; gives names of weights that were
    changed in it. The copies are in host memory."""
    weights: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: local(p) if is_spread(p) else p for name, p in weights.items()}
    tensors = weights | dict(model.named_buffers())
    kept = {name: (tensor.data, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors.items()}
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for module, training in modes:
            module.training = training
        for p, gradient, trained in gradients:
            p.grad = gradient
            p.requires_grad_(trained)
        changed += [name for name, tensor in tensors.items() if _restore(tensor, *kept[name]) and name in weights]


@torch.no_grad()
def _restore(tensor: Tensor, memory: Tensor, before: Tensor) -> bool:
    """Whether that was necessary. memory: others know it, so it must be the tensor's again."""
    replaced = tensor.data_ptr() != memory.data_ptr() or tensor.shape != before.shape or tensor.dtype != before.dtype
    if replaced:
        tensor.data = memory
    if not torch.equal(_bits(memory), _bits(before)):
        memory.copy_(before)
        return True
    return replaced


def _bits(tensor: Tensor) -> Tensor:
    """A number that is none is equal to itself only in its bits."""
    flat = tensor.detach().cpu().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.view(_BITS[flat.element_size()])
