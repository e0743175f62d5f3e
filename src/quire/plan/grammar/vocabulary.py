"""The tokens of a model as bytes, by which grammars say what may follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llguidance

__all__ = ["Vocabulary", "spelled_by_bytes"]

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens: bytes of each id, as many as the model has logits; empty for an id without a token.
    special_ids: ids that are never part of a text. eos_id: end of a text."""

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    eos_id: int

    def tokenizer(self, encode: Encode) -> llguidance.LLTokenizer:
        """Make the tokenizer of the grammar library. encode: spells a text in tokens. Takes seconds
        for a large vocabulary."""
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Source(self, encode)),
            n_vocab=len(self.tokens),
            eos_token=self.eos_id,
        )


class _Source:
    """The interface that the library's wrapper reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.eos_token_id = vocabulary.eos_id
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self._encode = encode
        self._by_bytes = spelled_by_bytes(vocabulary)

    def __call__(self, text: bytes) -> list[int]:
        """The tokenizer may have more tokens than the model, and the library looks none up."""
        words = text.decode("utf-8", "replace")
        ids = list(self._encode(words))
        return ids if max(ids, default=0) < len(self.tokens) else list(self._by_bytes(words))


def spelled_by_bytes(vocabulary: Vocabulary) -> Encode:
    """An encoder for where the model's own is not at hand: byte by byte, as far as there are tokens
    of one byte."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def encode(text: str) -> list[int]:
        data = text.encode("utf-8", "replace")
        return [ids[byte] for byte in (bytes((b,)) for b in data) if byte in ids]

    return encode
