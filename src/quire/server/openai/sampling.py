"""Makes SamplingParams from the fields of a request, within the server's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from quire.base.errors import RequestError
from quire.protocol.sampling_params import SAMPLING_PARAMETERS, SamplingParams
from quire.server.openai.beams import beam_rules, defaults_of
from quire.server.openai.structured import structured_outputs
from quire.server.requests.bodies import ChatRequest, CompletionRequest, GenerationRequest
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits

__all__ = ["chat_params", "check_label", "check_priority", "completion_params", "limit_field"]

_OWN_RULES = ("max_tokens", "structured_outputs", "truncate_prompt_tokens")
"""Parameters that need conversion; all others pass unchanged."""
_SHARED_FIELDS = tuple(
    name
    for name, each in SAMPLING_PARAMETERS.items()
    if each.facts.apis != "python" and name not in _OWN_RULES
)

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of a completion that names none, as in the OpenAI API."""


def completion_params(
    body: CompletionRequest, defaults: Mapping[str, object], limits: Limits
) -> SamplingParams:
    """Return the parameters of a completion. `echo` with logprobs asks for those of the prompt too.
    max_tokens 0 becomes 1: the engine must sample to compute the prompt, and the token is dropped.
    """
    given, defaults = _shared(body, limits), defaults_of(body, defaults)
    given["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    given["max_tokens"] = body.max_tokens
    defaults = {"max_tokens": DEFAULT_COMPLETION_TOKENS, **defaults}
    if body.max_tokens == 0 and body.echo:
        given["max_tokens"] = 1
    _check_at_most("logprobs", body.logprobs, "max_logprobs", limits)
    return SamplingParams.from_optional(defaults, **given)


def chat_params(
    body: ChatRequest, defaults: Mapping[str, object], limits: Limits, *, must_call: bool = False
) -> SamplingParams:
    """Return the parameters of a chat. Without max_tokens the answer may fill the context.
    must_call: the answer is a call; a format, which is about its text, is checked and dropped."""
    _check_twice(body)
    given, defaults = _shared(body, limits), defaults_of(body, defaults)
    if must_call:
        given["structured_outputs"] = None
    given["logprobs"] = _chat_logprobs(body, limits)
    limit = limit_field(body)
    given["max_tokens"] = None if limit is None else getattr(body, limit)
    # SamplingParams itself has 16 by default; None in `defaults` means "up to the context".
    try:
        return SamplingParams.from_optional({"max_tokens": None, **defaults}, **given)
    except RequestError as error:
        if limit is None or not str(error).startswith("max_tokens "):
            raise
        raise RefusedError(str(error).replace("max_tokens", limit, 1), param=limit) from error


def limit_field(body: GenerationRequest) -> str | None:
    """Return the request's field that bounds the answer; None if only a default does."""
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return None if body.max_tokens is None else "max_tokens"


def _check_twice(body: ChatRequest) -> None:
    """Raise RefusedError if two fields with the same meaning differ."""
    variables = body.chat_template_kwargs or {}
    for name, other, value, stated in (
        ("max_completion_tokens", "max_tokens", body.max_completion_tokens, body.max_tokens),
        *(
            (name, f"chat_template_kwargs.{name}", getattr(body, name), variables.get(name))
            for name in ("reasoning_effort", "verbosity")
        ),
    ):
        if value is not None and stated is not None and value != stated:
            raise RefusedError(
                f"{name} is {value!r}, but {other} is {str(stated)[:80]!r}. They mean the same: "
                "send one of them.",
                param=name,
            )


def _chat_logprobs(body: ChatRequest, limits: Limits) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RefusedError(
            f"top_logprobs is {body.top_logprobs}, but logprobs is not true. Set it to true.",
            param="top_logprobs",
        )
    _check_at_most("top_logprobs", body.top_logprobs, "max_logprobs", limits)
    return (body.top_logprobs or 0) if body.logprobs else None


def _shared(body: GenerationRequest, limits: Limits) -> dict[str, object]:
    _check_limits(body, limits)
    beam_rules(body, limits.max_beam_width)
    _check_stream_options(body)
    if body.stream and body.prompt_logprobs:
        raise RefusedError(
            f"prompt_logprobs is {body.prompt_logprobs} in a stream, which has no place for them. "
            "Set stream to false.",
            param="prompt_logprobs",
        )
    given: dict[str, object] = {name: getattr(body, name) for name in _SHARED_FIELDS}
    given["structured_outputs"] = structured_outputs(body)
    return given


def _check_stream_options(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise RefusedError(
            "stream_options is given, but stream is not true. Set stream, or leave it out.",
            param="stream_options",
        )


def _check_limits(body: GenerationRequest, limits: Limits) -> None:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check_priority(body.priority, limits)
    _check_at_most("n", body.n, "max_n", limits, lowest=1)
    _check_at_most("prompt_logprobs", body.prompt_logprobs, "max_logprobs", limits)
    _check_length("stop", stops, "max_stop", limits)
    for stop in stops:
        _check_length("a string of stop", stop, "max_stop_chars", limits)
    _check_length("stop_token_ids", body.stop_token_ids, "max_stop_token_ids", limits)
    _check_length("logit_bias", body.logit_bias, "max_logit_bias", limits)
    _check_length("allowed_token_ids", body.allowed_token_ids, "max_allowed_token_ids", limits)
    _check_length("bad_words", body.bad_words, "max_bad_words", limits)
    _check_length("hooks", body.hooks, "max_hooks", limits)
    for word in body.bad_words or ():
        _check_length("a word of bad_words", word, "max_stop_chars", limits)
    for name, text in (("cache_salt", body.cache_salt), ("request_id", body.request_id)):
        check_label(name, text, limits)


def _check_at_most(
    name: str, value: int | None, limit: str, limits: Limits, lowest: int = 0
) -> None:
    """Refuse counts above the limit, and -1, which asks for everything."""
    highest: int = getattr(limits, limit)
    if value is not None and not lowest <= value <= highest:
        raise RefusedError(
            f"{name} is {value}, but this server gives {lowest} to {highest} ({limit}). "
            "Send one of these.",
            param=name,
        )


def _check_length(name: str, value: Sized | None, limit: str, limits: Limits) -> None:
    highest: int = getattr(limits, limit)
    if value is not None and len(value) > highest:
        raise RefusedError(
            f"{name} has a length of {len(value)}, but this server takes at most {highest} "
            f"({limit}). Send less.",
            param=name.rpartition(" ")[2],
        )


def check_priority(priority: int | None, limits: Limits) -> None:
    """Raise RefusedError for a priority that this server does not take."""
    highest = limits.max_priority
    if priority is not None and abs(priority) > highest:
        raise RefusedError(
            f"priority is {priority}, but this server takes {-highest} to {highest} "
            "(max_priority). Send one of these.",
            param="priority",
        )


def check_label(name: str, text: str | None, limits: Limits) -> None:
    """Raise RefusedError for texts that are too long, or cannot stand unchanged in logs and
    JSON."""
    if text is None:
        return
    _check_length(name, text, "max_label_chars", limits)
    if not text.isascii() or not text.isprintable():
        raise RefusedError(f"{name} is {ascii(text)[:80]}. Use printable ASCII.", param=name)
