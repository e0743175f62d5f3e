"""Beam search written down as `transformers` defines it: over full score matrices, without a cache,
rows or blocks. What the engine finds is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.protocol import BeamRules

Scores = Callable[[tuple[int, ...]], np.ndarray]
"""Log-probabilities [V] of what may follow so many tokens."""


@dataclass(frozen=True)
class Found:
    tokens: tuple[int, ...]
    cum_logprob: float
    score: float


@dataclass(frozen=True)
class Outcome:
    """found: the best sequences, best first. computed: all tokens that beams went on from."""

    found: list[Found]
    computed: set[int]


def search(
    scores: Scores,
    prompt: Sequence[int],
    rules: BeamRules,
    max_tokens: int,
    stop: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> Outcome:
    width, penalty = rules.width, rules.length_penalty
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    found: list[Found] = []
    computed: set[int] = set()
    for length in range(1, max_tokens + 1):
        matrix = np.stack([total + scores((*prompt, *tokens)) for tokens, total in beams])
        flat = matrix.reshape(-1)
        best = np.argsort(-flat, kind="stable")[: (1 + len(stop)) * width]
        going_on = []
        for rank, place in enumerate(best.tolist()):
            parent, token = divmod(place, matrix.shape[1])
            tokens, total = (*beams[parent][0], token), float(flat[place])
            if (token in stop and length >= min_tokens) or length == max_tokens:
                if rank < width:
                    found.append(Found(tokens, total, total / length**penalty))
            else:
                going_on.append((tokens, total))
        found = sorted(found, key=lambda one: -one.score)[:width]
        beams = going_on[:width]
        if not beams:
            break
        if len(found) == width:
            reach = max_tokens if rules.early_stopping == "never" and penalty > 0 else length
            if rules.early_stopping is True or beams[0][1] / reach**penalty <= found[-1].score:
                break
        computed.update(tokens[-1] for tokens, _ in beams)
    return Outcome(found, computed)
