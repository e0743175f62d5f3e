"""The lines of a batch: the request of each, and the line that answers it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["BATCH_ROUTES", "BatchLine", "error_line", "read_line", "result_line"]

BATCH_ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/classify",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchLine:
    """key: hash of the line, by which its answer is found again. fault: why it is no request; empty
    if it is one."""

    key: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    fault: str = ""


class _Fields(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_line(text: bytes, seen: set[str], route: str | None = None) -> BatchLine:
    """Read one line. seen: ids of earlier lines, to which this one's is added. route: the route
    that all lines must name; None for any. A bad line has its fault, and harms no other line."""
    key = hashlib.blake2b(text, digest_size=16).hexdigest()
    try:
        fields = msgspec.json.decode(text, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BatchLine(key, None, fault=f"The line is no request of a batch: {error}.")
    custom_id, fault = fields.custom_id, ""
    if custom_id in seen:
        fault = f"custom_id {custom_id[:80]!r} is that of a line before it. Use each once."
    elif fields.method != "POST":
        fault = f"method is {fields.method[:16]!r}. Use POST."
    elif fields.url not in BATCH_ROUTES:
        fault = f"url is {fields.url[:80]!r}. Use one of {', '.join(BATCH_ROUTES)}."
    elif route is not None and fields.url != route:
        fault = f"url is {fields.url!r}, but the batch is for {route!r}."
    elif fields.body.get("stream") or fields.body.get("background"):
        fault = "The body has stream or background, but a batch gives whole answers. Leave it out."
    seen.add(custom_id)
    body = msgspec.json.encode(fields.body)
    return BatchLine(key, custom_id, fields.url, body, fault)


def result_line(line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    """Return the answer to a line as text, without a line end."""
    response = {
        "status_code": status,
        "request_id": request_id,
        "body": msgspec.Raw(body or b"null"),
    }
    return _written(line, response, None)


def error_line(line: BatchLine) -> bytes:
    """Return the answer to a line that is no request."""
    return _written(line, None, {"code": "invalid_line", "message": line.fault})


def _written(line: BatchLine, response: object, error: object) -> bytes:
    found = {
        "id": f"batch_req_{line.key}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(found)
