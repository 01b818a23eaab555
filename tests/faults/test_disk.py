"""A disk that takes no more: clear words, old checkpoints intact, and a run that goes on where it can."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain import HybridTrainer, config
from foretrain.errors import SaveError
from foretrain.events import Event, Notice, Progress
from foretrain.models import huggingface
from foretrain.persist import checkpoint
from foretrain.persist.checkpoint import verify
from foretrain.recipes import train as run

LIMIT = 40_000
"""Less than the moments of the optimizer take, more than any other file of the tiny run."""


@contextlib.contextmanager
def small_disk(limit: int = LIMIT) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond `limit`: writes fail half-way, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_space(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def failing(when: Callable[[Path], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, out of space whenever its path argument is one of those."""

    def call(*arguments: Any, **options: Any) -> Any:
        if any(isinstance(argument, Path) and when(argument) for argument in arguments):
            no_space()
        return function(*arguments, **options)

    return call


def intact_steps(workshop: Any) -> list[int]:
    steps = []
    for path in sorted(workshop.checkpoints.glob("step-*")):
        verify(path)
        steps.append(int(path.name.removeprefix("step-")))
    return steps


def test_the_run_goes_on_without_a_save_and_fails_at_the_last_one(workshop: Any) -> None:
    with small_disk():
        code, printed = workshop.resume("--set", "checkpoint.interval=5")
    assert code == 1
    warning, error = (line for line in printed.splitlines() if "cannot save the checkpoint" in line)
    assert warning.startswith("warning: killed/checkpoints: cannot save the checkpoint of step 10: ")
    assert "the checkpoint of step 9 is intact" in warning
    assert warning.endswith("the run goes on and tries again at the next save")
    assert error.startswith("error: killed/checkpoints: cannot save the checkpoint of step 11: ")
    assert "the checkpoint of step 9 is intact" in error
    assert error.endswith("then go on with --resume")
    assert "Traceback" not in printed
    assert intact_steps(workshop) == [3, 6, 9]
    assert not list(workshop.killed.rglob(".tmp-*"))
    assert not (workshop.killed / "model").exists()
    assert workshop.resume()[0] == 0
    assert workshop.is_as_undisturbed()


def test_a_disk_that_gets_room_again_in_mid_run(workshop: Any) -> None:
    notices: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_disk())

        def make_room(event: Event) -> None:
            if isinstance(event, Notice) and "cannot save" in event.message:
                notices.append(event.message)
                stack.close()

        changed = config.load("tiny.toml", ["checkpoint.interval=1"]).config
        summary = run.train(changed, "fresh", progress=False, listeners=[make_room])
    assert summary["reason"] == "finished"
    assert len(notices) == 1
    assert "step 1" in notices[0]
    assert workshop.is_as_undisturbed("fresh")


