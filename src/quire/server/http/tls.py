"""The TLS files of a server."""

from __future__ import annotations

import ssl

from quire.errors import ConfigError
from quire.server.settings import ServerSettings

__all__ = ["tls_context"]


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the TLS context, None without TLS. Raises ConfigError if the files cannot be read."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        raise ConfigError(
            f"The TLS files {settings.ssl_keyfile} and {settings.ssl_certfile} cannot be used: "
            f"{error}. Give a key and its certificate in PEM form."
        ) from error
    return context
