"""Routes for conversations that are kept: list them, pin one, let one expire, delete one."""

from __future__ import annotations

import contextlib
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.errors import EngineError, EngineUnavailableError
from quire.server.http.body import BodyDecoder
from quire.server.http.events import while_connected
from quire.server.http.openapi import body_of
from quire.server.openai.answer import encode
from quire.server.requests.bodies import SessionChange
from quire.server.requests.errors import RefusedError
from quire.server.routes.respond import JSON
from quire.server.routes.services import Services
from quire.server.sessions.store import Session

__all__ = ["sessions_router"]


def sessions_router(services: Services) -> APIRouter:
    """A caller sees the conversations of its own key."""
    router = APIRouter(tags=["operations"])
    store = services.sessions
    decoder: BodyDecoder[SessionChange] = BodyDecoder(SessionChange, services.settings.limits)

    @router.get("/admin/sessions")
    async def list_sessions(request: Request) -> Response:
        """The conversations that are kept, used last first."""
        found = [_shown(*each) for each in store.listed(request.state.tenant)]
        return Response(encode({"sessions": found}), media_type=JSON)

    @router.post("/admin/sessions/{session_id:path}", openapi_extra=body_of(SessionChange))
    async def change_session(request: Request, session_id: str) -> Response:
        """Pin a conversation, with its K/V so far, or say how long it is kept without use."""
        body = await decoder.decode(await services.bodies.read(request))
        tenant = request.state.tenant
        before = store.required(session_id, tenant)
        if body.ttl_s is not None:
            _check_ttl(body.ttl_s, services.settings.limits.session_s)
        session = store.change(session_id, tenant, is_pinned=body.pinned, ttl_s=body.ttl_s)
        if session.is_pinned or body.pinned is not None:
            try:
                await while_connected(request.receive, _settle(services, request, session_id))
            except BaseException:
                with contextlib.suppress(RefusedError):  # it has been deleted meanwhile
                    store.change(session_id, tenant, ttl_s=before.ttl_s)
                raise
            session = store.required(session_id, tenant)
        return Response(encode(_shown(session, session.ttl_s)), media_type=JSON)

    @router.delete("/admin/sessions/{session_id:path}")
    async def delete_session(request: Request, session_id: str) -> Response:
        """Forget a conversation, and let its K/V go."""
        try:
            store.delete(session_id, request.state.tenant)
        finally:  # also if it is gone: an earlier call may have failed to let its K/V go
            await _settle(services, request, session_id)
        return Response(encode({"id": session_id, "deleted": True}), media_type=JSON)

    return router


def _check_ttl(ttl_s: float, most: float) -> None:
    if not 0 < ttl_s <= most:
        raise RefusedError(
            f"ttl_s is {ttl_s:g}. Give seconds above 0, up to {most:g} (session_s).",
            param="ttl_s",
        )


async def _settle(services: Services, request: Request, session_id: str) -> None:
    """Keep the K/V of a conversation in the cache, or let them go."""
    state = request.state
    try:
        await services.session_pins.settle(session_id, state.tenant, state.weight)
    except EngineUnavailableError:
        raise
    except EngineError as error:
        raise RefusedError(str(error), status=503, retry_after_s=1) from error


def _shown(session: Session, seconds_left: float) -> dict[str, Any]:
    return {
        "id": session.id,
        "turns": session.version,
        "messages": len(session.messages),
        "tokens": len(session.token_ids),
        "pinned": session.is_pinned,
        "created": int(session.created_s),
        "ttl_s": session.ttl_s,
        "seconds_left": round(seconds_left, 3),
    }
