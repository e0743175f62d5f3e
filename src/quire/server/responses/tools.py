"""Converts tools of the Responses API to functions of a chat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from quire.server.requests.places import Fields, fields_of, refused

__all__ = ["GivenTools", "chat_choice", "given_tools", "shown_choice", "shown_tools"]

_CHOICE = (
    'Use "none", "auto", "required", {"type": "function", "name": …} or '
    '{"type": "allowed_tools", "mode": …, "tools": […]}.'
)


@dataclass(slots=True)
class GivenTools:
    """functions: in the form of a chat. custom: names of those that take a text, which the model
    writes as the only argument of a function. namespaces: by name of the function. skipped: types
    of tools that only another service could run."""

    functions: list[Fields] = field(default_factory=list[Fields])
    custom: set[str] = field(default_factory=set[str])
    namespaces: dict[str, str] = field(default_factory=dict[str, str])
    skipped: list[str] = field(default_factory=list[str])


def given_tools(tools: list[Fields] | None) -> GivenTools:
    """Return the tools of a request. RefusedError names a bad one."""
    found = GivenTools()
    for index, tool in enumerate(tools or ()):
        _add(found, tool, f"tools[{index}]", None)
    return found


def _add(found: GivenTools, tool: Fields, place: str, namespace: str | None) -> None:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom", "namespace"):
        found.skipped.append(str(kind)[:80])
        return
    if not isinstance(name, str):
        raise refused(f"{place}.name", name, "Give the tool a name.")
    if kind == "namespace":
        inner: object = tool.get("tools")
        listed = cast("list[object]", inner) if isinstance(inner, list) else []
        for index, each in enumerate(listed):
            at = f"{place}.tools[{index}]"
            _add(found, fields_of(each, at), at, name)
        return
    function: Fields = {"name": name, "description": tool.get("description")}
    if kind == "custom":
        found.custom.add(name)
        function["parameters"] = _text_parameter(tool, place)
    else:
        function |= {"parameters": tool.get("parameters"), "strict": tool.get("strict")}
    if namespace is not None:
        found.namespaces[name] = namespace
    said = {key: value for key, value in function.items() if value is not None}
    found.functions.append({"type": "function", "function": said})


def _text_parameter(tool: Fields, place: str) -> Fields:
    """Return the schema of a custom tool's one argument. A regular expression becomes its pattern.
    The text of a grammar only tells the model what to write, and is not enforced."""
    given = tool.get("format")
    form = {} if given is None else fields_of(given, f"{place}.format")
    text: Fields = {"type": "string"}
    if form.get("type") == "grammar":
        if form.get("syntax") == "regex":
            text["pattern"] = form.get("definition")
        else:
            text["description"] = f"Text of this grammar:\n{form.get('definition')}"
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def shown_tools(tools: list[Fields] | None) -> list[Fields]:
    """Return a request's tools in the form of its response: functions have every field that Open
    Responses names."""
    open_fields: Fields = {"description": None, "parameters": None, "strict": None}
    return [
        {**open_fields, **tool} if tool.get("type") == "function" else tool for tool in tools or ()
    ]


def shown_choice(given: str | Fields | None) -> str | Fields:
    """Return `tool_choice` in the form of the response."""
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        return {"mode": "auto", **given}
    return given or "auto"


def chat_choice(given: str | Fields | None, tools: GivenTools) -> str | Fields | None:
    """Return `tool_choice` in the form of a chat. Raises RefusedError for a malformed one. If it
    names a skipped tool, the choice is left to the model."""
    if given is None or isinstance(given, str):
        is_idle = given in (None, "auto", "none")
        return None if is_idle and not tools.functions else given
    kind = given.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": given.get("name")}}
    if kind == "allowed_tools":
        named: Any = given.get("tools")
        listed = cast("list[object]", named) if isinstance(named, list) else []
        allowed = [fields_of(tool, "tool_choice.tools") for tool in listed]
        names = [tool.get("name") for tool in allowed if tool.get("type") in ("function", "custom")]
        functions = [{"type": "function", "function": {"name": name}} for name in names]
        mode = given.get("mode", "auto")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
    if kind in tools.skipped:
        return None
    raise refused("tool_choice", given, _CHOICE)
