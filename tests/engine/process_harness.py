"""An engine in a process of its own, for tests: fast heartbeats, short limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.clients.request_stream import RequestStream
from quire.engine.kernel_choice import Measure
from quire.engine.supervision.host import host_engine
from quire.engine.supervision.stall import StallLimits
from quire.engine.supervision.supervisor import (
    CORE_COMMAND,
    EngineSupervisor,
    RestartPolicy,
)
from quire.protocol import EngineRequest, SamplingParams, SequenceFinish, TokenLogprobs
from quire.protocol.control import ListPins
from quire.protocol.pooling_params import POOLED_PARAMS, Pooling
from quire.protocol.status import EngineState
from tests.engine.fake_core_process import FakeCoreOptions
from tests.executor.fake import FakeModel
from tests.forked import FAKE, REAL, core_starter, template_of
from tests.waiting import WAIT_S

FAKE_MODEL = FakeModel([None], 1000)

NUM_FRESH_BEATS = 4
"""Heartbeats after an answer of the core, after which the reading is not from before the answer."""

ENDLESS = 30_000
"""Tokens of an output that does not end within a test, in a core of `FakeCoreOptions.endless`."""

RESTART_AT_ONCE = RestartPolicy(first_delay_s=0.0, max_failed_starts=3)


def by_flags(*_: object) -> None:
    """A measurement that finds nothing, so that a test costs none."""


def run(work: Coroutine[Any, Any, None], limit_s: float = 240) -> None:
    """Run a test's coroutine; hanging is failing."""
    asyncio.run(asyncio.wait_for(work, limit_s))


class ForkedSupervisor(EngineSupervisor):
    """Supervisor of cores that are forked from a template (tests/forked.py), with no imports. Ranks
    of real ones are forked too."""

    def __init__(self, *given: Any, template: str = FAKE, **named: Any) -> None:
        super().__init__(*given, **named)
        module = REAL if template == REAL else ""
        self._fork = core_starter(template_of(template), module)

    async def _start_process(self) -> asyncio.subprocess.Process:
        return await self._fork(self)


class SoleHost(Protocol):
    """An `EngineHost` of one engine."""

    @property
    def directory(self) -> Path: ...
    @property
    def client(self) -> ProcessEngineClient: ...
    @property
    def supervisor(self) -> EngineSupervisor: ...
    @property
    def supervision(self) -> asyncio.Task[None]: ...

    def write_dump(self, reason: str) -> None: ...


@contextlib.asynccontextmanager
async def hosted(
    options: FakeCoreOptions | None = None,
    *,
    settings: Mapping[str, str | int | float | bool | None] | None = None,
    command: Sequence[str] = CORE_COMMAND,
    stall_s: float = 60.0,
    phase_s: float = 1800.0,
    policy: RestartPolicy = RESTART_AT_ONCE,
    wait: bool = True,
    measure: Measure = by_flags,
    **client_options: Any,
) -> AsyncGenerator[SoleHost]:
    """Host a fake core, or with `settings` a real one that `command` runs; ready, if waited for.
    measure: measurement by which kernels are chosen. client_options: options of a client whose core
    is not silent when a busy machine gives it no time for seconds."""
    if settings is None:
        command = (options or FakeCoreOptions()).command()
    make_supervisor = partial(
        ForkedSupervisor,
        template=FAKE if settings is None else REAL,
        command=command,
        heartbeat_interval_s=0.05,
        stall_limits=StallLimits(
            min_s=stall_s, start_silence_s=max(stall_s, 60.0), phase_s=phase_s
        ),
        restart_policy=policy,
    )
    make_client = partial(ProcessEngineClient, **{"silence_s": WAIT_S, **client_options})
    async with host_engine(
        settings or {}, measure=measure, make_supervisor=make_supervisor, make_client=make_client
    ) as host:
        sole = cast("SoleHost", host)
        if wait:
            await until_state(sole.client, EngineState.READY)
        yield sole


async def until_state(client: ProcessEngineClient, state: EngineState) -> None:
    status = client.status
    while status.state is not state:
        assert status.state is not EngineState.DEAD or state is EngineState.DEAD, status.message
        status = await client.wait_for_change(status)


async def until_begun(founds: Sequence[Collected], count: int) -> None:
    """Wait until the first sample of each has so many tokens."""
    while min(len(found.tokens.get(0, ())) for found in founds) < count:
        await asyncio.sleep(0.001)  # the processor is for those that compute


async def until_idle(client: ProcessEngineClient) -> None:
    """Wait until the core reports that it holds nothing for anybody, so nothing leaks."""
    async with asyncio.timeout(WAIT_S):
        await until_fresh(client)
        while True:
            stats = client.stats
            if stats.num_blocks and not (
                stats.num_running or stats.num_waiting or stats.num_used_blocks
            ):
                return
            await asyncio.sleep(0.02)


async def until_fresh(client: ProcessEngineClient) -> None:
    """Wait until the client's readings cover all that it has sent so far."""
    await until_state(client, EngineState.READY)
    await client.control(ListPins())
    for _ in range(NUM_FRESH_BEATS):
        beat = client._watch._beat
        while client._watch._beat is beat:
            await asyncio.sleep(0.01)


@dataclass
class Collected:
    """All that a stream gave, by sample."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, SequenceFinish] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    num_updates: int = 0


async def collect(stream: RequestStream, into: Collected | None = None) -> Collected:
    """Read a stream to its end, and check that it ends each sample once and says nothing after."""
    found = into or Collected()
    async with stream:
        async for update in stream:
            found.num_updates += 1
            assert update.samples or update.prompt_logprobs or update.num_cached_tokens is not None
            for sample in update.samples:
                assert sample.index not in found.finishes, "news after the end"
                found.tokens.setdefault(sample.index, []).extend(sample.token_ids)
                found.logprobs.setdefault(sample.index, []).extend(sample.logprobs)
                if sample.finish is not None:
                    found.finishes[sample.index] = sample.finish
    return found


async def ask(
    client: ProcessEngineClient,
    prompt: Sequence[int],
    *,
    seed: int = 0,
    pooling: Pooling | None = None,
    **params: Any,
) -> RequestStream:
    """Add a request; greedy unless a temperature is given."""
    chosen = SamplingParams(**{"temperature": 0.0, **params})
    if pooling is not None:
        chosen = POOLED_PARAMS
    return await client.add(
        EngineRequest(
            request_id="test",
            first_handle=client.reserve_handles(chosen.n),
            prompt_token_ids=np.array(prompt, np.int32),
            params=chosen,
            seed=seed,
            pooling=pooling,
        )
    )
