"""Requests by their ids over an engine in this process: `LLMEngine`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.base.foreign import check_foreign, missing_attribute
from quire.base.idioms import CALL_ARGUMENTS, MISSING_METHODS
from quire.base.platform.interrupts import held
from quire.bundled import named_model
from quire.protocol.beam_search import BeamRules
from quire.protocol.control import ControlOp, Report
from quire.protocol.outputs import PoolingRequestOutput, RequestOutput
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.scheduling_params import SchedulingParams

if TYPE_CHECKING:  # methods import what an engine has loaded
    from quire.engine.build import Engine
    from quire.entrypoints.engine_args import EngineArgs
    from quire.text.rendering import OutputReader, Prompt, RenderedPrompt, TokenizerFace

__all__ = ["Enqueued", "LLMEngine", "built_engine"]


def built_engine(settings: Mapping[str, Any]) -> Engine:
    """An engine by the settings' names; of the bundled model if none is named. output_hooks: a list
    of what `load_hooks` takes."""
    from quire.config.settings import EngineSettings
    from quire.engine.build import build_engine

    model, hooks = settings.get("model"), settings.get("output_hooks") or ()
    name = named_model(model) if model is None or isinstance(model, str) else model
    chosen = {**settings, "model": name}
    chosen.pop("output_hooks", None)
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise ConfigError(f"Setting output_hooks cannot be {hooks!r:.80}. Give a list of hooks.")
    engine = build_engine(EngineSettings.from_options(chosen), hooks=hooks)
    if engine.renderer.images is not None:
        engine.renderer.images.keep_by_name()
    return engine


class LLMEngine:
    """`add_request`, then `step` until `has_unfinished_requests` is false. `LLM` does all of it.

    One thread at a time may use it.
    """

    def __init__(self, engine: Engine) -> None:
        from quire.text.rendering import OutputAssembler, PromptAdapters, RequestRenderer

        self.engine = engine
        seed = engine.resolved.settings.seed
        self.requests = RequestRenderer(engine.renderer, engine.eos_token_ids, seed)
        self.assembler = OutputAssembler(engine.renderer, engine.eos_token_ids)
        self.adapters = PromptAdapters(engine.resolved.settings.max_lora_rank)
        self._in_use = threading.Lock()
        self._process_id = os.getpid()
        self._next_handle = 0
        self._next_request = 0
        self._readers: dict[str, tuple[RequestOutput, OutputReader, range]] = {}
        self._media: dict[str, range] = {}  # by request, the handles of what the engine was given

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> LLMEngine:
        """The engine that these arguments describe."""
        check_foreign(RequestError, "from_engine_args", CALL_ARGUMENTS, others)
        return cls(built_engine(engine_args.given))

    # --- requests by id -------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Queue a request, whose outputs `step` gives. Its id. RequestError if it cannot be served,
        or the id is of an open request."""
        from quire.text.rendering import OutputReader

        check_foreign(RequestError, "add_request", CALL_ARGUMENTS, others)
        if request_id in self._readers:
            raise RequestError(f"request_id {request_id!r} is open already: give another one")
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"params is {params!r}: give SamplingParams")
        rendered = self.engine.renderer.render_prompt(prompt)
        first = self._next_handle
        scheduling = SchedulingParams(priority=priority)
        with held():
            output = self.add(rendered, params, scheduling, request_id=request_id)
            handles = range(first, self._next_handle)
            self._readers[request_id] = (output, OutputReader(output, params.output_kind), handles)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step. The requests of `add_request` that it changed, by their output_kind;
        one that failed has its `error` set."""
        found: list[RequestOutput] = []
        if self.assembler.has_unfinished:
            self.run_step()
        # Steps of other calls, such as `LLM.generate`, also let these outputs grow.
        for request_id, (output, reader, _) in list(self._readers.items()):
            shown = reader.read()
            if output.finished:
                del self._readers[request_id]
            if shown is not None:
                found.append(shown)
        return found

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests; unknown and finished ones are passed over."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if each in self._readers:
                self.abort(self._readers.pop(each)[2])

    def has_unfinished_requests(self) -> bool:
        return bool(self._readers) or self.assembler.has_unfinished

    def get_num_unfinished_requests(self) -> int:
        return len(self._readers)

    def get_tokenizer(self) -> TokenizerFace | None:
        """The model's tokenizer; None with skip_tokenizer_init."""
        from quire.text.rendering import TokenizerFace

        return TokenizerFace.of(self.engine.renderer)

    # --- what it is made of ---------------------------------------------------------------------

    @held()
    def add(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        scheduling: SchedulingParams,
        beams: BeamRules | None = None,
        *,
        pin_seconds: float | None = None,
        request_id: str | None = None,
    ) -> RequestOutput:
        """Queue a rendered request; the output that grows while it runs. RequestError if it cannot
        be served; then nothing has changed."""
        from quire.text.rendering import truncated

        request_id = self.new_request_id() if request_id is None else request_id
        prompt = self._with_media(request_id, prompt)
        handle = self.take_handles(params.n)
        now = time.monotonic()
        try:
            prompt = truncated(prompt, params, self.engine.resolved.settings.max_model_len)
            request = self.requests.render(request_id, handle, prompt, params, now, beams)
            request = replace(request, scheduling=scheduling, pin_seconds=pin_seconds)
            witness = self.engine.witness(request)
            output = self.assembler.add(request_id, handle, prompt, params, witness)
            self.engine.client.add(request)
        except BaseException:
            self.assembler.drop(range(handle, handle + params.n))
            self._drop_media([request_id])
            raise
        return output

    def open_request(self, params: SamplingParams, *, max_tokens_is_default: bool) -> EngineRequest:
        """Return a request whose prompt will come. RequestError if it cannot be served so."""
        from quire.text.rendering import RenderedPrompt

        request = self.requests.render(
            self.new_request_id(),
            self.take_handles(2),
            RenderedPrompt([]),
            params,
            time.monotonic(),
            max_tokens_is_default=max_tokens_is_default,
        )
        request = replace(request, is_open=True)
        self.engine.witness(request)
        return request

    @held()
    def add_pooled(
        self, prompt: RenderedPrompt, params: PoolingParams, scheduling: SchedulingParams
    ) -> PoolingRequestOutput:
        """Queue a rendered prompt for its vector, by the model's own parameters where some are
        open; what will have it. Errors as of `add`."""
        from quire.text.rendering import truncated

        params = self.engine.sentences.settled(params)
        request_id = self.new_request_id()
        prompt = self._with_media(request_id, prompt)
        handle = self.take_handles(1)
        try:
            longest = self.engine.resolved.settings.max_model_len
            prompt = truncated(prompt, params, longest, is_encoder=self.engine.spec.is_encoder)
            now = time.monotonic()
            request = self.requests.render_pooled(request_id, handle, prompt, params, now)
            output = self.assembler.add_pooled(request_id, handle, prompt, params)
            self.engine.client.add(replace(request, scheduling=scheduling))
        except BaseException:
            self.assembler.drop([handle])
            self._drop_media([request_id])
            raise
        return output

    def _with_media(self, request_id: str, prompt: RenderedPrompt) -> RenderedPrompt:
        """The prompt when the engine has been given its media, if it has some."""
        if not prompt.parts:
            return prompt
        client, count = self.engine.client, len(prompt.parts)
        first = self.take_handles(count)
        handles = self._media[request_id] = range(first, first + count)
        try:
            pairs = zip(handles, prompt.parts, strict=True)
            infos = [client.put_media(handle, part.data) for handle, part in pairs]
            return prompt.with_media(infos, handles)
        except BaseException:
            self._drop_media([request_id])
            raise

    def _drop_media(self, request_ids: Sequence[str]) -> None:
        held = [self._media.pop(each) for each in request_ids if each in self._media]
        handles = [handle for each in held for handle in each]
        if handles:
            self.engine.client.drop_media(handles)

    @property
    def next_handle(self) -> int:
        """The handle of the next request."""
        return self._next_handle

    def take_handles(self, count: int) -> int:
        """The first of `count` handles that no request had."""
        self._next_handle += count
        return self._next_handle - count

    def new_request_id(self) -> str:
        """One that no request of `LLM` had, and that is not open in `add_request`."""
        while (found := str(self._next_request)) in self._readers:
            self._next_request += 1
        self._next_request += 1
        return found

    def run_step(self) -> Collection[str]:
        """One engine step; ids of the requests that it changed."""
        client = self.engine.client
        if client.report.is_paused and client.waits_for_input:
            raise EngineError("the engine is paused or sleeps: call resume() or wake_up() first")
        with held(), self.sole_use():
            return self._take_step()

    def _take_step(self) -> Collection[str]:
        client = self.engine.client
        update = self.assembler.process(client.step())
        if update.aborts:
            client.abort(update.aborts)
        ended = [i for i, output in update.requests.items() if output.finished]
        self._drop_media([*ended, *update.pooled])
        return update.requests.keys() | update.pooled.keys()

    def control(self, op: ControlOp) -> Report:
        """Carry out an operation between steps. One that waits for requests runs their steps, with
        stop strings and all."""
        client = self.engine.client
        with held(), self.sole_use():
            try:
                while not client.is_ready_for(op):
                    self._take_step()
                return client.control(op)
            except BaseException:
                client.stop_waiting()
                raise

    @held()
    def abort(self, handles: Container[int]) -> None:
        """Leave nothing of these sequences behind: after Ctrl-C, an error, a stream cut short."""
        live = [handle for handle in self.assembler.handles() if handle in handles]
        client = self.engine.client
        if self._is_forked:
            self.assembler.drop(live)
            return
        if live:
            self.assembler.drop(live)
            client.abort(live)
        held = self._media.items()
        self._drop_media([i for i, own in held if any(handle in handles for handle in own)])
        while client.has_unfinished and not self.assembler.has_unfinished:
            if client.waits_for_input:
                break
            client.step()

    @property
    def _is_forked(self) -> bool:
        """True in a child, which lacks the threads that compute: a wait for them has no end."""
        return os.getpid() != self._process_id

    @contextmanager
    def sole_use(self) -> Iterator[None]:
        if self._is_forked:
            raise EngineError(
                f"the engine's threads stayed in process {self._process_id} when this one was "
                "forked from it: start a new engine here"
            )
        if not self._in_use.acquire(blocking=False):
            raise EngineError(
                "another thread is using this LLM: use it from one thread at a time, or start one "
                "LLM per thread"
            )
        try:
            yield
        finally:
            self._in_use.release()

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute("LLMEngine", name, MISSING_METHODS)


class Enqueued:
    """Requests of an engine whose outputs nobody has waited for."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._outputs: list[RequestOutput] = []
        self._handles: set[int] = set()

    @contextmanager
    def added(self) -> Iterator[list[RequestOutput]]:
        """A list for the outputs of requests that the block queues. If it raises, they are
        ended."""
        first, num_before = self._engine.next_handle, len(self._outputs)
        outputs: list[RequestOutput] = []
        try:
            with held():
                yield outputs
                self._outputs += outputs
                self._handles |= set(range(first, self._engine.next_handle))
        except BaseException:
            del self._outputs[num_before:]
            self._engine.abort(range(first, self._engine.next_handle))
            raise

    @contextmanager
    def awaited(self) -> Iterator[list[RequestOutput]]:
        """All outputs, for a block that completes them. If it raises EngineError they stay for the
        next one; anything else ends the requests."""
        try:
            yield list(self._outputs)
        except EngineError:
            raise
        except BaseException:
            handles = self._handles
            self._outputs, self._handles = [], set()
            self._engine.abort(handles)
            raise
        self._outputs, self._handles = [], set()
