"""The open requests of a client: the stream of each sequence in the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from quire.base.errors import RequestError
from quire.engine.clients.replay import Replays, resume_requests
from quire.engine.clients.request_stream import CHECKPOINT, RequestStream
from quire.protocol.messages import HANDLES_PER_CLIENT
from quire.protocol.request import EngineOutput, EngineRequest, FinishReason, Weights
from quire.protocol.step import IntArray

__all__ = ["HandleCounter", "OpenRequests"]


USUAL_OUTPUT = 256
"""Tokens that are counted for an output without a limit of its own."""


class HandleCounter:
    """Handles of one client id, each given once."""

    def __init__(self, client_id: int) -> None:
        self._next = client_id * HANDLES_PER_CLIENT

    def reserve(self, count: int) -> int:
        """The first of `count` consecutive handles."""
        first = self._next
        self._next += count
        return first


class OpenRequests:
    """Bookkeeping of open requests, without I/O. Towards its reader a request keeps its first
    handles. Each core that it is replayed to knows it by new ones, so late messages about an older
    life find no request."""

    def __init__(self, reserve_handles: Callable[[int], int], max_replays: int) -> None:
        """reserve_handles: returns the first of so many handles that were never used."""
        self._reserve_handles = reserve_handles
        self._replays = Replays(max_replays)
        self._streams: dict[RequestStream, int] = {}  # and its first handle in the core
        self._in_core: dict[int, tuple[RequestStream, int]] = {}  # by handle: stream, sample
        self._own: dict[int, tuple[RequestStream, int]] = {}
        self._grown: dict[RequestStream, None] = {}
        self._weights = CHECKPOINT

    def __len__(self) -> int:
        return len(self._streams)

    def open(
        self, request: EngineRequest, send_abort: Callable[[list[int]], None]
    ) -> RequestStream:
        """Follow a request that is about to be sent as it is. send_abort: called whenever the
        reader ends sequences, with their handles in the core; none if no core has them."""
        stream = RequestStream(request, weights=self._weights)
        self._follow(stream, send_abort)
        self._send_as(stream, request.first_handle)
        return stream

    def _follow(self, stream: RequestStream, send_abort: Callable[[list[int]], None]) -> None:
        def on_abort(indices: list[int]) -> None:
            if stream not in self._streams:
                return
            first = self._streams[stream]
            in_core = [first + i for i in indices if first + i in self._in_core]
            self._forget_ended(stream)
            send_abort(in_core)

        stream.on_abort = on_abort
        self._own.update(self._handles(stream, stream.request.first_handle))

    def let_go(self) -> list[RequestStream]:
        """Return the streams that may go on in another core at once after a core has died: all but
        those whose requests may have caused it. They are not followed any more."""
        going = [each for each in self._streams if not self._replays.is_suspect(each)]
        for stream in going:
            self._let_go(stream)
        return going

    def let_waiting_go(
        self, in_flight: frozenset[int] | None, *, is_silent: bool
    ) -> tuple[list[RequestStream], list[int]]:
        """Return the streams without a token that need not wait for this core, and their handles
        there; they are not followed any more. in_flight: handles that it computes, None if that is
        not known; their streams go if it `is_silent`, and each of them once."""
        going: list[RequestStream] = []
        in_core: list[int] = []
        for stream, first in list(self._streams.items()):
            handles = [each for each in self._handles(stream, first) if each in self._in_core]
            is_bound = stream.num_tokens or stream.request.pin_seconds is not None
            if is_bound or not handles or self._replays.is_suspect(stream):
                continue
            if in_flight is None or not in_flight.isdisjoint(handles):
                if not is_silent or stream.has_left_silence:
                    continue
                stream.has_left_silence = True
            going.append(stream)
            in_core += handles
            self._let_go(stream)
        for handle in in_core:
            del self._in_core[handle]
        return going, in_core

    def _let_go(self, stream: RequestStream) -> None:
        del self._streams[stream]
        for handle in self._handles(stream, stream.request.first_handle):
            self._own.pop(handle, None)

    def take_over(
        self, stream: RequestStream, send_abort: Callable[[list[int]], None]
    ) -> list[EngineRequest]:
        """Follow a stream of another client, and return the requests that continue it. send_abort:
        see `open`."""
        self._follow(stream, send_abort)
        return self._resume([stream])

    @property
    def tokens_in_flight(self) -> int:
        """Tokens that all streams may still compute: prompts, until they have given something, and
        outputs to come; a request that states no limit counts as USUAL_OUTPUT."""
        total = 0
        for stream in self._streams:
            request = stream.request
            most = request.params.max_tokens
            if most is None or request.max_tokens_is_default:
                most = USUAL_OUTPUT
            for index in stream.unfinished():
                total += max(most - len(stream.samples[index].token_ids), 1)
            if not stream.num_tokens:
                total += len(request.prompt_token_ids)
        return total

    def abort(self, handles: Iterable[int]) -> None:
        """End sequences by the handles of their requests; unknown ones are ignored."""
        for handle in handles:
            entry = self._own.get(handle)
            if entry is not None:
                stream, index = entry
                stream.abort(index)

    def awaits_prompt(self, handle: int) -> bool:
        """Return whether this is an open request that has not ended."""
        entry = self._own.get(handle)
        return entry is not None and entry[0].request.is_open

    def extended(self, handle: int, token_ids: IntArray, *, is_last: bool) -> EngineRequest | None:
        """An open request with more of its prompt; None if it has ended. RequestError if its
        prompt has."""
        if handle not in self._own:
            return None
        request = self._own[handle][0].request
        if not request.is_open:
            raise RequestError("the prompt of this request has ended: it cannot be extended")
        prompt = np.concatenate((request.prompt_token_ids, token_ids), dtype=np.int32)
        return replace(request, prompt_token_ids=prompt, is_open=not is_last)

    def set_request(self, handle: int, request: EngineRequest) -> int | None:
        """Replace a request by its continuation, which the next core will get. Return its handle in
        the present core; None if it is in none."""
        stream, index = self._own[handle]
        stream.request = request
        in_core = self._streams[stream] + index
        return in_core if in_core in self._in_core else None

    def fail_all(self, message: str) -> None:
        """End everything with an error."""
        for stream in list(self._streams):
            self._fail(stream, message)

    # --- what the core says ---------------------------------------------------------------------

    def take(self, output: EngineOutput) -> None:
        """Hand out what a step gave; `announce` tells the readers."""
        if output.tells_weights:
            self._use_weights(output.weights or CHECKPOINT)
        in_core, grown = self._in_core, self._grown
        for handle, num_tokens in output.num_cached_tokens.items():
            if handle in in_core:
                stream, _ = in_core[handle]
                stream.take_num_cached(num_tokens)
                grown[stream] = None
        for handle, piece in output.prompt_logprobs.items():
            if handle in in_core:
                stream, _ = in_core[handle]
                stream.take_prompt_logprobs(piece)
                grown[stream] = None
        for handle, vector in output.vectors.items():
            if handle in in_core:
                in_core[handle][0].take_vector(vector)  # its finish announces it
        logprobs = {handle: iter(entries) for handle, entries in output.logprobs.items()}
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            entry = in_core.get(handle)
            if entry is not None:
                stream, index = entry
                logprob = next(logprobs[handle], None) if handle in logprobs else None
                stream.take_token(index, token, logprob)
                grown[stream] = None
        for finish in output.finished:
            entry = in_core.get(finish.handle)
            if entry is not None:
                stream, index = entry
                own = stream.request.first_handle + index
                stream.finish(index, replace(finish, handle=own))
                self._forget_ended(stream)
                grown[stream] = None

    def _use_weights(self, weights: Weights) -> None:
        """Let all streams know what computes their tokens from now on."""
        if weights != self._weights:
            self._weights = weights
            for stream in self._streams:
                stream.use_weights(weights)

    def announce(self) -> None:
        """Tell the readers of streams that got something since the last call, each once."""
        grown, self._grown = self._grown, {}
        for stream in grown:
            stream.announce()

    def refuse(self, first_handle: int, message: str) -> None:
        """Handle a refusal by the core. A request that had been running fails instead."""
        for stream, first in list(self._streams.items()):
            if first == first_handle:
                if stream.num_tokens:
                    stream.finish_all(FinishReason.ERROR, message)
                stream.refuse(message)
                self._forget_ended(stream)
                stream.announce()

    # --- cores come and go ----------------------------------------------------------------------

    def core_died(self, in_flight: frozenset[int] | None) -> None:
        """in_flight: handles that were being computed; None if that is not known."""
        suspects = {
            stream: None
            for handle, (stream, _) in self._in_core.items()
            if in_flight is None or handle in in_flight
        }
        self._in_core.clear()
        for stream in self._replays.core_died(suspects):
            self._fail(
                stream,
                f"the engine died {stream.crashes} times while it computed this request: "
                "it may be the cause, so it is not tried again",
            )

    def core_started(self) -> list[EngineRequest]:
        """Return the requests to send to a new core: all but those that it was given meanwhile."""
        sent = {stream for stream, _ in self._in_core.values()}
        waiting = [stream for stream in self._streams if stream not in sent]
        return self._resume(self._replays.core_started(waiting))

    def next_trial(self) -> list[EngineRequest]:
        """Return held-back requests whose trial comes now; call it after every output."""
        return self._resume(self._replays.next_trial()) if self._replays.has_held else []

    def _resume(self, streams: Iterable[RequestStream]) -> list[EngineRequest]:
        requests: list[EngineRequest] = []
        for stream in streams:
            first = self._reserve_handles(len(stream.samples))
            self._send_as(stream, first)
            requests += resume_requests(stream, first)
        return requests

    def _send_as(self, stream: RequestStream, first_handle: int) -> None:
        self._streams[stream] = first_handle
        stream.use_weights(self._weights)
        self._in_core.update(self._handles(stream, first_handle))

    def _handles(
        self, stream: RequestStream, first_handle: int
    ) -> dict[int, tuple[RequestStream, int]]:
        return {first_handle + index: (stream, index) for index in stream.unfinished()}

    def _fail(self, stream: RequestStream, message: str) -> None:
        stream.finish_all(FinishReason.ERROR, message)
        self._forget_ended(stream)
        stream.announce()

    def _forget_ended(self, stream: RequestStream) -> None:
        """Drop the handles of samples that have ended, and the stream when all have."""
        live = set(stream.unfinished())
        for index in range(len(stream.samples)):
            if index not in live:
                self._in_core.pop(self._streams[stream] + index, None)
                self._own.pop(stream.request.first_handle + index, None)
        if stream.is_finished:
            del self._streams[stream]
