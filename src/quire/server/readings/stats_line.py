"""The line of figures in the log, in the words that users and their scripts know."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.base.telemetry import EngineStats
from quire.server.readings.metrics import ServerMetrics

__all__ = ["StatsLine"]

logger = logging.getLogger("quire.server")


@dataclass(frozen=True, slots=True)
class _Reading:
    time: float
    prompt_tokens: int
    generation_tokens: int


class StatsLine:
    """Logs a line every `interval_s`, except while the engine stays idle."""

    def __init__(self, interval_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last = _Reading(clock(), 0, 0)
        self._was_idle = True

    def tick(self, stats: EngineStats, metrics: ServerMetrics, device: str) -> None:
        """Call it more often than lines are due. device: device of the KV cache, if known."""
        now = _Reading(self._clock(), metrics.prompt_tokens, metrics.generation_tokens)
        seconds = now.time - self._last.time
        if seconds < self._interval_s:
            return
        last, self._last = self._last, now
        prompt_tokens = now.prompt_tokens - last.prompt_tokens
        generation_tokens = now.generation_tokens - last.generation_tokens
        is_idle = not (prompt_tokens or generation_tokens or stats.num_running or stats.num_waiting)
        level = logging.DEBUG if is_idle and self._was_idle else logging.INFO
        self._was_idle = is_idle
        looked_up = stats.prompt_tokens_total
        logger.log(
            level,
            "Engine 000: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f "
            "tokens/s, Running: %d reqs, Waiting: %d reqs, %sKV cache usage: %.1f%%, Prefix "
            "cache hit rate: %.1f%%",
            prompt_tokens / seconds,
            generation_tokens / seconds,
            stats.num_running,
            stats.num_waiting,
            {"": "", "cpu": "CPU "}.get(device, "GPU "),
            100 * stats.kv_cache_usage,
            100 * stats.cached_tokens_total / looked_up if looked_up else 0.0,
        )
