"""Error responses, in the shape that OpenAI clients read:

{"error": {"message": …, "type": …, "param": … or null, "code": the HTTP status}}
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Mapping

import msgspec

from quire.errors import EngineError, EngineUnavailableError, QuireError, RequestError
from quire.server.requests.bodies import ChatRequest, CompletionRequest

__all__ = ["CLIENT_LEFT", "ErrorReply", "RefusedError", "error_reply"]

logger = logging.getLogger("quire.server")

CLIENT_LEFT = 499
"""Nobody reads this status; logs and metrics show it, as those of nginx do."""

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
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

_NAME = re.compile(r"(?:an entry of |a key of )?[`'\"]?(?P<name>[a-z][a-z0-9_]*)\b")
_FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}


class RefusedError(QuireError):
    """A request ends here with this status. `param` names the field at fault; `retry_after_s` says
    when it may be worth another try."""

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


class ErrorReply(msgspec.Struct):
    """One error as it is sent: as a response of its own, or as an event in a stream."""

    status: int
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> bytes:
        """JSON, at most 2 KiB for ordinary text."""
        error = {
            "message": _clipped(self.message),
            "type": _TYPES.get(self.status, "APIError"),
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        headers = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(_spread(self.retry_after_s))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def error_reply(error: BaseException) -> ErrorReply:
    """Return the reply to any exception: the one funnel of all routes and streams.

    The words of an exception that quire did not raise on purpose stay in the log.
    """
    if isinstance(error, RefusedError):
        return ErrorReply(error.status, str(error), error.param, error.retry_after_s)
    if isinstance(error, RequestError):
        return ErrorReply(400, str(error), _param_of(str(error)))
    if isinstance(error, EngineUnavailableError):
        return ErrorReply(503, str(error), retry_after_s=1)
    if isinstance(error, EngineError):
        return ErrorReply(500, str(error))
    logger.error("a request failed by a fault of the server", exc_info=error)
    return ErrorReply(500, "The server failed at this request. Its log says why; please report it.")


def _spread(seconds: float) -> int:
    """Whole seconds within 20 % around `seconds`, at least 1: clients that were refused together
    must not come back together."""
    return max(1, math.ceil(seconds * random.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER)))


def _param_of(message: str) -> str | None:
    """The field that a message is about: those on parameters begin with its name."""
    found = _NAME.match(message)
    word = "" if found is None else found["name"]
    return word if word in _FIELDS or "_" in word else None


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"
