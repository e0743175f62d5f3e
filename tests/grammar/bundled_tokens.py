"""The first tokens of the bundled model's tokenizer, for engines over the fake model."""

from __future__ import annotations

from functools import cache, partial

from quire.bundled import bundled_model_path
from quire.plan.grammar.guidance import GuidanceGrammars
from quire.plan.grammar.vocabulary import Encode, Vocabulary
from quire.text.rendering.tokenizer import Tokenizer

__all__ = ["EOS", "grammars", "text_of", "tokenizer"]

EOS = 2


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(bundled_model_path())


def grammars(vocab_size: int) -> GuidanceGrammars:
    def load() -> tuple[Vocabulary, Encode]:
        tokens = [tokenizer().token_bytes(i) for i in range(vocab_size)]
        special = sorted(i for i in tokenizer().special_ids if i < vocab_size)
        encode = partial(tokenizer().encode, add_special_tokens=False)
        return Vocabulary(tokens, special, EOS), encode

    return GuidanceGrammars(load, [EOS])


def text_of(token_ids: list[int]) -> str:
    """Without the end."""
    return b"".join(tokenizer().token_bytes(i) for i in token_ids if i != EOS).decode()
