"""Sends spans to a collector: OTLP over HTTP, as JSON.

OpenTelemetry's SDK would add packages, protobuf among them, and it measures spans while they run.
These are made from timelines that have ended.
"""

from __future__ import annotations

import http.client
import logging
import queue
import threading
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

import msgspec

import quire
from quire.base.errors import ConfigError
from quire.server.readings.spans import Span, otlp_attributes

logger = logging.getLogger("quire.server")

__all__ = ["Collector", "SpanExporter", "collector_of"]

MAX_WAITING = 4096
"""Spans that wait to be sent; more are dropped."""
MAX_BATCH = 512
DELAY_S = 1.0
TIMEOUT_S = 5.0
MAX_PAUSE_S = 60.0


class Collector(msgspec.Struct, frozen=True):
    """The receiver of spans. url: with its path. headers: sent with each batch. service: name of
    this server in the traces."""

    url: str
    headers: Mapping[str, str]
    service: str


def collector_of(setting: str, environment: Mapping[str, str]) -> Collector | None:
    """Return the collector that a setting or OpenTelemetry's variables name; None without one.

    Raises ConfigError for a URL or a protocol that cannot be served.
    """
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    url = (
        setting
        or environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
        or (base and f"{base.rstrip('/')}/v1/traces")
    )
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not url or (is_off and not setting):
        return None
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_url = urlsplit(""), False
    if not is_url or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            f"otlp_traces_endpoint is {url[:200]!r}. Give the URL of a collector's HTTP port, such "
            "as http://localhost:4318/v1/traces."
        )
    if parts.username is not None:
        raise ConfigError(
            f"otlp_traces_endpoint has a user or a password before {parts.hostname!r}. Leave them "
            "out, and set OTEL_EXPORTER_OTLP_HEADERS=authorization=… instead."
        )
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    protocol = environment.get(name) or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    if protocol == "grpc" or parts.port == 4317:
        raise ConfigError(
            f"otlp_traces_endpoint is {url[:200]!r}, with gRPC. quire sends OTLP over HTTP: give "
            "the collector's HTTP port (4318), and unset OTEL_EXPORTER_OTLP_TRACES_PROTOCOL."
        )
    given = environment.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or environment.get(
        "OTEL_EXPORTER_OTLP_HEADERS", ""
    )
    pairs = (each.partition("=") for each in given.split(",") if "=" in each)
    headers = {unquote(key.strip()): unquote(value.strip()) for key, _, value in pairs}
    whole = url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"
    return Collector(whole, headers, environment.get("OTEL_SERVICE_NAME") or "quire")


class SpanExporter:
    """Sends spans from a thread of its own. Nobody waits for it: spans that find no room, or that
    the collector does not take, are dropped and counted."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._waiting: queue.Queue[Span] = queue.Queue(MAX_WAITING)
        self._num_sent = self._num_dropped_early = self._num_dropped_late = 0
        self._has_failed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-spans", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of spans that were sent and dropped."""
        return self._num_sent, self._num_dropped_early + self._num_dropped_late

    @property
    def has_failed(self) -> bool:
        """True while the collector takes nothing."""
        return self._has_failed

    def put(self, spans: list[Span]) -> None:
        """Queue the spans of one request, all or none."""
        if self._waiting.qsize() + len(spans) > MAX_WAITING:
            self._num_dropped_early += len(spans)
            return
        for span in spans:
            self._waiting.put_nowait(span)

    def close(self) -> None:
        """Send what waits, for at most the time of one batch, and end. May be called twice."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        pause_s = DELAY_S
        while not self._stopping.wait(pause_s):
            if self._drain():
                pause_s = DELAY_S
            elif self._stopping.is_set():
                break  # nobody waits for the collector twice
            else:
                pause_s = min(MAX_PAUSE_S, 2.0 * pause_s)
        else:
            self._drain()
        self._num_dropped_late += self._waiting.qsize()

    def _drain(self) -> bool:
        """Send what waits, up to the first batch that the collector does not take. Return False
        then."""
        while batch := self._take():
            problem = self._send(batch)
            if problem:
                self._num_dropped_late += len(batch)
                if not self._has_failed:
                    logger.warning(
                        "%s takes no traces (%s). Spans are dropped until it does.",
                        self._collector.url,
                        problem,
                    )
                self._has_failed = True
                return False
            self._num_sent += len(batch)
            self._has_failed = False
        return True

    def _take(self) -> list[Span]:
        found: list[Span] = []
        while len(found) < MAX_BATCH and not self._waiting.empty():
            found.append(self._waiting.get_nowait())
        return found

    def _send(self, batch: list[Span]) -> str:
        """Post spans. Return the problem, "" for none."""
        parts = urlsplit(self._collector.url)
        assert parts.hostname is not None
        is_secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        headers = {"content-type": "application/json", **self._collector.headers}
        try:
            connection.request("POST", target, self._body(batch), headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(error) or type(error).__name__
        finally:
            connection.close()
        return "" if 200 <= status < 300 else f"HTTP {status}"

    def _body(self, batch: list[Span]) -> bytes:
        resource = {"service.name": self._collector.service, "service.version": quire.__version__}
        scope = {"name": "quire", "version": quire.__version__}
        return msgspec.json.encode(
            {
                "resourceSpans": [
                    {
                        "resource": {"attributes": otlp_attributes(resource)},
                        "scopeSpans": [{"scope": scope, "spans": batch}],
                    }
                ]
            }
        )
