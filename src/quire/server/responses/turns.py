"""The prompt of a conversation. It uses the token ids that the engine knows, as far as the template
leaves their text unchanged, and drops the oldest turns if the prompt does not fit."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from quire.server.generation.history import continued
from quire.server.generation.parsed import AnswerForm
from quire.server.openai.job import Job
from quire.server.requests.errors import RefusedError
from quire.server.requests.places import Fields
from quire.server.responses.request import ReadRequest
from quire.text.rendering import RenderedPrompt

__all__ = ["fewest_dropped", "fitting_prompt", "turn_starts"]

_FIXED = ("system", "developer")

Found = TypeVar("Found")


async def fitting_prompt(
    job: Job,
    read: ReadRequest,
    form: AnswerForm | None,
    *,
    num_wanted: int,
    previous: list[int] | None,
) -> RenderedPrompt:
    """Render a conversation. num_wanted: tokens of the answer that must have room. previous: token
    ids of the conversation so far. Raises RefusedError as in `Job.render_chat`."""
    most = job.ready.capacity.max_model_len - num_wanted
    messages = cast("list[Fields]", read.chat.messages)
    starts = turn_starts(messages) if read.drops_oldest else []
    highest = max(0, len(starts) - 1)

    async def rendered(num_dropped: int) -> RenderedPrompt | None:
        if num_dropped:
            read.chat.messages = messages[: starts[0]] + messages[starts[num_dropped] :]
        try:
            prompt = await job.render_chat(read.chat, form)
        except RefusedError as error:
            if num_dropped == highest or "maximum context length" not in str(error):
                raise
            return None
        return prompt if len(prompt.token_ids) <= most or num_dropped == highest else None

    prompt, job.timeline.num_dropped_turns = await fewest_dropped(rendered, highest)
    tokenizer = job.renderer.tokenizer
    if previous is None or tokenizer is None or prompt.parts:
        return prompt  # tokens of images stand at places that only their own prompt has
    work = functools.partial(continued, prompt, previous, tokenizer)
    prompt, num_kept = await job.prompts.run(work, len(previous) + len(prompt.text or ""))
    job.timeline.num_history_tokens, job.timeline.num_kept_tokens = len(previous), num_kept
    return prompt


async def fewest_dropped(
    attempt: Callable[[int], Awaitable[Found | None]], highest: int
) -> tuple[Found, int]:
    """Return the result of `attempt` for the smallest number, from 0 to `highest`, for which it has
    one, and the number. It must have one for all larger numbers, and have one or raise at
    `highest`."""
    found = await attempt(0)
    if found is not None:
        return found, 0
    low, high = 1, highest
    while low < high:
        middle = (low + high) // 2
        given = await attempt(middle)
        if given is None:
            low = middle + 1
        else:
            found, high = given, middle
    if found is None:
        found = await attempt(high)
    assert found is not None, "the last attempt gives something or raises"
    return found, high


def turn_starts(messages: list[Fields]) -> list[int]:
    """Return the places at which a conversation may begin after its instructions: its first
    message, and each later one of the user."""
    start = next((i for i, each in enumerate(messages) if each["role"] not in _FIXED), None)
    if start is None:
        return []
    later = range(start + 1, len(messages))
    return [start, *(index for index in later if messages[index]["role"] == "user")]
