"""POST /v1/responses: an answer as a response, or as the events that build one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.receipts import Receipt
from quire.protocol.sampling_params import SamplingParams
from quire.server.generation.follow import NeverFull
from quire.server.generation.parsed import AnswerForm
from quire.server.generation.service import Generation, SampleDelta
from quire.server.http.events import DONE, EventSink
from quire.server.openai.answer import encode
from quire.server.openai.job import Job
from quire.server.openai.logprobs import LogprobsWriter
from quire.server.readings.prompt_memory import CacheVerdict
from quire.server.requests.errors import ErrorReply
from quire.server.requests.places import Fields
from quire.server.requests.responses_bodies import ResponsesRequest
from quire.server.responses.items import ItemReader
from quire.server.responses.request import ENCRYPTED_REASONING, RECEIPT, ReadRequest
from quire.server.responses.store import KeepsResponses, StoredResponse
from quire.server.responses.turns import fitting_prompt
from quire.text.dialect import Text
from quire.text.rendering import RenderedPrompt

__all__ = ["InputTokens", "ItemList", "Response", "ResponsesAnswer"]

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class CacheDiagnostics(msgspec.Struct):
    """type: "cache_hit", "cache_miss", "comparison_response_not_found" or "unavailable".
    The others are there for a miss. reason: the part that has changed. comparison_reusable_tokens:
    tokens that the compared response and its prompt have in common with this prompt."""

    type: str
    cache_missed_tokens: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET


class Response(msgspec.Struct):
    """One response: the request, and its outcome so far."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[Fields]
    instructions: str | None
    tools: list[Fields]
    tool_choice: str | Fields
    parallel_tool_calls: bool
    text: Fields
    reasoning: Fields
    truncation: str
    metadata: Fields
    temperature: float
    top_p: float
    background: bool
    store: bool
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    top_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    prompt_cache_key: str | None
    safety_identifier: str | None
    object: str = "response"
    service_tier: str = "default"
    usage: ResponseUsage | None = None
    error: Fields | None = None
    incomplete_details: Fields | None = None
    completed_at: int | None = None
    prompt_cache_diagnostics: CacheDiagnostics | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class ItemList(msgspec.Struct):
    """Items of a request."""

    data: list[Fields]
    first_id: str
    last_id: str
    has_more: bool
    object: str = "list"


