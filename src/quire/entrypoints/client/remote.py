"""Requests to an OpenAI-shaped server, one at a time, over the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire.base.errors import ConfigError, EngineError, RequestError

__all__ = ["RemoteServer", "ServerAddress", "error_message"]

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
"""A long prompt may be silent for minutes; servers send a comment into streams meanwhile."""

POLL_S = 0.3
"""Seconds between two looks at a server that is starting."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server. path: the part before `/v1/…`, behind a proxy."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse `http://host:port`, with or without the `/v1` that OpenAI clients want. Raises
        ConfigError."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of a server. Give http://127.0.0.1:8000.")
        default = 443 if parts.scheme == "https" else 80
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.scheme, parts.hostname, port or default, path)

    @property
    def is_local(self) -> bool:
        """True if the server is on this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


class RemoteServer:
    """A server at an address; each call is a connection of its own.

    Raises EngineError if nothing listens or the server is at fault, RequestError if it refuses.
    """

    def __init__(self, address: ServerAddress, api_key: str | None = None) -> None:
        self._address = address
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    @property
    def address(self) -> ServerAddress:
        return self._address

    def is_there(self) -> bool:
        """Return whether something listens at the address."""
        connection = self._connection()
        try:
            connection.connect()
        except OSError:
            return False
        finally:
            connection.close()
        return True

    def models(self) -> list[Mapping[str, Any]]:
        """Return the list of `/v1/models`, the server's own model first."""
        found = self.call("GET", "/v1/models").get("data")
        if not isinstance(found, list) or not found:
            raise EngineError(f"The server at {self._address} lists no models at /v1/models.")
        return found

    def wait_for_models(self, on_wait: Callable[[str], None]) -> list[Mapping[str, Any]]:
        """Return `models`, after waiting for a server that is starting (503). on_wait: called once,
        with the server's own message."""
        is_told = False
        while True:
            try:
                return self.models()
            except _StartingError as error:
                if not is_told:
                    on_wait(str(error))
                is_told = True
                time.sleep(POLL_S)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request and its answer as JSON."""
        connection = self._connection()
        try:
            response = self._send(connection, method, path, body)
            return self._as_object(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        finally:
            connection.close()

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed answer, until `[DONE]`. Leaving early closes the connection,
        which ends the request."""
        connection = self._connection()
        try:
            response = self._send(connection, "POST", path, {**body, "stream": True})
            while line := response.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = self._as_object(data)
                if "error" in event:
                    raise EngineError(f"The server broke off: {error_message(data)}")
                yield event
            raise EngineError(f"The server at {self._address} cut its answer off. Try again.")
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        at = self._address
        kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
        return kind(at.host, at.port, timeout=CONNECT_TIMEOUT_S)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
    ) -> http.client.HTTPResponse:
        """The response of a request that the server accepts."""
        text = None if body is None else json.dumps(body)
        try:
            connection.connect()
        except OSError as error:
            raise self._unreachable(error) from error
        connection.sock.settimeout(READ_TIMEOUT_S)
        connection.request(method, self._address.path + path, text, self.headers)
        try:
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            if self._address.scheme == "http" and self._speaks_tls():
                raise EngineError(
                    f"The server at {self._address} speaks TLS: give its address with https://."
                ) from error
            raise
        if response.status == http.HTTPStatus.OK:
            return response
        message = error_message(response.read())
        said = f"The server at {self._address} answers {response.status}: {message}"
        if response.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise _StartingError(said)
        if response.status == http.HTTPStatus.UNAUTHORIZED:
            raise RequestError(f"{said} Give a key with --api-key or QUIRE_API_KEY.")
        if "https" in message.lower() and self._speaks_tls():
            raise EngineError(f"{said} It speaks TLS: give its address with https://.")
        if response.status < http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise RequestError(said)
        raise EngineError(said)

    def _unreachable(self, error: OSError) -> EngineError:
        """Nothing was sent, since the connection failed."""
        at = self._address
        if isinstance(error, ssl.SSLCertVerificationError):
            return EngineError(
                f"The certificate of the server at {at} is not trusted ({error.verify_message}). "
                "Let SSL_CERT_FILE name the file of the authority that signed it, or use the name "
                "that the certificate is for."
            )
        if isinstance(error, ssl.SSLError):
            return EngineError(
                f"The server at {at} speaks no TLS that is understood here ({error.reason}): if it "
                "is a server without TLS, give its address with http://."
            )
        return EngineError(
            f"No server answers at {at} ({error.strerror or error}). Start one with "
            "`quire serve`, or give its address with --url."
        )

    def _speaks_tls(self) -> bool:
        """Return whether a TLS handshake succeeds, whatever the certificate; nothing is sent after
        it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        at = (self._address.host, self._address.port)
        try:
            with socket.create_connection(at, CONNECT_TIMEOUT_S) as plain:
                context.wrap_socket(plain, server_hostname=self._address.host).close()
        except OSError:
            return False
        return True

    def _as_object(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EngineError(
                f"What answers at {self._address} is no model server: it sent {data[:80]!r}."
            )
        return found

    def _lost(self, error: Exception) -> EngineError:
        reason = str(error) or type(error).__name__
        return EngineError(f"The server at {self._address} was lost: {reason}. Try again.")


class _StartingError(EngineError):
    """The server takes no requests now (503)."""


def error_message(body: bytes) -> str:
    """Extract the message from the body of an error, in OpenAI's shape or another."""
    try:
        found = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace").strip() or "no explanation"
    inner = found.get("error", found) if isinstance(found, dict) else found
    said = inner.get("message") if isinstance(inner, dict) else inner
    return str(said or inner)
