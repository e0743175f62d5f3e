"""The entrance of every HTTP request: headers, host and key are checked before routing.

Paths are open only if their routes say so, so a new route is guarded from its first day.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.requests.errors import RefusedError, error_reply
from quire.server.settings import ServerSettings

__all__ = ["CALLER", "ApiKeys", "Gate", "InternalCaller", "is_foreign_page"]

CALLER = "quire.caller"
"""Key of a scope that holds the caller of a request that the server makes to itself. No HTTP server
sets it."""

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing (RFC 9110, 9.2.1). Their answers are kept from foreign pages by the
browser."""

_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")
"""The name in a Host header; an IPv6 address keeps its brackets."""


@dataclass(frozen=True, slots=True)
class InternalCaller:
    """Identity of the server's own requests. tenant, weight: name and weight of a key. is_spare:
    whether they run on spare capacity."""

    tenant: str
    weight: float
    is_spare: bool = True


class ApiKeys:
    """Stores only SHA-256 digests of keys. A wrong key takes as long to check as a right one."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def names(self) -> list[str]:
        """Names, in the order of the keys."""
        return [_name(digest) for digest in self._digests]

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, headers: dict[bytes, bytes]) -> str | None:
        """Return a name for the key in the headers (a part of its digest); None if there is no
        valid one."""
        given = headers.get(b"x-api-key", b"")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip()
        digest = _digest(given)
        found = [known for known in self._digests if hmac.compare_digest(known, digest)]
        return _name(found[0]) if found else None


class Gate:
    """ASGI middleware. It sets in `scope["state"]` the name of the caller's key (`tenant`, empty if
    the server has no keys), the key's `weight`, and `is_spare` if the request runs on spare
    capacity."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, open_paths: Iterable[str] = ()
    ) -> None:
        """open_paths: paths that need no key."""
        self._app = app
        self._limits = settings.limits
        self._keys = ApiKeys(settings.api_key)
        weights = settings.api_key_weights
        self._weights = dict(zip(self._keys.names, weights, strict=False))
        self._open_paths = {root + path for path in open_paths for root in ("", settings.root_path)}
        self._origins = settings.allowed_origins
        self._hosts = {host.lower() for host in (settings.host, *settings.allowed_hosts)}
        # A web page lacks the key, and cannot reach a Unix socket.
        self._checks_host = settings.is_local and settings.uds is None and not settings.api_key
        self._num_open: Counter[str] = Counter()
        most = settings.limits.requests_per_key(len(settings.api_key))
        self._max_open = most and ceil(most / settings.api_server_count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        caller = scope.get(CALLER)
        state["is_spare"] = isinstance(caller, InternalCaller) and caller.is_spare
        if isinstance(caller, InternalCaller):
            state["tenant"], state["weight"] = caller.tenant, caller.weight
            await self._app(scope, receive, send)
            return
        try:
            key = self._check(scope)
        except RefusedError as error:
            reply = error_reply(error, scope)
            await Response(reply.body, reply.status, reply.headers)(scope, receive, send)
            return
        state["tenant"] = key
        state["weight"] = self._weights.get(key, 1.0)
        self._num_open[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open[key] -= 1
            if not self._num_open[key]:
                del self._num_open[key]

    def _check(self, scope: Scope) -> str:
        """Return the caller's key, as `ApiKeys.find` names it."""
        items: list[tuple[bytes, bytes]] = scope["headers"]
        self._check_size(items)
        headers = dict(items)
        if self._checks_host:
            self._check_host(headers.get(b"host", b""))
            if scope["method"] not in _SAFE_METHODS:
                self._check_origin(headers)
        if not len(self._keys) or scope["path"] in self._open_paths:
            return ""
        key = self._keys.find(headers)
        if key is None:
            raise RefusedError(
                "The request has no valid API key. Send one as `Authorization: Bearer KEY` or "
                "`x-api-key: KEY`.",
                status=401,
            )
        if self._max_open is not None and self._num_open[key] >= self._max_open:
            raise RefusedError(
                f"This API key has {self._max_open} requests open (max_requests_per_key). "
                "Wait for one to end.",
                status=429,
                retry_after_s=1,
            )
        return key

    def _check_size(self, items: list[tuple[bytes, bytes]]) -> None:
        num_bytes = sum(len(name) + len(value) for name, value in items)
        limits = self._limits
        if len(items) > limits.max_headers or num_bytes > limits.max_header_bytes:
            raise RefusedError(
                f"The request has {len(items)} headers of {num_bytes} bytes, but this server takes "
                f"{limits.max_headers} of {limits.max_header_bytes} (max_headers, "
                "max_header_bytes). Send less.",
                status=431,
            )

    def _check_host(self, host: bytes) -> None:
        """Refuse, without a key, a web page whose name was made to resolve to this machine."""
        given = host.decode("latin-1").lower()
        name = _HOST.fullmatch(given)
        is_known = name is not None and (_is_local(name[1]) or name[1] in self._hosts)
        if given and not is_known and given not in self._hosts:
            raise RefusedError(
                f"The Host header is {given[:80]!r}, which is not this machine. Start the server "
                "with --api-key or --allowed-hosts to serve under that name.",
                status=403,
            )

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Refuse, without a key, what a page of another site sends: a browser asks first only
        before JSON, but not before forms and bodies that are empty."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        host = headers.get(b"host", b"").decode("latin-1")
        if is_foreign_page(origin, host, self._origins):
            raise RefusedError(
                f"Web pages of {origin[:80]!r} may change nothing here. Start the server with "
                "--allowed-origins to let them.",
                status=403,
            )


def is_foreign_page(origin: str, host: str, allowed: Iterable[str]) -> bool:
    """Return True if a request comes from a web page of another host that is not allowed. origin:
    its Origin header (RFC 6454, 7); none or an empty one is of no page. host: its Host header."""
    is_own = origin.partition("://")[2].lower() == host.lower() != ""
    return bool(origin) and not is_own and not {origin, "*"} & set(allowed)


def _is_local(name: str) -> bool:
    """Return True if no resolver maps this name or address to another machine (RFC 6761, 6.3)."""
    labels = name.removesuffix(".").split(".")
    if labels[-1] == "localhost" and all(labels):
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _name(digest: bytes) -> str:
    """Return a part of a key's digest: enough to tell keys apart, useless for guessing one."""
    return digest[:16].hex()
