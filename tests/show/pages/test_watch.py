"""The live view over real sockets: what it refuses, and that a browser misses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.show.runs import STARTED, SUMMARY, append, end, progress, some_run, write_run
from tests.waiting import HANGS

from foretrain.cli.app import main
from foretrain.show.follow import Follower
from foretrain.show.pages import watch, watch_connections, watch_guard
from foretrain.show.pages.watch import WatchServer


class Serving:
    """A server in a thread, and what a browser would send to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = WatchServer(folder)
        self.port = self.server.port
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        self.cookie = f"foretrain-{self.port}={self.server.token}"

    def stop(self) -> None:
        self.server.server.should_exit = True
        self._thread.join(timeout=HANGS)
        assert not self._thread.is_alive()

    def ask(
        self, path: str = "/", method: str = "GET", cookie: str | None = None, **headers: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGS)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given["Cookie"] = self.cookie if cookie is None else cookie
        connection.request(method, path, headers=given)
        return connection, connection.getresponse()

    def answer(self, *arguments: Any, **more: Any) -> tuple[int, dict[str, str], str]:
        connection, response = self.ask(*arguments, **more)
        text = response.read().decode()
        connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, text


class Events:
    """What a browser's EventSource sees."""

    def __init__(self, serving: Serving, **headers: str) -> None:
        self._connection, self._response = serving.ask("/events", **headers)
        self.status = self._response.status

    def next(self) -> tuple[str, dict[str, Any]]:
        name = ""
        while True:
            line = self._response.readline().decode().rstrip("\n")
            if line.startswith("id: "):
                name = line[4:]
            elif line.startswith("data: "):
                return name, json.loads(line[6:])

    def read(self, count: int) -> None:
        self._response.read(count)

    def close(self) -> None:
        self._response.close()
        self._connection.close()


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr(watch, "INTERVAL", 0.02)
    made = Serving(write_run(tmp_path / "mine", some_run()))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """For what changes nothing."""
    made = Serving(write_run(tmp_path_factory.mktemp("shown") / "mine", some_run()))
    yield made
    made.stop()


# --- who may ask ------------------------------------------------------------------------------------------------------


def test_the_printed_address_gives_a_cookie_and_hides_the_token(shown: Serving) -> None:
    status, headers, _ = shown.answer(f"/?token={shown.server.token}", cookie="")
    assert (status, headers["location"]) == (303, "/")
    assert shown.server.token in headers["set-cookie"]
    assert {"httponly", "samesite=strict", "path=/"} <= {
        part.strip().lower() for part in headers["set-cookie"].split(";")
    }
    status, _, text = shown.answer()
    assert status == 200
    assert "data-live" in text
    assert shown.server.token not in text
    assert shown.server.address == f"http://127.0.0.1:{shown.port}/?token={shown.server.token}"


@pytest.mark.parametrize("path", ["/", "/events", "/report.js", "/?token=wrong", "/?token=", "/nothing"])
@pytest.mark.parametrize("cookie", ["", "foretrain=x", "foretrain-{port}=wrong", "foretrain-{port}="])
def test_nothing_is_told_without_the_token(shown: Serving, path: str, cookie: str) -> None:
    status, _, text = shown.answer(path, cookie=cookie.format(port=shown.port))
    assert status == 403
    assert "html" not in text


def test_the_token_is_new_for_every_server(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [STARTED])
    servers = [WatchServer(folder) for _ in range(2)]
    assert servers[0].token != servers[1].token
    assert len(servers[0].token) >= 43
    for server in servers:
        server._socket.close()


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.com",
            "evil.com:{port}",
            "127.0.0.1.evil.com:{port}",
            "localhost.evil.com:{port}",
            "127.0.0.1",
            "localhost",
        ),
        *(
            "0.0.0.0:{port}",
            "[::1]:{port}",
            "localhost:{port}.evil.com",
            "evil.com/?localhost:{port}",
            "LOCALHOST:1",
            "",
        ),
    ],
)
def test_a_foreign_host_is_refused(shown: Serving, host: str) -> None:
    status, _, text = shown.answer(Host=host.format(port=shown.port))
    assert status == 421
    assert "html" not in text


