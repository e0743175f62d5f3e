"""The listening sockets, opened before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
from collections.abc import Generator
from pathlib import Path

from quire.base.errors import ConfigError
from quire.server.settings import ServerSettings

__all__ = ["listening"]

BACKLOG = 2048

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Generator[list[socket.socket]]:
    """Open the sockets of the fronts. A single front gets one per address of the host's name;
    several fronts get one socket each and share the addresses. Raises ConfigError if an address is
    in use.

    The kernel distributes connections over them (SO_REUSEPORT, Linux 3.9). Sockets stay open while
    a front is replaced, and connections wait for the next one. All fronts share one Unix socket.
    """
    listeners: list[socket.socket] = []
    try:
        listeners += _listen(settings)
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise ConfigError(
            f"Cannot listen on {where}: {error.strerror or error}. {_advice(settings, error)}"
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
    listeners = _at_all_addresses(settings.host, settings.port)
    if count == 1:
        return listeners
    # The sockets above do not share, so another server on this port was found.
    places = [(each.family, each.getsockname()[:2]) for each in listeners]
    for listener in listeners:
        listener.close()
    return [
        socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=True)
        for family, address in (places[i % len(places)] for i in range(count))
    ]


def _at_all_addresses(host: str, port: int) -> list[socket.socket]:
    """Return one listener for each address of `host`, since clients try a name's addresses in an
    order of their own. Addresses that this machine lacks (IPv6 switched off) are left out."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = list(dict.fromkeys((family, address[0]) for family, _, _, _, address in found))
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in places:
        try:
            listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if len(places) == 1 or error.errno not in _NO_SUCH_ADDRESS:
                for each in listeners:
                    each.close()
                raise
            missing = error
            continue
        port = listener.getsockname()[1]  # the same port for all, if any free one was asked for
        listeners.append(listener)
    if not listeners and missing is not None:
        raise missing
    return listeners


def _advice(settings: ServerSettings, error: OSError) -> str:
    flag = "--uds" if settings.uds else "--port"
    if error.errno == errno.EADDRINUSE:
        return f"Stop what listens there, or choose another {flag}."
    if settings.uds:
        return "Give --uds a path of at most 107 bytes in a folder that you may write to."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Choose a --port from 1024 on, or give the right to use lower ones."
    return "Give --host a name or an address that this machine has."


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a killed server, on which no process listens."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # not ours to remove
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
