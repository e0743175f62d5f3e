"""One run with the front in the process that was started."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Sequence

from quire.config.settings import EngineSettings
from quire.engine.clients.async_client import AsyncEngineClient
from quire.engine.supervision.host import EngineHost, host_engine
from quire.engine.supervision.supervisor import EngineSupervisor
from quire.protocol.status import EngineState
from quire.server.app import create_app
from quire.server.generation.backend import Backend
from quire.server.generation.served_model import core_settings, load_served_model
from quire.server.http.server import HttpServer, uvicorn_config
from quire.server.prefixes.files import read_prefix_files, render_prefixes
from quire.server.prefixes.pinning import PrefixKeeper
from quire.server.processes.boot_screen import BootScreen
from quire.server.processes.stand_in import StandIn
from quire.server.processes.stopping import StopSignals, until
from quire.server.settings import ServerSettings

__all__ = ["SoleFront"]

logger = logging.getLogger("quire.server")


class SoleFront:
    """A run with its front in this process, from the first line of the boot screen to the last
    response."""

    def __init__(
        self,
        engine: EngineSettings,
        server: ServerSettings,
        *,
        screen: BootScreen,
        signals: StopSignals,
        make_supervisor: Callable[..., EngineSupervisor] = EngineSupervisor,
    ) -> None:
        """make_supervisor: see `host_engine`. Raises ConfigError if a file of `pin_prefix` is
        bad."""
        self._make_supervisor = make_supervisor
        self._prefixes = read_prefix_files(server.pin_prefix)
        self._engine = engine
        self._settings = server
        self._backend = Backend()
        app = create_app(server, self._backend)
        self._http = HttpServer(uvicorn_config(app, server))
        self._screen = screen
        self._signals = signals

    async def run(self, listeners: Sequence[socket.socket], stand_in: StandIn) -> None:
        """stand_in: answers on the listeners until the front does."""
        self._signals.call_at_first(self._backend.drain)
        serving = asyncio.create_task(self._http.serve(sockets=list(listeners)))
        relieving = asyncio.create_task(self._relieve(stand_in, listeners))
        try:
            async with host_engine(
                core_settings(self._engine),
                make_supervisor=self._make_supervisor,
                flight_dir=self._settings.flight_dir,
            ) as host:
                self._signals.call_at_usr1(host.write_dump)
                await self._serve(host, serving)
        finally:
            relieving.cancel()
            self._http.should_exit = True
            await serving

    async def _relieve(self, stand_in: StandIn, listeners: Sequence[socket.socket]) -> None:
        await self._http.listening.wait()
        for listener in listeners:
            stand_in.leave(listener)

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
        """Load the front's part of the model, show the progress of the engine's start, and pin
        prefixes on each core."""
        model = await asyncio.to_thread(load_served_model, self._engine, self._settings)
        self._backend.set_model(model)
        model.log_risks()
        keeper = PrefixKeeper(client, render_prefixes(self._prefixes, model.front.renderer))
        status = client.status
        while status.state is not EngineState.READY:
            self._screen.show(status)
            status = await client.wait_for_change(status)
        self._screen.show(status)
        await keeper.start()
        self._screen.ready(status, model.names[0], model.root, model.cache_risks)
        # Objects of the start-up live on: collections between tokens need not visit them.
        gc.collect()
        gc.freeze()
        await keeper.keep()

    async def _drain(self, client: AsyncEngineClient) -> None:
        num_open = client.num_unfinished
        logger.info("Shutting down; open requests: %d. A second signal ends them.", num_open)
        draining = asyncio.create_task(client.drain(self._settings.shutdown_timeout))
        forced = asyncio.create_task(self._signals.second.wait())
        await asyncio.wait((draining, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        draining.cancel()
        # Open requests fail, with a message, when the client is closed.
