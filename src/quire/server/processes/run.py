"""`quire serve`: opens the port, starts the engine, and serves until a signal comes."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire.config.settings import EngineSettings
from quire.server.processes.boot_screen import BootScreen
from quire.server.processes.listening import listening
from quire.server.processes.runtime import log_to_stderr, new_loop
from quire.server.processes.stand_in import StandIn
from quire.server.processes.stopping import StopSignals
from quire.server.settings import ServerSettings

if TYPE_CHECKING:  # the port answers before this is imported
    from quire.engine.supervision.supervisor import EngineSupervisor

__all__ = ["run_server"]

logger = logging.getLogger(__name__)


def run_server(
    engine: EngineSettings,
    server: ServerSettings,
    *,
    make_supervisor: Callable[..., EngineSupervisor] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit status.

    The first signal refuses new requests and gives open ones `shutdown_timeout` seconds to end; a
    second one ends at once. Raises ConfigError if the port is taken, a file of `pin_prefix` cannot
    be read or pinned, or the engine cannot start with these settings; EngineError if the engine or
    the HTTP server ends for good without a signal. make_supervisor: see `host_engine`.
    """
    log_to_stderr(server.log_level)
    if server.key_warning is not None:
        logger.warning(server.key_warning)
    with listening(server) as listeners:
        if server.uds is None:
            server = replace(server, port=listeners[0].getsockname()[1])
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_run(engine, server, listeners, make_supervisor))
    return 0


async def _run(
    engine: EngineSettings,
    server: ServerSettings,
    listeners: Sequence[socket.socket],
    make_supervisor: Callable[..., EngineSupervisor] | None,
) -> None:
    screen, signals = BootScreen(sys.stderr, server), StopSignals()
    signals.install()
    async with StandIn(server) as stand_in:
        await stand_in.open(listeners)
        screen.opened()
        make = await asyncio.to_thread(_imported, server)
        if make_supervisor is not None:
            make = functools.partial(make, make_supervisor=make_supervisor)
        if not signals.first.is_set():
            await make(engine, server, screen=screen, signals=signals).run(listeners, stand_in)


class _Run(Protocol):
    async def run(self, listeners: Sequence[socket.socket], stand_in: StandIn) -> None: ...


def _imported(server: ServerSettings) -> Callable[..., _Run]:
    """Runs in a thread: it takes a second or more, and the port is open."""
    if server.api_server_count > 1:
        from quire.server.processes.owner import Owner

        return Owner
    from quire.server.processes.sole_front import SoleFront

    return SoleFront
