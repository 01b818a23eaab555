"""Settings, in files and on the command line, and the command line itself: makers of inputs for the fuzzer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fuzz_mutations as spoil
from fuzz_examples import EAGER, TINY
from fuzz_maker import Input, Maker, plain
from fuzz_mutations import Random

LONG = frozenset(
    [
        "max_steps",
        "epochs",
        "device",
        "engine.compile",
        "log.trackers",
        "data.path",
        "data.cache",
        "data.validation_path",
        "model.type",
        "memory.budget",
    ]
)
"""Settings whose legal values can make a long run of a tiny one, or leave its folder."""
SIZES = frozenset(
    ["model.layers", "model.heads", "model.width", "model.context", "model.vocab_size", "batch_size", "data.bpe_size"]
)
WORDS = [
    "--json",
    "--json=false",
    "--json=maybe",
    "--quiet",
    "--verbose",
    "--out",
    "--set",
    "--resume",
    "--overwrite",
    "--help",
    "--version",
    "-h",
    "--prompt",
    "--data",
    "--base",
    "--adapter",
    "--seed",
    "--port",
    "--only",
    "--",
    "-",
    "-x",
    "--x=1",
    "--set=seed=1",
    "-s",
    "--state",
    "--budget",
    "text.txt",
    "base",
    "none",
    "out",
    "0",
    "-1",
    "nan",
    "1e400",
    "seed=1",
    "max_steps=1",
    "list",
    "run",
]
COMMANDS = tuple(
    tuple(command.split())
    for command in [
        "train",
        "finetune",
        "config init",
        "config show",
        "config check",
        "plan",
        "predictors",
        "doctor",
        "export",
        "compare",
        "bench run",
        "bench list",
        "bench compare",
        "bench history",
        "generate",
        "evaluate",
        "adapters list",
        "adapters merge",
        "adapters export",
        "report",
        "forecast",
        "watch",
        "",
    ]
)
NO_SETTINGS = (
    *("a.b.c.d.e=1", "a" * 3000 + "=1", "=", "==", f"seed={'[' * 3000}", f"seed={spoil.DIGITS}", "seed=1 # x"),
    "seed=1\nmax_steps=1",
)


def setting(make: Maker, tiny: bool) -> tuple[str, Any]:
    """A setting and a value for it: legal, of another type, or absurd. tiny: no value makes a run long."""
    from foretrain.config import settings

    rng = make.rng
    known = list(settings())
    kind = rng.random()
    if kind < make.legal:
        chosen = rng.choice([one for one in known if not (tiny and one.name in LONG)])
        return chosen.name, legal(rng, chosen.kind, tiny and chosen.name in SIZES)
    chosen = rng.choice(known)
    if kind < make.legal + 0.05:
        near = [chosen.name.rpartition(".")[2], f"{chosen.name}x", f"{chosen.name}.x", chosen.name.upper()]
        return rng.choice([*near, *near, *spoil.STRANGE[:30]]), spoil.value(rng)
    value = spoil.value(rng)
    decides = tiny and chosen.name in LONG | SIZES and isinstance(value, (int, float, str))
    if decides and not _harmless(chosen.name, value):
        return chosen.name, rng.choice([None, [], {}, -1, 10**30, "\x00"])
    if tiny and isinstance(value, int) and not isinstance(value, bool) and 8 < value < 2**31:
        value = -value
    return chosen.name, value


def _harmless(name: str, value: Any) -> bool:
    """Whether a value of a setting that decides sizes and lengths is refused, or small."""
    if isinstance(value, str):
        return name not in ("data.path", "data.cache", "data.validation_path", "memory.budget")
    return not 8 < value < 2**31


def legal(rng: Random, kind: str, small: bool) -> Any:
    """A value that fits how a setting is described: usual, or as small or large as it may be."""
    options: list[Any] = []
    for part in kind.split(" or "):
        least, most = (
            float(found[1]) if (found := re.search(rf"[{signs}] (-?[0-9]+)", part)) else unset
            for signs, unset in (("≥>", 0.0), ("≤<", 1e30))
        )
        if part.startswith("list"):
            options += [[], [2], [1, 2]] if "integers" in part else [[], ["*"], ["text", "x"]]
        elif part.startswith("integer"):
            whole = int(least)
            options += [whole + 1, whole + 2] if small else [*(whole + more for more in (0, 1, 2, 3, 7)), 2**31 - 1]
        elif part.startswith("number"):
            steps = (1e-12, 1e-3, 0.1, 0.5, 0.99, 1.0, 1e6, most - least)
            options += [least + step for step in steps if least + step < most or "≤" in part or step == 1e6 < most]
            options += [least] if "≥" in part else [least + 5e-324]
        elif part == "string":
            options += ["", "text", "x"]
        else:
            options += [json.loads(word) for word in part.split(" | ")]
    return rng.choice(options)


def overrides(make: Maker, tiny: bool, good: dict[str, Any]) -> list[str]:
    """`--set` for a good configuration with some settings of other values; at times no setting at all."""
    words = {name: plain(value) for name, value in good.items()}
    texts = [f"{name}={text}" for name, text in words.items()]
    for _ in range(make.rng.choice([1, 2, 4, 8])):
        name, value = setting(make, tiny)
        quoted = json.dumps(value) if isinstance(value, str) and make.chance(0.5) else plain(value)
        texts.append(f"{name}={quoted}")
    if make.chance(0.03):
        texts.append(make.rng.choice([*spoil.STRANGE[:40], *NO_SETTINGS]))
    return [part for text in texts for part in ("--set", text)]


def toml(make: Maker, tiny: bool, good: dict[str, Any]) -> bytes:
    """A configuration file of such settings, or bytes that are nearly one."""
    import tomlkit

    values = dict(good)
    for _ in range(make.rng.choice([1, 2, 4, 8])):
        name, value = setting(make, tiny)
        values[name] = value
    lines, sections = [], {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    for section in sorted(sections):
        lines += [f"[{section}]"] if section else []
        for key, value in sections[section].items():
            try:
                lines.append(f"{tomlkit.key(key).as_string()} = {tomlkit.item(value).as_string()}")
            except (ValueError, TypeError):  # None, which TOML does not have, or halves of characters
                lines.append(f"{key} = {plain(value)}")
    content = "\n".join(lines).encode("utf-8", "surrogatepass" if make.chance(0.3) else "replace")
    if make.chance(0.05):
        content = spoil.spoil_bytes(make.rng, content) if not tiny else content[: make.rng.randrange(len(content))]
    return content


def configure(make: Maker, tiny: bool, good: dict[str, Any], by_file: bool) -> list[str]:
    if not by_file:
        return overrides(make, tiny, good)
    Path("my.toml").write_bytes(toml(make, tiny, good))
    return [make.name("my.toml")] + (["--set", f"max_steps={make.rng.choice([2, 12])}"] if tiny else [])


def config_show(make: Maker, by_file: bool) -> Input:
    return Input(["config", "show", *configure(make, False, {}, by_file), *make.json()])


def config_check(make: Maker, by_file: bool) -> Input:
    Path("ok.toml").write_text("max_steps = 5\n")
    arguments = configure(make, False, {}, by_file)
    return Input(["config", "check", *([] if by_file else ["ok.toml"]), *arguments, *make.json()])


def config_init(make: Maker) -> Input:
    Path("there.toml").write_text("")
    name = make.rng.choice(["new.toml", "new.toml", "there.toml", "none/x.toml", *spoil.LOST_NAMES])
    preset = make.options(preset=("measured", "small", "finetune", "x"))
    return Input(["config", "init", name, *preset, *overrides(make, False, {}), *make.json()], writes=(name, "?"))


def plan(make: Maker, by_file: bool) -> Input:
    make.take("base")
    good = {"model.weights": "base"} if make.chance(0.3) else {}
    options = make.options(budget=("14GB", "1MB", "0", "1e400GB", "x"), device=("cuda", "cpu", "x"), finetune=(True,))
    return Input(["plan", *configure(make, False, good, by_file), *options, *make.json()])


def train(make: Maker, by_file: bool) -> Input:
    make.take("text.txt", "base", "tokenizer.json", "vocabulary")
    good = {
        **TINY,
        "data.path": "text.txt",
        "max_steps": make.rng.choice([1, 2, 6, 24]),
        **EAGER,
    }
    arguments = [
        "train",
        *configure(make, True, good, by_file),
        "--out",
        "out",
        *make.options(quiet=(True,), verbose=(True,), resume=(True,), overwrite=(True,)),
        *make.json(),
    ]
    return Input(arguments, writes=("out", "cache", "text"))


def finetune(make: Maker, by_file: bool) -> Input:
    make.take("base", "examples.jsonl", "chats.jsonl")
    data = make.name("examples.jsonl", "chats.jsonl")
    good = {**TINY, "max_steps": 2, "model.weights": make.name("base"), "data.path": data}
    arguments = [
        "finetune",
        *configure(make, True, good, by_file),
        "--out",
        "out",
        *make.options(quiet=(True,), verbose=(True,)),
        *make.json(),
    ]
    return Input(arguments, writes=("out", "cache", "text"))


def compare(make: Maker, by_file: bool) -> Input:
    """Nothing is run: the time is up before the first one."""
    make.take("text.txt")
    good = {**TINY, "data.path": "text.txt", "max_steps": 2}
    options = make.options(
        seeds=(1, 0),
        rates=(1, 0.5),
        budgets=(1,),
        arm=("a: optimizer.type=adamw", "a", ":", "a: seed=3"),
        ladder=(True,),
        quiet=(True,),
    )
    arguments = [
        "compare",
        *configure(make, True, good, by_file),
        "--out",
        "out",
        *options,
        *make.json(),
        "--minutes",
        "0",
    ]
    return Input(arguments, writes=("out", "cache", "text"))


def sweep(make: Maker) -> Input:
    """A space file; what is legal ends at the number of workers, before any is started."""
    import tomlkit

    drawn = [setting(make, False) for _ in range(make.rng.choice([1, 2, 4]))]
    ranges = [{"low": value, "high": spoil.value(make.rng), "log": True} for _, value in drawn]
    values = [make.rng.choice([value, [value], one]) for (_, value), one in zip(drawn, ranges, strict=True)]
    space = {name: value for (name, _), value in zip(drawn, values, strict=True)}
    how = {make.rng.choice(["trials", "rungs", "sampler", "storage", "x"]): spoil.value(make.rng)}
    content = {"base": {**TINY, "max_steps": 2}, "space": space, "sweep": how if make.chance(0.3) else {}}
    try:
        text = tomlkit.dumps(content).encode("utf-8", "surrogatepass")
    except (ValueError, TypeError, AttributeError):  # None, which TOML does not have, or names that are no keys
        text = b"[space]\nbatch_size = [1, 2]\n"
    Path("space.toml").write_bytes(spoil.spoil_bytes(make.rng, text) if make.chance(0.3) else text)
    return Input(["sweep", make.name("space.toml"), "--out", "out", "--workers", "0", *make.json()], writes=("out",))


def command_line(make: Maker) -> Input:
    """Words in any order: most are refused, none may run long."""
    make.take("text.txt", "base")
    chosen = make.rng.choice(COMMANDS)
    words = [make.rng.choice([*WORDS, *WORDS, *spoil.STRANGE]) for _ in range(make.rng.randrange(6))]
    long = {
        ("train",): ["--set", "max_steps=0"],
        ("compare",): ["--minutes", "-1"],
        ("bench", "run"): ["--processes", "0"],
        ("watch",): ["--port", "-1"],
        ("finetune",): ["--set", "max_steps=0"],
    }
    end = long.get(chosen, [])
    if "--" in words and end:
        words = [word for word in words if word != "--"]
    if words and words[-1].startswith("-") and end:
        words.append("text.txt")
    return Input(
        [*chosen, *words, *end],
        writes=(
            "out",
            "seed=1",
            "max_steps=1",
            "none",
            *(word for word in words if chosen == ("config", "init") and not word.startswith("-")),
        ),
    )
