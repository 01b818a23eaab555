"""What a class names in `saved` comes back as it was, through the codec; everything else is refused by name."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from foretrain.errors import CheckpointError
from foretrain.persist.codec import put_together, take_apart
from foretrain.persist.stateful import Buffer, StateError, Stateful, from_plain, plain


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    place: tuple[int, ...]
    loss: float
    weights: NDArray[np.float64]
    colour: Colour | None = None


class Inner(Stateful):
    saved = ("count", "_fall")

    def __init__(self) -> None:
        self.count = 0
        self._fall = math.inf


class Whole(Stateful):
    saved: ClassVar[tuple[str, ...]] = (
        "number",
        "share",
        "on",
        "name",
        "colour",
        "nothing",
        "pair",
        "recent",
        "points",
        "tallies",
        "seen",
        "array",
        "tensor",
        "buffer",
        "anything",
        "_hidden",
        "inner",
    )
    nothing: float | None
    pair: tuple[int, float]
    recent: deque[float]
    points: list[Point]
    tallies: dict[int, Point]
    seen: set[str]
    buffer: Buffer
    anything: Any
    _hidden: list[tuple[float, float]]

    def __init__(self) -> None:
        self.number, self.share, self.on, self.name, self.colour = 0, 0.0, False, "", Colour.RED
        self.nothing, self.pair, self.recent = None, (0, 0.0), deque(maxlen=4)
        self.points, self.tallies, self.seen = [], {}, set()
        self.array, self.tensor, self.buffer = np.zeros((2, 3)), torch.zeros(3), torch.zeros(2)
        self.anything, self._hidden, self.inner = None, [], Inner()


NUMBERS = st.floats(allow_nan=False)
POINTS = st.builds(
    Point,
    st.lists(st.integers(-9, 9), max_size=3).map(tuple),
    NUMBERS,
    st.lists(NUMBERS, max_size=3).map(lambda values: np.array(values, dtype=np.float64)),
    st.sampled_from([None, *Colour]),
)
VALUES = st.fixed_dictionaries(
    {
        "number": st.integers(-(2**63), 2**63),
        "share": NUMBERS,
        "on": st.booleans(),
        "name": st.text(max_size=5),
        "colour": st.sampled_from(Colour),
        "nothing": st.none() | NUMBERS,
        "pair": st.tuples(st.integers(0, 5), NUMBERS),
        "recent": st.lists(NUMBERS, max_size=4).map(lambda values: deque(values, maxlen=4)),
        "points": st.lists(POINTS, max_size=2),
        "tallies": st.dictionaries(st.integers(0, 9), POINTS, max_size=2),
        "seen": st.sets(st.text(max_size=3), max_size=3),
        "array": st.lists(NUMBERS, min_size=6, max_size=6).map(lambda values: np.array(values).reshape(2, 3)),
        "tensor": st.lists(st.floats(width=32), min_size=3, max_size=3).map(torch.tensor),
        "anything": st.none() | st.lists(st.integers(0, 3) | st.text(max_size=2), max_size=2) | st.just((1, [2.0])),
        "_hidden": st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2),
    }
)


def known(value: Any) -> Any:
    """With types, and arrays by their bits, so that equal means equal."""
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.detach().numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", value.dtype, value.shape, value.tobytes())
    if isinstance(value, (Point, Stateful)):
        return (type(value), {name: known(item) for name, item in vars(value).items()})
    if isinstance(value, dict):
        return (dict, {key: known(item) for key, item in value.items()})
    if isinstance(value, deque):
        return (deque, value.maxlen, [known(item) for item in value])
    if isinstance(value, (list, tuple)):
        return (type(value), [known(item) for item in value])
    return (type(value), value)


@given(VALUES, st.integers(0, 9), st.lists(st.floats(width=32), min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_what_was_saved_comes_back_through_the_codec(values: dict[str, Any], count: int, numbers: list[float]) -> None:
    whole, other = Whole(), Whole()
    for name, value in values.items():
        setattr(whole, name, value)
    whole.inner.count, whole.inner._fall = count, 0.5
    whole.buffer.copy_(torch.tensor(numbers))
    held = other.buffer
    state = whole.state_dict()
    other.load_state_dict(put_together(take_apart(state)))
    assert known(other) == known(whole)
    assert other.buffer is held
    assert known(other.state_dict()) == known(state)


def test_the_state_is_plain_and_has_the_names_without_underscores() -> None:
    state = Whole().state_dict()
    assert state["colour"] == "red"
    assert state["inner"] == {"count": 0, "fall": math.inf}
    assert "hidden" in state
    take_apart(state)


def test_loaded_values_share_nothing_with_the_state() -> None:
    whole = Whole()
    whole.anything = {"x": torch.zeros(1)}
    state = Whole().state_dict() | {"anything": {"x": torch.ones(1)}, "tensor": torch.ones(3), "recent": [1.0]}
    whole.load_state_dict(state)
    whole.tensor += 1
    whole.anything["x"] += 1
    whole.recent.append(2.0)
    assert state["tensor"].tolist() == [1, 1, 1]
    assert state["anything"]["x"].tolist() == [1]
    assert state["recent"] == [1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": "7"}, "Whole.number is a text, not a whole number"),
        ({"number": 2.5}, "Whole.number is a number, not a whole number"),
        ({"number": True}, "Whole.number is true or false, not a whole number"),
        ({"number": 10**40}, "Whole.number is a number of 144 bits"),
        ({"share": None}, "Whole.share is nothing, not a number"),
        ({"colour": "green"}, "Whole.colour is 'green', none of ['red', 'blue']"),
        ({"colour": []}, "Whole.colour is [], none of ['red', 'blue']"),
        ({"pair": [1]}, "Whole.pair has 1 entries, not 2"),
        ({"recent": {"a": 1}}, "Whole.recent is a mapping, not a list"),
        ({"recent": [1.0, "x"]}, "Whole.recent.1 is a text, not a number"),
        ({"points": [{"place": [], "loss": 1.0}]}, "Whole.points.0.weights is missing"),
        ({"points": [{**plain(Point((), 1.0, np.zeros(1))), "more": 1}]}, "Whole.points.0.more is not known here"),
        ({"tallies": {"a": plain(Point((), 1.0, np.zeros(1)))}}, "Whole.tallies: a key is a text, not a whole number"),
        ({"tallies": {1: 7}}, "Whole.tallies.1 is a number, not a mapping"),
        (
            {"array": torch.zeros(2, 4, dtype=torch.float64)},
            "Whole.array is [2, 4] torch.float64, not [2, 3] torch.float64",
        ),
        ({"tensor": torch.zeros(3, dtype=torch.int64)}, "Whole.tensor is [3] torch.int64, not [3] torch.float32"),
        ({"tensor": [0.0]}, "Whole.tensor is a list, not a tensor"),
        ({"buffer": torch.zeros(3)}, "Whole.buffer is [3] torch.float32, not [2] torch.float32"),
        ({"inner": {"count": 1}}, "Inner.fall is missing"),
        ({"inner": None}, "Whole.inner is nothing, not a mapping"),
        ({"more": 1}, "Whole.more is not known here"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    whole = Whole()
    before = known(whole)
    with pytest.raises(CheckpointError) as raised:
        whole.load_state_dict(whole.state_dict() | change)
    assert str(raised.value) == message
    assert known(whole) == before


@pytest.mark.parametrize("name", list(Whole().state_dict()))
def test_a_missing_entry_is_refused_by_name(name: str) -> None:
    state = {key: value for key, value in Whole().state_dict().items() if key != name}
    with pytest.raises(StateError, match=f"^Whole.{name} is missing$"):
        Whole().load_state_dict(state)


SINGLE = st.none() | st.booleans() | st.integers() | NUMBERS | st.text(max_size=3) | st.just(torch.zeros(2))
JSON = SINGLE | st.lists(SINGLE | st.lists(SINGLE, max_size=2), max_size=3)
JSON |= st.dictionaries(st.text(max_size=3) | st.integers(0, 3), JSON, max_size=3)


@given(st.sampled_from(list(Whole().state_dict())), JSON)
@settings(max_examples=100, deadline=None)
def test_a_forged_entry_is_taken_or_refused_never_stumbled_over(name: str, value: Any) -> None:
    whole = Whole()
    try:
        whole.load_state_dict(whole.state_dict() | {name: value})
    except CheckpointError:
        return
    assert known(plain(getattr(whole, name, None) if name != "hidden" else whole._hidden)) is not None


class Doubled(Inner):
    def after_load(self) -> None:
        if self.count < 0:
            raise ValueError(f"count = {self.count}")
        self.double = 2 * self.count


def test_a_class_may_follow_up_and_refuse_after_loading() -> None:
    doubled = Doubled()
    doubled.load_state_dict({"count": 4, "fall": 1.0})
    assert doubled.double == 8
    with pytest.raises(StateError, match=r"Doubled cannot use it \(ValueError: count = -1\)"):
        doubled.load_state_dict({"count": -1, "fall": 1.0})


def test_a_tensor_goes_to_the_device_of_the_object_where_none_is_there() -> None:
    class Placed(Stateful):
        saved = ("last",)
        last: Tensor | None

        def __init__(self) -> None:
            self.last, self.device = None, torch.device("meta")

    placed = Placed()
    placed.load_state_dict({"last": torch.ones(2)})
    assert placed.last is not None
    assert placed.last.device.type == "meta"


def test_records_are_read_by_their_type() -> None:
    point = Point((1, 2), math.nan, np.arange(3.0), Colour.BLUE)
    read = from_plain(Point | None, put_together(take_apart(plain(point))), "the point")
    assert known(plain(read)) == known(plain(point)) or math.isnan(read.loss)
    assert isinstance(read, Point)
    assert from_plain(Point | None, None, "the point") is None
    with pytest.raises(StateError, match=r"the point\.loss is a text"):
        from_plain(Point, plain(point) | {"loss": "x"}, "the point")


class Part(Stateful):
    saved = ("inner",)
    inner: Inner | None

    def __init__(self, inner: Inner | None) -> None:
        self.inner = inner


def test_a_part_that_only_one_side_has_is_refused() -> None:
    Part(None).load_state_dict({"inner": None})
    with pytest.raises(StateError, match=r"Part\.inner was saved, but there is none here"):
        Part(None).load_state_dict(Part(Inner()).state_dict())
    with pytest.raises(StateError, match=r"Part\.inner is nothing"):
        Part(Inner()).load_state_dict(Part(None).state_dict())


@pytest.mark.parametrize("value", [object(), math.sqrt, Inner])
def test_what_no_state_may_hold_is_a_mistake_of_ours(value: Any) -> None:
    inner = Inner()
    inner.count = value
    with pytest.raises(TypeError, match="a state may hold tensors"):
        inner.state_dict()
