"""Flags and commands of other programs. vLLM's flags without a counterpart are accepted where they
are not needed, with a line that says why, and refused where a feature is missing. Those of
llama.cpp and Ollama are refused with a line that names what does the same here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.base.errors import ConfigError
from quire.base.foreign import ForeignName
from quire.config.foreign import FOREIGN_SETTINGS
from quire.entrypoints.cli.flags.fields import as_flag
from quire.entrypoints.cli.parser import CommandParser, print_note

__all__ = ["add_foreign_flags", "check_foreign_flags", "command_advice", "flag_advice"]

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
        "--log-level, --disable-access-log and --disable-log-stats quiet the server", None
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
    "optimization_level": ("-O", "-O0", "-O1", "-O2", "-O3"),
    "attention_config": ("-ac",),
    "pipeline_parallel_size": ("-pp",),
    "enable_expert_parallel": ("-ep",),
    "decode_context_parallel_size": ("-dcp",),
    "prefill_context_parallel_size": ("-pcp",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_start_rank": ("-dpr",),
    "data_parallel_size_local": ("-dpl",),
    "data_parallel_address": ("-dpa",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_backend": ("-dpb",),
    "data_parallel_hybrid_lb": ("-dph",),
    "data_parallel_external_lb": ("-dpe",),
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
    levels = [flag for flag in flags if flag.startswith("-O") and flag != "-O"]
    named = [flag for flag in flags if flag not in levels]
    if levels:
        parser.add_argument(*levels, action="store_true", **common)
    if name.startswith(("enable_", "disable_")) or name in _SWITCHES:
        common["action"] = argparse.BooleanOptionalAction
    parser.add_argument(*named, **common)


class _Elsewhere(NamedTuple):
    """Replacement of another program's flag. flags: the first that a command has is named.
    command: one that has the first flag. note: more to know, or why no flag is needed."""

    flags: tuple[str, ...] = ()
    command: str = "quire serve"
    note: str = ""

    def advice(self, parser: CommandParser) -> str:
        found = next((flag for flag in self.flags if parser.has_flag(flag)), None)
        if found is not None:
            said = [f"{found} does it here"]
        elif self.flags:
            said = [f"`{self.command} {self.flags[0]}` does it"]
        else:
            said = []
        return "; ".join([*said, *([self.note] if self.note else [])])


def _rows(words: str, *flags: str, command: str = "quire serve", note: str = "") -> Any:
    return dict.fromkeys(words.split(), _Elsewhere(flags, command, note))


_CHAT = "quire chat"
_FLAGS_ELSEWHERE: Mapping[str, _Elsewhere] = {
    **_rows("-m -mu --model-url", "--model", note="or the name alone, a path or a repository"),
    **_rows("-hf -hfr --hf-repo", "--model", note="or the name alone, such as org/name:Q4_K_M"),
    **_rows("-hff --hf-file", "--model", note="or the name alone, such as org/name:Q4_K_M"),
    **_rows("-hft --hf-token", note="set HF_TOKEN in the environment"),
    **_rows("-c --ctx-size --context-length --num-ctx", "--max-model-len"),
    **_rows("-t --threads -tb --threads-batch", "--num-threads"),
    **_rows("-b --batch-size -ub --ubatch-size", "--max-num-batched-tokens"),
    **_rows("-np --parallel", "--max-num-seqs"),
    **_rows(
        "-ngl --gpu-layers --n-gpu-layers -ngld --n-cpu-moe -ncmoe -cmoe --cpu-moe -ot "
        "--override-tensor",
        note="the model is on one device as a whole, which --device names",
    ),
    **_rows("-mg --main-gpu -dev", "--device"),
    **_rows("-sm --split-mode -ts --tensor-split", "--tensor-parallel-size"),
    **_rows("-fa --flash-attn", note="attention reads the cache by blocks in any case"),
    **_rows("-ctk --cache-type-k -ctv --cache-type-v", "--kv-cache-dtype", note="int8 is q8_0"),
    **_rows("-cb --cont-batching", note="requests always share steps"),
    **_rows("--mmap --no-mmap --mlock", note="weights are read once, and stay in memory"),
    **_rows("-md --model-draft --draft-max", "--speculative-config"),
    **_rows("-a --alias", "--served-model-name"),
    **_rows("--jinja", note="chat templates are always rendered"),
    **_rows("--chat-template-file", "--chat-template"),
    **_rows("--lora", "--lora-modules", note="with --enable-lora, as name=path"),
    **_rows("--mmproj -mm", "--mmproj"),
    **_rows("--reasoning-format", "--reasoning-parser"),
    **_rows("--ssl-key-file", "--ssl-keyfile"),
    **_rows("--ssl-cert-file", "--ssl-certfile"),
    **_rows("--api-key-file", note="set QUIRE_API_KEY in the environment"),
    **_rows("-to --timeout", "--total-timeout-s"),
    **_rows("--host", "--host", "--url"),
    **_rows("--port", "--port", "--url"),
    **_rows("--fit", note="it is always on; `quire plan` shows what fits"),
    **_rows("--metrics --embedding --embeddings --rerank --reranking", note="it is always on"),
    **_rows("-s", "--seed"),
    **_rows("-p -f --prompt --file", "--quick", command=_CHAT, note="--port is the port"),
    **_rows("-sys -sysf --system-prompt-file", "--system-prompt", command=_CHAT),
    **_rows("-n --predict --n-predict --num-predict", "--max-tokens", command=_CHAT),
    **_rows("--temp", "--temperature", command=_CHAT),
    **_rows("--repeat-penalty", "--repetition-penalty", command=_CHAT),
    **_rows("-r --reverse-prompt", "--stop", command=_CHAT),
    **_rows("-cnv --conversation -i --interactive", note="`quire chat` holds a conversation"),
    **_rows("-v --verbose -lv --log-verbosity", "--log-level"),
}
"""Flags of llama.cpp and Ollama that no command here has."""

_COMMANDS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("run", "cli", "llama-cli"), "`quire chat MODEL` does it here"),
    **dict.fromkeys(("generate", "completion"), "`quire complete MODEL` does it here"),
    **dict.fromkeys(
        ("start", "server", "llama-server", "api_server", "embed", "embedding"),
        "`quire serve MODEL` does it here",
    ),
    **dict.fromkeys(
        ("pull", "download"),
        "a model is fetched when it is first named, such as `quire serve ORG/NAME`",
    ),
    **dict.fromkeys(
        ("list", "ls"),
        "fetched models are in the cache of Hugging Face, which `hf cache ls` lists",
    ),
    **dict.fromkeys(
        ("rm", "delete"),
        "fetched models are in the cache of Hugging Face, from which `hf cache rm` takes them",
    ),
    "ps": "a server lists its models at /v1/models",
    "stop": "Ctrl-C ends `quire serve`",
    "show": "`quire plan MODEL` does it here",
    "info": "`quire plan MODEL` does it here",
    "collect-env": "`quire doctor` does it here",
    **dict.fromkeys(("quantize", "llama-quantize", "create"), "`quire convert` does it here"),
    "llama-bench": "`quire bench latency MODEL` does it here",
    **dict.fromkeys(("cp", "push"), "a model is a folder or a file, which other programs copy"),
    "help": "`quire --help` does it here",
    "version": "`quire --version` does it here",
}
"""Commands of Ollama, llama.cpp and vLLM that do not exist here."""


def flag_advice(flag: str, parser: CommandParser) -> str | None:
    """Return what does the work of a flag that the parser's command does not have, if another
    program has it."""
    found = _FLAGS_ELSEWHERE.get(flag)
    return None if found is None else found.advice(parser)


def command_advice(command: str) -> str | None:
    """Return what does the work of another program's command, if one has it."""
    return _COMMANDS_ELSEWHERE.get(command)
