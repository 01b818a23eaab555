"""Events in words."""

from __future__ import annotations

import math

from foretrain import events
from foretrain.events import (
    CheckpointRejected,
    CheckpointSaved,
    Evaluated,
    Grown,
    HealthMeasured,
    MemoryUsed,
    Moved,
    Notice,
    Recovered,
)
from foretrain.show.narration import line, needs_attention

SHOWN_OTHERWISE = {"RunStarted", "Progress", "RunEnded"}
"""As the facts at the start, the progress line, and the table at the end."""


def a(kind: type[events.Event]) -> events.Event:
    """An event whose fields are what its annotations ask for."""
    values = {"int": 1, "float": 1.0, "str": "x", "bool": True}
    names = {name: str(type_).split(" ")[0] for name, type_ in kind.__annotations__.items()}
    return kind(**{name: values.get(word, {}) for name, word in names.items()})


def test_every_event_has_words() -> None:
    for kind in (kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)):
        if kind is events.Event:
            continue
        assert (line(a(kind), verbose=True) is None) is (kind.__name__ in SHOWN_OTHERWISE), kind


def test_what_needs_attention() -> None:
    assert needs_attention(Notice("x"))
    assert not needs_attention(Notice("x", level="info"))
    assert needs_attention(CheckpointRejected("x", "torn"))
    assert needs_attention(Recovered(1, "out_of_memory", "x"))
    assert not needs_attention(Recovered(1, "reset", "x"))


def test_memory_of_a_gpu_and_of_a_process() -> None:
    on_gpu = MemoryUsed(5, "predict", allocated=1, reserved=4 * 10**9, peak=3_140_000_000, pinned=512_000_000)
    assert line(on_gpu) == "step 5: memory in predict: peak 3.1 GB, 4.0 GB reserved, 512 MB pinned on the host"
    assert line(MemoryUsed(5, "full")) == "step 5: memory in full: not known"


def test_a_look_before_anything_is_known() -> None:
    assert line(HealthMeasured(0, None, None, None, {})) == "step 0: looked at 0 layers: nothing to measure yet"


def test_a_refused_move_has_no_loss_after_it() -> None:
    move = Moved(9, 40, "refused", 0.0, False, False, 2.5, 2.4, math.nan, 0.75, math.nan, 1.0, "the [probe] rose")
    said = "step 9: move 40 steps ahead [yellow]refused[/] (loss before 2.5000, confidence 0.75)"
    assert line(move) == said
    assert line(move, verbose=True) == f"{said}: the \\[probe] rose"


def test_a_checkpoint_that_is_mostly_not_the_model_says_what_it_is() -> None:
    assert line(CheckpointSaved(5, "x", 12.5, 0.1, 4.0, 1.0)) == "step 5: saved x (12.5 MB)"
    large = CheckpointSaved(5, "x", 45.9, 0.1, 3.4, 38.8)
    assert line(large) == "step 5: saved x (45.9 MB: 3.4 weights, 38.8 for prediction)"


def test_small_losses_keep_their_digits() -> None:
    move = Moved(995, 64, "kept", 1.0, False, True, 1.234e-6, 0.0, 2.784e-7, 0.94, 640.0, 64.0, "exact")
    assert "loss 1.234e-6 -> 2.784e-7, worth 640 steps" in str(line(move))


def test_a_chain_says_how_many_leaps_it_is_and_what_they_count() -> None:
    move = Moved(603, 78, "kept", 1.0, False, True, 6.5, 0.0, 3.3e-7, 1.0, 5880.0, 588.0, "", "linearised", 588)
    said = "step 603: chain of 78 linearised leaps [green]kept[/] (loss 6.5000 -> 3.300e-7, counted as 588 steps)"
    assert line(move) == said
    quasi = Moved(603, 1, "kept", 1.0, True, True, 6.5, 0.0, 3.3e-7, 1.0, 10.0, 1.0, "", "quasi-Newton", 1)
    assert "audited chain of 1 quasi-Newton leap [green]kept" in str(line(quasi))


def test_small_held_out_losses_keep_their_digits() -> None:
    assert line(Evaluated(5, 3.2e-5, 0.1, False, True)) == "step 5: held-out loss 3.200e-5 (best so far)"


def test_growth_is_told_when_it_is_made_and_when_it_is_judged() -> None:
    made = Grown(150, "made", 12, 12, 3.25, None, "")
    kept = Grown(165, "kept", 12, 12, 3.25, 3.2, "the loss has returned")
    undone = Grown(150, "undone", 6, 12, 3.25, 4.0, "the loss did not return within 15 steps")
    assert line(made) == "step 150: the model grows to 12 of 12 blocks, loss 3.2500 before it"
    assert line(kept) == "step 165: growth to 12 of 12 blocks kept, 3.2500 -> 3.2000"
    assert "growth undone" in (line(undone) or "")
    assert "the loss did not return within 15 steps, it goes on with 6 of 12 blocks" in (line(undone) or "")
