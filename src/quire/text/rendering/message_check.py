"""The check of chat messages that all ways in share: each place holds a type that it may hold.

What a template makes of a message is another matter (`messages.py`), and so are unknown fields:
templates read fields of their own.
"""

import json
from typing import Any, NoReturn, cast

from quire.base.errors import RequestError

__all__ = [
    "IMAGE_MARK",
    "IMAGE_PART_TYPES",
    "REASONING_FIELDS",
    "ROWS_PART_TYPE",
    "ROLES_WITH_CONTENT",
    "TEXT_ONLY",
    "TEXT_PART_TYPES",
    "check_messages",
]

# Names for a message's reasoning, the standard one first. Templates of gpt-oss read `thinking`.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TEXT_PART_TYPES = ("text", "input_text", "output_text")
ROWS_PART_TYPE = "image_embeds"
IMAGE_PART_TYPES = ("image_url", "input_image", "image", "image_pil", ROWS_PART_TYPE)
# Stands in messages, with its number as "index", where an image was taken out of them.
IMAGE_MARK = "image"
TEXT_ONLY = (
    "The served model takes text only. Send text parts. A GGUF model takes images with its mmproj "
    "file (setting mmproj)."
)
_UNHEARD = {
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
}
# Messages of other roles may do without: an answer that only calls tools, a tool without output,
# and roles whose meaning the template alone knows.
ROLES_WITH_CONTENT = ("user", "system", "developer")
_STRING_FIELDS = ("name", "tool_call_id", "refusal", *REASONING_FIELDS)
_MAX_SHOWN = 80
_MISSING = object()

_MESSAGE = 'Send an object such as {"role": "user", "content": "Hello"}.'
_CONTENT = "Send a string or a list of text parts."
_PART = 'Send a string or an object such as {"type": "text", "text": "Hello"}.'
_STRING = "Send a string."
_STRING_OR_NOTHING = "Send a string, or leave it out."
_FUNCTION = 'Send an object such as {"name": "search", "arguments": "{}"}.'
_ARGUMENTS = "Send an object or its JSON text."


def check_messages(messages: object, *, text_only: bool = False) -> None:
    """RequestError if these JSON values are no conversation; it names the place at fault (such as
    `messages[1].content[0].text`), the value, and what may stand there.

    text_only: refuse parts and fields that hold anything but text, or mark an image that was taken
    out of them.
    """
    if not isinstance(messages, list | tuple):
        _refuse("messages", messages, "Send a list of messages.")
    items = cast("list[object]", messages)
    if not items:
        raise RequestError("messages is empty. Send at least one message.")
    for index, message in enumerate(items):
        _check_message(f"messages[{index}]", message, text_only)


def _check_message(place: str, message: object, text_only: bool) -> None:
    fields = _fields(place, message, _MESSAGE)
    role = fields.get("role", _MISSING)
    if not isinstance(role, str) or not role:
        _refuse(f"{place}.role", role, 'Send a string such as "user".')
    content = fields.get("content", _MISSING)
    _check_content(f"{place}.content", content, role, text_only)
    if role == "tool" and (content is None or content is _MISSING):
        _refuse(f"{place}.content", content, "Send what the tool gave; it may be an empty text.")
    for name in _STRING_FIELDS:
        if name in fields:
            _check_string(f"{place}.{name}", fields[name], _STRING_OR_NOTHING)
    calls = fields.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list | tuple):
            _refuse(f"{place}.tool_calls", calls, "Send a list of tool calls, or leave it out.")
        for index, call in enumerate(cast("list[object]", calls)):
            _check_call(f"{place}.tool_calls[{index}]", call)
    call = fields.get("function_call")
    if call is not None:
        _check_function(f"{place}.function_call", call)
    audio = fields.get("audio")
    if text_only and audio is not None:
        _refuse(f"{place}.audio", audio, "The served model has no encoder for it. Leave it out.")


def _check_content(place: str, content: object, role: str, text_only: bool) -> None:
    if isinstance(content, str):
        return
    parts: list[object] = []
    if isinstance(content, list | tuple):
        parts = cast("list[object]", content)
    elif content is not None and content is not _MISSING:
        _refuse(place, content, _CONTENT)
    if not parts and role in ROLES_WITH_CONTENT:
        _refuse(
            place, cast("object", content), f'A message of role "{role}" needs content. {_CONTENT}'
        )
    for index, part in enumerate(parts):
        if not isinstance(part, str):
            _check_part(f"{place}[{index}]", part, text_only)


def _check_part(place: str, part: object, text_only: bool) -> None:
    fields = _fields(place, part, _PART)
    kind = fields.get("type", "text")
    if not isinstance(kind, str):
        _refuse(f"{place}.type", kind, 'Send "text".')
    if kind in TEXT_PART_TYPES:
        _check_string(f"{place}.text", fields.get("text", _MISSING), _STRING, is_optional=False)
    elif kind == "refusal":
        refusal = fields.get("refusal", _MISSING)
        _check_string(f"{place}.refusal", refusal, _STRING, is_optional=False)
    elif text_only and kind in _UNHEARD:
        missing = f"The served model has no encoder for {_UNHEARD[kind]}. Send text parts."
        _refuse(f"{place}.type", kind, missing)
    elif text_only and not (kind == IMAGE_MARK and fields.keys() == {"type", "index"}):
        _refuse(f"{place}.type", kind, TEXT_ONLY)


def _check_call(place: str, call: object) -> None:
    """A call as the OpenAI API writes it, or the bare function, as templates take it too."""
    fields = _fields(place, call, f'Send an object with a "function". {_FUNCTION}')
    for name in ("id", "type"):
        _check_string(f"{place}.{name}", fields.get(name), _STRING_OR_NOTHING)
    if fields.get("function") is None and "name" in fields:
        _check_function(place, fields)
    else:
        _check_function(f"{place}.function", fields.get("function", _MISSING))


def _check_function(place: str, function: object) -> None:
    fields = _fields(place, function, _FUNCTION)
    _check_string(f"{place}.name", fields.get("name", _MISSING), _STRING, is_optional=False)
    arguments = fields.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        _refuse(f"{place}.arguments", cast("object", arguments), _ARGUMENTS)


def _check_string(place: str, value: object, advice: str, *, is_optional: bool = True) -> None:
    if not isinstance(value, str) and not (is_optional and value is None):
        _refuse(place, value, advice)


def _fields(place: str, value: object, advice: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(place, value, advice)
    return cast("dict[str, Any]", value)


def _refuse(place: str, value: object, advice: str) -> NoReturn:
    raise RequestError(f"{place} is {_shown(value)}. {advice}")


def _shown(value: object) -> str:
    """Show a value as JSON; of a long value only the beginning is written at all."""
    if value is _MISSING:
        return "missing"
    if isinstance(value, str):
        value = value[:_MAX_SHOWN]
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += piece
        if len(text) > _MAX_SHOWN:
            return text[: _MAX_SHOWN - 1] + "…"
    return text
