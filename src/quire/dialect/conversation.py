"""Prepares conversations for a model: tools in words, and ids of calls in its own form."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from quire.dialect.spec import IdStyle
from quire.rendering.messages import joined_contents

__all__ = ["described", "with_call_ids"]

Message = dict[str, Any]

SHORT_LENGTH = 9
"""Letters and digits of an id of `IdStyle.SHORT`."""


def described(messages: Sequence[Message], text: str, *, in_system: bool = True) -> list[Message]:
    """Return copies of `messages` with `text`, which describes tools, and with calls and their
    results as texts. in_system: put it into the system message, otherwise into the user's first
    one, since some templates have no system message."""
    found = [_as_text(message) for message in messages]
    roles = ("system", "developer") if in_system else ("user",)
    for index, message in enumerate(found):
        if message.get("role") in roles and (index == 0 or not in_system):
            both = (message.get("content"), text) if in_system else (text, message.get("content"))
            found[index] = {**message, "content": joined_contents(*both)}
            return found
    return [{"role": roles[0], "content": text}, *found]


def with_call_ids(messages: Sequence[Message], style: IdStyle) -> list[Message]:
    """Return `messages` with ids of calls in the form of the family's template, whoever made them.
    Results still name their calls."""
    if style is IdStyle.RANDOM:
        return list(messages)
    found: list[Message] = []
    new_ids: dict[object, str] = {}
    num_calls = 0
    for message in messages:
        calls: object = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            written: list[Message] = []
            for call in cast("list[Message]", calls):
                new_id = _call_id(call, num_calls, style)
                new_ids[call.get("id")] = new_id
                written.append({**call, "id": new_id})
                num_calls += 1
            message = {**message, "tool_calls": written}
        elif message.get("tool_call_id") in new_ids:
            message = {**message, "tool_call_id": new_ids[message["tool_call_id"]]}
        found.append(message)
    return found


def _call_id(call: Mapping[str, Any], number: int, style: IdStyle) -> str:
    given: object = call.get("id")
    if style is IdStyle.COUNTED:
        return f"functions.{(call.get('function') or call).get('name')}:{number}"
    if isinstance(given, str) and len(given) == SHORT_LENGTH and given.isalnum():
        return given
    text = f"{number}" if given is None else str(given)
    return hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()[:SHORT_LENGTH]


def _as_text(message: Message) -> Message:
    calls: object = message.get("tool_calls")
    if message.get("role") == "tool":
        name: object = message.get("name") or message.get("tool_call_id") or "the tool"
        return {"role": "user", "content": joined_contents(f"({name}):", message.get("content"))}
    if not isinstance(calls, list) or not calls:
        return message
    written = [_call(cast("Mapping[str, Any]", call)) for call in cast("list[object]", calls)]
    text = json.dumps({"tool_calls": written}, ensure_ascii=False)
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": joined_contents(message.get("content"), text)}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments: object = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # those of an answer that was cut short stay a text
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}
