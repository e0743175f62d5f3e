"""Renders conversations for gpt-oss, after the published description of the Harmony format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.dialect.schema_types import Schema, listed, node, resolved
from quire.dialect.tools import Tool
from quire.errors import RequestError

__all__ = ["render_harmony"]

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CUTOFF = "2024-06"
_CHANNELS = (
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
_CALLS = "Calls to these tools must go to the commentary channel: 'functions'."
_EFFORTS = ("low", "medium", "high")
_MAX_DEPTH = 12

Message = Mapping[str, Any]


def render_harmony(
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    current_date: str,
    reasoning_effort: str = "medium",
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt text of a conversation.

    messages: as clients of chat completions send them, contents as texts. current_date: as
    YYYY-MM-DD. Analysis of earlier turns is left out, unless their calls lead to the present one.
    RequestError for an effort or a role that there is none of, and for a result without its call.
    """
    if reasoning_effort not in _EFFORTS:
        raise RequestError(
            f"reasoning_effort is {reasoning_effort!r}. This model takes {', '.join(_EFFORTS)}."
        )
    count = next((i for i, m in enumerate(messages) if not _is_instruction(m)), len(messages))
    instructions = "\n\n".join(filter(None, (_text(m) for m in messages[:count])))
    parts = [_system(reasoning_effort, current_date, has_tools=bool(tools))]
    if instructions or tools:
        parts.append(_message("developer", _developer(instructions, tools)))
    parts += _turns(messages[count:])
    return "".join(parts) + ("<|start|>assistant" if add_generation_prompt else "")


def _message(header: str, content: str, end: str = "<|end|>") -> str:
    return f"<|start|>{header}<|message|>{content}{end}"


def _is_instruction(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)


def _system(effort: str, date: str, *, has_tools: bool) -> str:
    lines = [
        _IDENTITY,
        f"Knowledge cutoff: {_CUTOFF}",
        f"Current date: {date}",
        "",
        f"Reasoning: {effort}",
        "",
        _CHANNELS,
        *([_CALLS] if has_tools else []),
    ]
    return _message("system", "\n".join(lines))


def _developer(instructions: str, tools: Sequence[Tool]) -> str:
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        types = "\n\n".join(map(_function, tools))
        namespace = f"namespace functions {{\n\n{types}\n\n}} // namespace functions"
        sections.append(f"# Tools\n\n## functions\n\n{namespace}")
    return "\n\n".join(sections)


def _turns(messages: Sequence[Message]) -> list[str]:
    """Render all messages behind the instructions."""
    names: dict[str, str] = {}
    finals = [i for i, m in enumerate(messages) if _is_final(m)]
    last_final = max(finals, default=-1)
    parts: list[str] = []
    for i, message in enumerate(messages):
        match message.get("role"):
            case "user":
                parts.append(_message("user", _text(message)))
            case "system" | "developer":
                parts.append(_message("developer", f"# Instructions\n\n{_text(message)}"))
            case "assistant":
                parts += _assistant(message, names, with_analysis=i > last_final)
            case "tool":
                parts.append(_result(message, names, i))
            case role:
                raise RequestError(
                    f"a message has the role {str(role)[:40]!r}. This model knows system, "
                    "developer, user, assistant and tool."
                )
    return parts


def _is_final(message: Message) -> bool:
    return message.get("role") == "assistant" and not message.get("tool_calls")


def _assistant(message: Message, names: dict[str, str], *, with_analysis: bool) -> list[str]:
    """Render one turn of the model. names: of the functions by call ids; this call adds to it."""
    parts: list[str] = []
    thought = message.get("reasoning") or message.get("reasoning_content")
    calls = message.get("tool_calls") or ()
    if thought and with_analysis:
        parts.append(_message("assistant<|channel|>analysis", str(thought)))
    content = _text(message)
    if not calls:
        return [*parts, _message("assistant<|channel|>final", content)]
    if content:
        parts.append(_message("assistant<|channel|>commentary", content))
    for call in calls:
        function = call["function"]
        names[str(call.get("id"))] = function["name"]
        arguments = function.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        header = f"assistant<|channel|>commentary to=functions.{function['name']} <|constrain|>json"
        parts.append(_message(header, arguments, "<|call|>"))
    return parts


def _result(message: Message, names: Mapping[str, str], index: int) -> str:
    name = names.get(str(message.get("tool_call_id"))) or message.get("name")
    if not name:
        raise RequestError(
            f"a tool message ({index} behind the instructions) answers no call before it. Send the "
            "id of one as tool_call_id."
        )
    return _message(f"functions.{name} to=assistant<|channel|>commentary", _text(message))


def _function(tool: Tool) -> str:
    """Write one function as a type of TypeScript."""
    lines = _comment(tool.description)
    fields = _fields(tool.root, tool.root, 0)
    given = f"_: {fields}" if tool.properties else ""
    return "\n".join([*lines, f"type {tool.name} = ({given}) => any;"])


def _comment(text: object) -> list[str]:
    return [f"// {line}" for line in text.splitlines()] if isinstance(text, str) else []


def _fields(schema: Schema, root: Schema, depth: int) -> str:
    """Write the type of an object, one line for each property behind its comment."""
    lines: list[str] = []
    required = listed(schema, "required")
    for name, each in node(schema.get("properties")).items():
        its = node(each)
        lines += _comment(its.get("description"))
        default = f" // default: {_plain(its['default'])}" if "default" in its else ""
        mark = "" if name in required else "?"
        lines.append(f"{name}{mark}: {_type(its, root, depth + 1)},{default}")
    return "\n".join(["{", *lines, "}"])


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type(schema: Schema, root: Schema, depth: int) -> str:
    """Write the type of a value."""
    target = resolved(schema.get("$ref"), root)
    if depth > _MAX_DEPTH:
        return "any"
    if target is not None:
        return _type(node(target), root, depth + 1)
    values = [schema["const"]] if "const" in schema else listed(schema, "enum")
    if values:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    options = listed(schema, "anyOf") or listed(schema, "oneOf")
    if options:
        return " | ".join(dict.fromkeys(_type(node(each), root, depth + 1) for each in options))
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [
            _type({**schema, "type": each}, root, depth + 1) for each in listed(schema, "type")
        ]
        return " | ".join(kinds)
    match kind:
        case "string" | "number" | "boolean" | "null":
            return str(kind)
        case "integer":
            return "number"
        case "array":
            item = _type(node(schema.get("items")), root, depth + 1)
            return f"({item})[]" if " | " in item else f"{item}[]"
        case "object":
            return _fields(schema, root, depth) if schema.get("properties") else "object"
        case _:
            return "any"
