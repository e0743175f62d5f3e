"""Bodies of requests for vectors and scores. None means "not given"."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["EmbeddingRequest", "Pooled", "PoolingRequest", "RerankRequest", "ScoreRequest"]


class Pooled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all of them have. pooling: which hidden states count, the last token's unless it
    is given."""

    model: str | None = None
    pooling: Literal["last", "cls", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None


class PoolingRequest(Pooled, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling. input: a text, token ids, or a list of either."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    task: Literal["embed"] | None = None


class EmbeddingRequest(Pooled, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. dimensions: the first so many of a vector, scaled to length 1."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class ScoreRequest(Pooled, kw_only=True, forbid_unknown_fields=True):
    """POST /score and /v1/score: one text with each of several, or pairs of two lists."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(Pooled, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank, /v1/rerank and /v2/rerank. documents: texts, or objects with a `text`."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None
