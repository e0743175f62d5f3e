"""Tokens and beams that clients of the fake model must get, computed from prompts alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache, partial

import numpy as np

from quire.protocol import BeamRules
from tests.executor.fake import FakeModel
from tests.scheduler.beam_reference import Outcome, search

VOCAB = 30


@dataclass(frozen=True)
class Asked:
    """All that the tokens of a sequence depend on, beside the model."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int]
    min_tokens: int
    seed: int
    sample_index: int = 0
    adapter: str = ""
    repeats: tuple[int, int, int] | None = None
    """Sizes of the shortest and the longest pattern, and how often it ends an output."""

    def repeats_at(self, tokens: tuple[int, ...]) -> bool:
        """True if an output ends with a pattern as often as that."""
        if self.repeats is None or len(tokens) < self.min_tokens:
            return False
        shortest, longest, count = self.repeats
        return any(
            len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
            for size in range(shortest, longest + 1)
        )

    def may_stop_at(self, token: int, num_tokens: int) -> bool:
        """Return whether this token ends an output as its last one. num_tokens: length of the
        output."""
        return token in self.stop and num_tokens >= self.min_tokens


@cache
def make_model(windows: tuple[int | None, ...], has_state: bool) -> FakeModel:
    return FakeModel(windows, VOCAB, has_state=has_state)


@lru_cache(maxsize=20000)
def expected_tokens(
    model: FakeModel,
    prompt: tuple[int, ...],
    count: int,
    seed: int,
    sample: int,
    adapter: str = "",
) -> tuple[int, ...]:
    """Tokens as if nothing stopped them. adapter: its digest."""
    return tuple(model.expected_tokens(prompt, count, seed, sample, adapter=adapter))


def expected_output(model: FakeModel, asked: Asked) -> tuple[int, ...]:
    """Tokens up to the first that stops."""
    tokens = expected_tokens(
        model, asked.prompt, asked.max_tokens, asked.seed, asked.sample_index, asked.adapter
    )
    for count, token in enumerate(tokens, start=1):
        if asked.may_stop_at(token, count) or asked.repeats_at(tokens[:count]):
            return tokens[:count]
    return tokens


@lru_cache(maxsize=200000)
def _expected_scores(model: FakeModel, tokens: tuple[int, ...]) -> np.ndarray:
    return model.expected_scores(tokens)


@lru_cache(maxsize=5000)
def expected_beams(model: FakeModel, asked: Asked, rules: BeamRules) -> Outcome:
    scores = partial(_expected_scores, model)
    return search(scores, asked.prompt, rules, asked.max_tokens, asked.stop, asked.min_tokens)
