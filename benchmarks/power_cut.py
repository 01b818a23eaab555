"""A disk that loses at a power cut what was not synced: `foretrain` on it, for the crash matrix, and a model for tests.

    python benchmarks/power_cut.py train tiny.toml --out runs/tiny     # as `foretrain`; the matrix starts it so

Of every file and folder under a watched one it knows what it held when it was last synced, or when the watch began. A
power cut leaves no more than that. What became of names that were not synced is not known, so there are two ends:

  names kept    every rename, new name and deletion has come to the disk; files have what was synced of them, or nothing
  names lost    none has that was made since its folder was last synced

`ckpt-chaos` itself looks for lost writes only in files that Python's open() made, under the name that they had then: it
notices neither safetensors nor a folder that is renamed. So its mode `unsynced` is carried out here, with names kept.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Tree = dict[str, bytes | None]
"""Path below the watched folder -> content; None for a folder."""
_Key = tuple[int, int]
_DEAF = "CKPT_CHAOS_DEAF"
"""Set: no sync reaches the disk, as if the program made none. The matrix must notice."""


class Disk:
    """What a power cut would leave of a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._durable: dict[_Key, bytes | dict[str, _Key]] = {}
        self._held: dict[_Key, int] = {}
        """A file that is open keeps its number: none that is made later is taken for it."""
        if root.is_dir():
            for path in (root, *root.rglob("*")):
                if not path.is_symlink():
                    self._note(path)

    def _note(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        self.synced(descriptor)
        os.close(descriptor)

    def synced(self, descriptor: int) -> None:
        """What is open there is on the disk from now on, as it is."""
        key, path = _key(status := os.fstat(descriptor)), Path(f"/proc/self/fd/{descriptor}")
        self._hold(key, path, follow=True)
        if stat.S_ISDIR(status.st_mode):
            self._durable[key] = self._listing(path)
        elif stat.S_ISREG(status.st_mode):
            self._durable[key] = path.read_bytes()

    def _listing(self, folder: Path) -> dict[str, _Key]:
        found = {}
        for path in folder.iterdir():
            found[path.name] = _key(path.lstat())
            self._hold(found[path.name], path)
        return found

    def _hold(self, key: _Key, path: Path, follow: bool = False) -> None:
        if key not in self._held:
            self._held[key] = os.open(path, os.O_PATH if follow else os.O_PATH | os.O_NOFOLLOW)

    # --- a power cut -------------------------------------------------------------------------------------------------

    def after_cut(self, names_kept: bool) -> Tree:
        """What would be there. The disk itself stays as it is."""
        tree: Tree = {}
        if self.root.is_dir():
            self._leave(_key(self.root.stat()), self.root, "", tree, names_kept)
        return tree

    def _leave(self, folder: _Key, path: Path, prefix: str, tree: Tree, names_kept: bool) -> None:
        listing = self._listing(path) if names_kept else self._durable.get(folder, {})
        assert isinstance(listing, dict)
        for name, key in sorted(listing.items()):
            kind = os.fstat(held := self._held[key]).st_mode
            if stat.S_ISDIR(kind):
                tree[prefix + name] = None
                self._leave(key, Path(f"/proc/self/fd/{held}"), f"{prefix}{name}/", tree, names_kept)
            elif stat.S_ISREG(kind):
                content = self._durable.get(key, b"")
                assert isinstance(content, bytes)
                tree[prefix + name] = content

    def cut(self) -> None:
        """Now, names kept: files lose what was not synced."""
        for name, content in self.after_cut(names_kept=True).items():
            path = self.root / name
            if content is not None and path.read_bytes() != content:
                path.write_bytes(content)

    # --- what the program does ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self, event: Callable[[], None] = lambda: None, deaf: bool = False) -> Iterator[None]:
        """Inside the block it hears syncs. event: called after each one, and after each change of a name. deaf: it
        hears none."""
        names = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "open", "fsync", "fdatasync")
        before: dict[str, Any] = {name: getattr(os, name) for name in names}
        busy = False

        def heard(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal busy
                result = before[name](*arguments, **options)
                if not busy:
                    busy = True
                    try:
                        if name in ("fsync", "fdatasync") and not deaf:
                            self.synced(arguments[0])
                        event()
                    finally:
                        busy = False
                return result

            return call

        for name in names:
            setattr(os, name, heard(name))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(os, name, function)

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _key(status: os.stat_result) -> _Key:
    return status.st_dev, status.st_ino


def states(root: Path, action: Callable[[], Any]) -> tuple[list[Tree], list[Tree]]:
    """All that power cuts during `action` could leave of `root`, each once; and what one right after it could."""
    disk = Disk(root)
    seen: dict[tuple[tuple[str, bytes | None], ...], Tree] = {}

    def look() -> None:
        for names_kept in (True, False):
            tree = disk.after_cut(names_kept)
            seen.setdefault(tuple(tree.items()), tree)

    try:
        look()
        with disk.listening(look):
            action()
        return list(seen.values()), [disk.after_cut(names_kept) for names_kept in (True, False)]
    finally:
        disk.close()


def lay_out(tree: Tree, folder: Path) -> None:
    """As it would be found after the cut."""
    folder.mkdir(parents=True)
    for name, content in tree.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


# --- under ckpt-chaos ------------------------------------------------------------------------------------------------


_to_the_end = contextlib.ExitStack()


def arm() -> None:
    """In a process that ckpt-chaos has armed already: its `unsynced` kills are power cuts of this disk."""
    if os.environ.get("CKPT_CHAOS_MODE") != "unsynced":
        return
    from ckpt_chaos import inject

    disk = Disk(Path(os.environ["CKPT_CHAOS_WATCH"]))
    _to_the_end.enter_context(disk.listening(deaf=_DEAF in os.environ))

    def cut() -> None:
        with inject._quietly():
            disk.cut()

    inject._roll_back_unsynced = cut


def main() -> None:
    arm()
    from foretrain.cli.app import main as foretrain

    foretrain()


if __name__ == "__main__":
    sys.exit(main())
