"""Converts tools of the Responses API to functions of a chat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from quire.server.requests.places import Fields, fields_of, refused, string_of

__all__ = ["GivenTools", "chat_choice", "given_tools", "shown_choice", "shown_tools"]

_UNNAMED = re.compile("[^a-zA-Z0-9_.-]")
"""Characters that names of functions do not have."""
_MAX_NAME = 128
"""Characters from which on a name is refused, so that hostile ones cost little here."""
_END_ANCHOR = re.compile(r"(?<!\\)(\\\\)*\$\Z")
_HOSTED_CHOICES = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview",
        "file_search", "image_generation", "local_shell", "mcp", "programmatic_tool_calling",
        "shell", "tool_search", "web_search", "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)  # fmt: skip
"""Types of choices that name a tool which only another service could run."""
_CHOICE = (
    'Use "none", "auto", "required", {"type": "function", "name": …} or '
    '{"type": "allowed_tools", "mode": …, "tools": […]}.'
)


@dataclass(slots=True)
class GivenTools:
    """functions: all tools in the form of a chat. custom: names of tools that take a text, which
    the model writes as the only argument of a function. namespaces, names: mappings from the name
    that the model sees; `names` has the name that the client gave, where it differs. skipped: types
    of tools that only another service could run."""

    functions: list[Fields] = field(default_factory=list[Fields])
    custom: set[str] = field(default_factory=set[str])
    namespaces: dict[str, str] = field(default_factory=dict[str, str])
    names: dict[str, str] = field(default_factory=dict[str, str])
    skipped: list[str] = field(default_factory=list[str])
    _joined: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    def model_name(self, namespace: object, name: str) -> str:
        """Return the name that the model sees. namespace: None for none."""
        return self._joined.get((namespace, name), name) if isinstance(namespace, str) else name

    def join(self, namespace: str, name: str, taken: set[str]) -> None:
        """Let the model see a function of a namespace by a name that no other tool has, and add it
        to `taken`. A second one of that namespace has the same name, which is refused later."""
        if (namespace, name) in self._joined:
            return
        joined = f"{_UNNAMED.sub('_', namespace[:_MAX_NAME])}__{name}"
        while joined in taken and len(joined) <= _MAX_NAME:
            joined += "_"
        taken.add(joined)
        self._joined[namespace, name] = joined
        self.names[joined] = name


class _Named(NamedTuple):
    """One function or custom tool. place: its place in the request."""

    tool: Fields
    name: str
    namespace: str | None
    place: str


def given_tools(tools: list[Fields] | None) -> GivenTools:
    """Return the tools of a request. RefusedError names a bad one."""
    found = GivenTools()
    named = list(_named(tools or (), "tools", None, found.skipped))
    owners = Counter(name for name, _ in {(each.name, each.namespace) for each in named})
    taken = set(owners)
    for each in named:
        if each.namespace is not None and owners[each.name] > 1:
            found.join(each.namespace, each.name, taken)
    for each in named:
        _add(found, each)
    return found


def _named(
    tools: Sequence[object], place: str, namespace: str | None, skipped: list[str]
) -> Iterator[_Named]:
    """Yield the tools, also those in namespaces. skipped: takes types of the others."""
    for index, given in enumerate(tools):
        at = f"{place}[{index}]"
        tool = fields_of(given, at)
        kind, name = tool.get("type"), tool.get("name")
        if kind not in ("function", "custom", "namespace"):
            skipped.append(str(kind)[:80])
        elif not isinstance(name, str):
            raise refused(f"{at}.name", name, "Give the tool a name.")
        elif kind == "namespace":
            inner: object = tool.get("tools")
            listed = cast("list[object]", inner) if isinstance(inner, list) else []
            yield from _named(listed, f"{at}.tools", name, skipped)
        else:
            yield _Named(tool, name, namespace, at)


def _add(found: GivenTools, given: _Named) -> None:
    tool = given.tool
    name = found.model_name(given.namespace, given.name)
    if given.namespace is not None:
        found.namespaces[name] = given.namespace
    function: Fields = {"name": name, "description": tool.get("description")}
    if tool["type"] == "custom":
        found.custom.add(name)
        text = _custom_text(tool, given.place)
        function |= {"parameters": _only(text), "strict": True if "pattern" in text else None}
    else:
        function |= {"parameters": tool.get("parameters"), "strict": tool.get("strict")}
    said = {key: value for key, value in function.items() if value is not None}
    found.functions.append({"type": "function", "function": said})


def _custom_text(tool: Fields, place: str) -> Fields:
    """Return the schema of a custom tool's text. A regular expression becomes its pattern, which
    holds the whole text. The text of a grammar only tells the model what to write, and is not
    enforced."""
    given = tool.get("format")
    form = {} if given is None else fields_of(given, f"{place}.format")
    text: Fields = {"type": "string"}
    if form.get("type") == "grammar":
        if form.get("syntax") == "regex":
            text["pattern"] = _whole(string_of(form, "definition", f"{place}.format"))
        else:
            text["description"] = f"Text of this grammar:\n{form.get('definition')}"
    return text


def _only(text: Fields) -> Fields:
    """Return the schema of the arguments of a function that takes one text."""
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def _whole(pattern: str) -> str:
    """Return a pattern that matches whole texts alone. Anchors at its ends say no more, and those
    within it are not read by all grammars."""
    inner = pattern.removeprefix("^")
    return f"^(?:{inner[:-1] if _END_ANCHOR.search(inner) else inner})$"


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
    """Return `tool_choice` in the form of a chat. Raises RefusedError for a malformed one. If only
    skipped tools could be called as it says, it is skipped with them: the choice is the model's."""
    if given is None or isinstance(given, str):
        if given not in (None, "auto", "none", "required"):
            raise refused("tool_choice", given, _CHOICE)
        is_idle = given in (None, "auto", "none") or (given == "required" and tools.skipped)
        return None if is_idle and not tools.functions else given
    kind = given.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _chosen_name(given, tools)}}
    if kind == "allowed_tools":
        return _allowed(given, tools)
    if isinstance(kind, str) and (kind in tools.skipped or kind in _HOSTED_CHOICES):
        return None
    raise refused("tool_choice", given, _CHOICE)


def _allowed(given: Fields, tools: GivenTools) -> str | Fields | None:
    """Return the choice between some tools; "none" where all of these are skipped ones."""
    named: Any = given.get("tools")
    listed = cast("list[object]", named) if isinstance(named, list) else []
    allowed = [fields_of(tool, "tool_choice.tools") for tool in listed]
    callable_tools = (tool for tool in allowed if tool.get("type") in ("function", "custom"))
    names = [_chosen_name(tool, tools) for tool in callable_tools]
    if allowed and not names:
        return "none" if tools.functions else None
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    mode = given.get("mode", "auto")
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def _chosen_name(given: Fields, tools: GivenTools) -> object:
    name: object = given.get("name")
    return tools.model_name(given.get("namespace"), name) if isinstance(name, str) else name
