"""From engine outputs to request outputs: detokenizing, stop strings, logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.protocol.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from quire.protocol.request import EngineOutput, FinishReason, SequenceFinish, WholeSequence
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import PromptLogprobs, TokenLogprobs
from quire.rendering.output import OutputRenderer
from quire.rendering.renderer import RenderedPrompt, Renderer

__all__ = ["AssemblerUpdate", "OutputAssembler"]


@dataclass(slots=True)
class AssemblerUpdate:
    """What one engine output changed. requests: those that grew or ended, by id, each once.
    aborts: handles whose sequences ended here, by a stop string, and not yet in the engine."""

    requests: dict[str, RequestOutput] = field(default_factory=dict[str, RequestOutput])
    aborts: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Request:
    output: RequestOutput
    params: SamplingParams
    eos_token_ids: frozenset[int]
    num_unfinished: int


@dataclass(slots=True)
class _Sequence:
    request: _Request
    completion: CompletionOutput
    renderer: OutputRenderer


class OutputAssembler:
    """Keeps the outputs of live requests; sequences are known by the handles of their requests."""

    def __init__(self, renderer: Renderer, eos_token_ids: frozenset[int]) -> None:
        self._renderer = renderer
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[int, _Sequence] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def handles(self) -> list[int]:
        """Of all sequences that have not ended."""
        return list(self._sequences)

    def add(
        self, request_id: str, first_handle: int, prompt: RenderedPrompt, params: SamplingParams
    ) -> RequestOutput:
        """Follow a request. RequestError if its text cannot be rendered (stop strings without a
        tokenizer); then nothing has changed."""
        renderers = [self._renderer.output_of(prompt.token_ids, params) for _ in range(params.n)]
        completions = [
            CompletionOutput(
                index=index,
                cumulative_logprob=None if params.logprobs is None else 0.0,
                logprobs=None if params.logprobs is None else [],
            )
            for index in range(params.n)
        ]
        output = RequestOutput(request_id, prompt.text, prompt.token_ids, completions)
        if params.prompt_logprobs is not None:
            none: PositionLogprobs | None = None
            output.prompt_logprobs = [none for _ in prompt.token_ids]
        request = _Request(output, params, self._eos_token_ids, params.n)
        for index, renderer in enumerate(renderers):
            self._sequences[first_handle + index] = _Sequence(request, completions[index], renderer)
        return output

    def set_prompt(self, handle: int, prompt: RenderedPrompt) -> None:
        """The prompt of a sequence without output has become longer. Ended ones are ignored."""
        sequence = self._sequences.get(handle)
        if sequence is None:
            return
        request = sequence.request
        request.output.prompt, request.output.prompt_token_ids = prompt.text, prompt.token_ids
        sequence.renderer = self._renderer.output_of(prompt.token_ids, request.params)

    def process(self, output: EngineOutput) -> AssemblerUpdate:
        """Take in what the engine gave. Outputs for sequences that ended before are dropped."""
        update = AssemblerUpdate()
        stops = {f.handle for f in output.finished if f.reason is FinishReason.STOP}
        for handle, num_cached in output.num_cached_tokens.items():
            sequence = self._sequences.get(handle)
            # Later samples that run on their own find the prompt of the first one in the cache.
            if sequence is not None and sequence.completion.index == 0:
                sequence.request.output.num_cached_tokens = num_cached
        for handle, piece in output.prompt_logprobs.items():
            if handle in self._sequences:
                self._add_prompt_logprobs(self._sequences[handle], piece)
        handles, tokens = output.handles.tolist(), output.token_ids.tolist()
        logprobs = {handle: iter(entries) for handle, entries in output.logprobs.items()}
        last = {handle: i for i, handle in enumerate(handles) if handle in stops}
        for i, (handle, token) in enumerate(zip(handles, tokens, strict=True)):
            sequence = self._sequences.get(handle)
            if sequence is not None:
                entry = next(logprobs[handle], None) if handle in logprobs else None
                self._append(sequence, token, entry, last.get(handle) == i)
                update.requests[sequence.request.output.request_id] = sequence.request.output
                if sequence.renderer.stopped is not None:
                    self._end_by_string(handle, sequence)
                    if handle not in stops:
                        update.aborts.append(handle)
        for finish in output.finished:
            self._finish(finish, update)
        return update

    def drop(self, handles: Sequence[int]) -> None:
        """Forget sequences whose outputs nobody waits for any more."""
        for handle in handles:
            self._sequences.pop(handle, None)

    def _append(
        self, sequence: _Sequence, token: int, logprobs: TokenLogprobs | None, is_stop: bool
    ) -> None:
        completion = sequence.completion
        completion.token_ids.append(token)
        delta = sequence.renderer.append((token,), is_stop)
        if delta.text:
            completion.text = sequence.renderer.text
        if logprobs is not None and completion.logprobs is not None:
            completion.logprobs.append(self._position(logprobs))
            total = completion.cumulative_logprob or 0.0
            completion.cumulative_logprob = total + logprobs.logprob

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

    def _end_by_string(self, handle: int, sequence: _Sequence) -> None:
        sequence.completion.finish_reason = FinishReason.STOP.value
        sequence.completion.stop_reason = sequence.renderer.stopped
        self._close(handle, sequence)

    def _finish(self, finish: SequenceFinish, update: AssemblerUpdate) -> None:
        sequence = self._sequences.get(finish.handle)
        if sequence is None:
            return
        completion, request = sequence.completion, sequence.request
        if finish.whole is not None:
            self._take_whole(sequence, finish.whole, finish.reason is FinishReason.STOP)
        if sequence.renderer.finish():
            completion.text = sequence.renderer.text
        completion.finish_reason = finish.reason.value
        if sequence.renderer.stopped is not None:
            completion.finish_reason = FinishReason.STOP.value
            completion.stop_reason = sequence.renderer.stopped
        elif finish.stop_token_id is not None and finish.stop_token_id not in self._eos_token_ids:
            completion.stop_reason = finish.stop_token_id
        if finish.reason in (FinishReason.ERROR, FinishReason.DEADLINE):
            request.output.error = finish.message
        self._close(finish.handle, sequence)
        update.requests[request.output.request_id] = request.output

    def _take_whole(self, sequence: _Sequence, whole: WholeSequence, is_stop: bool) -> None:
        completion = sequence.completion
        completion.token_ids = whole.token_ids.tolist()
        completion.cumulative_logprob = whole.cum_logprob
        sequence.renderer.append(completion.token_ids, is_stop)
        completion.text = sequence.renderer.text
        if completion.logprobs is not None:
            completion.logprobs = [self._position(entry) for entry in whole.logprobs]

    def _close(self, handle: int, sequence: _Sequence) -> None:
        del self._sequences[handle]
        sequence.request.num_unfinished -= 1
        sequence.request.output.finished = sequence.request.num_unfinished == 0
