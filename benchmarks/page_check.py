"""Opens reports and the live view in a real headless Chromium and checks what is to be seen there.

python benchmarks/page_runs.py RUNS                 # real runs to look at, once; 15 minutes on one core
python benchmarks/page_check.py RUNS/demo RUNS/long RUNS/troubled RUNS/busy RUNS/huge [--pictures FOLDER] [--save FILE]
    [--comparison benchmarks/results/2026-11-15-campaign-lm30m-adamw.json ...]

Needs chromium and chromedriver (on Debian: apt-get install chromium chromium-driver). For every run: no console error,
all charts drawn, numbers equal to summary.json, below 3 MB, loaded and drawn within 2 s, the ledger whole on demand,
everything reached with the keyboard and named for a screen reader, enough contrast in both themes. Then all runs in one
page; one with a single entry, whose curves are dots and whose long numbers fit in their cards; a small training
followed live through cut connections, a kill and a resumption; and one of 100,000 steps (`--steps`, 0: none). The page
of a comparison: every chart drawn, a click on an arm hides all its seeds, what lies under the pointer is said.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from browser import Browser
from foretrain.environment import describe
from foretrain.persist.files import write_atomic
from foretrain.show.pages import comparison_page
from foretrain.show.pages.report import write_report
from page_live import check_live, check_scale
from page_reading import check_reading

MOST_BYTES, MOST_SECONDS = 3_000_000, 2.0
CHARTS = ("loss", "rate", "gradient", "forecast", "confidence", "speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--pictures", type=Path, help="write screenshots there: light, dark, narrow, and as printed")
    parser.add_argument("--steps", type=int, default=100_000, help="of the run that is watched all along")
    parser.add_argument("--comparison", nargs="*", type=Path, default=[], help="results of `foretrain compare`")
    parser.add_argument("--save", type=Path, help="write what was measured there, as JSON")
    given = parser.parse_args()
    if given.pictures:
        given.pictures.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"environment": describe(), "reports": {}}
    with Browser() as browser, tempfile.TemporaryDirectory() as folder:
        found["browser"] = browser.version
        pages = [[run] for run in given.runs] + ([given.runs] if len(given.runs) > 1 else [])
        for runs in pages:
            name = "-".join(run.resolve().name for run in runs)[:80]
            found["reports"][name] = check_report(browser, runs, name, Path(folder), given.pictures)

        for result in given.comparison:
            found["reports"][result.stem] = check_comparison(browser, result, Path(folder), given.pictures)
        check_smallest(browser, Path(folder))

        def numbers(run: Path) -> None:
            check_charts(browser, run.name)
            check_numbers(browser, json.loads((run / "summary.json").read_text(encoding="utf-8")), run.name)

        picture = given.pictures / "live.png" if given.pictures else None
        found["live"] = check_live(browser, Path(folder), numbers, picture)
        if given.steps:
            found["scale"] = check_scale(browser, Path(folder), given.steps, numbers)
    if given.save:
        write_atomic(given.save, json.dumps(found, indent=2) + "\n")
    print("all checks passed")


def check_report(browser: Browser, runs: list[Path], name: str, folder: Path, pictures: Path | None) -> dict[str, Any]:
    target = folder / f"{name}.html"
    began = time.monotonic()
    size = write_report(runs, target)
    made = time.monotonic() - began
    assert size < MOST_BYTES, f"{name}: {size} bytes"
    browser.look(1280, 900)
    browser.open(target.as_uri())
    drawn = check_charts(browser, name)
    seconds = float(browser.ask("document.documentElement.dataset.drawnIn")) / 1000
    loaded = float(browser.ask("performance.getEntriesByType('navigation')[0].loadEventEnd")) / 1000
    assert loaded < MOST_SECONDS, f"{name}: {loaded:.2f} s"
    heap = browser.heap_megabytes()
    if len(runs) == 1:
        check_numbers(browser, json.loads((runs[0] / "summary.json").read_text(encoding="utf-8")), name)
    check_axis(browser, name)
    ledger = check_ledger(browser, name)
    check_choices(browser, name)
    reading = check_reading(browser, name)
    assert (errors := browser.errors()) == [], errors
    check_widths(browser, name)
    if pictures:
        browser.open(target.as_uri())  # without the focus and the choices of the checks
        for width, dark, kind in ((1280, False, "light"), (1280, True, "dark"), (390, False, "phone")):
            browser.picture(pictures / f"{name}-{kind}.png", width, dark)
        browser.look(1280, 900)
        printed = browser.command("Page.printToPDF", printBackground=True)["data"]
        (pictures / f"{name}.pdf").write_bytes(base64.b64decode(printed))
    figures: dict[str, Any] = {"bytes": size, "made_seconds": round(made, 2), "loaded_seconds": round(loaded, 3)}
    figures |= {"drawn_seconds": round(seconds, 4), "curves": drawn, "heap_megabytes": heap, **ledger, **reading}
    print(f"{name}: {figures}")
    return figures


def check_comparison(browser: Browser, result: Path, folder: Path, pictures: Path | None) -> dict[str, Any]:
    """Every chart drawn, an arm hidden and shown by a click on its name, and a point told by the pointer on it."""
    name, target = result.stem, folder / f"{result.stem}.html"
    write_atomic(target, comparison_page.page(json.loads(result.read_text(encoding="utf-8"))))
    browser.look(1280, 900)
    browser.open(target.as_uri())
    charts = browser.ask("[...document.querySelectorAll('[data-chart]')].map(one => one.dataset.chart)")
    empty = [chart for chart in charts if browser.until(f"{_holder(chart)}.dataset.drawn") == "empty"]
    assert len(charts) - len(empty) >= 3, (name, empty)
    picture = f"{_holder('curve')}.querySelector('canvas').toDataURL()"
    whole = browser.ask(picture)
    arm = f"{_holder('curve')}.querySelectorAll('th[role=button]')"
    assert int(browser.ask(f"{arm}.length")) > 1, name
    pictures_of_click = []
    for pressed in ("false", "true"):
        browser.ask(f"{arm}[0].click()")
        browser.until(f"{arm}[0].getAttribute('aria-pressed') === '{pressed}'")
        browser.until("new Promise(done => requestAnimationFrame(() => done(true)))")
        pictures_of_click.append(browser.ask(picture))
    assert pictures_of_click[0] != whole, name
    assert pictures_of_click[1] == whole, name
    browser.ask(f"{_holder('curve')}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    told = ""
    box = browser.ask(
        f"(({{left, top, width, height}}) => [left, top, width, height])({_holder('curve')}"
        ".querySelector('.u-over').getBoundingClientRect())"
    )
    for place in range(20 * 15):  # over the whole chart, in steps smaller than the distance from which a point is told
        where = {"x": box[0] + box[2] * (place % 20 + 0.5) / 20, "y": box[1] + box[3] * (place // 20 + 0.5) / 15}
        browser.command("Input.dispatchMouseEvent", type="mouseMoved", **where)
        told = str(browser.ask("(one => one.hidden ? '' : one.textContent)(document.querySelector('.bubble'))"))
        if told:
            break
    assert ", seed " in told, (name, told)
    reading = check_reading(browser, name, "curve")
    assert (errors := browser.errors()) == [], errors
    if pictures:
        browser.open(target.as_uri())
        for width, dark, kind in ((1280, False, "light"), (1280, True, "dark"), (390, False, "phone")):
            browser.picture(pictures / f"{name}-{kind}.png", width, dark)
    figures = {"bytes": target.stat().st_size, "charts": len(charts) - len(empty), **reading}
    print(f"{name}: {figures}")
    return figures


def _holder(chart: str) -> str:
    return f"document.querySelector('[data-chart=\"{chart}\"]')"


def check_smallest(browser: Browser, folder: Path) -> None:
    """A run with a single entry and long numbers: every curve is a dot, and every figure fits in its card."""
    run = folder / "smallest"
    run.mkdir()
    numbers = {"loss": 7754.4507, "smoothed_loss": 7754.4507, "predicted_loss": 7000.0, "confidence": 0.5}
    numbers |= {"gradient_norm": 2.0, "learning_rate": 0.001, "tokens_per_second": 1234.5, "seconds": 1.5}
    ended = {"event": "RunEnded", "step": 12345678, "reason": "finished"}
    lines = [{"event": "Progress", "step": 10, **numbers}, ended]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    summary = {"final_val_loss": 7754.4507, "best_val_loss": 7754.4507, "final_train_loss": 123456.75, "seconds": 1.5}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    target = folder / "smallest.html"
    write_report([run], target)
    for width in (1280, 1010, 700, 390):
        browser.look(width, 900)
        browser.open(target.as_uri())
        high = browser.ask(
            "[...document.querySelectorAll('.card .figure')].filter(one => one.scrollWidth > one.clientWidth || "
            "one.offsetHeight > 36).map(one => one.textContent)"
        )
        assert high == [], f"at {width} pixels these figures do not fit in their cards: {high}"
        for chart in CHARTS:
            browser.until(f"document.querySelector('[data-chart=\"{chart}\"]').dataset.drawn")
            dots = browser.ask(
                f"(() => {{ const canvas = document.querySelector('[data-chart=\"{chart}\"] canvas'); "
                "const high = canvas.height * .75; let coloured = 0; "
                "const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, high).data; "
                "for (let at = 0; at < pixels.length; at += 4) { const one = pixels.subarray(at, at + 3); "
                "if (pixels[at + 3] > 128 && Math.max(...one) - Math.min(...one) > 60) coloured += 1; } "
                "return coloured; })()"
            )
            assert dots >= 4, f"{chart} of a single entry shows {dots} pixels of a curve at {width} pixels"
    assert (errors := browser.errors()) == [], errors


def check_ledger(browser: Browser, name: str) -> dict[str, Any]:
    """Short at first; every filter and order shows what it says; all rows on demand, within a blink."""
    rows = "document.querySelectorAll('#ledger tbody tr').length"
    first = int(browser.ask(rows))
    assert first <= 100, (name, first)
    total = int(browser.ask("JSON.parse(document.getElementById('data').textContent).ledger.rows"))
    took = browser.ask(
        "(() => { const start = performance.now(); [...document.querySelectorAll('.more button')].at(-1).click(); "
        "document.getElementById('ledger').offsetHeight; return performance.now() - start; })()"
    )
    assert browser.ask(rows) == max(total, 1), (name, total)
    assert took < 1000 * MOST_SECONDS, (name, took)
    steps = "[...document.querySelectorAll('#ledger tbody tr')].map(row => row.textContent)"
    for kind in ("move", "phase", "recovery"):
        browser.ask(f"document.querySelector('button[data-show={kind}]').click()")
        told = browser.ask("document.querySelector('[data-count]').textContent")
        shown, known = (int(word.replace(",", "")) for word in told.split(" ")[:3:2])
        assert shown == min(known, 100), (name, told)
        assert known == 0 or int(browser.ask(rows)) == shown, (name, told)
    browser.ask("document.querySelector('button[data-show=all]').click()")
    forth = browser.ask(steps)
    browser.ask("document.querySelector('button[data-order=last]').click()")
    back = browser.ask(steps)
    assert total > 100 or back == forth[::-1], name
    browser.ask("document.querySelector('button[data-order=first]').click()")
    return {"ledger_rows": total, "ledger_all_ms": round(float(took), 1)}


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
    best = summary["best_val_loss"] if summary["best_val_loss"] != summary["final_val_loss"] else None
    wanted = {
        "Held-out loss": [summary["final_val_loss"], best],
        "Training loss": [summary["final_train_loss"]],
        "Steps": [summary["global_step"]],
        "Time": [summary["seconds"]],
    }
    if not summary.get("exact"):
        wanted["Net time saved"] = [audit.get("gain_percent")]
    for card, numbers in wanted.items():
        known = [number for number in numbers if number is not None]
        shown = cards.get(card, [])[: len(numbers)]
        assert shown == known, f"{name}: {card} shows {shown}, the summary says {known}"
    for horizon, quality in (summary.get("forecast") or {}).items():
        row = browser.ask(
            "[...document.querySelectorAll('[data-section=horizons] tbody tr')].filter(row => "
            f"row.cells[0].textContent === '{horizon}').map(row => Number(row.cells[2].firstChild.value))"
        )
        known = None if quality.get("made") == 0 else quality["r2"]
        assert row == [known], f"{name}: R2 at {horizon} shows {row}"


def check_widths(browser: Browser, name: str) -> None:
    """No page is wider than its window, from a desk to a phone."""
    for width in (1280, 700, 485, 390):
        browser.look(width, 900)
        needed = float(browser.ask("document.documentElement.scrollWidth"))
        assert needed <= width, f"{name}: {needed:.0f} pixels wide in a window of {width}"
    browser.look(1280, 900)


def check_axis(browser: Browser, name: str) -> None:
    """The axis that is pressed is the one that suits the loss, and prediction is folded where nothing was tried."""
    pressed = browser.ask(
        "[...document.querySelectorAll('#loss .choices button[aria-pressed=true]')].map(one => one.textContent)"
    )
    log, state = browser.ask("(data => [data.loss.log, data.shared.prediction])(JSON.parse(data.textContent))")
    assert ("logarithmic" in pressed) is log, (name, pressed)
    assert browser.ask("document.querySelector('details.fold').open") is (state == "tried"), (name, state)


def check_choices(browser: Browser, name: str) -> None:
    """Over time, logarithmic, and back: each changes the picture."""
    seen = set()
    for label in ("over time", "logarithmic", "linear", "over steps"):
        browser.ask(
            f"[...document.querySelectorAll('.choices button')].find(one => one.textContent === '{label}').click()"
        )
        seen.add(browser.ask("document.querySelector('[data-chart=loss] canvas').toDataURL()"))
    assert len(seen) >= 3, name


if __name__ == "__main__":
    main()
