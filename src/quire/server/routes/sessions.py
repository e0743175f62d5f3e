"""Routes for conversations that are kept: list them, pin one, let one expire, delete one.

A caller sees the conversations of its own key.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from quire.base.errors import EngineError, EngineUnavailableError
from quire.server.requests.bodies import SessionChange
from quire.server.requests.errors import RefusedError
from quire.server.routes.route import Call, Deleted, Route
from quire.server.sessions.store import Session

__all__ = ["ROUTES"]


class SessionCard(msgspec.Struct):
    """A conversation that is kept."""

    id: str
    turns: int
    messages: int
    tokens: int
    pinned: bool
    created: int
    ttl_s: float
    seconds_left: float


class SessionList(msgspec.Struct):
    sessions: list[SessionCard]


async def list_sessions(call: Call[None]) -> SessionList:
    """The conversations that are kept, used last first."""
    return SessionList([_shown(*each) for each in call.services.sessions.listed(call.tenant)])


async def change_session(call: Call[SessionChange]) -> SessionCard:
    """Pin a conversation, with its K/V so far, or say how long it is kept without use."""
    body, store, session_id = call.body, call.services.sessions, call.part("session_id")
    before = store.required(session_id, call.tenant)
    if body.ttl_s is not None:
        _check_ttl(body.ttl_s, call.limits.session_s)
    session = store.change(session_id, call.tenant, is_pinned=body.pinned, ttl_s=body.ttl_s)
    if session.is_pinned or body.pinned is not None:
        try:
            await call.attended(_settle(call, session_id))
        except BaseException:
            with contextlib.suppress(RefusedError):  # it has been deleted meanwhile
                store.change(session_id, call.tenant, ttl_s=before.ttl_s)
            raise
        session = store.required(session_id, call.tenant)
    await call.services.kept_sessions.written()
    return _shown(session, session.ttl_s)


async def delete_session(call: Call[None]) -> Deleted:
    """Forget a conversation, and let its K/V go."""
    session_id = call.part("session_id")
    try:
        call.services.sessions.delete(session_id, call.tenant)
    finally:  # also if it is gone: an earlier call may have failed to let its K/V go
        await call.services.kept_sessions.written()
        await _settle(call, session_id)
    return Deleted(id=session_id, deleted=True)


def _check_ttl(ttl_s: float, most: float) -> None:
    if not 0 < ttl_s <= most:
        raise RefusedError(
            f"ttl_s is {ttl_s:g}. Give seconds above 0, up to {most:g} (session_s).",
            param="ttl_s",
        )


async def _settle(call: Call[Any], session_id: str) -> None:
    """Keep the K/V of a conversation in the cache, or let them go."""
    try:
        await call.services.session_pins.settle(session_id, call.tenant, call.weight)
    except EngineUnavailableError:
        raise
    except EngineError as error:
        raise RefusedError(str(error), status=503, retry_after_s=1) from error


def _shown(session: Session, seconds_left: float) -> SessionCard:
    return SessionCard(
        session.id,
        session.version,
        len(session.messages),
        len(session.token_ids),
        session.is_pinned,
        int(session.created_s),
        session.ttl_s,
        round(seconds_left, 3),
    )


_ONE = "/admin/sessions/{session_id:path}"

ROUTES = (
    Route("GET", "/admin/sessions", list_sessions, answer=SessionList),
    Route("POST", _ONE, change_session, SessionChange, SessionCard),
    Route("DELETE", _ONE, delete_session, answer=Deleted, refuses=(503,)),
)
