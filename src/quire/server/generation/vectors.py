"""One prompt in the engine that ends as a vector of its hidden states, without generation."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from quire.base.errors import EngineError, EngineUnavailableError, RequestError
from quire.engine.clients.async_client import UpdateStream
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import FinishReason
from quire.protocol.scheduling_params import SchedulingParams
from quire.protocol.step import FloatArray
from quire.server.generation.backend import Ready
from quire.server.generation.service import Render
from quire.server.generation.waiting import Party, Place, WaitingRoom, within
from quire.server.readings.metrics import ServerMetrics
from quire.server.readings.timeline import Timeline
from quire.server.requests.errors import RefusedError
from quire.text.rendering import RenderedPrompt, RequestRenderer, truncated

__all__ = ["PooledPrompt", "VectorService"]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """vector: float32 [E]. num_tokens: tokens of the prompt. num_cached: number of them taken from
    the cache."""

    vector: FloatArray
    num_tokens: int
    num_cached: int


class VectorService:
    """The way of a prompt to its vector: waiting room, rendering, request, answer."""

    def __init__(self, metrics: ServerMetrics, waiting: WaitingRoom) -> None:
        self._metrics = metrics
        self._waiting = waiting

    async def vector(
        self,
        ready: Ready,
        render: Render,
        params: PoolingParams,
        *,
        timeline: Timeline,
        party: Party,
        scheduling: SchedulingParams,
        salt: str,
    ) -> PooledPrompt:
        """Compute a vector.

        Raises RefusedError if too much waits, the prompt does not fit or time runs out,
        RequestError if it cannot be served as asked, EngineError if the engine failed, and
        EngineUnavailableError.
        """
        place = self._waiting.enter(party)
        try:
            started_s = timeline.now()
            params = ready.model.front.sentences.settled(params)
            prompt = _truncated(await render(), params, ready)
            num_tokens = len(prompt.token_ids)
            self._metrics.count_prompt(num_tokens, timeline.now() - started_s)
            timeline.num_prompt_tokens += num_tokens
            place.hold(num_tokens)
            return await self._computed(ready, prompt, params, timeline, place, scheduling, salt)
        finally:
            place.leave()

    async def _computed(
        self,
        ready: Ready,
        prompt: RenderedPrompt,
        params: PoolingParams,
        timeline: Timeline,
        place: Place,
        scheduling: SchedulingParams,
        salt: str,
    ) -> PooledPrompt:
        client, front = ready.client, ready.model.front
        renderer = RequestRenderer(front.renderer, front.eos_token_ids, ready.model.seed)
        request = renderer.render_pooled(
            timeline.request_id, client.reserve_handles(1), prompt, params, time.monotonic()
        )
        request = replace(request, salt=salt, scheduling=scheduling)
        ending = FinishReason.ABORT
        try:
            async with await client.add(request) as stream:
                vector, num_cached = await within(place.first_token_s, _followed(stream, place))
            ending = FinishReason.STOP
        except (EngineError, RequestError):
            ending = FinishReason.ERROR
            raise
        except TimeoutError as error:
            raise RefusedError(
                f"No vector came within {place.first_token_s():g} s (first_token_timeout_s). "
                "Shorten the prompt or try again later.",
                status=503,
                retry_after_s=5,
            ) from error
        finally:
            timeline.finish_reason = ending.value
            self._metrics.count_finish(ending.value)
        timeline.num_cached_tokens += num_cached
        return PooledPrompt(params.finished(vector), len(prompt.token_ids), num_cached)


async def _followed(stream: UpdateStream, place: Place) -> tuple[FloatArray, int]:
    """The vector, and the number of cached tokens."""
    num_cached = 0
    async for update in stream:
        if update.num_cached_tokens is not None:
            place.start()
            num_cached = update.num_cached_tokens
        if update.vector is not None:
            return update.vector, num_cached
        for sample in update.samples:
            finish = sample.finish
            if finish is not None and finish.is_request_fault:
                raise RequestError(finish.message)
            if finish is not None:
                message = finish.message or "The engine ended the request early. Send it again."
                is_abort = finish.reason is FinishReason.ABORT
                raise EngineUnavailableError(message) if is_abort else EngineError(message)
    raise EngineError("The engine ended the request without a vector. Send it again.")


def _truncated(prompt: RenderedPrompt, params: PoolingParams, ready: Ready) -> RenderedPrompt:
    """Return the prompt, cut if asked. Raises RefusedError if it does not fit the context."""
    max_model_len = ready.capacity.max_model_len
    prompt = truncated(prompt, params, max_model_len, is_encoder=ready.model.front.is_encoder)
    if len(prompt.token_ids) > max_model_len:
        raise RefusedError(
            f"This model's maximum context length is {max_model_len} tokens. However, your input "
            f"has {len(prompt.token_ids)} tokens. Please reduce its length, or send "
            "truncate_prompt_tokens.",
            param="input",
        )
    return prompt
