"""Draw solutions of two examples and their errors, with leaps and without: python docs/draw_science.py docs/images"""

from __future__ import annotations

import math
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXAMPLES = Path(__file__).parents[1] / "examples"
CELLS, LEVELS = 80, 20
SIDE, GAP, LEFT, TOP, HEIGHT = 196, 52, 34, 34, 300
SOLUTION = ("#2c5b8a", "#8db4d6", "#f4f4f2", "#e8a27c", "#9c3a2b")
ERROR = ("#10182e", "#2b4a73", "#3f8a86", "#9cc46b", "#fdf0a0")
SMALLEST, LARGEST = -6.0, -1.0
"""Powers of ten between which errors are told apart."""
STYLE = """
text { font: 12.5px system-ui, sans-serif; fill: #5a6372; } .name { fill: #1b1f26; } .ground { fill: #fff; }
.frame { fill: none; stroke: #9aa4b4; }
@media (prefers-color-scheme: dark) { text { fill: #9aa4b4; } .name { fill: #e7eaf0; } .ground { fill: #171b22; } }
"""


@dataclass(frozen=True)
class Case:
    """Says what to draw of an example: the corners of its domain and the names of its axes."""

    name: str
    low: tuple[float, float]
    high: tuple[float, float]
    axes: tuple[str, str]
    steps: int

    def grid(self) -> Tensor:
        """Return the middles of all cells, the first axis from left to right, the second from top to bottom."""
        share = (torch.arange(CELLS) + 0.5) / CELLS
        across, down = torch.meshgrid(share, 1 - share, indexing="xy")
        low, high = torch.tensor(self.low), torch.tensor(self.high)
        return low + (high - low) * torch.stack([across, down], 2).reshape(-1, 2)


CASES = [
    Case("poisson", (0.0, 0.0), (1.0, 1.0), ("x", "y"), 1000),
    Case("burgers", (0.0, -1.0), (1.0, 1.0), ("t", "x"), 2000),
]


def mixed(colours: tuple[str, ...], share: float) -> str:
    """Return the colour at this share of the way through the colours."""
    place = share * (len(colours) - 1)
    first = min(int(place), len(colours) - 2)
    parts = [[int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in colours[first : first + 2]]
    return "#" + "".join(f"{round(a + (b - a) * (place - first)):02x}" for a, b in zip(*parts, strict=True))


def field(levels: list[list[int]], colours: tuple[str, ...]) -> str:
    """Draw a field of levels, cells of one level in a row as one box."""
    boxes: dict[int, list[str]] = {}
    for y, row in enumerate(levels):
        start = 0
        for x in range(1, len(row) + 1):
            if x == len(row) or row[x] != row[start]:
                boxes.setdefault(row[start], []).append(f"M{start} {y}h{x - start}v1h{start - x}z")
                start = x
    paths = [f'<path fill="{mixed(colours, k / (LEVELS - 1))}" d="{"".join(boxes[k])}"/>' for k in sorted(boxes)]
    return "".join(paths)


def levels_of(values: Tensor, low: float, high: float) -> list[list[int]]:
    share = ((values.double() - low) / (high - low)).clamp(0, 1 - 1e-9)
    return [[int(v) for v in row] for row in (share * LEVELS).floor().reshape(CELLS, CELLS).tolist()]


def panel(
    place: int, title: str, values: Tensor, bounds: tuple[float, float], colours: tuple[str, ...], case: Case
) -> str:
    left = LEFT + place * (SIDE + GAP)
    bottom, scale = TOP + SIDE, SIDE / CELLS
    power = colours is ERROR
    texts = [
        f'<text class="name" x="{left + SIDE / 2}" y="{TOP - 12}" text-anchor="middle">{title}</text>',
        f'<text x="{left}" y="{bottom + 16}">{case.low[0]:g}</text>',
        f'<text x="{left + SIDE}" y="{bottom + 16}" text-anchor="end">{case.high[0]:g}</text>',
        f'<text x="{left + SIDE / 2}" y="{bottom + 16}" text-anchor="middle">{case.axes[0]}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">{case.low[1]:g}</text>',
        f'<text x="{left - 6}" y="{TOP + 10}" text-anchor="end">{case.high[1]:g}</text>',
        f'<text x="{left - 6}" y="{TOP + SIDE / 2}" text-anchor="end">{case.axes[1]}</text>',
    ]
    bar = "".join(
        f'<rect x="{left + SIDE * k / LEVELS:.1f}" y="{bottom + 28}" width="{SIDE / LEVELS + 0.3:.1f}" height="9" '
        f'fill="{mixed(colours, k / (LEVELS - 1))}"/>'
        for k in range(LEVELS)
    )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = bounds[0] + share * (bounds[1] - bounds[0])
        shown = f"{10**value:.0e}".replace("e-0", "e-") if power else f"{value:.2g}"
        texts.append(f'<text x="{left + SIDE * share}" y="{bottom + 52}" text-anchor="{anchor}">{shown}</text>')
    drawn = field(levels_of(values, *bounds), colours)
    return (
        f'<g transform="translate({left} {TOP}) scale({scale:g})" shape-rendering="crispEdges">{drawn}</g>'
        f'<rect class="frame" x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}"/>{bar}{"".join(texts)}'
    )


def draw(case: Case, steps: int) -> str:
    """Run an example with leaps and without, and draw its solution and both errors."""
    example: dict[str, Any] = runpy.run_path(str(EXAMPLES / f"{case.name}.py"))
    grid = case.grid()
    wanted = example["solution"](grid).squeeze(1)
    most = float(wanted.abs().max())
    panels = []
    for place, plain in ((1, False), (2, True)):
        model, _, error = example["main"](steps=steps, plain=plain)
        with torch.no_grad():
            found = model(grid).squeeze(1)
        if not plain:
            panels.append(panel(0, f"u after {steps} steps, with leaps", found, (-most, most), SOLUTION, case))
        away = (found - wanted).abs().clamp(min=10**SMALLEST).log10()
        title = f"{'Adam alone' if plain else 'with leaps'}: error {error:.1e}"
        panels.append(panel(place, title, away, (SMALLEST, LARGEST), ERROR, case))
    width = LEFT + 3 * SIDE + 2 * GAP + 14
    label = f"{case.name}: the solution, its error with leaps and its error with Adam alone, after {steps} steps"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{label}">'
    ground = f'<style>{STYLE}</style><rect class="ground" width="100%" height="100%" rx="6"/>'
    return "\n".join([head, ground, *panels, "</svg>"]) + "\n"


def main() -> None:
    folder, fewer = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else math.inf
    for case in CASES:
        (folder / f"{case.name}.svg").write_text(draw(case, int(min(case.steps, fewer))), encoding="utf-8")


if __name__ == "__main__":
    main()
