"""Holds the K/V of pinned conversations in the engine's cache."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from weakref import WeakValueDictionary

from quire.errors import QuireError
from quire.protocol.control import ListPins, Unpin
from quire.protocol.scheduling_params import SchedulingParams
from quire.server.generation.backend import Backend
from quire.server.prefixes.pinning import pin_prefix
from quire.server.requests.errors import RefusedError
from quire.server.sessions.store import Session, SessionStore

__all__ = ["SessionPins"]

logger = logging.getLogger("quire.server")


class SessionPins:
    """Makes the engine hold what the store says: the tokens of a pinned conversation's last turn,
    until it expires, and nothing of the others."""

    def __init__(self, store: SessionStore, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in list(self._running):
            task.cancel()

    def follow(self, session: Session, tenant: str, weight: float) -> None:
        """Settle, beside the caller, a conversation after a kept turn, and the pinned ones that
        made room for it. weight: of the caller's key."""
        changed = [(session.id, tenant)] if session.is_pinned else []
        for session_id, owner in (*changed, *self._store.take_evicted()):
            task = asyncio.create_task(self._settle_beside(session_id, owner, weight))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _settle_beside(self, session_id: str, tenant: str, weight: float) -> None:
        try:
            await self.settle(session_id, tenant, weight)
        except QuireError as error:
            logger.warning("the K/V of a pinned session are not held any more: %s", error)

    async def settle(self, session_id: str, tenant: str, weight: float) -> None:
        """Pin the K/V of a conversation again, or let them go if it is not pinned or not there. If
        they cannot be pinned, it is not pinned any more. Errors as in `pin_prefix`, and 503
        (RefusedError) while there is no engine."""
        lock = self._locks.setdefault((tenant, session_id), asyncio.Lock())
        async with lock:
            try:
                await self._settle(session_id, tenant, weight)
            except BaseException:
                with contextlib.suppress(RefusedError):  # it is gone
                    self._store.change(session_id, tenant, is_pinned=False)
                raise

    async def _settle(self, session_id: str, tenant: str, weight: float) -> None:
        settled = None
        while (found := self._store.pinned(session_id, tenant)) != settled or found is None:
            await self._unpin(session_id, tenant)
            if found is None:
                return
            await pin_prefix(
                self._backend.require().client,
                _pin_name(session_id),
                found.session.token_ids,
                seconds=self._store.seconds_left(found),
                salt=found.session.salt,
                scheduling=SchedulingParams(tenant=tenant, weight=weight),
            )
            settled = found  # unless another turn has ended meanwhile

    async def _unpin(self, session_id: str, tenant: str) -> None:
        client = self._backend.require().client
        for pin in (await client.control(ListPins())).pins:
            if pin.tenant == tenant and pin.name == _pin_name(session_id):
                await client.control(Unpin(pin.handle))


def _pin_name(session_id: str) -> str:
    return f"session-{session_id}"
