"""Requests that arrive at a server over time, as those of many independent users do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import uvloop

from quire.base.errors import ConfigError
from quire.entrypoints.bench.serving_connection import ConnectionPool
from quire.entrypoints.bench.serving_stream import AnswerReader, AnswerTimes
from quire.entrypoints.client import ServerAddress

__all__ = ["Arrivals", "Load", "LoadResult", "run_load"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """rate: requests per second; infinite: all at once. burstiness: the shape of the gamma
    distribution of the time between two; 1 is a Poisson process, below it they come in bursts,
    above it they are more even."""

    rate: float
    burstiness: float

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(f"The {name} of arrivals is {value}. Give a number above 0.")

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds from the start, ascending, [count]; the first is 0.

        Intervals ~ Gamma(shape b, scale 1 / (rate · b)) have the mean 1 / rate and the squared
        coefficient of variation 1 / b.
        """
        if math.isinf(self.rate):
            return [0.0] * count
        scale = 1.0 / (self.rate * self.burstiness)
        gaps = np.random.default_rng(seed).gamma(self.burstiness, scale, max(count - 1, 0))
        return [0.0, *np.cumsum(gaps).tolist()][:count]


@dataclass(frozen=True, slots=True)
class Load:
    """path: route to call. bodies: JSON of the requests. arrivals: seconds at which each comes.
    max_concurrency: further ones wait here, and their time counts from when they are sent.
    timeout_s: a request that takes longer has failed."""

    address: ServerAddress
    headers: dict[str, str]
    path: str
    bodies: Sequence[bytes]
    arrivals: Sequence[float]
    max_concurrency: int | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """duration_s: time from the first request to the end of the last. cpu_share: part of one
    processor that this process used meanwhile; near 1 the generator is what was measured."""

    answers: tuple[AnswerTimes, ...]
    duration_s: float
    cpu_share: float


def run_load(load: Load, on_end: Callable[[AnswerTimes], None] | None = None) -> LoadResult:
    """Send all requests and wait for their ends. on_end: called after each."""
    return uvloop.run(_run(load, on_end or (lambda _: None)))


async def _run(load: Load, on_end: Callable[[AnswerTimes], None]) -> LoadResult:
    pool = ConnectionPool(load.address, load.headers)
    limit = nullcontext() if load.max_concurrency is None else (
        asyncio.Semaphore(load.max_concurrency)
    )  # fmt: skip
    start, cpu = time.perf_counter(), time.process_time()

    async def one(body: bytes) -> AnswerTimes:
        async with limit:
            answer = await _answer(pool, load, body)
        on_end(answer)
        return answer

    tasks: list[asyncio.Task[AnswerTimes]] = []
    try:
        for at, body in zip(load.arrivals, load.bodies, strict=True):
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(body)))
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        pool.close()
    duration = time.perf_counter() - start
    return LoadResult(tuple(answers), duration, (time.process_time() - cpu) / duration)


async def _answer(pool: ConnectionPool, load: Load, body: bytes) -> AnswerTimes:
    """Send one request; what goes wrong is told in the answer."""
    reader = AnswerReader(time.perf_counter())
    try:
        async with asyncio.timeout(load.timeout_s):
            status = await pool.post(load.path, body, reader.feed)
    except TimeoutError:
        reader.times.error = f"no end after {load.timeout_s:g} s"
        status = 200
    except OSError as error:
        reader.times.error = f"the connection was lost: {error}"
        status = 200
    return reader.finish(status, time.perf_counter())
