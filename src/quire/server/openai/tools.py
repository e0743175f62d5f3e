"""Reads `tools`, `tool_choice` and `parallel_tool_calls`: the calls that an answer may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from quire.base.errors import RequestError
from quire.server.generation.backend import ServedModel
from quire.server.generation.parsed import AnswerForm
from quire.server.requests.bodies import ChatRequest
from quire.server.requests.errors import RefusedError
from quire.text.dialect import NamedTool, Tool, ToolChoice
from quire.text.dialect.tools import check_tools

__all__ = ["AskedTools", "answer_form", "asked_tools", "tools_text"]

MAX_BUDGET = 2**31 - 1
"""Tokens of thinking that no context has room for."""
_FUNCTION = 'Send {"type": "function", "function": {"name": …, "parameters": …}}.'
_CHOICE = (
    'Use "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}.'
)


@dataclass(frozen=True, slots=True)
class AskedTools:
    """tools: tools that the answer may call; the prompt shows all tools of the request. parallel:
    allow several calls."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"
    parallel: bool = True

    @property
    def must_call(self) -> bool:
        """Return True if the answer must be a call. Then no format applies to its text."""
        return self.choice not in ("none", "auto")


def asked_tools(body: ChatRequest) -> AskedTools:
    """Return what the request offers and asks for. Raises RefusedError if it names an unknown tool,
    or its fields contradict each other."""
    tools = tuple(_tool(index, given) for index, given in enumerate(body.tools or ()))
    choice, allowed = _choice(body.tool_choice, has_tools=bool(tools))
    try:
        check_tools(tools)
    except RequestError as error:
        raise RefusedError(str(error), param="tools") from error
    offered = {tool.name: tool for tool in tools}
    if isinstance(choice, NamedTool):
        allowed = [choice.name]
    if allowed is not None:
        _check_names(allowed, offered)
        tools = tuple(tool for tool in tools if tool.name in allowed)
    return AskedTools(tools, choice, body.parallel_tool_calls is not False)


def _tool(index: int, given: dict[str, Any]) -> Tool:
    place = f"tools[{index}]"
    kind: object = given.get("type", "function")
    if kind != "function":
        _refuse("tools", f"{place}.type", kind, f"This server has tools of one type. {_FUNCTION}")
    if not isinstance(given.get("function"), dict):
        _refuse("tools", f"{place}.function", given.get("function"), _FUNCTION)
    function = cast("dict[str, object]", given["function"])
    name, strict = function.get("name"), function.get("strict")
    description, parameters = function.get("description"), function.get("parameters")
    place += ".function"
    if not isinstance(name, str):
        _refuse("tools", f"{place}.name", name, "Give the function a name.")
    if not isinstance(description, str | None):
        _refuse("tools", f"{place}.description", description, "Send a text, or leave it out.")
    if not isinstance(strict, bool | None):
        _refuse("tools", f"{place}.strict", strict, "Use true or false.")
    return Tool(name, _schema(place, parameters), bool(strict), description or "")


def _schema(place: str, parameters: object) -> dict[str, Any]:
    """Return the schema of the arguments; a function without one takes an empty object."""
    advice = 'Send a JSON Schema with "type": "object".'
    if parameters is None:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        _refuse("tools", f"{place}.parameters", parameters, advice)
    schema = cast("dict[str, Any]", parameters)
    kind: object = schema.get("type", "object")
    if kind != "object":
        _refuse("tools", f"{place}.parameters.type", kind, f"Arguments are an object. {advice}")
    if not isinstance(schema.get("properties", {}), dict):
        _refuse("tools", f"{place}.parameters.properties", schema["properties"], "Send an object.")
    return schema


def _choice(
    given: str | Mapping[str, object] | None, *, has_tools: bool
) -> tuple[ToolChoice, list[str] | None]:
    """Return the choice, and the names of the allowed tools, None for all."""
    if given is None:
        return ("auto" if has_tools else "none"), None
    if given == "none":
        return "none", None
    if not has_tools:
        raise RefusedError(
            "tool_choice is given, but there are no tools. Send tools, or leave it out.",
            param="tool_choice",
        )
    if isinstance(given, str):
        return _mode("tool_choice", given, _CHOICE), None
    kind = given.get("type")
    if kind == "function":
        return NamedTool(_name_of(given, "tool_choice")), None
    if kind != "allowed_tools":
        _refuse("tool_choice", "tool_choice", given, _CHOICE)
    return _allowed(given.get("allowed_tools"))


