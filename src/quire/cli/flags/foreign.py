"""Flags of vLLM without a counterpart here: those that are not needed are accepted with a line that
says why, and those whose feature is missing are refused with a line that says so."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.cli.flags.fields import as_flag
from quire.cli.parser import CommandParser, print_note
from quire.config.foreign import FOREIGN_SETTINGS
from quire.errors import ConfigError
from quire.foreign import ForeignName

__all__ = ["add_foreign_flags", "check_foreign_flags"]

_PREFIX = "foreign:"

_SWITCHES = (
    "aggregate_engine_logging", "async_scheduling", "calculate_kv_scales", "cudagraph_metrics",
    "data_parallel_external_lb", "data_parallel_hybrid_lb", "fully_sharded_loras",
    "guided_decoding_disable_fallback", "interleave_mm_strings", "kv_cache_metrics",
    "kv_sharing_fast_prefill", "mm_encoder_only", "ray_workers_use_nsight", "skip_mm_profiling",
    "tokens_only", "trust_remote_code", "use_tqdm_on_load", "use_v2_block_manager",
    "worker_use_ray",
)  # fmt: skip
"""Flags without a value, beside those that begin with `enable_` or `disable_`."""

_OF_SERVER: Mapping[str, ForeignName] = {
    "chat_template_content_format": ForeignName("it is read from the chat template itself", None),
    "uvicorn_log_level": ForeignName(
        "--disable-access-log and --disable-log-stats quiet the server", None
    ),
    "stream_interval": ForeignName("a reader that falls behind gets larger chunks", None),
    "max_log_len": ForeignName("prompts are never logged", None),
    "disable_log_requests": ForeignName("requests are logged only when asked", None),
    "enable_prompt_tokens_details": ForeignName("responses always have them", None, ""),
    "enable_request_id_headers": ForeignName("request ids are always echoed", None, ""),
    "enable_tokenizer_info_endpoint": ForeignName("it is always there", None, ""),
    "enable_server_load_tracking": ForeignName("/load always answers", None, ""),
    "disable_frontend_multiprocessing": ForeignName(
        "the engine has a process of its own, which costs one message a step", None
    ),
    "disable_fastapi_docs": ForeignName("/docs needs the API key like every route", None),
    "enable_auto_tool_choice": ForeignName("tools are always offered to the model", None),
    "default_chat_template_kwargs": ForeignName(
        "requests name chat_template_kwargs themselves so far"
    ),
    "override_generation_config": ForeignName(
        "--generation-config none gives neutral defaults; others are not settable yet"
    ),
    "logits_processors": ForeignName("a server takes none; LLM in Python does"),
}
"""Flags whose explanation differs for `quire serve`, or exists only there."""

_SHORT: Mapping[str, tuple[str, ...]] = {
    "compilation_config": ("-cc",),
    "optimization_level": ("-O0", "-O1", "-O2", "-O3"),
    "pipeline_parallel_size": ("-pp",),
    "enable_expert_parallel": ("-ep",),
}


def add_foreign_flags(parser: CommandParser, *, server: bool = False) -> None:
    """Let the parser know them, without showing them in its help. A flag that the command has
    itself is left alone."""
    for name in _flags(server):
        flags = [f for f in (as_flag(name), *_SHORT.get(name, ())) if not parser.has_flag(f)]
        if flags:
            _add(parser, flags, name)


def check_foreign_flags(options: argparse.Namespace) -> None:
    """A note for each that was given. Raises ConfigError for one whose feature is missing."""
    known = _flags(server=True)
    for dest, value in vars(options).items():
        if not dest.startswith(_PREFIX):
            continue
        name = dest.removeprefix(_PREFIX)
        foreign, flag = known[name], as_flag(f"no_{name}" if value is False else name)
        if not foreign.asks_for_nothing(value):
            raise ConfigError(
                foreign.refusal(flag if value in (True, False) else f"{flag} {value}")
            )
        print_note(f"{flag} is not needed: {foreign.reason}")


def _flags(server: bool) -> dict[str, ForeignName]:
    return {**FOREIGN_SETTINGS, **(_OF_SERVER if server else {})}


def _add(parser: CommandParser, flags: list[str], name: str) -> None:
    common: dict[str, Any] = {
        "dest": _PREFIX + name,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS,
    }
    levels = [flag for flag in flags if flag.startswith("-O")]
    named = [flag for flag in flags if flag not in levels]
    if levels:
        parser.add_argument(*levels, action="store_true", **common)
    if name.startswith(("enable_", "disable_")) or name in _SWITCHES:
        common["action"] = argparse.BooleanOptionalAction
    parser.add_argument(*named, **common)
