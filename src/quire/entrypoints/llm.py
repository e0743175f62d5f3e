"""Offline batched generation: `LLM`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from quire.base.errors import RequestError
from quire.base.foreign import check_foreign, missing_attribute
from quire.base.idioms import CALL_ARGUMENTS, MISSING_METHODS
from quire.base.platform.interrupts import held
from quire.entrypoints.llm_engine import Enqueued, LLMEngine, built_engine
from quire.entrypoints.llm_vectors import VectorCalls, VectorMethods
from quire.protocol.adapters import AdapterArgument, LoRARequest, adapters_for
from quire.protocol.beam_search import BeamRules, BeamSearchParams
from quire.protocol.control import (
    ListPins,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    Unpin,
    UpdateWeights,
    Wake,
)
from quire.protocol.outputs import (
    BeamSearchOutput,
    CompletionOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from quire.protocol.pins import PIN_PARAMS, PinnedPrefix, pin_seconds, prefix_key
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams, sampling_for
from quire.protocol.scheduling_params import SchedulingParams, scheduling_for

if TYPE_CHECKING:  # methods import what an engine has loaded: `from quire import LLM` is quick
    from quire.base.telemetry.engine_stats import Metric
    from quire.engine.build import Engine
    from quire.engine.clients.prompt_stream import PromptStream
    from quire.entrypoints.engine_args import EngineArgs
    from quire.text.dialect import Dialect
    from quire.text.dialect.chat import WholeChats
    from quire.text.rendering import ChatTemplate, Prompt, RenderedPrompt, TokenizerFace

__all__ = ["LLM"]

logger = logging.getLogger("quire")

Message = Mapping[str, Any]
ParamsArgument = SamplingParams | Sequence[SamplingParams] | None
SchedulingArgument = SchedulingParams | Sequence[SchedulingParams] | None


class LLM(VectorMethods):
    """An engine in this process: no server, no sockets, no `__main__` guard.

    model: a folder, GGUF file or hub id ("organization/name:Q4_K_M" for a GGUF file); None is the
    small demonstration model that comes with quire. settings: fields of `EngineSettings`, such as
    max_model_len. output_hooks=[…]: hooks that see outputs first, objects or names (`quire.hooks`).
    Raises ConfigError if the engine cannot start with them.

    One thread at a time may use it. Use it as a context manager, or call `shutdown`, to give its
    memory back early.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._llm_engine = LLMEngine(built_engine({**settings, "model": model}))
        self._engine: Engine = self._llm_engine.engine
        VectorMethods.__init__(self, VectorCalls(self._llm_engine, self._complete))
        self._dialect: tuple[ChatTemplate, Dialect] | None = None  # of the last chat
        self._enqueued = Enqueued(self._llm_engine)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An engine with these settings."""
        return cls(**engine_args.given)

    # --- generating -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: ParamsArgument = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        scheduling_params: SchedulingArgument = None,
        lora_request: AdapterArgument = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; outputs come in the order of the prompts.

        prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, {"prompt_embeds":
        float tensor [tokens, hidden size]} (with `enable_prompt_embeds`), or a list of them. Texts
        and ids may have `multi_modal_data`, and a `cache_salt`: its like alone share prefixes.
        sampling_params: one for all, or one per prompt; None takes the model's own defaults.
        priority: smaller goes first, under a policy that knows priorities. scheduling_params:
        priorities, deadlines, tenants and weights. lora_request: the adapter that computes the
        prompts (with `enable_lora`). Each is one for all, or one per prompt. others: arguments that
        vLLM has and that ask for nothing here.

        A single prompt that cannot be served raises RequestError. In a list, even of one, it gets
        an output without text, finish_reason "error" and `error` on both; others are complete.
        """
        from quire.text.rendering.lists import as_list

        check_foreign(RequestError, "generate", CALL_ARGUMENTS, others)
        if prompts is None:
            raise RequestError("generate has no prompts: give a text, token ids or a list")
        items, is_single = as_list(prompts)
        rendered = [self._render_prompt(prompt) for prompt in items]
        scheduling = scheduling_for(len(rendered), scheduling_params, priority)
        return self._run(
            rendered, sampling_params, scheduling, use_tqdm, is_single=is_single, lora=lora_request
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsArgument = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        scheduling_params: SchedulingArgument = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: AdapterArgument = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the model's chat template.

        messages: [{"role": …, "content": …}, …], or a list of such lists. chat_template: the text
        of another one. continue_final_message: the answer goes on with the last message; then
        add_generation_prompt is False. `outputs[i].answer` tells content, reasoning and calls of
        tools apart. Errors, and others, as in `generate`.
        """
        from quire.text.rendering.lists import holds_lists

        check_foreign(RequestError, "chat", CALL_ARGUMENTS, others)
        renderer = self._engine.renderer
        template = None if chat_template is None else renderer.request_template(chat_template)
        is_single = not holds_lists(messages)
        conversations = cast("list[Sequence[Message]]", [messages] if is_single else messages)
        chats = self._chats(template or renderer.chat_template, tools)
        if template is None and chats is not None:
            template = chats.template
        rendered = [
            self._render_chat(
                conversation,
                chats,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        scheduling = scheduling_for(len(rendered), scheduling_params, priority)
        params = self._params_for(rendered, sampling_params)
        outputs = self._run(
            rendered, params, scheduling, use_tqdm, is_single=is_single, lora=lora_request
        )
        if chats is not None:
            chats.answer_all(conversations, params, outputs)
        return outputs

    def _chats(
        self, template: ChatTemplate | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> WholeChats | None:
        """Return who reads answers to chats, if the engine knows texts."""
        from quire.text.dialect import find_dialect
        from quire.text.dialect.chat import WholeChats

        tokenizer = self._engine.renderer.tokenizer
        if template is None or tokenizer is None:
            return None
        if self._dialect is None or self._dialect[0] is not template:
            self._dialect = template, find_dialect(template, tokenizer)
        ends = self._engine.eos_token_ids
        return WholeChats(self._dialect[1], template, tokenizer, ends, tools)

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterArgument = None,
        priority: int | Sequence[int] | None = None,
        scheduling_params: SchedulingArgument = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` best continuations that a beam search finds of each prompt, best
        first. Prompts, adapters and errors as in `generate`."""
        from quire.text.rendering import beam_search_output
        from quire.text.rendering.lists import as_list

        check_foreign(RequestError, "beam_search", CALL_ARGUMENTS, others)
        if not isinstance(params, BeamSearchParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"params is {params!r}: give BeamSearchParams(beam_width=…)")
        items, is_single = as_list(prompts)
        rendered = [self._render_prompt(prompt) for prompt in items]
        scheduling = scheduling_for(len(rendered), scheduling_params, priority)
        outputs = self._run(
            rendered, params.sampling, scheduling, use_tqdm,
            is_single=is_single, beams=params.rules, lora=lora_request,
        )  # fmt: skip
        tokenizer = self._engine.renderer.tokenizer
        return [beam_search_output(output, params.rules, tokenizer) for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        scheduling_params: SchedulingParams | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt and yield its growing output after every step that changed it.

        The same object is yielded each time, unless the parameters have another output_kind: the
        news alone, or the end alone. Leaving the loop early ends the request. lora_request: the
        adapter that computes the prompt. Raises RequestError if the prompt cannot be served.
        """
        rendered = self._engine.renderer.render_prompt(prompt)
        rendered = self._llm_engine.adapters.put(rendered, lora_request)
        (params,) = self._params_for([rendered], sampling_params)
        (scheduling,) = scheduling_for(1, scheduling_params, None)
        first = self._llm_engine.next_handle
        handles = range(first, first)
        try:
            with held():
                output = self._llm_engine.add(rendered, params, scheduling)
                handles = range(first, self._llm_engine.next_handle)
            output.lora_request = lora_request
            if params.output_kind is RequestOutputKind.CUMULATIVE:
                yield from self._grow(output)
            else:
                yield from self._read(output, params.output_kind)
            _raise_error(output)
        finally:
            self._llm_engine.abort(handles)

    def _grow(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """It, whenever it has grown."""
        shown = (0, False)
        # Other calls, made while this one pauses, also let its output grow.
        while shown != (now := _extent(output)) or not output.finished:
            if now == shown:
                self._llm_engine.run_step()
                continue
            shown = now
            yield output

    def _read(self, output: RequestOutput, kind: RequestOutputKind) -> Iterator[RequestOutput]:
        """Copies of it, as its `kind` wants them."""
        from quire.text.rendering import OutputReader

        reader = OutputReader(output, kind)
        while True:
            is_last = output.finished
            if (found := reader.read()) is not None and output.error is None:
                yield found
            if is_last:
                return
            if not output.finished:
                self._llm_engine.run_step()

    def open_prompt(
        self,
        sampling_params: SamplingParams | None = None,
        *,
        max_prompt_tokens: int | None = None,
        scheduling_params: SchedulingParams | None = None,
    ) -> PromptStream:
        """Open a prompt that arrives in pieces and is computed meanwhile: `append`, `append`,
        `finish`.

        max_prompt_tokens: most tokens that it will have; None: the rest of the context.
        scheduling_params: priority, deadline, tenant and weight; the deadline counts from now.
        """
        from quire.engine.clients.prompt_stream import PromptStream
        from quire.text.rendering import PromptPieces

        (params,) = self._params_for([None], sampling_params)
        (scheduling,) = scheduling_for(1, scheduling_params, None)
        engine = self._llm_engine
        request = engine.open_request(params, max_tokens_is_default=sampling_params is None)
        return PromptStream(
            replace(request, max_prompt_tokens=max_prompt_tokens, scheduling=scheduling),
            params,
            PromptPieces(self._engine.renderer),
            self._engine.client,
            engine.assembler,
            engine.run_step,
        )

    # --- pinned prefixes ------------------------------------------------------------------------

    def pin_prefix(
        self, prompt: Prompt | Sequence[Message], ttl_s: float | None = None
    ) -> PinnedPrefix:
        """Keep the K/V of a prefix for prompts that start with its tokens, the partly filled last
        block too, for `ttl_s` seconds or until `unpin_prefix`.

        prompt: prompt of `generate`, or the first messages of conversations, in the form of `chat`.
        An equal prefix is pinned once, for as long as either call asked. Raises RequestError if it
        cannot be served, or takes more of the cache than may be pinned.
        """
        from quire.text.rendering.lists import holds_messages

        renderer = self._engine.renderer
        if holds_messages(prompt):
            chats = self._chats(renderer.chat_template, None)
            rendered = self._render_chat(
                cast("Sequence[Message]", prompt),
                chats,
                add_generation_prompt=False,
                chat_template=None if chats is None else chats.template,
            )
            if isinstance(rendered, RequestError):
                raise rendered
        else:
            rendered = renderer.render_prompt(cast("Prompt", prompt))
        seconds = pin_seconds(ttl_s)
        engine = self._llm_engine
        handle = engine.next_handle
        try:
            output = engine.add(rendered, PIN_PARAMS, SchedulingParams(), pin_seconds=seconds)
            while not output.finished:
                engine.run_step()
        finally:
            engine.abort(range(handle, handle + 1))
        _raise_error(output)
        key = prefix_key(output.prompt_token_ids, rendered.salt, is_shared=False)
        found = next((pin for pin in self.pinned_prefixes() if pin.key == key), None)
        if found is None:
            raise RequestError("the prefix was let go again already: give a longer ttl_s")
        return found

    def unpin_prefix(self, pin: PinnedPrefix) -> bool:
        """Let a prefix go before its time; whether it was still there."""
        if not isinstance(pin, PinnedPrefix):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"pin is {pin!r}: give what pin_prefix or pinned_prefixes gave")
        return self._engine.client.control(Unpin(pin.handle)).was_there

    def pinned_prefixes(self) -> tuple[PinnedPrefix, ...]:
        """The prefixes that are kept: size, hits, seconds left."""
        return self._engine.client.control(ListPins()).pins

    # --- memory, weights, profiles --------------------------------------------------------------

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give memory back until `wake_up`. level 1: the KV cache; weights stay on a CPU, and go
        from a GPU to host memory. level 2: the weights too; `wake_up` loads them again. mode:
        treatment of open streams, see `pause`; kept streams are computed again. Cached and pinned
        prefixes are lost."""
        self._llm_engine.control(Sleep(level, mode))

    def wake_up(self) -> None:
        """Take memory again after `sleep`, and go on. ConfigError if it has gone to somebody else
        meanwhile; then the engine sleeps on."""
        self._llm_engine.control(Wake())

    @property
    def is_sleeping(self) -> bool:
        return self._engine.client.report.sleep_level > 0

    def pause(self, mode: PauseMode = "abort") -> None:
        """Compute nothing until `resume`. mode: "keep" lets open streams stand still, "wait" lets
        those go on to their end that the engine has admitted, "abort" ends them."""
        self._llm_engine.control(Pause(mode))

    def resume(self) -> None:
        """Go on after `pause`."""
        self._llm_engine.control(Resume())

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes but pinned ones. reset_running_requests: requests that are
        under way are computed again too, so that no K/V from before is left. Returns True."""
        self._llm_engine.control(ResetPrefixCache(reset_running_requests))
        return True

    def update_weights(self, tensors: Mapping[str, Any], version: str = "") -> int:
        """Replace weights by name, as the checkpoint names them; others stay. Nothing that was
        cached before is hit any more; open streams go on with the new weights. The new version
        number. ConfigError, and nothing changes, for unknown names and other shapes. EngineError if
        they cannot be loaded: the engine goes on with the old ones, or sleeps if there is no memory
        for these either.

        tensors: torch tensors or arrays. version: label of outputs made with them (see
        `CompletionOutput.weight_versions`); empty for the new number.
        """
        return self._llm_engine.control(UpdateWeights(tensors, version)).weights_version

    def start_profile(self, directory: str = "quire-profile") -> None:
        """Record what steps do; a trace is written to `directory` by `stop_profile`."""
        self._llm_engine.control(StartProfile(directory))

    def stop_profile(self) -> str:
        """End the recording. The file, in Chrome's trace format."""
        return self._llm_engine.control(StopProfile()).profile

    # --- running --------------------------------------------------------------------------------

    def enqueue(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: ParamsArgument = None,
        *,
        lora_request: AdapterArgument = None,
        priority: int | Sequence[int] | None = None,
        scheduling_params: SchedulingArgument = None,
        **others: Any,
    ) -> list[str]:
        """Queue prompts without computing them; `wait_for_completion` does. Return their ids in
        order. lora_request: see `generate`."""
        from quire.text.rendering.lists import as_list

        check_foreign(RequestError, "enqueue", CALL_ARGUMENTS, others)
        items, _ = as_list(prompts)
        adapters = adapters_for(len(items), lora_request)
        rendered = self._llm_engine.adapters.put_each(
            [self._render_prompt(prompt) for prompt in items], adapters
        )
        scheduling = scheduling_for(len(rendered), scheduling_params, priority)
        asked = zip(rendered, self._params_for(rendered, sampling_params), scheduling, strict=True)
        with self._enqueued.added() as outputs:
            outputs += [self._admit(*each, None) for each in asked]
            for output, adapter in zip(outputs, adapters, strict=True):
                output.lora_request = adapter
        return [output.request_id for output in outputs]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all that was enqueued; outputs in that order, as `generate` gives those of a
        list. After an EngineError (the engine is paused) they can be waited for again; Ctrl-C ends
        them."""
        with self._enqueued.awaited() as outputs:
            self._complete(outputs, use_tqdm)
        for output in outputs:
            _log_error(output)
        return outputs

    def _run(
        self,
        rendered: Sequence[RenderedPrompt | RequestError],
        sampling_params: ParamsArgument,
        scheduling: Sequence[SchedulingParams],
        use_tqdm: bool,
        *,
        is_single: bool,
        beams: BeamRules | None = None,
        lora: AdapterArgument = None,
    ) -> list[RequestOutput]:
        adapters = adapters_for(len(rendered), lora)
        rendered = self._llm_engine.adapters.put_each(rendered, adapters)
        params = self._params_for(rendered, sampling_params)
        first_handle = self._llm_engine.next_handle
        try:
            asked = zip(rendered, params, scheduling, strict=True)
            outputs = [self._admit(*each, beams) for each in asked]
            self._complete(outputs, use_tqdm)
        finally:
            self._llm_engine.abort(range(first_handle, self._llm_engine.next_handle))
        for output, adapter in zip(outputs, adapters, strict=True):
            output.lora_request = adapter
            if is_single:
                _raise_error(output)
            _log_error(output)
        return outputs

    def _complete(
        self, outputs: Sequence[RequestOutput] | Sequence[PoolingRequestOutput], use_tqdm: bool
    ) -> None:
        """Run steps until these have ended."""
        from quire.text.rendering.progress import GenerationProgress

        with GenerationProgress(len(outputs), shown=use_tqdm) as progress:
            progress.failed(sum(output.finished for output in outputs))
            running = {output.request_id: output for output in outputs if not output.finished}
            while running:
                changed = self._llm_engine.run_step()
                ended = [i for i in running.keys() & changed if running[i].finished]
                progress.update([running.pop(i) for i in ended])

    def _admit(
        self,
        rendered: RenderedPrompt | RequestError,
        params: SamplingParams,
        scheduling: SchedulingParams,
        beams: BeamRules | None,
    ) -> RequestOutput:
        """Add a request; one that is refused becomes an output that says why."""
        from quire.text.rendering import RenderedPrompt

        if isinstance(rendered, RenderedPrompt):
            try:
                return self._llm_engine.add(rendered, params, scheduling, beams)
            except RequestError as error:
                refused, prompt = error, rendered
        else:
            refused, prompt = rendered, RenderedPrompt([], None)
        return RequestOutput(
            self._llm_engine.new_request_id(),
            prompt.text,
            prompt.token_ids,
            outputs=[CompletionOutput(0, finish_reason="error", error=str(refused))],
            finished=True,
            error=str(refused),
        )

    def _render_prompt(self, prompt: Prompt) -> RenderedPrompt | RequestError:
        try:
            return self._engine.renderer.render_prompt(prompt)
        except RequestError as error:
            return error

    def _render_chat(
        self, messages: Sequence[Message], chats: WholeChats | None, **options: Any
    ) -> RenderedPrompt | RequestError:
        try:
            messages, images = self._engine.renderer.take_images(messages)
            messages = messages if chats is None else chats.conversation(messages)
            return self._engine.renderer.render_chat(messages, images=images, **options)
        except RequestError as error:
            return error

    def _params_for(
        self, rendered: Sequence[object], given: ParamsArgument
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        return sampling_for(len(rendered), given)

    # --- readings -------------------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling values that the model's generation_config.json recommends, over the
        defaults of the class."""
        return SamplingParams.from_optional(self._engine.default_sampling)

    def get_tokenizer(self) -> TokenizerFace | None:
        """The model's tokenizer, with the names that users of `transformers` know; None with
        skip_tokenizer_init."""
        return self._llm_engine.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """Readings of the engine, by the names that /metrics of a server has."""
        from quire.base.telemetry.engine_stats import scheduler_metrics

        return scheduler_metrics(self._engine.client.stats())

    @property
    def llm_engine(self) -> LLMEngine:
        """Requests by their ids, step by step."""
        return self._llm_engine

    @property
    def engine(self) -> Engine:
        """The engine behind it: settings as resolved, the model's spec, statistics."""
        return self._engine

    def shutdown(self) -> None:
        """Free the model and the cache. May be called twice."""
        self._engine.client.shutdown()

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute("LLM", name, MISSING_METHODS)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _extent(output: RequestOutput) -> tuple[int, bool]:
    """Number of tokens so far, and whether the output has ended."""
    return sum(len(completion.token_ids) for completion in output.outputs), output.finished


def _log_error(output: RequestOutput) -> None:
    if output.error is not None:
        logger.warning("request %s failed: %s", output.request_id, output.error)


def _raise_error(output: RequestOutput) -> None:
    if output.error is not None:
        raise RequestError(output.error)
