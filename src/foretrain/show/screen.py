"""Make the screens that everything is printed on: as wide as the terminal, or plain lines where there is none."""

from __future__ import annotations

from typing import Any, Literal, TextIO, cast

from rich.console import Console
from rich.text import Text

from foretrain.show.outlet import discard, visible

_WIDE = 200
"""A table that nobody looks at on a terminal has so many columns: none of its cells is cut or folded."""


class Screen(Console):
    """Its reader may go away, as `head` does: what is printed afterwards is dropped, and the work goes on."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Texts may quote files: characters that steer a terminal are shown."""
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(cast("TextIO", self.file))


def screen(stream: Literal["stdout", "stderr"] = "stdout", *, wide: bool = True) -> Console:
    """Redraws, bars and cursor movements only on a real terminal, whatever the environment says of colours.

    wide: without a terminal, tables are as wide as they need; otherwise 80 columns.
    """
    console = Screen(stderr=stream == "stderr", highlight=False)
    if console.file.isatty():
        return console
    return Screen(stderr=stream == "stderr", highlight=False, force_interactive=False, width=_WIDE if wide else None)
