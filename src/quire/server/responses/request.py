"""Converts requests of the Responses API to chats."""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.requests.bodies import ChatExtras, ChatRequest
from quire.server.requests.errors import RefusedError
from quire.server.requests.places import Fields, fields_of, optional_string, refused
from quire.server.requests.responses_bodies import InputTokensRequest, ResponsesRequest
from quire.server.responses.conversation import CONFIGURATION_UPDATE, chat_messages
from quire.server.responses.tools import GivenTools, chat_choice, given_tools

__all__ = ["ENCRYPTED_REASONING", "RECEIPT", "ReadRequest", "read_request"]

ENCRYPTED_REASONING = "reasoning.encrypted_content"
RECEIPT = "receipt"
_LOGPROBS = "message.output_text.logprobs"

_EFFORTS = {
    "none": "none", "minimal": "low", "low": "low", "medium": "medium", "high": "high",
    "xhigh": "high", "max": "high",
}  # fmt: skip
"""Templates know three levels, and none."""
_VERBOSITIES = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request as a chat. drops_oldest: a conversation that does not fit loses its oldest
    turns. compared_id: id of the response with which its cached tokens are compared."""

    chat: ChatRequest
    tools: GivenTools
    drops_oldest: bool
    compared_id: str | None = None


def read_request(
    body: ResponsesRequest | InputTokensRequest, items: list[Fields], *, takes_images: bool
) -> ReadRequest:
    """Return a request as a chat. items: items of the whole conversation. takes_images: whether the
    model does. RefusedError names the field at fault."""
    _check_absent(body)
    tools = given_tools(body.tools)
    chat = ChatRequest(
        model=body.model,
        messages=chat_messages(body.instructions, items, tools, takes_images=takes_images),
        tools=tools.functions or None,
        tool_choice=chat_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls,
    )
    for name in ChatExtras.__struct_fields__:
        setattr(chat, name, getattr(body, name))
    reasoning, text = _configured(body, items)
    _take_reasoning(chat, reasoning)
    _take_format(chat, text)
    if body.truncation not in (None, "auto", "disabled"):
        raise refused("truncation", body.truncation, 'Use "auto" or "disabled".')
    compared_id = None
    if isinstance(body, ResponsesRequest):
        name, place = "comparison_response_id", "prompt_cache_options"
        compared_id = optional_string(body.prompt_cache_options, name, place)
        chat.stream, chat.thinking_token_budget = body.stream, body.thinking_token_budget
        chat.max_completion_tokens = body.max_output_tokens
        _take_logprobs(chat, body)
        if RECEIPT in (body.include or ()) and not body.deterministic:
            raise RefusedError(
                'include has "receipt", but only deterministic requests have one. Set '
                "deterministic to true too.",
                param="include",
            )
    return ReadRequest(chat, tools, body.truncation == "auto", compared_id)


def _check_absent(body: InputTokensRequest) -> None:
    """Raise RefusedError for features that are not offered."""
    for name, instead in (
        ("conversation", "Send previous_response_id, or the items themselves"),
        ("prompt", "There are no stored prompts; send input and instructions"),
    ):
        if getattr(body, name) is not None:
            raise RefusedError(f"{name} is given. {instead}.", param=name)


def _configured(body: InputTokensRequest, items: list[Fields]) -> tuple[Fields, Fields]:
    """Return `reasoning` and `text` of a request, as the last items that update them leave them."""
    settings = {"reasoning": body.reasoning or {}, "text": body.text or {}}
    for index, item in enumerate(items):
        if item.get("type") == CONFIGURATION_UPDATE:
            for name in settings:
                if item.get(name) is not None:
                    settings[name] = fields_of(item[name], f"input[{index}].{name}")
    return settings["reasoning"], settings["text"]


def _take_reasoning(chat: ChatRequest, reasoning: Fields) -> None:
    effort = reasoning.get("effort")
    if effort is None:
        return
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise refused("reasoning.effort", effort, f"Use one of {', '.join(_EFFORTS)}.")
    chat.reasoning_effort = _EFFORTS[effort]


def _take_format(chat: ChatRequest, text: Fields) -> None:
    """Set the format, and the verbosity."""
    verbosity = text.get("verbosity")
    if verbosity not in (None, *_VERBOSITIES):
        raise refused("text.verbosity", verbosity, f"Use one of {', '.join(_VERBOSITIES)}.")
    chat.verbosity = verbosity
    given = text.get("format")
    form = {"type": "text"} if given is None else fields_of(given, "text.format")
    if form.get("type") == "json_schema":
        stated = {name: form.get(name) for name in ("name", "schema", "strict")}
        chat.response_format = {"type": "json_schema", "json_schema": stated}
    elif form.get("type") in ("text", "json_object"):
        chat.response_format = {"type": form["type"]}
    else:
        advice = 'Use "text", "json_object" or "json_schema".'
        raise refused("text.format.type", form.get("type"), advice)


def _take_logprobs(chat: ChatRequest, body: ResponsesRequest) -> None:
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        chat.logprobs = True
        chat.top_logprobs = body.top_logprobs or 0
