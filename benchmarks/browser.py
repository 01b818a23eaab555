"""A headless Chromium for `page_check.py`, spoken to over WebDriver's own HTTP: needs chromium and chromedriver."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


class Browser:
    """`with Browser() as browser:`; closed with everything it wrote."""

    def __enter__(self) -> Browser:
        driver = shutil.which("chromedriver")
        if driver is None:
            raise SystemExit("chromedriver is not there; on Debian: apt-get install chromium chromium-driver")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if "started successfully on port" in line)
        self._port = int(line.strip().rstrip(".").rpartition(" ")[2])
        wanted = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": {"args": [*_FLAGS, f"--user-data-dir={self._folder.name}"]},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"
        self.version = f"{made['capabilities']['browserName']} {made['capabilities']['browserVersion']}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ask("DELETE", self._session)
        finally:
            self._process.terminate()
            self._process.wait()
            self._folder.cleanup()

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        sent = json.dumps(body or {}) if method == "POST" else None
        connection.request(method, path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        value = json.loads(answer.read())["value"]
        connection.close()
        if answer.status >= 400:
            raise RuntimeError(value["message"].partition("\n")[0])
        return value

    def open(self, address: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": address})

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": f"return {expression}", "args": []})

    def until(self, expression: str, seconds: float = 20.0) -> Any:
        """The value of the expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.ask(expression)):
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {expression}")
            time.sleep(0.1)
        return value

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the browser's own protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """As wide as this, and in the colours that the reader's system asks for."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def heap_megabytes(self) -> float:
        """Memory of the page's script and data, after what is no longer needed was dropped."""
        self.command("HeapProfiler.enable")
        self.command("HeapProfiler.collectGarbage")
        self.command("Performance.enable")
        metrics = self.command("Performance.getMetrics")["metrics"]
        return round(next(one["value"] for one in metrics if one["name"] == "JSHeapUsedSize") / 1e6, 1)

    def errors(self) -> list[str]:
        """What the console said that is not just information, since the last call."""
        said = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in said if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path, width: int, dark: bool = False) -> None:
        """The whole page."""
        self.look(width, 900, dark)
        time.sleep(0.4)
        self.look(width, min(12000, int(self.ask("document.documentElement.scrollHeight"))), dark)
        time.sleep(0.4)
        path.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))
