"""Chat messages, brought to the plain form that chat templates expect."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from quire.base.errors import RequestError, quoted
from quire.text.rendering.message_check import (
    REASONING_FIELDS,
    ROLES_WITH_CONTENT,
    TEXT_PART_TYPES,
    check_messages,
)

Message = dict[str, Any]

# A string, whose end may be missing, or a sign outside of strings.
_JSON_SIGNS = re.compile(r'"(?:[^"\\]++|\\.)*+("?)|[{}\[\],]', re.DOTALL)
ContentForm = Literal["string", "parts", "either", "part"]
"""Forms of `content` that a branch of a template accepts: text, a list of typed parts, both, or a
list of which it shows one text part alone."""
ArgumentsForm = Literal["object", "string", "either"]
"""Forms of `arguments` of a tool call that a template accepts: an object, its JSON text, or
both."""


def plain_data(value: Any) -> Any:
    """A copy of `value` made of JSON types only, so that a template can call nothing on it.

    Objects with `model_dump` (pydantic) and dataclasses become dicts, tuples lists; anything else,
    such as an image, becomes a text that names its type: templates only ask whether it is there.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return _base_value(kind, value)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {_plain_key(key): plain_data(item) for key, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in cast("Sequence[Any]", value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: plain_data(getattr(value, item.name)) for item in dataclasses.fields(value)
        }
    dump = getattr(value, "model_dump", None)
    return plain_data(dump()) if callable(dump) else f"<{type(value).__name__}>"


def _plain_key(key: object) -> str | int | float | None:
    value = plain_data(key)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def checked_messages(messages: object, *, text_only: bool = False) -> list[Message]:
    """Copies of `messages` as plain data. RequestError as `check_messages` raises it."""
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        messages = list(cast("Sequence[Any]", messages))
    data = plain_data(messages)
    check_messages(data, text_only=text_only)
    return cast("list[Message]", data)


def plain_messages(messages: Sequence[Any]) -> list[Message]:
    """Return `messages` copied as plain data, reasoning under all of its names. None values stay.

    Any role and content passes here; `check_messages` bounds what clients may send. Raises
    RequestError when there are none or one is no object with a role.
    """
    if isinstance(messages, str | Mapping) or not messages:
        check_messages(plain_data(messages))
    found: list[Message] = []
    for index, value in enumerate(messages):
        data = plain_data(value)
        if not isinstance(data, dict) or not isinstance(cast("Message", data).get("role"), str):
            raise RequestError(
                f"messages[{index}] is {quoted(value)}. "
                'Each message must be an object with a string "role".'
            )
        found.append(_with_reasoning_names(cast("Message", data)))
    return found


def fit_messages(
    messages: list[Message],
    content_form: Callable[[str, bool], ContentForm],
    arguments: ArgumentsForm,
) -> list[Message]:
    """`messages` with contents and tool-call arguments in the form that the template accepts.

    `content_form` gives that of a role, in messages with or without tool calls.
    """
    return [
        _fit_message(message, index, content_form(message["role"], bool(message.get("tool_calls"))))
        for index, message in enumerate(fit_arguments(messages, arguments))
    ]


def fit_arguments(messages: list[Message], form: ArgumentsForm) -> list[Message]:
    """`messages` with tool-call arguments in the form that the template accepts."""
    return [
        {
            **message,
            "tool_calls": [
                _fit_call(call, form) for call in cast("list[Any]", message["tool_calls"])
            ],
        }
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def without_optional_nulls(messages: list[Message]) -> list[Message] | None:
    """`messages` without the None values of fields other than `content`; None if there are none.

    Clients write out fields that they do not use (`tool_calls: null`), and many templates take a
    field that is there for one that has a value.
    """
    if all(value is not None or key == "content" for m in messages for key, value in m.items()):
        return None
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in messages
    ]


def without_null_contents(messages: list[Message]) -> list[Message] | None:
    """`messages` with an empty text for each content that is null or missing and may be so; None if
    there is none."""
    filled = [
        message
        if message.get("content") is not None or message["role"] in ROLES_WITH_CONTENT
        else {**message, "content": ""}
        for message in messages
    ]
    return None if filled == messages else filled


def joined_contents(first: object, second: object) -> object:
    """Both contents as one: a text if both are, or else a list of parts. None is no text."""
    contents = [content for content in (first, second) if content is not None and content != ""]
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(cast("list[str]", contents))
    return [part for content in contents for part in _parts_of(content)]


def _parts_of(content: object) -> list[Any]:
    if isinstance(content, list):
        return cast("list[Any]", content)
    return [{"type": "text", "text": content} if isinstance(content, str) else content]


def _fit_message(message: Message, index: int, content_form: ContentForm) -> Message:
    fitted = dict(message)
    content = message.get("content")
    if isinstance(content, str) and content and content_form in ("parts", "part"):
        fitted["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        parts = [_normal_part(part) for part in cast("list[Any]", content)]
        if content_form == "string":
            fitted["content"] = _joined_text(parts, index)
        elif content_form == "part" and len(parts) > 1:
            fitted["content"] = [{"type": "text", "text": _joined_text(parts, index)}]
        else:
            fitted["content"] = parts
    return fitted


def _normal_part(part: Any) -> Any:
    """Strings and the text parts of other APIs as {"type": "text", "text": ...}."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    if fields and fields.get("type", "text") in TEXT_PART_TYPES:
        return {**fields, "type": "text"}
    if fields.get("type") == "refusal" and isinstance(fields.get("refusal"), str):
        return {"type": "text", "text": fields["refusal"]}
    return cast("Any", part)


def _joined_text(parts: list[Any], index: int) -> str:
    texts: list[str] = []
    for part in parts:
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        if fields.get("type") != "text":
            raise RequestError(
                f"messages[{index}].content has a part of type {quoted(fields.get('type', part))}, "
                "but the chat template of this model takes text only. Send text parts."
            )
        if not isinstance(fields.get("text"), str):
            raise RequestError(
                f"messages[{index}].content has the part {quoted(fields)}. "
                'A part of type "text" must have a string "text".'
            )
        texts.append(fields["text"])
    return "\n".join(texts)


def _fit_call(call: Any, form: ArgumentsForm) -> Any:
    """OpenAI clients send arguments as JSON text; most templates want the object."""
    if not isinstance(call, dict):
        return call
    fields = cast("dict[str, Any]", call)
    function = fields.get("function")
    if isinstance(function, dict):
        return {**fields, "function": _fit_call(function, form)}
    arguments = fields.get("arguments")
    if isinstance(arguments, str) and form == "object":
        return {**fields, "arguments": _object_of(arguments)}
    if isinstance(arguments, str) and not arguments.strip() and form != "string":
        return {**fields, "arguments": {}}
    if isinstance(arguments, dict) and form == "string":
        return {**fields, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return fields


def _object_of(text: str) -> dict[str, Any]:
    """The object that `text` spells, or what came of it where an answer was cut; an empty text is
    an empty object. Any other text is the value of one argument, so that nothing is lost."""
    if text.strip() in ("", "null"):
        return {}
    for whole in (text, *_endings(text)):
        try:
            value = json.loads(whole)
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return cast("dict[str, Any]", value)
    return {"arguments": text}


def _endings(text: str) -> Iterator[str]:
    """Yield a JSON text that was cut off, ended: within the value that was cut, or else before the
    member that was. Nothing for a text that was not cut."""
    closing, last = _closing(text)
    if closing:
        yield text + closing
        if last:
            yield text[:last] + _closing(text[:last])[0]


def _closing(text: str) -> tuple[str, int]:
    """Return the signs that a JSON text lacks at its end, and where its last whole member ends."""
    opened: list[str] = []
    quote, last = "", 0
    for sign in _JSON_SIGNS.finditer(text):
        if sign[0][0] == '"':
            quote = "" if sign[1] else '"'
        elif sign[0] in "{[":
            opened.append("}" if sign[0] == "{" else "]")
            last = sign.end()
        elif sign[0] == ",":
            last = sign.start()
        elif opened:
            opened.pop()
    return quote + "".join(reversed(opened)), last


def _with_reasoning_names(message: Message) -> Message:
    given = (message.get(name) for name in REASONING_FIELDS)
    reasoning = next((value for value in given if value is not None), None)
    if reasoning is None:
        return message
    named = {name: reasoning for name in REASONING_FIELDS if message.get(name) is None}
    return {**message, **named, "reasoning_content": reasoning}


def _base_value(kind: type, value: Any) -> Any:
    """`value` of a subclass (an enum, say) as a plain str, int or float."""
    if kind is str:
        return str.__str__(value)
    return int.__int__(value) if kind is int else float.__float__(value)
