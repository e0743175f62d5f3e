"""Routes for conversations that are kept: list them, pin one, let one expire, delete one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.errors import EngineError, EngineUnavailableError
from quire.protocol.control import ListPins, Unpin
from quire.protocol.scheduling_params import SchedulingParams
from quire.server.http.body import BodyDecoder
from quire.server.http.events import while_connected
from quire.server.http.openapi import body_of
from quire.server.openai.answer import encode
from quire.server.prefixes.pinning import pin_prefix
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
        session = store.required(session_id, tenant)
        if body.ttl_s is not None:
            _check_ttl(body.ttl_s, services.settings.limits.session_s)
            session.ttl_s = body.ttl_s
        if body.pinned is not None:
            await _unpin(services, tenant, session_id)
        if body.pinned:
            await while_connected(request.receive, _pin(services, request, session))
        try:
            session = store.change(session_id, tenant, is_pinned=body.pinned, ttl_s=body.ttl_s)
        except RefusedError:  # it has been deleted meanwhile
            await _unpin(services, tenant, session_id)
            raise
        return Response(encode(_shown(session, session.ttl_s)), media_type=JSON)

    @router.delete("/admin/sessions/{session_id:path}")
    async def delete_session(request: Request, session_id: str) -> Response:
        """Forget a conversation, and let its K/V go."""
        store.delete(session_id, request.state.tenant)
        await _unpin(services, request.state.tenant, session_id)
        return Response(encode({"id": session_id, "deleted": True}), media_type=JSON)

    return router


def _check_ttl(ttl_s: float, most: float) -> None:
    if not 0 < ttl_s <= most:
        raise RefusedError(
            f"ttl_s is {ttl_s:g}. Give seconds above 0, up to {most:g} (session_s).",
            param="ttl_s",
        )


def _pin_name(session_id: str) -> str:
    return f"session-{session_id}"


async def _pin(services: Services, request: Request, session: Session) -> None:
    """Keep the K/V of a conversation in the cache."""
    state = request.state
    try:
        await pin_prefix(
            services.ready().client,
            _pin_name(session.id),
            session.token_ids,
            seconds=session.ttl_s,
            salt=session.salt,
            scheduling=SchedulingParams(tenant=state.tenant, weight=state.weight),
        )
    except EngineUnavailableError:
        raise
    except EngineError as error:
        raise RefusedError(str(error), status=503, retry_after_s=1) from error


async def _unpin(services: Services, tenant: str, session_id: str) -> None:
    """Let the K/V of a conversation go, if they are pinned."""
    client = services.backend.require().client
    for pin in (await client.control(ListPins())).pins:
        if pin.tenant == tenant and pin.name == _pin_name(session_id):
            await client.control(Unpin(pin.handle))


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
