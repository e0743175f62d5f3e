"""A model of hashes, for an executor without a real one; see `tests.executor.fake`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.protocol.pooling_params import Pooling
from quire.protocol.step import FloatArray, MaskArray

__all__ = ["INITIAL_STATE", "FakeModel", "Words", "adapter_word"]

Words = npt.NDArray[np.uint64]

INITIAL_STATE = 0


def _mix(values: Words | np.uint64 | int, salt: int) -> Words:
    """A 64-bit finaliser (SplitMix64, Steele et al. 2014) of values combined with a salt."""
    x = np.asarray(values, np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def adapter_word(digest: str) -> np.uint64:
    """Return what an adapter changes in each token; 0 for none."""
    if not digest:
        return np.uint64(0)
    return np.uint64(int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=8).digest()))


class FakeModel:
    """A model of hashes with two layers per group. K/V of layer 1 hash the token at their position.
    K/V of layer 2 hash what layer 1 reads there, over all groups. The next token hashes what layer
    2 reads.

    windows: sliding window of each group, or None. has_state: True if the next token also depends
    on a recurrent state, a hash of the previous state and the token.
    """

    def __init__(
        self, windows: Sequence[int | None], vocab_size: int, *, has_state: bool = False
    ) -> None:
        self.windows = tuple(windows)
        self.vocab_size = vocab_size
        self.has_state = has_state

    def first_layer(
        self, inputs: npt.NDArray[np.integer[Any]], positions: npt.NDArray[np.int64]
    ) -> Words:
        """K/V of layer 1: [T]. inputs: token ids, or words of media in their place."""
        return _mix(_mix(inputs.astype(np.uint64), 1) + positions.astype(np.uint64), 2)

    def read(self, contents: Sequence[Words], position: int) -> int:
        """Hash what attention at `position` sees; contents[g][p] is position p of group g."""
        total = np.uint64(0)
        for group, window in enumerate(self.windows):
            start = 0 if window is None else max(position - window + 1, 0)
            seen = contents[group][start : position + 1]
            places = np.arange(start, position + 1, dtype=np.uint64)
            total += _mix(_mix(seen, 3) + places, 4 + group).sum(dtype=np.uint64)
        return int(_mix(total, 5))

    def advance(self, state: int, token_ids: Sequence[int]) -> list[int]:
        """The recurrent states after each of these tokens."""
        states: list[int] = []
        for token in token_ids:
            state = int(_mix(_mix(state, 9) + np.uint64(token), 10))
            states.append(state)
        return states

    def see(self, read: int, state: int) -> int:
        """Combine a read of layer 2 with the state there."""
        return int(_mix(_mix(read, 11) + np.uint64(state), 12)) if self.has_state else read

    def draw(self, hidden: int, seed: int, sample_index: int, mask: MaskArray | None = None) -> int:
        """Return the token after this hidden state, among those that the mask allows."""
        word = _mix(_mix(hidden, 6) + np.uint64(seed % 2**64), 7 + sample_index)
        if mask is None:
            return int(word % np.uint64(self.vocab_size))
        allowed = self.allowed(mask)
        return int(allowed[int(word % np.uint64(len(allowed)))])

    def allowed(self, mask: MaskArray) -> npt.NDArray[np.int64]:
        """The token ids that a mask allows."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
        return np.flatnonzero(bits)

    def expected_tokens(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        seed: int,
        sample_index: int = 0,
        mask: Callable[[Sequence[int]], MaskArray | None] = lambda _: None,
        adapter: str = "",
    ) -> list[int]:
        """Return the tokens that follow `prompt`, computed from the tokens alone. mask: returns the
        mask after an output. adapter: digest of the request's adapter."""
        tokens = list(prompt)
        with np.errstate(over="ignore"):
            second: list[int] = []
            while len(tokens) < len(prompt) + num_tokens:
                hidden = self._hidden_of(tokens, second, adapter)
                allowed = mask(tokens[len(prompt) :])
                tokens.append(self.draw(hidden, seed, sample_index, allowed))
        return tokens[len(prompt) :]

    def expected_scores(self, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        """`scores` of the next token after `tokens`, computed from the tokens alone."""
        with np.errstate(over="ignore"):
            return self.scores(self._hidden_of(tokens, []))

    def scores(self, hidden: int) -> npt.NDArray[np.float64]:
        """Return substitutes for log-probabilities [V] after a hidden state: from 0 to -4, in
        multiples of 2**-18, so that their sums have no rounding."""
        words = _mix(np.arange(self.vocab_size, dtype=np.uint64) + np.uint64(hidden), 8)
        return (words % np.uint64(2**20)).astype(np.float64) / -(2.0**18)

    def states(self, hidden: Sequence[int]) -> FloatArray:
        """Stand-in for the hidden states [N, 4] where the model saw these words [N]."""
        words = np.array(hidden, np.uint64).reshape(-1, 1)
        parts = words >> np.arange(0, 64, 16, dtype=np.uint64)
        return ((parts % np.uint64(2**16)).astype(np.float32) - np.float32(2**15)) / np.float32(3)

    def expected_vector(self, prompt: Sequence[int], pooling: Pooling) -> FloatArray:
        """The vector of a prompt, computed from its tokens alone."""
        with np.errstate(over="ignore"):
            second: list[int] = []
            hidden = [self._hidden_of(prompt[:end], second) for end in range(1, len(prompt) + 1)]
        states = self.states(hidden)
        if pooling == "mean":
            total = np.zeros(states.shape[1])
            for state in states:
                total += state
            return (total / len(states)).astype(np.float32)
        return states[0] if pooling == "cls" else states[-1]

    def _hidden_of(self, tokens: Sequence[int], second: list[int], adapter: str = "") -> int:
        """Return the hidden state at the last token. second: K/V of layer 2 so far; this call
        appends to it."""
        inputs = np.array(tokens, np.uint64) ^ adapter_word(adapter)
        first = self.first_layer(inputs, np.arange(len(tokens)))
        groups = [first] * len(self.windows)
        while len(second) < len(tokens):
            second.append(self.read(groups, len(second)))
        deep = [np.array(second, np.uint64)] * len(self.windows)
        has_state = self.has_state
        states = self.advance(INITIAL_STATE, inputs.tolist()) if has_state else [INITIAL_STATE]
        return self.see(self.read(deep, len(tokens) - 1), states[-1])
