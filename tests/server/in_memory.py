"""An engine in the event loop of the test: the real scheduler over the fake executor, behind the
door that servers use. Its tokens are hashes, and so are its log-probabilities."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from quire import LLM
from quire.base.errors import ConfigError, EngineUnavailableError, RequestError
from quire.base.telemetry import EngineStats
from quire.config.feasibility import check_servable
from quire.engine.clients.async_client import UpdateStream
from quire.engine.clients.open_requests import OpenRequests
from quire.engine.core.hook_runner import HookRunner
from quire.engine.core.hook_session import TokenTexts
from quire.hooks import HOLD, Answer, End, Unsent, WatchedSequence
from quire.hooks.load import HookSet
from quire.protocol import EngineOutput, EngineRequest, PromptLogprobs, TokenLogprobs
from quire.protocol.control import AdminOp, ExtendPrompt, Report, asleep
from quire.protocol.media import ImageData, MediaInfo
from quire.protocol.status import EngineCapacity, EngineFacts, EngineState, EngineStatus
from quire.protocol.step import IntArray, TopTokens
from tests.engine.fake_engine import FakeEngine
from tests.grammar.bundled_tokens import grammars
from tests.waiting import WAIT_S

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 512


class Three:
    """An output hook that ends an output before its fourth token."""

    def watch(self, sequence: WatchedSequence) -> Three:
        return self

    def judge(self, unsent: Unsent) -> Answer:
        return HOLD if len(unsent.token_ids) < 4 else End("three", 3)


class InMemoryClient:
    """Steps run in a task, `step_s` apart; a paused engine queues and computes nothing.

    gives_logprobs: whether the engine computes them; else they are made up here.
    """

    gives_logprobs = False

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        num_blocks: int = 512,
        max_num_seqs: int = 8,
        max_model_len: int = MAX_MODEL_LEN,
        facts: EngineFacts | None = None,
    ) -> None:
        self.engine = FakeEngine(
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            grammars=grammars(VOCAB_SIZE),
            hooks=HookRunner(HookSet(offered={"three": Three()}), TokenTexts(None), WAIT_S),
        )
        self._capacity = EngineCapacity(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            block_size=16,
            num_blocks=num_blocks,
            capacity_tokens=16 * num_blocks,
            groups=((None, 16),),
            uses_priority=False,
            facts=facts or EngineFacts(),
        )
        self.state = EngineState.READY
        self.step_s = step_s
        self.paused = False
        self.added: list[EngineRequest] = []
        self.fail_after: int | None = None
        self._open = OpenRequests(self.reserve_handles, max_replays=1)
        self._next_handle = 0
        self._asked: dict[int, EngineRequest] = {}
        self._running: asyncio.Task[None] | None = None

    def reserve_handles(self, count: int) -> int:
        self._next_handle += count
        return self._next_handle - count

    async def add(self, request: EngineRequest) -> UpdateStream:
        if self.state is not EngineState.READY:
            raise EngineUnavailableError(f"the engine is {self.state.value}")
        check_servable(request, self._capacity)
        self.added.append(request)
        stream = self._open.open(request, self._abort_in_core)
        handles = range(request.first_handle, request.first_handle + request.params.n)
        self._asked.update(dict.fromkeys(handles, request))
        try:
            bare = request.params
            if request.beams is None and not self.gives_logprobs:  # those of beams are there
                bare = replace(bare, logprobs=None)
            self.engine.core.add(replace(request, params=bare))
        except RequestError as error:
            self._open.refuse(request.first_handle, str(error))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return stream

    async def put_media(
        self, handle: int, data: bytes | ImageData, *, is_spare: bool = False
    ) -> MediaInfo:
        del is_spare
        await asyncio.sleep(0)
        return self.engine.core.put_media(handle, data)

    def drop_media(self, handles: Iterable[int]) -> None:
        self.engine.core.drop_media(list(handles))

    def abort(self, handles: Iterable[int]) -> None:
        self._open.abort(handles)

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        op = ExtendPrompt(handle, token_ids, is_last)
        self.engine.core.control(op, time.monotonic())

    async def control(self, op: AdminOp) -> Report:
        core = self.engine.core
        while not core.is_ready_for(op):
            await asyncio.sleep(0.001)
        try:
            report = core.control(op, time.monotonic())
        except ConfigError as error:  # as it comes from another process
            raise RequestError(str(error)) from error
        if self.state in (EngineState.READY, EngineState.SLEEPING):
            self.state = EngineState.SLEEPING if report.sleep_level else EngineState.READY
        return report

    def _abort_in_core(self, handles: list[int]) -> None:
        self.engine.core.abort(handles)

    async def _run(self) -> None:
        while self.engine.core.has_unfinished:
            await asyncio.sleep(self.step_s)
            if self.paused or self.engine.core.waits_for_input:
                continue
            output = self.engine.core.step(time.monotonic())
            self.engine.core.check_invariants()
            self._add_logprobs(output)
            self._open.take(output)
            self._open.announce()
            if self.fail_after is not None:
                self.fail_after -= len(output.handles)
                if self.fail_after < 0:
                    self.fail_after = None
                    self._open.fail_all("the engine was lost")
                    self.engine.core.abort(list(self._asked))

    def _add_logprobs(self, output: EngineOutput) -> None:
        if self.gives_logprobs:
            return
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            asked = self._asked[handle].params.logprobs
            if asked is not None:
                output.logprobs.setdefault(handle, []).append(fake_logprobs(token, asked))
        for handle in output.num_cached_tokens:
            request = self._asked[handle]
            asked = request.params.prompt_logprobs
            if asked is not None and handle == request.first_handle:
                tokens = request.prompt_token_ids.tolist()[1:]
                entries = tuple(fake_logprobs(token, asked) for token in tokens)
                output.prompt_logprobs[handle] = PromptLogprobs(1, entries)

    @property
    def directories(self) -> tuple[Path, ...]:
        return ()

    @property
    def status(self) -> EngineStatus:
        level = self.engine.core.report.sleep_level
        message = asleep(level) if level else ""
        return EngineStatus(self.state, capacity=self._capacity, message=message)

    @property
    def stats(self) -> EngineStats:
        return EngineStats.of(self.engine.core.stats())

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    async def wait_for_change(self, status: EngineStatus) -> EngineStatus:
        while self.status == status:
            await asyncio.sleep(0.01)
        return self.status

    async def drain(self, timeout_s: float) -> None:
        self.state = EngineState.DRAINING
        deadline = time.monotonic() + timeout_s
        while self.num_unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        self._open.fail_all("the server is shutting down")

    async def close(self) -> None:
        self._open.fail_all("the server is shutting down")


class RealClient(InMemoryClient):
    """The core of an `LLM`, which nobody else uses at the same time."""

    gives_logprobs = True

    def __init__(
        self, llm: LLM, max_model_len: int = MAX_MODEL_LEN, folder: Path | None = None
    ) -> None:
        """folder: the engine's, as one of its own process has it."""
        super().__init__(max_model_len=max_model_len)
        self._folder = folder
        self.engine = SimpleNamespace(core=llm.engine.client._core)
        spec = llm.engine.spec
        self._capacity = replace(
            self._capacity,
            draws_tokens=spec.draws_tokens,
            num_classes=spec.num_classes,
            facts=llm.engine.facts,
        )

    @property
    def directories(self) -> tuple[Path, ...]:
        return () if self._folder is None else (self._folder,)


def fake_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of which only the shape means something."""
    ids = np.array([(token + 17 * rank) % VOCAB_SIZE for rank in range(num_top)], np.int32)
    values = np.array([-0.5 - rank for rank in range(num_top)], np.float32)
    return TokenLogprobs(token, -0.5, 1, TopTokens(ids, values))
