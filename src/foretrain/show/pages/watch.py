"""The report of one run, live: a server for this machine alone that reads the run's files and answers nothing but GET.

It never speaks to the trainer. A browser gets the whole state when it connects, and from then on the parts that
changed; one that comes back with the state it had gets only what is newer.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from foretrain.show.pages.render import asset, style
from foretrain.show.pages.report_page import Parts, live_page, live_script, parts
from foretrain.show.pages.watch_guard import HOST, Code, Doorkeeper

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

CLIENTS = 8
"""So many browsers may look at a time."""
INTERVAL = 0.5
"""The files are read every so many seconds, however many browsers there are."""
SHARE = 0.1
"""Looks take this share of the time at the most: the page of a long run takes longer, and is made more rarely."""
_SIGN_OF_LIFE = 15.0


class Live:
    """It holds the state of the run for all browsers, which is read at most once per interval."""

    def __init__(self, folder: Path) -> None:
        self.follower = Follower(folder)
        self.clients = 0
        self._next = -math.inf
        self._parts = parts([self.follower.record])
        self._state = self.follower.version, self._parts
        self._looking: asyncio.Task[None] | None = None

    async def current(self) -> tuple[str, Parts]:
        """Return (version, parts) as of now. There is one look at a time; it goes on when those who wait leave."""
        if self._looking is None and time.monotonic() >= self._next:
            self._looking = asyncio.create_task(self._look_once())
        if self._looking is not None:
            await asyncio.shield(self._looking)
        return self._state

    async def _look_once(self) -> None:
        began = time.monotonic()
        try:
            await asyncio.to_thread(self._look)
            self._state = self.follower.version, self._parts
        finally:
            self._next = began + max(INTERVAL, (time.monotonic() - began) / SHARE)
            self._looking = None

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
        """Yield server-sent events: first everything, unless the browser has this version, then what changed."""
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
    """Write the sections and charts that differ from what was sent as one line; `sent` knows them from now on."""
    message: dict[str, Any] = {"title": made.title, "sections": {}, "charts": {}}
    for kind, items in (("sections", made.sections), ("charts", made.charts)):
        for name, value in items.items():
            text = json.dumps(value, separators=(",", ":"))
            if sent.get(f"{kind}/{name}") != text:
                sent[f"{kind}/{name}"] = text
                message[kind][name] = value
    return json.dumps(message, separators=(",", ":"), allow_nan=False)


# --- the application --------------------------------------------------------------------------------------------------


def application(live: Live, token: str, port: int, stopping: Callable[[], bool] = lambda: False) -> Doorkeeper:
    """Answer at five fixed addresses; whatever else is asked for does not exist."""
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
            Route("/report.js", fixed(live_script(), "text/javascript"), methods=["GET"]),
        ]
    )
    app.router.redirect_slashes = False
    return Doorkeeper(app, token, port)


# --- the server -------------------------------------------------------------------------------------------------------


class WatchServer:
    """It is bound to this machine's own address when it is made; `run` serves until it is told to stop."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        import uvicorn

        from foretrain.show.pages.watch_connections import Connection

        live = Live(folder)
        self._socket = _bound(port)
        self.port = int(self._socket.getsockname()[1])
        self.token = secrets.token_urlsafe(32)
        self.guard = application(live, self.token, self.port, lambda: self.server.should_exit)
        self.server: uvicorn.Server = uvicorn.Server(
            uvicorn.Config(
                self.guard,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                http=Connection,
                loop="asyncio",
                limit_concurrency=64,
                timeout_graceful_shutdown=2,
            )
        )

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def address_to_open(self) -> str:
        """Make an address for the command line of a browser, which others can read: it opens once, for this user."""
        self.guard.code = Code()
        return f"http://{HOST}:{self.port}/?code={self.guard.code.text}"

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
