"""Error responses, in the shape that OpenAI clients read:

{"error": {"message": …, "type": …, "param": … or null, "code": the HTTP status}}

and, on the routes of the Messages API, in the one that its clients read:

{"type": "error", "error": {"type": …, "message": …}, "request_id": …}
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.base.errors import EngineError, EngineUnavailableError, QuireError, RequestError, clipped
from quire.server.requests.bodies import ChatRequest, CompletionRequest, TokensRequest

__all__ = [
    "CLIENT_LEFT",
    "OVERLOADED",
    "ErrorReply",
    "ErrorResponse",
    "MessagesErrorResponse",
    "RefusedError",
    "error_reply",
    "is_messages_path",
]

logger = logging.getLogger("quire.server")

CLIENT_LEFT = 499
"""Status, in logs and metrics only, of a request whose client has left, as in nginx."""

MAX_MESSAGE_CHARS = 1500
"""Keeps an error body under 2 KiB, whatever the request was."""

RETRY_JITTER = 0.2

_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    507: "InsufficientStorageError",
}

_MESSAGES_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MESSAGES_PATH = re.compile(r"/v1/messages(?:/|$)")
OVERLOADED = 529
"""Status of the Messages API where other routes have 503."""

_STORAGE_ERRNOS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))
_STORAGE_CODES = frozenset((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY))

_TOOLS = (r"\btools\[(\d+)\]\.function\b", r"tools[\1]")
_OF_SAMPLING = {*CompletionRequest.__struct_fields__} - {*TokensRequest.__struct_fields__}
_OWN_NAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    r"/v1/responses(?:/|$)": (
        _TOOLS,
        (r"\bresponse_format\.json_schema\b|\bresponse_format\b", "text.format"),
        (r"\bmax_completion_tokens\b|\bmax_tokens\b", "max_output_tokens"),
        (r"\breasoning_effort\b", "reasoning.effort"),
        (r"\bverbosity\b", "text.verbosity"),
        (r"^messages\[\d+\]\.(?=\w)", "a message of input: "),
        (r"^messages\b", "input"),
    ),
    r"/v1/messages(?:/|$)": (
        (r"\btools\[(\d+)\]\.function\.parameters\b", r"tools[\1].input_schema"),
        _TOOLS,
        (r"\bresponse_format\.json_schema\b|\bresponse_format\b", "output_config.format"),
        (r"\bthinking_token_budget\b", "thinking.budget_tokens"),
        (r"\breasoning_effort\b", "output_config.effort"),
        (r"^stop\b|(?<=^a string of )stop\b", "stop_sequences"),
    ),
    r"/inference/v1/generate$": (
        (r"^prompt\b", "token_ids"),
        (
            rf"(?:^|(?<=\())({'|'.join(sorted(_OF_SAMPLING))})\b",
            r"sampling_params.\1",
        ),
    ),
    r"/(?:v1/embeddings|pooling|classify)$": ((r"^prompt\b", "input"),),
}
"""Fields of routes whose requests become those of another API, by what errors there call them.
Values stand in quotes, and are left alone."""
_QUOTED = re.compile(r"""((?<!\w)'[^']*'|"[^"]*")""")
_END = r"(?![\w'\"-])"
_RENAMED = {
    re.compile(path): [
        (re.compile(rf"(?<![\w'\"./-])(?:{old})" + _END * (old[-1] != ")")), new)
        for old, new in names
    ]
    for path, names in _OWN_NAMES.items()
}

_NAME = re.compile(r"(?:an entry of |a key of )?[`'\"]?(?P<name>[a-z][a-z0-9_]*)\b")
_FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}


