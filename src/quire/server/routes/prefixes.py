"""Routes for pinned prefixes: list them, pin one, let one go.

A caller sees what its own key pinned, and the prefixes that the operator shares with all.
"""

from __future__ import annotations

import math
import secrets

import msgspec

from quire.base.errors import EngineError, EngineUnavailableError
from quire.protocol.control import ListPins, Unpin
from quire.protocol.pins import PIN_PARAMS, PinnedPrefix
from quire.protocol.scheduling_params import SchedulingParams
from quire.server.generation.prompts import check_context
from quire.server.generation.waiting import Party, within
from quire.server.openai.job import tenant_salt
from quire.server.openai.sampling import check_label
from quire.server.openai.tools import tools_text
from quire.server.prefixes.pinning import pin_prefix
from quire.server.requests.bodies import PinRequest, TokenizeRequest
from quire.server.requests.errors import RefusedError
from quire.server.routes.route import Call, Deleted, Needs, Route
from quire.text.rendering import RenderedPrompt

__all__ = ["ROUTES"]


class Prefix(msgspec.Struct):
    """A pinned prefix; seconds_left is null for one without end. The id follows from the text and
    whom it serves, so that it outlives an engine."""

    id: str
    name: str
    tokens: int
    blocks: int
    hits: int
    seconds_left: float | None
    shared: bool


class PrefixList(msgspec.Struct):
    prefixes: list[Prefix]


async def list_prefixes(call: Call[None]) -> PrefixList:
    """The pinned prefixes: their size, hits, and seconds left."""
    report = await call.ready.client.control(ListPins())
    return PrefixList([_shown(pin) for pin in report.pins if _is_visible(pin, call)])


async def pin(call: Call[PinRequest]) -> Prefix:
    """Compute a prefix and keep it for the requests of the caller's key."""
    if (adapter := call.ready.model.adapter_of(call.body.model)) is not None:
        raise RefusedError(
            f"model names the adapter `{adapter}`, but prefixes are pinned for the base model "
            "alone. Leave it out.",
            param="model",
        )
    check_label("cache_salt", call.body.cache_salt, call.limits)
    return _shown(await call.attended(_pin(call)))


async def unpin(call: Call[None]) -> Deleted:
    """Let a pinned prefix go before its time."""
    prefix_id, client = call.part("prefix_id"), call.ready.client
    pins = (await client.control(ListPins())).pins
    visible = {pin.key: pin for pin in pins if _is_visible(pin, call)}
    found = visible.get(prefix_id)
    if found is not None and found.tenant != call.tenant:
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
    return Deleted(id=prefix_id, deleted=True)


async def _pin(call: Call[PinRequest]) -> PinnedPrefix:
    """Pin a prefix. It takes a place in the waiting room like any other prompt."""
    body = call.body
    seconds = math.inf if body.ttl_s is None else body.ttl_s
    if not seconds > 0:
        raise RefusedError(f"ttl_s is {seconds:g}. Give seconds above 0.", param="ttl_s")
    place = call.services.waiting.enter(Party())
    try:
        prompt = await _render(call)
        place.hold(len(prompt.token_ids))
        work = pin_prefix(
            call.ready.client,
            f"api-{secrets.token_hex(8)}",
            prompt.token_ids,
            seconds=seconds,
            salt=tenant_salt(call.tenant, body.cache_salt),
            scheduling=SchedulingParams(tenant=call.tenant, weight=call.weight),
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


async def _render(call: Call[PinRequest]) -> RenderedPrompt:
    ready, body, prompts = call.ready, call.body, call.services.prompts
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
        found = await prompts.render_chat(
            renderer, chat, max_model_len, dialect, text, tenant=call.tenant
        )
    else:
        found = await prompts.render_prompt(renderer, body.prompt or "", max_model_len)
    return check_context(found, PIN_PARAMS, max_model_len)


def _is_visible(pin: PinnedPrefix, call: Call[None]) -> bool:
    return pin.is_shared or pin.tenant == call.tenant


def _shown(pin: PinnedPrefix) -> Prefix:
    is_endless = pin.seconds_left == math.inf
    return Prefix(
        pin.key,
        pin.name,
        pin.num_tokens,
        pin.num_blocks,
        pin.hits,
        None if is_endless else round(pin.seconds_left, 3),
        pin.is_shared,
    )


ROUTES = (
    Route("GET", "/admin/prefixes", list_prefixes, answer=PrefixList, needs=Needs.ENGINE),
    Route("POST", "/admin/prefixes", pin, PinRequest, Prefix, needs=Needs.ROOM),
    Route("DELETE", "/admin/prefixes/{prefix_id}", unpin, answer=Deleted, needs=Needs.ENGINE),
)
