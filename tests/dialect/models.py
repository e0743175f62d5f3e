"""Small tokenizers with the markers of a family, and what their grammars allow."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.plan.grammar.source import grammar_text
from quire.plan.grammar.vocabulary import Vocabulary
from quire.protocol.grammar import GrammarSpec
from quire.text.rendering import Tokenizer

__all__ = ["EOS", "TURN", "Follower", "library", "tokenizer", "walk"]

EOS, TURN = "<|im_end|>", "<|im_start|>"
_MERGES = (
    '" :', '" ,', '" }', "} }", "< /", "> Ċ", "Ċ <", "Ġ \"", "\" :", "{ \"", "t r", "u e", "tr ue",
    "n u", "l l", "nu ll", "h e", "he ll", "hell o", "o l", "t o", "to ol", "< /", "] }", "( ",
)  # fmt: skip


@cache
def tokenizer(special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Tokenizer:
    """Make a tokenizer of bytes and a few longer tokens. special, added: further tokens; special
    ones are no text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(dict.fromkeys(tuple(m.split(" ")) for m in _MERGES if len(m.split(" ")[-1]) > 0))
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [pair for pair in pairs if _is_known(pair, vocab)]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for text in (EOS, TURN, *special):
        backend.add_special_tokens([text])
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    with tempfile.TemporaryDirectory() as folder:
        backend.save(str(Path(folder) / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer.from_folder(folder)


def _is_known(pair: tuple[str, ...], vocab: dict[str, int]) -> bool:
    """Adds the joined token of a merge whose parts are tokens."""
    if len(pair) != 2 or any(part not in vocab for part in pair):
        return False
    vocab.setdefault("".join(pair), len(vocab))
    return True


@cache
def library(tokens: Tokenizer) -> LLTokenizer:
    """The grammar library's view of a tokenizer."""
    pieces = [tokens.token_bytes(i) for i in range(tokens.vocab_size)]
    eos = tokens.eos_token_id
    assert eos is not None
    vocabulary = Vocabulary(pieces, sorted(tokens.special_ids), eos)
    return vocabulary.tokenizer(partial(tokens.encode, add_special_tokens=False))


class Follower:
    """Follows one output under a grammar."""

    def __init__(self, spec: GrammarSpec, tokens: Tokenizer) -> None:
        self._matcher = LLMatcher(library(tokens), grammar_text(spec), log_level=0)
        if self._matcher.is_error():
            text = grammar_text(spec, drops_refused=True)
            self._matcher = LLMatcher(library(tokens), text, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()[:1000]
        self._mask = np.zeros(-(-tokens.vocab_size // 32), np.uint32)
        self._eos = tokens.eos_token_id

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def allowed(self) -> list[int]:
        """Tokens that may follow, without the end."""
        if self._matcher.is_stopped():
            return []
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        assert not self._matcher.is_error(), self._matcher.get_error()[:1000]
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        return [int(i) for i in np.flatnonzero(bits) if i != self._eos]

    def feed(self, token_id: int) -> bool:
        """Take a token, and return whether it was allowed."""
        if token_id not in self.allowed():
            return False
        self._matcher.consume_token(token_id)
        return True

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Return whether these are a whole answer, in any spelling."""
        is_legal = self._matcher.validate_tokens(list(token_ids)) == len(token_ids)
        return is_legal and self._matcher.consume_tokens(list(token_ids)) and self.may_end


def walk(
    spec: GrammarSpec,
    tokens: Tokenizer,
    seed: int,
    *,
    most: int = 600,
    phrases: Sequence[str] = (),
) -> list[int] | None:
    """Return the output of a random model with a taste for ends; None if it takes longer than
    `most`. phrases: texts that it prefers."""
    rng = random.Random(seed)
    follower, output = Follower(spec, tokens), list[int]()
    ends = [tokens.token_id(sign) for sign in ('"', "}", "]", ")", "Ċ", "<", ">")]
    liked = [tokens.encode(phrase, add_special_tokens=False) for phrase in phrases]
    while len(output) < most:
        if liked and rng.random() < 0.1:
            said = list(itertools.takewhile(follower.feed, rng.choice(liked)))
            output += said
            if said:
                continue
        if follower.may_end and rng.random() < 0.3:
            return output
        allowed = follower.allowed()
        if not allowed:
            return output if follower.may_end else None
        wished = [i for i in ends if i in allowed]
        if wished and rng.random() < 0.3 + len(output) / most:
            token = wished[0] if rng.random() < 0.7 else rng.choice(wished)
        else:
            token = rng.choice(allowed)
        assert token is not None
        assert follower.feed(token)
        output.append(token)
    return None
