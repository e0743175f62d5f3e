"""Renders conversations for gpt-oss, after the published description of the Harmony format, in
place of its chat template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.protocol.json_schema.types import Schema, listed, node, resolved
from quire.text.dialect.spec import ArgumentStyle, Dialect
from quire.text.dialect.tools import Tool, tool_of
from quire.text.rendering import ChatTemplate, check_messages
from quire.text.rendering.messages import ArgumentsForm, ContentForm, fit_messages, plain_messages

__all__ = ["HarmonyTemplate", "own_template", "render_harmony"]

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CUTOFF = "2024-06"
_CHANNELS = (
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
_CALLS = "Calls to these tools must go to the commentary channel: 'functions'."
_EFFORTS = ("low", "medium", "high")
_MAX_DEPTH = 12

_ARGUMENTS: ArgumentsForm = "string"
_EFFORT = "reasoning_effort"
_SWITCHES = frozenset(("enable_thinking", "thinking"))
"""Variables of other families, which have no effect on this one."""
_LIKE = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts of other models. This one always thinks."""

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

    messages: chat messages in the form of the OpenAI API, with texts as contents. current_date:
    YYYY-MM-DD. Analysis of earlier turns is left out, unless their calls lead to the present one.
    Raises RequestError for an unknown effort or role, and for a result without its call.
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
        types = "\n\n".join(map(_Types().function, tools))
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
    """Render one turn of the model. names: names of the functions by call ids; this function adds
    to it."""
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
        function = call.get("function") or call
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


class _Types:
    """Writes functions as types of TypeScript, which have no references: the target of a reference
    is written out in its place, so a small schema may mean an endless text. A schema that refers to
    itself is `any` within itself, and so is every reference once `MAX_COST` is spent."""

    MAX_COST = 100_000
    """For the references of all tools: characters, and `PART_COST` for each part."""
    PART_COST = 16
    """Characters that take about as long as a part without any."""

    def __init__(self) -> None:
        self._root: Schema = {}
        self._open = set[int]()  # identities of the targets that are being written
        self._cost = 0
        self._num_nested = 0  # characters of the parts of the type that is being written

    def function(self, tool: Tool) -> str:
        """Write one function."""
        self._root = tool.root
        lines = _comment(tool.description)
        given = f"_: {self._fields(tool.root, 0)}" if tool.properties else ""
        return "\n".join([*lines, f"type {tool.name} = ({given}) => any;"])

    def _fields(self, schema: Schema, depth: int) -> str:
        """Write the type of an object, one line for each property behind its comment."""
        lines: list[str] = []
        required = listed(schema, "required")
        for name, each in node(schema.get("properties")).items():
            its = node(each)
            lines += _comment(its.get("description"))
            default = f" // default: {_plain(its['default'])}" if "default" in its else ""
            mark = "" if name in required else "?"
            lines.append(f"{name}{mark}: {self._type(its, depth + 1)},{default}")
        return "\n".join(["{", *lines, "}"])

    def _type(self, schema: Schema, depth: int) -> str:
        """Write the type of a value."""
        before, self._num_nested = self._num_nested, 0
        text = "any" if depth > _MAX_DEPTH else self._written(schema, depth)
        if self._open:
            self._cost += self.PART_COST + max(len(text) - self._num_nested, 0)
        self._num_nested = before + len(text)
        return text

    def _written(self, schema: Schema, depth: int) -> str:
        target = resolved(schema.get("$ref"), self._root)
        if target is not None:
            return self._target(target, depth)
        values = [schema["const"]] if "const" in schema else listed(schema, "enum")
        if values:
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        options = listed(schema, "anyOf") or listed(schema, "oneOf")
        kind = schema.get("type")
        if not options and isinstance(kind, list):
            names = dict.fromkeys(each for each in listed(schema, "type") if isinstance(each, str))
            options = [{**schema, "type": each} for each in names]
        if options:
            return " | ".join(dict.fromkeys(self._type(node(each), depth + 1) for each in options))
        name = kind if isinstance(kind, str) else ""
        match name:
            case "string" | "number" | "boolean" | "null":
                return name
            case "integer":
                return "number"
            case "array":
                item = self._type(node(schema.get("items")), depth + 1)
                return f"({item})[]" if " | " in item else f"{item}[]"
            case "object":
                return self._fields(schema, depth) if schema.get("properties") else "object"
            case _:
                return "any"

    def _target(self, target: object, depth: int) -> str:
        """Write what a reference leads to."""
        if id(target) in self._open or self._cost > self.MAX_COST:
            return "any"
        self._open.add(id(target))
        text = self._type(node(target), depth + 1)
        self._open.remove(id(target))
        return text


def _comment(text: object) -> list[str]:
    return [f"// {line}" for line in text.splitlines()] if isinstance(text, str) else []


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def own_template(
    dialect: Dialect | None,
    template: ChatTemplate | None,
    today: Callable[[], datetime.date] = datetime.date.today,
) -> ChatTemplate | HarmonyTemplate | None:
    """Return the renderer of a model's conversations: its template, or ours in its place. A
    template that the user gave is kept. today: day that ours writes."""
    if template is None or template.is_given:
        return template
    if dialect is None or dialect.style is not ArgumentStyle.CHANNELS:
        return template
    return HarmonyTemplate(template, today)


def _content_form(_role: str, _has_calls: bool) -> ContentForm:
    return "string"


class HarmonyTemplate:
    """Writes the same as the model's template. It uses the template itself for anything outside of
    the published format: documents, a last message to continue, other variables than the effort,
    tools of other kinds."""

    def __init__(
        self, template: ChatTemplate, today: Callable[[], datetime.date] = datetime.date.today
    ) -> None:
        self._template = template
        self._today = today

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises RequestError when a request sets a variable that only the engine may set."""
        self._template.check_kwargs(kwargs)

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation. Arguments and errors as in `ChatTemplate`, and
        RequestError for an effort, a role or a result as in `render_harmony`. An effort that only
        other models know counts as the nearest."""
        found = _own_tools(tools, documents, continue_final_message, kwargs)
        if found is None:
            return self._template.render(
                messages, tools, documents, add_generation_prompt, continue_final_message, **kwargs
            )
        chat = plain_messages(messages)
        check_messages(chat)
        effort = kwargs.get(_EFFORT) or "medium"
        return render_harmony(
            fit_messages(chat, _content_form, _ARGUMENTS),
            found,
            current_date=self._today().isoformat(),
            reasoning_effort=_LIKE.get(effort, effort) if isinstance(effort, str) else effort,
            add_generation_prompt=add_generation_prompt,
        )

    def arguments_form(
        self,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> ArgumentsForm:
        """Return the form of tool-call arguments as `ChatTemplate` does."""
        if _own_tools(tools, documents, continue_final_message, kwargs) is not None:
            return _ARGUMENTS
        return self._template.arguments_form(tools)


def _own_tools(
    tools: Sequence[Any] | None,
    documents: Sequence[Any] | None,
    continue_final_message: bool | str,
    kwargs: Mapping[str, Any],
) -> list[Tool] | None:
    """Return the tools of a conversation within the published format; None for any other."""
    found = [tool_of(given) for given in tools or ()]
    others = kwargs.keys() - _SWITCHES - {_EFFORT}
    if documents or continue_final_message or others or None in found:
        return None
    return [tool for tool in found if tool is not None]
