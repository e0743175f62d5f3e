"""Conversations: each prompt is what was said before, and a new question."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.entrypoints.bench.lengths import DATASETS
from quire.entrypoints.simulator.workloads.trace import (
    GENERATED,
    Piece,
    TraceRequest,
    poisson_times,
)

__all__ = ["MEAN_TURNS", "draw_chat", "draw_chat_prompts"]

MEAN_TURNS = 3.5
"""Questions of a conversation, geometric. ShareGPT has about so many; the shape is our choice."""

THINK_S = 20.0
"""Mean seconds between an answer and the next question, exponential; our choice."""

READ_S_PER_TOKEN = 0.05
"""Seconds in which an answer comes, by token of it, before the user thinks; our choice."""


@dataclass(slots=True)
class _Talk:
    pieces: list[Piece]
    num_tokens: int


def draw_chat_prompts(
    *, rate: float, seconds: float, seed: int, max_prompt: int = 1024, max_output: int = 1024
) -> list[TraceRequest]:
    """Draw the paper's chat workload (section 6.5): a prompt is the end of a history, cut to
    `max_prompt` tokens, and shares nothing with others, since no K/V is kept between turns."""
    rng = np.random.default_rng([seed, 4])
    times = poisson_times(rng, rate, seconds)
    questions, answers = DATASETS["sharegpt"]
    found: list[TraceRequest] = []
    for at_s in times:
        turns = int(rng.geometric(1 / MEAN_TURNS))
        history = int(questions.draw(rng, turns).sum() + answers.draw(rng, turns)[1:].sum())
        output = int(answers.draw(rng, 1)[0])
        found.append(TraceRequest(at_s, min(history, max_prompt), min(output, max_output)))
    return found


def draw_chat(*, rate: float, seconds: float, seed: int, max_model_len: int) -> list[TraceRequest]:
    """Draw conversations whose turns follow each other, so that a turn finds the one before it in
    the cache. rate: turns per second. A conversation ends before it exceeds the context."""
    rng = np.random.default_rng([seed, 5])
    questions, answers = DATASETS["sharegpt"]
    found: list[TraceRequest] = []
    for number, at_s in enumerate(poisson_times(rng, rate / MEAN_TURNS, seconds)):
        talk, now = _Talk([], 0), at_s
        for turn in range(int(rng.geometric(1 / MEAN_TURNS))):
            question = min(int(questions.draw(rng, 1)[0]), max_model_len // 4)
            answer = min(int(answers.draw(rng, 1)[0]), max_model_len // 4)
            if talk.num_tokens + question + answer > max_model_len:
                break
            talk.pieces.append(Piece(number * 4096 + turn, question))
            prompt = talk.num_tokens + question
            found.append(TraceRequest(now, prompt, answer, tuple(talk.pieces)))
            talk.pieces.append(Piece(GENERATED, answer))
            talk.num_tokens = prompt + answer
            now += answer * READ_S_PER_TOKEN + float(rng.exponential(THINK_S))
    return sorted(found, key=lambda request: request.arrival_s)
