"""Schemas of bodies for /openapi.json. Routes decode bodies with msgspec, not with pydantic."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.requests import bodies as requests
from quire.server.requests.messages_bodies import CountTokensRequest, MessagesRequest
from quire.server.requests.pooling_bodies import (
    BatchRequest,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.requests.responses_bodies import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)

__all__ = ["add_body_schemas", "body_of"]

_REFERENCE = "#/components/schemas/{name}"
_BODIES = (
    requests.CompletionRequest,
    requests.ChatRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
    requests.PinRequest,
    requests.TokensRequest,
    requests.AdapterRequest,
    requests.SessionChange,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    InputTokensRequest,
    CompactRequest,
    EmbeddingRequest,
    PoolingRequest,
    ClassifyRequest,
    ScoreRequest,
    RerankRequest,
    BatchRequest,
)


def body_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that takes such a body."""
    schema = {"$ref": _REFERENCE.format(name=kind.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def add_body_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the schemas that `body_of` names."""
    _, components = msgspec.json.schema_components(_BODIES, ref_template=_REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    return document
