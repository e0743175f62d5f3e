"""Figures from the times of a load: throughput, latencies, goodput, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.base.errors import ConfigError, EngineError
from quire.entrypoints.bench.serving_load import LoadResult
from quire.entrypoints.bench.serving_stream import AnswerTimes

__all__ = ["LATENCIES", "ServingFigures", "parse_goodput", "serving_figures"]

LATENCIES: Mapping[str, str] = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""ttft: time from sending to the first chunk with output. itl: time between two chunks. tpot: (end
- first chunk) / (output tokens - 1) of a request. e2el: time from sending to the last chunk."""

_PER_REQUEST = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """counts and rates by name; latencies_ms by name, each value sorted. errors: messages of the
    requests that failed, which no other figure counts."""

    num_completed: int
    num_prompt_tokens: int
    num_output_tokens: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_output_tokens_per_s: float
    peak_concurrency: int
    goodput_per_s: float | None
    generator_cpu_share: float
    latencies_ms: Mapping[str, Sequence[float]]
    errors: tuple[str, ...]

    def statistics(self, names: Sequence[str], percentiles: Sequence[float]) -> dict[str, float]:
        """`mean_ttft_ms`, `median_ttft_ms`, `p99_ttft_ms`, …; a latency of which there is no value
        (tpot of answers of one token) is left out."""
        found: dict[str, float] = {}
        for name in names:
            values = np.asarray(self.latencies_ms[name])
            if values.size:
                found[f"mean_{name}_ms"] = float(values.mean())
                found[f"median_{name}_ms"] = float(np.median(values))
                for percent in percentiles:
                    found[f"p{percent:g}_{name}_ms"] = float(np.percentile(values, percent))
        return found


def serving_figures(result: LoadResult, goals_ms: Mapping[str, float]) -> ServingFigures:
    """goals_ms: latencies that a request must keep to count as goodput; empty: not asked. Raises
    EngineError if every request failed."""
    answers = [answer for answer in result.answers if answer.error is None]
    errors = tuple(answer.error for answer in result.answers if answer.error is not None)
    if not answers:
        raise EngineError(f"All {len(errors)} requests failed. The first: {errors[0]}")
    by_request = [_latencies(answer) for answer in answers]
    prompt = sum(answer.num_prompt_tokens for answer in answers)
    output = sum(answer.num_output_tokens for answer in answers)
    seconds = result.duration_s
    latencies = {
        name: sorted(found[name] for found in by_request if name in found)
        for name in _PER_REQUEST
    }  # fmt: skip
    latencies["itl"] = _gaps_ms(answers)
    good = [found for found in by_request if _keeps(found, goals_ms)]
    return ServingFigures(
        num_completed=len(answers),
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        duration_s=seconds,
        requests_per_s=len(answers) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        peak_output_tokens_per_s=_peak_rate(answers),
        peak_concurrency=_peak_concurrency(answers),
        goodput_per_s=len(good) / seconds if goals_ms else None,
        generator_cpu_share=result.cpu_share,
        latencies_ms=latencies,
        errors=errors,
    )


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Parse "ttft:100", "tpot:20" into milliseconds by name. Raises ConfigError."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = -1.0
        if name not in _PER_REQUEST or not goals[name] > 0:
            raise ConfigError(
                f"--goodput cannot be {text!r}. Give one of {', '.join(_PER_REQUEST)} and "
                "milliseconds, such as ttft:100."
            )
    return goals


def _latencies(answer: AnswerTimes) -> dict[str, float]:
    """In milliseconds, of one answer. tpot needs two tokens."""
    first, end = answer.chunks[0], answer.end
    found = {"ttft": (first - answer.start) * 1000, "e2el": (end - answer.start) * 1000}
    if answer.num_output_tokens > 1:
        found["tpot"] = (end - first) * 1000 / (answer.num_output_tokens - 1)
    return found


def _keeps(latencies: Mapping[str, float], goals_ms: Mapping[str, float]) -> bool:
    return all(latencies.get(name, 0.0) <= goal for name, goal in goals_ms.items())


def _gaps_ms(answers: Sequence[AnswerTimes]) -> list[float]:
    """Between two chunks of one answer, sorted."""
    gaps = [np.diff(answer.chunks) for answer in answers]
    return (np.sort(np.concatenate(gaps)) * 1000).tolist()


def _peak_rate(answers: Sequence[AnswerTimes]) -> float:
    """Most output tokens in one second of the clock; the tokens of an answer are shared evenly
    among its chunks."""
    times = np.concatenate([np.asarray(answer.chunks) for answer in answers])
    weights = np.concatenate(
        [
            np.full(len(answer.chunks), answer.num_output_tokens / len(answer.chunks))
            for answer in answers
        ]
    )
    seconds = np.floor(times - times.min()).astype(np.int64)
    return float(np.bincount(seconds, weights).max())


def _peak_concurrency(answers: Sequence[AnswerTimes]) -> int:
    """Most answers under way at one time. One that ends as another starts is no longer there."""
    changes = [(answer.start, 1) for answer in answers] + [(answer.end, -1) for answer in answers]
    running = np.cumsum([change for _, change in sorted(changes)])
    return int(running.max())
