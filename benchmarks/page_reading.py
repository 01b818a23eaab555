"""For `page_check.py`: can a page be used with the keyboard, heard instead of seen, and read in both themes?"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from browser import Browser

_FOCUSABLE = (
    "[...document.querySelectorAll('a[href], button, summary, [tabindex]')]"
    ".filter(one => one.tabIndex >= 0 && one.checkVisibility({visibilityProperty: true}))"
)
_HERE = (
    "(() => { const at = document.activeElement, style = getComputedStyle(at); return [at.tagName, "
    "at.getAttribute('role') || '', style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1, "
    f"{_FOCUSABLE}.indexOf(at), (at.ariaLabel || at.textContent || '').slice(0, 40)]; }})()"
)
_HEADINGS = (
    "[...document.querySelectorAll('h1, h2, h3, h4')].filter(one => one.checkVisibility()).map(one => +one.tagName[1])"
)
_CONTRAST = """(() => {
  const parts = text => text.match(/^rgba?\\(([^)]+)\\)/)?.[1].split(/[ ,/]+/).map(Number);
  const light = part => part <= 10 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4;
  const bright = colour => .2126 * light(colour[0]) + .7152 * light(colour[1]) + .0722 * light(colour[2]);
  const behind = one => { for (; one; one = one.parentElement) {
    const colour = parts(getComputedStyle(one).backgroundColor); if (colour && (colour[3] ?? 1) === 1) return colour; }
    return [255, 255, 255]; };
  const found = new Map(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !one.checkVisibility()) continue;
    if (one.closest('svg, script, style, noscript, .bubble, .skip, .unseen')) continue;
    const style = getComputedStyle(one), ink = parts(style.color);
    if (!ink) continue;
    const pair = [bright(ink), bright(behind(one))].sort((a, b) => b - a), ratio = (pair[0] + .05) / (pair[1] + .05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 600);
    if (ratio < (large ? 3 : 4.5)) found.set(`${one.tagName}.${one.className}`, +ratio.toFixed(2));
  }
  return [...found];
})()"""


def check_reading(browser: Browser, name: str, chart: str = "loss") -> dict[str, Any]:
    """How much was looked at, once all of it was found in order."""
    assert browser.ask("document.documentElement.lang") == "en", name
    levels = browser.ask(_HEADINGS)
    assert levels[0] == 1, (name, levels)
    assert levels.count(1) == 1, (name, levels)
    assert all(after <= before + 1 for before, after in pairwise(levels)), (name, levels)
    for dark in (False, True):
        browser.look(1280, 900, dark)
        browser.until(
            f"getComputedStyle(document.documentElement).colorScheme.includes('{'dark' if dark else 'light'}')"
        )
        assert (pale := browser.ask(_CONTRAST)) == [], (name, "dark" if dark else "light", pale)
    browser.look(1280, 900)
    return {"headings": len(levels), "named": _names(browser, name), "tab_stops": _keyboard(browser, name, chart)}


def _names(browser: Browser, name: str) -> int:
    """Everything that takes the focus or is a picture has a name in the accessibility tree."""
    nodes = browser.command("Accessibility.getFullAXTree")["nodes"]
    told = [
        (node["role"]["value"], node.get("name", {}).get("value", ""), node) for node in nodes if not node["ignored"]
    ]
    wanted = []
    for role, said, node in told:
        focusable = any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", ()))
        if (focusable and role != "RootWebArea") or role in ("image", "img", "region", "application"):
            wanted.append((role, said))
    assert (nameless := [role for role, said in wanted if not said.strip()]) == [], (name, nameless)
    charts = [said for role, said in wanted if role == "application"]
    assert charts, name
    rows = [said for said in charts if said.startswith("Phases of ")]  # these have no values
    assert all("lowest" in said and "highest" in said for said in charts if said not in rows), (name, charts)
    return len(wanted)


def press(browser: Browser, key: str, code: int, **more: Any) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)


def _keyboard(browser: Browser, name: str, chart: str) -> int:
    """Tab goes through everything once, in the order of the page, each with a visible focus; keys use what is there."""
    browser.ask("document.activeElement.blur(), scrollTo(0, 0)")
    count = int(browser.ask(f"{_FOCUSABLE}.length"))
    reached = []
    for _ in range(count):
        press(browser, "Tab", 9)
        reached.append(browser.ask(_HERE))
    places = [place for *_, place, _ in reached]
    assert places == list(range(count)), (name, count, reached)
    assert all(visible for _, _, visible, _, _ in reached), (name, [one for one in reached if not one[2]])
    # Arrow keys read the values of a chart aloud; Enter hides a curve and shows it again.
    browser.ask(f"document.querySelector('[data-chart={chart}] [role=application]').focus()")
    heard = []
    for _ in range(3):
        press(browser, "ArrowRight", 39)
        heard.append(browser.ask("document.querySelector('.unseen').textContent"))
    assert len(set(heard)) == 3, (name, heard)
    assert all(text.startswith("step " if chart == "loss" else "training time") for text in heard), (name, heard)
    assert all(": " in text for text in heard), (name, heard)
    browser.ask(f"document.querySelector('[data-chart={chart}] th[role=button]').focus()")
    for pressed in ("false", "true"):
        press(browser, "Enter", 13, text="\r")
        browser.until(f"document.activeElement.getAttribute('aria-pressed') === '{pressed}'")
    return count