@pytest.mark.parametrize("name", ["optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("step", [9, 11], ids=["mid-run", "last"])
def test_a_full_disk_in_its_own_words(step: int, name: str, workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> bool:
        return path.name == name and path.parent.name == f".tmp-step-{step:08d}"

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", failing(full, checkpoint.save_file))
        patch.setattr(checkpoint, "write_synced", failing(full, checkpoint.write_synced))
        code, printed = workshop.foretrain("train", "tiny.toml", "--out", "fresh")
    assert code == (0 if step == 9 else 1)
    line = next(line for line in printed.splitlines() if "cannot save" in line)
    assert f"cannot save the checkpoint of step {step}: the disk is full (No space left on device)" in line
    assert f"the checkpoint of step {6 if step == 9 else 9} is intact. Free some space" in line
    if step == 11:
        assert workshop.foretrain("train", "tiny.toml", "--out", "fresh", "--resume")[0] == 0
    assert workshop.is_as_undisturbed("fresh")


def test_a_stop_that_cannot_be_saved_is_an_error(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretrain.loop import fit

    monkeypatch.setattr(fit.StopRequest, "requested", "SIGTERM", raising=False)
    monkeypatch.setattr(fit.StopRequest, "__init__", lambda self: setattr(self, "_before", {}))
    monkeypatch.setattr(checkpoint, "save_file", no_space)
    code, printed = workshop.resume()
    assert code == 1
    assert "error: killed/checkpoints: cannot save the checkpoint of step 10: the disk is full" in printed
    assert intact_steps(workshop) == [3, 6, 9]


def test_the_log_on_a_full_disk_never_stops_a_run(workshop: Any) -> None:
    line = json.dumps({"event": "Notice", "message": "x" * 100, "level": "info"}) + "\n"
    with (workshop.killed / "metrics.jsonl").open("a") as log:
        log.write(line * (1_000_000 // len(line)))
    with small_disk(1_000_000):
        code, printed = workshop.resume()
    assert code == 0
    assert (
        "metrics.jsonl: [Errno 27] File too large; check the folder and its permissions: what is to be logged"
        in printed
    )
    assert workshop.is_as_undisturbed()
    code, printed = workshop.resume()
    assert code == 0
    for text in (workshop.killed / "metrics.jsonl").read_text().splitlines():
        json.loads(text)


def test_a_log_that_gets_room_again_in_mid_run_is_complete(workshop: Any) -> None:
    def told(folder: str) -> list[tuple[str, int | None]]:
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        events = [(event["event"], event.get("step")) for event in map(json.loads, lines)]
        return [event for event in events if event[0] in ("RunStarted", "Progress", "Evaluated", "RunEnded")]

    changed = config.load("tiny.toml", ["checkpoint.interval=0", "log.interval=1"]).config
    run.train(changed, "whole", progress=False)
    with contextlib.ExitStack() as stack:

        def fill_disk(event: Event) -> None:
            if isinstance(event, Progress) and event.step == 3:
                stack.enter_context(small_disk(1))
            elif isinstance(event, Progress) and event.step == 8:
                stack.close()

        notices: list[Notice] = []
        listeners = [fill_disk, lambda event: notices.append(event) if isinstance(event, Notice) else None]
        run.train(changed, "full", progress=False, listeners=listeners)
    words = [notice.message for notice in notices if "metrics.jsonl" in notice.message]
    assert ["waits in memory" in text for text in words] == [True, False]
    assert words[1].endswith("there is room again, the log goes on")
    assert told("full") == told("whole")


def test_a_model_that_cannot_be_exported(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "save_file", no_space)
        code, printed = workshop.resume()
    assert code == 1
    assert "error: killed/model: cannot write the model: the disk is full" in printed
    assert "all checkpoints are intact. Free some space, then go on with --resume" in printed
    assert not list(workshop.killed.rglob(".tmp-*"))
    assert workshop.resume()[0] == 0
    assert workshop.is_as_undisturbed()


@pytest.mark.parametrize("name", ["config.toml", "summary.json"])
def test_a_file_of_the_run_that_cannot_be_written(name: str, workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretrain.persist import files

    with monkeypatch.context() as patch:
        full = failing(lambda path: path.name == f".tmp-{name}", files.write_synced)
        patch.setattr(files, "write_synced", full)
        code, printed = workshop.resume()
    assert code == 1
    assert f"error: killed/{name}: cannot write it: the disk is full" in printed
    assert workshop.resume()[0] == 0
    assert workshop.is_as_undisturbed()


def test_a_read_only_checkpoint_folder(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be renamed, removed or made in it: the run still finds its newest checkpoint and says what it
    cannot do."""

    def read_only(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if workshop.checkpoints in path.absolute().parents:
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return function(path, *arguments, **options)

        return call

    (workshop.checkpoints / ".tmp-step-00000010").mkdir()
    (workshop.newest / "state.json").write_text("damaged")
    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "unlink"):
            patch.setattr(Path, name, read_only(getattr(Path, name)))
        patch.setattr(checkpoint, "remove", read_only(checkpoint.remove))
        code, printed = workshop.resume("--set", "checkpoint.interval=5")
    assert code == 1
    assert "resumed from step 6" in printed
    error = printed.splitlines()[-1]
    assert error.startswith("error: killed/checkpoints: cannot save the checkpoint of step 11: [Errno 30] Read-only")
    assert error.endswith("Check the folder and its permissions, then go on with --resume")
    assert workshop.resume()[0] == 0
    assert workshop.is_as_undisturbed()


def test_a_file_in_the_place_of_the_checkpoint_folder(workshop: Any) -> None:
    (workshop.folder / "fresh").mkdir()
    (workshop.folder / "fresh" / "checkpoints").write_text("in the way")
    changed = config.load("tiny.toml").config
    with pytest.raises(SaveError, match="Check the folder"):
        run.train(changed, "fresh", resume=True, progress=False)


@pytest.mark.parametrize("back", [False, True])
def test_a_run_folder_that_is_moved_in_mid_run_is_not_made_anew(back: bool, tmp_path: Path) -> None:
    """Neither for checkpoints nor for the best weights; put back, it is used again."""
    out, elsewhere, notices = tmp_path / "run", tmp_path / "elsewhere", []

    def move(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event.message)
        elif isinstance(event, Progress) and event.step == 6:
            out.rename(elsewhere)
        elif back and isinstance(event, Progress) and event.step == 14:
            elsewhere.rename(out)

    settings = {"device": "cpu", "max_steps": 20, "evaluation.interval": 2, "checkpoint.interval": 4, "log.interval": 2}
    trainer = HybridTrainer(torch.nn.Linear(3, 1), None, torch.nn.MSELoss(), config.from_mapping(settings))
    data = [(torch.ones(4, 3), torch.zeros(4, 1))]
    with contextlib.nullcontext() if back else pytest.raises(SaveError, match="was moved or deleted"):
        trainer.fit(data, data, out=out, callbacks=[move], progress=False)
    assert any("the run folder was moved or deleted while the run goes on" in text for text in notices)
    assert [out.exists(), elsewhere.exists()] == [back, not back]
    saved = {path.name for path in ((out if back else elsewhere) / "checkpoints").iterdir()}
    assert ("step-00000020" in saved) is back
