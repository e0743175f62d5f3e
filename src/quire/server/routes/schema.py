"""Contents of /openapi.json beside the bodies of requests: every status of every route with its
schema, and the bounds of fields."""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec

from quire.protocol.parameters.declaration import MAX_INT, Declared
from quire.protocol.sampling_params import MAX_LOGPROBS, SAMPLING_PARAMETERS
from quire.protocol.status import EngineStatus
from quire.server.anthropic.answer import Message, TokenCount
from quire.server.batches.lines import BATCH_ROUTES
from quire.server.batches.store import KeptBatch, KeptFile
from quire.server.openai.chat import ChatCompletion
from quire.server.openai.completions import TextCompletion
from quire.server.openai.tokens import GeneratedTokens
from quire.server.openai.vectors import (
    ClassList,
    EmbeddingList,
    PoolingList,
    RerankResults,
    ScoreList,
)
from quire.server.readings.short_status import PROBES, ShortStatus
from quire.server.requests.errors import is_messages_path
from quire.server.requests.limits import Limits
from quire.server.responses.answer import InputTokens, ItemList, Response
from quire.server.responses.compaction import Compaction
from quire.server.routes.batches import MAX_METADATA

__all__ = ["describe"]

_REFERENCE = "#/components/schemas/{name}"
_JSON = "application/json"
_STREAM = "text/event-stream"
_TEXT = "text/plain"
_BYTES = "application/octet-stream"
_STREAMING = (
    "/inference/v1/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)


class ErrorDetail(msgspec.Struct):
    """type: a name for the status. param: the field at fault. code: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """Body of every status but 200."""

    error: ErrorDetail


class ModelCard(msgspec.Struct):
    """A name of the served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    default_sampling_params: dict[str, Any]
    permission: list[Any]


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int
    waiting_requests: int
    waiting_tokens: int


class Prefix(msgspec.Struct):
    """A pinned prefix; seconds_left is null for one without end."""

    id: str
    name: str
    tokens: int
    blocks: int
    hits: int
    seconds_left: float | None
    shared: bool


class PrefixList(msgspec.Struct):
    prefixes: list[Prefix]


class Deleted(msgspec.Struct):
    id: str
    deleted: bool


class SessionCard(msgspec.Struct):
    """A conversation that is kept."""

    id: str
    turns: int
    messages: int
    tokens: int
    pinned: bool
    created: int
    ttl_s: float
    seconds_left: float


class SessionList(msgspec.Struct):
    sessions: list[SessionCard]


class EngineActivity(msgspec.Struct):
    sleep_level: int
    is_paused: bool


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct):
    """Body of every status but 200 of the Messages API."""

    type: str
    error: MessagesErrorDetail
    request_id: str


_ANSWERS: dict[str, type[Any]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
    "/inference/v1/generate": GeneratedTokens,
    "/v1/embeddings": EmbeddingList,
    "/pooling": PoolingList,
    "/classify": ClassList,
    **dict.fromkeys(("/score", "/v1/score"), ScoreList),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankResults),
    "post /v1/files": KeptFile,
    "get /v1/files/{file_id}": KeptFile,
    "delete /v1/files/{file_id}": Deleted,
    "post /v1/batches": KeptBatch,
    "get /v1/batches/{batch_id}": KeptBatch,
    "/v1/batches/{batch_id}/cancel": KeptBatch,
    "/v1/messages": Message,
    "/v1/responses": Response,
    "/v1/responses/input_tokens": InputTokens,
    "/v1/responses/compact": Compaction,
    "get /v1/responses/{response_id}": Response,
    "delete /v1/responses/{response_id}": Deleted,
    "/v1/responses/{response_id}/cancel": Response,
    "/v1/responses/{response_id}/input_items": ItemList,
    "/v1/messages/count_tokens": TokenCount,
    "/v1/models": ModelList,
    "/v1/models/{model_id}": ModelCard,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
    "/version": Version,
    "/load": Load,
    "/livez": ShortStatus,
    "/health": ShortStatus,
    "/readyz": ShortStatus,
    "/admin/status": EngineStatus,
    "/admin/sessions": SessionList,
    "post /admin/sessions/{session_id}": SessionCard,
    "delete /admin/sessions/{session_id}": Deleted,
    "post /admin/prefixes": Prefix,
    "get /admin/prefixes": PrefixList,
    "/admin/prefixes/{prefix_id}": Deleted,
    **dict.fromkeys(("/sleep", "/wake_up", "/pause", "/resume"), EngineActivity),
}
"""Answers by path, and by method where there are several. Others are objects without fixed
fields."""

