"""The routes of the Messages API."""

from __future__ import annotations

from starlette.responses import Response

from quire.server.anthropic.answer import Message, MessagesAnswer, TokenCount, error_event
from quire.server.anthropic.request import read_request
from quire.server.http.body import unknown_names
from quire.server.openai.sampling import chat_params
from quire.server.openai.tools import answer_form, asked_tools
from quire.server.readings.timeline import Timeline
from quire.server.requests.messages_bodies import CountTokensRequest, MessagesRequest
from quire.server.routes.route import Call, Needs, Route, respond

__all__ = ["ROUTES"]


async def create_message(call: Call[MessagesRequest]) -> Response:
    """Answer a conversation."""
    ready = call.ready
    read = read_request(call.body, ready.model)
    tools, defaults = asked_tools(read.chat), ready.model.front.default_sampling
    params = chat_params(read.chat, defaults, call.limits, must_call=tools.must_call)
    form = answer_form(tools, read.chat, ready.model)
    ignored = [*unknown_names(call.data, MessagesRequest), *read.skipped_tools]

    def answer(timeline: Timeline) -> MessagesAnswer:
        timeline.ignored, timeline.removed_lines = ignored, read.removed_lines
        job = call.services.job(ready, call.request, read.chat, timeline)
        return MessagesAnswer(job, read, params, form)

    return await respond(call, read.chat, answer, error_event)


async def count_message_tokens(call: Call[CountTokensRequest]) -> TokenCount:
    """Count the tokens of a prompt."""
    call.ready.model.check_name(call.body.model)
    read = read_request(call.body, call.ready.model)
    return TokenCount(
        await call.attended(call.services.count_chat(call.ready, read.chat, call.tenant))
    )


ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        create_message,
        MessagesRequest,
        Message,
        needs=Needs.ROOM,
        streams=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_message_tokens,
        CountTokensRequest,
        TokenCount,
        needs=Needs.ENGINE,
    ),
)
