"""Contents of /openapi.json that FastAPI does not know: bodies, parameters, every status with its
schema, and the bounds of fields."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec
from starlette.routing import compile_path

from quire.protocol.parameters.declaration import MAX_INT, Declared
from quire.protocol.sampling_params import MAX_LOGPROBS, SAMPLING_PARAMETERS
from quire.server.batches.lines import BATCH_ROUTES
from quire.server.requests.errors import (
    OVERLOADED,
    ErrorResponse,
    MessagesErrorResponse,
    is_messages_path,
)
from quire.server.requests.limits import Limits
from quire.server.routes.batches import MAX_METADATA
from quire.server.routes.route import BYTES, EVENTS, JSON, Access, Needs, Route

__all__ = ["describe"]

_REFERENCE = "#/components/schemas/{name}"

_MEANINGS = {
    400: "The request cannot be served as it is.",
    401: "No valid API key.",
    403: "Not for this caller, or a Host that is not this machine's.",
    404: "No such model, or no such thing.",
    408: "The body did not arrive in time.",
    409: "Another request is under way that this one contradicts.",
    413: "The body is too large.",
    415: "Another media type than the route takes.",
    429: "Too many requests at once; Retry-After says when to come again.",
    431: "Too many or too large headers.",
    500: "A fault of the server.",
    501: "Not offered here; the message says what to send instead.",
    503: "The engine takes no requests now; Retry-After says when to come again.",
    507: "No room on the disk to keep what the request brings. Deleting needs none.",
    529: "As 503 on other routes.",
}
_ANSWERED = {
    101: "A WebSocket.",
    200: "As asked.",
    503: "The state in which it is not so.",
}
_OF_EVERY_ROUTE = (403, 431, 500)
_OF_KEYS = (401, 429)
_OF_BODIES = (400, 404, 408, 413, 415, 503)
_OF_NEEDS = {Needs.NOTHING: (), Needs.ENGINE: (503,), Needs.ROOM: (503,), Needs.FILES: (404,)}


def describe(
    document: dict[str, Any], routes: Iterable[Route[Any, Any]], limits: Limits
) -> dict[str, Any]:
    """Return the framework's document with all that the routes say, and with bounds from
    `limits`."""
    listed = [route for route in routes if route.is_listed]
    kinds = {each for route in listed for each in (route.body, route.answer) if each is not None}
    ordered = [ErrorResponse, MessagesErrorResponse, *sorted(kinds, key=str)]
    found, schemas = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    references = dict(zip(ordered, found, strict=True))
    document["components"] = {"schemas": schemas}
    for route in listed:
        _, path, varying = compile_path(route.path)
        operation = document["paths"][path][route.method.lower()]
        operation.update(_asked(route, varying, references))
        operation["responses"] = _responses(route, references)
    for name, bounds in _bounds(limits).items():
        for schema in schemas.values():
            _bind(schema.get("properties", {}).get(name), bounds)
    for name, fields in _own_bounds(limits).items():
        for field, bounds in fields.items():
            _bind(schemas[name]["properties"][field], bounds)
    return document


def _asked(
    route: Route[Any, Any], varying: Iterable[str], references: Mapping[Any, Any]
) -> dict[str, Any]:
    """Return the parameters and the body of a route, where it has some."""
    found: dict[str, Any] = {}
    text = {"type": "string"}
    parameters = [{"name": n, "in": "path", "required": True, "schema": text} for n in varying]
    parameters += [{"name": q.name, "in": "query", "schema": dict(q.schema)} for q in route.query]
    if parameters:
        found["parameters"] = parameters
    content: dict[str, Any] = {}
    if route.body is not None:
        content = {JSON: {"schema": references[route.body]}}
    if route.form is not None:
        content = {"multipart/form-data": {"schema": dict(route.form)}}
    if content:
        found["requestBody"] = {"required": not route.may_lack_body, "content": content}
    return found


def _responses(route: Route[Any, Any], references: Mapping[Any, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if route.answer is not None:
        schema = references[route.answer]
    elif route.media == BYTES:
        schema = {"type": "string", "format": "binary"}
    content: dict[str, Any] = {route.media: {"schema": schema}}
    if route.streams:
        content[EVENTS] = {"schema": {"type": "string"}}
    is_of_messages = is_messages_path(route.path)
    refusals = _refusals(route)
    if is_of_messages:
        refusals = {OVERLOADED if status == 503 else status for status in refusals}
    kind = MessagesErrorResponse if is_of_messages else ErrorResponse
    refused = {JSON: {"schema": references[kind]}}
    found = {status: {"description": _MEANINGS[status], "content": refused} for status in refusals}
    for status in route.statuses:
        found[status] = {"description": _ANSWERED[status], "content": content}
        if status == 101:
            del found[status]["content"]
    return {str(status): found[status] for status in sorted(found)}


def _refusals(route: Route[Any, Any]) -> set[int]:
    """Return the statuses of errors that a route may answer with."""
    found = {*_OF_EVERY_ROUTE, *_OF_NEEDS[route.needs], *route.refuses}
    if route.access is not Access.ANYONE:
        found.update(_OF_KEYS)
    if route.body is not None or route.form is not None:
        found.update(_OF_BODIES)
    if not route.is_literal:
        found.add(404)
    return found


def _up_to(highest: int) -> dict[str, Any]:
    return {"minimum": 0, "maximum": highest}


def _bounds_of(declared: Declared) -> dict[str, Any]:
    """Return the bounds that a declaration states."""
    facts = declared.facts
    found: dict[str, Any] = {}
    if math.isfinite(facts.low):
        found["minimum"] = facts.low
    if math.isfinite(facts.high) and facts.high != MAX_INT:  # beyond any memory
        found["maximum"] = facts.high
    if facts.most is not None:
        found["maxItems"] = facts.most
        found["items"] = {"minLength": 1, "maxLength": facts.most_chars}
    return found


def _bounds(limits: Limits) -> dict[str, dict[str, Any]]:
    """Return the bounds of fields by name, in the form of JSON schema."""
    label = {"maxLength": limits.max_label_chars, "pattern": "^[ -~]*$"}
    tokens = {"minimum": 1}
    ids = {"items": {"minimum": 0}}
    text = {"minLength": 1, "maxLength": limits.max_stop_chars}
    stops = {"maxItems": limits.max_stop, "items": text}
    return {
        **{name: _bounds_of(each) for name, each in SAMPLING_PARAMETERS.items()},
        "n": {"minimum": 1, "maximum": limits.max_n},
        "best_of": {"minimum": 1, "maximum": max(limits.max_n, limits.max_beam_width)},
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), tokens),
        "prompt_logprobs": _up_to(min(limits.max_logprobs, MAX_LOGPROBS)),
        "top_logprobs": _up_to(limits.max_logprobs),
        "priority": {"minimum": -limits.max_priority, "maximum": limits.max_priority},
        "deadline_s": {"exclusiveMinimum": 0},
        "ttl_s": {"exclusiveMinimum": 0},
        "thinking_token_budget": {"minimum": -1},
        "dimensions": {"minimum": 1},
        "top_n": {"minimum": 1},
        "max_tokens_per_doc": {"minimum": 1},
        **dict.fromkeys(("stop", "stop_sequences"), stops),
        "stop_token_ids": {"maxItems": limits.max_stop_token_ids, **ids},
        "logit_bias": {
            "maxProperties": limits.max_logit_bias,
            "additionalProperties": {"minimum": -100, "maximum": 100},
        },
        "allowed_token_ids": {"minItems": 1, "maxItems": limits.max_allowed_token_ids, **ids},
        "bad_words": {"maxItems": limits.max_bad_words, "items": text},
        "hooks": {"maxItems": limits.max_hooks},
        "messages": {"minItems": 1, "maxItems": limits.max_messages},
        **dict.fromkeys(("tokens", "token_ids"), ids),
        "chat_template": {"maxLength": limits.max_chat_template_chars},
        "truncation": {"enum": ["auto", "disabled"]},
        **dict.fromkeys(("cache_salt", "request_id"), label),
        "session_id": {**label, "minLength": 1},
    }


def _own_bounds(limits: Limits) -> dict[str, dict[str, dict[str, Any]]]:
    """Return bounds of fields that mean another thing in other bodies, by body and name."""
    texts = {"minItems": 1, "maxItems": limits.max_embedding_inputs}
    some = {"minItems": 1}
    inputs = {"input": some}
    return {
        "CompletionRequest": {
            "logprobs": _up_to(limits.max_logprobs),
            "max_tokens": {"minimum": 0},
            "stop": {"minLength": 1, "maxLength": limits.max_stop_chars},
            "prompt": some,
        },
        "ChatRequest": {"stop": {"minLength": 1, "maxLength": limits.max_stop_chars}},
        "TokensRequest": {"token_ids": some},
        **dict.fromkeys(("EmbeddingRequest", "PoolingRequest", "ClassifyRequest"), inputs),
        "ScoreRequest": {"text_1": texts, "text_2": texts},
        "RerankRequest": {"documents": texts},
        "SessionChange": {"ttl_s": {"maximum": limits.session_s}},
        "BatchRequest": {
            "endpoint": {"enum": list(BATCH_ROUTES)},
            "completion_window": {"enum": ["24h"]},
            "metadata": {"maxProperties": MAX_METADATA},
        },
    }


_KINDS = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "maxProperties": ("object",),
    "pattern": ("string",),
    "enum": ("string",),
    "items": ("array",),
    "additionalProperties": ("object",),
}
"""Types to which a bound applies."""


def _bind(schema: dict[str, Any] | None, bounds: dict[str, Any]) -> None:
    """Put the bounds into the alternatives of a field that have such a type."""
    if schema is None:
        return
    for each in schema.get("anyOf", [schema]):
        for name, value in bounds.items():
            if each.get("type") not in _KINDS[name]:
                continue
            if isinstance(value, dict):  # of what the list or object holds
                _bind(each[name], cast("dict[str, Any]", value))
            else:
                each[name] = value
