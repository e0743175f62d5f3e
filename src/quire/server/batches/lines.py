"""The lines of a batch: what each asks for, and the line that answers it."""

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
    """key: of the text of the line, by which an answer is found again. fault: why it asks for
    nothing; empty if it does."""

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
    """Read one line. seen: ids of those before it, to which its own is added. route: that all lines
    ask; None for any. A bad line has its fault, and harms no other."""
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
    """Return the answer to a line, as a line without its end."""
    response = {
        "status_code": status,
        "request_id": request_id,
        "body": msgspec.Raw(body or b"null"),
    }
    return _written(line, response, None)


def error_line(line: BatchLine) -> bytes:
    """Return the answer to a line that asks for nothing."""
    return _written(line, None, {"code": "invalid_line", "message": line.fault})


def _written(line: BatchLine, response: object, error: object) -> bytes:
    found = {
        "id": f"batch_req_{line.key}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(found)
