"""TensorBoard's event files: what its own writers write is read, and garbage is refused in a sentence."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.forecast.event_files import is_event_file, scalars
from foretrain.forecast.logged import read_losses


def written(folder: Path) -> Path:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(1, 21):
            writer.add_scalar("train/loss", 4 - step / 10, step)
            writer.add_scalar("lr", 1e-3, step)
            if step % 5 == 0:
                writer.add_scalar("eval/loss", 5 - step / 10, step)
        writer.add_text("note", "a text is no scalar")
    (file,) = folder.iterdir()
    return file


def test_scalars_of_a_real_writer_are_read(tmp_path: Path) -> None:
    file = written(tmp_path / "tb")
    found = read_losses(tmp_path / "tb")
    assert found.column == "eval/loss"
    assert found.held_out
    assert [step for step, _ in found.points] == [5, 10, 15, 20]
    assert found.points[-1][1] == pytest.approx(3.0)
    assert len(found.rates) == 20
    renamed = file.rename(tmp_path / "log.bin")
    assert is_event_file(renamed)
    assert read_losses(renamed).points == found.points


def record(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + bytes(4) + content + bytes(4)


def test_a_tensor_of_one_number_is_a_scalar(tmp_path: Path) -> None:
    tensor = b"\x08\x01" + b"\x22\x04" + struct.pack("<f", 2.5)
    value = b"\x0a\x04loss" + b"\x42" + bytes([len(tensor)]) + tensor
    summary = b"\x0a" + bytes([len(value)]) + value
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(record(b"\x10\x07" + b"\x2a" + bytes([len(summary)]) + summary))
    assert list(scalars(file)) == [(7, "loss", 2.5)]


@pytest.mark.parametrize("content", [b"\x2a\x7fabc", b"\x09abc", b"\x10\xff", b"\x0b", b"\x10" + b"\xff" * 11])
def test_fields_that_do_not_fit_into_their_message_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(record(content))
    with pytest.raises(InputError, match="byte 0 begins no record of an event file"):
        list(scalars(file))


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    file = written(tmp_path / "tb")
    whole = list(scalars(file))
    file.write_bytes(file.read_bytes()[:-7])
    assert 0 < len(list(scalars(file))) <= len(whole)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_in_a_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("garbage") / "events.out.tfevents.1"
    for garbage in (content, record(content)):
        file.write_bytes(garbage)
        try:
            list(scalars(file))
        except InputError as error:
            assert str(file) in str(error)  # noqa: PT017 - some garbage is a record by chance
