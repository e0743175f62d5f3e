"""Language of an output, as a request states it."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from quire.base.errors import RequestError
from quire.base.foreign import ForeignName, explaining

__all__ = ["GrammarKind", "GrammarSpec", "StructuredOutputsParams"]

MAX_SOURCE_BYTES = 2**20
"""Most bytes of one grammar. The largest real schemas known have 1.6 and 2.3 MB, which llguidance
refuses too (benchmarks/decoding/schema_compile.py); those that it compiles have up to 250 KB."""


class GrammarKind(enum.StrEnum):
    """The names are those of the fields of vLLM's `structured_outputs`, but for `ANSWER`: the
    answers of a chat model, which the engine's own front writes and no user does."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """source: a JSON Schema, nothing, a regular expression, a JSON array of texts, a Lark or GBNF
    grammar, a JSON object of tags, or for an answer `{"lark": rules, "grammars": {name: spec}}`,
    according to `kind`. Such a spec has the fields of this class, and in `where` the field of the
    request that states it. is_strict: refuse keywords that cannot be enforced, instead of dropping
    them. whitespace: a regular expression for the text between the parts of JSON; None for at most
    8 spaces, tabs and line breaks.
    """

    kind: GrammarKind
    source: str = ""
    is_strict: bool = True
    whitespace: str | None = None


_OF_USERS = tuple(kind for kind in GrammarKind if kind is not GrammarKind.ANSWER)

_FOREIGN: Mapping[str, ForeignName] = {
    "disable_additional_properties": ForeignName("the schema says additionalProperties itself"),
    "disable_fallback": ForeignName("there is one library", None),
}


@explaining(RequestError, "a field of structured outputs", _FOREIGN)
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Language of the output: exactly one of the first six fields. The names are those of vLLM.

    json: JSON Schema, an object or its text. regex: pattern of the whole output. choice: the texts
    that the output may be. grammar: Lark or GBNF. json_object: any JSON object. structural_tag:
    texts that begin a part under a schema, within free text. disable_any_whitespace: JSON without
    whitespace. whitespace_pattern: a regular expression for the text between parts of JSON. strict:
    with `json`, refuse keywords that cannot be enforced, instead of dropping them.

    Raises RequestError naming the field, its value and what it may be.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        given = [kind.value for kind in _OF_USERS if self._is_given(kind)]
        if len(given) != 1:
            names = ", ".join(kind.value for kind in _OF_USERS)
            what = "nothing" if not given else " and ".join(given)
            raise RequestError(f"structured_outputs has {what}. Give exactly one of {names}.")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "structured_outputs has whitespace_pattern beside disable_any_whitespace, which "
                "contradict each other. Give one of them."
            )
        source = self.spec.source
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MAX_SOURCE_BYTES:
            raise RequestError(
                f"structured_outputs.{given[0]} has {size:,} bytes, more than "
                f"{MAX_SOURCE_BYTES:,}. Send a smaller one."
            )

    def _is_given(self, kind: GrammarKind) -> bool:
        value = getattr(self, kind.value)
        return bool(value) if kind is GrammarKind.JSON_OBJECT else value is not None

    @property
    def spec(self) -> GrammarSpec:
        """The grammar in the form that the engine takes."""
        kind = next(kind for kind in _OF_USERS if self._is_given(kind))
        whitespace = "" if self.disable_any_whitespace else self.whitespace_pattern
        return GrammarSpec(kind, self._source(kind), self.strict, whitespace)

    def _source(self, kind: GrammarKind) -> str:
        value = cast("object", getattr(self, kind.value))
        if kind is GrammarKind.JSON_OBJECT:
            return ""
        if kind is GrammarKind.CHOICE:
            return _dumped(kind, _choices(value))
        if isinstance(value, str):
            return value
        is_json = kind in (GrammarKind.JSON, GrammarKind.STRUCTURAL_TAG)
        if is_json and isinstance(value, Mapping | bool):
            return _dumped(kind, cast("object", value))
        raise RequestError(
            f"structured_outputs.{kind} is {str(value)[:80]!r}, "
            f"but it takes {'an object or its text' if is_json else 'a text'}. Change it."
        )


def _choices(value: object) -> list[str]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    choices = list(cast("Sequence[object]", value)) if is_list else []
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError(
            f"structured_outputs.choice is {str(cast('object', value))[:80]!r}, but it takes "
            "a list of texts of at least one character each. Change it."
        )
    return cast("list[str]", choices)


def _dumped(kind: GrammarKind, value: object) -> str:
    """Keys keep their order, since outputs follow it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.{kind} cannot be written as JSON ({error}). Change it."
        ) from error
