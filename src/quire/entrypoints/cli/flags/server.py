"""A flag for every setting and every limit of the server."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields

from quire.entrypoints.cli.flags.fields import add_field_flags, given_fields
from quire.entrypoints.cli.parser import CommandParser
from quire.server import Limits, ServerSettings

__all__ = ["add_adapter_flags", "add_server_flags", "read_server_settings"]

_SETTING, _LIMIT = "server:", "limit:"

_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "disable_access_log": ("--disable-uvicorn-access-log",),
    "sse_keep_alive_s": ("--sse-keep-alive-interval",),
    "api_server_count": ("-asc",),
}
"""vLLM's spellings of some flags."""


def add_server_flags(parser: CommandParser) -> None:
    """In two groups, so that the help shows first what people look for."""
    settings = [item for item in fields(ServerSettings) if item.name != "limits"]
    add_field_flags(parser.add_argument_group("server"), settings, _SETTING, _SPELLINGS)
    limits = parser.add_argument_group("limits on requests")
    add_field_flags(limits, fields(Limits), _LIMIT, _SPELLINGS)


def add_adapter_flags(parser: CommandParser) -> None:
    """The settings of a server that say which adapters requests may name."""
    settings = [item for item in fields(ServerSettings) if item.name.startswith("lora_")]
    add_field_flags(parser.add_argument_group("adapters"), settings, _SETTING)


def read_server_settings(options: argparse.Namespace) -> ServerSettings:
    """Settings from parsed flags. Raises ConfigError for a value that cannot be."""
    return ServerSettings(
        limits=Limits(**given_fields(options, _LIMIT)), **given_fields(options, _SETTING)
    )