def test_two_hosts_are_none() -> None:
    """The server itself refuses such a request; it is not relied on."""
    guard = watch.Doorkeeper(None, "key", 80)  # type: ignore[arg-type]
    own, other = (b"host", b"localhost:80"), (b"host", b"evil.example")
    for headers, refused in (
        ([own], False),
        ([own, other], True),
        ([own, own], True),
        ([other, own], True),
        ([], True),
    ):
        assert (guard._refusal({"method": "GET", "headers": headers}) is not None) is refused


def test_its_own_names_are_answered(shown: Serving) -> None:
    for name in ("127.0.0.1", "localhost"):
        assert shown.answer(Host=f"{name}:{shown.port}")[0] == 200
    forwarded = shown.answer(Host="evil.com", X_Forwarded_Host=f"localhost:{shown.port}")
    assert forwarded[0] == 421


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.com"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}]
)
def test_other_pages_may_not_ask(shown: Serving, headers: dict[str, str]) -> None:
    assert shown.answer(**headers)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "NEW"])
def test_only_get_is_answered(shown: Serving, method: str) -> None:
    status, headers, _ = shown.answer("/", method)
    assert (status, headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/summary.json",
            "/metrics.jsonl",
            "/config.toml",
            "/../summary.json",
            "/..%2fsummary.json",
            "/%2e%2e/x",
            "//",
        ),
        *("//", "/report.js/", "/events/1", "/etc/passwd", "/?path=../x/../..", "/favicon.ico", "/assets/uplot.js"),
    ],
)
def test_there_are_no_other_addresses(shown: Serving, path: str) -> None:
    status, _, text = shown.answer(path)
    assert status == (200 if path.startswith("/?") else 404)
    assert "root:" not in text


KEPT_TO_ITSELF = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def test_every_answer_has_the_headers_that_keep_it_to_itself(shown: Serving) -> None:
    answers = [shown.answer(), shown.answer("/report.js"), shown.answer("/nothing"), shown.answer(cookie="")]
    answers.append(shown.answer("/", "POST"))
    for _, headers, _ in answers:
        assert headers.items() >= watch_guard.HEADERS.items() >= KEPT_TO_ITSELF.items()
        assert "server" not in headers
        assert not [name for name in headers if name.startswith("access-control")]
    policy = dict(
        part.strip().partition(" ")[::2] for part in watch_guard.HEADERS["content-security-policy"].split(";")
    )
    own, nothing = "'self'", "'none'"
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), nothing),
        **dict.fromkeys(("script-src", "style-src", "connect-src"), own),
        "img-src": "data:",
    }


def test_the_page_keeps_to_its_own_policy(shown: Serving) -> None:
    text = shown.answer()[2]
    assert not re.search(r"<style|<script>|style=|\son[a-z]+=", text)
    for path in re.findall(r'(?:src|href)="(/[^"]*)"', text):
        status, headers, content = shown.answer(path)
        assert status == 200
        assert content
        assert headers["content-type"].startswith("text/css" if path.endswith("css") else "text/javascript")


def test_it_is_bound_to_this_machine_only(shown: Serving) -> None:
    assert shown.server._socket.getsockname()[0] == "127.0.0.1"


# --- the browser that is opened ---------------------------------------------------------------------------------------


def opening(serving: Serving) -> str:
    """The path of the address that stands on the browser's command line."""
    address = serving.server.address_to_open()
    assert serving.server.token not in address
    return address.removeprefix(f"http://127.0.0.1:{serving.port}")


