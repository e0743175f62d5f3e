"""Bodies of requests. None means "not given": the model's or the server's default applies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quire.protocol.parameters.declaration import Apis
from quire.protocol.sampling_params import SAMPLING_PARAMETERS

__all__ = [
    "ChatExtras",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "ParametersOfOpenAI",
    "PinRequest",
    "Prediction",
    "SessionChange",
    "StreamOptions",
    "TokenizeRequest",
    "TokensRequest",
]


Messages = Annotated[
    Any, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})
]
"""Any value; `check_messages` reports errors."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: send one last chunk with the usage. continuous_usage_stats: usage in each
    chunk. include_obfuscation is accepted and has no effect: chunks are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def _parameters(name: str, apis: set[Apis]) -> type[msgspec.Struct]:
    """Make a struct with a field for each declared parameter that one of these APIs takes."""
    fields = [
        (each.name, each.in_json | None, None)
        for each in SAMPLING_PARAMETERS.values()
        if each.facts.apis in apis
    ]
    return msgspec.defstruct(name, fields, kw_only=True)


ParametersOfOpenAI = _parameters("ParametersOfOpenAI", {"openai", "all"})
_ParametersOfAll = _parameters("_ParametersOfAll", {"all"})


class GenerationRequest(ParametersOfOpenAI, kw_only=True, forbid_unknown_fields=True):
    """Fields that completions and chats have in common: the sampling parameters, of which those
    that the server reads by name stand here once more with their types, and others.
    docs/server.md describes each field."""

    model: str | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    hooks: list[str] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_timeline: bool | None = None
    return_weight_versions: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    deadline_s: float | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None


class ChatExtras(_ParametersOfAll, kw_only=True):
    """Fields of chats that other APIs accept too, with the same meaning: sampling parameters and
    others."""

    cache_salt: str | None = None
    priority: int | None = None
    deadline_s: float | None = None
    request_id: str | None = None
    session_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(
    GenerationRequest, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """POST /v1/completions.

    prompt: a text, token ids, or a list of either. prompt_embeds: base64 of the bytes of
    `torch.save` or safetensors, a tensor [tokens, hidden size]; or a list of them. One of the two
    must be given.
    """

    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: str | list[str] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class TokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /inference/v1/generate. sampling_params: fields of completions, without a prompt."""

    token_ids: list[int]
    sampling_params: CompletionRequest = msgspec.field(default_factory=CompletionRequest)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_s: float | None = None


class PredictionPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A piece of a predicted text."""

    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text that the client expects as the answer, such as the file that is being edited."""

    content: str | list[PredictionPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        """Return the text in one piece."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    session_id: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or messages, which go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class SessionChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/sessions/{session_id}. ttl_s: seconds for which it is kept without use."""

    pinned: bool | None = None
    ttl_s: float | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class AdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter.

    lora_path: path in the folder for adapters; default is the name. load_inplace: replace another
    adapter of this name. lora_int_id is accepted and has no effect.
    """

    lora_name: str
    lora_path: str | None = None
    load_inplace: bool | None = None
    lora_int_id: int | None = None


class PinRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/prefixes: the beginning of prompts, or the first messages of conversations.
    ttl_s: seconds for which it is kept; None for as long as the engine runs."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: Messages = None
    ttl_s: float | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
