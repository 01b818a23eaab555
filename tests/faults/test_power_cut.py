"""A power cut at every event of a write: what is found afterwards is whole, old or new; and new once the write is over.

The disk of `benchmarks/power_cut.py` loses all that was not synced. Names that were not synced are kept, or lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.conftest import HERE, load_script
from tests.finetuning import make_base

from foretrain.data import cache
from foretrain.data.tokenizers import ByteTokenizer
from foretrain.engine.weights import load_weights, write_weights
from foretrain.errors import CheckpointError
from foretrain.models import lora
from foretrain.models.adapter_files import read_adapter, save_adapter
from foretrain.persist.checkpoint import CheckpointStore, read
from foretrain.persist.files import make_folder
from foretrain.persist.folder import RunFolder
from foretrain.recipes.export import write_model

Tree = dict[str, bytes | None]
Found = Callable[[Path], Any]
NOTHING = "nothing"


@pytest.fixture(scope="module")
def power_cut() -> Any:
    return load_script(HERE.parents[1] / "benchmarks" / "power_cut.py")


@pytest.fixture
def check(power_cut: Any, tmp_path: Path) -> Callable[..., None]:
    """check(action, found, old, new): `found` says what is in the folder after a cut during `action`."""
    numbers = itertools.count()

    def check(action: Callable[[], Any], found: Found, old: Any, new: Any) -> None:
        def after(tree: Tree) -> Any:
            folder = tmp_path / f"after-cut-{next(numbers)}"
            power_cut.lay_out(tree, folder)
            return found(folder)

        during, at_end = power_cut.states(tmp_path / "disk", action)
        assert len(during) > 1
        for tree in during:
            assert after(tree) in (old, new), sorted(tree)
        assert [after(tree) for tree in at_end] == [new, new]

    (tmp_path / "disk").mkdir()
    return check


def state(number: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((40,), float(number))}, "number": number}


def newest(root: Path) -> Any:
    """The number of the checkpoint that a run would go on from. None that has its name is damaged."""
    store = CheckpointStore(root / "checkpoints")
    loaded = store.load_newest()
    if loaded is None:
        return NOTHING
    assert loaded.rejected == []
    assert not list(store.root.glob(".*"))
    assert loaded.state["model"]["weight"].tolist() == [float(loaded.state["number"])] * 40
    return loaded.state["number"]


@pytest.mark.parametrize("steps", [[1], [1, 2], [1, 2, 2], [1, 2, 3], [2, 1]], ids=str)
def test_a_checkpoint_is_whole(steps: list[int], check: Callable[..., None], tmp_path: Path) -> None:
    """Among them: a step that is saved again, one that makes an older one go, and one after a rollback."""
    store = CheckpointStore(tmp_path / "disk" / "checkpoints", keep=2)
    for number, step in enumerate(steps[:-1]):
        store.save(step, state(number))
    new = len(steps) - 1
    check(lambda: store.save(steps[-1], state(new)), newest, new - 1 if new else NOTHING, new)


def test_the_best_weights_are_whole(check: Callable[..., None], tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "disk" / "checkpoints")
    store.save_best(1, state(1))

    def best(root: Path) -> Any:
        found = CheckpointStore(root / "checkpoints").best()
        return max(read(path)["number"] for path in found.values())

    check(lambda: store.save_best(2, state(2)), best, 1, 2)


def test_a_small_document_is_whole(check: Callable[..., None], tmp_path: Path) -> None:
    def text(root: Path) -> str:
        return (root / "run" / "config.toml").read_text()

    with RunFolder(tmp_path / "disk" / "run", resume=False) as folder:
        folder.write("config.toml", "old")
        check(lambda: folder.write("config.toml", "new, and longer"), text, "old", "new, and longer")


def test_the_name_of_a_folder_is_there_with_what_it_holds(check: Callable[..., None], tmp_path: Path) -> None:
    def depth(root: Path) -> int:
        return sum((root / path).is_dir() for path in ("a", "a/b", "a/b/c"))

    check(lambda: make_folder(tmp_path / "disk" / "a"), depth, 0, 1)
    make_folder(tmp_path / "disk" / "a" / "b")
    check(lambda: make_folder(tmp_path / "disk" / "a" / "b" / "c"), depth, 2, 3)


@pytest.mark.parametrize("old", [NOTHING, 3])
def test_a_token_cache_is_whole(old: Any, check: Callable[..., None], tmp_path: Path) -> None:
    """One that is replaced may be gone for a moment: it is made anew then."""
    folder = tmp_path / "disk" / "tokens" / "key"

    def write(count: int) -> None:
        def fill(new: Path) -> dict[str, Any]:
            (new / "train.bin").write_bytes(b"\1\0" * count)
            (new / "held_out.bin").write_bytes(b"\2\0")
            return {"dtype": "<u2", "vocab_size": 257, "train": count, "held_out": 1}

        cache.write(folder, fill, ByteTokenizer().to_json())

    def tokens(root: Path) -> Any:
        there = root / "tokens" / "key"
        return cache.check(there)["train"] if there.exists() else old

    if old != NOTHING:
        write(old)
    check(lambda: write(5), tokens, old, 5)


def test_an_adapter_is_whole_and_never_a_mix(check: Callable[..., None], tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "adapter"
    model = make_base(1)

    def write(alpha: float) -> None:
        lora.attach(model, lora.LoraSettings(rank=2, alpha=alpha), seed=int(alpha))
        save_adapter(model, folder, beside={"tokenizer.json": ByteTokenizer().to_json()})
        lora.detach(model)

    def settings_and_weights(root: Path) -> Any:
        if not (root / "adapter" / "adapter_config.json").exists():
            with pytest.raises(CheckpointError, match="does not exist"):
                read_adapter(root / "adapter")
            return "none for a moment"
        adapter = read_adapter(root / "adapter")
        return adapter.settings.alpha, float(next(iter(adapter.tensors.values())).sum())

    write(1.0)
    old = settings_and_weights(tmp_path / "disk")
    write(2.0)
    new = settings_and_weights(tmp_path / "disk")
    write(1.0)
    assert old[1] != new[1]

    def found(root: Path) -> Any:
        there = settings_and_weights(root)
        return old if there == "none for a moment" else there

    check(lambda: write(2.0), found, old, new)


def test_every_file_of_a_model_is_whole(check: Callable[..., None], tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "model"
    models = [make_base(1), make_base(2)]
    contents: list[dict[str, bytes]] = []
    for model in models:
        write_model(model, folder, "", ByteTokenizer())
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    write_model(models[0], folder, "", ByteTokenizer())

    def weights(root: Path) -> int:
        """0 or 1, as the files of that model are there; of what is the same in both nothing is missing."""
        there = {path.name: path.read_bytes() for path in (root / "model").iterdir()}
        assert there.keys() == contents[0].keys()
        assert all(content in (contents[0][name], contents[1][name]) for name, content in there.items())
        return [content["model.safetensors"] for content in contents].index(there["model.safetensors"])

    check(lambda: write_model(models[1], folder, "", ByteTokenizer()), weights, 0, 1)


def test_the_weights_of_an_own_model_are_whole(check: Callable[..., None], tmp_path: Path) -> None:
    def made(number: float) -> torch.nn.Linear:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, number)
        return model

    def weight(root: Path) -> float:
        loaded = made(0.0)
        load_weights(loaded, root / "model.safetensors")
        return float(loaded.weight.detach()[0, 0])

    write_weights(made(1.0), tmp_path / "disk" / "model.safetensors")
    check(lambda: write_weights(made(2.0), tmp_path / "disk" / "model.safetensors"), weight, 1.0, 2.0)


def test_the_disk_loses_what_was_not_synced(power_cut: Any, tmp_path: Path) -> None:
    """A write as it must not be: the new name is there, the content is not."""
    (tmp_path / "a").write_text("old")

    def careless() -> None:
        (tmp_path / "b").write_text("new")
        (tmp_path / "b").replace(tmp_path / "a")

    during, at_end = power_cut.states(tmp_path, careless)
    assert {"a": b""} in during
    assert at_end == [{"a": b""}, {"a": b"old"}]
