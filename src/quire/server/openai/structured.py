"""Makes one grammar from `response_format`, `structured_outputs` and the older `guided_*`
fields."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, cast

from quire.base.errors import RequestError
from quire.protocol.grammar import StructuredOutputsParams
from quire.protocol.json_schema import all_unsupported, num_chars_to_read
from quire.server.generation.parsed import AnswerForm
from quire.server.requests.bodies import GenerationRequest
from quire.server.requests.errors import RefusedError
from quire.text.dialect import Dialect, Tool
from quire.text.dialect.argument_rules import left_out

__all__ = ["dropped_keywords", "num_schema_chars", "structured_field", "structured_outputs"]

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
MAX_DROPPED = 64
"""Paths that a timeline keeps."""
_KNOWN = frozenset(field.name for field in fields(StructuredOutputsParams))


def structured_field(body: GenerationRequest) -> str | None:
    """Return the request's field with the grammar of its output, None for free text. Raises
    RefusedError as in `structured_outputs`."""
    return next(iter(_given(body)), None)


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """Return the requested grammar, None for free text. Raises RefusedError if several fields ask
    for one, or one is wrong."""
    given = _given(body)
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(given)
        raise RefusedError(f"{names} are given. Send one of them.", param=next(iter(given)))
    ((param, asked),) = given.items()
    unknown = sorted(asked.keys() - _KNOWN)
    if unknown:
        raise RefusedError(
            f"structured_outputs.{unknown[0][:80]} is no field. Use one of: "
            f"{', '.join(sorted(_KNOWN))}.",
            param=param,
        )
    for name in ("disable_any_whitespace", "strict", "json_object"):
        if not isinstance(asked.get(name, False), bool | None):
            raise RefusedError(
                f"structured_outputs.{name} is a switch. Use true or false.", param=param
            )
    if not isinstance(asked.get("whitespace_pattern"), str | None):
        raise RefusedError("structured_outputs.whitespace_pattern takes a text.", param=param)
    try:
        return StructuredOutputsParams(**{k: v for k, v in asked.items() if v is not None})
    except RequestError as error:
        raise RefusedError(str(error), param=param) from error


def num_schema_chars(structured: StructuredOutputsParams | None, form: AnswerForm | None) -> int:
    """Return the number of characters that `dropped_keywords` has to read, as `num_chars_to_read`
    counts them."""
    given = None if structured is None else structured.json
    return num_chars_to_read(given) + (0 if form is None else form.num_chars)


def dropped_keywords(
    structured: StructuredOutputsParams | None, form: AnswerForm | None
) -> list[str]:
    """Return the paths in a request's schemas that are not enforced."""
    found: list[str] = []
    if structured is not None and structured.json is not None and not structured.strict:
        found += _dropped(structured.json)
    if form is None:
        return found[:MAX_DROPPED]
    for tool in form.tools:
        if not tool.is_strict:
            found += (f"{tool.name}: {place}" for place in _dropped(tool.parameters))
            found += (f"{tool.name}: {place}" for place in _left_out(form.dialect, tool))
    return found[:MAX_DROPPED]


def _dropped(schema: object) -> list[str]:
    try:
        return all_unsupported(json.loads(schema) if isinstance(schema, str) else schema)
    except (ValueError, RecursionError, TypeError, OverflowError):  # the engine refuses it
        return []


def _left_out(dialect: Dialect, tool: Tool) -> list[str]:
    try:
        return left_out(dialect, tool)
    except (RequestError, RecursionError, TypeError, ValueError):  # `AnswerForm.held` says so
        return []


def _given(body: GenerationRequest) -> dict[str, dict[str, Any]]:
    """Return the fields of `StructuredOutputsParams`, by the request's field that states them."""
    guided = _of_guided(body)
    first_guided = next((old for old, name in _GUIDED.items() if name in guided), "guided_json")
    found = {
        "response_format": _of_response_format(body.response_format) or None,
        "structured_outputs": body.structured_outputs,
        first_guided: guided or None,
    }
    return {name: asked for name, asked in found.items() if asked is not None}


def _of_response_format(given: dict[str, Any] | None) -> dict[str, Any]:
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": given}
    stated = cast("dict[str, Any]", given.get("json_schema") or {})
    if kind != "json_schema":
        raise RefusedError(
            f"response_format.type is {str(kind)[:80]!r}. Use text, json_object or json_schema.",
            param="response_format",
        )
    if not isinstance(cast("object", stated), dict) or not isinstance(stated.get("schema"), dict):
        raise RefusedError(
            "response_format.json_schema has no schema, which is an object. Give one.",
            param="response_format",
        )
    strict = cast("object", stated.get("strict"))
    if not isinstance(strict, bool | None):
        raise RefusedError(
            "response_format.json_schema.strict is a switch. Use true or false.",
            param="response_format",
        )
    return {"json": stated["schema"], "strict": bool(strict)}


def _of_guided(body: GenerationRequest) -> dict[str, Any]:
    given = {ours: getattr(body, theirs) for theirs, ours in _GUIDED.items()}
    if given.get("json_object") is False:
        del given["json_object"]
    return {name: value for name, value in given.items() if value is not None}
