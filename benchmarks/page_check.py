"""Opens reports and the live view in a real headless Chromium and checks what is to be seen there.

python benchmarks/page_check.py RUN [RUN ...] [--pictures FOLDER]

Needs chromium and chromedriver (on Debian: apt-get install chromium chromium-driver). For every run: no console error,
all charts drawn, numbers equal to summary.json, below 3 MB, drawn within 2 s, everything reachable with the keyboard.
Then all runs in one page, and a small training followed live: values change, a kill and a resumption are followed, a
foreign Host header, writes and other paths are refused.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from browser import Browser
from foretrain.show.report import write_report

MOST_BYTES, MOST_SECONDS = 3_000_000, 2.0
CHARTS = ("loss", "forecast", "confidence", "gradient", "speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--pictures", type=Path, help="write screenshots there: light, dark and narrow")
    given = parser.parse_args()
    if given.pictures:
        given.pictures.mkdir(parents=True, exist_ok=True)
    with Browser() as browser, tempfile.TemporaryDirectory() as folder:
        for run in given.runs:
            check_report(browser, [run], Path(folder), given.pictures)
        if len(given.runs) > 1:
            check_report(browser, given.runs, Path(folder), given.pictures)
        check_live(browser, Path(folder), given.pictures)
    print("all checks passed")


# --- the file ---------------------------------------------------------------------------------------------------------


def check_report(browser: Browser, runs: list[Path], folder: Path, pictures: Path | None) -> None:
    name = "-".join(run.resolve().name for run in runs)[:80]
    target = folder / f"{name}.html"
    size = write_report(runs, target)
    assert size < MOST_BYTES, f"{name}: {size} bytes"
    browser.look(1280, 900)
    browser.open(target.as_uri())
    drawn = check_charts(browser, name)
    seconds = float(browser.ask("document.documentElement.dataset.drawnIn")) / 1000
    loaded = float(browser.ask("performance.getEntriesByType('navigation')[0].loadEventEnd")) / 1000
    assert loaded < MOST_SECONDS, f"{name}: {loaded:.2f} s"
    if len(runs) == 1:
        check_numbers(browser, json.loads((runs[0] / "summary.json").read_text(encoding="utf-8")), name)
    check_choices(browser, name)
    check_keyboard(browser, name)
    assert (errors := browser.errors()) == [], errors
    if pictures:
        for width, dark, kind in ((1280, False, "light"), (1280, True, "dark"), (420, False, "narrow")):
            browser.picture(pictures / f"{name}-{kind}.png", width, dark)
    print(f"{name}: {size:,} bytes, {drawn} curves drawn in {seconds:.3f} s, page loaded in {loaded:.2f} s")


def check_charts(browser: Browser, name: str) -> int:
    """Every chart that has data is a canvas with more than background on it."""
    curves = 0
    for chart in CHARTS:
        drawn = browser.until(f"document.querySelector('[data-chart=\"{chart}\"]').dataset.drawn")
        if drawn == "empty":
            continue
        curves += int(drawn)
        colours = browser.ask(
            f"(() => {{ const canvas = document.querySelector('[data-chart=\"{chart}\"] canvas'); const pixels = "
            "new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer); "
            "return new Set(pixels).size; })()"
        )
        assert colours > 10, f"{name}: {chart} shows {colours} colours"
    assert curves, name
    return curves


def check_numbers(browser: Browser, summary: dict[str, Any], name: str) -> None:
    cards = browser.ask(
        "Object.fromEntries([...document.querySelectorAll('.card')].map(card => [card.querySelector('dt').textContent, "
        "[...card.querySelectorAll('data')].map(one => Number(one.value))]))"
    )
    audit = summary.get("audit") or {}
    wanted = {
        "Net time saved": [audit.get("gain_percent"), audit.get("low"), audit.get("high")],
        "Held-out loss": [summary["final_val_loss"], summary["best_val_loss"]],
        "Training loss": [summary["final_train_loss"]],
        "Steps": [summary["global_step"]],
        "Time": [summary["seconds"]],
    }
    for card, numbers in wanted.items():
        known = [number for number in numbers if number is not None]
        assert cards[card] == known, f"{name}: {card} shows {cards[card]}, the summary says {known}"
    for horizon, quality in (summary.get("forecast") or {}).items():
        row = browser.ask(
            "[...document.querySelectorAll('[data-section=horizons] tbody tr')].filter(row => "
            f"row.cells[0].textContent === '{horizon}').map(row => Number(row.cells[2].firstChild.value))"
        )
        assert row == [quality["r2"]], f"{name}: R2 at {horizon} shows {row}"


def check_choices(browser: Browser, name: str) -> None:
    """Over time, logarithmic, and back: each changes the picture; the ledger shows what was chosen."""
    seen = set()
    for label in ("over time", "logarithmic", "linear", "over steps"):
        browser.ask(
            f"[...document.querySelectorAll('.choices button')].find(one => one.textContent === '{label}').click()"
        )
        seen.add(browser.ask("document.querySelector('[data-chart=loss] canvas').toDataURL()"))
    assert len(seen) >= 3, name
    if browser.ask("document.querySelectorAll('button[data-show=move]').length"):
        browser.ask("document.querySelector('button[data-show=move]').click()")
        shown = "[...document.querySelectorAll('[data-section=ledger] tbody tr')].filter(row => row.offsetParent)"
        assert browser.ask(f"{shown}.every(row => row.className === 'move')"), name
        browser.ask("document.querySelector('button[data-show=all]').click()")


def check_keyboard(browser: Browser, name: str) -> None:
    """Tab reaches the first link, buttons, curves and tables, in the order of the page, each with a visible focus."""
    browser.ask("document.activeElement.blur(), scrollTo(0, 0)")
    reached = []
    for _ in range(60):
        for kind in ("keyDown", "keyUp"):
            browser.command("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        place = browser.ask(
            "(() => { const at = document.activeElement, box = at.getBoundingClientRect(); return [at.tagName, "
            "at.getAttribute('role') || '', Math.round(box.top + scrollY), "
            "getComputedStyle(at).outlineStyle !== 'none', (at.ariaLabel || at.textContent || '').slice(0, 30)]; })()"
        )
        reached.append(place)
        if place[0] == "SUMMARY":
            break
    kinds = {(tag, role) for tag, role, *_ in reached}
    assert {("A", ""), ("BUTTON", ""), ("TH", "button"), ("DIV", "application"), ("DIV", "region")} <= kinds, (
        name,
        kinds,
    )
    assert all(visible for _, _, _, visible, _ in reached), (name, [one for one in reached if not one[3]])


# --- live -------------------------------------------------------------------------------------------------------------


def check_live(browser: Browser, folder: Path, pictures: Path | None) -> None:
    run = folder / "live"
    train = [sys.executable, "-m", "foretrain.cli", "train", "--out", str(run), "--quiet"]
    settings = ["--set", "max_steps=400", "--set", "log.interval=2", "--set", "checkpoint.interval=20"]
    settings += ["--set", "batch_size=2", "--set", "evaluation.batches=2"]
    trainer = subprocess.Popen([*train, *settings])
    _until((run / "metrics.jsonl").is_file)
    command = [sys.executable, "-m", "foretrain.cli", "watch", str(run), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        told = json.loads(server.stdout.readline())
        browser.look(1280, 900)
        browser.open(told["address"])
        assert browser.ask("location.search") == "", "the token stays in the address"
        step = (
            "Number([...document.querySelectorAll('.card')].find(one => one.textContent.startsWith('Steps'))"
            ".querySelector('data').value)"
        )
        browser.until("document.documentElement.dataset.updates > 2", 60)
        first = browser.ask(step)
        browser.until(f"{step} > {first}", 60)
        assert browser.ask("document.getElementById('status').textContent") == "Live"
        check_charts(browser, "live")
        _until(lambda: any((run / "checkpoints").glob("step-*")))
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        stopped = browser.ask(step)
        trainer = subprocess.Popen([*train, "--resume"])
        browser.until("document.querySelector('[data-section=ledger]').textContent.includes('resumed')", 60)
        browser.until(f"{step} > {stopped}", 120)
        check_refusals(told["port"])
        assert trainer.wait() == 0
        browser.until("document.querySelector('.badge').textContent === 'finished'", 30)
        check_numbers(browser, json.loads((run / "summary.json").read_text(encoding="utf-8")), "live")
        if pictures:
            browser.picture(pictures / "live.png", 1280, True)
        # A server that goes away is said, and one that comes back on its port would need its own new address.
        assert (errors := browser.errors()) == [], errors
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == 0
        browser.until("document.getElementById('status').textContent.startsWith('Not connected')", 20)
        updates = browser.ask("document.documentElement.dataset.updates")
        print(f"live: {updates} updates, kill and resumption followed, refusals in place")
    finally:
        for process in (trainer, server):
            if process.poll() is None:
                process.kill()
                process.wait()


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


def _until(done: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


if __name__ == "__main__":
    main()
