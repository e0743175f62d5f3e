"""Parts of a chat's prompt, as digests: enough to say which of them a later request changed."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from quire.server.requests.bodies import ChatRequest
from quire.text.rendering.message_check import TEXT_PART_TYPES

__all__ = ["ChatParts", "Place", "digest"]

_KEY = secrets.token_bytes(16)
_SYSTEM = ("system", "developer")
_TEXT_TYPES = (*TEXT_PART_TYPES, "refusal")

PlaceName = Literal[
    "system",
    "tools",
    "effort",
    "verbosity",
    "settings",
    "message",
    "answer",
    "generation_prompt",
    "template",
    "prompt",
]


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a chat in which a token differs. message: number of the message after the system
    prompt, from 0, of "message" and "answer"; role: its role. "answer": the earlier answer, which
    is now a message or a part of the prompt. "template": parts that both requests have, and that
    the template wrote differently. "prompt": there are no parts."""

    name: PlaceName
    message: int | None = None
    role: str = ""


@dataclass(frozen=True, slots=True)
class ChatParts:
    """Digests of the parts that a chat's prompt is made of. settings: all else that a template may
    read, but for flags that only change how a prompt ends. roles: roles of the messages after the
    system prompt."""

    system: bytes
    tools: bytes
    effort: bytes
    verbosity: bytes
    settings: bytes
    messages: tuple[bytes, ...]
    roles: tuple[str, ...]

    @classmethod
    def of(cls, body: ChatRequest) -> ChatParts:
        """Return the digests of a chat."""
        given: object = body.messages
        messages = cast("list[dict[str, Any]]", given) if isinstance(given, list) else []
        start = 0
        while start < len(messages) and messages[start].get("role") in _SYSTEM:
            start += 1
        settings = body.chat_template_kwargs, body.chat_template, body.documents
        return cls(
            digest([_bare(each) for each in messages[:start]]),
            digest(body.tools),
            digest(body.reasoning_effort),
            digest(body.verbosity),
            digest(settings),
            tuple(digest(_bare(each)) for each in messages[start:]),
            tuple(str(each.get("role"))[:32] for each in messages[start:]),
        )

    def place(self, earlier: ChatParts) -> Place | None:
        """Return the first part that differs in an earlier chat; None if all that both have is the
        same."""
        for name in ("tools", "system", "effort", "verbosity", "settings"):
            if getattr(self, name) != getattr(earlier, name):
                return Place(cast("PlaceName", name))
        pairs = zip(self.messages, earlier.messages, strict=False)
        for index, (one, other) in enumerate(pairs):
            if one != other:
                return Place("message", index, self.roles[index])
        return None

    def is_like(self, earlier: ChatParts) -> bool:
        """Return whether it has a message of an earlier chat."""
        return not set(self.messages).isdisjoint(earlier.messages)


def digest(value: object) -> bytes:
    """Return the keyed digest of a value that JSON can hold."""
    data = msgspec.json.encode(value, enc_hook=str)
    return hashlib.blake2b(data, digest_size=8, key=_KEY).digest()


def _bare(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without the data of its media, which have digests of their own."""
    content: object = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("list[Any]", content)
    return {**message, "content": [_bare_part(part) for part in parts]}


def _bare_part(part: object) -> object:
    if not isinstance(part, dict):
        return part
    fields = cast("dict[str, Any]", part)
    is_text = "text" in fields or fields.get("type") in _TEXT_TYPES
    return fields if is_text else {"type": fields.get("type")}
