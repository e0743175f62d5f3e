"""Holds the K/V of pinned conversations in the engine's cache."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from weakref import WeakValueDictionary

from quire.base.errors import QuireError, RequestError
from quire.engine.clients.async_client import AsyncEngineClient
from quire.protocol.control import ListPins, Unpin
from quire.protocol.pins import PinnedPrefix, prefix_key
from quire.protocol.scheduling_params import SchedulingParams
from quire.server.generation.backend import Backend
from quire.server.prefixes.pinning import pin_prefix
from quire.server.sessions.store import PinnedSession, Session, SessionStore

__all__ = ["SessionPins"]

logger = logging.getLogger("quire.server")


CLOSE_S = 1.0
"""Longest wait, in seconds, for settlings that are cancelled."""
_PREFIX = "session-"
"""Start of the names of their pins."""
_SLACK_S = 1.0
"""Seconds by which a pin may outlive its session: the two clocks are read one after the other."""


class _Settling:
    """Settlings of one conversation follow each other. settled: state that the last one found in
    the store and the engine holds now; None if unknown. It lasts while others wait."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.settled: tuple[PinnedSession | None] | None = None


class SessionPins:
    """Makes the engine hold what the store says: the tokens of a pinned conversation's last turn,
    until it expires, and nothing of the others."""

    def __init__(self, store: SessionStore, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._settlings: WeakValueDictionary[tuple[str, str], _Settling] = WeakValueDictionary()
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def close(self) -> None:
        """End what runs beside callers, and leave the store alone from now on."""
        self._is_closed = True
        if self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running, timeout=CLOSE_S)

    async def restore(self) -> None:
        """Settle, beside the caller, what an engine that has started holds otherwise than the
        store: a session whose pin was lost, or a pin whose session was. No key has a weight yet."""
        try:
            pins = (await self._backend.require().client.control(ListPins())).pins
        except QuireError as error:
            logger.warning("the K/V of pinned sessions are not looked up: %s", error)
            return
        held = {
            (pin.name.removeprefix(_PREFIX), pin.tenant): pin.key
            for pin in pins
            if pin.name.startswith(_PREFIX) and not pin.is_shared
        }
        wanted = {
            (session.id, tenant): prefix_key(session.token_ids, session.salt, is_shared=False)
            for session, tenant in self._store.all_pinned()
        }
        for key in held.keys() | wanted.keys():
            if held.get(key) != wanted.get(key):
                self._start(*key, 1.0)

    def follow(self, session: Session, tenant: str, weight: float) -> None:
        """Settle, beside the caller, a conversation after a kept turn, and the pinned ones that
        made room for it. weight: weight of the caller's key."""
        changed = [(session.id, tenant)] if session.is_pinned else []
        for session_id, owner in (*changed, *self._store.take_evicted()):
            self._start(session_id, owner, weight)

    def _start(self, session_id: str, tenant: str, weight: float) -> None:
        if self._is_closed:
            return
        task = asyncio.create_task(self._settle_beside(session_id, tenant, weight))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _settle_beside(self, session_id: str, tenant: str, weight: float) -> None:
        try:
            await self.settle(session_id, tenant, weight)
        except (QuireError, sqlite3.Error) as error:
            logger.warning("the K/V of a pinned session are not settled: %s", error)

    async def settle(self, session_id: str, tenant: str, weight: float) -> None:
        """Pin the K/V of a conversation again, or let them go if it is not pinned or not there. If
        they cannot be pinned, it is not pinned any more. Errors as in `pin_prefix`, and 503
        (RefusedError) while there is no engine."""
        settling = self._settlings.setdefault((tenant, session_id), _Settling())
        async with settling.lock:
            while (now := (self._store.pinned(session_id, tenant),)) != settling.settled:
                settling.settled = None
                (found,) = now
                try:
                    if await self._hold(found, session_id, tenant, weight):
                        settling.settled = now
                except BaseException as error:
                    if found is None or self._is_closed:
                        raise
                    if self._store.unpin(found, tenant):
                        self._start(session_id, tenant, weight)  # lets an earlier turn's go
                        raise
                    if not isinstance(error, QuireError):
                        raise

    async def _hold(
        self, found: PinnedSession | None, session_id: str, tenant: str, weight: float
    ) -> bool:
        """Pin what was found, and let go what else is pinned for this session. Returns False, and
        changes nothing, if the store has something else by now."""
        client = self._backend.require().client
        pins = (await client.control(ListPins())).pins
        held = [pin for pin in pins if (pin.tenant, pin.name) == (tenant, _pin_name(session_id))]
        if found != self._store.pinned(session_id, tenant):
            return False  # a later turn's pin, maybe by another front, may be among them
        key = None
        if found is not None:
            session = found.session
            key = prefix_key(session.token_ids, session.salt, is_shared=False)
            left = self._store.seconds_left(found) + _SLACK_S
            # An equal pin would keep the longer of the two times.
            await _unpin(client, [p for p in held if p.key == key and p.seconds_left > left])
            scheduling = SchedulingParams(tenant=tenant, weight=weight)
            try:
                await self._pin(client, found, scheduling)
            except RequestError:  # there may be no room for both
                if not held:
                    raise
                await _unpin(client, held)
                await self._pin(client, found, scheduling)
        await _unpin(client, [pin for pin in held if pin.key != key])
        return True

    async def _pin(
        self, client: AsyncEngineClient, found: PinnedSession, scheduling: SchedulingParams
    ) -> None:
        await pin_prefix(
            client,
            _pin_name(found.session.id),
            found.session.token_ids,
            seconds=self._store.seconds_left(found),
            salt=found.session.salt,
            scheduling=scheduling,
        )


async def _unpin(client: AsyncEngineClient, pins: Sequence[PinnedPrefix]) -> None:
    for pin in pins:
        await client.control(Unpin(pin.handle))


def _pin_name(session_id: str) -> str:
    return _PREFIX + session_id
