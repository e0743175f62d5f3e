"""The routes that make responses, and those of kept ones."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from quire.server.generation.backend import Ready
from quire.server.http.body import unknown_names
from quire.server.http.gate import is_foreign_page
from quire.server.http.websocket import WEBSOCKET, WebSocket
from quire.server.openai.answer import encode
from quire.server.openai.sampling import chat_params
from quire.server.openai.tools import answer_form, asked_tools
from quire.server.readings.timeline import Timeline
from quire.server.requests.errors import ErrorReply, RefusedError, error_reply
from quire.server.requests.places import Fields
from quire.server.requests.responses_bodies import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from quire.server.responses.answer import (
    InputTokens,
    ItemList,
    Response,
    ResponsesAnswer,
    page_of,
)
from quire.server.responses.compaction import Compaction, compacted, summary_request
from quire.server.responses.conversation import input_items
from quire.server.responses.references import with_referenced
from quire.server.responses.request import read_request
from quire.server.responses.socket import (
    LOCAL_RESPONSES,
    LocalResponses,
    LocalStore,
    SocketResponse,
)
from quire.server.responses.store import KeepsResponses, StoredResponse
from quire.server.responses.tools import shown_choice, shown_tools
from quire.server.routes.route import (
    AFTER,
    JSON,
    LIMIT,
    Call,
    Deleted,
    Needs,
    Query,
    Route,
    page_size,
    respond,
)
from quire.server.routes.services import Services

__all__ = ["ROUTES"]

_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc",
}  # fmt: skip

_OUTPUTS = ("function_call_output", "custom_tool_call_output")

_ORDER = Query("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"})


async def create_response(call: Call[ResponsesRequest]) -> Response | HttpResponse:
    """Answer a conversation, or go on with one that is kept."""
    services, body = call.services, call.body
    if body.background:
        _check_background(body)
        services.background.check_room(call.tenant)
    ignored = unknown_names(call.data, ResponsesRequest)
    asked = _Asked(services, call.ready, call.request, body, ignored)
    if body.background:
        return asked.start()
    return await respond(call, asked.read.chat, asked.answer, asked.fault)


async def open_socket(call: Call[None]) -> HttpResponse:
    """Make responses over a WebSocket."""
    request, settings = call.request, call.services.settings
    socket: WebSocket | None = request.scope.get("extensions", {}).get(WEBSOCKET)
    if socket is None:
        raise RefusedError(
            "GET /v1/responses is for WebSockets (RFC 6455). Open one, or send POST."
        )
    origin, host = (request.headers.get(name, "") for name in ("origin", "host"))
    if is_foreign_page(origin, host, settings.allowed_origins):
        raise RefusedError(
            f"Web pages of {origin[:80]!r} may not open WebSockets. Start the server with "
            "--allowed-origins to let them.",
            status=403,
        )
    return SocketResponse(request.app, socket, call.limits, call.services.bodies.in_flight)


async def compact_response(call: Call[CompactRequest]) -> Compaction:
    """Make a summary of a conversation, to go on with in its place."""
    body = summary_request(call.body)
    ignored = unknown_names(call.data, CompactRequest)
    asked = _Asked(call.services, call.ready, call.request, body, ignored)
    with call.services.recorded(call.request, asked.read.chat) as timeline:
        answer = asked.answer(timeline)
        await call.attended(answer.whole())
    usage = answer.response.usage
    assert usage is not None, "the answer is whole"
    return compacted(answer.response, usage, asked.items)


async def count_input_tokens(call: Call[InputTokensRequest]) -> InputTokens:
    """Count the tokens of a prompt."""
    services, body = call.services, call.body
    call.ready.model.check_name(body.model)
    before, _ = _before(services, body, call.tenant)
    items = _input_items(services, body, call.tenant)
    takes_images = call.ready.model.front.renderer.images is not None
    read = read_request(body, [*before, *items], takes_images=takes_images)
    return InputTokens(await call.attended(services.count_chat(call.ready, read.chat)))


async def retrieve_response(call: Call[None]) -> HttpResponse:
    """A response that is kept."""
    if call.request.query_params.get("stream") == "true":
        raise RefusedError("Kept responses are not streamed again. Leave out stream.")
    found = call.services.responses.find(call.part("response_id"), call.tenant)
    return HttpResponse(encode(found.body), media_type=JSON)


async def delete_response(call: Call[None]) -> Deleted:
    """Forget a response; conversations cannot go on from it any more."""
    response_id = call.part("response_id")
    call.services.responses.delete(response_id, call.tenant)
    call.services.background.cancel(response_id)
    return Deleted(id=response_id, object="response", deleted=True)


async def cancel_response(call: Call[None]) -> HttpResponse:
    """End a response that is made in the background."""
    response_id, store = call.part("response_id"), call.services.responses
    found = store.find(response_id, call.tenant)
    if not found.body["background"]:
        raise RefusedError(
            f"The response {response_id[:80]!r} is not made in the background. Only such a "
            "one can be cancelled; close the connection of others.",
            param="response_id",
        )
    if found.is_unfinished:
        found.body["status"] = "cancelled"
        store.put(found, call.tenant)
        call.services.background.cancel(response_id)
    return HttpResponse(encode(found.body), media_type=JSON)


async def list_input_items(call: Call[None]) -> ItemList:
    """The items that a response was asked with."""
    limit, order = page_size(call.request), _ORDER.of(call.request) or ""
    if order not in ("asc", "desc"):
        raise RefusedError(f'order is {order[:80]!r}. Use "asc" or "desc".', param="order")
    found = call.services.responses.find(call.part("response_id"), call.tenant)
    after = AFTER.of(call.request)
    return page_of(found.input, limit=limit, descends=order == "desc", after=after)


class _Asked:
    """One request to make a response."""

    def __init__(
        self,
        services: Services,
        ready: Ready,
        request: Request,
        body: ResponsesRequest,
        ignored: list[str],
    ) -> None:
        """ignored: names of fields that nothing reads. Raises RefusedError for a bad request."""
        self._services = services
        self._ready = ready
        self._request = request
        self._body = body
        self._ignored = ignored
        self._local: LocalResponses | None = request.scope.get(LOCAL_RESPONSES)
        before, self._last = _before(services, body, request.state.tenant, self._local)
        self._items = _with_ids(_input_items(services, body, request.state.tenant, self._local))
        self.items = [*before, *self._items]
        if self._local is not None:
            _check_outputs(self.items)
        takes_images = ready.model.front.renderer.images is not None
        self.read = read_request(body, self.items, takes_images=takes_images)
        limits, chat = services.settings.limits, self.read.chat
        tools, defaults = asked_tools(chat), ready.model.front.default_sampling
        self._params = chat_params(chat, defaults, limits, must_call=tools.must_call)
        self._form = answer_form(tools, chat, ready.model)
        self._answer: ResponsesAnswer | None = None

    def answer(self, timeline: Timeline) -> ResponsesAnswer:
        """Make the answer."""
        services, body, ready = self._services, self._body, self._ready
        timeline.ignored = [*self._ignored, *self.read.tools.skipped]
        job = services.job(ready, self._request, self.read.chat, timeline)
        response = self._new_response(job.adapter or ready.model.names[0])
        timeline.answer_id = response.id
        self._answer = ResponsesAnswer(
            job,
            body,
            self.read,
            self._params,
            self._form,
            response,
            self._items,
            self._store(),
            None if self._last is None else self._last.token_ids,
        )
        return self._answer

    def _store(self) -> KeepsResponses | None:
        """Return where the response is to be kept."""
        if self._body.store is not False:
            return self._services.responses
        return None if self._local is None else LocalStore(self._local, self.items)

    def fault(self, reply: ErrorReply) -> bytes:
        """Return the event of an error within a stream."""
        assert self._answer is not None, "a stream has begun with its answer"
        return self._answer.failed(reply)

    def start(self) -> Response:
        """Make the answer in the background, and return its present state."""
        services, tenant = self._services, self._request.state.tenant
        with ExitStack() as recording:
            recorded = services.recorded(self._request, self.read.chat)
            answer = self.answer(recording.enter_context(recorded))
            response = answer.response
            body = msgspec.to_builtins(response)
            kept = StoredResponse(response.id, response.previous_response_id, body, self._items)
            services.responses.put(kept, tenant)
            run = self._run(answer, recording.pop_all())
        services.background.start(response.id, tenant, run)
        return response

    async def _run(self, answer: ResponsesAnswer, recording: ExitStack) -> None:
        try:
            with recording:
                await answer.whole()
        except Exception as error:  # noqa: BLE001  kept with the response, as a client is told it
            answer.fail(error_reply(error, self._request.scope))

    def _new_response(self, model: str) -> Response:
        body, params = self._body, self._params
        return Response(
            id=f"resp_{secrets.token_hex(16)}",
            created_at=int(time.time()),
            model=model,
            status="queued",
            output=[],
            instructions=body.instructions,
            tools=shown_tools(body.tools),
            tool_choice=shown_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text=_shown_text(body.text or {}),
            reasoning={"effort": None, "summary": None, **(body.reasoning or {})},
            truncation=body.truncation or "disabled",
            metadata=body.metadata or {},
            temperature=params.temperature,
            top_p=params.top_p,
            background=bool(body.background),
            store=body.store is not False,
            previous_response_id=body.previous_response_id,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            top_logprobs=body.top_logprobs or 0,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            prompt_cache_key=body.prompt_cache_key,
            safety_identifier=body.safety_identifier,
        )


def _shown_text(given: Fields) -> Fields:
    """Return a request's `text` in the form of its response, with every field of its format."""
    form = given.get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {"description": None, **form, "strict": bool(form.get("strict"))}
    return {**given, "format": form}


