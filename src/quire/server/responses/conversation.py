"""Converts items of a conversation to messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from quire.server.generation.sealed import unseal
from quire.server.requests.places import Fields, fields_of, refused, string_of
from quire.server.responses.tools import GivenTools
from quire.text.rendering.media.parts import image_part, image_source
from quire.text.rendering.message_check import TEXT_ONLY

__all__ = ["CONFIGURATION_UPDATE", "SUMMARY_QUESTION", "chat_messages", "input_items"]

_ROLES = ("user", "assistant", "system", "developer")
_HOSTED = (
    "web_search_call", "file_search_call", "computer_call", "computer_call_output",
    "image_generation_call", "code_interpreter_call", "local_shell_call",
    "local_shell_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "tool_search_call", "tool_search_output", "additional_tools", "shell_call",
    "shell_call_output", "apply_patch_call", "apply_patch_call_output", "program",
    "program_output",
)  # fmt: skip
"""Items of tools that another service ran. They have no text for a model."""
CONFIGURATION_UPDATE = "configuration_update"
_NOT_SAID = (*_HOSTED, "compaction_trigger", CONFIGURATION_UPDATE)
"""Items that are no part of a prompt."""
SUMMARY_QUESTION = (
    "Summarize our conversation so far, so that you can go on with it from the summary alone: what "
    "I asked for, what was decided and found out, and what is still to be done."
)
"""The question that an item of compaction answers."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_LEFT_OUT = "[{} left out: this model reads text only]"
_CONTENT = 'Send a string or a list of parts such as {"type": "input_text", "text": "Hello"}.'


def input_items(given: str | Sequence[object]) -> list[Fields]:
    """Return the input of a request as items with types. Raises RefusedError for malformed ones."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    items = [fields_of(item, f"input[{index}]") for index, item in enumerate(given)]
    return [{**item, "type": _kind(item)} for item in items]


def _kind(item: Fields) -> object:
    """Return the type of an item, which a message and a reference may leave out."""
    is_reference = bool(item.get("id")) and item.keys() <= {"id", "type"}
    usual = "item_reference" if is_reference else "message"
    return usual if item.get("type") is None else item["type"]


def chat_messages(
    instructions: str | None,
    items: Iterable[Fields],
    tools: GivenTools,
    *,
    takes_images: bool = False,
) -> list[Fields]:
    """Return a conversation as messages. Items of one answer become one message of the assistant.
    tools: tools of the request, for the names of earlier calls. takes_images: whether the model
    does. RefusedError names an item that cannot be read."""
    messages: list[Fields] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        place, kind = f"input[{index}]", item.get("type")
        if kind == "message":
            _add_message(messages, item, place, takes_images=takes_images)
        elif kind == "reasoning":
            answer = _answer(messages, "content", "tool_calls")
            before = answer.get("reasoning_content", "")
            answer["reasoning_content"] = before + _thoughts(item, place)
        elif kind == "function_call":
            arguments = string_of(item, "arguments", place)
            _add_call(messages, item, tools, arguments, place)
        elif kind == "custom_tool_call":
            written = {"input": string_of(item, "input", place)}
            _add_call(messages, item, tools, msgspec.json.encode(written).decode(), place)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": string_of(item, "call_id", place),
                    "content": _output(item.get("output"), place),
                }
            )
        elif kind == "compaction":
            messages += _summary_messages(item)
        elif kind not in _NOT_SAID:
            advice = "Send messages, reasoning, calls of functions, and what these gave."
            raise refused(f"{place}.type", kind, advice)
    return messages


def _answer(messages: list[Fields], *ends: str) -> Fields:
    """Return the message that an answer's next item belongs to: the last one, unless it already has
    one of `ends`."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in ends):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(messages: list[Fields], item: Fields, place: str, *, takes_images: bool) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise refused(f"{place}.role", role, f"Send one of {', '.join(_ROLES)}.")
    content = item.get("content")
    if role != "assistant" and content == []:
        raise refused(
            f"{place}.content", content, f"A message of the {role} needs some. {_CONTENT}"
        )
    if role == "assistant":
        answer = _answer(messages, "tool_calls", "content")
        answer["content"] = "".join(_texts(content, f"{place}.content"))
        return
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    parts = _parts(content, f"{place}.content", takes_images=takes_images)
    messages.append({"role": role, "content": parts})


def _parts(content: object, place: str, *, takes_images: bool) -> list[Fields]:
    """Return the parts of a message that is no answer."""
    if not isinstance(content, list):
        raise refused(place, content, _CONTENT)
    parts: list[Fields] = []
    for index, value in enumerate(cast("list[object]", content)):
        at = f"{place}[{index}]"
        part = fields_of(value, at)
        if part.get("type") == "input_image" and takes_images:
            parts.append(image_part(image_source(part, at)))
        else:
            parts.append({"type": "text", "text": _text(part, at)})
    return parts


def _texts(content: object, place: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise refused(place, content, _CONTENT)
    texts: list[str] = []
    for index, value in enumerate(cast("list[object]", content)):
        at = f"{place}[{index}]"
        texts.append(_text(fields_of(value, at), at))
    return texts


def _text(part: Fields, place: str) -> str:
    kind = part.get("type")
    if kind == "refusal":
        return string_of(part, "refusal", place)
    if kind in _TEXT_PARTS:
        return string_of(part, "text", place)
    raise refused(f"{place}.type", kind, TEXT_ONLY)


def _thoughts(item: Fields, place: str) -> str:
    """Return the thinking of an earlier answer: its text, or its seal's. Summaries, and seals of
    other servers, have none."""
    content = item.get("content")
    texts: list[str] = []
    if isinstance(content, list):
        for index, value in enumerate(cast("list[object]", content)):
            at = f"{place}.content[{index}]"
            texts.append(string_of(fields_of(value, at), "text", at))
    sealed = item.get("encrypted_content")
    if not any(texts) and isinstance(sealed, str):
        return unseal(sealed) or ""
    return "".join(texts)


def _add_call(
    messages: list[Fields], item: Fields, tools: GivenTools, arguments: str, place: str
) -> None:
    name = tools.model_name(item.get("namespace"), string_of(item, "name", place))
    call = {
        "id": string_of(item, "call_id", place),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    answer = _answer(messages)
    answer["tool_calls"] = [*answer.get("tool_calls", ()), call]
    answer["content"] = answer["content"] or None


def _summary_messages(item: Fields) -> list[Fields]:
    """Return the messages that an item of compaction stands for; none for one of another server."""
    sealed = item.get("encrypted_content")
    summary = unseal(sealed) if isinstance(sealed, str) else None
    if summary is None:
        return []
    return [
        {"role": "user", "content": SUMMARY_QUESTION},
        {"role": "assistant", "content": summary},
    ]


def _output(given: object, place: str) -> str:
    """Return a tool's output. A note replaces media: a tool cannot know what the model reads,
    and the conversation must go on."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise refused(f"{place}.output", given, "Send a string or a list of parts.")
    texts: list[str] = []
    for index, value in enumerate(cast("list[object]", given)):
        at = f"{place}.output[{index}]"
        part = fields_of(value, at)
        if part.get("type") in _TEXT_PARTS:
            texts.append(string_of(part, "text", at))
        else:
            texts.append(_LEFT_OUT.format(str(part.get("type"))[:40]))
    return "\n".join(texts)
