"""Models are fetched from a Hub by their names: a server on loopback stands for it, with its addresses and headers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from tests.causal import write_causal

from foretrain.errors import InputError
from foretrain.recipes import hub
from foretrain.recipes.open_model import find_folder, open_base

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "somebody/asks-first"


class Server(ThreadingHTTPServer):
    """Serves folders as models. asked: the paths, in their order."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path]) -> None:
        self.models, self.asked = models, list[str]()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.asked.append(path)
        if path.startswith(f"/api/models/{GATED}"):
            return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        for name, folder in self.server.models.items():
            if path.startswith(f"/api/models/{name}"):
                return self._answer(200, json.dumps(self._described(name, folder, path)).encode())
            if path.startswith(f"/{name}/resolve/"):
                return self._file(folder / path.split("/", 5)[5])
        return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _described(self, name: str, folder: Path, path: str) -> object:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = {str(file.relative_to(folder)): file for file in files}
        if "/tree/" in path:
            return [
                {"type": "file", "path": one, "size": file.stat().st_size, "oid": etag_of(file)}
                for one, file in names.items()
            ]
        siblings = [{"rfilename": one, "size": file.stat().st_size} for one, file in names.items()]
        return {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}

    def _file(self, file: Path) -> None:
        if not file.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._answer(200, file.read_bytes(), {"ETag": f'"{etag_of(file)}"', "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def etag_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:40]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    write_causal(folder, "llama")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"another form")
    return folder


@pytest.fixture
def server(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A Hub with a model, with one that is nothing but a pickle, and with one whose owners want to be asked."""
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"a pickle")
    made = Server({"somebody/llama": llama, "openai-community/gpt2": llama, "somebody/pickled": pickled})
    threading.Thread(target=made.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    template = made.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield made
    made.shutdown()
    made.server_close()


def test_a_model_is_fetched_once_without_pickles_and_code(server: Server, llama: Path) -> None:
    said: list[str] = []
    folder = find_folder("somebody/llama", said.append)
    held = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= held
    assert not held & {"pytorch_model.bin", "modeling.py", "onnx"}
    assert (folder / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()
    assert len(said) == 1
    assert "fetching somebody/llama from the Hugging Face Hub: " in said[0]
    assert open_base("somebody/llama").tokenizer.vocab_size == open_base(llama).tokenizer.vocab_size
    server.asked.clear()
    assert find_folder("somebody/llama", said.append) == folder
    assert (len(said), server.asked) == (1, [])


def test_the_bare_name_of_a_gpt2_is_its_organisations(server: Server) -> None:
    assert "models--openai-community--gpt2" in str(find_folder("gpt2"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("somebody/pickled", "it has no weights as safetensors"),
        ("somebody/nothing", "no such model on the Hugging Face Hub"),
        (GATED, "its owners want to be asked first"),
    ],
)
def test_what_cannot_be_had_is_said(server: Server, name: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        find_folder(name)
    assert not any("/resolve/" in path for path in server.asked)


def test_a_word_that_is_no_name_of_a_model_asks_nobody(server: Server) -> None:
    for fetched in ("runs-mine", "demo"):
        with pytest.raises(InputError, match="nothing is fetched here"):
            find_folder(fetched)
    with pytest.raises(InputError, match="nothing is fetched here"):
        find_folder("somebody/llama", fetch=False)
    assert server.asked == []


def test_no_network_says_how_to_get_it_elsewhere(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputError, match=r"somebody/llama: there is no such folder.*OfflineMode.*get it where there is"
    ):
        find_folder("somebody/llama")
    assert server.asked == []


def test_without_the_library_it_says_what_to_install(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"foretrain\[transformers\]"):
        hub.fetch("somebody/llama", print)


def test_from_the_command_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{n} x", "label": str(n % 3)}) for n in range(40))
    )
    command = [sys.executable, "-m", "foretrain", "finetune", "--base", "somebody/llama", "--data", "data.jsonl"]
    command += ["--out", "run", "--set=max_steps=2", "--set=batch_size=4", "--set=evaluation.batches=1"]
    environment = {**os.environ, "HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fetching somebody/llama from the Hugging Face Hub" in done.stdout + done.stderr
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert COMMIT in adapter["base_model_name_or_path"]
