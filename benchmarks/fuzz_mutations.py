"""Ways to spoil what a program is given: values, trees of values, bytes, names and folders. All draw from one seeded
`random.Random`, so that an input can be made again. `fuzz_inputs.py` makes inputs with them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Random = random.Random
DIGITS = "9" * 5000
STRANGE = (
    *("", " ", "\x00", "\x1b]0;title\x07", "\x1b[2J", "[/x]", "[bold]", "[link=http://a]b[/link]", "\ud800", "\udcff"),
    *(
        "\u202eevil",
        "é",
        "漢字" * 20,
        "a\nb",
        "a\r\nb",
        "\t",
        '"',
        "'",
        "\\",
        "{x}",
        "{",
        "%s",
        "{0.__class__}",
        "a" * 300,
    ),
    *("x" * 100_000, "~nosuchuser/x", "../../x", ".", "-", "--help", "nan", "inf", "-1", "1e400", "0x10", "true"),
    *("null", "auto", "cuda", "cpu", "meta", "hf:none", "*", "[", "**/*", "text.txt", "/proc/self/mem", "/dev/null"),
)
NUMBERS = (
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        255,
        256,
        257,
        65535,
        65536,
        2**31 - 1,
        2**31,
        -(2**31),
        2**53,
        2**63 - 1,
        2**63,
        2**64,
        10**30,
    ),
    *(-(2**63), 10**400, 0.0, -0.0, 0.5, 1.5, -0.5, 1e-300, 5e-324, 1e30, 1e300, 1.8e308, 1e-9, 0.1),
    *(float("nan"), float("inf"), float("-inf")),
)
OTHERS = (None, True, False, [], {}, [1], {"a": 1}, [[]], [None], {"": ""}, [1, "a", None], ["text.txt"])


def value(rng: Random) -> Any:
    """Anything that JSON can hold."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(NUMBERS)
    if kind < 0.65:
        return rng.choice(STRANGE)
    if kind < 0.9:
        return copy.deepcopy(rng.choice(OTHERS))  # it may be changed in its turn
    return [value(rng) for _ in range(rng.randrange(4))]


def near(rng: Random, old: Any) -> Any:
    """Something of the same type that is a little, or very, wrong."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice([old + 1, old - 1, -old, old * 2, old * 10**6, old * 10**18, float(old), str(old), 0])
    if isinstance(old, float):
        return rng.choice([-old, old * 1e6, old * 1e300, old / 1e300, float("nan"), float("inf"), 0, 1, str(old)])
    if isinstance(old, str):
        cut = rng.randrange(len(old) + 1)
        return rng.choice([old[:cut], old[cut:], old + rng.choice(STRANGE), old.upper(), old * 2, rng.choice(STRANGE)])
    if isinstance(old, list):
        return rng.choice([old[: len(old) // 2], old * 2, [old], old[::-1], [*old, value(rng)]])
    if isinstance(old, dict):
        return rng.choice([{}, list(old), {**old, rng.choice(STRANGE): value(rng)}, {"x": old}])
    return value(rng)


# --- trees ------------------------------------------------------------------------------------------------------------


def places(tree: Any, most: int = 5000) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree of dictionaries and lists."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(found) < most:
        here = waiting.pop(0)
        inside = (
            list(here.items()) if isinstance(here, dict) else list(enumerate(here)) if isinstance(here, list) else []
        )
        for key, item in inside:
            found.append((here, key))
            if isinstance(item, (dict, list)):
                waiting.append(item)
    return found


def spoil_tree(rng: Random, tree: Any) -> Any:
    """One to three changes of a tree: replace, delete, rename, repeat, retype, deepen, enlarge, or replace it whole."""
    if rng.random() < 0.03:
        return value(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        found = places(tree)
        if not found:
            return value(rng)
        top = [place for place in found if place[0] is tree]
        container, key = rng.choice(top if rng.random() < 0.4 else found)
        if isinstance(container, list) and not -1 < key < len(container):
            continue
        if isinstance(container, dict) and key not in container:
            continue
        _spoil(rng, container, key)
    return tree


def _spoil(rng: Random, container: Any, key: Any) -> None:
    old = container[key]
    match rng.choice(["replace", "replace", "near", "near", "delete", "rename", "repeat", "deepen", "enlarge", "swap"]):
        case "replace":
            container[key] = value(rng)
        case "near":
            container[key] = near(rng, old)
        case "delete":
            del container[key]
        case "rename" if isinstance(container, dict):
            container[rng.choice(STRANGE)] = container.pop(key)
        case "repeat" if isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), old)
        case "deepen":
            for _ in range(rng.choice([1, 3, 60])):
                old = [old] if rng.random() < 0.5 else {"x": old}
            container[key] = old
        case "enlarge":
            times = min(1000, 1 + 200_000 // (1 + len(repr(old))))  # what is enlarged again must not fill the disk
            container[key] = [old] * times if not isinstance(old, str) else old * times
        case "swap":
            others = list(container) if isinstance(container, dict) else list(range(len(container)))
            other = rng.choice(others)
            container[key], container[other] = container[other], old
        case _:
            container[key] = value(rng)


def json_text(rng: Random, tree: Any) -> bytes:
    """A tree as JSON, at times with what only a careless writer makes."""
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.04:
        text = rng.choice(["[" * 100_000, '{"a":' * 100_000, DIGITS, "", "\ufeff" + text, text + text, f"[{DIGITS}]"])
    return text.encode("utf-8", "surrogatepass" if rng.random() < 0.2 else "replace")


# --- bytes ------------------------------------------------------------------------------------------------------------


def spoil_bytes(rng: Random, content: bytes) -> bytes:
    """Flip, cut, insert, repeat, zero or swap some."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 30])):
        place = rng.randrange(len(data) + 1)
        if rng.random() < 0.4:  # headers decide most
            place = min(place, rng.randrange(64))
        length = rng.choice([1, 1, 2, 8, 64, 1000])
        match rng.choice(["flip", "flip", "flip", "cut", "insert", "repeat", "zero", "end"]):
            case "flip" if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case "cut":
                del data[place : place + length]
            case "insert":
                data[place:place] = rng.choice(
                    [rng.randbytes(length), b"\x00", b"\xff\xfe", b"\n", b'"', b"{}", b"\x1b[2J"]
                )
            case "repeat":
                data[place:place] = data[place : place + length]
            case "zero":
                data[place : place + length] = bytes(len(data[place : place + length]))
            case "end":
                del data[place:]
            case _:
                data.append(rng.randrange(256))
    return bytes(data)


