"""The shell of a page in one file: style, themes, tables, figures. It loads nothing and can be read without script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from foretrain.config.paths import flattened
from foretrain.show.pages.theme import CHART_STYLE, DARK, FONT, LIGHT, variables

UNKNOWN = '<span class="unknown" title="unknown">–</span>'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

STYLE = f"""
:root {{ color-scheme: light; {variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ color-scheme: dark; {variables(DARK)} }} }}
:root[data-theme=dark] {{ color-scheme: dark; {variables(DARK)} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 15.5px/1.55 {FONT}; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 40px 28px 72px; }}
h1 {{ font-size: 17px; font-weight: 600; margin: 0; color: var(--muted); letter-spacing: .005em; }}
h2 {{ font-size: 20px; font-weight: 650; margin: 60px 0 6px; letter-spacing: -.01em; }}
h3 {{ font-size: 15px; font-weight: 600; margin: 0 0 8px; }}
p {{ margin: 0 0 12px; max-width: 46em; }}
.top {{ display: flex; justify-content: space-between; align-items: baseline; gap: 16px; }}
.top button {{ font: inherit; font-size: 13px; color: var(--muted); background: none; border: 1px solid var(--line);
  border-radius: 99px; padding: 3px 12px; cursor: pointer; white-space: nowrap; }}
.top button:hover, .top button:focus-visible {{ color: var(--ink); border-color: var(--muted); }}
.verdict {{ font-size: clamp(21px, 2.7vw, 31px); line-height: 1.3; letter-spacing: -.017em; font-weight: 600;
  max-width: 33em; margin: 14px 0 14px; text-wrap: pretty; }}
.badge {{ display: inline-block; font-size: 12.5px; font-weight: 600; padding: 2px 11px; border-radius: 99px;
  margin-top: 26px; border: 1px solid currentColor; color: var(--muted); }}
.badge.gain {{ color: var(--good); }} .badge.slower {{ color: var(--bad); }}
.badge.caution {{ color: var(--caution); border-style: dashed; }}
.facts, .lead, figcaption, .small {{ color: var(--muted); }}
.facts, .small {{ font-size: 13.5px; }}
.small {{ line-height: 1.4; }}
.notice {{ border-left: 3px solid var(--caution); padding: 8px 16px; background: var(--surface); margin: 20px 0; }}
.notice ul {{ margin: 6px 0 0; padding-left: 20px; }}
figure {{ margin: 18px 0 0; padding: 18px 20px 12px; background: var(--surface); border: 1px solid var(--grid);
  border-radius: 10px; min-width: 0; break-inside: avoid; }}
figcaption {{ font-size: 13.5px; margin: 0 0 12px; max-width: 60em; }}
.pair {{ display: grid; grid-template-columns: 1fr 1fr; gap: 20px; }}
svg.chart {{ display: block; max-width: 100%; height: auto; margin: 0 auto; overflow: visible; }}
.narrow {{ display: none; }}
.scroll {{ overflow-x: auto; max-width: 100%; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }}
th {{ text-align: left; font-weight: 500; font-size: 12.5px; line-height: 1.35; color: var(--muted);
  vertical-align: bottom; }}
th, td {{ padding: 8px 14px 8px 0; border-bottom: 1px solid var(--grid); }}
th:last-child, td:last-child {{ padding-right: 2px; }}
tbody tr:last-child td {{ border-bottom: 0; }}
td {{ vertical-align: top; }}
.number {{ text-align: right; white-space: nowrap; }}
.forest svg.chart {{ max-width: none; }}
.forest {{ padding-top: 0; padding-bottom: 0; vertical-align: middle; overflow: hidden; }}
th.forest {{ vertical-align: bottom; }}
.arms td {{ vertical-align: middle; }} .arms td, .arms th {{ padding-right: 12px; }}
.arms td:first-child {{ min-width: 200px; }}
.claim td {{ background: color-mix(in srgb, var(--series-1) 7%, transparent); }}
.swatch {{ display: inline-block; vertical-align: -2px; margin-right: 8px; }}
.unknown {{ color: var(--muted); }}
details {{ margin-top: 12px; }}
summary {{ cursor: pointer; color: var(--muted); font-size: 13.5px; }}
summary:hover {{ color: var(--ink); }}
details > .scroll {{ max-height: 460px; overflow: auto; margin-top: 10px; }}
.block {{ border-top: 1px solid var(--grid); padding-top: 14px; margin-top: 14px; }}
.block > summary {{ color: var(--ink); font-size: 15.5px; font-weight: 600; }}
ul.rules {{ padding-left: 20px; max-width: 48em; }} ul.rules li {{ margin-bottom: 6px; }}
pre {{ background: var(--surface); border: 1px solid var(--grid); border-radius: 8px; padding: 14px 16px;
  white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }}
