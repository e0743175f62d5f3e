"""Flags of vLLM without a counterpart here: those that are not needed are accepted with a line that
says why, and those whose feature is missing are refused with a line that says so."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.cli.flags.fields import as_flag
from quire.cli.parser import CommandParser, print_note
from quire.config.settings import FOREIGN, MISSING
from quire.errors import ConfigError

__all__ = ["add_foreign_flags", "check_foreign_flags"]

_PREFIX = "foreign:"


@dataclass(frozen=True, slots=True)
class _Foreign:
    """reason: why it is not needed, or what is missing. takes: it has a value. neutral: values that
    ask for nothing, of a flag that is refused otherwise; None if it is never refused. always: it
    cannot be turned off, so `--no-…` is refused; what to do instead, or empty."""

    reason: str
    takes: bool = True
    neutral: tuple[str, ...] | None = None
    always: str | None = None


_WITH_VALUE = ("tokenizer_mode",)
_NEGATABLE = ("async_scheduling", "trust_remote_code")
"""Beside those that begin with `enable_`."""

_ALWAYS = {"enable_chunked_prefill": "", "async_scheduling": "to turn it off, use --depth 1"}

_NOT_NEEDED: Mapping[str, _Foreign] = {
    **{
        name: _Foreign(reason, takes=name in _WITH_VALUE, always=_ALWAYS.get(name))
        for name, reason in FOREIGN.items()
    },
    "compilation_config": _Foreign("nothing is compiled at start-up"),
    "optimization_level": _Foreign("nothing is compiled at start-up"),
    "max_seq_len_to_capture": _Foreign("a captured step serves every length"),
    "model_impl": _Foreign("a model has one implementation"),
    "enable_expert_parallel": _Foreign("there is one device", takes=False),
    "distributed_executor_backend": _Foreign("there is one device"),
    "disable_custom_all_reduce": _Foreign("there is one device", takes=False),
    "limit_mm_per_prompt": _Foreign("models take text only"),
    "allowed_local_media_path": _Foreign("models take text only"),
}
"""Of the engine."""

_NOT_NEEDED_BY_SERVER: Mapping[str, _Foreign] = {
    "chat_template_content_format": _Foreign("it is read from the chat template itself"),
    "uvicorn_log_level": _Foreign("--disable-access-log and --disable-log-stats quiet the server"),
    "stream_interval": _Foreign("a reader that falls behind gets larger chunks"),
    "max_log_len": _Foreign("prompts are never logged"),
    "disable_log_requests": _Foreign("requests are logged only when asked", takes=False),
    "enable_prompt_tokens_details": _Foreign("responses always have them", takes=False, always=""),
    "enable_request_id_headers": _Foreign("request ids are always echoed", takes=False, always=""),
    "enable_tokenizer_info_endpoint": _Foreign("it is always there", takes=False, always=""),
    "enable_server_load_tracking": _Foreign("/load always answers", takes=False, always=""),
    "disable_frontend_multiprocessing": _Foreign(
        "the engine has a process of its own, which costs one message a step", takes=False
    ),
    "disable_fastapi_docs": _Foreign("/docs needs the API key like every route", takes=False),
}

_ONE = ("1",)
_MISSING_SWITCHES = ("enable_lora",)
_NEUTRAL = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), _ONE),
    **dict.fromkeys(("cpu_offload_gb", "kv_offloading_size"), ("0",)),
}
_MISSING: Mapping[str, _Foreign] = {
    **{
        name: _Foreign(reason, takes=name not in _MISSING_SWITCHES, neutral=_NEUTRAL.get(name, ()))
        for name, reason in MISSING.items()
    },
    "hf_token": _Foreign(
        "set HF_TOKEN in the environment, since every user of a machine can read its command lines",
        neutral=(),
    ),
    "logits_processors": _Foreign("a server takes none; LLM in Python does", neutral=()),
    "runner": _Foreign("models generate text", neutral=("auto", "generate")),
    "convert": _Foreign("models generate text", neutral=("auto", "none")),
}
_MISSING_IN_SERVER: Mapping[str, _Foreign] = {
    "enable_auto_tool_choice": _Foreign(
        "answers are not parsed for tool calls yet", takes=False, neutral=()
    ),
    "tool_call_parser": _Foreign("answers are not parsed for tool calls yet", neutral=()),
    "reasoning_parser": _Foreign("answers are not parsed for reasoning yet", neutral=()),
    "default_chat_template_kwargs": _Foreign(
        "requests name chat_template_kwargs themselves so far", neutral=()
    ),
    "override_generation_config": _Foreign(
        "--generation-config none gives neutral defaults; others are not settable yet", neutral=()
    ),
    "structured_outputs_config": _Foreign("there is no structured output yet", neutral=()),
    "otlp_traces_endpoint": _Foreign("there are no traces yet", neutral=()),
}

_SHORT: Mapping[str, tuple[str, ...]] = {
    "compilation_config": ("-cc",),
    "optimization_level": ("-O0", "-O1", "-O2", "-O3"),
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "enable_expert_parallel": ("-ep",),
    "speculative_config": ("-sc",),
}


def add_foreign_flags(parser: CommandParser, *, server: bool = False) -> None:
    """Let the parser know them, without showing them in its help. A flag that the command has
    itself is left alone."""
    for name, foreign in _flags(server).items():
        flags = [f for f in (as_flag(name), *_SHORT.get(name, ())) if not parser.has_flag(f)]
        if flags:
            _add(parser, flags, name, foreign)


def check_foreign_flags(options: argparse.Namespace) -> None:
    """A note for each that was given. Raises ConfigError for one whose feature is missing."""
    known = _flags(server=True)
    for dest, value in vars(options).items():
        if not dest.startswith(_PREFIX):
            continue
        name = dest.removeprefix(_PREFIX)
        foreign, flag = known[name], as_flag(f"no_{name}" if value is False else name)
        if value is False and foreign.always is not None:
            advice = foreign.always or "leave it out"
            raise ConfigError(f"{flag} cannot be served: {foreign.reason}; {advice}.")
        if foreign.neutral is None or value is False or value in foreign.neutral:
            print_note(f"{flag} is not needed: {foreign.reason}")
        else:
            shown = "" if value is True else f" {value}"
            raise ConfigError(f"{flag}{shown} cannot be served: {foreign.reason}.")


def _flags(server: bool) -> dict[str, _Foreign]:
    of_server = {**_NOT_NEEDED_BY_SERVER, **_MISSING_IN_SERVER} if server else {}
    return {**_NOT_NEEDED, **_MISSING, **of_server}


def _add(parser: CommandParser, flags: list[str], name: str, foreign: _Foreign) -> None:
    common: dict[str, Any] = {
        "dest": _PREFIX + name,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS,
    }
    levels = [flag for flag in flags if flag.startswith("-O")]
    named = [flag for flag in flags if flag not in levels]
    if levels:
        parser.add_argument(*levels, action="store_true", **common)
    if foreign.takes:
        parser.add_argument(*named, **common)
    elif name.startswith("enable_") or name in _NEGATABLE:
        parser.add_argument(*named, action=argparse.BooleanOptionalAction, **common)
    else:
        parser.add_argument(*named, action="store_true", **common)
