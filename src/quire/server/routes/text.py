"""Routes of the tokenizer."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from quire.server.generation.backend import Ready
from quire.server.openai.tools import tools_text
from quire.server.requests.bodies import DetokenizeRequest, TokenizeRequest
from quire.server.requests.errors import RefusedError
from quire.server.routes.route import Call, Needs, Route
from quire.text.rendering import Tokenizer

__all__ = ["ROUTES"]


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


async def tokenize(call: Call[TokenizeRequest]) -> TokenizeResponse:
    """Token ids of a prompt, or of messages as the chat template writes them."""
    call.ready.model.check_name(call.body.model)
    return await call.attended(_tokenize(call))


async def detokenize(call: Call[DetokenizeRequest]) -> DetokenizeResponse:
    """The text of token ids."""
    body = call.body
    call.ready.model.check_name(body.model)
    work = functools.partial(_decode, _tokenizer(call.ready), body.tokens)
    return DetokenizeResponse(await call.services.prompts.run(work, len(body.tokens)))


async def tokenizer_info(call: Call[None]) -> dict[str, Any]:
    """Special tokens and the chat template, for clients that have no tokenizer of their own."""
    template = call.ready.model.front.renderer.chat_template
    tokenizer = _tokenizer(call.ready)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": call.ready.capacity.max_model_len,
        "chat_template": None if template is None else template.source(),
        **tokenizer.special_tokens,
    }


async def _tokenize(call: Call[TokenizeRequest]) -> TokenizeResponse:
    ready, body, prompts = call.ready, call.body, call.services.prompts
    max_model_len, renderer = ready.capacity.max_model_len, ready.model.front.renderer
    if (body.prompt is None) == (body.messages is None):
        raise RefusedError("Give either prompt or messages.", param="prompt")
    token_ids: list[int] = []
    if body.messages is not None:
        text, dialect = tools_text(body.tools, ready.model), ready.model.dialect
        rendered = await prompts.render_chat(
            renderer, body, max_model_len, dialect, text, tenant=call.tenant
        )
        token_ids = rendered.token_ids
    elif body.prompt:
        rendered = await prompts.render_prompt(
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
    return TokenizeResponse(len(token_ids), max_model_len, token_ids, strings)


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


ROUTES = (
    Route("POST", "/tokenize", tokenize, TokenizeRequest, TokenizeResponse, needs=Needs.ROOM),
    Route(
        "POST", "/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse, needs=Needs.ROOM
    ),
    Route("GET", "/tokenizer_info", tokenizer_info, needs=Needs.ENGINE, refuses=(400,)),
)
