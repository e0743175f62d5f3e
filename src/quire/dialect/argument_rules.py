"""The rules of a call's arguments, in each style."""

from __future__ import annotations

import json

from quire.dialect.rules import Rules
from quire.dialect.tools import Tool
from quire.protocol.grammar import GrammarKind, GrammarSpec

__all__ = ["arguments_rule"]


def arguments_rule(rules: Rules, tool: Tool, name: str, where: str) -> str:
    """Add the grammar `name` of a tool's arguments, and return what refers to it. where: the field
    of the request that states the schema."""
    source = json.dumps(dict(tool.schema), ensure_ascii=False)
    return rules.grammar(name, GrammarSpec(GrammarKind.JSON, source, tool.is_strict), where)
