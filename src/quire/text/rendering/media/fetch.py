"""Images fetched for requests: from listed hosts alone, at addresses that anybody could reach.

A name is resolved once per hop, all its addresses are checked, and one of those is dialled, so that
a name that changes its mind reaches nothing else. Proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from quire.base.errors import RequestError, quoted

__all__ = ["Addresses", "ImageFetcher", "all_addresses", "global_addresses"]

MAX_REDIRECTS = 3
TIMEOUT_S = 15.0
CHUNK_BYTES = 65_536
MAX_LOOKUPS = 16
"""Most names that are looked up at once. One whose server never answers holds its place until the
system gives it up, in half a minute or so."""

_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_UNICAST = ipaddress.ip_network("2000::/3")
"""The only part of IPv6 that is given out for global unicast (RFC 4291, IANA's registry)."""

_EMBEDDED = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32")))
"""Networks in it with addresses that stand for others of IPv4 (RFC 3056, 4380)."""

Addresses = Callable[[str, int], Sequence[str]]
"""Resolver of a host and a port. It raises OSError if there are no addresses."""


def all_addresses(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host. Raises OSError if there are none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    if not addresses:
        raise OSError("the host has no address")
    return addresses


def global_addresses(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host. Raises OSError if there are none, or one of them is not
    global."""
    addresses = all_addresses(host, port)
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        checked = mapped or address
        is_odd = checked.version == 6 and (
            checked not in _UNICAST or any(checked in network for network in _EMBEDDED)
        )
        if is_odd or not checked.is_global or checked.is_multicast:
            raise OSError("an address of the host is not a global one")
    return addresses


@dataclass(frozen=True, slots=True)
class _Target:
    scheme: str
    host: str
    port: int
    path: str


class ImageFetcher:
    """Reads images by http: and https: URLs. Any thread may call it."""

    def __init__(
        self,
        hosts: Collection[str] | None,
        max_bytes: int,
        addresses: Addresses = global_addresses,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """hosts: hosts that URLs may name, "host" or "host:port"; None for any. timeout_s: seconds
        for all hops of one image together, the look-up of their names included."""
        self._hosts = None if hosts is None else frozenset(host.strip().lower() for host in hosts)
        self._max_bytes = max_bytes
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._lookups = threading.BoundedSemaphore(MAX_LOOKUPS)

    def __call__(self, url: str, place: str) -> bytes:
        """Return the bytes behind a URL. place: its path in the request. Raises RequestError for
        hosts that are not listed, addresses that are not global, and what is not there, too large
        or too slow."""
        deadline = time.monotonic() + self._timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            target = self._target(url, place)
            try:
                found = self._get(target, deadline)
            except (OSError, http.client.HTTPException, ValueError) as error:
                late = time.monotonic() >= deadline
                reason = f"it took over {self._timeout_s:g} s" if late else _first_line(error)
                raise RequestError(f"{place}: {quoted(url)} cannot be read ({reason})") from error
            if isinstance(found, bytes):
                return found
            following = urllib.parse.urljoin(url, found)
            if self._target(following, place).port != target.port:
                raise RequestError(f"{place}: {quoted(url)} is redirected to another port")
            url = following
        raise RequestError(f"{place}: {quoted(url)} is redirected more than {MAX_REDIRECTS} times")

    def _target(self, url: str, place: str) -> _Target:
        try:
            if not url.isascii() or any(sign in url for sign in " \t\r\n\\"):
                raise ValueError("it has signs that no URL has")
            parts = urllib.parse.urlsplit(url)
            host, scheme = (parts.hostname or "").rstrip("."), parts.scheme.lower()
            port = parts.port or _PORTS.get(scheme, 0)
            if scheme not in _PORTS or not host or "@" in parts.netloc:
                raise ValueError("it is no plain http: or https: URL")
        except ValueError as error:
            raise RequestError(f"{place}: {quoted(url)} cannot be read ({error})") from error
        names = (f"{host}:{port}", *((host,) if port == _PORTS[scheme] else ()))
        if self._hosts is not None and self._hosts.isdisjoint(names):
            raise RequestError(
                f"{place} names the host {quoted(parts.netloc)}, which allowed_media_domains does "
                "not list: send the image as a data: URL"
            )
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        return _Target(scheme, host, port, path)

    def _get(self, target: _Target, deadline: float) -> bytes | str:
        """Return the body, or where the host redirects to. Raises OSError, ValueError or
        HTTPException."""
        address = self._look_up(target, deadline)[0]
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time is left")
        # A host that sends a byte now and then would outlast the timeout of each read. TLS takes
        # the socket away from `dialled`, so the watch has a descriptor of its own.
        with (
            socket.create_connection((address, target.port), timeout=left) as dialled,
            dialled.dup() as watched,
        ):
            watch = threading.Timer(left, _shut, (watched,))
            watch.daemon = True
            try:
                watch.start()
            except RuntimeError as error:  # the system has no more threads
                raise OSError(f"the host cannot be asked: {error}") from error
            try:
                found = self._ask(target, dialled)
            finally:
                watch.cancel()
            if time.monotonic() >= deadline:  # the end may be that of the watch
                raise TimeoutError("no time is left")
            return found

    def _look_up(self, target: _Target, deadline: float) -> Sequence[str]:
        """Return the addresses of a host. The system's resolver knows no deadline, so it runs in a
        thread that is left behind if it is late."""
        if not self._lookups.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError("too many names are looked up")
        found = Future[Sequence[str]]()

        def work() -> None:
            try:
                found.set_result(self._addresses(target.host, target.port))
            except Exception as error:  # noqa: BLE001  it is raised where the result is awaited
                found.set_exception(error)
            finally:
                self._lookups.release()

        try:
            threading.Thread(target=work, name="quire-lookup", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._lookups.release()
            raise OSError(f"the host cannot be looked up: {error}") from error
        return found.result(max(deadline - time.monotonic(), 0.0))

    def _ask(self, target: _Target, dialled: socket.socket) -> bytes | str:
        if target.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(target.host, target.port, context=context)
            connection.sock = context.wrap_socket(dialled, server_hostname=target.host)
        else:
            connection = http.client.HTTPConnection(target.host, target.port)
            connection.sock = dialled
        try:
            headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "quire"}
            connection.request("GET", target.path, headers=headers)
            with connection.getresponse() as response:
                if response.status in _REDIRECTS:
                    return response.getheader("Location") or ""
                if response.status != http.client.OK:
                    raise ValueError(f"the host answers {response.status}")
                return self._body(response)
        finally:
            connection.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        pieces: list[bytes] = []
        num_bytes = 0
        if (response.length or 0) > self._max_bytes:
            raise ValueError(f"it has {response.length} bytes, over {self._max_bytes}")
        while piece := response.read1(CHUNK_BYTES):
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise ValueError(f"it has over {self._max_bytes} bytes")
            pieces.append(piece)
        if response.length:
            raise ValueError("the host ended it early")
        return b"".join(pieces)


def _shut(dialled: socket.socket) -> None:
    try:
        dialled.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]
