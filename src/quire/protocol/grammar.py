"""Which language an output belongs to, as a request states it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["GrammarKind", "GrammarSpec"]


class GrammarKind(enum.StrEnum):
    """The names are those of the fields of vLLM's `structured_outputs`."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """source: of `kind`: a JSON Schema, nothing, a regular expression, a JSON array of texts, a
    Lark grammar, a JSON object of tags."""

    kind: GrammarKind
    source: str = ""
