"""The job of an answer: one request, and the parts of the server that serve it."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec

from quire.protocol.sampling_params import SamplingParams
from quire.protocol.scheduling_params import SchedulingParams
from quire.server.generation.backend import Ready
from quire.server.generation.parsed import AnswerForm
from quire.server.generation.prompts import PromptRenderer
from quire.server.generation.service import Generation, GenerationService, Render
from quire.server.generation.waiting import Party
from quire.server.openai.answer import AnswerHead
from quire.server.openai.beams import beam_rules
from quire.server.openai.logprobs import LogprobsBudget, LogprobsWriter
from quire.server.openai.sampling import limit_field
from quire.server.openai.structured import dropped_keywords, num_schema_chars, structured_field
from quire.server.readings.chat_parts import ChatParts
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import ChatRequest, GenerationRequest
from quire.server.requests.places import Fields
from quire.server.sessions.turn import SessionTurn
from quire.text.rendering import RenderedPrompt, Renderer

__all__ = ["Job", "tenant_salt"]


def replace_messages(body: ChatRequest, session: SessionTurn) -> ChatRequest:
    """Return a chat with all messages of its conversation."""
    given: object = body.messages
    messages = cast("list[Fields]", given) if isinstance(given, list) else []
    return msgspec.structs.replace(body, messages=session.conversation(messages))


def tenant_salt(tenant: str, cache_salt: str | None) -> str:
    """Return the salt of a request's cached prefixes. Tenants share none, whatever salt they
    send."""
    return f"{tenant}\0{cache_salt or ''}" if tenant else cache_salt or ""


@dataclass(frozen=True, slots=True)
class Job:
    """tenant: separates the cached prefixes of different API keys. weight: weight of the key, for
    the policy `fair`. always_usage: streams report their usage even if not asked. party,
    logprobs_budget: shared by all prompts of the request. adapter: name in the request. is_spare:
    the request runs on spare capacity. session: the conversation that the request continues, if the
    server keeps it."""

    ready: Ready
    prompts: PromptRenderer
    generations: GenerationService
    logprobs_budget: LogprobsBudget
    max_beam_width: int
    timeline: Timeline
    tenant: str = ""
    weight: float = 1.0
    always_usage: bool = False
    adapter: str | None = None
    is_spare: bool = False
    session: SessionTurn | None = None
    party: Party = field(default_factory=Party)

    def head(self, prefix: str, kind: str) -> AnswerHead:
        """Return the head of an answer to this request, and let its timeline know the id."""
        name = self.adapter or self.ready.model.names[0]
        self.timeline.answer_id = prefix + self.timeline.request_id
        return AnswerHead(self.timeline.answer_id, kind, int(time.time()), name)

    def logprobs(
        self, num_top: int, body: GenerationRequest, generation: Generation, *, echo: bool = False
    ) -> LogprobsWriter:
        """Return a writer for one choice of this answer. echo: its text begins with the prompt."""
        renderer, prompt, params = self.renderer, generation.prompt, generation.params
        # A text prompt shows no text for the special tokens that were put around it.
        hides_special = params.skip_special_tokens or (echo and prompt.text is not None)
        return LogprobsWriter(
            renderer.tokenizer,
            num_top,
            self.logprobs_budget,
            as_ids=bool(body.return_tokens_as_token_ids),
            starts_text=echo or not renderer.continues_text(prompt.known_token_ids, params),
            shows_special=not hides_special,
        )

    @property
    def renderer(self) -> Renderer:
        """Text functions of the served model."""
        return self.ready.model.front.renderer

    async def render_chat(self, body: ChatRequest, form: AnswerForm | None) -> RenderedPrompt:
        """Render the prompt of a chat. form: form of parsed answers."""
        prompts, ready, renderer = self.prompts, self.ready, self.renderer
        max_model_len, dialect = ready.capacity.max_model_len, ready.model.dialect
        tools_text = "" if form is None else form.tools_text
        if self.session is not None:
            body = replace_messages(body, self.session)
        prompt = await prompts.render_chat(
            renderer, body, max_model_len, dialect, tools_text, tenant=self.tenant
        )
        work = functools.partial(ChatParts.of, body)
        self.timeline.parts = await prompts.run(work, len(prompt.token_ids))
        if self.session is not None:
            work = functools.partial(self.session.continued, prompt, renderer.tokenizer)
            size = self.session.num_known + len(prompt.text or "")
            prompt, self.timeline.num_kept_tokens = await prompts.run(work, size)
            self.timeline.num_history_tokens = self.session.num_known
        if body.prediction is None:
            return prompt
        text = body.prediction.text
        return await prompts.render_prediction(renderer, prompt, text, max_model_len)

    @asynccontextmanager
    async def open(
        self,
        render: Render,
        params: SamplingParams,
        body: GenerationRequest,
        form: AnswerForm | None = None,
        *,
        fits_room: bool = False,
    ) -> AsyncGenerator[Generation]:
        """Open a generation, as `GenerationService.open` does. A session keeps the result.
        fits_room: max_tokens is cut to what the prompt leaves of the context."""
        structured = params.structured_outputs
        if structured is not None or form is not None:
            work = functools.partial(dropped_keywords, structured, form)
            size = num_schema_chars(structured, form)
            self.timeline.dropped_keywords = await self.prompts.run(work, size)
        async with self.generations.open(
            self.ready,
            self._adapted(render),
            params,
            timeline=self.timeline,
            party=self.party,
            truncate=body.truncate_prompt_tokens,
            salt=tenant_salt(self.tenant, body.cache_salt),
            scheduling=self._scheduling(body),
            beams=beam_rules(body, self.max_beam_width),
            limit_field=None if fits_room else limit_field(body),
            form=form,
            grammar_field=self._grammar_field(params, body, form),
        ) as generation:
            generation.shows_weights = bool(body.return_weight_versions)
            if self.session is not None:
                generation.tap = self.session.take
            yield generation
        if self.session is not None:
            self.session.keep()

    def _adapted(self, render: Render) -> Render:
        """Mark the prompt for the adapter that the request names."""
        name, adapters = self.adapter, self.ready.model.adapters
        if name is None or adapters is None:
            return render

        async def adapted() -> RenderedPrompt:
            prompt = await render()
            return replace(prompt, adapter=await adapters.ref(name))

        return adapted

    def _grammar_field(
        self, params: SamplingParams, body: GenerationRequest, form: AnswerForm | None
    ) -> str | None:
        if params.structured_outputs is not None:
            return structured_field(body)
        if form is None:
            return None
        return "tools" if form.tools else "thinking_token_budget"

    def _scheduling(self, body: GenerationRequest) -> SchedulingParams:
        return SchedulingParams(
            body.priority or 0, body.deadline_s, self.tenant, self.weight, self.is_spare
        )
