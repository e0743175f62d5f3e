"""One prompt in the engine: its updates become deltas of text, and it ends exactly once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from quire.base.errors import EngineError, EngineUnavailableError, RequestError
from quire.engine.clients.async_client import RequestUpdate, SampleUpdate, UpdateStream
from quire.engine.model_front import ModelFront
from quire.protocol.beam_search import BeamRules
from quire.protocol.outputs import WeightVersionSpan, common_weights
from quire.protocol.prediction import PredictionReader
from quire.protocol.receipts import Receipt, Witness
from quire.protocol.request import EngineRequest, FinishReason, SequenceFinish
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.scheduling_params import SchedulingParams
from quire.protocol.step import IntArray, TokenLogprobs
from quire.server.generation.backend import Ready, ServedModel
from quire.server.generation.follow import Outlet, follow
from quire.server.generation.open_images import OpenImages, PromptMedia
from quire.server.generation.parsed import AnswerForm, PartsReader
from quire.server.generation.prompts import PromptRenderer, check_context
from quire.server.generation.receipts import ReceiptStore
from quire.server.generation.waiting import Party, Place, WaitingRoom
from quire.server.readings.metrics import ServerMetrics
from quire.server.readings.prompt_memory import KnownPrompt, PromptMemory
from quire.server.readings.timeline import Timeline
from quire.server.readings.trace_recorder import TraceRecorder
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.text.dialect import Part
from quire.text.rendering import Ending, OutputRenderer, RenderedPrompt, RequestRenderer

__all__ = ["Generation", "GenerationService", "Render", "RequestRecords", "SampleDelta"]

Render = Callable[[], Awaitable[RenderedPrompt]]

TextEnding = Literal["stop", "length", "content_filter", "repetition"]
"""Values of finish_reason that OpenAI clients accept for text. All other endings are errors."""


class SampleDelta(msgspec.Struct, gc=False):
    """One sample's growth by one update. logprobs: one per token, if asked. finish_reason,
    stop_reason (a stop string or token id): only set in the last delta. parts: parts of a parsed
    answer, which has no text beside them. weight_versions: set in the last delta, if asked."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: TextEnding | None = None
    stop_reason: int | str | None = None
    parts: Sequence[Part] = ()
    weight_versions: Sequence[WeightVersionSpan] = ()


@dataclass(slots=True)
class _Sample:
    """prediction: position of the output in the client's prediction, if there is one. num_tokens:
    tokens of the output so far."""

    renderer: OutputRenderer | PartsReader
    prediction: PredictionReader | None = None
    ending: str | None = None
    num_tokens: int = 0


