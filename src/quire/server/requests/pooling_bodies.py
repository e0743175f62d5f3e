"""Bodies of requests for vectors, scores and batches. None means "not given"."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "BatchRequest", "ClassifyRequest", "EmbeddingRequest", "Pooled", "PoolingRequest",
    "RerankRequest", "ScoreRequest",
]  # fmt: skip


class Pooled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all of them have. pooling: hidden states that count; None for those that the
    model's files name."""

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
    """POST /v1/embeddings. dimensions: keep the first ones of a vector, scaled to length 1.
    prompt_name: one of the model's prompts, which is put before each text."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class ClassifyRequest(Pooled, kw_only=True, forbid_unknown_fields=True):
    """POST /classify. use_activation: give probabilities, not the model's raw numbers."""

    input: str | list[str | int | list[int]]
    use_activation: bool | None = None


class ScoreRequest(Pooled, kw_only=True, forbid_unknown_fields=True):
    """POST /score and /v1/score: one text with each of several, or pairs of two lists."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(Pooled, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank, /v1/rerank and /v2/rerank. documents: texts, or objects with a `text`.
    max_tokens_per_doc: cut each of these to its first tokens, so many."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    max_tokens_per_doc: int | None = None
    return_documents: bool | None = None


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches. endpoint: the route of all lines of the file."""

    input_file_id: str
    endpoint: str
    completion_window: str | None = None
    metadata: dict[str, str] | None = None
