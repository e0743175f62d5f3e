"""Histograms that are cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

__all__ = ["LATENCY_BOUNDS", "SHORT_BOUNDS", "TOKEN_BOUNDS", "Histogram"]

SHORT_BOUNDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Bounds in seconds between tokens and to the first one: from half a millisecond, which small
models reach, with the usual bounds above 10 ms."""

LATENCY_BOUNDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0,
    20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0,
)  # fmt: skip
"""Bounds in seconds of whole requests and of their parts."""

TOKEN_BOUNDS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""Bounds for numbers of tokens, and other counts."""


class Histogram(msgspec.Struct):
    """counts: per bucket (bounds[i - 1], bounds[i]], and one above the last bound."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, or several equal ones."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        """Add the counts of a histogram with the same bounds."""
        self.counts = [own + its for own, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it), as Prometheus expects, "+Inf" last."""
        found: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            running += count
            found.append(("+Inf" if bound is None else repr(bound), running))
        return found
