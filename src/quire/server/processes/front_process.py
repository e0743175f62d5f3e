"""One of several fronts as a process, started by `Fronts`:

    python -m quire.server.processes.front_process

Its standard input brings a `FrontLaunch` and stays open. One more byte tells the process to drain,
the end of the input to end. On its standard output, the first byte means that it listens; each
later one is a heartbeat of its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.platform.streams import claim_streams
from quire.base.telemetry.flight.stacks import StackFile, StackPlace
from quire.config.settings import EngineSettings
from quire.engine.clients.process_client import ProcessEngineClient
from quire.protocol.codec import Codec, read_message
from quire.protocol.status import EngineState
from quire.server.app import create_app
from quire.server.generation.backend import Backend
from quire.server.generation.served_model import load_served_model
from quire.server.http.server import HttpServer, uvicorn_config
from quire.server.processes.front_launch import BAD_CONFIG, FrontLaunch
from quire.server.processes.runtime import log_to_stderr, new_loop
from quire.server.processes.stopping import until
from quire.server.readings.front_board import FrontBoard, FrontReading
from quire.server.readings.metrics import ServerMetrics

__all__: list[str] = []

logger = logging.getLogger("quire.server")

PATIENCE_S = 10.0
"""Seconds that connections wait at the socket for a new front. It is longer than a front needs
beside a running engine. An engine that starts takes minutes, so its phase is answered instead."""


def main() -> int:
    """Serve until told to stop. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # for the owner, which says when to drain
    claim_streams()
    log_to_stderr()
    owner = _claim_output()
    try:
        launch = read_message(sys.stdin.fileno(), Codec[FrontLaunch](FrontLaunch))
        logging.getLogger().setLevel(launch.server.log_level.upper())
        StackFile(StackPlace(launch.directory, f"front{launch.front}"), f"front {launch.front}")
        with (
            socket.socket(fileno=launch.listener) as listener,
            asyncio.Runner(loop_factory=new_loop) as runner,
        ):
            runner.run(_Front(launch).run(listener, owner))
    except ConfigError as error:
        logger.error("a front process cannot start: %s", error)
        return BAD_CONFIG
    return 0


def _claim_output() -> int:
    """Return a descriptor of standard output, to which nothing else writes from now on."""
    owner = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return owner


class _Front:
    def __init__(self, launch: FrontLaunch) -> None:
        self._launch = launch
        self._board = FrontBoard(Path(launch.directory))
        self._backend = Backend()
        app = create_app(launch.server, self._backend, board=self._board, front=launch.front)
        self._http = HttpServer(uvicorn_config(app, launch.server))
        self._draining = asyncio.Event()
        self._ending = asyncio.Event()

    async def run(self, listener: socket.socket, owner: int) -> None:
        """owner: descriptor of the pipe to the owner."""
        launch = self._launch
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._on_input)
        client = ProcessEngineClient(Path(launch.directory), client_id=launch.front)
        self._backend.serve(client)
        loading = asyncio.create_task(self._load(client))
        serving = asyncio.create_task(self._serve(listener, loading))
        telling = asyncio.create_task(self._tell(owner))
        try:
            tasks = {serving: "The HTTP server ended by itself.", loading: ""}
            await until(self._draining, tasks)
            await self._drain(client)
        finally:
            loading.cancel()
            telling.cancel()
            await client.close()  # open requests fail, with a message
            self._http.should_exit = True
            if not self._http.listening.is_set():
                serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def _serve(self, listener: socket.socket, loading: asyncio.Task[None]) -> None:
        """Take connections as soon as they can be served: a front that replaces another one beside
        a running engine must refuse no client."""
        await asyncio.wait({loading}, timeout=PATIENCE_S)
        await self._http.serve(sockets=[listener])

    async def _tell(self, owner: int) -> None:
        """Tell the owner that this process listens, then send heartbeats."""
        os.set_blocking(owner, False)
        await self._http.listening.wait()
        while True:
            # The owner has ended, and so will this process; or it sleeps, and the pipe is full.
            with contextlib.suppress(OSError):
                os.write(owner, b".")
            await asyncio.sleep(self._launch.heartbeat_s)

    async def _load(self, client: ProcessEngineClient) -> None:
        """Load all that serving needs. The first reading on the board tells the owner that this is
        done."""
        engine = EngineSettings.from_values(self._launch.engine)
        model = await asyncio.to_thread(load_served_model, engine, self._launch.server)
        if model.seed is not None:  # fronts with equal seeds would repeat each other's draws
            model = replace(model, seed=model.seed + self._launch.front)
        self._backend.set_model(model)
        if self._launch.front == 0:
            model.log_risks()
        gc.collect()
        gc.freeze()
        status = client.status
        while status.state is EngineState.STARTING:
            status = await client.wait_for_change(status)
        self._board.write(self._launch.front, FrontReading(ServerMetrics()))

    async def _drain(self, client: ProcessEngineClient) -> None:
        draining = asyncio.create_task(client.drain(self._launch.server.shutdown_timeout))
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait((draining, ending), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, ending):
            task.cancel()

    def _on_input(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._ending.set()
        self._backend.drain()
        self._draining.set()


if __name__ == "__main__":
    sys.exit(main())
