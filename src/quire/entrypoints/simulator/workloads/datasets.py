"""Requests with lengths like those of a data set, and Poisson arrivals."""

from __future__ import annotations

import numpy as np

from quire.base.errors import ConfigError
from quire.entrypoints.bench.lengths import DATASETS, LogNormal, draw_workload
from quire.entrypoints.simulator.workloads.chat import draw_chat
from quire.entrypoints.simulator.workloads.trace import Piece, TraceRequest, poisson_times
from quire.entrypoints.simulator.workloads.translation import draw_translation

__all__ = ["HEAVY_TAILED", "TRACE_NAMES", "draw_heavy_tailed", "draw_trace"]

TRACE_NAMES = (*DATASETS, "translation-80", "translation-341", "chat", "heavy-tailed")
"""Kinds of traces that `draw_trace` knows."""

HEAVY_TAILED = (LogNormal(533.0, 1.4), LogNormal(36.0, 0.6))
"""Prompts with a median of 200 tokens of which one in a hundred is 26 times as long; short
outputs."""

_MAX_HEAVY = 12000
_SHARED_PREFIXES, _SHARED_TOKENS, _SHARED_SHARE = 8, 128, 0.3


def draw_trace(
    kind: str,
    *,
    rate: float,
    seconds: float,
    seed: int,
    max_model_len: int,
    n: int = 1,
    is_search: bool = False,
) -> list[TraceRequest]:
    """Draw a trace of one of `TRACE_NAMES` with `rate` requests per second. ConfigError if there
    is no such kind."""
    if kind not in TRACE_NAMES:
        raise ConfigError(f"Trace {kind!r} is not known. Give one of: {', '.join(TRACE_NAMES)}.")
    if kind == "chat":
        return draw_chat(rate=rate, seconds=seconds, seed=seed, max_model_len=max_model_len)
    if kind == "heavy-tailed":
        return draw_heavy_tailed(rate=rate, seconds=seconds, seed=seed)
    if kind.startswith("translation-"):
        prefix = int(kind.removeprefix("translation-"))
        return draw_translation(prefix, rate=rate, seconds=seconds, seed=seed)
    times = poisson_times(np.random.default_rng([seed, 1]), rate, seconds)
    work = draw_workload(*DATASETS[kind], len(times), seed, max_model_len)
    return [
        TraceRequest(at_s, prompt, output, n=n, is_search=is_search)
        for at_s, prompt, output in zip(
            times, work.prompt_lengths, work.output_lengths, strict=True
        )
    ]


def draw_heavy_tailed(*, rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Draw a trace of `HEAVY_TAILED` lengths, in which some prompts begin with one of a few
    prefixes."""
    rng = np.random.default_rng([seed, 2])
    times = poisson_times(rng, rate, seconds)
    work = draw_workload(*HEAVY_TAILED, len(times), seed, _MAX_HEAVY)
    found: list[TraceRequest] = []
    for at_s, prompt, output in zip(times, work.prompt_lengths, work.output_lengths, strict=True):
        shares = prompt > _SHARED_TOKENS and rng.random() < _SHARED_SHARE
        prefix = Piece(int(rng.integers(_SHARED_PREFIXES)), _SHARED_TOKENS)
        found.append(TraceRequest(at_s, prompt, output, (prefix,) if shares else ()))
    return found
