"""Answers of the generating routes: whole, or as a stream of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fastapi import Request
from starlette.responses import Response

from quire.server.http.events import EventSink, EventStream, error_event, while_connected
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import GenerationRequest
from quire.server.requests.errors import ErrorReply
from quire.server.routes.services import Services

__all__ = ["JSON", "Answer", "respond"]

JSON = "application/json"


class Answer(Protocol):
    """The answer to one request."""

    async def whole(self) -> bytes:
        """Return the JSON body."""
        ...

    async def stream(self, sink: EventSink, /) -> bytes:
        """Start the sink, write events, and return the last ones."""
        ...


async def respond(
    services: Services,
    request: Request,
    body: GenerationRequest,
    new_answer: Callable[[Timeline], Answer],
    fault: Callable[[ErrorReply], bytes] = error_event,
) -> Response:
    """Return the answer in the form that the request asks for. fault: writes an error within a
    stream."""
    if body.stream:

        async def produce(sink: EventSink) -> bytes:
            with services.recorded(request, body) as timeline:
                return await new_answer(timeline).stream(sink)

        return EventStream(produce, services.settings.limits.sse_keep_alive_s, fault)
    with services.recorded(request, body) as timeline:
        work = new_answer(timeline).whole()
        return Response(await while_connected(request.receive, work), media_type=JSON)
