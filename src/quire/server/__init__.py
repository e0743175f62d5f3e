"""The HTTP server: OpenAI-compatible routes over the engine's client. It never imports torch.

`run_server(engine_settings, server_settings)` serves until a signal ends it, and returns the exit
status. `create_app` makes the same application for an engine that already runs. docs/server.md
draws the way of a request.
"""

from typing import TYPE_CHECKING, Any

from quire.server.requests.limits import LIMIT_HELP, Limits
from quire.server.settings import SERVER_HELP, ServerSettings

if TYPE_CHECKING:
    from quire.server.processes.run import run_server

__all__ = ["LIMIT_HELP", "SERVER_HELP", "Limits", "ServerSettings", "run_server"]


def __getattr__(name: str) -> Any:
    """Import the server on first use: the flags of `quire serve` need only its settings, and
    FastAPI takes half a second."""
    if name != "run_server":
        raise AttributeError(f"module 'quire.server' has no attribute {name!r}")
    from quire.server.processes.run import run_server

    return run_server
