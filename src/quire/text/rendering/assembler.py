"""Assembles request outputs from engine outputs: detokenizing, stop strings, logprobs."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.base.errors import RequestError
from quire.protocol.beam_search import BeamRules
from quire.protocol.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    WeightHistory,
    common_weights,
)
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.receipts import Witness
from quire.protocol.request import EngineOutput, FinishReason, SequenceFinish, Weights
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import PromptLogprobs, TokenLogprobs
from quire.text.rendering.output import OutputRenderer
from quire.text.rendering.renderer import RenderedPrompt, Renderer
from quire.text.rendering.tokenizer import Tokenizer

__all__ = ["AssemblerUpdate", "OutputAssembler", "beam_search_output"]


@dataclass(slots=True)
class AssemblerUpdate:
    """Changes by one engine output. requests: outputs that grew or ended, by id, each once. pooled:
    the same for vectors. aborts: handles whose sequences ended here, by a stop string, and not yet
    in the engine."""

    requests: dict[str, RequestOutput] = field(default_factory=dict[str, RequestOutput])
    pooled: dict[str, PoolingRequestOutput] = field(default_factory=dict[str, PoolingRequestOutput])
    aborts: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Request:
    output: RequestOutput
    params: SamplingParams
    num_unfinished: int
    witness: Witness | None = None
    weights: list[WeightHistory] = field(default_factory=list[WeightHistory])


@dataclass(slots=True)
class _Sequence:
    request: _Request
    completion: CompletionOutput
    renderer: OutputRenderer
    weights: WeightHistory


@dataclass(frozen=True, slots=True)
class _News:
    """Growth of one sequence in one output. logprobs: one per token, if asked."""

    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs]
    finish: SequenceFinish | None


class OutputAssembler:
    """Keeps the outputs of live requests; sequences are known by the handles of their requests."""

    def __init__(
        self,
        renderer: Renderer,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: clock for the metrics of requests."""
        self._clock = clock
        self._renderer = renderer
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[int, _Sequence] = {}
        self._pooled: dict[int, tuple[PoolingRequestOutput, PoolingParams]] = {}
        self._weights = Weights()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences) or bool(self._pooled)

    def handles(self) -> list[int]:
        """Handles of all sequences that have not ended."""
        return [*self._sequences, *self._pooled]

    def add(
        self,
        request_id: str,
        first_handle: int,
        prompt: RenderedPrompt,
        params: SamplingParams,
        witness: Witness | None = None,
    ) -> RequestOutput:
        """Follow a request. witness: makes its receipt, if it asked for one. RequestError if its
        text cannot be rendered (stop strings without a tokenizer); then nothing has changed."""
        renderers = [self._output_renderer(prompt, params) for _ in range(params.n)]
        completions = [
            CompletionOutput(
                index=index,
                cumulative_logprob=None if params.logprobs is None else 0.0,
                logprobs=None if params.logprobs is None else [],
            )
            for index in range(params.n)
        ]
        metrics = RequestMetrics(time.time(), self._clock())
        output = RequestOutput(
            request_id, prompt.text, prompt.token_ids, completions, metrics=metrics
        )
        if params.prompt_logprobs is not None:
            none: PositionLogprobs | None = None
            output.prompt_logprobs = [none for _ in prompt.token_ids]
        histories = [WeightHistory(self._weights) for _ in completions]
        request = _Request(output, params, params.n, witness, histories)
        parts = zip(completions, renderers, histories, strict=True)
        for handle, (completion, renderer, history) in enumerate(parts, first_handle):
            self._sequences[handle] = _Sequence(request, completion, renderer, history)
        return output

    def add_pooled(
        self, request_id: str, handle: int, prompt: RenderedPrompt, params: PoolingParams
    ) -> PoolingRequestOutput:
        """Follow a request for a vector."""
        output = PoolingRequestOutput(request_id, PoolingOutput(), prompt.token_ids)
        self._pooled[handle] = output, params
        return output

    def set_prompt(self, handle: int, prompt: RenderedPrompt) -> None:
        """The prompt of a sequence without output has become longer. Ended ones are ignored."""
        sequence = self._sequences.get(handle)
        if sequence is None:
            return
        request = sequence.request
        request.output.prompt, request.output.prompt_token_ids = prompt.text, prompt.token_ids
        sequence.renderer = self._output_renderer(prompt, request.params)

    def _output_renderer(self, prompt: RenderedPrompt, params: SamplingParams) -> OutputRenderer:
        return self._renderer.output_of(prompt.known_token_ids, params, self._eos_token_ids)

    def process(self, output: EngineOutput) -> AssemblerUpdate:
        """Take in what the engine gave. Outputs for sequences that ended before are dropped."""
        update = AssemblerUpdate()
        now = self._clock()
        if output.tells_weights:
            self._use_weights(output.weights or Weights())
        for handle, num_cached in output.num_cached_tokens.items():
            sequence = self._sequences.get(handle)
            # Later samples that run on their own find the prompt of the first one in the cache.
            if sequence is not None and sequence.completion.index == 0:
                sequence.request.output.num_cached_tokens = num_cached
                for history in sequence.request.weights:
                    history.begin()
                _note_scheduled(sequence.request.output, now)
        for handle, piece in output.prompt_logprobs.items():
            if handle in self._sequences:
                self._add_prompt_logprobs(self._sequences[handle], piece)
        if self._pooled:
            self._take_pooled(output, update)
        tokens: dict[int, list[int]] = {}
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            tokens.setdefault(handle, []).append(token)
        finished = {finish.handle: finish for finish in output.finished}
        for handle in dict.fromkeys((*tokens, *finished)):
            sequence = self._sequences.get(handle)
            if sequence is not None:
                news = _News(
                    tokens.get(handle, []), output.logprobs.get(handle, []), finished.get(handle)
                )
                _note_tokens(sequence.request.output, len(news.token_ids), now)
                if self._take(handle, sequence, news):
                    update.aborts.append(handle)
                update.requests[sequence.request.output.request_id] = sequence.request.output
        return update

    def _take_pooled(self, output: EngineOutput, update: AssemblerUpdate) -> None:
        for handle in self._pooled.keys() & output.num_cached_tokens.keys():
            self._pooled[handle][0].num_cached_tokens = output.num_cached_tokens[handle]
        for finish in output.finished:
            if finish.handle not in self._pooled:
                continue
            pooled, params = self._pooled.pop(finish.handle)
            vector = output.vectors.get(finish.handle)
            if vector is not None:
                try:
                    pooled.outputs.data = params.finished(vector)
                except RequestError as error:
                    pooled.error = str(error)
            else:
                pooled.error = finish.message or f"the request ended early ({finish.reason.value})"
            pooled.finished = True
            update.pooled[pooled.request_id] = pooled

    def _use_weights(self, weights: Weights) -> None:
        """Take in what computes all tokens from now on."""
        if weights != self._weights:
            self._weights = weights
            for each in self._sequences.values():
                each.weights.change(weights, len(each.completion.token_ids))

    def drop(self, handles: Sequence[int]) -> None:
        """Forget sequences whose outputs are not wanted any more."""
        for handle in handles:
            self._sequences.pop(handle, None)
            self._pooled.pop(handle, None)

    def _take(self, handle: int, sequence: _Sequence, news: _News) -> bool:
        """Add the growth of a sequence. Whether it ended here and not yet in the engine."""
        completion, finish = sequence.completion, news.finish
        if finish is not None and finish.whole is not None:
            news = _News(finish.whole.token_ids.tolist(), finish.whole.logprobs, finish)
        text, num_kept, ending = sequence.renderer.take(news.token_ids, finish)
        completion.token_ids.extend(news.token_ids[:num_kept])
        if text:
            completion.text = sequence.renderer.text
        self._add_logprobs(completion, news.logprobs[:num_kept])
        if finish is not None and finish.whole is not None:
            completion.cumulative_logprob = finish.whole.cum_logprob
        witness = sequence.request.witness
        if witness is not None:
            reason, stop = (None, None) if ending is None else ending
            kept = news.token_ids[:num_kept], news.logprobs[:num_kept]
            witness.take(completion.index, *kept, reason, stop)
        if ending is None:
            return False
        completion.finish_reason, completion.stop_reason = ending.reason.value, ending.stop_reason
        if finish is not None and finish.whole is not None:
            sequence.weights.came_whole()
        completion.weight_versions = sequence.weights.spans(len(completion.token_ids)) or None
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.DEADLINE):
            sequence.request.output.error = completion.error = finish.message
        self._close(handle, sequence)
        return finish is None

    def _add_logprobs(
        self, completion: CompletionOutput, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        if completion.logprobs is None:
            return
        for entry in logprobs:
            if entry.log_mass is not None:
                completion.log_masses = completion.log_masses or []
                completion.log_masses.append(entry.log_mass)
            completion.logprobs.append(self._position(entry))
            total = completion.cumulative_logprob or 0.0
            completion.cumulative_logprob = total + entry.logprob

    def _add_prompt_logprobs(self, sequence: _Sequence, piece: PromptLogprobs) -> None:
        into = sequence.request.output.prompt_logprobs
        if into is not None:
            for offset, entry in enumerate(piece.entries):
                into[piece.start + offset] = self._position(entry)

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        found = {
            token: Logprob(logprob, rank, self._token_text(token))
            for rank, (token, logprob) in enumerate(
                zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True), start=1
            )
        }
        found[entry.token_id] = Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))
        return found

    def _token_text(self, token_id: int) -> str | None:
        tokenizer = self._renderer.tokenizer
        return None if tokenizer is None else tokenizer.token_text(token_id)

    def _close(self, handle: int, sequence: _Sequence) -> None:
        del self._sequences[handle]
        request = sequence.request
        request.num_unfinished -= 1
        request.output.finished = request.num_unfinished == 0
        if request.output.finished and request.witness is not None:
            request.output.receipt = request.witness.receipt(common_weights(request.weights))


def _note_scheduled(output: RequestOutput, now: float) -> None:
    if output.metrics is not None and not output.metrics.scheduled_ts:
        output.metrics.scheduled_ts = now


def _note_tokens(output: RequestOutput, count: int, now: float) -> None:
    metrics = output.metrics
    if metrics is None or not count:
        return
    metrics.first_token_ts = metrics.first_token_ts or now
    metrics.last_token_ts = now
    metrics.num_generation_tokens += count


def beam_search_output(
    output: RequestOutput, rules: BeamRules, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """Make the output of a request that has ended; without a tokenizer texts are empty."""
    if output.error is not None:
        tokens = list(output.prompt_token_ids)
        failed = BeamSearchSequence(tokens, output.prompt or "", -math.inf, -math.inf)
        failed.finish_reason = "error"
        return BeamSearchOutput([failed], output.error)
    sequences: list[BeamSearchSequence] = []
    for found in output.outputs:
        tokens = [*output.prompt_token_ids, *found.token_ids]
        cum_logprob = found.cumulative_logprob or 0.0
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                text="" if tokenizer is None else tokenizer.decode(tokens),
                cum_logprob=cum_logprob,
                score=rules.score(cum_logprob, len(found.token_ids)),
                logprobs=found.logprobs,
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)
