"""Let only those look at the live page who have the key, and nobody through another page."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
CODE_SECONDS = 60.0
"""A browser must ask so many seconds after it was started, at the most."""
_CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
"""A connection that its owner has closed is listed as nobody's, which is as root's."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_CLOSE = {"connection": "close"}
"""Whoever is sent away has to connect again: connections are for those who have the key."""


class Code:
    """A key for the command line of a browser, which everybody on this machine can read.

    It is good once and for a minute, and where the system tells whose a connection is, for this user's own programs
    only: whoever else reads it can do nothing with it.
    """

    def __init__(self) -> None:
        self.text = secrets.token_urlsafe(32)
        self._until = time.monotonic() + CODE_SECONDS

    def opens(self, given: str, scope: Scope) -> bool:
        if not hmac.compare_digest(given.encode(), self.text.encode()) or time.monotonic() > self._until:
            return False
        owner = owner_of(scope["client"], scope["server"])
        if owner not in (None, 0, os.geteuid()):
            return False
        self._until = -1.0
        return True


def owner_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user whose program is at the client's end of a connection within this machine.

    None where the system keeps no list of connections; -1 for a connection that is not in it.
    """
    here = f"{int.from_bytes(socket.inet_aton(HOST), sys.byteorder):08X}"
    ends = (f"{here}:{client[1]:04X}", f"{here}:{server[1]:04X}")
    listed = None
    for path in _CONNECTIONS:
        try:
            lines = path.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        listed = -1
        for fields in map(str.split, lines):
            if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]) and fields[3] == _ESTABLISHED:
                return int(fields[7])
    return listed


class Doorkeeper:
    """It checks before anything is answered: the method, the host asked for, where the request comes from, the key."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app = app
        self.token = token
        self.code: Code | None = None
        """The browser that is being opened has it."""
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        self.cookie = f"foretrain-{port}"
        """Cookies know no ports: every server has one of its own name."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import PlainTextResponse, RedirectResponse

        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [
                    (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given
                ]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        refused = self._refusal(scope)
        if refused is not None:
            status, text, headers = refused
            await PlainTextResponse(f"{text}\n", status, {**headers, **_CLOSE})(scope, receive, guarded)
        elif scope["path"] == "/" and self._has_key(scope):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            await answer(scope, receive, guarded)
        elif not self._same(_cookie(scope, self.cookie)):
            text = "open the address that foretrain watch has printed: it holds the key\n"
            await PlainTextResponse(text, 403, _CLOSE)(scope, receive, guarded)
        else:
            await self.app(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str, dict[str, str]] | None:
        if scope["method"] != "GET":
            return 405, "this server is read-only", {"allow": "GET"}
        hosts = _header(scope, b"host")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return 421, "this server answers under its own name only", {}
        origins = _header(scope, b"origin")
        if any(origin not in {f"http://{host}" for host in self.hosts} for origin in origins):
            return 403, "another page may not ask here", {}
        if "cross-site" in _header(scope, b"sec-fetch-site"):
            return 403, "another page may not ask here", {}
        return None

    def _has_key(self, scope: Scope) -> bool:
        """Tell whether it comes with the printed address, or is the browser that was opened."""
        if self._same(_query(scope, "token")):
            return True
        return self.code is not None and self.code.opens(_query(scope, "code"), scope)

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def _header(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == wanted]


def _query(scope: Scope, wanted: str) -> str:
    from urllib.parse import parse_qs

    query: bytes = scope["query_string"]
    return parse_qs(query.decode("latin-1")).get(wanted, [""])[0]


def _cookie(scope: Scope, wanted: str) -> str:
    pairs = (part.strip().partition("=") for text in _header(scope, b"cookie") for part in text.split(";"))
    return next((value for name, _, value in pairs if name == wanted), "")
