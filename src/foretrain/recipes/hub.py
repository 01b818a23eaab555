"""Models of the Hugging Face Hub by their names: out of its cache, or fetched once. Never a pickle, never code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from foretrain.config.units import format_size
from foretrain.data.hub_tokenizers import FILES as TOKENIZER_FILES
from foretrain.errors import InputError, how_to_install
from foretrain.models.causal_files import INDEX, WEIGHTS, holds_weights
from foretrain.persist.files import user_path

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
"""`gpt2`, or `organisation/model`."""
_BARE = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
"""Names without an organisation that are fetched. Any other may be a folder that was not spelled right."""
_WEIGHTS = (WEIGHTS, INDEX, "model-*-of-*.safetensors")
_WANTED = (
    *_WEIGHTS,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    *TOKENIZER_FILES,
)


def is_name(name: str) -> bool:
    """Return whether it could be the name of a model."""
    return _NAME.fullmatch(name) is not None


def in_cache(name: str) -> Path | None:
    """Return the folder of a model that was fetched before, by whatever program."""
    for full_name in (name, f"openai-community/{name}"):  # where the bare names of GPT-2 lead to
        cached = _cache() / f"models--{full_name.replace('/', '--')}"
        for snapshot in _snapshots(cached):
            if holds_weights(snapshot) and (snapshot / "config.json").is_file():
                return snapshot
    return None


def can_be_fetched(name: str) -> bool:
    """Return whether a name says clearly enough that a model of the Hub is meant."""
    return "/" in name or name in _BARE


def fetch(name: str, say: Callable[[str], None]) -> Path:
    """Fetch configuration, weights (safetensors only) and tokenizer into the Hub's cache; return their folder.

    say: hears how much it is before it begins."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise InputError(
            f"{name}: there is no such folder; to fetch a model of the Hugging Face Hub, "
            f"{how_to_install('foretrain[transformers]')}"
        ) from None
    full_name = name if "/" in name else f"openai-community/{name}"
    cache = _cache()
    try:
        about = huggingface_hub.HfApi().model_info(full_name, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
        wanted = {file for file in sizes if any(fnmatchcase(file, pattern) for pattern in _WANTED)}
        _check(full_name, wanted)
        size = format_size(sum(sizes[file] for file in wanted))
        say(f"fetching {full_name} from the Hugging Face Hub: {size}, kept in {cache}")
        return Path(huggingface_hub.snapshot_download(full_name, cache_dir=cache, allow_patterns=sorted(wanted)))
    except errors.GatedRepoError:
        raise InputError(
            f"{full_name}: its owners want to be asked first; agree on its page on the Hugging Face Hub, log in once "
            "with: hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"{name}: there is no such folder, and no such model on the Hugging Face Hub that you may read; "
            "for one of your own, log in once with: hf auth login"
        ) from None
    except InputError:
        raise
    except Exception as error:  # whatever the network or the disk has: of its library, or of those beneath
        words = str(error).strip().split("\n")[0]
        raise InputError(
            f"{name}: there is no such folder, and fetching it from the Hugging Face Hub failed "
            f"({type(error).__name__}: {words}); {how_to_get(name)}"
        ) from error


def how_to_get(name: str) -> str:
    """Say how a model gets here where this program does not fetch it."""
    code = f"import transformers as t; t.AutoModelForCausalLM.from_pretrained('{name}').save_pretrained('FOLDER')"
    code += f"; t.AutoTokenizer.from_pretrained('{name}').save_pretrained('FOLDER')"
    return (
        f'if it is a model of the Hugging Face Hub, get it where there is a network with: python -c "{code}" '
        "and name FOLDER"
    )


def _check(name: str, files: set[str]) -> None:
    if "config.json" not in files or not files & {WEIGHTS, INDEX}:
        raise InputError(
            f"{name}: on the Hugging Face Hub it has no weights as safetensors ({WEIGHTS}) with a config.json, and "
            "nothing else is opened: a pickle can run any code"
        )


def _cache() -> Path:
    """Return where huggingface_hub keeps what it fetched."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return user_path(cache, "HF_HUB_CACHE")
    home = os.environ.get("HF_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return user_path(Path(home) if home else Path(base) / "huggingface", "HF_HOME") / "hub"


def _snapshots(cached: Path) -> list[Path]:
    """Return the versions of a cached model, the one that its main branch stands for first, then the newest."""
    try:
        found = sorted((cached / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
    main = cached / "refs" / "main"
    wanted = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    return sorted(found, key=lambda path: path.name != wanted)
