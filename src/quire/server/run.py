"""`quire serve`: the port opens, the engine starts, requests are served until a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import fields, replace
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from quire.bundled import bundled_model_path
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from quire.engine.async_client import AsyncEngineClient
from quire.engine.host import EngineHost, host_engine
from quire.engine.model_front import load_model_front
from quire.engine.supervisor import EngineSupervisor, SettingValue
from quire.errors import ConfigError, EngineError
from quire.platform import detect_platform
from quire.protocol.status import EngineState
from quire.server.app import create_app
from quire.server.backend import Backend, ServedModel
from quire.server.boot_screen import BootScreen
from quire.server.http_protocol import limited_protocol
from quire.server.settings import ServerSettings

__all__ = ["run_server", "uvicorn_config"]

logger = logging.getLogger("quire.server")

BUNDLED_NAME = "bundled"
BACKLOG = 2048
LAST_RESPONSES_S = 3
"""How long responses that have been told to end may take to leave."""


def run_server(
    engine: EngineSettings,
    server: ServerSettings,
    *,
    make_supervisor: Callable[..., EngineSupervisor] = EngineSupervisor,
) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit status.

    The first signal refuses new requests and lets open ones end, for `shutdown_timeout` seconds; a
    second one ends at once. Raises ConfigError if the port is taken or the engine cannot start
    with these settings, and EngineError if it, or the HTTP server, ends for good without a signal.
    make_supervisor: as for `host_engine`.
    """
    _log_to_stderr()
    with _listening(server) as listener:
        if server.uds is None:
            server = replace(server, port=listener.getsockname()[1])
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_Server(engine, server, make_supervisor).run(listener))
    return 0


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


class _HttpServer(uvicorn.Server):
    """Leaves signals to `_Server`, which must end the requests before the connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """EngineError where the base class would end the whole process, its engine and all."""
        try:
            await super().serve(sockets)
        except SystemExit as ended:
            raise EngineError("The HTTP server cannot start. The log above says why.") from ended


class _Server:
    """One run, from the first line of the boot screen to the last response."""

    def __init__(
        self,
        engine: EngineSettings,
        server: ServerSettings,
        make_supervisor: Callable[..., EngineSupervisor],
    ) -> None:
        self._make_supervisor = make_supervisor
        self._engine = engine
        self._settings = server
        self._backend = Backend()
        app = create_app(server, self._backend)
        self._http = _HttpServer(uvicorn_config(app, server))
        self._screen = BootScreen(sys.stderr, server)
        self._stop = asyncio.Event()
        self._second_signal = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        try:
            self._screen.opened()
            async with host_engine(
                _core_settings(self._engine), make_supervisor=self._make_supervisor
            ) as host:
                await self._serve(host, serving)
        finally:
            self._http.should_exit = True
            await serving

    async def _serve(self, host: EngineHost, serving: asyncio.Task[None]) -> None:
        self._backend.serve(host.client)
        starting = asyncio.create_task(self._start(host.client))
        stopping = asyncio.create_task(self._stop.wait())
        waited = {starting, stopping, host.supervision, serving}
        try:
            while True:
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if stopping in done:
                    break
                for task in done:
                    task.result()
                if host.supervision in done:
                    raise EngineError("The engine ended for good. The log above says why.")
                if serving in done:
                    raise EngineError("The HTTP server ended by itself. The log above says why.")
                waited -= done
            await self._drain(host.client)
        finally:
            for task in (starting, stopping):
                task.cancel()

    async def _start(self, client: AsyncEngineClient) -> None:
        """Load what the front needs itself, and show how the engine's start goes on."""
        self._backend.set_model(await asyncio.to_thread(self._load_model))
        status = client.status
        while status.state is not EngineState.READY:
            self._screen.show(status)
            status = await client.wait_for_change(status)
        self._screen.show(status)
        self._screen.ready(status, self._backend.model)
        # What start-up made stays: collections need not visit it between tokens.
        gc.collect()
        gc.freeze()

    def _load_model(self) -> ServedModel:
        settings = _with_model(self._engine)
        plan = plan_startup(settings, detect_platform())
        front = load_model_front(settings, plan.folder, plan.resolved.spec)
        root = self._engine.model or BUNDLED_NAME
        names = self._settings.served_model_name or (root,)
        seed = plan.resolved.settings.seed
        return ServedModel(tuple(names), root, int(time.time()), front, seed)

    async def _drain(self, client: AsyncEngineClient) -> None:
        num_open = client.num_unfinished
        logger.info("Shutting down: %d requests are open. A second signal ends them.", num_open)
        draining = asyncio.create_task(client.drain(self._settings.shutdown_timeout))
        forced = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait((draining, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        draining.cancel()
        # What is still open fails, with a message, when the client is closed.

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._second_signal.set()
        self._backend.drain()
        self._stop.set()


@contextlib.contextmanager
def _listening(settings: ServerSettings) -> Generator[socket.socket]:
    """A listening socket, so that a port in use is known before anything is loaded."""
    try:
        listener = _listen(settings)
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise ConfigError(
            f"Cannot listen on {where}: {error.strerror or error}. Stop what listens there, or "
            f"choose another {'--uds' if settings.uds else '--port'}."
        ) from error
    try:
        listener.setblocking(False)
        yield listener
    finally:
        listener.close()
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)


def _listen(settings: ServerSettings) -> socket.socket:
    if settings.uds is not None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(settings.uds)
        listener.listen(BACKLOG)
        return listener
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)


def _with_model(settings: EngineSettings) -> EngineSettings:
    if settings.model is not None:
        return settings
    return replace(settings, model=str(bundled_model_path()))


def _core_settings(settings: EngineSettings) -> dict[str, SettingValue]:
    """By name, as the core process takes them."""
    chosen = _with_model(settings)
    return {item.name: getattr(chosen, item.name) for item in fields(chosen)}


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _log_to_stderr() -> None:
    """The form of line that users of such servers know."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    # Its lines about starting would come before the engine is ready; the boot screen has them.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
