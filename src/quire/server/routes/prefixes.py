"""Routes for pinned prefixes: list them, pin one, let one go."""

from __future__ import annotations

import math
import secrets
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.errors import EngineError, EngineUnavailableError
from quire.protocol.control import ListPins, Unpin
from quire.protocol.pins import PIN_PARAMS, PinnedPrefix
from quire.protocol.scheduling_params import SchedulingParams
from quire.rendering import RenderedPrompt
from quire.server.generation.backend import Ready
from quire.server.generation.prompts import check_context
from quire.server.generation.waiting import Party, within
from quire.server.http.body import BodyDecoder
from quire.server.http.events import while_connected
from quire.server.http.openapi import body_of
from quire.server.openai.answer import encode
from quire.server.openai.job import tenant_salt
from quire.server.openai.sampling import check_label
from quire.server.openai.tools import tools_text
from quire.server.prefixes.pinning import pin_prefix
from quire.server.requests.bodies import PinRequest, TokenizeRequest
from quire.server.requests.errors import RefusedError
from quire.server.routes.services import Services

__all__ = ["prefix_router"]


JSON = "application/json"


def prefix_router(services: Services) -> APIRouter:
    """A caller sees what its own key pinned, and the prefixes that the operator shares with all."""
    router = APIRouter(tags=["operations"])
    decoder: BodyDecoder[PinRequest] = BodyDecoder(PinRequest, services.settings.limits)

    @router.get("/admin/prefixes")
    async def list_prefixes(request: Request) -> Response:
        """The pinned prefixes: their size, hits, and seconds left."""
        report = await services.backend.require().client.control(ListPins())
        found = [_shown(pin) for pin in report.pins if _is_visible(pin, request)]
        return Response(encode({"prefixes": found}), media_type=JSON)

    @router.post("/admin/prefixes", openapi_extra=body_of(PinRequest))
    async def pin(request: Request) -> Response:
        """Compute a prefix and keep it for the requests of the caller's key."""
        ready = services.ready()
        body = await decoder.decode(await services.bodies.read(request))
        if (adapter := ready.model.adapter_of(body.model)) is not None:
            raise RefusedError(
                f"model names the adapter `{adapter}`, but prefixes are pinned for the base model "
                "alone. Leave it out.",
                param="model",
            )
        check_label("cache_salt", body.cache_salt, services.settings.limits)
        found = await while_connected(request.receive, _pin(services, ready, request, body))
        return Response(encode(_shown(found)), media_type=JSON)

    @router.delete("/admin/prefixes/{prefix_id}")
    async def unpin(request: Request, prefix_id: str) -> Response:
        """Let a pinned prefix go before its time."""
        client = services.backend.require().client
        pins = (await client.control(ListPins())).pins
        visible = {str(pin.handle): pin for pin in pins if _is_visible(pin, request)}
        found = visible.get(prefix_id)
        if found is not None and found.tenant != request.state.tenant:
            raise RefusedError(
                f"The prefix {prefix_id} was pinned by the operator for all API keys. Ask the "
                "operator to let it go.",
                status=403,
            )
        if found is None or not (await client.control(Unpin(found.handle))).was_there:
            raise RefusedError(
                f"There is no pinned prefix {prefix_id[:64]!r}. GET /admin/prefixes lists them.",
                status=404,
            )
        return Response(encode({"id": prefix_id, "deleted": True}), media_type=JSON)

    return router


async def _pin(
    services: Services, ready: Ready, request: Request, body: PinRequest
) -> PinnedPrefix:
    """Pin a prefix. It takes a place in the waiting room like any other prompt."""
    seconds = math.inf if body.ttl_s is None else body.ttl_s
    if not seconds > 0:
        raise RefusedError(f"ttl_s is {seconds:g}. Give seconds above 0.", param="ttl_s")
    place = services.waiting.enter(Party())
    try:
        prompt = await _render(services, ready, body)
        place.hold(len(prompt.token_ids))
        work = pin_prefix(
            ready.client,
            f"api-{secrets.token_hex(8)}",
            prompt.token_ids,
            seconds=seconds,
            salt=tenant_salt(request.state.tenant, body.cache_salt),
            scheduling=SchedulingParams(tenant=request.state.tenant, weight=request.state.weight),
        )
        return await within(place.first_token_s, work)
    except TimeoutError as error:
        raise RefusedError(
            f"The prefix was not computed within {round(place.first_token_s(), 3):g} s "
            "(first_token_timeout_s). Shorten it or try again later.",
            status=503,
            retry_after_s=5,
        ) from error
    except EngineUnavailableError:
        raise
    except EngineError as error:
        raise RefusedError(str(error), status=503, retry_after_s=1) from error
    finally:
        place.leave()


async def _render(services: Services, ready: Ready, body: PinRequest) -> RenderedPrompt:
    max_model_len, renderer = ready.capacity.max_model_len, ready.model.front.renderer
    if (body.prompt is None) == (body.messages is None):
        raise RefusedError("Give either prompt or messages.", param="prompt")
    if body.prompt == "":
        raise RefusedError(
            "The prompt has no tokens of its own. Send at least one character.", param="prompt"
        )
    if body.messages is not None:
        chat = TokenizeRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=False,
        )
        text, dialect = tools_text(body.tools, ready.model), ready.model.dialect
        found = await services.prompts.render_chat(renderer, chat, max_model_len, dialect, text)
    else:
        found = await services.prompts.render_prompt(renderer, body.prompt or "", max_model_len)
    return check_context(found, PIN_PARAMS, max_model_len)


def _is_visible(pin: PinnedPrefix, request: Request) -> bool:
    return pin.is_shared or pin.tenant == request.state.tenant


def _shown(pin: PinnedPrefix) -> dict[str, Any]:
    """The id is a text, since it may be too large for the numbers of other languages."""
    is_endless = pin.seconds_left == math.inf
    return {
        "id": str(pin.handle),
        "name": pin.name,
        "tokens": pin.num_tokens,
        "blocks": pin.num_blocks,
        "hits": pin.hits,
        "seconds_left": None if is_endless else round(pin.seconds_left, 3),
        "shared": pin.is_shared,
    }
