"""Content blocks of an answer, built from its parts as they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.server.generation.sealed import seal
from quire.text.dialect import CallArguments, CallStart, Part, Reasoning, Text

__all__ = ["BlockReader", "whole_blocks"]

Event = dict[str, Any]


class BlockReader:
    """Makes the events of blocks, one block after the other: start, deltas, stop. White space
    before a text waits for the text, since no block may be empty.

    has_calls: True once a call has begun.
    """

    def __init__(self, *, hides_thinking: bool = False) -> None:
        """hides_thinking: blocks of thinking have only their signature."""
        self._hides_thinking = hides_thinking
        self._index = -1
        self._open: type[Part] | None = None
        self._blank = ""
        self._thoughts: list[str] = []
        self.has_calls = False

    def take(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Yield the events of the next parts."""
        for part in parts:
            match part:
                case Text(text):
                    yield from self._text(text)
                case Reasoning(text):
                    yield from self._reasoning(text)
                case CallStart(_, call_id, name):
                    self.has_calls = True
                    call: Event = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                    yield from self._start(CallStart, {**call, "caller": {"type": "direct"}})
                case CallArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def finish(self) -> Iterator[Event]:
        """Yield the end of the open block."""
        if self._open is None:
            return
        if self._open is Reasoning:
            signature = seal("".join(self._thoughts))
            self._thoughts.clear()
            yield self._delta({"type": "signature_delta", "signature": signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _text(self, text: str) -> Iterator[Event]:
        if self._open is not Text:
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank = self._blank, ""
            yield from self._start(Text, {"type": "text", "text": "", "citations": None})
        yield self._delta({"type": "text_delta", "text": text})

    def _reasoning(self, text: str) -> Iterator[Event]:
        if self._open is not Reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._start(Reasoning, block)
        self._thoughts.append(text)
        if not self._hides_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _start(self, kind: type[Part], block: Event) -> Iterator[Event]:
        yield from self.finish()
        self._open, self._blank = kind, ""
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def whole_blocks(events: Iterator[Event]) -> list[Event]:
    """Return the blocks that these events build. The input of a call that was cut short is empty,
    since its partial text is no JSON."""
    blocks: list[Event] = []
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if delta["type"] == "input_json_delta":
                index = event["index"]
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            elif name is not None:
                blocks[-1][name] += delta[name]
            else:
                blocks[-1]["signature"] = delta["signature"]
    for index, text in arguments.items():
        try:
            blocks[index]["input"] = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError:
            blocks[index]["input"] = {}
    return blocks