def spoil_lines(rng: Random, content: bytes, spoil: Callable[[Random, Any], Any] = spoil_tree) -> bytes:
    """JSON lines with some of them spoilt, as trees or as bytes; some lost, repeated or in another order."""
    lines = content.splitlines()
    for _ in range(rng.choice([1, 1, 2, 5])):
        if not lines:
            break
        place = rng.randrange(min(len(lines), 3) if rng.random() < 0.5 else len(lines))
        match rng.choice(["tree", "tree", "tree", "tree", "bytes", "lost", "repeated", "order", "all"]):
            case "tree":
                lines[place] = _spoilt_line(rng, lines[place], spoil)
            case "bytes":
                lines[place] = spoil_bytes(rng, lines[place])
            case "lost":
                del lines[place:]
            case "repeated":
                lines[place:place] = lines[place : place + 3]
            case "order":
                rng.shuffle(lines)
            case "all":
                lines = [_spoilt_line(rng, line, spoil) for line in lines[:50]]
    return b"\n".join(lines) + rng.choice([b"\n", b""])


def _spoilt_line(rng: Random, line: bytes, spoil: Callable[[Random, Any], Any]) -> bytes:
    try:
        return json_text(rng, spoil(rng, json.loads(line))).replace(b"\n", b" ")
    except (ValueError, RecursionError):
        return spoil_bytes(rng, line)


# --- files and folders ------------------------------------------------------------------------------------------------


def spoil_file(rng: Random, path: Path) -> str:
    """Change a file in the way that fits it; says what was done."""
    kind = rng.random()
    try:
        content = path.read_bytes()
    except OSError:  # its owner may not read it
        return "unreadable"
    if kind < 0.12:
        return _replace(rng, path)
    if path.suffix == ".jsonl" and kind < 0.8:
        path.write_bytes(spoil_lines(rng, content))
        return "lines"
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, IndexError):  # spoilt once already
        if path.suffix == ".json" and kind < 0.85:
            path.write_bytes(json_text(rng, spoil_tree(rng, json.loads(content))))
            return "tree"
        if path.suffix == ".safetensors" and kind < 0.6:
            path.write_bytes(spoil_tensors(rng, content))
            return "tensors"
    path.write_bytes(spoil_bytes(rng, content))
    return "bytes"


def _replace(rng: Random, path: Path) -> str:
    """Something else in its place, or nothing."""
    what = rng.choice(["nothing", "folder", "link", "loop", "empty", "large", "secret"])
    path.unlink()
    match what:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/proc/self/cmdline")
        case "loop":
            path.symlink_to(path.name)
        case "empty":
            path.write_bytes(b"")
        case "large":
            path.write_bytes(rng.randbytes(200_000))
        case "secret":
            path.write_bytes(b"{}")
            path.chmod(0)
    return what


def spoil_tensors(rng: Random, content: bytes) -> bytes:
    """A safetensors file with another header: forms, number formats, places, names, or what belongs to it."""
    size = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    entry = header[name]
    match rng.choice(["dtype", "shape", "all dtypes", "name", "lost", "flat", "tree", "values", "metadata"]):
        case "dtype":
            entry["dtype"] = rng.choice(
                ["F64", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "X"]
            )
        case "shape":
            entry["shape"] = rng.choice(
                [[], entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]], [0], [-1]]
            )
        case "all dtypes":
            same = {"F32": ["I32", "U32"], "I64": ["F64", "U64"], "U8": ["I8", "BOOL", "F8_E4M3", "F8_E5M2"]}
            for other in names:
                header[other]["dtype"] = rng.choice(same.get(header[other]["dtype"], ["F32"]))
        case "name":
            parts = name.split(".")
            parts[rng.randrange(len(parts))] = rng.choice(["x", "0", "99", "-1", "1e3", *STRANGE[:20]])
            header[".".join(parts)] = header.pop(name)
        case "lost":
            del header[name]
        case "flat":
            entry["shape"] = [entry["data_offsets"][1] - entry["data_offsets"][0]]
            entry["dtype"] = "U8"
        case "tree":
            header = spoil_tree(rng, header)
        case "values":
            rest = bytes(rng.choice([b"\xff", b"\x00", b"\x7f"]) * len(rest))
        case "metadata":
            header["__metadata__"] = rng.choice([{}, {"format": "x"}, {"a": "b" * 1000}, value(rng)])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest


def files_in(folder: Path, *patterns: str) -> list[Path]:
    """The plain files below a folder, sorted."""
    found = [path for pattern in patterns or ("**/*",) for path in folder.glob(pattern)]
    return sorted({path for path in found if path.is_file() and not path.is_symlink()})


def spoil_folder(rng: Random, folder: Path, *patterns: str) -> str:
    """One or two files below a folder, or the folder: parts lost, moved, linked, or files that nobody expects."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        files = files_in(folder, *patterns)
        if not files:
            break
        path = rng.choice(files)
        if rng.random() < 0.85:
            done.append(f"{path.relative_to(folder)}: {spoil_file(rng, path)}")
            continue
        what = rng.choice(["lost parent", "extra", "swap", "moved"])
        done.append(f"{path.relative_to(folder)}: {what}")
        match what:
            case "lost parent" if path.parent != folder:
                shutil.rmtree(path.parent)
            case "swap":
                other = rng.choice(files)
                one, two = path.read_bytes(), other.read_bytes()
                path.write_bytes(two)
                other.write_bytes(one)
            case "moved":
                path.rename(path.with_name(f"{path.name}.old"))
            case _:
                (path.parent / rng.choice(["step-00000099", "x", ".tmp-x", "bad-step-1", "lora", "0"])).mkdir(
                    exist_ok=True
                )
    return "; ".join(done)


# --- names ------------------------------------------------------------------------------------------------------------

ODD_NAMES = (
    *(
        b"\xff",
        b"a\x1b[2Jb",
        b"a\nb",
        b"-x",
        b"--set",
        b"[red]",
        b"[bold]",
        b"a b",
        b"~",
        b"~nosuchuser",
        b"a'b",
        b'a"b',
        b"*",
        b"[",
    ),
    *(
        b"x" * 255,
        "é漢".encode(),
        b"\xc3",
        b"..x",
        b"a=b",
        b"a:b",
        b"hf:x",
        b"$(x)",
        b"%s",
        b"{x}",
        b"a\\b",
        b"a\tb",
        "\u202ea".encode(),
    ),
)
LOST_NAMES = (
    "none",
    "x" * 256,
    "/a" * 3000,
    "~nosuchuser/x",
    "/proc/self/mem",
    "/dev/null",
    "/dev/zero/x",
    ".",
    "",
    "a\udcff",
    "\ud800",
)


def odd_name(rng: Random, suffix: str = "") -> str:
    """A name that a file can have, but few have."""
    name = rng.choice(ODD_NAMES) + suffix.encode()
    return os.fsdecode(name[-255:])
