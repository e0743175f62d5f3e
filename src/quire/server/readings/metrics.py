"""Counters of the server. The names of the exported metrics are in `exposition.py`."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from quire.protocol.sampling_params import SamplingParams
from quire.server.readings.histogram import LATENCY_BOUNDS, SHORT_BOUNDS, TOKEN_BOUNDS, Histogram
from quire.server.readings.timeline import Timeline

__all__ = ["ServerMetrics"]


def _histogram(bounds: tuple[float, ...]) -> Histogram:
    return msgspec.field(default_factory=lambda: Histogram(bounds))


class ServerMetrics(msgspec.Struct):
    """Counters and histograms since the server started, for one event loop. http: requests by
    handler, method and class of status. num_open_requests: at this moment."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_open_requests: int = 0
    finished: dict[str, int] = {}
    http: dict[tuple[str, str, str], int] = {}
    http_seconds: dict[str, Histogram] = {}
    time_to_first_token: Histogram = _histogram(SHORT_BOUNDS)
    inter_token_latency: Histogram = _histogram(SHORT_BOUNDS)
    request_tpot: Histogram = _histogram(SHORT_BOUNDS)
    e2e_latency: Histogram = _histogram(LATENCY_BOUNDS)
    render_time: Histogram = _histogram(SHORT_BOUNDS)
    queue_time: Histogram = _histogram(LATENCY_BOUNDS)
    prefill_time: Histogram = _histogram(LATENCY_BOUNDS)
    decode_time: Histogram = _histogram(LATENCY_BOUNDS)
    inference_time: Histogram = _histogram(LATENCY_BOUNDS)
    request_prompt_tokens: Histogram = _histogram(TOKEN_BOUNDS)
    request_generation_tokens: Histogram = _histogram(TOKEN_BOUNDS)
    request_max_tokens: Histogram = _histogram(TOKEN_BOUNDS)
    request_n: Histogram = _histogram(TOKEN_BOUNDS)

    def add(self, other: ServerMetrics) -> None:
        """Add the counts of another front."""
        for name in self.__struct_fields__:
            own, its = getattr(self, name), getattr(other, name)
            if isinstance(own, Histogram):
                own.add(its)
            elif isinstance(own, dict):
                _add_entries(cast("dict[Any, Any]", own), its)
            else:
                setattr(self, name, own + its)

    def count_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count one HTTP request. handler: the template of its route, or "none"."""
        key = (handler, method, f"{status // 100}xx")
        self.http[key] = self.http.get(key, 0) + 1
        histogram = self.http_seconds.get(handler)
        if histogram is None:
            histogram = self.http_seconds[handler] = Histogram(LATENCY_BOUNDS)
        histogram.observe(seconds)

    def count_tokens(
        self, now_s: float, previous_s: float | None, num_tokens: int, num_steps: int
    ) -> None:
        """Count the tokens of `num_steps` steps. now_s, previous_s: seconds after the request at
        which they and the tokens before them came."""
        self.generation_tokens += num_tokens
        if previous_s is None:
            self.time_to_first_token.observe(now_s)
        else:
            self.inter_token_latency.observe((now_s - previous_s) / num_steps, num_tokens)

    def count_finish(self, reason: str) -> None:
        """Count a sample that ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_generation(self, timeline: Timeline, params: SamplingParams, num_tokens: int) -> None:
        """Count a prompt that ended with its samples, in whatever way."""
        self.request_n.observe(params.n)
        self.request_generation_tokens.observe(num_tokens)
        if params.max_tokens is not None:
            self.request_max_tokens.observe(params.max_tokens)
        now = timeline.now()
        self.e2e_latency.observe(now)
        queued, scheduled, first = (
            timeline.queued_s,
            timeline.scheduled_s,
            timeline.first_token_s,
        )
        if queued is None or scheduled is None:
            return
        self.queue_time.observe(scheduled - queued)
        self.inference_time.observe(now - scheduled)
        if first is not None:
            self.prefill_time.observe(first - scheduled)
            self.decode_time.observe(now - first)
            num_per_sample = num_tokens / params.n
            if num_per_sample > 1:
                per_token = (now - first) / (num_per_sample - 1)
                self.request_tpot.observe(per_token)

    def count_prompt(self, num_tokens: int, render_s: float) -> None:
        """Count a prompt that was rendered and is about to be queued."""
        self.prompt_tokens += num_tokens
        self.request_prompt_tokens.observe(num_tokens)
        self.render_time.observe(render_s)


def _add_entries(own: dict[Any, Any], its: dict[Any, Any]) -> None:
    for key, value in its.items():
        if isinstance(value, Histogram):
            own.setdefault(key, Histogram(value.bounds)).add(value)
        else:
            own[key] = own.get(key, 0) + value
