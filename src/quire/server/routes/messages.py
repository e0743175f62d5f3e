"""The routes of the Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.anthropic.answer import MessagesAnswer, TokenCount, error_event
from quire.server.anthropic.request import read_request
from quire.server.http.body import BodyDecoder, unknown_names
from quire.server.http.events import while_connected
from quire.server.http.openapi import body_of
from quire.server.openai.answer import encode
from quire.server.openai.sampling import chat_params
from quire.server.openai.tools import answer_form, asked_tools
from quire.server.readings.timeline import Timeline
from quire.server.requests.messages_bodies import CountTokensRequest, MessagesRequest
from quire.server.routes.respond import JSON, respond
from quire.server.routes.services import Services

__all__ = ["messages_router"]


def messages_router(services: Services) -> APIRouter:
    """Messages, and the tokens of their prompts."""
    router = APIRouter(tags=["Messages"])
    limits = services.settings.limits
    decoder: BodyDecoder[MessagesRequest] = BodyDecoder(MessagesRequest, limits)
    counts: BodyDecoder[CountTokensRequest] = BodyDecoder(CountTokensRequest, limits)

    @router.post("/v1/messages", openapi_extra=body_of(MessagesRequest))
    async def create_message(request: Request) -> Response:
        """Answer a conversation."""
        ready = services.ready()
        data = await services.bodies.read(request)
        body = await decoder.decode(data)
        read = read_request(body, ready.model)
        tools, defaults = asked_tools(read.chat), ready.model.front.default_sampling
        params = chat_params(read.chat, defaults, limits, must_call=tools.must_call)
        form = answer_form(tools, read.chat, ready.model)
        ignored = [*unknown_names(data, MessagesRequest), *read.skipped_tools]

        def answer(timeline: Timeline) -> MessagesAnswer:
            timeline.ignored, timeline.removed_lines = ignored, read.removed_lines
            job = services.job(ready, request, read.chat, timeline)
            return MessagesAnswer(job, read.chat, params, form, read.hides_thinking)

        return await respond(services, request, read.chat, answer, error_event)

    @router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountTokensRequest))
    async def count_message_tokens(request: Request) -> Response:
        """Count the tokens of a prompt."""
        ready = services.backend.require()
        body = await counts.decode(await services.bodies.read(request))
        ready.model.check_name(body.model)
        read = read_request(body, ready.model)
        work = services.count_chat(ready, read.chat)
        count = await while_connected(request.receive, work)
        return Response(encode(TokenCount(count)), media_type=JSON)

    return router
