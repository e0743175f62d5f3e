"""Converts turns of content blocks to messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec

from quire.server.anthropic.volatile import without_volatile
from quire.server.generation.sealed import unseal
from quire.server.requests.places import Fields, fields_of, refused, string_of
from quire.text.rendering.media.parts import image_part
from quire.text.rendering.media.sources import ImageSource, StoredFile

__all__ = ["chat_messages"]

_BLOCKS = 'Send a string or a list of blocks such as {"type": "text", "text": "Hello"}.'
_TEXT_ONLY = "The served model takes text only. Send text blocks."
_LEFT_OUT = "[{} left out: this model reads text only]"
_BELOW = "[image {} of this result follows]"
_HOSTED = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")
"""Blocks of tools that another service ran, beside those that end in `_tool_result`."""


def chat_messages(
    system: str | list[Fields] | None, turns: object, *, takes_images: bool = False
) -> tuple[list[Fields], list[str]]:
    """Return a conversation as messages, and the lines removed from its system prompt.
    takes_images: whether the model does. RefusedError names the bad turn or block."""
    texts = [system] if isinstance(system, str) else _texts(system or [], "system")
    kept, removed = without_volatile(texts)
    messages: list[Fields] = []
    if kept:
        messages.append({"role": "system", "content": "\n\n".join(kept)})
    if not isinstance(turns, list) or not turns:
        raise refused("messages", cast("object", turns), "Send a list of at least one message.")
    for index, turn in enumerate(cast("list[object]", turns)):
        place = f"messages[{index}]"
        given = fields_of(turn, place)
        role = given.get("role")
        blocks = _blocks(given.get("content"), f"{place}.content")
        if role == "assistant":
            _join(messages, _assistant(blocks, place))
        elif role == "user":
            for message in _user(blocks, place, takes_images=takes_images):
                _join(messages, message)
        elif role == "system":
            _join(messages, {"role": "system", "content": "\n\n".join(_texts(blocks, place))})
        else:
            raise refused(f"{place}.role", role, 'Send "user", "assistant" or "system".')
    return messages, removed


def _join(messages: list[Fields], message: Fields) -> None:
    """Append a message, or join it to the previous one of the same side, since templates expect
    turns to alternate."""
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"] or message["role"] in ("tool", "assistant"):
        messages.append(message)
        return
    if message["role"] == "system":
        last["content"] = "\n\n".join((last["content"], message["content"]))
        return
    last["content"] = [*last["content"], *message["content"]]


def _blocks(content: object, place: str) -> list[Fields]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise refused(place, content, _BLOCKS)
    blocks = enumerate(cast("list[object]", content))
    return [fields_of(block, f"{place}[{index}]") for index, block in blocks]


def _texts(blocks: Iterable[object], place: str) -> list[str]:
    texts: list[str] = []
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        given = fields_of(block, at)
        if given.get("type") != "text":
            raise refused(f"{at}.type", given.get("type"), 'Send "text".')
        texts.append(string_of(given, "text", at))
    return texts


def _user(blocks: list[Fields], place: str, *, takes_images: bool) -> Iterable[Fields]:
    """Yield results of tools, each as its own message, then what the user says. Images of results
    come there: most templates show texts alone as results."""
    said: list[Fields] = []
    for index, block in enumerate(blocks):
        at = f"{place}.content[{index}]"
        if block.get("type") == "tool_result":
            images: list[Fields] = []
            yield {
                "role": "tool",
                "tool_call_id": string_of(block, "tool_use_id", at),
                "content": _result(block, at, images if takes_images else None),
            }
            said += images
            continue
        if block.get("type") == "image" and takes_images:
            said.append(_image(block, at))
            continue
        said.append({"type": "text", "text": _read(block, at)})
    if said or not blocks:
        yield {"role": "user", "content": said or [{"type": "text", "text": ""}]}


def _image(block: Fields, place: str) -> Fields:
    """Return the part of an image, by its bytes, its URL or an uploaded file."""
    source, at = fields_of(block.get("source"), f"{place}.source"), f"{place}.source"
    kind = source.get("type")
    value: str | StoredFile
    if kind == "base64":
        data = string_of(source, "data", at)
        value, at = f"data:{source.get('media_type') or ''};base64,{data}", f"{at}.data"
    elif kind == "url":
        value, at = string_of(source, "url", at), f"{at}.url"
    elif kind == "file":
        value, at = StoredFile(string_of(source, "file_id", at)), f"{at}.file_id"
    else:
        raise refused(f"{at}.type", kind, 'Send "base64", "url" or "file".')
    return image_part(ImageSource(at, value))


def _read(block: Fields, place: str) -> str:
    """Return the text of a user's block."""
    kind = block.get("type")
    if kind == "text":
        return string_of(block, "text", place)
    if kind == "search_result":
        head = f"{block.get('title', '')}\n{block.get('source', '')}\n"
        return head + "\n".join(_texts(_blocks(block.get("content"), place), place))
    if kind == "document":
        return _document(block, place)
    raise refused(f"{place}.type", kind, _TEXT_ONLY)


