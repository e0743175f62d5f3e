"""uvicorn, configured for this project."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from quire.base.errors import EngineError
from quire.server.http.protocol import limited_protocol
from quire.server.http.tls import key_password, tls_context
from quire.server.settings import ServerSettings

__all__ = ["HttpServer", "uvicorn_config"]

LAST_RESPONSES_S = 3
"""Seconds for responses to finish after they were told to end."""


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """Return uvicorn's configuration for the application. Raises ConfigError if the TLS files
    cannot be read."""
    tls_context(settings)
    limits = settings.limits
    config = uvicorn.Config(
        app,
        http=limited_protocol(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=not settings.disable_access_log,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(limits.keep_alive_timeout_s),
        timeout_graceful_shutdown=LAST_RESPONSES_S,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=key_password(settings),
        ssl_certfile=settings.ssl_certfile,
    )
    config.load()
    return config


class HttpServer(uvicorn.Server):
    """Leaves signals to its owner, which must end the requests before the connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        """Set once connections are taken."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.listening.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve. Raises EngineError where the base class would end the whole process, including its
        engine."""
        try:
            await super().serve(sockets)
        except SystemExit as ended:
            raise EngineError("The HTTP server cannot start. The log above says why.") from ended