class InputTokens(msgspec.Struct):
    """Answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


@dataclass(slots=True)
class ResponsesAnswer:
    """The answer to one request. items: items of the request itself, with ids. store: None if the
    answer is not kept. previous: token ids of the conversation so far, if known."""

    job: Job
    body: ResponsesRequest
    read: ReadRequest
    params: SamplingParams
    form: AnswerForm | None
    response: Response
    items: list[Fields]
    store: KeepsResponses | None
    previous: list[int] | None
    _num_events: int = 0
    _reader: ItemReader = field(init=False)
    _token_ids: list[int] = field(default_factory=list[int])
    _writer: LogprobsWriter | None = None

    def __post_init__(self) -> None:
        seals = ENCRYPTED_REASONING in (self.body.include or ())
        name = self.response.id.removeprefix("resp_")
        self._reader = ItemReader(name, self.read.tools, seals=seals)

    async def whole(self) -> bytes:
        """Return the JSON body. Errors as in `GenerationService.open` and `Generation.run`."""
        async with self._open() as generation:

            def take(deltas: list[SampleDelta]) -> None:
                for delta in deltas:
                    self._take(delta, generation)

            self.response.status = "in_progress"
            if self.response.background:
                self._put(None)
            await generation.run(take, NeverFull())
        self._keep(generation)
        return encode(self.response)

    async def stream(self, sink: EventSink) -> bytes:
        """Start the stream when the engine has taken the prompt. Writes all events but the last
        one, which it returns. Errors as in `whole`."""
        async with self._open() as generation:
            await generation.settle()
            await sink.start()
            self.response.status = "in_progress"
            sink.write(self._told("created") + self._told("in_progress"))

            def write(deltas: list[SampleDelta]) -> None:
                for delta in deltas:
                    sink.write(b"".join(map(self._event, self._take(delta, generation))))

            await generation.run(write, sink)
        self._keep(generation)
        return self._told(self.response.status) + DONE

    def failed(self, reply: ErrorReply) -> bytes:
        """Return the last event of a stream that an error ended. The response is kept as failed."""
        self.fail(reply)
        return self._told("failed") + DONE

    def fail(self, reply: ErrorReply) -> None:
        """Keep the response as failed, with its output so far."""
        for _ in self._reader.finish("incomplete"):
            pass
        code = "server_error" if reply.status >= 500 else "invalid_prompt"
        self.response.status = "failed"
        self.response.output = self._reader.items
        self.response.error = {"code": code, "message": reply.message}
        self._put(None)

    def _open(self) -> AbstractAsyncContextManager[Generation]:
        return self.job.open(self._render, self.params, self.read.chat, self.form)

    async def _render(self) -> RenderedPrompt:
        room = self.params.max_tokens if self.body.max_output_tokens is not None else 1
        return await fitting_prompt(
            self.job, self.read, self.form, num_wanted=room or 1, previous=self.previous
        )

    def _take(self, delta: SampleDelta, generation: Generation) -> list[Fields]:
        """Read one delta, and return its events, encoded at once because items change later."""
        parts = [Text(delta.text)] if delta.text else delta.parts
        logprobs: Sequence[Any] = ()
        if self.params.logprobs is not None and all(isinstance(part, Text) for part in parts):
            shown = [each for each in delta.logprobs if not self._is_hidden(each.token_id)]
            logprobs = list(self._logprobs(generation).chat(shown))
        events = list(self._reader.take(parts, logprobs))
        self._token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self._end(delta.finish_reason, events)
        return events

    def _end(self, reason: str, events: list[Fields]) -> None:
        response = self.response
        response.status = "completed"
        if reason != "stop":
            is_cut = reason in ("length", "repetition")  # the API knows no loops
            response.status = "incomplete"
            why = "max_output_tokens" if is_cut else "content_filter"
            response.incomplete_details = {"reason": why}
        events += self._reader.finish(response.status)

    def _is_hidden(self, token_id: int) -> bool:
        """Return True if a token is never text, such as the one that ends the answer."""
        tokenizer = self.job.renderer.tokenizer
        is_special = tokenizer is not None and tokenizer.is_special(token_id)
        return is_special and self.params.skip_special_tokens

    def _logprobs(self, generation: Generation) -> LogprobsWriter:
        """Return the writer for the whole answer: only its first token starts the text."""
        if self._writer is None:
            num_top = self.params.logprobs or 0
            self._writer = self.job.logprobs(num_top, self.read.chat, generation)
        return self._writer

    def _keep(self, generation: Generation) -> None:
        self.response.output = self._reader.items
        self.response.usage = _usage(generation)
        if self.read.compared_id is not None:
            size = self.job.ready.capacity.block_size
            verdict = generation.known.compared(self.read.compared_id, size)
            self.response.prompt_cache_diagnostics = _diagnostics(verdict)
        self.response.completed_at = int(time.time())
        if RECEIPT in (self.body.include or ()) and generation.receipt is not None:
            self.response.receipt = generation.receipt
        self._put([*generation.prompt.token_ids, *self._token_ids])

    def _put(self, token_ids: list[int] | None) -> None:
        if self.store is None:
            return
        response = self.response
        if response.background and not self.store.is_wanted(response.id):
            return
        body: Fields = msgspec.to_builtins(response)
        kept = StoredResponse(
            response.id, response.previous_response_id, body, self.items, token_ids
        )
        self.store.put(kept, self.job.tenant)

    def _told(self, what: str) -> bytes:
        return self._event({"type": f"response.{what}", "response": self.response})

    def _event(self, event: Fields) -> bytes:
        numbered = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(numbered))


def _usage(generation: Generation) -> ResponseUsage:
    num_prompt, num_output = len(generation.prompt.token_ids), generation.num_tokens
    return ResponseUsage(
        num_prompt,
        InputDetails(min(generation.num_cached_tokens, num_prompt)),
        num_output,
        OutputDetails(generation.num_reasoning_tokens or 0),
        num_prompt + num_output,
    )


_CHANGES = {
    "model": "model_changed",
    "tools": "tools_changed",
    "effort": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
    "system": "input_changed",
    "message": "input_changed",
}


def _diagnostics(verdict: CacheVerdict | None) -> CacheDiagnostics:
    if verdict is None:
        return CacheDiagnostics("comparison_response_not_found")
    if verdict.goes_on:
        return CacheDiagnostics("cache_hit")
    reason = _CHANGES.get(verdict.changed or "")
    if reason is None:
        return CacheDiagnostics("unavailable")
    return CacheDiagnostics("cache_miss", verdict.num_missed, reason, verdict.num_common)


def page_of(items: Iterable[Fields], *, limit: int, descends: bool, after: str | None) -> ItemList:
    """Return a page of a request's items. after: id of the item before the first."""
    listed = list(items)
    if descends:
        listed.reverse()
    if after is not None:
        ids = [item["id"] for item in listed]
        listed = listed[ids.index(after) + 1 :] if after in ids else []
    page = listed[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return ItemList(page, first, last, len(listed) > limit)
