"""Draw the arms of campaign results with their intervals: python docs/draw_campaign.py OUT.svg RESULT.json [...]"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

from foretrain.show.pages.comparison_page import place, ratio_range, round_factors

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 300, 18, 10, 36
STYLE = """
text { font: 12.5px system-ui, sans-serif; fill: #5a6372; } .name { fill: #1b1f26; } .grid { stroke: #e8eaee; }
.one { stroke: #5a6372; stroke-dasharray: 3 2; } .span { stroke: #4a5260; stroke-width: 1.6; fill: none; }
.dot { fill: #4a5260; } .ground { fill: #fff; }
@media (prefers-color-scheme: dark) { text { fill: #9aa4b4; } .name { fill: #e7eaf0; } .grid { stroke: #272d37; }
.one { stroke: #9aa4b4; } .span { stroke: #c3cad6; } .dot { fill: #c3cad6; } .ground { fill: #171b22; } }
"""


def rows(path: Path) -> list[dict[str, Any]]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[result["config"]["optimizer"]["type"]]
    ladder = {rung["rung"] for rung in result["analysis"]["ladder"]}
    return [
        {"name": f"{optimizer}: {arm['label']}", **arm["speedup"]}
        for arm in result["analysis"]["arms"]
        if arm["speedup"] is not None and arm["n"] >= 3 and arm["arm"] not in ladder
    ]


def draw(found: list[dict[str, Any]]) -> str:
    bounds = ratio_range(found)
    bottom = TOP + ROW * len(found)

    def x(factor: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * place(factor, bounds) / 100

    label = "Speed-up to equal loss over the equally tuned plain loop, 95 % intervals"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 46}" role="img" aria-label="{label}">',
        f'<style>{STYLE}</style><rect class="ground" width="100%" height="100%" rx="6"/>',
    ]
    for factor in round_factors(bounds, 6):
        style = "one" if factor == 1 else "grid"
        parts.append(f'<path class="{style}" d="M{x(factor):.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{x(factor):.1f}" y="{bottom + 17}" text-anchor="middle">{factor:g}</text>')
    for number, row in enumerate(found):
        y = TOP + ROW * number + ROW / 2
        parts.append(f'<text class="name" x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(row["name"])}</text>')
        if row["low"] is not None and row["high"] is not None:
            parts.append(f'<path class="span" d="M{x(row["low"]):.1f} {y - 4}v8m0 -4H{x(row["high"]):.1f}m0 -4v8"/>')
        parts.append(f'<circle class="dot" cx="{x(row["mean"]):.1f}" cy="{y}" r="4.4"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">speed-up to equal loss (factor, log scale)</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    picture, *files = (Path(argument) for argument in sys.argv[1:])
    picture.write_text(draw([row for file in files for row in rows(file)]), encoding="utf-8")


if __name__ == "__main__":
    main()
