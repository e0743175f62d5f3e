"""The listening sockets, opened before anything is loaded."""

from __future__ import annotations

import contextlib
import socket
import stat
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
        _remove_stale(Path(settings.uds))
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(settings.uds)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
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


def _remove_stale(path: Path) -> None:
    """The socket of a server that was killed: nobody takes connections there."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # not ours to remove
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
