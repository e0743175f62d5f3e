"""`quire serve`: the port opens, the engine starts, requests are served until a signal comes."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.config.settings import EngineSettings
from quire.engine.async_client import AsyncEngineClient
from quire.engine.host import EngineHost, host_engine
from quire.engine.supervisor import EngineSupervisor
from quire.protocol.status import EngineState
from quire.server.app import create_app
from quire.server.backend import Backend
from quire.server.boot_screen import BootScreen
from quire.server.http_server import HttpServer, log_to_stderr, new_loop, uvicorn_config
from quire.server.listening import listening
from quire.server.owner import Owner
from quire.server.pinning import PrefixKeeper
from quire.server.prefix_files import PrefixFile, read_prefix_files, render_prefixes
from quire.server.served_model import core_settings, load_served_model
from quire.server.settings import ServerSettings
from quire.server.stopping import StopSignals, until

__all__ = ["run_server"]

logger = logging.getLogger("quire.server")


def run_server(
    engine: EngineSettings,
    server: ServerSettings,
    *,
    make_supervisor: Callable[..., EngineSupervisor] = EngineSupervisor,
) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit status.

    The first signal refuses new requests and lets open ones end, for `shutdown_timeout` seconds; a
    second one ends at once. Raises ConfigError if the port is taken, a file of `pin_prefix` cannot
    be read or pinned, or the engine cannot start with these settings, and EngineError if it, or the
    HTTP server, ends for good without a signal.
    make_supervisor: as for `host_engine`.
    """
    log_to_stderr()
    prefixes = read_prefix_files(server.pin_prefix)
    with listening(server) as listeners:
        if server.uds is None:
            server = replace(server, port=listeners[0].getsockname()[1])
        with asyncio.Runner(loop_factory=new_loop) as runner:
            if server.api_server_count > 1:
                runner.run(Owner(engine, server, prefixes, make_supervisor).run(listeners))
            else:
                runner.run(_Server(engine, server, prefixes, make_supervisor).run(listeners[0]))
    return 0


class _Server:
    """One run with the front in this process, from the first line of the boot screen to the last
    response."""

    def __init__(
        self,
        engine: EngineSettings,
        server: ServerSettings,
        prefixes: Sequence[PrefixFile],
        make_supervisor: Callable[..., EngineSupervisor],
    ) -> None:
        self._make_supervisor = make_supervisor
        self._prefixes = prefixes
        self._engine = engine
        self._settings = server
        self._backend = Backend()
        app = create_app(server, self._backend)
        self._http = HttpServer(uvicorn_config(app, server))
        self._screen = BootScreen(sys.stderr, server)
        self._signals = StopSignals(self._backend.drain)

    async def run(self, listener: socket.socket) -> None:
        self._signals.install()
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        try:
            self._screen.opened()
            async with host_engine(
                core_settings(self._engine), make_supervisor=self._make_supervisor
            ) as host:
                await self._serve(host, serving)
        finally:
            self._http.should_exit = True
            await serving

    async def _serve(self, host: EngineHost, serving: asyncio.Task[None]) -> None:
        self._backend.serve(host.client)
        starting = asyncio.create_task(self._start(host.client))
        try:
            await until(
                self._signals.first,
                {
                    starting: "",
                    host.supervision: "The engine ended for good. The log above says why.",
                    serving: "The HTTP server ended by itself. The log above says why.",
                },
            )
            await self._drain(host.client)
        finally:
            starting.cancel()

    async def _start(self, client: AsyncEngineClient) -> None:
        """Load what the front needs itself, show how the engine's start goes on, and pin prefixes
        on each core."""
        model = await asyncio.to_thread(load_served_model, self._engine, self._settings)
        self._backend.set_model(model)
        keeper = PrefixKeeper(client, render_prefixes(self._prefixes, model.front.renderer))
        status = client.status
        while status.state is not EngineState.READY:
            self._screen.show(status)
            status = await client.wait_for_change(status)
        self._screen.show(status)
        await keeper.start()
        self._screen.ready(status, model.names[0], model.root)
        # What start-up made stays: collections need not visit it between tokens.
        gc.collect()
        gc.freeze()
        await keeper.keep()

    async def _drain(self, client: AsyncEngineClient) -> None:
        num_open = client.num_unfinished
        logger.info("Shutting down: %d requests are open. A second signal ends them.", num_open)
        draining = asyncio.create_task(client.drain(self._settings.shutdown_timeout))
        forced = asyncio.create_task(self._signals.second.wait())
        await asyncio.wait((draining, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        draining.cancel()
        # What is still open fails, with a message, when the client is closed.
