"""What the server counts. The names of the exported metrics are in `exposition.py`."""

from __future__ import annotations

from collections import Counter

from quire.protocol.sampling_params import SamplingParams
from quire.server.histogram import LATENCY_BOUNDS, SHORT_BOUNDS, TOKEN_BOUNDS, Histogram
from quire.server.timeline import Timeline

__all__ = ["ServerMetrics"]


class ServerMetrics:
    """Counters and histograms since the server started; for one event loop."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, str]] = Counter()
        self.http_seconds: dict[str, Histogram] = {}
        self.num_open_requests = 0
        self.time_to_first_token = Histogram(SHORT_BOUNDS)
        self.inter_token_latency = Histogram(SHORT_BOUNDS)
        self.request_tpot = Histogram(SHORT_BOUNDS)
        self.e2e_latency = Histogram(LATENCY_BOUNDS)
        self.render_time = Histogram(SHORT_BOUNDS)
        self.queue_time = Histogram(LATENCY_BOUNDS)
        self.prefill_time = Histogram(LATENCY_BOUNDS)
        self.decode_time = Histogram(LATENCY_BOUNDS)
        self.inference_time = Histogram(LATENCY_BOUNDS)
        self.request_prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.request_generation_tokens = Histogram(TOKEN_BOUNDS)
        self.request_max_tokens = Histogram(TOKEN_BOUNDS)
        self.request_n = Histogram(TOKEN_BOUNDS)

    def count_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """One HTTP request. handler: the template of its route, or "none"."""
        self.http[handler, method, f"{status // 100}xx"] += 1
        histogram = self.http_seconds.get(handler)
        if histogram is None:
            histogram = self.http_seconds[handler] = Histogram(LATENCY_BOUNDS)
        histogram.observe(seconds)

    def count_tokens(
        self, timeline: Timeline, previous_s: float | None, num_tokens: int, num_steps: int
    ) -> None:
        """Tokens of one request arrived, of `num_steps` steps; others did at `previous_s`."""
        self.generation_tokens += num_tokens
        now = timeline.last_token_s or 0.0
        if previous_s is None:
            self.time_to_first_token.observe(now)
        else:
            self.inter_token_latency.observe((now - previous_s) / num_steps, num_tokens)

    def count_finish(self, reason: str) -> None:
        """One sample ended."""
        self.finished[reason] += 1

    def count_generation(self, timeline: Timeline, params: SamplingParams, num_tokens: int) -> None:
        """One prompt and its samples ended, however they did."""
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
        """A prompt was rendered and is about to be queued."""
        self.prompt_tokens += num_tokens
        self.request_prompt_tokens.observe(num_tokens)
        self.render_time.observe(render_s)
