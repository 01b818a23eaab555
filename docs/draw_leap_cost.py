"""Draw what a leap costs beside a step, by points and by width: python docs/draw_leap_cost.py docs/images

The figures are those of benchmarks/results/2026-11-18-leap-cost-cuda.json.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "2026-11-18-leap-cost-cuda.json"
WIDTH, HEIGHT, LEFT, TOP, ACROSS, DOWN, GAP = 720, 290, 52, 40, 280, 190, 60
LOW, HIGH = 0.5, 50.0
"""Milliseconds at the bottom and at the top."""
STYLE = """
text { font: 12.5px system-ui, sans-serif; fill: #5a6372; } .name { fill: #1b1f26; } .ground { fill: #fff; }
.grid { stroke: #d8dde5; } .leap { stroke: #9c3a2b; fill: #9c3a2b; } .step { stroke: #2c5b8a; fill: #2c5b8a; }
polyline { fill: none !important; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa4b4; } .name { fill: #e7eaf0; } .ground { fill: #171b22; } .grid { stroke: #323a47; }
  .leap { stroke: #e8a27c; fill: #e8a27c; } .step { stroke: #8db4d6; fill: #8db4d6; }
}
"""


def up(milliseconds: float) -> float:
    """Return how far down on the page so many milliseconds lie."""
    share = math.log(milliseconds / LOW) / math.log(HIGH / LOW)
    return TOP + DOWN * (1 - share)


def panel(left: float, title: str, by: str, rows: list[dict[str, Any]]) -> list[str]:
    """Draw one panel: milliseconds of a leap and of a step by the number of points or by the width."""
    rows = sorted(rows, key=lambda row: row[by])
    least, most = math.log(rows[0][by]), math.log(rows[-1][by])
    places = [left + ACROSS * (math.log(row[by]) - least) / (most - least) for row in rows]
    parts = [f'<text class="name" x="{left}" y="{TOP - 16}">{title}</text>']
    for tick in (1, 3, 10, 30):
        y = up(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + ACROSS}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    for place, row in zip(places, rows, strict=True):
        parts.append(f'<text x="{place:.1f}" y="{TOP + DOWN + 20}" text-anchor="middle">{row[by]:,}</text>')
    for kind in ("leap", "step"):
        heights = [up(1e3 * row[f"{kind}_seconds"]) for row in rows]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, heights, strict=True))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
        for x, y, row in zip(places, heights, rows, strict=True):
            told = f"{kind}: {1e3 * row[f'{kind}_seconds']:.2f} ms"
            told += f", {row['rows']} rows" if kind == "leap" else ""
            parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{told}</title></circle>')
    return parts


def main() -> None:
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["results"]
    right = LEFT + ACROSS + GAP
    words = "Milliseconds of a leap and of a step of Adam, by points and by width"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        *panel(LEFT, "ms by points, 256 wide", "points", [row for row in rows if row["width"] == 256]),
        *panel(right, "ms by width, 8,192 points", "width", [row for row in rows if row["points"] == 8192]),
        f'<circle class="leap" cx="{LEFT + 4}" cy="{HEIGHT - 16}" r="4"/>',
        f'<text x="{LEFT + 14}" y="{HEIGHT - 12}">a linearised leap</text>',
        f'<circle class="step" cx="{LEFT + 140}" cy="{HEIGHT - 16}" r="4"/>',
        f'<text x="{LEFT + 150}" y="{HEIGHT - 12}">a step of Adam</text>',
        "</svg>",
    ]
    (Path(sys.argv[1]) / "leap-cost.svg").write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