def _check_background(body: ResponsesRequest) -> None:
    for name, is_wrong, advice in (
        ("store", body.store is False, "it could not be read. Leave it out"),
        ("stream", body.stream is True, "it is read by polling. Leave it out"),
    ):
        if is_wrong:
            raise RefusedError(
                f"{name} is {getattr(body, name)} for a response in the background: {advice}.",
                param=name,
            )


def _before(
    services: Services,
    body: InputTokensRequest,
    tenant: str,
    local: LocalResponses | None = None,
) -> tuple[list[Fields], StoredResponse | None]:
    """Return the conversation that a request continues, and its last response. local: responses of
    the WebSocket over which it came."""
    if body.previous_response_id is None:
        return [], None
    if body.session_id is not None:
        raise RefusedError(
            "session_id and previous_response_id both name a conversation. Send one of them.",
            param="session_id",
        )
    found = None if local is None else local.conversation(body.previous_response_id)
    if found is not None:
        return found
    try:
        return services.responses.conversation(body.previous_response_id, tenant)
    except RefusedError as error:
        raise RefusedError(str(error), status=error.status, param="previous_response_id") from error


def _input_items(
    services: Services,
    body: InputTokensRequest,
    tenant: str,
    local: LocalResponses | None = None,
) -> list[Fields]:
    """Return the input, with items of earlier answers in place of references. local: see
    `_before`."""

    def answers(response_id: str) -> tuple[list[Fields], int]:
        found = None if local is None else local.conversation(response_id)
        if found is not None:
            return found[1].body["output"], 0
        return services.responses.output(response_id, tenant)

    return with_referenced(input_items(body.input), answers, services.settings.limits)


