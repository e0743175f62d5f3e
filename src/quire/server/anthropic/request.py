"""Converts requests of the Messages API to chats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.server.anthropic.conversation import chat_messages
from quire.server.generation.backend import ServedModel
from quire.server.requests.bodies import ChatExtras, ChatRequest
from quire.server.requests.messages_bodies import CountTokensRequest, MessagesRequest
from quire.server.requests.places import Fields, fields_of, optional_string, refused

__all__ = ["ReadRequest", "read_request"]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
MAX_TOKENS = 2**31 - 1
"""More than any context has: max_tokens is cut to the room there anyway."""
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Templates know three levels."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request as a chat. removed_lines: lines removed from its system prompt, see `volatile`.
    skipped_tools: tools that only another service could run. hides_thinking: blocks of thinking
    have no text. previous_id: id of the message with which its cached tokens are compared."""

    chat: ChatRequest
    removed_lines: list[str]
    skipped_tools: list[str]
    hides_thinking: bool
    previous_id: str | None = None


def read_request(body: MessagesRequest | CountTokensRequest, model: ServedModel) -> ReadRequest:
    """Return a request as a chat. RefusedError names the field at fault."""
    takes_images = model.front.renderer.images is not None
    messages, removed_lines = chat_messages(body.system, body.messages, takes_images=takes_images)
    tools, skipped_tools = _tools(body.tools or [])
    skipped_names: list[object] = [
        tool.get("name") for tool in body.tools or () if _is_hosted(tool)
    ]
    chat = ChatRequest(model=body.model, messages=messages, tools=tools or None)
    for name in ChatExtras.__struct_fields__:
        setattr(chat, name, getattr(body, name))
    _take_choice(chat, body.tool_choice, skipped_names)
    _take_thinking(chat, body, model)
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        chat.continue_final_message = True
    previous_id = None
    if isinstance(body, MessagesRequest):
        previous_id = optional_string(body.diagnostics, "previous_message_id", "diagnostics")
        chat.stream = body.stream
        chat.max_tokens = min(body.max_tokens, MAX_TOKENS)
        chat.stop = body.stop_sequences
    hides = (body.thinking or {}).get("display") == "omitted"
    return ReadRequest(chat, removed_lines, skipped_tools, hides, previous_id)


def _tools(given: list[Fields]) -> tuple[list[Fields], list[str]]:
    tools: list[Fields] = []
    skipped: list[str] = []
    for index, tool in enumerate(given):
        if _is_hosted(tool):
            skipped.append(str(tool["type"])[:80])
            continue
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
            "strict": tool.get("strict"),
        }
        if not isinstance(function["name"], str):
            raise refused(f"tools[{index}].name", function["name"], "Give the tool a name.")
        said = {name: value for name, value in function.items() if value is not None}
        tools.append({"type": "function", "function": said})
    return tools, skipped


def _is_hosted(tool: Fields) -> bool:
    """Return True for a tool that only another service could run."""
    return tool.get("type") not in (None, "custom")


def _take_choice(chat: ChatRequest, given: Fields | None, skipped_names: list[object]) -> None:
    """Set the choice. If only skipped tools could be called as it says, it is skipped with
    them."""
    if given is None:
        return
    kind = given.get("type")
    if given.get("disable_parallel_tool_use") is True:
        chat.parallel_tool_calls = False
    if kind == "any" and skipped_names and not chat.tools:
        return
    if kind == "tool" and isinstance(given.get("name"), str):
        if given["name"] in skipped_names:
            return
        chat.tool_choice = {"type": "function", "function": {"name": given["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        if chat.tools or kind == "any":
            chat.tool_choice = _CHOICES[kind]
    else:
        advice = 'Send {"type": "auto"}, "any", "none", or "tool" with a "name".'
        raise refused("tool_choice", given, advice)


def _take_thinking(
    chat: ChatRequest, body: MessagesRequest | CountTokensRequest, model: ServedModel
) -> None:
    """Set the template's switches, the budget and the format. A model that cannot think gets none
    of these: agents send the same request to every model."""
    thinking: Any = body.thinking or {"type": "disabled"}
    kind = thinking.get("type")
    variables: Fields = {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}
    if kind == "enabled":
        budget = thinking.get("budget_tokens")
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            advice = "Give a number of tokens above 0."
            raise refused("thinking.budget_tokens", budget, advice)
        if model.dialect is not None and model.dialect.thinks:
            chat.thinking_token_budget = budget
    elif kind not in ("disabled", "adaptive", "between_tools"):
        advice = 'Use "enabled", "adaptive", "between_tools" or "disabled".'
        raise refused("thinking.type", kind, advice)
    config = body.output_config or {}
    effort, asked = config.get("effort"), config.get("format")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            advice = f"Use one of {', '.join(_EFFORTS)}."
            raise refused("output_config.effort", effort, advice)
        variables["reasoning_effort"] = _EFFORTS[effort]
    chat.chat_template_kwargs = {**variables, **(body.chat_template_kwargs or {})}
    if asked is not None:
        place = "output_config.format"
        given = fields_of(asked, place)
        if given.get("type") != "json_schema":
            raise refused(f"{place}.type", given.get("type"), 'Use "json_schema".')
        schema = fields_of(given.get("schema"), f"{place}.schema")
        form = {"name": "output", "schema": schema}
        chat.response_format = {"type": "json_schema", "json_schema": form}
