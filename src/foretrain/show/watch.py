"""The report of one run, live: a server for this machine alone that reads the run's files and answers nothing but GET.

It never speaks to the trainer. A browser gets the whole state when it connects, and from then on the parts that
changed; one that comes back with the state it had gets only what is newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.errors import InputError
from foretrain.show.follow import Follower
from foretrain.show.report_page import Parts, asset, live_page, parts, script, style

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
CLIENTS = 8
"""Browsers at a time."""
INTERVAL = 0.5
"""Seconds between two looks at the files, however many browsers there are."""
SHARE = 0.1
"""Of the time, spent on looks at the most: the page of a long run takes longer to make, and is made more rarely."""
_SIGN_OF_LIFE = 15.0
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


class Live:
    """The state of the run for all browsers, read at most once per interval."""

    def __init__(self, folder: Path) -> None:
        self.follower = Follower(folder)
        self.clients = 0
        self._lock = asyncio.Lock()
        self._next = -math.inf
        self._parts = parts([self.follower.record])

    async def current(self) -> tuple[str, Parts]:
        """(version, parts) as of now."""
        async with self._lock:
            if (began := time.monotonic()) >= self._next:
                await asyncio.to_thread(self._look)
                self._next = began + max(INTERVAL, (time.monotonic() - began) / SHARE)
            return self.follower.version, self._parts

    def _look(self) -> None:
        try:
            changed = self.follower.poll()
        except InputError:  # not readable at present: what is known stays on the page
            return
        if changed:
            with contextlib.suppress(Exception):  # a file that makes no sense: what is known stays on the page
                self._parts = parts([self.follower.record])

    async def page(self) -> str:
        _, made = await self.current()
        return await asyncio.to_thread(live_page, made)

    async def changes(self, known: str | None, stopping: Callable[[], bool]) -> AsyncIterator[str]:
        """Server-sent events: first everything, unless the browser has this version, then what changed."""
        sent: dict[str, str] = {}
        version, told = known, time.monotonic()
        self.clients += 1
        try:
            while not stopping():
                now, made = await self.current()
                if now != version or not sent:
                    changed = _changed(made, sent)
                    if now != version:
                        yield f"id: {now}\ndata: {changed}\n\n"
                        told = time.monotonic()
                    version = now
                elif time.monotonic() - told > _SIGN_OF_LIFE:
                    yield ": still here\n\n"
                    told = time.monotonic()
                await asyncio.sleep(INTERVAL)
        finally:
            self.clients -= 1


def _changed(made: Parts, sent: dict[str, str]) -> str:
    """The sections and charts that differ from what was sent, as one line; `sent` knows them from now on."""
    message: dict[str, Any] = {"title": made.title, "sections": {}, "charts": {}}
    for kind, items in (("sections", made.sections), ("charts", made.charts)):
        for name, value in items.items():
            text = json.dumps(value, separators=(",", ":"))
            if sent.get(f"{kind}/{name}") != text:
                sent[f"{kind}/{name}"] = text
                message[kind][name] = value
    return json.dumps(message, separators=(",", ":"), allow_nan=False)


# --- the application --------------------------------------------------------------------------------------------------


def application(live: Live, token: str, port: int, stopping: Callable[[], bool] = lambda: False) -> ASGIApp:
    """Five addresses, all fixed; whatever else is asked for does not exist."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    def fixed(text: str, kind: str) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return PlainTextResponse(text, media_type=kind)

        return answer

    async def start(request: Request) -> Response:
        return PlainTextResponse(await live.page(), media_type="text/html")

    async def changes(request: Request) -> Response:
        if live.clients >= CLIENTS:
            return PlainTextResponse("too many browsers look at this run\n", 503, {"retry-after": "10"})
        known = request.headers.get("last-event-id")
        return StreamingResponse(live.changes(known, stopping), media_type="text/event-stream")

    app: Starlette = Starlette(
        routes=[
            Route("/", start, methods=["GET"]),
            Route("/events", changes, methods=["GET"]),
            Route("/style.css", fixed(style(), "text/css"), methods=["GET"]),
            Route("/uplot.js", fixed(asset("uplot.js"), "text/javascript"), methods=["GET"]),
            Route("/report.js", fixed(script(), "text/javascript"), methods=["GET"]),
        ]
    )
    app.router.redirect_slashes = False
    return Guard(app, token, port)


class Guard:
    """Before anything is answered: the method, the host that was asked for, where the request comes from, the token."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app = app
        self.token = token
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
            await PlainTextResponse(f"{text}\n", status, headers)(scope, receive, guarded)
        elif self._same(_query_token(scope)) and scope["path"] == "/":
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            await answer(scope, receive, guarded)
        elif not self._same(_cookie(scope, self.cookie)):
            text = "open the address that foretrain watch has printed: it holds the key\n"
            await PlainTextResponse(text, 403)(scope, receive, guarded)
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

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def _header(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == wanted]


def _query_token(scope: Scope) -> str:
    from urllib.parse import parse_qs

    query: bytes = scope["query_string"]
    return parse_qs(query.decode("latin-1")).get("token", [""])[0]


def _cookie(scope: Scope, wanted: str) -> str:
    pairs = (part.strip().partition("=") for text in _header(scope, b"cookie") for part in text.split(";"))
    return next((value for name, _, value in pairs if name == wanted), "")


# --- the server -------------------------------------------------------------------------------------------------------


class WatchServer:
    """Bound to this machine's own address when it is made; `run` serves until it is told to stop."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        import uvicorn

        live = Live(folder)
        self._socket = _bound(port)
        self.port = int(self._socket.getsockname()[1])
        self.token = secrets.token_urlsafe(32)
        app = application(live, self.token, self.port, lambda: self.server.should_exit)
        self.server: uvicorn.Server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                http="h11",
                loop="asyncio",
                limit_concurrency=64,
                timeout_graceful_shutdown=2,
            )
        )

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def run(self) -> None:
        try:
            self.server.run(sockets=[self._socket])
        finally:
            self._socket.close()


def _bound(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, port))
        made.listen()  # a browser that is opened at once waits, and is not turned away
    except (OSError, OverflowError) as error:
        made.close()
        raise InputError(
            f"--port {port}: cannot be used ({error}); choose another, or 0 for any that is free"
        ) from None
    return made
