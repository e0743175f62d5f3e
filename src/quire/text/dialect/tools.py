"""The tools of a request, and those that an answer has to call."""

from __future__ import annotations

import copy
import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from quire.base.errors import RequestError
from quire.protocol.json_schema import without_unsupported
from quire.protocol.json_schema.types import Schema, listed, node, resolved, types_of

__all__ = [
    "NAME_CHARACTERS",
    "NamedTool",
    "Tool",
    "ToolChoice",
    "check_tools",
    "chosen_tools",
    "tool_of",
    "tools_prompt",
]

NAME_CHARACTERS = string.ascii_letters + string.digits + "_.-"
_NAME = re.compile("[a-zA-Z0-9_.-]{1,128}")

_OTHERS = frozenset(
    ("additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf", "if")
)
"""Keywords of a schema that does not list all of its properties."""


@dataclass(frozen=True)
class Tool:
    """A function. parameters: JSON Schema of its arguments, an object. is_strict: constraints that
    the grammar cannot enforce are refused, otherwise ignored."""

    name: str
    parameters: Schema = field(default_factory=dict[str, Any])
    is_strict: bool = False
    description: str = ""

    @property
    def properties(self) -> Schema:
        """Schemas of the arguments by name; empty where the schema states none."""
        return node(self.root.get("properties"))

    @property
    def schema(self) -> Schema:
        """Schema of the object of arguments. If the tool's schema does not mention others than it
        lists, it allows none, since a function takes no others. One that it requires is mentioned.
        """
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        names = node(self.parameters.get("properties"))
        has_others = any(
            isinstance(name, str) and name not in names
            for name in listed(self.parameters, "required")
        )
        is_open = has_others or not _OTHERS.isdisjoint(self.parameters)
        closed = {} if is_open else {"additionalProperties": False}
        kind = self.parameters.get("type", "object") if self.is_strict else "object"
        return {**self.parameters, **closed, "type": kind}

    @cached_property
    def root(self) -> Schema:
        """Return `schema`, or the schema that it only refers to; if lenient, without constraints
        that no grammar can enforce."""
        target = resolved(self.schema.get("$ref"), self.schema)
        found = {**self.schema, **node(target)}
        if not self.is_strict:
            found = copy.deepcopy(found)
            without_unsupported(found)
        return found

    @property
    def others(self) -> object:
        """Schema of the arguments that are not listed; False if there are none."""
        return self.root.get("additionalProperties", True)

    def types_of(self, name: str) -> frozenset[str]:
        """Return the JSON types that an argument may have."""
        return types_of(self.properties.get(name, self.others), self.root)

    @property
    def signature(self) -> str:
        """The tool as JSON, for a prompt."""
        return json.dumps(
            {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
            ensure_ascii=False,
        )


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The answer is one call of this tool."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""none: text alone. auto: text and calls. required: one call or more."""


def check_tools(tools: Sequence[Tool], choice: ToolChoice = "auto") -> None:
    """Check the tools. Raises RequestError for a name that no format can write, for one that two
    tools have, and for a choice that fits no tool."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise RequestError(
                f"tools[{index}] has the name {tool.name[:80]!r}. Give one of up to 128 letters, "
                "digits, underscores, dots and dashes."
            )
        if tool.name in seen:
            raise RequestError(
                f"tools[{index}] has the name {tool.name!r} of a tool before it. Rename one."
            )
        seen.add(tool.name)
    if isinstance(choice, NamedTool) and choice.name not in seen:
        raise RequestError(
            f"tool_choice names {choice.name[:80]!r}, which is none of the tools. Name one of "
            f"{', '.join(sorted(seen)[:20]) or 'none, since there are no tools'}."
        )
    if choice == "required" and not tools:
        raise RequestError("tool_choice is 'required', but there are no tools. Send some.")


def chosen_tools(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """Return the tools that the answer may call. Raises RequestError as in `check_tools`."""
    check_tools(tools, choice)
    if choice == "none":
        return ()
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.name == choice.name]
    return tools


def tool_of(given: object) -> Tool | None:
    """Read a tool in the form of the OpenAI API; None if it is no function with a name."""
    function = node(node(given).get("function"))
    name = function.get("name")
    if not isinstance(name, str):
        return None
    description = function.get("description")
    return Tool(
        name,
        node(function.get("parameters")),
        description=description if isinstance(description, str) else "",
    )


def tools_prompt(tools: Sequence[Tool], choice: ToolChoice = "auto") -> str:
    """Return a system prompt's description of the tools, for a model whose template has no place
    for them."""
    chosen = chosen_tools(tools, choice)
    if not chosen:
        return ""
    lines = [
        "You can call these functions:",
        *(tool.signature for tool in chosen),
        "To call functions, answer with JSON of this form alone:",
        '{"tool_calls": [{"name": NAME, "arguments": {…}}]}',
    ]
    if choice == "auto":
        lines += ["To answer without a call, write:", '{"response": "YOUR ANSWER"}']
    return "\n".join(lines)
