"""For `page_check.py`: the live view in a browser, with cut connections, a killed trainer, and a very long run."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import page_runs
from browser import Browser

_STEP = (
    "Number([...document.querySelectorAll('.card')].find(one => one.textContent.startsWith('Steps'))"
    ".querySelector('data').value)"
)
_ALL_SEEN = (
    "JSON.stringify([document.querySelector('header').innerText.replace(/^.*(Live|Connecting)/, ''), "
    "[...document.querySelectorAll('main [data-section]')].map(one => one.innerHTML), "
    "document.querySelector('[data-count]').textContent, document.querySelector('#ledger tbody').innerHTML, "
    "[...document.querySelectorAll('canvas')].map(one => one.toDataURL())])"
)


class Cutter:
    """Stands between browser and server, and cuts every connection when it is told to."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        self._open: list[socket.socket] = []
        self.passed = 0
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                own, its = (f"127.0.0.1:{port}".encode() for port in (self.port, self._to))
                threading.Thread(target=self._pass, args=(near, far, own, its), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, b"", b""), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, own: bytes, its: bytes) -> None:
        with suppress(OSError):
            while given := source.recv(4096):
                target.sendall(given.replace(own, its) if own else given)  # it answers under its own name only
                self.passed += 0 if own else len(given)
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def close(self) -> None:
        self._door.close()
        self.cut()


