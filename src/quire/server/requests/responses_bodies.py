"""Bodies of the Responses API. None means "not given". Agents send fields that nothing here reads;
these are listed in the request's timeline and not refused."""

from __future__ import annotations

from typing import Any

from quire.server.requests.bodies import ChatExtras

__all__ = ["CompactRequest", "InputTokensRequest", "ResponsesRequest"]


class InputTokensRequest(ChatExtras, kw_only=True):
    """POST /v1/responses/input_tokens: the parts of a prompt."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """POST /v1/responses. prompt_cache_key, safety_identifier: returned unchanged.
    prompt_cache_options: asks why less was cached than the response that it names as
    `comparison_response_id` has in common with the prompt."""

    background: bool | None = None
    deterministic: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    top_logprobs: int | None = None
    thinking_token_budget: int | None = None


class CompactRequest(ChatExtras, kw_only=True):
    """POST /v1/responses/compact. prompt_cache_key: accepted, without effect."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
