"""The TLS files of a server."""

from __future__ import annotations

import ssl
from pathlib import Path

from quire.base.errors import ConfigError
from quire.server.settings import ServerSettings

__all__ = ["key_password", "tls_context"]


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the TLS context, None without TLS. Raises ConfigError if the files cannot be read."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, lambda: _password_of(settings)
        )
    except OSError as error:
        raise ConfigError(
            f"The TLS files {settings.ssl_keyfile} and {settings.ssl_certfile} cannot be used: "
            f"{error}. Give a key and its certificate in PEM form."
        ) from error
    return context


def key_password(settings: ServerSettings) -> str | None:
    """Return the password of the TLS key, None if none is given. Raises ConfigError if its file
    cannot be read."""
    file = settings.ssl_keyfile_password_file
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"ssl_keyfile_password_file is {file!r}, which cannot be read ({error}). Give a text "
            "file that holds the password alone."
        ) from error


def _password_of(settings: ServerSettings) -> str:
    """Return the password of an encrypted key, for which OpenSSL would ask at the terminal."""
    password = key_password(settings)
    if password is None:
        raise ConfigError(
            f"The TLS key {settings.ssl_keyfile} is encrypted. Name the file of its password by "
            "ssl_keyfile_password_file, or give a key that is not encrypted."
        )
    return password