def _check_outputs(items: list[Fields]) -> None:
    """RefusedError for the output of a call that the conversation does not have."""
    calls: set[object] = set()
    for item in items:
        kind = str(item["type"])
        if kind in ("function_call", "custom_tool_call"):
            calls.add(item.get("call_id"))
        elif kind in _OUTPUTS and item.get("call_id") not in calls:
            raise RefusedError(
                f"There is no tool call {str(item.get('call_id'))[:80]!r}, of which the input has "
                "the output. Send the call before it.",
                param="input",
            )


def _with_ids(items: list[Fields]) -> list[Fields]:
    """Return items with ids, by which they are read page by page."""
    found: list[Fields] = []
    for item in items:
        prefix = _PREFIXES.get(str(item["type"]), "item")
        given: Any = item.get("id")
        is_id = isinstance(given, str) and bool(given)
        named = {**item, "id": given if is_id else f"{prefix}_{secrets.token_hex(12)}"}
        found.append(_in_parts(named) if isinstance(item.get("content"), str) else named)
    return found


def _in_parts(item: Fields) -> Fields:
    """Return a message with a single text as content, in the form of lists."""
    if item.get("role") != "assistant":
        return {**item, "content": [{"type": "input_text", "text": item["content"]}]}
    part: Fields = {"type": "output_text", "text": item["content"], "annotations": []}
    return {**item, "content": [part], "status": item.get("status", "completed")}


ROUTES: tuple[Route[Any, Any], ...] = (
    Route(
        "POST",
        "/v1/responses",
        create_response,
        ResponsesRequest,
        Response,
        needs=Needs.ROOM,
        streams=True,
        refuses=(507,),
    ),
    Route("GET", "/v1/responses", open_socket, statuses=(101,), refuses=(400,)),
    Route(
        "POST",
        "/v1/responses/compact",
        compact_response,
        CompactRequest,
        Compaction,
        needs=Needs.ROOM,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        InputTokensRequest,
        InputTokens,
        needs=Needs.ENGINE,
    ),
    Route("GET", "/v1/responses/{response_id}", retrieve_response, answer=Response, refuses=(400,)),
    Route("DELETE", "/v1/responses/{response_id}", delete_response, answer=Deleted, refuses=(400,)),
    Route(
        "POST",
        "/v1/responses/{response_id}/cancel",
        cancel_response,
        answer=Response,
        refuses=(400,),
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}/input_items",
        list_input_items,
        answer=ItemList,
        query=(LIMIT, _ORDER, AFTER),
        refuses=(400,),
    ),
)
