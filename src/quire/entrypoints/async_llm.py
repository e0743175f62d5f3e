"""An engine for asyncio programs: `AsyncLLM`."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from quire.base.errors import EngineError, EngineUnavailableError, RequestError
from quire.base.foreign import check_foreign, missing_attribute
from quire.base.idioms import CALL_ARGUMENTS, MISSING_METHODS
from quire.base.telemetry.engine_stats import Metric, scheduler_metrics
from quire.engine.clients.engine_thread import EngineThread
from quire.entrypoints.engine_args import EngineArgs
from quire.entrypoints.llm_engine import built_engine
from quire.protocol.adapters import LoRARequest
from quire.protocol.control import (
    ControlOp,
    Pause,
    PauseMode,
    Report,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from quire.protocol.media import MediaInfo
from quire.protocol.outputs import PoolingRequestOutput, RequestOutput
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import EngineOutput, EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.scheduling_params import SchedulingParams
from quire.text.rendering import (
    OutputAssembler,
    OutputReader,
    Prompt,
    PromptAdapters,
    RenderedPrompt,
    RequestRenderer,
    TokenizerFace,
    truncated,
)
from quire.text.rendering.media.parts import IMAGE_FIELDS

__all__ = ["AsyncLLM"]


class _Open:
    """A request whose outputs somebody reads. news: set when there may be some."""

    def __init__(self, output: RequestOutput, params: SamplingParams, handles: range) -> None:
        self.output = output
        self.reader = OutputReader(output, params.output_kind)
        self.handles = handles
        self.news = asyncio.Event()

    def mark_aborted(self) -> None:
        for completion in self.output.outputs:
            completion.finish_reason = completion.finish_reason or "abort"
        self.output.finished = True


class _OpenVector:
    """A request for a vector, likewise."""

    def __init__(self, output: PoolingRequestOutput, handle: int) -> None:
        self.output = output
        self.handles = range(handle, handle + 1)
        self.news = asyncio.Event()

    def mark_aborted(self) -> None:
        self.output.error = "the request was aborted"
        self.output.finished = True


class AsyncLLM:
    """An engine in a thread of this process, for requests of one event loop.

    Settings are those of `LLM`. Use it as a context manager, or call `shutdown`, to give its memory
    back.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.engine = built_engine({**settings, "model": model})
        eos = self.engine.eos_token_ids
        seed = self.engine.resolved.settings.seed
        self._requests = RequestRenderer(self.engine.renderer, eos, seed)
        self._adapters = PromptAdapters(self.engine.resolved.settings.max_lora_rank)
        self._assembler = OutputAssembler(self.engine.renderer, eos)
        self._open: dict[str, _Open | _OpenVector] = {}
        self._next_handle = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: BaseException | None = None
        self._is_shut_down = False
        self._process_id = os.getpid()
        self._thread = EngineThread(self.engine.client, self._hand_over, self._hand_over_death)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> AsyncLLM:
        """The engine that these arguments describe."""
        check_foreign(RequestError, "from_engine_args", CALL_ARGUMENTS, others)
        return cls(**engine_args.given)

    # --- generating -----------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        scheduling_params: SchedulingParams | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; `sampling_params.output_kind` sets the form of the outputs. An
        output does not change after it was given. Leaving the loop early ends the request.

        request_id: id for `abort`, unlike those of open requests; None makes one up. lora_request:
        the adapter that computes the prompt (with `enable_lora`). Raises RequestError if the
        request cannot be served or has failed, EngineError if the engine has.
        """
        check_foreign(RequestError, "generate", CALL_ARGUMENTS, others)
        self._check_alive()
        self._enter_loop()
        params = sampling_params or SamplingParams.from_optional(self.engine.default_sampling)
        scheduling = scheduling_params or SchedulingParams(priority=priority)
        bare = await self._render(prompt, lora_request)
        if params.deterministic and not self.engine.facts.unstable:  # may read all weights
            await asyncio.to_thread(self.engine.provenance.sections, self.engine.facts)
        async with self._with_media(bare) as rendered:
            request_id = self._free_id(request_id)
            opened = await self._add(rendered, params, request_id, scheduling)
            try:
                while True:
                    await opened.news.wait()
                    opened.news.clear()
                    self._check_alive()
                    found, is_over = opened.reader.read(), opened.output.finished
                    if opened.output.error is not None:
                        raise RequestError(opened.output.error)
                    if found is not None:
                        yield found
                    if is_over:
                        return
            finally:
                self._end(request_id)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        scheduling_params: SchedulingParams | None = None,
        **others: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Make one vector of a prompt, as `LLM.encode` does: the one output, whose `outputs.data`
        is a float32 tensor [hidden size]. pooling_params: None as the model's files say. Others,
        and errors, as in `generate`; RequestError for what `abort` ended."""
        import torch

        check_foreign(RequestError, "encode", CALL_ARGUMENTS, others)
        self._check_alive()
        self._enter_loop()
        scheduling = scheduling_params or SchedulingParams(priority=priority)
        rendered = await self._render(prompt, lora_request)
        request_id = self._free_id(request_id)
        params = pooling_params or PoolingParams()
        opened = await self._add_pooled(rendered, params, request_id, scheduling)
        try:
            while not opened.output.finished:
                await opened.news.wait()
                opened.news.clear()
                self._check_alive()
            output = opened.output
            if output.error is not None:
                raise RequestError(output.error)
            output.outputs.data = torch.from_numpy(output.outputs.data)
            yield output
        finally:
            self._end(request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their last outputs come with finish_reason "abort". Unknown ones are passed
        over."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if each in self._open:
                self._abort(self._open[each])

    def _free_id(self, request_id: str | None) -> str:
        """The id, or a new one in place of None. RequestError if it is of an open request."""
        if request_id is None:
            numbers = itertools.count(self._next_handle)
            return next(i for n in numbers if (i := f"request-{n}") not in self._open)
        if request_id in self._open:
            raise RequestError(f"request_id {request_id!r} is open already: give another one")
        return request_id

    async def _render(self, prompt: Prompt, lora: LoRARequest | None) -> RenderedPrompt:
        """A prompt with its adapter. Other requests may be added meanwhile."""
        render = partial(self.engine.renderer.render_prompt, prompt)
        has_images = isinstance(prompt, Mapping) and any(map(prompt.get, IMAGE_FIELDS))
        rendered = await asyncio.to_thread(render) if has_images else render()
        if lora is not None:  # its files may be large
            rendered = await asyncio.to_thread(self._adapters.put, rendered, lora)
        return rendered

    @asynccontextmanager
    async def _with_media(self, prompt: RenderedPrompt) -> AsyncGenerator[RenderedPrompt]:
        """The prompt when the engine has its media, which it keeps until the block ends. Steps go
        on while images are encoded. RequestError for media that the engine refuses."""
        if not prompt.parts:
            yield prompt
            return
        first = self._next_handle
        handles = range(first, first + len(prompt.parts))
        self._next_handle += len(prompt.parts)
        is_over = threading.Event()

        def drop() -> None:
            self._thread.do(lambda client: client.drop_media(handles))

        def put(handle: int, data: object) -> MediaInfo:
            info = self.engine.client.put_media(handle, data)
            if is_over.is_set():  # whoever waited has been cancelled, and dropped what was there
                drop()
            return info

        try:
            infos = [
                await asyncio.to_thread(put, handle, part.data)
                for handle, part in zip(handles, prompt.parts, strict=True)
            ]
            yield prompt.with_media(infos, handles)
        finally:
            is_over.set()
            drop()

    async def _add(
        self,
        rendered: RenderedPrompt,
        params: SamplingParams,
        request_id: str,
        scheduling: SchedulingParams,
    ) -> _Open:
        """Open a request; its id is taken before anything is awaited."""
        rendered = truncated(rendered, params, self.engine.resolved.settings.max_model_len)
        handle = self._next_handle
        handles = range(handle, handle + params.n)
        request = self._requests.render(request_id, handle, rendered, params, time.monotonic())
        request = replace(request, scheduling=scheduling)
        witness = self.engine.witness(request)
        output = self._assembler.add(request_id, handle, rendered, params, witness)
        self._next_handle += params.n
        opened = self._open[request_id] = _Open(output, params, handles)
        await self._send(request_id, request)
        return opened

    async def _add_pooled(
        self,
        rendered: RenderedPrompt,
        params: PoolingParams,
        request_id: str,
        scheduling: SchedulingParams,
    ) -> _OpenVector:
        """Open a request for a vector."""
        params = self.engine.sentences.settled(params)
        longest = self.engine.resolved.settings.max_model_len
        rendered = truncated(rendered, params, longest, is_encoder=self.engine.spec.is_encoder)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        now = time.monotonic()
        request = self._requests.render_pooled(request_id, handle, rendered, params, now)
        output = self._assembler.add_pooled(request_id, handle, rendered, params)
        opened = self._open[request_id] = _OpenVector(output, handle)
        await self._send(request_id, replace(request, scheduling=scheduling))
        return opened

    async def _send(self, request_id: str, request: EngineRequest) -> None:
        """Have the engine take a request that is open."""
        try:
            await asyncio.wrap_future(self._thread.do(lambda client: client.add(request)))
        except BaseException:
            self._end(request_id)
            raise

    def _abort(self, opened: _Open | _OpenVector) -> None:
        """Mark what has not ended, and tell the engine."""
        live = set(self._assembler.handles()) & set(opened.handles)
        if not live:
            return
        self._assembler.drop(list(live))
        self._thread.do(lambda client: client.abort(sorted(live)))
        opened.mark_aborted()
        opened.news.set()

    def _end(self, request_id: str) -> None:
        """Leave nothing of a request behind."""
        opened = self._open.pop(request_id, None)
        if opened is not None:
            self._abort(opened)

    # --- from the thread to the loop ------------------------------------------------------------

    def _hand_over(self, output: EngineOutput) -> None:
        self._in_loop(lambda: self._take(output))

    def _hand_over_death(self, error: BaseException) -> None:
        self._death = error
        self._in_loop(self._wake_all)

    def _in_loop(self, call: Callable[[], None]) -> None:
        loop = self._loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has been closed: `_enter_loop` of the next one clears up
            return

    def _take(self, output: EngineOutput) -> None:
        update = self._assembler.process(output)
        if update.aborts:
            self._thread.do(lambda client: client.abort(update.aborts))
        for request_id in (*update.requests, *update.pooled):
            if request_id in self._open:
                self._open[request_id].news.set()

    def _wake_all(self) -> None:
        for opened in self._open.values():
            opened.news.set()

    def _enter_loop(self) -> None:
        """Outputs go to the running loop. EngineError if requests of another one are open."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed() and self._open:
            raise EngineError(
                "requests of another event loop are open: use an AsyncLLM from one loop at a time"
            )
        for request_id in list(self._open):
            self._end(request_id)
        self._loop = loop

    def _check_alive(self) -> None:
        if os.getpid() != self._process_id:
            raise EngineError(
                f"the engine's thread stayed in process {self._process_id} when this one was "
                "forked from it: start a new engine here"
            )
        if self._death is not None:
            raise EngineError(f"the engine has died: {self._death}") from self._death
        if self._is_shut_down:
            raise EngineUnavailableError("this AsyncLLM was shut down: make another one")

    # --- control --------------------------------------------------------------------------------

    async def _control(self, op: ControlOp) -> Report:
        self._check_alive()
        done = self._thread.do(lambda client: client.control(op), op)
        return await asyncio.wrap_future(done)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Sleep as `LLM.sleep` does."""
        await self._control(Sleep(level, mode))

    async def wake_up(self, tags: None = None) -> None:
        """Wake as `LLM.wake_up` does."""
        check_foreign(RequestError, "wake_up", CALL_ARGUMENTS, {"tags": tags})
        await self._control(Wake())

    async def is_sleeping(self) -> bool:
        return self.engine.client.report.sleep_level > 0

    async def pause_generation(self, *, mode: PauseMode = "abort", **others: Any) -> None:
        """Pause as `LLM.pause` does. With "wait" streams give outputs meanwhile, `abort` ends them,
        and whoever stops waiting leaves the engine as it was; another pause or sleep comes after
        it. RequestError if `resume_generation` or `wake_up` ends the wait."""
        check_foreign(RequestError, "pause_generation", CALL_ARGUMENTS, others)
        await self._control(Pause(mode))

    async def resume_generation(self) -> None:
        """Go on as `LLM.resume` does."""
        await self._control(Resume())

    async def is_paused(self) -> bool:
        return self.engine.client.report.is_paused

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes as `LLM.reset_prefix_cache` does."""
        given = {"reset_connector": reset_connector}
        check_foreign(RequestError, "reset_prefix_cache", CALL_ARGUMENTS, given)
        await self._control(ResetPrefixCache(reset_running_requests))
        return True

    async def start_profile(self, directory: str = "quire-profile") -> None:
        """Begin a profile as `LLM.start_profile` does."""
        await self._control(StartProfile(directory))

    async def stop_profile(self) -> str:
        """End the profile as `LLM.stop_profile` does; its path."""
        return (await self._control(StopProfile())).profile

    # --- readings -------------------------------------------------------------------------------

    async def get_tokenizer(self) -> TokenizerFace | None:
        """Return what `LLM.get_tokenizer` does."""
        return TokenizerFace.of(self.engine.renderer)

    async def get_metrics(self) -> list[Metric]:
        """Return what `LLM.get_metrics` does."""
        self._check_alive()
        return await asyncio.wrap_future(
            self._thread.do(lambda client: scheduler_metrics(client.stats()))
        )

    async def check_health(self) -> None:
        """EngineError if it computes no more."""
        self._check_alive()

    @property
    def is_running(self) -> bool:
        return self._death is None and not self._is_shut_down

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return self._death is not None

    @property
    def dead_error(self) -> BaseException:
        """The error that the engine died of."""
        return self._death or EngineError("the engine has not died")

    # --- ending ---------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all requests, and free the model and the cache. May be called twice."""
        self._is_shut_down = True
        self._thread.stop()
        self._in_loop(self._wake_all)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute("AsyncLLM", name, MISSING_METHODS)