td code {{ font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }}
@media (max-width: 900px) {{ .pair {{ grid-template-columns: 1fr; gap: 0; }} }}
@media (max-width: 640px) {{
  main {{ padding: 22px 14px 48px; }} h2 {{ margin-top: 44px; }} figure {{ padding: 14px 10px 8px; }}
  .wide {{ display: none; }} .narrow {{ display: block; }}
  .arms {{ font-size: 13px; }} .arms .small {{ font-size: 12.5px; }} .arms td, .arms th {{ padding-right: 8px; }}
  .arms td:first-child {{ min-width: 108px; }} .forest svg.chart {{ width: 150px; }} .badge {{ margin-top: 18px; }}
}}
@media print {{
  :root, :root[data-theme=dark], :root:not([data-theme=light]) {{ color-scheme: light; {variables(LIGHT)} }}
  body {{ background: none; font-size: 11pt; }} main {{ max-width: none; padding: 0; }} .top button {{ display: none; }}
  .wide {{ display: block; }} .narrow {{ display: none; }} .scroll {{ overflow: visible; max-height: none; }}
  h2 {{ break-after: avoid; margin-top: 32px; }} figure {{ border: 0; padding: 0; }}
}}
{CHART_STYLE}"""

# The button is made by the script, so that a page without script has no button that does nothing.
_SCRIPT = """
const root = document.documentElement, button = document.createElement('button');
const asked = () => matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
const dark = () => (root.dataset.theme || asked()) === 'dark';
const name = () => { button.textContent = dark() ? 'Light theme' : 'Dark theme'; };
if (['#dark', '#light'].includes(location.hash)) root.dataset.theme = location.hash.slice(1);
button.type = 'button';
button.onclick = () => { root.dataset.theme = dark() ? 'light' : 'dark'; name(); };
name();
document.querySelector('.top').append(button);
"""


def document(title: str, body: str) -> str:
    """A whole page. `body` is markup; it has an element of class "top", which gets the button for the theme."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1, style: str = "") -> str:
    """Cells are markup already; from column `numbers_from` on they stand to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if place >= numbers_from else "" for place in range(len(cells))]
        scope = ' scope="col"' if tag == "th" else ""
        made = (f"<{tag}{scope}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(made)}</tr>\n"

    body = "".join(line(row, "td") for row in rows)
    return scrolling(line(head, "th"), body, style)


def scrolling(head: str, body: str, style: str = "") -> str:
    """A table that is moved sideways by itself where the screen is too narrow for it."""
    made = f'<table class="{style}"><thead>{head}</thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{made}</div>'


def details(summary: str, content: str, style: str = "") -> str:
    return f'<details class="{style}"><summary>{escape(summary)}</summary>{content}</details>'


def figure(draw: Callable[[int], str], widths: tuple[int, int], title: str, caption: str, data: str) -> str:
    """A chart drawn for wide and for narrow screens, with the numbers behind it."""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    pictures = f'<div class="wide">{draw(widths[0])}</div><div class="narrow">{draw(widths[1])}</div>'
    return f"<figure>{heading}{told}{pictures}{details('The numbers behind this chart', data)}</figure>"


def settings_table(settings: Mapping[str, object]) -> str:
    """A nested mapping as rows of dotted names and values."""
    rows = [(name, "not set" if value is None else str(value)) for name, value in flattened(settings).items()]
    cells = [[f"<code>{escape(name)}</code>", f"<code>{escape(value)}</code>"] for name, value in rows]
    return table(["setting", "value"], cells, numbers_from=2)