_MEANINGS = {
    400: "The request cannot be served as it is.",
    401: "No valid API key.",
    403: "Not for this caller, or a Host that is not this machine's.",
    404: "No such model, or no such thing.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "Another media type than the route takes.",
    429: "Too many requests at once; Retry-After says when to come again.",
    431: "Too many or too large headers.",
    500: "A fault of the server.",
    503: "The engine takes no requests now; Retry-After says when to come again.",
    507: "No room on the disk to keep what the request brings. Deleting needs none.",
    529: "As 503 on other routes.",
}
_OF_EVERY_ROUTE = (401, 403, 429, 431, 500)
_OF_BODIES = (400, 404, 408, 413, 415, 503)
_OF_OTHERS: dict[str, tuple[int, ...]] = {
    "/v1/models": (503,),
    "/v1/models/{model_id}": (404, 503),
    "/tokenizer_info": (400, 503),
    "/v1/responses/{response_id}": (400, 404),
    "/v1/responses/{response_id}/cancel": (400, 404),
    "/v1/responses/{response_id}/input_items": (400, 404),
    **dict.fromkeys(("/v1/files", "/v1/batches"), (400, 404)),
    **dict.fromkeys(("/v1/files/{file_id}", "/v1/files/{file_id}/content"), (400, 404)),
    **dict.fromkeys(("/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"), (400, 404)),
    "/admin/sessions/{session_id}": (404, 503),
    "/admin/prefixes": (503,),
    "/admin/prefixes/{prefix_id}": (404, 503),
    "/admin/requests/{request_id}": (404,),
    **dict.fromkeys(("/is_sleeping", "/is_paused"), (400, 503)),
    **dict.fromkeys(("/sleep", "/wake_up", "/pause", "/resume"), (400, 503)),
    **dict.fromkeys(("/reset_prefix_cache", "/start_profile", "/stop_profile"), (400, 503)),
}
"""Statuses of routes without a body, beside `_OF_EVERY_ROUTE`."""
_KEEPING = {
    "/v1/files",
    "/v1/batches",
    "/v1/batches/{batch_id}/cancel",
    "/v1/responses",
    "/v1/chat/completions",
}
"""Routes that keep what is posted there."""


def describe(document: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Return the framework's document with all responses, and with bounds from `limits`."""
    kinds = list(dict.fromkeys((ErrorResponse, MessagesErrorResponse, *_ANSWERS.values())))
    _, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(components)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _responses(path, method, "requestBody" in operation)
    for name, bounds in _bounds(limits).items():
        for schema in schemas.values():
            _bind(schema.get("properties", {}).get(name), bounds)
    for name, fields in _own_bounds(limits).items():
        for field, bounds in fields.items():
            _bind(schemas[name]["properties"][field], bounds)
    return document


def _responses(path: str, method: str, has_body: bool) -> dict[str, Any]:
    kind = _ANSWERS.get(f"{method} {path}") or _ANSWERS.get(path)
    schema: dict[str, Any] = {"type": "object"}
    if kind is not None:
        schema = {"$ref": _REFERENCE.format(name=kind.__name__)}
    content: dict[str, Any] = {_JSON: {"schema": schema}}
    if path == "/metrics":
        content = {_TEXT: {"schema": {"type": "string"}}}
    elif path == "/v1/files/{file_id}/content":
        content = {_BYTES: {"schema": {"type": "string", "format": "binary"}}}
    elif path in _STREAMING:
        content[_STREAM] = {"schema": {"type": "string"}}
    found: dict[str, Any] = {"200": {"description": "As asked.", "content": content}}
    if path in PROBES:
        not_well = {"description": "The state in which it is not so.", "content": content}
        return {**found, "503": not_well, **_refusals((403, 431, 500))}
    if (method, path) == ("get", "/v1/responses"):
        return {"101": {"description": "A WebSocket."}, **_refusals((*_OF_EVERY_ROUTE, 400))}
    own = _OF_BODIES if has_body else _OF_OTHERS.get(path, ())
    if method == "post" and path in _KEEPING:
        own = (*own, 507)
    if is_messages_path(path):
        own = (*(status for status in own if status != 503), 529)
        return {**found, **_refusals((*_OF_EVERY_ROUTE, *own), MessagesErrorResponse)}
    return {**found, **_refusals((*_OF_EVERY_ROUTE, *own))}


def _refusals(
    statuses: tuple[int, ...], kind: type[msgspec.Struct] = ErrorResponse
) -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}
    return {
        str(status): {"description": _MEANINGS[status], "content": content}
        for status in sorted(statuses)
    }


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
