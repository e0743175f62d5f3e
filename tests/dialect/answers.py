"""Answers as a model of each family writes them, and what their parts are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.text.dialect import (
    AnswerParser,
    CallArguments,
    CallStart,
    Dialect,
    Part,
    Reasoning,
    Text,
    Thinking,
    Tool,
)
from quire.text.rendering import Tokenizer

__all__ = ["TOOLS", "Answer", "Call", "parsed", "read"]

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "area": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
                "unit": {"type": ["string", "null"], "enum": ["C", "F", None]},
            },
            "required": ["city"],
        },
    ),
    Tool("now", {"type": "object", "properties": {}}),
    Tool(
        "files.write",
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            "required": ["path", "text"],
        },
    ),
)

Call = tuple[str, dict[str, Any]]
"""The name of a tool and its arguments."""


@dataclass(frozen=True)
class Answer:
    """The parts of an answer. ids: ids of the calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    ids: tuple[str, ...] = ()
    num_reasoning_tokens: int = 0

    @property
    def without_ids(self) -> Answer:
        """The answer for comparisons: ids are drawn."""
        return replace(self, ids=())


def parsed(
    dialect: Dialect,
    tokens: Tokenizer,
    token_ids: Sequence[int],
    cuts: Sequence[int] = (),
    *,
    tools: Sequence[Tool] = TOOLS,
    thinking: Thinking = Thinking.NONE,
    **more: Any,
) -> tuple[list[Part], AnswerParser]:
    """Return all parts of an output that comes in chunks. cuts: ends of the chunks."""
    parser = AnswerParser(dialect, tokens, tools, thinking, **more)
    places = [0, *sorted(cuts), len(token_ids)]
    parts: list[Part] = []
    for start, end in itertools.pairwise(places):
        parts += parser.take(token_ids[start:end])
    return parts + parser.finish(), parser


def read(parts: Sequence[Part]) -> Answer:
    """The parts together; indices are 0, 1, 2, … and each call begins once, before its
    arguments."""
    text = reasoning = ""
    names: list[str] = []
    ids: list[str] = []
    arguments: list[str] = []
    for part in parts:
        match part:
            case Text():
                text += part.text
            case Reasoning():
                reasoning += part.text
            case CallStart():
                assert part.index == len(names)
                names.append(part.name)
                ids.append(part.id)
                arguments.append("")
            case CallArguments():
                assert part.index == len(names) - 1
                arguments[part.index] += part.text
        assert not isinstance(part, Text | Reasoning | CallArguments) or part.text
    calls = zip(names, map(json.loads, arguments), strict=True)
    return Answer(text, reasoning, tuple(calls), tuple(ids))
