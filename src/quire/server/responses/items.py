"""Output items of an answer, built from its parts as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from quire.server.generation.sealed import seal
from quire.server.requests.places import Fields
from quire.server.responses.tools import GivenTools
from quire.text.dialect import CallArguments, CallStart, Part, Reasoning, Text

__all__ = ["ItemReader", "response_of"]

Event = dict[str, Any]

_ITEM_ID = re.compile("[a-z]+_([0-9a-f]+)_[0-9]+")
"""Form of the ids that `ItemReader` gives."""


def response_of(item_id: str) -> str | None:
    """Return the id of the response whose output has an item; None for other ids."""
    name = _ITEM_ID.fullmatch(item_id)
    return None if name is None else f"resp_{name[1]}"


class ItemReader:
    """Makes the events of items, one item after the other. `items` has the complete ones; if the
    answer ends early, the last one is incomplete.

    White space before a text waits for the text: it makes no message of its own.
    """

    def __init__(self, name: str, tools: GivenTools, *, seals: bool) -> None:
        """name: name of the answer; ids of items contain it. seals: reasoning is also given in its
        opaque form."""
        self.items: list[Fields] = []
        self._name = name
        self._tools = tools
        self._seals = seals
        self._open: Fields | None = None
        self._text = ""
        self._blank = ""
        self._logprobs: list[Any] = []
        self._held: list[Any] = []
        """Log-probabilities of tokens whose text has not come yet."""

    def take(self, parts: Sequence[Part], logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Yield the events of the next parts. logprobs: values of their tokens, if these are only
        text. Without parts, logprobs are kept for the text that follows."""
        if not parts and self._expects_text:
            self._held += logprobs
        for part in parts:
            if not isinstance(part, Text):
                self._held = []  # they were of its markers
            match part:
                case Text(text):
                    yield from self._take_text(text, logprobs)
                    logprobs = ()
                case Reasoning(text):
                    yield from self._take_reasoning(text)
                case CallStart(_, call_id, name):
                    yield from self._start_call(call_id, name)
                case CallArguments(_, text):
                    yield from self._take_arguments(text)

    def finish(self, status: str = "completed") -> Iterator[Event]:
        """Yield the end of the open item."""
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            yield from self._end_message(item)
        elif item["type"] == "reasoning":
            yield from self._end_reasoning(item)
        else:
            yield from self._end_call(item)
        if "status" in item:
            item["status"] = status
        self._open = None
        self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    @property
    def _expects_text(self) -> bool:
        """True if a token without text belongs to a message. In another item it belongs to that
        item, or to the marker at its end."""
        return self._open is None or self._open["type"] == "message" or bool(self._blank)

    @property
    def _index(self) -> int:
        return len(self.items) - (self._open is None)

    def _start(self, item: Fields) -> Iterator[Event]:
        yield from self.finish()
        self._open, self._text, self._blank, self._held = item, "", "", []
        yield {
            "type": "response.output_item.added",
            "output_index": self._index,
            "item": dict(item),
        }

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}_{len(self.items) + (self._open is not None)}"

    def _at(self, kind: str, **others: Any) -> Event:
        """Return an event of the open item."""
        place: Event = {"item_id": (self._open or {})["id"], "output_index": self._index}
        return {"type": f"response.{kind}", **place, **others}

    def _take_text(self, text: str, logprobs: Sequence[Any]) -> Iterator[Event]:
        logprobs, self._held = [*self._held, *logprobs], []
        if self._open is None or self._open["type"] != "message":
            self._blank += text
            if not self._blank.strip():
                self._held = logprobs
                return
            text = self._blank
            yield from self._start(
                {
                    "id": self._id("msg"),
                    "type": "message",
                    "role": "assistant",
                    "status": "in_progress",
                    "content": [],
                }
            )
            self._logprobs = []
            part: Event = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._at("content_part.added", content_index=0, part=part)
        self._text += text
        self._logprobs += logprobs
        given = {"delta": text, "logprobs": logprobs}
        yield self._at("output_text.delta", content_index=0, **given)

    def _end_message(self, item: Fields) -> Iterator[Event]:
        self._logprobs += self._held
        part: Fields = {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": self._logprobs,
        }
        item["content"] = [part]
        given = {"text": self._text, "logprobs": self._logprobs}
        yield self._at("output_text.done", content_index=0, **given)
        yield self._at("content_part.done", content_index=0, part=part)

    def _take_reasoning(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "reasoning":
            item: Fields = {"id": self._id("rs"), "type": "reasoning", "summary": []}
            yield from self._start({**item, "content": [], "status": "in_progress"})
            part = {"type": "reasoning_text", "text": ""}
            yield self._at("content_part.added", content_index=0, part=part)
        self._text += text
        yield self._at("reasoning_text.delta", content_index=0, delta=text)

    def _end_reasoning(self, item: Fields) -> Iterator[Event]:
        part = {"type": "reasoning_text", "text": self._text}
        item["content"] = [part]
        if self._seals:
            item["encrypted_content"] = seal(self._text)
        yield self._at("reasoning_text.done", content_index=0, text=self._text)
        yield self._at("content_part.done", content_index=0, part=part)

    def _start_call(self, call_id: str, name: str) -> Iterator[Event]:
        call: Fields = {"call_id": call_id, "name": self._tools.names.get(name, name)}
        if name in self._tools.namespaces:
            call["namespace"] = self._tools.namespaces[name]
        if name in self._tools.custom:
            yield from self._start(
                {"id": self._id("ctc"), "type": "custom_tool_call", **call, "input": ""}
            )
            return
        item = {"id": self._id("fc"), "type": "function_call", **call, "arguments": ""}
        yield from self._start({**item, "status": "in_progress"})

    def _take_arguments(self, text: str) -> Iterator[Event]:
        """Take arguments. A custom tool's are a text within JSON, given once it is complete."""
        self._text += text
        if self._open is not None and self._open["type"] == "function_call":
            yield self._at("function_call_arguments.delta", delta=text)

    def _end_call(self, item: Fields) -> Iterator[Event]:
        if item["type"] == "function_call":
            item["arguments"] = self._text
            given = {"name": item["name"], "arguments": self._text}
            yield self._at("function_call_arguments.done", **given)
            return
        item["input"] = _input_of(self._text)
        yield self._at("custom_tool_call_input.delta", delta=item["input"])
        yield self._at("custom_tool_call_input.done", input=item["input"])


def _input_of(arguments: str) -> str:
    """Return the text for a custom tool; for a call that was cut short, its JSON so far."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments
