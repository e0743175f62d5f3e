"""A server on a free port of this machine, in a thread of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pytest
import uvicorn

from quire.bundled import bundled_model_path
from quire.config.families.reader import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.model_front import ModelFront, load_model_front
from quire.server.app import create_app
from quire.server.generation.adapters import ServedAdapters
from quire.server.generation.backend import Backend, ServedModel
from quire.server.generation.served_model import model_dialect
from quire.server.http.server import uvicorn_config
from quire.server.readings.prompt_memory import KnownPrompt, PromptMemory
from quire.server.readings.timeline import Timeline
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests.server.in_memory import InMemoryClient
from tests.waiting import WAIT_S, wait_for

Result = TypeVar("Result")

MODEL = "bundled"

PATIENT = Limits(max_queue_s=10 * WAIT_S, first_token_timeout_s=10 * WAIT_S)
"""Limits that end no request because others use the machine too."""


def remembered(timeline: Timeline, token_ids: list[int]) -> KnownPrompt:
    """A prompt of a request that a test makes by hand."""
    ids = np.array(token_ids, np.int32)
    return PromptMemory(1).add(timeline, ids, tail=0, salt="", adapter="", media=(), parts=None)


@functools.cache
def bundled_front() -> ModelFront:
    """The bundled model's, loaded once."""
    folder = bundled_model_path()
    return load_model_front(EngineSettings(), folder, read_model_spec(folder))


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    port: int
    client: InMemoryClient
    backend: Backend
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Result]) -> Result:
        """Run in the server's event loop."""
        done: list[Result] = []
        event = threading.Event()

        def run() -> None:
            done.append(function())
            event.set()

        self.loop.call_soon_threadsafe(run)
        assert event.wait(WAIT_S)
        return done[0]

    def wait_until_open(self, num_requests: int = 1) -> None:
        """Wait until the engine has so many requests."""
        wait_for(lambda: self.call(lambda: self.client.num_unfinished) >= num_requests, "request")

    def wait_until_idle(self) -> None:
        """Wait until no request is open; then no block may be in use."""

        def is_idle() -> bool:
            return not (self.client.num_unfinished or self.client.engine.core.has_unfinished)

        wait_for(lambda: self.call(is_idle), "end of a request")
        assert self.call(lambda: self.client.stats.num_used_blocks) == 0


@contextlib.contextmanager
def held_up(patch: pytest.MonkeyPatch, owner: type, name: str) -> Iterator[threading.Event]:
    """Let calls of a method wait to the end of this. The event is set when one has begun."""
    begun, may_go = threading.Event(), threading.Event()
    method = getattr(owner, name)

    def wait(*given: Any, **named: Any) -> Any:
        begun.set()
        assert may_go.wait(WAIT_S)
        return method(*given, **named)

    patch.setattr(owner, name, wait)
    try:
        yield begun
    finally:
        may_go.set()


@contextlib.contextmanager
def running_server(
    front: ModelFront,
    settings: ServerSettings | None = None,
    client: InMemoryClient | None = None,
    adapters: ServedAdapters | None = None,
) -> Iterator[RunningServer]:
    settings = settings or ServerSettings(disable_access_log=True)
    if settings.limits == Limits():
        settings = replace(settings, limits=PATIENT)
    backend = Backend()
    engine = client or InMemoryClient()
    backend.serve(engine)
    names = (MODEL, "other-name")
    dialect = model_dialect(front)
    model = ServedModel(names, "bundled", 1700000000, front, 0, dialect, adapters)
    backend.set_model(model)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn_config(create_app(settings, backend), settings))
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    wait_for(lambda: server.started, "start of the server")
    try:
        yield RunningServer(f"http://127.0.0.1:{port}", port, engine, backend, loops[0])
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()
        if client is None:
            engine.engine.core.shutdown()
