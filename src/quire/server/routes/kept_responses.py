"""The routes of responses that are kept."""

from __future__ import annotations

from starlette.responses import Response as HttpResponse

from quire.server.openai.answer import encode
from quire.server.requests.errors import RefusedError
from quire.server.responses.answer import ItemList, Response, page_of
from quire.server.routes.route import AFTER, JSON, LIMIT, Call, Deleted, Query, Route, page_size

__all__ = ["ROUTES"]

_ORDER = Query("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"})


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


ROUTES = (
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
