"""A request of a trace: lengths and a time, and of its text no more than what others share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError
from quire.entrypoints.simulator.executor import TOKEN
from quire.protocol import BeamRules, EngineRequest, SamplingParams

__all__ = [
    "GENERATED",
    "Piece",
    "TraceRequest",
    "at_rate",
    "check_fits",
    "engine_requests",
    "longest",
    "poisson_times",
]

GENERATED = -1
"""Content of a piece that a simulated device wrote: the output of an earlier turn."""

_FIRST_TOKEN = TOKEN + 1
_OWN = 2**32
"""Contents from here on are of one request alone."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a prompt. Pieces of equal content have equal tokens, as far as they go."""

    content: int
    length: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """output_tokens: tokens of each sequence. pieces: pieces at the beginning of the prompt; the
    rest is its own. n: sequences. is_search: whether they are the beams of a search."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[Piece, ...] = ()
    n: int = 1
    is_search: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and one output."""
        return self.prompt_tokens + self.output_tokens


def longest(trace: Sequence[TraceRequest]) -> int:
    """Return the tokens of the longest sequence, prompt and output."""
    return max(request.num_tokens for request in trace)


def check_fits(trace: Sequence[TraceRequest], max_model_len: int) -> None:
    """Raise ConfigError, naming the request, if one is longer than the context."""
    for number, request in enumerate(trace, start=1):
        if request.num_tokens > max_model_len:
            raise ConfigError(
                f"Request {number} of the trace has {request.prompt_tokens} + "
                f"{request.output_tokens} tokens, but the context holds {max_model_len}. Take it "
                "out, or choose a model with a longer context."
            )


def at_rate(trace: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the trace with its times stretched to so many requests per second."""
    span = trace[-1].arrival_s - trace[0].arrival_s
    factor = (len(trace) - 1) / rate / span if span else 0.0
    first = trace[0].arrival_s
    return [replace(each, arrival_s=(each.arrival_s - first) * factor) for each in trace]


def poisson_times(rng: np.random.Generator, rate: float, seconds: float) -> list[float]:
    """Return the times of Poisson arrivals before `seconds`; at least one."""
    count = max(round(rate * seconds), 1)
    return np.sort(rng.uniform(0.0, seconds, count)).tolist()


def engine_requests(trace: Sequence[TraceRequest], vocab_size: int) -> list[EngineRequest]:
    """Requests as the engine core takes them; sequences have handles 0, 1, 2, …"""
    requests: list[EngineRequest] = []
    handle = 0
    for index, each in enumerate(trace):
        requests.append(
            EngineRequest(
                request_id=str(index),
                first_handle=handle,
                prompt_token_ids=_prompt_of(each, index, vocab_size),
                params=SamplingParams(n=each.n, max_tokens=each.output_tokens),
                seed=index,
                arrival_time=each.arrival_s,
                beams=BeamRules(each.n) if each.is_search else None,
            )
        )
        handle += each.n
    return requests


def _prompt_of(request: TraceRequest, index: int, vocab_size: int) -> npt.NDArray[np.int32]:
    left, parts = request.prompt_tokens, list[npt.NDArray[np.int32]]()
    for piece in (*request.pieces, Piece(_OWN + index, left)):
        count = min(piece.length, left)
        if count:
            parts.append(_tokens(piece.content, count, vocab_size))
            left -= count
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _tokens(content: int, count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return tokens that look random, the same for the same content (SplitMix64's increment and
    first multiplier, Steele et al. 2014)."""
    if content == GENERATED:
        return np.full(count, TOKEN, np.int32)
    start = np.uint64(content * 0x9E3779B97F4A7C15 % 2**64)
    words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + start
    words ^= words >> np.uint64(29)
    words *= np.uint64(0x94D049BB133111EB)
    found = (words >> np.uint64(33)) % np.uint64(vocab_size - _FIRST_TOKEN)
    return found.astype(np.int32) + np.int32(_FIRST_TOKEN)