class Generation:
    """A prompt in the engine, opened and closed by `GenerationService.open`; call `run` once.

    num_tokens: tokens of all samples so far. num_cached_tokens: cached tokens of the prompt.
    prompt_logprobs: one per position, if asked; complete when the first token arrives. known: the
    prompt, as it is remembered. receipt: set when `run` has ended, for a deterministic request.
    shows_weights: last deltas tell the versions of weights.
    """

    def __init__(
        self,
        stream: UpdateStream,
        prompt: RenderedPrompt,
        params: SamplingParams,
        front: ModelFront,
        *,
        limits: Limits,
        place: Place,
        timeline: Timeline,
        metrics: ServerMetrics,
        recorder: TraceRecorder,
        known: KnownPrompt,
        beams: BeamRules | None = None,
        form: AnswerForm | None = None,
        has_grammar: bool = False,
        grammar_field: str | None = None,
        witness: Witness | None = None,
        keep: Callable[[Receipt], Receipt] = lambda receipt: receipt,
    ) -> None:
        """known: the prompt, as it is remembered. beams: rules of a beam search, whose samples come
        at its end. form: form of parsed answers. has_grammar: the engine must compile a grammar
        first. grammar_field: the request's field with that grammar. witness: makes the receipt, if
        one is asked for. keep: signs and stores it, in a thread."""
        self.prompt = prompt
        self.params = params
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.shows_weights = False
        self.tap: Callable[[list[SampleDelta]], None] | None = None
        """Called with all growth too."""
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt.token_ids)
        self._stream = stream
        self._limits = limits
        self._place = place
        self._timeline = timeline
        self._metrics = metrics
        self._recorder = recorder
        self.known = known
        self._first_answer: list[int] = []
        self._beams = beams
        self._is_parsed = timeline.is_parsed = form is not None
        self._has_grammar = has_grammar
        self._grammar_field = grammar_field
        self._witness = witness
        self._keep = keep
        self.receipt: Receipt | None = None
        self._is_scheduled = False
        self._samples = [
            _Sample(
                _reader(front, prompt, params, form),
                PredictionReader(prompt.prediction) if prompt.prediction else None,
            )
            for _ in range(params.n)
        ]
        self._last_token_s: float | None = None
        self._early: list[SampleDelta] = []  # what arrived while `settle` waited
        self._has_failed = False
        self._expiry: RefusedError | None = None
        begun_s = timeline.now()
        self._timer = self._expire_at(
            lambda: begun_s + place.queue_s(),
            "The request waited {:g} s for the engine (max_queue_s). Try again later.",
            since_s=begun_s,
        )

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Return the number of reasoning tokens of all samples so far; None if the answers are not
        parsed."""
        if not self._is_parsed:
            return None
        readers = (sample.renderer for sample in self._samples)
        return sum(r.num_reasoning_tokens for r in readers if isinstance(r, PartsReader))

    @property
    def num_predicted(self) -> tuple[int, int] | None:
        """Return the numbers of predicted tokens that have and have not appeared in the outputs;
        None without a prediction."""
        readers = [each.prediction for each in self._samples if each.prediction is not None]
        if not readers:
            return None
        return sum(r.num_accepted for r in readers), sum(r.num_rejected for r in readers)

    async def settle(self) -> None:
        """Wait until the engine has accepted the request's grammar, so that a refusal can be an
        HTTP status. Errors as in `run`. Requests without a grammar do not wait."""
        if not self._has_grammar:
            return
        news = asyncio.Event()
        self._stream.listen(news.set)
        first = self._stream.take_update()
        if first is None:
            await news.wait()
            first = self._stream.take_update()
        self._stream.listen(None)
        if first is not None:
            self._early = self._take_update(first)

    async def run(self, take: Callable[[list[SampleDelta]], None], outlet: Outlet) -> None:
        """Give growth to `take`, as the engine gives it, until every sample has finished; see
        `follow`.

        Raises RequestError if the engine refuses the request, EngineError if a sample failed,
        RefusedError if the request ran out of time, and what `take` raises.
        """

        def take_update(update: RequestUpdate) -> None:
            if deltas := self._take_update(update):
                take(deltas)

        if self._early:
            await outlet.flush()
            take(self._early)
        await follow(self._stream, take_update, outlet)
        if self._expiry is not None:
            raise self._expiry
        if self._witness is not None and self._witness.is_complete:
            self.receipt = await asyncio.to_thread(self._kept_receipt, self._witness)

    def _kept_receipt(self, witness: Witness) -> Receipt | None:
        histories = [self._stream.weights(i) for i in range(self.params.n)]
        made = witness.receipt(common_weights(histories))
        return None if made is None else self._keep(made)

    def close(self) -> None:
        """Release the place in the queue and the timer, and count how the request ended."""
        self._timer.cancel()
        self._place.leave()
        timeline = self._timeline
        timeline.num_generation_tokens += self.num_tokens
        if (predicted := self.num_predicted) is not None:
            timeline.num_accepted_prediction_tokens = predicted[0]
            timeline.num_rejected_prediction_tokens = predicted[1]
        for sample in self._samples:
            timeline.finish_reason = sample.ending or self._early_end()
            self._metrics.count_finish(timeline.finish_reason)
        self._metrics.count_generation(self._timeline, self.params, self.num_tokens)
        self.known.answered(self._first_answer)
        num_prompt = len(self.prompt.token_ids)
        self._recorder.record(timeline, num_prompt, self.num_tokens, self.params.n)

    def _early_end(self) -> str:
        """Return the finish reason of a sample that did not finish by itself."""
        return FinishReason.ERROR.value if self._has_failed else FinishReason.ABORT.value

    def _take_update(self, update: RequestUpdate) -> list[SampleDelta]:
        if update.num_cached_tokens is not None:
            self._scheduled(update.num_cached_tokens)
        for piece in update.prompt_logprobs:
            end = piece.start + len(piece.entries)
            self.prompt_logprobs[piece.start : end] = piece.entries
        found: list[SampleDelta] = []
        num_tokens = num_steps = 0
        for news in update.samples:
            num_new = len(news.token_ids)
            num_tokens += num_new
            num_steps = max(num_steps, num_new)
            sample = self._samples[news.index]
            if sample.ending is None:
                found.append(self._take(sample, news))
        if num_tokens:
            self._count_tokens(num_tokens, num_steps)
        if self.tap is not None:
            self.tap(found)
        return found

    def _take(self, sample: _Sample, news: SampleUpdate) -> SampleDelta:
        finish, begun = news.finish, time.perf_counter()
        grown, num_kept, ending = sample.renderer.take(news.token_ids, finish)
        self._timeline.read_s += time.perf_counter() - begun
        self.num_tokens += num_kept
        sample.num_tokens += num_kept
        if news.index == 0:
            self._first_answer += news.token_ids
        if sample.prediction is not None:
            sample.prediction.read(news.token_ids[:num_kept])
        if self._witness is not None:
            self._see(self._witness, news, num_kept, ending)
        if isinstance(grown, str):
            delta = SampleDelta(news.index, grown, news.token_ids, news.logprobs)
        else:
            delta = SampleDelta(news.index, "", news.token_ids, news.logprobs, parts=grown)
        if ending is None:
            return delta
        delta.token_ids, delta.logprobs = news.token_ids[:num_kept], news.logprobs[:num_kept]
        delta.finish_reason, delta.stop_reason = self._as_ending(ending, finish), ending.stop_reason
        if finish is None:
            self._stream.abort(news.index)
        if self.shows_weights:
            delta.weight_versions = self._stream.weights(news.index).spans(sample.num_tokens)
        sample.ending = delta.finish_reason
        return delta

    def _see(
        self, witness: Witness, news: SampleUpdate, num_kept: int, ending: Ending | None
    ) -> None:
        """Show the witness what came. Log-probabilities that were not asked for go no further."""
        reason, stop_reason = (None, None) if ending is None else ending
        kept = news.token_ids[:num_kept], news.logprobs[:num_kept]
        witness.take(news.index, *kept, reason, stop_reason)
        if self.params.logprobs is None:
            news.logprobs = ()

    def _as_ending(self, ending: Ending, finish: SequenceFinish | None) -> TextEnding:
        """Return the ending of a text. Raises if it is an error."""
        if ending.reason is FinishReason.STOP:
            return "stop"
        if ending.reason is FinishReason.LENGTH:
            return "length"
        if ending.reason is FinishReason.CONTENT_FILTER:
            return "content_filter"
        if ending.reason is FinishReason.REPETITION:
            return "repetition"
        assert finish is not None
        if ending.reason is FinishReason.DEADLINE:
            raise RefusedError(
                f"{finish.message[:1].upper()}{finish.message[1:]}.", status=503, retry_after_s=5
            )
        if finish.is_request_fault:
            raise self._fault(finish.message)
        self._has_failed = True
        message = finish.message or "The engine ended the request early. Send it again."
        if ending.reason is FinishReason.ABORT:  # nobody asked for it here
            raise self._expiry or EngineUnavailableError(message)
        raise self._expiry or EngineError(message)

    def _fault(self, message: str) -> Exception:
        """Make the error of a request at fault. Before its first step, its grammar is at fault."""
        is_of_grammar = not self._is_scheduled or message.startswith("the grammar ")
        if not self._has_grammar or not is_of_grammar:
            return RequestError(message)
        is_of_tools = message.startswith("tools[")
        return RefusedError(message, param="tools" if is_of_tools else self._grammar_field)

    def _scheduled(self, num_cached_tokens: int) -> None:
        self._place.start()
        self._is_scheduled = True
        self.num_cached_tokens = num_cached_tokens
        timeline = self._timeline
        timeline.num_cached_tokens += num_cached_tokens
        if timeline.scheduled_s is None:
            timeline.scheduled_s = timeline.now()
        self._timer.cancel()
        if self._beams is not None:
            self._expire_at_total()
            return
        self._timer = self._expire_at(
            self._place.first_token_s,
            "No token came within {:g} s (first_token_timeout_s). Shorten the prompt or try "
            "again later.",
        )

    def _count_tokens(self, num_tokens: int, num_steps: int) -> None:
        timeline = self._timeline
        if self._last_token_s is None:
            self._place.leave()
            self._timer.cancel()
            self._expire_at_total()
        previous, self._last_token_s = self._last_token_s, timeline.add_chunk(num_tokens)
        self._metrics.count_tokens(self._last_token_s, previous, num_tokens, num_steps)

    def _expire_at_total(self) -> None:
        seconds = self._place.total_s(self._limits.total_timeout_s)
        self._timer = self._expire_at(
            lambda: seconds,
            "The answer was not complete after {:g} s (total_timeout_s). Lower max_tokens.",
        )

    def _expire_at(
        self, latest: Callable[[], float], message: str, *, since_s: float = 0.0
    ) -> asyncio.TimerHandle:
        """Abort at `latest()` seconds after arrival; the value may rise meanwhile. message: has a
        place for the seconds, counted from `since_s`."""
        loop, timeline = asyncio.get_running_loop(), self._timeline

        def expire() -> None:
            left_s = latest() - timeline.now()
            if left_s > 0.0:
                self._timer = loop.call_later(left_s, expire)
                return
            text = message.format(round(latest() - since_s, 3))
            self._expiry = RefusedError(text, status=503, retry_after_s=5)
            self._stream.abort()

        return loop.call_later(max(0.0, latest() - timeline.now()), expire)


def _reader(
    front: ModelFront, prompt: RenderedPrompt, params: SamplingParams, form: AnswerForm | None
) -> OutputRenderer | PartsReader:
    """Make the reader of one sample."""
    renderer = front.renderer
    if form is None:
        return renderer.output_of(prompt.known_token_ids, params, front.eos_token_ids)
    stop_tokens = renderer.stop_tokens(params.stop_strings)
    return form.reader(prompt, params, stop_tokens, front.eos_token_ids)


async def _witness_of(ready: Ready, request: EngineRequest) -> Witness | None:
    """Return what makes the receipt of a request, if it asks for one. The first one may read all
    weights. Raises RefusedError if the bits of the answer cannot be promised."""
    if not request.params.deterministic:
        return None
    model, facts = ready.model, ready.capacity.facts
    try:
        made = model.front.provenance.witness
        return await asyncio.to_thread(made, request, facts, model.root)
    except RequestError as error:
        raise RefusedError(str(error), param="deterministic") from error


@dataclass(frozen=True, slots=True)
class RequestRecords:
    """Places for what stays of requests: the trace, prompts in memory, receipts."""

    trace: TraceRecorder
    prompts: PromptMemory
    receipts: ReceiptStore


class GenerationService:
    """The way of a prompt into the engine: waiting room, rendering, request, generation."""

    def __init__(
        self,
        limits: Limits,
        metrics: ServerMetrics,
        waiting: WaitingRoom,
        prompts: PromptRenderer,
        images: OpenImages,
        records: RequestRecords,
    ) -> None:
        """prompts: makes large grammars in its threads. images: room of those of open requests."""
        self._limits = limits
        self._metrics = metrics
        self._waiting = waiting
        self._prompts = prompts
        self._images = images
        self._records = records
        self._requests: tuple[ServedModel, RequestRenderer] | None = None

    @asynccontextmanager
    async def open(
        self,
        ready: Ready,
        render: Render,
        params: SamplingParams,
        *,
        timeline: Timeline,
        party: Party,
        scheduling: SchedulingParams,
        truncate: int | None = None,
        salt: str = "",
        beams: BeamRules | None = None,
        limit_field: str | None = "max_tokens",
        form: AnswerForm | None = None,
        grammar_field: str | None = None,
    ) -> AsyncGenerator[Generation]:
        """Render and add one prompt; on leaving, abort what is unfinished. limit_field: the
        request's field that bounds the answer; None if a default does. form: form of parsed
        answers. grammar_field: the request's field with the grammar.

        Raises RefusedError if too much waits or the prompt does not fit, RequestError if it cannot
        be served as asked, and EngineUnavailableError.
        """
        place = self._waiting.enter(party)
        is_spare = scheduling.is_spare
        media = PromptMedia(self._images, ready.client, place.queue_s(), is_spare=is_spare)
        try:
            prompt = await self._rendered(
                ready, render, params, timeline, truncate, limit_field, media
            )
            place.hold(len(prompt.token_ids))
            added = self._added(
                ready,
                prompt,
                params,
                scheduling,
                place,
                timeline,
                salt,
                beams,
                form,
                grammar_field,
                max_tokens_is_default=limit_field is None,
            )
            async with added as generation:
                yield generation
        finally:
            place.leave()
            media.leave()

    async def _rendered(
        self,
        ready: Ready,
        render: Render,
        params: SamplingParams,
        timeline: Timeline,
        truncate: int | None,
        limit_field: str | None,
        media: PromptMedia,
    ) -> RenderedPrompt:
        """media: holds those of the prompt afterwards, also if this fails."""
        started_s, most = timeline.now(), ready.capacity.max_model_len
        prompt = await render()
        if prompt.token_ids:  # nothing is encoded for a prompt that does not fit
            prompt = check_context(prompt, params, most, truncate, limit_field)
        if prompt.parts:
            prompt = await media.enter(prompt, ready.model.front.renderer.images)
            prompt = check_context(prompt, params, most, truncate, limit_field)
        if timeline.rendered_s is None:
            timeline.rendered_s = timeline.now()
        timeline.num_prompt_tokens += len(prompt.token_ids)
        self._metrics.count_prompt(len(prompt.token_ids), timeline.now() - started_s)
        return prompt

    @asynccontextmanager
    async def _added(
        self,
        ready: Ready,
        prompt: RenderedPrompt,
        params: SamplingParams,
        scheduling: SchedulingParams,
        place: Place,
        timeline: Timeline,
        salt: str,
        beams: BeamRules | None,
        form: AnswerForm | None,
        grammar_field: str | None,
        *,
        max_tokens_is_default: bool,
    ) -> AsyncGenerator[Generation]:
        client = ready.client
        handle = client.reserve_handles(params.n)
        request = self._request_renderer(ready.model).render(
            timeline.request_id,
            handle,
            prompt,
            params,
            time.monotonic(),
            beams,
            max_tokens_is_default=max_tokens_is_default,
        )
        if form is not None:
            form = form.at_end_of(prompt)
            request = await self._prompts.run(partial(form.held, request), form.num_chars)
        witness = await _witness_of(ready, request)
        if timeline.queued_s is None:
            timeline.queued_s = timeline.now()
        request = replace(request, salt=salt, scheduling=scheduling, arrival_time=time.monotonic())
        async with await client.add(request) as stream:
            known = self._records.prompts.add(
                timeline,
                request.prompt_token_ids,
                tail=self._tail(ready, request.prompt_token_ids, timeline),
                salt=salt,
                adapter=request.adapter_digest,
                media=request.media,
                parts=timeline.parts,
            )
            generation = Generation(
                stream,
                prompt,
                params,
                ready.model.front,
                limits=self._limits,
                place=place,
                timeline=timeline,
                metrics=self._metrics,
                recorder=self._records.trace,
                known=known,
                beams=beams,
                form=form,
                has_grammar=request.grammar is not None,
                grammar_field=grammar_field,
                witness=witness,
                keep=partial(self._records.receipts.put, timeline=timeline),
            )
            try:
                yield generation
            finally:
                generation.close()

    def _tail(self, ready: Ready, token_ids: IntArray, timeline: Timeline) -> int:
        """Return where what the template wrote after the last message begins; 0 without one."""
        if timeline.parts is None:
            return 0
        return ready.model.front.renderer.last_end(token_ids)

    def _request_renderer(self, model: ServedModel) -> RequestRenderer:
        """Make one per model, since it draws the seeds of requests that name none."""
        if self._requests is None or self._requests[0] is not model:
            front = model.front
            renderer = RequestRenderer(front.renderer, front.eos_token_ids, model.seed)
            self._requests = (model, renderer)
        return self._requests[1]
