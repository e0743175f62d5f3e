"""The one error tree.

    QuireError
    ├── RequestError   the request's fault: it alone fails (HTTP 4xx)
    ├── EngineError    our fault or the machine's (HTTP 5xx)
    └── ConfigError    the engine cannot start as asked: wrong path, unsupported value, broken file

A message has three parts: what, the value, what to do.
"""

__all__ = ["ConfigError", "EngineError", "QuireError", "RequestError"]


class QuireError(Exception):
    """Base of everything that quire raises on purpose."""


class RequestError(QuireError):
    """A request cannot be served as it was asked; nothing else is affected."""


class EngineError(QuireError):
    """The engine, not the request, is at fault."""


class ConfigError(QuireError):
    """The engine cannot start with these settings, on this machine, or from these files."""
