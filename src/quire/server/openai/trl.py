"""Answers in the form of TRL's own server: ids and log-probabilities, without text."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["TrlAnswer", "trl_answer"]


class TrlAnswer(msgspec.Struct):
    """prompt_ids: ids of each prompt. completion_ids: ids of each sample, those of the first prompt
    first. logprobs, logprob_token_ids: most likely first, of each token of each sample; None if
    they were not asked for."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[list[float]]] | None
    logprob_token_ids: list[list[list[int]]] | None


def trl_answer(prompt_ids: list[list[int]], choices: list[dict[str, Any]]) -> TrlAnswer:
    """Return an answer with the choices of completions or chats, which name tokens by their ids."""
    found = TrlAnswer(prompt_ids, [choice["token_ids"] for choice in choices], None, None)
    if any(choice["logprobs"] is None for choice in choices):
        return found
    ranked = [[_ranked(*entry) for entry in _entries(each["logprobs"])] for each in choices]
    found.logprobs = [[[value for _, value in entry] for entry in each] for each in ranked]
    found.logprob_token_ids = [[[token for token, _ in entry] for entry in each] for each in ranked]
    return found


def _entries(logprobs: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """Return each token with its log-probability and those of the most likely ones."""
    if "content" in logprobs:
        return [
            (
                each["token"],
                each["logprob"],
                {top["token"]: top["logprob"] for top in each["top_logprobs"]},
            )
            for each in logprobs["content"]
        ]
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    return list(zip(*columns, strict=True))


def _ranked(token: str, logprob: float, top: dict[str, float]) -> list[tuple[int, float]]:
    """Return ids and log-probabilities, most likely first."""
    both = sorted({token: logprob, **top}.items(), key=lambda item: -item[1])
    return [(int(name.removeprefix("token_id:")), value) for name, value in both]
