"""Prepares conversations for a model: tools in words, and ids of calls in its own form."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from quire.base.errors import RequestError
from quire.text.dialect.spec import Dialect, IdStyle
from quire.text.rendering.messages import joined_contents

__all__ = ["described", "in_call_order", "prepared", "with_call_ids"]

Message = dict[str, Any]

SHORT_LENGTH = 9
"""Letters and digits of an id of `IdStyle.SHORT`."""


def prepared(messages: Sequence[Message], dialect: Dialect) -> list[Message]:
    """Return a conversation as the model's prompts have it: ids of calls in its own form, results
    in the order of their calls, and both as texts if the template has no place for them. A request
    without tools has the same."""
    if not dialect.describes_tools:
        return in_call_order(with_call_ids(messages, dialect.ids))
    # The texts show no ids of calls. Ids that tell all calls apart serve best.
    return _as_texts(in_call_order(with_call_ids(messages, IdStyle.COUNTED)))


def described(messages: Sequence[Message], text: str, *, in_system: bool = True) -> list[Message]:
    """Return `messages` with `text`, which describes tools. in_system: put it into the system
    message, otherwise into the user's first one, since some templates have no system message."""
    found = list(messages)
    roles = ("system", "developer") if in_system else ("user",)
    for index, message in enumerate(found):
        if message.get("role") in roles and (index == 0 or not in_system):
            both = (message.get("content"), text) if in_system else (text, message.get("content"))
            found[index] = {**message, "content": joined_contents(*both)}
            return found
    return [{"role": roles[0], "content": text}, *found]


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` with the results of a turn's calls in the order of these: many templates
    show no ids, and clients send results as they come."""
    found: list[Message] = []
    results: list[tuple[int, Message]] = []  # of one turn, and the places of their calls
    places: dict[object, int] = {}
    for message in messages:
        if message.get("role") == "tool" and message.get("tool_call_id") in places:
            results.append((places[message["tool_call_id"]], message))
            continue
        found += _sorted(results)
        results.clear()
        found.append(message)
        ids = [call.get("id") for call in _calls_of(message)]
        places = {each: place for place, each in enumerate(ids) if each is not None}
    return found + _sorted(results)


def _sorted(results: Sequence[tuple[int, Message]]) -> list[Message]:
    return [message for _, message in sorted(results, key=lambda each: each[0])]


def with_call_ids(messages: Sequence[Message], style: IdStyle) -> list[Message]:
    """Return `messages` with ids of calls in the form of the family's template, whoever made them.
    Results still name their calls. One without an id gets that of the next call of its name or, if
    it has none, of the call at its place, if this had no id either."""
    if style is IdStyle.RANDOM:
        return list(messages)
    found: list[Message] = []
    new_ids: dict[object, str] = {}
    unanswered: dict[object, Iterator[str]] = {}  # calls of a turn that had no id
    num_calls = 0
    for message in messages:
        calls: object = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            written: list[Message] = []
            without = defaultdict[object, list[str]](list)
            for call in cast("list[Message]", calls):
                new_id = _call_id(call, num_calls, style)
                if call.get("id"):
                    new_ids[call["id"]] = new_id
                else:
                    without[None].append(new_id)
                    without[(call.get("function") or call).get("name")].append(new_id)
                written.append({**call, "id": new_id})
                num_calls += 1
            message = {**message, "tool_calls": written}
            unanswered = {name: iter(ids) for name, ids in without.items()}
        elif message.get("role") == "tool" and not message.get("tool_call_id"):
            new_id = _answered(unanswered, message.get("name") or None)
            message = message if new_id is None else {**message, "tool_call_id": new_id}
        elif message.get("tool_call_id") in new_ids:
            message = {**message, "tool_call_id": new_ids[message["tool_call_id"]]}
        found.append(message)
    return found


def _answered(ids: Mapping[object, Iterator[str]], name: object) -> str | None:
    """Take the id of the call that a result without one answers. ids: ids by name; None has all."""
    at_place = next(ids.get(None, iter(())), None)
    return at_place if name is None else next(ids.get(name, iter(())), None)


def _call_id(call: Mapping[str, Any], number: int, style: IdStyle) -> str:
    given: object = call.get("id")
    if style is IdStyle.COUNTED:
        return f"functions.{(call.get('function') or call).get('name')}:{number}"
    if isinstance(given, str) and len(given) == SHORT_LENGTH and given.isalnum():
        return given
    text = str(given) if given else f"{number}"
    return hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()[:SHORT_LENGTH]


def _calls_of(message: Message) -> list[Message]:
    """The calls of a message, also one of the older API."""
    calls: object = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return cast("list[Message]", calls)
    call: object = message.get("function_call")
    return [{"function": call}] if isinstance(call, dict) else []


def _as_texts(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as texts. A result has the name of its tool and, beside others of it, the
    number of its call."""
    found: list[Message] = []
    titles: dict[object, str] = {}
    for message in messages:
        if message.get("role") in ("tool", "function"):
            given: object = message.get("tool_call_id")
            title = titles.get(given) if given else None
            title = title or message.get("name") or given or titles.get(None) or "the tool"
            content = joined_contents(f"({title}):", message.get("content"))
            found.append({"role": "user", "content": content})
            continue
        calls = _calls_of(message)
        if not calls:
            found.append(message)
            continue
        written = [_call(call) for call in calls]
        names = [call["name"] for call in written]
        totals = Counter(names)
        numbers = Counter[str]()
        titles.pop(None, None)  # the call of the older API, which has no id
        for call, name in zip(calls, names, strict=True):
            numbers[name] += 1
            number = f", call {numbers[name]}" if totals[name] > 1 else ""
            titles[call.get("id")] = f"{name}{number}"
        try:
            text = json.dumps({"tool_calls": written}, ensure_ascii=False)
        except RecursionError as error:
            raise RequestError(
                "The arguments of a tool call are nested too deep. Send what is nested less."
            ) from error
        kept = {k: v for k, v in message.items() if k not in ("tool_calls", "function_call")}
        found.append({**kept, "content": joined_contents(message.get("content"), text)})
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments: object = function.get("arguments") or {}
    if isinstance(arguments, str):
        # A text that was cut short, or that Python can't read, stays one.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}
