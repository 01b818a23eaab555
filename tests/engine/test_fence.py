"""The fence by itself: what is caught, what is kept, what is put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foretrain.engine.fence import Fence, Ordered, OwnCodeError, same_model, untouched
from foretrain.persist.signals import Interrupted


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: S311, NPY002


def test_what_is_returned_is_returned_and_random_states_are_as_before() -> None:
    torch.manual_seed(1)
    with untouched():
        expected = drawn()
    fence = Fence()
    assert fence.call("it", drawn) == expected
    assert fence.call("it", drawn) == expected
    assert drawn() == expected


def test_an_error_is_told_with_its_place_and_its_traceback() -> None:
    with pytest.raises(OwnCodeError) as caught:
        Fence().call("Mine.forecast()", lambda: int("one"))
    failure = caught.value.failure
    assert (failure.where, failure.error) == (
        "Mine.forecast()",
        "ValueError: invalid literal for int() with base 10: 'one'",
    )
    assert failure.traceback.startswith("Traceback (most recent call last)")
    assert 'int("one")' in failure.traceback


def test_what_is_said_has_one_line_and_a_bound() -> None:
    def talkative() -> None:
        raise ValueError("a\nb " * 100_000)

    with pytest.raises(OwnCodeError) as caught:
        Fence().call("it", talkative)
    failure = caught.value.failure
    assert failure.error.startswith("ValueError: a b a b a")
    assert "\n" not in failure.error
    assert len(failure.error) < 400
    assert len(failure.traceback) < 21_000


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_order_is_kept_until_it_is_taken(kind: type[BaseException]) -> None:
    fence = Fence()

    def order() -> None:
        raise kind("now")

    with pytest.raises(Ordered):
        fence.call("it", order)
    with fence.hearing():
        raise SystemExit("later")
    taken = fence.taken()
    assert isinstance(taken, kind)
    assert str(taken) == "now"
    assert fence.taken() is None


def test_a_signal_that_left_own_code_is_no_order_of_it() -> None:
    fence = Fence()

    def left() -> None:
        assert fence.interruptible
        raise Interrupted("SIGINT")

    with pytest.raises(Ordered):
        fence.call("it", left, again=True)
    assert fence.order is None
    assert not fence.interruptible


def test_only_what_is_done_again_is_left_by_a_signal() -> None:
    fence = Fence()
    seen: list[bool] = []
    for again in (False, True):
        fence.call("it", lambda: seen.append(fence.interruptible), again=again)
    assert seen == [False, True]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, float("nan"), -0.0]))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def test_a_model_that_nobody_changed_is_not_said_to_be_changed() -> None:
    model = Counting()
    with same_model(model) as changed:
        pass
    assert changed == []


@pytest.mark.parametrize("how", ["in place", "by data", "another tensor", "by an error"])
def test_weights_buffers_modes_and_gradients_are_put_back(how: str) -> None:
    model = Counting().train()
    memory = model.w.data_ptr()
    changed: list[str] = []

    def change() -> None:
        with same_model(model) as found:
            try:
                model.eval()
                model.seen += 1
                model.z.grad = torch.ones(2, dtype=torch.complex64)
                model.w.requires_grad_(False)
                with torch.no_grad():
                    if how == "another tensor":
                        model.w.data = torch.zeros(7)
                    elif how == "by data":
                        model.w.data.add_(1)
                    else:
                        model.w.zero_()
                if how == "by an error":
                    raise ValueError("no")
            finally:
                changed.append("")
        changed.extend(found)

    if how == "by an error":
        with pytest.raises(ValueError, match="no"):
            change()
    else:
        change()
        assert changed == ["", "w"]
    assert model.training
    assert (model.w.requires_grad, model.z.grad, int(model.seen)) == (True, None, 0)
    values: Any = model.w.detach()
    assert values[0] == 1
    assert values[1].isnan()
    assert bool(torch.signbit(values[2]))
    assert model.w.data_ptr() == memory
