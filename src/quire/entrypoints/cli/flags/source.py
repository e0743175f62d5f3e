"""Flags by which commands choose a server, or an engine of their own."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, RequestError
from quire.config import env
from quire.config.settings import EngineSettings
from quire.config.startup import check_early
from quire.entrypoints.cli.flags.engine import add_engine_flags, default_settings, given_settings
from quire.entrypoints.cli.flags.sampling import add_sampling_flags, given_sampling
from quire.entrypoints.cli.parser import CommandParser, print_note
from quire.entrypoints.cli.texts.source import EngineSource, ServerSource, TextSource
from quire.entrypoints.client import RemoteServer, ServerAddress

__all__ = ["add_server_flags", "add_source_flags", "open_source", "openai_key", "server_of"]

DEFAULT_URL = "http://127.0.0.1:8000"


def add_source_flags(parser: CommandParser) -> None:
    """Add flags of the server, of sampling, and of the engine."""
    group = add_server_flags(parser, "; the bundled model in this process if none is there")
    group.add_argument("--model-name", help="one of the server's models (its first)")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def add_server_flags(parser: CommandParser, otherwise: str = "") -> argparse._ArgumentGroup:
    """Add the flags of `server_of`, and return their group. otherwise: words for the help, on what
    happens if no server is there."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        "--base-url",
        help=f"server to ask (OPENAI_BASE_URL if that is set, else {DEFAULT_URL}{otherwise})",
    )
    group.add_argument(
        "--api-key", help="key of the server; better in QUIRE_API_KEY or OPENAI_API_KEY"
    )
    return group


def server_of(options: argparse.Namespace) -> RemoteServer:
    """Return the server that the flags or the environment name, or the one at `DEFAULT_URL`."""
    address = ServerAddress.parse(options.url or env.openai_base_url() or DEFAULT_URL)
    return RemoteServer(address, options.api_key or openai_key(address))


@contextmanager
def open_source(options: argparse.Namespace) -> Generator[tuple[TextSource, Mapping[str, Any]]]:
    """The source of text and the sampling parameters that the flags name.

    A model or another engine setting asks for an engine in this process. Without one it is the
    server of --url or OPENAI_BASE_URL; at the default address, if nothing listens there, the
    bundled model instead.
    """
    settings = given_settings(options)
    sampling = given_sampling(options)
    if "seed" in settings:
        sampling["seed"] = settings["seed"]
    _refuse_text(settings.get("model"))
    wants_engine = bool(settings.keys() - {"seed", "quiet"} - default_settings(options))
    url = options.sources.get("url")
    if wants_engine and url is not None and url.is_default:
        options.url = None
    if wants_engine and options.url is not None:
        engine_flags = ", ".join(sorted(settings))
        raise ConfigError(
            f"--url asks a server, but {engine_flags} would set up an engine in this process. "
            "Leave out one of the two; --model-name picks a model of the server."
        )
    server, is_named = server_of(options), bool(options.url or env.openai_base_url())
    if wants_engine or not (is_named or server.is_there()):
        _check(settings, sampling)  # before it is said that something loads
        if not wants_engine:
            print_note(
                f"no server at {DEFAULT_URL}, so the bundled model answers in this process; "
                "`quire serve` starts a server"
            )
        elif not settings.get("quiet"):
            model = settings.get("model") or "the bundled model"
            print_note(f"{model} is loaded in this process; `quire plan` shows what it uses")
        engine = EngineSource({**settings, "quiet": True})
        try:
            yield engine, sampling
        finally:
            engine.shutdown()
    else:
        yield ServerSource(server, _model_card(server, options.model_name)), sampling


def openai_key(address: ServerAddress) -> str | None:
    """OPENAI_API_KEY, unless it would cross a network that anybody could read."""
    return env.openai_api_key() if address.scheme == "https" or address.is_local else None


def _check(settings: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Raises what an engine would, once it is there, for values without a meaning."""
    from quire.protocol.sampling_params import SamplingParams

    check_early(EngineSettings.from_options(settings))
    SamplingParams.from_optional(sampling)


def _refuse_text(model: str | None) -> None:
    """A text where the model stands, as other programs take it, would be looked for as a folder."""
    if model is not None and " " in model.strip() and not Path(model).exists():
        raise ConfigError(f"{model!r} is no model; give a text behind -q: -q {shlex.quote(model)}.")


def _model_card(server: RemoteServer, wanted: str | None) -> Mapping[str, Any]:
    cards = {str(card["id"]): card for card in server.wait_for_models(print_note)}
    if wanted is not None and wanted not in cards:
        raise RequestError(
            f"The server at {server.address} has no model {wanted!r}. It has: {', '.join(cards)}."
        )
    return cards[wanted or next(iter(cards))]
