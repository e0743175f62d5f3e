"""Request fields of other servers and of the OpenAI API that have no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.protocol.sampling_params import SAMPLING_PARAMETERS

__all__ = ["IGNORED_FIELDS", "NOT_OFFERED", "OTHER_NAMES"]

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)
"""Accepted and ignored: they never change the text of an answer, only bookkeeping elsewhere."""

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_OF_ROUTES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": _LIMITS,
    "stop": ("stop", "stop_sequences"),
}
"""Sampling parameters, and what routes call them."""
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **{
        other: _OF_ROUTES.get(name, (name,))
        for name, each in SAMPLING_PARAMETERS.items()
        for other in each.facts.others
    },
    **dict.fromkeys(_LIMITS, _LIMITS),
    "format": ("response_format", "text"),
    "n_probs": ("top_logprobs", "logprobs"),
    "input": ("messages", "prompt"),
    "messages": ("messages", "input", "prompt"),
    "prompt": ("prompt", "messages", "input"),
}
"""Fields here that mean the same as one of llama.cpp, Ollama, `transformers` or another route: the
first that a route has."""

_TOOLS = "completions have no tools; send messages and tools to /v1/chat/completions"
_REASONING = "completions do not tell reasoning from the answer; chats do"
_MEDIA = "images of all requests are prepared alike, as --mm-processor-kwargs says"
_ANSWERS = "answers are texts"
_NONE: tuple[Any, ...] = ()

NOT_OFFERED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "audio": (_ANSWERS, _NONE),
    "echo": ("an answer repeats nothing of the chat; completions have it", (False,)),
    "ec_transfer_params": ("there is no disaggregated encoder", _NONE),
    "frequency_penalty_decay": ("there is no such penalty", _NONE),
    "function_call": (
        'this is the older form of tool_choice; send that, such as {"type": "function", '
        '"function": {"name": …}}',
        ("none", "auto"),
    ),
    "functions": (
        'this is the older form of tools; send those, each as {"type": "function", "function": …}',
        ([],),
    ),
    "guided_decoding_backend": ("there is one library for structured output", ("auto",)),
    "include_reasoning": (_REASONING, (True,)),
    "kv_transfer_params": ("there is no disaggregated prefill", _NONE),
    "logprob_token_ids": ("log-probabilities are of the most likely tokens", ([],)),
    "logits_processors": ("code is never taken from requests", ([],)),
    "media_io_kwargs": (_MEDIA, ({},)),
    "mm_processor_kwargs": (_MEDIA, ({},)),
    "modalities": (_ANSWERS, (["text"],)),
    "parallel_tool_calls": (_TOOLS, (True, False)),
    "prediction": ("predicted outputs are offered for chats", _NONE),
    "prompt_embeds": ("messages are text; send it to /v1/completions", _NONE),
    "return_prompt_text": ("send echo to completions", (False,)),
    "return_token_offsets": ("they are not computed", (False,)),
    "stream_interval": ("chunks go out as tokens come", (1,)),
    "suffix": ("text is only continued, not filled in", ("",)),
    "thinking_token_budget": (_REASONING, _NONE),
    "tool_choice": (_TOOLS, ("none",)),
    "tools": (_TOOLS, ([],)),
    "verbosity": ("only a chat template can read it; send it with messages", ("medium",)),
    "vllm_xargs": ("there are no request plug-ins", ({},)),
    "web_search_options": ("the server searches nothing", _NONE),
}
"""Refused with the reason, unless the value is null or one that asks for nothing. Names of sampling
parameters stand in `FOREIGN_PARAMS`."""
