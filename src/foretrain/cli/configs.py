"""`foretrain config`: write, show and check configuration files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from foretrain.cli.terminal import Json, Settings, put, put_json, say
from foretrain.errors import ConfigError, InputError

config_app = App(name="config", help="Write, show and check configuration files.")


@config_app.command
def init(
    file: Path,
    /,
    *,
    preset: Annotated[
        str,
        Parameter(
            help="Preset to start from. `small`, `medium`, `large`, `specialist` and `generalist` set phases and "
            "rates, no model size."
        ),
    ] = "measured",
    set_: Settings = None,
    json_: Json = False,
) -> None:
    """Write a configuration file with every setting, its default and its meaning."""
    from foretrain.config import load, to_toml

    loaded = load(None, [f"preset={preset}", *(set_ or ())])
    text = to_toml(loaded.config)
    for notice in loaded.notices:
        say(f"note: {notice}")
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise InputError(f"{file} exists already; choose another name or delete it first") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror})") from None
    command = f"foretrain {'finetune' if preset == 'finetune' else 'train'} {shlex.quote(str(file))}"
    if json_:
        put_json({"written": str(file), "command": command})
    else:
        put(f"wrote {file}; train it with: {command}")


@config_app.command
def show(file: Path | None = None, /, *, set_: Settings = None, json_: Json = False) -> None:
    """Print the whole configuration as a run would see it, with the meaning of every setting."""
    from foretrain.config import load, to_mapping, to_toml

    config = load(file, set_ or ()).config
    if json_:
        put_json(to_mapping(config))
    else:
        put(to_toml(config).rstrip())


@config_app.command
def check(file: Path, /, *, set_: Settings = None, json_: Json = False) -> None:
    """Check a configuration file. Exit code 0: it can be used. 2: it cannot, and the reason is printed."""
    from foretrain.config import load

    try:
        loaded = load(file, set_ or ())
    except ConfigError as error:
        error.facts = {"ok": False}
        raise
    if json_:
        put_json({"ok": True, "notices": list(loaded.notices)})
        return
    for text in loaded.notices:
        put(f"note: {text}")
    put(f"{file}: ok")
