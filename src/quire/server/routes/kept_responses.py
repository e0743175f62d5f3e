"""The routes of responses that are kept."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response as HttpResponse

from quire.server.openai.answer import encode
from quire.server.requests.errors import RefusedError
from quire.server.responses.answer import page_of
from quire.server.routes.respond import JSON
from quire.server.routes.services import Services

__all__ = ["kept_responses_router"]

MAX_PAGE = 100
_PAGE = {
    "parameters": [
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 20},
        },
        {
            "name": "order",
            "in": "query",
            "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        },
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
}


def kept_responses_router(services: Services) -> APIRouter:
    """Responses that are kept: read, cancel and delete them."""
    router = APIRouter(tags=["Responses"])
    store, runs = services.responses, services.background

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> HttpResponse:
        """A response that is kept."""
        _check_is_id(response_id)
        if request.query_params.get("stream") == "true":
            raise RefusedError("Kept responses are not streamed again. Leave out stream.")
        found = store.find(response_id, request.state.tenant)
        return HttpResponse(encode(found.body), media_type=JSON)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> HttpResponse:
        """Forget a response; conversations cannot go on from it any more."""
        _check_is_id(response_id)
        store.delete(response_id, request.state.tenant)
        runs.cancel(response_id)
        found = {"id": response_id, "object": "response", "deleted": True}
        return HttpResponse(encode(found), media_type=JSON)

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> HttpResponse:
        """End a response that is made in the background."""
        found = store.find(response_id, request.state.tenant)
        if not found.body["background"]:
            raise RefusedError(
                f"The response {response_id[:80]!r} is not made in the background. Only such a "
                "one can be cancelled; close the connection of others.",
                param="response_id",
            )
        if found.is_unfinished:
            found.body["status"] = "cancelled"
            store.put(found, request.state.tenant)
            runs.cancel(response_id)
        return HttpResponse(encode(found.body), media_type=JSON)

    @router.get("/v1/responses/{response_id}/input_items", openapi_extra=_PAGE)
    async def list_input_items(request: Request, response_id: str) -> HttpResponse:
        """The items that a response was asked with."""
        query = request.query_params
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        after = query.get("after")
        _check_page(limit, order)
        found = store.find(response_id, request.state.tenant)
        page = page_of(found.input, limit=int(limit), descends=order == "desc", after=after)
        return HttpResponse(encode(page), media_type=JSON)

    return router


def _check_is_id(response_id: str) -> None:
    """Refuse the method for a route of its own, which stands where an id would."""
    if response_id in ("compact", "input_tokens"):
        raise HTTPException(405)


def _check_page(limit: str, order: str) -> None:
    is_number = len(limit) <= len(str(MAX_PAGE)) and limit.isascii() and limit.isdecimal()
    if not (is_number and 1 <= int(limit) <= MAX_PAGE):
        raise RefusedError(f"limit is {limit[:80]!r}. Use 1 to {MAX_PAGE}.", param="limit")
    if order not in ("asc", "desc"):
        raise RefusedError(f'order is {order[:80]!r}. Use "asc" or "desc".', param="order")
