"""The format of a model's thinking and tool calls, written as a grammar, and read back as tokens
arrive."""

from quire.text.dialect.detect import find_dialect
from quire.text.dialect.grammar import answer_grammar
from quire.text.dialect.harmony import render_harmony
from quire.text.dialect.parser import AnswerParser
from quire.text.dialect.parts import CallArguments, CallStart, Part, Reasoning, Text
from quire.text.dialect.spec import Dialect, Thinking, thinking_at_end
from quire.text.dialect.tools import NamedTool, Tool, ToolChoice, tools_prompt

__all__ = [
    "AnswerParser",
    "CallArguments",
    "CallStart",
    "Dialect",
    "NamedTool",
    "Part",
    "Reasoning",
    "Text",
    "Thinking",
    "Tool",
    "ToolChoice",
    "answer_grammar",
    "find_dialect",
    "render_harmony",
    "thinking_at_end",
    "tools_prompt",
]
