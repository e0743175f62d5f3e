"""The HTTP server: OpenAI-shaped routes over the engine's client door. Free of torch.

    run_server(engine_settings, server_settings) -> exit status

serves until a signal ends it. `create_app` is the same application for an engine that already
runs; docs/server.md draws the way of a request.
"""

from quire.server.limits import LIMIT_HELP, Limits
from quire.server.run import run_server
from quire.server.settings import SERVER_HELP, ServerSettings

__all__ = ["LIMIT_HELP", "SERVER_HELP", "Limits", "ServerSettings", "run_server"]
