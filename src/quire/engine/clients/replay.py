"""Replay of open requests after the core that computed them died.

They are sent to the next core as if they had been preempted, with the tokens that they have: noise
depends on (seed, sample, position) alone, so they continue as they would have. A request may be
what kills its core. So the ones that were being computed when it died are counted; whoever reaches
the limit is sent alone among its likes, and fails if the core dies again while it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from quire.engine.clients.request_stream import RequestStream
from quire.protocol.request import EngineRequest

__all__ = ["Replays", "resume_requests"]

TRIAL_TOKENS = 4
"""A suspect that has given so many more tokens has outlived the step that killed the core, with
the ones that were in flight beside it, and lets the next one follow."""


def resume_requests(stream: RequestStream, first_handle: int) -> list[EngineRequest]:
    """The requests that continue an unfinished one, over the handles from `first_handle` on.

    Before the first token that is the request itself, and so is a beam search, which gives nothing
    before its end. After it each sample resumes on its own; by
    then the log-probabilities of the prompt have all been given.
    """
    request = replace(stream.request, first_handle=first_handle)
    if request.beams is not None:
        return [request]
    if not stream.num_tokens and len(stream.unfinished()) == len(stream.samples):
        return [request]
    prompt_logprobs = None if stream.num_tokens else request.params.prompt_logprobs
    params = replace(request.params, n=1, prompt_logprobs=prompt_logprobs)
    return [
        replace(
            request,
            first_sample=index,
            params=params,
            output_token_ids=np.array(stream.samples[index].token_ids, np.int32),
        )
        for index in stream.unfinished()
    ]


class Replays:
    """Counts deaths by request, and decides which requests follow to the next core, and when."""

    def __init__(self, max_replays: int) -> None:
        """max_replays: number of core deaths that a request may survive while it is being computed;
        the next one fails it. With 0 every request in the dying step fails at once."""
        self._max_replays = max_replays
        self._held = deque[RequestStream]()
        self._on_trial: RequestStream | None = None
        self._trial_goal = 0

    def core_died(self, in_flight: Iterable[RequestStream]) -> list[RequestStream]:
        """Return the requests of the dead core's last step that must fail now. If a suspect was on
        trial, it alone is counted: the others have run without it."""
        charged = list(in_flight)
        if self._on_trial in charged and not self._is_trial_over:
            charged = [self._on_trial]
        failed: list[RequestStream] = []
        for stream in charged:
            stream.crashes += 1
            if stream.crashes > self._max_replays:
                failed.append(stream)
        self._held.clear()
        self._on_trial = None
        return failed

    def core_started(self, unfinished: Iterable[RequestStream]) -> list[RequestStream]:
        """Return the requests to send to the new core at once; the others wait for their turn."""
        released: list[RequestStream] = []
        for stream in unfinished:
            (self._held if self.is_suspect(stream) else released).append(stream)
        return [*released, *self.next_trial()]

    def is_suspect(self, stream: RequestStream) -> bool:
        """Return whether a request has seen so many deaths that it must be sent alone."""
        return 0 < self._max_replays <= stream.crashes

    def next_trial(self) -> list[RequestStream]:
        """The suspect to send now, if there is one and the one before it is through."""
        if not self._is_trial_over:
            return []
        self._on_trial = None
        while self._held and self._on_trial is None:
            stream = self._held.popleft()
            if not stream.is_finished:
                self._on_trial, self._trial_goal = stream, stream.num_tokens + TRIAL_TOKENS
        return [] if self._on_trial is None else [self._on_trial]

    @property
    def _is_trial_over(self) -> bool:
        trial = self._on_trial
        return trial is None or trial.is_finished or trial.num_tokens >= self._trial_goal

    @property
    def has_held(self) -> bool:
        """True if requests wait for their trial."""
        return bool(self._held)