def _mode(place: str, given: object, advice: str) -> ToolChoice:
    if given == "auto":
        return "auto"
    if given != "required":
        _refuse("tool_choice", place, given, advice)
    return "required"


def _allowed(given: object) -> tuple[ToolChoice, list[str]]:
    place = "tool_choice.allowed_tools"
    if not isinstance(given, dict):
        _refuse("tool_choice", place, given, 'Send {"mode": "auto", "tools": […]}.')
    fields = cast("dict[str, object]", given)
    mode = _mode(f"{place}.mode", fields.get("mode", "auto"), 'Use "auto" or "required".')
    tools = fields.get("tools")
    if not isinstance(tools, list) or not tools:
        advice = "Send a list of at least one tool."
        _refuse("tool_choice", f"{place}.tools", cast("object", tools), advice)
    named = enumerate(cast("list[object]", tools))
    return mode, [_name_of(tool, f"{place}.tools[{index}]") for index, tool in named]


def _name_of(tool: object, place: str) -> str:
    name = _fields(_fields(tool).get("function")).get("name")
    if not isinstance(name, str):
        advice = 'Send {"type": "function", "function": {"name": …}}.'
        _refuse("tool_choice", place, tool, advice)
    return name


def _fields(value: object) -> dict[str, object]:
    """Return the fields of an object, an empty dict for anything else."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _check_names(names: Iterable[str], offered: Iterable[str]) -> None:
    known = set(offered)
    for name in names:
        if name not in known:
            raise RefusedError(
                f"tool_choice names {name[:80]!r}, which is none of the tools. Name one of "
                f"{', '.join(sorted(known)[:20])}.",
                param="tool_choice",
            )


def answer_form(asked: AskedTools, body: ChatRequest, model: ServedModel) -> AnswerForm | None:
    """Return the form of the answers; None if they are plain text, as those of a model without
    thinking are when there are no tools. Raises RefusedError for a feature that this model lacks.
    """
    dialect, tokenizer = model.dialect, model.front.renderer.tokenizer
    budget = body.thinking_token_budget
    if budget is not None and budget < -1:
        raise RefusedError(
            f"thinking_token_budget is {budget}. Give a number of tokens, or -1 for no limit.",
            param="thinking_token_budget",
        )
    thinks = dialect is not None and dialect.thinks
    if budget is not None and budget >= 0 and not thinks:
        raise RefusedError(
            f"thinking_token_budget is {budget}, but this model does not think before it answers. "
            "Leave it out.",
            param="thinking_token_budget",
        )
    if dialect is None or tokenizer is None or not (asked.tools or thinks):
        return None
    return AnswerForm(
        dialect,
        tokenizer,
        asked.tools,
        asked.choice,
        asked.parallel,
        min(budget, MAX_BUDGET) if budget is not None and budget >= 0 else None,
        _num_calls(body.messages),
    )


def tools_text(tools: list[dict[str, Any]] | None, model: ServedModel) -> str:
    """Return a chat's tools in words; empty if the template shows them. Raises RefusedError as in
    `asked_tools`."""
    body = ChatRequest(messages=[], tools=tools)
    form = answer_form(asked_tools(body), body, model)
    return "" if form is None else form.tools_text


def _num_calls(messages: object) -> int:
    """Count the calls of a conversation. Malformed ones are refused later."""
    num_calls = 0
    for message in cast("list[object]", messages) if isinstance(messages, list) else []:
        calls = _fields(message).get("tool_calls")
        num_calls += len(cast("list[object]", calls)) if isinstance(calls, list) else 0
    return num_calls


def _refuse(param: str, place: str, value: object, advice: str) -> NoReturn:
    shown = "missing" if value is None else f"{str(value)[:80]!r}"
    raise RefusedError(f"{place} is {shown}. {advice}", param=param)