def _document(block: Fields, place: str) -> str:
    source = fields_of(block.get("source"), f"{place}.source")
    title = block.get("title")
    head = f"{title}\n" if isinstance(title, str) and title else ""
    if source.get("type") == "text":
        return head + string_of(source, "data", f"{place}.source")
    if source.get("type") == "content":
        return head + "\n".join(_texts(_blocks(source.get("content"), place), place))
    raise refused(f"{place}.source.type", source.get("type"), _TEXT_ONLY)


def _result(block: Fields, place: str, images: list[Fields] | None) -> str:
    """Return a tool's output as text. images: gets its images, which the text names by number; None
    if the model takes none. A note replaces what the model does not read: a tool cannot know it,
    and the conversation must go on."""
    content = block.get("content")
    texts: list[str] = []
    for index, part in enumerate(_blocks("" if content is None else content, f"{place}.content")):
        kind = part.get("type")
        if kind in ("text", "search_result"):
            texts.append(_read(part, f"{place}.content[{index}]"))
        elif kind == "image" and images is not None:
            images.append(_image(part, f"{place}.content[{index}]"))
            texts.append(_BELOW.format(len(images)))
        elif kind == "tool_reference":
            texts.append(str(part.get("tool_name", "")))
        else:
            texts.append(_LEFT_OUT.format(str(kind)[:40]))
    text = "\n".join(texts)
    return f"Error: {text}" if block.get("is_error") is True else text


def _assistant(blocks: list[Fields], place: str) -> Fields:
    message: Fields = {"role": "assistant", "content": ""}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Fields] = []
    for index, block in enumerate(blocks):
        at, kind = f"{place}.content[{index}]", str(block.get("type"))
        if kind == "text":
            texts.append(string_of(block, "text", at))
        elif kind == "thinking":
            thoughts.append(_thinking(block, at))
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif not (kind in _HOSTED or kind == "redacted_thinking" or kind.endswith("_tool_result")):
            raise refused(f"{at}.type", kind, 'Send "text", "thinking" or "tool_use".')
    message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message


def _thinking(block: Fields, place: str) -> str:
    """Return the thinking of an earlier answer: its text, or that sealed in its signature."""
    text, signature = block.get("thinking"), block.get("signature")
    if not isinstance(text, str | None):
        raise refused(f"{place}.thinking", text, "Send it back as it came.")
    if text or not isinstance(signature, str):
        return text or ""
    return unseal(signature) or ""


def _call(block: Fields, place: str) -> Fields:
    given = fields_of(block.get("input", {}), f"{place}.input")
    function = {
        "name": string_of(block, "name", place),
        "arguments": msgspec.json.encode(given).decode("utf-8", "replace"),
    }
    return {"id": string_of(block, "id", place), "type": "function", "function": function}
