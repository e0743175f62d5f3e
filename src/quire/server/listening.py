"""The listening sockets, opened before anything is loaded."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from pathlib import Path

from quire.errors import ConfigError
from quire.server.settings import ServerSettings

__all__ = ["listening"]

BACKLOG = 2048


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Generator[list[socket.socket]]:
    """One socket per front, all at the same address; ConfigError if that is in use.

    The kernel spreads connections over them (SO_REUSEPORT, Linux 3.9). They stay open while a front
    is replaced: what is connected meanwhile waits for the next one. A Unix socket is one for all.
    """
    listeners: list[socket.socket] = []
    try:
        listeners += _listen(settings)
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise ConfigError(
            f"Cannot listen on {where}: {error.strerror or error}. Stop what listens there, or "
            f"choose another {'--uds' if settings.uds else '--port'}."
        ) from error
    try:
        for listener in listeners:
            listener.setblocking(False)
        yield listeners
    finally:
        for listener in listeners:
            listener.close()
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)


def _listen(settings: ServerSettings) -> list[socket.socket]:
    count = settings.api_server_count
    if settings.uds is not None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(settings.uds)
        listener.listen(BACKLOG)
        return [listener] * count
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    address = (settings.host, settings.port)
    listener = socket.create_server(address, family=family, backlog=BACKLOG)
    if count == 1:
        return [listener]
    # The one above does not share, so that another server at this port was found.
    address = listener.getsockname()[:2]
    listener.close()
    return [
        socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=True)
        for _ in range(count)
    ]
