"""Bodies of the routes of TRL's own server, which its clients used up to TRL 1.12."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from quire.base.errors import clipped
from quire.server.requests.bodies import ChatRequest, CompletionRequest, ParametersOfOpenAI
from quire.server.requests.errors import RefusedError

__all__ = ["TrlChatRequest", "TrlGenerateRequest"]

Request = TypeVar("Request", CompletionRequest, ChatRequest)


class _TrlRequest(ParametersOfOpenAI, kw_only=True, forbid_unknown_fields=True):
    """Fields of both routes: sampling parameters and others. logprobs: tokens to list beside the
    one that is there; None for no log-probabilities. generation_kwargs: more sampling
    parameters."""

    n: int | None = None
    logprobs: int | None = 0
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] | None = None

    def _request(self, kind: type[Request], fields: dict[str, Any]) -> Request:
        """Return the request of another route with these parameters and fields. Raises RefusedError
        for a parameter that it does not have."""
        names = ParametersOfOpenAI.__struct_fields__
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.structured_outputs_regex is not None:
            given["structured_outputs"] = {"regex": self.structured_outputs_regex}
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        try:
            return msgspec.convert(
                {**given, **(self.generation_kwargs or {}), **fields, **ids}, kind
            )
        except msgspec.ValidationError as error:
            raise RefusedError(
                f"generation_kwargs: {clipped(str(error))}. Correct it.", param="generation_kwargs"
            ) from error


class TrlGenerateRequest(_TrlRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /generate. prompts: texts or token ids. images: one list for each prompt, which must be
    empty here."""

    prompts: list[str | list[int]]
    images: list[list[str] | None] | None = None

    def completion(self) -> CompletionRequest:
        """Return the same request of /v1/completions. Errors as of `_request`."""
        if any(self.images or ()):
            raise RefusedError(
                "images are given, but this route takes text alone. Send them to "
                "/v1/chat/completions, as image_url.",
                param="images",
            )
        return self._request(CompletionRequest, {"prompt": self.prompts, "logprobs": self.logprobs})


class TrlChatRequest(_TrlRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /chat. messages: conversations."""

    messages: list[list[dict[str, Any]]]
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    def chats(self) -> list[ChatRequest]:
        """Return a request of /v1/chat/completions for each conversation. Errors as of
        `_request`."""
        fields: dict[str, Any] = {
            "logprobs": self.logprobs is not None,
            "top_logprobs": self.logprobs,
            "chat_template_kwargs": self.chat_template_kwargs or None,
        }
        if self.tools:
            fields.update(tools=self.tools, tool_choice="none")
        return [
            self._request(ChatRequest, {**fields, "messages": [_with_images(m) for m in each]})
            for each in self.messages
        ]


def _with_images(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with TRL's image parts in the form of the OpenAI API."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    found = cast("list[Any]", content)
    parts: list[Any] = []
    for part in found:
        data = cast("dict[str, Any]", part).get("image_pil") if isinstance(part, dict) else None
        url = {"url": f"data:image/png;base64,{data}"}
        parts.append(part if data is None else {"type": "image_url", "image_url": url})
    return {**message, "content": parts}
