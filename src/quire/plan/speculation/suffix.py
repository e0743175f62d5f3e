"""Suffix decoding: guesses the most frequent continuation of the longest earlier context, in the
sequence and in earlier answers (Oliaro et al. 2024, SuffixDecoding)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from quire.plan.speculation.history import TokenHistory
from quire.protocol.step import IntArray

__all__ = ["EarlierAnswers", "SuffixDrafter"]

RUN = 2
"""Tokens of the shortest context; a single token says too little."""

GAP = -1

MAX_TOKENS = 65_536
"""Most tokens kept of all earlier answers. An index takes about 300 bytes per token: 20 MB."""


class _Answers:
    """Answers of one tenant. When they are full, the older half is dropped."""

    def __init__(self) -> None:
        self.young = TokenHistory(RUN)
        self.old = TokenHistory(RUN)

    @property
    def num_tokens(self) -> int:
        return len(self.young.tokens) + len(self.old.tokens)

    def add(self, token_ids: Sequence[int], share: int) -> None:
        if len(self.young.tokens) + len(token_ids) >= share // 2:
            self.old, self.young = self.young, TokenHistory(RUN)
        self.young.extend([*token_ids[-(share // 2 - 1) :], GAP])


class EarlierAnswers:
    """Finished outputs by tenant. Guesses use answers of the same tenant only, because the speed of
    an answer would reveal those of others."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tenants: OrderedDict[str, _Answers] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Number of kept tokens, gaps included."""
        return sum(each.num_tokens for each in self._tenants.values())

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep a finished answer. If there is no room, drop the tenants that have been silent
        longest."""
        if len(token_ids) <= RUN:
            return
        answers = self._tenants.setdefault(salt, _Answers())
        self._tenants.move_to_end(salt)
        answers.add(token_ids, self._max_tokens)
        while len(self._tenants) > 1 and self.num_tokens > self._max_tokens:
            self._tenants.popitem(last=False)

    def of(self, salt: str) -> tuple[TokenHistory, ...]:
        """The answers of one tenant."""
        answers = self._tenants.get(salt)
        return () if answers is None else (answers.young, answers.old)


class SuffixDrafter:
    """Starts at the places of the longest context and follows the most frequent next token. The
    walk ends where its probability falls below `min_probability`, and is no longer than the context
    was."""

    def __init__(
        self, answers: EarlierAnswers, salt: str, longest: int, min_probability: float
    ) -> None:
        self._own = TokenHistory(RUN)
        self._answers = answers
        self._salt = salt
        self._longest = longest
        self._min_probability = min_probability

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        own = self._own
        own.extend(token_ids[len(own.tokens) :].tolist())
        most = num_in_flight + max_drafts
        walks = [
            self._walk(history, own.tokens, most)
            for history in (own, *self._answers.of(self._salt))
        ]
        _, guess = max(walks, key=lambda walk: walk[0])
        return guess[num_in_flight:]

    def _walk(
        self, history: TokenHistory, context: Sequence[int], most: int
    ) -> tuple[float, list[int]]:
        """Return the expected number of right tokens, and the guess."""
        found = history.matches(context, self._longest)
        if not found:
            return 0.0, []
        longest = max(length for _, length in found)
        places = [place for place, length in found if length == longest]
        tokens, guess = history.tokens, list[int]()
        probability, score = 1.0, 0.0
        while len(guess) < min(most, longest):
            places = [place for place in places if place < len(tokens)]
            following = Counter(tokens[place] for place in places)
            if not following:
                break
            token, count = following.most_common(1)[0]
            probability *= count / len(places)
            if token == GAP or probability < self._min_probability:
                break
            guess.append(token)
            score += probability
            places = [place + 1 for place in places if tokens[place] == token]
        return score, guess
