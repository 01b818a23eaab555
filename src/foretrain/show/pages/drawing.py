"""The smallest pieces of a chart as SVG text."""

from __future__ import annotations

from html import escape

from foretrain.show.pages.theme import LOOKS

_CHARACTER = 6.7  # pixels of an average character, on the wide side so that nothing is cut off


def svg(content: str, label: str, width: int, height: float) -> str:
    size = f'viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}"'
    return f'<svg class="chart" {size} role="img" aria-label="{escape(label)}">{content}</svg>'


def text_at(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(text)}</text>'


def text_width(text: str) -> float:
    return len(text) * _CHARACTER


def title(text: str) -> str:
    """What is shown when the pointer rests on a mark."""
    return f"<title>{escape(text)}</title>" if text else ""


def marker(look: int, x: float, y: float, size: float = 4.0, style: str = "mark", tip: str = "") -> str:
    """A shape for each look, so that colour is not needed to tell them apart."""
    s = size
    shapes = (
        f"m{-s} 0a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z",
        f"m0 {-1.3 * s:g}l{1.3 * s:g} {1.3 * s:g}l{-1.3 * s:g} {1.3 * s:g}l{-1.3 * s:g} {-1.3 * s:g}z",
        f"m{-0.9 * s:g} {-0.9 * s:g}h{1.8 * s:g}v{1.8 * s:g}h{-1.8 * s:g}z",
        f"m0 {-1.2 * s:g}l{1.2 * s:g} {2.1 * s:g}h{-2.4 * s:g}z",
        f"m0 {1.2 * s:g}l{1.2 * s:g} {-2.1 * s:g}h{-2.4 * s:g}z",
        _plus(s),
        f"m{-1.2 * s:g} 0l{2.1 * s:g} {-1.2 * s:g}v{2.4 * s:g}z",
        f"m{1.2 * s:g} 0l{-2.1 * s:g} {-1.2 * s:g}v{2.4 * s:g}z",
    )
    return f'<path class="{style}" d="M{x:.1f} {y:.1f}{shapes[look % LOOKS]}">{title(tip)}</path>'


def _plus(size: float) -> str:
    side = f"{0.8 * size:g}"
    start = f"m{-0.4 * size:g} {-1.2 * size:g}"
    return f"{start}h{side}v{side}h{side}v{side}h-{side}v{side}h-{side}v-{side}h-{side}v-{side}h{side}z"
