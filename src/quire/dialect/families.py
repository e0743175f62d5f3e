"""The dialects that have a name."""

from __future__ import annotations

from collections.abc import Mapping

from quire.dialect.spec import Dialect

__all__ = ["DIALECTS", "GENERIC"]

_THINK = ("<think>", "</think>")

HERMES = Dialect(
    name="hermes",
    open='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    close="}\n</tool_call>",
    separator="\n",
    thinking=_THINK,
    markers=("<tool_call>", "</tool_call>"),
)

GENERIC = Dialect(
    name="generic",
    section=('{"tool_calls": [', "]}"),
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
    separator=", ",
    is_bare=True,
    text_wrap=('{"response": ', "}"),
    describes_tools=True,
)

DIALECTS: Mapping[str, Dialect] = {each.name: each for each in (HERMES, GENERIC)}
"""By the names of vLLM's `--tool-call-parser`."""
