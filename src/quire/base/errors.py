"""The one error tree.

    QuireError
    ├── RequestError   the request's fault: it alone fails (HTTP 4xx)
    ├── EngineError    our fault or the machine's (HTTP 5xx)
    │   ├── EngineUnavailableError    requests cannot be taken, now or any more (HTTP 503)
    │   └── EngineLostError    processes that compute together are no longer all there
    └── ConfigError    the engine cannot start as asked: wrong path, unsupported value, broken file

A message has three parts: the fault, the value, the way out. RequestError and ConfigError are also
ValueErrors: scripts that were written for other engines catch those.
"""

__all__ = [
    "ConfigError",
    "EngineError",
    "EngineLostError",
    "EngineUnavailableError",
    "QuireError",
    "RequestError",
    "clipped",
    "quoted",
]


class QuireError(Exception):
    """Base of everything that quire raises on purpose."""


class RequestError(QuireError, ValueError):
    """A request cannot be served as it was asked; nothing else is affected."""


class EngineError(QuireError):
    """The engine, not the request, is at fault."""


class EngineUnavailableError(EngineError):
    """The engine takes no requests now (HTTP 503); it may later, unless its state is DEAD."""


class EngineLostError(EngineError):
    """A process that computes a part of the model has ended or hangs: no step can be computed."""


class ConfigError(QuireError, ValueError):
    """The engine cannot start with these settings, on this machine, or from these files."""


def quoted(value: object) -> str:
    """Return a value as messages show it; of a long one, the beginning."""
    return clipped(repr(value))


def clipped(text: str, most: int = 80) -> str:
    """Return a text of at most `most` characters, the last of which tells that more follow."""
    return text if len(text) <= most else text[: most - 1] + "…"
