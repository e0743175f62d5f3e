"""The prompt of a conversation: of the token ids that the engine knows already, as far as the
template leaves their text as it was, and without its oldest turns where it does not fit."""

from __future__ import annotations

from typing import cast

from quire.rendering import RenderedPrompt
from quire.server.generation.history import continued
from quire.server.generation.parsed import AnswerForm
from quire.server.openai.job import Job
from quire.server.requests.errors import RefusedError
from quire.server.requests.places import Fields
from quire.server.responses.request import ReadRequest

__all__ = ["fitting_prompt", "without_oldest_turn"]

_FIXED = ("system", "developer")


async def fitting_prompt(
    job: Job,
    read: ReadRequest,
    form: AnswerForm | None,
    *,
    num_wanted: int,
    previous: list[int] | None,
) -> RenderedPrompt:
    """Render a conversation. num_wanted: tokens of the answer that must have room. previous: token
    ids of the conversation so far. RefusedError as in `Job.render_chat`."""
    most = job.ready.capacity.max_model_len - num_wanted
    while True:
        shorter = without_oldest_turn(cast("list[Fields]", read.chat.messages))
        may_drop = read.drops_oldest and shorter is not None
        try:
            prompt = await job.render_chat(read.chat, form)
        except RefusedError as error:
            if not may_drop or "maximum context length" not in str(error):
                raise
        else:
            if len(prompt.token_ids) <= most or not may_drop:
                break
        read.chat.messages = shorter
        job.timeline.num_dropped_turns += 1
    tokenizer = job.renderer.tokenizer
    if previous is None or tokenizer is None:
        return prompt
    prompt, num_kept = continued(prompt, previous, tokenizer)
    job.timeline.num_history_tokens, job.timeline.num_kept_tokens = len(previous), num_kept
    return prompt


def without_oldest_turn(messages: list[Fields]) -> list[Fields] | None:
    """Return a conversation without its first message after the instructions, and what belongs to
    it up to the next message of the user; None if no other turn is left."""
    start = next((i for i, each in enumerate(messages) if each["role"] not in _FIXED), None)
    if start is None:
        return None
    for end in range(start + 1, len(messages)):
        if messages[end]["role"] == "user":
            return messages[:start] + messages[end:]
    return None
