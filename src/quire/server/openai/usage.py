"""Usage of a request, in the form of responses."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.generation.service import Generation

__all__ = ["Usage", "usage_of"]


class _PromptDetails(msgspec.Struct):
    cached_tokens: int


class _CompletionDetails(msgspec.Struct):
    """reasoning_tokens: tokens of thinking in parsed answers. accepted_prediction_tokens,
    rejected_prediction_tokens: tokens of predictions that the outputs have, and the rest."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Tokens of all prompts (each counted once) and of all samples. Details are given for
    predictions and for parsed answers."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails
    completion_tokens_details: _CompletionDetails | UnsetType = UNSET


def usage_of(generations: Iterable[Generation], *, with_output: bool = True) -> Usage:
    """Return the usage so far. with_output: False leaves out tokens that were computed but not
    asked for."""
    prompt_tokens = completion_tokens = cached_tokens = 0
    details: _CompletionDetails | UnsetType = UNSET
    for generation in generations:
        prompt_tokens += len(generation.prompt.token_ids)
        cached_tokens += generation.num_cached_tokens
        if with_output:
            completion_tokens += generation.num_tokens
        # only chats have these, and a chat is one generation
        num_reasoning, predicted = generation.num_reasoning_tokens, generation.num_predicted
        if num_reasoning is not None or predicted is not None:
            details = _CompletionDetails(
                UNSET if num_reasoning is None else num_reasoning, *(predicted or ())
            )
    return Usage(
        prompt_tokens,
        prompt_tokens + completion_tokens,
        completion_tokens,
        _PromptDetails(min(cached_tokens, prompt_tokens)),
        details,
    )
