"""Prefixes that stay in the cache: pinned by a request, or by the operator's files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.engine.clients.async_client import AsyncEngineClient
from quire.protocol.control import ListPins
from quire.protocol.pins import PIN_PARAMS, PinnedPrefix, prefix_key
from quire.protocol.request import EngineRequest, FinishReason, SequenceFinish
from quire.protocol.scheduling_params import SchedulingParams
from quire.protocol.status import EngineCapacity, EngineState, EngineStatus
from quire.server.prefixes.files import RenderedPrefix

__all__ = ["PrefixKeeper", "pin_prefix"]

logger = logging.getLogger("quire.server")

RETRY_S = 0.5
MAX_TRIES = 20
LOOK_S = 30.0
"""Seconds between two looks for prefixes that the engine has let go."""

Cores = tuple[int, EngineCapacity | None]
"""Restarts so far, and the capacity of all ready replicas. One of them changes with each new
core."""


async def pin_prefix(
    client: AsyncEngineClient,
    name: str,
    token_ids: Sequence[int],
    *,
    seconds: float = math.inf,
    salt: str = "",
    scheduling: SchedulingParams | None = None,
    is_shared: bool = False,
) -> PinnedPrefix:
    """Compute a prefix and keep it. name: name of the pin. If an equal prefix is pinned, that one
    stays, for the longer of the two times.

    Raises RequestError if the engine refuses it or it expires at once, EngineError if it was not
    pinned, and EngineUnavailableError.
    """
    request = EngineRequest(
        request_id=name,
        first_handle=client.reserve_handles(1),
        prompt_token_ids=np.array(token_ids, np.int32),
        params=PIN_PARAMS,
        seed=0,
        arrival_time=time.monotonic(),
        salt=salt,
        scheduling=scheduling or SchedulingParams(),
        pin_seconds=seconds,
        pin_is_shared=is_shared,
    )
    finish: SequenceFinish | None = None
    async with await client.add(request) as stream:
        async for update in stream:
            finish = update.samples[0].finish if update.samples else finish
    if finish is None or finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        message = "the engine ended the request" if finish is None else finish.message
        raise EngineError(f"The prefix was not pinned: {message}.")
    # Compare by key: a request that was replayed on another core has another handle there.
    key = prefix_key(token_ids, salt, is_shared=is_shared)
    for pin in (await client.control(ListPins())).pins:
        if pin.key == key:
            return pin
    if time.monotonic() - request.arrival_time > seconds:
        raise RequestError(
            f"ttl_s is {seconds:g}, and the prefix was let go as soon as it was pinned. Allow it "
            "more time."
        )
    raise EngineError("The prefix was let go as soon as it was pinned. Pin it again.")


class PrefixKeeper:
    """Pins the operator's prefixes on the first core, and again on each later one and after a core
    has let them go by itself."""

    def __init__(
        self,
        client: AsyncEngineClient,
        prefixes: Sequence[RenderedPrefix],
        look_s: float = LOOK_S,
    ) -> None:
        """look_s: seconds between two looks for prefixes that were let go."""
        self._client = client
        self._prefixes = prefixes
        self._look_s = look_s
        self._served: Cores | None = None
        self._lost: tuple[str, ...] = ()
        """Keys of the prefixes that the present core has let go."""
        self._refused: set[str] = set()
        """Names, for one line in the log each."""

    async def start(self) -> None:
        """Wait until all are pinned. Raises ConfigError if one cannot be, EngineError if it fails
        again and again."""
        for tries in range(MAX_TRIES):
            status = await self._ready()
            try:
                refused = await self._pin_all(status)
            except EngineError:
                if tries == MAX_TRIES - 1:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            for error in refused.values():
                raise ConfigError(f"A prefix of --pin-prefix is refused: {error}") from error
            return

    async def keep(self) -> None:
        """Keep them pinned for ever; returns only if there are none. Failures are logged: the
        server goes on without the prefix."""
        status = self._client.status
        while self._prefixes:
            if status.state is EngineState.SLEEPING:
                self._served = None  # the core has dropped them
            is_new = _cores(status) != self._served
            if status.state is EngineState.READY and (is_new or self._lost):
                try:
                    self._log(await self._pin_all(status, None if is_new else self._lost))
                except EngineError as error:
                    logger.warning("prefixes are not pinned yet: %s", error)
                    await asyncio.sleep(RETRY_S)
                    status = self._client.status
                    continue
            status = await self._next(status)

    async def _next(self, status: EngineStatus) -> EngineStatus:
        """Wait until the status changes or prefixes are missing."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    return await self._client.wait_for_change(status)
            with contextlib.suppress(EngineError):
                self._lost = (await self._client.control(ListPins())).lost_pins
                if self._lost:
                    return self._client.status

    async def _ready(self) -> EngineStatus:
        status = self._client.status
        while status.state is not EngineState.READY:
            status = await self._client.wait_for_change(status)
        return status

    async def _pin_all(
        self, status: EngineStatus, lost: Collection[str] | None = None
    ) -> dict[str, RequestError]:
        """Pin the prefixes that the present core lacks, and return by name why some are refused.
        lost: keys of those that are pinned; None for all."""
        refused: dict[str, RequestError] = {}
        if self._prefixes:
            pins = (await self._client.control(ListPins())).pins
            held = {pin.key for pin in pins}
            for prefix in self._prefixes:
                key = prefix_key(prefix.token_ids, "", is_shared=True)
                if key in held or (lost is not None and key not in lost):
                    continue
                try:
                    await self._pin(prefix)
                except RequestError as error:
                    refused[prefix.name] = error
        self._served, self._lost = _cores(status), ()
        return refused

    def _log(self, refused: Mapping[str, RequestError]) -> None:
        for name, error in refused.items():
            if name not in self._refused:
                self._refused.add(name)
                logger.error("the prefix %s of --pin-prefix is refused: %s", name, error)

    async def _pin(self, prefix: RenderedPrefix) -> None:
        pin = await pin_prefix(self._client, prefix.name, prefix.token_ids, is_shared=True)
        self._refused.discard(prefix.name)
        logger.info(
            "Pinned %s: %d tokens in %d KV blocks.", pin.name, pin.num_tokens, pin.num_blocks
        )


def _cores(status: EngineStatus) -> Cores:
    return status.restarts, status.capacity
