"""Close connections that ask for nothing: they must not keep the live page from those who look at it."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 5.0
"""The head of the first request must end so many seconds after the connection began."""
MOST_SILENT = 32
"""So many connections may ask for nothing; when one more comes, the oldest goes. The server's limit is well above."""


class Connection(H11Protocol):
    """It is closed unless it asks for something soon. Without the key it gets one answer, and is closed."""

    came = 0.0
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.came = self.loop.time()
        self._limit = self.loop.call_later(PATIENCE, self._leave)
        silent = [other for other in self.connections if isinstance(other, Connection) and other.silent]
        if len(silent) > MOST_SILENT:
            min(silent, key=lambda other: other.came)._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    @property
    def silent(self) -> bool:
        return not self.cycle and not self.transport.is_closing()

    def _leave(self) -> None:
        if self.silent:
            self.transport.close()
