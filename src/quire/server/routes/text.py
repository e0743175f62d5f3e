"""Routes of the tokenizer."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.rendering import Tokenizer
from quire.server.generation.backend import Ready
from quire.server.http.body import BodyDecoder
from quire.server.http.events import while_connected
from quire.server.http.openapi import body_of
from quire.server.openai.answer import encode
from quire.server.openai.tools import tools_text
from quire.server.requests.bodies import DetokenizeRequest, TokenizeRequest
from quire.server.requests.errors import RefusedError
from quire.server.routes.services import Services

__all__ = ["text_router"]

JSON = "application/json"


def text_router(services: Services) -> APIRouter:
    """Tokenize, detokenize, and what the tokenizer is."""
    router = APIRouter(tags=["tokenizer"])
    limits = services.settings.limits
    tokenizes: BodyDecoder[TokenizeRequest] = BodyDecoder(TokenizeRequest, limits)
    detokenizes: BodyDecoder[DetokenizeRequest] = BodyDecoder(DetokenizeRequest, limits)

    @router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages as the chat template writes them."""
        ready = services.ready()
        body = await tokenizes.decode(await services.bodies.read(request))
        ready.model.check_name(body.model)
        found = await while_connected(request.receive, _tokenize(services, ready, body))
        return Response(encode(found), media_type=JSON)

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        ready = services.ready()
        body = await detokenizes.decode(await services.bodies.read(request))
        ready.model.check_name(body.model)
        tokenizer = _tokenizer(ready)
        work = functools.partial(_decode, tokenizer, body.tokens)
        text = await services.prompts.run(work, len(body.tokens))
        return Response(encode({"prompt": text}), media_type=JSON)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template, for clients that have no tokenizer of their own."""
        ready = services.backend.require()
        template = ready.model.front.renderer.chat_template
        tokenizer = _tokenizer(ready)
        info: dict[str, Any] = {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": ready.capacity.max_model_len,
            "chat_template": None if template is None else template.source(),
            **tokenizer.special_tokens,
        }
        return Response(encode(info), media_type=JSON)

    return router


async def _tokenize(services: Services, ready: Ready, body: TokenizeRequest) -> dict[str, Any]:
    max_model_len, renderer = ready.capacity.max_model_len, ready.model.front.renderer
    if (body.prompt is None) == (body.messages is None):
        raise RefusedError("Give either prompt or messages.", param="prompt")
    token_ids: list[int] = []
    if body.messages is not None:
        text = tools_text(body.tools, ready.model)
        rendered = await services.prompts.render_chat(renderer, body, max_model_len, text)
        token_ids = rendered.token_ids
    elif body.prompt:
        rendered = await services.prompts.render_prompt(
            renderer,
            body.prompt,
            max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
        )
        token_ids = rendered.token_ids
    strings = None
    if body.return_token_strs:
        tokenizer = _tokenizer(ready)
        strings = [tokenizer.token_string(token_id) for token_id in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    for token_id in set(token_ids):
        if token_id < 0 or tokenizer.token_string(token_id) is None:
            raise RefusedError(
                f"tokens[{token_ids.index(token_id)}] is {token_id}, which is no token of this "
                f"model. Its vocabulary has {tokenizer.vocab_size} tokens.",
                param="tokens",
            )
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def _tokenizer(ready: Ready) -> Tokenizer:
    tokenizer = ready.model.front.renderer.tokenizer
    if tokenizer is None:
        raise RefusedError(
            "The engine runs without a tokenizer (skip_tokenizer_init). Start it with one."
        )
    return tokenizer
