"""Draw a run from its metrics.jsonl: loss over steps, phases as bands, moves as marks.

python docs/draw_run.py runs/demo docs/images/run.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 300, 56, 40, 34
COLOURS = {"warmup": "#e8e8e8", "full": "#dbe9f6", "predict": "#f5a85b", "correct": "#9ccc8a"}
MARKS = {"kept": "#2a7d2a", "shrunk": "#2a7d2a", "refused": "#b3541e", "rolled back": "#b3541e"}


def draw(events: list[dict[str, Any]]) -> str:
    progress = [event for event in events if event["event"] == "Progress"]
    held_out = [event for event in events if event["event"] == "Evaluated"]
    last = max(event["step"] for event in progress)
    losses = [event["loss"] for event in progress + held_out]
    low, high = min(losses), max(losses)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 16) * step / last

    def y(loss: float) -> float:
        return TOP + (HEIGHT - BOTTOM - TOP) * (high - loss) / (high - low)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12" '
            'font-family="system-ui, sans-serif" role="img" aria-label="Loss over steps, with phases and moves">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    changes = [(event["step"], event["phase"]) for event in events if event["event"] == "PhaseChanged"]
    spans = zip([(0, "warmup"), *changes], [*changes, (last, "")], strict=True)
    for (start, phase), (end, _) in spans:
        width = max(1.5, x(end) - x(start))
        parts.append(
            f'<rect x="{x(start):.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - BOTTOM - TOP}" '
            f'fill="{COLOURS[phase]}"/>'
        )
    line = " ".join(f"{x(event['step']):.1f},{y(event['loss']):.1f}" for event in progress)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f4e79" stroke-width="1.4"/>')
    parts += [
        f'<circle cx="{x(event["step"]):.1f}" cy="{y(event["loss"]):.1f}" r="3" fill="#8a1c7c"/>' for event in held_out
    ]
    parts += [
        f'<path d="M{x(event["step"]):.1f} {TOP - 4}l-5 -9h10z" fill="{MARKS[event["verdict"]]}">'
        f"<title>{event['horizon']} steps ahead: {event['verdict']}</title></path>"
        for event in events
        if event["event"] == "Moved"
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        step, loss = last * share, low + (high - low) * share
        parts.append(f'<text x="{x(step):.0f}" y="{HEIGHT - 22}" text-anchor="middle">{step:.0f}</text>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.0f}" text-anchor="end">{loss:.2f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 5}" text-anchor="middle">virtual steps</text>')
    parts.append(f'<text x="12" y="{TOP - 16}">loss</text>')
    legend = [*((colour, name) for name, colour in COLOURS.items()), ("#1f4e79", "training"), ("#8a1c7c", "held-out")]
    for index, (colour, name) in enumerate(legend):
        place = 150 + 98 * index
        parts.append(f'<rect x="{place}" y="6" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{place + 16}" y="16">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    run, picture = Path(sys.argv[1]), Path(sys.argv[2])
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    picture.write_text(draw([json.loads(line) for line in lines]), encoding="utf-8")


if __name__ == "__main__":
    main()