class RefusedError(QuireError):
    """Ends a request with this status. `param` names the field at fault; `retry_after_s` says when
    another try may be worth it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s


class ErrorDetail(msgspec.Struct):
    """type: a name for the status. param: the field at fault. code: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """Body of every status but 200."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct):
    """Body of every status but 200 of the Messages API."""

    type: str
    error: MessagesErrorDetail
    request_id: str


class ErrorReply(msgspec.Struct):
    """One error in its wire form, a response of its own or an event in a stream. request_id: id for
    the shape of the Messages API, which names the request; may be empty."""

    status: int
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    request_id: str | None = None

    def at(self, path: str, request_id: str = "") -> ErrorReply:
        """Return the reply in the shape of the API that has this path."""
        if not is_messages_path(path):
            return self
        status = OVERLOADED if self.status == 503 else self.status
        return ErrorReply(status, self.message, None, self.retry_after_s, request_id)

    @property
    def body(self) -> bytes:
        """Return JSON, at most 2 KiB for ordinary text."""
        if self.request_id is not None:
            return self._messages_body(self.request_id)
        message = clipped(self.message, MAX_MESSAGE_CHARS)
        kind = _TYPES.get(self.status, "APIError")
        error = ErrorDetail(message, kind, self.param, self.status)
        return msgspec.json.encode(ErrorResponse(error))

    def _messages_body(self, request_id: str) -> bytes:
        status = 503 if self.status == OVERLOADED else self.status
        other = "api_error" if status >= 500 else "invalid_request_error"
        kind = _MESSAGES_TYPES.get(status, other)
        error = MessagesErrorDetail(kind, clipped(self.message, MAX_MESSAGE_CHARS))
        return msgspec.json.encode(MessagesErrorResponse("error", error, request_id))

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        headers = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(_spread(self.retry_after_s))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def is_messages_path(path: str) -> bool:
    """Return True if a path belongs to the Messages API, below any root."""
    return _MESSAGES_PATH.search(path) is not None


def error_reply(error: BaseException, scope: Mapping[str, Any]) -> ErrorReply:
    """Return the reply to any exception; all routes and streams use it. scope: scope of the
    request, whose path decides the shape.

    The message of an exception that quire did not raise on purpose stays in the log.
    """
    request_id: str = scope.get("state", {}).get("request_id", "")
    path = scope.get("path", "")
    return _with_own_names(_reply_to(error), path).at(path, request_id)


def _with_own_names(reply: ErrorReply, path: str) -> ErrorReply:
    """Return the reply with the field names of the route that was called."""
    for route, names in _RENAMED.items():
        if route.search(path) is None:
            continue
        pieces = _QUOTED.split(reply.message)
        for old, new in names:
            # Every other piece is a quoted value, which is the client's.
            pieces[::2] = [old.sub(new, piece) for piece in pieces[::2]]
            if reply.param is not None:
                reply.param = str(old.sub(new, reply.param)).partition(".")[0]
        reply.message = "".join(pieces)
    return reply


def _reply_to(error: BaseException) -> ErrorReply:
    if isinstance(error, RefusedError):
        return ErrorReply(error.status, str(error), error.param, error.retry_after_s)
    if isinstance(error, RequestError):
        return ErrorReply(400, str(error), _param_of(str(error)))
    if isinstance(error, EngineUnavailableError):
        return ErrorReply(503, str(error), retry_after_s=1)
    if isinstance(error, EngineError):
        return ErrorReply(500, str(error))
    if (reason := _storage_fault(error)) is not None:
        logger.warning("there is no room to keep what a request brings: %s", error)
        message = f"The server has no room to keep this ({reason}). Delete files or make room."
        return ErrorReply(507, message)
    logger.error("a request failed by a fault of the server", exc_info=error)
    return ErrorReply(500, "The server failed at this request. Its log says why; please report it.")


def _storage_fault(error: BaseException) -> str | None:
    """Return why a file or database could not be written, without its place; None of any other
    error."""
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        return os.strerror(error.errno).lower()
    if isinstance(error, sqlite3.OperationalError):
        primary = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        return str(error) if primary in _STORAGE_CODES else None
    return None


def _spread(seconds: float) -> int:
    """Return whole seconds within 20 % of `seconds`, at least 1, so that clients that were refused
    together do not return together."""
    return max(1, math.ceil(seconds * random.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER)))


def _param_of(message: str) -> str | None:
    """Return the field that a message is about: messages on parameters begin with its name."""
    found = _NAME.match(message)
    word = "" if found is None else found["name"]
    return word if word in _FIELDS or "_" in word else None
