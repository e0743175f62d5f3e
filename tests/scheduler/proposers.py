"""Drafts for sequences of the fake model, by proposers that know what will come."""

from __future__ import annotations

import random

import numpy as np

from quire.plan.scheduler.sequence import Sequence
from quire.protocol.step import IntArray
from tests.executor.fake import FakeModel
from tests.scheduler.expected import VOCAB, expected_tokens


def _known_output(
    model: FakeModel, sequence: Sequence, known: IntArray, count: int
) -> tuple[tuple[int, ...], int]:
    """The first `count` tokens of the output, and how many of them the sequence has."""
    request, adapter = sequence.group.request, sequence.group.extras.adapter
    prompt = tuple(request.prompt_token_ids.tolist())
    tokens = expected_tokens(model, prompt, count, request.seed, sequence.sample_index, adapter)
    return tokens, len(known) - len(prompt)


class Guesses:
    """Drafts of which any number is right, at the right place or beside it."""

    def __init__(
        self, model: FakeModel, kind: str, max_drafts: int, poison: int | None, seed: int
    ) -> None:
        """kind: see `Setup.guesses`. poison: a token that no draft has."""
        self._model = model
        self._kind = kind
        self._max_drafts = max_drafts
        self._poison = poison
        self._rng = random.Random(seed)

    def propose(
        self, sequence: Sequence, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        rng, kind, group = self._rng, self._kind, sequence.group
        count = group.max_total_tokens - len(group.request.prompt_token_ids)
        truth, start = _known_output(self._model, sequence, known, count)
        at = start + rng.randint(0, num_in_flight)
        num_drafts = rng.randint(0, min(max_drafts, self._max_drafts))
        num_right = rng.randint(0, num_drafts)
        if kind != "any":
            at = start + num_in_flight
            num_right = 0 if kind == "wrong" else num_drafts
        if kind == "beyond":
            num_drafts = max_drafts + self._max_drafts
        drafts = list(truth[at : at + num_right])
        drafts += [rng.randrange(VOCAB) for _ in range(num_drafts - len(drafts))]
        if kind == "wrong":
            drafts = [(token + 1) % VOCAB for token in truth[at : at + num_drafts]]
        if self._poison in drafts:
            drafts = drafts[: drafts.index(self._poison)]
        return np.array(drafts, np.int32)


class Knows:
    """Drafts the tokens that will come, `num_right` of them and one that is wrong."""

    def __init__(self, model: FakeModel, num_right: int) -> None:
        self._model = model
        self._num_right = num_right

    def propose(
        self, sequence: Sequence, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        truth, start = _known_output(self._model, sequence, known, 40)
        at = start + num_in_flight
        right = truth[at : at + self._num_right]
        return np.array([*right, (truth[at + len(right)] + 1) % VOCAB][:max_drafts], np.int32)


class Wrong:
    """`count` drafts, none of them right."""

    def __init__(self, count: int) -> None:
        self._count = count

    def propose(
        self, sequence: Sequence, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        return np.full(min(self._count, max_drafts), VOCAB + 1, np.int32)


class Once:
    """These drafts, and then none."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens

    def propose(
        self, sequence: Sequence, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        tokens, self._tokens = self._tokens, ()
        return np.array(tokens, np.int32)
