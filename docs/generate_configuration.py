"""Writes docs/configuration.md from the schema, so that the page cannot say anything else than the program does."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from foretrain.config import Config, settings
from foretrain.config.names import BARE_ALIASES, KEY_ALIASES, PRESETS, RESERVED, SECTION_ALIASES, WITHOUT_SIZE

PAGE = Path(__file__).parent / "configuration.md"
WIDTH = 120

INTRODUCTION = """# Configuration

<!-- Written by docs/generate_configuration.py from the schema; change the schema, then run `make docs`. -->

A run is described by one TOML file, or by none: every setting has a default.

```
foretrain config init my.toml          # write a file with every setting, its default and its meaning
foretrain config check my.toml         # exit 0, or 2 and one line that says what is wrong
foretrain config show my.toml          # the whole configuration as a run would see it; --json for programs
foretrain train my.toml --set max_steps=5000 --set optimizer.learning_rate=3e-4
```

`--set key=value` changes one setting and can be repeated; words need no quotes. The file overrides the preset,
and `--set` overrides the file. An unknown key is an error that names the nearest known one, also for names that other
tools use (`block_size`, `warmup_ratio`, `max_grad_norm`). Keys are written with their section: `warmup_steps` alone
could be the learning rate's or prediction's, and is refused with both names.
"""


def wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION]
    section = None
    for setting in settings():
        name, _, key = setting.name.rpartition(".")
        if name != section:
            section = name
            model = Config.model_fields[name].annotation if name else Config
            about = " ".join((model.__doc__ or "").split())
            lines += ["", f"## `[{name}]`" if name else "## Top level", "", *wrapped(about), ""]
        default = "unset" if setting.default is None else f"`{json.dumps(setting.default)}`"
        lines += wrapped(f"- **`{key}`** ({setting.kind}; default {default}): {setting.meaning}", "  ")
    lines += [
        "",
        "## Presets",
        "",
        '`preset = "NAME"` sets these values before the file is read. `measured` is the default: the defaults above.',
        f"{', '.join(f'`{name}`' for name in PRESETS if name in WITHOUT_SIZE)} carry the numbers of the original",
        "methodology: phases and rates, no model size (that is `model.type`).",
        "",
    ]
    for name, values in PRESETS.items():
        if values:
            told = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in values.items())
            lines += wrapped(f"- **`{name}`**: {told}", "  ")
    lines += [""]
    lines += [
        "## Other names",
        "",
        "These names load as well, for configurations written for the original methodology:",
        "",
    ]
    lines += ["| name | means |", "|---|---|"]
    lines += [f"| `[{name}]` | `[{target}]` |" for name, target in SECTION_ALIASES.items()]
    lines += [
        f"| `{name}` | {', '.join(f'`{target}`' for target in targets)} |" for name, targets in KEY_ALIASES.items()
    ]
    twice = "warmup_steps"  # also `schedule.warmup_steps`
    lines += [f"| `{name}` | `{target}` |" for name, target in BARE_ALIASES.items() if name not in (target, twice)]
    lines += [f"| `{twice}` beside `full_steps` at the top of a file | `{BARE_ALIASES[twice]}` |"]
    lines += [
        "",
        "Type names may be written in capitals (`AdamW`, `WarmupStableDecay`). These load with a notice that they",
    ]
    lines += ["have no effect: " + ", ".join(f"`{name}`" for name in RESERVED) + ".", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
