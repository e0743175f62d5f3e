"""Interface of engines for the CPU benchmarks, and the rates read off a run.

One adapter file per engine makes it step and tells how many tokens each request has. Everything
that is timed is timed here, so that a figure means the same for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "AS_STORED",
    "Engine",
    "EngineOptions",
    "Moment",
    "Timeline",
    "UnavailableError",
    "run_requests",
]

MAX_IDLE_STEPS = 10_000
"""Steps without a new token after which a run is given up."""
AS_STORED = "as stored"
"""Weights of a file in its own format."""


class UnavailableError(Exception):
    """This engine, or this format of its weights, cannot run here; the message is one line."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """model: folder with a config.json, or a GGUF file. weights: a format that the engine names;
    for a file AS_STORED, or a format that quire quantizes it to. work_dir: folder of converted
    models. max_num_seqs requests of max_model_len tokens must fit at once. widen_16_bits: compute
    with 16-bit weights in float32, as on a processor that has no products of bfloat16, though this
    one has."""

    model: Path
    weights: str
    num_threads: int
    max_num_seqs: int
    max_model_len: int
    work_dir: Path
    seed: int
    widen_16_bits: bool = False

    @property
    def is_gguf(self) -> bool:
        return self.model.suffix == ".gguf"


class Engine(Protocol):
    """An engine that is loaded. Requests are token ids, decoded greedily to an exact length."""

    settings: dict[str, Any]
    """Version, and what it was told; for the record."""

    def start(self, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> None:
        """Queue all requests at once. All earlier ones have ended."""
        ...

    def step(self) -> Sequence[int]:
        """Compute until something may have changed; number of output tokens of every request."""
        ...

    def kernel_seconds(self) -> float | None:
        """Time spent in compiled kernels since the start, or None if the engine cannot tell."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """State after a step. seconds: time since the requests were queued. counts: tokens
    of every request."""

    seconds: float
    counts: tuple[int, ...]
    kernel_seconds: float | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run of requests from the moment they were queued to their last token."""

    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    moments: tuple[Moment, ...]

    def prefill_rate(self) -> float:
        """Prompt tokens per second until every request has its first token."""
        return sum(self.prompt_lengths) / self._all_started().seconds

    def output_rate(self) -> float:
        """Output tokens per second over the whole run, prompts included in the time."""
        return sum(self.output_lengths) / self.moments[-1].seconds

    def decode_rate(self) -> float:
        """Output tokens per second while all requests decode: from the moment when every request
        has its first token to the moment when the first one ends. Tokens that came before that are
        not counted. Raises ValueError if there is no such time."""
        first, last = self._decode_window()
        return (sum(last.counts) - sum(first.counts)) / (last.seconds - first.seconds)

    def share_outside_kernels(self) -> float | None:
        """Return the share of time outside kernels while all requests decode; None if unknown."""
        first, last = self._decode_window()
        if first.kernel_seconds is None or last.kernel_seconds is None:
            return None
        inside = last.kernel_seconds - first.kernel_seconds
        return 1 - inside / (last.seconds - first.seconds)

    def _all_started(self) -> Moment:
        return next(moment for moment in self.moments if min(moment.counts) > 0)

    def _decode_window(self) -> tuple[Moment, Moment]:
        first = self._all_started()
        last = next(moment for moment in self.moments if self._one_ended(moment))
        if last.seconds <= first.seconds:
            raise ValueError(
                f"a request of {min(self.output_lengths)} tokens ended before all had started: "
                "ask for more output tokens"
            )
        return first, last

    def _one_ended(self, moment: Moment) -> bool:
        return any(map(int.__ge__, moment.counts, self.output_lengths))


def run_requests(
    engine: Engine, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]
) -> Timeline:
    """Raises RuntimeError unless every request ends with exactly its number of tokens."""
    wanted = tuple(output_lengths)
    moments: list[Moment] = []
    idle = 0
    started = time.perf_counter()
    engine.start(prompts, output_lengths)
    while not moments or moments[-1].counts != wanted:
        counts = tuple(engine.step())
        seconds = time.perf_counter() - started
        idle = idle + 1 if moments and moments[-1].counts == counts else 0
        if any(map(int.__gt__, counts, wanted)) or idle > MAX_IDLE_STEPS:
            raise RuntimeError(f"{type(engine).__name__} gave {counts} tokens, not {wanted}")
        moments.append(Moment(seconds, counts, engine.kernel_seconds()))
    return Timeline(tuple(map(len, prompts)), wanted, tuple(moments))
