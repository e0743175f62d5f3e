"""Bodies of the Messages API. None means "not given". Clients add fields month by month, so an
unknown one is listed in the request's timeline and not refused."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quire.server.requests.bodies import ChatExtras

__all__ = ["CountTokensRequest", "MessagesRequest"]

Tokens = Annotated[int, msgspec.Meta(ge=1)]
Turns = Annotated[
    Any, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})
]
"""Any value; `conversation` reports errors."""


class CountTokensRequest(ChatExtras, kw_only=True):
    """POST /v1/messages/count_tokens: the parts of a prompt."""

    model: str
    messages: Turns
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages. diagnostics: asks why less was cached than the message that it names as
    `previous_message_id` has in common with the prompt."""

    max_tokens: Tokens
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    diagnostics: dict[str, Any] | None = None
