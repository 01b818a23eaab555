"""Processes that agree through a store: here each is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from foretrain.errors import ConfigError, InputError, OutOfMemory
from foretrain.launch import joining, roll
from foretrain.launch.group import ALONE, Group, OtherRankFailed, RankPlace, place_of
from foretrain.launch.roll import LostRank, Roll
from foretrain.launch.stopping import AgreedStop
from foretrain.persist.folder import RunFolder


@pytest.fixture(scope="module")
def server() -> Any:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def on_ranks(server: Any, name: str, work: Callable[[Group], Any], size: int = 3) -> list[Any]:
    """What `work` returns or raises in each of so many processes."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        store = TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
        try:
            found[rank] = work(Group(RankPlace(rank, size), PrefixStore(name, store), timeout=20.0))
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_the_environment_says_who_a_process_is() -> None:
    assert place_of({}) is None
    assert place_of({"RANK": "0", "WORLD_SIZE": "1"}) is None
    told = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert place_of(told) == RankPlace(5, 8, 1, 2)


def test_rank_0_says_and_all_know(server: Any) -> None:
    assert on_ranks(server, "say", lambda group: group.from_first(lambda: f"from {group.rank}")) == ["from 0"] * 3


def test_where_one_fails_all_end(server: Any) -> None:
    def work(group: Group) -> str:
        with group.together():
            if group.rank == 1:
                raise OutOfMemory("no room")
        return "well"

    first, second, third = on_ranks(server, "fail", work)
    assert isinstance(second, OutOfMemory)
    for other in (first, third):
        assert isinstance(other, OtherRankFailed)
        assert str(other) == "rank 1: no room"
        assert other.exit_code == OutOfMemory.exit_code


def test_the_others_come_when_rank_0_is_done(server: Any) -> None:
    order: list[int] = []

    def work(group: Group) -> None:
        group.by_first(lambda: order.append(group.rank))

    on_ranks(server, "order", work)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_alone_nothing_is_asked() -> None:
    with ALONE.together():
        assert ALONE.from_first(lambda: "me") == "me"
    assert ALONE.well("")
    assert ALONE.by_first(lambda: 3) == 3
    with pytest.raises(ValueError, match="mine"), ALONE.together():
        raise ValueError("mine")


@pytest.mark.parametrize("asked", ["SIGTERM", "early"])
def test_all_stop_after_the_same_step(server: Any, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(roll, "_OFTEN", 0.01)
    in_step = threading.Barrier(3)

    def work(group: Group) -> tuple[int, str, str | None]:
        with Roll(group) as kept:
            stop = AgreedStop(kept)
            step = 0
            while not (stop.requested or stop.early is not None):
                in_step.wait(20)  # a collective operation: nobody gets through it alone
                step += 1
                if group.rank == 1 and step == 5:
                    if asked == "SIGTERM":
                        stop._handle(15, None)
                    else:
                        stop.ask("it is enough")
                stop.after_step(step)
            return step, stop.requested, stop.early

    found = on_ranks(server, f"stop {asked}", work)
    assert len(set(found)) == 1
    step, requested, early = found[0]
    assert step > 5
    assert (requested, early) == (("SIGTERM", None) if asked == "SIGTERM" else ("", "it is enough"))


def test_a_run_after_one_that_was_stopped_goes_on(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same processes make one run after the other: what the first one agreed on is not for the second."""
    monkeypatch.setattr(roll, "_OFTEN", 0.01)
    in_step = threading.Barrier(3)

    def run(group: Group, asks_at: int) -> int:
        with Roll(group) as kept:
            stop = AgreedStop(kept)
            step = 0
            while stop.early is None:
                in_step.wait(20)
                step += 1
                if step == asks_at and group.rank == step % 3:
                    stop.ask("it is enough")
                while step == asks_at - 1 and not group.store.check([kept._key("step", group.rank)]):
                    pass  # the thread looks, and would find an old word
                stop.after_step(step)
            return step

    found = on_ranks(server, "again", lambda group: (run(group, 5), run(group, 40)))
    assert len(set(found)) == 1
    first, second = found[0]
    assert first >= 5
    assert second >= 40


def test_a_rank_that_does_not_answer_is_named(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "_OFTEN", 0.01)
    monkeypatch.setattr(roll, "_ANSWER", 0.5)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(roll.os, "_exit", lambda code: seen.append((1, code)))
    failed = threading.Event()

    def work(group: Group) -> str:
        with Roll(group) as kept:
            kept.after_step(7)
            if group.rank == 1:
                group.store.wait([kept._key("step", 1)], timedelta(seconds=20))
                failed.wait(20)
                return "hung"
            group.store.wait([kept._key("step", 1)], timedelta(seconds=20))
            found = kept.explain(RuntimeError("gloo: Timed out waiting 8000ms for recv operation"))
            assert isinstance(found, LostRank)
            group.store.wait([kept._given_up], timedelta(seconds=20))
            while not seen:  # by the thread of rank 1
                failed.wait(0.01)
            failed.set()
            return str(found)

    first, hung, third = on_ranks(server, "hang", work)
    assert hung == "hung"
    assert "rank 1 hangs or is gone, last seen after step 7; rank 0 waits for it after step 7" in first
    assert "rank 2 waits for it" in third
    assert (1, 1) in seen


def test_an_error_of_ones_own_is_no_lost_rank(server: Any) -> None:
    with Roll(Group(RankPlace(0, 2), server)) as kept:
        assert kept.explain(ValueError("Connection reset by peer")) is None
        assert kept.explain(RuntimeError("shape mismatch")) is None
    assert Roll(ALONE).explain(RuntimeError("gloo")) is None


def test_a_failure_that_all_have_is_told_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(joining, "_SHORTLY", timedelta(seconds=0.2))
    common, own = ConfigError("max_steps is wrong"), InputError("no such file here")
    assert [joining.tells_of(common, RankPlace(rank, 3)) for rank in (0, 1, 2)] == [True, False, False]
    assert [joining.tells_of(own, RankPlace(rank, 3)) for rank in (2, 1)] == [True, False]
    assert not joining.tells_of(OtherRankFailed(1, 2, "words"), RankPlace(0, 3))


def test_one_device_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="names one device for 2 processes; set device = 'cuda'"):
        joining._take_device("cuda:1", RankPlace(1, 2, 1))
    with pytest.raises(ConfigError, match="'mps' is one device"):
        joining._take_device("mps", RankPlace(1, 2, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="process 1 of this machine has no GPU: there are 1"):
        joining._take_device("cuda", RankPlace(1, 2, 1))
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert joining._take_device("auto", RankPlace(4, 8, 0)) == "nccl"
    assert chosen == [0]
    assert joining._take_device("cpu", RankPlace(4, 8, 0)) == "gloo"


def test_a_launcher_that_does_not_say_where_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT do not say"), joining.joined("cpu", 5.0):
        pytest.fail("there is nobody to join")
    assert joining.current_group() is ALONE


def test_only_the_owner_writes_into_a_run_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", resume=False, owner=False) as folder:
        folder.files["config.toml"] = "x"
        folder.describe()
        folder.write_summary({"a": 1})
        folder.clear()
    assert not (tmp_path / "run").exists()
    with RunFolder(tmp_path / "run", resume=False) as owner:
        owner.write("config.toml", "x")
        with RunFolder(tmp_path / "run", resume=True, owner=False) as other:  # the lock is the owner's
            other.note_smaller({"accumulation_steps": 4})
        assert owner.smaller() == '{"accumulation_steps": 4}'
