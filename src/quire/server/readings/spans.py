"""Spans of requests, as OpenTelemetry's collectors read them.

Names: semantic conventions for generative AI (`gen_ai.*`, operations and usage), W3C Trace Context
for ids, OTLP 1.x for the JSON.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from quire.protocol.status import RequestFacts
from quire.server.readings.prompt_memory import CacheVerdict
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import CompletionRequest, GenerationRequest
from quire.server.requests.pooling_bodies import Pooled

__all__ = ["Span", "TraceContext", "otlp_attributes", "request_spans"]

MAX_CHARS = 1024
"""Characters of a text in a span. The name of a model that is not here may have many more."""

MAX_DETAILS = 256
"""Spans of one request below its phases."""

_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII
)
"""Version, trace, parent, flags, and what later versions may add."""
_SAMPLED = 1
_SERVER, _INTERNAL = 2, 1
_ERROR = 2

_PHASES = (
    ("render", None, "rendered_s"),
    ("queue", "queued_s", "scheduled_s"),
    ("prefill", "scheduled_s", "first_token_s"),
    ("decode", "first_token_s", "finished_s"),
)
"""Spans within a request: name, begin and end in the timeline."""

_PARAMETERS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "stop": "stop_sequences",
    "n": "choice.count",
}
"""Fields of a body, and the names of their attributes below `gen_ai.request`."""


Span = dict[str, object]
"""A span in OTLP's JSON."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A request's place in a trace. parent_id: "" for the first span of a trace. is_sampled: False
    if the caller keeps no spans of this trace."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    is_sampled: bool = True

    @classmethod
    def begin(cls, traceparent: str) -> TraceContext:
        """Return a new span's context, below that of the header; a trace of its own without one, or
        with one that is not valid."""
        span_id = _new_id(8)
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None or (found[1] == "00" and found[5]):
            return cls(_new_id(16), span_id)
        trace_id, parent_id, flags = found.group(2, 3, 4)
        if not (trace_id.strip("0") and parent_id.strip("0")):
            return cls(_new_id(16), span_id)
        return cls(trace_id, span_id, parent_id, bool(int(flags, 16) & _SAMPLED))

    @property
    def traceparent(self) -> str:
        """The header that names this span."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def request_spans(
    context: TraceContext,
    timeline: Timeline,
    body: GenerationRequest | Pooled,
    model: str,
    error: str,
    names: str,
    facts: Sequence[RequestFacts] = (),
    verdict: CacheVerdict | None = None,
) -> list[Span]:
    """Return the spans of a request that has ended: the request itself first, then its phases, then
    what they consist of.

    model: name of the model that answered. error: type of the error that ended it, or "". names:
    see `TRACE_NAMES`. facts: facts of its prompts, as its caller may see them. verdict: why its
    prompt was computed; None if that is not known.
    """
    operation = _operation(body)
    attributes: dict[str, object] = {"http.route": timeline.route}
    if names != "vllm":
        attributes |= _genai(operation, timeline, body, model)
    if names != "genai":
        attributes |= _vllm(timeline, body, model)
    if error:
        attributes["error.type"] = error
    if verdict is not None:
        attributes |= _cache(verdict)
    begin_ns = round(timeline.arrived_at * 1e9)

    def at(seconds: float | None) -> int:
        return begin_ns + round((seconds or 0.0) * 1e9)

    name = "llm_request" if names == "vllm" else f"{operation} {model}".rstrip()
    whole = _span(context, name, (begin_ns, at(timeline.finished_s)), attributes)
    whole["spanId"] = context.span_id
    whole["kind"] = _SERVER
    if context.parent_id:
        whole["parentSpanId"] = context.parent_id
    else:
        del whole["parentSpanId"]
    if timeline.first_token_s is not None:
        whole["events"] = [{"timeUnixNano": str(at(timeline.first_token_s)), "name": "first token"}]
    if error:
        whole["status"] = {"code": _ERROR, "message": (timeline.error or error)[:MAX_CHARS]}
    phases = _phases(context, timeline, facts, at)
    details = islice(_details(context, timeline, facts, at), MAX_DETAILS)
    found = [whole, *phases.values()]
    for phase, detail in details:
        if phase in phases:
            detail["parentSpanId"] = phases[phase]["spanId"]
        found.append(detail)
    return found


def _phases(
    context: TraceContext,
    timeline: Timeline,
    facts: Sequence[RequestFacts],
    at: Callable[[float], int],
) -> dict[str, Span]:
    found: dict[str, Span] = {}
    for phase, since, until in _PHASES:
        start = 0.0 if since is None else getattr(timeline, since)
        end = getattr(timeline, until)
        if start is not None and end is not None:
            more = _waits(facts) if phase == "queue" else {}
            found[phase] = _span(context, phase, (at(start), at(end)), more)
    return found


def _details(
    context: TraceContext,
    timeline: Timeline,
    facts: Sequence[RequestFacts],
    at: Callable[[float], int],
) -> Iterator[tuple[str, Span]]:
    """Yield spans with the phase that each is a part of, none if it is a part of the request
    itself."""
    first, end = timeline.first_token_s, timeline.finished_s or timeline.now()
    if first is not None and timeline.read_s:
        busy = {"quire.busy_ms": 1000.0 * timeline.read_s}
        name = "tool parse" if timeline.is_parsed else "detokenize"
        yield "decode", _span(context, name, (at(first), at(end)), busy)
    sent_s = timeline.queued_s or 0.0
    for each in facts:
        starts = [min(sent_s + chunk.at_s, end) for chunk in each.chunks]
        ends = [*starts[1:], *([] if each.num_chunks > len(starts) else [first or end])]
        for chunk, start, until in zip(each.chunks, starts, ends, strict=False):
            yield (
                "prefill",
                _span(
                    context,
                    "prefill chunk",
                    (at(start), at(max(start, until))),
                    {"quire.tokens": chunk.num_tokens, "quire.decoding_rows": chunk.num_rows},
                ),
            )
        for lost in each.preemptions:
            start = min(sent_s + lost.at_s, end)
            until = end if lost.seconds is None else min(start + lost.seconds, end)
            found: dict[str, object] = {
                "quire.preemption.cause": lost.cause.value,
                "quire.preemption.computed_tokens": lost.num_computed,
            }
            if lost.by is not None and lost.by.request_id:
                found["quire.preemption.by"] = lost.by.request_id
            if lost.num_again is not None:
                found["quire.preemption.tokens_again"] = lost.num_again
            yield "", _span(context, "preempted", (at(start), at(until)), found)


def _waits(facts: Sequence[RequestFacts]) -> dict[str, object]:
    """Return seconds that the first prompt waited, by their reasons."""
    waits = facts[0].waits if facts else {}
    return {f"quire.wait.{reason}_s": seconds for reason, seconds in waits.items()}


def _cache(verdict: CacheVerdict) -> dict[str, object]:
    """Return why tokens of the prompt were computed: hashes and counts."""
    found: dict[str, object] = {"quire.cache.reason": verdict.kind.value}
    if verdict.compared:
        found["quire.cache.compared_request"] = verdict.compared
        found["quire.cache.common_tokens"] = verdict.num_common
    if verdict.token is not None:
        found["quire.cache.first_different_token"] = verdict.token
    if verdict.place is not None:
        found["quire.cache.differs_in"] = verdict.place.name
    return found


def _operation(body: GenerationRequest | Pooled) -> str:
    if isinstance(body, Pooled):
        return "embeddings"
    return "text_completion" if isinstance(body, CompletionRequest) else "chat"


def _genai(
    operation: str, timeline: Timeline, body: GenerationRequest | Pooled, model: str
) -> dict[str, object]:
    found: dict[str, object] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": body.model or model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.num_cached_tokens,
        "quire.request_id": timeline.request_id,
    }
    if timeline.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [timeline.finish_reason]
    for field, name in _PARAMETERS.items():
        value = getattr(body, field, None)
        if value is not None:
            is_text = field == "stop" and isinstance(value, str)
            found[f"gen_ai.request.{name}"] = [value] if is_text else value
    return found


def _vllm(timeline: Timeline, body: GenerationRequest | Pooled, model: str) -> dict[str, object]:
    """Return the attributes that vLLM gives its one span."""
    found: dict[str, object] = {
        "gen_ai.request.id": timeline.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": timeline.num_generation_tokens,
    }
    for name in ("max_tokens", "temperature", "top_p", "n"):
        value = getattr(body, name, None)
        if value is not None:
            found[f"gen_ai.request.{name}"] = value
    scheduled, first, end = timeline.scheduled_s, timeline.first_token_s, timeline.finished_s
    seconds = {
        "time_in_queue": _between(timeline.queued_s, scheduled),
        "time_to_first_token": first,
        "e2e": end,
        "time_in_model_prefill": _between(scheduled, first),
        "time_in_model_decode": _between(first, end),
        "time_in_model_inference": _between(scheduled, end),
    }
    for name, value in seconds.items():
        if value is not None:
            found[f"gen_ai.latency.{name}"] = value
    return found


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _span(
    context: TraceContext, name: str, times: tuple[int, int], attributes: Mapping[str, object]
) -> Span:
    """Return a span below that of the request. times: begin and end, ns since 1970."""
    return {
        "traceId": context.trace_id,
        "spanId": _new_id(8),
        "parentSpanId": context.span_id,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(times[0]),
        "endTimeUnixNano": str(times[1]),
        "attributes": otlp_attributes(attributes),
    }


def otlp_attributes(values: Mapping[str, object]) -> list[dict[str, object]]:
    """Return attributes as OTLP's JSON lists them."""
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: object) -> dict[str, object]:
    """Return a value as OTLP's JSON has it: whole numbers are strings. Long texts are cut. A
    seed above 2**63 - 1, for which collectors would refuse the whole batch, becomes a text."""
    match value:
        case bool():
            return {"boolValue": value}
        case int() if -(2**63) <= value < 2**63:
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            items = cast("list[object]", value)
            return {"arrayValue": {"values": [_value(each) for each in items]}}
        case _:
            return {"stringValue": str(value)[:MAX_CHARS]}


def _new_id(num_bytes: int) -> str:
    """Return a random id that is not zero, as hexadecimal digits."""
    while True:
        found = secrets.token_hex(num_bytes)
        if found.strip("0"):
            return found
