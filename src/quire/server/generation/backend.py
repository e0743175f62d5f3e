"""Backend of the routes: an engine and its model's text, from the moment they are there."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from quire.engine.clients.async_client import AsyncEngineClient
from quire.engine.model_front import ModelFront
from quire.protocol.status import (
    CORE_STARTS,
    EngineCapacity,
    EngineState,
    EngineStatus,
    StartPhase,
)
from quire.server.generation.adapters import ServedAdapters
from quire.server.requests.errors import RefusedError
from quire.text.dialect import Dialect
from quire.text.rendering.chat_template.cache_lint import CacheRisk

__all__ = ["Backend", "Ready", "ServedModel", "describe"]

logger = logging.getLogger("quire.server")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """names: names that requests may use; responses have the first. root: folder or hub id.
    created: Unix seconds, the same for the life of the server. seed: seed from which requests
    without one draw theirs; None for unpredictable ones. dialect: form of its calls and thinking;
    None without a chat. cache_risks: habits of its chat template that cost cached prefixes.
    adapters: adapters that requests may name in its place; None if the engine takes none."""

    names: tuple[str, ...]
    root: str
    created: int
    front: ModelFront
    seed: int | None = None
    dialect: Dialect | None = None
    adapters: ServedAdapters | None = None
    cache_risks: tuple[CacheRisk, ...] = ()

    def log_risks(self) -> None:
        """Log each habit of the chat template that costs cached prefixes."""
        for risk in self.cache_risks:
            logger.info("The chat template defeats cached prefixes: %s.", risk.words)

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request names; None for the model itself. RefusedError 404 for
        a name that is not served."""
        if name is None or name in self.names:
            return None
        if self.adapters is not None and self.adapters.has(name):
            return name
        self.check_name(name)
        return None

    def check_name(self, name: str | None) -> None:
        """RefusedError 404 for a model that is not served; None means the one that is."""
        if name is not None and name not in self.names:
            adapters = [] if self.adapters is None else self.adapters.names
            if name in adapters:
                return
            served = ", ".join(f"`{known}`" for known in (*self.names, *adapters))
            raise RefusedError(
                f"The model `{name[:128]}` does not exist. This server has {served}.",
                status=404,
                param="model",
            )


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine that takes requests."""

    client: AsyncEngineClient
    model: ServedModel
    capacity: EngineCapacity


class Backend:
    """Empty at first, so that the port can open at once; `serve` fills it in."""

    def __init__(self) -> None:
        self.awaits_sessions = False
        """True while conversations of an earlier server may come, if the engine has K/V on disk."""
        self._client: AsyncEngineClient | None = None
        self._model: ServedModel | None = None
        self._opened = time.monotonic()
        self.is_draining = False

    def serve(self, client: AsyncEngineClient) -> None:
        """Take requests with this engine once it is ready."""
        self._client = client

    def set_model(self, model: ServedModel) -> None:
        """The model whose tokenizer and template have been loaded."""
        self._model = model

    def drain(self) -> None:
        """Refuse requests from now on."""
        self.is_draining = True

    @property
    def client(self) -> AsyncEngineClient | None:
        return self._client

    @property
    def model(self) -> ServedModel | None:
        return self._model

    @property
    def capacity(self) -> EngineCapacity | None:
        """Capacity of the engine; None before there was one."""
        return None if self._client is None else self._client.status.capacity

    @property
    def status(self) -> EngineStatus:
        """The engine's own word, except while there is none, while conversations are still read,
        and while the server drains: then it counts as draining to the last response, though the
        engine ends before that."""
        if self._client is None or self._model is None:
            return EngineStatus(
                EngineState.STARTING, self._start_phases(), message="the model is being looked up"
            )
        status = self._client.status
        if self.is_draining:
            return EngineStatus(
                EngineState.DRAINING, status.phases, status.capacity, status.restarts,
                "the server is shutting down",
            )  # fmt: skip
        capacity = status.capacity
        if self.awaits_sessions and capacity is not None and capacity.kv_store:
            return replace(status, state=EngineState.STARTING, message="sessions are read")
        return status

    def _start_phases(self) -> tuple[StartPhase, ...]:
        """Return the core's phases. Once they are done, add the one that this front still waits
        for."""
        phases = () if self._client is None else self._client.status.phases
        if phases and not phases[-1].is_done:
            return phases
        name = CORE_STARTS if self._client is None else "loading the tokenizer"
        return (*phases, StartPhase(name, time.monotonic() - self._opened, is_done=False))

    def require(self) -> Ready:
        """RefusedError 503, with the phase, unless requests can be taken."""
        status, client, model = self.status, self._client, self._model
        ready = status.state is EngineState.READY and status.capacity is not None
        if not ready or client is None or model is None or status.capacity is None:
            raise RefusedError(
                f"The engine is {describe(status)}. {_ADVICE.get(status.state, 'Try again soon')}.",
                status=503,
                retry_after_s=_RETRY_S.get(status.state, 1.0),
            )
        return Ready(client, model, status.capacity)

    def require_core(self) -> AsyncEngineClient:
        """For what an engine does that serves or sleeps. RefusedError 503 unless it can."""
        if self._client is None or self.status.state is not EngineState.SLEEPING:
            return self.require().client
        return self._client


_ADVICE = {
    EngineState.SLEEPING: "POST /wake_up wakes it",
    EngineState.DRAINING: "Try again when a server is back at this address",
    EngineState.DEAD: "The server has to be started again; its log says why",
}
"""Advice in states that do not end by themselves."""
_RETRY_S = {EngineState.STARTING: 5.0, EngineState.DRAINING: 5.0, EngineState.DEAD: 30.0}


def describe(status: EngineStatus) -> str:
    """State, phase and reason in a few words: "starting (loading, 2.1 s)"."""
    details = [status.message] if status.message else []
    if status.phases and not status.phases[-1].is_done:
        phase = status.phases[-1]
        shown = f"{phase.name}, {phase.seconds:.1f} s"
        is_start = status.state in (EngineState.STARTING, EngineState.RESTARTING)
        details = [shown] if is_start else [shown, *details]  # the message says the same
    return status.state.value + (f" ({'; '.join(details)})" if details else "")
