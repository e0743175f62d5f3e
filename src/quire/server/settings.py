"""Settings of the server; the engine's own settings are in `quire.config`."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.telemetry.flight.dump import user_folder
from quire.server.requests.limits import Limits

__all__ = ["SERVER_HELP", "ServerSettings"]

LONG_KEY_CHARS = 16
"""Fewest characters of a key without a warning, since a shorter one can be guessed. 128 bits take
32 characters in hexadecimal, 22 in base64."""

LOG_LEVELS = ("debug", "info", "warning", "error")
TRACE_NAMES = ("genai", "vllm", "both")

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s\"']+")
"""An Origin header (RFC 6454, section 7), or `*` for all of them."""

_ROOT_PATH = re.compile(r"[\w.~!$&'()*+,;=@%-]+(/[\w.~!$&'()*+,;=@%-]+)*", re.ASCII)
"""Segments of a path (RFC 3986, section 3.3), with slashes between them; a colon is a host's."""

_KEY_ADVICE = "`python -c 'import secrets; print(secrets.token_hex())'` makes one."


def _setting(default: Any, text: str, *, repeats: bool = False) -> Any:
    """repeats: the flag adds to its earlier values."""
    return field(default=default, metadata={"help": text, "repeats": repeats})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Checked on construction. ConfigError names the setting, its value and what it may be."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0 picks a free one")
    uds: str | None = _setting(None, "path of a Unix socket, in place of host and port")
    ssl_keyfile: str | None = _setting(None, "file of the TLS key")
    ssl_keyfile_password_file: str | None = _setting(
        None, "file of the password that the TLS key is encrypted with"
    )
    ssl_certfile: str | None = _setting(None, "file of the TLS certificate")
    root_path: str = _setting("", "path under which a proxy serves this server")
    served_model_name: tuple[str, ...] = _setting(
        (), "names that requests may give for the model; responses carry the first"
    )
    api_key: tuple[str, ...] = _setting(
        (), "keys, one of which each request must carry (Authorization: Bearer, or x-api-key)"
    )
    api_key_weights: tuple[float, ...] = _setting(
        (), "shares of the API keys under --scheduling-policy fair, one for each key"
    )
    insecure_no_auth: bool = _setting(False, "listen beyond this machine without an API key")
    allowed_origins: tuple[str, ...] = _setting((), "web origins whose pages may call the server")
    allowed_hosts: tuple[str, ...] = _setting(
        (), "values of the Host header to accept beside this machine's own, without an API key"
    )
    pin_prefix: tuple[str, ...] = _setting(
        (),
        "files with texts, or .json files with messages, that requests of all keys may start with; "
        "they stay in the KV cache",
        repeats=True,
    )
    lora_modules: tuple[str, ...] = _setting(
        (), "LoRA adapters that requests may name as their model, each as name=path"
    )
    lora_folder: str | None = _setting(
        None,
        "folder of LoRA adapters that requests may name, and from which "
        "/v1/load_lora_adapter loads",
    )
    tool_call_parser: str | None = _setting(
        None, "format of tool calls, by vLLM's name (found from the chat template)"
    )
    reasoning_parser: str | None = _setting(
        None, "format of thinking, by vLLM's name (found from the chat template)"
    )
    trust_request_chat_template: bool = _setting(
        False, "let requests bring their own chat_template (it runs in a sandbox)"
    )
    enable_force_include_usage: bool = _setting(
        False, "send usage at the end of every stream, asked or not"
    )
    enable_engine_control: bool = _setting(
        False, "open the routes that pause the engine, let it sleep, and reset its prefix cache"
    )
    weights_folder: str | None = _setting(
        None, "folder of safetensors files from which /update_weights may take weights"
    )
    ui: bool = _setting(True, "serve a page at /ui, with a chat and a view of the engine")
    profile_dir: str = _setting("quire-profile", "folder of the traces of /start_profile")
    log_level: str = _setting(
        "info", "least severe lines of the log: debug, info, warning or error"
    )
    enable_log_requests: bool = _setting(
        False, "log the parameters of each request, and at its end where its time went"
    )
    disable_access_log: bool = _setting(False, "log no line per request")
    disable_log_stats: bool = _setting(False, "log no figures every 10 seconds")
    log_stats_interval: float = _setting(10.0, "seconds between two lines of figures")
    shutdown_timeout: float = _setting(30.0, "seconds that SIGTERM leaves to open requests")
    api_server_count: int = _setting(1, "front processes that share the port and one engine")
    render_threads: int = _setting(2, "threads for chat templates and tokenizing")
    data_dir: str | None = _setting(
        None, "folder of uploaded files and batches (/v1/files, /v1/batches), kept for restarts"
    )
    receipt_key: str | None = _setting(
        None, "file of a key, for this user alone, that signs receipts (HMAC-SHA-256)"
    )
    num_kept_timelines: int = _setting(256, "requests whose timelines are kept")
    record_trace: str = _setting(
        "", "file to which lengths and times of requests are added, no texts"
    )
    otlp_traces_endpoint: str = _setting(
        "", "URL of a collector that gets a trace of each request (OTLP over HTTP)"
    )
    otlp_names: str = _setting(
        "genai",
        "attributes of traces: genai (OpenTelemetry's names), vllm (its older ones) or both",
    )
    record_ui: str = _setting(
        "", "file for a recording of the page's engine view, of requests of all keys, no texts"
    )
    limits: Limits = field(default_factory=Limits, metadata={"help": "bounds on requests"})

    def __post_init__(self) -> None:
        _check_range("port", self.port, 0, 65535)
        _check_range("api_server_count", self.api_server_count, 1, 64)
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"log_level is {self.log_level!r}. Give one of {', '.join(LOG_LEVELS)}."
            )
        if self.otlp_names not in TRACE_NAMES:
            raise ConfigError(
                f"otlp_names is {self.otlp_names!r}. Give one of {', '.join(TRACE_NAMES)}."
            )
        _check_range("render_threads", self.render_threads, 1, 64)
        _check_range("num_kept_timelines", self.num_kept_timelines, 0, 100_000)
        if not self.shutdown_timeout >= 0 or not self.log_stats_interval > 0:
            raise ConfigError(
                f"shutdown_timeout is {self.shutdown_timeout} and log_stats_interval is "
                f"{self.log_stats_interval}. Give seconds: at least 0, and more than 0."
            )
        for key in self.api_key:
            if not key or key != key.strip() or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"An api_key is empty, begins or ends with a space, or is not printable ASCII "
                    f"({len(key)} characters). {_KEY_ADVICE}"
                )
        self._check_weights()
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"An allowed_origin is {origin[:80]!r}, which no browser sends. Give a scheme, "
                    "a host and perhaps a port, such as https://chat.example.org:8443, or * for "
                    "all."
                )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile go together. Give both or neither.")
        if self.ssl_keyfile_password_file is not None and self.ssl_keyfile is None:
            raise ConfigError("ssl_keyfile_password_file goes with ssl_keyfile. Give both.")
        object.__setattr__(self, "root_path", _as_root_path(self.root_path))
        if not (self.is_local or self.api_key or self.insecure_no_auth):
            raise ConfigError(
                f"host is {self.host!r}, which other machines can reach, and there is no api_key. "
                "Give --api-key, or --insecure-no-auth if the network is trusted."
            )

    def _check_weights(self) -> None:
        weights = self.api_key_weights
        if weights and len(weights) != len(self.api_key):
            raise ConfigError(
                f"There are {len(weights)} api_key_weights for {len(self.api_key)} API keys. Give "
                "one for each, in the order of the keys."
            )
        for weight in weights:
            if not 0.0 < weight < math.inf:
                raise ConfigError(f"An api_key_weight is {weight}. Give numbers above 0.")

    @property
    def key_warning(self) -> str | None:
        """Warning about keys that are too short to be safe; None if all are long enough."""
        shortest = min(map(len, self.api_key), default=LONG_KEY_CHARS)
        if shortest >= LONG_KEY_CHARS:
            return None
        return (
            f"An API key of {shortest} characters can be guessed: {LONG_KEY_CHARS} or more are "
            f"safe. {_KEY_ADVICE}"
        )

    @property
    def flight_dir(self) -> Path:
        """Folder for dumps of the flight recorder."""
        return user_folder() if self.data_dir is None else Path(self.data_dir) / "flight"

    @property
    def is_local(self) -> bool:
        """True if only this machine can connect."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """URL at which clients on this machine reach the server, without a path."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        scheme = "https" if self.ssl_certfile else "http"
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"{scheme}://{host}:{self.port}{self.root_path}"


def _as_root_path(given: str) -> str:
    """Return the path with one slash in front and none behind, empty for the root."""
    path = given.strip("/")
    if not path:
        return ""
    if not _ROOT_PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise ConfigError(
            f"root_path is {given[:80]!r}, which is no path. Give one such as /llm, without a host "
            "and a query."
        )
    return f"/{path}"


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}. Give a number from {low} to {high}.")


SERVER_HELP: Mapping[str, str] = {
    item.name: item.metadata["help"] for item in fields(ServerSettings)
}
"""Help of each setting, by name."""