def test_the_address_on_a_browsers_command_line_is_good_once(serving: Serving) -> None:
    path = opening(serving)
    assert serving.answer(path.replace("/?", "/events?"), cookie="")[0] == 403
    status, headers, _ = serving.answer(path, cookie="")
    assert (status, headers["location"]) == (303, "/")
    assert serving.server.token in headers["set-cookie"]
    assert serving.answer(path, cookie="")[0] == 403
    assert serving.answer("/?code=", cookie="")[0] == 403


def test_another_users_program_can_do_nothing_with_it(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    path = opening(serving)
    with monkeypatch.context() as theirs:
        theirs.setattr(watch_guard, "owner_of", lambda client, server: os.geteuid() + 1)
        assert serving.answer(path, cookie="")[0] == 403
    assert serving.answer(path, cookie="")[0] == 303


def test_it_dies_if_no_browser_comes(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_guard, "CODE_SECONDS", -1.0)
    assert serving.answer(opening(serving), cookie="")[0] == 403


def test_whose_a_connection_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as client:
            assert watch_guard.owner_of(client.getsockname(), server.getsockname()) == os.geteuid()
            assert watch_guard.owner_of(server.getsockname(), client.getsockname()) != os.geteuid() + 1
            assert watch_guard.owner_of(("127.0.0.1", 1), server.getsockname()) == -1
            monkeypatch.setattr(watch_guard, "_CONNECTIONS", (tmp_path / "none",))
            assert watch_guard.owner_of(client.getsockname(), server.getsockname()) is None


# --- connections that ask for nothing ---------------------------------------------------------------------------------


def strangers(serving: Serving, count: int) -> Iterator[socket.socket]:
    """Connections without a key: idle ones, and ones that have sent half a request."""
    for number in range(count):
        made = socket.create_connection(("127.0.0.1", serving.port), timeout=HANGS)
        if number % 2:
            made.sendall(b"GET / HTTP/1.1\r\nHost: ")
        yield made


def test_connections_that_ask_for_nothing_keep_nobody_out(shown: Serving) -> None:
    with contextlib.ExitStack() as stack:
        for stranger in strangers(shown, 100):
            stack.enter_context(stranger)
        assert shown.answer()[0] == 200


def test_connections_that_ask_for_nothing_are_closed_and_those_that_look_are_not(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_connections, "PATIENCE", 0.05)
    events = Events(serving)
    events.next()
    for stranger in strangers(serving, 2):
        assert stranger.recv(1) == b""
        stranger.close()
    append(serving.folder, {"event": "Notice", "message": "still here", "level": "info"})
    assert "still here" in str(events.next())
    events.close()


def test_whoever_has_no_key_has_to_connect_again(shown: Serving) -> None:
    for answer in (shown.answer(cookie=""), shown.answer("/", "POST"), shown.answer(Host="evil.com")):
        assert answer[1]["connection"] == "close"
    assert "connection" not in shown.answer()[1]


# --- following --------------------------------------------------------------------------------------------------------


def test_a_browser_gets_everything_and_then_what_changed(serving: Serving) -> None:
    events = Events(serving)
    _, first = events.next()
    assert {"lead", "findings", "loss-numbers"} <= set(first["sections"])
    assert {"loss", "shared", "heat", "ledger", "rows/0"} <= set(first["charts"])
    append(serving.folder, {"event": "PhaseChanged", "step": 100, "phase": "full", "reason": "a new reason"})
    _, second = events.next()
    assert "a new reason" in second["charts"]["rows/0"][-1][-1]
    assert "lead" not in second["sections"]
    assert "loss" not in second["charts"]
    end(serving.folder, SUMMARY)
    message: dict[str, Any] = {}
    while "finished" not in message.get("sections", {}).get("lead", ""):
        _, message = events.next()
    events.close()


def test_a_browser_that_comes_back_misses_nothing_and_gets_nothing_twice(serving: Serving) -> None:
    events = Events(serving)
    name, _ = events.next()
    events.close()
    append(serving.folder, {"event": "Progress", "step": 110, "loss": 0.5, "seconds": 11.0, "phase": "full"})
    events = Events(serving, Last_Event_ID=name)
    later, message = events.next()
    assert later != name
    assert message["charts"]["loss"]["runs"][0]["series"][0]["values"][-1] == 0.5
    events.close()
    events = Events(serving, Last_Event_ID=later)
    append(serving.folder, {"event": "Notice", "message": "only this is new", "level": "info"})
    _, message = events.next()
    assert set(message["charts"]) <= {"shared", "ledger", "rows/0"}
    assert "only this is new" in message["charts"]["rows/0"][-1][-1]
    events.close()


def test_connections_that_are_cut_again_and_again_lose_nothing(serving: Serving) -> None:
    """What a browser knows after every cut, also in the middle of a message, is in the end what the run is."""
    known: dict[str, Any] = {}
    headers: dict[str, str] = {}
    for step in range(110, 210, 10):
        entry = {"event": "Progress", "step": step, "loss": 300 / step, "seconds": step, "phase": "full"}
        append(serving.folder, entry)
        append(serving.folder, {"event": "PhaseChanged", "step": step, "phase": "full", "reason": f"reason {step}"})
        broken = Events(serving, **headers)
        broken.read(step)  # some of the next message, which is then lost
        broken.close()
        append(serving.folder, {"event": "Notice", "message": f"while away at {step}", "level": "info"})
        events = Events(serving, **headers)
        name, message = events.next()
        events.close()
        headers = {"Last_Event_ID": name}
        known |= message["sections"] | message["charts"]
    fresh: dict[str, Any] = {}
    for have, given in ((known, headers), (fresh, {})):
        events = Events(serving, **given)
        while "while away at 200" not in str(have.get("rows/0")):
            _, message = events.next()
            have |= message["sections"] | message["charts"]
        events.close()
    assert fresh == known
    rows = str(known["rows/0"])
    assert all(f"reason {step}" in rows and f"while away at {step}" in rows for step in range(110, 210, 10))


def test_a_look_goes_on_when_a_browser_leaves_and_the_next_one_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks at a time would read every line twice."""
    monkeypatch.setattr(watch, "INTERVAL", 1000.0)
    folder = write_run(tmp_path / "run", some_run())
    live, poll = watch.Live(folder), Follower.poll
    begun, may_go_on = threading.Event(), threading.Event()
    looks: list[bool] = []

    def slow(follower: Follower) -> bool:
        begun.set()
        assert may_go_on.wait(HANGS)
        looks.append(poll(follower))
        return looks[-1]

    monkeypatch.setattr(Follower, "poll", slow)

    async def browsers() -> str:
        first = asyncio.create_task(live.current())
        await asyncio.to_thread(begun.wait, HANGS)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(live.current())
        await asyncio.sleep(0)
        may_go_on.set()
        version, made = await second
        assert "at step 100 of 100" in made.sections["lead"]
        return version

    version = asyncio.run(browsers())
    alone = Follower(folder)
    poll(alone)
    assert looks == [True]
    assert version == alone.version
    assert live.follower.record.decisions == alone.record.decisions


def test_looks_at_a_long_run_take_a_small_part_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))  # the clock of other servers goes on
    live = watch.Live(write_run(tmp_path / "run", some_run()))
    looks: list[float] = []

    def slow() -> None:
        looks.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(live, "_look", slow)

    async def asked_every_half_second() -> None:
        for _ in range(200):
            await live.current()
            now[0] += 0.5

    asyncio.run(asked_every_half_second())
    assert all(later - earlier >= 2.0 / watch.SHARE for earlier, later in pairwise(looks))
    assert len(looks) > 3


def test_kill_resumption_and_a_new_run_in_the_folder_are_followed(serving: Serving) -> None:
    events = Events(serving)
    events.next()
    append(serving.folder, {"event": "Resumed", "step": 50}, {"event": "RunStarted", "step": 50, "max_steps": 100})
    append(serving.folder, {"event": "Progress", "step": 60, "loss": 4.0, "seconds": 6.0})
    message: dict[str, Any] = {"charts": {}}
    while _steps(message) != [10, 20, 30, 40, 50, 60]:
        _, message = events.next()
    (serving.folder / "metrics.jsonl").unlink()
    write_run(serving.folder, [STARTED, progress(7)])
    while _steps(message) != [7]:
        _, message = events.next()
    events.close()


def _steps(message: dict[str, Any]) -> list[int]:
    series = message["charts"].get("loss", {"runs": [{"series": []}]})["runs"][0]["series"]
    return series[0]["steps"] if series else []


def test_a_file_that_makes_no_sense_leaves_what_is_known_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", some_run())
    live = watch.Live(folder)
    live._look()
    known = live._parts
    assert "at step 100 of 100" in known.sections["lead"]
    end(folder, SUMMARY)
    with monkeypatch.context() as broken:
        broken.setattr(watch, "parts", lambda records: 1 / 0)
        live._look()
    assert live._parts is known
    append(folder, {"event": "Notice", "message": "[" * 100_000})
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("[" * 100_000 + "\n")
    live._look()
    assert "finished" in live._parts.sections["lead"]


def test_too_many_browsers_are_sent_away_and_room_is_made_again(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "CLIENTS", 1)
    first = Events(serving)
    first.next()
    second = Events(serving)
    assert second.status == 503
    second.close()
    assert serving.answer()[0] == 200
    first.close()
    for step in range(1000):  # the server notices when it next writes
        append(serving.folder, {"event": "Notice", "message": f"note {step}"})
        again = Events(serving)
        if again.status == 200:
            break
        again.close()
    assert again.status == 200
    again.close()


def test_it_ends_while_browsers_look(tmp_path: Path) -> None:
    made = Serving(write_run(tmp_path / "run", some_run()))
    events = Events(made)
    events.next()
    made.stop()
    events.close()


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_address_and_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import webbrowser

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(WatchServer, "run", lambda self: self._socket.close())
    folder = write_run(tmp_path / "run", some_run())
    with pytest.raises(SystemExit, match="0"):
        main(["watch", str(folder), "--open"])
    address = capsys.readouterr().out.strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address)
    (shown,) = opened
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?code=[\w-]{43}", shown)
    assert shown.partition("=")[2] not in address
    with pytest.raises(SystemExit, match="0"):
        main(["watch", str(folder), "--json"])
    assert set(json.loads(capsys.readouterr().out)) == {"address", "port"}


def test_a_port_in_use_and_what_is_no_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", some_run())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit, match="2"):
            main(["watch", str(folder), "--port", str(taken.getsockname()[1])])
    assert "--port" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(folder), "--port", "99999"])
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("mine", encoding="utf-8")
    for name in ("else", "else/notes.txt"):
        with pytest.raises(SystemExit, match="2"):
            main(["watch", str(tmp_path / name)])
    assert "else: no run folder (it holds no metrics.jsonl)" in capsys.readouterr().err


def test_it_can_be_started_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = []

    def serve(server: WatchServer) -> None:
        server._socket.close()
        follower = Follower(tmp_path / "later")
        followed.append(follower.poll())
        write_run(tmp_path / "later", some_run())
        followed.append(follower.poll())

    monkeypatch.setattr(WatchServer, "run", serve)
    with pytest.raises(SystemExit, match="0"):
        main(["watch", str(tmp_path / "later")])
    assert followed == [False, True]
    assert (
        f"{tmp_path / 'later'}: no run has begun there yet; it is shown as soon as it does" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit, match="0"):
        main(["watch", str(tmp_path / "later")])
    assert "no run has begun" not in capsys.readouterr().err


def test_reports_need_no_server() -> None:
    import subprocess

    modules = "foretrain.show.pages.report_page, foretrain.cli.app"
    code = f"import sys, {modules}; assert not {{'starlette', 'uvicorn'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
