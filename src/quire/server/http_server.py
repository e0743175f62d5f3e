"""uvicorn, as this project runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from quire.errors import ConfigError, EngineError
from quire.server.http_protocol import limited_protocol
from quire.server.settings import ServerSettings

__all__ = ["HttpServer", "log_to_stderr", "new_loop", "uvicorn_config"]

LAST_RESPONSES_S = 3
"""How long responses that have been told to end may take to leave."""


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """How uvicorn serves the application. ConfigError if the TLS files cannot be read."""
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
        ssl_certfile=settings.ssl_certfile,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(
            f"The TLS files {settings.ssl_keyfile} and {settings.ssl_certfile} cannot be used: "
            f"{error}. Give a key and its certificate in PEM form."
        ) from error
    return config


class HttpServer(uvicorn.Server):
    """Leaves signals to its owner, which must end the requests before the connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """EngineError where the base class would end the whole process, its engine and all."""
        try:
            await super().serve(sockets)
        except SystemExit as ended:
            raise EngineError("The HTTP server cannot start. The log above says why.") from ended


def new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def log_to_stderr() -> None:
    """The form of line that users of such servers know."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    # Its lines about starting would come before the engine is ready; the boot screen has them.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
