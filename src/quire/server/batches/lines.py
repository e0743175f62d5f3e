"""The lines of a batch: the request of each, and the line that answers it."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import msgspec

__all__ = ["BATCH_ROUTES", "BatchLine", "error_line", "read_line", "result_line", "texts_of_lines"]

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


_NULL, _FALSE = msgspec.Raw(b"null"), msgspec.Raw(b"false")


class _Fields(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Asked(msgspec.Struct):
    """Fields of a body that a batch does not have. Only the route decodes the others, within the
    bounds of bodies."""

    stream: msgspec.Raw = _NULL
    background: msgspec.Raw = _NULL
    deadline_s: msgspec.Raw = _NULL

    @property
    def fault(self) -> str:
        if self.stream not in (_NULL, _FALSE) or self.background not in (_NULL, _FALSE):
            return (
                "The body has stream or background, but a batch gives whole answers. Leave it out."
            )
        if self.deadline_s != _NULL:
            return "The body has deadline_s, but a batch waits for spare capacity. Leave it out."
        return ""


def texts_of_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank, without the mark of byte order that some
    programs write first."""
    is_first = True
    for text in file:
        stripped = (text.removeprefix(codecs.BOM_UTF8) if is_first else text).strip()
        is_first = False
        if stripped:
            yield stripped


def read_line(text: bytes, seen: set[str], max_bytes: int, route: str | None = None) -> BatchLine:
    """Read one line. seen: ids of earlier lines, to which this one's is added. max_bytes: most
    bytes of a line, the bound of a request's body. route: the route that all lines must name; None
    for any. A bad line carries its fault, and harms no other line."""
    key = hashlib.blake2b(text, digest_size=16).hexdigest()
    if len(text) > max_bytes:
        fault = f"The line has more than {max_bytes} bytes (max_body_bytes). Send less."
        return BatchLine(key, None, fault=fault)
    try:
        fields = msgspec.json.decode(text, type=_Fields)
        asked = msgspec.json.decode(fields.body, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BatchLine(key, None, fault=f"The line is no request of a batch: {error}.")
    custom_id = fields.custom_id
    if custom_id in seen:
        fault = f"custom_id {custom_id[:80]!r} is that of a line before it. Use each once."
    elif fields.method != "POST":
        fault = f"method is {fields.method[:16]!r}. Use POST."
    elif fields.url not in BATCH_ROUTES:
        fault = f"url is {fields.url[:80]!r}. Use one of {', '.join(BATCH_ROUTES)}."
    elif route is not None and fields.url != route:
        fault = f"url is {fields.url!r}, but the batch is for {route!r}."
    else:
        fault = asked.fault
    seen.add(custom_id)
    return BatchLine(key, custom_id, fields.url, bytes(fields.body), fault)


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
