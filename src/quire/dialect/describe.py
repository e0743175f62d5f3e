"""Tools in the words of a conversation, for models whose template has no place for them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

__all__ = ["described"]

Message = dict[str, Any]


def described(messages: Sequence[Message], text: str, *, in_system: bool = True) -> list[Message]:
    """Return copies of `messages` that hold `text`, which describes tools, and in which calls and
    their results are texts. in_system: put it into the system message, else into the first one of
    the user, since some templates take no system message."""
    found = [_as_text(message) for message in messages]
    roles = ("system", "developer") if in_system else ("user",)
    for index, message in enumerate(found):
        if message.get("role") in roles and (index == 0 or not in_system):
            found[index] = {**message, "content": _joined(message.get("content"), text, in_system)}
            return found
    return [{"role": roles[0], "content": text}, *found]


def _joined(content: object, text: str, is_last: bool) -> object:
    """Content with a text behind it, or before it."""
    if isinstance(content, list):
        parts = cast("list[object]", content)
        part = {"type": "text", "text": text}
        return [*parts, part] if is_last else [part, *parts]
    given = content if isinstance(content, str) else ""
    return "\n\n".join(filter(None, (given, text) if is_last else (text, given)))


def _as_text(message: Message) -> Message:
    calls: object = message.get("tool_calls")
    if message.get("role") == "tool":
        name: object = message.get("name") or message.get("tool_call_id") or "the tool"
        return {"role": "user", "content": _joined(message.get("content"), f"({name}):", False)}
    if not isinstance(calls, list) or not calls:
        return message
    written = [_call(cast("Mapping[str, Any]", call)) for call in cast("list[object]", calls)]
    text = json.dumps({"tool_calls": written}, ensure_ascii=False)
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": _joined(message.get("content"), text, True)}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments: object = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # those of an answer that was cut stay a text
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}