@contextmanager
def watched(run: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`foretrain watch` of a run, and what it has printed."""
    until((run / "metrics.jsonl").is_file)
    command = [sys.executable, "-m", "foretrain.cli.app", "watch", str(run), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        printed = ""
        while not printed.endswith("}\n"):
            line = server.stdout.readline()
            assert line, f"foretrain watch ended after: {printed}"
            printed += line
        yield server, json.loads(printed)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def check_live(browser: Browser, folder: Path, check: Callable[[Path], None], picture: Path | None) -> dict[str, Any]:
    """Values change; kill -9 and resumption are followed; a browser that is cut off again and again ends with the page
    that a new one would get."""
    run = folder / "live"
    train = [sys.executable, "-m", "foretrain.cli.app", "train", "--out", str(run), "--quiet"]
    settings = ("max_steps=400", "log.interval=2", "checkpoint.interval=20", "batch_size=2", "evaluation.batches=2")
    trainer = subprocess.Popen([*train, *(part for one in settings for part in ("--set", one))])
    try:
        with watched(run) as (server, told):
            cutter = Cutter(told["port"])
            browser.look(1280, 900)
            browser.open(told["address"].replace(str(told["port"]), str(cutter.port)))
            assert browser.ask("location.search") == "", "the token stays in the address"
            browser.until("document.documentElement.dataset.updates > 2", 60)
            first = browser.ask(_STEP)
            browser.until("document.querySelector('progress').value > 0", 60)
            browser.until("document.querySelector('.going').textContent.includes(' left')", 60)
            browser.until(f"{_STEP} > {first}", 60)
            assert browser.ask("document.getElementById('status').textContent") == "Live"
            assert (errors := browser.errors()) == [], errors
            until(lambda: any((run / "checkpoints").glob("step-*")))
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            stopped = browser.ask(_STEP)
            trainer = subprocess.Popen([*train, "--resume"])
            browser.until("document.getElementById('ledger').textContent.includes('resumed')", 60)
            cuts = 0
            while trainer.poll() is None and cuts < 5:
                seen = cutter.passed
                until(lambda seen=seen: cutter.passed > seen + 2000 or trainer.poll() is not None)  # amid a message
                cutter.cut()
                cuts += 1
                browser.until("document.getElementById('status').textContent.startsWith('Not connected')", 20)
                browser.until("document.getElementById('status').textContent === 'Live'", 30)
            browser.until(f"{_STEP} > {stopped}", 120)
            check_refusals(told["port"])
            assert trainer.wait() == 0
            browser.until("document.querySelector('.state').textContent.startsWith('finished')", 30)
            check(run)
            check_same_when_new(browser)
            if picture:
                browser.picture(picture, 1280, True)
            browser.errors()  # of the cuts, which the browser reports
            updates = int(browser.ask("document.documentElement.dataset.updates"))
            cutter.cut()
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=20) == 0
            browser.until("document.getElementById('status').textContent.startsWith('Not connected')", 20)
            cutter.close()
    finally:
        end(trainer)
    print(f"live: kill and resumption followed, {cuts} cuts without a loss, refusals in place")
    return {"cuts": cuts, "killed_at_step": stopped, "updates_after_reload": updates}


def check_same_when_new(browser: Browser) -> None:
    """What the page has become is what it is when it is opened anew: texts, ledger and every pixel of the charts."""
    browser.ask("document.querySelector('button[data-order=first]').click()")
    time.sleep(1.5)
    before = browser.ask(_ALL_SEEN)
    browser.ask("location.reload()")
    browser.until("document.documentElement.dataset.updates > 0", 30)
    browser.ask("document.querySelector('button[data-order=first]').click()")
    browser.until("document.documentElement.dataset.drawnUpdates > 0", 30)
    after = browser.ask(_ALL_SEEN)
    for old, new in zip(json.loads(before), json.loads(after), strict=True):
        assert old == new, (str(old)[:300], str(new)[:300])


def check_scale(browser: Browser, folder: Path, steps: int, check: Callable[[Path], None]) -> dict[str, Any]:
    """A run of very many steps, watched from its beginning to its end."""
    run = folder / "huge"
    train = [*page_runs.command("huge", run), "--set", f"max_steps={steps}"]
    began = time.monotonic()
    trainer = subprocess.Popen(train)
    took: list[float] = []
    try:
        with watched(run) as (server, told):
            browser.look(1280, 900)
            browser.open(told["address"])
            browser.errors()  # of a server that went away before
            seen = ""
            while trainer.poll() is None:
                last = str(browser.ask("document.documentElement.dataset.drawnUpdates") or "")
                if last != seen:
                    seen = last
                    took.append(float(browser.ask("document.documentElement.dataset.updateTook")))
                time.sleep(0.25)
            assert trainer.returncode == 0
            trained = time.monotonic() - began
            busy = _cpu_seconds(server.pid)
            browser.until("document.querySelector('.state').textContent.startsWith('finished')", 60)
            check(run)
            heap = browser.heap_megabytes()
            resident = _resident_megabytes(server.pid)
            check_same_when_new(browser)
            loaded = float(browser.ask("performance.getEntriesByType('navigation')[0].loadEventEnd")) / 1000
            assert (errors := browser.errors()) == [], errors
    finally:
        end(trainer)
    late = took[-20:]
    assert statistics.median(late) < 250, late
    found = {
        "steps": steps,
        "train_seconds": round(trained, 1),
        "updates_seen": len(took),
        "update_ms_median": round(statistics.median(took), 1),
        "update_ms_median_of_last_20": round(statistics.median(late), 1),
        "update_ms_most": max(took),
        "server_share_of_one_core": round(busy / trained, 3),
        "server_megabytes": resident,
        "browser_heap_megabytes": heap,
        "reload_seconds": round(loaded, 2),
    }
    print(f"{steps:,} steps live: {found}")
    return found


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_megabytes(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def check_refusals(port: int) -> None:
    def status(method: str = "GET", path: str = "/", **headers: str) -> int:
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(method, path, headers=headers)
        found = connection.getresponse().status
        connection.close()
        return found

    assert status(Host="evil.example") == 421
    assert status() == 403
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert status(method) == 405
    for path in ("/../summary.json", "/summary.json", "/etc/passwd"):
        assert status(path=path) in (403, 404)


def until(done: Callable[[], bool], seconds: float = 120.0) -> None:
    last = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < last
        time.sleep(0.05)


def end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
