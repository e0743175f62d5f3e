"""One run with several front processes. Their owner has the engine core, and serves no requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from quire.base.errors import ConfigError
from quire.config.settings import EngineSettings
from quire.engine.clients.async_client import AsyncEngineClient
from quire.engine.supervision.host import EngineHost, host_engine
from quire.engine.supervision.supervisor import EngineSupervisor
from quire.protocol.status import EngineState
from quire.server.generation.served_model import (
    core_settings,
    front_settings,
    load_served_model,
    served_names,
)
from quire.server.prefixes.files import RenderedPrefix, read_prefix_files, render_prefixes
from quire.server.prefixes.pinning import PrefixKeeper
from quire.server.processes.boot_screen import BootScreen
from quire.server.processes.fronts import LAST_S, Fronts
from quire.server.processes.stand_in import StandIn
from quire.server.processes.stopping import StopSignals, until
from quire.server.readings.short_status import ShortStatus, short_status
from quire.server.readings.stats_line import StatsLine
from quire.server.settings import ServerSettings

__all__ = ["Owner"]

logger = logging.getLogger("quire.server")

TICK_S = 1.0


class Owner:
    """Owns the server, from the first line of the boot screen to the end of the last process."""

    def __init__(
        self,
        engine: EngineSettings,
        server: ServerSettings,
        *,
        screen: BootScreen,
        signals: StopSignals,
        make_supervisor: Callable[..., EngineSupervisor] = EngineSupervisor,
    ) -> None:
        """make_supervisor: see `host_engine`. Raises ConfigError if a file of `pin_prefix` is bad,
        or for replicas, which only a single front can serve. The owner pins prefixes, since it
        outlives its fronts."""
        if engine.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={engine.data_parallel_size} and several fronts "
                "(--api-server-count) do not go together so far. Leave one of them out."
            )
        self._make_supervisor = make_supervisor
        self._prefixes = read_prefix_files(server.pin_prefix)
        self._engine = engine
        self._settings = server
        self._screen = screen
        self._signals = signals

    async def run(self, listeners: Sequence[socket.socket], stand_in: StandIn) -> None:
        """stand_in: answers on the listeners until fronts do."""
        settings = core_settings(self._engine)
        async with host_engine(
            settings,
            make_supervisor=self._make_supervisor,
            flight_dir=self._settings.flight_dir,
        ) as host:
            self._signals.call_at_usr1(host.write_dump)
            # The owner writes one line of figures for all fronts.
            of_fronts = replace(self._settings, disable_log_stats=True)
            fronts = Fronts(
                host.directory,
                listeners,
                front_settings(self._engine),
                of_fronts,
                on_listening=stand_in.leave,
            )
            stand_in.status = partial(_status, host.client)
            supervision = asyncio.create_task(fronts.run())
            try:
                await self._serve(host, fronts, supervision)
                for listener in listeners:
                    stand_in.leave(listener)
                    listener.close()  # or connections to a socket without a front would wait
                await self._drain(fronts, supervision)
            finally:
                await fronts.stop()
                supervision.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await supervision

    async def _serve(
        self, host: EngineHost, fronts: Fronts, supervision: asyncio.Task[None]
    ) -> None:
        starting = asyncio.create_task(self._start(host.client, fronts))
        ticking = asyncio.create_task(self._tick(host.client, fronts))
        try:
            await until(
                self._signals.first,
                {
                    starting: "",
                    ticking: "",
                    supervision: "The front processes ended by themselves.",
                    host.supervision: "The engine ended for good. The log above says why.",
                },
            )
        finally:
            starting.cancel()
            ticking.cancel()

    async def _start(self, client: AsyncEngineClient, fronts: Fronts) -> None:
        keeper = PrefixKeeper(client, await asyncio.to_thread(self._rendered_prefixes))
        status = client.status
        while status.state is not EngineState.READY:
            self._screen.show(status)
            status = await client.wait_for_change(status)
        self._screen.show(status)
        await keeper.start()
        await fronts.wait_until_ready()
        names, root = served_names(self._engine, self._settings)
        self._screen.ready(status, names[0], root)
        await keeper.keep()

    def _rendered_prefixes(self) -> list[RenderedPrefix]:
        """Render the operator's prefixes. The owner loads the tokenizer for this alone."""
        if not self._prefixes:
            return []
        model = load_served_model(self._engine, self._settings)
        return render_prefixes(self._prefixes, model.front.renderer)

    async def _tick(self, client: AsyncEngineClient, fronts: Fronts) -> None:
        """Log a line of figures now and then."""
        if self._settings.disable_log_stats:
            return
        line = StatsLine(self._settings.log_stats_interval)
        while True:
            await asyncio.sleep(TICK_S)
            capacity = client.status.capacity
            device = "" if capacity is None else capacity.device
            line.tick(client.stats, fronts.board.total().metrics, device)

    async def _drain(self, fronts: Fronts, supervision: asyncio.Task[None]) -> None:
        logger.info("Shutting down: open requests may end. A second signal ends them.")
        fronts.drain()
        forced = asyncio.create_task(self._signals.second.wait())
        await asyncio.wait(
            (supervision, forced),
            timeout=self._settings.shutdown_timeout + LAST_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        forced.cancel()


def _status(client: AsyncEngineClient) -> ShortStatus:
    """While no front listens."""
    if client.status.state is EngineState.READY:
        return ShortStatus("starting", "fronts")
    return short_status(client.status)
